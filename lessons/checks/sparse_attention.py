"""Checks of the lesson "Who needs to look at everything?"."""

from typing import Any

import torch
from torch import Tensor

from thinker.interpretability.pattern_plots import example_mask
from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.errors import UserError

LENGTH = 512  # of the texts in the third exercise
FIRST, BACK = (
    8,
    50,
)  # what each of their tokens needs: the first tokens, itself, and tokens before it


def visible(text: str, length: int) -> Tensor:
    """Which keys each query sees with one of Thinker's patterns, (length, length)."""
    return example_mask(parse_pattern(text), length, n_heads=1)[0]


@exercise
def check_pattern(answer: Any) -> str | None:
    """A function of positions q (T, 1) and k (T,): every third of the newest 9 keys, as in
    `dilated(9, 3)`."""
    T = 24
    q, k = torch.arange(T)[:, None], torch.arange(T)
    try:
        found = call(answer, q, k)
    except RuntimeError as error:
        if "ambiguous" not in str(error):
            raise
        return "Not yet: q and k are tensors. Put parentheses around each condition, and & instead of `and` between them."
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != (T, T):
        return "Not yet: the result has to be a table of True and False, with one row per query and one column per key."
    distance = q - k
    is_third = distance % 3 == 0
    if torch.equal(found, visible("dilated(9, 3)", T)):
        return None
    if torch.equal(found, visible("window(9)", T)):
        return "Not yet: this is the whole window. Keep only distances that 3 divides."
    if (found & (k > q)).any():
        return "Not yet: some queries see later keys. A distance q - k must not be negative."
    if torch.equal(found, (distance >= 0) & (distance <= 9) & is_third):
        return "Not yet: the key 9 tokens before is one too many. The newest 9 keys have distances 0 to 8."
    if torch.equal(found, (distance >= 0) & is_third):
        return "Not yet: every third key is right, but nothing ends the window. Only the newest 9 keys count."
    if torch.equal(found, visible("window(9)", T) & (k % 3 == 0)):
        return "Not yet: here k itself is a multiple of 3. The distance q - k has to be one, so that a query sees itself."
    if not found.diagonal().all():
        return "Not yet: a query has to see its own key, at distance 0."
    row = found[20].nonzero().flatten().tolist()
    return f"Not yet: query 20 should see the keys 14, 17 and 20. With your pattern it sees {row}."


@exercise
def check_count(answer: Any) -> str | None:
    """The keys of query 13, and of all 16 queries together, with `block(4, 2)`."""
    keys = visible("block(4, 2)", 16).sum(dim=1)
    right_one, right_all = int(keys[13]), int(keys.sum())
    one, total = (float(x) for x in torch.as_tensor(answer, dtype=torch.float64).reshape(2))
    if is_near(one, 8.0):
        return "Not yet: query 13 does not see all of its own block, because keys 14 and 15 come later."
    if is_near(one, 2.0):
        return "Not yet: query 13 sees 2 keys of its own block, but also the block before."
    if is_near(one, 5.0):
        return "Not yet: tokens are counted from 0, so query 13 is the second token of its block, not the first."
    if not is_near(one, float(right_one)):
        return "Not yet: query 13 is in the block of the tokens 12 to 15. Which keys does it see there, and which before?"
    if is_near(total, float(right_all)):
        return None
    if is_near(total, 104.0):
        return "Not yet: the first number is right. For the sum, remember that the first block has no block before it."
    if is_near(total, 96.0):
        return "Not yet: the first number is right, but queries of the same block do not all see the same number of keys."
    if is_near(total, 40.0):
        return "Not yet: the first number is right. Your sum counts only the keys in each query's own block."
    return "Not yet: the first number is right. For the sum, add up the four queries of one block, then the four blocks."


@exercise
def check_cheapest(answer: Any) -> str | None:
    """A pattern that shows each token the first 8 tokens, itself and the 50 before it, and little
    else."""
    if not isinstance(answer, str):
        return 'Not yet: write the pattern in quotes, such as "full".'
    try:
        pattern = parse_pattern(answer)
    except UserError as error:
        return f"Not yet: Thinker does not know this pattern ({error})."
    if pattern.n_features:
        return "Not yet: linear attention keeps only sums. The recall task shows that single tokens get lost in them."
    if pattern.by_content or pattern.by_head or pattern.tokens:
        return "Not yet: here it depends on content or chance whether a needed key is seen. Use positions alone."
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    needed = (k <= q) & ((q - k <= BACK) | (k < FIRST))
    seen = visible(answer, LENGTH)
    if (seen & (k > q)).any():
        return (
            "Not yet: with this pattern, tokens see later ones, and nothing in the task needs that."
        )
    missing = needed & ~seen
    if not missing.any():
        n_seen, n_needed = (float(mask.sum()) / LENGTH for mask in (seen, needed))
        if n_seen == n_needed:
            return None
        return f"Not yet: nothing is missing, but it takes {n_seen:.1f} keys per query, and {n_needed:.1f} are enough."
    if "&" in answer and not missing.logical_and((k >= FIRST) & (q - k > BACK)).any():
        return "Not yet: & keeps only keys that both patterns allow. A token needs what at least one of them allows."
    query, key = (int(x) for x in missing.nonzero()[-1])
    if torch.equal(missing, needed & (q - k == BACK) & (k >= FIRST)):
        return "Not yet: a window counts the query's own key, too. One needed key, 50 tokens before, is just outside."
    if torch.equal(missing, needed & (k < FIRST) & (q - k > BACK)):
        return (
            "Not yet: this is enough for the tokens nearby, but late tokens do not see the first 8."
        )
    return f"Not yet: token {query} needs token {key}, {query - key} tokens before it, and does not see it."
