"""--speculate and --draft of generate.py."""

import pytest
from conftest import ROOT, run_script
from generate_flags import check_refused

GENERATE = ROOT / "generate.py"


def test_drafts_do_not_change_the_text(tiny_run):
    common = [GENERATE, tiny_run, "--prompt", "Line 3: the cat", "--max-new-tokens", "20"]
    common += ["--seed", "2"]
    plain = run_script(*common)
    drafted = run_script(*common, "--speculate", "4")
    assert drafted.stdout == plain.stdout
    assert "drafted tokens accepted" in drafted.stderr
    assert run_script(*common, "--speculate", "3", "--draft", tiny_run).stdout == plain.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculate", "65"], "speculate is 65"),
        (["--speculate", "2", "--window", "8"], "window cannot be combined with speculate"),
        (["--no-cache", "--speculate", "2"], "speculate needs the KV cache"),
    ],
)
def test_invalid_arguments_raise(tiny_run, monkeypatch, capsys, arguments, message):
    check_refused(tiny_run, monkeypatch, capsys, arguments, message)
