"""What older cards cannot do is not chosen for them: bf16, Triton and the flash kernel."""

import importlib

import fake_cuda
import pytest
import torch
from device_trace import DeviceTrace
from test_training_step import OPTIONS, new_step

from thinker import generate
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import find
from thinker.model import Thinker, ThinkerConfig
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.errors import UserError
from thinker.serving import __main__ as serve
from thinker.training.config.load import validate_config
from thinker.training.settings import compile_choice
from thinker.training.settings.resolve import resolve_precision, resolve_settings

GPU = torch.device("cuda:0")
CARDS = {  # the compute capability, from NVIDIA's list, and whether it has bf16 and Triton
    "Tesla P100": ((6, 0), False, False),
    "Tesla V100": ((7, 0), False, True),
    "Tesla T4": ((7, 5), False, True),
    "NVIDIA A100": ((8, 0), True, True),
    "NVIDIA GeForce RTX 3090": ((8, 6), True, True),
    "NVIDIA GeForce RTX 4090": ((8, 9), True, True),
    "NVIDIA H100": ((9, 0), True, True),
}
SHAPE = ThinkerConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2, max_seq_len=32)


@pytest.fixture(params=CARDS)
def card(request, monkeypatch):
    """A name, and whether the card has bf16 and Triton."""
    (major, minor), has_bf16, has_triton = CARDS[request.param]
    monkeypatch.setattr(fake_cuda.GPU, "name", request.param)
    monkeypatch.setattr(fake_cuda.GPU, "major", major)
    monkeypatch.setattr(fake_cuda.GPU, "minor", minor)
    assert torch.cuda.is_bf16_supported()  # by emulation
    return request.param, has_bf16, has_triton


def config(**train):
    train = {"max_minutes": 600, "batch_size": 4, "micro_batch_size": 4} | train
    return validate_config({"train": train, "data": {"seq_len": 32}})


def test_training_is_in_bf16_where_the_card_computes_it(gpu, card, capsys):
    name, has_bf16, _ = card
    chosen = resolve_precision(config(), GPU)
    assert chosen == ("bf16" if has_bf16 else "fp16")
    said = capsys.readouterr().err
    if has_bf16:
        assert said == ""
    else:
        assert said.startswith(f"precision fp16: {name} (compute capability ")
        assert said.count("\n") == 1
    options = {name: values[0] for name, values in OPTIONS.items()} | {"precision": chosen}
    step, batch = new_step(gpu, options)
    assert step.scaler.is_enabled() == (not has_bf16)
    step(batch, 1.0)
    with DeviceTrace() as trace:
        step(batch, 1.0)
    assert trace.reads == {}


def test_bf16_that_is_asked_for_is_an_error_on_an_old_card(card):
    name, has_bf16, _ = card
    previous = resolve_settings(config(precision="fp32", compile=False), SHAPE, GPU)
    previous = previous.with_train(precision="bf16")
    if has_bf16:
        assert resolve_precision(config(precision="bf16"), GPU) == "bf16"
        assert resolve_precision(config(), GPU, previous) == "bf16"
        return
    needs = rf"{name} \(compute capability .*\) has no bf16, which needs 8.0; use precision fp16"
    with pytest.raises(UserError, match=needs):
        resolve_precision(config(precision="bf16"), GPU)
    with pytest.raises(UserError, match=f"the run uses train.precision=bf16, but {needs}"):
        resolve_precision(config(), GPU, previous)


def precision_of_generate(monkeypatch, *flags):
    def load(path, device, checkpoint):
        with device:
            return Thinker(SHAPE), make_tokenizer("byte", [])

    monkeypatch.setattr(importlib.import_module("thinker.interop.load"), "load", load)
    monkeypatch.setattr("sys.argv", ["generate.py", "runs/x", *flags])
    parser, features = generate.make_parser()
    arguments = generate.parse_arguments(parser, features)
    return generate.load_model(arguments, features).options["dtype"]


class Loaded(Exception):
    """Ends a server once it knows what it would load."""


def precision_of_server(monkeypatch, *flags):
    def load_generator(name, checkpoint, device, dtype, arguments, features):
        raise Loaded(dtype)

    monkeypatch.setattr(find, "find_model", lambda path, checkpoint: path)
    monkeypatch.setattr(serve, "load_generator", load_generator)
    monkeypatch.setattr("sys.argv", ["thinker-serve", "runs/x", "--port", "0", *flags])
    with pytest.raises(Loaded) as loaded:
        serve.main()
    return loaded.value.args[0]


@pytest.mark.parametrize("command", [precision_of_generate, precision_of_server])
def test_sampling_and_serving_choose_as_training_does(gpu, card, monkeypatch, capsys, command):
    _, has_bf16, _ = card
    assert command(monkeypatch) == (torch.bfloat16 if has_bf16 else torch.float16)
    assert ("precision fp16: " in capsys.readouterr().err) == (not has_bf16)
    if not has_bf16:
        with pytest.raises((UserError, SystemExit)):
            command(monkeypatch, "--precision", "bf16")


def test_blocks_are_compiled_only_where_triton_runs(card, monkeypatch, capsys):
    name, _, has_triton = card
    monkeypatch.setattr(compile_choice.importlib.util, "find_spec", lambda name: name)
    assert resolve_settings(config(), SHAPE, GPU).train.compile == has_triton
    said = capsys.readouterr().err
    assert ("too old for the compiler Triton, which needs 7.0" in said) == (not has_triton)
    if has_triton:
        assert resolve_settings(config(compile=True), SHAPE, GPU).train.compile
    else:
        with pytest.raises(UserError, match=rf"train.compile=true: {name} .*; set it to false"):
            resolve_settings(config(compile=True), SHAPE, GPU)


def test_without_the_package_triton_auto_does_not_compile(monkeypatch, capsys):
    monkeypatch.setattr(compile_choice.importlib.util, "find_spec", lambda name: None)
    assert not resolve_settings(config(), SHAPE, GPU).train.compile
    assert "the package triton is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("documents", [False, True])
def test_attention_runs_by_kernels_that_the_card_has(gpu, card, documents):
    _, has_bf16, has_triton = card
    position = torch.arange(1024, device=gpu)
    document = torch.zeros(1, 1024, dtype=torch.int64, device=gpu) if documents else None
    tokens = TokenInfo(position, document, None)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    with DeviceTrace():
        mask = MaskBuilder(2, dtype).build(parse_pattern("window(100)"), tokens, tokens, True)
    flex = "flex" if has_triton else "sdpa"
    assert mask.kernel == ("varlen" if documents and has_bf16 else flex)
