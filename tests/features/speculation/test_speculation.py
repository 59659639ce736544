"""Speculation on real models: whatever is drafted, the text is the one that plain decoding
gives."""

import functools
import itertools
from collections import Counter

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    EOS,
    NO_EOS,
    PARAMS,
    PROMPTS,
    SAME_EXAMPLES,
    SHAPES,
    TOKENIZER,
    assert_same,
    few,
    small_model,
)

from thinker.features.speculation.draft_model import DraftModel
from thinker.features.speculation.prompt_lookup import NGRAM_SIZES, PromptLookup
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.caches.full_cache import FullCaches
from thinker.generation.sampler import distribution, sample_tokens
from thinker.generation.sequence import Sequence
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return small_model(1, n_layers=2, n_heads=4, n_kv_heads=2)


@functools.cache
def make_generator(seed, shape, drafter):
    """Kept, since to make one takes as long as to use it."""
    model = small_model(seed, **SHAPES[shape])
    if drafter == "none":
        return Generator(model, TOKENIZER)
    draft = {"lookup": None, "other": small_model(seed + 1), "itself": model}[drafter]
    return Generator(model, TOKENIZER, speculate=8, draft=draft)


def test_speculation_samples_the_same_tokens_as_plain_decoding():
    tally, accepting = Counter(), Counter()

    @settings(max_examples=examples(150), **SAME_EXAMPLES)
    @given(st.data())
    def check(data):
        seed, shape = data.draw(st.integers(0, 4)), data.draw(st.integers(0, len(SHAPES) - 1))
        prompts, speculate = data.draw(PROMPTS), data.draw(st.integers(1, 8))
        params = [data.draw(PARAMS) for _ in prompts]
        plain = make_generator(seed, shape, "none").generate(prompts, params)
        for name in ("lookup", *[("itself",), ("other",), ("itself",)][speculate % 3]):
            generator = make_generator(seed, shape, name)
            generator.drafting.max_len = speculate
            speculated = generator.generate(prompts, params)
            assert_same(plain, speculated)
            accepted = sum(c.accepted for c in speculated)
            tally[name] += accepted
            accepting[name] += accepted > 0
            for completion in speculated:
                tally[name, "refused"] += completion.drafted - completion.accepted
                if name == "itself" and completion.finish_reason == "length":
                    assert completion.accepted == completion.drafted
                    assert completion.drafted or len(completion.token_ids) < 3

    check()
    # Else there was nothing to test.
    for name in ("lookup", "other", "itself"):
        assert tally[name] > 5
        assert accepting[name] > 2
    assert tally["lookup", "refused"] > 5
    assert tally["other", "refused"] > 5


@pytest.mark.parametrize("drafter", ["lookup", "other", "itself"])
def test_max_new_tokens_may_fall_inside_a_draft(model, drafter):
    draft = {"lookup": None, "other": small_model(2), "itself": model}[drafter]
    prompts, limits = ["abab", "b"] * 12, [*range(1, 13), *range(1, 13)]
    params = [SamplingParams(n, n % 2, logit_bias=few(b"ab"), seed=i) for i, n in enumerate(limits)]
    plain = Generator(model, TOKENIZER).generate(prompts, params)
    speculated = Generator(model, TOKENIZER, speculate=5, draft=draft).generate(prompts, params)
    assert_same(plain, speculated)
    assert [len(c.token_ids) for c in speculated] == limits
    assert sum(c.accepted for c in speculated) > 40
    for index in range(12):  # alone, where no other row needs a longer draft
        alone = Generator(model, TOKENIZER, speculate=5, draft=draft).generate(
            prompts[index:][:1], [params[index]]
        )
        assert_same(plain[index : index + 1], alone)
        assert (alone[0].drafted, alone[0].accepted) == (
            speculated[index].drafted,
            speculated[index].accepted,
        )


@pytest.mark.parametrize("drafter", ["lookup", "other", "itself"])
def test_generation_stops_at_the_end_of_the_context(model, drafter):
    draft = {"lookup": None, "other": small_model(2), "itself": model}[drafter]
    prompts = [
        "ab" * 20,
        "a" * 47,
        "",
        "aba" * 15,
    ]  # 47: all but the one token that is drawn and never fed
    params = SamplingParams(1000, 0.7, logit_bias=few(b"ab"))
    plain = Generator(model, TOKENIZER).generate(prompts, params)
    speculated = Generator(model, TOKENIZER, speculate=8, draft=draft).generate(prompts, params)
    assert_same(plain, speculated)
    assert [len(c.token_ids) for c in speculated] == [48 - len(prompt) for prompt in prompts]
    assert sum(c.accepted for c in speculated) > 10


def test_each_accepted_draft_saves_a_forward_pass(model):
    for draft in (None, small_model(2), model):
        generator, passes = Generator(model, TOKENIZER, compile=False, speculate=4, draft=draft), []
        generator.model.register_forward_pre_hook(
            lambda module, args, passes=passes: passes.append(args[0].shape)
        )
        completion = generator.generate(["abab"], SamplingParams(40, logit_bias=few(b"ab")))[0]
        assert len(passes) == 40 - completion.accepted < 40  # one of them read the prompt


def test_drafts_of_the_same_model_are_always_accepted(model):
    generator = Generator(model, TOKENIZER, speculate=3, draft=model)
    completions = generator.generate(
        ["", "abc", "é漢"], SamplingParams(30, logit_bias=NO_EOS, presence_penalty=1.0)
    )
    # The prompt leads to one token, then each pass to three drafts and one more, the last to what
    # is still wanted.
    assert [(c.drafted, c.accepted) for c in completions] == [(7 * 3 + 0, 7 * 3 + 0)] * 3


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_a_stop_string_or_eos_may_fall_inside_a_draft(model, drafter):
    # Some documents in the prompt, so that prompt lookup drafts the BOS token between them.
    document = [*b"ab", EOS]
    ends = []
    for options in ({}, {"speculate": 6, "draft": None if drafter == "lookup" else model}):
        generator, completions = (
            Generator(model, TOKENIZER, **options),
            [Completion("") for _ in range(30)],
        )
        rows = [
            generator.new_sequence(
                index,
                completion,
                SamplingParams(12, logit_bias=few(document), seed=index),
                [EOS, *document * 4],
            )
            for index, completion in enumerate(completions)
        ]
        cache = generator.new_cache(len(rows), 48 + 6)
        logits = generator.prefill([row.tokens for row in rows], cache)
        for _ in generator.decode(rows, cache, logits):
            pass
        ends.append(completions)
    assert_same(*ends)
    assert all(EOS not in c.token_ids[:-1] for c in completions)
    # The BOS token was a draft that came true, with others after it that no longer could.
    inside = [c for c in completions if c.token_ids[-1] == EOS and c.drafted > c.accepted > 0]
    assert len(inside) > 3
    if drafter == "itself":  # every draft up to the end of the text is drawn, the end itself too
        for completion in completions:
            drawn = len(completion.token_ids) - 1  # but the first, which the prompt leads to
            if drawn < 7:
                assert completion.accepted == drawn


@pytest.mark.parametrize("drafter", ["lookup", "other", "itself"])
def test_a_finished_sequence_does_not_change_the_others(model, drafter):
    draft = {"lookup": None, "other": small_model(2), "itself": model}[drafter]
    generator = Generator(model, TOKENIZER, speculate=4, draft=draft)
    prompts = ["abab", "b" * 30, "", "abab", "ba", "c" * 44]
    ends = [(3, ()), (40, ()), (30, ("abab",)), (11, ()), (40, ()), (40, ())]
    params = [SamplingParams(n, logit_bias=few(b"ab"), seed=n, stop=stop) for n, stop in ends]
    together = generator.generate(prompts, params)
    assert len({len(c.token_ids) for c in together}) > 3  # they end at different times
    for completion, own in zip(together, params):
        alone = generator.generate([completion.prompt], own)[0]
        assert completion.token_ids == alone.token_ids
        # What is proposed for a row is its own affair too.
        assert (completion.drafted, completion.accepted) == (alone.drafted, alone.accepted)


@pytest.mark.parametrize("drafter", ["lookup", "other"])
def test_samples_follow_the_models_joint_distribution(drafter, stress):
    letters, prompt = (
        b"abcd",
        "aabacadbbcbdccdda",
    )  # every pair of letters: prompt lookup always finds one
    samples, batch = 8_000 if stress else 3_000, 1_000  # rows of a batch
    model = small_model(4)
    sampling_key = {
        "temperature": 1.4,
        "top_p": 0.93,
        "frequency_penalty": 0.8,
        "logit_bias": dict.fromkeys(letters, 1000.0),
    }
    draft = None if drafter == "lookup" else small_model(5)
    generator = Generator(model, TOKENIZER, speculate=2, draft=draft)
    seen, drafted, accepted = Counter(), 0, 0
    for begin in range(0, samples, batch):
        # The second token is drafted, and where that was right, the third comes from the same pass.
        completions = generator.generate(
            [prompt] * batch, SamplingParams(3, seed=begin, **sampling_key)
        )
        seen.update(tuple(c.token_ids) for c in completions)
        drafted += sum(c.drafted for c in completions)
        accepted += sum(c.accepted for c in completions)
    assert drafted == samples
    assert 0.1 < accepted / drafted < 0.9

    expected = joint_distribution(model, prompt, letters, SamplingParams(**sampling_key))
    assert sum(expected.values()) == pytest.approx(1)
    assert len(expected) < 64  # top-p leaves some out; these never come
    assert seen.keys() <= expected.keys()
    cells = [(seen[three], probability * samples) for three, probability in expected.items()]
    rare = [
        cell for cell in cells if cell[1] < 10
    ]  # together, so that the test's own distribution is right
    cells = [cell for cell in cells if cell[1] >= 10] + (
        [tuple(map(sum, zip(*rare)))] if rare else []
    )
    assert len(cells) > 20
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    p = torch.special.gammaincc(
        torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(statistic / 2).double()
    )
    assert p > 1e-4


def joint_distribution(model, prompt, letters, params):
    """The probability of every sequence of three letters that can come, by passes over whole
    texts."""
    known = {(): 1.0}
    for _ in range(3):
        longer = {}
        for drawn, probability in known.items():
            ids = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt), *drawn]
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[:, -1, : TOKENIZER.vocab_size]
            counts = torch.bincount(
                torch.tensor(drawn, dtype=torch.int64), minlength=TOKENIZER.vocab_size
            )
            probs = distribution(logits, params, None, counts[None])[0].tolist()
            longer.update(
                {
                    (*drawn, letter): probability * probs[letter]
                    for letter in letters
                    if probs[letter]
                }
            )
        known = longer
    return known


class CountedList(list):
    """Counts the tokens that are read from it in slices."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            self.read += len(found)
        return found


def followed_before(tokens):
    """What stands behind the latest earlier place where the text's longest possible ending stood,
    by its definition."""
    for n in NGRAM_SIZES:
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end:]
    return []


@settings(max_examples=examples(200), **SAME_EXAMPLES)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12),
    length=st.integers(1, 8),
    limit=st.integers(1, 30),
)
def test_prompt_lookup_proposes_the_continuation_of_the_longest_match(parts, length, limit):
    lookup, tokens = PromptLookup(length), CountedList()
    row = Sequence(3, Completion(""), SamplingParams(), tokens, limit, TOKENIZER)
    now, guess = length, []
    for part in parts:
        if guess:  # drafts grow while they are right, and shrink to one more than was right
            right = [a == b for a, b in itertools.zip_longest(guess, part[: len(guess)])]
            now = min(2 * now, length) if all(right) else right.index(False) + 1
        before = tokens.read
        tokens += part
        row.n_remaining = max(1, row.n_remaining - len(part))
        (guess,) = lookup.propose([row])
        # Work for the new tokens and the proposal, none for the rest of the text.
        assert (
            tokens.read - before <= (sum(NGRAM_SIZES) + 1) * len(part) + sum(NGRAM_SIZES) + length
        )
        assert lookup.indexes[3].n_indexed == len(tokens) - 1
        assert guess == followed_before(list(tokens))[: min(now, row.n_remaining - 1)]


def test_prompt_lookup_takes_constant_time_per_token():
    tokens = CountedList(i * i % 251 for i in range(5000))
    row = Sequence(0, Completion(""), SamplingParams(), tokens, 1000, TOKENIZER)
    lookup = PromptLookup(4)
    lookup.propose([row])
    costs = []
    for token in (7, 8, 9) * 200:
        before = tokens.read
        tokens.append(token)
        lookup.propose([row])
        costs.append(tokens.read - before)
    assert max(costs[-10:]) <= max(costs[:10]) + 1 <= 30


def test_prompt_lookup_treats_sequences_independently():
    lookup = PromptLookup(4)
    texts = {5: [1, 2, 3, 1, 2], 0: [1, 2, 9, 1, 2], 2: [4, 5, 6]}
    rows = [
        Sequence(index, Completion(""), SamplingParams(), list(text), 9, TOKENIZER)
        for index, text in texts.items()
    ]
    assert lookup.propose(rows) == [[3, 1, 2], [9, 1, 2], []]
    rows[1].tokens += [9, 1, 2, 9]
    rows[2].tokens += [4, 5]
    assert lookup.propose(rows[:0:-1]) == [[6, 4, 5], [1, 2, 9]]  # the first row has left


def test_a_draft_model_proposes_its_own_samples_after_accepted_and_rejected_drafts(model):
    drafter = DraftModel(model, 3, FullCaches())
    rows = [
        Sequence(
            index,
            Completion(""),
            SamplingParams(seed=index, presence_penalty=1.0),
            [EOS, *text],
            limit,
            TOKENIZER,
        )
        for index, (text, limit) in enumerate([(b"ab", 30), (b"", 9), (b"hello", 2), (b"xyz", 30)])
    ]
    accept = itertools.cycle([3, 0, 1, 3, 2, 3, 0])  # how many of a row's drafts come true
    with torch.no_grad():
        for _ in range(7):
            for row, draft in zip(rows, drafter.propose(rows), strict=True):
                assert len(draft) == min(3, max(0, row.n_remaining - 1))
                expected = []
                for _ in draft:
                    logits = model(torch.tensor([[*row.tokens, *expected]]))[
                        :, -1, : TOKENIZER.vocab_size
                    ]
                    expected += sample_tokens([(row, expected)], logits)
                assert draft == expected
                for token in [*draft[: next(accept)], 7]:
                    if row.n_remaining > 1:
                        row.extend([(token, 0.0, {})])


def test_a_draft_model_must_have_the_same_vocabulary_and_context(model):
    with pytest.raises(UserError, match="the draft has 300 token ids, the model has 264"):
        Generator(model, TOKENIZER, speculate=2, draft=small_model(vocab_size=300))
    with pytest.raises(
        UserError,
        match="the draft model's context is 47 tokens; use a draft model with at least 48",
    ):
        Generator(model, TOKENIZER, speculate=2, draft=small_model(max_seq_len=47))
    with pytest.raises(UserError, match="draft needs speculate"):
        Generator(model, TOKENIZER, draft=small_model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": -1}, "speculate is -1"),
        ({"speculate": 65}, "speculate is 65.*64"),
        ({"speculate": 4, "window": 8}, "window cannot be combined with speculate"),
        ({"use_cache": False, "speculate": 2}, "speculate needs the KV cache"),
        ({"speculat": 2}, "Generator has no option speculat; did you mean speculate"),
    ],
)
def test_contradictory_options_raise(model, options, message):
    with pytest.raises(UserError, match=message):
        Generator(model, TOKENIZER, **options)
