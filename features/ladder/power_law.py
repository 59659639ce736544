"""Loss by compute as a power law, fitted to a few sizes, with prediction intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinker.runtime.errors import UserError

LEVEL = 0.95  # of prediction intervals
MIN_SIZES = 4  # of a law whose floor is fitted, too
EXPONENTS = np.geomspace(0.005, 2, 2500)  # that a fit tries


@dataclass(frozen=True)
class PowerLaw:
    """loss = floor + scale · compute^-exponent, with compute in FLOPs and loss in nats per token.

    Kaplan et al. 2020, arXiv:2001.08361; with a floor, Henighan et al. 2020, arXiv:2010.14701.
    """

    floor: float
    scale: float
    exponent: float

    def __call__(self, compute: float | np.ndarray) -> Any:
        """The predicted loss."""
        return self.floor + self.scale * compute**-self.exponent


@dataclass(frozen=True)
class Prediction:
    """The loss of a new run (nats per token), and the interval that holds it with 95%
    probability."""

    loss: float
    low: float
    high: float


class PowerLawFit:
    """The power law nearest to the losses of some runs (least squares), and what it predicts.

    compute: FLOPs of each run. floor: if it is known, such as the entropy of the corpus; else a
    number from 0 up is fitted. Raises UserError if there are too few sizes, if the floor is above a
    loss, or if the loss does not fall with compute.

    For a given exponent the law is a straight line in compute^-exponent. So a grid of exponents,
    each with its line, is the whole search.
    """

    def __init__(
        self, compute: Sequence[float], losses: Sequence[float], floor: float | None = None
    ) -> None:
        n_sizes = len(set(compute))
        if n_sizes < MIN_SIZES:
            raise UserError(
                f"{n_sizes} sizes are too few to fit a power law; use at least {MIN_SIZES}"
            )
        if floor is not None and floor >= min(losses):
            raise UserError(
                f"a loss of {min(losses):.4f} is below the floor of {floor:.4f}, so no power law "
                "fits"
            )
        self.known_floor = floor
        self.unit = float(np.exp(np.mean(np.log(compute))))  # of compute, for numbers near 1
        n_fitted = 3
        if floor is not None:
            n_fitted = 2
        self.degrees_of_freedom = len(losses) - n_fitted
        y = np.array(losses)
        z = (np.array(compute) / self.unit) ** -EXPONENTS[:, None]  # (exponents, runs)
        self.floors, self.scales = self._lines(z, y)  # (exponents,) each
        fitted = self.floors[:, None] + self.scales[:, None] * z
        self.errors = np.square(y - fitted).sum(axis=1)  # (exponents,)
        self.errors[self.scales <= 0] = np.inf
        best = int(self.errors.argmin())
        if not np.isfinite(self.errors[best]):
            raise UserError("the loss does not fall with size; train the sizes for longer")
        self._z = z
        exponent = float(EXPONENTS[best])
        scale = float(self.scales[best]) * self.unit**exponent
        self.law = PowerLaw(float(self.floors[best]), scale, exponent)
        # Standard deviation of a run around the law, in nats.
        self.noise = float(np.sqrt(self.errors[best] / self.degrees_of_freedom))

    def _lines(self, z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Floor and scale of the line for each exponent. z: (exponents, runs), y: (runs,)."""
        floors = np.zeros(len(z))
        if self.known_floor is not None:
            floors += self.known_floor
        else:
            centered = z - z.mean(axis=1, keepdims=True)
            slopes = (centered * y).sum(axis=1) / np.square(centered).sum(axis=1)
            floors = np.maximum(0, y.mean() - slopes * z.mean(axis=1))
        self.is_floor_fitted = (floors > 0) & (self.known_floor is None)
        through_floor = (z * (y - floors[:, None])).sum(axis=1) / np.square(z).sum(axis=1)
        return floors, through_floor

    def predict(self, compute: float) -> Prediction:
        """The loss of a run of so many FLOPs, with the interval of a single run.

        The interval holds every loss that, as one more run, would raise the sum of squared errors
        by at most Student's t squared times the squared noise. For a straight line, this is the
        usual prediction interval. Here it also covers the uncertain exponent and floor. It does not
        cover that losses may not follow a power law.
        """
        from scipy.stats import t  # slow to import

        z = self._z  # (exponents, runs)
        new = (compute / self.unit) ** -EXPONENTS  # (exponents,)
        predicted = self.floors + self.scales * new
        # By how much the new run's variance exceeds the noise, as the line is uncertain, too.
        center = z.mean(axis=1)
        spread = np.square(z - center[:, None]).sum(axis=1)
        of_line = 1 / z.shape[1] + np.square(new - center) / spread
        of_scale = np.square(new) / np.square(z).sum(axis=1)
        leverage = np.where(self.is_floor_fitted, of_line, of_scale)
        quantile = float(t.ppf((1 + LEVEL) / 2, self.degrees_of_freedom))
        most = self.errors.min() + (quantile * self.noise) ** 2
        allowed = self.errors <= most
        widths = np.sqrt(np.maximum(0, most - self.errors[allowed]) * (1 + leverage[allowed]))
        low = max(self.known_floor or 0.0, float((predicted[allowed] - widths).min()))
        high = float((predicted[allowed] + widths).max())
        return Prediction(float(self.law(compute)), low, high)
