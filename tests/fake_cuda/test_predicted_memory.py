"""The predicted memory of a step is what an H100, an H200 and Inductor's own programs need."""

import json
from functools import partial
from pathlib import Path

import fake_cuda
import pytest
import torch
import torch.nn.functional as F
from inductor_programs import PeakCounter, inductor_programs
from torch._subclasses.fake_tensor import FakeTensorMode

from thinker.benchmarks.speed.train import SHAPES
from thinker.data.batches.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention import Attention
from thinker.model.kernels import linear_cross_entropy as head
from thinker.model.layers import RMSNorm
from thinker.model.positions import apply_rotary_emb, heads_last
from thinker.model.transformer import MLP
from thinker.training.config.load import load_config, validate_config
from thinker.training.kernels import project_jointly
from thinker.training.settings import compiled_programs, memory_estimate
from thinker.training.settings.memory_estimate import WORKSPACES, estimate_memory
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda:0")
RESULTS = ROOT / "benchmarks" / "results"

# The first column of the table "h100-plan": the config, and what its command changed.
BYTE_TEXT = ["data.source=pysource", "data.tokenizer=byte"]
PLANS = {
    "TinyStories 34M, micro-batch 32, compiled": (
        "gpu-tinystories",
        ["train.micro_batch_size=32", "train.batch_size=32", "model.vocab_size=257"],
    ),
    "124M, micro-batch 16, compiled, checkpointed blocks": (
        "gpu-124m",
        ["train.micro_batch_size=16", "train.checkpoint_every_n_blocks=1"],
    ),
    "124M, micro-batch 8, not compiled": (
        "gpu-124m",
        ["train.micro_batch_size=8", "train.compile=false"],
    ),
    "124M, micro-batch 16, compiled": ("gpu-124m", ["train.micro_batch_size=16"]),
    "350M, micro-batch 8, compiled": ("gpu-350m", ["train.micro_batch_size=8"]),
    "124M, micro-batch 32, compiled": ("gpu-124m", ["train.micro_batch_size=32"]),
}


def recorded_plans():
    """Measured bytes by config, on an H100."""
    lines = map(json.loads, (RESULTS / "recorded.jsonl").read_text().splitlines())
    (plan,) = (line for line in lines if line["name"] == "h100-plan")
    return {row["config"]: 1e9 * float(row["measured GB"]) for row in plan["rows"]}


def keep_last_chunk(monkeypatch):
    """As when a card was measured: a chunk's gradient stays while the next logits are computed."""
    kept = []
    forward = head._LinearCrossEntropy.forward

    def forward_of_that_time(*arguments):
        total = forward(*arguments)
        kept.clear()
        return total

    monkeypatch.setattr(head._LinearCrossEntropy, "forward", staticmethod(forward_of_that_time))
    for module, name in ((memory_estimate, "_compiled_loss"), (head, "loss_and_gradient")):
        monkeypatch.setattr(module, name, partial(_keep, kept, getattr(module, name)))


def _keep(kept, chunk_loss, logits, *rest):
    result = chunk_loss(logits, *rest)
    kept[:] = [result]
    return result


@pytest.mark.parametrize("name", PLANS)
def test_peaks_of_an_h100(name, monkeypatch):
    keep_last_chunk(monkeypatch)
    config_name, overrides = PLANS[name]
    config = load_config(ROOT / "configs" / f"{config_name}.yaml", [*BYTE_TEXT, *overrides])
    settings = resolve_settings(config, config.thinker_config(config.model.vocab_size), GPU)
    predicted = estimate_memory(settings, settings.train.micro_batch_size, GPU).peak
    assert 0.95 < predicted / recorded_plans()[name] < 1.05


def recorded_races():
    """(shape, contender, measured bytes) of our compiled steps on an H200."""
    for line in map(json.loads, (RESULTS / "gpu.jsonl").read_text().splitlines()):
        is_ours = line["name"].startswith("thinker compiled")
        if is_ours and line["stage"] in ("training, 124m", "training, 350m"):
            yield line["stage"][-4:], line["name"], line["peak_memory_bytes"]


def project_with_one_product(attention, x, rope):
    """Attention.project() when the H200 was measured."""
    H, K = attention.n_heads, attention.n_kv_heads
    qkv = project_jointly(x, attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = qkv.unflatten(-1, (-1, attention.head_dim)).split([H, K, K], dim=-2)
    rope = heads_last(rope)
    q = apply_rotary_emb(q, rope)
    k = apply_rotary_emb(k, rope)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def gated_with_one_product(mlp, x):
    """MLP.forward() at that time."""
    gate, up = project_jointly(x, mlp.gate_proj, mlp.up_proj).chunk(2, dim=-1)
    return mlp.down_proj(F.silu(gate) * up)


def norm_of_that_time(norm, x):
    """RMSNorm.forward() at that time, within the compiler."""
    normalized = F.rms_norm(x.float(), x.shape[-1:], eps=norm.eps)
    return normalized.to(x.dtype) * norm.weight.to(x.dtype)


@pytest.mark.parametrize(("shape", "name", "measured"), list(recorded_races()), ids=str)
def test_peaks_of_an_h200(shape, name, measured, monkeypatch):
    """With joined products, as the model had them when it was measured there."""
    keep_last_chunk(monkeypatch)
    monkeypatch.setattr(Attention, "project", project_with_one_product)
    monkeypatch.setattr(MLP, "forward", gated_with_one_product)
    monkeypatch.setattr(RMSNorm, "forward", norm_of_that_time)
    shape = SHAPES[shape]
    if "micro-batch" in name:  # twice as many sequences at once
        shape = shape._replace(
            micro_batch_size=2 * shape.micro_batch_size, n_micro_batches=shape.n_micro_batches // 2
        )
    if "heads" in name:
        shape = shape._replace(n_heads=shape.n_heads // 2)
    optimizer = name.replace(",", "").split()[2]
    size = shape.micro_batch_size
    train = {"batch_size": shape.batch_size, "micro_batch_size": size}
    train |= {"compile": True, "precision": "bf16", "max_steps": 1}
    config = validate_config({"optimizer": {"name": optimizer}, "train": train})
    # The shapes of the benchmark have sequences as long as the model's context.
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"seq_len": shape.seq_len})}
    )
    settings = resolve_settings(config, shape.model_config(), GPU)
    assert 0.95 < estimate_memory(settings, size, GPU).peak / measured < 1.05


SHAPE = {"vocab_size": 4096, "d_model": 256, "n_layers": 3, "n_heads": 4, "max_seq_len": 512}
CASES = [
    {"compile": False},
    {"compile": False, "precision": "fp32", "optimizer": "adamw", "n_kv_heads": 2},
    {"compile": False, "checkpoint_every_n_blocks": 1},
    {},
    {"optimizer": "adamw", "n_kv_heads": 1},
    {"checkpoint_every_n_blocks": 1},
    {"checkpoint_every_n_blocks": 2, "optimizer": "adamw", "precision": "fp32"},
    {"precision": "fp32"},
    {"mlp": "ungated", "activation": "relu2", "norm": "layernorm", "tie_embeddings": True},
    {"precision": "fp16", "micro_batch_size": 16, "qk_norm": False},
    {"attention": "window(64)", "document_masking": True, "precision": "fp16"},
    {"micro_batch_size": 1, "batch_size": 4, "d_model": 512},
]


def resolve(options):
    """Settings of a case."""
    options = dict(options)
    optimizer = {"name": options.pop("optimizer", "muon")}
    data = {"seq_len": 512, "document_masking": options.pop("document_masking", False)}
    train = {"precision": "bf16", "compile": True, "micro_batch_size": 8, "batch_size": 16}
    train["max_steps"] = 9
    of_train = (*train, "checkpoint_every_n_blocks")
    train |= {name: options.pop(name) for name in of_train if name in options}
    config = validate_config({"data": data, "optimizer": optimizer, "train": train})
    return resolve_settings(config, ThinkerConfig(**SHAPE | options), GPU)


def counted_peak(settings, monkeypatch):
    """Bytes of a step whose compiled parts are Inductor's programs, each with its own buffers."""
    tokens = torch.zeros(settings.train.batch_size, settings.data.seq_len, dtype=torch.int64)
    document_ids = tokens if settings.data.document_masking else None
    batch = Batch(tokens, tokens, tokens.numel(), document_ids)
    with (
        monkeypatch.context() as patch,
        FakeTensorMode(allow_non_fake_inputs=True),
        inductor_programs(patch) as programs,
        PeakCounter() as counter,
    ):
        with GPU:
            model = Thinker(settings.model)
        step = TrainingStep(model, settings)
        step(batch, 1.0)  # creates the optimizers' state
        counter.peak = 0
        step(batch, 1.0)
    assert bool(programs) == settings.train.compile
    return counter.peak


@pytest.mark.parametrize("options", CASES, ids=str)
def test_peaks_of_inductors_programs(options, monkeypatch, capsys):
    settings = resolve(options)
    predicted = estimate_memory(settings, settings.train.micro_batch_size, GPU).peak
    assert capsys.readouterr().err == ""  # no doubt about the compiler
    counted = counted_peak(settings, monkeypatch)
    assert predicted - WORKSPACES["cuda"] == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("size", [2, 8])
def test_the_micro_batch_is_the_largest_that_fits(size, monkeypatch):
    """In what Inductor's programs count: with 6% to spare it is chosen, with 1% too little not."""
    options = {"n_layers": 2, "micro_batch_size": "auto"}
    needed = counted_peak(resolve(options | {"micro_batch_size": size}), monkeypatch)
    needed += WORKSPACES["cuda"]
    for free, chosen in ((1.06 * needed, size), (0.99 * needed, size // 2)):
        memory = int(free), fake_cuda.GPU.total_memory
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, memory=memory: memory)
        assert resolve(options).train.micro_batch_size == chosen


def test_without_the_compiler_every_operation_counts(monkeypatch, capsys):
    settings = resolve({})
    fused = estimate_memory(settings, 8, GPU)

    def fail(graph):
        raise AttributeError("torch has changed")

    monkeypatch.setattr(compiled_programs, "Program", fail)
    plain = estimate_memory(settings, 8, GPU)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memory is estimated as if nothing were fused: ")
    assert plain.peak > 1.1 * fused.peak
    assert plain.optimizer == fused.optimizer
