"""Prepare a corpus: read a source, split it, tokenize it into shards, and cache them."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from thinker.data import chat
from thinker.data.corpus_cache import building_folder, read_index, write_index
from thinker.data.llmc_tokens import read_documents
from thinker.data.shards import FORMAT, SHARD_TOKENS, DamagedShard, ShardWriter, TokenShards
from thinker.data.sources import Document, MissingData, Source, open_source, stamps
from thinker.data.split import SplitDocument, empty_split_error, split_documents
from thinker.data.text_bytes import loses_text, warn_of_lost_text
from thinker.data.tokenizer import Tokenizer
from thinker.data.tokenizer_factory import check_spec, load_tokenizer, make_tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.files import make_folder
from thinker.runtime.reading import read_json

INDEX_FORMAT = 4  # format of corpus.json
BATCH_CHARS = 4 << 20  # characters tokenized together, in threads


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus: tokenizer, both splits, the sha256 of their tokens, and the folder in the cache.

    The sha256 (of tokens and loss masks) and the tokenizer's content_hash identify a corpus in the cache and in runs.
    """

    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    sha256: str = field(repr=False)
    folder: Path


def prepare_corpus(
    *, source: str, tokenizer: str | Tokenizer = "bpe:4096", assistant_only_loss: bool = False,
    val_fraction: float = 0.05, cache_dir: str | Path = ".cache", progress: bool = True,
    shard_tokens: int = SHARD_TOKENS, val_tokens: str | None = None, **source_options: Any,
) -> Corpus:  # fmt: skip
    """Tokenize a source into shards on disk, or open the shards of an earlier call with the same options.

    The validation split is the last val_fraction of a single text, or the documents whose content hash is below
    val_fraction, so equal documents are always in the same split. The tokenizer is trained only on the training split.
    Documents without text are skipped with a message. Memory does not grow with the corpus.

    Args:
        tokenizer: a tokenizer or its name (see tokenizer_factory.check_spec).
        assistant_only_loss: use only the assistant's messages of conversations as targets.
        progress: print bars and messages to standard error.
        shard_tokens: a shard is closed after the document that reaches this many tokens.
        val_tokens: a file of tokens (llmc_tokens.py) whose documents form the validation split. Equal documents of the
            source are left out.
        source_options: passed to sources.open_source.

    Raises UserError for invalid options, and for text that is missing, unreadable or too short to split.
    """
    kind = check_spec(tokenizer) if isinstance(tokenizer, str) else tokenizer.kind
    if not 0 < val_fraction < 1:
        raise UserError(f"data.val_fraction={val_fraction}: use a fraction between 0 and 1, for example 0.05")
    opened = open_source(source, **source_options)
    if val_tokens is not None and (kind in ("bpe", "char", "byte") or opened.whole_text):
        needs = "data.tokenizer=tiktoken:gpt2 or the path of a tokenizer, and a source other than a single text file"
        raise UserError(f"data.val_tokens needs {needs}")
    if val_tokens is not None and not os.path.isfile(val_tokens):
        raise MissingData(f"data.val_tokens={val_tokens} is not a file; set the path of a token file")
    spec, tokenizer_key = (load_tokenizer(tokenizer) if kind == "path" else tokenizer), tokenizer
    if isinstance(spec, Tokenizer):
        kind, tokenizer_key = spec.kind, spec.content_hash
    if source == "repeated_random" and kind not in ("byte", "char"):
        raise UserError(f"data.tokenizer={tokenizer}: use byte or char with data.source=repeated_random")
    parts = [INDEX_FORMAT, FORMAT, opened.key, tokenizer_key, val_fraction, shard_tokens]
    parts += ["assistant_only_loss"] if assistant_only_loss else []
    parts += [] if val_tokens is None else [stamps([val_tokens])]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / key
    try:
        if folder.exists():
            return _open(folder)
    except DamagedShard as error:
        print(f"rebuilding the damaged token cache: {error}", file=sys.stderr)
    make_folder(folder.parent, "data.cache_dir")
    with building_folder(folder) as building:
        _build(building, opened, spec, assistant_only_loss, val_fraction, val_tokens, progress, shard_tokens)
        _publish(building, folder)
    return _open(folder)


def find_corpus(sha256: str, tokenizer_hash: str, cache_dir: str | Path) -> Corpus | None:
    """Find an undamaged corpus in the cache by its identity; None if there is none."""
    for index in sorted((Path(cache_dir) / "tokens").glob("*/corpus.json")):
        with contextlib.suppress(DamagedShard):
            if read_json(index, DamagedShard).get("sha256") == sha256:
                corpus = _open(index.parent)
                if corpus.tokenizer.content_hash == tokenizer_hash:
                    return corpus
    return None


def _open(folder: Path) -> Corpus:
    try:
        index = read_index(folder)
        tokenizer = load_tokenizer(folder)
        train, val = (TokenShards.open(folder, index[name], tokenizer) for name in ("train", "val"))
        return Corpus(tokenizer, train, val, str(index["sha256"]), folder)
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise DamagedShard(f"{folder}: {error}") from error


def _publish(building: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, unless another process has already published it."""
    try:
        if folder.exists():
            _open(folder)
            return
    except DamagedShard:
        shutil.rmtree(folder)
    try:
        os.rename(building, folder)
    except OSError:
        if not folder.exists():
            raise


def _build(
    folder: Path, source: Source, spec: str | Tokenizer, assistant_only_loss: bool, val_fraction: float,
    val_tokens: str | None, progress: bool, shard_tokens: int,
) -> None:  # fmt: skip
    """Write a corpus to an empty folder. The source is read once; text for training the tokenizer stays in memory."""
    documents = split_documents(source, val_fraction)
    sample: list[SplitDocument] = []  # read for the tokenizer, from both splits: about SAMPLE_BYTES at most

    def training_texts() -> Iterator[str]:
        for split, document in documents:
            sample.append((split, document))
            if split == "train":
                yield document.text
        if not any(split == "train" for split, _ in sample):
            raise empty_split_error("train", source, val_fraction)

    tokenizer = spec
    if isinstance(spec, str):
        if progress and spec.startswith("bpe:"):
            print(f"training {spec} on {source.name} ...", file=sys.stderr)
        tokenizer = make_tokenizer(spec, training_texts())
        if spec.startswith("bpe:") and (size := tokenizer.vocab_size) < int(spec[4:]):
            print(f"the text is too short for {spec}; the vocabulary has {size} tokens", file=sys.stderr)
    tokenizer.save(folder)
    if val_tokens is not None:
        documents = split_documents(source, val_fraction, read_documents(val_tokens, tokenizer))
    writers = {split: ShardWriter(folder, split, tokenizer, shard_tokens) for split in ("train", "val")}
    n_tokens = n_texts = n_lost = 0
    total, unit = (source.n_bytes, "B") if source.whole_text else (source.n_documents, " documents")
    with tqdm(desc="tokenizing", disable=not progress, total=total, unit=unit, unit_scale=source.whole_text) as bar:
        for batch in _batches(itertools.chain(sample, documents)):
            encoded = encode_all(tokenizer, [document for _, document in batch], assistant_only_loss)
            for (split, document), (ids, loss_mask) in zip(batch, encoded):
                n_bytes = len(document.text.encode())
                continues = source.whole_text and writers[split].started
                writers[split].add(ids, n_bytes, document.log_prob, continues, loss_mask)
                n_tokens += len(ids)
                n_texts += 1
                n_lost += document.messages is None and loses_text(tokenizer, document.text, ids)
                bar.update(n_bytes if source.whole_text else 1)
            bar.set_postfix_str(f"{n_tokens / max(bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s")
    warn_of_lost_text(n_lost, n_texts)
    for split, writer in writers.items():
        if not writer.started:
            raise empty_split_error(split, source, val_fraction)
        writer.close()
    train, val = writers.values()
    digest = hashlib.sha256(train.digest.digest() + val.digest.digest()).hexdigest()
    write_index(folder, {"train": train.files, "val": val.files, "sha256": digest})


def encode_all(
    tokenizer: Tokenizer, documents: list[Document], assistant_only_loss: bool
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Encode documents to (ids, loss mask or None for all). Raises UserError for mixed kinds of rows."""
    if len({document.messages is None for document in documents}) > 1:
        raise UserError("the rows mix conversations and text; put them in separate files")
    if documents[0].messages is None:
        if assistant_only_loss:
            raise UserError("data.assistant_only_loss=true needs conversations; name its column in data.column")
        yield from ((ids, None) for ids in tokenizer.encode_batch([document.text for document in documents]))
        return
    reads_calls = tokenizer.chat_template is None or "tool_calls" in tokenizer.chat_template
    for document in documents:
        if not reads_calls and any("tool_calls" in m and not m.get("content") for m in document.messages):
            raise UserError(f"{document.where}: a message has only tool_calls, which the chat template ignores")
        ids, answers = chat.encode(tokenizer, document.messages)
        yield ids, answers if assistant_only_loss else np.ones_like(answers)


def _batches(documents: Iterable[SplitDocument]) -> Iterator[list[SplitDocument]]:
    """Group documents into lists of about BATCH_CHARS characters."""
    batch, size = [], 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
