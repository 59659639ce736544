"""The losses of a ladder, the power law through them, and what it predicts."""

from __future__ import annotations

from typing import Any

from thinker.features.ladder.ladder_plan import LadderPlan
from thinker.features.ladder.power_law import PowerLawFit
from thinker.features.sweeps.sweep import Sweep, SweepRun
from thinker.runtime.errors import UserError


class LadderResult:
    """The runs of a ladder, smallest first, their power law, and the predicted loss of its target.

    `checked`: the loss of the target, once add_check() knows it. Raises UserError if a run failed
    or its loss is not finite.
    """

    def __init__(self, plan: LadderPlan, sweep: Sweep) -> None:
        self.plan = plan
        self.checked: float | None = None
        sizes = {rung.name: rung for rung in plan.rungs}
        self.rows: list[dict[str, Any]] = []
        floor = None
        for run in sweep.runs:
            row = sizes[run.setting.name].as_row()
            row |= {"seed": run.seed, "loss": final_loss(run)}
            result = run.result()
            row["seconds"] = result.final("elapsed_s")
            floor = result.final("entropy_floor")
            self.rows.append(row)
        self.rows.sort(key=lambda row: (row["flops"], row["seed"]))
        flops = [row["flops"] for row in self.rows]
        self.fit = PowerLawFit(flops, [row["loss"] for row in self.rows], floor)
        self.prediction = self.fit.predict(plan.target.flops)

    @property
    def error(self) -> float | None:
        """The loss of the target, as a distance from its prediction: 0.01 is 1% above it."""
        if self.checked is None:
            return None
        return self.checked / self.prediction.loss - 1

    def add_check(self, run: SweepRun) -> None:
        """Compare with the run of the target."""
        self.checked = final_loss(run)

    def as_json(self) -> dict[str, Any]:
        """The documented values."""
        target = self.plan.target
        return {
            "config": self.plan.config.name,
            "tokens_per_parameter": target.tokens / target.parameters,
            "rows": self.rows,
            "floor": self.fit.law.floor,
            "floor_known": self.fit.known_floor is not None,
            "scale": self.fit.law.scale,
            "exponent": self.fit.law.exponent,
            "noise": self.fit.noise,
            "target": target.as_row(),
            "predicted": self.prediction.loss,
            "low": self.prediction.low,
            "high": self.prediction.high,
            "loss": self.checked,
            "error": self.error,
        }


def final_loss(run: SweepRun) -> float:
    """The last validation loss of a run. Raises UserError if it has none."""
    if run.status == "not finite":
        raise UserError(f"{run.name}: the loss is not finite; lower optimizer.lr")
    loss = run.result().final("val_loss")
    if run.status != "finished" or loss is None:
        raise UserError(f"{run.name} failed: {run.error}; the same command tries again")
    return loss
