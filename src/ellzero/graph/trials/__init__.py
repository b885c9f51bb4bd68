"""Trying removals out on copies, before any gate is trained."""
