"""Decoding on a GPU with few launches: kernels in Triton, and a decoder of single texts."""
