"""The summary and loss curve at the end of a run."""

import sys

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.corpus.corpus import Corpus
from thinker.evaluation.text_baselines import text_baselines
from thinker.runtime.registry import offers
from thinker.training.reports.after_training import after_training, describe_result, sampling_hint
from thinker.training.reports.fit import assess_fit, describe_baselines, describe_fit, evaluations
from thinker.training.reports.loss_plot import plot_loss
from thinker.training.state.run_state import RunState


def print_summary(
    run: RunDirectory,
    state: RunState,
    epochs: float,
    corpus: Corpus,
    loader: BatchLoader | None = None,
) -> None:
    """Print the result, where it stands and advice, and plot the loss curve. loader: of the
    training batches."""
    if not run.writes:
        return
    lines = list(run.read_metrics())
    validations = evaluations(lines)
    if not validations:
        missing = f"{run.metrics} does not contain the result"
        print(f"finished: {state.step} steps; {missing}", file=sys.stderr)
        return
    last = validations[-1]
    result = describe_result(last, state)
    for describe_evaluation in offers("describe_evaluation"):
        result += describe_evaluation(last)
    print("\n".join(result), flush=True)  # first, as the rest is slow

    baselines = text_baselines(corpus)
    plot = run.path / "loss.png"
    minutes = state.elapsed_s / 60
    plot_loss(lines, plot, f"{run.path.name}: {state.tokens:,} tokens in {minutes:.1f} minutes")
    for comparable_losses in offers("comparable_losses"):
        compared = comparable_losses(state.settings, corpus, loader, lines, state.best_val_loss)
        if compared is not None:
            lines = compared
            state = state.model_copy(update={"best_val_loss": None})

    messages = []
    fit = assess_fit(lines, state, epochs, baselines)
    if fit is not None:
        messages.append(describe_fit(fit))
    if baselines:
        messages.append(describe_baselines(last, baselines))
    if fit is not None and not last.get("entropy_floor"):
        from thinker.training.reports.estimates import describe_estimates

        estimates = describe_estimates(last, fit, state)
        if estimates is not None:
            messages.append(estimates)
    messages.append(f"loss curve {plot}")
    messages.append(sampling_hint(run.path, state, corpus.train.has_conversations))
    messages += after_training(lines, state, epochs, baselines)
    print("\n".join(messages))
