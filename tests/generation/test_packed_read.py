"""A packed read has the logits that the model has for each row alone, whatever is read together."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import examples, random_model
from pairwise import pairwise
from torch.nn import functional as F

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders import packed_read
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.packed_read import PROVED_READS, PackedReader, new_reader
from thinker.model import proof
from thinker.model.attention import Attention
from thinker.model.kernels.varlen_attention import VarlenRows
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {
    "n_kv_heads": [1, 2, 4],
    "qk_norm": [True, False],
    "attention_bias": [False, True],
    "positions": ["rope", "learned", "alibi", "relative", "sinusoidal", "none"],
    "attn_logit_softcap": [None, 5.0],
    "attention_sinks": [False, True],
    "head_dim": [8, 12],
    "attention": ["full", "window(4) | strided(5)", ["full", "heads(full, window(4))"]],
}
TOKENIZER = make_tokenizer("byte", [])
TOLERANCE = 1e-4
N_ROWS = 7
N_TOKENS = 40  # of each text


def make_model(**config):
    return random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=64, n_heads=4, **config)


def make_texts():
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(264, (N_ROWS, N_TOKENS), generator=numbers)


def check_drawn_reads(model, reader, numbers):
    """Read drawn pieces of drawn rows until the texts end; logits are those of a whole pass."""
    texts = make_texts()
    with torch.no_grad():
        known = model(texts)
    cache = reader.model.new_cache(N_ROWS, 64)
    n_read = [0] * N_ROWS
    while min(n_read) < N_TOKENS:
        rows = []
        for row in numbers.sample(range(N_ROWS), numbers.randint(1, N_ROWS)):
            n = min(numbers.choice([0, 1, 1, 5, 17]), N_TOKENS - n_read[row])
            rows += [row] * n
        if not rows:
            continue
        if numbers.random() < 0.3:
            numbers.shuffle(rows)  # tokens of a row need not be neighbors
        places = []
        for row in rows:
            places.append((row, n_read[row]))
            n_read[row] += 1
        wanted = numbers.sample(range(len(rows)), numbers.randint(0, len(rows)))
        if numbers.random() < 0.3:
            wanted = range(len(rows))
        found = reader.read(cache, rows, [int(texts[place]) for place in places], wanted)
        assert found.shape == (len(wanted), 264)
        assert cache.lengths == n_read
        if wanted:
            expected = torch.stack([known[places[at]] for at in wanted])
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=str)
def test_logits_are_those_of_the_model(case):
    model = make_model(**case)
    reader, problem = new_reader(fuse_for_inference(model))
    assert problem == ""
    for seed in range(examples(2)):
        check_drawn_reads(model, reader, random.Random(f"{case} {seed}"))


def test_tokens_may_be_on_the_device():
    model = make_model()
    reader = PackedReader(fuse_for_inference(model))
    texts = make_texts()
    with torch.no_grad():
        known = model(texts[:, :3])
    for rows in ([0, 6], [6, 0], [2, 3, 4], list(range(N_ROWS))):  # few and many of the rows
        cache = reader.model.new_cache(N_ROWS, 64)
        for at in range(3):
            found = reader.read(cache, rows, texts[rows, at], range(len(rows)))
            torch.testing.assert_close(found, known[rows, at], rtol=0, atol=TOLERANCE)


REFUSED = {
    "window(8)": {"attention": "window(8)"},
    "window(6)": {"attention": ["full", "window(6)"]},
    "linear": {"attention": "linear(16)"},
    "prefix": {"attention": "prefix(4)"},
    "topk": {"attention": "topk(4)"},
    "retrieve": {"attention": "retrieve(4, 2)"},
    "token shift": {"token_shift": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_know_is_named(name):
    reader, problem = new_reader(fuse_for_inference(make_model(**REFUSED[name])))
    assert reader is None
    assert problem.startswith("packed reads do not know")
    assert name in problem


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
def test_a_short_context_is_enough_for_the_proof(n):
    model = random_model(vocab_size=264, max_seq_len=n)
    assert new_reader(fuse_for_inference(model))[1] == ""


def test_an_edited_model_is_not_packed(monkeypatch):
    """One whose attention sees more than a mask can say, or fails on many rows."""
    plain = Attention.forward

    def edited(self, x, *rest):
        return plain(self, x, *rest) + x.mean(1, keepdim=True)  # over the tokens of the pass

    monkeypatch.setattr(Attention, "forward", edited)
    model = make_model()
    assert "something else" in new_reader(fuse_for_inference(model))[1]

    def failing(self, x, rope, mask, *rest):
        assert mask.kernel != "cache", "no such kernel"
        return plain(self, x, rope, mask, *rest)

    monkeypatch.setattr(Attention, "forward", failing)
    assert new_reader(fuse_for_inference(model))[1] == "packed reads failed: no such kernel"


def test_activations_are_not_recorded():
    reader = PackedReader(fuse_for_inference(make_model()))
    cache = reader.model.new_cache(1, 8)
    with (
        reader.model.record("blocks.0.attention.weights"),
        pytest.raises(UserError, match="recorded"),
    ):
        reader.read(cache, [0], [1], [0])
    assert cache.lengths == [0]


def test_prompts_of_unequal_lengths_are_read_apart_while_hooks_are_open():
    generator = Generator(make_model(), TOKENIZER, compile=False)
    generator.decoder.packs_rows = True
    params = SamplingParams(1, temperature=0)
    known = generator.generate(["abc", "de"], params)
    with generator.model.record("blocks.0.attention.weights") as recorded:
        found = generator.generate(["abc", "de"], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in known]
    assert len(recorded) > 0


def test_no_pass_over_prompts_is_small():
    """One token by itself would be a step of decoding, which is compiled and captured."""
    generator = Generator(make_model(), TOKENIZER, compile=False)
    decoder = generator.decoder
    decoder.packs_rows = True
    decoder.tokens_per_step = 8
    sizes = []
    plain = decoder.read

    def read(cache, rows, tokens, wanted):
        sizes.append(len(tokens))
        return plain(cache, rows, tokens, wanted)

    decoder.read = read
    generator.generate(["abc", "defg"], SamplingParams(1))
    assert sizes == [5, 4]  # each prompt begins with a token of its own


@pytest.fixture
def tf32():
    """torch's options of products on a GPU."""
    options = torch.backends.cuda.matmul
    before = options.allow_tf32
    yield options
    options.allow_tf32 = before


@pytest.mark.parametrize("is_allowed", [False, True])
def test_the_proof_allows_for_tf32_where_products_use_it(tf32, is_allowed):
    """Where factors have the 10 bits of a GPU's tensor cores."""
    model = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    tf32.allow_tf32 = is_allowed
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=numbers)
    w = torch.randn(256, 256, generator=numbers)
    rounded = [(each.view(torch.int32) + (1 << 12)) & ~0x1FFF for each in (x, w)]
    found = rounded[0].view(torch.float32) @ rounded[1].view(torch.float32)
    assert proof.has_near_logits(model, found, x @ w) == is_allowed
    assert not proof.has_near_logits(model, 1.02 * (x @ w), x @ w)


def logits_after_noise(model):
    """The logits after a token that follows 200 random keys, (1, 1, V)."""
    cache = model.new_cache(1, 201)
    noise = proof.Noise()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.copy_(noise(tensor.shape).bfloat16())
    cache.lengths = cache.high_water = cache.high_water_before = [200]
    with torch.no_grad():
        return model(torch.tensor([[512]]), cache=cache)


@pytest.mark.parametrize("edit", [None, 0.5, 2.0])
def test_the_proof_allows_for_the_rounding_of_many_layers_in_bf16(edit):
    """A residual stream in fp32, as the fused kernels have it, beside one in bf16; and an edit."""
    shape = {"d_model": 256, "n_heads": 4, "n_kv_heads": 4, "head_dim": 64, "d_ff": 512}
    shape |= {"vocab_size": 1024, "max_seq_len": 256, "tie_embeddings": False}
    model = random_model(0, n_layers=24, **shape)
    proof.randomize(model, proof.Noise())
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    narrow = fuse_for_inference(model, torch.bfloat16)
    known = logits_after_noise(narrow)
    if edit is not None:
        model.norm.weight.data[:128] *= edit
    found = logits_after_noise(model)
    error = (found - known.float()).abs().max() / known.float().abs().max()
    assert error > 0.03
    assert proof.has_near_logits(narrow, found, known) == (edit is None)


def loops_of_varlen(query, key, value, query_starts, key_starts, max_q, max_k, **options):
    """torch's variable-length attention with the mask of SDPA's lower-right alignment."""
    assert options["window_size"] == (-1, 0)
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert (len(query), len(key)) == (query_starts[-1], key_starts[-1])
    assert max_q >= query_starts.diff().max()
    assert max_k >= key_starts.diff().max()
    parts = []
    for row in range(len(query_starts) - 1):
        q = query[query_starts[row] : query_starts[row + 1]].transpose(0, 1)  # (H, T, D)
        k, v = (x[key_starts[row] : key_starts[row + 1]].transpose(0, 1) for x in (key, value))
        T, S = q.shape[1], k.shape[1]
        allowed = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        y = F.scaled_dot_product_attention(
            q, k, v, allowed, scale=options["scale"], enable_gqa=options.get("enable_gqa", False)
        )
        parts.append(y.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("has_gqa", [False, True])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_pieces_are_handed_to_the_variable_length_kernel(monkeypatch, has_gqa, head_dim):
    calls = []

    def stand_in(*tensors, **options):
        calls.append(tensors)
        return loops_of_varlen(*tensors, **options)

    def init(self, max_distance):
        self.window = (-1, 0)
        self.varlen_attn, self.has_gqa = stand_in, has_gqa

    monkeypatch.setattr(VarlenRows, "__init__", init)
    monkeypatch.setattr(packed_read, "_has_varlen", lambda *model: True)
    model = make_model(n_kv_heads=2, head_dim=head_dim)
    check_drawn_reads(model, PackedReader(fuse_for_inference(model)), random.Random(1))
    assert calls


@pytest.mark.parametrize(
    ("config", "dtype", "capability", "expected"),
    [
        ({}, torch.bfloat16, (9, 0), True),
        ({}, torch.float16, (8, 0), True),
        ({}, torch.float16, (7, 5), False),
        ({}, torch.float32, (9, 0), False),
        ({"positions": "alibi"}, torch.bfloat16, (9, 0), False),
        ({"attn_logit_softcap": 5.0}, torch.bfloat16, (9, 0), False),
        ({"attention_sinks": True}, torch.bfloat16, (9, 0), False),
        ({"attention": "strided(5)"}, torch.bfloat16, (9, 0), False),
    ],
    ids=str,
)
def test_the_kernel_is_used_where_it_is_exact(monkeypatch, config, dtype, capability, expected):
    model = fuse_for_inference(make_model(**config), dtype)
    masks = PackedReader(model).masks
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_read._has_varlen(model, masks) is expected


@pytest.mark.parametrize("n_per_pass", [5, 2048])
def test_prompts_of_unequal_lengths_are_read_together(monkeypatch, n_per_pass):
    model = make_model()
    plain, packed = (Generator(model, TOKENIZER, compile=False) for _ in range(2))
    packed.decoder.packs_rows = True  # as on a GPU
    packed.decoder.tokens_per_step = n_per_pass
    passes = []
    read = PackedReader.read
    monkeypatch.setattr(
        PackedReader, "read", lambda *given: passes.append(len(given[3])) or read(*given)
    )
    prompts = ["abc", "de", "abc", "fghi"]
    params = SamplingParams(6, seed=1)
    known = plain.generate(prompts, params)
    passes.clear()
    found = packed.generate(prompts, params)
    n_tokens = sum(len(packed.encode(prompt)) for prompt in set(prompts))
    proof = [sum(n for _, n in reads) for reads in PROVED_READS]
    assert sum(passes) == n_tokens + sum(proof)
    assert max(passes[len(proof) :]) <= n_per_pass
    for ours, theirs in zip(found, known, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
