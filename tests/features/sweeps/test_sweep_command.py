"""thinker sweep: a grid with seeds, killed and resumed, with the losses and intervals of its
runs."""

import csv
import json
import math
import os
import signal

import in_process
import pytest
import scipy.stats
import sweep_runs
from conftest import run_script
from sweep_runs import events, start_command
from training_runs import checkpoint_steps, last_step, read_metrics, wait_for

from thinker.runtime.errors import UserError

tiny_config, run_here = sweep_runs.tiny_config, sweep_runs.run_here  # fixtures
fork_processes = in_process.fork_processes
pytestmark = pytest.mark.usefixtures("one_thread")
GRID = ("--grid", "optimizer.lr=x0.3,x1,x3", "--grid", "model.d_model=16,32", "--seeds", "2")
SMALL_GRID = ("--grid", "optimizer.lr=x0.3,x1", "--seeds", "2")
OF_TIME = ("seconds", "folder")


def table(folder):
    """The rows of settings.csv and runs.csv without what differs between equal sweeps."""
    rows = []
    for name in ("settings.csv", "runs.csv"):
        for row in csv.DictReader((folder / name).read_text().splitlines()):
            rows.append({key: value for key, value in row.items() if key not in OF_TIME})
    return rows


def finished(folder):
    """The names of the runs that have ended."""
    path = folder / "sweep.json"
    if not path.exists():
        return []
    return [name for name, run in json.loads(path.read_text()).items() if run["status"]]


def trainings(folder):
    """The process ids of the runs that are at work."""
    pids = []
    for owner in folder.glob("*/.owner"):
        pid = int(owner.read_text().split()[1])
        if not has_ended(pid):
            pids.append(pid)
    return pids


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.more
def test_a_grid_that_is_killed_twice_gives_the_table_of_one_that_is_not(
    tiny_config, tmp_path, stress
):
    """In real processes: SIGKILL of the parent and its children. With --stress, 3 rates x 2 widths x
    2 seeds."""
    grid, n_runs = (GRID, 12) if stress else (SMALL_GRID, 4)
    sweep = ["sweep", tiny_config, *grid, "train.log_every=1", "--jobs", "2", "--folder"]
    whole = start_command(tmp_path, *sweep, "whole")
    shown, error = whole.communicate()
    assert whole.returncode == 0, error
    killed = tmp_path / "killed"
    for n_finished in (0, n_runs // 2):
        process = start_command(tmp_path, *sweep, "killed")

        def is_at_work(n_finished=n_finished):
            is_far = len(finished(killed)) >= n_finished
            at_work = [run for run in killed.glob("*/") if 0 < last_step(run) < 6]
            return is_far and at_work and trainings(killed)

        assert wait_for(is_at_work, process), process.communicate()
        process.kill()
        process.communicate()
        for pid in trainings(killed):
            os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not trainings(killed))
        assert n_finished <= len(finished(killed)) < n_runs
    process = start_command(tmp_path, *sweep, "killed")
    assert process.communicate()[0].replace("killed", "whole").splitlines()[0].split() == (
        shown.splitlines()[0].split()
    )
    assert process.returncode == 0
    assert table(killed) == table(tmp_path / "whole")
    assert len(table(killed)) == n_runs // 2 + n_runs
    check_statistics(killed)


def check_statistics(folder):
    """The means, intervals and tests of settings.csv are those that scipy computes from
    metrics.jsonl."""
    losses = {}
    for row in csv.DictReader((folder / "runs.csv").read_text().splitlines()):
        loss = read_metrics(folder / os.path.basename(row["folder"]))[-1]["val_loss"]
        assert float(row["val_loss"]) == loss
        losses.setdefault(row["setting"], []).append(loss)
    rows = list(csv.DictReader((folder / "settings.csv").read_text().splitlines()))
    means = [float(row["val_loss"]) for row in rows]
    assert means == sorted(means)
    best = losses[rows[0]["setting"]]
    for row in rows:
        values = losses[row["setting"]]
        n, mean = len(values), sum(values) / len(values)
        low, high = scipy.stats.t.interval(0.95, n - 1, mean, scipy.stats.sem(values))
        assert float(row["val_loss"]) == pytest.approx(mean, rel=1e-12)
        assert float(row["interval"]) == pytest.approx((high - low) / 2, rel=1e-9)
        if row is rows[0]:
            assert row["p_to_best"] == ""
            continue
        # Welch's t-test, by its definition.
        errors = [scipy.stats.sem(each) ** 2 for each in (best, values)]
        statistic = (sum(best) / n - mean) / math.sqrt(sum(errors))
        freedom = sum(errors) ** 2 / sum(error**2 / (n - 1) for error in errors)
        p = 2 * scipy.stats.t.sf(abs(statistic), freedom)
        assert float(row["p_to_best"]) == pytest.approx(p, rel=1e-9)


@pytest.mark.more
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_children_which_save(tiny_config, tmp_path, number, status):
    command = ["sweep", tiny_config, "train.max_steps=1000000", "train.log_every=1"]
    command += ["train.eval_every=100000", "train.save_every=100000"]
    command += ["--grid", "model.d_model=16,32", "--jobs", "2", "--json"]
    process = start_command(tmp_path, *command)
    folder = tmp_path / "runs" / "tiny-sweep"
    runs = [folder / f"d_model-{width}-seed-1" for width in (16, 32)]
    assert wait_for(lambda: all(last_step(run) for run in runs), process), process.communicate()
    pids = trainings(folder)
    assert len(pids) == 2
    os.killpg(process.pid, number)  # as a terminal does
    shown, error = process.communicate()
    assert process.returncode == status, error
    assert all(has_ended(pid) for pid in pids)
    for run in runs:
        assert checkpoint_steps(run) == [last_step(run)]
    assert [event["event"] for event in events(shown)] == ["start", "setting", "setting", "stopped"]
    assert events(shown)[-1]["left"] == 2
    assert "the same command continues" in events(shown)[-1]["verdict"]


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_more_values_reuse_runs_and_other_configs_are_refused(
    run_here, tiny_config, tmp_path, text_file
):
    sweep = ["sweep", tiny_config, "--seeds", "2", "--json"]
    status, shown = run_here(*sweep, "--grid", "optimizer.head_lr=0.01,1e30")
    lines = events(shown)
    assert status == 0
    assert [line["event"] for line in lines] == ["start", *4 * ["run"], *2 * ["setting"], "done"]
    runs = {line["name"]: line for line in lines if line["event"] == "run"}
    assert {run["status"] for name, run in runs.items() if "1e+30" in name or "1e30" in name} == {
        "not finite"
    }
    good, bad = (line for line in lines if line["event"] == "setting")
    assert (good["settings"], bad["settings"]) == (
        {"optimizer.head_lr": "0.01"},
        {"optimizer.head_lr": "1e30"},
    )
    assert good["values"] == [runs[f"head_lr-0.01-seed-{seed}"]["val_loss"] for seed in (1, 2)]
    assert (bad["val_loss"], bad["values"], bad["interval"]) == (None, [None, None], None)
    assert lines[-1]["verdict"].startswith("only optimizer.head_lr=0.01 has a finite loss")
    folder = tmp_path / "runs" / "tiny-sweep"
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    n_parameters = 2 * 300 * 32 + 2 * (4 * 32**2 + 3 * 32 * 128 + 2 * 32 + 2 * 16) + 32
    assert {run["parameters"] for run in runs.values() if run["parameters"]} == {n_parameters}

    # The folder of a sweep stands for its runs.
    compared = events(run_here("compare", folder, "--json")[1])
    compared = [line for line in compared if line["event"] == "setting"]
    assert [line["values"] for line in compared] == [good["values"]]

    # One value more, and one seed more: only new runs are trained.
    written_at = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    status, shown = run_here(
        *sweep[:2], "--seeds", "3", "--json", "--grid", "optimizer.head_lr=0.01,1e30,0.02"
    )
    lines = events(shown)
    assert (lines[0]["runs"], lines[0]["finished"]) == (9, 4)
    new = {line["name"] for line in lines if line["event"] == "run"}
    assert new == {
        *(f"head_lr-{lr}-seed-3" for lr in ("0.01", "1e30")),
        *(f"head_lr-0.02-seed-{seed}" for seed in (1, 2, 3)),
    }
    after = {path: path.stat().st_mtime_ns for path in written_at}
    assert after == written_at

    # Another config under the same names.
    with pytest.raises(UserError, match="was trained with train.max_steps=6, which is now 7; give"):
        run_here(*sweep, "--grid", "optimizer.head_lr=0.01,1e30", "train.max_steps=7")
    # Keys without effect on the result may change.
    shown = run_here(*sweep, "--grid", "optimizer.head_lr=0.01,1e30", "train.save_every=3")[1]
    assert events(shown)[0]["finished"] == 4


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_a_failed_run_leaves_the_others(run_here, tiny_config, tmp_path):
    folder = tmp_path / "runs" / "tiny-sweep"
    folder.mkdir(parents=True)
    obstacle = folder / "d_model-16-seed-1"
    obstacle.write_text("a file where the run needs a folder")
    sweep = ["sweep", tiny_config, "--grid", "model.d_model=16,32"]
    status, shown = run_here(*sweep)
    assert status == 1
    assert "d_model-16-seed-1 failed: run.dir=" in shown
    assert "the same command tries again" in shown
    assert shown.splitlines()[1].startswith("model.d_model=32 ")
    lines = events(run_here(*sweep, "--json")[1])
    assert lines[-1]["failed"] == ["d_model-16-seed-1"]
    obstacle.unlink()
    status, shown = run_here(*sweep)
    assert status == 0
    assert " failed: " not in shown


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_a_text_that_changes_between_two_sweeps_is_noticed(
    run_here, tiny_config, tmp_path, text_file
):
    text = tmp_path / "own.txt"
    text.write_text(text_file.read_text())
    sweep = ["sweep", tiny_config, f"data.path={text}", "--seeds", "2"]
    assert run_here(*sweep)[0] == 0
    text.write_text(text_file.read_text().replace("cat", "dog"))
    status, shown = run_here(*sweep)
    assert status == 1
    assert shown.count("has changed since the run") == 2
    text.write_text(text_file.read_text())
    assert run_here(*sweep)[0] == 0


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_variants_for_the_same_time_are_compared_seed_by_seed(run_here, tiny_config, tmp_path):
    """What benchmarks of equal time do: named variants, the first of which is the baseline."""
    variants = ["--variant", "plain:", "--variant", "no decay: optimizer.weight_decay=0"]
    variants += ["--variant", "half: optimizer.lr=x0.5 optimizer.head_lr=x0.5"]
    sweep = ["sweep", tiny_config, *variants, "--minutes", "9", "--seeds", "2"]
    status, shown = run_here(*sweep, "--json")
    assert status == 0
    rows = {line["name"]: line for line in events(shown) if line["event"] == "setting"}
    base = dict(zip(rows["plain"]["seeds"], rows["plain"]["values"]))
    for row in rows.values():
        distances = [loss - base[seed] for seed, loss in zip(row["seeds"], row["values"])]
        mean = sum(distances) / 2
        assert row["difference"] == pytest.approx(mean, abs=1e-12)
        half = 12.706204736 * abs(distances[0] - distances[1]) / 2  # t of one degree of freedom
        assert row["difference_interval"] == pytest.approx(half, rel=1e-6, abs=1e-12)
    plain, half = (
        (tmp_path / "runs" / "tiny-sweep" / f"{name}-seed-1" / "config.yaml").read_text()
        for name in ("plain", "half")
    )
    assert "max_minutes: 9.0" in plain
    rates = [
        float(text.split("  head_lr: ")[1].splitlines()[0].replace("null", "0"))
        for text in (plain, half)
    ]
    assert rates[1] == pytest.approx(rates[0] / 2) == 0.0125  # 0.05, scaled for 4 sequences a step
    assert run_here(*sweep)[1].splitlines()[0].endswith("from plain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one run leaves nothing to compare; set --grid, --variant or --seeds"),
        (["--grid", "optimizer.lr"], "has no values; write it as section.key=V1,V2"),
        (["--grid", "optimizer.lr=1,1"], "has 1 twice"),
        (["--grid", "optimizer.lr=1,2", "optimizer.lr=3"], "is an override of all runs, too"),
        (["--grid", "run.seed=1,2"], "use --seeds and --folder"),
        (["--grid", "data.path=x2,x3"], "so x2 cannot multiply it"),
        (["--grid", "optimizer.rate=1,2"], "unknown config key optimizer.rate"),
        (["--grid", "model.n_heads=2,3"], "model.d_model"),
        (["--variant", "train.max_steps=3"], "write it as 'NAME: section.key=value ...'"),
        (["--variant", "a: lr", "--seeds", "2"], "lr is not an override"),
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--seeds", "2", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["--seeds", "2", "--minutes", "nan"], "--minutes is nan; it must be a positive number"),
        (["--seeds", "2", "--multipliers", "1,2"], "--multipliers has no effect without --halving"),
        (["--halving", "--grid", "optimizer.lr=1,2"], "--grid has no effect with --halving"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    run_here, tiny_config, tmp_path, arguments, message
):
    with pytest.raises(UserError) as error:
        run_here("sweep", tiny_config, *arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_two_sweeps_do_not_share_a_folder(run_here, tiny_config, tmp_path):
    from thinker.features.sweeps.grid import make_settings
    from thinker.features.sweeps.sweep import Sweep

    settings = make_settings(tiny_config, [], {"model.d_model": ["16", "32"]}, {})
    first = Sweep(tiny_config, [], settings, 1, None, tmp_path / "runs" / "tiny-sweep")
    first.open()
    with pytest.raises(UserError, match="another sweep is at work"):
        run_here("sweep", tiny_config, "--grid", "model.d_model=16,32")
    first.close()


@pytest.mark.parametrize("name", ["sweep", "compare"])
def test_help_imports_no_torch(name, tmp_path):
    code = (
        f"import sys; sys.argv = ['{name}', '--help']\n"
        f"from thinker.features.sweeps.{name}_command import make_parser\n"
        "make_parser()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'matplotlib', 'yaml')))"
    )
    assert run_script("-c", code).returncode == 0
