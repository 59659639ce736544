"""Near-duplicate documents, by MinHash (Broder 1997) and locality-sensitive hashing.

Two documents are near duplicates if their sets of 8-byte strings have a Jaccard similarity of about
THRESHOLD or more. Each document has a signature: N_HASHES minima, computed by the library rensa.
The share of values in which two signatures agree estimates the similarity. A band is three values
of a signature; only documents that agree in all values of a band are compared. Signatures are in a
file, so memory grows by a few dozen bytes per document.
"""

from pathlib import Path

import numpy as np

from thinker.runtime.errors import UserError, install_command

N_HASHES = 252
N_BANDS = 84  # three values per band: nearly all pairs with a similarity of 0.4 agree in one
# Similarity of edited copies: 5% of words 0.83, 5% of characters 0.49, 30% of words 0.34.
THRESHOLD = 0.42
SHINGLE_BYTES = 8
BATCH_BYTES = 1 << 22  # of text, hashed together
SEED = 1


class NearDuplicates:
    """Collects the texts of a source, then finds the near duplicates among them.

    folder: for temporary files.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import rensa
        except ImportError as error:
            remedy = f"run {install_command('clean')}"
            raise UserError(
                f"data.clean.duplicates=near needs the package rensa; {remedy}"
            ) from error
        self.digest = rensa.RMinHash.digest_matrix_from_flat_token_hashes
        self.path = folder / "signatures"
        self.file = open(self.path, "wb")  # noqa: SIM115 - closed by find()
        self.n_documents = 0  # in the file
        self.batch: list[np.ndarray] = []  # the shingles of documents that are not in it yet
        self.n_bytes = 0  # of the batch

    def add(self, text: str) -> None:
        """Add the next document."""
        self.batch.append(_shingles(text.encode()))
        self.n_bytes += len(self.batch[-1])
        if self.n_bytes >= BATCH_BYTES:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self.batch:
            return
        offsets = np.cumsum([0, *map(len, self.batch)], dtype=np.uint64)
        rows = self.digest(np.concatenate(self.batch), offsets, N_HASHES, SEED).to_rows()
        self.file.write(np.array(rows, np.uint32).tobytes())
        self.n_documents += len(self.batch)
        self.batch = []
        self.n_bytes = 0

    def find(self) -> np.ndarray:
        """For each document the first one of its group of near duplicates, (n,) int64; itself if it
        is the first."""
        from scipy.sparse import coo_array  # slow to import
        from scipy.sparse.csgraph import connected_components

        self._write_batch()
        self.file.close()
        n = self.n_documents
        if n == 0:
            return np.zeros(0, np.int64)
        signatures = np.memmap(self.path, np.uint32, "r", shape=(n, N_HASHES))
        groups = np.arange(n)  # of each document; groups that have a pair of near duplicates merge
        for band in np.split(np.arange(N_HASHES), N_BANDS):
            # Documents that agree in the band, as pairs that are not in one group yet.
            keys = _hash_rows(signatures[:, band[0] : band[-1] + 1])
            order = np.argsort(keys, kind="stable")
            same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
            pairs = np.stack([order[same], order[same + 1]], axis=1)
            pairs = pairs[groups[pairs[:, 0]] != groups[pairs[:, 1]]]
            is_similar = _similarity(signatures, pairs) >= THRESHOLD
            first, second = groups[pairs[is_similar]].T
            graph = coo_array((np.ones(len(first), bool), (first, second)), shape=(n, n))
            groups = connected_components(graph, directed=False)[1][groups]
        _, firsts, members = np.unique(groups, return_index=True, return_inverse=True)
        return firsts[members]


def _shingles(data: bytes) -> np.ndarray:
    """The strings of 8 bytes in a text as numbers, (n,) uint64; a shorter text is one string."""
    data = data.ljust(SHINGLE_BYTES, b"\0")
    n = len(data) - SHINGLE_BYTES + 1
    overlapping = np.ndarray(n, "<u8", data, strides=(1,))
    return _mix(overlapping)


def _hash_rows(rows: np.ndarray) -> np.ndarray:
    """A hash of each row, (n, k) uint32 -> (n,) uint64."""
    keys = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        keys = _mix(keys ^ column)
    return keys


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread the bits of numbers; products wrap at 64 bits."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(29))


def _similarity(signatures: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The share of equal values of each pair of signatures, (n,)."""
    parts = [np.zeros(0)]
    for start in range(0, len(pairs), 1 << 15):
        first, second = pairs[start : start + (1 << 15)].T
        parts.append((signatures[first] == signatures[second]).mean(axis=1))
    return np.concatenate(parts)
