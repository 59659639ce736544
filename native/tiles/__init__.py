"""Kernels of tiles: small blocks of matrices that a processor multiplies at once."""
