"""Minimal pairs during training: right, on every kind of run, and without a trace in it."""

import json

import fork_server
import pytest
from conftest import ROOT
from training_runs import assert_same_tensors, metrics_without_times, train_losses
from training_workers import train_each

from thinker.features.eval_suites.minimal_pairs import read_pairs, score_pairs
from thinker.interop import load
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

BASE = ROOT / "tests" / "fixtures" / "base.yaml"
SHAPE = [
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "data.seq_len=32",
    "data.tokenizer=bpe:300",
    "data.max_documents=60",
    "train.batch_size=4",
    "train.eval_every=2",
    "train.eval_sequences=2",
    "train.decay_fraction=0",
    "train.save_every=2",
    "train.device=cpu",
    "train.precision=fp32",
]
KINDS = {
    "plain": (1, ["model.dropout=0.2", "train.ema_decay=0.9"]),
    "ddp": (2, ["train.parallel=ddp"]),
    "fsdp": (2, ["train.parallel=fsdp", "model.tie_embeddings=true"]),
}
PAIRS = [
    {"good": "The cat sat.", "bad": "The sat cat.", "phenomenon": "order"},
    {"good": "A dog ran.", "bad": "An dog ran.", "phenomenon": "article"},
    {"good": "An owl ran.", "bad": "A owl ran.", "phenomenon": "article"},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def pairs_file(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return file


def overrides(run, cache, *keys, steps=4):
    return [*SHAPE, f"data.cache_dir={cache}", f"train.max_steps={steps}", *keys, f"run.dir={run}"]


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("ddp", marks=pytest.mark.more),
        pytest.param("fsdp", marks=pytest.mark.more),
    ],
)
def test_scoring_leaves_no_trace_in_the_training(kind, cache, pairs_file, tmp_path):
    """Also in a run that stops and resumes; the accuracy is that of the saved model."""
    n_ranks, keys = KINDS[kind]
    suite = [f"train.eval_suite={pairs_file}", "train.eval_suite_every=2"]
    plain, scored, parts = (tmp_path / name for name in ("plain", "scored", "parts"))
    runs = [overrides(plain, cache, *keys), overrides(scored, cache, *keys, *suite)]
    runs += [overrides(parts, cache, *keys, *suite, steps=n) for n in (2, 4)]
    each = [runs] if n_ranks == 1 else [[run] for run in runs]
    for some in each:
        done = fork_server.run_ranks(n_ranks, train_each, str(BASE), some)
        assert done == [[0] * len(some)] * n_ranks
    assert_same_tensors(plain, scored, 4)
    assert train_losses(plain) == train_losses(scored) == train_losses(parts)
    lines = {}
    for run in (scored, parts):
        lines[run] = [line for line in metrics_without_times(run) if "train_loss" in line]
    assert lines[scored] == lines[parts]
    names = {"pairs_accuracy", "pairs_accuracy/order", "pairs_accuracy/article"}
    for line in lines[scored]:
        found = {key for key in line if key.startswith("pairs_accuracy")}
        assert found == (names if line["step"] % 2 == 0 else set())
    for step in (2, 4):
        model, tokenizer = load(scored, checkpoint=step)
        rows = score_pairs(model, tokenizer, read_pairs(pairs_file)).accuracies()
        (line,) = [line for line in lines[scored] if line["step"] == step]
        assert line["pairs_accuracy"] == pytest.approx(rows[-1].accuracy)
        for row in rows[:-1]:
            assert line[f"pairs_accuracy/{row.name}"] == pytest.approx(row.accuracy)
    assert not any("pairs_accuracy" in line for line in metrics_without_times(plain))


def test_pairs_that_are_too_long_are_refused_before_the_first_step(cache, tmp_path):
    run = tmp_path / "run"
    keys = ["train.eval_suite=tales-pairs", "train.log_every=4", "train.eval_suite_every=4"]
    config = load_config(BASE, overrides(run, cache, *keys))
    with pytest.raises(UserError, match=r"the longest sentence has \d+ tokens, .* reads 32"):
        build_trainer(config).train()
    assert metrics_without_times(run) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["train.eval_suite_every=2"], "has no effect without train.eval_suite"),
        (["train.eval_suite_limit=2"], "has no effect without train.eval_suite"),
        (
            ["train.eval_suite=tales-pairs", "train.log_every=4", "train.eval_suite_every=6"],
            r"not a multiple of train.log_every \(4\); use 8",
        ),
        (["train.eval_suite=tales-pairs", "train.eval_every=null"], "needs train.eval_suite_every"),
    ],
)
def test_keys_without_effect_are_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_config(BASE, overrides(tmp_path / "run", tmp_path, *keys))
