"""A forward as the list of its operations, and copies of a model to try one on."""
