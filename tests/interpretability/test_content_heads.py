"""Content scores: heads built by hand have the scores that they must have, real models and
tokenizers fit together."""

import pytest
import torch
from metaspace_tokenizer import metaspace_tokenizer
from tokenizers import normalizers

from thinker.data.text import story_words, tales
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import content_heads, content_report, heads
from thinker.interpretability.content_heads import RELATIONS
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
N = 4  # stories


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe:800", [tales.generate_story(0, index).text for index in range(200)])


@pytest.fixture(scope="module")
def stories(bpe):
    return [content_heads.make_story(bpe, index) for index in range(N)]


def on_first_token(T):
    weights = torch.zeros(T, T)
    weights[:, 0] = 1
    return weights


def by_distance(T, w):
    """A head that gives a token at distance d the weight w(d), relative to the others, and the
    first token half."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    weights = w(distance) * (distance >= 0) * (torch.arange(T) > 0)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-9) / 2
    weights[:, 0] = 1 - weights.sum(dim=-1)
    return weights


def score(stories, *make_heads):
    """Scores of the heads of a single layer, each a function of a story."""
    by_length = {story.tokens.tolist().__repr__(): story for story in stories}

    def attention(tokens):
        story = by_length[tokens[0].tolist().__repr__()]
        return torch.stack([make(story) for make in make_heads])[None, None]

    return content_heads.score_content(attention, stories)


@pytest.mark.parametrize("name", RELATIONS)
def test_a_head_that_attends_to_a_relation_scores_1_in_it(stories, name):
    def related(story):
        pairs = story.relations[name].float()
        counts = pairs.sum(dim=-1, keepdim=True)
        return torch.where(counts > 0, pairs / counts.clamp_min(1), on_first_token(len(pairs)))

    def half(story):
        return (related(story) + on_first_token(len(story.tokens))) / 2

    found = score(stories, related, half).relations[name]
    assert found.score.tolist() == [[pytest.approx(1), pytest.approx(0.5)]]
    assert (found.low - found.score).abs().max() < 1e-5  # every story has the same mean
    assert (found.chance < 0.6 * found.score).all()
    assert (found.excess_low > 0).all()
    torch.testing.assert_close(found.excess, found.score - found.chance, atol=1e-6, rtol=0)


def test_heads_that_know_only_distances_score_their_chance(stories):
    found = score(
        stories,
        lambda story: by_distance(
            len(story.tokens), lambda d: torch.ones_like(d).float()
        ),  # uniform
        lambda story: by_distance(len(story.tokens), lambda d: (-d / 9).clamp_max(0).exp()),
        lambda story: by_distance(len(story.tokens), lambda d: (d == 1).float()),
        lambda story: by_distance(len(story.tokens), lambda d: 0.1 + (d % 6 == 0)),
        lambda story: on_first_token(len(story.tokens)),
    )
    for name in RELATIONS:
        relation = found.relations[name]
        torch.testing.assert_close(relation.score, relation.chance, atol=2e-4, rtol=0)
        assert relation.excess.abs().max() < 2e-4
        assert (relation.score[0, :4] > 0).any()
    uniform = found.relations["next fact"].score[0, 0]
    known = [0.5 * (story.relations["next fact"].float().sum(dim=-1) / torch.arange(len(story.tokens)).clamp_min(1))
             for story in stories]  # fmt: skip
    n_queries = sum(story.relations["next fact"].any(dim=-1).sum() for story in stories)
    assert uniform == pytest.approx(float(sum(x.sum() for x in known) / n_queries), abs=1e-5)
    assert found.strength[0, 3] > 0.9
    assert found.period[0, 3] == 6
    assert found.strength[0, [0, 1, 2, 4]].max() < 0.05
    assert found.divergence.shape == (5, 5)


def test_local_is_the_token_and_the_three_before_it(stories):
    at = [
        lambda story, k=k: by_distance(len(story.tokens), lambda d: (d == k).float())
        for k in (0, 3, 4)
    ]
    found = score(stories, *at).measures["local"][0].tolist()
    assert found == [
        pytest.approx(x, abs=0.04) for x in (0.5, 0.5, 0)
    ]  # the first rows attend to the first token


def test_relations_are_those_of_the_words(bpe):
    story, found = tales.generate_story(content_heads.SEED, 0), content_heads.make_story(bpe, 0)
    ids = found.tokens.tolist()
    assert ids[0] == bpe.bos_id
    assert bpe.decode(ids[1:]) == story.text
    words = story_words.find_words(story)
    _, places = content_heads.locate_words(story.text, words, bpe)
    in_words = [i for place in places for i in place]
    assert in_words == sorted(set(in_words))  # no token belongs to two words
    rest = [token for i, token in enumerate(ids[1:], 1) if i not in in_words]
    assert not any(char.isalnum() for char in bpe.decode(rest))
    for word, place in zip(words, places):
        assert bpe.decode([ids[i] for i in place]).strip(' "') == story.text[word.start : word.end]
    repeated = [number for number, word in enumerate(words) if word.first_mention is not None]
    assert found.facts.nonzero().flatten().tolist() == [places[number][0] for number in repeated]
    for number in repeated:
        first = places[words[number].first_mention]
        assert (
            found.relations["this fact"][places[number][-1]].nonzero().flatten().tolist() == first
        )
        assert set(first) <= set(
            found.relations["next fact"][places[number][0] - 1].nonzero().flatten().tolist()
        )
    for pairs in found.relations.values():
        assert not pairs.triu(1).any()
    texts = [story.text[word.start : word.end].lower() for word in words]
    for name, kinds in (
        ("class", [w.part_of_speech for w in words]),
        ("list", [w.source for w in words]),
    ):
        for number, kind in enumerate(kinds):
            others = [
                n for n in range(number) if kind and kinds[n] == kind and texts[n] != texts[number]
            ]
            keys = found.relations[name][places[number][-1]].nonzero().flatten().tolist()
            assert keys == [i for n in others for i in places[n]]


@pytest.mark.parametrize("kind", ["byte", "metaspace"])
def test_tokenizers_of_other_kinds(tmp_path, kind):
    tokenizer = (
        make_tokenizer("byte", [])
        if kind == "byte"
        else metaspace_tokenizer(tmp_path, {"\n": -3.0}, True)
    )
    story = tales.generate_story(content_heads.SEED, 0)
    words = story_words.find_words(story)
    ids, places = content_heads.locate_words(story.text, words, tokenizer)
    for word, place in zip(words, places):
        assert (
            tokenizer.decode_bytes([ids[i] for i in place]).decode().strip()
            == story.text[word.start : word.end]
        )
    found = content_heads.make_story(tokenizer, 0)
    assert found.facts.sum() == sum(word.first_mention is not None for word in words)


def test_a_tokenizer_that_changes_the_text_is_refused(tmp_path):
    tokenizer = metaspace_tokenizer(tmp_path, {"\n": -3.0}, True, normalizers.Lowercase())
    with pytest.raises(UserError, match="the tokenizer changes the text of tales"):
        content_heads.make_story(tokenizer, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 4, "attention": "window(16)", "qk_norm": True},
        {"n_kv_heads_per_layer": [2, 1], "n_kv_heads": 2},
        {"attention": "heads(prefix(8), strided(5), full, full)", "n_kv_heads": 4},
        {"attention_sinks": True, "positions": "alibi"},
    ],
)
def test_models_of_any_shape_are_scored(random_model, bpe, stories, options):
    model = random_model(vocab_size=bpe.vocab_size, max_seq_len=256, **options)
    found = content_heads.score_content(model.attention_weights, stories)
    weights = [
        model.attention_weights(story.tokens[None])[:, 0] for story in stories
    ]  # (layers, H, T, T) each
    missing = weights[0][..., 0, 0].isnan()
    assert missing.any() == ("n_kv_heads_per_layer" in options)
    for name in RELATIONS:
        pairs = [story.relations[name] for story in stories]
        known = sum((x * y).sum(dim=(2, 3)) for x, y in zip(weights, pairs)) / sum(
            x.any(-1).sum() for x in pairs
        )
        scores = found.relations[name]
        torch.testing.assert_close(scores.score, known, equal_nan=True, atol=1e-5, rtol=0)
        for values in vars(scores).values():
            assert torch.equal(values.isnan(), missing)
        assert (scores.low <= scores.score)[~missing].all()
    assert torch.equal(found.strength.isnan(), missing)
    torch.testing.assert_close(
        found.measures["entropy"], sum(map(heads.entropy, weights)) / N, equal_nan=True
    )


def test_targets_are_the_first_tokens_of_facts_that_return(stories):
    inputs, targets = content_heads.fact_targets(stories)
    assert inputs.shape == targets.shape
    for row, story in enumerate(stories):
        counted = (targets[row] != IGNORE_INDEX).nonzero().flatten()
        assert torch.equal(counted + 1, story.facts.nonzero().flatten())
        assert torch.equal(targets[row, counted], story.tokens[counted + 1])
        assert torch.equal(inputs[row, : len(story.tokens) - 1], story.tokens[:-1])


def test_stories_are_new_to_any_run_and_fit(random_model, bpe):
    lengths = [len(content_heads.make_story(bpe, index).tokens) for index in range(40)]
    limit = sorted(lengths)[10]
    made = content_heads.make_stories(random_model(max_seq_len=limit), bpe, 5)
    assert [len(story.tokens) for story in made] == [
        length for length in lengths if length <= limit
    ][:5]
    with pytest.raises(
        UserError,
        match=r"only 0 of 40 stories fit into the context \(a story has \d+ tokens or more",
    ):
        content_heads.make_stories(random_model(max_seq_len=32), bpe, 2)
    with pytest.raises(UserError, match="--stories is 1; use at least 2"):
        content_heads.make_stories(random_model(), bpe, 1)


def test_the_report(random_model, bpe, tmp_path):
    model = random_model(vocab_size=bpe.vocab_size, max_seq_len=256, n_kv_heads_per_layer=[2, 1])
    report = content_report.report_content(model, bpe, tmp_path, 3)
    assert "what the model was trained on is unknown" in report.table()
    assert [row[0] for row in report.rows] == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"]
    stories = content_heads.make_stories(model, bpe, 3)
    inputs, targets = content_heads.fact_targets(stories)
    before = heads.losses(model, inputs, targets)
    with model.patch({"blocks.1.attention.heads.1": "zero"}):
        cost = heads.losses(model, inputs, targets) - before
    assert report.data["cost"]["value"][1][1] == pytest.approx(cost.mean().item(), abs=1e-5)
    assert report.data["cost"]["value"][1][2:] == [None, None]  # pruned
    found = content_heads.score_content(model.attention_weights, stories)
    assert report.data["subject"]["score"][0] == pytest.approx(
        found.relations["subject"].score[0].tolist()
    )
    pairs = report.data["most_similar"]
    assert [x for *_, x in pairs] == sorted(x for *_, x in pairs)
    assert len({frozenset(pair[:2]) for pair in pairs}) == 5
    divergence = heads.pairwise_js_divergence(
        model.attention_weights(stories[0].tokens[None])[0, 0]
    )
    assert found.divergence[:4, :4].shape == divergence.shape
    by_layer = [
        sum(float(row[1]) for row in report.rows if row[0][0] == str(n)) / k
        for n, k in ((0, 4), (1, 2))
    ]
    assert report.data["by_layer"]["distance"] == pytest.approx(by_layer, abs=1e-3)
    verb = "grows" if by_layer[1] > by_layer[0] else "falls"
    assert f"distance {verb} from {by_layer[0]:.3g}" in report.footer


def test_a_model_of_one_layer_has_no_trend(random_model, bpe, tmp_path):
    model = random_model(
        vocab_size=bpe.vocab_size, max_seq_len=256, n_layers=1, n_heads=1, n_kv_heads=1
    )
    report = content_report.report_content(model, bpe, tmp_path, 2)
    assert "by depth: the model has one layer" in report.footer
    assert len(report.rows) == 1
