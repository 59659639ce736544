"""A plan in words: what it recommends, and its table."""

from typing import Any

from thinker.runtime.memory import format_bytes
from thinker.training.metrics import format_trained
from thinker.training.reports.epochs import FEW_STEPS, format_epochs, most_epochs, too_many_epochs

OPTIMAL_TOKENS = 20  # per parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3)
LEAST_PARAMETERS = 10_000  # smaller models learn nothing
SMALL_SHARE, LARGE_SHARE = 0.01, 5.0  # of the compute-optimal number of tokens


def recommendation(plan: dict[str, Any]) -> list[str]:
    """Whether a run fits in memory, and advice on epochs and model size: 1 to 3 lines."""
    changes = []
    epochs = plan.get("epochs", 0)
    most = most_epochs(plan.get("dropout", 0.0))
    if epochs > most:
        changes.append(too_many_epochs(epochs, plan["steps"] / epochs))
    share = _share_of_optimum(plan)
    if plan.get("size_is_chosen"):  # by model.size
        share = None
    if share is not None and share < SMALL_SHARE:
        changes.append(_too_large(plan, 2 * epochs <= most))
    elif share is not None and share > LARGE_SHARE and epochs <= most:
        changes.append(
            f"a model of about {_best_size(plan)} parameters would learn more from these tokens "
            f"(raise model.d_model or model.n_layers), but train more slowly"
        )
    max_steps = plan.get("max_steps") or 0
    if max_steps > plan.get("steps", 0):
        changes.append(
            f"train.max_minutes ends the run after about {plan['steps']:,} of {max_steps:,} steps; "
            f"raise it to train to the end"
        )
    if plan["peak_bytes"] > plan["usable_bytes"]:
        peak = format_bytes(plan["peak_bytes"])
        usable = format_bytes(plan["usable_bytes"])
        remedy = (
            "set train.micro_batch_size=auto or train.checkpoint_every_n_blocks=1, or lower "
            "data.seq_len"
        )
        fits = f"the run does not fit: it needs {peak}, but only {usable} is usable; {remedy}"
    elif changes:
        fits = "the run fits"
    else:
        fits = "the run fits; no changes needed"
    return [fits, *changes]


def _too_large(plan: dict[str, Any], may_train_longer: bool) -> str:
    """What to do about too few tokens for a model."""
    steps = plan["steps"]
    if steps < FEW_STEPS and may_train_longer:
        limit = "max_steps" if plan.get("max_steps", steps) is not None else "max_minutes"
        plural = "s are" if steps != 1 else " is"
        return f"{steps} step{plural} too few to learn from; train longer (raise train.{limit})"
    text = f"the model is large for {plan['tokens']:,} tokens; "
    more = "train longer" if may_train_longer else "add text"
    if plan["tokens"] < OPTIMAL_TOKENS * LEAST_PARAMETERS:
        return text + more
    size = _best_size(plan)
    return f"{text}use about {size} parameters (lower model.d_model or model.n_layers), or {more}"


def _share_of_optimum(plan: dict[str, Any]) -> float | None:
    """The tokens of a plan as a share of the compute-optimal number; None if that is unknown."""
    if not plan["optimal_tokens"] or "tokens" not in plan:
        return None
    return plan["tokens"] / plan["optimal_tokens"]


def _best_size(plan: dict[str, Any]) -> str:
    """The number of parameters for which the tokens of a plan are compute-optimal."""
    rounded = float(f"{plan['tokens'] / OPTIMAL_TOKENS:.1g}")
    return f"{rounded:,.0f}"


def format_plan(plan: dict[str, Any]) -> str:
    """Format a plan as a table."""
    blocks = plan["parameters"] - plan["embedding_parameters"]
    compiled = "compiled" if plan["compile"] else "not compiled"
    rows = [
        ("parameters", f"{plan['parameters']:,}, {blocks:,} outside the embedding"),
        ("device", f"{plan['device']}, {plan['precision']}, {compiled}"),
        ("micro-batch", f"{plan['micro_batch_size']} sequences"),
    ]
    for name in ("weights", "gradients", "optimizer", "activations"):
        rows.append((name, format_bytes(plan[f"{name}_bytes"])))
    cache = format_bytes(plan["cache_bytes"])
    rows += [
        ("peak memory", _peak_memory(plan)),
        ("KV cache", f"{cache} for one full-length sequence when sampling"),
        ("compute", f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token"),
    ]
    if "step_s" in plan:
        rows.append(("speed", _speed(plan)))
    if "tokens" in plan:
        rows.append(("tokens", _tokens(plan)))
    if "seconds" in plan:
        rows.append(("time", _time(plan["seconds"] / 60)))
    for line in plan["recommendation"]:
        rows.append(("recommendation", line))
    return "\n".join(f"{name:<18} {text}" for name, text in rows)


def _peak_memory(plan: dict[str, Any]) -> str:
    peak = format_bytes(plan["peak_bytes"])
    text = f"{peak} of tensors; {format_bytes(plan['free_bytes'])} free"
    if "measured_peak_bytes" in plan:
        measured = format_bytes(plan["measured_peak_bytes"])
        text += f"; {measured} measured in four steps, including allocator overhead"
    return text


def _speed(plan: dict[str, Any]) -> str:
    text = f"{plan['step_s']:.3g} s per step, {plan['tokens_per_second']:,.0f} tokens/s"
    text += format_trained(
        plan["tokens_per_second"], plan["trained_tokens_per_second"], ", {} of them trained on"
    )
    if "mfu" in plan:
        text += f", MFU {plan['mfu']:.2f}"
    return text


def _tokens(plan: dict[str, Any]) -> str:
    tokens = f"{plan['tokens']:,}"
    processed = plan["processed_tokens"]
    if format_trained(processed, plan["tokens"], "{}"):
        tokens = f"{tokens} of {processed:,} trained on,"
    text = f"{tokens} in {plan['steps']:,} steps"
    if "epochs" in plan:
        text += f", {format_epochs(plan['epochs'])}"
    share = _share_of_optimum(plan)
    if share is not None:
        optimum = f"{plan['optimal_tokens']:,} (20 per parameter)"
        text += f"; {share:.2g} times the compute-optimal {optimum}"
    return text


def _time(minutes: float) -> str:
    if minutes < 120:
        return f"{minutes:.1f} minutes"
    return f"{minutes / 60:.1f} hours"
