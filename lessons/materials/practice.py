"""Training of small models within a lesson."""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop import load
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import validate_config
from thinker.training.run import train

MakeBatch = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def is_fast() -> bool:
    """Whether the lessons are tested: train little, and do not expect good models."""
    return os.environ.get("THINKER_LESSONS_FAST") == "1"


def lesson_seed() -> int:
    """The number that tests add to the seed of each training, THINKER_LESSONS_SEED; 0 by default.

    Raises UserError if it is no number.
    """
    text = os.environ.get("THINKER_LESSONS_SEED", "0")
    if not text.isdecimal():
        raise UserError(f"THINKER_LESSONS_SEED has to be a number from 0, but it is {text!r}")
    return int(text)


def train_on_task(
    config: ThinkerConfig, make_batch: MakeBatch, n_steps: int, lr: float = 3e-3, seed: int = 0
) -> tuple[Thinker, list[float]]:
    """Train a new model on batches made on the fly; returns it and the loss of each step (nats per
    counted target).

    Args:
        make_batch: from a random generator to tokens and targets, (B, T) each; targets of -1 are
            not counted.
        n_steps: one tenth of them with THINKER_LESSONS_FAST=1.
        lr: the learning rate of AdamW, which falls linearly to 0.
        seed: of weights and batches; lesson_seed() is added to it.
    """
    torch.manual_seed(seed + lesson_seed())
    model = Thinker(config)

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        total, count = model(tokens, targets=targets)
        return total / count

    n_steps = max(2, n_steps // 10) if is_fast() else n_steps
    losses = take_steps(model, mean_loss, make_batch, n_steps, lr, seed)
    return model.eval(), losses


def take_steps(
    model: nn.Module, mean_loss: Callable[[Tensor, Tensor], Tensor], make_batch: MakeBatch, n_steps: int,
    lr: float = 3e-3, seed: int = 0,
) -> list[float]:  # fmt: skip
    """Train with AdamW on batches made on the fly; returns the loss of each step. See
    train_on_task."""
    generator = torch.Generator().manual_seed(seed + lesson_seed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for step in Progress(range(n_steps), desc="training", disable=is_fast()):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / n_steps)
        loss = mean_loss(*make_batch(generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_tales() -> tuple[Thinker, Tokenizer]:
    """Train two layers of four heads on whole stories of tales for about a minute; returns model
    and tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "data": {
                "source": "tales", "max_documents": 200 if is_fast() else 6000, "packing": "documents",
                "tokenizer": "bpe:512" if is_fast() else "bpe:2048", "seq_len": 320 if is_fast() else 192,
                "cache_dir": f"{folder}/cache",
            },
            "run": {"dir": f"{folder}/run", "seed": 1 + lesson_seed()}, "model": {"d_model": 128, "n_layers": 2, "n_heads": 4},
            "train": {"device": "cpu", "max_steps": 5 if is_fast() else 400, "batch_size": 12, "eval_every": 400,
                      "sample_every": None, "precision": "fp32"},
        }  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):  # hides the summary
            train(validate_config(config))
        return load(f"{folder}/run")
