"""Needle test on `tales`: does the model use a fact that was mentioned n tokens ago?

A needle is a story of the grammar, cut where a fact's word occurs for the second time. The word
follows the same phrase both times (`from Flint`, `the magic lantern`), so the phrase determines
which fact is meant. Stories continue for about 140 tokens after a fact. For longer distances,
encounters of the hero are inserted between the first two paragraphs, in the grammar's own words
(`go // meet kind`), until the farthest fact is about n tokens away: the model was trained on such
sentences, but never on so many in one story.

The distance between the first tokens of the two mentions is within n/16 of n, and the word occurs
nowhere else. An answer is correct if the word is more likely than all other words of its list in
the grammar. Words that are a prefix of another (`ball`, `balloon`) are left out, because they could
never be less likely.
"""

import re
from collections.abc import Callable, Iterable
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.data.text import tales
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.model import Thinker
from thinker.runtime.errors import UserError

# The name of a fact and of its list of words, and the phrase before the word.
PHRASES = {
    "town": "from",
    "hobby": "loved",
    "friend": "friend",
    "thing": "magic",
    "password": "was",
    "pet": "the",
    "food": "some",
    "look": "very",
    "wild": "old",
}
GRAMMAR = tales.GRAMMAR  # expanded in parts; tales.generate_story() expands whole stories


def _distinct_words(name: str) -> list[str]:
    """The words of a list that no other word of it begins with."""
    words = [item[""] for item in GRAMMAR.lists[name]]
    kept = []
    for word in words:
        longer = [other for other in words if other != word and other.startswith(word)]
        if not longer:
            kept.append(word)
    return kept


VALUES = {name: _distinct_words(name) for name in PHRASES}
HEROES_AND_PETS = {}
for _name in ("girl", "boy", "pet"):
    for _item in GRAMMAR.lists[_name]:
        HEROES_AND_PETS[_item[""]] = _item
MAX_STORIES = 100  # generated per needle
MAX_PREFIXES_PER_BATCH = 16
Scorer = Callable[[Thinker, list[int], list[list[int]]], Tensor]


class Needle(NamedTuple):
    """A text, and the value that continues it after a space."""

    text: str
    value: str
    name: str  # of the fact
    tokens: list[int]  # of the text, after the BOS token
    distance: int


def expand(ops: Iterable[tales.Op], random: Random, bound: dict[str, tales.Item]) -> str:
    """Expand part of the grammar like tales.generate_story(), for alternatives of equal weight."""
    text = ""
    for op in ops:
        match op:
            case tales.Text(plain):
                text += plain
            case tales.Call(rule):
                text += expand(random.choice(rule.alternatives), random, bound)
            case tales.SampleWord(name, _, form, items):
                bound[name] = random.choice(items)
                text += bound[name][form]
            case tales.RecallWord(name, form):
                text += bound[name][form]
    return text


def find_needles(text: str, facts: dict[str, str], tokenizer: Tokenizer) -> list[Needle]:
    """Find all facts of a text that recur after their phrase, at any distance."""
    tokens = tokenizer.encode(text)
    lengths = [len(tokenizer.token_bytes(token)) for token in tokens]
    # The first token may start below 0, because some tokenizers add a space before the text.
    # Characters are bytes here, as the text is ASCII.
    token_starts = accumulate(lengths, initial=len(text) - sum(lengths))
    token_index = {start: index for index, start in enumerate(token_starts)}
    words: dict[str, list[int]] = {}  # where each word occurs, including the space before it
    for match in re.finditer(r"[\w-]+", text):
        words.setdefault(match.group(), []).append(match.start() - 1)
    needles = []
    for name, phrase in PHRASES.items():
        value = facts.get(name)
        # The text ends at the second mention, so the word is nowhere else before it.
        starts = words.get(value, [])[:2]
        if value not in VALUES[name] or len(starts) < 2:
            continue
        follow_phrase = all(text[:start].lower().endswith(phrase) for start in starts)
        start_tokens = all(start in token_index for start in starts)
        if follow_phrase and start_tokens:
            first = token_index[starts[0]]
            second = token_index[starts[1]]
            context = [tokenizer.bos_id, *tokens[:second]]
            needles.append(Needle(text[: starts[1]], value, name, context, second - first))
    return needles


def story_needles(tokenizer: Tokenizer, distance: int, random: Random) -> list[Needle]:
    """Generate a story and return its needles at about this distance."""
    story = tales.generate_story(random.getrandbits(64), 0)
    facts = {choice.name: choice.value for choice in story.choices if choice.kind == "fact"}
    needles = find_needles(story.text, facts, tokenizer)
    # If its farthest fact is not far enough, the hero meets somebody in between.
    n_missing = 0
    if needles:
        n_missing = distance - max(needle.distance for needle in needles)
    bound = {"hero": HEROES_AND_PETS[facts["hero"]], "pet": HEROES_AND_PETS[facts["pet"]]}
    encounters = ""
    while n_missing > 0:
        encounter = expand(GRAMMAR.read_text("\n\n<go>\n\n<meet> <kind>", 0), random, bound)
        length = len(tokenizer.encode(encounter))
        if length >= 2 * n_missing:
            break  # would overshoot by more than the missing tokens
        encounters += encounter
        n_missing -= length
    if encounters:
        longer = story.text.replace("\n\n", encounters + "\n\n", 1)
        needles = find_needles(longer, facts, tokenizer)
    return [needle for needle in needles if abs(needle.distance - distance) <= distance / 16]


def make_needles(tokenizer: Tokenizer, distance: int, n_examples: int, seed: int) -> list[Needle]:
    """Create `n_examples` needles from different stories, or fewer if few stories fit.

    They are determined by `seed`.
    """
    random = Random(f"{seed}:{distance}")
    chosen: list[Needle] = []
    for _ in range(MAX_STORIES * n_examples):
        if len(chosen) == n_examples:
            break
        needles = story_needles(tokenizer, distance, random)
        if needles:
            chosen.append(random.choice(needles))
    return chosen


def all_prefixes(values: list[list[int]]) -> list[tuple[int, ...]]:
    """The different beginnings of values, up to their last token."""
    return sorted({tuple(value[:-1]) for value in values})


def sum_log_probs(values: list[list[int]], after: dict[tuple[int, ...], Tensor]) -> Tensor:
    """ln P of each of A values, (A,) float64.

    after: ln P of all tokens at each position of a prefix of all_prefixes(), (T, V).
    """
    sums = []
    for value in values:
        logprobs = after[tuple(value[:-1])]
        sums.append(logprobs[range(len(value)), value].double().sum())
    return torch.stack(sums)


@torch.no_grad()
def log_probs(model: Thinker, context: list[int], values: list[list[int]]) -> Tensor:
    """ln P of each of A values (lists of tokens) after a context, (A,) float64.

    Values that differ only in their last token share a row of the batch.
    """
    # Words are short: most differ only in their last token, so few rows are needed.
    prefixes = all_prefixes(values)
    rows = [torch.tensor([*context, *prefix]) for prefix in prefixes]
    tokens = pad_sequence(rows, batch_first=True).to(model.device)
    logprobs: list[Tensor] = []
    for batch in tokens.split(MAX_PREFIXES_PER_BATCH):
        hidden = hidden_states(model, batch)[:, len(context) - 1 :]
        logits = model.lm_head(hidden).float()  # (rows, longest prefix + 1, V)
        logprobs.extend(logits.log_softmax(dim=-1).cpu())
    return sum_log_probs(values, dict(zip(prefixes, logprobs)))


def continue_with(tokenizer: Tokenizer, needle: Needle, word: str) -> list[int]:
    """The tokens of a word after the needle's text, by the tokens of the whole text.

    Raises UserError if a token spans both.
    """
    whole = [tokenizer.bos_id, *tokenizer.encode(f"{needle.text} {word}")]
    length = len(needle.tokens)
    if whole[:length] != needle.tokens:
        raise UserError(f"a token of this tokenizer spans {word!r} and the text before it")
    return whole[length:]


def needle_test(
    model: Thinker,
    tokenizer: Tokenizer,
    distance: int,
    n_examples: int = 64,
    seed: int = 0,
    scorer: Scorer = log_probs,
) -> dict[str, Any]:
    """Measure accuracy at a distance.

    Returns it with its standard error √(p(1 − p)/n), the mean probability of the answer, and
    chance. `scorer`: computes what log_probs() does. If the test is impossible, "unreachable"
    contains the reason.
    """
    needles = make_needles(tokenizer, distance, n_examples, seed)
    prefix = model.config.prefix
    rows = []
    try:
        if not needles:
            raise UserError("no story repeats a fact at that distance")
        # Tokens of the prefix see each other, also backwards.
        if min(len(needle.tokens) for needle in needles) < prefix:
            raise UserError(f"the bidirectional prefix of {prefix} tokens contains the answer")
        for needle in needles:
            words = VALUES[needle.name]
            answer = words.index(needle.value)
            values = [continue_with(tokenizer, needle, word) for word in words]
            nats = scorer(model, needle.tokens, values)  # (A,)
            rows.append([nats.argmax() == answer, nats.softmax(dim=0)[answer], 1 / len(nats)])
    except UserError as error:
        return {"distance": distance, "unreachable": str(error)}
    accuracy, probability, chance = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    return {
        "distance": distance,
        "n_examples": len(rows),
        "accuracy": accuracy,
        "error": (accuracy * (1 - accuracy) / len(rows)) ** 0.5,
        "probability": probability,
        "chance": chance,
    }


def format_table(results: list[dict[str, Any]]) -> str:
    """Format the results of needle_test(), one line per distance."""
    lines = [
        f"{'distance':>15}  {'accuracy':>12}  {'error':>6}  {'probability':>11}  {'chance':>6}"
    ]
    numbers = "{accuracy:12.3f}  {error:6.3f}  {probability:11.3f}  {chance:6.3f}"
    for result in results:
        if "unreachable" in result:
            text = result["unreachable"]
        else:
            text = numbers.format(**result)
        lines.append(f"{result['distance']:>15}  {text}")
    return "\n".join(lines)
