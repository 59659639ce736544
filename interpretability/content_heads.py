"""What heads attend to in stories of `tales`.

Similar words, the first mention of a fact, the subject of a verb. The words come from the story's
exact derivation (data/text/story_words.py). A score is the mean weight that a head puts on all
tokens of such words. Chance is the same for the closest head whose weights depend only on distance,
with the same weight on the first token (interpretability/distances.py), so a head that always
attends nearby does not count.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from thinker.data.text import tales
from thinker.data.text.story_words import Word, find_words
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import estimate_ratio
from thinker.interpretability import distances, heads
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

SEED = -1  # of no config, so that no model was trained on these stories
MAX_STORIES = 20  # generated per story that fits into the context
LOCAL = 4  # tokens that count as local: the query and those before it
N_COMPARED = 8  # stories on which all pairs of heads are compared, which takes longest


def local(weights: Tensor) -> Tensor:
    """Mean weight of the token itself and the LOCAL - 1 tokens before it; (..., T, T) -> (...)."""
    return (weights.tril() - weights.tril(-LOCAL)).sum(dim=-1).mean(dim=-1)


MEASURES = {
    "entropy": heads.entropy,
    "distance": heads.mean_distance,
    "first": heads.first_token,
    "local": local,
}
# Name of a score -> from which token a head attends to what.
RELATIONS = {
    "class": "a word → different earlier words of the same part of speech",
    "list": "a word → different earlier words of the same list",
    "next fact": "the token before a fact that returns → its first mention",
    "this fact": "a fact that returns → its first mention",
    "subject": "a verb → its subject",
}


@dataclass(frozen=True)
class StoryTokens:
    """The tokens of a story, and what is related to what."""

    tokens: Tensor  # (T,)
    relations: dict[str, Tensor]  # (T, T) bool each: pairs of query and key that belong to it
    facts: Tensor  # (T,) bool: first tokens of facts that return


def locate_words(
    text: str, words: list[Word], tokenizer: Tokenizer
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a text, and the tokens of each word by position.

    Raises UserError if the tokenizer changes text.
    """
    ids = [*tokenizer.bos_prefix, *tokenizer.encode(text)]
    pieces = []
    for token in ids:
        if token in tokenizer.bos_prefix:  # which is not of the text
            pieces.append(b"")
        else:
            pieces.append(tokenizer.token_bytes(token))
    data = b"".join(pieces)
    if data.lstrip() != text.encode():  # some tokenizers add a space before the text
        problem = "the tokenizer changes the text of tales, so words have no tokens"
        raise UserError(f"{problem}; use a lossless tokenizer")
    # Places of the tokens in the text, which is ASCII: a byte is a character.
    lengths = torch.tensor(list(map(len, pieces)))
    ends = lengths.cumsum(0) - (len(data) - len(text))
    starts = ends - lengths
    places = []
    for word in words:
        overlaps = (starts < word.end) & (ends > word.start)
        places.append(overlaps.nonzero().flatten().tolist())
    return ids, places


def make_story(tokenizer: Tokenizer, index: int) -> StoryTokens:
    """Generate a story and find its relations.

    Raises UserError if its words cannot be found in the tokens.
    """
    story = tales.generate_story(SEED, index)
    words = find_words(story)
    ids, places = locate_words(story.text, words, tokenizer)
    T = len(ids)
    relations = {name: torch.zeros(T, T, dtype=torch.bool) for name in RELATIONS}
    facts = torch.zeros(T, dtype=torch.bool)
    values = [story.text[word.start : word.end].lower() for word in words]
    for number, word in enumerate(words):
        query = places[number][-1]  # the first token that knows the whole word
        for other, earlier in enumerate(words[:number]):
            # Not equal words: a head may find those by their tokens alone.
            if values[other] == values[number]:
                continue
            if word.part_of_speech == earlier.part_of_speech != "":
                relations["class"][query, places[other]] = True
            if word.source == earlier.source != "":
                relations["list"][query, places[other]] = True
        for other in word.subject:
            relations["subject"][query, places[other]] = True
        if word.first_mention is not None:
            mention = places[word.first_mention]
            start = places[number][0]
            relations["this fact"][query, mention] = True
            relations["next fact"][start - 1, mention] = True
            facts[start] = True
    return StoryTokens(torch.tensor(ids), relations, facts)


def make_stories(model: Thinker, tokenizer: Tokenizer, n: int) -> list[StoryTokens]:
    """The first n stories that fit into the model's context.

    Raises UserError if there are fewer.
    """
    if n < 2:
        raise UserError(f"--stories is {n}; use at least 2")
    limit = model.config.max_seq_len
    lengths = []
    stories = []
    for index in range(MAX_STORIES * n):
        story = make_story(tokenizer, index)
        lengths.append(len(story.tokens))
        if lengths[-1] <= limit:
            stories.append(story)
        if len(stories) == n:
            return stories
    found = f"a story has {min(lengths)} tokens or more, and the model reads {limit}"
    raise UserError(f"only {len(stories)} of {len(lengths)} stories fit into the context ({found})")


@dataclass(frozen=True)
class RelationScore:
    """Mean weight of a relation by head, with 95% intervals over stories.

    (layers, H) each, nan for missing heads.
    """

    score: Tensor
    low: Tensor
    high: Tensor
    chance: Tensor
    excess: Tensor  # score minus chance
    excess_low: Tensor
    excess_high: Tensor


@dataclass(frozen=True)
class ContentScores:
    """Scores of all heads, (layers, H) unless stated otherwise, nan for missing heads."""

    relations: dict[str, RelationScore]
    measures: dict[str, Tensor]  # of MEASURES
    strength: Tensor  # of the period
    period: Tensor
    by_distance: Tensor  # (layers, H, T): weights of the closest head that depends only on distance
    divergence: Tensor  # (layers · H, layers · H): mean Jensen–Shannon divergence, nats


@torch.no_grad()
def score_content(
    attention: Callable[[Tensor], Tensor], stories: list[StoryTokens]
) -> ContentScores:
    """Score heads on stories.

    attention: tokens (1, T) -> weights (layers, 1, H, T, T), as model.attention_weights.
    """
    longest = max(len(story.tokens) for story in stories)
    found = defaultdict(list)  # by relation: (layers, H) per story
    measures = defaultdict(list)  # by measure: (layers, H) per story
    by_distance = []  # (layers, H, longest) per story
    by_query = []  # (layers, H, longest) per story
    divergence = []  # (layers · H, layers · H) per story
    for number, story in enumerate(Progress(stories, desc="reading stories")):
        weights = attention(story.tokens[None])[:, 0].float().cpu()  # (layers, H, T, T)
        for name, pairs in story.relations.items():
            found[name].append((weights * pairs).sum(dim=(-2, -1)))  # (layers, H)
        for name, measure in MEASURES.items():
            measures[name].append(measure(weights))
        if number < N_COMPARED:
            divergence.append(heads.pairwise_js_divergence(weights.flatten(0, 1)))
        padding = longest - len(story.tokens)
        distance_sums, query_sums = distances.sum_by_distance(weights)
        by_distance.append(F.pad(distance_sums, (0, padding)))
        by_query.append(F.pad(query_sums, (0, padding)))

    # One head without content for all stories, but with the weight that each query really spent.
    w = distances.fit_distances(sum(by_distance), sum(by_query))
    relations = {}
    for name in RELATIONS:
        chances = []
        n_queries = []
        for story, mass in zip(stories, by_query):
            pairs = story.relations[name]
            expected = distances.expected_weights(w, mass[..., : len(pairs)]) * pairs
            chances.append(expected.sum(dim=(-2, -1)))
            n_queries.append(float(pairs.any(dim=-1).sum()))
        chance = torch.stack(chances, dim=-1)  # (layers, H, N)
        score = torch.stack(found[name], dim=-1)  # (layers, H, N)
        relations[name] = _score(score, chance, torch.tensor(n_queries))
    means = {}
    for name, values in measures.items():
        means[name] = torch.stack(values).mean(dim=0)
    strength, period = distances.periodicity(w)
    strength = strength.where(~means["entropy"].isnan(), torch.nan)  # missing heads
    mean_divergence = torch.stack(divergence).mean(dim=0)
    return ContentScores(relations, means, strength, period, w, mean_divergence)


def _score(found: Tensor, chance: Tensor, n_queries: Tensor) -> RelationScore:
    """Estimate means over queries.

    found, chance: sums of weights by story (layers, H, N). n_queries: number by story (N,).
    """
    score = _estimate(found, n_queries)
    # Of the difference by story, whose interval is narrower than that of two separate means.
    excess = _estimate(found - chance, n_queries)
    mean_chance = (chance.sum(dim=-1) / n_queries.sum()).float()
    return RelationScore(*score, mean_chance, *excess)


def _estimate(sums: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
    """Σ sums / Σ sizes with its 95% interval: (layers, H, N), (N,) -> (layers, H) each."""
    rows = []
    for row in sums.flatten(0, 1):
        estimate = estimate_ratio(row, sizes, 0.95)
        if estimate.low is None:  # only one story has such queries
            rows.append([estimate.mean, torch.nan, torch.nan])
        else:
            rows.append([estimate.mean, estimate.low, estimate.high])
    return torch.tensor(rows).unflatten(0, sums.shape[:2]).unbind(dim=-1)


def fact_targets(stories: list[StoryTokens]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (N, T) each, for the loss on the first token of facts that return."""
    T = max(len(story.tokens) for story in stories) - 1
    inputs = torch.zeros(len(stories), T, dtype=torch.int64)
    targets = torch.full((len(stories), T), IGNORE_INDEX)
    for row, story in enumerate(stories):
        n = len(story.tokens) - 1
        inputs[row, :n] = story.tokens[:-1]
        targets[row, :n] = torch.where(story.facts[1:], story.tokens[1:], IGNORE_INDEX)
    return inputs, targets
