"""Write the generated pages of docs/reference/ and configs/schema.json: python
scripts/make_reference.py."""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from thinker.benchmarks.command import names
from thinker.commands.table import all_commands
from thinker.interop.families.abilities import families_markdown
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import run_command
from thinker.runtime.process.invocation import script_path
from thinker.runtime.registry import FEATURES, features, import_offer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_NAMES = (
    "train",
    "plan",
    "load",
    "save",
    "evaluate",
    "inspect",
    "export_huggingface",
    "export_gguf",
    "Thinker",
    "ThinkerConfig",
    "KVCache",
    "Generator",
    "SamplingParams",
    "Completion",
    "UserError",
)
DOCUMENTED = (  # modules, or some names of a module
    "thinker.training.callback:Callback,StepInfo,TrainingParts,TrainingRun",
    "thinker.training.reports.run_summary:RunSummary",
    "thinker.training.tracking.tracker:Tracker,TrackedRun",
    "thinker.training.objective:Objective,Loss",
    "thinker.generation:Score",
    "thinker.data.tokenizers.tokenizer:Tokenizer",
    "thinker.interpretability.reports:Prompt",
    "thinker.interpretability.heads",
    "thinker.interpretability.flow",
    "thinker.interpretability.attribution",
    "thinker.interpretability.hooked.hooked_model:HookedThinker",
    "thinker.interpretability.hooked.lens_tokens:LensTokens",
    "thinker.interpretability.hooked.lens_weights:LensWeights",
    "thinker.interpretability.hooked.hooked_cache:HookedCache",
    "thinker.model.inspection.attention_statistics",
)
EXAMPLE = """import torch
from thinker import Thinker, ThinkerConfig

model = Thinker(ThinkerConfig(vocab_size=4096, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2))
tokens = torch.randint(4096, (2, 16))  # (B, T)
logits = model(tokens)  # (B, T, V)
loss_sum, n_targets = model(tokens, targets=tokens.roll(-1, 1))  # in nats
"""
GENERATED = "`python scripts/make_reference.py` generates this page; do not edit it.\n"


def main() -> int:
    """Write all generated files. Returns the exit status."""
    ArgumentParser(
        description="Write the generated pages of docs/reference/ and configs/schema.json."
    ).parse_args()
    folder = ROOT / "docs" / "reference"
    pages = reference_pages()
    for path in folder.glob("*.md"):  # of features that are gone
        if path.name not in pages and GENERATED in path.read_text(encoding="utf-8"):
            path.unlink()
    for name, page in pages.items():
        (folder / name).write_text(page, encoding="utf-8")
    (ROOT / "configs" / "schema.json").write_text(config_schema(), encoding="utf-8")
    return 0


def reference_pages() -> dict[str, str]:
    """The generated pages of docs/reference/ by file name."""
    pages = {
        "config.md": config_markdown(),
        "commands.md": commands_markdown(),
        "python-api.md": api_markdown(),
        "families.md": _join([families_markdown(GENERATED)]),
    }
    for feature in features():
        for name, offer in feature.pages.items():
            make_page = import_offer(offer)
            pages[name] = _join([make_page(GENERATED)])
    pages["features.md"] = features_markdown(pages)
    return pages


def config_markdown() -> str:
    """A table of keys per section."""
    from thinker.training.config.config import Config, config_sections
    from thinker.training.config.key_list import nested_sections

    parts = [
        "# Config keys\n",
        f"Every key of a config file. On the command line, write `section.key=value`. {GENERATED}",
    ]
    sections = config_sections()
    meaning = Config.model_fields["extensions"].description
    parts.append(f"Beside the sections, there is one key, `extensions`, a list: {meaning}\n")
    nested = {name: section for name, (_, section) in nested_sections().items()}
    for section_name, section in (sections | nested).items():
        schema = section.model_json_schema()
        parts += [f"## {section_name}\n", f"{inspect.cleandoc(section.__doc__)}\n"]
        parts += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            default = (
                "required" if field.is_required() else json.dumps(field.default, ensure_ascii=False)
            )
            type_name = _type_name(schema["properties"][name]).replace("|", "\\|")
            parts.append(
                f"| `{name}` | {type_name} | `{default}` | {' '.join(field.description.split())} |"
            )
        parts.append("")
    return _join(parts)


def features_markdown(pages: dict[str, str]) -> str:
    """The optional features, each with its guide and those of `pages` that it generates."""
    parts = ["# Features\n", f"Each optional feature is a folder in `features/`. {GENERATED}"]
    for feature in features():
        package = import_module(f"{FEATURES}.{feature.name}")
        summary = package.__doc__.splitlines()[0]
        before, _, after = summary.partition(": ")  # "Pruning: remove heads."
        if not after:
            after = before
        guide = f"features/{feature.name}/guide.md"
        title = _title((ROOT / guide).read_text(encoding="utf-8"))
        line = f"- [{title}](../../{guide}): {_sentence(after)}"
        for name in feature.pages:
            line += f" [{_title(pages[name])}]({name})."
        parts.append(line)
    return _join(parts)


def _title(page: str) -> str:
    """The heading of a page in Markdown."""
    return page.splitlines()[0].removeprefix("# ")


def config_schema() -> str:
    """JSON schema for editors that check config files."""
    from thinker.training.config.config import Config

    schema = Config.model_json_schema() | {"title": "Thinker config"}
    return json.dumps(_unwrapped(schema), indent=1, ensure_ascii=False) + "\n"


def _unwrapped(schema: Any) -> Any:
    """A JSON schema whose descriptions are single lines."""
    if isinstance(schema, list):
        return [_unwrapped(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _unwrapped(value) for key, value in schema.items()}
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    return result


def _type_name(schema: dict[str, Any]) -> str:
    """Short name of a JSON schema's type, such as "integer ≥ 1 | null"."""
    if "anyOf" in schema:
        return " | ".join(_type_name(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    name = schema.get("type", "any")
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [
        f"{sign} {schema[key]:.10g}"
        for key, sign in bounds.items()
        if abs(schema.get(key, 1e38)) < 1e15
    ]
    return " ".join([name, ", ".join(limits)]).strip()


def commands_markdown() -> str:
    """The commands, each with its options by group."""
    parts = ["# Commands\n", f"Every command and its options. {GENERATED}"]
    parts.append("`thinker COMMAND` needs an installation. In a checkout, scripts do the same.\n")
    for name in all_commands():
        heading = f"thinker {name}"
        script = script_path(name)
        if (ROOT / script).is_file():
            heading += f" (python {script})"
        parts += _command(heading, parser_of(name), "##")
    return _join(parts)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command, caught when it is about to parse: commands build and parse in one
    function."""
    main = import_offer(all_commands()[name].main)
    arguments = []
    if name == "benchmark":  # it builds the parsers of those that it finds in its arguments
        arguments = names()
    caught = []

    def catch(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        caught.append(parser)
        raise SystemExit

    methods = ("parse_known_args", "parse_known_intermixed_args")
    originals = {method: getattr(argparse.ArgumentParser, method) for method in methods}
    command_line = sys.argv
    sys.argv = [f"thinker {name}", *arguments]
    try:
        for method in methods:
            setattr(argparse.ArgumentParser, method, catch)
        with contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = command_line
        for method, original in originals.items():
            setattr(argparse.ArgumentParser, method, original)
    return caught[0]


def _command(title: str, parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    yield f"{heading} {title}\n"
    yield f"{_sentence(parser.description)}\n"
    if parser.epilog:
        yield _code(inspect.cleandoc(parser.epilog.removeprefix("examples:\n")))
    subcommands = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                subcommands = action.choices
            elif not isinstance(action, argparse._HelpAction):
                rows.append(_option_row(parser, action))
        if rows:
            column = {"positional arguments": "arguments", "options": "option"}.get(
                group.title, group.title
            )
            yield f"| {column} | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    for subparser in subcommands.values():
        yield from _command(subparser.prog, subparser, heading + "#")


def _option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    is_flag = bool(action.option_strings)
    name = formatter._get_default_metavar_for_optional(action) if is_flag else action.dest
    names = " ".join(
        [", ".join(action.option_strings), formatter._format_args(action, name)]
    ).strip()
    meaning = formatter._expand_help(action)
    return f"| `{_cell(names)}` | {_cell(meaning)} |"


def api_markdown() -> str:
    """The public classes and functions with their signatures and docstrings."""
    parts = ["# Python API\n", f"The public classes and functions. {GENERATED}"]
    package = import_module("thinker")
    parts += [
        "## thinker\n",
        "Import these names from `thinker` itself.\n",
        f"```python\n{EXAMPLE}```\n",
    ]
    for name in PACKAGE_NAMES:
        parts += _document(name, getattr(package, name))
        if name == "Generator":
            parts += _feature_options()
    documented = list(DOCUMENTED)
    for feature in features():
        documented += feature.python_api
    for entry in documented:
        module_name, _, names = entry.partition(":")
        module = import_module(module_name)
        parts += [f"## {module_name}\n", f"{_docstring(module)}\n"]
        for name in names.split(",") if names else _public_names(module):
            parts += _document(name, getattr(module, name))
    return _join(parts)


def _feature_options() -> Iterator[str]:
    """The options of Generator() that features add."""
    for feature in features():
        for seam in ("cache", "decoder", "drafter", "observer"):
            offer = getattr(feature, seam)
            if not (feature.generator_options and offer):
                continue
            function = import_offer(offer)
            parameters = inspect.signature(function).parameters
            options = [parameters[name] for name in feature.generator_options]
            yield f"### Options of Generator: {feature.name}\n"
            signature = inspect.Signature(options)
            shown = _type(str(signature)[1:-1]).replace("'", "")
            yield _code(f"Generator(..., {shown})")
            yield f"{_docstring(function)}\n"


def _public_names(module: ModuleType) -> list[str]:
    """Names of the classes and functions that a module defines, in its order."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and callable(value)
    ]


def _document(name: str, value: Any) -> Iterator[str]:
    """A class or function: its signature, docstring, fields and methods."""
    yield f"### {name}\n"
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"{_docstring(value)}\n"
        return
    is_config = dataclasses.is_dataclass(value)
    if not is_config:
        yield _code(_signature(name, value))
    yield f"{_docstring(value)}\n"
    if not inspect.isclass(value):
        return
    if is_config:
        yield (
            "| field | type | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(_field_rows(value))
            + "\n"
        )
    for method_name, method in vars(value).items():
        function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        if method_name.startswith("_") or not getattr(function, "__doc__", None):
            continue
        if isinstance(function, property):
            yield f"**{name}.{method_name}**: {_docstring(function)}\n"
        elif inspect.isfunction(function):
            owner = name if function is not method else name[0].lower() + name[1:]
            yield _code(
                _signature(
                    f"{owner}.{method_name}",
                    function,
                    skip_first=not isinstance(method, staticmethod),
                )
            )
            yield f"{_docstring(function)}\n"


def _field_rows(dataclass: type) -> Iterator[str]:
    """The fields of a dataclass. A comment beside or above a field in the source is its meaning."""
    source = textwrap.dedent(inspect.getsource(dataclass))
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("#").strip()
    lines = source.splitlines()
    names = {field.name for field in dataclasses.fields(dataclass)}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign) or node.target.id not in names:
            continue
        name = node.target.id
        if name.startswith("_"):
            continue
        inside = range(node.lineno, node.end_lineno + 1)
        meaning = [comments[line] for line in inside if line in comments]
        above = node.lineno - 1
        while not meaning and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        if not meaning:
            meaning = [comments[line] for line in range(above + 1, node.lineno)]
        default = ""
        if node.value is not None:
            default = f"`{_cell(_shown_default(ast.get_source_segment(source, node.value)))}`"
        kind = _cell(ast.unparse(node.annotation))
        yield f"| `{name}` | `{kind}` | {default} | {_cell(' '.join(meaning))} |"


def _shown_default(text: str) -> str:
    """The default of a field, without the call that makes it."""
    for kind, shown in (("list", "[]"), ("dict", "{}")):
        if re.match(rf"field\(\s*default_factory={kind}\b", text):
            return shown
    return " ".join(text.split())


def _signature(name: str, function: Any, skip_first: bool = False) -> str:
    """A signature as in the source; one parameter per line where it is long."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    words, seen_star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            words.append("*")
        seen_star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = star + parameter.name
        has_type = parameter.annotation is not parameter.empty
        text += f": {_type(parameter.annotation)}" if has_type else ""
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if has_type else f"={parameter.default!r}"
        words.append(text)
    returns = signature.return_annotation
    arrow = (
        ""
        if returns in (signature.empty, None, "None") or inspect.isclass(function)
        else f" -> {_type(returns)}"
    )
    line = f"{name}({', '.join(words)}){arrow}"
    return (
        line
        if len(line) <= 100
        else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"
    )


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(
        r"\b(?:typing|collections\.abc|pathlib|torch|torch\.nn|thinker\.[\w.]+)\.(?=[A-Z])",
        "",
        text,
    )


def _docstring(value: Any) -> str:
    """The docstring in Markdown: parameters become a list."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"(?m)^    (\w+): ", r"- `\1`: ", text.replace("Args:\n", "Parameters:\n\n"))


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _join(parts: list[str]) -> str:
    text = "\n".join(parts)
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


if __name__ == "__main__":
    run_command(main)
