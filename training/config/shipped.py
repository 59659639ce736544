"""The configs that come with Thinker, by name, and what their first lines say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from thinker.runtime.errors import UserError, did_you_mean

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "configs" / "chat.jinja"
FACTS = ("Hardware", "Time and loss", "Time", "Loss")  # that a config begins a sentence with


@dataclass(frozen=True)
class ConfigHeader:
    """What the comment at the top of a config says."""

    purpose: str  # what the config is for, in a sentence or two
    facts: dict[str, str]  # hardware, time and loss, as far as they are known


def shipped_configs() -> dict[str, Path]:
    """The configs by name: those in configs/, then those of features."""
    paths = [*sorted(ROOT.glob("configs/*.yaml")), *sorted(ROOT.glob("features/*/*.yaml"))]
    return {path.stem: path for path in paths}


TEXT_ENDINGS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}


def find_config(given: str | Path) -> Path:
    """The file that the user means: a YAML file, a run directory, or the name of a config that
    comes with Thinker. Raises UserError."""
    path = Path(given)
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    if path.suffix.lower() in TEXT_ENDINGS and path.is_file():
        source = TEXT_ENDINGS[path.suffix.lower()]
        raise UserError(
            f"{given} is text, not a config; train on it with small-text or another config: "
            f"small-text data.source={source} data.path={given}"
        )
    if path.exists() and not path.is_dir():
        return path
    configs = shipped_configs()
    if str(given) in configs:
        return configs[str(given)]
    if path.is_dir():
        raise UserError(
            f"{given} is a folder, but not of a run: it has no config.yaml; give a YAML file, a "
            "run in that folder, or the name of a config (thinker configs lists them)"
        )
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    hint = did_you_mean(str(given), beside)
    if not hint:
        hint = did_you_mean(path.stem, configs, "the config {}, which comes with Thinker")
    if not hint:
        hint = f"; give a YAML file, a run, or one of {', '.join(configs)}"
    raise UserError(f"config {given} does not exist{hint}")


def find_template(given: str | None) -> str | None:
    """The path of a chat template: a file of the user, or chat.jinja, which comes with Thinker."""
    if given == TEMPLATE.name and not Path(given).exists():
        return str(TEMPLATE)
    return given


def read_header(path: Path) -> ConfigHeader:
    """Read the comment at the top of a config."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        is_code = line.startswith(("# yaml-language-server", "#  "))
        if not is_code:
            lines.append(line.removeprefix("#").strip())
    text = " ".join(lines)
    beginnings = "|".join(FACTS)
    parts = re.split(rf"(?<=[.:]) ({beginnings}): ", text)
    facts = {}
    for fact, sentences in zip(parts[1::2], parts[2::2]):
        facts[fact.lower()] = sentences.strip()
    return ConfigHeader(_without_command(parts[0]), facts)


def _without_command(text: str) -> str:
    """A text that ended with a colon before a command line, as a sentence."""
    return re.sub(r":\s*$", ".", text.strip())
