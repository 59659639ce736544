"""Early exit: skip later layers for tokens that are already certain."""
