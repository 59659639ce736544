"""Read a config from YAML, apply overrides, and turn the errors of validation into one line."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from thinker.features.distillation.keys import DistillConfig
from thinker.features.pruning.keys import PruneConfig
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.reading import Loader, read_yaml
from thinker.training.config.config import Config
from thinker.training.config.source_section import CleanConfig, MixedSource

LIST = "a list of two numbers, such as [0.8, 0.95]"
EXPECTED = {  # what a value must be, by the start of pydantic's error type
    "bool_": "true or false", "int_": "an integer", "float_": "a number", "finite_": "a finite number",
    "string_pattern": "letters, digits, dots, _ and -", "string_": "text", "literal_": "{expected}",
    "list_": "a list", "tuple_": LIST, "too_": LIST, "missing": LIST,
    "model_": "a mapping of keys to values", "dict_": "a mapping of keys to values",
    "greater_than_equal": "at least {ge:.16g}", "greater_than": "more than {gt:.16g}",
    "less_than_equal": "at most {le:.16g}", "less_than": "less than {lt:.16g}",
}  # fmt: skip
NESTED = {  # parts of a location, the model
    ("data", "sources"): (4, MixedSource), ("data", "clean"): (3, CleanConfig),
    ("train", "distill"): (3, DistillConfig), ("train", "prune"): (3, PruneConfig),
}  # fmt: skip


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read a config from YAML and apply overrides "section.key=value". Raises UserError that names the wrong key."""
    path = Path(path)
    if not path.exists():
        available = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise UserError(
            f"config {path} does not exist (available: {available or 'none in configs/'})"
        )
    tree = read_yaml(path)
    tree = {
        name: {} if section is None else section for name, section in tree.items()
    }  # empty sections
    for override in overrides:
        name, equals, text = override.partition("=")
        section, _, key = name.strip().partition(".")
        if not (equals and key and text.strip()):
            raise UserError(
                f"{override!r} is not an override; write section.key=value, such as train.max_steps=100"
            )
        values = tree.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(
                f"{path}: {section} is {values!r}; it must be a mapping of keys to values"
            )
        if section == "data" and (match := re.fullmatch(r"sources\.(\d+)\.(\w+)", key)):
            values, key = _source(values.get("sources"), int(match[1]), override), match[2]
        elif (section, part := key.partition(".")[0]) in NESTED and "." in key:
            values[part] = values.get(part) or {}
            if isinstance(values[part], dict):
                values, key = values[part], key.partition(".")[2]
        try:
            value = yaml.load(text, Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        is_text = (
            not isinstance(value, bool | int | float | list | dict | None)
            and text.strip()[0] not in "'\""
        )
        values[key] = text.strip() if is_text else value  # all of it, as YAML drops " #2"
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = str(Path("runs") / path.stem)
    return validate_config(tree)


def _source(sources: Any, index: int, override: str) -> dict[str, Any]:
    """The source of a mixture that an override changes. Raises UserError if there is none."""
    sources = sources if isinstance(sources, list) else []
    if index >= len(sources) or not isinstance(sources[index], dict):
        raise UserError(f"{override}: the config has {len(sources)} data.sources, numbered from 0")
    return sources[index]


def check_run_folder(path: str | Path, config: Config, overrides: list[str]) -> None:
    """Raise UserError if the config belongs to a run that was copied or moved, unless run.dir is overridden."""
    folder = Path(path).resolve().parent
    is_given = any(override.strip().startswith("run.dir") for override in overrides)
    if (
        (folder / "checkpoints").is_dir()
        and not is_given
        and Path(config.run.dir).resolve() != folder
    ):
        raise UserError(
            f"{path} is not in its run.dir ({config.run.dir}); if the run was moved, add run.dir={folder}"
        )


def validate_config(tree: dict[str, Any]) -> Config:
    """Make a Config from plain dictionaries. Raises UserError that names the first wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first, path = error.errors()[0], error.errors()[0]["loc"]
        size, nested = NESTED.get(path[:2], (2, None))
        location = path[:size]  # a section, its key; a source, its key
        name = ".".join(map(str, location))
        if first["type"] in ("extra_forbidden", "invalid_key"):
            section = Config.model_fields[location[0]].annotation if len(location) > 1 else Config
            names = list(
                (section if nested is None or len(location) < size else nested).model_fields
            )
            *outer, key = map(str, location)
            hint = (
                did_you_mean(key, names, ".".join([*outer, "{}"]))
                or f"; use one of {', '.join(names)}"
            )
            raise UserError(f"unknown config key {name}{hint}") from error
        if (
            first["type"] == "value_error"
        ):  # of a whole config, or of a part: then its message starts with the key
            raise UserError(f"{name}{'.' if name else ''}{first['ctx']['error']}") from error
        if first["type"] == "missing" and nested is not None:
            example = {"source": "jsonl", "teacher": "runs/large"}[location[-1]]
            raise UserError(f"{name} is missing; set it, for example to {example}") from error
        index = [
            part
            for part in path[len(location) :]
            if isinstance(part, int) and first["type"] != "missing"
        ]
        name += "".join(f"[{i}]" for i in index)
        expected = []  # several if the key's type is a union
        for each in (each for each in error.errors() if each["loc"][: len(location)] == location):
            form = next(
                (form for kinds, form in EXPECTED.items() if each["type"].startswith(kinds)),
                "another value",
            )
            expected.append(form.format(**each.get("ctx", {})).replace("'", ""))
        *others, last = dict.fromkeys(expected)
        wanted = " or ".join([*(text.replace(" or ", ", ") for text in others), last])
        shown = {"None": "null", "True": "true", "False": "false"}.get(
            repr(first["input"]), repr(first["input"])
        )
        raise UserError(f"{name} is {shown}; it must be {wanted}") from error
