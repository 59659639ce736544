"""Read files that may come from strangers: regular ones only, up to a bounded size, and YAML without aliases."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from thinker.runtime.errors import UserError

MAX_FILE_BYTES = 1 << 26  # the largest, o200k_base's tokens, take 4 MB; a stranger's file must not fill the memory
MAX_REPETITIONS = 4  # in a regular expression: each multiplies the time by the length of a name


class Loader(yaml.SafeLoader):
    """YAML without duplicate keys, of which PyYAML silently takes the last, and without aliases.

    Ten aliases of ten aliases each, ten levels deep, are a file of a few hundred bytes that takes hours to read.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """As in the base class, but refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            raise yaml.MarkedYAMLError(problem=f"aliases such as *{event.anchor} are not read; write the value again",
                                       problem_mark=event.start_mark)  # fmt: skip
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in the base class, but refuse duplicate keys."""
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.Node) -> int | float:
        """As in the base class, but refuse 1:30, which YAML 1.1 reads as 90, and 010, which it reads as 8."""
        if ":" in node.value or re.match(r"[-+]?0[0-9]", node.value):
            raise yaml.MarkedYAMLError(problem=f"{node.value} is no decimal number", problem_mark=node.start_mark)
        is_int = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", Loader.construct_number)


def read_bytes(path: Path, error_type: type[Exception] = UserError) -> bytes:
    """The content of a file. Raises `error_type` where it is missing, unreadable, too large, or a pipe or device."""
    try:
        if not path.is_file():
            raise error_type(f"{path} is {'not a regular file' if path.exists() else 'missing'}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise error_type(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(content) > MAX_FILE_BYTES:
        raise error_type(f"{path} is larger than any file of its kind")
    return content


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Raises UserError as read_bytes() does."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text") from error


def read_json(path: Path, error_type: type[Exception] = UserError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error_type` where the file is missing or holds anything else."""
    try:
        content = json.loads(read_bytes(path, error_type))
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise error_type(f"{path} is not a JSON object")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, {} for an empty one. Raises UserError where it holds anything else."""
    try:
        content = yaml.load(read_text(path), Loader) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date or number
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML{line}: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not keys with values")
    return content


def checked_pattern(pattern: str) -> str:
    """Return a stranger's regular expression. Raises re.error for one that may take forever, such as "(a+)+b"."""
    is_nested = re.search(r"[*+}?][^()]*\)[*+{]", pattern)
    if is_nested or len(re.findall(r"[*+{]", pattern)) > MAX_REPETITIONS:
        raise re.error(f"it repeats what repeats, or has more than {MAX_REPETITIONS} repetitions")
    return pattern
