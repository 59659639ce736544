"""Attention and loss kernels, each tested against a plain equivalent."""
