"""Folders of tokens that another machine has prepared (data.source=tokens)."""

import json
import shutil

import pytest
from conftest import ROOT, run_script

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError

TEXTS = [f"story {i} of é\n" for i in range(300)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=["byte", "bpe:300"])
def prepared(request, tmp_path):
    """A corpus, and a copy of its folder."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    corpus = prepare_corpus(
        source="jsonl",
        path=path,
        tokenizer=request.param,
        val_fraction=0.2,
        cache_dir=tmp_path / "cache",
        progress=False,
    )
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    return corpus, copy


def open_copy(copy, **options):
    defaults = {"source": "tokens", "path": str(copy), "tokenizer": str(copy)}
    return prepare_corpus(**{**defaults, **options})


def test_a_copied_folder_is_the_same_corpus(prepared, tmp_path):
    corpus, copy = prepared
    (tmp_path / "a.jsonl").unlink()
    shutil.rmtree(tmp_path / "cache")
    opened = open_copy(copy, cache_dir=tmp_path / "none")
    assert opened.sha256 == corpus.sha256
    assert opened.tokenizer.content_hash == corpus.tokenizer.content_hash
    assert (opened.train.n_documents, opened.val.n_documents) == (
        corpus.train.n_documents,
        corpus.val.n_documents,
    )
    assert not (tmp_path / "none").exists()  # nothing is tokenized
    again = open_copy(copy, tokenizer=corpus.tokenizer)
    assert again.sha256 == corpus.sha256


def test_its_documents_are_the_texts(prepared):
    _, copy = prepared
    source = open_source("tokens", path=str(copy))
    documents = list(source.documents())
    assert sorted(document.text for document in documents) == sorted(TEXTS)
    assert [document.number for document in documents] == list(range(300))
    for start in (1, 200, 299, 300):
        rest = list(source.documents((start, None)))
        assert [each.text for each in rest] == [each.text for each in documents[start:]]


def test_mistakes(prepared, tmp_path):
    _, copy = prepared
    cases = {
        "has no corpus.json": {"path": str(tmp_path)},
        f"set data.tokenizer={copy}": {"tokenizer": "bpe:400"},
        "data.max_documents has no effect": {"max_documents": 3},
        "data.buffer_tokens has no effect": {"first_bytes": 3},
        "data.val_tokens has no effect": {"val_tokens": "val.bin"},
        "data.assistant_only_loss has no effect": {"assistant_only_loss": True},
        "data.column has no effect": {"column": "text"},
    }
    for message, options in cases.items():
        with pytest.raises(UserError, match=message):
            open_copy(copy, **options)
    [shard] = copy.glob("val-*.tokens")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match="is damaged: .* does not match its sha256; copy it again"):
        open_copy(copy)


def test_conversations_are_trained_but_not_read_as_text(tmp_path):
    rows = []
    for i in range(40):
        words = [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": f"b {i}"}]
        rows.append({"messages": words})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "bytes").mkdir()
    make_tokenizer("byte", []).save(tmp_path / "bytes")
    tiny = ["model.d_model=32", "model.n_layers=1", "data.seq_len=16", "train.device=cpu"]
    tiny += ["data.val_fraction=0.5", "train.precision=fp32", "data.max_documents=null"]
    train = [ROOT / "train.py", ROOT / "tests" / "fixtures" / "base.yaml", *tiny]
    rows_data = ["data.source=jsonl", f"data.path={path}", "data.tokenizer=bytes"]
    rows_data += ["data.chat_template=chat.jinja", "data.cache_dir=cache"]
    done = run_script(*train, *rows_data, "run.dir=first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "cache" / "tokens").glob("*")
    shutil.move(folder, tmp_path / "copy")
    tokens = ["data.source=tokens", "data.path=copy", "data.tokenizer=copy"]
    done = run_script(*train, *tokens, "run.dir=second", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = []
    for run in ("first", "second"):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        values = map(json.loads, lines)
        losses.append([line["train_loss"] for line in values if "train_loss" in line])
    assert losses[0] == losses[1]
    source = open_source("tokens", path=str(tmp_path / "copy"))
    with pytest.raises(UserError, match="has conversations"):
        list(source.documents())
