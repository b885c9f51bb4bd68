"""A budget in other people's loops: Lightning and the Trainer of Hugging Face. Each file needs an extra of its own."""
