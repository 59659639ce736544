"""Sampling and training on the same kernels, so that their probabilities have the same bits."""
