"""What a run says at its end: its result, advice, and how to sample from it."""

import math
import shlex
from pathlib import Path
from typing import Any

from thinker.evaluation.entropy_floor import format_excess
from thinker.evaluation.text_baselines import NGRAM
from thinker.runtime.process.invocation import other_command
from thinker.training.metrics import format_trained
from thinker.training.reports.epochs import may_train_longer, most_epochs
from thinker.training.reports.fit import (
    FAR_FROM_FLOOR,
    advise_on_fit,
    assess_fit,
    evaluations,
    is_worse_than_ngrams,
)
from thinker.training.state.run_state import RunState

LEAST_LONGER = 1.5  # times the training until now, to be worth continuing


def describe_result(val: dict[str, Any], state: RunState) -> list[str]:
    """Describe the result of a run, from its last evaluation."""
    tokens = f"{state.tokens:,} tokens"
    trained = format_trained(state.processed_tokens, state.tokens, "{} of which were trained on")
    if trained:
        tokens = f"{state.processed_tokens:,} tokens, {trained}"
    lines = [
        f"finished: {state.step} steps, {tokens}, {state.elapsed_s:.0f} s of training",
        f"validation loss {val['val_loss']:.4f} nats per token, "
        f"{val['val_bits_per_byte']:.4f} bits per byte",
    ]
    train = state.settings.train
    if state.stops_early(train):
        since = f"since step {state.lowest_at}"
        lines.append(f"stopped early: no lower loss in {train.patience} evaluations {since}")
    if state.skipped:
        lines.append(
            f"skipped {state.skipped} steps with a non-finite loss or gradient (see "
            f"nonfinite-step-*.json)"
        )
    floor = val.get("entropy_floor")
    if floor:
        excess = format_excess(val["val_loss"], floor, 1)
        lines.append(
            f"floor {floor:.4f} nats per token, the entropy of the corpus; the loss is "
            f"{excess} the floor"
        )
    return lines


def sampling_hint(run: Path, state: RunState, is_chat: bool) -> str:
    """The command that samples from a run; with `is_chat`, the one that chats with it."""
    folder = shlex.quote(str(run))
    chat = other_command("chat")
    if is_chat and chat == "thinker chat":
        return f"chat with it: {chat} {folder}"
    prompt = ""
    prefix_len = state.settings.model.prefix  # including the BOS token
    if is_chat:  # there is no script of a checkout for chats
        prompt = ' --chat --prompt "your message"'
    elif prefix_len:
        prompt = f' --prompt "at least {prefix_len} tokens of text"'
    return f"sample from it: {other_command('generate')} {folder}{prompt}"


def after_training(
    lines: list[dict[str, Any]],
    state: RunState,
    epochs: float,
    baselines: dict[str, float] | None = None,
) -> list[str]:
    """Advice for a finished run, from its final state, the lines of metrics.jsonl and
    evaluation.text_baselines; none if no line can be compared."""
    validations = evaluations(lines)
    if not validations:
        return []
    last = validations[-1]
    advice = []
    vocab_size = state.settings.model.vocab_size
    if _is_above_uniform(last["val_loss"], vocab_size):
        advice.append(
            f"the validation loss {last['val_loss']:.2f} is above ln {vocab_size} = "
            f"{math.log(vocab_size):.2f}, the loss of a uniform guess, so the model has learned "
            f"nothing that helps on new text"
        )
    fit = assess_fit(lines, state, epochs, baselines)
    if fit is not None:
        smaller = "" if state.settings.run.init_from else "a smaller model, "
        advice += advise_on_fit(fit, f"{smaller}more text or a higher model.dropout")
    has_advice = bool(advice)
    most = most_epochs(state.settings.model.dropout)
    longer = 2.0  # times the training until now
    if epochs > 0:
        longer = min(longer, most / epochs)
    if longer >= LEAST_LONGER and _ended_by_time(state) and _may_improve(validations, has_advice):
        advice.append(_continue_the_run(state, longer))
    if not advice and is_worse_than_ngrams(last, baselines):
        advice.append(_beat_the_ngrams(state, epochs))
    return advice


def _beat_the_ngrams(state: RunState, epochs: float) -> str:
    """Say that a 5-gram model is better, and what to do."""
    better = f"a {NGRAM} model predicts the text better than this model"
    if may_train_longer(epochs, state.settings.model.dropout):
        return f"{better}; train longer: raise train.{_limit(state)}"
    larger = "" if state.settings.run.init_from else "a larger model, "
    return (
        f"{better}, which has seen the data {epochs:,.0f} times; try {larger}a higher "
        f"optimizer.lr or more text"
    )


def _is_above_uniform(loss: float, vocab_size: int) -> bool:
    return round(loss, 2) > round(math.log(vocab_size), 2)  # as printed


def _ended_by_time(state: RunState) -> bool:
    max_minutes = state.settings.train.max_minutes
    return max_minutes is not None and state.elapsed_s >= 60 * max_minutes


def _may_improve(validations: list[dict[str, Any]], has_advice: bool) -> bool:
    """Whether longer training would lower the loss. has_advice: something else is wrong."""
    loss = validations[-1]["val_loss"]
    floor = validations[-1].get("entropy_floor")
    if floor:
        return loss / floor - 1 > FAR_FROM_FLOOR
    lowest = min(line["val_loss"] for line in validations)
    return loss <= lowest and not has_advice


def _continue_the_run(state: RunState, longer: float) -> str:
    """Say that the time limit ended the run, and how to continue it. longer: how many times as
    long."""
    train = state.settings.train
    of_steps = f" of {train.max_steps:,}" if train.max_steps else ""
    minutes = math.ceil(longer * train.max_minutes)
    folder = shlex.quote(str(state.settings.run.dir))
    command = f"{other_command('train')} {folder}"
    if "ranks" in state.machine:  # torchrun has options of its own
        command = "the same command and"
    return (
        f"train.max_minutes={train.max_minutes:g} ended the run after {state.step:,}{of_steps} "
        f"steps; longer training would lower the validation loss; continue it with {command} "
        f"train.max_minutes={minutes}"
    )


def _limit(state: RunState) -> str:
    """The key that ended the run."""
    if _ended_by_time(state):
        return "max_minutes"
    if state.stops_early(state.settings.train):
        return "patience"
    return "max_steps"
