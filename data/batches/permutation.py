"""A pseudorandom permutation of any size without a table, for the order of the training data."""

import hashlib

import numpy as np

ROUNDS = 8


def permute(indices: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Apply the pseudorandom permutation of range(size) that `key` selects to indices, (n,) int64.

    A Feistel network over the smallest even number of bits that can represent size - 1. A value
    outside range(size) is permuted again until it is inside (cycle walking, fewer than 4 rounds on
    average). There is no table, so memory does not depend on size. Raises IndexError for an index
    outside range(size).
    """
    if ((indices < 0) | (indices >= size)).any():
        raise IndexError(f"index {indices} is outside range({size})")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.sha512(repr((size, *key)).encode()).digest()
    round_keys = np.frombuffer(digest, "<u8")[:ROUNDS]
    out = indices.astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        left = out[outside] >> half
        right = out[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = left << half | right
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits with SplitMix64's finalizer: every input bit affects every output bit (products wrap
    at 64 bits)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
