# %% [markdown]
# # Many heads, few keys
#
# *Why do models have dozens of heads, and then let them share their keys?* This lesson shows what a
# second head can do that one head cannot, and what keys and values cost in memory. It takes about
# 20 minutes. You need to know queries, keys, values and the causal mask.
#
# You will learn
#
# - why one row of weights is not enough, and how a vector is split into heads;
# - how query heads share keys and values (GQA and MQA), and how many bytes that saves;
# - what sharing costs in quality, on a small task.

# %%
import math

import torch

from thinker.lessons.materials.diagrams import grouped_heads
from thinker.lessons.materials.practice import is_fast, train_on_task
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

# %% [markdown]
# ## One row says one thing
#
# Take the text **7 − 3 =**. The token *=* needs both digits, and it must know which came first.
#
# - A key has two numbers: is this the first digit, and is it the second?
# - A value is the digit itself; *−* and *=* have the value 0.
# - A query can ask for one digit or for both.
#
# These scores are not scaled, to keep them simple.

# %%
tokens, names = ["7", "−", "3", "="], ["one head", "head 0 of 2", "head 1 of 2"]
keys = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
queries = torch.tensor([[10.0, 10.0], [10.0, 0.0], [0.0, 10.0]])  # both, first, second
weights = (queries @ keys.T).softmax(dim=-1)
show(Heatmap("weights of =", weights, names, tokens, shade=1.0))
for text, digits in (("7 − 3", [7.0, 0.0, 3.0, 0.0]), ("3 − 7", [3.0, 0.0, 7.0, 0.0])):
    both, first, second = (weights @ torch.tensor(digits)).tolist()
    print(f"{text}: one head reads {both:.2f}, two read {first:.2f} and {second:.2f}")

# %% tags=["check"]
digits = torch.tensor([[7.0, 0, 3, 0], [3.0, 0, 7, 0]])
assert torch.allclose(weights @ digits.T, torch.tensor([[5.0, 5], [7, 3], [3, 7]]), atol=2e-3)
shared = attend(queries[None, 1:, None], keys[None, None], digits.T[None, None], scale=1.0)
assert torch.allclose(shared[0, :, 0], weights[1:] @ digits.T)  # two query heads and one KV head
pairs = torch.tensor([[7.0, 3], [3, 7], [1, 0], [0, 9]])
assert torch.allclose(pairs @ torch.tensor([0.9, 0.1]), torch.tensor([6.6, 3.4, 0.9, 0.9]))

# %% [markdown]
# The weights of a row sum to 1. A head that wants two tokens has to divide its attention, and what
# comes out is their average: 5, for 7 − 3 and for 3 − 7. No later layer can tell from this 5 which
# digit came first. Two heads have two rows, so one reads 7 and the other 3.
#
# **Question.** Could one head give the first digit a weight of 0.9 and the second 0.1?
#
# <details><summary>Answer</summary>
#
# Then 7 − 3 gives 6.6 and 3 − 7 gives 3.4, which is better. But 1 − 0 and 0 − 9 both give 0.9, and
# the second digit hardly counts.
#
# Wider values would help: if the values are (7, 0) and (0, 3), one head reads (3.5, 1.5), which
# says both digits and their order. But it still has one row of weights. It cannot look at one token
# strongly for the first number, and at another for the second. Two heads can.
#
# </details>
#
# ## Split and merge
#
# One matrix makes the queries of all heads, side by side in one long row per token. Then each row
# is cut into heads. Here are three tokens a, b and c with rows of four numbers, so two heads get
# two numbers each. `view` cuts the rows, and `transpose` puts heads before tokens:

# %%
x = torch.tensor([[10.0, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
cut = x.view(3, 2, 2)  # (tokens, heads, numbers of a head)
right = cut.transpose(0, 1)  # (heads, tokens, numbers of a head)
wrong = x.view(2, 3, 2)  # the same shape as `right`, without a transpose
merged = right.transpose(0, 1).flatten(1)  # tokens first, then join dimensions 1 and 2
print("merged again:", merged.tolist())

# %% tags=["folded"]
names = ["head 0", "head 1", "wrong head 0", "wrong head 1"]
tables = [Heatmap(name, y, "abc", "01", 0, 33) for name, y in zip(names, [*right, *wrong])]
show(SideBySide(Heatmap("x", x, "abc", "0123", 0, 33), *tables[:2]))
show(SideBySide(*tables[2:]))

# %% tags=["check"]
assert torch.equal(merged, x)
assert right[0].tolist() == [[10, 11], [20, 21], [30, 31]]
assert wrong[0].tolist() == [[10, 11], [12, 13], [20, 21]]  # row b holds numbers of a

# %% [markdown]
# It is easy to forget the transpose, because `view` alone can give the same shape. Then row b of
# head 0 holds numbers of token a, and no error is raised.
#
# Now in general. A model has H heads with D numbers each. B texts of T tokens are B · T vectors of
# C numbers, where C is the width of the model:
#
# | step | shape |
# |---|---|
# | the vectors of the tokens | (B, T, C) |
# | times the matrix of the queries (`q_proj`) | (B, T, H·D), often H·D = C |
# | `view` cuts the last dimension | (B, T, H, D) |
# | `transpose(1, 2)` puts heads before tokens | (B, H, T, D) |
#
# Keys and values are made in the same way. Each head computes attention alone. Merging goes back:
# transpose, then join the last two dimensions. At the end, a matrix called `o_proj` mixes the
# heads. That is all of multi-head attention, and it agrees with Thinker's:


# %%
def attention(q, k, v):
    """The five lines of lesson 1, for all heads at once: (..., T, D) each."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # swap the last two dimensions
    hidden = torch.ones_like(scores).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return weights @ v


torch.manual_seed(0)
c = ThinkerConfig(10, d_model=32, n_layers=1, n_heads=4, positions="none", qk_norm=False)
module = Thinker(c).blocks[0].attention  # without positions, and without norms of q and k
torch.nn.init.normal_(module.o_proj.weight)  # a new model starts with zeros here
x = torch.randn(2, 5, 32)  # (B, T, C)
projected = module.q_proj(x), module.k_proj(x), module.v_proj(x)
q, k, v = (y.view(2, 5, 4, 8).transpose(1, 2) for y in projected)  # split: (2, 4, 5, 8)
ours = module.o_proj(attention(q, k, v).transpose(1, 2).flatten(2))  # merge: (2, 5, 32)
causal = AttentionMask(is_causal=True)
theirs = module(x, None, causal)
print(f"largest difference: {(ours - theirs).abs().max():.0e}")

# %% tags=["check"]
assert torch.allclose(ours, theirs, atol=1e-5)
assert {p.numel() for p in module.parameters()} == {32 * 32}

# %% [markdown]
# (`k.T` of lesson 1 would reverse all four dimensions, so here it is `k.transpose(-2, -1)`.)
#
# More heads are not more parameters (trained numbers): each of the four matrices has 32 · 32,
# whatever H is. But the more heads, the narrower they are.
#
# ## Shared keys
#
# In the first example, the two heads had different queries, but *the same keys and values*. That
# was enough. So a model may have K key/value heads, called **KV heads**, for its H query heads:
#
# - **MHA**, multi-head attention: K = H. Every query head has its own keys and values.
# - **GQA**, grouped-query attention: 1 < K < H. Each KV head serves H/K query heads, and H/K has to
#   be a whole number.
# - **MQA**, multi-query attention: K = 1. All query heads share one KV head.
#
# For H = 4 query heads, a line says which KV head each of them reads:

# %% tags=["folded"]
show(
    grouped_heads(),
    "Four query heads. MHA: each reads a KV head of its own. GQA with two KV heads: query heads 0 "
    "and 1 read KV head 0, and 2 and 3 read KV head 1. MQA: all four read KV head 0.",
)

# %% [markdown]
# `attend` takes keys and values with fewer heads than the queries. It computes the same as if each
# KV head were repeated for its group. There are two ways to repeat, and only one fits:

# %%
H, K, D = 8, 2, 16
generator = torch.Generator().manual_seed(0)
q = torch.randn(1, H, 6, D, generator=generator)
k, v = torch.randn(2, 1, K, 6, D, generator=generator)
grouped = attend(q, k, v, causal)
interleaved = [x.repeat_interleave(H // K, dim=1) for x in (k, v)]
tiled = [x.repeat(1, H // K, 1, 1) for x in (k, v)]
off = [(attend(q, *pair, causal) - grouped).abs().max() for pair in (interleaved, tiled)]
print(f"interleaved: {torch.arange(K).repeat_interleave(4).tolist()}, off by {off[0]:.1f}")
print(f"     repeat: {torch.arange(K).repeat(4).tolist()}, off by {off[1]:.1f}")

# %% tags=["check"]
assert [round(float(x), 1) for x in off] == [0.0, 3.6]
off = (attend(q, *tiled, causal) - grouped).abs().amax(dim=(0, 2, 3))
assert [head for head in range(H) if off[head] < 1e-5] == [0, 2, 5, 7]
order = [0, 2, 4, 6, 1, 3, 5, 7]  # those that read KV head 0 with `repeat`, then those that read 1
assert torch.allclose(
    attend(q[:, order], k, v, causal), attend(q, *tiled, causal)[:, order], atol=1e-6
)

# %% [markdown]
# The lists say which KV head each of the eight query heads reads. With `repeat`, query heads 0, 2,
# 5 and 7 are still right. The others are wrong, and no error is raised.
#
# **Question.** Would a model that was *trained* with `repeat` be worse?
#
# <details><summary>Answer</summary>
#
# No. It is the same model with its query heads in another order. But weights trained with one order
# are wrong in the other, so code that loads a model has to know which one it used.
#
# </details>
#
# ## Count parameters and cache
#
# **Parameters.** Take a model of width C = 256 with 4 layers, H = 8 and D = 32. With K = 2, each
# layer has these matrices:
#
# - `q_proj` and `o_proj`: C · H · D = 65,536 numbers each;
# - `k_proj` and `v_proj`: C · K · D = 16,384 each;
# - three matrices of the MLP: C · F = 256 · 704 = 180,224 each, where F is the width of the MLP;
# - two norms: C = 256 each.
#
# The embedding and the last matrix have V · C = 256,000 each (V: how many tokens there are, here
# 1,000), and there is one more norm of C numbers at the end. Only `k_proj` and `v_proj` depend on
# K.
#
# **Cache.** To write the next token, a model needs the keys and values of all tokens before it, so
# it keeps them (lesson 6 builds a cache). Per token these are 2 (key and value) · layers · K · D
# numbers: here 2 · 4 · 2 · 32 = 512. Each number has 4 bytes in fp32, and 2 in bf16, the format of
# most large models.

# %%
formulas, measured = [], []
for K in (8, 2, 1):
    sizes = {"vocab_size": 1000, "d_model": 256, "n_layers": 4, "d_ff": 704}
    c = ThinkerConfig(**sizes, n_heads=8, n_kv_heads=K, qk_norm=False)
    C, H, D, F, V = 256, 8, 32, 704, 1000
    layer = 2 * C * H * D + 2 * C * K * D + 3 * C * F + 2 * C
    formulas.append([4 * layer + 2 * V * C + C, 2 * 4 * K * D * 4])
    model = Thinker(c)
    layers = model.new_cache(1, max_len=100).layers
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // 100
    measured.append([sum(p.numel() for p in model.parameters()), cache])
print("K  parameters: formula, counted   cache per token in fp32: formula, measured")
for K, a, b in zip((8, 2, 1), formulas, measured):
    print(f"{K} {a[0]:>20,} {b[0]:>10,} {a[1]:>33,} {b[1]:>9,}")

# %% tags=["check"]
assert formulas == measured == [[3725568, 8192], [3332352, 2048], [3266816, 1024]]
assert round(3266816 / 3725568, 2) == 0.88
assert [256 * 8 * 32, 256 * 2 * 32, 256 * 704, 1000 * 256] == [65536, 16384, 180224, 256000]
assert model.to(torch.bfloat16).new_cache(1, max_len=100).layers[0].keys.nbytes == 100 * D * 2

# %% [markdown]
# With a single KV head, the model still has 88% of its parameters, but only an eighth of its cache.
# The number of *query* heads is not in the formula of the cache: only KV heads count.
#
# Now take the shape of a real model: 32 layers, 32 query heads, D = 128, bf16. LLaMA 2 7B (7
# billion parameters) has this shape with 32 KV heads, and Llama 3 8B has it with 8. How many tokens
# fit in a laptop with 16 GiB of memory (1 GiB = 2³⁰ bytes)?

# %%
for K in (32, 8, 1):
    per_token = 2 * 32 * K * 128 * 2  # key and value, layers, KV heads, D, bytes
    n_tokens = 16 * 2**30 // per_token
    print(f"K = {K:>2}: {per_token:>7,} bytes per token; 16 GiB hold {n_tokens:,} tokens")

# %% tags=["folded"]
figure, (axes,) = new_figure(6.5, 3.8)
for K, color in ((32, ORANGE), (8, BLUE), (1, GREY)):
    gib = [2 * 32 * K * 128 * 2 * length / 2**30 for length in (2**10, 2**20)]
    axes.plot([2**10, 2**20], gib, color, label=f"{K} KV heads" if K > 1 else "1 KV head")
axes.axhline(16, color="black", linestyle="--", linewidth=1)
axes.text(1100, 18, "all memory of a laptop with 16 GiB", fontsize=9)
axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="cache in GiB")
ticks = [2**10, 2**13, 2**15, 2**17, 2**20]
axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
axes.minorticks_off()
axes.legend(frameon=False)
show(figure, "K = 32 fills 16 GiB at 32,768 tokens, K = 8 at 131,072, K = 1 at 1,048,576.")

# %% tags=["check"]
sizes = [2 * 32 * K * 128 * 2 for K in (32, 8, 1)]
assert [(x, 2**34 // x) for x in sizes] == [(524288, 32768), (131072, 131072), (16384, 1048576)]
assert 32768 * sizes[1] == 4 * 2**30

# %% [markdown]
# With 32 KV heads, 32,768 tokens fill the laptop before a single parameter is stored. With 8, they
# take 4 GiB. All of it is read again for every new token, so a small cache also saves time.
#
# ## What it costs
#
# All heads of a group have to choose from the same keys. How much does that hurt? We measure it on
# a task of recall: **c 5 a 2 ... a 2 c 5 ...**. A text lists eight letters, each followed by a
# number. Then the same letters come in another order, and the model has to name the number of each.
# There are 32 letters and 32 numbers.
#
# One layer has 8 query heads of width 8. With `token_shift`, the vector of the token before, times
# trained factors, is added to the vector of each token, so that a number knows its letter. A guess
# among 32 numbers has a loss of ln 32 = 3.47 nats. We say that a model has **learned** the task when
# the mean loss of the newest 20 steps falls below 1.


# %%
def make_batch(generator, texts=32):
    letters = torch.rand(texts, 32, generator=generator).argsort(dim=1)[:, :8]  # 0 to 31
    numbers = torch.randint(32, 64, (texts, 8), generator=generator)
    order = torch.rand(texts, 8, generator=generator).argsort(dim=1)
    asked, answers = letters.gather(1, order), numbers.gather(1, order)
    pairs, questions = torch.stack((letters, numbers), 2), torch.stack((asked, answers), 2)
    tokens = torch.cat((pairs.flatten(1), questions.flatten(1)), dim=1)
    targets = torch.full_like(tokens, -1)
    targets[:, 16::2] = answers
    return tokens, targets


def train(K, seed):
    """Share of right answers after 600 steps, and after how many the task was learned."""
    sizes = {"vocab_size": 64, "d_model": 64, "n_layers": 1, "n_heads": 8, "n_kv_heads": K}
    config = ThinkerConfig(**sizes, token_shift=True)
    model, losses = train_on_task(config, make_batch, n_steps=600, lr=1e-2, seed=seed)
    newest = torch.tensor(losses).unfold(0, 20, 1).mean(dim=1)  # of steps 1 to 20, 2 to 21, ...
    n_before = int((newest >= 1).long().cumprod(dim=0).sum())  # until one is below 1
    tokens, targets = make_batch(torch.Generator().manual_seed(99), texts=512)
    is_right = (model(tokens).argmax(dim=-1) == targets)[targets >= 0]
    return float(is_right.float().mean()), 20 + n_before


seeds = (0,) if is_fast() else (0, 1, 2)
shares, needed = {}, {}
for K in (8, 2, 1):  # one to three minutes
    shares[K], needed[K] = zip(*[train(K, seed) for seed in seeds])
    right = " ".join(f"{share:4.0%}" for share in shares[K])
    steps = " ".join(str(n) for n in needed[K])
    print(f"K = {K}: {right} right; learned after {steps} steps,", end=" ")
    print(f"{sum(needed[K]) / len(seeds):.0f} on average")

# %% tags=["check"]
assert round(math.log(32), 2) == 3.47
if not is_fast():
    assert min(*shares[8], *shares[2], *shares[1]) > 0.95
    assert sum(needed[1]) > sum(needed[8])

# %% [markdown]
# Each column is one seed, and your runs may differ a little. All models learn the task, also those
# with a single KV head. But one KV head needs more steps than eight, on average: here 255 instead of
# 170. In single runs it can be as fast, so one run of each would prove nothing.
#
# Do not expect the same numbers of large models. These heads are tiny: with K = 1, a key of 8
# numbers has to tell 32 letters apart. Three runs are few, and models with fewer KV heads also have
# fewer parameters. Ainslie et al. trained large models further with GQA, and found it close to MHA
# in quality and to MQA in speed.
#
# ## Exercises
#
# Replace the dots, run the cell, and read what it says. Then run it again.
#
# **1. Grouped attention.** q has shape (H, T, D), k and v have (K, T, D). Give each query head the
# keys and values of its group, compute causal attention, and merge the heads: the result has shape
# (T, H · D). Take H and K from the shapes: `len(q)` and `len(k)`. Dimensions count from 0: in (K,
# T, D), the heads are dimension 0. Use `attention` from above, which needs as many keys as queries.
# (`attend` would do the grouping for you.)


# %% tags=["exercise"]
from thinker.lessons.checks.many_heads import check_cache, check_grouped, check_layout


def my_grouped(q, k, v):
    return ...


check_grouped(my_grouped)

# %% [markdown]
# **2. A cache on paper.** A model has 24 layers, 16 query heads, 4 KV heads and D = 64. It runs in
# bf16. How many MiB does its cache take for a text of 4,096 tokens? (1 MiB = 2²⁰ = 1,048,576 bytes)

# %% tags=["exercise"]
my_mib = ...
check_cache(my_mib)

# %% [markdown]
# **3. Which one fits?** You have 3 GiB (1 GiB = 2³⁰ bytes) for the cache of 32,768 tokens in bf16.
# Three models have 32 layers. **A** has 16 query heads, 4 KV heads and D = 256. **B** has 32, 16
# and 128. **C** has 64, 8 and 64. Which one fits, and how many GiB does its cache take?

# %% tags=["exercise"]
my_layout = ...  # the letter and the GiB, such as ("A", 1.5)
check_layout(my_layout)

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def grouped_attention(q, k, v):
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))  # (H, T, D)
    y = attention(q, k, v)  # (H, T, D)
    return y.transpose(0, 1).flatten(1)  # tokens first, then join the heads


check_grouped(grouped_attention)

# 2 · 24 layers · 4 KV heads · 64 numbers · 2 bytes = 24,576 bytes per token.
check_cache(24576 * 4096 / 2**20)

# Only K · D counts: 1,024, 2,048 and 512.
# C takes 2 · 32 · 512 · 2 bytes · 32,768 = 2 GiB, A 4, B 8.
check_layout(("C", 2.0))

# %% [markdown]
# ## Words of this lesson
#
# - **H, K, C**: the number of query heads, the number of KV heads, the width of the model (numbers
#   per token).
# - **KV head**: keys and values that one query head (MHA), a group (GQA) or all (MQA) read.
#
# Sources: Shazeer 2019 on MQA ([arXiv:1911.02150](https://arxiv.org/abs/1911.02150)); Ainslie et
# al. 2023 on GQA ([arXiv:2305.13245](https://arxiv.org/abs/2305.13245)); LLaMA 2
# ([arXiv:2307.09288](https://arxiv.org/abs/2307.09288)); Llama 3
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783)). Next: attention that does not look at
# every token.
