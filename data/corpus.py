"""Prepare a corpus: read a source, split it, tokenize it into shards, and cache them."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinker.data.cleaning import Cleaning, CleaningRules
from thinker.data.corpus_cache import INDEX, building_folder, publish, read_index, write_index
from thinker.data.document import MissingData
from thinker.data.encoding import encode_documents
from thinker.data.llmc_tokens import read_documents
from thinker.data.shards import FORMAT, SHARD_TOKENS, DamagedShard, ShardWriter, TokenShards
from thinker.data.sources import Source, open_source, stamps
from thinker.data.split import SplitDocument, empty_split_error, split_documents
from thinker.data.text_bytes import loses_text, warn_of_lost_text
from thinker.data.tokenizer import FILE_NAME, Tokenizer
from thinker.data.tokenizer_factory import check_spec, load_tokenizer, make_tokenizer
from thinker.data.tokenizing_progress import TokenizingProgress
from thinker.runtime.errors import UserError
from thinker.runtime.files import make_folder
from thinker.runtime.reading import read_json

INDEX_FORMAT = 4  # format of corpus.json
CLEANING_FORMAT = 1  # changes with the way to find what is dropped


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus: tokenizer, both splits, the sha256 of their tokens, and the folder in the cache.

    The sha256 (of tokens and loss masks) and the tokenizer's content_hash identify a corpus in the cache and in runs.
    A mixture (mixed_corpus.py) has the shards of its parts, one after the other.
    """

    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    sha256: str = field(repr=False)
    folder: Path
    parts: Mapping[str, "Corpus"] = field(default_factory=dict)  # the sources of a mixture, by name


def prepare_corpus(
    *, source: str, tokenizer: str | Tokenizer = "bpe:4096", assistant_only_loss: bool = False,
    val_fraction: float = 0.05, cache_dir: str | Path = ".cache", progress: bool = True,
    shard_tokens: int = SHARD_TOKENS, val_tokens: str | None = None, clean: CleaningRules | None = None,
    **source_options: Any,
) -> Corpus:  # fmt: skip
    """Tokenize a source into shards on disk, or open the shards of an earlier call with the same options.

    The validation split is the last val_fraction of a single text, or the documents whose content hash is below
    val_fraction, so equal documents are always in the same split. The tokenizer is trained only on the training split.
    With val_fraction=0, it is empty. Documents without text are skipped with a message. Memory does not grow with the
    corpus.

    Args:
        tokenizer: a tokenizer or its name (see tokenizer_factory.check_spec).
        assistant_only_loss: use only the assistant's messages of conversations as targets.
        progress: print bars and messages to standard error.
        shard_tokens: a shard is closed after the document that reaches this many tokens.
        val_tokens: a file of tokens (llmc_tokens.py) whose documents form the validation split. Equal documents of the
            source are left out.
        clean: which documents to drop; the source is then read once more. corpus.json counts them.
        source_options: passed to sources.open_source.

    Raises UserError for invalid options, and for text that is missing, unreadable or too short to split.
    """
    kind = check_spec(tokenizer) if isinstance(tokenizer, str) else tokenizer.kind
    if not 0 <= val_fraction < 1:
        raise UserError(f"data.val_fraction={val_fraction}: use a fraction between 0 and 1, for example 0.05")
    opened = open_source(source, **source_options)
    if val_tokens is not None and (kind in ("bpe", "char", "byte") or opened.whole_text):
        needs = "data.tokenizer=tiktoken:gpt2 or the path of a tokenizer, and a source other than a single text file"
        raise UserError(f"data.val_tokens needs {needs}")
    if clean is not None and opened.whole_text:
        raise UserError("data.clean has no effect on a single text file; remove it, or use a folder of files")
    if clean is not None and val_tokens is not None:
        raise UserError("data.clean cannot be combined with data.val_tokens; remove one of them")
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
    parts += [] if clean is None else [CLEANING_FORMAT, asdict(clean)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / key
    try:
        if folder.exists():
            return _open(folder)
    except DamagedShard as error:
        print(f"rebuilding the damaged token cache: {error}", file=sys.stderr)
        shutil.rmtree(folder)
    make_folder(folder.parent, "data.cache_dir")
    with building_folder(folder) as building:
        if not folder.exists():  # another process may just have finished it
            _build(building, opened, spec, assistant_only_loss, val_fraction, val_tokens, progress, shard_tokens, clean)
            publish(building, folder)
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


def _build(
    folder: Path, source: Source, spec: str | Tokenizer, assistant_only_loss: bool, val_fraction: float,
    val_tokens: str | None, progress: bool, shard_tokens: int, clean: CleaningRules | None,
) -> None:  # fmt: skip
    """Write a corpus to a folder, which may contain finished shards from before an interruption.

    Without these, the source is read once; text for training the tokenizer stays in memory.
    """
    for path in folder.iterdir():  # remove what is unfinished
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".tokens" and path.name != FILE_NAME:
            path.unlink()
    cleaning = None if clean is None else Cleaning(clean)
    if cleaning is not None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            cleaning.find(split_documents(source, val_fraction, warn=False), Path(scratch), progress)
        print(f"{cleaning.summary()}; examples in {folder.with_suffix('') / INDEX}", file=sys.stderr)
    documents = split_documents(source, val_fraction)
    documents = documents if cleaning is None else cleaning.apply(documents)
    sample: list[SplitDocument] = []  # read for the tokenizer, from both splits: about SAMPLE_BYTES at most

    def training_texts() -> Iterator[str]:
        for split, document in documents:
            sample.append((split, document))
            if split == "train":
                yield document.text
        if not any(split == "train" for split, _ in sample):
            raise empty_split_error("train", source, val_fraction)

    tokenizer = spec
    if isinstance(spec, str) and list(folder.glob("*.tokens")):
        tokenizer = load_tokenizer(folder)
    elif isinstance(spec, str):
        if progress and spec.startswith("bpe:"):
            print(f"training {spec} on {source.name} ...", file=sys.stderr)
        tokenizer = make_tokenizer(spec, training_texts())
        if spec.startswith("bpe:") and (size := tokenizer.vocab_size) < int(spec[4:]):
            print(f"the text is too short for {spec}; the vocabulary has {size} tokens", file=sys.stderr)
    tokenizer.save(folder)
    if val_tokens is not None:
        documents = split_documents(source, val_fraction, read_documents(val_tokens, tokenizer))
    writers = {split: ShardWriter(folder, split, tokenizer, shard_tokens) for split in ("train", "val")}
    n_written = {split: 0 if source.whole_text else writer.resume() for split, writer in writers.items()}
    if any(n_written.values()):
        print(f"continuing after {sum(n_written.values()):,} documents that are tokenized", file=sys.stderr)
    n_texts = n_lost = 0
    chain = _skip(itertools.chain(sample, documents), n_written)
    with TokenizingProgress(source, sum(n_written.values()), progress) as bar:
        for (split, document), (ids, loss_mask) in encode_documents(tokenizer, chain, assistant_only_loss):
            n_bytes = len(document.text.encode())
            continues = source.whole_text and writers[split].started
            writers[split].add(ids, n_bytes, document.log_prob, continues, loss_mask)
            n_texts += 1
            n_lost += document.messages is None and loses_text(tokenizer, document.text, ids)
            bar.update(document, n_bytes, len(ids))
    warn_of_lost_text(n_lost, n_texts)
    for split, writer in writers.items():
        if not writer.started and (split == "train" or val_fraction > 0):
            raise empty_split_error(split, source, val_fraction)
        writer.close()
    train, val = writers.values()
    digest = hashlib.sha256(train.digest.digest() + val.digest.digest()).hexdigest()
    dropped = {} if cleaning is None else {"dropped": cleaning.report}
    write_index(folder, {"train": train.files, "val": val.files, "sha256": digest, **dropped})


def _skip(documents: Iterable[SplitDocument], n_written: dict[str, int]) -> Iterator[SplitDocument]:
    """Leave out the first documents of each split, which are in finished shards."""
    left = dict(n_written)
    for split, document in documents:
        if left[split] > 0:
            left[split] -= 1
        else:
            yield split, document
