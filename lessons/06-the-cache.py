# %% [markdown]
# # The cache, and why not an RNN?
#
# *How much work does a model repeat for every word it writes?* This lesson counts it, lets a cache
# do it only once, and shows how a cache can be wrong without anyone noticing. It takes about 20
# minutes. You need to know keys, values, heads and the causal mask.
#
# You will learn
#
# - what a cache of keys and values saves, and the one test that finds a broken cache;
# - what attention, a recurrent network and a convolution pay for remembering;
# - how a model writes endless text in constant memory.

# %%
import torch
import torch.nn.functional as F

from thinker.data.tales import generate_story
from thinker.generation import Generator, SamplingParams
from thinker.lessons import small_models
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.lessons.practice import is_fast
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.plot_style import BLUE, ORANGE, new_figure

# %% [markdown]
# ## The same work, again and again
#
# A model reads the text so far, chooses the next token, appends it, and reads the text again. A
# text of t tokens has t queries and t keys, so reading it computes t² scores per head. Starting
# from one token, count the scores for writing four, on paper: 1 + 4 + 9 + 16 = **30**.
#
# But a causal mask means that later tokens change nothing about earlier ones. Their keys and values
# are the same in every pass, so keep them, in a **cache**. Then each pass computes only the newest
# query and compares it with all keys: 1 + 2 + 3 + 4 = **10** scores. The tables show how often each
# score is computed.

# %%
without, cached = torch.zeros(4, 4), torch.zeros(4, 4)
for t in range(1, 5):
    without[:t, :t] += 1  # the whole text again
    cached[t - 1, :t] += 1  # one query, all keys
options = {"rows": "1234", "columns": "1234", "digits": 0, "shade": 4}
pictures = Heatmap("without: 30", without, **options), Heatmap("cached: 10", cached, **options)
show(SideBySide(*pictures))
for T in (4, 512):
    n_without = T * (T + 1) * (2 * T + 1) // 6  # 1 + 4 + 9 + ... + T²
    n_with = T * (T + 1) // 2  # 1 + 2 + 3 + ... + T
    print(f"{T} tokens: {n_without:,} scores without a cache, {n_with:,} with it")

# %% tags=["check"]
assert (int(without.sum()), int(cached.sum())) == (30, 10) == (4 * 5 * 9 // 6, 4 * 5 // 2)
assert (n_without, n_with, n_without // n_with) == (sum(t * t for t in range(513)), sum(range(513)), 341)

# %% [markdown]
# For 512 tokens, that is 1 score instead of 341.
#
# **Question.** Why does nobody cache the queries?
#
# <details><summary>Answer</summary>
#
# A query is needed once, when its own token is read. Later tokens ask with queries of their own.
#
# </details>
#
# ## A cache that works
#
# We need a model that has learned something. This one trains for about a minute on short children's
# stories, in windows of 96 tokens; `texts` are 20 stories that it has not seen.
#
# `model.new_cache(1, n)` is an empty cache for one text of n tokens. `model(tokens, cache=cache)`
# reads tokens, adds their keys and values to the cache, and returns their logits. Usually the
# prompt is read in one pass, and every new token in a pass of its own.

# %%
model, tokenizer, texts = small_models.train_on_stories()


def read(cache, tokens):  # the first 16 in one pass, the others one by one
    parts = (tokens[:16], *tokens[16:].split(1))
    return torch.cat([model(part[None], cache=cache)[0] for part in parts])


cache = model.new_cache(1, 96)
error = (read(cache, texts[0]) - model(texts[:1])[0]).abs().max().item()
print(f"largest difference of a logit: {error:.0e}; the cache takes {cache.nbytes:,} bytes")

# %% tags=["check"]
assert error < 1e-4
assert cache.nbytes == 2 * 2 * 4 * 24 * 96 * 4 == 147_456

# %% [markdown]
# This is the **equality test**: at every position, logits computed with a cache equal those of one
# pass over the whole text, up to rounding (here below 1e-4).
#
# Its bytes: 2 (keys and values) · 2 layers · 4 heads of width 24 · 96 tokens · 4 bytes = 147,456.
#
# ## A cache that does not work
#
# Let us break it by one position, a classic mistake: a token that is read alone gets a position
# that is one too high, because somebody counted from 1.


# %%
class WrongPosition(KVCache):
    def append(self, batch_size, length, tokens=None):
        context = super().append(batch_size, length, tokens)
        if length == 1:
            context.positions, context.end = context.positions + 1, context.end + 1
        return context


results = {}
for kind in (KVCache, WrongPosition):
    caches = [kind(model.config, 1, 96, "cpu", torch.float32) for _ in range(21)]
    logits = torch.stack([read(cache, text) for cache, text in zip(caches, texts)])
    loss = F.cross_entropy(logits[:, 16:-1].flatten(0, 1), texts[:, 17:].flatten()).item()
    differences = (logits - model(texts)).abs().amax(dim=(0, 2)).detach()  # by position
    n_equal = int((differences < 1e-4).long().cumprod(0).sum())
    results[kind.__name__] = loss, float(differences.max()), n_equal
    story = small_models.write(model, tokenizer, caches[-1], "Once upon a time", 50)
    print(f"{kind.__name__}: {story[:75]}\n  loss {loss:.3f},", end=" ")
    print(f"largest difference {differences.max():.0e}, equal up to token {n_equal}")

# %% tags=["check"]
(right_loss, _, n_right), (loss, error, n_equal) = results.values()
assert (n_right, n_equal) == (96, 16)
assert is_fast() or (error > 0.5 and abs(loss - right_loss) < 0.05)

# %% [markdown]
# The text does not give the mistake away, and the losses are within 0.05 nats of each other. But
# some logits are off by more than 0.5, thousands of times as much as rounding. The test even says
# where: the 16 tokens of the prompt are right, so the mistake is in reading single tokens.
#
# **Question.** Suppose the test read a prompt of 95 tokens, and then one more. What would it miss?
#
# <details><summary>Answer</summary>
#
# A mistake in storing the keys of single tokens: no later token would read them.
#
# </details>
#
# ## How long does it take?
#
# Here a model with random weights writes T tokens, without and with a cache.

# %%
lengths = (8, 16, 32) if is_fast() else (64, 128, 256, 512)
larger = Thinker(ThinkerConfig(512, d_model=192, n_layers=2, n_heads=6)).eval()
slow = [small_models.seconds_to_write(larger, T, has_cache=False) for T in lengths]
fast = [small_models.seconds_to_write(larger, T, has_cache=True) for T in lengths]
figure, (axes,) = new_figure(6.5, 3.2)
for name, times, color in (("without a cache", slow, ORANGE), ("with a cache", fast, BLUE)):
    axes.plot(lengths, times, marker="o", color=color, label=name)
    print(f"{name:>15}:", ", ".join(f"T = {T} {s:.2f} s" for T, s in zip(lengths, times)))
axes.set(xlabel="T, tokens written", ylabel="seconds", xticks=lengths)
axes.legend(frameon=False)
show(figure, "Without a cache, the time to write a text grows much faster than its length.")

# %% tags=["check"]
assert is_fast() or (slow[-1] > 2 * fast[-1] and slow[-1] / slow[0] > fast[-1] / fast[0])

# %% [markdown]
# With a cache, the time grows about as T does: a few hundred keys cost little beside the rest of
# the model. Without it, the time grows much faster; 512 tokens take more than twice as long.
#
# ## Scores that are never stored
#
# Even one pass over a long prompt has T² scores per head. Written out, they all lie in memory at
# once. A **fused** kernel, such as torch's `scaled_dot_product_attention`, computes a block of
# them, uses it and forgets it (Dao et al. 2022). Compare them, for 4 heads of width 32:

# %%
for T in (256, 1024):
    q, k, v = torch.randn(3, 4, T, 32, generator=torch.Generator().manual_seed(0))
    scores = (q @ k.mT / 32**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    error = (scores.softmax(-1) @ v - fused).abs().max()
    print(f"T = {T}: scores {scores.nbytes:,} bytes, output {fused.nbytes:,}, error {error:.0e}")

# %% tags=["check"]
assert (scores.nbytes, fused.nbytes) == (4 * 1024**2 * 4, 4 * 1024 * 32 * 4)
assert error < 1e-5
assert 32 * 32768**2 * 4 == 128 * 2**30

# %% [markdown]
# Four times the tokens make 16 times the scores, but 4 times the output. At T = 32,768, the scores
# of one layer with 32 heads would take 128 GiB. A fused kernel still computes them, but keeps few.
#
# ## Why not an RNN?
#
# A recurrent network (RNN) such as a GRU reads token after token and keeps a **state** of fixed
# size. A causal **convolution** mixes each token with a few before it. Neither needs a growing
# cache. Give both the same task as attention, **recall**: read up to 12 pairs, then say the values
# of the same keys in another order. For example, `b 7 d 3 a 9` and then `d → 3 a → 9 b → 7`.
#
# All have about as many parameters and train for 500 steps. The transformer gets one help:
# `token_shift` adds to each token the one before it, so that a value knows its key. The others see
# the token before by design; a transformer has to learn to, which takes longer.

# %%
T, n_steps = 48, 5 if is_fast() else 500  # 12 pairs, twice
small = ThinkerConfig(48, d_model=64, n_layers=2, n_heads=2, d_ff=128, token_shift=True)
networks = {  # steps to read T tokens, numbers in the state, and reach
    "attention": (lambda: Thinker(small), 2, 2 * 2 * T * 64, T),
    "GRU": (small_models.GRU, T, 104, T),
    "convolution": (small_models.Convolution, 3, 80 * 3 * (1 + 4 + 16), 1 + 3 * (1 + 4 + 16)),
}
right, sizes = {}, {}
lines = ["T = 48       parameters  steps   state  reach  right of 2, 4, 8, 12 pairs"]
for name, (make, steps, state, reach) in networks.items():
    torch.manual_seed(0)
    network = make()
    small_models.train(network, n_steps)
    sizes[name] = sum(parameter.numel() for parameter in network.parameters())
    right[name] = [small_models.accuracy(network, n) for n in (2, 4, 8, 12)]
    shares = " ".join(f"{share:5.0%}" for share in right[name])
    lines += [f"{name:11}  {sizes[name]:>10,}  {steps:>5}  {state:>6,}  {reach:>5}  {shares}"]
print("\n".join(lines))

# %% tags=["check"]
assert all(75_000 < size < 89_000 for size in sizes.values())
assert (networks["convolution"][3], networks["attention"][2] // networks["GRU"][2]) == (64, 118)
if not is_fast():
    assert min(right["attention"]) > 0.9
    assert max(right["GRU"][-1], right["convolution"][-1]) < 0.5

# %% [markdown]
# - **Steps** that must run one after the other to read T tokens, counting a layer as one. A GRU has
#   to read the last token after all others. To *write* T tokens, all three need T steps.
# - **State**: the numbers that are kept while writing. Attention keeps 118 times as many as the GRU
#   here, and more as T grows. The GRU presses the whole list into 104 numbers.
# - **Reach**: the convolution sees 64 tokens, more than the text has. But its weights belong to
#   fixed distances, and a key stands somewhere else in every text. Scores find it by content.
# - **Right answers**: attention more than 90% at every length; for 12 pairs, the others under 50%.
#   Be fair: this task was chosen because it needs recall, and each result is one run. A GRU that
#   trains longer does better. Where a fixed state is enough, it is cheaper.
#
# ## Endless text
#
# A cache grows with the text, and a model knows only the lengths of its training. A **sliding
# window** keeps the newest keys. Xiao et al. 2023 found that large models then break down: their
# heads put spare attention on the first tokens. Keep a few of these **attention sinks**, too:

# %%
generator = Generator(model, tokenizer, compile=False, window=60, sinks=4)
params = SamplingParams(max_new_tokens=40 if is_fast() else 400)
done = generator.generate("Once upon a time", params)[0]
print(f"{len(done.token_ids)} tokens, {done.n_evicted} forgotten: ...{done.text[-45:]!r}")
for n in (100, 10_000):
    full, bounded = model.new_cache(1, n).nbytes, generator.new_cache(model, 1, n).nbytes
    print(f"cache for {n:>6,} tokens: {full:>10,} bytes, with the window {bounded:,}")
long_text = " ".join(generate_story(2, i).text for i in range(1 if is_fast() else 10))
no_sinks = Generator(model, tokenizer, compile=False, window=64)
scores = [one.score(long_text).logprobs for one in (generator, no_sinks)]
loss, loss_without = (-sum(logprobs) / len(logprobs) for logprobs in scores)
print(f"64 keys, 4 of them sinks: {loss:.2f} nats; without sinks: {loss_without:.2f}")

# %% tags=["check"]
assert len({generator.new_cache(model, 1, n).nbytes for n in (100, 1000, 10_000)}) == 1
assert is_fast() or (done.n_evicted > 300 and abs(loss - loss_without) < 0.1)

# %% [markdown]
# The window's bytes stay the same. In this small model, sinks change the loss by less than 0.1
# nats: the breakdown does not show here. Measure before you rely on either.
#
# ## Exercises
#
# **1. Decode with a cache.** `prompt` is a list of tokens. Return the list of the `n_new` likeliest
# tokens after it, one after the other. Use `model.new_cache` and `model(tokens, cache=cache)`,
# where tokens have shape (1, T) and logits (1, T, V). Read every token once, and none that nobody
# needs.


# %% tags=["exercise"]
from thinker.lessons.checks.the_cache import check_bytes, check_decoding, check_suspect


def decode(model, prompt, n_new):
    return ...


check_decoding(decode)

# %% [markdown]
# **2. Bytes on paper.** A model has 32 layers and 32 query heads of width 128, which share 8 key
# and value heads. Numbers are in bf16, 2 bytes each. How many bytes does its cache of 4,096 tokens
# take?

# %% tags=["exercise"]
my_bytes = ...
check_bytes(my_bytes)

# %% [markdown]
# **3. Find the broken cache.** A model reads seven tokens: the first three in one pass (rows 0 to
# 2), the others one by one. One of the caches A, B and C has a bug; another only computes in bf16,
# which rounds. Which is broken, and how? `"position"`: a token read alone gets too high a position.
# `"mask"`: it does not see the oldest key. `"store"`: later tokens do not find its key.

# %% tags=["exercise"]
from thinker.lessons.checks.the_cache import mystery_tables

tables, rows = mystery_tables(), [str(row) for row in range(7)]
show(SideBySide(*(Heatmap(name, table, rows, "abcd") for name, table in tables.items())))
my_table, my_bug = ..., ...  # such as "C", "mask"
check_suspect((my_table, my_bug))

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def decode_with_cache(model, prompt, n_new):
    cache = model.new_cache(1, len(prompt) + n_new)
    tokens, newest = [], prompt
    for _ in range(n_new):
        logits = model(torch.tensor([newest]), cache=cache)
        newest = [int(logits[0, -1].argmax())]  # the next pass reads only this one
        tokens += newest
    return tokens


check_decoding(decode_with_cache)
# Keys and values · layers · key and value heads · width · tokens · bytes: 2^29, half a GiB.
check_bytes(2 * 32 * 8 * 128 * 4096 * 2)
# A is off by about 0.1 at most, in all rows: rounding. B is right up to row 3, which was read alone. So positions and
# masks are right. Row 4 is wrong by more than 1: it is the first that needs the key of a token read alone.
check_suspect(("B", "store"))

# %% [markdown]
# ## Words of this lesson
#
# - **cache**: keys and values of all tokens so far. **State**: what any model keeps of them.
# - **equality test**: logits with a cache equal those of one pass.
# - **fused attention**: computes scores in blocks and never stores all of them.
# - **attention sink**: an early token that takes spare attention.
#
# Sources: fused attention, Dao et al. 2022 ([arXiv:2205.14135](https://arxiv.org/abs/2205.14135));
# sinks, Xiao et al. 2023 ([arXiv:2309.17453](https://arxiv.org/abs/2309.17453)); recall, Arora et
# al. 2023 ([arXiv:2312.04927](https://arxiv.org/abs/2312.04927)). Next: train a model on stories
# whose best possible loss is known.
