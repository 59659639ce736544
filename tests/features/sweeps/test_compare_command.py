"""thinker compare: groups of seeds, their statistics, and what may be ranked by which loss."""

import csv
import json
import math
import statistics

import matplotlib.colors
import matplotlib.image
import pytest
import scipy.stats
import sweep_runs
import torch
import yaml
from conftest import run_script
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from sweep_runs import events

from thinker.features.sweeps.comparison import Comparison, Group, group_runs
from thinker.features.sweeps.comparison_report import _shift, plot
from thinker.features.sweeps.run_result import RunResult, read_run
from thinker.features.sweeps.seed_statistics import mean_and_interval, welch_p
from thinker.runtime.errors import UserError

run_here = sweep_runs.run_here  # a fixture
LOSSES = st.lists(st.floats(0.1, 10), min_size=2, max_size=6)


@given(LOSSES, LOSSES)
def test_intervals_and_tests_are_those_of_scipy(a, b):
    mean, half = mean_and_interval(a)
    error = scipy.stats.sem(a)
    assert mean == pytest.approx(sum(a) / len(a))
    if error > 1e-9:
        low, high = scipy.stats.t.interval(0.95, len(a) - 1, mean, error)
        assert half == pytest.approx((high - low) / 2, rel=1e-6)
    spread = min(scipy.stats.sem(a), scipy.stats.sem(b))
    if spread > 1e-6:
        expected = scipy.stats.ttest_ind(a, b, equal_var=False).pvalue
        assert welch_p(a, b) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_without_several_values_there_is_no_test():
    assert welch_p([1.0], [2.0, 3.0]) is None
    assert welch_p([1.0, 1.0], [2.0, 2.0]) is None
    assert mean_and_interval([2.5]) == (2.5, 0.0)


def write_run(folder, losses, corpus="c", tokenizer="t", **keys):
    """A run directory with an evaluation every ten steps; keys as section__key=value."""
    tree = {
        "run": {"dir": str(folder), "seed": 1},
        "data": {"source": "text", "path": "a.txt", "tokenizer": "char", "seq_len": 32},
        "train": {"max_steps": 10 * len(losses), "save_every": 5},
        "tracking": {"wandb": "disabled"},
    }
    for name, value in keys.items():
        section, _, key = name.partition("__")
        tree[section][key] = value
    checkpoint = folder / "checkpoints" / f"step-{10 * len(losses):08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"corpus": corpus, "tokenizer": tokenizer}))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, checkpoint / "model.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    lines = []
    for number, loss in enumerate(losses, start=1):
        step = {"step": 10 * number, "tokens": 1000 * number, "elapsed_s": 6.0 * number}
        lines.append(step | {"train_loss": loss + 0.1})
        lines.append(step | {"val_loss": loss, "val_bits_per_byte": loss / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_seeds(folder, name, losses, **keys):
    for seed, loss in enumerate(losses, start=1):
        write_run(folder / f"{name}-seed-{seed}", [9.0, loss - 0.5, loss], run__seed=seed, **keys)


def test_groups_table_csv_plot_and_verdict(run_here, tmp_path):
    """Best first; keys of the machine do not divide groups; folders that are no runs are left
    out."""
    write_seeds(tmp_path / "runs", "wide", [3.0, 3.1, 3.2])
    write_seeds(tmp_path / "runs", "long", [2.0, 2.1], data__seq_len=32, train__batch_size=8)
    other = yaml.safe_load((tmp_path / "runs" / "wide-seed-2" / "config.yaml").read_text())
    other["train"]["save_every"] = 7
    (tmp_path / "runs" / "wide-seed-2" / "config.yaml").write_text(yaml.safe_dump(other))
    (tmp_path / "runs" / "notes").mkdir()
    folders = sorted((tmp_path / "runs").iterdir())
    status, shown = run_here("compare", *folders, "--csv", "runs.csv", "--png", "runs.png")
    assert status == 0
    table = [line.split() for line in shown.splitlines()[1:3]]
    interval = scipy.stats.sem([2.0, 2.1]) * scipy.stats.t.ppf(0.975, 1)
    p = scipy.stats.ttest_ind([2.0, 2.1], [3.0, 3.1, 3.2], equal_var=False).pvalue
    assert table[0] == [
        "long", "2", "2.0500", f"{interval:.4f}", "1.0250", "1.5500", "3,000", "0.30", "22",
    ]  # fmt: skip
    assert table[1][:3] == ["wide", "3", "3.1000"]
    assert table[1][-1] == f"{p:.2g}"
    assert "long: train.batch_size=8" in shown
    assert (
        f"long is better than wide: 2.0500 against 3.1000 nats per token (Welch's t-test, 2 and 3 "
        f"seeds, p = {p:.2g})"
    ) in shown.splitlines()
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [(row["setting"], row["seed"], row["val_loss"]) for row in rows] == [
        ("long", "1", "2.0"), ("long", "2", "2.1"),
        ("wide", "1", "3.0"), ("wide", "2", "3.1"), ("wide", "3", "3.2"),
    ]  # fmt: skip
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_one_evaluation_is_in_the_plot(tmp_path):
    """A line of one point would be invisible."""
    path = tmp_path / "plot.png"
    runs = []
    for number, loss in enumerate([2.0, 3.0], start=1):
        folder = write_run(tmp_path / str(number), [loss], train__batch_size=number)
        runs.append(read_run(folder))
    groups, _ = group_runs(runs)
    plot(Comparison(groups), path)
    pixels = matplotlib.image.imread(path)[:, : 13 * 120 // 2, :3]
    for color in ("C0", "C1"):
        distance = abs(pixels - matplotlib.colors.to_rgb(color)).max(axis=2)
        height = (distance < 0.02).sum(axis=0).max()
        assert height > 6  # pixels of a dot; the line in the legend has two or three


def test_close_groups_are_not_distinguishable(run_here, tmp_path):
    write_seeds(tmp_path, "a", [2.0, 2.2])
    write_seeds(tmp_path, "b", [2.1, 2.4], train__batch_size=8)
    write_seeds(tmp_path, "c", [2.2, 2.3], train__batch_size=9)
    write_seeds(tmp_path, "d", [8.0, 8.1], train__batch_size=10)
    folders = sorted(tmp_path.glob("*-seed-*"))
    lines = events(run_here("compare", *folders, "--json")[1])
    p = scipy.stats.ttest_ind([2.0, 2.2], [2.1, 2.4], equal_var=False).pvalue
    assert lines[-1]["verdict"] == (
        f"a and b are not distinguishable with 2 seeds each, p = {p:.2g}; nor are c"
    )
    settings = [line for line in lines if line["event"] == "setting"]
    assert [(line["name"], line["rank"]) for line in settings] == [
        ("a", 1), ("b", 2), ("c", 3), ("d", 4)
    ]  # fmt: skip
    assert settings[0]["p_to_best"] is None
    assert settings[3]["p_to_best"] < 0.05
    alone = run_here("compare", tmp_path / "a-seed-1", tmp_path / "b-seed-1")[1]
    assert "with one seed each; train more seeds to see whether this is chance" in alone


def test_other_texts_are_not_ranked_and_other_tokenizers_by_bits_per_byte(run_here, tmp_path):
    write_run(tmp_path / "a", [2.0])
    write_run(tmp_path / "b", [1.0], corpus="d", data__path="b.txt")
    _, shown = run_here("compare", tmp_path / "a", tmp_path / "b")
    assert "not ranked, as the validation texts of" in shown
    assert "differ: data.path is a.txt and data.path is b.txt" in shown
    assert "the runs are not ranked" in shown
    assert shown.splitlines()[1].startswith("a ")  # as given, not the lower loss first
    # The same file, which has changed in between.
    write_run(tmp_path / "changed", [1.0], corpus="d", train__batch_size=8)
    assert "has changed before" in run_here("compare", tmp_path / "a", tmp_path / "changed")[1]
    # Other lengths of sequences, and so other windows.
    write_run(tmp_path / "long", [1.5], data__seq_len=64)
    _, shown = run_here("compare", tmp_path / "a", tmp_path / "long")
    assert "ranked by bits per byte" in shown
    assert "0.7500 against 1.0000 bits per byte" in shown
    # Another tokenizer, whose tokens do not tell whether the text is the same.
    write_run(tmp_path / "bytes", [1.0], corpus="d", tokenizer="u", data__tokenizer="byte")
    for folder in ("a", "bytes"):  # configs that load
        tree = yaml.safe_load((tmp_path / folder / "config.yaml").read_text())
        tree["data"]["cache_dir"] = str(tmp_path / "cache")
        (tmp_path / folder / "config.yaml").write_text(yaml.safe_dump(tree))
    _, shown = run_here("compare", tmp_path / "a", tmp_path / "bytes")
    assert "the token cache does not contain the text of" in shown
    # Generated texts of other seeds are of the same kind.
    generated = {"data__source": "tales", "data__path": None}
    write_run(tmp_path / "tales-1", [1.0], corpus="x", **generated)
    write_run(tmp_path / "tales-2", [1.2], corpus="y", tokenizer="v", run__seed=2, **generated)
    _, shown = run_here("compare", tmp_path / "tales-1", tmp_path / "tales-2")
    assert shown.splitlines()[1].split()[:3] == ["tales", "2", "1.1000"]
    # So are those of other seeds and another tokenizer.
    write_run(
        tmp_path / "bytes-1", [0.5], corpus="w", tokenizer="u", data__tokenizer="byte", **generated
    )
    _, shown = run_here("compare", tmp_path / "tales-2", tmp_path / "bytes-1")
    assert "ranked by bits per byte" in shown
    assert "bytes-1 ends lowest, 0.2500 against 0.6000 bits per byte" in shown
    write_run(tmp_path / "same-seed", [1.0], corpus="z", **generated, train__batch_size=8)
    _, shown = run_here("compare", tmp_path / "tales-1", tmp_path / "same-seed")
    assert "not ranked" in shown


@pytest.mark.more
def test_real_runs_of_two_tokenizers_are_ranked_by_bits_per_byte(run_here, train_args, tiny_run):
    """The text is the same if the token cache says so."""
    folder = tiny_run.parent / "bytes"
    done = run_script(*train_args, f"run.dir={folder}", "data.tokenizer=byte", "train.max_steps=40")
    assert done.returncode == 0, done.stderr
    lines = events(run_here("compare", tiny_run, folder, "--json")[1])
    settings = [line for line in lines if line["event"] == "setting"]
    assert {line["measure"] for line in settings} == {"val_bits_per_byte"}
    losses = [line["val_bits_per_byte"] for line in settings]
    assert losses == sorted(losses)
    assert "ranked by bits per byte" in lines[-1]["notes"][0]


def test_what_is_left_out_is_said(run_here, tmp_path):
    first = write_run(tmp_path / "a", [2.0, 1.0])
    write_run(tmp_path / "again", [2.0, 1.1])
    write_run(tmp_path / "short", [2.0], train__max_steps=50)
    write_run(tmp_path / "new", [])
    folders = [tmp_path / name for name in ("a", "again", "short", "new")]
    _, shown = run_here("compare", *folders)
    assert "again repeats" in shown
    assert f"not finished: {tmp_path / 'short'}" in shown
    assert f"{tmp_path / 'new'} has no validation loss and is left out" in shown
    (first / "checkpoints").rename(first / "gone")
    assert "has no checkpoint, which names its validation text" in run_here("compare", *folders)[1]
    with pytest.raises(UserError, match="is not a run directory"):
        run_here("compare", tmp_path)
    with pytest.raises(UserError, match="none of these runs has a validation loss"):
        run_here("compare", tmp_path / "new")


def test_a_run_that_is_still_training_is_not_in_the_mean(run_here, tmp_path):
    write_seeds(tmp_path, "a", [1.0, 1.2])
    write_seeds(tmp_path, "b", [1.5, 1.6], train__batch_size=8)
    write_run(tmp_path / "a-seed-3", [9.0], run__seed=3, train__max_steps=30)
    folders = sorted(tmp_path.glob("*-seed-*"))
    _, shown = run_here("compare", *folders)
    row = next(line for line in shown.splitlines() if line.startswith("a "))
    assert row.split()[:5] == ["a", "2", "of", "3", "1.1000"]
    assert f"not finished: {tmp_path / 'a-seed-3'}" in shown
    a, b = (line for line in events(run_here("compare", *folders, "--json")[1]) if "rank" in line)
    assert (a["seeds"], a["values"]) == ([1, 2, 3], [1.0, 1.2, None])
    half_width = scipy.stats.t.ppf(0.975, 1) * statistics.stdev([1.0, 1.2]) / 2**0.5
    assert a["interval"] == pytest.approx(half_width)
    p = scipy.stats.ttest_ind([1.0, 1.2], [1.5, 1.6], equal_var=False).pvalue
    assert b["p_to_best"] == pytest.approx(p)


def test_a_damaged_run_does_not_keep_others_from_being_compared(run_here, tmp_path):
    write_run(tmp_path / "a", [1.0])
    write_run(tmp_path / "b", [2.0], train__batch_size=8)
    damaged = write_run(tmp_path / "damaged", [1.0]) / "config.yaml"
    damaged.write_text("model: [")
    _, shown = run_here("compare", *sorted(tmp_path.iterdir()))
    assert f"{damaged} is damaged; the run is left out" in shown
    assert "a ends lowest" in shown
    with pytest.raises(UserError, match="is damaged"):
        run_here("compare", tmp_path / "damaged")


def test_intervals_of_a_plot_do_not_hide_each_other():
    """The shift is the same share of a linear and of a logarithmic axis."""
    assert _shift([1.0, 100.0], [1.0, 100.0], 0.5) == pytest.approx([10.0, 1000.0])
    assert _shift([0.0, 2.0], [0.0, 2.0], 0.25) == [0.5, 2.5]


@given(st.lists(LOSSES, min_size=2, max_size=5))
def test_the_lowest_mean_is_first_and_infinite_losses_are_last(groups):
    made = []
    for number, losses in enumerate(groups):
        runs = []
        for seed, loss in enumerate(losses):
            keys = {"run.seed": seed}
            runs.append(RunResult(None, "finished", keys, [{"val_loss": loss}], "c", "t"))
        made.append(Group(str(number), runs))
    diverged = Group("diverged", [RunResult(None, "not finite", {"run.seed": 0}, [])])
    failed = Group("failed", [RunResult(None, "failed", {"run.seed": 0}, [])])
    comparison = Comparison([diverged, failed, *made])
    means = [group.mean("val_loss") for group in comparison.groups]
    assert means[: len(made)] == sorted(means[: len(made)])
    assert {group.name for group in comparison.groups[-2:]} == {"diverged", "failed"}
    assert [row["rank"] for row in comparison.rows()] == list(range(1, len(made) + 3))
    assert json.dumps(comparison.rows(), allow_nan=False)
    assert math.isinf(diverged.mean("val_loss"))
