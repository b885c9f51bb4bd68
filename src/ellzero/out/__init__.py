"""The way out: closing, taking out, writing to a file, reporting."""
