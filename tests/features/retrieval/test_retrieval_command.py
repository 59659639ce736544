"""--retrieve of generate.py."""

import json

from conftest import ROOT, run_script

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
