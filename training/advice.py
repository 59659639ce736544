"""Reports and advice: the data before training, the result after training, and the table of a plan."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.corpus import Corpus
from thinker.data.shards import TokenShards
from thinker.evaluation.perplexity import format_excess
from thinker.evaluation.text_baselines import NGRAM
from thinker.runtime.memory import format_bytes
from thinker.training.config import Settings
from thinker.training.resume import RunState
from thinker.training.scaling_law import count_parameters, predict_loss_changes

MANY_EPOCHS = 10  # up to 4 epochs are nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)
GOOD_EPOCHS = 4
FEW_STEPS = 20
MIN_VAL_TOKENS = 2000  # with fewer, the standard error of the loss is several hundredths of a nat
MIN_VAL_CONVERSATIONS = 10
MANY_CUT = 0.01  # of the documents
OVERFITTING = 0.02  # relative rise of the validation loss above its lowest value
LARGE_GAP = 1.5  # validation loss / training loss
SMALL_GAP = 0.05  # relative: the losses are about equal
FAR_FROM_FLOOR = 0.06
SMALL_SHARE, LARGE_SHARE = 0.01, 5.0  # of the compute-optimal number of tokens

# Verdicts on a run. The last one: the validation loss has risen, but not because the training loss fell.
UNDERFITTED, WELL_FITTED, OVERFITTED = "underfitted", "well fitted", "overfitted"
NOT_IMPROVING = "no longer improving"

Lines = list[str]


def before_training(settings: Settings, corpus: Corpus, n_sequences: int) -> Lines:
    """Describe the data of a run and warn if there is too little. `n_sequences`: in the training split."""
    train, steps_per_epoch = settings.train, n_sequences / settings.train.batch_size
    line = f"data: {_amount(corpus.train)} for training, {_amount(corpus.val)} for validation"
    at_most = "at most " if train.max_minutes is not None else ""
    if train.max_steps is not None:
        line += f"; {at_most}{format_epochs(train.max_steps / steps_per_epoch)} in {train.max_steps:,} steps"
    compiled = ", compiled" if train.compile else ""
    lines = [line, f"precision {train.precision}{compiled}, micro-batches of {train.micro_batch_size} sequences"]
    if corpus.tokenizer.kind == "char":
        vocab_size, used = corpus.tokenizer.vocab_size, corpus.tokenizer.vocab_size - 257
        lines.append(
            f"char: {vocab_size:,} tokens (256 bytes to encode any text, {used:,} non-ASCII characters, and BOS); "
            f"the loss starts at ln {vocab_size} = {math.log(vocab_size):.2f} and soon drops, as most bytes never occur"
        )
    seq_len, n = settings.data.seq_len, corpus.train.n_documents
    n_cut = sum(int((np.diff(shard.offsets[:]) > seq_len).sum()) for shard in corpus.train.shards)
    if settings.data.packing == "documents" and n_cut > MANY_CUT * n:
        cut = f"advice: {n_cut:,} of {n:,} {_kind(corpus.train)}s are longer than data.seq_len={seq_len} and get cut"
        lines.append(f"{cut}; raise data.seq_len (and model.max_seq_len if it is lower)")
    if train.max_steps is not None and train.warmup_steps >= train.max_steps:
        lines.append(f"advice: train.warmup_steps={train.warmup_steps:,} lasts until the end of the run; lower it")
    if few := few_to_validate(corpus.val):
        lines.append(f"advice: {few}, so its loss is imprecise; raise data.val_fraction or add text")
    if train.max_steps is not None and train.max_steps / steps_per_epoch > MANY_EPOCHS:
        lines.append(f"advice: {too_many_epochs(train.max_steps / steps_per_epoch, steps_per_epoch, at_most)}")
    return lines


def few_to_validate(val: TokenShards) -> str | None:
    """The size of the validation set if it is too small for a precise loss, otherwise None."""
    if val.has_conversations and (n := val.n_documents) < MIN_VAL_CONVERSATIONS:
        return f"the validation split has only {n} conversation{'s' if n > 1 else ''}"
    return f"the validation split has only {val.n_tokens:,} tokens" if val.n_tokens < MIN_VAL_TOKENS else None


def too_many_epochs(epochs: float, steps_per_epoch: float, at_most: str = "") -> str:
    """Say that a run has too many epochs, and what to change."""
    steps = max(1, math.ceil(GOOD_EPOCHS * steps_per_epoch))
    seen = f"the model will see the data {at_most}{epochs:,.0f} times and memorize it"
    if steps < FEW_STEPS:  # too few to learn from
        return f"{seen}; add text: {GOOD_EPOCHS} epochs are only {steps} step{'s' if steps > 1 else ''}"
    return (
        f"{seen}; add text or lower train.max_steps (to {steps:,} for {GOOD_EPOCHS} epochs); raising model.dropout "
        "helps a little"
    )


@dataclass(frozen=True)
class Fit:
    """Where a finished run stands."""

    verdict: str  # UNDERFITTED, WELL_FITTED, OVERFITTED or NOT_IMPROVING
    epochs: float
    train_loss: float  # nats per token, the mean of the last lines
    val_loss: float
    best: dict[str, Any]  # the line of metrics.jsonl with the lowest validation loss


def evaluations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The complete evaluations among the lines of metrics.jsonl."""
    return [line for line in lines if {"val_loss", "val_bits_per_byte"} <= line.keys()]


def assess_fit(
    lines: list[dict[str, Any]], state: RunState, epochs: float, baselines: dict[str, float] | None = None
) -> Fit | None:
    """Compare the training and validation losses in the lines of metrics.jsonl; None without a training loss.

    baselines: from evaluation.text_baselines. A model that is worse than a 5-gram model is not well fitted.
    """
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    if not train:
        return None
    # A loss below the best one was measured on other sequences, before train.eval_sequences was changed.
    vals = evaluations(lines)
    vals = [line for line in vals if line["val_loss"] >= (state.best_val_loss or 0.0)] or vals[-1:]
    best, loss, floor = (
        min(vals, key=lambda line: line["val_loss"]),
        vals[-1]["val_loss"],
        vals[-1].get("entropy_floor"),
    )
    until_best = [(step, value) for step, value in train if step <= best["step"]]
    now, verdict = _recent_mean(train), WELL_FITTED
    could_learn_more = loss < now * (1 + SMALL_GAP) or _is_worse(vals[-1], baselines)
    if loss > best["val_loss"] * (1 + OVERFITTING):
        verdict = OVERFITTED if until_best and now < _recent_mean(until_best) else NOT_IMPROVING
    elif epochs > GOOD_EPOCHS and loss > LARGE_GAP * now:
        verdict = OVERFITTED
    elif loss <= best["val_loss"] and not (floor and loss / floor - 1 <= FAR_FROM_FLOOR) and could_learn_more:
        verdict = UNDERFITTED
    return Fit(verdict, epochs, now, loss, best)


def _is_worse(val: dict[str, Any], baselines: dict[str, float] | None) -> bool:
    """Whether the model is worse than a 5-gram model."""
    return baselines is not None and val["val_bits_per_byte"] > baselines[NGRAM]


def after_training(
    lines: list[dict[str, Any]], state: RunState, epochs: float, baselines: dict[str, float] | None = None
) -> Lines:
    """Advice for a finished run, from its final state, the lines of metrics.jsonl and evaluation.text_baselines."""
    settings = state.settings
    validations = evaluations(lines)
    last, train = validations[-1], settings.train
    loss, advice = last["val_loss"], []
    uniform = math.log(settings.model.vocab_size)
    if round(loss, 2) > round(uniform, 2):  # as printed
        advice.append(
            f"the validation loss {loss:.2f} is above ln {settings.model.vocab_size} = {uniform:.2f}, the loss of a "
            "uniform guess, so the model has learned nothing that helps on new text"
        )
    smaller = "" if settings.run.init_from else "a smaller model, "
    if fit := assess_fit(lines, state, epochs, baselines):
        advice += _overfitting(fit, f"{smaller}more text or a higher model.dropout")
    floor = last.get("entropy_floor")
    is_falling = loss <= min(line["val_loss"] for line in validations)
    by_time = train.max_minutes is not None and state.elapsed_s >= 60 * train.max_minutes
    if by_time and (loss / floor - 1 > FAR_FROM_FLOOR if floor else is_falling and not advice):
        of_steps = f" of {train.max_steps:,}" if train.max_steps else ""
        minutes = math.ceil(2 * train.max_minutes)
        command = f"{_command('train')} {shlex.quote(f'{settings.run.dir}/config.yaml')}"
        if "ranks" in state.machine:  # torchrun has options of its own
            command = "the same command and"
        advice.append(
            f"train.max_minutes={train.max_minutes:g} ended the run after {state.step:,}{of_steps} steps; longer "
            f"training would lower the validation loss; continue it with {command} train.max_minutes={minutes}"
        )
    if _is_worse(last, baselines) and not advice:
        stopped_early = train.patience is not None and state.evaluations_since_best >= train.patience
        key = "max_minutes" if by_time else "patience" if stopped_early else "max_steps"
        advice.append(f"a {NGRAM} model predicts the text better than this model; train longer: raise train.{key}")
    return [f"advice: {line}" for line in advice]


def _overfitting(fit: Fit, remedy: str) -> Lines:
    """What to do about a validation loss that rises, or that is far above the training loss."""
    best = f"{fit.best['val_loss']:.3f}"
    if fit.verdict == NOT_IMPROVING:
        return [
            f"the validation loss was lowest at step {fit.best['step']:,} ({best}); use the weights of that step "
            "(generate.py --checkpoint best)"
        ]
    if fit.verdict != OVERFITTED:
        return []
    if fit.val_loss <= fit.best["val_loss"] * (1 + OVERFITTING):
        return [f"against overfitting, try {remedy}"]
    return [
        f"overfitting: since step {fit.best['step']:,} the validation loss has risen from {best} to "
        f"{fit.val_loss:.3f} while the training loss fell; use the weights of step {fit.best['step']:,} "
        f"(generate.py --checkpoint best), or train with fewer steps, {remedy}"
    ]


def recommendation(plan: dict[str, Any]) -> Lines:
    """Whether a run fits in memory, and advice on epochs and model size: 1 to 3 lines."""
    peak, usable = (format_bytes(plan[name]) for name in ("peak_bytes", "usable_bytes"))
    changes, epochs = [], plan.get("epochs", 0)
    if epochs > MANY_EPOCHS:
        changes.append(too_many_epochs(epochs, plan["steps"] / epochs))
    optimal_tokens = plan["optimal_tokens"]
    share = plan["tokens"] / optimal_tokens if optimal_tokens and "tokens" in plan else 1.0
    if share < SMALL_SHARE:
        changes.append(
            f"the model is large for {plan['tokens']:,} tokens; use about {_round(plan['tokens'] / 20)} parameters "
            "(lower model.d_model or model.n_layers), or train longer"
        )
    elif share > LARGE_SHARE and epochs <= MANY_EPOCHS:
        changes.append(
            f"a model of about {_round(plan['tokens'] / 20)} parameters would learn more from these tokens "
            "(raise model.d_model or model.n_layers), but train more slowly"
        )
    if (plan.get("max_steps") or 0) > plan.get("steps", 0):
        ended = f"train.max_minutes ends the run after about {plan['steps']:,} of {plan['max_steps']:,} steps"
        changes.append(f"{ended}; raise it to train to the end")
    if plan["peak_bytes"] > plan["usable_bytes"]:
        remedy = "set train.micro_batch_size=auto or train.checkpoint_every_n_blocks=1, or lower data.seq_len"
        return [f"the run does not fit: it needs {peak}, but only {usable} is usable; {remedy}", *changes]
    return [f"the run fits{'' if changes else '; no changes needed'}", *changes]


def format_plan(plan: dict[str, Any]) -> str:
    """Format a plan as a table."""
    sizes = {name.removesuffix("_bytes"): format_bytes(n) for name, n in plan.items() if name.endswith("_bytes")}
    blocks = plan["parameters"] - plan["embedding_parameters"]
    peak = f"{sizes['peak']} of tensors; {sizes['free']} free"
    if "measured_peak_bytes" in plan:
        peak += f"; {sizes['measured_peak']} measured in four steps, including allocator overhead"
    rows = [
        ("parameters", f"{plan['parameters']:,}, {blocks:,} outside the embedding"),
        ("device", f"{plan['device']}, {plan['precision']}, {'compiled' if plan['compile'] else 'not compiled'}"),
        ("micro-batch", f"{plan['micro_batch_size']} sequences"),
        *((name, sizes[name]) for name in ("weights", "gradients", "optimizer", "activations")),
        ("peak memory", peak),
        ("KV cache", f"{sizes['cache']} for one full-length sequence when sampling"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token"),
    ]
    if "step_s" in plan:
        mfu = f", MFU {plan['mfu']:.2f}" if "mfu" in plan else ""
        rows.append(("speed", f"{plan['step_s']:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s{mfu}"))
    if "tokens" in plan:
        tokens, optimal = plan["tokens"], plan["optimal_tokens"]
        share = f"; {tokens / optimal:.2g} times the compute-optimal {optimal:,} (20 per parameter)" if optimal else ""
        epochs = f", {format_epochs(plan['epochs'])}" if "epochs" in plan else ""
        rows.append(("tokens", f"{tokens:,} in {plan['steps']:,} steps{epochs}{share}"))
    if "seconds" in plan:
        minutes = plan["seconds"] / 60
        rows.append(("time", f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"))
    rows += [("recommendation", line) for line in plan["recommendation"]]
    return "\n".join(f"{name:<18} {text}" for name, text in rows)


def format_epochs(epochs: float) -> str:
    """Format a number of epochs, such as "0.37 epochs", "1 epoch" or "120 epochs"."""
    number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return f"{number} epoch{'' if number == '1' else 's'}"


def describe_result(val: dict[str, Any], state: RunState) -> Lines:
    """Describe the result of a run, from its last evaluation."""
    lines = [
        f"finished: {state.step} steps, {state.tokens:,} tokens, {state.elapsed_s:.0f} s of training",
        f"validation loss {val['val_loss']:.4f} nats per token, {val['val_bits_per_byte']:.4f} bits per byte",
    ]
    patience = state.settings.train.patience
    if patience is not None and state.evaluations_since_best >= patience:
        best = state.best_step
        lines.append(f"stopped early: no lower validation loss in {patience} evaluations since step {best}")
    if state.skipped:
        lines.append(f"skipped {state.skipped} steps with a non-finite loss or gradient (see nonfinite-step-*.json)")
    if floor := val.get("entropy_floor"):
        excess = format_excess(val["val_loss"], floor, 1)
        lines.append(f"floor {floor:.4f} nats per token, the entropy of the corpus; the loss is {excess} the floor")
    return lines


def describe_fit(fit: Fit) -> str:
    """The training loss, its distance from the validation loss, and the verdict, as one line."""
    gap = fit.val_loss - fit.train_loss
    losses = (
        f"training loss {fit.train_loss:.4f}, {abs(gap):.4f} {'below' if gap >= 0 else 'above'} the validation loss"
    )
    return f"{losses}, after {format_epochs(fit.epochs)}: {fit.verdict}"


def describe_baselines(val: dict[str, Any], baselines: dict[str, float]) -> str:
    """Compare a model with simple models of the same text (evaluation.text_baselines), as one line."""
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in baselines.items())
    return f"bits per byte: this model {val['val_bits_per_byte']:.2f}, {others}"


def describe_levers(val: dict[str, Any], fit: Fit, state: RunState) -> str | None:
    """Estimate how far more time, text or parameters would lower the loss, the largest change first, as one line.

    None for fine-tuning, if the entropy floor is known, and for losses that the law does not describe.
    """
    settings = state.settings
    is_described = fit.verdict != NOT_IMPROVING and val["val_loss"] < math.log(settings.model.vocab_size)
    if settings.run.init_from or val.get("entropy_floor") or not is_described:
        return None
    losses = val["val_loss"], val["val_bits_per_byte"], fit.train_loss
    changes = predict_loss_changes(*losses, count_parameters(settings.model), state.tokens, fit.epochs)
    if changes is None:
        return None
    levers = [(changes.text, "text")]
    if fit.verdict != OVERFITTED:  # otherwise, more steps or parameters overfit more
        levers.append((changes.time, "steps" if settings.train.max_minutes is None else "minutes"))
        levers.append((changes.parameters, "parameters"))
    (first, name), *others = sorted(levers, reverse=True)
    rest = "".join(f", twice the {name} {_by_about(change)}" for change, name in others)
    return f"estimate: twice the {name} would lower the loss {_by_about(first)}{rest}"


def _by_about(change: float) -> str:
    return f"by about {change:.2f}" if change >= 0.01 else "by less than 0.01"


def sampling_hint(run: Path, state: RunState, is_chat: bool) -> str:
    """The command that samples from a run; with `is_chat`, the one that chats with it."""
    prompt = ""
    if prefix_len := state.settings.model.prefix:  # including the BOS token
        prompt = f' --prompt "at least {prefix_len} tokens of text"'
    prompt = ' --chat --prompt "your message"' if is_chat else prompt
    return f"sample from it: {_command('generate')} {shlex.quote(str(run))}{prompt}"


def _recent_mean(train: list[tuple[int, float]]) -> float:
    """Mean loss of the last lines, each (step, loss)."""
    recent = [loss for _, loss in train[-10:]]
    return sum(recent) / len(recent)


def _amount(tokens: TokenShards) -> str:
    """Format an amount of data, such as "512 tokens in 9 conversations"."""
    n = tokens.n_documents
    return f"{tokens.n_tokens:,} tokens in {n:,} {_kind(tokens)}{'s' if n != 1 else ''}"


def _kind(tokens: TokenShards) -> str:
    return "conversation" if tokens.has_conversations else "document"


def _round(n: float) -> str:
    return f"{float(f'{n:.1g}'):,.0f}"


def _command(name: str) -> str:
    """The start of a command line: thinker-NAME, or python NAME.py in a checkout."""
    script = Path(sys.argv[0])
    if script.name != "train.py":
        return f"thinker-{name}"
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return shlex.join([str(python), str(script.with_name(f"{name}.py"))])
