"""Verifiers: those that come with Thinker, and those of a user that fail in every way."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema.exceptions import SchemaError
from training_runs import wait_for

from thinker.features.rewards.verifiers.built_in import (
    arithmetic,
    evaluate,
    exact,
    json_schema,
    regex,
)
from thinker.features.rewards.verifiers.verifier import Answer, checked_parts
from thinker.features.rewards.verifiers.verifier_process import (
    MAX_REASONS,
    OTHER_REASONS,
    VerifierProcess,
)
from thinker.runtime.errors import UserError

MY_REWARDS = """
import os
import sys
import time

print("loading")


def score(answer):
    print("prints", answer.text)
    os.write(1, b"writes")
    if answer.text == "raise":
        raise KeyError("no such column")
    if answer.text == "nan":
        return float("nan")
    if answer.text == "infinity":
        return {"a": 1.0, "b": float("inf")}
    if answer.text == "text":
        return "0.5"
    if answer.text == "die":
        os._exit(7)
    if answer.text == "exit":
        sys.exit("done")
    if answer.text == "hang":
        time.sleep(1000)
    return {"long": len(answer.text), "row": answer.row["n"]}


number = 3
"""


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(MY_REWARDS)
    process = VerifierProcess([f"{path}:score"], 3.0, tmp_path / "verifier.log")
    yield process
    process.close()


def answers(*texts):
    return [Answer("prompt", text, {"n": 2}) for text in texts]


def test_a_failure_costs_one_answer_its_reward(rewards, tmp_path, capsys):
    """Whatever a verifier does, the others are judged; each reason is said once and counted."""
    (name,) = rewards.names
    bad = ["raise", "nan", "infinity", "text", "die", "hang", "exit", "die", "raise"]
    texts = ["first"]
    for each in bad:
        texts += [each, "good"]
    found = rewards.judge(answers(*texts))
    assert found[0] == {name: {"long": 5.0, "row": 2.0}}
    assert found[1::2] == [None] * len(bad)
    assert found[2::2] == [{name: {"long": 4.0, "row": 2.0}}] * len(bad)
    line = 1 + MY_REWARDS.splitlines().index('        raise KeyError("no such column")')
    reasons = {
        f"{name}: KeyError: 'no such column' (line {line})": 2,
        f"{name}: ValueError: reward is nan": 1,
        f"{name}: ValueError: b is inf": 1,
        f"{name}: ValueError: reward is str, not a number": 1,
        f"{name} ended its process (status 7)": 2,
        f"{name} took longer than 3 s (train.grpo.timeout)": 1,
        f"{name} ended its process (status 1)": 1,
    }
    assert dict(rewards.failures) == reasons
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"no reward: {reason}" for reason in reasons)
    log = (tmp_path / "verifier.log").read_text()
    assert "loading" in log
    assert "prints good" in log
    assert log.count("Traceback") == 5  # of each error once per process; one comes again


@pytest.mark.parametrize("text", ["hang", "die"])
def test_a_verifier_that_always_ends_its_process_ends_the_run(tmp_path, text):
    path = tmp_path / "my_rewards.py"
    path.write_text(MY_REWARDS)
    process = VerifierProcess([f"{path}:score"], 0.5, tmp_path / "verifier.log")
    with pytest.raises(UserError, match="with 5 answers, before any had a reward"):
        process.judge(answers(*[text] * 64))
    process.close()


def test_it_does_not_once_an_answer_had_a_reward(rewards):
    assert rewards.judge(answers("good", *["die"] * 7))[1:] == [None] * 7


def test_several_verifiers(tmp_path):
    process = VerifierProcess(["arithmetic", "length"], 5.0, tmp_path / "log")
    found = process.judge([Answer("2+3=", "5"), Answer("2+3=", "23")])
    assert found == [
        {"arithmetic": {"reward": 1.0}, "length": {"reward": -1.0}},
        {"arithmetic": {"reward": 0.0}, "length": {"reward": -2.0}},
    ]
    process.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "unknown verifier nothing; use one of exact"),
        ("exat", "did you mean exact"),
        ("{}/absent.py:score", "absent.py is not a file"),
        ("{}/my.py:absent", "has no function absent"),
        ("{}/my.py:scor", "did you mean score"),
        ("{}/my.py", "names no function; use FILE.py:FUNCTION"),
        ("{}/my.py:number", "number in .*my.py is int; it must be a function"),
        ("{}/my:score", "did you mean .*my.py:score"),
        ("{}/my.score", "did you mean .*my.py:score"),
        ("{}/broken.py:score", r"ZeroDivisionError: division by zero \(line 1\)"),
        ("{}/syntax.py:score", r"SyntaxError: expected ':' \(syntax.py, line 1\)"),
    ],
)
def test_a_verifier_that_cannot_be_loaded(tmp_path, name, text):
    (tmp_path / "my.py").write_text(MY_REWARDS)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def score(answer)")
    with pytest.raises(UserError, match=text):
        VerifierProcess([name.format(tmp_path)], 5.0, tmp_path / "log")


def test_what_comes_with_thinker():
    assert exact(Answer("?", " yes\n", {"answer": "yes"})) == 1
    assert exact(Answer("?", "no", {"completion": "yes"})) == 0
    with pytest.raises(ValueError, match="no text or number in the column"):
        exact(Answer("?", "no", {}))
    assert regex(Answer("?", "a12 ", {"regex": r"a\d+"})) == 1
    assert regex(Answer("?", "a12b", {"regex": r"a\d+"})) == 0
    assert arithmetic(Answer("1+1=2\n27+85=", "112\n")) == 1
    assert arithmetic(Answer("What is 27 - 85 = ", "-58")) == 1
    assert arithmetic(Answer("2*(3+4)=", "14.0")) == 0
    assert arithmetic(Answer("05+3=", "8")) == 1
    assert exact(Answer("?", "42", {"answer": 42})) == 1
    assert evaluate("-2*(3+4)-1") == -15
    for prompt in ("", "three and four", "3+4 is"):
        with pytest.raises(ValueError, match="does not end with a sum"):
            arithmetic(Answer(prompt, "7"))
    with pytest.raises(ValueError, match="the row has no column regex"):
        regex(Answer("?", "7", {}))
    with pytest.raises(ValueError, match="no sum"):
        evaluate("2**9")


def test_json_that_fits_a_schema():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for row in ({"json_schema": schema}, {"json_schema": json.dumps(schema)}):
        assert json_schema(Answer("?", ' {"n": 3}\n', row)) == 1
        for text in ('{"n": "3"}', "{}", '{"n": 3', "3", "", "[" * 100_000):
            assert json_schema(Answer("?", text, row)) == 0
    with pytest.raises(SchemaError):
        json_schema(Answer("?", "{}", {"json_schema": {"type": "integr"}}))


def test_rows_may_hold_any_value(rewards):
    """Such as a date of a Parquet file, which JSON does not know."""
    row = {"n": 2, "day": datetime.date(2026, 1, 2)}
    (name,) = rewards.names
    assert rewards.judge([Answer("?", "abc", row)]) == [{name: {"long": 3.0, "row": 2.0}}]


def test_a_process_that_is_gone_before_it_is_asked(rewards):
    """It costs one answer its reward."""
    rewards._process.kill()
    rewards._process.wait()
    found = rewards.judge(answers("a", "bc"))
    (name,) = rewards.names
    assert found == [None, {name: {"long": 2.0, "row": 2.0}}]


HABITS = """
from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import neighbour
import numpy as np
import torch


@dataclass
class Kept:
    n: int


def score(answer):
    if answer.text == "numpy":
        return {"a": np.float32(1.5), "b": np.bool_(True), "c": torch.tensor(2)}
    if answer.text == "read":
        return len(sys.stdin.read()) + neighbour.ONE
    if answer.text == "program":
        return subprocess.run([sys.executable, "program.py"]).returncode
    if answer.text == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(answer.row["file"]).write_text(str(child.pid))
        time.sleep(1000)
    return int(answer.text)
"""


@pytest.fixture
def habits(tmp_path, monkeypatch):
    """Verifiers in a folder with a module beside them, and with one that is called random."""
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    (tmp_path / "program.py").write_text("import neighbour\n")
    (tmp_path / "random.py").write_text("raise RuntimeError('not the random of Python')\n")
    (tmp_path / "habits.py").write_text(HABITS)
    monkeypatch.chdir(tmp_path)
    process = VerifierProcess(["habits.py:score"], 5.0, tmp_path / "verifier.log")
    yield process
    process.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_what_verifiers_usually_do(habits, tmp_path):
    numpy, read = habits.judge(answers("numpy", "read"))
    assert numpy == {"habits.py:score": {"a": 1.5, "b": 1.0, "c": 2.0}}
    assert read == {"habits.py:score": {"reward": 1.0}}
    # A reason that holds the answer does not fill the screen.
    assert habits.judge(answers(*(f"x{n}" for n in range(30)))) == [None] * 30
    assert len(habits.failures) == MAX_REASONS + 1
    assert habits.failures[OTHER_REASONS] == 30 - MAX_REASONS
    line = 1 + HABITS.splitlines().index("    return int(answer.text)")
    assert all(reason.endswith((f"(line {line})", OTHER_REASONS)) for reason in habits.failures)
    # A program that a verifier starts finds the files beside it.
    assert habits.judge(answers("program")) == [{"habits.py:score": {"reward": 0.0}}]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_children_end_with_the_verifier_that_started_them(habits, tmp_path):
    file = tmp_path / "child"
    assert habits.judge([Answer("?", "child", {"file": str(file)})]) == [None]
    child = int(file.read_text())
    wait_for(lambda: not is_running(child))


FORKS = """
import os
import sys


def comes_back(answer):
    if os.fork() == 0:
        return 77.0
    os.wait()
    return float(len(answer.text))


def raises(answer):
    if os.fork() == 0:
        raise ValueError("in the child")
    os.wait()
    return float(len(answer.text))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("function", ["comes_back", "raises"])
def test_a_child_that_comes_back_judges_nothing(tmp_path, function):
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    process = VerifierProcess([f"{path}:{function}"], 60.0, tmp_path / "log")
    texts = ["a", "bb", "ccc"]
    found = process.judge(answers(*texts))
    process.close()
    assert [list(each.values()) for each in found] == [[{"reward": len(text)}] for text in texts]


CHANGES = """
def changes(answer):
    answer.row["n"] = "changed"
    return 0.0


def reads(answer):
    return answer.row["n"]
"""


def test_a_verifier_cannot_change_the_row_of_the_next(tmp_path):
    path = tmp_path / "changes.py"
    path.write_text(CHANGES)
    names = [f"{path}:changes", f"{path}:reads"]
    process = VerifierProcess(names, 60.0, tmp_path / "log")
    (found,) = process.judge(answers("a"))
    process.close()
    assert found[names[1]] == {"reward": 2.0}


def test_neighbours_of_one_name_are_refused(tmp_path):
    """Python would give the second verifier that of the first."""
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"NAME = {folder!r}\n")
        path = tmp_path / folder / f"of_{folder}.py"
        path.write_text("import helper\n\n\ndef score(answer):\n    return 0.0\n")
        names.append(f"{path}:score")
    with pytest.raises(UserError, match="b and .*a both have a module helper; rename one"):
        VerifierProcess(names, 60.0, tmp_path / "log")
    for name in names:
        VerifierProcess([name], 60.0, tmp_path / "log").close()
    (tmp_path / "a" / "helper.py").unlink()
    (tmp_path / "a" / "of_a.py").write_text("def score(answer):\n    return 0.0\n")
    VerifierProcess(names, 60.0, tmp_path / "log").close()
    (tmp_path / "a" / "helper").mkdir()
    (tmp_path / "a" / "helper" / "__init__.py").touch()  # a package, which a function may import
    with pytest.raises(UserError, match="both have a module helper"):
        VerifierProcess(names, 60.0, tmp_path / "log")


HANGS = """
import os
import time
from pathlib import Path


def score(answer):
    path = Path(__file__).with_name("pid")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(1000)
"""
PARENT = """
import sys
from pathlib import Path

from thinker.features.rewards.verifiers.verifier import Answer
from thinker.features.rewards.verifiers.verifier_process import VerifierProcess

VerifierProcess([sys.argv[1]], 1000.0, Path(sys.argv[2])).judge([Answer("", "")])
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_a_verifier_ends_with_the_training_that_was_killed(tmp_path):
    path = tmp_path / "hangs.py"
    path.write_text(HANGS)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{path}:score", tmp_path / "log"])
    file = tmp_path / "pid"
    wait_for(file.exists)
    verifier = int(file.read_text())
    assert is_running(verifier)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(verifier))


def test_rewards_that_are_refused():
    for value, message in (
        (-1e16, r"reward is -1e\+16, beyond 1e\+15"),
        ({1: 1.0, "1": 4.0}, "two rewards have the name 1"),
    ):
        with pytest.raises(ValueError, match=message):
            checked_parts(value)
    assert checked_parts({"two\nlines": 1}) == {"two lines": 1.0}


def is_running(pid):
    """Whether a process exists, and is not only waiting for its parent to see its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ctrl_c_does_not_reach_verifiers(rewards):
    """Training ends its step first, and needs rewards for that."""
    assert os.getpgid(rewards._process.pid) != os.getpgid(0)
