"""What the data of a config looks like: its sources, the lengths of its documents, and the
sequences of a step."""

import codecs
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.corpus_index import INDEX
from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure, plain_text, save_figure
from thinker.runtime.process.progress import Progress
from thinker.training.config.config import Config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.initial_model import load_initial_model
from thinker.training.settings.resolve import resolve_open_keys, resolve_precision

CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {
    127: "␡"
}
MAX_STEP = 1 << 32  # without train.max_steps
COMPARED_DOCUMENTS = 200_000  # per source, to count equal ones


@dataclass(frozen=True)
class SourceReport:
    """A source in numbers. Lengths are those of the documents of the training split, in tokens with
    the BOS token."""

    name: str
    train_documents: int
    val_documents: int
    train_tokens: int
    val_tokens: int
    val_share: float  # of the bytes
    bytes_per_token: float
    lengths: np.ndarray  # (n,) int64
    share_longer: float  # of the documents, longer than a sequence
    share_padding: float  # of the positions of the training sequences
    n_equal: int  # documents that equal an earlier one, among the first COMPARED_DOCUMENTS
    dropped: dict[str, int]  # by cleaning

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the lengths as percentiles."""
        names = ("min", "p10", "median", "p90", "max")
        percentiles = np.percentile(self.lengths, [0, 10, 50, 90, 100]).round().astype(int)
        return vars(self) | {"lengths": dict(zip(names, percentiles.tolist()))}


@dataclass(frozen=True)
class Sequence:
    """A training sequence as text."""

    source: str
    sample_id: int
    epoch: float  # how often its source was read before this step
    # Text; number of the document; "" or "bos", "masked" (no target), "padding".
    tokens: list[tuple[str, int, str]]


@dataclass(frozen=True)
class DataReport:
    """The data of a config: its sources, and sequences of one step."""

    sources: list[SourceReport]
    seq_len: int
    step: int
    sequences: list[Sequence]


def make_data_report(config: Config, step: int, n_sequences: int) -> DataReport:
    """Prepare the corpus of a config, as training does, and describe it. `step` counts from 0."""
    device = choose_device(config.train.device)
    config = resolve_open_keys(config, device, resolve_precision(config, device))
    config, _, tokenizer = load_initial_model(config)
    corpus = prepare_training_data(config, tokenizer)
    data = config.data
    prefix = config.thinker_config(corpus.tokenizer.vocab_size).prefix
    max_step = config.train.max_steps or MAX_STEP
    if step >= max_step:
        raise UserError(f"--step {step} is not below {max_step}, the number of steps of the run")
    parts = corpus.parts or {data.source: corpus}
    sources = [_source_report(name, part, config) for name, part in parts.items()]
    with tempfile.TemporaryDirectory() as folder:
        loader = open_loader(config, corpus, prefix, Path(folder))
        loader.start(0)
        try:
            sequences = list(_sequences(corpus, loader, list(parts), step, n_sequences))
        finally:
            loader.close()
    return DataReport(sources, data.seq_len, step, sequences)


def table(report: DataReport) -> list[list[str]]:
    """Rows of cells: a name, and a value per source. The first row has the names of the sources."""
    rows: dict[str, list[str]] = {"": []}
    for source in report.sources:
        lengths = source.to_dict()["lengths"]
        equal = f"equal to an earlier one, of the first {COMPARED_DOCUMENTS:,}"
        cells = [
            ("", source.name),
            ("documents, training", f"{source.train_documents:,}"),
            ("documents, validation", f"{source.val_documents:,}"),
            ("tokens, training", f"{source.train_tokens:,}"),
            ("tokens, validation", f"{source.val_tokens:,}"),
            ("held out for validation", f"{source.val_share:.1%}"),
            ("bytes per token", f"{source.bytes_per_token:.2f}"),
            ("document length in tokens, median", f"{lengths['median']:,}"),
            ("document length, 10% to 90%", f"{lengths['p10']:,} to {lengths['p90']:,}"),
            ("longest document", f"{lengths['max']:,}"),
            (f"longer than a sequence of {report.seq_len}", f"{source.share_longer:.1%}"),
            ("padding", f"{source.share_padding:.1%}"),
            (equal, f"{source.n_equal:,}"),
            ("dropped by cleaning", f"{sum(source.dropped.values()):,}"),
        ]
        for name, value in cells:
            rows.setdefault(name, []).append(value)
    return [[name, *cells] for name, cells in rows.items()]


def format_sources(report: DataReport) -> str:
    """The table as text."""
    rows = table(report)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
        line = name.ljust(widths[0])
        for cell, width in zip(cells, widths[1:]):
            line += "  " + cell.rjust(width)
        lines.append(line.rstrip())
    return "\n".join(lines)


def plot_lengths(report: DataReport, path: Path) -> None:
    """Plot how the lengths of the documents are distributed, by source."""
    figure, (axes,) = new_figure(8, 4.5)
    longest = max(int(source.lengths.max()) for source in report.sources)
    bins = np.geomspace(1, longest + 1, 50)
    for source in report.sources:
        weights = np.full(len(source.lengths), 1 / len(source.lengths))
        style = {"histtype": "step", "linewidth": 1.8, "label": plain_text(source.name)}
        axes.hist(source.lengths, bins, weights=weights, **style)
    label = f"a sequence ({report.seq_len})"
    axes.axvline(report.seq_len, color=GREY, linestyle="--", linewidth=1.2, label=label)
    axes.set(xscale="log", xlabel="tokens per document", ylabel="share of the documents")
    axes.legend(frameon=False)
    save_figure(figure, path)


def _source_report(name: str, part: Corpus, config: Config) -> SourceReport:
    train = part.train
    val = part.val
    seq_len = config.data.seq_len
    lengths = np.concatenate([np.diff(shard.offsets[:]) for shard in train.shards])
    windows = PackedDataset(train, seq_len, config.data.packing)
    n_targets = train.n_tokens - len(train.shards)
    index = json.loads((part.folder / INDEX).read_text(encoding="utf-8"))
    dropped = index.get("dropped", {})
    return SourceReport(
        name=name,
        train_documents=train.n_documents,
        val_documents=val.n_documents,
        train_tokens=train.n_tokens,
        val_tokens=val.n_tokens,
        val_share=val.n_bytes / (train.n_bytes + val.n_bytes),
        bytes_per_token=(train.n_bytes + val.n_bytes) / (train.n_tokens + val.n_tokens),
        lengths=lengths,
        share_longer=float((lengths > seq_len).mean()),
        share_padding=1 - n_targets / (len(windows) * seq_len),
        n_equal=_count_equal(train),
        dropped={reason: entry["count"] for reason, entry in dropped.items()},
    )


def _count_equal(tokens: TokenShards) -> int:
    """How many documents equal an earlier one, among the first COMPARED_DOCUMENTS."""
    seen: set[bytes] = set()
    n = 0
    total = min(tokens.n_documents, COMPARED_DOCUMENTS)
    with Progress(desc="comparing documents", total=total, leave=False, delay=1) as bar:
        for shard in tokens.shards:
            for start, end in pairwise(shard.offsets[: COMPARED_DOCUMENTS - n + 1].tolist()):
                document = shard.tokens[start:end].tobytes()
                seen.add(hashlib.blake2b(document, digest_size=12).digest())
                n += 1
                bar.update()
    return n - len(seen)


def _sequences(
    corpus: Corpus, loader: BatchLoader, names: list[str], step: int, n: int
) -> Iterator[Sequence]:
    inputs, targets = loader.batch(step, slice(min(n, loader.batch_size)))  # (n, T) each
    epochs = loader.epochs(step)
    for sample, ids, wanted in zip(loader.samples(step), inputs.tolist(), targets.tolist()):
        tokens = _describe_tokens(corpus.tokenizer, ids, wanted)
        yield Sequence(names[sample.source], sample.index, epochs[sample.source], tokens)


def _describe_tokens(
    tokenizer: Tokenizer, ids: list[int], targets: list[int]
) -> list[tuple[str, int, str]]:
    """The tokens of a sequence, as in Sequence."""
    bos_id = tokenizer.bos_id
    n_used = _used_length(ids, targets, bos_id)
    tokens = []
    document = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i, (token, target) in enumerate(zip(ids, targets)):
        kind = ""
        if token == bos_id:
            document += 1
        if i >= n_used:
            kind = "padding"
        elif token == bos_id:
            kind = "bos"
            decoder.reset()
        elif target == IGNORE_INDEX:
            kind = "masked"
        text = decoder.decode(tokenizer.token_bytes(token))  # a character may have several tokens
        tokens.append((text.translate(CONTROL_PICTURES), document, kind))
    return tokens


def _used_length(ids: list[int], targets: list[int], bos_id: int) -> int:
    """The number of positions before the padding at the end; all if there is nothing else."""
    for n_used in range(len(ids), 0, -1):
        if (ids[n_used - 1], targets[n_used - 1]) != (bos_id, IGNORE_INDEX):
            return n_used
    return len(ids)
