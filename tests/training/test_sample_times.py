"""train.sample_every: after which steps a run takes samples."""

import json
from fractions import Fraction

import pytest
from conftest import run_script
from hypothesis import given
from hypothesis import strategies as st
from training_contract import small_config
from training_runs import assert_same_run, assert_same_tensors, metrics_without_times, read_metrics

from thinker.runtime.errors import UserError
from thinker.training.callback import Callback
from thinker.training.callbacks.samples import count_samples, reaches_share
from thinker.training.config.load import validate_config
from thinker.training.reports import summary
from thinker.training.run import train


@pytest.fixture(autouse=True)
def no_summary(monkeypatch):
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)


def read_samples(run):
    path = run / "samples.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def sampled_steps(run):
    return [sample["step"] for sample in read_samples(run)]


def ends_of_shares(shares, n):
    """The steps after which one of n equal shares is done; `shares`: what is done after each
    step."""
    steps = []
    for step, (before, now) in enumerate(zip([0, *shares], shares), start=1):
        if n * now // 1 > n * before // 1:
            steps.append(step)
    return steps


# ---------------------------------------------------------------- the rule


@given(st.integers(1, 20_000))
def test_a_run_of_steps_is_sampled_in_equal_shares(n_steps):
    n = count_samples(n_steps)
    assert n == min(8, max(1, n_steps // 5))
    shares = [step / n_steps for step in range(n_steps + 1)]
    steps = [
        step for step in range(1, n_steps + 1) if reaches_share(*shares[step - 1 : step + 1], n)
    ]
    exact = [Fraction(step, n_steps) for step in range(1, n_steps + 1)]
    assert steps == ends_of_shares(exact, n)
    assert len(steps) == n
    assert steps[-1] == n_steps
    gaps = [after - before for before, after in zip([0, *steps], steps)]
    assert min(gaps) >= min(5, n_steps)
    assert max(gaps) - min(gaps) <= 1


@given(st.lists(st.floats(0, 0.3), min_size=1, max_size=200))
def test_a_run_of_minutes_is_sampled_once_in_a_share(durations):
    assert count_samples(None) == 8
    done = [0.0]
    for duration in durations:
        done.append(min(1.0, done[-1] + duration))
    steps = [step for step in range(1, len(done)) if reaches_share(*done[step - 1 : step + 1], 8)]
    assert len(steps) <= 8
    assert len(steps) == len({int(8 * done[step]) for step in steps})
    assert reaches_share(0.0, done[-1], 8) == bool(steps)


def test_the_key_takes_auto_numbers_and_null():
    for value in ("auto", 1, 400, None):
        config = validate_config({"train": {"max_steps": 1, "sample_every": value}})
        assert config.train.sample_every == value
    assert validate_config({"train": {"max_steps": 1}}).train.sample_every == "auto"
    for value in (0, -1, "often", 2.5):
        with pytest.raises(UserError, match="train.sample_every"):
            validate_config({"train": {"max_steps": 1, "sample_every": value}})


# ---------------------------------------------------------------- real runs


CASES = {
    "auto": ([], [5, 10, 15, 20]),
    "short": (["train.max_steps=7"], [7]),
    "one step": (["train.max_steps=1"], [1]),
    "number": (["train.sample_every=6"], [6, 12, 18]),
    "never": (["train.sample_every=null"], []),
    "steps before minutes": (["train.max_minutes=500"], [5, 10, 15, 20]),
}
FEW = ["train.max_steps=20", "train.save_every=5", "train.eval_every=7"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_prints_and_keeps_its_samples(case, tmp_path, capfd):
    more, steps = CASES[case]
    config = small_config(tmp_path, "run", [*FEW, "train.sample_prompt=One", *more])
    assert train(config) == 0
    assert sampled_steps(tmp_path / "run") == steps
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    printed = [line.split(":")[0] for line in lines if ": One" in line]
    assert printed == [f"step {step}" for step in steps]


@pytest.mark.parametrize("more", [[], ["train.ema_decay=0.9", "train.log_every=3"]])
def test_samples_change_no_bit_of_a_run(more, tmp_path):
    with_samples = small_config(tmp_path, "with", [*FEW, *more])
    without = small_config(tmp_path, "without", [*FEW, *more, "train.sample_every=null"])
    assert train(with_samples) == train(without) == 0
    assert metrics_without_times(tmp_path / "with") == metrics_without_times(tmp_path / "without")
    assert_same_tensors(tmp_path / "with", tmp_path / "without", 20)


class Stop(Exception):
    """What ends a run as suddenly as a kill."""


class StopsAt(Callback):
    """Ends the run when a hook is called with this step."""

    def __init__(self, hook, step):
        self.step = step
        setattr(self, hook, self.stop)

    def stop(self, found, *others):
        step = getattr(found, "step", found)
        if step == self.step:
            raise Stop


@pytest.mark.parametrize("hook", ["on_save", "on_step_end", "on_sample", "after_step"])
@pytest.mark.parametrize("step", [5, 10, 15, 20])
@pytest.mark.parametrize("every", ["auto", 5])
def test_a_run_that_was_killed_has_the_samples_of_one_that_was_not(
    hook, step, every, tmp_path_factory
):
    """Also if the kill comes between the save of a step and whatever follows."""
    folder = tmp_path_factory.getbasetemp() / f"killed-{every}"
    more = [*FEW, f"train.sample_every={every}"]
    if not folder.exists():
        assert train(small_config(folder, "whole", more)) == 0
        assert sampled_steps(folder / "whole") == [5, 10, 15, 20]
    name = f"{hook}-{step}"
    config = small_config(folder, name, more)
    with pytest.raises(Stop):
        train(config, callbacks=[StopsAt(hook, step)])
    assert train(config) == 0
    assert read_samples(folder / name) == read_samples(folder / "whole")
    assert_same_run(folder / "whole", folder / name, 20)


def test_a_run_of_minutes_takes_its_samples_once_though_it_is_killed(tmp_path):
    limits = ["train.max_steps=null", "train.max_minutes=0.02", "train.save_every=3"]
    config = small_config(tmp_path, "run", [*limits, "train.eval_every=null"])

    class StopsAfterTwo(Callback):
        n_samples = 0

        def on_sample(self, step, prompt, text):
            self.n_samples += 1
            if self.n_samples == 2:
                raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            train(config, callbacks=[StopsAfterTwo()])
    assert train(config) == 0
    run = tmp_path / "run"
    elapsed = [line["elapsed_s"] for line in read_metrics(run) if "train_loss" in line]
    shares = [min(1.0, seconds / 60 / 0.02) for seconds in elapsed]
    assert sampled_steps(run) == ends_of_shares(shares, 8)
    assert sampled_steps(run)[-1] == len(elapsed)


def test_a_longer_run_goes_on_in_its_own_shares(tmp_path):
    assert train(small_config(tmp_path, "run", [*FEW, "train.decay_fraction=0"])) == 0
    longer = [*FEW, "train.decay_fraction=0", "train.max_steps=40"]
    assert train(small_config(tmp_path, "run", longer)) == 0
    assert sampled_steps(tmp_path / "run") == [5, 10, 15, 20, 25, 30, 35, 40]
    assert train(small_config(tmp_path, "run", longer)) == 0  # it is finished
    assert sampled_steps(tmp_path / "run") == [5, 10, 15, 20, 25, 30, 35, 40]


def test_a_model_with_a_prefix_needs_a_prompt_for_samples(tmp_path, capfd):
    prefix = ["model.attention=prefix(3)", *FEW]
    assert train(small_config(tmp_path, "none", prefix)) == 0
    assert "no samples: they need a prompt of 3 tokens" in capfd.readouterr().err
    assert sampled_steps(tmp_path / "none") == []
    assert train(small_config(tmp_path, "some", [*prefix, "train.sample_prompt=One"])) == 0
    assert "no samples" not in capfd.readouterr().err
    assert sampled_steps(tmp_path / "some") == [5, 10, 15, 20]
    for asked in (["train.sample_prompt=O"], ["train.sample_every=5"]):
        with pytest.raises(UserError, match="prefix needs at least"):
            train(small_config(tmp_path, "wrong", [*prefix, *asked]))


def test_the_quickstart_prints_several_samples_in_a_short_run(tmp_path):
    done = run_script(
        "train.py", "configs/quickstart.yaml", "train.max_steps=20", f"run.dir={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path / 'cache'}", "data.max_documents=300", "data.tokenizer=bpe:500",
        "model.d_model=32", "model.n_heads=2", "train.device=cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for step in (5, 10, 15, 20):
        assert f"step {step}: Once upon a time" in done.stderr
    assert sampled_steps(tmp_path / "run") == [5, 10, 15, 20]
