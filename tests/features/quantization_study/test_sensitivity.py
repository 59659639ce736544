"""What few bits cost each part: against plain computations; the choice of bits; and the command
with its file."""

import json

import pytest
import torch
from conftest import ROOT, random_model, run_script
from installed import needs

from thinker.features.quantization_study import sensitivity
from thinker.features.quantization_study.sensitivity import Cost
from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.mixed_bits import check_bits, matrix_names
from thinker.interop import load
from thinker.native.quantization import quantize
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = ROOT / "scripts" / "sensitivity.py"


@pytest.fixture
def texts():
    tokens = torch.randint(61, (5, 13), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, texts):
    nats, counts = sensitivity.sequence_losses(model, *texts)
    return float(nats.sum() / counts.sum())


def test_one_bit_keeps_signs_and_means():
    weight = torch.randn(3, 40)
    rounded = sensitivity.round_weight(weight, 1)
    assert torch.equal(rounded < 0, weight < 0)
    for part in (slice(0, 32), slice(32, 40)):
        expected = weight[:, part].abs().mean(1, keepdim=True).expand(-1, rounded[:, part].shape[1])
        torch.testing.assert_close(rounded[:, part].abs(), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_a_matrix_costs_what_it_costs_when_sampling(texts, bits, tied):
    """The loss with one rounded matrix is that of a model prepared for inference with it, also if
    the head is tied."""
    model = random_model(tie_embeddings=tied)
    before = model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    plain, costs = sensitivity.measure(model, *texts, sensitivity.matrix_changes(model, (bits,)))
    assert plain == pytest.approx(loss(model, texts))
    assert [cost.name for cost in costs] == matrix_names(2)
    for name, cost in zip(matrix_names(2), costs):
        matrices = sensitivity.fused_matrices(model)[name]
        copy = fuse_for_inference(model)
        module = copy
        for part in name.split("."):
            module = getattr(
                module, part if part.isdigit() or hasattr(module, part) else f"{part}_proj"
            )
        whole = torch.cat([linear.weight for linear in matrices])
        module.weight = torch.nn.Parameter(quantize(whole, bits).dequantize())
        assert cost.loss == pytest.approx(loss(copy, texts) - plain, abs=1e-5)
        assert cost.low <= cost.loss <= cost.high
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@torch.no_grad()
def test_scores_of_rounded_queries_and_keys(texts):
    """By hand for one head; a head whose scores have many bits costs nothing."""
    model = random_model(n_heads=4, n_kv_heads=2, attn_logit_softcap=5.0)
    _, costs = sensitivity.measure(model, *texts, sensitivity.head_changes(model, (16, 8, 1)))
    costs = [cost for cost in costs if ".scores." in cost.name]
    assert len(costs) == 2 * 4 * 3
    by_bits = {bits: [abs(cost.loss) for cost in costs if cost.bits == bits] for bits in (16, 8, 1)}
    assert max(by_bits[16]) < 1e-4 < max(by_bits[8]) < max(by_bits[1])
    tokens = texts[0]
    with model.record(
        "blocks.1.attention.q", "blocks.1.attention.k", "blocks.1.attention.weights"
    ) as cache:
        with sensitivity.rounded_scores(model, 1, 3, 1):
            model(tokens)
        rounded = model.attention_weights(tokens)
    q, k = cache["blocks.1.attention.q"][:, 3], cache["blocks.1.attention.k"][:, 1]
    q, k = (x.sign() * x.abs().mean(-1, keepdim=True) for x in (q, k))
    scores = 5 * ((q @ k.mT * model.config.head_dim**-0.5) / 5).tanh()
    expected = scores.masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf).softmax(-1)
    with (
        sensitivity.rounded_scores(model, 1, 3, 1),
        model.record("blocks.1.attention.weights") as again,
    ):
        model(tokens)
    torch.testing.assert_close(again["blocks.1.attention.weights"][:, 3], expected)
    torch.testing.assert_close(again["blocks.1.attention.weights"][:, :3], rounded[1][:, :3])


@torch.no_grad()
def test_sums_of_rounded_weights_and_values(texts):
    model = random_model(n_heads=4, n_kv_heads=2)
    _, costs = sensitivity.measure(model, *texts, sensitivity.head_changes(model, (16, 8, 1)))
    by_bits = {
        bits: [abs(c.loss) for c in costs if c.bits == bits and ".sums." in c.name]
        for bits in (16, 8, 1)
    }
    assert len(by_bits[16]) == 2 * 4
    assert max(by_bits[16]) < 1e-4 < max(by_bits[8]) < max(by_bits[1])
    name = "blocks.1.attention"
    points = f"{name}.v", f"{name}.weights", f"{name}.heads.3"
    with sensitivity.rounded_sums(model, 1, 3, 8), model.record(*points) as cache:
        model(texts[0])
    v, weights, found = (
        cache[f"{name}.v"][:, 1],
        cache[f"{name}.weights"][:, 3],
        cache[f"{name}.heads.3"],
    )
    largest = v.abs().amax(-1)  # (B, S)
    for row, query in ((0, 0), (1, 5), (4, 11)):
        scaled = weights[row, query] * largest[row]
        levels = torch.tensor([round(float(255 * one / scaled.max())) for one in scaled])
        codes = (127 * v[row] / largest[row, :, None]).round()  # (S, D)
        expected = levels.float() @ codes * scaled.max() / 255 / 127
        known = weights[row, query] @ v[row]
        torch.testing.assert_close(found[row, query], expected, rtol=1e-4, atol=1e-5)
        assert 0 < (expected - known).norm() < 0.02 * known.norm()


@pytest.mark.parametrize(
    "form", [{"attention_sinks": True}, {"attention": "linear(8)"}, {"positions": "alibi"}]
)
def test_heads_without_plain_scores_are_refused(form):
    with pytest.raises(UserError, match="scores can be rounded only without"):
        sensitivity.head_changes(random_model(**form))


def test_bits_go_where_they_gain_most_per_byte():
    model = random_model(d_model=64, n_heads=4, n_kv_heads=4)
    names = matrix_names(2)
    costs = [Cost(name, bits, 0.0, None, None) for name in names for bits in (4, 8)]
    gains = {"blocks.0.attention.o": 1.0, "blocks.1.mlp.gate_up": 2.0, "lm_head": -1.0}
    costs = [
        Cost(c.name, c.bits, gains.get(c.name, 0.1) * (c.bits == 4), None, None) for c in costs
    ]
    with pytest.raises(
        UserError, match="--budget 4.4 is too small: 4 bits and the scales take 4.50 per weight"
    ):
        sensitivity.assign_bits(model, costs, 4.4)
    chosen = sensitivity.assign_bits(model, costs, 4.5)
    assert chosen == dict.fromkeys(names, 4)
    assert sensitivity.mean_bits(model, chosen) == 4.5
    chosen = sensitivity.assign_bits(model, costs, 4.7)
    assert (
        chosen["blocks.0.attention.o"] == 8
    )  # a quarter of the size of gate_up's, which no longer fits
    assert sensitivity.mean_bits(model, chosen) <= 4.7
    chosen = sensitivity.assign_bits(model, costs, 100)
    assert [name for name, bits in chosen.items() if bits == 4] == ["lm_head"]  # it loses by 8 bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head": 3}, "gives lm_head 3 bits; use 8 or 4"),
        ({"lm_head": True}, "gives lm_head True bits"),
        ({"blocks.7.mlp.down": 4}, "names blocks.7.mlp.down; use one that was made for this model"),
    ],
)
def test_an_assignment_for_another_model_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        check_bits(dict.fromkeys(matrix_names(2), 8) | change, 2)
    with pytest.raises(UserError, match="has no bits for lm_head"):
        check_bits(dict.fromkeys(matrix_names(2)[:-1], 8), 2)


@pytest.mark.parametrize("compile", [True, False])
def test_sampling_with_bits_by_matrix(tiny_run, compile):
    """Equal bits for all matrices are those bits; and other assignments change the logits of a
    matrix alone."""
    model, tokenizer = load(tiny_run)
    names, params = matrix_names(2), SamplingParams(max_new_tokens=8, seed=1)
    texts = {}
    for name, bits in {
        "4": 4,
        "all 4": dict.fromkeys(names, 4),
        "8": 8,
        "all 8": dict.fromkeys(names, 8),
    }.items():
        texts[name] = (
            Generator(model, tokenizer, bits=bits, compile=compile)
            .generate(["Line 1"], params)[0]
            .logprobs
        )
    assert texts["4"] == texts["all 4"]
    assert texts["8"] == texts["all 8"]
    mixed = dict.fromkeys(names, 4) | {"blocks.1.mlp.down": 8}
    generator = Generator(model, tokenizer, bits=mixed, compile=compile)
    assert generator.generate(["Line 1"], params)[0].logprobs not in texts.values()


@needs("speculation")
def test_mixed_bits_have_no_draft(tiny_run):
    model, tokenizer = load(tiny_run)
    mixed = dict.fromkeys(matrix_names(2), 4)
    with pytest.raises(UserError, match="cannot be combined with a draft"):
        Generator(model, tokenizer, bits=mixed, speculate=2, draft=model)


def test_the_command_and_its_file(tiny_run, tmp_path):
    out, png = tmp_path / "mixed.json", tmp_path / "map.png"
    done = run_script(SCRIPT, tiny_run, "--read-data", cwd=tmp_path)
    assert done.returncode == 2
    done = run_script(SCRIPT, tiny_run, "--texts", 4, "--budget", 5, "--out", out, "--png", png)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("loss: ")
    assert lines[-1] == f"wrote {out}; use it with --bits mixed:{out}"
    assert png.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())
    assert set(written["bits"]) == set(matrix_names(2))
    assert 4.5 <= written["bits_per_weight"] <= 5
    result = json.loads(run_script(SCRIPT, tiny_run, "--texts", 4, "--json").stdout)
    assert len(result["costs"]) == 3 * (len(matrix_names(2)) + 2 * 2 * 2)
    done = run_script(
        ROOT / "generate.py", tiny_run, "--prompt", "Line", "--bits", f"mixed:{out}", "--seed", 1
    )
    assert done.returncode == 0, done.stderr
    assert "4-bit weights, " in done.stderr
    score = tmp_path / "text.txt"
    score.write_text("Line 3: the cat")
    done = run_script(ROOT / "generate.py", tiny_run, "--score", score, "--bits", f"mixed:{out}")
    assert "with 4-bit weights, " in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "--bits is 5; use 8, 4 or mixed:FILE"),
        ("mixed:", "--bits is mixed:; use 8, 4 or mixed:FILE"),
        ("mixed:no.json", "no.json"),
    ],
)
def test_other_bits_are_one_line(tiny_run, text, message):
    done = run_script(ROOT / "generate.py", tiny_run, "--bits", text)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_rounded_scores_are_divided_too():
    model = random_model(attention_temperature=4.0, std=0.6)
    tokens = torch.randint(61, (4, 33))
    _, costs = sensitivity.measure(
        model, tokens[:, :-1], tokens[:, 1:], sensitivity.head_changes(model, bits=(8,))
    )
    assert max(abs(cost.loss) for cost in costs) < 0.01
