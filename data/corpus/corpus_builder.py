"""Write the shards of a corpus: clean, train the tokenizer, tokenize, continue after an interruption."""

import hashlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from thinker.data.corpus.corpus_cache import INDEX, write_index
from thinker.data.corpus.encoding import encode_documents
from thinker.data.corpus.llmc_tokens import read_documents
from thinker.data.corpus.shard_writer import HASH_SUFFIX, ShardWriter
from thinker.data.corpus.tokenizing_progress import TokenizingProgress
from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument, empty_split_error, split_documents
from thinker.data.text.text_sample import sample_texts
from thinker.data.tokenizers import tokenizer_factory
from thinker.data.tokenizers.text_bytes import loses_text, warn_of_lost_text
from thinker.data.tokenizers.tokenizer import FILE_NAME, Tokenizer
from thinker.data.tokenizers.tokenizer_factory import load_tokenizer, make_tokenizer
from thinker.features.cleaning.cleaning import Cleaning, CleaningRules
from thinker.runtime.errors import UserError


def build_corpus(
    folder: Path, source: Source, spec: str | Tokenizer, assistant_only_loss: bool, val_fraction: float,
    val_tokens: str | None, progress: bool, shard_tokens: int, clean: CleaningRules | None,
) -> None:  # fmt: skip
    """Write a corpus to a folder, which may contain finished shards from before an interruption.

    The source is read once, and once more each for cleaning and for a tokenizer that is trained on a long text.
    """
    for path in folder.iterdir():  # remove what is unfinished
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix not in (".tokens", HASH_SUFFIX) and path.name != FILE_NAME:
            path.unlink()
    cleaning = None if clean is None else Cleaning(clean)
    if cleaning is not None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            cleaning.find(split_documents(source, val_fraction), Path(scratch), progress)
        print(
            f"{cleaning.summary()}; examples in {folder.with_suffix('') / INDEX}", file=sys.stderr
        )

    skipped: list[tuple[int, int]] = []

    def note_skipped(n_skipped: int, n_documents: int) -> None:
        skipped.append((n_skipped, n_documents))

    def open_documents() -> Iterator[SplitDocument]:
        skipped.clear()
        documents = split_documents(source, val_fraction, on_skipped=note_skipped)
        return documents if cleaning is None else cleaning.apply(documents)

    def empty_error(split: str) -> UserError:
        if cleaning is None:
            return empty_split_error(split, source, val_fraction)
        return UserError(
            f"the {split} split is empty; {cleaning.summary()}; loosen the rules of data.clean"
        )

    documents = open_documents()
    read: list[SplitDocument] | None = []  # for the tokenizer, if that was not too long
    tokenizer = spec
    if isinstance(spec, str) and (kept := _kept_tokenizer(folder)) is not None:
        tokenizer = kept
    elif isinstance(spec, str):
        texts: list[str] = []
        if spec.startswith(("bpe:", "char")):
            texts, read = sample_texts(source, documents, tokenizer_factory.SAMPLE_BYTES, progress)
            if not texts:
                raise empty_error("train")
            if progress and spec.startswith("bpe:"):
                print(f"training {spec} on {source.name} ...", file=sys.stderr)
            if read is None:
                read, documents = [], open_documents()
        tokenizer = make_tokenizer(spec, texts)
        if spec.startswith("bpe:") and (size := tokenizer.vocab_size) < int(spec[4:]):
            print(
                f"the text is too short for {spec}; the vocabulary has {size} tokens",
                file=sys.stderr,
            )
    tokenizer.save(folder)
    if val_tokens is not None:
        skipped.clear()
        documents = split_documents(
            source, val_fraction, read_documents(val_tokens, tokenizer), note_skipped
        )
    writers = {
        split: ShardWriter(folder, split, tokenizer, shard_tokens, True)
        for split in ("train", "val")
    }
    n_written = {
        split: 0 if source.whole_text else writer.resume() for split, writer in writers.items()
    }
    if any(n_written.values()):
        print(
            f"continuing after {sum(n_written.values()):,} documents that are tokenized",
            file=sys.stderr,
        )
    n_texts = n_lost = 0
    chain = _skip(itertools.chain(read, documents), n_written)
    with TokenizingProgress(source, sum(n_written.values()), progress) as bar:
        for (split, document), (ids, loss_mask) in encode_documents(
            tokenizer, chain, assistant_only_loss
        ):
            n_bytes = len(document.text.encode())
            continues = source.whole_text and writers[split].started
            writers[split].add(ids, n_bytes, document.log_prob, continues, loss_mask)
            n_texts += 1
            n_lost += document.messages is None and loses_text(tokenizer, document.text, ids)
            bar.update(document, n_bytes, len(ids))
    for n_skipped, n in skipped:
        print(f"skipping {n_skipped} of {n} documents without text", file=sys.stderr)
    warn_of_lost_text(n_lost, n_texts)
    for split, writer in writers.items():
        if not writer.started and (split == "train" or val_fraction > 0):
            raise empty_error(split)
        writer.close()
    for path in folder.glob(f"*{HASH_SUFFIX}"):
        path.unlink()
    train, val = writers.values()
    digest = hashlib.sha256(train.digest.digest() + val.digest.digest()).hexdigest()
    dropped = {} if cleaning is None else {"dropped": cleaning.report}
    write_index(folder, {"train": train.files, "val": val.files, "sha256": digest, **dropped})


def _kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of the finished shards in a folder; None without any. Removes shards whose tokenizer is damaged."""
    shards = list(folder.glob("*.tokens"))
    try:
        return load_tokenizer(folder) if shards else None
    except UserError:
        for shard in shards:
            shard.unlink()
        return None


def _skip(documents: Iterable[SplitDocument], n_written: dict[str, int]) -> Iterator[SplitDocument]:
    """Leave out the first documents of each split, which are in finished shards."""
    left = dict(n_written)
    for split, document in documents:
        if left[split] > 0:
            left[split] -= 1
        else:
            yield split, document
