"""model.size=auto: choose the model, tokenizer, batch and dropout from the size of the text and the
training time.

Some constants come from short runs (docs/development/experiments.md), the others are guesses.
docs/reference/sizes.md has tables.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinker.data.text.sources import open_source
from thinker.runtime.device import matmul_flops
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.config.config import Config
from thinker.training.config.load import validate_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.metrics import peak_flops
from thinker.training.reports.epochs import MAX_EPOCHS, most_epochs
from thinker.training.settings.settings import Settings

# Width, layers and heads, smallest first.
SHAPES = [
    (64, 2, 2),
    (64, 4, 2),
    (96, 4, 3),
    (128, 4, 4),
    (160, 4, 5),
    (192, 4, 6),
    (224, 4, 7),
    (256, 4, 8),
    (256, 6, 8),
    (320, 6, 5),
    (384, 6, 6),
    (448, 6, 7),
    (512, 8, 8),
    (640, 8, 10),
    (768, 10, 12),
    (768, 12, 12),
    (1024, 16, 16),
]
# Parameters in the blocks, divided by the square root of the FLOPs of the run.
PARAMETERS_PER_ROOT_FLOP = 0.15
PARAMETERS_PER_BYTE = 6  # at most, of text: larger models memorize it
MFU = 0.38  # share of the rate of a large matrix product that a training step reaches on a CPU
GPU_MFU_WIDTH = 1024  # a guess: on a GPU narrower models reach less, in proportion to their width
# Bytes of text from which a tokenizer is used, with the bytes of English or code per token.
TOKENIZERS = [
    (0, "char", 1.0),
    (150_000, "bpe:512", 1.95),
    (4_000_000, "bpe:1024", 2.5),
    (20_000_000, "bpe:4096", 3.4),
]
CONTEXT_BYTES = 256  # of a sequence, on a CPU
DROPOUTS = [(0.0, 0.0), (3.0, 0.1), (8.0, 0.2), (20.0, 0.3)]  # by the least number of epochs
WEIGHT_DECAY, DECAY_EPOCHS = 0.1, 3.0  # the decay, and the least number of epochs with it
FEW_BYTES = 50_000  # too little text to learn a language from
COUNTED_BYTES = 1 << 30  # stop counting here; longer texts are seldom repeated
CHOSEN_KEYS = [  # with their section
    ("model", "d_model"),
    ("model", "n_layers"),
    ("model", "n_heads"),
    ("model", "dropout"),
    ("data", "tokenizer"),
    ("data", "seq_len"),
    ("optimizer", "weight_decay"),
    ("train", "batch_size"),
    ("train", "max_steps"),
]


@dataclass(frozen=True)
class Choice:
    """What the rule chooses, by config key, and the parameters and epochs it expects."""

    d_model: int
    n_layers: int
    n_heads: int
    tokenizer: str
    seq_len: int
    batch_size: int
    dropout: float
    weight_decay: float
    n_parameters: int  # without embedding and head
    epochs: float
    max_steps: int | None  # if the time would last for more than MAX_EPOCHS
    possible_steps: float  # in the time


def choose(n_bytes: int, minutes: float, flops_per_second: float, is_gpu: bool = False) -> Choice:
    """Choose for `n_bytes` of training text and a device that multiplies large matrices at this
    rate."""
    tokenizer, bytes_per_token = next(
        (name, size) for least, name, size in reversed(TOKENIZERS) if n_bytes >= least
    )
    n_tokens = n_bytes / bytes_per_token
    seq_len = 1024 if is_gpu else max(32, 32 * round(CONTEXT_BYTES / bytes_per_token / 32))
    seq_len = min(seq_len, max(16, 1 << int(math.log2(n_tokens / 16 + 1))))  # at least 16 sequences
    for shape in reversed(SHAPES):
        d_model, n_layers, _ = shape
        mfu = MFU * min(1.0, d_model / GPU_MFU_WIDTH) if is_gpu else MFU
        flops = 60 * minutes * flops_per_second * mfu
        n_parameters = n_layers * (4 * d_model**2 + 3 * d_model * (-(-8 * d_model // 192) * 64))
        if n_parameters <= min(
            PARAMETERS_PER_ROOT_FLOP * math.sqrt(flops), PARAMETERS_PER_BYTE * n_bytes
        ):
            break
    vocab_size = int(tokenizer.partition(":")[2] or 257)
    flops_per_token = 6 * (n_parameters + d_model * vocab_size) + 12 * n_layers * d_model * seq_len
    epochs = flops / flops_per_token / n_tokens
    batch_size = 16 if not is_gpu else 64
    possible_steps = epochs * n_tokens / (batch_size * seq_len)
    max_steps = None
    if epochs > MAX_EPOCHS:
        epochs = MAX_EPOCHS
        max_steps = max(1, round(epochs * n_tokens / (batch_size * seq_len)))
    dropout = next(p for least, p in reversed(DROPOUTS) if epochs >= least)
    weight_decay = WEIGHT_DECAY if epochs >= DECAY_EPOCHS else 0.0
    return Choice(
        *shape,
        tokenizer,
        seq_len,
        batch_size,
        dropout,
        weight_decay,
        n_parameters,
        epochs,
        max_steps,
        possible_steps,
    )


def resolve_size(
    config: Config,
    device: torch.device,
    precision: str,
    previous: Settings | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> Config:
    """Fill in the keys that model.size=auto chooses; keys that the config sets stay. Prints the
    choice to stderr.

    A resumed run (with the settings `previous`) keeps its choice. Raises UserError if the text
    cannot be read.
    """
    if config.model.size is None:
        return config
    written = _written_keys(config)
    if previous is None:
        chosen = _choose_for(config, device, precision, dist, written)
    else:
        saved = previous.model_dump(mode="json")
        chosen = {key: saved[section][key] for section, key in CHOSEN_KEYS}
    return _config_of(config, chosen | written)


def _config_of(config: Config, chosen: dict[str, Any]) -> Config:
    """A config with what was chosen for it."""
    tree = config.model_dump(exclude={"model": {"size"}})
    for section, key in CHOSEN_KEYS:
        tree[section][key] = chosen[key]
    return validate_config(tree)


def _written_keys(config: Config) -> dict[str, Any]:
    """The keys that the config sets itself. A tokenizer of None is left open (keys.py)."""
    written = {}
    for section, key in CHOSEN_KEYS:
        values = getattr(config, section)
        if key in values.model_fields_set:
            written[key] = getattr(values, key)
    if written.get("tokenizer", "") is None:
        del written["tokenizer"]
    return written


def _choose_for(
    config: Config, device: torch.device, precision: str, dist: DistContext, written: dict[str, Any]
) -> dict[str, Any]:
    """Choose by the text of a config and the speed of the device, and print the choice. All ranks
    call it."""
    with dist.main_process_first():
        n_bytes = count_bytes(config)
    rate = peak_flops(device, precision) or matmul_flops(device, precision, repeats=50)
    rate = dist.broadcast_object(rate) * dist.world_size
    minutes = config.train.max_minutes
    train_bytes = round(n_bytes * (1 - config.data.val_fraction))
    choice = choose(train_bytes, minutes, rate, device.type == "cuda")
    if choice.epochs > MAX_EPOCHS / 4:
        with dist.main_process_first():
            choice = _bound_epochs(config, choice, written)
    print("\n".join(describe(choice, n_bytes, minutes, written)), file=sys.stderr)
    return dict(vars(choice))


def _bound_epochs(config: Config, choice: Choice, written: dict[str, Any]) -> Choice:
    """A choice with the steps and the expected epochs of the tokens that the text really has.

    Tokenizes the text, as the run does.
    """
    chosen = _config_of(config, vars(choice) | written)
    corpus = prepare_training_data(chosen, None)
    prefix_len = chosen.thinker_config(corpus.tokenizer.vocab_size).prefix
    loader = open_loader(chosen, corpus, prefix_len)
    if loader.dataset.is_endless:
        return choice
    many = 1000
    epochs_per_step = max(loader.epochs(many)) / many
    max_steps = None
    n_steps = choice.possible_steps * choice.batch_size * choice.seq_len
    n_steps /= chosen.train.batch_size * chosen.data.seq_len
    most_steps = max(1, int(most_epochs(chosen.model.dropout) / epochs_per_step))
    if n_steps > most_steps:
        n_steps = max_steps = most_steps
    return replace(choice, epochs=n_steps * epochs_per_step, max_steps=max_steps)


def count_bytes(config: Config) -> int:
    """Bytes of text in the sources of a config, in UTF-8; stops counting at COUNTED_BYTES."""
    n_bytes = 0
    for source in config.data.text_sources():
        opened = open_source(seed=config.run.seed, **source.source_options())
        if opened.n_bytes is not None:
            sizes = iter([opened.n_bytes])
        else:
            sizes = (len(document.text.encode()) for document in opened.documents())
        for size in sizes:
            n_bytes += size
            if n_bytes >= COUNTED_BYTES:
                return n_bytes
    return n_bytes


def describe(
    choice: Choice, n_bytes: int, minutes: float, written: dict[str, Any] | None = None
) -> list[str]:
    """The choice in one line, and a warning if there is too little text. `written`: keys that the
    config sets."""
    keys = vars(choice) | (written or {})
    text = f"{format_size(n_bytes)}: {keys['n_layers']} layers of width {keys['d_model']}"
    if not written or written.keys() <= {"dropout", "weight_decay"}:
        text = (
            f"{format_size(n_bytes)}: {choice.n_parameters / 1e6:.1f}M parameters "
            f"({text.partition(': ')[2]})"
        )
    text += f", {keys['tokenizer']}, dropout {keys['dropout']:g}"
    if not written or written.keys() <= {"dropout", "weight_decay"}:
        epochs = f"{choice.epochs:.0f}" if choice.epochs >= 9.95 else f"{choice.epochs:.1f}"
        if choice.max_steps:
            text += (
                f", {epochs} epochs expected; ends before {minutes:g} minutes, as more "
                f"epochs would not help"
            )
        else:
            text += f", {epochs} epochs in {minutes:g} minutes expected"
    lines = [text]
    if n_bytes < FEW_BYTES:
        lines.append(
            f"advice: {format_size(n_bytes)} is too little text to learn a language from; the "
            f"model will mostly repeat "
            "it; add text, or fine-tune a trained model (run.init_from)"
        )
    return lines


def format_size(n_bytes: int) -> str:
    """Format a number of bytes, such as "1.1 MB"."""
    return f"{n_bytes / 1e6:.3g} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.3g} KB"
