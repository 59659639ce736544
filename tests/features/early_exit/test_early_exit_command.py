"""--early-exit of generate.py, and scripts/early_exit.py."""

import json

import pytest
from conftest import ROOT, run_script
from generate_flags import check_refused

GENERATE = ROOT / "generate.py"


def test_early_exit_says_how_many_layers_it_used(tiny_run):
    common = [
        GENERATE,
        tiny_run,
        "--prompt",
        "Line",
        "--max-new-tokens",
        "9",
        "--seed",
        "4",
        "--device",
        "cpu",
    ]
    plain = run_script(*common, "--no-compile")
    for threshold, layers in (("0.999999999", "2.00"), ("0.000001", "1.00")):
        done = run_script(*common, "--early-exit", threshold)
        assert done.returncode == 0, done.stderr
        assert f"; {layers} of 2 layers per token" in done.stderr
        assert (done.stdout == plain.stdout) == (layers == "2.00")
        (row,) = map(
            json.loads, run_script(*common, "--early-exit", threshold, "--json").stdout.splitlines()
        )
        assert row["mean_layers"] == float(layers)
        assert done.stdout == f"Line{row['text']}\n"
    assert json.loads(run_script(*common, "--json").stdout)["mean_layers"] is None


def test_the_cost_of_early_exit(tiny_run):
    script = ROOT / "scripts" / "early_exit.py"
    done = run_script(script, tiny_run, "--texts", "3", "--early-exit", "0.000001,0.999999999", "--device", "cpu",
                      "--json", "--text", ROOT / "README.md")  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stdout)["early_exit"]
    assert (first["mean_layers"], last["mean_layers"]) == (1, 2)
    assert (
        last["early_loss"]
        == pytest.approx(last["loss"], abs=1e-5)
        == pytest.approx(first["loss"], abs=1e-5)
    )
    assert first["kl"] > 1e-4 > abs(last["kl"])
    done = run_script(script, tiny_run, "--early-exit", "0.5,2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --early-exit 0.5,2 is not a list of probabilities")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--score", "x", "--early-exit", "0.5"], "--early-exit has no effect with --score"),
        (["--early-exit", "0.5", "--no-cache"], "early_exit needs the KV cache"),
    ],
)
def test_invalid_arguments_raise(tiny_run, monkeypatch, capsys, arguments, message):
    check_refused(tiny_run, monkeypatch, capsys, arguments, message)
