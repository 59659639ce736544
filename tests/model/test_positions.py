"""RoPE stretched beyond the length of the pretraining gives transformers' own angles and logits."""

import copy
import json
import math
from dataclasses import asdict

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.benchmarks.baselines import to_transformers
from thinker.model.positions import Rope, apply_rotary_emb
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import UserError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL = 32  # positions of the pretraining
LONG = {
    "type": "yarn",
    "original_max_seq_len": 8192,
}  # long enough that some pairs turn more than beta_fast times
YARN = {"type": "yarn", "original_max_seq_len": ORIGINAL}
LLAMA3 = {"type": "llama3", "original_max_seq_len": ORIGINAL}
# All but the factor.
SCALINGS = {
    "linear": {"type": "linear"},
    "dynamic": {"type": "dynamic", "original_max_seq_len": ORIGINAL},
    "yarn": YARN,
    "yarn-attention": YARN | {"attention_factor": 1.5},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-betas": YARN | {"beta_fast": 4, "beta_slow": 0.5},
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 3.0, "beta_slow": 0.25},
    "yarn-long": LONG,
    "yarn-untruncated-long": LONG | {"truncate": False},
    "llama3": LLAMA3,
    "llama3-factors": LLAMA3 | {"low_freq_factor": 0.25, "high_freq_factor": 2},
    "llama3-long": {"type": "llama3", "original_max_seq_len": 8192},
}
SHAPES = [(16, 1e4), (16, 5e5), (64, 1e4), (64, 5e5)]  # head width, theta

each_scaling = pytest.mark.parametrize("name", SCALINGS)
each_factor = pytest.mark.parametrize("factor", [2.0, 4, 8])


def scaled(name, factor):
    return RopeScaling.from_dict(SCALINGS[name] | {"factor": factor})


def their_parameters(values, theta):
    """The same in the words of transformers, which has defaults of its own for what is left out,
    but not for llama3."""
    words = {"type": "rope_type", "original_max_seq_len": "original_max_position_embeddings"}
    if values["type"] == "llama3":
        values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | values
    if values["type"] == "dynamic":  # it takes this from max_position_embeddings
        values = {name: value for name, value in values.items() if name != "original_max_seq_len"}
    return {"rope_theta": theta} | {words.get(name, name): value for name, value in values.items()}


def their_tables(values, head_dim, theta, length, step=1, exact=False):
    """cos and sin (length / step, D) of a fresh transformers' module; exact: its own code, but in
    double precision."""
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=values.get("original_max_seq_len", ORIGINAL),
        rope_parameters=their_parameters(values, theta),
    )
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch, "float32", torch.float64)
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        x = torch.zeros(1, dtype=torch.float64 if exact else torch.float32)
        cos, sin = module(x, torch.arange(0, length, step)[None])
    assert cos.dtype == x.dtype
    return cos[0], sin[0]


def our_tables(rope, length, step=1):
    """In their form: sin without the sign of apply_rotary_emb."""
    cos, sin = rope(torch.arange(0, length, step), length, torch.float32)
    return cos, torch.cat((-sin[:, : rope.head_dim // 2], sin[:, rope.head_dim // 2 :]), -1)


def close(ours, theirs, atol):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=atol)


def logits_of_transformers(model, values, tokens):
    """Of a fresh model with our weights: transformers' dynamic angles depend on the passes
    before."""
    other = to_transformers(model)
    config = copy.deepcopy(other.config)
    config.max_position_embeddings = values.get("original_max_seq_len", ORIGINAL)
    config.rope_parameters = their_parameters(values, model.config.rope_theta)
    fresh = type(other)(config).eval()
    fresh.load_state_dict(other.state_dict())
    with torch.no_grad():
        return fresh(tokens).logits


@each_scaling
@each_factor
@pytest.mark.parametrize(("head_dim", "theta"), SHAPES)
def test_tables_equal_those_of_transformers(name, factor, head_dim, theta):
    length, step = (20_000, 53) if name.endswith("long") else (3 * ORIGINAL, 1)
    values = SCALINGS[name] | {"factor": factor}
    ours = our_tables(Rope(head_dim, theta, scaled(name, factor)), length, step)
    close(ours, their_tables(values, head_dim, theta, length, step, exact=True), 1e-6)
    if (
        step == 1
    ):  # in fp32 as they have it, an angle of a hundred radians is off by a hundred roundings
        close(ours, their_tables(values, head_dim, theta, length), 1e-6 + 2**-23 * length)
    plain = our_tables(Rope(head_dim, theta), length, step)
    assert (ours[0] - plain[0]).abs().max() > 0.1  # there was something to compare


@pytest.mark.parametrize(
    ("head_dim", "theta", "original"),
    [(16, 50.0, 4096), (16, 1e4, 4), (2, 1e4, 64), (16, 20.0, 64)],
)
def test_yarn_at_the_edges(head_dim, theta, original):
    """A ramp that goes on beyond the last pair, one without width, one pair only, a ramp over all
    of them."""
    values = YARN | {"factor": 4.0, "original_max_seq_len": original}
    rope = Rope(head_dim, theta, RopeScaling.from_dict(values))
    length = 3 * original
    close(our_tables(rope, length), their_tables(values, head_dim, theta, length, exact=True), 1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_tables_without_scaling_equal_those_of_transformers(theta):
    close(
        our_tables(Rope(16, theta), 96),
        their_tables({"type": "default"}, 16, theta, 96, exact=True),
        1e-6,
    )


@pytest.mark.parametrize("name", [name for name in SCALINGS if not name.endswith("long")])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_logits_equal_those_of_transformers(random_model, name, qk_norm):
    values = SCALINGS[name] | {"factor": 4.0}
    model = random_model(d_model=64, max_seq_len=ORIGINAL, qk_norm=qk_norm, rope_theta=500.0)
    tokens = torch.randint(0, 61, (2, 3 * ORIGINAL))
    with torch.no_grad():
        plain = model(tokens)
        model.rope = Rope(model.config.head_dim, 500.0, scaled(name, 4.0))
        ours = model(tokens)
    torch.testing.assert_close(
        ours, logits_of_transformers(model, values, tokens), rtol=0, atol=1e-4
    )
    assert (ours - plain).abs().max() > 0.05


@pytest.mark.parametrize(
    "lengths", [(96, 32, 64), (20, 96, 95, 97, 96), (32, 33, 32, 64, 31)], ids=str
)
def test_dynamic_tables_are_never_those_of_another_length(random_model, lengths):
    values = SCALINGS["dynamic"] | {"factor": 2.0}
    model = random_model(d_model=64, max_seq_len=ORIGINAL, qk_norm=False)
    model.rope = Rope(16, 10000.0, scaled("dynamic", 2.0))
    for length in lengths:
        close(
            our_tables(model.rope, length), their_tables(values, 16, 1e4, length, exact=True), 1e-6
        )
        tokens = torch.randint(0, 61, (1, length))
        with torch.no_grad():
            ours = model(tokens)
        torch.testing.assert_close(
            ours, logits_of_transformers(model, values, tokens), rtol=0, atol=1e-4
        )


@each_scaling
def test_tables_grow_and_are_kept(name):
    rope, whole = Rope(16, 1e4, scaled(name, 4)), Rope(16, 1e4, scaled(name, 4))
    for end, held in (
        (5, 5),
        (7, 10),
        (31, 31),
        (20, 31),
    ):  # all within the original length; grown at least twofold
        at = torch.tensor([[0, end - 1, 2], [1, 3, end // 2]])
        cos, sin = rope(at, end, torch.bfloat16)
        assert len(rope.table[0]) == held
        assert cos.shape == sin.shape == (2, 1, 3, 16)
        assert cos.dtype == sin.dtype == torch.bfloat16
        for got, known in zip((cos, sin), whole(torch.arange(ORIGINAL), ORIGINAL, torch.bfloat16)):
            assert torch.equal(got[:, 0], known[at])
    table = rope.table
    rope(at, 20, torch.float32)
    assert rope.table is table
    assert list(rope.state_dict()) == list(rope.parameters()) == []


@pytest.mark.parametrize(
    "name", ["linear", "dynamic", "yarn", "yarn-betas", "yarn-mscale", "llama3"]
)
@pytest.mark.parametrize("head_dim", [2, 4, 16, 64])
def test_factor_one_is_no_scaling(name, head_dim):
    # Dynamic within the original length only: beyond, its base grows by (length / original) even
    # so.
    length = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    close(
        our_tables(Rope(head_dim, 1e4, scaled(name, 1)), length),
        our_tables(Rope(head_dim, 1e4), length),
        1e-6,
    )


def test_dynamic_changes_nothing_up_to_the_original_length_and_something_at_factor_one_beyond():
    for factor in (1, 8):
        rope = Rope(16, 1e4, scaled("dynamic", factor))
        for length in (1, ORIGINAL - 1, ORIGINAL):
            assert torch.equal(our_tables(rope, length)[0], our_tables(Rope(16, 1e4), length)[0])
        values = SCALINGS["dynamic"] | {"factor": factor}
        close(
            our_tables(rope, ORIGINAL + 1),
            their_tables(values, 16, 1e4, ORIGINAL + 1, exact=True),
            1e-6,
        )
        assert not torch.equal(
            our_tables(rope, 2 * ORIGINAL)[0], our_tables(Rope(16, 1e4), 2 * ORIGINAL)[0]
        )


@given(
    factor=st.integers(1, 9),
    theta=st.floats(10, 1e6),
    half=st.integers(1, 32),
    length=st.integers(33, 400),
)
@settings(max_examples=examples(50), deadline=None)
def test_what_the_kinds_mean(factor, theta, half, length):
    at, plain = torch.arange(0, 40 * factor, factor), Rope(2 * half, theta)
    linear = Rope(2 * half, theta, scaled("linear", factor))(at, len(at) * factor, torch.float32)
    close(
        linear, plain(torch.arange(40), 40, torch.float32), 1e-6
    )  # `factor` positions take the room of one
    # Dynamic leaves the fastest pair alone and makes of the slowest what interpolation would.
    dynamic, stretch = (
        Rope(2 * half, theta, scaled("dynamic", factor)),
        factor * length / ORIGINAL - factor + 1,
    )
    cos, known = our_tables(dynamic, length)[0], our_tables(plain, length)[0]
    close([cos[:, 0]], [known[:, 0]], 1e-6)
    if half > 1:
        slowest = torch.arange(length, dtype=torch.float64) * theta ** (1 / half - 1) / stretch
        close([cos[:, half - 1]], [slowest.cos()], 1e-6)


@each_scaling
@given(
    seed=st.integers(0, 1000),
    ends=st.lists(st.integers(0, 95), min_size=2, max_size=2),
    shift=st.integers(0, 95),
)
@settings(max_examples=examples(15), deadline=None)
def test_scores_depend_on_distance_alone(name, seed, ends, shift):
    rope, length = Rope(16, 1e4, scaled(name, 4)), 3 * ORIGINAL
    q, k = torch.randn(
        2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    shift = min(shift, length - 1 - max(ends))

    def score(*ends):
        turned = [
            apply_rotary_emb(x, rope(torch.tensor([at]), length, torch.float64))
            for x, at in zip((q, k), ends)
        ]
        return (turned[0] * turned[1]).sum()

    close([score(*ends)], [score(*(end + shift for end in ends))], 1e-5)
    close([score(shift, shift)], [(q * k).sum() * rope.attention_scaling**2], 1e-5)


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2, "mscale_all_dim": 0.5}, (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
    ],
)
def test_attention_scaling(more, known):
    rope = Rope(16, 1e4, RopeScaling.from_dict({**YARN, "factor": 8, **more}))
    assert rope.attention_scaling == pytest.approx(known)
    assert rope(torch.tensor([0]), 1, torch.float32)[0][0, 0].item() == pytest.approx(known)
    assert (
        Rope(16, 1e4).attention_scaling == Rope(16, 1e4, scaled("linear", 8)).attention_scaling == 1
    )


def test_a_cache_cannot_grow_under_dynamic_scaling():
    rope = Rope(16, 1e4, scaled("dynamic", 4))
    rope.check_growth(ORIGINAL)
    with pytest.raises(
        UserError,
        match=r"a cache .* original_max_seq_len = 32 positions, but got 33; use yarn or linear",
    ):
        rope.check_growth(ORIGINAL + 1)
    for other in (None, *(scaled(name, 4) for name in SCALINGS if name != "dynamic")):
        Rope(16, 1e4, other).check_growth(10**9)


@each_scaling
def test_dict_and_back(name):
    scaling = scaled(name, 4)
    assert RopeScaling.from_dict(json.loads(json.dumps(asdict(scaling)))) == scaling
    given = SCALINGS[name] | {"factor": 4}
    assert {key: asdict(scaling)[key] for key in given} == given
    assert RopeScaling(**given) == scaling


def test_defaults_are_put_in():
    yarn, llama3 = asdict(scaled("yarn", 2)), asdict(scaled("llama3", 2))
    assert (yarn["beta_fast"], yarn["beta_slow"], yarn["truncate"], yarn["low_freq_factor"]) == (
        32,
        1,
        True,
        None,
    )
    assert (llama3["low_freq_factor"], llama3["high_freq_factor"], llama3["beta_fast"]) == (
        1,
        4,
        None,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "model.rope_scaling is None; use a mapping"),
        ("yarn", "model.rope_scaling is 'yarn'; use a mapping"),
        ({}, "type is None; choose from: linear, dynamic, yarn, llama3"),
        ({"type": "yarm", "factor": 2}, "type is 'yarm'; choose from: .*did you mean yarn?"),
        ({"type": ["yarn"], "factor": 2}, r"type is \['yarn'\]; choose from: linear"),
        (
            {"type": "longrope", "factor": 2},
            "type is 'longrope'; choose from: linear, dynamic, yarn, llama3",
        ),
        ({"rope_type": "yarn"}, "unknown key 'rope_type'; did you mean type?"),
        (
            {**YARN, "factor": 2, "original_max_position_embeddings": 8},
            "did you mean original_max_seq_len?",
        ),
        ({"type": "linear", "factor": 2, 3: 4}, "model.rope_scaling has an unknown key 3"),
        ({"type": "linear"}, "factor is None; with type linear it must be a number from 1 to"),
        (
            {"type": "linear", "factor": True},
            "factor is True; with type linear it must be a number",
        ),
        ({"type": "linear", "factor": "2"}, "factor is '2'"),
        (
            {"type": "linear", "factor": 0.99},
            "factor is 0.99; with type linear it must be a number from 1 to",
        ),
        ({"type": "linear", "factor": math.nan}, "factor is nan"),
        ({"type": "linear", "factor": math.inf}, "factor is inf"),
        ({"type": "linear", "factor": 10**400}, "factor is 1000"),
        (
            {"type": "linear", "factor": 2, "original_max_seq_len": 8},
            "original_max_seq_len has no effect with type linear",
        ),
        (
            {"type": "dynamic", "factor": 2},
            "original_max_seq_len is None; with type dynamic .* an integer from 1 to",
        ),
        ({"type": "yarn", "factor": 2}, "original_max_seq_len is None; with type yarn"),
        ({"type": "llama3", "factor": 2}, "original_max_seq_len is None; with type llama3"),
        (
            {"type": "yarn", "factor": 2, "original_max_seq_len": 0},
            "original_max_seq_len is 0; .* from 1 to",
        ),
        (
            {"type": "yarn", "factor": 2, "original_max_seq_len": 8.0},
            "original_max_seq_len is 8.0; .*an integer",
        ),
        (
            {"type": "yarn", "factor": 2, "original_max_seq_len": True},
            "original_max_seq_len is True; .*an integer",
        ),
        (
            {"type": "linear", "factor": 2, "beta_fast": 32},
            "beta_fast has no effect with type linear; remove it",
        ),
        (
            {**SCALINGS["dynamic"], "factor": 2, "truncate": False},
            "truncate has no effect with type dynamic",
        ),
        (
            {**LLAMA3, "factor": 2, "attention_factor": 1.0},
            "attention_factor has no effect with type llama3",
        ),
        (
            {**YARN, "factor": 2, "low_freq_factor": 1},
            "low_freq_factor has no effect with type yarn",
        ),
        (
            {**YARN, "factor": 2, "truncate": 1},
            "truncate is 1; with type yarn it must be true or false",
        ),
        (
            {**YARN, "factor": 2, "beta_fast": False},
            "beta_fast is False; with type yarn it must be a number",
        ),
        (
            {**YARN, "factor": 2, "beta_slow": 0},
            "beta_slow is 0; with type yarn it must be a number from 1e-09 to",
        ),
        ({**YARN, "factor": 2, "attention_factor": -1.0}, "attention_factor is -1.0"),
        (
            {**YARN, "factor": 2, "beta_fast": 1},
            r"beta_fast is 1; it must be above beta_slow = 1.0",
        ),
        (
            {**LLAMA3, "factor": 2, "low_freq_factor": 4},
            r"high_freq_factor is 4.0; it must be above low_freq_factor",
        ),
        ({**YARN, "factor": 2, "mscale": 1.0}, "mscale and mscale_all_dim together"),
        ({**YARN, "factor": 2, "mscale_all_dim": 1.0}, "mscale and mscale_all_dim together"),
        (
            {**YARN, "factor": 2, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
            "or only attention_factor",
        ),
    ],
    ids=str,
)
def test_what_is_refused(values, message):
    with pytest.raises(UserError, match=message) as caught:
        RopeScaling.from_dict(values)
    assert str(caught.value).startswith("model.rope_scaling")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("theta", "original"), [(1.0, 32), (0.5, 32), (1e4, 1), (2.0, 10**8)])
def test_yarn_is_refused_where_no_pair_lies_between_its_betas(theta, original):
    scaling = RopeScaling("yarn", 4.0, original)
    with pytest.raises(UserError, match="model.rope_scaling of type yarn has no effect"):
        Rope(64, theta, scaling)
