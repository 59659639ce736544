"""Benchmarks of learning from rewards."""
