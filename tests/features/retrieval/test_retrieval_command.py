"""--retrieve of generate.py."""

import json

import pytest
from conftest import ROOT, run_script

from thinker.features.retrieval import command
from thinker.runtime.errors import UserError

GENERATE = ROOT / "generate.py"


def test_retrieval_reports_what_is_stored(tiny_run):
    common = [
        GENERATE,
        tiny_run,
        "--window",
        "8",
        "--sinks",
        "2",
        "--retrieve",
        "2",
        "--retrieve-block",
        "4",
    ]
    common += ["--prompt", "Line 1: the cat " * 20, "--max-new-tokens", "9", "--seed", "1"]
    completed = run_script(*common)
    row = json.loads(run_script(*common, "--json").stdout)
    assert row["n_evicted"] == (row["prompt_tokens"] + len(row["token_ids"]) - 1 - 10) // 4 * 4 > 50
    assert row["stored_bytes"] > 0
    assert f"stored tokens 3 to {2 + row['n_evicted']} in" in completed.stderr
    assert "each query retrieves up to 2 blocks of 4" in completed.stderr
    refused = run_script(*common[:4], "--retrieve", "2", "--retrieve-block", "3")
    assert "use a block that divides the window" in refused.stderr


def test_a_plot_leaves_out_distances_without_needles(tmp_path):
    far = {"distance": 64, "accuracy": 0.5, "chance": 0.1}
    near = {"distance": 4, "unreachable": "no story repeats a fact at that distance"}
    command.plot({"window": [near, far], "retrieval": [near, far]}, 4, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="nothing to plot: no story repeats"):
        command.plot({"window": [near], "retrieval": [near]}, 4, tmp_path / "a.png")
