# %% [markdown]
# # Attention by hand
#
# *What does the word "sat" look at?* This lesson computes attention with numbers that you can check
# on paper, then with the library that trains real models. It takes about 15 minutes. You need to
# know what a dot product is.
#
# The code uses *torch*, which is like numpy (a *tensor* is an array), and *Thinker*, the library of
# this course. You need not read every cell: the text says what each one does.
#
# You will learn
#
# - the four steps of attention: score, scale, softmax, weighted sum;
# - what a causal mask hides, and why it comes before the softmax;
# - why scores are divided by √D.

# %%
import math

import torch

from thinker.lessons.materials.diagrams import attention_head
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.model.attention_dispatch import AttentionMask, attend

torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# <details><summary>New to torch? The signs that this lesson uses</summary>
#
# - `torch.tensor([[1.0, 2.0], [3.0, 4.0]])` is a table with 2 rows and 2 columns: its shape is (2,
#   2).
# - `a @ b` multiplies matrices: each row of a with each column of b, as a dot product. `b.T` swaps
#   the rows and columns of b.
# - `x.shape` is the shape, and `x.shape[-1]` its last number. `x.sum()` adds all numbers.
# - `x.softmax(dim=-1)` works along the last dimension, so along each row.
# - `x[3:]` is the part from number 3 on; counting starts at 0. `x[None]` adds a dimension of size 1
#   in front: it makes a table with one row of a list.
# - `x.triu(1)` keeps what is at least 1 place to the right of the diagonal, and sets the rest to 0.
#   `.bool()` turns 0 into False and other numbers into True. `torch.ones_like(x)` has the shape of
#   x and a 1 everywhere.
# - `x.masked_fill(b, value)` puts the value where b is True.
#
# </details>

# %% [markdown]
# ## What does "sat" look at?
#
# Take the sentence **The cat sat on mat**. A model cuts a text into **tokens**: words, or pieces of
# words. Here each word is a token. When the model reads *sat*, it needs to know who sat. So *sat*
# asks all words, and some answers count more than others. In numbers:
#
# - *sat* asks with a **query**: a list of numbers (a vector), here two of them.
# - Every word, *sat* too, has a **key** with as many numbers. It says what the word has to offer.
# - The **score** of a word is the dot product of query and key: multiply number by number, then
#   add.
#
# It is a little like a **library**. A reader comes with a question: the query. The titles on the
# spines are the keys. The content of the books is what we will call values. The better a title fits
# the question, the more the reader takes from that book. There the analogy ends. A reader picks a
# few books, but a word always gets one mixture of *all* books: much of some, little of others. And
# each word is a reader and a book at the same time.
#
# Where do queries and keys come from? In a model, each token is a vector x. Three matrices, which
# training has found, turn it into a query, a key and, later in this lesson, a value. For example,
# if x is (1, 2) and the rows of the first matrix are (0.1, 0.4) and (0.2, 0.2), then the query is
# 1 · (0.1, 0.4) + 2 · (0.2, 0.2) = (0.5, 0.8). From here on, we choose queries and keys ourselves.

# %%
words = ["The", "cat", "sat", "on", "mat"]
query = torch.tensor([0.5, 0.8])  # of "sat"
keys = torch.tensor([[0.1, 0.2], [0.7, 0.9], [0.5, 0.8], [0.3, 0.1], [0.2, 0.4]])

for word, key in zip(words, keys):
    products = query * key
    sums = f"{products[0]:.2f} + {products[1]:.2f} = {products.sum():.2f}"
    print(f"{word:>4}: 0.5 · {key[0]:.1f} + 0.8 · {key[1]:.1f} = {sums}")

# %% [markdown]
# The key of *sat* is equal to the query. But the key of *cat* points in almost the same direction
# and is longer, so *cat* has the highest score: 1.07.
#
# **Scale.** The scores are divided by √D, where D is the length of the query. With D = 2, we divide
# by 1.414. The last part of this lesson shows why.
#
# **Softmax.** Scores can be any numbers, but *sat* has 100% of its attention to give, no more and
# no less. So every score becomes a positive number (e to the power of the score), and each of these
# is divided by their sum. The results are the **weights**: none is negative, and they sum to 1.

# %%
scores = keys @ query  # @ makes all dot products at once: each row of keys with query
scaled = scores / math.sqrt(2)
exponentials = scaled.exp()
weights = exponentials / exponentials.sum()

print("word   score  /√2     e^     weight")
for row in zip(words, scores, scaled, exponentials, weights):
    print(f"{row[0]:>4}   {row[1]:.2f}   {row[2]:.4f}  {row[3]:.4f}  {row[4]:.4f}")
print(f"                sum {exponentials.sum():.4f}  {weights.sum():.4f}")

# %% tags=["check"]
assert torch.allclose(torch.tensor([1.0, 2.0]) @ torch.tensor([[0.1, 0.4], [0.2, 0.2]]), query)
assert torch.allclose(scores, torch.tensor([0.21, 1.07, 0.89, 0.23, 0.42]))
assert torch.allclose(scaled, torch.tensor([0.1485, 0.7566, 0.6293, 0.1626, 0.2970]), atol=1e-4)
assert torch.allclose(
    exponentials, torch.tensor([1.1601, 2.1310, 1.8763, 1.1766, 1.3458]), atol=1e-4
)
assert torch.allclose(weights, torch.tensor([0.1509, 0.2771, 0.2440, 0.1530, 0.1750]), atol=1e-4)

# %% [markdown]
# So *sat* gives 28% of its attention to *cat*, 24% to itself, and 15% to 18% to each of the others.
#
# ## The weighted sum
#
# Weights alone change nothing. Each word also has a **value**: what it passes on. The output for
# *sat* is the sum of all values, each multiplied by its weight. Give *cat* a value of (1, 0), *mat*
# (0, 1) and the others (0, 0), and the output says how much of each *sat* has received:

# %%
values = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
output = weights @ values
print(f"output of sat: {output[0]:.4f} of cat, {output[1]:.4f} of mat")

# %% tags=["check"]
assert torch.allclose(output, torch.tensor([0.2771, 0.1750]), atol=1e-4)

# %% [markdown]
# ## Do not look ahead
#
# A language model learns to guess the next word. While it reads *sat*, the words *on* and *mat*
# have not been written yet. So a **causal mask** hides them: their scores become −∞ *before* the
# softmax. e to the power of −∞ is 0, so hidden words get no weight, and the other weights still sum
# to 1.

# %%
masked = scaled.clone()
masked[3:] = -torch.inf
causal_weights = masked.softmax(dim=0)

show(
    SideBySide(
        Heatmap("scores / √2", scaled[None], ["sat"], words),
        Heatmap("masked", masked[None], ["sat"], words),
        Heatmap("weights", causal_weights[None], ["sat"], words, shade=1.0),
    )
)

# %% tags=["check"]
assert torch.allclose(causal_weights, torch.tensor([0.2245, 0.4124, 0.3631, 0.0, 0.0]), atol=1e-4)

# %% [markdown]
# Now *cat* has 41% of the attention of *sat*.
#
# **Question.** What if you set the weights of *on* and *mat* to 0 after the softmax instead?
#
# <details><summary>Answer</summary>
#
# The other weights would still be 0.15, 0.28 and 0.24. Their sum is 0.67, so the output would be a
# third too small, and the future would still matter: a longer future would make it even smaller.
#
# </details>
#
# This is the whole way, for the one word *sat*. A model does it for each word:

# %% tags=["folded"]
show(
    attention_head(),
    "The vector of sat, times a matrix, is the query. The vectors of all words, times two other "
    "matrices, are keys and values. Query and keys give scores, divided by the root of D. The "
    "causal mask and the softmax turn them into weights. The output is the sum of the values, each "
    "times its weight.",
)

# %% [markdown]
# ## A whole sentence at once
#
# Every word asks at the same time, so queries, keys and values are matrices with one row per word.
# Three tokens are enough to see it. Their queries and keys are equal: (1, 0), (0, 1) and (1, 1).
# These scores are *not* scaled, so that you can do them in your head.

# %%
x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
v = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
tokens = ["a", "b", "c"]

raw = x @ x.T  # .T swaps rows and columns, so this is every query with every key: (3, 3)
hidden = torch.ones(3, 3).triu(1).bool()  # 1 right of the diagonal, where keys are later: True
masked = raw.masked_fill(hidden, -torch.inf)  # -inf where hidden is True
weights = masked.softmax(dim=-1)  # along each row

show(
    SideBySide(
        Heatmap("raw scores, not scaled", raw, tokens, tokens, digits=0),
        Heatmap("masked scores", masked, tokens, tokens, digits=0),
        Heatmap("weights", weights, tokens, tokens, digits=4, shade=1.0),
        Heatmap("output", weights @ v, tokens, ["1st", "2nd"], digits=4),
    )
)

# %% tags=["check"]
assert torch.allclose(weights[1], torch.tensor([0.2689, 0.7311, 0.0]), atol=1e-4)
assert torch.allclose(weights[2], torch.tensor([0.2119, 0.2119, 0.5761]), atol=1e-4)
assert torch.allclose(
    weights @ v, torch.tensor([[1.0, 2.0], [2.4621, 0.5379], [0.8478, 1.0]]), atol=1e-4
)

# %% [markdown]
# Rows are queries, columns are keys, and each row of weights sums to 1. The first token sees only
# itself. The second row has the scores 0 and 1, so its weights are 1 / (1 + e) = 0.2689 and
# e / (1 + e) = 0.7311.
#
# Divided by √2, the weights of the last row move closer together:

# %%
scaled_weights = (masked / math.sqrt(2)).softmax(dim=-1)
print("not scaled:", weights[2])
print("scaled:    ", scaled_weights[2])

# %% tags=["check"]
assert torch.allclose(scaled_weights[2], torch.tensor([0.2483, 0.2483, 0.5035]), atol=1e-4)

# %% [markdown]
# ## Four words on paper
#
# With well-chosen numbers, even scaled weights are simple fractions. e to the power of 0.693 is 2,
# and 0.98 / √2 = 0.693. So each 0.98 in a score doubles the exponential. Take **Big dogs chase
# cats**. The first number of a key says whether a word is a thing, and the second whether it is an
# action:
#
# | word | query | key | value |
# |---|---|---|---|
# | Big | (0.98, 0) | (0, 0) | (4, 0) |
# | dogs | (0, 1.96) | (1, 0) | (2, 2) |
# | chase | (1.96, 0) | (0, 1) | (0, 4) |
# | cats | (0, 1.96) | (1, 0) | (1, 3) |
#
# So *chase* looks for things. Its score is 1.96 with *dogs*, and 0 with *Big* and itself. *cats*
# is hidden. 1.96 is 2 · 0.98, so the exponentials are 1, 4 and 1. Their sum is 6, and the weights
# are 1/6, 4/6 and 1/6.
#
# The first number of the output is (1 · 4 + 4 · 2 + 1 · 0) / 6 = 2. The second is 2, too. Compute
# the row of *cats* before you look:

# %%
unit = math.sqrt(2) * math.log(2)  # 0.98
sentence = ["Big", "dogs", "chase", "cats"]
q = unit * torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
k = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
v = torch.tensor([[4.0, 0.0], [2.0, 2.0], [0.0, 4.0], [1.0, 3.0]])

hidden = torch.ones(4, 4).triu(1).bool()
exponentials = (q @ k.T / math.sqrt(2)).masked_fill(hidden, -torch.inf).exp()
weights = exponentials / exponentials.sum(dim=-1, keepdim=True)  # by the sum of each row

show(
    SideBySide(
        Heatmap("exponentials", exponentials, sentence, sentence, digits=0),
        Heatmap("weights", weights, sentence, sentence, digits=3, shade=1.0),
        Heatmap("output", weights @ v, sentence, ["1st", "2nd"], digits=0),
    )
)

# %% tags=["check"]
assert round(unit, 2) == 0.98
assert round(0.98 / math.sqrt(2), 3) == round(math.log(2), 3) == 0.693
rows = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 4, 1, 0], [1, 1, 4, 1]])
assert torch.allclose(exponentials, rows.float())
assert torch.allclose(weights @ v, torch.tensor([[4.0, 0], [3, 1], [2, 2], [1, 3]]), atol=1e-5)

# %% [markdown]
# *cats* looks for actions. Its exponentials are 1, 1, 4 and 1, so *chase* gets 4/7. *dogs* looks
# for actions, too, but *chase* comes later. So *dogs* divides its weight equally between the two
# words that it sees.
#
# ## Five lines, and the library
#
# This is all of attention:


# %%
def five_lines(q, k, v):  # (T, D) each: T tokens, D numbers per token
    scores = q @ k.T / math.sqrt(q.shape[-1])  # (T, T); q.shape[-1] is D
    hidden = torch.ones_like(scores).triu(1).bool()
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v  # (T, D)


# %% [markdown]
# `attend` is the function that Thinker trains with. It takes several texts (B) at once, and several
# **heads** (H): a head is one such attention, and lesson 4 shows why a model has many. So `attend`
# wants tensors of shape (B, H, T, D). Indexing with `[None, None]` adds the first two dimensions.

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 6, 8, generator=generator)
ours = five_lines(q, k, v)
theirs = attend(q[None, None], k[None, None], v[None, None], AttentionMask(is_causal=True))[0, 0]
print(f"largest difference: {(ours - theirs).abs().max():.0e}")

# %% tags=["check"]
assert torch.allclose(ours, theirs, atol=1e-6)

# %% [markdown]
# ## Check other people's numbers
#
# The five keys of *The cat sat on mat* come from a text on attention. It prints the weights 0.08,
# 0.34, 0.29, 0.08 and 0.21 for them. They sum to 1, so they look right. Are they?
#
# The ratio of two weights is e to the power of the difference of their scores, after scaling. Take
# *cat* and *The*: ln(0.34 / 0.08) = 1.447, and the scores differ by 1.07 − 0.21 = 0.86. So the
# scores must have been divided by 0.86 / 1.447 = 0.59. Other pairs have to give the same divisor:

# %%
printed = torch.tensor([0.08, 0.34, 0.29, 0.08, 0.21])
for word, index in (("cat", 1), ("sat", 2), ("mat", 4)):
    divisor = (scores[index] - scores[0]) / (printed[index] / printed[0]).log()
    print(f"{word} and The: the scores would have been divided by {divisor:.2f}")
print("softmax, not scaled:", [round(x, 4) for x in scores.softmax(0).tolist()])

# %% tags=["check"]
pairs = [(float(scores[i] - scores[0]), float(printed[i])) for i in (1, 2, 4)]
assert [round(difference / math.log(p / 0.08), 2) for difference, p in pairs] == [0.59, 0.53, 0.22]
assert round(math.log(0.34 / 0.08), 3) == 1.447
smallest = pairs[0][0] / math.log(0.345 / 0.075)  # of cat, if rounding hides as much as it can
largest = pairs[2][0] / math.log(0.205 / 0.085)  # of mat
assert largest < 0.24 < 0.56 < smallest
assert torch.allclose(
    scores.softmax(0), torch.tensor([0.1317, 0.3113, 0.2600, 0.1344, 0.1625]), atol=1e-4
)

# %% [markdown]
# Three pairs, three divisors, and rounding to two digits does not explain them. So the printed
# weights are not the softmax of these scores at all. Another text has our three tokens and prints
# 0.268 and 0.731 for the second row. These are right, but cut off instead of rounded, and not
# scaled. When you read about attention, compute at least one row yourself.
#
# ## Why √D?
#
# A score is a sum of D products. Suppose that the numbers in queries and keys are random:
# independent of each other (like two dice, one says nothing about the other), with mean 0 and
# standard deviation 1. (The standard deviation says how far numbers typically are from their mean.
# The variance is its square.) For such numbers,
#
# - the variance of a product is the product of the variances, because the means are 0: here
#   1 · 1 = 1;
# - the variance of a sum is the sum of the variances, here D · 1 = D.
#
# So a score has a standard deviation of √D. Measure it on 4,000 random queries, each with 16 keys.
# The last columns show the largest of the 16 weights, on average:

# %% tags=["folded"]
generator = torch.Generator().manual_seed(0)
print("   D   deviation of scores   √D   largest of 16 weights: not scaled   scaled")
spreads, sharpness = [], []
for D in (4, 16, 64, 256, 1024):
    q, k = torch.randn(2, 4000, 16, D, generator=generator)
    scores = (q[:, :1] @ k.transpose(1, 2))[:, 0]  # (4000, 16): one query and 16 keys, 4,000 times
    largest = [
        float((scores / divisor).softmax(-1).max(-1).values.mean()) for divisor in (1, math.sqrt(D))
    ]
    spreads.append(float(scores.std()) / math.sqrt(D))
    sharpness.append(largest)
    print(
        f"{D:>4}   {scores.std():>19.1f} {math.sqrt(D):>4.0f}   {largest[0]:>33.2f}   {largest[1]:>6.2f}"
    )

# %% tags=["check"]
assert all(abs(spread - 1) < 0.02 for spread in spreads)
assert [round(first, 2) for first, _ in sharpness] == sorted(
    round(first, 2) for first, _ in sharpness
)
assert sharpness[-1][0] > 0.94
assert all(abs(second - 0.24) < 0.02 for _, second in sharpness[1:])

# %% [markdown]
# Without scaling, a head of width 1,024 gives almost all of its weight to a single key, before it
# has learned anything. The softmax is then **saturated**: one weight is nearly 1, and a small
# change of a score changes no weight. That also stops the head from learning. Training follows the
# **gradient**, which says how much the result changes if a number changes a little. Where nothing
# changes, the gradient is almost 0. The next figure shows how long the gradient is that reaches the
# query.

# %% tags=["folded"]
from thinker.runtime.plot_style import BLUE, ORANGE, new_figure

widths = (4, 16, 64, 256, 1024)
sizes = {"not scaled": [], "divided by √D": []}
generator = torch.Generator().manual_seed(0)
for D in widths:
    q, k = torch.randn(2, 4000, 16, D, generator=generator, dtype=torch.float64)
    q = q[:, :1].requires_grad_()  # (4000, 1, D): one query and 16 keys, 4,000 times
    for name, divisor in zip(sizes, (1, math.sqrt(D))):
        weights = (q @ k.transpose(1, 2) / divisor).softmax(-1)
        (gradient,) = torch.autograd.grad(weights[..., 0].sum(), q)  # of the first key's weight
        sizes[name].append(float(gradient.norm(dim=-1).median()))

figure, (axes,) = new_figure(6.5, 3.6)
for (name, values), color in zip(sizes.items(), (ORANGE, BLUE)):
    axes.plot(widths, values, marker="o", color=color, label=name)
axes.set(
    xscale="log",
    yscale="log",
    xlabel="D, width of the head",
    ylabel="median length of the gradient",
)
axes.set_xticks(widths, [str(width) for width in widths])
axes.minorticks_off()
axes.legend(frameon=False)
show(
    figure,
    "The gradient vanishes as heads get wider, unless scores are divided by the root of the width.",
)
for name, values in sizes.items():
    print(f"{name:>14}: {values[0]:.3f} at D = 4, {values[-1]:.1e} at D = 1024")

# %% tags=["check"]
assert sizes["not scaled"][-1] < 1e-7 < 0.02 < min(sizes["divided by √D"])

# %% [markdown]
# ## Exercises
#
# Replace the dots, run the cell, and read what it says. Then run it again.
#
# **1. Build your own attention.** q, k and v have shape (T, D). Scale the scores, and hide later
# tokens. Try it without looking at the five lines above. The signs of torch at the top of this page
# help.


# %% tags=["exercise"]
from thinker.lessons.checks.attention_by_hand import check_attention


def my_attention(q, k, v):
    return ...


check_attention(my_attention)

# %% [markdown]
# **2. Two words on paper.** Two words have the queries (0.98, 0.98) and (0.98, 0), the keys (1, 0)
# and (0, 3), and the values (15, 0) and (0, 15). Scale by √2. No mask, so each word sees both. What
# are the two outputs? All results are whole numbers.

# %% tags=["exercise"]
from thinker.lessons.checks.attention_by_hand import check_two_words

my_outputs = ...  # a row for each word, such as [[1, 2], [3, 4]]
check_two_words(my_outputs)

# %% [markdown]
# **3. Another divisor.** The entries of queries and keys are independent, with mean 0 and standard
# deviation 2, and D = 64. By what do you divide the scores so that their standard deviation is 1?

# %% tags=["exercise"]
from thinker.lessons.checks.attention_by_hand import check_divisor

my_divisor = ...
check_divisor(my_divisor)

# %% [markdown]
# ## Solutions

# %% tags=["solution"]
check_attention(five_lines)

# The scores are 0.98 and 2.94, then 0.98 and 0. So the exponentials are 2 and 8, then 2 and 1.
# The weights are 1/5 and 4/5, then 2/3 and 1/3. The values are 15 times (1, 0) and (0, 1).
check_two_words([[3, 12], [10, 5]])

# An entry has the variance 4, a product 4 · 4 = 16, and a sum of 64 products 64 · 16 = 1,024 = 32².
check_divisor(32)

# %% [markdown]
# ## Words of this lesson
#
# - **token**: a word or a piece of a word; what a model reads one at a time.
# - **query, key, value**: what a token asks, what it offers, and what it passes on.
# - **score**: dot product of a query and a key. **Weight**: its share after the softmax.
# - **causal mask**: hides later tokens.
# - **head width D**: the length of a query. **T**: the number of tokens.
#
# Attention was described by Vaswani et al. 2017
# ([arXiv:1706.03762](https://arxiv.org/abs/1706.03762)). Next: masks, and what a model does that
# can look ahead.
