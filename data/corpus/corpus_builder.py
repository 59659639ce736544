"""Build a corpus: read a source, split it, train the tokenizer, write the shards; continue after an
interruption."""

import hashlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from thinker.data.chat.chat_report import ChatReport
from thinker.data.corpus.corpus_index import INDEX, write_index
from thinker.data.corpus.document_filter import DocumentFilter
from thinker.data.corpus.encoding import encode_documents
from thinker.data.corpus.shard_writer import HASH_SUFFIX, ShardWriter
from thinker.data.corpus.tokenizing_progress import TokenizingProgress
from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument, empty_split_error, split_documents
from thinker.data.text.text_sample import sample_texts
from thinker.data.tokenizers import tokenizer_factory
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.text_bytes import loses_text, warn_of_lost_text
from thinker.data.tokenizers.tokenizer import FILE_NAME, Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError


def build_corpus(
    folder: Path,
    source: Source,
    spec: str | Tokenizer,
    *,
    assistant_only_loss: bool,
    val_fraction: float,
    val_tokens: str | None,
    progress: bool,
    shard_tokens: int,
    document_filter: DocumentFilter | None,
) -> None:
    """Write a corpus to a folder, which may contain finished shards from before an interruption.

    The source is read once, and once more each for a filter and for a tokenizer that is trained on
    a long text.
    """
    _remove_unfinished(folder)
    text = _Text(source, val_fraction, document_filter)
    if document_filter is not None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            documents = split_documents(source, val_fraction)
            document_filter.decide(documents, Path(scratch), progress)
        index = folder.with_suffix("") / INDEX
        print(f"{document_filter.summary()}; examples in {index}", file=sys.stderr)

    # The tokenizer.
    documents: Iterable[SplitDocument] = text.documents()
    tokenizer = spec
    if isinstance(spec, str):
        tokenizer = _kept_tokenizer(folder)
        if tokenizer is None:
            tokenizer, documents = _make_tokenizer(spec, text, documents, progress)
    tokenizer.save(folder)

    # The tokens. Documents that an interrupted process has written are read again, and left out.
    if val_tokens is not None:
        documents = text.documents(val_tokens, tokenizer)
    writers = {
        split: ShardWriter(folder, split, tokenizer, shard_tokens, keeps_hashes=True)
        for split in ("train", "val")
    }
    n_written = {"train": 0, "val": 0}
    if not source.whole_text:
        n_written = {split: writer.resume() for split, writer in writers.items()}
    n_before = sum(n_written.values())
    if n_before:
        print(f"continuing after {n_before:,} documents that are tokenized", file=sys.stderr)
    left = _skip(documents, n_written)
    n_texts = n_lost = 0
    n_conversations = {"train": 0, "val": 0}
    report = ChatReport(tokenizer, assistant_only_loss)
    with TokenizingProgress(source, n_before, progress) as bar:
        for (split, document), encoded in encode_documents(tokenizer, left, assistant_only_loss):
            writer = writers[split]
            n_bytes = len(document.text.encode())
            continues = source.whole_text and writer.started
            writer.add_rows(encoded, n_bytes, document.log_prob, continues)
            n_texts += 1
            if document.messages is not None:
                report.add(document, encoded)
                n_conversations[split] += 1
            elif document.encode is not None:
                n_conversations[split] += 1
            elif loses_text(tokenizer, document.text, encoded[0][0]):
                n_lost += 1
            bar.update(document, n_bytes, sum(len(ids) for ids, _ in encoded))
    for n_skipped, n in text.skipped:
        print(f"skipping {n_skipped} of {n} documents without text", file=sys.stderr)
    warn_of_lost_text(n_lost, n_texts)
    for line in report.lines():
        print(line, file=sys.stderr)

    # The index, which makes the corpus complete.
    for split, writer in writers.items():
        if not writer.started and (split == "train" or val_fraction > 0):
            raise text.empty_error(split)
        writer.close()
    for path in folder.glob(f"*{HASH_SUFFIX}"):
        path.unlink()
    train = writers["train"]
    val = writers["val"]
    digest = hashlib.sha256(train.digest.digest() + val.digest.digest()).hexdigest()
    notes = [*report.unread, *report.lines()]
    index = {"train": train.files, "val": val.files, "sha256": digest, "notes": notes}
    if any(n_conversations.values()):
        index["n_conversations"] = n_conversations
    if document_filter is not None:
        index["dropped"] = document_filter.report
    write_index(folder, index)


class _Text:
    """The documents of a source with their splits, which can be read several times."""

    def __init__(
        self, source: Source, val_fraction: float, document_filter: DocumentFilter | None
    ) -> None:
        self.source = source
        self.val_fraction = val_fraction
        self.filter = document_filter
        self.skipped: list[tuple[int, int]] = []  # documents without text, and all; at the end

    def documents(
        self, val_tokens: str | None = None, tokenizer: Tokenizer | None = None
    ) -> Iterator[SplitDocument]:
        """Read the documents, from the start. val_tokens: a file with the validation split, and its
        tokenizer."""
        self.skipped.clear()
        if val_tokens is not None:
            from thinker.data.corpus.llmc_tokens import read_documents

            validation = read_documents(val_tokens, tokenizer)
            return split_documents(self.source, self.val_fraction, validation, self._note_skipped)
        documents = split_documents(self.source, self.val_fraction, on_skipped=self._note_skipped)
        return documents if self.filter is None else self.filter.drop(documents)

    def empty_error(self, split: str) -> UserError:
        """Error for a split without documents."""
        if self.filter is None:
            return empty_split_error(split, self.source, self.val_fraction)
        remedy = f"loosen the rules of {self.filter.config_key}"
        return UserError(f"the {split} split is empty; {self.filter.summary()}; {remedy}")

    def _note_skipped(self, n_skipped: int, n_documents: int) -> None:
        self.skipped.append((n_skipped, n_documents))


def _remove_unfinished(folder: Path) -> None:
    """Keep only finished shards and the tokenizer."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix not in (".tokens", HASH_SUFFIX) and path.name != FILE_NAME:
            path.unlink()


def _kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of the finished shards in a folder; None without any. Removes shards whose
    tokenizer is damaged."""
    shards = list(folder.glob("*.tokens"))
    try:
        return load_tokenizer(folder) if shards else None
    except UserError:
        for shard in shards:
            shard.unlink()
        return None


def _make_tokenizer(
    spec: str, text: _Text, documents: Iterator[SplitDocument], progress: bool
) -> tuple[Tokenizer, Iterable[SplitDocument]]:
    """Make the tokenizer of a corpus, from a sample of its documents if it is trained.

    Returns it and all documents: those that were read for the sample, if they are few, are not read
    again.
    """
    is_bpe = spec.startswith("bpe:")
    if not is_bpe and not spec.startswith("char"):
        return make_tokenizer(spec, []), documents
    texts, read = sample_texts(text.source, documents, tokenizer_factory.SAMPLE_BYTES, progress)
    if not texts:
        raise text.empty_error("train")
    if progress and is_bpe:
        print(f"training {spec} on {text.source.name} ...", file=sys.stderr)
    tokenizer = make_tokenizer(spec, texts)
    if is_bpe and tokenizer.vocab_size < int(spec.removeprefix("bpe:")):
        size = tokenizer.vocab_size
        print(
            f"the text is too short for {spec}; the vocabulary has {size} tokens", file=sys.stderr
        )
    if read is None:
        return tokenizer, text.documents()
    return tokenizer, itertools.chain(read, documents)


def _skip(documents: Iterable[SplitDocument], n_written: dict[str, int]) -> Iterator[SplitDocument]:
    """Leave out the first documents of each split, which are in finished shards."""
    left = dict(n_written)
    for split, document in documents:
        if left[split] > 0:
            left[split] -= 1
        else:
            yield split, document
