"""Pruning: remove heads, neurons, layers or single weights, during training or after it."""
