"""Batches: packing, order and prefetching of windows."""
