"""What stands in for a part of a network that was taken out: layers, attention, norms."""
