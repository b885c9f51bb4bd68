"""Experiments: the papers' networks, data and recipes, the loop that trains them, and what is made of many runs."""
