"""What a GPU would run compiles for an H200: training steps, decoding steps, int8 weights,
FlexAttention."""

import lowering
import pytest
import torch
from test_training_step import new_step
from torch._subclasses.fake_tensor import FakeTensorMode

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator
from thinker.generation.decoders import compiled_decoder as compiled_decode
from thinker.generation.decoders.quantized_linear import QuantizedLinear
from thinker.model import Thinker, ThinkerConfig
from thinker.model.kernels import flex_attention, linear_cross_entropy
from thinker.training.optim import muon

CUDA = torch.device("cuda:0")
OPTIONS = {"precision": "bf16", "optimizer": "muon", "attention": "full", "positions": "rope", "documents": False,
           "dropout": 0.0, "micro_batch_size": 2, "lora_rank": None, "checkpoint_every_n_blocks": None}  # fmt: skip
SHAPE = {
    "vocab_size": 512,
    "d_model": 256,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
}
PATTERNS = ["window(64)", "longformer(50, 4, 3)", "bigbird(50, 3, 64, 2, 1)", "token(3)", "prefix(300)",
            "heads(full, strided(3))"]  # fmt: skip


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """The programs that torch.compile has made."""
    found, compile_, backends = [], torch.compile, {}

    def compile(function, options=None, **arguments):
        backend = backends.setdefault(str(options), lowering.Lowering(found, options or {}))
        return compile_(function, backend=backend, **arguments)

    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield found
    for module in (flex_attention, linear_cross_entropy, muon):
        module._compiled.cache_clear()
    muon._compiled_momenta.cache_clear()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": 0.1, "precision": "fp32", "optimizer": "adamw"},
        {"documents": True, "optimizer": "adamw"},
    ],
    ids=str,
)
def test_a_training_step(programs, options):
    step, batch = new_step(CUDA, OPTIONS | options, compile=True, **SHAPE)
    step(batch, 1.0)
    blocks = [program for program in programs if program.n_products >= 4]
    assert [(program.is_backward, program.n_products) for program in blocks] == [
        (False, 7),
        (True, 14),
    ]
    assert all(program.kernels for program in programs)
    if options == {}:  # two norms, rotated queries, rotated keys, SwiGLU, the sum
        assert len(blocks[0].kernels) == 6


@pytest.mark.parametrize("bits", [None, 8])
def test_a_decoding_step(programs, bits, monkeypatch):
    monkeypatch.setattr(compiled_decode._Bucket, "_capture", lambda self: self._step())
    with CUDA:
        model = Thinker(ThinkerConfig(**SHAPE, max_seq_len=256))
    generator = Generator(
        model, make_tokenizer("byte", []), dtype=torch.bfloat16, compile=True, bits=bits
    )
    for rows in (1, 4):
        cache = generator.new_cache(rows, 128)
        generator.decoder.step(torch.zeros(rows, 1, dtype=torch.int64, device=CUDA), cache)
    single, several = programs
    assert (single.n_products == 0) == (bits is not None)
    assert several.n_products >= 2 * 4 + 1
    assert all(program.kernels for program in programs)


def test_a_row_of_int8_weights_is_one_kernel_that_reads_them(programs):
    with CUDA, torch.no_grad():
        torch.compile(QuantizedLinear(torch.empty(2304, 768), None, 8, native=False))(
            torch.empty(1, 1, 768, dtype=torch.bfloat16)
        )
    (program,) = programs
    assert (len(program.kernels), program.n_products) == (1, 0)
    assert program.n_bytes < 1.1 * 2304 * 768


@pytest.mark.parametrize(
    ("attention", "positions"),
    [("full", "alibi"), *((attention, "rope") for attention in PATTERNS)],
)
def test_flex_attention_forward_and_backward(programs, attention, positions):
    options = OPTIONS | {"attention": attention, "positions": positions, "optimizer": "adamw"}
    step, batch = new_step(CUDA, options, T=1024, **SHAPE)
    step(batch, 1.0)
    assert [program.is_backward for program in programs] == [False, True]
