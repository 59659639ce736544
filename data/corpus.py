"""From the name of a source to tokens on disk: split, tokenizer, shards, and a cache of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from thinker.data import chat
from thinker.data.shards import FORMAT, SHARD_TOKENS, DamagedShard, ShardWriter, TokenShards
from thinker.data.sources import Document, Source, open_source
from thinker.data.tokenizer import Tokenizer
from thinker.data.tokenizer_factory import check_spec, load_tokenizer, make_tokenizer
from thinker.runtime.errors import FULL_DISK, UserError
from thinker.runtime.files import atomic_write

INDEX_FORMAT = 3  # of corpus.json
BATCH_CHARS = 4 << 20  # text that is tokenized at once, in threads
ABANDONED_SECONDS = 24 * 3600  # a folder still being built after this long belongs to a process that was killed

Labelled = tuple[bool, Document]  # whether it belongs to validation, and the document


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus: its tokenizer, its two splits, a sha256 of all their tokens, and the cache's folder."""

    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    sha256: str
    folder: Path


def prepare_corpus(
    *,
    source: str,
    path: str | None = None,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    streaming: bool = True,
    tokenizer: str | Tokenizer = "bpe:4096",
    assistant_only_loss: bool = False,
    val_fraction: float = 0.05,
    max_documents: int | None = None,
    seed: int = 0,
    cache_dir: str | Path = ".cache",
    progress: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> Corpus:
    """Tokenize a source into memory-mapped shards, or open what an earlier call made of the same.

    Validation is the last val_fraction of a single text; of documents those whose content hash falls below
    val_fraction, so that equal documents never lie in both splits. The tokenizer is trained on the training split
    alone. Documents without text are left out, and said so. Memory does not grow with the corpus.

    Args:
        tokenizer: a tokenizer, or its name: see tokenizer_factory.check_spec.
        assistant_only_loss: in conversations only what the assistant says is a target.
        progress: show bars and messages on standard error.
        shard_tokens: a shard file is closed after the document that reaches this many tokens.
        The other arguments are those of sources.open_source.

    Raises UserError for wrong options, and for text that is missing, unreadable, or too little to split.
    """
    kind = check_spec(tokenizer) if isinstance(tokenizer, str) else "given"
    if not 0 < val_fraction < 1:
        raise UserError(f"data.val_fraction={val_fraction}: it must lie between 0 and 1, for example 0.05")
    opened = open_source(
        source,
        path=path,
        config=config,
        split=split,
        column=column,
        streaming=streaming,
        max_documents=max_documents,
        seed=seed,
    )
    saved = load_tokenizer(tokenizer) if kind == "path" else tokenizer if kind == "given" else None
    if source == "repeated_random" and (saved.kind if saved else kind) not in ("byte", "char"):
        raise UserError(
            f"data.tokenizer={tokenizer}: data.source=repeated_random needs byte or char, one token a character"
        )
    parts = [INDEX_FORMAT, FORMAT, opened.key, saved.content_hash if saved else tokenizer, val_fraction, shard_tokens]
    parts += ["answers"] * assistant_only_loss
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / key
    if folder.exists():
        try:
            return _open(folder)
        except DamagedShard as error:
            print(f"the token cache is damaged and is made again: {error}", file=sys.stderr)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise UserError(f"data.cache_dir={cache_dir}: {folder.parent} cannot be a folder: {error.strerror}") from error
    _remove_abandoned(folder)
    building = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=folder.parent))
    try:
        _build(building, opened, saved or tokenizer, assistant_only_loss, val_fraction, progress, shard_tokens)
        _move(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _open(folder)


def _open(folder: Path) -> Corpus:
    try:
        index = json.loads((folder / "corpus.json").read_bytes())
        tokenizer = load_tokenizer(folder)
        train, val = (TokenShards.open(folder, index[name], tokenizer) for name in ("train", "val"))
        sha256 = str(index["sha256"])
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise DamagedShard(f"{folder}: {error}") from error
    return Corpus(tokenizer, train, val, sha256, folder)


def _move(building: Path, folder: Path) -> None:
    """Put a finished folder in its place, unless another process has just put the same there."""
    if folder.exists():
        try:
            _open(folder)
            return
        except DamagedShard:
            shutil.rmtree(folder)
    try:
        os.rename(building, folder)
    except OSError:
        if not folder.exists():
            raise


def _remove_abandoned(folder: Path) -> None:
    for other in folder.parent.glob(f"{folder.name}.building-*"):
        try:
            abandoned = time.time() - other.stat().st_mtime > ABANDONED_SECONDS
        except FileNotFoundError:
            continue  # its builder has just finished
        if abandoned:
            shutil.rmtree(other, ignore_errors=True)


def _build(
    folder: Path,
    source: Source,
    spec: str | Tokenizer,
    assistant_only_loss: bool,
    val_fraction: float,
    progress: bool,
    shard_tokens: int,
) -> None:
    """Read the source once: what trained the tokenizer (a bounded sample) is kept, and tokenized first."""
    documents = _split(source, val_fraction)
    kept: deque[Labelled] = deque()
    if isinstance(spec, Tokenizer):
        tokenizer = spec
    else:
        if progress and spec.startswith("bpe:"):
            print(f"training {spec} on {source.name} ...", file=sys.stderr)
        tokenizer = make_tokenizer(spec, _training_texts(source, val_fraction, documents, kept))
        if spec.startswith("bpe:") and tokenizer.vocab_size < int(spec[4:]):
            found = f"the vocabulary has {tokenizer.vocab_size} tokens"
            print(f"the text is too short for {spec}: {found}", file=sys.stderr)
    tokenizer.save(folder)
    train, val = (ShardWriter(folder, name, tokenizer, shard_tokens) for name in ("train", "val"))
    everything = itertools.chain((kept.popleft() for _ in range(len(kept))), documents)
    for in_val, document, ids, loss_mask in _encode(tokenizer, everything, source, assistant_only_loss, progress):
        writer = val if in_val else train
        continues = source.whole_text and writer.started
        writer.add(ids, len(document.text.encode()), document.log_prob, continues, loss_mask)
    for name, writer in (("train", train), ("val", val)):
        if not writer.started:
            raise _nothing_in(name, source, val_fraction)
        writer.close()
    digest = hashlib.sha256(train.digest.digest() + val.digest.digest()).hexdigest()
    atomic_write(folder / "corpus.json", json.dumps({"train": train.files, "val": val.files, "sha256": digest}))


def _split(source: Source, val_fraction: float) -> Iterator[Labelled]:
    """Every document (or piece of a single text) that holds text, with whether it belongs to validation."""
    empty = found = 0
    cut = min(max(round((source.n_bytes or 0) * (1 - val_fraction)), 1), (source.n_bytes or 0) - 1)
    position = 0  # in a single text, in bytes
    for document in source.documents():
        data = document.text.encode()
        found += 1
        if not data:
            empty += 1
        elif source.whole_text:
            head = data[: max(cut - position, 0)].decode(errors="ignore")  # a cut within a character lies before it
            tail = document.text[len(head) :]
            position += len(data)
            yield from ((in_val, Document(text)) for in_val, text in ((False, head), (True, tail)) if text)
        else:
            number = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
            yield number < val_fraction * 2**32, document
    if found == empty:
        wanted = "a file with text" if source.whole_text else "at least two documents with text"
        raise UserError(f"data.source={source.name}: the corpus is empty; give it {wanted}")
    if empty:
        print(f"{empty} of {found} documents hold no text and are left out", file=sys.stderr)


def _training_texts(
    source: Source, val_fraction: float, documents: Iterator[Labelled], kept: deque[Labelled]
) -> Iterator[str]:
    """The texts of the training split, for as long as they are asked for; every document that is read is kept."""
    any_text = False
    for in_val, document in documents:
        kept.append((in_val, document))
        if not in_val:
            any_text = True
            yield document.text
    if not any_text:
        raise _nothing_in("train", source, val_fraction)


def _encode(
    tokenizer: Tokenizer, documents: Iterable[Labelled], source: Source, assistant_only_loss: bool, progress: bool
) -> Iterator[tuple[bool, Document, np.ndarray, np.ndarray | None]]:
    n_tokens = 0
    scale = {"total": source.n_bytes, "unit": "B", "unit_scale": True}
    if not source.whole_text:
        scale = {"total": source.n_documents, "unit": " documents"}
    with tqdm(desc="tokenizing", disable=not progress, **scale) as bar:
        for batch in _batches(documents):
            for (in_val, document), (ids, loss_mask) in zip(
                batch, encode_all(tokenizer, [d for _, d in batch], assistant_only_loss)
            ):
                yield in_val, document, ids, loss_mask
                n_tokens += len(ids)
                bar.update(len(document.text.encode()) if source.whole_text else 1)
            bar.set_postfix_str(f"{n_tokens / max(bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s")


def encode_all(
    tokenizer: Tokenizer, documents: list[Document], assistant_only_loss: bool
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The ids of each document, and which of them are to be learned, None for all.

    Raises UserError where documents are no conversations and only answers are wanted, or some are and others not.
    """
    if len({document.messages is None for document in documents}) > 1:
        raise UserError("some rows are conversations and others are text; give them in files of their own")
    if documents[0].messages is None:
        if assistant_only_loss:
            raise UserError(
                "data.assistant_only_loss=true needs conversations: rows with a list of messages (data.column)"
            )
        yield from ((ids, None) for ids in tokenizer.encode_batch([document.text for document in documents]))
        return
    for document in documents:
        ids, answers = chat.encode(tokenizer, document.messages)
        yield ids, answers if assistant_only_loss else np.ones_like(answers)


def _batches(documents: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    batch, size = [], 0
    for labelled in documents:
        batch.append(labelled)
        size += len(labelled[1].text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nothing_in(name: str, source: Source, val_fraction: float) -> UserError:
    change = "raise" if name == "val" else "lower"
    remedy = "give it more text" if source.whole_text else f"{change} data.val_fraction or give it more documents"
    equal = "" if source.whole_text else " (equal documents fall together)"
    return UserError(
        f"data.source={source.name}: with data.val_fraction={val_fraction} nothing falls into the {name} split{equal};"
        f" {remedy}"
    )
