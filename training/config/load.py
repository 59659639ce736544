"""Read a config from YAML, apply overrides, and validate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from thinker.runtime.errors import UserError
from thinker.runtime.yaml_files import read_yaml
from thinker.training.config.config import Config
from thinker.training.config.shipped import find_config
from thinker.training.config.stored import known_keys


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read a config from YAML and apply overrides "section.key=value". Raises UserError that names
    the wrong key.

    path: a YAML file, a run directory, or the name of a config that comes with Thinker.
    """
    path = find_config(path)
    tree = read_yaml(path)
    for name, section in tree.items():
        if section is None:  # a section without keys
            tree[name] = [] if name == "extensions" else {}
    is_of_run = path.name == "config.yaml" and _is_in_run_directory(path)
    if is_of_run:
        tree = known_keys(tree, Config)
    if overrides:
        from thinker.training.config.overrides import apply_override

        for override in overrides:
            apply_override(tree, override, path)
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = str(Path("runs") / path.stem)
    if is_of_run:
        return validate_config(tree, opened=path.parent)
    return validate_config(tree, folder=path.parent)


def validate_config(
    tree: dict[str, Any], folder: Path | None = None, opened: Path | None = None
) -> Config:
    """Make a Config from plain dictionaries. Raises UserError that names the first wrong key.

    Its extensions are imported first, as they may register names that it uses. They are searched in
    `folder`, in the current folder and on the Python path, but not in the run directory `opened`
    (runtime/extensions.py).
    """
    entries = tree.get("extensions")
    is_list = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    if is_list and entries:
        from thinker.runtime.extensions import import_extensions

        folders = [] if folder is None else [folder]
        tree = {**tree, "extensions": import_extensions(entries, folders, opened)}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        from thinker.training.config.error_messages import describe_error

        raise UserError(describe_error(error, Config)) from error


def check_run_folder(path: str | Path, config: Config, overrides: list[str]) -> None:
    """Raise UserError if the config belongs to a run that was copied or moved, unless run.dir is
    overridden."""
    path = find_config(path)
    folder = path.resolve().parent
    is_given = any(override.strip().startswith("run.dir") for override in overrides)
    if is_given or not _is_in_run_directory(path):
        return
    if Path(config.run.dir).resolve() != folder:
        raise UserError(
            f"{path} is not in its run.dir ({config.run.dir}); if the run was moved, add "
            f"run.dir={folder}"
        )


def _is_in_run_directory(path: str | Path) -> bool:
    return (Path(path).resolve().parent / "checkpoints").is_dir()
