"""evaluate(): the losses of a model on a text, with confidence intervals."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import TextLoss, text_loss, tokenize
from thinker.interop.find import find_model
from thinker.interop.load import load
from thinker.model import Thinker
from thinker.runtime.backend import configure_backend
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.training.config.data_section import DataConfig
from thinker.training.data.open_run import load_run_config, load_validation_data

MAX_TOKENS = 200_000  # of a text that is not the run's


@dataclass(frozen=True)
class TextChoice:
    """Which text to measure on: the validation split of the run, unless there is a source."""

    source: str | None = None  # tales, pysource, text, jsonl or parquet
    path: str | None = None  # file, folder or glob of the last three
    column: str | None = None  # of jsonl and parquet; None: text
    max_tokens: int | None = None  # None: all of a split, MAX_TOKENS of a source
    part: str | None = None  # of a split: one source of a mixture
    # Of a split: read the files that the config names if the token cache lacks them. Only for
    # trusted configs.
    read_data: bool = False


class Text(NamedTuple):
    """A text to evaluate on."""

    source: str
    trained: int | None  # the length of the sequences in training, if it is known
    layout: dict[str, Any]  # of windows: options of PackedDataset
    is_one: bool  # a single document
    tokens: TokenShards


class TextLosses(NamedTuple):
    """The losses of a text by context length, and how they were counted."""

    losses: list[TextLoss]
    trained: int  # the length of the sequences in training, or what stands for it
    has_halves: bool  # only the second half of each window is counted
    is_part: bool  # only the beginning of the text is counted
    lost: list[str]  # lines about targets that are not counted


def evaluate(
    path: str | Path,
    text: str | Path | None = None,
    *,
    source: str = "text",
    context: Sequence[int] = (),
    stride: int | None = None,
    confidence: float = 0.95,
    max_tokens: int | None = None,
    checkpoint: str | int = "latest",
    device: str = "auto",
) -> list[TextLoss]:
    """Loss, perplexity and bits per byte of a model, with confidence intervals, as `thinker eval`.

    Args:
        path: a run directory, a checkpoint, a Hugging Face folder or a GGUF file.
        text: file, folder or glob to measure on. None: the validation split of the run.
        source: how `text` is read: text, jsonl or parquet.
        context: lengths of the windows. Empty: the length of the sequences in training.
        stride: tokens counted per window, from its end. None: half of it for a single text,
            otherwise all.
        confidence: of the intervals.
        max_tokens: of the text. None: all of a validation split, 200,000 of another text.

    Returns a TextLoss per context length, such as result[0].bits_per_byte.mean. Raises UserError.
    """
    chosen_device = choose_device(device)
    configure_backend(chosen_device)
    folder = find_model(path, checkpoint)
    model, tokenizer = load(folder, chosen_device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer, so it cannot read text")
    choice = TextChoice(max_tokens=max_tokens)
    if text is not None:
        choice = TextChoice(source, str(text), max_tokens=max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        opened = open_text(choice, folder, tokenizer, Path(scratch))
        return measure_text(model, tokenizer, opened, choice, context, stride, confidence).losses


def open_text(choice: TextChoice, folder: Path, tokenizer: Tokenizer, scratch: Path) -> Text:
    """The chosen text, or the validation split of the run. Raises UserError if it cannot be
    read."""
    if choice.source is not None:
        config = load_run_config(folder)
        data = None if config is None else config.data
        return _read_source(choice, tokenizer, scratch, data)
    part = choice.part
    config, tokens = load_validation_data(
        folder, tokenizer, "--source", scratch, choice.read_data, part
    )
    data = config.data
    source = data.source or part
    if source is None:
        names = ", ".join(data.source_names())
        source = f"all tokens of {names}, not weighted; --part NAME for one of them"
    layout = {"packing": data.val_packing, "document_masking": data.val_masking}
    return Text(source, data.seq_len, layout, False, tokens)


def _read_source(
    choice: TextChoice, tokenizer: Tokenizer, scratch: Path, data: DataConfig | None
) -> Text:
    """The source that the flags choose. data: of the model's training, if it is known. A model that
    has only seen texts from their beginning, or alone, reads them so here, too."""
    options = {"path": choice.path}
    if choice.column:
        options["column"] = choice.column
    max_tokens = choice.max_tokens or MAX_TOKENS
    if choice.source == "tales":  # a seed of stories that no run trains on
        options |= {"max_documents": 1 + max_tokens // 16, "seed": 1 << 40}
    source = open_source(choice.source, **options)
    layout: dict[str, Any] = {"packing": "contiguous"}
    if data is not None and not source.whole_text:
        layout["document_masking"] = data.document_masking
        if data.packing != "contiguous":
            layout["packing"] = "documents"
    if choice.source == "tales":
        layout["packing"] = "documents"
    tokens = tokenize(source, tokenizer, max_tokens, scratch)
    trained = None if data is None else data.seq_len
    return Text(source.name, trained, layout, source.whole_text, tokens)


def measure_text(
    model: Thinker,
    tokenizer: Tokenizer,
    text: Text,
    choice: TextChoice,
    context: Sequence[int] = (),
    stride: int | None = None,
    confidence: float = 0.95,
) -> TextLosses:
    """Losses of a text by context length. Raises UserError if a context is longer than the text."""
    tokens = text.tokens
    trained = text.trained or min(model.config.max_seq_len, 1024)
    longest = max(shard.n_tokens - 1 for shard in tokens.shards)
    lengths = list(context) or [min(trained, longest)]
    if max(lengths) > longest:
        raise UserError(
            f"--context is {max(lengths)}, longer than the text ({longest} tokens); use at "
            f"most {longest}"
        )
    prefix = model.config.prefix
    # As Generator.score() does.
    has_halves = text.is_one and stride is None and prefix <= 1
    byte_lengths = scaled_byte_lengths(tokens, tokenizer)
    max_tokens = choice.max_tokens or MAX_TOKENS
    is_limited = choice.source is not None or choice.max_tokens is not None
    is_part = is_limited and tokens.n_tokens > max_tokens
    losses = []
    lost = []
    for T in lengths:
        counted = T - T // 2 if has_halves else stride
        windows = PackedDataset(tokens, T, **text.layout, stride=counted, prefix_len=prefix)
        limit = 0
        if is_part and choice.source is None:
            limit = -(-max_tokens // windows.stride)
        lost += windows.lost_targets(limit or None).lines(f"context {T}", prefix)
        losses.append(text_loss(model, windows, byte_lengths, confidence, trained, limit))
    return TextLosses(losses, trained, has_halves, is_part, lost)
