"""Plain lines about a training: what to expect of its data before it starts, what its result means, what to change."""

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.corpus import Corpus
from thinker.data.shards import TokenShards
from thinker.evaluation.perplexity import format_excess
from thinker.runtime.memory import format_bytes
from thinker.training.config import Settings
from thinker.training.resume import RunState

MANY_EPOCHS = 10  # up to 4 repetitions are worth nearly as much as new text (Muennighoff et al. 2023, arXiv:2305.16264)
GOOD_EPOCHS = 4
MIN_VAL_TOKENS = 2000  # the standard error of the mean of so few tokens is several hundredths of a nat
MIN_VAL_CONVERSATIONS = 10
MANY_CUT = 0.01  # of the documents
OVERFITTING = 0.02  # relative rise of the validation loss above its lowest value
FAR_FROM_FLOOR = 0.06
SMALL_SHARE, LARGE_SHARE = 0.01, 5.0  # of the compute-optimal number of tokens

Lines = list[str]


def before_training(settings: Settings, corpus: Corpus, n_sequences: int) -> Lines:
    """What the run will read: how much, how often, and what is too little. `n_sequences`: in the training split."""
    train, steps_per_epoch = settings.train, n_sequences / settings.train.batch_size
    line = f"data: {_amount(corpus.train)} for training, {_amount(corpus.val)} for validation"
    at_most = "at most " if train.max_minutes is not None else ""
    if train.max_steps is not None:
        line += f"; {at_most}{format_epochs(train.max_steps / steps_per_epoch)} in {train.max_steps:,} steps"
    compiled = ", compiled" if train.compile else ""
    lines = [line, f"computing in {train.precision}{compiled}, {train.micro_batch_size} sequences at a time"]
    if corpus.tokenizer.kind == "char":
        vocab_size, used = corpus.tokenizer.vocab_size, corpus.tokenizer.vocab_size - 257
        lines.append(
            f"char: {vocab_size:,} tokens, namely all 256 bytes, so that any text can be encoded, {used:,} characters "
            f"beyond ASCII, and the start of a text; an untrained model has a loss of ln {vocab_size} = "
            f"{math.log(vocab_size):.2f}, and soon learns which tokens never occur"
        )
    seq_len, n = settings.data.seq_len, corpus.train.n_documents
    n_cut = sum(int((np.diff(shard.offsets[:]) > seq_len).sum()) for shard in corpus.train.shards)
    if settings.data.packing == "documents" and n_cut > MANY_CUT * n:
        cut = f"advice: {n_cut:,} of {n:,} {_kind(corpus.train)}s are longer than data.seq_len={seq_len} and are cut"
        lines.append(f"{cut}; raise it, and model.max_seq_len where the model's context is shorter")
    if train.max_steps is not None and train.warmup_steps >= train.max_steps:
        lines.append(f"advice: train.warmup_steps={train.warmup_steps:,} leaves no step at the peak rate; lower it")
    if few := few_to_validate(corpus.val):
        lines.append(f"advice: {few}; its loss will be imprecise. Raise data.val_fraction or give it more text")
    if train.max_steps is not None and train.max_steps / steps_per_epoch > MANY_EPOCHS:
        lines.append(f"advice: {too_many_epochs(train.max_steps / steps_per_epoch, steps_per_epoch, at_most)}")
    return lines


def few_to_validate(val: TokenShards) -> str | None:
    """What the validation set consists of where that is too little for a precise loss."""
    if val.has_conversations and (n := val.n_documents) < MIN_VAL_CONVERSATIONS:
        return f"validation reads only {n} conversation{'s' if n > 1 else ''}"
    return f"validation reads only {val.n_tokens:,} tokens" if val.n_tokens < MIN_VAL_TOKENS else None


def too_many_epochs(epochs: float, steps_per_epoch: float, at_most: str = "") -> str:
    """That the data is read too often, and what to do."""
    steps = max(1, math.ceil(GOOD_EPOCHS * steps_per_epoch))
    return (
        f"the data will be read {at_most}{epochs:,.0f} times, so the model will memorize it: give it more text, "
        f"or lower train.max_steps (to {steps:,} for {GOOD_EPOCHS} epochs); a higher model.dropout helps a little"
    )


def after_training(lines: list[dict[str, Any]], state: RunState, epochs: float) -> Lines:
    """What the lines of metrics.jsonl say about the run that has ended in this state, and what to change."""
    settings = state.settings
    validations = [line for line in lines if "val_loss" in line]
    last, train = validations[-1], settings.train
    loss, advice = last["val_loss"], []
    uniform = math.log(settings.model.vocab_size)
    if round(loss, 2) > round(uniform, 2):  # as they are shown
        advice.append(
            f"the validation loss {loss:.2f} is above ln {settings.model.vocab_size} = {uniform:.2f}, the loss of "
            "guessing every token with the same probability: the model has learned nothing that helps on new text"
        )
    # Lower than the weights that are kept: measured before train.eval_sequences was changed, on other sequences.
    comparable = [line for line in validations if line["val_loss"] >= (state.best_val_loss or 0.0)]
    smaller = "" if settings.run.init_from else "a smaller model, "
    advice += _overfitting(lines, comparable or [last], epochs, f"{smaller}more text or a higher model.dropout")
    floor = last.get("entropy_floor")
    is_falling = loss <= min(line["val_loss"] for line in validations)
    by_time = train.max_minutes is not None and state.elapsed_s >= 60 * train.max_minutes
    if by_time and (loss / floor - 1 > FAR_FROM_FLOOR if floor else is_falling and not advice):
        of_steps = f" of {train.max_steps:,}" if train.max_steps else ""
        minutes = math.ceil(2 * train.max_minutes)
        advice.append(
            f"train.max_minutes={train.max_minutes:g} ended the run after {state.step:,}{of_steps} steps; more would "
            f"lower the validation loss: the same command with train.max_minutes={minutes} resumes it"
        )
    return [f"advice: {line}" for line in advice]


def _overfitting(lines: list[dict[str, Any]], validations: list[dict[str, Any]], epochs: float, remedy: str) -> Lines:
    """Whether validation got worse while training got better, and since when."""
    best, loss = min(validations, key=lambda line: line["val_loss"]), validations[-1]["val_loss"]
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    if not train:
        return []
    recent = [value for _, value in train[-10:]]
    now = sum(recent) / len(recent)
    times = f"; the data was read {epochs:,.1f} times" if epochs > 1 else ""
    if loss > best["val_loss"] * (1 + OVERFITTING):
        until = [value for step, value in train if step <= best["step"]][-10:]
        if until and now < sum(until) / len(until):
            return [
                f"overfitting: since step {best['step']:,} the validation loss has risen from {best['val_loss']:.3f} "
                f"to {loss:.3f} while the training loss fell to {now:.3f}{times}. The weights of step "
                f"{best['step']:,} are kept (generate.py --checkpoint best); fewer steps, {remedy} help"
            ]
        return [
            f"the validation loss was lowest at step {best['step']:,}, {best['val_loss']:.3f}; the weights of that "
            "step are kept (generate.py --checkpoint best)"
        ]
    if epochs > GOOD_EPOCHS and loss > 1.5 * now:
        return [f"overfitting: the validation loss is {loss:.3f}, the training loss {now:.3f}{times}; {remedy} helps"]
    return []


def recommendation(plan: dict[str, Any]) -> Lines:
    """Whether a plan fits, and what to change about it: 1 to 3 lines, and none on the size of a given model."""
    peak, usable = (format_bytes(plan[name]) for name in ("peak_bytes", "usable_bytes"))
    changes, epochs = [], plan.get("epochs", 0)
    if epochs > MANY_EPOCHS:
        changes.append(too_many_epochs(epochs, plan["steps"] / epochs))
    optimal_tokens = plan["optimal_tokens"]
    share = plan["tokens"] / optimal_tokens if optimal_tokens and "tokens" in plan else 1.0
    if share < SMALL_SHARE:
        changes.append(
            f"the model is large for {plan['tokens']:,} tokens: one of about {_round(plan['tokens'] / 20)} parameters "
            "learns most from them (lower model.d_model or model.n_layers); or train longer"
        )
    elif share > LARGE_SHARE and epochs <= MANY_EPOCHS:
        changes.append(
            f"a model of about {_round(plan['tokens'] / 20)} parameters would learn more from as many tokens "
            "(raise model.d_model or model.n_layers), but takes longer"
        )
    if plan["peak_bytes"] > plan["usable_bytes"]:
        remedy = "train.micro_batch_size=auto, train.checkpoint_every_n_blocks=1 or a shorter data.seq_len takes less"
        return [f"it does not fit: it takes {peak}, and {usable} can be used; {remedy}", *changes]
    return [f"it fits{'' if changes else ', and nothing needs to be changed'}", *changes]


def format_plan(plan: dict[str, Any]) -> str:
    """A plan as a table for people."""
    sizes = {name.removesuffix("_bytes"): format_bytes(n) for name, n in plan.items() if name.endswith("_bytes")}
    blocks = plan["parameters"] - plan["embedding_parameters"]
    peak = f"{sizes['peak']} of tensors, {sizes['free']} free"
    if "measured_peak_bytes" in plan:
        peak += f", {sizes['measured_peak']} measured in four steps, with what the allocator reserves"
    rows = [
        ("parameters", f"{plan['parameters']:,}, {blocks:,} outside the embedding"),
        ("device", f"{plan['device']}, {plan['precision']}, {'compiled' if plan['compile'] else 'not compiled'}"),
        ("sequences at once", f"{plan['micro_batch_size']}"),
        *((name, sizes[name]) for name in ("weights", "gradients", "optimizer", "activations")),
        ("peak memory", peak),
        ("cache", f"{sizes['cache']} for a sequence of full length, when sampling"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token"),
    ]
    if "step_s" in plan:
        mfu = f", MFU {plan['mfu']:.2f}" if "mfu" in plan else ""
        rows.append(("speed", f"{plan['step_s']:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s{mfu}"))
    if "tokens" in plan:
        tokens, optimal = plan["tokens"], plan["optimal_tokens"]
        share = f": {tokens / optimal:.2g} of the compute-optimal {optimal:,} (20 per parameter)" if optimal else ""
        epochs = f", {format_epochs(plan['epochs'])}" if "epochs" in plan else ""
        rows.append(("tokens", f"{tokens:,} in {plan['steps']:,} steps{epochs}{share}"))
    if "seconds" in plan:
        minutes = plan["seconds"] / 60
        rows.append(("time", f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"))
    rows += [("recommendation", line) for line in plan["recommendation"]]
    return "\n".join(f"{name:<18} {text}" for name, text in rows)


def format_epochs(epochs: float) -> str:
    """For example "0.37 epochs", "1 epoch", "1.4 epochs", "120 epochs"."""
    number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return f"{number} epoch{'' if number == '1' else 's'}"


def describe_result(val: dict[str, Any], state: RunState) -> Lines:
    """The result of a run by its last validation."""
    lines = [
        f"finished: {state.step} steps, {state.tokens:,} tokens, {state.elapsed_s:.0f} s of training",
        f"validation loss {val['val_loss']:.4f} nats per token, {val['val_bits_per_byte']:.4f} bits per byte",
    ]
    if state.skipped:
        lines.append(f"{state.skipped} steps were skipped: loss or gradient was not finite (nonfinite-step-*.json)")
    if floor := val.get("entropy_floor"):
        excess = format_excess(val["val_loss"], floor, 1)
        lines.append(f"entropy of the corpus {floor:.4f} nats per token: the model is {excess} the best possible")
    return lines


def sampling_hint(run: Path, state: RunState, is_chat: bool) -> str:
    """The command that samples from a run; with `is_chat` a prompt is a message."""
    command, prompt = "thinker-generate", ""
    if (script := Path(sys.argv[0])).name == "train.py":  # in a checkout
        python = Path(sys.executable)
        python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        command = shlex.join([str(python), str(script.with_name("generate.py"))])
    if prefix_len := state.settings.model.prefix:  # the BOS token is one of them
        prompt = f' --prompt "at least {prefix_len} tokens of text"'
    prompt = ' --chat --prompt "your message"' if is_chat else prompt
    return f"sample from it: {command} {shlex.quote(str(run))}{prompt}"


def _amount(tokens: TokenShards) -> str:
    """For example "9 conversations with 512 tokens"."""
    n = tokens.n_documents
    return f"{tokens.n_tokens:,} tokens in {n:,} {_kind(tokens)}{'s' if n != 1 else ''}"


def _kind(tokens: TokenShards) -> str:
    return "conversation" if tokens.has_conversations else "document"


def _round(n: float) -> str:
    return f"{float(f'{n:.1g}'):,.0f}"
