"""Monitor a model while it generates: figures of attention at some positions, compared with its
validation set."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.sequence import Sequence
from thinker.generation.setup import Setup
from thinker.model import KVCache, Thinker
from thinker.model.inspection.attention_statistics import FIGURES, figure_names, measure_text
from thinker.runtime.checks import check_types
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json

# In a run directory; features/monitoring/validation_figures.py writes it.
FILE_NAME = "validation_figures.json"
NEWEST = 64  # measured positions that the figures are means of

Values = dict[str, float]  # by name, as in figure_names()


def describe_figure(name: str) -> str:
    """A figure in words: "layer 3: attention entropy"."""
    *path, figure = name.split(".")
    words = {"max_logit": "maximum logit", "first_token_share": "share on the first token"}
    words = words.get(figure, figure.replace("_", " "))
    return f"layer {path[1]}: {words}" if path else words


@dataclass(frozen=True)
class Drift:
    """A figure outside the range of the validation set. `excess`: how far outside, 1 at its
    border."""

    name: str
    value: float
    low: float
    high: float
    excess: float

    def __str__(self) -> str:
        side = "below" if self.value < self.low else "above"
        limits = f"{self.low:.3g} to {self.high:.3g} of the validation set"
        return f"{describe_figure(self.name)} {self.value:.3g} is {side} the {limits}"


@dataclass(frozen=True)
class Reference:
    """The figures of a run's validation set at one step: mean and standard deviation by group of
    positions.

    Group i has the positions 2^i to 2^(i + 1) - 1, and the last one also all later ones.
    """

    step: int
    figures: dict[str, tuple[list[float], list[float]]]  # by name: means and standard deviations

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Read the file of a run. Raises UserError if it is damaged."""
        content = read_json(path)
        try:
            step = content["step"]
            figures = {}
            for name, values in content["figures"].items():
                figures[name] = values["mean"], values["std"]
            is_valid = type(step) is int and _are_figures(figures)
        except (KeyError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            remedy = "delete it (the next evaluation of the run writes it again)"
            raise UserError(f"{path} is damaged; {remedy}")
        return cls(step, figures)

    def find_drift(self, measured: list[tuple[int, Values]]) -> list[Drift]:
        """Compare the means of measured positions (position, values), largest deviation first.

        With n positions, a mean may deviate by 2 + 4/√n standard deviations of single positions:
        positions of one text are alike, so that more of them tell less than as many of different
        texts.
        """
        found = []
        for name, (means, stds) in self.figures.items():
            found_values = []
            groups = []  # of these positions alone
            for position, values in measured:
                if name in values:
                    found_values.append(values[name])
                    groups.append(min(position.bit_length(), len(means)) - 1)
            if not found_values:
                continue
            n = len(found_values)
            value = sum(found_values) / n
            mean = sum(means[group] for group in groups) / n
            std = sum(stds[group] for group in groups) / n
            tolerance = (2 + 4 / math.sqrt(n)) * std + 0.01 * abs(mean) + 0.01
            excess = abs(value - mean) / tolerance
            if excess > 1:
                found.append(Drift(name, value, mean - tolerance, mean + tolerance, excess))
        return sorted(found, key=lambda drift: -drift.excess)


def _are_figures(figures: dict[str, tuple[list[float], list[float]]]) -> bool:
    """Whether all figures have means and deviations of the same groups, which are finite."""
    columns = list(chain.from_iterable(figures.values()))
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or min(lengths) == 0:
        return False
    numbers = chain.from_iterable(columns)
    return all(type(number) is float and math.isfinite(number) for number in numbers)


def print_warning(line: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


@dataclass
class Monitor:
    """Measures the newest position of a text from time to time, on a copy of its keys and values;
    no text changes.

    It measures again once a measurement costs at most `max_cost` of the decoding time since the
    last one. It also measures after steps 1, 2, 4, 8, ..., at any cost, so that short texts have
    figures. These steps sample one token per text, as a text may end within a longer one.
    warn(line) is called when figures begin to drift from `reference`, with the one that is
    farthest outside.
    """

    reference: Reference | None = None
    max_cost: float = 0.01  # share of the time
    warn: Callable[[str], None] = print_warning
    n_measured: int = field(default=0, init=False)  # positions
    figures: Values = field(default_factory=dict, init=False)  # means over the newest positions
    drift: list[Drift] = field(
        default_factory=list, init=False
    )  # figures out of range, worst first

    def __post_init__(self) -> None:
        # Positions, and what was measured there.
        self._newest: deque[tuple[int, Values]] = deque(maxlen=NEWEST)
        self._n_observed = 0  # steps
        self._seconds = 0.0  # of decoding since the last measurement that was due by its cost
        self._cost = math.inf  # seconds of the last measurement
        self._last_text: Sequence | None = None  # one that the last step has continued
        self._last_step = 0.0

    @torch.no_grad()
    def calibrate(self, model: Thinker) -> None:
        """Find out how long measuring takes. Called before decoding."""
        n_read = max(1, model.config.prefix)
        for _ in range(2):  # the first time takes longer
            cache = model.new_cache(max_len=n_read + 1)
            tokens = torch.zeros(1, n_read + 1, dtype=torch.int64, device=model.device)
            model(tokens[:, :-1], cache=cache, last_logits_only=True)
            start = time.perf_counter()
            measure_text(model, tokens[:, -1:], model.config.vocab_size, cache).tolist()
            self._cost = time.perf_counter() - start

    def observe(
        self, model: Thinker, sequences: list[Sequence], copy_row: Callable[[int], KVCache]
    ) -> None:
        """Called after a step, when the newest token of each sequence has not been read yet.

        copy_row(index): a copy of the cache of a sequence, of which this call may change
        everything.
        """
        now = time.perf_counter()
        self._n_observed += 1
        if not sequences:
            return
        is_due = _is_power_of_2(self._n_observed)
        if self._last_text in sequences:  # otherwise there was a pause, or a prompt was read
            self._seconds += now - self._last_step
            if self._cost <= self.max_cost * self._seconds:
                is_due = True
                self._seconds = 0.0
        if is_due:
            index = self.n_measured % len(sequences)
            self._measure(model, sequences[index], copy_row(index))
            self._cost = time.perf_counter() - now
        self._last_text = sequences[-1]
        self._last_step = time.perf_counter()

    def max_tokens(self) -> int:
        """One before a step after which observe() measures whatever that takes."""
        return 1 if _is_power_of_2(self._n_observed + 1) else sys.maxsize

    @torch.no_grad()
    def _measure(self, model: Thinker, sequence: Sequence, cache: KVCache) -> None:
        n_read = len(sequence.tokens) - 1
        if cache.lengths != [n_read]:
            cache.truncate([n_read])  # rejected drafts
        token = torch.tensor([[sequence.tokens[-1]]], device=model.device)
        row = measure_text(model, token, sequence.tokenizer.vocab_size, cache)[:, 0].tolist()
        names = figure_names(len(model.blocks))
        values = {name: value for name, value in zip(names, row) if math.isfinite(value)}
        for layer, layer_cache in enumerate(cache.layers):
            if layer_cache.size:  # linear attention has a state of constant size
                n_slots = min(layer_cache.size, model.config.max_seq_len)
                values[f"blocks.{layer}.cache_used"] = min(1.0, (n_read + 1) / n_slots)
        self._newest.append((n_read, values))
        self.n_measured += 1
        figures = {}
        for name in values:
            column = [each[name] for _, each in self._newest if name in each]
            figures[name] = sum(column) / len(column)
        self.figures = figures  # at once, as a server reads it from another thread
        was_drifting = bool(self.drift)
        self.drift = [] if self.reference is None else self.reference.find_drift(list(self._newest))
        if self.drift and not was_drifting:
            n_others = len(self.drift) - 1
            others = f" ({n_others} more figures drift)" if n_others else ""
            self.warn(f"{self.drift[0]}{others}")

    def summary(self) -> dict[str, Any]:
        """For JSON: the means over the newest measured positions, per layer, and the drifting
        figures in words."""
        layers: dict[int, Values] = {}
        for name, value in self.figures.items():
            if name.startswith("blocks."):
                _, layer, figure = name.split(".")
                layers.setdefault(int(layer), {})[figure] = value
        return {
            "positions": self.n_measured,
            "token_entropy": self.figures.get("token_entropy"),
            "layers": [layers.get(layer, {}) for layer in range(max(layers, default=-1) + 1)],
            "drift": None if self.reference is None else [str(each) for each in self.drift],
        }

    def lines(self) -> list[str]:
        """The summary as lines of text."""
        if not self.n_measured:
            return ["monitor: no position was measured, as no text had two new tokens"]
        entropy = f"token entropy {self.figures['token_entropy']:.3g}"
        plural = "" if self.n_measured == 1 else "s"
        lines = [f"monitor: {self.n_measured} position{plural}, {entropy}"]
        for layer, values in enumerate(self.summary()["layers"]):
            words = [
                f"{describe_figure(name)} {values[name]:.3g}"
                for name in (*FIGURES, "cache_used")
                if name in values
            ]
            lines.append(f"layer {layer}: {', '.join(words)}")
        return lines


def _is_power_of_2(n: int) -> bool:
    return n.bit_count() == 1


def load_monitor(folder: Path, warn: Callable[[str], None] | None = None) -> Monitor:
    """A monitor for the model in a folder: a checkpoint of a run, whose figures it compares with,
    or any other.

    warn(line) says why there is nothing to compare with, and reports drift; by default it prints to
    standard error. Raises UserError if the stored figures are damaged.
    """
    if warn is None:
        warn = print_warning
    path = folder.resolve().parent.parent / FILE_NAME
    state = folder / "state.json"
    if not (path.is_file() and state.is_file()):
        problem = f"no figures are stored with {folder}"
        warn(f"drift is not reported: {problem}; see train.log_attention_every")
        return Monitor(warn=warn)
    reference, step = Reference.read(path), read_json(state).get("step")
    if reference.step != step:
        warn(f"drift is not reported: {path} is of step {reference.step}, not of step {step}")
        return Monitor(warn=warn)
    return Monitor(reference, warn=warn)


def make_observer(
    setup: Setup, caches: CacheFactory, decoder: Decoder, monitor: Monitor | None = None
) -> Monitor | None:
    """For the option `monitor`, which measures attention at some positions; None: do not.

    Raises UserError if other options hide what it measures.
    """
    check_types({"monitor": Monitor | None}, locals())
    if monitor is None:
        return None
    setup.need_cache("monitor")
    if not caches.is_observable:
        option = "retrieve" if caches.option == "window" else caches.option
        reason = f"{option}, whose attention it does not see"
        raise UserError(f"monitor cannot be combined with {reason}; use only one")
    monitor.calibrate(decoder.model)
    return monitor
