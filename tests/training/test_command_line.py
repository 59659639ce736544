"""Keys that are written as flags, and the list of all keys."""

import json
import sys

import pytest
from conftest import ROOT, run_script
from installed import needs

from thinker.runtime.errors import UserError
from thinker.training.config.command_line import ConfigArgumentParser
from thinker.training.config.config import config_sections

PLAN = [ROOT / "scripts" / "plan.py", ROOT / "tests" / "fixtures" / "base.yaml"]


@pytest.fixture
def parse(monkeypatch):
    def parse(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        parser = ConfigArgumentParser(prog="train.py")
        parser.add_argument("--json", action="store_true")
        return parser.parse_command_line()

    return parse


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--max_steps", "10"], "write train.max_steps=10"),
        (["--train.max_steps", "10"], "write train.max_steps=10"),
        (["--max-steps=10"], "write train.max_steps=10"),
        (["--max_steps"], "write train.max_steps=..."),
        (["--max_steps", "--json"], "write train.max_steps=..."),
        (["--max_steps", "data.seq_len=8"], "write train.max_steps=..."),
        (["--path", "my text.txt"], "write data.path='my text.txt'"),
        (["--lr", "-1"], "write optimizer.lr=-1"),
        (["--name", "x"], "write optimizer.name=x or tracking.name=x"),
        (["--max_stps", "3"], "did you mean train.max_steps? (--keys lists them)"),
        (["-q"], "write config keys as section.key=value (--keys lists them)"),
    ],
)
def test_a_flag_that_is_a_key_is_answered_with_the_key(parse, words, end):
    with pytest.raises(UserError) as error:
        parse("c.yaml", "data.seq_len=8", *words)
    flag = next(word for word in words if word.startswith("-"))
    assert str(error.value) == f"unknown flag {flag}; {end}"


@pytest.mark.parametrize(
    "words",
    [["c.yaml", "a.b=1", "--json"], ["--json", "c.yaml", "a.b=1"], ["c.yaml", "--json", "a.b=1"]],
)
def test_flags_and_overrides_come_in_any_order(parse, words):
    arguments = parse(*words)
    assert (arguments.config, arguments.overrides, arguments.json) == ("c.yaml", ["a.b=1"], True)
    assert parse("c.yaml").overrides == []


def test_all_keys_are_listed_with_their_defaults(parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--keys")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    expected = [
        f"{name}.{key}={json.dumps(field.default)}"
        for name, section in config_sections().items()
        for key, field in section.model_fields.items()
    ]
    assert [line.split("  ")[0] for line in lines] == expected
    with pytest.raises(SystemExit):
        parse("c.yaml", "--keys", "tracking")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "tracking.trackers",
        "tracking.wandb",
        "tracking.project",
        "tracking.name",
    ]
    with pytest.raises(UserError, match="unknown config section trak; use one of run, model"):
        parse("--keys", "trak")


@needs("mixtures")
@needs("cleaning")
def test_keys_of_a_list_and_of_a_nested_section_are_listed(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--keys", "data.sources")
    lines = capsys.readouterr().out.splitlines()
    assert "data.sources.0.weight=1.0" in [line.split("  ")[0] for line in lines]
    assert all(line.startswith("data.sources.0.") for line in lines)
    with pytest.raises(SystemExit):
        parse("--keys", "data.clean")
    assert "data.clean.duplicates=null" in capsys.readouterr().out


def test_the_commands_read_it_so(tmp_path):
    done = run_script(ROOT / "train.py", "c.yaml", "--max_steps", "10")
    assert (done.returncode, done.stderr) == (
        2,
        "error: unknown flag --max_steps; write train.max_steps=10\n",
    )
    done = run_script(
        *PLAN,
        "--no-steps",
        "data.tokenizer=byte",
        "train.compile=false",
        "--json",
        f"run.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["micro_batch_size"] > 0


def test_the_config_alone_is_required():
    done = run_script(ROOT / "train.py")
    assert (done.returncode, done.stderr) == (
        2,
        "error: the following arguments are required: CONFIG (--help lists all flags)\n",
    )
