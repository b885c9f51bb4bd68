"""Loops and files of others: Lightning, the Trainer and the folders of Hugging Face. Each needs an extra of its own."""
