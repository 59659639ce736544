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
from tqdm import tqdm

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.corpus_index import INDEX
from thinker.data.corpus.shards import TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure, plain_text, save_figure
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
    bytes_per_token: float
    lengths: np.ndarray  # (n,) int64
    share_longer: float  # of the documents, longer than a sequence
    share_padding: float  # of the positions of the training sequences
    n_equal: int  # documents that equal an earlier one, among the first COMPARED_DOCUMENTS
    dropped: dict[str, int]  # by cleaning

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the lengths as percentiles."""
        names = ("min", "p10", "median", "p90", "max")
        lengths = dict(
            zip(
                names,
                np.percentile(self.lengths, [0, 10, 50, 90, 100]).round().astype(int).tolist(),
            )
        )
        return vars(self) | {"lengths": lengths}


@dataclass(frozen=True)
class Sequence:
    """A training sequence as text."""

    source: str
    sample_id: int
    epoch: float  # how often its source was read before this step
    tokens: list[
        tuple[str, int, str]
    ]  # text; number of the document; "" or "bos", "masked" (no target), "padding"


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
    data, prefix = config.data, config.thinker_config(corpus.tokenizer.vocab_size).prefix
    if step >= (config.train.max_steps or MAX_STEP):
        raise UserError(
            f"--step {step} is not below {config.train.max_steps or MAX_STEP}, the number of "
            f"steps of the run"
        )
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
        for name, value in (
            ("", source.name),
            ("documents, training", f"{source.train_documents:,}"),
            ("documents, validation", f"{source.val_documents:,}"),
            ("tokens, training", f"{source.train_tokens:,}"),
            ("tokens, validation", f"{source.val_tokens:,}"),
            ("bytes per token", f"{source.bytes_per_token:.2f}"),
            ("document length in tokens, median", f"{lengths['median']:,}"),
            ("document length, 10% to 90%", f"{lengths['p10']:,} to {lengths['p90']:,}"),
            ("longest document", f"{lengths['max']:,}"),
            (f"longer than a sequence of {report.seq_len}", f"{source.share_longer:.1%}"),
            ("padding", f"{source.share_padding:.1%}"),
            (
                f"equal to an earlier one, of the first {COMPARED_DOCUMENTS:,}",
                f"{source.n_equal:,}",
            ),
            ("dropped by cleaning", f"{sum(source.dropped.values()):,}"),
        ):
            rows.setdefault(name, []).append(value)
    return [[name, *cells] for name, cells in rows.items()]


def format_sources(report: DataReport) -> str:
    """The table as text."""
    rows = table(report)
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return "\n".join(
        "  ".join(
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))]
        ).rstrip()
        for name, *cells in rows
    )


def plot_lengths(report: DataReport, path: Path) -> None:
    """Plot how the lengths of the documents are distributed, by source."""
    figure, (axes,) = new_figure(8, 4.5)
    longest = max(int(source.lengths.max()) for source in report.sources)
    bins = np.geomspace(1, longest + 1, 50)
    for source in report.sources:
        weights = np.full(len(source.lengths), 1 / len(source.lengths))
        axes.hist(
            source.lengths,
            bins,
            weights=weights,
            histtype="step",
            linewidth=1.8,
            label=plain_text(source.name),
        )
    axes.axvline(
        report.seq_len,
        color=GREY,
        linestyle="--",
        linewidth=1.2,
        label=f"a sequence ({report.seq_len})",
    )
    axes.set(xscale="log", xlabel="tokens per document", ylabel="share of the documents")
    axes.legend(frameon=False)
    save_figure(figure, path)


def _source_report(name: str, part: Corpus, config: Config) -> SourceReport:
    train, val, data = part.train, part.val, config.data
    lengths = np.concatenate([np.diff(shard.offsets[:]) for shard in train.shards])
    windows = PackedDataset(train, data.seq_len, data.packing)
    n_bytes, n_tokens = train.n_bytes + val.n_bytes, train.n_tokens + val.n_tokens
    index = json.loads((part.folder / INDEX).read_text(encoding="utf-8"))
    return SourceReport(
        name,
        train.n_documents,
        val.n_documents,
        train.n_tokens,
        val.n_tokens,
        n_bytes / n_tokens,
        lengths,
        share_longer=float((lengths > data.seq_len).mean()),
        share_padding=1 - (train.n_tokens - len(train.shards)) / (len(windows) * data.seq_len),
        n_equal=_count_equal(train),
        dropped={reason: entry["count"] for reason, entry in index.get("dropped", {}).items()},
    )


def _count_equal(tokens: TokenShards) -> int:
    """How many documents equal an earlier one, among the first COMPARED_DOCUMENTS."""
    seen: set[bytes] = set()
    n = 0
    bar = tqdm(
        desc="comparing documents",
        total=min(tokens.n_documents, COMPARED_DOCUMENTS),
        leave=False,
        delay=1,
    )
    with bar:
        for shard in tokens.shards:
            for start, end in pairwise(shard.offsets[: COMPARED_DOCUMENTS - n + 1].tolist()):
                seen.add(
                    hashlib.blake2b(shard.tokens[start:end].tobytes(), digest_size=12).digest()
                )
                n += 1
                bar.update()
    return n - len(seen)


def _sequences(
    corpus: Corpus, loader: BatchLoader, names: list[str], step: int, n: int
) -> Iterator[Sequence]:
    rows = slice(min(n, loader.batch_size))
    inputs, targets = loader.batch(step, rows)
    bos_id, epochs = corpus.tokenizer.bos_id, loader.epochs(step)
    documents = (inputs == bos_id).cumsum(1)  # (n, T)
    for sample, *row in zip(
        loader.samples(step), inputs.tolist(), targets.tolist(), documents.tolist()
    ):
        is_padding = [pair == (bos_id, IGNORE_INDEX) for pair in zip(*row[:2])]
        n_used = len(is_padding) - (is_padding[::-1].index(False) if False in is_padding else 0)
        tokens, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
        for i, (token, target, document) in enumerate(zip(*row)):
            kind = "padding" if i >= n_used else "bos" if token == bos_id else ""
            kind = kind or ("masked" if target == IGNORE_INDEX else "")
            if kind == "bos":
                decoder.reset()
            text = decoder.decode(
                corpus.tokenizer.token_bytes(token)
            )  # a character may have several tokens
            tokens.append((text.translate(CONTROL_PICTURES), document, kind))
        yield Sequence(names[sample.source], sample.index, epochs[sample.source], tokens)
