"""Early exit: all layers give the same bits, an exit gives a layer's distribution, and rows are
independent."""

import math

import pytest
import torch
from conftest import random_model
from installed import if_installed
from pairwise import pairwise

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.early_exit.agreement import early_exit_cost, format_table
from thinker.features.early_exit.decoder import EarlyExitDecoder
from thinker.generation import Generator, SamplingParams
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.generation.chat.conversation import Conversation
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
NEVER = 1 - 1e-9
CASES = pairwise({
    "dtype": ["fp32", "bf16"],
    "bits": [None, 8, 4],
    "form": [{}, {"attention": "window(4)"}, {"attention": "topk(4)"}, {"positions": "alibi"},
             {"attention": "token(3)"}, {"attn_logit_softcap": 2.0, "attention_sinks": True},
             {"attention": "prefix(2)", "no_rope_layers": [1]}, {"positions": "learned"}, {"token_shift": True},
             {"value_embeddings": True, "bigram_rows": 23},
             {"positions": "sinusoidal"}, {"block": "parallel", "norm": "layernorm", "mlp_bias": True},
             {"block": "both_norms", "logit_softcap": 3.0, "window_rope_theta": 100.0, "attention": ["window(4)", "full"]}],
    "qk_norm": [True, False],
    "n_kv_heads": [4, 2, 1],
    "memory": [{}, {"slide": True}],
    "prompts": [["abcabc"], ["abcabc", "xyz", "abcabc"]],
    "sampling": [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"regex": "[a-z ]+", "temperature": 1.0}],
})  # fmt: skip


def make_model(std=0.3, n_layers=4, max_seq_len=32, **options):
    """A model with exits at every layer for a threshold of about 0.5: its layers predict with some
    confidence."""
    return random_model(
        vocab_size=TOKENIZER.vocab_size,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        std=std,
        **options,
    )


def confident(**options):
    return make_model(std=0.6, n_layers=5, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_an_exit_every_bit_is_that_of_torch(case):
    model = make_model(
        max_seq_len=16, qk_norm=case["qk_norm"], n_kv_heads=case["n_kv_heads"], **case["form"]
    )
    how = {"dtype": case["dtype"], "bits": case["bits"], **case["memory"]}
    params = SamplingParams(
        18, seed=2, logprobs=2, logit_bias={TOKENIZER.bos_id: -math.inf}, **case["sampling"]
    )
    plain = Generator(model, TOKENIZER, compile=False, **how)
    exits = Generator(model, TOKENIZER, early_exit=NEVER, **how)
    for one, other in zip(
        plain.generate(case["prompts"], params), exits.generate(case["prompts"], params)
    ):
        assert vars(one) == vars(other)
    assert exits.decoder.mean_layers == 4


@torch.no_grad()
def by_hand(model, tokens, threshold):
    """Logits (V,) and layers of each token (T,): in float64, one text, keys and values of each
    layer in lists."""
    model, results = model.double(), []
    config, keys, values = model.config, [[] for _ in model.blocks], [[] for _ in model.blocks]
    for position, token in enumerate(tokens):
        rope = model.rope(torch.tensor([position]), position + 1, torch.float64)
        x, logits, used = model.embedding(torch.tensor([[token]])), None, 0
        for layer, block in enumerate(model.blocks):
            q, k, v = block.attention.project(block.attention_norm(x), rope)  # (1, H or K, 1, D)
            keys[layer].append(k.repeat_interleave(config.n_heads // config.n_kv_heads, dim=1))
            values[layer].append(v.repeat_interleave(config.n_heads // config.n_kv_heads, dim=1))
            if used:
                continue
            scores = q @ torch.cat(keys[layer], dim=2).mT / config.head_dim**0.5
            y = scores.softmax(-1) @ torch.cat(values[layer], dim=2)
            x = x + block.attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
            logits = model.lm_head(model.norm(x))[0, 0]
            if logits.softmax(-1).max() >= threshold or layer == len(model.blocks) - 1:
                used = layer + 1
        results.append((logits, used))
    return results


@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_logits_and_cache_are_those_of_the_definition(n_kv_heads):
    model, tokens = confident(n_kv_heads=n_kv_heads).double(), torch.randint(256, (16,))
    early, cache, found = EarlyExitDecoder(model, 0.5), model.new_cache(1, 16), []
    for token in tokens:
        logits = early.step(token[None, None], cache)
        found.append((logits[0, 0], int(early.layers_used)))
    known = by_hand(model, tokens.tolist(), 0.5)
    assert len({used for _, used in known}) > 1
    assert [used for _, used in found] == [used for _, used in known]
    torch.testing.assert_close(
        torch.stack([x for x, _ in found]), torch.stack([x for x, _ in known])
    )
    assert early.mean_layers == sum(used for _, used in known) / 16


@pytest.mark.parametrize(
    "form",
    [{}, {"positions": "alibi", "n_kv_heads": 1}, {"attention": ["window(4)", "full"]}],
    ids=str,
)
def test_rows_do_not_depend_on_their_neighbours(form):
    model = confident(**form).double()
    tokens, threshold = torch.randint(256, (5, 12)), 0.5
    together, cache = EarlyExitDecoder(model, threshold), model.new_cache(5, 12)
    batch, layers = [], []
    for position in range(12):
        batch.append(together.step(tokens[:, position : position + 1], cache))
        layers.append(together.layers_used)
    assert any(len(set(used.tolist())) > 1 for used in layers)
    for row in range(5):
        alone, own_cache = EarlyExitDecoder(model, threshold), model.new_cache(1, 12)
        for position in range(12):
            logits = alone.step(tokens[row : row + 1, position : position + 1], own_cache)
            torch.testing.assert_close(logits[0], batch[position][row])
            assert int(alone.layers_used) == layers[position][row]


def test_texts_of_a_batch_equal_those_alone():
    generator = Generator(confident(), TOKENIZER, early_exit=0.6)
    prompts = ["abc", "the cat", "x", "abc"]
    params = [SamplingParams(20, temperature=0.8, seed=seed) for seed in range(4)]
    together = generator.generate(prompts, params)
    mean = generator.decoder.mean_layers
    assert 1 < mean < 5
    for prompt, one, found in zip(prompts, params, together):
        alone = Generator(confident(), TOKENIZER, early_exit=0.6).generate(prompt, one)[0]
        assert alone.token_ids == found.token_ids
    full = Generator(confident(), TOKENIZER, compile=False).generate(prompts, params)
    assert [one.token_ids for one in full] != [one.token_ids for one in together]


def test_a_lower_threshold_uses_no_more_layers():
    model, tokens = confident(), torch.randint(256, (1, 12))
    used = []
    for threshold in (0.01, 0.2, 0.4, 0.6, 0.8, 0.95, NEVER):
        cache = model.new_cache(1)
        model(tokens[:, :-1], cache=cache)  # the same full cache for each
        early = EarlyExitDecoder(model, threshold)
        early.step(tokens[:, -1:], cache)
        used.append(int(early.layers_used))
    assert used == sorted(used)
    costs = [
        early_exit_cost(model, *texts(), threshold) for threshold in (0.01, 0.3, 0.6, 0.9, NEVER)
    ]
    assert [cost.mean_layers for cost in costs] == sorted(cost.mean_layers for cost in costs)
    assert costs[0].mean_layers == 1
    assert costs[-1].mean_layers == 5


def texts(n=3, length=16):
    tokens = torch.randint(256, (n, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 4:] = -1
    return tokens[:, :-1], targets


def test_the_cost_is_that_of_the_two_distributions():
    model, (tokens, targets) = confident().double(), texts()
    cost, sums, n = early_exit_cost(model, tokens, targets, 0.5), torch.zeros(5).double(), 0
    with torch.no_grad():
        full = model(tokens).log_softmax(-1)
    for row in range(len(tokens)):
        for position, (logits, used) in enumerate(by_hand(model, tokens[row].tolist(), 0.5)):
            target, p, q = targets[row, position], full[row, position], logits.log_softmax(-1)
            if target >= 0:
                values = [
                    used,
                    -p[target],
                    -q[target],
                    (p.exp() * (p - q)).sum(),
                    float(p.argmax() != q.argmax()),
                ]
                sums, n = sums + torch.tensor(values).double(), n + 1
    assert cost.n_tokens == n == 36
    found = [cost.mean_layers, cost.loss, cost.early_loss, cost.kl, cost.changed]
    assert found == pytest.approx((sums / n).tolist(), abs=1e-5)
    assert cost.layer_share == pytest.approx(cost.mean_layers / 5)
    assert cost.kl > 0
    same = early_exit_cost(model, tokens, targets, NEVER)
    assert (same.mean_layers, same.kl, same.changed) == (5, pytest.approx(0, abs=1e-9), 0)
    assert len(format_table([cost, same]).splitlines()) == 4


def test_conversations_continue_with_a_complete_cache():
    generator = Generator(confident(), TOKENIZER, early_exit=0.5)
    conversation, params = (
        Conversation(generator),
        SamplingParams(4, seed=1, logit_bias={TOKENIZER.bos_id: -math.inf}),
    )
    for _ in range(2):
        assert "".join(conversation.reply("ab", params))
    assert conversation.undo()
    assert "".join(conversation.reply("ab", params))


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ({}, {"early_exit": 0.0}, "use a probability above 0 and below 1"),
        ({}, {"early_exit": 1}, "use a probability above 0 and below 1"),
        ({}, {"early_exit": math.nan}, "use a probability above 0 and below 1"),
        ({}, {"window": 8}, "early_exit cannot be combined with window"),
        *if_installed(
            "speculation", ({}, {"speculate": 2}, "early_exit cannot be combined with speculate")
        ),
        ({}, {"compile": True}, "early_exit cannot be combined with compile"),
        ({}, {"use_cache": False}, "early_exit needs the KV cache"),
        ({"n_layers": 1}, {}, "at least 2 layers"),
        ({"attention": "linear(8)"}, {}, "does not support linear attention"),
        ({"block": "parallel_one_norm"}, {}, r"does not support model\.block=parallel_one_norm"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(form, options, words):
    with pytest.raises(UserError, match=words) as caught:
        Generator(make_model(**form), TOKENIZER, **{"early_exit": 0.5, **options})
    assert "\n" not in str(caught.value)


def test_batches_that_change_recorded_activations_and_prefixes_are_refused():
    generator = Generator(make_model(), TOKENIZER, early_exit=0.5)
    with pytest.raises(UserError, match="continuous batching does not support early_exit"):
        ContinuousBatch(generator, 4)
    with (
        generator.model.record("norm"),
        pytest.raises(UserError, match="cannot be recorded or patched"),
    ):
        generator.generate("ab")
    with pytest.raises(UserError, match="bidirectional prefix"):
        early_exit_cost(make_model(attention="prefix(3)"), *texts(), 0.5)
    with pytest.raises(UserError, match="no targets"):
        early_exit_cost(make_model(), texts()[0], texts()[1].fill_(-1), 0.5)
    assert not isinstance(Generator(make_model(), TOKENIZER).decoder, EarlyExitDecoder)


@pytest.mark.parametrize("bits", [8, 4])
def test_early_exit_reads_the_same_cache(bits):
    """Without an exit, the text of all layers; with one, another text in the same cache."""
    model = random_model(1, 0.4, 0.25, vocab_size=264, d_model=64, max_seq_len=128)
    params = SamplingParams(60, seed=1, logit_bias={TOKENIZER.bos_id: -math.inf})
    texts = [
        Generator(model, TOKENIZER, cache_bits=bits, compile=False, early_exit=threshold).generate(
            "Hello", params
        )[0]
        for threshold in (None, 0.999999, 0.01)
    ]
    assert texts[1].token_ids == texts[0].token_ids
    assert texts[2].token_ids != texts[0].token_ids
