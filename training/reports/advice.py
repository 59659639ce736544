"""Reports and advice: the data before training, the result after training, and the table of a
plan."""

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.evaluation.entropy_floor import format_excess
from thinker.evaluation.text_baselines import NGRAM
from thinker.runtime.memory import format_bytes
from thinker.training.reports.fit import (
    FAR_FROM_FLOOR,
    GOOD_EPOCHS,
    advise_on_fit,
    assess_fit,
    evaluations,
    format_epochs,
    is_worse_than_ngrams,
)
from thinker.training.settings.settings import Settings
from thinker.training.state.run_state import RunState

MANY_EPOCHS = 10  # without dropout
MAX_EPOCHS = 24.0  # more make the validation loss rise
MIN_DROPOUT = 0.1  # with which MAX_EPOCHS still help
FEW_STEPS = 20
MIN_VAL_TOKENS = 2000  # with fewer, the standard error of the loss is several hundredths of a nat
MIN_VAL_CONVERSATIONS = 10
MANY_CUT = 0.01  # of the documents
SMALL_SHARE, LARGE_SHARE = 0.01, 5.0  # of the compute-optimal number of tokens

Lines = list[str]


def before_training(
    settings: Settings, corpus: Corpus, loader: BatchLoader, kernel_problem: str
) -> Lines:
    """Describe the data of a run and warn if there is too little.

    kernel_problem: why the run does not use fused kernels, or "" if it does.
    """
    train = settings.train
    dataset = loader.dataset
    has_one_source = dataset.n_sources == 1
    is_known = train.max_steps is not None and has_one_source and not dataset.is_endless
    epochs = loader.epochs(train.max_steps)[0] if is_known else 0.0
    amount = _amount(corpus.train)
    if not loader.reads_corpus:
        amount = "a dataset of your own"
    elif has_one_source and dataset.is_endless:
        amount = "a stream"
    line = f"data: {amount} for training, {_amount(corpus.val)} for validation"
    at_most = "at most " if train.max_minutes is not None else ""
    if is_known:
        line += f"; {at_most}{format_epochs(epochs)} in {train.max_steps:,} steps"
    compiled = ", compiled" if train.compile else ""
    kernels = f"no fused kernels ({kernel_problem})" if kernel_problem else "fused kernels"
    size = f"micro-batches of {train.micro_batch_size} sequences"
    lines = [line, f"precision {train.precision}{compiled}, {kernels}, {size}"]
    if corpus.tokenizer.kind == "char":
        vocab_size, used = corpus.tokenizer.vocab_size, corpus.tokenizer.vocab_size - 257
        lines.append(
            f"char: {vocab_size:,} tokens (256 bytes to encode any text, {used:,} non-ASCII "
            f"characters, and BOS); "
            f"the loss starts at ln {vocab_size} = {math.log(vocab_size):.2f} and soon drops, "
            f"as most bytes never occur"
        )
    seq_len, n = settings.data.seq_len, corpus.train.n_documents
    n_cut = sum(int((np.diff(shard.offsets[:]) > seq_len).sum()) for shard in corpus.train.shards)
    if settings.data.packing != "contiguous" and n_cut > MANY_CUT * n:
        cut = (
            f"advice: {n_cut:,} of {n:,} {_kind(corpus.train)}s are longer than "
            f"data.seq_len={seq_len} and get cut"
        )
        lines.append(f"{cut}; raise data.seq_len (and model.max_seq_len if it is lower)")
    if train.max_steps is not None and train.warmup_steps >= train.max_steps:
        lines.append(
            f"advice: train.warmup_steps={train.warmup_steps:,} lasts until the end of the "
            f"run; lower it"
        )
    if few := few_to_validate(corpus.val):
        lines.append(
            f"advice: {few}, so its loss is imprecise; raise data.val_fraction or add text"
        )
    if epochs > most_epochs(settings.model.dropout):
        lines.append(f"advice: {too_many_epochs(epochs, train.max_steps / epochs, at_most)}")
    return lines


def few_to_validate(val: TokenShards) -> str | None:
    """The size of the validation set if it is too small for a precise loss, otherwise None."""
    if val.has_conversations and (n := val.n_documents) < MIN_VAL_CONVERSATIONS:
        return f"the validation split has only {n} conversation{'s' if n > 1 else ''}"
    return (
        f"the validation split has only {val.n_tokens:,} tokens"
        if val.n_tokens < MIN_VAL_TOKENS
        else None
    )


def most_epochs(dropout: float) -> float:
    """The number of epochs beyond which the validation loss of most texts rises."""
    return MAX_EPOCHS if dropout >= MIN_DROPOUT else MANY_EPOCHS


def too_many_epochs(epochs: float, steps_per_epoch: float, at_most: str = "") -> str:
    """Say that a run has too many epochs, and what to change."""
    steps = max(1, math.ceil(GOOD_EPOCHS * steps_per_epoch))
    seen = f"the model will see the data {at_most}{epochs:,.0f} times and memorize it"
    if steps < FEW_STEPS:  # too few to learn from
        return (
            f"{seen}; add text: {GOOD_EPOCHS} epochs are only {steps} "
            f"step{'s' if steps > 1 else ''}"
        )
    return (
        f"{seen}; add text or lower train.max_steps (to {steps:,} for {GOOD_EPOCHS} epochs); "
        f"raising model.dropout "
        "helps a little"
    )


def after_training(
    lines: list[dict[str, Any]],
    state: RunState,
    epochs: float,
    baselines: dict[str, float] | None = None,
) -> Lines:
    """Advice for a finished run, from its final state, the lines of metrics.jsonl and
    evaluation.text_baselines."""
    settings = state.settings
    validations = evaluations(lines)
    last, train = validations[-1], settings.train
    loss, advice = last["val_loss"], []
    uniform = math.log(settings.model.vocab_size)
    if round(loss, 2) > round(uniform, 2):  # as printed
        advice.append(
            f"the validation loss {loss:.2f} is above ln {settings.model.vocab_size} = "
            f"{uniform:.2f}, the loss of a "
            "uniform guess, so the model has learned nothing that helps on new text"
        )
    smaller = "" if settings.run.init_from else "a smaller model, "
    if fit := assess_fit(lines, state, epochs, baselines):
        advice += advise_on_fit(fit, f"{smaller}more text or a higher model.dropout")
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
            f"train.max_minutes={train.max_minutes:g} ended the run after "
            f"{state.step:,}{of_steps} steps; longer "
            f"training would lower the validation loss; continue it with {command} "
            f"train.max_minutes={minutes}"
        )
    if is_worse_than_ngrams(last, baselines) and not advice:
        stopped_early = (
            train.patience is not None and state.evaluations_since_lowest >= train.patience
        )
        key = "max_minutes" if by_time else "patience" if stopped_early else "max_steps"
        advice.append(
            f"a {NGRAM} model predicts the text better than this model; train longer: raise "
            f"train.{key}"
        )
    return [f"advice: {line}" for line in advice]


def recommendation(plan: dict[str, Any]) -> Lines:
    """Whether a run fits in memory, and advice on epochs and model size: 1 to 3 lines."""
    peak, usable = (format_bytes(plan[name]) for name in ("peak_bytes", "usable_bytes"))
    changes, epochs = [], plan.get("epochs", 0)
    most = most_epochs(plan.get("dropout", 0.0))
    if epochs > most:
        changes.append(too_many_epochs(epochs, plan["steps"] / epochs))
    optimal_tokens = plan["optimal_tokens"]
    share = plan["tokens"] / optimal_tokens if optimal_tokens and "tokens" in plan else 1.0
    if share < SMALL_SHARE:
        changes.append(
            f"the model is large for {plan['tokens']:,} tokens; use about "
            f"{_round(plan['tokens'] / 20)} parameters "
            "(lower model.d_model or model.n_layers), or train longer"
        )
    elif share > LARGE_SHARE and epochs <= most:
        changes.append(
            f"a model of about {_round(plan['tokens'] / 20)} parameters would learn more from "
            f"these tokens "
            "(raise model.d_model or model.n_layers), but train more slowly"
        )
    if (plan.get("max_steps") or 0) > plan.get("steps", 0):
        ended = (
            f"train.max_minutes ends the run after about {plan['steps']:,} of "
            f"{plan['max_steps']:,} steps"
        )
        changes.append(f"{ended}; raise it to train to the end")
    if plan["peak_bytes"] > plan["usable_bytes"]:
        remedy = (
            "set train.micro_batch_size=auto or train.checkpoint_every_n_blocks=1, or "
            "lower data.seq_len"
        )
        return [
            f"the run does not fit: it needs {peak}, but only {usable} is usable; {remedy}",
            *changes,
        ]
    return [f"the run fits{'' if changes else '; no changes needed'}", *changes]


def format_plan(plan: dict[str, Any]) -> str:
    """Format a plan as a table."""
    sizes = {
        name.removesuffix("_bytes"): format_bytes(n)
        for name, n in plan.items()
        if name.endswith("_bytes")
    }
    blocks = plan["parameters"] - plan["embedding_parameters"]
    peak = f"{sizes['peak']} of tensors; {sizes['free']} free"
    if "measured_peak_bytes" in plan:
        peak += f"; {sizes['measured_peak']} measured in four steps, including allocator overhead"
    rows = [
        ("parameters", f"{plan['parameters']:,}, {blocks:,} outside the embedding"),
        (
            "device",
            f"{plan['device']}, {plan['precision']}, "
            f"{'compiled' if plan['compile'] else 'not compiled'}",
        ),
        ("micro-batch", f"{plan['micro_batch_size']} sequences"),
        *((name, sizes[name]) for name in ("weights", "gradients", "optimizer", "activations")),
        ("peak memory", peak),
        ("KV cache", f"{sizes['cache']} for one full-length sequence when sampling"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token"),
    ]
    if "step_s" in plan:
        mfu = f", MFU {plan['mfu']:.2f}" if "mfu" in plan else ""
        rows.append(
            (
                "speed",
                f"{plan['step_s']:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s{mfu}",
            )
        )
    if "tokens" in plan:
        tokens, optimal = plan["tokens"], plan["optimal_tokens"]
        share = (
            f"; {tokens / optimal:.2g} times the compute-optimal {optimal:,} (20 per parameter)"
            if optimal
            else ""
        )
        epochs = f", {format_epochs(plan['epochs'])}" if "epochs" in plan else ""
        rows.append(("tokens", f"{tokens:,} in {plan['steps']:,} steps{epochs}{share}"))
    if "seconds" in plan:
        minutes = plan["seconds"] / 60
        rows.append(
            ("time", f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours")
        )
    rows += [("recommendation", line) for line in plan["recommendation"]]
    return "\n".join(f"{name:<18} {text}" for name, text in rows)


def describe_result(val: dict[str, Any], state: RunState) -> Lines:
    """Describe the result of a run, from its last evaluation."""
    lines = [
        f"finished: {state.step} steps, {state.tokens:,} tokens, {state.elapsed_s:.0f} s of "
        f"training",
        f"validation loss {val['val_loss']:.4f} nats per token, "
        f"{val['val_bits_per_byte']:.4f} bits per byte",
    ]
    patience = state.settings.train.patience
    if patience is not None and state.evaluations_since_lowest >= patience:
        lines.append(
            f"stopped early: no lower loss in {patience} evaluations since step {state.lowest_at}"
        )
    if state.skipped:
        lines.append(
            f"skipped {state.skipped} steps with a non-finite loss or gradient (see "
            f"nonfinite-step-*.json)"
        )
    if floor := val.get("entropy_floor"):
        excess = format_excess(val["val_loss"], floor, 1)
        lines.append(
            f"floor {floor:.4f} nats per token, the entropy of the corpus; the loss is "
            f"{excess} the floor"
        )
    return lines


def sampling_hint(run: Path, state: RunState, is_chat: bool) -> str:
    """The command that samples from a run; with `is_chat`, the one that chats with it."""
    prompt = ""
    if prefix_len := state.settings.model.prefix:  # including the BOS token
        prompt = f' --prompt "at least {prefix_len} tokens of text"'
    prompt = ' --chat --prompt "your message"' if is_chat else prompt
    return f"sample from it: {_command('generate')} {shlex.quote(str(run))}{prompt}"


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
