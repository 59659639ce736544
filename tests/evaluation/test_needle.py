"""The needles are what they say they are, and are scored as whole passes would score them."""

import re

import pytest
import torch
from metaspace_tokenizer import metaspace_tokenizer
from story_parser import parse
from tokenizers import normalizers

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text import tales
from thinker.evaluation import needle

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    cache = tmp_path_factory.mktemp("c")
    return {spec: prepare_corpus(source="tales", max_documents=3000, tokenizer=spec, cache_dir=cache, progress=False)
            for spec in ("bpe:2500", "byte")}  # fmt: skip


@pytest.fixture(scope="module")
def bpe(corpora):
    return corpora["bpe:2500"].tokenizer


@pytest.fixture(scope="module")
def byte(corpora):
    return corpora["byte"].tokenizer


def pattern(ops):
    """A regular expression of what these constructs can say; a word said again is any word."""
    parts = []
    for op in ops:
        match op:
            case tales.Text(text):
                parts.append(re.escape(text))
            case tales.Call(rule):
                parts.append("(?:" + "|".join(map(pattern, rule.alternatives)) + ")")
            case tales.SampleWord():
                parts.append(
                    "(?:"
                    + "|".join(
                        sorted({re.escape(item[op.form]) for item in op.items}, reverse=True)
                    )
                    + ")"
                )
            case _:
                parts.append(r"[\w-]+")
    return "".join(parts)


@pytest.mark.parametrize("spec", ["bpe", "byte"])
@pytest.mark.parametrize("distance", [16, 32, 128, 300, 1000])
def test_needles_match_their_story(request, monkeypatch, stress, spec, distance):
    tokenizer, stories, generate_story = request.getfixturevalue(spec), {}, tales.generate_story

    def remember(seed, index):
        story = generate_story(seed, index)
        stories[story.text.split("\n\n")[0]] = story
        return story

    monkeypatch.setattr(tales, "generate_story", remember)
    too_near = spec == "byte" and distance <= 32
    if too_near and not stress:
        monkeypatch.setattr(needle, "MAX_STORIES", 10)
    needles = needle.make_needles(tokenizer, distance, 12, seed=1)
    if too_near:
        assert len(needles) < 3  # no story comes back to anything within a dozen letters
    else:
        assert len(needles) == 12
    encounter = re.compile(pattern(needle.GRAMMAR.read_text("\n\n<go>\n\n<meet> <kind>", 0)))
    for text, value, name, tokens, found in needles:
        assert tokens == [tokenizer.bos_id, *tokenizer.encode(text)]
        (first,) = re.finditer(rf"\b{needle.PHRASES[name]}( {value})\b", text, re.IGNORECASE)
        assert found == len(tokenizer.encode(text)) - len(tokenizer.encode(text[: first.start(1)]))
        assert abs(found - distance) <= distance / 16
        assert len(re.findall(rf"\b{value}\b", text)) == 1
        assert text.endswith(needle.PHRASES[name])

        opening = text.split("\n\n")[0]
        story = stories[opening]
        assert parse(story.text) == story
        assert ("fact", name, value) in [choice[:3] for choice in story.choices]
        at, encounters = len(opening), 0
        while not story.text[len(opening) :].startswith(text[at:]):
            at, encounters = encounter.match(text, at).end(), encounters + 1
        assert (story.text[len(opening) :] + "\n").startswith(text[at:] + f" {value}")
        assert (encounters > 0) or story.text.startswith(text)
        if spec == "bpe":
            assert encounters == 0 or distance >= 128
            assert encounters <= distance // 30


def test_the_seed_determines_the_needles(bpe):
    needles = needle.make_needles(bpe, 64, 5, seed=1)
    assert needles == needle.make_needles(bpe, 64, 5, seed=1)
    assert needles != needle.make_needles(bpe, 64, 5, seed=2)
    assert len({one.text for one in needles}) == 5


def test_values_are_grammar_words_and_none_is_a_prefix_of_another():
    for name, values in needle.VALUES.items():
        words = [item[""] for item in needle.GRAMMAR.lists[name]]
        assert set(values) <= set(words)
        assert len(values) >= len(words) - 3
        left_out = set(words) - set(values)
        assert all(any(word.startswith(short) for word in values) for short in left_out)
        assert not [(a, b) for a in values for b in values if a != b and a.startswith(b)]


def reference_log_probs(model, tokenizer, one):
    """ln P of every value in its place, each by a pass of its own."""
    sums = []
    for value in needle.VALUES[one.name]:
        ids = tokenizer.encode(f" {value}")
        with torch.no_grad():
            known = model(torch.tensor([[*one.tokens, *ids]]))[0].double().log_softmax(dim=-1)
        sums.append(sum(known[len(one.tokens) - 1 + k, i].item() for k, i in enumerate(ids)))
    return sums


@pytest.mark.parametrize(
    ("spec", "form"), [("bpe", {}), ("byte", {}), ("byte", {"attention": "window(70)"})]
)
def test_log_probs_equal_full_forward_passes(request, random_model, spec, form, stress):
    n_examples = 4 if stress else 2
    tokenizer = request.getfixturevalue(spec)
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=1, **form)
    distance = 64 if spec == "bpe" else 160
    right, given = [], []
    for one in needle.make_needles(tokenizer, distance, n_examples, seed=0):
        expected = reference_log_probs(model, tokenizer, one)
        ids = [tokenizer.encode(f" {value}") for value in needle.VALUES[one.name]]
        assert needle.log_probs(model, one.tokens, ids).tolist() == pytest.approx(
            expected, abs=2e-4
        )
        best = needle.VALUES[one.name][max(range(len(expected)), key=expected.__getitem__)]
        right.append(best == one.value)
        place = needle.VALUES[one.name].index(one.value)
        given.append(torch.tensor(expected).softmax(dim=0)[place].item())
    found = needle.needle_test(model, tokenizer, distance, n_examples=n_examples)
    assert found["n_examples"] == n_examples
    assert found["accuracy"] == sum(right) / n_examples
    assert found["probability"] == pytest.approx(sum(given) / n_examples, rel=1e-3)


def test_words_have_the_tokens_of_the_whole_text(random_model, tmp_path):
    """A tokenizer that adds a space before a text does not add one before the word."""
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer = metaspace_tokenizer(tmp_path, {"\n": -3.0}, True, normalizers.Sequence(spaces))
    model = random_model(vocab_size=tokenizer.vocab_size)
    (one,) = needle.make_needles(tokenizer, 160, 1, seed=0)
    scored = []

    def scorer(model, context, values):
        scored.extend(context + value for value in values)
        return torch.zeros(len(values))

    needle.needle_test(model, tokenizer, 160, n_examples=1, seed=0, scorer=scorer)
    wholes = [f"{one.text} {value}" for value in needle.VALUES[one.name]]
    assert scored == [[tokenizer.bos_id, *tokenizer.encode(whole)] for whole in wholes]


def test_accuracy_and_binomial_error(random_model, bpe):
    """A head that prefers the words of half the needles, whatever the context."""
    model = random_model(vocab_size=bpe.vocab_size, max_seq_len=512, tie_embeddings=False)
    needles = needle.make_needles(bpe, 32, 8, seed=0)
    preferred = {one.name: one.value for one in needles}
    expected = sum(preferred[one.name] == one.value for one in needles) / 8
    single = {bpe.encode(f" {value}")[-1] for value in preferred.values()}
    with torch.no_grad():
        model.norm.weight.fill_(0)
        model.norm.weight[0] = 1
        model.lm_head.weight.fill_(0)
    model.norm.register_forward_hook(lambda module, given, x: x.abs())
    with torch.no_grad():
        model.lm_head.weight[sorted(single), 0] = 50.0
    assert all(len(bpe.encode(f" {value}")) == 1 for value in preferred.values())
    found = needle.needle_test(model, bpe, 32, n_examples=8)
    assert found["accuracy"] == expected
    assert 0 < expected < 1
    assert found["error"] == pytest.approx((expected * (1 - expected) / 8) ** 0.5)
    assert 1 / 160 < found["chance"] < 1 / 20


def test_unreachable_distances_have_a_reason(random_model, bpe, byte):
    model = random_model(vocab_size=bpe.vocab_size, max_seq_len=200, positions="learned")
    assert needle.needle_test(model, bpe, 32, n_examples=2)["n_examples"] == 2
    far = needle.needle_test(model, bpe, 256, n_examples=2)
    assert "200 learned positions" in far["unreachable"]
    near = needle.needle_test(random_model(vocab_size=257), byte, 8, n_examples=2)
    assert "no story" in near["unreachable"]
    lines = needle.format_table([far, near]).splitlines()
    assert len(lines) == 3
    assert "200 learned positions" in lines[1]


def test_a_prefix_that_includes_the_answer(random_model, bpe):
    found = needle.needle_test(
        random_model(vocab_size=bpe.vocab_size, attention="prefix(999)"), bpe, 32, 2
    )
    assert "contains the answer" in found["unreachable"]
