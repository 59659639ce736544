"""Generate docs/reference/config.md and configs/schema.json from the fields of the config."""

import json
from pathlib import Path
from typing import Any

from thinker.training.config import Config

HEADER = """# Config keys

Every key of a config file. `python -m thinker.training.config_docs` generates this page from
`training/config_sections.py`; do not edit it. A key can also be set on the command line, as `section.key=value`.
"""


def config_markdown() -> str:
    """A table of keys per section."""
    parts = [HEADER]
    for section_name, section_field in Config.model_fields.items():
        section = section_field.annotation
        schema = section.model_json_schema()
        parts += [f"## {section_name}\n", f"{section.__doc__.strip()}\n"]
        parts += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            default = json.dumps(field.default, ensure_ascii=False)
            type_name = _type_name(schema["properties"][name]).replace("|", "\\|")
            parts.append(f"| `{name}` | {type_name} | `{default}` | {field.description} |")
        parts.append("")
    return "\n".join(line.strip() for line in "\n".join(parts).rstrip().splitlines()) + "\n"


def config_schema() -> str:
    """JSON schema for editors that check config files."""
    schema = Config.model_json_schema() | {"title": "Thinker config"}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _type_name(schema: dict[str, Any]) -> str:
    """Short name of a JSON schema's type, such as "integer ≥ 1 | null"."""
    if "anyOf" in schema:
        return " | ".join(_type_name(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    name = schema.get("type", "any")
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:.10g}" for key, sign in bounds.items() if abs(schema.get(key, 1e38)) < 1e15]
    return " ".join([name, ", ".join(limits)]).strip()


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    (root / "docs" / "reference" / "config.md").write_text(config_markdown(), encoding="utf-8")
    (root / "configs" / "schema.json").write_text(config_schema(), encoding="utf-8")
