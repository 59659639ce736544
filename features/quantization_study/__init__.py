"""The cost of few bits, matrix by matrix."""
