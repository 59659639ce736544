"""Read YAML from untrusted files, without aliases and duplicate keys."""

import re
from pathlib import Path
from typing import Any

import yaml

from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_text

INT_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"


class Loader(yaml.SafeLoader):
    """YAML loader that rejects aliases, and duplicate keys, of which PyYAML silently uses the last.

    Nested aliases, ten levels deep with ten aliases each, make a file of a few hundred bytes take
    hours to read.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Like the base class, but reject aliases."""
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            problem = f"aliases such as *{event.anchor} are not supported; repeat the value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Like the base class, but reject duplicate keys."""
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in names:
                problem = f"duplicate key {key.value}; remove one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.Node) -> int | float:
        """Like the base class, but reject numbers that are not decimal.

        YAML 1.1 reads 1:30 as 90, and 010 as 8.
        """
        if ":" in node.value or re.match(r"[-+]?0[0-9]", node.value):
            problem = f"{node.value} is not a decimal number"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if node.tag == INT_TAG:
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


Loader.add_constructor(INT_TAG, Loader.construct_number)
Loader.add_constructor(FLOAT_TAG, Loader.construct_number)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; {} if the file is empty. Raises UserError."""
    text = read_text(path)
    try:
        content = yaml.load(text, Loader) or {}
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: invalid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: an impossible date or number.
        raise UserError(f"{path}: invalid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path} has no keys with values; it must be a mapping, with lines such as key: value"
        )
    return content
