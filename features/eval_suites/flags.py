"""The flags --suite and --pairs of `thinker eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.evaluation.eval_flags import EvalFlags, Report
from thinker.features.eval_suites.accuracy import Accuracy, format_accuracies
from thinker.features.eval_suites.presets import PRESETS, run_preset
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.features.eval_suites.minimal_pairs import MinimalPair
    from thinker.model import Thinker

TALES_PAIRS = "tales-pairs"
SUITES = (TALES_PAIRS, *PRESETS)
# Flags of other measurements.
UNUSED = (
    "fineweb",
    "read_data",
    "part",
    "source",
    "path",
    "column",
    "max_tokens",
    "rope_scaling",
    "png",
    "context",
    "stride",
    "long",
    "factor",
    "windows",
    "tasks",
    "include",
    "shots",
)


class SuiteFlags(EvalFlags):
    """Accuracies with fixed settings; see features/eval_suites/guide.md."""

    def __init__(self, parser: ArgumentParser) -> None:
        title = "suites with fixed settings (see --confidence, --limit)"
        add = parser.add_argument_group(title).add_argument
        suite_help = (
            f"{TALES_PAIRS}: minimal pairs from the grammar of tales, without network; others: "
            "lm-eval's tasks, downloaded"
        )
        add("--suite", choices=SUITES, help=suite_help)
        pairs_help = (
            "minimal pairs of your own: JSONL with good, bad and phenomenon, or a folder of "
            "BLiMP's files"
        )
        add("--pairs", type=Path, metavar="FILE", help=pairs_help)

    def check(self, arguments: argparse.Namespace, parser: ArgumentParser) -> bool:
        """As EvalFlags.check()."""
        if arguments.suite is None and arguments.pairs is None:
            return False
        if arguments.suite is not None and arguments.pairs is not None:
            raise UserError("--suite and --pairs choose different items; use one of them")
        flag = "--suite" if arguments.suite is not None else "--pairs"
        parser.check_unused(arguments, f"with {flag}", UNUSED)
        return True

    def evaluate(
        self, arguments: argparse.Namespace, model: Thinker, tokenizer: Tokenizer
    ) -> Report:
        """As EvalFlags.evaluate()."""
        if arguments.suite in PRESETS:
            return report_preset(arguments, model, tokenizer)
        from thinker.features.eval_suites.minimal_pairs import read_pairs
        from thinker.features.eval_suites.tales_pairs import VERSION, tales_pairs

        if arguments.pairs is not None:
            settings = {"pairs": str(arguments.pairs)}
            return report_pairs(arguments, model, tokenizer, read_pairs(arguments.pairs), settings)
        settings = {"suite": TALES_PAIRS, "version": VERSION}
        return report_pairs(arguments, model, tokenizer, tales_pairs(), settings)


def report_preset(arguments: argparse.Namespace, model: Thinker, tokenizer: Tokenizer) -> Report:
    """Run a suite of lm-eval's tasks."""
    name = arguments.suite
    limit, confidence = arguments.limit, arguments.confidence
    result = run_preset(model, tokenizer, name, limit, confidence)
    header = {
        "model": arguments.run,
        "suite": name,
        "lm_eval": result.settings["lm_eval"],
        "confidence": confidence,
        "limit": limit,
        "missing": PRESETS[name].missing or None,
    }
    return make_report(header, result.accuracies, result.settings)


def report_pairs(
    arguments: argparse.Namespace,
    model: Thinker,
    tokenizer: Tokenizer,
    pairs: list[MinimalPair],
    settings: dict[str, Any],
) -> Report:
    """Score minimal pairs and report the accuracy on each phenomenon."""
    from thinker.features.eval_suites.minimal_pairs import first_pairs, score_pairs

    scores = score_pairs(model, tokenizer, first_pairs(pairs, arguments.limit), progress=True)
    accuracies = scores.accuracies(arguments.confidence)
    header = {
        "model": arguments.run,
        **settings,
        "score": "ln P of the whole sentence after the BOS token; ties count half",
        "confidence": arguments.confidence,
        "limit": arguments.limit,
    }
    return make_report(header, accuracies, {"items": scores.to_dicts()})


def make_report(
    header: dict[str, Any], accuracies: Sequence[Accuracy], more: dict[str, Any]
) -> Report:
    """The header and the table as text; for JSON also `more`."""
    lines = []
    for name, value in header.items():
        if value is not None:
            lines.append(f"{name:>12}  {value}")
    lines += ["", format_accuracies(accuracies)]
    values = header | {"accuracies": [vars(row) for row in accuracies]} | more
    return Report(values, "\n".join(lines), None)
