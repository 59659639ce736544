# %% [markdown]
# # Who needs to look at everything?
#
# *What does a model lose if each token looks at no more than 24 tokens?* This lesson counts what
# attention costs, draws cheaper patterns, and measures what they no longer find. It takes about 20
# minutes. You need to know scores, weights and the causal mask.
#
# You will learn
#
# - why twice the text costs four times as many scores;
# - how to write a pattern as a condition on two positions, and how far a stack of windows reaches;
# - what linear attention reorders, and what it gives up.

# %%
from functools import partial
from timeit import repeat

import torch

from thinker.interpretability import pattern_plots
from thinker.lessons.materials.practice import is_fast, train_on_task
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.model.kernels.linear_attention import linear_attention, random_features
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

# %% [markdown]
# ## The bill
#
# With a causal mask, the first token scores one key, the second two, and so on; the last scores T
# keys. Together these are T · (T + 1) / 2 scores per head and layer. If each token looks at no more
# than the newest 64 keys, almost every token adds the same 64 scores, however long the text is.

# %%
bill = {T: (T * (T + 1) // 2, 64 * T - 64 * 63 // 2) for T in (1_000, 2_000, 100_000)}
for T, (everything, newest) in bill.items():
    print(f"{T:>7,} tokens: {everything:>13,} scores, or {newest:>9,} in a window of 64")

# %% tags=["check"]
for T, counts in bill.items():
    assert counts == (sum(range(T + 1)), sum(min(q + 1, 64) for q in range(T)))
assert 2 < bill[2_000][1] / bill[1_000][1] < 2.04 < 3.99 < bill[2_000][0] / bill[1_000][0] < 4
assert 780 < bill[100_000][0] / bill[100_000][1] < 790

# %% [markdown]
# Twice the text costs four times as many scores on the left, twice as many on the right. At 100,000
# tokens, the left is almost 800 times the right. A table of all T × T scores, 4 bytes each, would
# fill 40 GB for one head. (A **kernel** is the program that computes attention on the chip. Good
# kernels never store this table, but they still compute the half below the diagonal.)
#
# ## A pattern is a condition
#
# A **pattern** says which keys a query may see, by a condition on two positions: that of the query,
# q, and that of the key, k, both counted from 0. "The newest four keys, including my own" is one
# line. Thinker calls it `window(4)`:

# %%
T = 16
q, k = torch.arange(T)[:, None], torch.arange(T)  # a column of queries, a row of keys
by_hand = (k <= q) & (q - k < 4)


def visible(text, T):
    return pattern_plots.example_mask(parse_pattern(text), T, n_heads=1)[0]  # (T, T)


print("the same as window(4):", torch.equal(by_hand, visible("window(4)", T)))

# %% tags=["check"]
assert torch.equal(by_hand, visible("window(4)", T))
assert torch.equal((k <= q) & ((q - k < 4) | ((q - k) % 4 == 0)), visible("strided(4)", T))

# %% [markdown]
# Patterns can be combined: `|` means at least one of two, `&` means both. These are the usual ones:
#
# - `full`: all tokens so far. Below, it is called *causal*.
# - `window(w)`: the newest w keys.
# - `global(g)`: the first g tokens of the text, mostly as `window(w) | global(g)`.
# - `strided(s)`: the newest s keys, and those at the distances s, 2s, 3s and so on.
# - `bigbird(w, g, b, r)`: `window(w) | global(g)`, and r random blocks of b earlier tokens.
#
# The pictures have a row for each query and a column for each key. Seen keys are blue:

# %% tags=["folded"]
patterns = ["full", "window(4)", "global(2)"]  # `full` is causal
patterns += ["window(4) | global(2)", "strided(4)", "bigbird(2, 1, 2, 1)"]
names = {text: text.replace("full", "causal") for text in patterns}
for part in (patterns[:3], patterns[3:]):
    figure, panels = new_figure(8, 3.1, columns=3, share=False)
    for axes, text in zip(panels, part):
        plot = pattern_plots.make_pattern_plot(text, T, n_heads=1)
        plot.title = names[text]
        pattern_plots.plot_pattern(axes, plot)
        axes.axis("off")
    titles = " and ".join(names[text] for text in part)
    show(figure, f"{titles}: a row for each query, a column for each key.")
print("pattern                keys of the last query   all 16 queries")
for text in patterns:
    n_keys = visible(text, T).sum(dim=1)
    print(f"{names[text]:<22} {n_keys[-1]:>22} {n_keys.sum():>16}")

# %% tags=["check"]
n_keys = {text: visible(text, 64).sum(dim=1) for text in patterns}
assert n_keys["strided(4)"].tolist() == [min(q + 1, 4) + q // 4 for q in range(64)]
assert [text for text in patterns if n_keys[text][-1] > n_keys[text][:32].max()] == [
    "full",
    "strided(4)",
]
assert [int(visible(text, 16).sum()) for text in patterns] == [136, 58, 31, 81, 82, 67]
assert [int(visible(text, 16)[-1].sum()) for text in patterns] == [16, 4, 2, 6, 7, 5]

# %% [markdown]
# Query 15 of `strided(4)` sees 4 keys nearby and 3 further back, at the distances 4, 8 and 12. Only
# with the plain causal mask and with `strided` does the number grow with the text.
#
# ## How far does a window reach?
#
# One layer of `window(3)` reads up to 2 tokens back. But these have read 2 tokens further back in
# the layer below. So L layers of `window(w)` should reach L · (w − 1) tokens back.
#
# Gradients show it: how much does the output of the last token change if an earlier input changes?
# The table shows powers of ten: −3 means about 10⁻³ = 0.001. "Hidden" means a gradient of exactly
# 0: nothing gets through.

# %%
sizes = []
for L in (1, 2, 3, 4):
    torch.manual_seed(0)
    config = ThinkerConfig(10, 32, L, n_heads=2, attention="window(3)", init="normal")
    inputs = torch.randn(1, 10, 32, dtype=torch.float64).requires_grad_()
    output = Thinker(config).double()(embeddings=inputs)[0, -1]  # of the last token
    gradient = torch.autograd.grad(output.square().sum(), inputs)[0]  # (1, 10, 32)
    sizes.append(gradient[0].norm(dim=-1).flip(0))  # by distance
sizes, rows = torch.stack(sizes), [f"L = {L}" for L in (1, 2, 3, 4)]
title = "log10 of the gradient, by tokens back"
show(Heatmap(title, sizes.log10(), rows, list("0123456789"), digits=0, shade=40))

# %% tags=["check"]
assert [row.nonzero().flatten().tolist() for row in sizes] == [
    list(range(2 * L + 1)) for L in (1, 2, 3, 4)
]
assert all(
    10 * sizes[3, d + 1 : d + 3].max() < sizes[3, max(1, d - 1) : d + 1].min() for d in (2, 4, 6)
)
two_layers = {text: visible(text, 64).float() @ visible(text, 64).float() > 0 for text in patterns}
assert two_layers["window(4) | global(2)"][63].nonzero().flatten().tolist() == [
    0,
    1,
    *range(57, 64),
]
assert torch.equal(two_layers["strided(4)"], visible("full", 64))

# %% [markdown]
# Each row ends where the formula says: 2, 4, 6 and 8 tokens back. The powers fall in steps, because
# a far token has to pass through more layers.
#
# **Question.** In `window(4) | global(2)`, every token sees the first two. Can the last of 64
# tokens learn through them, in two layers, what stands in the middle?
#
# <details><summary>Answer</summary>
#
# No. The mask is causal: the first two tokens do not see later ones, so they cannot pass them on.
# `strided(4)` connects all tokens in two layers: steps of 4, then the window.
#
# </details>
#
# ## Linear attention: the same sum in another order
#
# Patterns drop keys. **Linear attention** keeps all of them, but never computes the scores. Leave
# out the softmax for a moment: the weight of a key is q · k, divided by the sum of all q · k. (All
# products are positive in this example. In general they are not, which is one more reason for the
# exponential.) Take the query (1, 2), the keys (1, 0), (0, 1), (1, 1) and the values (6, 0), (0,
# 6), (6, 6).
#
# - **Scores first.** The scores are 1, 2 and 3. The weighted values 1 · (6, 0) + 2 · (0,
#   6) + 3 · (6, 6) = (24, 30), divided by 1 + 2 + 3 = 6, are (4, 5).
# - **Keys and values first.** Multiply each number of a key with each number of its value: that is
#   a 2 × 2 table. Add the tables. The query times their sum is (24, 30) again. It is divided by the
#   query times the sum of the keys, (1, 2) · (2, 2) = 6.

# %%
query, keys = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
values = torch.tensor([[6.0, 0.0], [0.0, 6.0], [6.0, 6.0]])
tables = [key[:, None] * value for key, value in zip(keys, values)]
scores, total = query @ keys.T, sum(tables)
titles, sides = ("1st key · value", "2nd key · value", "3rd key · value"), ("1st", "2nd")
tables = [Heatmap(*pair, sides, sides, digits=0, shade=14) for pair in zip(titles, tables)]
show(SideBySide(*tables, Heatmap("sum", total, sides, sides, digits=0, shade=14)))
print("scores first:         ", (scores @ values / scores.sum()).tolist())
print("keys and values first:", (query @ total / (query @ keys.sum(0))).tolist())

# %% tags=["check"]
assert (scores.tolist(), (scores @ values).tolist()) == ([1, 2, 3], [24, 30])
assert (query @ total / (query @ keys.sum(0))).tolist() == [4, 5]

# %% [markdown]
# The second way needs no list of keys. It keeps two sums: that of the tables stays 2 × 2, and that
# of the keys stays 2 numbers, however long the text is.
#
# With the softmax, q · k is replaced by e to the power of the score. This does not split into a
# part of q and a part of k, but it can be estimated: Thinker's `linear(m)` turns each query and
# each key into m **random features**, so that the dot product of two such lists is *on average* e
# to the power of the score.
#
# <details><summary>How? (You can skip this.)</summary>
#
# First divide q and k by the fourth root of D. Then q · k is the scaled score.
#
# Draw m vectors ω of independent standard normal numbers (mean 0, standard deviation 1). Turn x
# into the m numbers exp(ω · x − |x|² / 2) / √m. The dot product of the features of q and k is then
# the mean of exp(ω · (q + k) − |q|² / 2 − |k|² / 2) over m vectors. On average, exp(ω · z) is
# exp(|z|² / 2), and |q + k|² / 2 − |q|² / 2 − |k|² / 2 = q · k.
#
# </details>
#
# How large is the error of the outputs? We draw the numbers of queries and keys with a standard
# deviation of 0.4, then of 1.0. Values have 16 numbers, so each head keeps m · (16 + 1) numbers:
# m · 16 in the table, and m in the sum of the keys.

# %% tags=["folded"]
generator = torch.Generator().manual_seed(0)
errors = {0.4: [], 1.0: []}
print("features   error at 0.4   error at 1.0   numbers kept")
for m in (4, 16, 64, 256, 1024):
    for std, found in errors.items():
        q, k, v = torch.randn(3, 10, 4, 64, 16, generator=generator)  # (B, H, T, D) each
        exact = attend(std * q, std * k, v, AttentionMask(is_causal=True))
        estimate, state = linear_attention(std * q, std * k, v, random_features(m, 16, m))
        found.append(float((estimate - exact).square().mean().sqrt()))
    small, large, n_kept = errors[0.4][-1], errors[1.0][-1], state.sums[0, 0].numel()
    print(f"{m:>8}   {small:>12.3f}   {large:>12.3f} {n_kept:>14,}")
print(f"size of the exact outputs at 1.0: {exact.square().mean().sqrt():.2f}")

# %% tags=["check"]
assert all(1.6 < first / second < 2.4 for first, second in zip(errors[0.4], errors[0.4][1:]))
assert all(1 < first / second < 1.4 for first, second in zip(errors[1.0], errors[1.0][1:]))
assert abs(float(exact.square().mean().sqrt()) - 0.36) < 0.02 < 0.2 < errors[1.0][-1]
assert [round(errors[std][0], 2) for std in errors] == [0.11, 0.39]
assert state.sums[0, 0].numel() == 1024 * (16 + 1)

# %% [markdown]
# At 0.4, four times as many features give about half the error: it falls as 1 / √m. At 1.0, the
# weights are sharper, and the error falls slowly: it is 0.39 with 4 features and still 0.23 with
# 1,024, where the outputs themselves have a size of 0.35. Linear attention is good at averages, and
# bad at looking at exactly one token.
#
# ## What it saves
#
# Fewer scores save time only if the program skips the others, as Thinker does for windows and
# linear attention. This is the forward pass of a small model on this machine:

# %% tags=["times"]
lengths = (256, 512, 1024) if is_fast() else (1024, 2048, 4096, 8192)
times = {}
for name, text in (("causal", "full"), ("window(64)", "window(64)"), ("linear(16)", "linear(16)")):
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 2}
    model = Thinker(ThinkerConfig(**sizes, max_seq_len=8192, attention=text))
    inputs = [torch.zeros(1, T, dtype=torch.long) for T in lengths]
    runs = [repeat(partial(model, x), number=1, repeat=4) for x in inputs]  # seconds
    times[name] = [1000 * min(seconds) for seconds in runs]
    print(f"{name:>10}:", *[f" T = {T}: {ms:.1f} ms" for T, ms in zip(lengths, times[name])])

# %% tags=["folded", "times"]
figure, (axes,) = new_figure(6.5, 3.4)
for (name, milliseconds), color in zip(times.items(), (ORANGE, BLUE, GREY)):
    axes.plot(lengths, milliseconds, marker="o", color=color, label=name)
axes.set(xlabel="T, tokens", ylabel="time in ms", xticks=lengths)
axes.legend(frameon=False)
show(figure, "With the length, the time with the causal mask alone grows fastest.")

# %% [markdown]
# Your times will differ, and a busy machine makes them jump. With the causal mask alone, the scores
# take four times as long for twice the tokens, but the rest of the model, such as its MLP, takes
# only twice as long. So for long texts, the time should grow between two and four times. Windows
# and linear attention should take about twice as long for twice the tokens. (Short runs have a
# fixed cost on top, so here it can be less.) In short texts, there is little to save.
#
# ## What it loses
#
# Now a task that needs exact recall. A text has four parts of 24 tokens. Each shows four pairs of a
# letter and a number, then eight blanks, and then asks for the four letters in another order. After
# each, the model has to name the number that stood after it.

# %%
from thinker.lessons.materials.recall import NAMES, make_recall_in_parts

tokens, _ = make_recall_in_parts(torch.Generator().manual_seed(1))
print("first part:", " ".join(NAMES[token] for token in tokens[0, :24]))

# %% [markdown]
# A number stands 9 to 21 tokens before the letter that asks for it. With 16 numbers, guessing is
# right in 6% of cases. We train one layer with each pattern. (With `token_shift`, the vector of the
# token before, times trained factors, is added to the vector of each token. So one layer can find
# the number after a letter.)

# %%
accuracy, sizes = {}, {"vocab_size": 33, "d_model": 64, "n_layers": 1, "n_heads": 4, "d_ff": 64}
tested = ["full", "window(8)", "window(16)", "window(24)"]  # `full` is causal
tested += ["window(8) | global(4)", "strided(8)", "bigbird(8, 4, 4, 2)", "linear(8)"]
for text in tested:
    config = ThinkerConfig(**sizes, attention=text, token_shift=True)
    model, _ = train_on_task(config, make_recall_in_parts, n_steps=300, lr=1e-2)
    tokens, targets = make_recall_in_parts(torch.Generator().manual_seed(99), B=256)
    with torch.no_grad():
        is_right = (model(tokens).argmax(-1) == targets)[targets >= 0]
    accuracy[text] = float(is_right.float().mean())
    keys = f"{visible(text, 96).sum() / 96:.1f} keys" if text != "linear(8)" else "sums"
    print(f"{names.get(text, text):>21}: {accuracy[text]:>4.0%} right, {keys}")

# %% tags=["check"]
distances = [16 + 2 * j - (2 * i + 1) for i in range(4) for j in range(4)]
assert [min(distances), max(distances), sum(d < 16 for d in distances), 8 * 17] == [9, 21, 10, 136]
assert all(distance % 2 for distance in distances)
assert [round(int(visible(text, 96).sum()) / 96, 1) for text in ("full", "window(24)")] == [
    48.5,
    21.1,
]
if not is_fast():
    assert accuracy["window(8)"] < 0.09 < 0.98 < min(accuracy["full"], accuracy["window(24)"])
    assert abs(accuracy["window(16)"] - (10 / 16 + 6 / 16 / 16)) < 0.03
    assert 0.12 < accuracy["linear(8)"] < 0.5
    assert max(accuracy["window(8) | global(4)"], accuracy["strided(8)"]) < 0.09
    assert 0.1 < accuracy["bigbird(8, 4, 4, 2)"] < 0.4

# %% [markdown]
# Your runs may differ a little.
#
# - `window(24)` finds everything with 21.1 keys per query on average, where the causal mask alone
#   leaves 48.5.
# - `window(8)` is too short. It gets 6% right, so it can only guess. With `global(4)`, it could see
#   2 of the 16 answers of a text, but it has not learned to use them. `strided(8)` sees none: the
#   distances of all answers are odd, and those that it sees further back are 8, 16, 24 and so on.
# - `bigbird` sees some of the answers through its random blocks and its first tokens. It gets 18%
#   right here.
# - `linear(8)` sees every token, but gets only 21% right here. It is bad at looking at one token,
#   and each of its heads keeps only 8 · (16 + 1) = 136 numbers. The keys and values of 96 tokens
#   are 96 · 2 · 16 = 3,072.
#
# **Question.** `window(16)` gets 66% right here. Where does this number come from?
#
# <details><summary>Answer</summary>
#
# It sees 15 tokens back. Pair i and question j (0 to 3) are 15 + 2 · (j − i) apart, so it sees the
# pair if j ≤ i: in 10 of 16 cases. In the other 6, it guesses. So we expect
# 10/16 + 6/16 · 1/16 = 0.648.
#
# </details>
#
# So the cheapest good pattern fits the distances in your data. If these are unknown, some layers
# have to look at everything. Gemma 2, for example, alternates layers with a window and layers that
# see all tokens so far.
#
# ## Exercises
#
# Replace the dots, run the cell, and read what it says. Then run it again.
#
# **1. Write a pattern.** The newest 9 keys, but only every third: at the distances 0, 3 and 6. q is
# a column of positions and k is a row, as above. Return a table of True and False.


# %% tags=["exercise"]
from thinker.lessons.checks.sparse_attention import check_cheapest, check_count, check_pattern


def my_pattern(q, k):
    return ...


check_pattern(my_pattern)

# %% [markdown]
# **2. Count on paper.** `block(4, 2)` divides the text into blocks of 4 tokens. A query sees its
# own block, up to itself, and the block before. How many keys does query 13 see (counted from 0),
# and how many do all queries of 16 tokens see together?

# %% tags=["exercise"]
my_counts = ...  # such as [3, 40]
check_count(my_counts)

# %% [markdown]
# **3. Choose the cheapest.** In a model with one layer, each of 512 tokens needs itself, the 50
# before it, and the first 8 (unless they come later). Which pattern takes the fewest keys for that?

# %% tags=["exercise"]
my_choice = ...  # such as "full"
check_cheapest(my_choice)

# %% [markdown]
# ## Solutions

# %% tags=["solution"]
# Not later, not more than 8 back, and a distance of 0, 3 or 6. & needs the parentheses.
check_pattern(lambda q, k: (k <= q) & (q - k < 9) & ((q - k) % 3 == 0))
# Query 13 is the second in its block: 2 keys there, 4 in the block before. The queries of a
# block see 1 + 2 + 3 + 4 = 10 keys in it. In three of the four blocks, each also sees 4 earlier
# keys: 10 + 3 · (10 + 16).
check_count([6, 88])
# 50 tokens before and the token itself are 51 keys. Keys of either kind are needed: |.
check_cheapest("window(51) | global(8)")

# %% [markdown]
# ## Words of this lesson
#
# - **pattern**: the condition that says which keys a query sees.
# - **window**: the newest w keys. **Global tokens**: keys that every later query sees.
# - **linear attention**: sums up keys and values first; its cost grows with T, not T². **Random
#   features**: numbers whose dot products estimate the weights of the softmax.
#
# Sources: windows and global tokens (arXiv:2004.05150), strides (arXiv:1904.10509), BigBird
# (arXiv:2007.14062), random features (arXiv:2009.14794), Gemma 2 (arXiv:2408.00118). Next: the
# cache, and why a model does not read its own text again for each new token.
