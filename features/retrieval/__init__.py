"""Retrieval: a window that also attends to the best blocks that left it."""
