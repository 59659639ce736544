"""What a run says of its data before it starts, with advice if there is too little."""

import math

import numpy as np

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.training.reports.epochs import format_epochs, most_epochs, too_many_epochs
from thinker.training.settings.settings import Settings

MIN_VAL_TOKENS = 2000  # with fewer, the standard error of the loss is several hundredths of a nat
MIN_VAL_CONVERSATIONS = 10
MANY_CUT = 0.01  # of the documents
RAISE = "raise data.seq_len (and model.max_seq_len if it is lower)"


def before_training(
    settings: Settings, corpus: Corpus, loader: BatchLoader, kernel_problem: str
) -> list[str]:
    """Describe the data of a run and warn if there is too little.

    kernel_problem: why the run does not use fused kernels, or "" if it does.
    """
    train = settings.train
    at_most = "at most " if train.max_minutes is not None else ""
    epochs = _planned_epochs(settings, loader)
    amounts = _describe_amounts(corpus, loader)
    if epochs is not None:
        amounts += f"; {at_most}{format_epochs(epochs)} in {train.max_steps:,} steps"
    lines = [amounts, _describe_computation(settings, kernel_problem)]
    if corpus.tokenizer.kind == "char":
        lines.append(_describe_characters(corpus.tokenizer.vocab_size))

    advice = [
        *_too_many_cut(settings, corpus.train, loader),
        _too_long_warmup(settings),
        _too_few_to_validate(corpus.val),
    ]
    if epochs is not None and epochs > most_epochs(settings.model.dropout):
        advice.append(too_many_epochs(epochs, train.max_steps / epochs, at_most))
    return lines + [f"advice: {line}" for line in advice if line]


def _planned_epochs(settings: Settings, loader: BatchLoader) -> float | None:
    """The epochs in train.max_steps. None if they are unknown, or differ between sources."""
    max_steps = settings.train.max_steps
    dataset = loader.dataset
    if max_steps is None or dataset.n_sources != 1 or dataset.is_endless:
        return None
    return loader.epochs(max_steps)[0]


def _describe_amounts(corpus: Corpus, loader: BatchLoader) -> str:
    amount = _amount(corpus.train)
    if not loader.reads_corpus:
        amount = "a dataset of your own"
    elif loader.dataset.n_sources == 1 and loader.dataset.is_endless:
        amount = "a stream"
    return f"data: {amount} for training, {_amount(corpus.val)} for validation"


def _describe_computation(settings: Settings, kernel_problem: str) -> str:
    train = settings.train
    compiled = ", compiled" if train.compile else ""
    kernels = f"no fused kernels ({kernel_problem})" if kernel_problem else "fused kernels"
    size = f"micro-batches of {train.micro_batch_size} sequences"
    return f"precision {train.precision}{compiled}, {kernels}, {size}"


def _describe_characters(vocab_size: int) -> str:
    n_used = vocab_size - 257
    return (
        f"char: {vocab_size:,} tokens (256 bytes to encode any text, {n_used:,} non-ASCII "
        f"characters, and BOS); the loss starts at ln {vocab_size} = {math.log(vocab_size):.2f} "
        f"and soon drops, as most bytes never occur"
    )


def _too_many_cut(settings: Settings, tokens: TokenShards, loader: BatchLoader) -> list[str]:
    """Advice if many documents are longer than a sequence."""
    seq_len = settings.data.seq_len
    if tokens.has_conversations:
        return _lost_targets(settings, tokens, loader)
    if settings.data.packing == "contiguous":
        return []
    n_cut = 0
    for shard in tokens.shards:
        n_cut += int((np.diff(shard.offsets[:]) > seq_len).sum())
    if n_cut <= MANY_CUT * tokens.n_documents:
        return []
    return [
        f"{n_cut:,} of {tokens.n_documents:,} {_kind(tokens)}s are longer than "
        f"data.seq_len={seq_len} and get cut; {RAISE}"
    ]


def _lost_targets(settings: Settings, tokens: TokenShards, loader: BatchLoader) -> list[str]:
    """Advice if targets of conversations do not fit into a sequence, or are in a prefix."""
    seq_len = settings.data.seq_len
    prefix_len = settings.model.prefix
    windows = getattr(loader.dataset, "dataset", None)
    if not isinstance(windows, PackedDataset):  # of several sources
        windows = PackedDataset(tokens, seq_len, settings.data.packing, prefix_len=prefix_len)
    lost = windows.lost_targets()
    lines = lost.lines(f"data.seq_len={seq_len}", prefix_len)
    if lost.n_cut:
        lines[0] += f"; {RAISE}"
    return lines


def _too_long_warmup(settings: Settings) -> str:
    """Advice if the warmup has no end, or ""."""
    train = settings.train
    if train.max_steps is None or train.warmup_steps < train.max_steps:
        return ""
    return f"train.warmup_steps={train.warmup_steps:,} lasts until the end of the run; lower it"


def _too_few_to_validate(val: TokenShards) -> str:
    """Advice if the validation split is too small for a precise loss, or ""."""
    n = val.n_conversations
    if val.has_conversations and n < MIN_VAL_CONVERSATIONS:
        size = f"{n} conversation{_plural(n)}"
    elif val.n_tokens < MIN_VAL_TOKENS:
        size = f"{val.n_tokens:,} tokens"
    else:
        return ""
    return (
        f"the validation split has only {size}, so its loss is imprecise; raise "
        f"data.val_fraction or add text"
    )


def _amount(tokens: TokenShards) -> str:
    """Format an amount of data, such as "512 tokens in 9 conversations"."""
    n = tokens.n_conversations
    amount = f"{tokens.n_tokens:,} tokens in {n:,} {_kind(tokens)}{_plural(n)}"
    if tokens.n_documents > n:
        amount += f" ({tokens.n_documents:,} rows)"
    return amount


def _kind(tokens: TokenShards) -> str:
    return "conversation" if tokens.has_conversations else "document"


def _plural(n: int) -> str:
    return "" if n == 1 else "s"
