"""The stored figures of a validation set: those of its texts, read as generation reads them."""

import json

import pytest
import torch
from conftest import random_model

from thinker.data.corpus.corpus import prepare_corpus
from thinker.features.monitoring.monitor import FILE_NAME, Reference
from thinker.features.monitoring.validation_figures import measure_validation, validation_texts
from thinker.model.inspection.attention_statistics import figure_names, measure_text
from thinker.runtime.errors import UserError

T = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that are shorter and longer than T tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["ab" * n + str(n) for n in range(1, 60)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    path = str(folder / "texts.jsonl")
    corpus = prepare_corpus(
        source="jsonl",
        tokenizer="byte",
        cache_dir=folder,
        val_fraction=0.5,
        path=path,
        shard_tokens=700,
    )
    return corpus, texts


def test_texts_are_documents_or_pieces_of_them(corpus):
    corpus, texts = corpus
    tokenizer, documents = corpus.tokenizer, set(texts)
    assert len(corpus.val.shards) > 1
    found = list(validation_texts(corpus.val, tokenizer.bos_prefix, T, 1000))
    assert all(ids[0] == tokenizer.bos_id and tokenizer.bos_id not in ids[1:] for ids in found)
    pieces = [tokenizer.decode(ids[1:]) for ids in found]
    whole = {
        piece for piece in pieces if len(piece) < T - 1 and piece[0] == "a" and piece in documents
    }
    assert whole
    assert all(any(piece in document for document in documents) for piece in pieces)
    assert max(map(len, found)) == T
    # Without gaps or repetitions: with enough of them, the pieces are all of the validation split.
    n_text = sum(shard.n_tokens - shard.n_documents - 1 for shard in corpus.val.shards)
    assert sum(len(ids) - 1 for ids in found) == n_text
    some = list(validation_texts(corpus.val, [], T, 5))
    assert 3 <= len(some) <= 5
    assert all(tokenizer.bos_id not in ids for ids in some)


@pytest.mark.parametrize("attention", ["full", ["linear(8)", "window(6)"]])
def test_means_and_deviations_by_hand(corpus, attention):
    corpus, _ = corpus
    model = random_model(1, vocab_size=300, attention=attention).train()
    stored = measure_validation(model, corpus.val, corpus.tokenizer, T)
    assert model.training
    by_group = {}
    for ids in validation_texts(corpus.val, corpus.tokenizer.bos_prefix, T, 64):
        rows = measure_text(model.eval(), torch.tensor([ids]), corpus.tokenizer.vocab_size)
        for position in range(1, len(ids)):
            by_group.setdefault(len(bin(position)) - 3, []).append(rows[:, position])
    names = figure_names(2)
    assert {*stored["figures"]} == {
        name for name in names if attention == "full" or not name.startswith("blocks.0")
    }
    assert stored["positions"] == sum(map(len, by_group.values()))
    for name, figure in stored["figures"].items():
        assert (
            len(figure["mean"]) == len(by_group) == 5
        )  # positions 1, 2 to 3, 4 to 7, 8 to 15, 16 to 23
        for group, rows in by_group.items():
            values = torch.stack(rows)[:, names.index(name)].double()
            assert figure["mean"][group] == pytest.approx(values.mean().item(), abs=1e-6)
            assert figure["std"][group] == pytest.approx(values.std(correction=0).item(), abs=1e-5)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"step": 1, "figures": {}}', '{"step": 1, "figures": {"token_entropy": {"mean": [1.0], "std": []}}}',
     '{"step": 1, "figures": {"token_entropy": {"mean": [NaN], "std": [1.0]}}}', '{"step": 1, "figures": [1]}',
     '{"step": 1, "figures": {"token_entropy": {"mean": 1.0, "std": 1.0}}}', "{"],
)  # fmt: skip
def test_a_damaged_file_is_refused(content, tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(content)
    with pytest.raises(UserError, match=FILE_NAME):
        Reference.read(path)
