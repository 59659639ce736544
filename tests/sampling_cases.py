"""Models, parameters and prompts that tests of sampling share."""

import math

import pytest
from conftest import random_model
from hypothesis import strategies as st

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import SamplingParams

TOKENIZER = make_tokenizer("byte", [])
EOS = TOKENIZER.eos_id
NO_EOS = {EOS: -math.inf}

# The same examples every time: a pass over several positions differs from one over a single
# position in its last bits, and one draw in a million stands so near to a border that it could fall
# on either side.
SAME_EXAMPLES = {"derandomize": True, "deadline": None}


def small_model(seed=0, **shape):
    """Random weights, every one of which matters."""
    small = {
        "vocab_size": 264,
        "d_model": 16,
        "n_layers": 1,
        "n_heads": 2,
        "d_ff": 16,
        "max_seq_len": 48,
    }
    return random_model(seed, 0.3, 0.4, **{"n_kv_heads": None, **small, **shape})


def few(letters, **more):
    """A logit bias that leaves these tokens only: a text of so few soon repeats itself, and drafts
    are accepted."""
    return {**dict.fromkeys(letters, 60.0), **more}


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, None, 2, 5]),
    top_p=st.sampled_from([None, None, 0.6, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.3]),
    logit_bias=st.sampled_from([(), few(b"ab"), few(b"abc"), few([97, 98]) | {EOS: 59.0}]),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([(), (), ("abb",), ("cc", "baab")]),
)
SHAPES = [
    {},
    {"n_heads": 4, "n_kv_heads": 2, "n_layers": 2},
    {
        "n_heads": 4,
        "n_kv_heads": 1,
        "max_seq_len": 20,
    },  # where the context ends before max_new_tokens
    {"qk_norm": False, "tie_embeddings": True},
]
PROMPTS = st.lists(st.text("abc", max_size=16), min_size=1, max_size=3)


def assert_same(plain, speculated):
    for a, b in zip(plain, speculated, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert (a.drafted, a.accepted) == (0, 0)
        assert 0 <= b.accepted <= b.drafted
