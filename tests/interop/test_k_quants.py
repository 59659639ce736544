"""K-quants: as accurate as those of llama.cpp, in the same matrices, and computed alike there."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, random_model
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.text.tales import generate_story
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.gguf.gguf_quantization import describe_fallbacks, stored_dtype
from thinker.interop.gguf.k_quants import quantize_k
from thinker.interop.gguf.verify_gguf import verify_gguf
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.runtime.errors import RunError

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_thread")

K_DTYPES = ("q4_k_m", "q5_k_m", "q6_k")
BYTE = make_tokenizer("byte", [])
# A type of gguf's own quantizer that has at least as many bits, without a search.
COARSER = {"q4_k": "q4_1", "q5_k": "q5_1", "q6_k": "q8_0"}
RATIO = {"q4_k": 1.0, "q5_k": 1.0, "q6_k": 4.2}  # of errors: q8_0 has four times as many levels


def dequantize(data, dtype):
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype.upper()])


def rms(restored, values):
    return float(np.sqrt(np.square(restored - np.asarray(values)).mean()))


def samples(kind, seed, shape=(16, 512)):
    torch.manual_seed(seed)
    if kind == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample(shape)
    if kind == "heavy":
        return torch.distributions.StudentT(4.0).sample(shape)
    return torch.randn(shape) + {"normal": 0.0, "shifted": 2.0}[kind]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "laplace", "heavy", "shifted"]),
    st.sampled_from(list(COARSER)),
    st.floats(-3, 3),
)
def test_errors_are_below_those_of_a_type_with_more_bits(seed, kind, dtype, exponent):
    values = samples(kind, seed) * 10**exponent
    coarser = COARSER[dtype]
    data = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[coarser.upper()])
    ours = rms(dequantize(quantize_k(values, dtype), dtype), values)
    assert ours <= RATIO[dtype] * rms(dequantize(data, coarser), values)


@pytest.mark.parametrize("dtype", list(COARSER))
def test_special_blocks(dtype):
    values = torch.zeros(6, 256)
    values[1] = 3.0
    values[2] = -3.0
    values[3, 7] = 1.0
    values[4, ::2] = -1e-7  # below the smallest f16 scale of a level
    values[5] = torch.linspace(-1, 1, 256)
    restored = dequantize(quantize_k(values, dtype), dtype)
    assert np.isfinite(restored).all()
    assert not restored[0].any()
    error = np.abs(restored - values.numpy()).max(1)
    assert (error <= [0, 0.05, 0.05, 0.01, 1.3e-7, 0.05]).all()
    # Blocks and rows do not depend on each other.
    shuffled = quantize_k(values.flip(0), dtype)
    assert np.array_equal(shuffled[::-1], quantize_k(values, dtype))


@pytest.mark.parametrize("dtype", list(COARSER))
def test_numbers_beyond_f16_are_not_finite(dtype):
    values = torch.ones(1, 256) * 1e9
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(dequantize(quantize_k(values, dtype), dtype)).all()


def test_sensitive_matrices_have_more_bits():
    """By hand from llama.cpp's rule for 16 layers: 0, 1, 14, 15 and every third of the others."""
    config = random_model(n_layers=16).config
    square = torch.empty(256, 256)

    def layers_with(part, dtype):
        found = []
        for layer in range(16):
            name = f"blocks.{layer}.{part}.weight"
            if stored_dtype(name, square, dtype, config) == "q6_k":
                found.append(layer)
        return found

    chosen = [0, 1, 4, 7, 10, 13, 14, 15]
    assert layers_with("attention.v_proj", "q4_k_m") == chosen
    assert layers_with("mlp.down_proj", "q5_k_m") == chosen
    assert layers_with("mlp.up_proj", "q4_k_m") == []
    assert stored_dtype("lm_head.weight", square, "q4_k_m", config) == "q6_k"
    assert stored_dtype("embedding.weight", square, "q4_k_m", config) == "q4_k"
    tied = random_model(n_layers=2, tie_embeddings=True).config
    assert stored_dtype("embedding.weight", square, "q4_k_m", tied) == "q6_k"


def test_fallbacks_are_described():
    model = random_model(d_model=256, d_ff=320, n_layers=2)
    assert describe_fallbacks(model, "q8_0") is None
    described = describe_fallbacks(model, "q4_k_m")
    assert described == "matrices whose rows do not divide into blocks of 256: 1 in q5_0, 1 in q8_0"
    narrow = random_model(d_model=64, d_ff=80, n_layers=1)
    assert "of 32: 1 in f16" in describe_fallbacks(narrow, "q4_0")


SHAPES = {
    "wide": {"n_layers": 2, "d_ff": 512},
    "fallback": {"n_layers": 9, "d_ff": 320},
    "odd": {"n_layers": 3, "d_ff": 272},
    "tied": {"n_layers": 17, "d_ff": 256, "tie_embeddings": True, "qk_norm": False},
}


def quantize_with_llama_cpp(llama_cpp, source, target, dtype):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"])
    params.nthread = 1
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    assert status == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", K_DTYPES)
def test_types_and_errors_are_those_of_llama_cpp(tmp_path, shape, dtype):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = random_model(vocab_size=BYTE.vocab_size, d_model=256, **SHAPES[shape])
    full, ours, theirs = (tmp_path / f"{name}.gguf" for name in ("full", "ours", "theirs"))
    write_gguf(model, BYTE, full, "f32")
    write_gguf(model, BYTE, ours, dtype)
    quantize_with_llama_cpp(llama_cpp, full, theirs, dtype)
    values = {tensor.name: tensor.data for tensor in gguf.GGUFReader(full).tensors}
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(theirs).tensors}
    for tensor in gguf.GGUFReader(ours).tensors:
        other = expected[tensor.name]
        assert tensor.tensor_type == other.tensor_type, tensor.name
        error = rms(gguf.quants.dequantize(tensor.data, tensor.tensor_type), values[tensor.name])
        theirs_error = rms(
            gguf.quants.dequantize(other.data, other.tensor_type), values[tensor.name]
        )
        assert error <= 1.03 * theirs_error, tensor.name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", K_DTYPES)
def test_llama_cpp_has_the_logits_of_the_same_weights_and_only_those(tmp_path, shape, dtype):
    pytest.importorskip("llama_cpp")
    path = tmp_path / "model.gguf"
    arguments = {"vocab_size": BYTE.vocab_size, "d_model": 256, **SHAPES[shape]}
    model = random_model(**arguments)
    write_gguf(model, BYTE, path, dtype)
    assert "of those of the same weights" in verify_gguf(model, BYTE, path, dtype, n_texts=10)
    with torch.no_grad():
        model.blocks[1].attention.v_proj.weight.mul_(2)
    with pytest.raises(RunError, match="logits from llama.cpp differ"):
        verify_gguf(model, BYTE, path, dtype, n_texts=10)


@pytest.mark.stress
def test_the_loss_is_near_that_of_llama_cpp_s_own_quantizer(tmp_path):
    """A model that tells stories, on stories of another seed, without an importance matrix."""
    llama_cpp = pytest.importorskip("llama_cpp")
    run = tmp_path / "run"
    changes = ["model.d_model=256", "model.n_heads=8", "train.max_minutes=10"]
    command = [sys.executable, ROOT / "train.py", ROOT / "configs/quickstart.yaml"]
    subprocess.run([*command, f"run.dir={run}", *changes], check=True)
    model, tokenizer = load(run)
    full, theirs = tmp_path / "full.gguf", tmp_path / "theirs.gguf"
    write_gguf(model, tokenizer, full, "f32")

    def loss(path):
        loaded = load(path)[0]
        total = count = 0.0
        for index in range(60):
            ids = [tokenizer.bos_id, *tokenizer.encode(generate_story(987654, index).text)]
            tokens = torch.tensor([ids[:177]])
            with torch.no_grad():
                nats, n_targets = loaded(tokens[:, :-1], targets=tokens[:, 1:])
            total += float(nats)
            count += float(n_targets)
        return total / count

    for dtype in K_DTYPES:
        write_gguf(model, tokenizer, tmp_path / f"{dtype}.gguf", dtype)
        quantize_with_llama_cpp(llama_cpp, full, theirs, dtype)
        assert loss(tmp_path / f"{dtype}.gguf") <= 1.02 * loss(theirs)
        assert loss(tmp_path / f"{dtype}.gguf") <= 1.02 * loss(full)
