# %% [markdown]
# # The cache, and why not an RNN?
#
# *How much work does a model repeat for every word it writes?* This lesson counts that work, saves
# most of it with a cache, and shows how a cache can be wrong without anyone noticing. It takes
# about 20 minutes. You need to know keys, values, heads and the causal mask.
#
# You will learn
#
# - what a cache of keys and values saves, and the one test that finds a broken cache;
# - what attention, a recurrent network and a convolution pay for remembering;
# - how a model writes endless text in constant memory.

# %%
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from thinker.data.text.tales import generate_story
from thinker.generation import Generator, SamplingParams
from thinker.lessons.materials import small_models
from thinker.lessons.materials.practice import is_fast, lesson_seed
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.runtime.plot_style import BLUE, ORANGE, new_figure
from thinker.training.reports.plan_operations import describe_operations, format_operations

# %% [markdown]
# ## The same work, again and again
#
# A model reads the text so far, chooses the next token, appends it, and reads the text again. A
# text of t tokens has t queries and t keys. A plain program computes all t² scores of a head and
# throws the hidden ones away. (Lesson 5 counted only the visible ones.) Count them on paper: four
# passes over 1, 2, 3 and 4 tokens compute 1 + 4 + 9 + 16 = **30** scores.
#
# With a causal mask, later tokens change nothing about earlier ones. The keys and values of a token
# are the same in every pass, so we can keep them, in a **cache**. Then each pass computes only the
# newest query and compares it with all keys: 1 + 2 + 3 + 4 = **10** scores.
#
# The tables show how often each score is computed. Rows are queries, columns are keys.

# %% tags=["folded"]
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
    share = f"one score where there were {n_without / n_with:.0f}"
    print(f"{T} tokens: {n_without:,} scores without a cache, {n_with:,} with it: {share}")

# %% tags=["check"]
assert (int(without.sum()), int(cached.sum())) == (30, 10) == (4 * 5 * 9 // 6, 4 * 5 // 2)
assert (n_without, n_with) == (sum(t * t for t in range(513)), sum(range(513)))
assert round(n_without / n_with) == 342

# %% [markdown]
# For 512 tokens, the model with a cache computes 342 times fewer scores.
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
# stories, in windows of 96 tokens. `texts` are the first 96 tokens of 20 stories that it has not
# seen.
#
# - `model.new_cache(1, n)` is an empty cache for one text of n tokens.
# - `model(tokens, cache=cache)` reads new tokens, which see the cached ones, too. It adds their
#   keys and values to the cache and returns their logits.
#
# Usually the beginning of a text, the **prompt**, is read in one pass, and every later token in a
# pass of its own. `read` does the same:

# %%
model, tokenizer, texts = small_models.train_on_stories()


def read(cache, tokens):
    parts = (tokens[:16], *tokens[16:].split(1))  # 16 tokens together, the others one by one
    logits = [model(part[None], cache=cache)[0] for part in parts]  # part[None]: (1, T)
    return torch.cat(logits)


cache = model.new_cache(1, 96)
error = (read(cache, texts[0]) - model(texts[:1])[0]).abs().max().item()
print(f"largest difference of a logit: {error:.6f}; the cache takes {cache.nbytes:,} bytes")

# %% tags=["check"]
assert error < 1e-4
assert cache.nbytes == 2 * 2 * 4 * 24 * 96 * 4 == 147_456

# %% [markdown]
# This is the **equality test**: at every position, logits computed with a cache equal those of one
# pass over the whole text, up to rounding. The largest difference above is about 0.00001. (Your
# run may differ a little.)
#
# The bytes of the cache: 2 (keys and values) · 2 layers · 4 heads of width 24 · 96 tokens · 4 bytes
# per number = 147,456.
#
# ## A cache that does not work
#
# Let us break it by one position. A token that is read alone gets a position that is one too high,
# because somebody counted from 1. The class below is `KVCache` with only this mistake: the model
# calls `append` before each pass. You need not understand each line.


# %%
class WrongPosition(KVCache):
    def append(self, batch_size, length, tokens=None):
        context = super().append(batch_size, length, tokens)  # what the right cache does
        if length == 1:  # a token that is read alone
            context.positions = context.positions + 1  # RoPE turns by these
            context.end = context.end + 1  # the end of the text moves, too
        return context


# %% [markdown]
# Now compare it with `KVCache`, the right one: a story that the model writes with each, the loss on
# the 20 stories, and the equality test.

# %% tags=["folded"]
results = {}
for kind in (KVCache, WrongPosition):
    caches = [kind(model.config, 1, 96, "cpu", torch.float32) for _ in range(21)]
    logits = torch.stack([read(cache, text) for cache, text in zip(caches, texts)])
    loss = F.cross_entropy(logits[:, 16:-1].flatten(0, 1), texts[:, 17:].flatten()).item()
    errors = (logits - model(texts)).abs().detach()
    differences, average = errors.amax(dim=(0, 2)), errors[:, 16:].mean()  # by position; of all
    n_equal = int((differences < 1e-4).long().cumprod(0).sum())
    results[kind.__name__] = loss, float(differences.max()), n_equal
    story = small_models.write(model, tokenizer, caches[-1], "Once upon a time", 50)
    print(
        f"{kind.__name__}: {story[:75]}\n  loss {loss:.3f}, the first {n_equal} tokens are equal,"
    )
    print(f"  largest difference of a logit {differences.max():.6f}, on average {average:.6f}")

# %% tags=["check"]
(right_loss, _, n_right), (loss, error, n_equal) = results.values()
assert (n_right, n_equal) == (96, 16)
assert is_fast() or (error > 0.5 and abs(loss - right_loss) < 0.05)

# %% [markdown]
# You cannot see the mistake in the story. (A girl named *Edmund*, as here, is no sign of it: the
# small model errs with the right cache, too.) The losses are nearly equal: here 1.155 and 1.158.
# But one logit is wrong by 5.3, hundreds of thousands of times as much as rounding. Why does the
# loss hardly change? On average a logit is off by 0.08, and some tokens get likelier by that, others
# less likely. The test even says where: the 16 tokens of the prompt are right, so the mistake is in
# reading single tokens.
#
# Why does the story survive? RoPE depends only on the distance of two positions (lesson 3). All
# single tokens move by one, so the distances between them stay right. Only their distances to the
# prompt are wrong, by one.
#
# **Question.** Suppose the test read a prompt of 95 tokens, and then one more. What would it miss?
#
# <details><summary>Answer</summary>
#
# A mistake in storing the key of a token that was read alone. It does not change the token's own
# logits, only those of later tokens that need this key. Here no later token is read.
#
# </details>
#
# ## How long does it take?
#
# Here a model with random weights writes T tokens, without and with a cache.

# %% tags=["folded", "times"]
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
print(f"T = {lengths[-1]}: {slow[-1] / fast[-1]:.0f} times as long without a cache as with it")

# %% [markdown]
# With a cache, twice the tokens take about twice as long: a few hundred keys cost little beside the
# rest of the model. Without it, there are twice as many passes, each over twice as many tokens. So
# most of the work grows four times, and the scores grow eight times.
#
# The last line compares both at 512 tokens. The gain is much less than 342 times, because the
# scores are only a part of the work.
#
# ## Scores that are never stored
#
# Even one pass over a long prompt has T² scores per head. A plain program has them all in memory at
# once. A **fused kernel** is a program for the chip that does all steps of attention together: it
# computes a block of scores, uses it and forgets it (Dao et al. 2022). Where it can, torch's
# `scaled_dot_product_attention` uses one. Compare both ways, for 4 heads of width 32:

# %%
for T in (256, 1024):
    q, k, v = torch.randn(3, 4, T, 32, generator=torch.Generator().manual_seed(0))
    later = torch.ones(T, T).triu(1).bool()
    scores = q @ k.mT / 32**0.5  # k.mT: the transposed keys of each head
    scores = scores.masked_fill(later, -torch.inf)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    error = (scores.softmax(-1) @ v - fused).abs().max()
    print(f"T = {T}: scores {scores.nbytes:,} bytes, output {fused.nbytes:,}, ", end="")
    print(f"largest difference {error:.0e}")

# %% tags=["check"]
assert (scores.nbytes, fused.nbytes) == (4 * 1024**2 * 4, 4 * 1024 * 32 * 4)
assert error < 1e-5
assert 32 * 32768**2 * 4 == 128 * 2**30

# %% [markdown]
# Four times the tokens make 16 times the scores, but 4 times the output. At T = 32,768, the scores
# of one layer with 32 heads, 4 bytes each, would take 128 GiB (a GiB is 2³⁰ bytes). A fused kernel
# still computes the visible half of them (lesson 5), but keeps few at a time.
#
# ## What a model computes
#
# How much of the work are the scores? Count multiplications and additions, together called
# **FLOPs**, of all matrix products. A dot product of n numbers takes n of each, so 2 · n. A
# matrix of a · b numbers takes 2 · a · b for each token. Here is all that the model above does
# with a text of 96 tokens:

# %%
table = describe_operations(model, 96, torch.float32)
print(format_operations(table))

# %% tags=["check"]
model.kernel = "reference"  # plain matrix products, which torch counts
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    model(texts[:1])
assert counter.get_total_flops() == sum(row["flops"] for row in table["rows"])
cache = model.new_cache(1, 96)
model(texts[:1, :-1], cache=cache)
with FlopCounterMode(display=False) as counter:
    model(texts[:1, -1:], cache=cache)
assert counter.get_total_flops() == sum(row["next_token_flops"] for row in table["rows"])
model.kernel = "auto"
n_bytes = sum(parameter.nbytes for parameter in model.parameters()) + cache.nbytes
assert n_bytes == sum(row["nbytes"] for row in table["rows"])
flops = {row["name"]: row["flops"] for row in table["rows"]}
share = (flops["scores"] + flops["weighted sums"]) / sum(flops.values())
assert round(share, 2) == 0.12

# %% [markdown]
# L counts layers, F is the width of the MLP, and the other letters are those of lesson 4. Scores and
# weighted sums are 12% of the work here. They grow with T², everything else with T.
#
# With a cache, the last token takes only a 96th of the FLOPs. But it needs nearly all bytes: each
# matrix, key and value is read once, and only the embedding gives no more than a row.
#
# `thinker plan CONFIG --operations` prints this table for any config.
#
# ## Why not an RNN?
#
# Two other kinds of network need no growing cache:
#
# - A **recurrent network** (RNN) reads token after token and keeps a **state**, a list of numbers
#   of fixed length. From the old state and the new token it computes the next state. A **GRU** is
#   an RNN that learns which numbers to keep and which to replace.
# - A causal **convolution** computes each vector from the token itself and a few before it, at
#   fixed distances, with the same matrices everywhere in the text.
#
# Give all the same task, **recall**: read up to 12 pairs of a key and a value, then say the value
# of each key, in another order. For example, after `b 7 d 3 a 9` come the questions `d`, `a` and
# `b`, and the answers are `3`, `9` and `7`.
#
# All train for 500 steps. The transformer gets one help: `token_shift` adds to each token's vector
# the vector of the token before it, so that a value knows its key. (Each number is multiplied by a
# learned factor first.) The other networks see the token before by design.
#
# The table has these columns:
#
# - **Parameters**: the numbers that training finds, about equally many.
# - **Steps** that must run one after the other to read T tokens; a layer counts as one. A GRU can
#   read a token only after all earlier ones. To *write* T tokens, all three need T steps.
# - **State**: how many numbers are kept for the next token. Attention keeps keys and values of 2
#   layers, 48 tokens and width 64: 2 · 2 · 48 · 64 = 12,288. The GRU keeps 104. The convolution has
#   three layers of width 80, which look 3, 12 and 48 tokens back, together 63: 80 · 63 = 5,040.
# - **Reach**: from how many tokens an answer can come.
# - **Right**: the share of right answers after 2, 4, 8 and 12 pairs. The last row is for guessing
#   one of the values in the text.

# %% tags=["folded"]
T, n_steps = 48, 5 if is_fast() else 500  # 12 pairs, twice
small = ThinkerConfig(48, d_model=64, n_layers=2, n_heads=2, d_ff=128, token_shift=True)
networks = {  # steps to read T tokens, numbers in the state, and reach
    "attention": (lambda: Thinker(small), 2, 2 * 2 * T * 64, T),
    "GRU": (small_models.GRU, T, 104, T),
    "convolution": (small_models.Convolution, 3, 80 * 3 * (1 + 4 + 16), 1 + 3 * (1 + 4 + 16)),
}
right, sizes = {}, {}
lines = ["T = 48       parameters  steps   state  reach  right: 2     4     8    12 pairs"]
for name, (make, steps, state, reach) in networks.items():
    torch.manual_seed(lesson_seed())
    network = make()
    small_models.train(network, n_steps)
    sizes[name] = sum(parameter.numel() for parameter in network.parameters())
    right[name] = [small_models.accuracy(network, n) for n in (2, 4, 8, 12)]
    shares = " ".join(f"{share:5.0%}" for share in right[name]).rjust(26)
    lines += [f"{name:11}  {sizes[name]:>10,}  {steps:>5}  {state:>6,}  {reach:>5}  {shares}"]
lines += ["guessing".ljust(len(lines[-1]) - 23) + " ".join(f"{1 / n:5.0%}" for n in (2, 4, 8, 12))]
print("\n".join(lines))

# %% tags=["check"]
assert all(75_000 < size < 89_000 for size in sizes.values())
assert (networks["convolution"][3], networks["attention"][2] // networks["GRU"][2]) == (64, 118)
if not is_fast():
    assert min(right["attention"]) > 0.9
    assert max(right["GRU"][-1], right["convolution"][-1]) < 0.5
    assert right["GRU"][0] > 0.6 > 0.45 > right["convolution"][0]
    assert right["GRU"][-1] > 1.5 / 12

# %% [markdown]
# - Attention answers all questions right here, for up to 12 pairs. Scores find a key by its
#   content, wherever it stands. The price is the state: 118 times as many numbers as in the GRU,
#   and more as T grows.
# - The GRU is better than guessing: here 76% with 2 pairs, 22% with 12.
# - The convolution reaches further back than this text is long. But with 2 pairs it gets 30% right
#   here, less than guessing: it has not even learned to say one of the two values in the text. Its
#   matrices belong to fixed distances, and a key stands somewhere else in every text.
#
# This run cannot say why the GRU fails: 104 numbers may be too few, or 500 steps too short. And the
# task was chosen because it needs recall. Where a fixed state is enough, it is cheaper.
#
# **How much cheaper?** Compare one layer of each, both of width C:
#
# | | attention | GRU |
# |---|---|---|
# | C × C matrices | 4 | 6 |
# | FLOPs of T tokens | 8·C²·T + 4·C·T² | 12·C²·T |
# | FLOPs of token T alone | 8·C² + 4·C·T | 12·C² |
# | bytes of state, fp32 | 8·C·T | 4·C |
# | steps, one after the other | 1 | T |
# | steps from first to last token | 1 | T − 1 |
#
# The term with T² has the scores and the weighted sums, 2·C·T² each, also the hidden half. Here
# C is 512:

# %% tags=["folded"]
C, LENGTHS = 512, (100, 500, 1000, 2000)


def attention_flops(C, T):
    return 8 * C * C * T + 4 * C * T * T


def gru_flops(C, T):
    return 12 * C * C * T


print("       MFLOP to read T        token T alone            bytes of state")
print("    T  attention     GRU     attention    GRU       attention      GRU")
for T in LENGTHS:
    read_all = f"{attention_flops(C, T) / 1e6:>9,.0f} {gru_flops(C, T) / 1e6:>7,.0f}"
    one_more = (8 * C * C + 4 * C * T) / 1e6
    one = f"{one_more:>9.1f} {12 * C * C / 1e6:>6.1f}"
    print(f"{T:>5,}  {read_all}     {one}       {8 * C * T:>9,}   {4 * C:>6,}")

# %% tags=["check"]
layer = Thinker(ThinkerConfig(10, d_model=C, n_layers=1, n_heads=8)).blocks[0].attention
gru = torch.nn.GRU(C, C, batch_first=True)
for T in LENGTHS:
    x = torch.randn(1, T, C)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x, None, AttentionMask(is_causal=True, kernel="reference"))
    assert counter.get_total_flops() == attention_flops(C, T)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _, state = gru(x)
    assert counter.get_total_flops() == gru_flops(C, T)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gru(x[:, -1:], state)
    assert counter.get_total_flops() == 12 * C * C
    _, k, v = layer.project(x, None)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        q, _, _ = layer.project(x[:, -1:], None)
        layer.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
    assert counter.get_total_flops() == 8 * C * C + 4 * C * T
    assert state.nbytes == 4 * C
    cache = KVCache(ThinkerConfig(10, d_model=C, n_layers=1), 1, T, "cpu", torch.float32)
    assert cache.nbytes == 8 * C * T
assert attention_flops(C, C) == gru_flops(C, C)
assert round(attention_flops(C, 2000) / gru_flops(C, 2000), 1) == 2.0
assert 8 * C * 2000 // (4 * C) == 4000

# %% [markdown]
# Below T = C tokens, attention needs *fewer* FLOPs than the GRU. At 2,000 tokens it needs twice as
# many, and 4,000 times the state. But the GRU takes 2,000 steps to read them, while attention reads
# all at once, which suits the chips that train it. And what the first token says reaches the last
# through 1,999 updates of the state, instead of one score.
#
# ## Endless text
#
# A cache grows with the text, and a model knows only the lengths of its training. A **sliding
# window** keeps only the newest keys and values.
#
# But the weights of a head must sum to 1, even if it finds nothing that is worth looking at. Xiao
# et al. 2023 found that heads of large models then look at the first tokens, whatever they are, and
# that these models break down when a window forgets them. So keep a few of the first tokens, too,
# as **attention sinks**:

# %%
generator = Generator(model, tokenizer, compile=False, window=60, sinks=4)  # writes texts
never_end = {tokenizer.bos_id: float("-inf")}  # added to the logit of the token that ends a text
params = SamplingParams(max_new_tokens=40 if is_fast() else 400, logit_bias=never_end)
done = generator.generate("Once upon a time", params)[0]
print(f"{len(done.token_ids)} tokens, {done.n_evicted} forgotten: ...{done.text[-45:]!r}")
for n in (100, 10_000):
    full, bounded = model.new_cache(1, n).nbytes, generator.new_cache(1, n).nbytes
    print(f"cache for {n:>6,} tokens: {full:>10,} bytes, with window and sinks {bounded:,}")
long_text = " ".join(generate_story(2, i).text for i in range(1 if is_fast() else 10))
no_sinks = Generator(model, tokenizer, compile=False, window=64)
scores = [one.score(long_text).logprobs for one in (generator, no_sinks)]
loss, loss_without = (-sum(logprobs) / len(logprobs) for logprobs in scores)
print(f"64 keys, 4 of them sinks: {loss:.2f} nats; without sinks: {loss_without:.2f}")

# %% tags=["check"]
assert len({generator.new_cache(1, n).nbytes for n in (100, 1000, 10_000)}) == 1
assert is_fast() or (len(done.token_ids), done.n_evicted) == (400, 340)
assert is_fast() or abs(loss - loss_without) < 0.1

# %% [markdown]
# The model read 404 tokens: 5 of the prompt and 399 new ones, since nobody reads the last. It kept
# 64 and forgot 340. (The prompt is *Once upon a time* and a token for the start of a text.)
#
# The bytes with a window stay the same, however long the text is. A token takes
# 153,600 / 100 = 1,536 bytes, so 102,912 bytes are those of 67 tokens: the 60 newest, the 4 sinks,
# an empty place that long prompts need, and 2 for the keys of the 4 sinks, stored a second time
# without values. (RoPE turns these anew for each query, as if nothing lay between them and the
# window.)
#
# The losses are almost the same with and without sinks: here 1.13 and 1.12. This small model,
# trained on 96 tokens, does not break down. Measure before you rely on sinks, or do without them.
#
# ## Exercises
#
# **1. Decode with a cache.** `prompt` is a list of tokens. Return a list of `n_new` new tokens:
# each is the likeliest one after all tokens before it.
#
# - Use `model.new_cache(1, n)` and `logits = model(tokens, cache=cache)`.
# - `torch.tensor([prompt])` has the shape (1, T) that the model wants. For a single token t, it is
#   `torch.tensor([[t]])`.
# - `int(logits[0, -1].argmax())` is the likeliest token after the last one that was read. (`argmax`
#   is the index of the largest number: 2 for 0.1, 0.3, 0.6.)
#
# Read each token only once. Do not read the last new token: nobody needs the logits after it.


# %% tags=["exercise"]
from thinker.lessons.checks.the_cache import check_bytes, check_decoding, check_suspect


def decode(model, prompt, n_new):
    return ...


check_decoding(decode)

# %% [markdown]
# **2. Bytes on paper.** A model has 32 layers and 32 query heads of width 128, which share 8 key
# and value heads. A number takes 2 bytes (the format bf16). How many bytes does its cache of 4,096
# tokens take?

# %% tags=["exercise"]
my_bytes = ...
check_bytes(my_bytes)

# %% [markdown]
# **3. Find the broken cache.** A model reads seven tokens: the first three in one pass (rows 0 to
# 2), the others one by one. The tables show their logits. One of the caches A, B and C has a bug.
# Another only computes in bf16, which rounds: it changes all rows a little. Which is broken, and
# how?
#
# - `"position"`: a token that is read alone gets a position that is too high.
# - `"mask"`: a token that is read alone does not see the oldest key.
# - `"store"`: the key of a token that is read alone is not stored, so later tokens miss it.
#
# For each bug, ask yourself which row would be the first to be wrong.

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
# - **cache**: keys and values of all tokens so far. **State**: what any network keeps of a text.
# - **equality test**: logits with a cache equal those of one pass.
# - **FLOPs**: multiplications and additions.
# - **fused attention**: computes scores in blocks and never stores all of them.
# - **attention sink**: one of the first tokens, which gets the weight that a head needs nowhere
#   else.
#
# Sources: fused attention, Dao et al. 2022 ([arXiv:2205.14135](https://arxiv.org/abs/2205.14135));
# sinks, Xiao et al. 2023 ([arXiv:2309.17453](https://arxiv.org/abs/2309.17453)); recall, Arora et
# al. 2023 ([arXiv:2312.04927](https://arxiv.org/abs/2312.04927)). Next: train a model on stories
# whose best possible loss is known.
