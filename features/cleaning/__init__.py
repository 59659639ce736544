"""Cleaning: drop documents by length, quality and duplication."""
