"""thinker ladder: its sizes, its runs, its prediction and the check of it."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import in_process
import pytest
import torch
import yaml
from training_runs import read_metrics, wait_for

from thinker import Thinker, ThinkerConfig
from thinker.features.ladder import ladder_report
from thinker.features.ladder.ladder_command import main
from thinker.features.ladder.ladder_plan import LadderPlan, gap_of_budget
from thinker.features.ladder.power_law import PowerLawFit
from thinker.features.ladder.rungs import make_rung, plan_rungs
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.metrics import flops_per_token

fork_processes = in_process.fork_processes
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("model.d_model=64", "model.n_heads=4", "train.max_steps=96", "--sizes", "4", "--gap", "4")


@pytest.fixture
def tiny_config(train_args, tmp_path):
    """The config of the tiny run as a file of its own."""
    tree = load_config(train_args[1], [*train_args[2:], "model.n_kv_heads=null"])
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree.model_dump(mode="json", exclude={"run": {"dir"}})))
    return path


def events(shown):
    """The lines of JSON that the command has printed."""
    return [json.loads(line) for line in shown.splitlines()]


@pytest.fixture
def ladder(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ladder", *map(str, arguments)])
        capsys.readouterr()
        assert main() == 0
        return capsys.readouterr()

    return run


def target(**options):
    shape = {"vocab_size": 300, "d_model": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}
    return make_rung(ThinkerConfig(**{**shape, **options}), 10.0, 64, 1024)


@pytest.mark.parametrize("gap", [4.0, 8.0, 32.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2},
        {"n_heads": 3, "head_dim": 64},
        {"tie_embeddings": True},
        {"d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50304},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_sizes_are_below_the_target_with_as_many_tokens_per_parameter(options, gap):
    top = target(**options)
    rungs = plan_rungs(top, 5, gap, 64)
    assert rungs[-1].flops <= top.flops / gap
    group = top.model.n_heads // top.model.n_kv_heads
    for rung in rungs:
        with torch.device("meta"):
            model = Thinker(rung.model)
        assert rung.flops == flops_per_token(model, 64) * rung.steps * 1024
        assert rung.tokens == pytest.approx(
            10 * flops_per_token(model, 64) / 6, rel=0.002, abs=1024
        )
        assert rung.model.n_layers == top.model.n_layers
        assert rung.model.n_heads == group * rung.model.n_kv_heads
        if "head_dim" not in options:
            assert rung.model.n_heads * rung.model.head_dim == rung.model.d_model
    flops = [rung.flops for rung in rungs]
    assert flops == sorted(set(flops))
    steps = [flops[i + 1] / flops[i] for i in range(4)]
    assert all(1.2 < step < 3.4 for step in steps)


@pytest.mark.parametrize(
    ("options", "gap"),
    [({"d_model": 16}, 8.0), ({"d_model": 4, "n_heads": 1}, 8.0), ({}, 1e12)],
    ids=["narrow", "narrowest", "no FLOPs"],
)
def test_a_target_that_is_too_small_has_no_sizes_below_it(options, gap):
    top = target(**options)
    with pytest.raises(UserError, match=f"there are no 6 different sizes .* of {top.name}; lower"):
        plan_rungs(top, 6, gap, 64)


def test_copies_that_another_key_does_not_fit_are_left_out():
    top = target(d_model=128, n_heads=2, rope_dim=32)
    rungs = plan_rungs(top, 3, 8.0, 64)
    assert all(rung.model.head_dim >= 32 for rung in rungs)


def test_a_budget_is_spent():
    top = target(d_model=512, n_heads=8)
    flops = top.flops / 10
    gap = gap_of_budget(top, 2, 5, flops)
    spent = sum(2 * rung.flops for rung in plan_rungs(top, 5, gap, 64))
    assert 0.8 * flops < spent <= 1.05 * flops


@pytest.mark.usefixtures("fork_processes")
def test_the_loss_is_predicted_and_checked(ladder, tiny_config, tmp_path):
    shown = ladder(tiny_config, *SMALL, "--check")
    folder = tmp_path / "runs" / "tiny-ladder"
    result = json.loads((folder / "ladder.json").read_text())
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert len(result["rows"]) == 4
    texts = []
    for row in result["rows"]:
        run = folder / f"{row['size']}-{row['steps']}-seed-{row['seed']}"
        last = read_metrics(run)[-1]
        assert (last["step"], last["val_loss"]) == (row["steps"], row["loss"])
        assert last["processed_tokens"] == row["tokens"]
        rates = [line["lr"] for line in read_metrics(run) if "lr" in line]
        assert rates[-1] < 0.2 * max(rates)  # the schedule ends with the run
        keys = yaml.safe_load((run / "config.yaml").read_text())
        width, layers, _ = map(int, row["size"].split("x"))
        assert (keys["model"]["d_model"], keys["model"]["n_layers"]) == (width, layers)
        texts.append(keys["data"])
    assert texts == 4 * texts[:1]  # the same validation split
    flops = [row["flops"] for row in result["rows"]]
    losses = [row["loss"] for row in result["rows"]]
    assert max(flops) <= result["target"]["flops"] / 4
    fit = PowerLawFit(flops, losses)
    assert result["predicted"] == pytest.approx(fit.predict(result["target"]["flops"]).loss)
    checked = read_metrics(folder / "64x2x4-96-seed-1")[-1]["val_loss"]
    assert result["loss"] == checked
    assert result["error"] == pytest.approx(checked / result["predicted"] - 1)
    assert f"predicted for 64x2x4 with {result['target']['flops']:.2e} FLOPs" in shown.out
    assert f"trained: {checked:.4f}, {abs(result['error']):.2%}" in shown.out

    again = ladder(tiny_config, *SMALL, "--json")
    start, done = events(again.out)
    assert (start["event"], start["left"], start["runs"]) == ("start", 0, 4)
    corpus = prepare_training_data(load_config(tiny_config, []), None)
    text_tokens = sum(len(shard.tokens) for shard in corpus.train.shards)
    epochs = start["target"]["tokens"] / text_tokens
    assert start["target"]["epochs"] == pytest.approx(epochs, rel=0.05)
    assert (done["event"], done["predicted"]) == ("done", result["predicted"])
    assert done["loss"] is None


def test_the_picture_has_all_that_it_names(monkeypatch, tmp_path):
    """Also the loss of a target that is far from the law."""
    figures = []
    monkeypatch.setattr(ladder_report, "save_figure", lambda figure, path: figures.append(figure))
    plan = LadderPlan(None, [], None, target(), plan_rungs(target(), 4, 8.0, 64))
    rows = []
    for rung, loss in zip(plan.rungs, (4.0, 3.7, 3.5, 3.35)):
        rows.append({"flops": rung.flops, "loss": loss})
    fit = PowerLawFit([row["flops"] for row in rows], [row["loss"] for row in rows])
    for checked in (1.0, 9.0):
        prediction = fit.predict(plan.target.flops)
        result = SimpleNamespace(
            plan=plan, rows=rows, fit=fit, prediction=prediction, checked=checked
        )
        ladder_report.draw(result, tmp_path / "ladder.png")
        low, high = figures[-1].axes[0].get_ylim()
        assert low < min(checked, prediction.low) <= max(checked, prediction.high) < high


def test_a_plan_trains_nothing(ladder, tiny_config, tmp_path):
    shown = ladder(tiny_config, *SMALL, "--plan")
    assert "(train.fit_bigrams=off)" in shown.err
    assert "4 runs to train in runs" in shown.err
    assert "then: the loss of 64x2x4 after 96 steps" in shown.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_seeds_are_points_of_their_own(ladder, tiny_config, tmp_path):
    ladder(tiny_config, *SMALL, "--seeds", "2", "--jobs", "2")
    result = json.loads((tmp_path / "runs" / "tiny-ladder" / "ladder.json").read_text())
    assert [row["seed"] for row in result["rows"]] == 4 * [1, 2]
    losses = [row["loss"] for row in result["rows"]]
    assert len(set(losses)) == 8
    flops = [row["flops"] for row in result["rows"]]
    assert result["noise"] == pytest.approx(PowerLawFit(flops, losses).noise)


@pytest.mark.more
@pytest.mark.usefixtures("fork_processes")
def test_minutes_give_the_same_plan_again(ladder, tiny_config, tmp_path):
    arguments = [tiny_config, *SMALL[:-2], "--minutes", "0.05"]
    ladder(*arguments)
    result = json.loads((tmp_path / "runs" / "tiny-ladder" / "ladder.json").read_text())
    (start, done) = events(ladder(*arguments, "--json").out)
    assert start["left"] == 0
    assert done["rows"] == result["rows"]
    budget = tmp_path / "runs" / "tiny-ladder" / "budget.json"
    before = budget.read_text()
    ladder(*arguments, "--plan", "train.max_steps=192")  # another model has another budget
    assert budget.read_text() != before


@pytest.mark.more
def test_a_stopped_ladder_continues(tiny_config, tmp_path):
    """In real processes, with SIGINT."""

    command = [sys.executable, "-m", "thinker", "ladder", tiny_config, *SMALL]
    more = ["train.log_every=1", "--folder", "stopped"]
    process = subprocess.Popen(
        [*map(str, command), *more],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = tmp_path / "stopped"
    wait_for(lambda: any(read_metrics(run) for run in folder.glob("*-seed-1")), process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert "the same command continues" in error
    done = subprocess.run([*map(str, command), *more], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = [*map(str, command), "train.log_every=1", "--folder", "whole"]
    subprocess.run(whole, cwd=tmp_path, check=True, capture_output=True)
    results = []
    for name in ("stopped", "whole"):
        result = json.loads((tmp_path / name / "ladder.json").read_text())
        results.append([row["loss"] for row in result["rows"]])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3"], "--sizes is 3; a power law needs at least 4"),
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--gap", "1.5"], "--gap is 1.5; it must be at least 2"),
        (["--minutes", "-1"], None),
        (["--flops", "1", "--sizes", "4"], "there are no 4 different sizes .*raise --minutes or"),
        (["--flops", "nan"], "--flops is nan; it must be a positive number"),
        (["--plan", "--check"], "--plan trains nothing, so --check has no effect"),
        (["run.init_from=other"], "a ladder trains from the beginning; remove run.init_from"),
    ],
)
def test_mistakes(ladder, tiny_config, arguments, message):
    with pytest.raises((UserError, SystemExit), match=message):
        ladder(tiny_config, *arguments)
