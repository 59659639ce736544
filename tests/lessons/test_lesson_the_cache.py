"""The checks of the lesson on the cache take right answers and name typical mistakes; its networks
are causal."""

import pytest
import torch

from thinker.lessons.checks.the_cache import (
    check_bytes,
    check_decoding,
    check_suspect,
    mystery_tables,
)
from thinker.lessons.materials.recall import make_recall
from thinker.lessons.materials.small_models import GRU, Convolution


def likeliest(logits):
    return [int(logits[0, -1].argmax())]


def decoding(
    reads=lambda tokens: tokens[-1:], is_cached=True, n_extra=0, has_prompt=False, reads_last=False
):
    """An answer to the first exercise, with a mistake."""

    def decode(model, prompt, n_new):
        cache = model.new_cache(1, 60)
        tokens = [*prompt, *likeliest(model(torch.tensor([prompt]), cache=cache))]
        while len(tokens) < len(prompt) + n_new + n_extra:
            logits = model(torch.tensor([reads(tokens)]), cache=cache if is_cached else None)
            tokens += likeliest(logits)
        if reads_last:
            model(torch.tensor([tokens[-1:]]), cache=cache)
        return tokens if has_prompt else tokens[len(prompt) :]

    return decode


def new_cache_each_time(model, prompt, n_new):
    tokens = list(prompt)
    for _ in range(n_new):
        tokens += likeliest(model(torch.tensor([tokens]), cache=model.new_cache(1, 32)))
    return tokens[len(prompt) :]


def prompt_one_by_one(model, prompt, n_new):
    """Right, with the prompt read token by token."""
    cache, tokens = model.new_cache(1, 32), list(prompt)
    for at in range(len(prompt) + n_new - 1):
        logits = model(torch.tensor([tokens[at : at + 1]]), cache=cache)
        tokens += likeliest(logits) if at >= len(prompt) - 1 else []
    return tokens[len(prompt) :]


def prompt_again(model, prompt, n_new):
    """Starts the loop by reading the last token of the prompt a second time."""
    cache = model.new_cache(1, 32)
    model(torch.tensor([prompt]), cache=cache)
    return [
        token
        for _ in range(n_new)
        for token in likeliest(model(torch.tensor([prompt[-1:]]), cache=cache))
    ]


def first_twice(model, prompt, n_new):
    """Takes the first token from the prompt's logits in the first round of the loop too."""
    cache = model.new_cache(1, 32)
    logits = model(torch.tensor([prompt]), cache=cache)
    tokens = likeliest(logits)
    while len(tokens) < n_new:
        tokens += likeliest(logits)
        logits = model(torch.tensor([tokens[-1:]]), cache=cache)
    return tokens


RIGHT = 2 * 32 * 8 * 128 * 4096 * 2
WRONG = [
    (check_decoding, decoding(has_prompt=True), "without the prompt"),
    (check_decoding, decoding(is_cached=False), "gets no cache"),
    (check_decoding, new_cache_each_time, "made 6 caches"),
    (check_decoding, decoding(n_extra=1), "you returned 7"),
    (check_decoding, decoding(reads=lambda tokens: tokens), "pass only the newest token"),
    (check_decoding, decoding(reads_last=True), "the last one is read too"),
    (check_decoding, prompt_again, "first new token is wrong"),
    (check_decoding, first_twice, "comes twice"),
    (check_decoding, decoding(reads=lambda tokens: tokens[-2:-1]), "a later one is wrong"),
    (check_bytes, RIGHT * 4, "32 query heads share them"),
    (check_bytes, RIGHT * 2, "takes 2 bytes"),
    (check_bytes, RIGHT * 8, "not 32, and 2 bytes"),
    (check_bytes, RIGHT // 2, "keys or values are missing"),
    (check_bytes, RIGHT // 32, "single layer"),
    (check_bytes, RIGHT // 4096, "bytes per token"),
    (check_bytes, RIGHT // 128, "128 numbers per token"),
    (check_bytes, RIGHT // 8, "single KV head"),
    (check_bytes, 512, "wanted in bytes"),
    (check_bytes, 0.5, "wanted in bytes"),
    (check_bytes, 1000, "multiply 2 (keys and values)"),
    (check_suspect, ("A", "mask"), "That is rounding"),
    (check_suspect, ("C", "store"), "in all digits"),
    (check_suspect, ("D", "store"), "A, B or C"),
    (check_suspect, ("B", "position"), "(row 3) would be wrong"),
    (check_suspect, ("B", "mask"), "miss a key of the prompt"),
    (check_suspect, ("B", "cache"), "one of position, mask, store"),
    (check_suspect, ("B", ...), "replace the dots"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_decoding(decoding())
    assert check_decoding(prompt_one_by_one)
    assert check_bytes(2**29)
    assert check_suspect(("B", "store"))


def test_only_one_of_the_caches_is_broken():
    tables = mystery_tables()
    errors = {name: (tables[name] - tables["one pass"]).abs().amax(dim=1) for name in "ABC"}
    assert 0.01 < errors["A"].max() < 0.2
    assert errors["B"][:4].max() < 1e-4 < 1 < errors["B"][4:].min()
    assert errors["C"].max() < 1e-4


@pytest.mark.parametrize(("make", "reach"), [(Convolution, 64), (GRU, 70)])
def test_a_network_of_recall_reads_as_far_back_as_the_lesson_says(make, reach):
    torch.manual_seed(0)
    tokens = torch.zeros(1, 70, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 3] = 1
    network = make()
    with torch.no_grad():
        differs = (network(tokens) != network(changed)).any(dim=-1)[0]
    assert not differs[:3].any()
    if make is Convolution:
        assert differs.nonzero().max() == 3 + reach - 1
    else:
        assert differs[-1]


def test_recall_asks_for_each_value_once():
    tokens, targets = make_recall(torch.Generator().manual_seed(0), n_pairs=3, n_texts=2)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        value_of = dict(zip(row[0:6:2], row[1:6:2]))
        assert sorted(row[0:6:2]) == sorted(row[6::2])
        assert wanted == [-1] * 6 + [x for key in row[6::2] for x in (value_of[key], -1)]
        assert row[7::2] == [value_of[key] for key in row[6::2]]
