"""Callbacks of the road: the average of the weights, and samples."""
