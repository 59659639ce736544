"""Figures per layer in metrics.jsonl: right, on every kind of run, and without a trace in the
training."""

import math

import fork_server
import pytest
import torch
from conftest import ROOT
from installed import if_installed
from training_runs import assert_same_tensors, metrics_without_times, read_metrics, train_losses
from training_workers import train_each

from thinker.data.batches.prefetch import Batch
from thinker.features.monitoring.layer_log import mean_attention
from thinker.features.monitoring.monitor import FILE_NAME, Reference
from thinker.interop import load
from thinker.model.inspection.attention_statistics import FIGURES
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

BASE = ROOT / "tests" / "fixtures" / "base.yaml"
SHAPE = [
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "data.seq_len=32",
]
LENGTH = [
    "train.batch_size=4",
    "train.eval_every=2",
    "train.eval_sequences=2",
    "train.decay_fraction=0",
]
LOGGED = ["train.log_attention_every=2", "train.log_grad_norms=true"]
MASKED = ["data.packing=documents", "data.document_masking=true", "train.micro_batch_size=1"]
KINDS = {
    "plain": (1, []),
    "bf16": (
        1,
        [
            "train.precision=bf16",
            *MASKED,
            "model.qk_norm=false",
            "model.dropout=0.2",
            "train.ema_decay=0.9",
        ],
    ),
    "compiled": (1, ["train.compile=true", "model.attention=[full,window(8)]"]),
    "linear": (1, ["model.attention=[linear(16),topk(4)]", "train.checkpoint_every_n_blocks=1"]),
    "ddp": (2, ["train.parallel=ddp"]),
    "fsdp": (2, ["train.parallel=fsdp", "model.tie_embeddings=true"]),
}
PRUNED = {
    "gates": (1, ["train.prune.heads=0.5", "train.prune.by=gates", "model.n_kv_heads=2"]),
    "pruned": (1, ["train.prune.weights=0.5", "train.prune.every=1"]),
}
KINDS |= dict(if_installed("pruning", *PRUNED.items()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def overrides(run, cache, *keys, steps=4):
    fixed = [
        *SHAPE,
        *LENGTH,
        "train.device=cpu",
        f"data.cache_dir={cache}",
        "data.max_documents=60",
    ]
    precision = (
        [] if any(key.startswith("train.precision") for key in keys) else ["train.precision=fp32"]
    )
    return [
        *fixed,
        "data.tokenizer=bpe:300",
        *precision,
        f"train.max_steps={steps}",
        *keys,
        f"run.dir={run}",
    ]


def figures(line):
    """{figure: [layers with it]}"""
    return {
        name: [key.split(".")[1] for key in line if key.startswith(f"{name}/blocks.")]
        for name in FIGURES
    }


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("bf16", "linear") else [pytest.mark.stress])
        for kind in KINDS
    ],
)
def test_logging_leaves_no_trace_in_the_training(kind, cache, tmp_path):
    n_ranks, keys = KINDS[kind]
    plain, logged, parts = (tmp_path / name for name in ("plain", "logged", "parts"))
    runs = [overrides(plain, cache, *keys), overrides(logged, cache, *keys, *LOGGED)]
    changes = (
        [] if kind in ("gates", "pruned") else [3]
    )  # pruning depends on how long the run will be
    runs += [overrides(parts, cache, *keys, *LOGGED, steps=n) for n in (*changes, 4)]
    for each in [runs] if n_ranks == 1 else [[run] for run in runs]:
        assert (
            fork_server.run_ranks(n_ranks, train_each, str(BASE), each)
            == [[0] * len(each)] * n_ranks
        )
    assert_same_tensors(plain, logged, 4)
    assert_same_tensors(parts, logged, 4)
    assert train_losses(plain) == train_losses(logged)
    of_steps = {
        line["step"]: line for line in metrics_without_times(logged) if "train_loss" in line
    }
    resumed = {line["step"]: line for line in metrics_without_times(parts) if "train_loss" in line}
    assert resumed == of_steps
    layers = ["1"] if kind == "linear" else ["0", "1"]
    for step, line in of_steps.items():
        assert figures(line) == dict.fromkeys(FIGURES, layers if step % 2 == 0 else [])
        groups = [name for name in line if name.startswith("grad_norm/")]
        assert {
            "grad_norm/blocks.0",
            "grad_norm/blocks.1",
            "grad_norm/embedding",
            "grad_norm/norm",
        } <= {*groups}
        assert math.sqrt(sum(line[name] ** 2 for name in groups)) == pytest.approx(
            line["grad_norm"], rel=1e-4
        )
        for layer in layers if step % 2 == 0 else []:
            assert 0 < line[f"attention_entropy/blocks.{layer}"] < math.log(32)
            assert 0 < line[f"first_token_share/blocks.{layer}"] < 1
    assert not any("/blocks." in key for line in read_metrics(plain) for key in line)
    assert not (plain / FILE_NAME).exists()
    assert (parts / FILE_NAME).read_bytes() == (logged / FILE_NAME).read_bytes()
    stored = Reference.read(logged / FILE_NAME)
    assert stored.step == 4
    assert {*stored.figures} == {
        "token_entropy",
        *(f"blocks.{layer}.{name}" for layer in layers for name in FIGURES),
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.stress) for kind in ("ddp", "fsdp")]
)
def test_ranks_log_the_figures_of_one_process(kind, cache, tmp_path):
    """Of the first sequences, which are those of rank 0."""
    alone, several = tmp_path / "alone", tmp_path / "several"
    keys = ["train.batch_size=8", *LOGGED, "train.eval_every=null"]
    fork_server.run_ranks(1, train_each, str(BASE), [overrides(alone, cache, *keys)])
    fork_server.run_ranks(
        2, train_each, str(BASE), [overrides(several, cache, *keys, f"train.parallel={kind}")]
    )
    one, two = ([{key: value for key, value in line.items() if "/" in key} for line in metrics_without_times(run)]
                for run in (alone, several))  # fmt: skip
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for left, right in zip(one, two):
        assert right == pytest.approx(left, rel=1e-3, abs=1e-4)


def test_every_machine_logs_flops(tiny_run):
    lines = [line for line in read_metrics(tiny_run) if "train_loss" in line]
    ratios = [line["flops_per_second"] / line["tokens_per_second"] for line in lines]
    assert min(ratios) > 1e5
    assert max(ratios) == pytest.approx(min(ratios))


def test_positions_without_a_choice_are_left_out(tiny_run):
    """The first position of a document attends to itself alone; padding has no target."""
    model, _ = load(tiny_run)
    tokens = torch.randint(1, 300, (6, 16))
    targets, document_ids = tokens.roll(-1, dims=1), torch.ones_like(tokens)
    everything = mean_attention(model, Batch(tokens, targets, 0, document_ids))
    assert everything == pytest.approx(
        mean_attention(model, Batch(tokens[:4], targets[:4], 0)), rel=1e-4
    )
    targets[:, 8:] = -1
    half = mean_attention(model, Batch(tokens, targets, 0))
    assert half == pytest.approx(
        mean_attention(model, Batch(tokens[:, :8], targets[:, :8], 0)), abs=1e-6
    )
    assert mean_attention(model, Batch(tokens, targets, 0, torch.arange(16).expand(6, -1))) == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["train.log_every=4", "train.log_attention_every=6"],
            r"not a multiple of train.log_every \(4\); use 8",
        ),
        (
            ["model.attention=linear(8)", "train.log_attention_every=1"],
            "linear attention has no logits",
        ),
    ],
)
def test_what_cannot_be_logged_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_config(BASE, overrides(tmp_path / "run", tmp_path, *keys))
