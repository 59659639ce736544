"""train.patience: when a run stops, and how it goes on."""

import random

import pytest
from conftest import run_script
from training_runs import read_metrics

KEYS = ["model.d_model=32", "model.n_layers=2", "model.n_heads=2", "data.seq_len=16", "data.tokenizer=byte",
        "data.val_fraction=0.3", "train.batch_size=8", "train.decay_fraction=0", "train.max_steps=300",
        "train.eval_every=5", "train.save_every=null", "train.device=cpu", "train.precision=fp32",
        "train.compile=false", "train.patience=3"]  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run on noise, which can only be memorized, and its messages."""
    folder = tmp_path_factory.mktemp("early")
    draw = random.Random(3)
    (folder / "noise.txt").write_text("".join(draw.choice("abcdefgh") for _ in range(2000)))
    (folder / "noise.yaml").write_text("data: {source: text}\n")
    command = ["train.py", folder / "noise.yaml", *KEYS, f"data.path={folder / 'noise.txt'}",
               f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}"]  # fmt: skip
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    return folder / "run", command, done


def losses(run):
    return [(line["step"], line["val_loss"]) for line in read_metrics(run) if "val_loss" in line]


def test_it_stops_after_so_many_evaluations_without_a_new_low(stopped):
    run, _, done = stopped
    steps, values = zip(*losses(run))
    assert steps[-1] < 300
    best = values.index(min(values))
    assert len(values) - 1 - best == 3
    for end in range(1, len(values)):  # not earlier
        assert end - 1 - values.index(min(values[:end])) < 3
    assert (run / "checkpoints" / f"best-{steps[best]:08d}").is_dir()
    assert (run / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()
    assert f"stopped early: no lower loss in 3 evaluations since step {steps[best]}" in done.stdout


def test_more_patience_continues_the_run(stopped):
    run, command, _ = stopped
    before = losses(run)
    again = run_script(*command)
    assert again.returncode == 0
    assert "is finished; raise train.patience to continue" in again.stderr
    assert losses(run) == before
    more = run_script(*command, "train.patience=5")
    assert more.returncode == 0, more.stderr
    assert losses(run)[: len(before)] == before
    assert len(losses(run)) >= len(before) + 2
