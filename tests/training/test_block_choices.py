"""Runs from scratch with the block choices of other architectures: resumed bit by bit, alike with
and without kernels and on several ranks; which optimizer trains which parameter."""

import math

import fork_server
import pytest
import torch
from conftest import ROOT
from pairwise import pairwise
from training_runs import train_losses
from training_workers import train_each

from thinker import Thinker, checkpoint
from thinker.model import ThinkerConfig
from thinker.training.config.load import load_config
from thinker.training.config.sections import OptimizerConfig
from thinker.training.metrics import flops_per_token
from thinker.training.optim.muon import Muon
from thinker.training.optim.optimizers import Optimizers, resolve_learning_rates
from thinker.training.reports.scaling_law import count_parameters
from thinker.training.settings.memory_bound import least_parameters

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = ROOT / "tests" / "fixtures" / "base.yaml"
CHOICES = {
    "block": ["pre_norm", "post_norm", "both_norms", "parallel", "parallel_one_norm"],
    "norm": ["rmsnorm", "rmsnorm_one_plus", "layernorm", "layernorm_no_bias", "layernorm_no_weight"],
    "mlp": [
        {},
        {"activation": "gelu_tanh"},
        {"mlp": "ungated", "activation": "relu2"},
        {"mlp": "ungated", "mlp_bias": True},
    ],
    "heads": [
        {"qk_norm": False},
        {"qk_norm_type": "rmsnorm_width"},
        {"qk_norm_type": "layernorm_per_head"},
        {"qk_norm_type": "layernorm"},
        {"qk_norm_type": "rmsnorm_one_plus"},
    ],
    "biases": [{}, {"attention_bias": True, "attention_out_bias": True}, {"head_bias": True}],
    "positions": [
        {"rope_dim": 4},
        {"positions": "learned", "position_offset": 2},
        {"window_rope_theta": 100.0, "attention": "LG", "window": 8},
    ],
    "scales": [{}, {"embedding_scale": 4.0, "logit_softcap": 5.0}, {"logit_scale": 0.5, "attention_scale": 0.2}],
    "tie_embeddings": [False, True],
    "optimizer": ["muon", "adamw"],
    "precision": ["fp32", "bf16"],
}  # fmt: skip
CASES = pairwise(CHOICES)
SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
STEPS = 3


def shape_of(case):
    """The keys of the model section that a case sets."""
    shape = SHAPE | {name: case[name] for name in ("block", "norm", "tie_embeddings")}
    for name in ("mlp", "heads", "biases", "positions", "scales"):
        shape |= case[name]
    return shape


def overrides(case, run, cache, n_steps=STEPS, *more):
    keys = [f"model.{name}={value}" for name, value in shape_of(case).items()]
    return [
        *keys,
        "data.tokenizer=bpe:300",
        "data.max_documents=60",
        "data.seq_len=32",
        f"data.cache_dir={cache}",
        f"optimizer.name={case['optimizer']}",
        "optimizer.weight_decay=0.1",
        f"train.precision={case['precision']}",
        "train.batch_size=4",
        "train.device=cpu",
        "train.compile=false",
        "train.decay_fraction=0",
        "train.eval_every=null",
        f"train.max_steps={n_steps}",
        f"run.dir={run}",
        *more,
    ]


def train_alone(*runs):
    assert fork_server.run_ranks(1, train_each, str(BASE), list(runs)) == [[0] * len(runs)]


def tensors(run):
    return checkpoint.read_tensors(run / "checkpoints" / f"step-{STEPS:06d}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def name_of(case):
    return "-".join(str(value) for value in case.values() if value).replace(" ", "")


def marked(cases, n_fast):
    for index, case in enumerate(cases):
        marks = () if index < n_fast else pytest.mark.more
        yield pytest.param(case, id=f"{index}-{name_of(case)}", marks=marks)


@pytest.mark.parametrize("case", list(marked(CASES, 2)))
def test_a_run_resumes_to_the_bit_and_needs_no_kernels(case, cache, tmp_path):
    whole, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    train_alone(
        overrides(case, whole, cache),
        overrides(case, parts, cache, 1),
        overrides(case, parts, cache),
        overrides(case, plain, cache, STEPS, "train.kernels=off"),
    )
    losses = train_losses(whole)
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) for loss in losses.values())
    assert train_losses(parts) == losses
    rel = 1e-5 if case["precision"] == "fp32" else 0.02
    assert train_losses(plain) == pytest.approx(losses, rel=rel)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", list(marked(CASES[1:3], 0)))
def test_two_ranks_train_as_one(case, parallel, cache, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    case = case | {"precision": "fp32"}
    train_alone(overrides(case, alone, cache))
    run = overrides(case, shared, cache, STEPS, f"train.parallel={parallel}")
    assert fork_server.run_ranks(2, train_each, str(BASE), [run]) == [[0], [0]]
    assert train_losses(shared) == pytest.approx(train_losses(alone), rel=1e-4)


@pytest.mark.parametrize("case", list(marked(CASES, len(CASES))))
def test_each_parameter_has_its_optimizer(case):
    model = Thinker(ThinkerConfig(vocab_size=61, max_seq_len=64, **shape_of(case)))
    for name in ("muon", "adamw"):
        config = resolve_learning_rates(
            OptimizerConfig(name=name, weight_decay=0.1), model.config, 16
        )
        optimizers = Optimizers(model, config)
        found = {}
        for optimizer in optimizers.optimizers:
            for group in optimizer.param_groups:
                for parameter_name in group["param_names"]:
                    assert parameter_name not in found
                    found[parameter_name] = (type(optimizer), group["lr"], group["weight_decay"])
        assert set(found) == {parameter_name for parameter_name, _ in model.named_parameters()}
        for parameter_name, parameter in model.named_parameters():
            kind, lr, decay = found[parameter_name]
            if parameter.dim() == 1:  # norms and biases
                assert (kind is Muon, lr, decay) == (False, config.norm_lr, 0)
            elif parameter_name in ("embedding.weight", "positions.weight"):
                assert (kind is Muon, lr, decay) == (False, config.embedding_lr, 0)
            elif parameter_name == "lm_head.weight":
                assert (lr, decay) == (config.head_lr, 0.1)
            else:
                assert (kind is Muon, lr, decay) == (name == "muon", config.lr, 0.1)


@pytest.mark.parametrize("case", list(marked(CASES, len(CASES))))
def test_sizes_and_operations_are_counted_from_the_matrices(case):
    config = ThinkerConfig(vocab_size=61, max_seq_len=64, **shape_of(case))
    model = Thinker(config)
    looked_up = model.embedding.weight.numel() * (not config.tie_embeddings)
    inner = sum(p.numel() for p in model.blocks.parameters())
    inner += sum(p.numel() for p in model.norm.parameters())
    n_matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    n_positions = 0
    if model.positions is not None:
        n_positions = model.positions.weight.numel()
    total = sum(p.numel() for p in model.parameters())
    attention = 12 * config.n_layers * config.n_heads * config.head_dim * 64
    assert flops_per_token(model, 64) == 6 * (total - looked_up - n_positions) + attention
    assert count_parameters(config) == inner
    assert least_parameters(config) <= n_matrices
    assert least_parameters(config) >= n_matrices - 2 * config.d_model


@pytest.mark.parametrize("case", list(marked(CASES, len(CASES))))
def test_a_new_model_predicts_evenly(case):
    config = ThinkerConfig(vocab_size=61, max_seq_len=64, **shape_of(case))
    logits = Thinker(config)(torch.arange(20)[None])
    if not config.tie_embeddings:
        assert torch.equal(logits, torch.zeros_like(logits))
    assert logits.log_softmax(-1).exp().max() < 0.5


def test_every_pair_of_choices_occurs():
    for a in CHOICES:
        for b in CHOICES:
            for x in CHOICES[a]:
                for y in CHOICES[b]:
                    assert a == b or any(case[a] == x and case[b] == y for case in CASES)
    assert load_config(BASE, overrides(CASES[0], "run", "cache")).model.block == CASES[0]["block"]
