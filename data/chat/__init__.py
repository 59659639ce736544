"""Conversations: reading them from rows, and their tokens."""
