"""Prints samples as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from thinker.generation.command.terminal import describe_unmet, log
from thinker.generation.command_flags import CommandFlags
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.runtime.checks import finite_json


def print_json_samples(
    generator: Generator,
    prompt: str,
    tokens: list[int],
    params: SamplingParams,
    n_samples: int,
    features: Iterable[CommandFlags],
) -> None:
    """Print each sample as a JSON object, with the facts that features add."""
    completions = generator.generate([prompt] * n_samples, params, [tokens] * n_samples)
    facts: dict[str, Any] = {}
    for flags in features:
        facts |= flags.facts(generator)
    for index, completion in enumerate(completions):
        row = dataclasses.asdict(completion) | {"seed": params.seed + index} | facts
        print(finite_json(row))
    log(*describe_unmet(completions))
