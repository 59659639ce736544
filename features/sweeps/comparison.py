"""Compare runs: groups that differ only in the seed, the loss to rank them by, and the verdict."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from thinker.features.sweeps.run_result import RunResult, finite
from thinker.features.sweeps.seed_statistics import SIGNIFICANT, mean_and_interval, welch_p

UNITS = {"val_loss": "nats per token", "val_bits_per_byte": "bits per byte"}


@dataclass
class Group:
    """Runs that differ only in the seed. Means are over those that have ended."""

    name: str
    runs: list[RunResult]
    settings: dict[str, Any] = field(default_factory=dict)  # in which it differs from the others

    @property
    def counted(self) -> list[RunResult]:
        """The runs that means, intervals and tests are about: those that have ended. Only if none
        has, those that are still training."""
        ended = [run for run in self.runs if run.status in ("finished", "not finite")]
        return ended or [run for run in self.runs if run.curve and run.status == "unfinished"]

    def values(self, key: str) -> list[float]:
        """A value of the last evaluation of each run that has one; infinite for one that
        diverged."""
        found = [run.final(key) for run in self.counted]
        return [value for value in found if value is not None]

    def mean(self, key: str) -> float | None:
        """The mean over the runs; None if no run has a value."""
        values = self.values(key)
        if not values:
            return None
        return statistics.fmean(values)

    def interval(self, key: str) -> float | None:
        """Half the width of the mean's 95% interval; None for one run, and for one that
        diverged."""
        values = self.values(key)
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return None
        return mean_and_interval(values)[1]


class Comparison:
    """Groups, best first, and the loss that ranks them.

    `measure` is val_loss if all runs were evaluated on the same tokens, val_bits_per_byte if they
    were evaluated on the same text otherwise, and None if no loss ranks them; `notes` say why.
    `baseline`: a group from which the others' distance is measured, seed by seed.
    """

    def __init__(self, groups: Sequence[Group], baseline: Group | None = None) -> None:
        self.baseline = baseline
        known = ("finished", "unfinished")
        runs = []
        for group in groups:
            runs += [run for run in group.runs if run.curve and run.status in known]
        self.measure, self.notes = choose_measure(runs)
        self.groups = sorted(groups, key=self._rank)
        unfinished = [str(run.folder) for run in runs if run.status == "unfinished"]
        if unfinished:
            self.notes.append(f"not finished: {', '.join(unfinished)}")

    def _rank(self, group: Group) -> float:
        if self.measure is None:
            return 0.0  # the order in which they were given
        mean = group.mean(self.measure)
        return math.inf if mean is None else mean

    @property
    def best(self) -> Group | None:
        """The group with the lowest loss, if one can be said."""
        if self.measure is None or not self.groups:
            return None
        mean = self.groups[0].mean(self.measure)
        if mean is None or not math.isfinite(mean):
            return None
        return self.groups[0]

    def p_to_best(self, group: Group) -> float | None:
        """The p-value of the group's distance from the best one; None if there is no test."""
        best = self.best
        if best is None or group is best:
            return None
        values = group.values(self.measure)
        if not all(map(math.isfinite, values)):
            return None
        return welch_p(best.values(self.measure), values)

    def difference(self, group: Group) -> tuple[float, float] | None:
        """The mean distance from the baseline over the seeds that both have, and half the width of
        its 95% interval."""
        if self.baseline is None or self.measure is None:
            return None
        base = {run.seed: run.final(self.measure) for run in self.baseline.counted}
        distances = []
        for run in group.counted:
            value = finite(run.final(self.measure))
            other = finite(base.get(run.seed))
            if value is not None and other is not None:
                distances.append(value - other)
        if not distances:
            return None
        return mean_and_interval(distances)

    def rows(self) -> list[dict[str, Any]]:
        """The documented values of each group, best first, for CSV and JSON."""
        rows = []
        for number, group in enumerate(self.groups, start=1):
            row: dict[str, Any] = {"name": group.name, "settings": group.settings}
            row["seeds"] = [run.seed for run in group.runs]
            row["measure"] = self.measure
            row["rank"] = number
            if self.measure is None:
                row["rank"] = None
            for key in ("val_loss", "val_bits_per_byte", "tokens", "elapsed_s"):
                name = {"elapsed_s": "seconds"}.get(key, key)
                row[name] = finite(group.mean(key))
            row["best_val_loss"] = _mean(run.best_val_loss for run in group.counted)
            row["parameters"] = group.runs[0].parameters
            row["interval"] = None
            row["values"] = []
            if self.measure is not None:
                row["interval"] = group.interval(self.measure)
                for run in group.runs:
                    value = None
                    if run in group.counted:
                        value = finite(run.final(self.measure))
                    row["values"].append(value)
            row["p_to_best"] = self.p_to_best(group)
            if self.baseline is not None:
                difference = self.difference(group)
                row["difference"] = None
                row["difference_interval"] = None
                if difference is not None:
                    row["difference"], row["difference_interval"] = difference
            rows.append(row)
        return rows

    def verdict(self) -> str:
        """What the losses say, in plain sentences; "" if there is nothing to compare."""
        if len(self.groups) < 2:
            return ""
        best = self.best
        if best is None:
            return "the runs are not ranked"
        second = self.groups[1]
        key = self.measure
        lowest, next_lowest = best.mean(key), second.mean(key)
        losses = f"{lowest:.4f} against {_number(next_lowest)} {UNITS[key]}"
        p = self.p_to_best(second)
        seeds = _describe_seeds(len(best.values(key)), len(second.values(key)))
        if finite(next_lowest) is None:
            return f"only {best.name} has a finite loss: {lowest:.4f} {UNITS[key]}"
        if p is None:
            remedy = "train more seeds to see whether this is chance"
            return f"{best.name} ends lowest, {losses} of {second.name}, with {seeds}; {remedy}"
        if p < SIGNIFICANT:
            test = f"Welch's t-test, {seeds}, p = {p:.2g}"
            return f"{best.name} is better than {second.name}: {losses} ({test})"
        text = f"{best.name} and {second.name} are not distinguishable with {seeds}, p = {p:.2g}"
        others = []
        for group in self.groups[2:]:
            p = self.p_to_best(group)
            if p is not None and p >= SIGNIFICANT:
                others.append(group.name)
        if others:
            text += f"; nor are {', '.join(others)}"
        return text


def _describe_seeds(a: int, b: int) -> str:
    if a == b == 1:
        return "one seed each"
    if a == b:
        return f"{a} seeds each"
    return f"{a} and {b} seeds"


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.fmean(known)


def _number(value: float | None) -> str:
    if value is None:
        return "no value"
    return f"{value:.4f}"


# ---------------------------------------------------------------- groups


def group_runs(runs: Sequence[RunResult]) -> tuple[list[Group], list[str]]:
    """Group runs that differ only in the seed, in the order in which they come. Also returns notes
    on runs that were left out because another one has the same keys and seed."""
    groups: list[Group] = []
    notes = []
    for run in runs:
        keys = run.effective_keys()
        same = [group for group in groups if group.runs[0].effective_keys() == keys]
        if not same:
            groups.append(Group("", [run]))
            continue
        (group,) = same
        twins = [each for each in group.runs if each.seed == run.seed]
        if twins:
            notes.append(f"{run.folder} repeats {twins[0].folder}, keys and seed, and is left out")
            continue
        group.runs.append(run)
    differing = differing_keys([group.runs[0].effective_keys() for group in groups])
    for group in groups:
        keys = group.runs[0].effective_keys()
        group.settings = {key: keys.get(key) for key in differing}
    _name_groups(groups)
    return groups, notes


def differing_keys(trees: Sequence[dict[str, Any]]) -> list[str]:
    """The keys that do not have the same value everywhere."""
    names = dict.fromkeys(itertools.chain.from_iterable(trees))
    missing = object()  # None is a value
    differing = []
    for name in names:
        first = trees[0].get(name, missing)
        if any(tree.get(name, missing) != first for tree in trees):
            differing.append(name)
    return differing


def _name_groups(groups: list[Group]) -> None:
    """Name each group after its first run, without the seed if it has several runs; with the whole
    path where names are equal."""
    for group in groups:
        name = group.runs[0].folder.resolve().name
        if len(group.runs) > 1:
            name = re.sub(r"(-seed)?-\d+$", "", name)
        group.name = name
    names = [group.name for group in groups]
    for group in groups:
        if names.count(group.name) > 1:
            group.name = str(group.runs[0].folder)


# ---------------------------------------------------------------- what may be compared


def choose_measure(runs: Sequence[RunResult]) -> tuple[str | None, list[str]]:
    """The loss that ranks these runs, or None, and notes that say why it is not val_loss.

    Losses per token are comparable if text and tokenizer are equal; bits per byte if the text is.
    """
    measure = "val_loss"
    notes = []
    for a, b in itertools.combinations(runs, 2):
        problem = _text_problem(a, b)
        if problem:
            return None, [f"not ranked, as {problem}"]
        if measure == "val_loss" and not _has_same_tokens(a, b):
            measure = "val_bits_per_byte"
            notes.append(
                f"ranked by bits per byte, as {a.folder} and {b.folder} differ in the tokenizer or "
                "in how tokens form sequences"
            )
            limits = [run.keys.get("train.eval_sequences") for run in (a, b)]
            if any(limits):
                notes.append(
                    "train.eval_sequences limits the evaluated text, which is longer for some runs"
                )
    return measure, notes


def _has_same_tokens(a: RunResult, b: RunResult) -> bool:
    """Whether two runs with the same text were evaluated on the same tokens."""
    is_equal = a.tokenizer == b.tokenizer
    if _has_text_of_other_seed(a, b):
        is_equal = a.keys.get("data.tokenizer") == b.keys.get("data.tokenizer")
    names = ("data.seq_len", "data.packing", "data.document_masking", "train.eval_sequences")
    return is_equal and all(a.keys.get(name) == b.keys.get(name) for name in names)


def _has_text_of_other_seed(a: RunResult, b: RunResult) -> bool:
    """Whether two runs have texts that a generator made from different seeds: not equal, and of the
    same kind. So are tokenizers that were trained on them in the same way."""
    keys = a.text_keys()
    if a.seed == b.seed or keys != b.text_keys():
        return False
    return not any(key.endswith("path") and value for key, value in keys.items())


def _text_problem(a: RunResult, b: RunResult) -> str:
    """Why the validation texts of two runs are not the same; "" if they are."""
    for run in (a, b):
        if run.corpus is None:
            return f"{run.folder} has no checkpoint, which names its validation text"
    if a.corpus == b.corpus or _has_text_of_other_seed(a, b):
        return ""
    names = differing_keys([a.text_keys(), b.text_keys()])
    if names:
        name = names[0]
        values = [f"{name} is {run.keys.get(name)}" for run in (a, b)]
        return f"the validation texts of {a.folder} and {b.folder} differ: {' and '.join(values)}"
    if a.tokenizer == b.tokenizer:
        return f"the text of {a.folder} has changed before {b.folder} read it"
    return _changed_text(a, b)


def _changed_text(a: RunResult, b: RunResult) -> str:
    """As _text_problem(), for runs with the same keys and other tokenizers, whose tokens do not
    tell: the lengths of their texts do, if they are in the cache."""
    sizes = []
    for run in (a, b):
        size = _text_size(run.folder, str(run.corpus), str(run.tokenizer))
        if size is None:
            return (
                f"the token cache does not contain the text of {run.folder}, which would tell "
                "whether it is that of the others"
            )
        sizes.append(size)
    if sizes[0] != sizes[1]:
        return f"the text of {a.folder} has changed before {b.folder} read it"
    return ""


@cache
def _text_size(folder: Path, corpus: str, tokenizer: str) -> tuple[int, int] | None:
    """Bytes of a run's validation and training text; None if they are not in the cache."""
    from thinker.training.config.load import load_config
    from thinker.training.data.run_corpus import find_training_data

    data = load_config(folder / "config.yaml", []).data
    found = find_training_data(data, corpus, tokenizer)
    if found is None:
        return None
    return found.val.n_bytes, found.train.n_bytes
