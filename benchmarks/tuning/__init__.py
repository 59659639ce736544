"""The search for learning rates and batch sizes."""
