"""Few cases that hold every pair of values of any two options."""

from itertools import combinations, product


def pairwise(options: dict[str, list]) -> list[dict]:
    """Cases, {option: value}, such that any two values of two options occur together in one of
    them; always the same.

    Greedy: each case begins with a pair that is still missing, and each further option takes the
    value that makes the most missing pairs.
    """
    names = list(options)
    missing = {
        (
            (a, i),
            (b, j),
        ): None  # values by their number, so that they need not be hashable; in order, as a set is not
        for a, b in combinations(names, 2)
        for i, j in product(range(len(options[a])), range(len(options[b])))
    }
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(options[name])), key=lambda i: _n_made(missing, chosen, name, i)
                )
        missing = {pair: None for pair in missing if not all(chosen[name] == i for name, i in pair)}
        cases.append({name: options[name][chosen[name]] for name in names})
    return cases


def _n_made(missing: dict, chosen: dict[str, int], name: str, i: int) -> int:
    """The number of missing pairs of this value with values that are already chosen."""
    return sum(
        pair in missing
        for other in chosen.items()
        for pair in (((name, i), other), (other, (name, i)))
    )
