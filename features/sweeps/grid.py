"""The settings of a sweep, from --grid and --variant, and the names of their runs."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError

MULTIPLIER = re.compile(r"x(\d+\.?\d*(?:e-?\d+)?)")
MAX_NAME = 100  # characters of a folder's name
# Commas that are not within brackets, braces or quotes divide values.
VALUE = re.compile(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")


@dataclass(frozen=True)
class Setting:
    """Values of keys that a run trains with.

    `values` are as given, such as "x0.5"; `overrides` are what they stand for in this config.
    """

    name: str  # as in tables
    folder_name: str
    values: dict[str, str]
    overrides: tuple[str, ...]


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key in "section.key=V1,V2". Raises UserError for anything else."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, _, given = text.partition("=")
        values = [value.strip() for value in VALUE.findall(given)]
        if "." not in key or not values:
            raise UserError(
                f"--grid {text} has no values; write it as section.key=V1,V2, such as "
                "optimizer.lr=0.01,0.04"
            )
        if key in grid:
            raise UserError(f"--grid {key} is given twice; write all values after one --grid")
        repeated = [value for value in values if values.count(value) > 1]
        if repeated:
            raise UserError(f"--grid {text} has {repeated[0]} twice; remove one")
        grid[key] = values
    return grid


def parse_variants(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """The keys of each variant in "NAME: section.key=value ...". Raises UserError for anything
    else."""
    variants: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, overrides = text.partition(":")
        name = name.strip()
        if not (name and colon):
            raise UserError(
                f"--variant {text!r} has no name; write it as 'NAME: section.key=value ...'"
            )
        if name in variants:
            raise UserError(f"--variant {name} is given twice; choose another name")
        values = {}
        for override in overrides.split():
            key, equals, value = override.partition("=")
            if not equals:
                raise UserError(
                    f"--variant {text!r}: {override} is not an override; write section.key=value"
                )
            values[key] = value
        variants[name] = values
    return variants


def make_settings(
    config: Path,
    overrides: list[str],
    grid: dict[str, list[str]],
    variants: dict[str, dict[str, str]],
) -> list[Setting]:
    """Every variant with every combination of the grid's values. Raises UserError for a key that is
    given twice or cannot be multiplied."""
    given = {override.partition("=")[0] for override in overrides}
    for key in itertools.chain(grid, *variants.values()):
        if key in given:
            raise UserError(f"{key} is an override of all runs, too; remove that one")
    for key in grid:
        if any(key in values for values in variants.values()):
            raise UserError(f"{key} is in --grid and in a --variant; remove one of them")
    for key in ("run.seed", "run.dir"):
        if key in grid or any(key in values for values in variants.values()):
            raise UserError(f"{key} differs between the runs anyway; use --seeds and --folder")
    settings = []
    named = variants or {"": {}}
    for name, values in named.items():
        for combination in itertools.product(*grid.values()):
            chosen = values | dict(zip(grid, combination))
            of_grid = dict(zip(grid, combination))
            settings.append(_setting(config, overrides, name, of_grid, chosen))
    folders = [setting.folder_name for setting in settings]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"two settings would use the folder {folder}; name them with --variant")
    return settings


def _setting(
    config: Path,
    overrides: list[str],
    variant: str,
    of_grid: dict[str, str],
    chosen: dict[str, str],
) -> Setting:
    label = " ".join(f"{key}={value}" for key, value in of_grid.items())
    name = " ".join(part for part in (variant, label) if part)
    parts = []
    if variant:
        parts.append(variant)
    for key, value in of_grid.items():
        parts += [key.rpartition(".")[2], value]
    folder = re.sub(r"[^\w.+-]+", "-", "-".join(parts)).strip("-.")[:MAX_NAME]
    return Setting(
        name or "the config",
        folder or "config",
        chosen,
        tuple(multiply_values(config, overrides, chosen)),
    )


def multiply_values(config: Path, overrides: list[str], values: dict[str, str]) -> list[str]:
    """The values as overrides. A value such as x0.5 multiplies the config's, default rates
    included; they are those of a config with all other values."""
    plain = []
    for key, value in values.items():
        if not MULTIPLIER.fullmatch(value):
            plain.append(f"{key}={value}")
    if len(plain) == len(values):
        return plain
    from thinker.training.config.load import load_config

    base = load_config(config, [*overrides, *plain])
    multiplied = []
    for key, value in values.items():
        found = MULTIPLIER.fullmatch(value)
        if found:
            multiplied.append(f"{key}={_multiply(base, key, float(found[1])):.6g}")
    return [*plain, *multiplied]


def numbers_of(values: Sequence[str]) -> list[float] | None:
    """The numbers that the values are: all plain, such as 0.5, or all multipliers, such as x0.5.
    None if they are neither."""
    found = [MULTIPLIER.fullmatch(value) for value in values]
    texts = list(values)
    if all(found):
        texts = [value.removeprefix("x") for value in values]
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    if not all(map(math.isfinite, numbers)):
        return None
    return numbers


def _multiply(config: Any, key: str, factor: float) -> float:
    from thinker.training.optim.optimizers import resolve_learning_rates

    section, _, name = key.partition(".")
    values = getattr(config, section, None)
    if section == "optimizer":
        architecture = config.thinker_config(vocab_size=1)
        values = resolve_learning_rates(values, architecture, config.train.batch_size)
    base = getattr(values, name, None)
    is_number = isinstance(base, (int, float)) and not isinstance(base, bool)
    if not is_number:
        raise UserError(
            f"{key} is {base!r} in the config, so x{factor:g} cannot multiply it; list values "
            "instead"
        )
    return factor * base
