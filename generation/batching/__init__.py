"""Continuous batching: texts that come and go."""
