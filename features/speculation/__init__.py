"""Speculative decoding: drafts that are verified in one pass."""
