"""Steps with fused kernels are near those in plain torch, and a run says which of the two it
uses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from thinker.data.batches.prefetch import Batch
from thinker.model import ThinkerConfig, proof
from thinker.model import attention as model_attention
from thinker.model.attention import Attention, LinearAttention
from thinker.model.kernels import blockwise_attention, linear_cross_entropy
from thinker.model.kernels.linear_cross_entropy import loss_and_gradient
from thinker.model.layers import Linear
from thinker.model.transformer import MLP, Thinker
from thinker.native import compiler, training
from thinker.native.compiler import has_compiler
from thinker.native.tiles import tile_kernels
from thinker.training import kernels as kernels_module
from thinker.training.config.load import validate_config
from thinker.training.kernels import NATIVE, Kernels, choose_kernels, fused_kernels, without_kernels
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

CONFIG = ThinkerConfig(vocab_size=50, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16,
                       init="normal")  # fmt: skip
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
VARIANTS = [
    {}, {"qk_norm": False}, {"no_rope_layers": [0, 2]}, {"attention_bias": True}, {"positions": "alibi"},
    {"attention": "window(4)"}, {"n_kv_heads": 4},
]  # fmt: skip


def make_step(config=CONFIG, optimizer="muon", lora_rank=None, **train):
    train = {
        "precision": "fp32",
        "compile": False,
        "micro_batch_size": 2,
        "batch_size": 4,
        "max_steps": 9,
        **train,
    }
    tree = {"train": train, "optimizer": {"name": optimizer}}
    settings = resolve_settings(validate_config(tree), config, CPU).with_train(lora_rank=lora_rank)
    return TrainingStep(build_model(config, 1, CPU), settings)


def trained(step, is_plain=False, has_documents=False):
    """The first gradients and the losses of two steps, of documents that may start anywhere."""
    if is_plain:
        step.kernels = Kernels({})
        for optimizer in step.optimizers.optimizers:
            optimizer.is_fused = False
    losses, grads = [], {}
    for seed in range(2):
        tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(seed))
        documents = (tokens[:, :-1] < 8).cumsum(1) if has_documents else None
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 64, documents)
        if not grads:
            with fused_kernels(step.model, step.kernels):
                step.model(batch.inputs, targets=batch.targets, document_ids=batch.document_ids)[
                    0
                ].backward()
            grads = {name: p.grad for name, p in step.model.named_parameters()}
            step.model.zero_grad()
        losses.append(step(batch, 1.0)[0])
    return torch.stack(losses), grads


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_fused_step_is_near_the_plain_one(changes, has_documents, precision):
    config = dataclasses.replace(CONFIG, **changes)
    fused_losses, fused = trained(
        make_step(config, precision=precision), has_documents=has_documents
    )
    plain_losses, plain = trained(make_step(config, precision=precision), True, has_documents)
    is_exact = precision == "fp32"
    torch.testing.assert_close(
        fused_losses, plain_losses, rtol=1e-5 if is_exact else 1e-2, atol=1e-5
    )
    for name, grad in plain.items():
        assert (fused[name] - grad).norm() <= (1e-3 if is_exact else 0.1) * grad.norm() + 1e-6, name


@needs_compiler
def test_lora_and_double_weights_train_with_fused_kernels():
    losses, grads = trained(make_step(optimizer="adamw", lora_rank=2))
    plain_losses, plain = trained(make_step(optimizer="adamw", lora_rank=2), is_plain=True)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-5)
    assert [name for name, grad in grads.items() if grad is None] == [
        name for name, g in plain.items() if g is None
    ]
    torch.set_default_dtype(torch.float64)
    try:
        losses, _ = trained(make_step(optimizer="adamw"))
        plain_losses, _ = trained(make_step(optimizer="adamw"), is_plain=True)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_only_the_step_uses_the_kernels(monkeypatch):
    step = make_step()
    assert step.kernels == Kernels(NATIVE, is_native=True)
    assert step.kernel_problem == ""

    def replaced():
        modules = step.model.modules()
        names = {"forward", "project", "attend"}
        return {type(each) for each in modules if names & set(vars(each))}

    with fused_kernels(step.model, step.kernels):
        assert replaced() == set(NATIVE) - {LinearAttention}
        step.model.blocks[1].mlp.forward = len  # of a user
        with without_kernels(step.model, step.kernels):
            assert replaced() == {MLP}
        assert replaced() == set(NATIVE) - {LinearAttention}
    assert replaced() == set()
    trained(step)
    assert replaced() == set()


def test_why_a_run_has_no_kernels(monkeypatch):
    step = make_step()
    train, model = step.train, step.model
    kernels, problem = choose_kernels(model, train, torch.device("cuda"))
    assert not kernels.is_native
    assert problem == "they run only on CPUs; the device is cuda"
    compiled = train.model_copy(update={"compile": True})
    assert choose_kernels(model, compiled, CPU) == (Kernels({}), "train.compile is on")
    off = train.model_copy(update={"kernels": "off"})
    assert choose_kernels(model, off, CPU) == (Kernels({}), "train.kernels is off")
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CC", raising=False)
    training.load_training_library.cache_clear()
    try:
        step = make_step()
        assert step.kernel_problem == "no C compiler found (no-such-compiler)"
        trained(step)
    finally:
        training.load_training_library.cache_clear()


def smoothed(logits, targets, needs_gradient):
    losses, grad = loss_and_gradient(logits, targets, needs_gradient)
    return 0.9 * losses, grad


def forward_without_options(self, tokens=None, *, targets=None, document_ids=None):
    return THINKER_FORWARD(self, tokens, targets=targets, document_ids=document_ids)


THINKER_FORWARD = Thinker.forward
WIDE = dataclasses.replace(
    CONFIG, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=64, max_seq_len=128
)
# What tile_support() is at least for an edit to matter.
SUPPORT = {"attend": 1, "blockwise": 1, "the function": 1, "forward": 1, "cast": 1}
# By name: what an edit replaces and by what, and the type of module that then runs as written.
EDITS = {
    "attend": (Attention, "attend", lambda self, q, k, v, mask, cache: v + 0 * q, Attention),
    "blockwise": (
        blockwise_attention.BlockwiseAttention,
        "__call__",
        lambda self, q, k, v, scale, *unused: v + 0 * q,
        Attention,
    ),
    "the function": (model_attention, "attend", lambda q, k, v, *rest: v + 0 * q, Attention),
    "forward": (Linear, "forward", lambda self, x: x @ (2 * self.weight).T.to(x.dtype), Linear),
    "cast": (Linear, "cast_weight", lambda self, dtype: (1.01 * self.weight).to(dtype), Linear),
    "mlp": (MLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x)), MLP),
    "loss": (linear_cross_entropy, "loss_and_gradient", smoothed, Thinker),
    "loss without options": (Thinker, "forward", forward_without_options, Thinker),
}


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_trains_as_it_is_written(edit, precision, monkeypatch, capsys):
    """Also where only bf16 has a faster form, with heads and tokens that it supports."""
    if training.load_training_library().tile_support() < SUPPORT.get(edit, 0):
        pytest.skip("this processor has no form of it")
    config = dataclasses.replace(WIDE, n_kv_heads=2)
    options = {"precision": precision, "micro_batch_size": 4}
    assert set(make_step(config, **options).kernels.forms) == set(NATIVE)
    place, name, function, kind = EDITS[edit]
    monkeypatch.setattr(place, name, function)
    if place is linear_cross_entropy:
        monkeypatch.setattr(kernels_module, "loss_and_gradient", function)
    step = make_step(config, **options)
    assert kind not in step.kernels.forms
    assert "as written" in capsys.readouterr().err
    losses, grads = long_trained(step)
    plain_losses, plain = long_trained(make_step(config, **options, kernels="off"))
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(losses, plain_losses, rtol=tolerance, atol=1e-5)
    for parameter, grad in plain.items():
        if grad is not None:
            difference = (grads[parameter] - grad).norm()
            assert difference <= 10 * tolerance * grad.norm() + 1e-6, parameter
    if edit == "cast":  # by which each gradient is 1% larger, less than bf16 may differ
        for parameter, grad in plain.items():
            scale = (grads[parameter] * grad).sum() / grad.square().sum()
            assert abs(scale - 1) < 5e-3, parameter


@needs_compiler
def test_an_edit_of_a_model_of_large_blocks_is_noticed_in_bf16(monkeypatch, capsys):
    """Blocks that are too large to be compared in their own shape are compared in a small one."""
    if training.load_training_library().tile_support() == 0:
        pytest.skip("needs AMX or AVX512-BF16")
    monkeypatch.setattr(proof, "MAX_BLOCK", 0)
    monkeypatch.setattr(Linear, "forward", EDITS["forward"][2])
    step = make_step(WIDE, precision="bf16")
    assert not {Linear, MLP} & set(step.kernels.forms)
    assert "as written" in capsys.readouterr().err


@needs_compiler
def test_a_step_in_bf16_takes_the_products(monkeypatch):
    if not tile_kernels.has_fast_activation_product(0):
        pytest.skip("needs AVX512-BF16 without AMX")
    calls = []
    for name in ("swiglu_mlp", "linear"):
        function = getattr(tile_kernels, name)
        monkeypatch.setattr(
            tile_kernels,
            name,
            lambda *args, name=name, function=function: (calls.append(name), function(*args))[1],
        )
    step = make_step(WIDE, precision="bf16", micro_batch_size=4)
    calls.clear()
    long_trained(step)
    assert calls.count("swiglu_mlp") == 3
    assert calls.count("linear") == 6  # q, k and v together, and what joins the heads

    seen = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.add(module)
    )
    calls.clear()
    try:
        long_trained(step)
        mlp = step.model.blocks[1].mlp
        assert {mlp, mlp.gate_proj, mlp.up_proj, mlp.down_proj} <= seen
    finally:
        hook.remove()
    assert calls == []  # a hook of all modules is to see each of them


def long_trained(step):
    """A loss and its gradients, of as many tokens as the kernels need."""
    tokens = torch.randint(50, (4, 129), generator=torch.Generator().manual_seed(2))
    with step.fast_model():
        total, _ = step.model(tokens[:, :-1], targets=tokens[:, 1:].contiguous())
        total.backward()
    return total.detach(), {name: p.grad for name, p in step.model.named_parameters()}


@needs_compiler
@pytest.mark.parametrize("matrix", ["gate_proj", "down_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("change", ["hook", "forward", "cast", "bias", "another module"])
def test_a_changed_matrix_takes_effect_in_the_next_step(change, matrix):
    """Also after the proof."""
    options = {"precision": "bf16", "micro_batch_size": 4}
    steps = [make_step(WIDE, **options), make_step(WIDE, **options, kernels="off")]
    unchanged, _ = long_trained(steps[0])
    results = []
    for step in steps:
        block = step.model.blocks[1]
        part = block.mlp if hasattr(block.mlp, matrix) else block.attention
        linear = getattr(part, matrix)
        if change == "hook":
            linear.register_forward_hook(lambda module, inputs, output: 3 * output)
        elif change == "forward":
            linear.forward = lambda x, linear=linear: 3 * F.linear(x, linear.weight.to(x.dtype))
        elif change == "cast":
            linear.cast_weight = lambda dtype, linear=linear: (3 * linear.weight).to(dtype)
        elif change == "bias":
            linear.bias = torch.nn.Parameter(torch.linspace(-0.2, 0.2, len(linear.weight)))
        else:
            setattr(part, matrix, torch.nn.Sequential(linear, torch.nn.ReLU()))
        step.model.zero_grad()
        results.append(long_trained(step))
    (loss, grads), (plain_loss, plain) = results
    torch.testing.assert_close(loss, plain_loss, rtol=2e-2, atol=1e-5)
    assert abs(unchanged - loss) > 1e-3
    for name, grad in plain.items():
        if grad is not None:
            assert (grads[name] - grad).norm() <= 0.1 * grad.norm() + 1e-6, name


@needs_compiler
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"tie_embeddings": True},
    {"logit_softcap": 20.0}, {"value_embeddings": True, "bigram_rows": 64}], ids=str)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_unchanged_model_uses_all_kernels(changes, precision, capsys):
    step = make_step(dataclasses.replace(WIDE, **changes), precision=precision)
    assert set(step.kernels.forms) == set(NATIVE)
    assert "as written" not in capsys.readouterr().err


@needs_compiler
def test_plain_causal_attention_in_bf16_takes_the_kernel(monkeypatch):
    """What else changes the scores does not."""
    if training.load_training_library().tile_support() == 0:
        pytest.skip("needs AMX or AVX512-BF16")
    calls = []
    computes = tile_kernels.causal_attention
    monkeypatch.setattr(
        tile_kernels, "causal_attention", lambda *args: (calls.append(1), computes(*args))[1]
    )

    def n_calls(precision="bf16", **changes):
        step = make_step(dataclasses.replace(WIDE, **changes), precision=precision)
        calls.clear()
        long_trained(step)
        return len(calls)

    assert n_calls() == 3
    assert n_calls(precision="fp32") == 0
    assert n_calls(attention=["full", "window(8)", "full"]) == 2
    assert n_calls(attn_logit_softcap=20.0) == 0
    assert n_calls(attention_sinks=True) == 0
    assert n_calls(positions="alibi") == 0
    assert n_calls(positions="learned") == 3
    assert n_calls(head_dim=16) == 0
