"""--json-schema and --regex of generate.py."""

import json
import os
import re

import pytest
from conftest import ROOT, run_script
from generate_flags import check_refused
from installed import if_installed

GENERATE = ROOT / "generate.py"


def test_json_schema_and_regex(tiny_run, tmp_path):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    common = [GENERATE, tiny_run, "--seed", "1", "--max-new-tokens", "60"]
    completed = run_script(*common, "--json-schema", tmp_path / "schema.json", "--num-samples", "2")
    assert completed.returncode == 0, completed.stderr
    for text in completed.stdout.split("\n\n---\n\n"):
        assert 0 <= json.loads(text)["n"] <= 99
    assert "cut" not in completed.stderr
    cut = "cut before the JSON schema or regex was complete; use a higher --max-new-tokens"
    completed = run_script(*common, "--regex", "(ab){90}", "--num-samples", "2", "--json")
    for row in map(json.loads, completed.stdout.splitlines()):
        assert (row["text"][:4], row["finish_reason"], row["constraint_met"]) == (
            "abab",
            "length",
            False,
        )
    assert f"2 of 2 texts were {cut}" in completed.stderr
    completed = run_script(*common, "--regex", "(ab){90}")
    assert f"the text was {cut}" in completed.stderr
    turns = "Line\nLine\n/set regex c+d\n\n/set regex none\n/set json-schema true\n\n"
    completed = run_script(*common, "--regex", "a[bc]{3}", "--interactive", input=turns)
    assert completed.returncode == 0, completed.stderr
    *matched, made_json = completed.stdout.split("\n", 3)
    assert [
        bool(re.fullmatch(pattern, line))
        for pattern, line in zip(["a[bc]{3}", "a[bc]{3}", "c+d"], matched)
    ] == [True] * 3
    assert made_json.startswith("{")
    assert 'json-schema = {"type":"object"}' in completed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--score", "x", "--regex", "a"], "--regex has no effect with --score"),
        (["--score", "x", "--json-schema", "s"], "--json-schema has no effect with --score"),
        (["--regex", "a", "--json-schema", "s"], "not allowed with argument --regex"),
        (["--json-schema", "nowhere.json"], "cannot read nowhere.json"),
        (["--json-schema", os.devnull], "json_schema is '', which is not valid JSON"),
        (["--regex", "["], "regex cannot be used: unclosed character class"),
        *if_installed(
            "speculation",
            (
                ["--regex", "a", "--speculate", "2"],
                "json_schema and regex cannot be combined with speculate",
            ),
        ),
    ],
)
def test_invalid_arguments_raise(tiny_run, monkeypatch, capsys, arguments, message):
    check_refused(tiny_run, monkeypatch, capsys, arguments, message)
