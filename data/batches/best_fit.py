"""Best-fit packing: whole documents into windows with little padding, in any order.

Best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): the longest document goes first, each into
the fullest window that has room for it. Documents of one length are placed together, so the time
depends on the number of lengths.
"""

import numpy as np


def pack_best_fit(
    offsets: np.ndarray, seq_len: int, truncate: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Pack the documents between `offsets`, (n + 1,), into windows of seq_len tokens.

    A document longer than a window is cut every seq_len tokens. Its last piece comes first in its
    window, because it does not begin with a BOS token. truncate: leave out what does not fit into
    one window.

    Returns (n_segments, 2) int64, the start and end of each segment of the windows, window by
    window; and (n_windows + 1,) int64, the index of the first segment of each window.
    """
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    if truncate:
        lengths = np.minimum(lengths, seq_len)

    # A long document fills windows of its own. What is packed is the rest: a whole document, or a
    # last piece.
    n_full = np.where(lengths > seq_len, lengths // seq_len, 0)
    rest = lengths - n_full * seq_len
    tails = np.flatnonzero((n_full > 0) & (rest > 0))
    whole = np.flatnonzero(n_full == 0)
    whole = whole[np.argsort(-lengths[whole], kind="stable")]

    # Each last piece opens a window; whole documents are placed there and in new windows.
    window_of = np.full(len(lengths), -1)
    window_of[tails] = np.arange(len(tails))
    window_of_whole = np.zeros(len(whole), np.int64)
    n_windows = _place(lengths[whole], seq_len, rest[tails], window_of_whole)
    window_of[whole] = window_of_whole

    # All segments: the packed ones in the order in which they were placed, then those that fill a
    # window.
    packed = np.concatenate([tails, whole])
    filling = np.repeat(np.arange(len(lengths)), n_full)
    piece = np.arange(len(filling)) - np.repeat(np.cumsum(n_full) - n_full, n_full)
    begin_packed = starts[packed] + n_full[packed] * seq_len
    begin_filling = starts[filling] + piece * seq_len
    begin = np.concatenate([begin_packed, begin_filling])
    end = begin + np.concatenate([rest[packed], np.full(len(filling), seq_len)])
    window = np.concatenate([window_of[packed], n_windows + np.arange(len(filling))])

    # Windows come in the order of their first documents.
    first = np.full(n_windows + len(filling), np.iinfo(np.int64).max)
    np.minimum.at(first, window, begin)
    by_first = np.argsort(first, kind="stable")
    rank = np.empty(len(first), np.int64)
    rank[by_first] = np.arange(len(first))
    order = np.argsort(rank[window], kind="stable")
    counts = np.bincount(window, minlength=len(first))[by_first]
    segments = np.stack([begin, end], axis=1)[order]
    return segments, np.concatenate([[0], np.cumsum(counts)])


def _place(lengths: np.ndarray, seq_len: int, used: np.ndarray, out: np.ndarray) -> int:
    """Write the window of each document to `out`, and return the number of windows. `lengths` must
    not increase.

    used: number of tokens in each window that already exists.
    """
    n_windows = len(used)
    # Windows by their number of free tokens, and which of these lists are not empty.
    room = [np.zeros(0, np.int64) for _ in range(seq_len + 1)]
    has_room = np.zeros(seq_len + 1, bool)

    def add(free: int, windows: np.ndarray) -> None:
        room[free] = np.concatenate([room[free], windows])
        has_room[free] = len(room[free]) > 0

    for free in np.unique(seq_len - used).tolist():
        add(free, np.flatnonzero(seq_len - used == free))
    _, firsts, counts = np.unique(-lengths, return_index=True, return_counts=True)
    for first, count in zip(firsts.tolist(), counts.tolist()):
        length = int(lengths[first])
        at = first
        end = first + count
        while at < end:
            # The fullest windows with room for this length; new ones if there is none.
            free = length + int(has_room[length:].argmax())
            n_left = end - at
            if has_room[free]:
                windows = room[free][:n_left]
                room[free] = room[free][n_left:]
                has_room[free] = len(room[free]) > 0
            else:
                n_new = -(-n_left // (seq_len // length))
                free = seq_len
                windows = np.arange(n_windows, n_windows + n_new)
                n_windows += n_new
            out[at : at + len(windows)] = windows
            at += len(windows)
            add(free - length, windows)
    return n_windows
