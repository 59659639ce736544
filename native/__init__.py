"""Kernels in C for decoding on a CPU, and each of them in plain PyTorch."""
