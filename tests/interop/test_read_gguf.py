"""Reading GGUF files: every type to the bit, files of llama.cpp's quantizer, and hostile ones."""

import copy
import ctypes

import numpy as np
import pytest
import torch
from conftest import random_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.interop.find import find_model
from thinker.interop.gguf.gguf_file import TYPES, GgufFile
from thinker.interop.gguf.verify_gguf import round_inputs
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.runtime.errors import RunError, UserError

gguf = pytest.importorskip("gguf")
from gguf_files import REMOVE, rewrite  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BYTE = make_tokenizer("byte", [])
SIZES = {"vocab_size": BYTE.vocab_size, "d_model": 256, "d_ff": 512, "n_layers": 2}
# What llama.cpp quantizes to, and the types of its files' matrices.
QUANTIZED = {
    "F32": {"F32"},
    "F16": {"F16"},
    "BF16": {"BF16"},
    "Q8_0": {"Q8_0"},
    "Q5_1": {"Q5_1", "Q6_K"},
    "Q5_0": {"Q5_0", "Q6_K"},
    "Q4_1": {"Q4_1", "Q6_K"},
    "Q4_0": {"Q4_0", "Q6_K"},
    "Q6_K": {"Q6_K"},
    "Q5_K_M": {"Q5_K", "Q6_K"},
    "Q4_K_M": {"Q4_K", "Q6_K"},
}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A model with all matrices in blocks of 256, and its file in f32."""
    model = random_model(**SIZES)
    path = tmp_path_factory.mktemp("full") / "full.gguf"
    write_gguf(model, BYTE, path, "f32")
    return model, path


def random_blocks(kind, n_rows, n_columns, seed):
    """Rows of any bytes, but with f16 numbers of usual size."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    if kind.name == "F32":
        return values
    if kind.name == "F16":
        return values.astype(np.float16)
    if kind.name == "BF16":
        return gguf.quants.quantize(values, kind)
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_rows * n_columns // block, n_bytes), dtype=np.uint8)
    numbers = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind.name, 1)
    scales = rng.uniform(-0.01, 0.01, (len(blocks), numbers)).astype("<f2").view(np.uint8)
    start = n_bytes - 2 if kind.name == "Q6_K" else 0
    blocks[:, start : start + 2 * numbers] = scales
    return blocks.reshape(n_rows, -1)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_to_the_bit(tmp_path, full, name):
    """As gguf dequantizes it, whatever bytes there are."""
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, 512, 256, 0)
    tensors = {"blk.1.ffn_up.weight": (data, kind)}
    rewrite(full[1], tmp_path / "x.gguf", {}, tensors)
    wanted = gguf.quants.dequantize(data, kind).astype(np.float32)
    file = GgufFile(tmp_path / "x.gguf")
    assert np.array_equal(file.read("blk.1.ffn_up.weight").numpy(), wanted)
    model = load(tmp_path / "x.gguf")[0]
    assert np.array_equal(model.blocks[1].mlp.up_proj.weight.detach().numpy(), wanted)
    for key, tensor in model_tensors(full[0]).items():
        if key != "blocks.1.mlp.up_proj.weight":
            assert torch.equal(model_tensors(model)[key], tensor)


def test_reading_a_file_copies_it(tmp_path, full):
    rewrite(full[1], tmp_path / "x.gguf", {})
    model = load(tmp_path / "x.gguf")[0]
    (tmp_path / "x.gguf").write_bytes(b"")  # a map of the file would now crash
    assert torch.isfinite(model.embedding.weight).all()


def test_other_types_are_refused_with_a_list(tmp_path, full):
    kind = gguf.GGMLQuantizationType.Q2_K
    tensors = {"blk.1.ffn_up.weight": (np.zeros((512, 84), np.uint8), kind)}
    rewrite(full[1], tmp_path / "x.gguf", {}, tensors)
    with pytest.raises(UserError, match="ffn_up.weight is of type Q2_K; those that are read: F32"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_file_that_llama_cpp_quantized_gives_its_logits(tmp_path, full, dtype):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tmp_path / "quantized.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    name = "ALL_F32" if dtype == "F32" else f"MOSTLY_{dtype}"
    params.ftype = int(gguf.LlamaFileType[name])
    params.nthread = 1
    status = llama_cpp.llama_model_quantize(
        str(full[1]).encode(), str(path).encode(), ctypes.byref(params)
    )
    assert status == 0
    tensors = gguf.GGUFReader(path).tensors
    assert {t.tensor_type.name for t in tensors if len(t.shape) == 2} == QUANTIZED[dtype]
    model, tokenizer = load(path)
    for tensor in tensors:
        if tensor.name == "blk.0.ffn_down.weight":
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(model.blocks[0].mlp.down_proj.weight.detach().numpy(), wanted)
    llama = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False
    )
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(BYTE.vocab_size, (1, 64), generator=rng)
    llama.eval(tokens[0].tolist())
    theirs = torch.from_numpy(llama.scores[:64].copy())
    llama.close()
    with torch.no_grad():
        logits = model(tokens)[0]
        largest = (logits - theirs).abs().max()
        if dtype in ("F32", "BF16"):
            assert largest <= {"F32": 1e-5, "BF16": 2e-2}[dtype] * logits.abs().max()
        else:
            # llama.cpp rounds the inputs of layers, too, which changes so much:
            rounded = round_inputs(copy.deepcopy(model), dtype.lower())(tokens)[0]
            factor = 10 if dtype == "F16" else 3
            assert largest <= factor * (logits - rounded).abs().max()
    assert tokenizer.encode("Hello") == BYTE.encode("Hello")


def test_a_path_may_be_a_file_or_a_folder_with_one(tmp_path, full):
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "Some.GGUF"
    file.write_bytes(full[1].read_bytes())
    assert find_model(folder) == find_model(file) == file
    assert load(folder)[1].vocab_size == BYTE.vocab_size
    with pytest.raises(UserError, match="single model"):
        find_model(file, "best")
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="not a run directory"):
        find_model(folder)


ARCHITECTURE = "qwen3."
UINT32 = gguf.GGUFValueType.UINT32
UINT64 = gguf.GGUFValueType.UINT64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba'; those that are read: qwen3"),
        ({ARCHITECTURE + "block_count": REMOVE}, "its header has no num_hidden_layers"),
        ({ARCHITECTURE + "embedding_length": REMOVE}, "has no hidden_size"),
        ({ARCHITECTURE + "block_count": (10**6, UINT32)}, "fewer tensors than .* layers"),
        ({ARCHITECTURE + "block_count": (0, UINT32)}, "num_hidden_layers is 0"),
        ({ARCHITECTURE + "block_count": "two"}, "num_hidden_layers is 'two'"),
        ({ARCHITECTURE + "embedding_length": (10**6, UINT32)}, "is F32 .*; it must be"),
        ({ARCHITECTURE + "embedding_length": (2**40, UINT64)}, "d_model"),
        ({ARCHITECTURE + "attention.head_count": (0, UINT32)}, "num_attention_heads is 0"),
        ({ARCHITECTURE + "attention.key_length": (3, UINT32)}, "head dimension|value_length|differ"),
        ({ARCHITECTURE + "attention.value_length": (8, UINT32)}, "keys and values of different"),
        ({ARCHITECTURE + "rope.dimension_count": (2, UINT32)}, "it rotates 2 of 64 channels"),
        ({ARCHITECTURE + "rope.scaling.type": "yarn"}, "RoPE scaling is 'yarn'; none, linear"),
        ({ARCHITECTURE + "rope.scaling.type": "linear"}, "factor"),
        ({ARCHITECTURE + "attention.causal": False}, "causal is False; Thinker supports only True"),
        ({ARCHITECTURE + "expert_count": (8, UINT32)}, "expert_count is 8"),
        ({ARCHITECTURE + "attention.sliding_window": (8, UINT32)}, "sliding_window may change the output"),
        ({ARCHITECTURE + "attention.layer_norm_rms_epsilon": "x"}, "rms_norm_eps is 'x'"),
        ({ARCHITECTURE + "rope.freq_base": -1.0}, "rope_theta"),
        ({"tokenizer.ggml.tokens": REMOVE}, "it has no list of tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_headers_that_cannot_be_read_are_one_sentence(tmp_path, full, changes, message):
    rewrite(full[1], tmp_path / "x.gguf", changes)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "x.gguf") in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": REMOVE}, "has no tensor blk.1.ffn_up.weight"),
        ({"blk.1.extra.weight": np.zeros(3, np.float32)}, "unknown tensor blk.1.extra.weight"),
        ({"blk.1.ffn_up.weight": np.zeros((512, 255), np.float32)}, r"is F32 \[512, 255\]"),
        ({"blk.1.ffn_up.weight": np.full((512, 256), np.nan, np.float32)}, "non-finite"),
        ({"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32)}, "another way than Llama"),
        ({"rope_freqs.weight": np.ones(5, np.float32) * 2}, "another way than Llama"),
        ({"token_embd.weight": REMOVE}, "has no tensor token_embd.weight"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_one_sentence(tmp_path, full, tensors, message):
    rewrite(full[1], tmp_path / "x.gguf", {}, tensors)
    with pytest.raises((UserError, RunError), match=message) as caught:
        load(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_divisors_of_1_scale_nothing(tmp_path, full):
    rewrite(full[1], tmp_path / "x.gguf", {}, {"rope_freqs.weight": np.ones(32, np.float32)})
    assert load(tmp_path / "x.gguf")[0].config.rope_scaling is None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    model = random_model(vocab_size=BYTE.vocab_size, d_model=32, n_layers=1)
    write_gguf(model, BYTE, path, "f32")
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damaged_files_are_one_sentence(tmp_path, small, data):
    """Cut off anywhere, or with other bytes in the header: refused, or read as another model."""
    content = bytearray(small.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, 9000))
            n_bytes = data.draw(st.sampled_from([1, 4, 8]))
            value = data.draw(st.sampled_from([b"\0", b"\1", b"\x7f", b"\xff"]))
            content[place : place + n_bytes] = value * n_bytes
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    message = ""
    try:
        load(path)
    except (UserError, RunError) as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("place", [8, 16])  # the numbers of tensors and of keys
def test_made_up_lengths_take_no_time(tmp_path, small, place):
    content = bytearray(small.read_bytes())
    content[place : place + 8] = (2**62).to_bytes(8, "little")
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a GGUF file"):
        load(tmp_path / "x.gguf")


def test_a_long_list_is_refused_before_it_is_read(tmp_path, small):
    content = small.read_bytes()
    key = b"tokenizer.ggml.token_type"
    place = content.index(key) + len(key) + 8  # after the types of the value and of its items
    changed = content[:place] + (2**21).to_bytes(8, "little") + content[place + 8 :]
    (tmp_path / "x.gguf").write_bytes(changed + bytes(2**24))
    with pytest.raises(UserError, match="a list has 2097152 values"):
        load(tmp_path / "x.gguf")
