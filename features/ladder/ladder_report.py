"""What `thinker ladder` prints and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from thinker.features.ladder.ladder_plan import LadderPlan
from thinker.features.ladder.ladder_result import LadderResult
from thinker.features.sweeps.comparison_report import print_event
from thinker.features.sweeps.sweep import Sweep, SweepRun
from thinker.runtime.files import atomic_write
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, save_figure
from thinker.training.reports.epochs import GOOD_EPOCHS

BAR = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]{postfix}"
RESULTS = "ladder.json"
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


class LadderReport:
    """Prints the plan, the progress, the prediction and its check: for people, or as lines of JSON
    for programs."""

    def __init__(self, plan: LadderPlan, folder: Path, as_json: bool) -> None:
        self.plan = plan
        self.folder = folder
        self.as_json = as_json

    def describe(self, sweep: Sweep) -> None:
        """Say what will be trained, and for how long."""
        sizes = {rung.name: rung for rung in [*self.plan.rungs, self.plan.target]}
        left = [sizes[run.setting.name] for run in sweep.unfinished]
        seconds = 0.0
        if left:
            print("timing a few steps of each size", file=sys.stderr)
            times = {rung.name: self.plan.seconds(rung) for rung in set(left)}
            seconds = sum(times[rung.name] for rung in left)
        target = self.plan.target
        epochs = self.plan.epochs(target)
        if self.as_json:
            rows = [rung.as_row() for rung in self.plan.rungs]
            runs = len(sweep.runs)
            print_event(
                "start", sizes=rows, target=target.as_row() | {"epochs": epochs}, runs=runs,
                left=len(left), seconds=seconds,
            )  # fmt: skip
            return
        lines = [f"{'size':<12} {'parameters':>12} {'steps':>8} {'tokens':>14} {'FLOPs':>9}"]
        shown = dict.fromkeys(sizes[run.setting.name] for run in sweep.runs[::-1])
        for rung in shown:
            row = f"{rung.name:<12} {rung.parameters:>12,.0f} {rung.steps:>8,} {rung.tokens:>14,}"
            lines.append(f"{row} {rung.flops:>9.2e}")
        n_finished = len(sweep.runs) - len(left)
        text = f"{len(left)} runs to train in {self.folder}, about {format_seconds(seconds)}"
        if n_finished:
            text += f"; {n_finished} are finished"
        lines.append(text)
        if target not in shown:
            text = f"then: the loss of {target.name} after {target.steps:,} steps"
            lines.append(f"{text}, {target.flops:.2e} FLOPs")
        if self.plan.has_fit:
            lines.append(
                "no size is fitted to the pairs of its tokens before it is trained "
                "(train.fit_bigrams=off); thinker train may do that, and end lower"
            )
        if epochs is not None and epochs > GOOD_EPOCHS:
            lines.append(
                f"advice: {target.name} would read the text {epochs:.0f} times. Repeated text "
                "teaches less, which no smaller size can tell; lower --tokens-per-parameter"
            )
        print("\n".join(lines), file=sys.stderr)

    def train(self, sweep: Sweep, jobs: int) -> None:
        """Train the runs that have not ended, with a progress bar over their FLOPs.

        A signal stops them; then the same command continues.
        """
        from thinker.runtime.process.progress import Progress

        sweep.open()
        try:
            self.describe(sweep)
            sizes = {rung.name: rung for rung in [*self.plan.rungs, self.plan.target]}

            def flops_done() -> float:
                done = 0.0
                for run in sweep.runs:
                    done += run.progress() * sizes[run.setting.name].flops
                return done

            total = sum(sizes[run.setting.name].flops for run in sweep.runs)
            before = flops_done()
            with Progress(total=total, initial=before, desc="ladder", bar_format=BAR) as bar:

                def on_wait() -> None:
                    done = flops_done()
                    if done > bar.n:  # otherwise a log would get a line twice a second
                        bar.update(done - bar.n)

                def on_end(run: SweepRun) -> None:
                    loss = run.result().final("val_loss")
                    if self.as_json:
                        name, status = run.setting.name, run.status
                        print_event("run", size=name, seed=run.seed, status=status, loss=loss)
                    if run.status == "finished":
                        bar.set_postfix_str(f"{run.setting.name}: {loss:.4f}")

                sweep.train(jobs, on_end, on_wait)
                on_wait()
        except (KeyboardInterrupt, SystemExit):
            n_left = len(sweep.unfinished)
            text = f"stopped with {n_left} runs left; the same command continues"
            if self.as_json:
                print_event("stopped", left=n_left)
            else:
                print(text, file=sys.stderr)
            raise
        finally:
            sweep.close()

    def predict(self, result: LadderResult) -> None:
        """Print the losses, the law and the prediction."""
        if self.as_json:
            return
        lines = [f"{'size':<12} {'seed':>4} {'FLOPs':>9} {'loss':>8} {'law':>8}"]
        law = result.fit.law
        for row in result.rows:
            start = f"{row['size']:<12} {row['seed']:>4} {row['flops']:>9.2e}"
            lines.append(f"{start} {row['loss']:>8.4f} {law(row['flops']):>8.4f}")
        floor = "fitted"
        if result.fit.known_floor is not None:
            floor = "the entropy of the corpus"
        formula = f"loss = {law.floor:.3f} + {law.scale:.3g} · FLOPs^-{law.exponent:.3f}"
        lines.append(f"{formula} (floor: {floor}; runs deviate by {result.fit.noise:.4f} nats)")
        target, found = self.plan.target, result.prediction
        gap = target.flops / self.plan.rungs[-1].flops
        lines.append(
            f"predicted for {target.name} with {target.flops:.2e} FLOPs ({gap:.1f} times those of "
            f"{self.plan.rungs[-1].name}): {found.loss:.4f} nats per token, 95% interval "
            f"{found.low:.4f} to {found.high:.4f}"
        )
        print("\n".join(lines))

    def check(self, result: LadderResult) -> None:
        """Print how far the prediction was from the loss of the target."""
        if self.as_json:
            return
        side = "above"
        if result.error < 0:
            side = "below"
        found = result.prediction
        place = "outside"
        if found.low <= result.checked <= found.high:
            place = "inside"
        distance = f"{abs(result.error):.2%} {side} the prediction, {place} the interval"
        print(f"trained: {result.checked:.4f}, {distance}")

    def end(self, result: LadderResult, png: Path) -> None:
        """Write the results and the plot."""
        values = result.as_json()
        atomic_write(self.folder / RESULTS, json.dumps(values, indent=1) + "\n")
        draw(result, png)
        if self.as_json:
            files = {"results": str(self.folder / RESULTS), "png": str(png)}
            print_event("done", **values, files=files)
            return
        print(f"plot {png}")


def format_seconds(seconds: float) -> str:
    """A time for people, in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def draw(result: LadderResult, path: Path) -> None:
    """Loss by compute on log axes: the runs, the law with its interval, and the target."""
    figure, (axes,) = new_figure(7, 4.5)
    target = result.plan.target
    flops = [row["flops"] for row in result.rows]
    law = result.fit.law
    compute = np.geomspace(flops[0] / 1.5, target.flops * 2, 80)
    found = [result.fit.predict(each) for each in compute]
    lows, highs = [each.low for each in found], [each.high for each in found]
    axes.fill_between(compute, lows, highs, color=ORANGE, alpha=0.15, label="95% interval of a run")
    label = f"{law.floor:.3f} + {law.scale:.3g} · FLOPs$^{{-{law.exponent:.3f}}}$"
    axes.plot(compute, law(compute), color=ORANGE, linestyle="--", label=label)
    losses = [row["loss"] for row in result.rows]
    axes.plot(flops, losses, "o", color=BLUE, label="trained copies")
    axes.plot(
        target.flops, result.prediction.loss, "D", color=ORANGE, markersize=8, fillstyle="none",
        label=f"{target.name}: {result.prediction.loss:.3f} predicted",
    )  # fmt: skip
    if result.checked is not None:
        label = f"{target.name}: {result.checked:.3f} trained"
        axes.plot(target.flops, result.checked, "x", color="black", markersize=9, label=label)
    if result.fit.known_floor is not None:
        label = f"entropy of the corpus: {law.floor:.3f}"
        axes.axhline(law.floor, color=GREY, linestyle=":", label=label)
    axes.axvline(result.plan.rungs[-1].flops, color=GREY, alpha=0.4, linewidth=1)
    shown = [*losses, law(compute[-1]), result.prediction.low, result.prediction.high]
    if result.checked is not None:
        shown.append(result.checked)
    if result.fit.known_floor is not None:
        shown.append(law.floor)
    positive = [loss for loss in shown if loss > 0]  # the interval may reach below
    bottom, top = 0.97 * min(positive), 1.03 * max(positive)
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(bottom, top),
        xlabel="training FLOPs",
        ylabel="validation loss (nats per token)",
    )
    ticks = [tick for tick in TICKS if bottom < tick < top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
