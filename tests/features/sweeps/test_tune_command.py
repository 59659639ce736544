"""scripts/tune.py as a command, and the schedule of its rungs."""

import itertools
import json
import math
import os
import re
import shlex
import signal

import in_process
import pytest
import yaml
from conftest import ROOT, run_script, start_script
from hypothesis import given
from hypothesis import strategies as st
from installed import needs
from training_runs import read_metrics, wait_for

from thinker.features.sweeps.halving import Cost, better_half, plan_rungs
from thinker.features.sweeps.tuning import Search
from thinker.features.sweeps.tuning_report import best_result, format_rows, plot, recommendation
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

TUNE = ROOT / "scripts" / "tune.py"
pytestmark = pytest.mark.usefixtures("one_thread")
fork_processes, tune = in_process.fork_processes, in_process.run_in_process  # fixtures
SIZES = st.lists(st.integers(1, 48), min_size=1, max_size=3, unique=True)
COSTS = st.builds(Cost, st.floats(0, 20), st.floats(1e-4, 0.1), st.integers(1, 16))


@given(st.integers(2, 60), SIZES, st.integers(1, 50), COSTS, st.floats(1, 1e5), st.floats(1, 1e7))
def test_rungs_halve_the_trials_and_double_their_tokens_within_the_minutes(
    n, sizes, steps, cost, seconds, length
):
    try:
        rungs = plan_rungs(n, sizes, steps, cost, seconds, length)
    except UserError as error:  # and with the minutes that it names there is a plan
        seconds += 60 * float(re.search(r"raise --minutes by ([\d.]+),", str(error))[1])
        rungs = plan_rungs(n, sizes, steps, cost, seconds, length)
    assert rungs[0].n_trials == n
    assert rungs[-1].n_trials <= 2 < min([rung.n_trials for rung in rungs[:-1]], default=3)
    for before, after in itertools.pairwise(rungs):
        assert after.n_trials == (before.n_trials + 1) // 2
        assert after.n_sequences == 2 * before.n_sequences
    for rung in rungs:  # all trials see the same sequences, in whole steps
        assert [rung.n_sequences % size for size in sizes] == [0] * len(sizes)
    assert rungs[0].n_sequences >= steps * max(sizes)
    assert cost.seconds(rungs) <= seconds * (1 + 1e-9)
    unit = math.lcm(*sizes)
    # One unit more of sequences in the first rung.
    longer = plan_rungs(n, sizes, rungs[0].n_sequences // max(sizes) + unit, cost, 1e18, 1.0)
    is_full = cost.seconds(longer) > seconds
    is_long = rungs[-1].n_sequences + unit * 2 ** (len(rungs) - 1) > length
    assert is_full or is_long  # no more fits into the minutes, or is worth it


@given(
    st.lists(
        st.one_of(st.floats(0, 10), st.sampled_from([math.inf, math.nan])), min_size=1, max_size=30
    )
)
def test_the_better_half_goes_on(losses):
    kept = better_half(losses)
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    assert [losses[i] for i in kept] == finite[: (len(losses) + 1) // 2]
    assert len(set(kept)) == len(kept)


@pytest.fixture
def config(train_args, tmp_path):
    """The config of the tiny run as a file of its own. Its length ends the search after seconds,
    whatever --minutes."""
    tree = load_config(
        train_args[1], [*train_args[2:], "train.max_steps=160", "train.warmup_steps=2"]
    )
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree.model_dump(mode="json", exclude={"run": {"dir"}})))
    return path


def rows_of(folder):
    return [json.loads(line) for line in (folder / "tuning.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("fork_processes")
def test_search_its_reuse_and_its_interruption(tune, config, tmp_path):
    command = [
        TUNE,
        config,
        "data.shift_windows=true",
        "--multipliers",
        "0.05,1,1e30",
        "--jobs",
        "2",
    ]
    command += ["--batch-sizes", "2,4"]
    shown = tune(*command, "--png", "plot.png")
    folder = tmp_path / "runs" / "tiny-tuning"
    plan, *rows = rows_of(folder)
    assert [rung["n_trials"] for rung in plan["rungs"]] == [6, 3, 2]
    assert [rung["n_sequences"] for rung in plan["rungs"]] == [
        160,
        320,
        640,
    ]  # the last is the config's 160 steps of 4
    first = {(row["multiplier"], row["batch_size"]): row for row in rows if row["rung"] == 1}
    assert first.keys() == {(multiplier, size) for multiplier in (0.05, 1, 1e30) for size in (2, 4)}
    assert [row["val_loss"] for (multiplier, _), row in first.items() if multiplier == 1e30] == [
        None,
        None,
    ]
    for row in rows:
        assert (
            row["tokens"]
            == 32 * plan["rungs"][row["rung"] - 1]["n_sequences"]
            == row["steps"] * row["batch_size"] * 32
        )
        metrics = read_metrics(folder / row["run"])
        if row["val_loss"] is not None:
            assert (metrics[-1]["step"], metrics[-1]["val_loss"]) == (row["steps"], row["val_loss"])
            assert [line["step"] for line in metrics if "val_loss" in line] == [row["steps"]]
            trained = yaml.safe_load((folder / row["run"] / "config.yaml").read_text())
            halved = 0.5**0.5 if row["batch_size"] == 2 else 1
            default = 0.04 * 0.5  # of 4 sequences per step
            assert trained["optimizer"]["lr"] == pytest.approx(
                default * halved * row["multiplier"], rel=1e-5
            )
            assert trained["data"]["shift_windows"] is True
            for override in row["overrides"]:  # as printed, so as trained
                section, _, key = override.partition("=")[0].partition(".")
                assert str(trained[section][key]) == override.partition("=")[2]
        assert not (folder / row["run"] / "checkpoints").exists()
    best = best_result(rows)
    last = [row for row in rows if row["rung"] == 3]
    assert best["val_loss"] == min(row["val_loss"] for row in last)
    table = [line.split() for line in shown.splitlines() if re.match(r" +\d", line)]
    assert [[int(line[0]), float(line[1]), int(line[2])] for line in table] == [
        [row["rung"], row["multiplier"], row["batch_size"]]
        for rung in (1, 2, 3)
        for row in sorted(
            (row for row in rows if row["rung"] == rung),
            key=lambda row: row["val_loss"] or math.inf,
        )
    ]
    result = "of the values tried, those of the config are best"
    if used := [
        line.removeprefix("use: ") for line in shown.splitlines() if line.startswith("use: ")
    ]:
        result = f"use: {used[0]}"
        changed = load_config(config, ["data.shift_windows=true", *shlex.split(used[0])])
        assert changed.train.batch_size * changed.train.max_steps == 4 * 160
        assert changed.train.batch_size == best["batch_size"]
    assert result in shown.splitlines()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    written_at = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    assert tune(*command) == shown  # the same table, nothing trained again
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == written_at
    assert (folder / "tuning.png").read_bytes().startswith(b"\x89PNG")
    (line,) = tune(*command, "--json").splitlines()  # all runs were made earlier
    done = json.loads(line)
    assert (done["event"], done["verdict"]) == ("done", result)
    assert done["best"] == best
    other = run_script(*command, "--minutes", "9", cwd=tmp_path)
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "contains a search with other arguments; give another --folder" in other.stderr

    # A last rung without end, which Ctrl-C ends.
    plan["rungs"][2]["n_sequences"] = 2**40
    kept = [plan, *(row for row in rows if row["rung"] < 3)]
    (folder / "tuning.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    for row in last:
        (folder / row["run"] / "metrics.jsonl").unlink()
    process = start_script(*command, cwd=tmp_path)
    runs = [folder / row["run"] for row in last]
    assert wait_for(lambda: all(read_metrics(run) for run in runs), process), process.output()
    trainings = [int((run / ".owner").read_text().split()[1]) for run in runs]
    assert not any(has_ended(pid) for pid in trainings)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    best = best_result(kept[1:])
    assert f"(loss {best['val_loss']:.4f} in rung 2)" in process.output()[0]
    assert all(has_ended(pid) for pid in trainings)
    assert rows_of(folder) == kept


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.learning_rate=1"], "unknown config key optimizer.learning_rate"),
        (["--minutes", "0"], "--minutes is 0; it must be a positive number"),
        (["--minutes", "nan"], "--minutes is nan; it must be a positive number"),
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (
            ["--multipliers", "1", "--batch-sizes", "4"],
            "leave nothing to compare; set more --multipliers",
        ),
        (["--multipliers", "1,x"], "--multipliers is '1,x'; it must be numbers such as 0.5,1,2"),
        (
            ["--multipliers", "0,1"],
            "--multipliers is '0,1'; the numbers must be positive and different",
        ),
        (
            ["--batch-sizes", "4,4"],
            "--batch-sizes is '4,4'; the numbers must be positive and different",
        ),
        (["--batch-sizes", "4.5"], "--batch-sizes is '4.5'; it must be whole numbers such as 8,16"),
        (["--png", "a.jpg"], "plots are PNG files"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(arguments, message, config, tmp_path):
    done = run_script(TUNE, config, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_too_few_minutes_are_refused_with_the_number_that_is_enough():
    with pytest.raises(
        UserError, match=r"^18 runs of at least 20 steps need 8\.4 minutes; raise --minutes by 7\.4"
    ):
        plan_rungs(18, [8, 16, 32], 20, Cost(5.0, 0.01, 2), 60, math.inf)


def test_rates_of_adapters_and_micro_batches(config, tiny_run, tmp_path):
    """What a trial changes is what the config reads: adapters have one rate, and micro-batches
    divide a batch."""
    lora = [
        "model.n_kv_heads=null",
        "data.tokenizer=null",
        f"run.init_from={tiny_run}",
        "optimizer.name=adamw",
    ]
    for overrides, n_rates in (
        (["train.lora_rank=2", *lora], 1),
        (["model.tie_embeddings=true"], 3),
        ([], 4),
    ):
        search = Search(config, [*overrides, "train.micro_batch_size=4"], tmp_path)
        search.prepare()
        optimizer = search.settings(6).optimizer
        candidate = search.candidate(2.0, 6, optimizer)
        rates = [override for override in candidate.overrides if override.startswith("optimizer.")]
        assert len(rates) == n_rates
        assert float(rates[0].removeprefix("optimizer.lr=")) == pytest.approx(
            2 * optimizer.lr, rel=1e-5
        )
        assert candidate.overrides[n_rates:] == ("train.batch_size=6", "train.micro_batch_size=2")
        assert (
            search.trial(candidate, 1, 12).overrides[-1] == "tracking.wandb=disabled"
        )  # a valid config
        assert search.candidate(1.0, 4, optimizer).overrides == ()


def result(multiplier, batch_size, loss, rung=1, overrides=()):
    values = {
        "rung": rung,
        "multiplier": multiplier,
        "batch_size": batch_size,
        "steps": 8,
        "tokens": 100,
    }
    return values | {"val_loss": loss, "seconds": loss and 1.0, "overrides": list(overrides)}


def test_what_is_said_of_a_result(config, tmp_path):
    tree = load_config(config, [])
    own = recommendation(
        [result(0.5, 4, 2.0), result(1, 4, 1.0), result(2, 4, None)], config, [], tree
    )
    assert own == ["of the values tried, those of the config are best",
                   "the rates were tuned on shorter runs: 8 steps instead of 160"]  # fmt: skip
    rows = [
        result(1, 4, 1.0),
        result(2, 8, 0.9, overrides=["optimizer.lr=0.1", "train.batch_size=8"]),
    ]
    use, command, edge, length = recommendation(rows, config, ["data.path=a b.txt"], tree)
    assert use == "use: optimizer.lr=0.1 train.batch_size=8 train.max_steps=80"
    assert shlex.split(command) == [
        "thinker",
        "train",
        str(config),
        "data.path=a b.txt",
        *use.split()[1:],
    ]
    assert edge == "the best multiplier is the largest one tried; also set --multipliers above it"
    assert length.endswith("8 steps instead of 80")
    assert format_rows([*rows, result(4, 4, None)]).splitlines()[-1].endswith("not finite")
    plot([*rows, result(4, 4, None), result(2, 8, 0.8, rung=2)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@needs("auto_size")
@pytest.mark.usefixtures("fork_processes")
def test_a_config_that_chooses_its_size_keeps_one_choice_for_all_trials(tune, text_file, tmp_path):
    config = ROOT / "features" / "auto_size" / "any-text.yaml"
    command = [TUNE, config, f"data.path={text_file}", "model.n_layers=1",
               "data.seq_len=16", "train.max_steps=20", "train.warmup_steps=2", "train.device=cpu",
               f"data.cache_dir={tmp_path / 'cache'}", "--multipliers", "0.5,1", "--batch-sizes", "4"]  # fmt: skip
    shown = tune(*command)
    plan, *rows = rows_of(tmp_path / "runs" / "any-text-tuning")
    assert "model.size=null" in plan["size"]
    for row in rows:
        trained = yaml.safe_load(
            (tmp_path / "runs" / "any-text-tuning" / row["run"] / "config.yaml").read_text()
        )
        chosen = dict(override.split("=") for override in plan["size"])
        for key in ("model.d_model", "data.tokenizer", "model.dropout"):
            section, _, name = key.partition(".")
            assert trained[section][name] == json.loads(chosen[key])
    assert tune(*command) == shown
