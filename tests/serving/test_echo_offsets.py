"""Where the tokens of an echoed prompt are in the text, without a server."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import random_model
from metaspace_tokenizer import metaspace_tokenizer

from thinker.generation import Generator
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.serving.models import ServedModel
from thinker.serving.protocol import CompletionRequest

TEXT = "the cat é sat"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model whose tokenizer writes a space before each text that has none."""
    pieces = {"▁the": -1.0, "cat": -1.0, "é": -3.0}
    tokenizer = metaspace_tokenizer(tmp_path_factory.mktemp("a") / "b", pieces, True)
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=128)
    engine = SimpleNamespace(generator=Generator(model, tokenizer), max_texts=9)
    return ServedModel("a", tmp_path_factory.getbasetemp(), engine, "fp32", 1)


@pytest.mark.parametrize("kind", ["text", "ids"])
@pytest.mark.parametrize("text", [TEXT, "cat", " x"])
def test_offsets_point_into_the_prompt(served, text, kind):
    tokenizer = served.generator.tokenizer
    ids = tokenizer.encode(text)
    prompt = {"text": text, "ids": ids}[kind]
    body = CompletionRequest(model="a", prompt=prompt, echo=True, logprobs=1, max_tokens=5, seed=1)
    (choice,) = served.choices(body)
    batch = ContinuousBatch(served.generator, 1)
    batch.add(choice.sequence)
    sampled = []
    while not batch.is_idle:
        for progress in batch.step():
            sampled += progress.sampled
    written = choice.whole(sampled)
    shown = {"text": text, "ids": tokenizer.decode(ids)}[kind]
    assert written["text"].startswith(shown)
    starts = written["logprobs"]["text_offset"]
    assert len(starts) == len(ids) + len(sampled)
    pairs = itertools.pairwise(starts[: len(ids) + 1])
    pieces = [written["text"][start:end] for start, end in pairs]
    names = [tokenizer.token_bytes(token).decode() for token in ids]
    if not shown.startswith(" "):
        names[0] = names[0].removeprefix(" ")
    assert pieces == names
