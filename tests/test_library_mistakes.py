"""What a user of the library passes by mistake: one line that says what would be right, and no
error of torch's."""

import math
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_model
from installed import if_installed

from thinker.api.training import plan, train
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

MODEL, TOKENIZER = random_model(vocab_size=257), make_tokenizer("byte", [])
IDS = torch.zeros(2, 3, dtype=torch.int64)
OTHER = random_model(vocab_size=257, n_layers=3)
VALUES = ("hot", "4", None, -1, 2.5, math.nan, math.inf, [1], {}, True, 10**400, b"x", IDS, Thinker)


def refused(call, message=None):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", [None, 42, b"runs", ["runs"], "a" * 5000, "a\0b", "", Path("nowhere")]
)
def test_load_refuses_what_is_no_folder(path):
    refused(lambda: load(path))


def test_load_refuses_other_devices_and_checkpoints(tiny_run):
    for device in ("banana", "cuda:99", None, 7, "cpu:1", "cpu:", "mps:x", torch.device("meta")):
        refused(partial(load, tiny_run, device), "device")
    for checkpoint in (None, 3.5, "a\0b", True, 99):
        refused(partial(load, tiny_run, checkpoint=checkpoint), "checkpoint")
    for device in ("cpu", "cpu:0", "auto", torch.device("cpu")):
        load(tiny_run, device)
    assert load(tiny_run, checkpoint=40)[0].config == load(str(tiny_run))[0].config


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_named_with_what_is(tiny_run):
    refused(lambda: load(tiny_run, device="cuda"), "^device 'cuda' is not available \\(available: ")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_several_names(name):
    assert Generator(MODEL, TOKENIZER, dtype=name).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "dtype", ["half a float", 8, float, torch.int8, torch.complex64, torch.float8_e4m3fn]
)
def test_other_dtypes_are_refused(dtype):
    refused(lambda: Generator(MODEL, TOKENIZER, dtype=dtype), "^(unknown )?dtype ")


@pytest.mark.parametrize(
    "pair", [(None, None), (None, TOKENIZER), ("runs", TOKENIZER), (TOKENIZER, MODEL), (MODEL, "x")]
)
def test_a_generator_needs_a_model_and_its_tokenizer(pair):
    refused(lambda: Generator(*pair))


def test_a_tokenizer_of_another_library_is_refused():
    models = pytest.importorskip("tokenizers.models")
    other = pytest.importorskip("tokenizers").Tokenizer(models.BPE())
    refused(
        lambda: Generator(MODEL, other), "^tokenizer is a Tokenizer.*pass the model's tokenizer"
    )
    refused(lambda: Generator(MODEL, None), "is None")


def test_a_generator_in_double_precision():
    assert Generator(MODEL, TOKENIZER, dtype=torch.float64).score("abc").logprobs == pytest.approx(
        Generator(MODEL, TOKENIZER).score("abc").logprobs, abs=1e-4
    )


def test_numbers_of_any_size_and_kind_are_as_floats():
    names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in names:
        for value in (10**30, Fraction(3, 2)):
            params = SamplingParams(2, seed=1, **{name: value})
            assert type(getattr(params, name)) is float
            Generator(MODEL, TOKENIZER).generate("abc", params)


def test_a_stop_string_that_no_text_can_hold_is_refused():
    refused(lambda: SamplingParams(stop=["caf\udce9"]), "^stop contains a lone surrogate")


@pytest.mark.parametrize("call", [train, plan])
def test_overrides_that_are_one_text_are_refused(call):
    refused(
        lambda: call("quickstart", "train.max_steps=3"),
        r"^overrides is .*; give a list, such as \['",
    )


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_numbers():
    values = {
        "top_k": np.int64(3),
        "temperature": np.float32(0.5),
        "seed": np.uint8(255),
        "top_p": np.float64(0.5),
    }
    params = SamplingParams(
        **values, logit_bias={np.int64(3): np.float16(-2)}, max_new_tokens=np.int32(4)
    )
    plain = SamplingParams(4, 0.5, 3, 0.5, logit_bias={3: -2.0}, seed=255)
    assert (params, hash(params)) == (plain, hash(plain))
    assert {type(getattr(params, name)) for name in values} == {int, float}
    assert [type(x) for x in params.logit_bias[0]] == [int, float]
    for value in (np.bool_(True), np.float32(3), np.array([3])):
        refused(partial(SamplingParams, top_k=value), "^top_k is ")


def all_refused(make, expected):
    """Every one of VALUES that is not of a type in `expected` is refused; the others may or may not
    be in range."""
    for value in VALUES:
        if type(value) in expected:
            try:
                make(value)
            except UserError as error:
                assert "\n" not in str(error)  # noqa: PT017 - it may be accepted
        else:
            refused(partial(make, value))


@pytest.mark.parametrize(
    ("option", "types"),
    [
        *((name, {bool}) for name in ("use_cache", "slide")),
        ("sinks", {int}), *if_installed("speculation", ("speculate", {int}), ("draft", {type(None)})),
        ("window", {int, type(None)}), ("dtype", {type(None)})
    ],
)  # fmt: skip
def test_options_of_a_generator_have_their_types(option, types):
    all_refused(lambda value: Generator(MODEL, TOKENIZER, **{option: value}), types)


@pytest.mark.parametrize("field", SamplingParams.__dataclass_fields__)
def test_sampling_parameters_have_their_types(field):
    others = {"stop": set(), "logit_bias": {dict}, "json_schema": {dict, str, bool}, "regex": {str}}
    kind = others.get(field, {int, float})
    optional = {type(None)} if getattr(SamplingParams, field) is None else set()
    all_refused(lambda value: SamplingParams(**{field: value}), kind | optional)


@pytest.mark.parametrize("field", ThinkerConfig.__dataclass_fields__)
def test_fields_of_a_config_have_their_types(field):
    hint = ThinkerConfig.__annotations__[field]
    names = {
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
        "list": list,
        "dict": dict,
        "None": type(None),
    }
    types = {names[name] for name in hint.split(" | ")}
    shape = {"vocab_size": 9, "d_model": 32, "n_layers": 1, "max_seq_len": 8}
    types |= {int} if float in types else set()
    all_refused(lambda value: Thinker(ThinkerConfig(**{**shape, field: value})), types)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"d_model": 0}, "^model.d_model is 0; it must be from 1 to"),
        ({"d_model": 32.0}, "^model.d_model is 32.0; it must be an integer$"),
        ({"n_heads": 5}, "multiple of model.n_heads"),
        ({"qk_norm": "no"}, "^model.qk_norm is 'no'; it must be True or False$"),
    ],
)
def test_a_config_names_what_is_wrong(shape, message):
    refused(lambda: ThinkerConfig(vocab_size=9, **shape), message)


@pytest.mark.parametrize("config", [None, {"vocab_size": 9}])
def test_a_model_needs_a_config(config):
    refused(lambda: Thinker(config), "^config is .*; it must be a ThinkerConfig$")


@pytest.mark.parametrize(
    "sizes",
    [(0, -1), (0,), (1, 0), (1, -1), ("a",), (1.5,), (1, "b"), (None,), (1, 5, -1), (True,)],
)
def test_sizes_of_a_cache(sizes):
    refused(lambda: MODEL.new_cache(*sizes), "use integers of at least 1")


def test_a_cache_of_another_dtype_is_refused():
    cache = MODEL.new_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(
            lambda: MODEL(IDS[:1], cache=cache),
            "^the cache is torch.float32, but the model uses torch.bfloat16",
        )


def test_a_text_with_lone_surrogates_is_refused():
    for call in (Generator(MODEL, TOKENIZER).score, Generator(MODEL, TOKENIZER).generate):
        refused(partial(call, "caf\udce9"), "contains a lone surrogate")


def test_a_model_loads_whatever_the_default_dtype_is(tiny_run):
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            model, _ = load(tiny_run)
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_cache_larger_than_the_memory_is_refused():
    refused(
        lambda: MODEL.new_cache(1, 10**12),
        "^this needs at least .* use a smaller batch_size or max_len",
    )


@pytest.mark.parametrize("n_top", [-1, 1.5, None, "b"])
def test_score_refuses_what_is_no_number(n_top):
    refused(lambda: Generator(MODEL, TOKENIZER).score("a", n_top), "^n_top is ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"document_ids": "x"}, "^document_ids is 'x'; it must be a tensor"),
        ({"document_ids": IDS.float()}, "^document_ids is torch.float32; it must be torch.int64"),
        ({"targets": IDS.float()}, "^targets is torch.float32; it must be torch.int64"),
        ({"targets": IDS[..., None]}, r"^targets is .*; it must be a tensor of shape \(2, 3\)"),
        (
            {"targets": IDS.to("meta")},
            r"^targets is on meta, but the model is on cpu; use targets.to\(model.device\)",
        ),
        ({"cache": "x"}, r"^cache is 'x'; it must come from model.new_cache\(\)"),
        ({"cache": OTHER.new_cache(2)}, "model of another shape"),
        ({"cache": MODEL.new_cache(2), "document_ids": IDS}, "cannot be combined with a cache"),
        ({"cache": MODEL.new_cache(2, 2)}, "cache"),
        ({"cache": MODEL.new_cache(3)}, "cache"),
        (
            {"targets": IDS, "last_logits_only": True},
            "^last_logits_only cannot be combined with targets",
        ),
    ],
)
def test_arguments_of_a_pass(arguments, message):
    refused(lambda: MODEL(IDS, **arguments), message)


def test_tokens_and_embeddings_of_a_pass():
    refused(lambda: MODEL(IDS.to("meta")), "^tokens is on meta")
    for dtype in (torch.int64, torch.complex64):
        refused(partial(MODEL, embeddings=torch.ones(2, 3, 32, dtype=dtype)), "^embeddings is ")


def test_names_of_activations():
    refused(lambda: MODEL.record(5).__enter__(), "^name is 5; it must be a string")
    refused(lambda: MODEL.patch(5).__enter__(), "^patches is 5")
    refused(lambda: MODEL.attention_weights("a text", "gpt2"), "needs the model's tokenizer")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 8},
        {"compile": False},
        {"window": 16},
        {"use_cache": False},
        *if_installed("speculation", {"speculate": 2}),
    ],
    ids=str,
)
def test_a_generator_under_other_defaults(options):
    """torch.set_default_dtype() and torch.set_default_device() of the program around it change
    nothing."""
    params = SamplingParams(4, seed=1, repetition_penalty=1.2, logit_bias={3: -1.0})
    expected = Generator(MODEL, TOKENIZER, **options).generate(["abc", "de"], params)
    score = Generator(MODEL, TOKENIZER, **options).score("abc")
    for set_default, other, usual in (
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_device, "meta", None),
    ):
        set_default(other)
        try:
            generator = Generator(MODEL, TOKENIZER, **options)
            found, rescored = generator.generate(["abc", "de"], params), generator.score("abc")
        finally:
            set_default(usual)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert rescored == score


def test_a_model_in_double_precision_has_a_loss_in_it():
    model = random_model(1).double()
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(0))
    loss, _ = model(tokens, targets=tokens)
    assert loss.dtype == torch.float64
    expected = torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradient = torch.autograd.grad(loss, model.embedding.weight)[0]
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, model.embedding.weight)[0], rtol=1e-10, atol=1e-12
    )
