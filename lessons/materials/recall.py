"""Tasks of exact recall: a text lists pairs, and the model has to find the second half of a pair by
the first."""

import torch
from torch import Tensor

N_KEYS = 24  # of make_recall: tokens 0 to 23 are keys, 24 to 47 are values
NAMES = [
    *"abcdefghijklmnop",
    *map(str, range(16)),
    ".",
]  # of make_recall_in_parts: letters, numbers, blank


def make_recall(
    generator: torch.Generator, n_pairs: int | None = None, n_texts: int = 64
) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, 4n) of n pairs (by default 1 to 12), then the same pairs in another
    order.

    Only the values of the second half count; the other targets are -1.
    """
    n = n_pairs or int(torch.randint(1, 13, (), generator=generator))
    keys = torch.rand(n_texts, N_KEYS, generator=generator).argsort(1)[
        :, :n
    ]  # each key at most once
    values = torch.randint(N_KEYS, 2 * N_KEYS, (n_texts, n), generator=generator)
    order = torch.rand(n_texts, n, generator=generator).argsort(1)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    halves = [torch.stack(pair, dim=2).flatten(1) for pair in ((keys, values), (asked, answers))]
    tokens = torch.cat(halves, dim=1)
    targets = torch.full_like(tokens, -1)
    targets[:, 2 * n :: 2] = answers
    return tokens, targets


def make_recall_in_parts(generator: torch.Generator, B: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (B, 96): four parts of 24 tokens, in which letters and numbers are shown
    and asked for.

    A part shows four pairs of a letter and a number, then eight blanks, and then the pairs in
    another order. Only the numbers there are targets. No letter is in two pairs of a text.
    """
    letters = torch.rand(B, 16, generator=generator).argsort(dim=1).view(B, 4, 4)
    pairs = torch.stack([letters, torch.randint(16, 32, (B, 4, 4), generator=generator)], dim=-1)
    order = torch.rand(B, 4, 4, 1, generator=generator).argsort(dim=2).expand(-1, -1, -1, 2)
    parts = pairs.flatten(2), torch.full((B, 4, 8), 32), pairs.gather(2, order).flatten(2)
    tokens = torch.cat(parts, dim=2).flatten(1)
    place = torch.arange(96)
    is_asked = (place % 24 >= 16) & (place % 2 == 0)
    return tokens, torch.where(is_asked, tokens.roll(-1, dims=1), -1)
