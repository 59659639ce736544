"""Runs and models on disk."""

from storage.load import load

__all__ = ["load"]
