"""Callbacks of the road: the average of the weights, samples, and tracking."""
