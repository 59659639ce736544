"""The summary and loss curve at the end of a run."""

import sys
from pathlib import Path
from typing import Any

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.corpus.corpus import Corpus
from thinker.evaluation.text_baselines import text_baselines
from thinker.runtime.registry import offers
from thinker.training.reports.after_training import after_training, describe_result, sampling_hint
from thinker.training.reports.fit import (
    Fit,
    assess_fit,
    describe_baselines,
    describe_fit,
    evaluations,
)
from thinker.training.reports.loss_plot import plot_loss
from thinker.training.reports.run_summary import RunSummary
from thinker.training.state.run_state import RunState


def print_summary(
    run: RunDirectory,
    state: RunState,
    epochs: float,
    corpus: Corpus,
    loader: BatchLoader | None = None,
) -> RunSummary | None:
    """Print the result, where it stands and advice, and plot the loss curve.

    loader: of the training batches. Returns what was printed; None on all ranks but the first, and
    if metrics.jsonl has no evaluation.
    """
    if not run.writes:
        return None
    lines = list(run.read_metrics())
    validations = evaluations(lines)
    if not validations:
        missing = f"{run.metrics} does not contain the result"
        print(f"finished: {state.step} steps; {missing}", file=sys.stderr)
        return None
    result = describe_result(validations[-1], state)
    for describe_evaluation in offers("describe_evaluation"):
        result += describe_evaluation(validations[-1])
    print("\n".join(result), flush=True)  # first, as the rest is slow

    plot = run.path / "loss.png"
    minutes = state.elapsed_s / 60
    plot_loss(lines, plot, f"{run.path.name}: {state.tokens:,} tokens in {minutes:.1f} minutes")
    summary = _summarize(run.path, result, lines, state, epochs, corpus, loader)
    messages = [*summary.assessment, f"loss curve {plot}", *summary.next_commands]
    messages += [f"advice: {text}" for text in summary.advice]
    print("\n".join(messages))
    return summary


def _summarize(
    path: Path,
    result: list[str],
    lines: list[dict[str, Any]],
    state: RunState,
    epochs: float,
    corpus: Corpus,
    loader: BatchLoader | None,
) -> RunSummary:
    """Assess a run from the lines of metrics.jsonl, of which one at least is an evaluation."""
    last = evaluations(lines)[-1]
    baselines = text_baselines(corpus)
    compared_state = state
    for comparable_losses in offers("comparable_losses"):
        compared = comparable_losses(state.settings, corpus, loader, lines, state.best_val_loss)
        if compared is not None:
            lines = compared
            compared_state = state.model_copy(update={"best_val_loss": None})

    fit = assess_fit(lines, compared_state, epochs, baselines)
    estimates = None
    if fit is not None and not last.get("entropy_floor"):
        from thinker.training.reports.estimates import describe_estimates

        estimates = describe_estimates(last, fit, compared_state)
    verdict = ""
    fit_line = ""
    if fit is not None:
        verdict = fit.verdict
        fit_line = describe_fit(fit)
    has_template = corpus.tokenizer.chat_template is not None
    is_chat = corpus.train.has_conversations and has_template
    comparison = ""
    if baselines:
        comparison = describe_baselines(last, baselines)
    return RunSummary(
        result=result,
        verdict=verdict,
        fit=fit_line,
        comparison=comparison,
        estimates=estimates or "",
        advice=after_training(lines, compared_state, epochs, baselines),
        next_commands=[sampling_hint(path, state, is_chat)],
        baselines=baselines or {},
        values=_values(last, fit, state, epochs, baselines or {}),
    )


def _values(
    val: dict[str, Any],
    fit: Fit | None,
    state: RunState,
    epochs: float,
    baselines: dict[str, float],
) -> dict[str, float]:
    """RunSummary.values, from the last evaluation."""
    values = dict(val)
    values |= {
        "step": state.step,
        "tokens": state.tokens,
        "processed_tokens": state.processed_tokens,
        "elapsed_s": state.elapsed_s,
        "epochs": epochs,
    }
    if fit is not None:
        values["train_loss"] = fit.train_loss
    if state.best_val_loss is not None:
        values["best_val_loss"] = state.best_val_loss
    for name, bits in baselines.items():
        values[f"baseline_bits_per_byte/{name}"] = bits
    return values
