# %% [markdown]
# # Masks
#
# *A model predicts almost without error, and then it writes nonsense. What happened?* This lesson
# removes the mask from attention, trains a model that cheats, and tests for the cheat. It takes
# about 20 minutes. You need lesson 1.
#
# You will learn
#
# - what a language model is made of, and what its loss is;
# - what the causal mask changes, and what order has to do with it;
# - how a loss can prove that a model has seen what it should predict;
# - a test for leaks that you can run on every model, and how to keep texts apart.

# %%
import math

import torch
import torch.nn.functional as F

from thinker.lessons.materials.practice import is_fast, lesson_seed
from thinker.lessons.pictures import Heatmap, SideBySide, model_diagram, show
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attention_weights

# %% [markdown]
# ## What a model is made of
#
# Attention is one part of a language model. This is the path of a text through all of it:
#
# 1. **Token ids.** Each token has a number, from 0 to V − 1. V is the size of the vocabulary.
# 2. **Embedding.** A table turns each number into a vector.
# 3. **Layers.** Each layer adds two things to every vector: first the output of attention, which
#    comes from other tokens, then the output of an **MLP**, which sees one token at a time. (An MLP
#    is two or three matrices with a nonlinear function between them, such as max(0, x). *Norms*
#    rescale the vectors before each step.)
# 4. **Logits.** A last matrix turns each vector into V numbers, one **logit** for each token that
#    could come next. Softmax turns them into probabilities.

# %% tags=["folded"]
show(
    model_diagram(),
    "Token ids, embedding, layers with attention and an MLP, logits, probabilities.",
)

# %% [markdown]
# Training compares these probabilities with the token that did come next. The **loss** of a token
# is −ln of the probability that the model gave to it. Its unit is called **nat**. The loss of a
# text is the mean over its tokens. (Why ln? The probability of a text is the product of those of
# its tokens, and the logarithm of a product is a sum.) Here are three possible next tokens with the
# logits 2, 1 and 0:

# %%
logits = torch.tensor([2.0, 1.0, 0.0])
p = logits.softmax(dim=-1)
rows = torch.stack([logits, logits.exp(), p, -p.log()])
names = ["logit", "e^logit", "probability", "loss if it comes"]
show(Heatmap("three possible next tokens", rows, names, ["1st", "2nd", "3rd"], digits=3, shade=10))

# %% tags=["check"]
assert torch.allclose(p, torch.tensor([0.665, 0.245, 0.090]), atol=1e-3)
assert torch.allclose(-p.log(), torch.tensor([0.408, 1.408, 2.408]), atol=1e-3)

# %% [markdown]
# If the likeliest token comes, the loss is 0.408 nats. The less likely the token, the higher its
# loss. A model that is certain and right has a loss of 0.
#
# ## The same numbers, twice
#
# Back to attention. These are the three tokens of lesson 1, again not scaled. Queries and keys are
# equal. On the left, there is **no mask**: all tokens see all. On the right, the mask is
# **causal**: it hides later tokens.

# %%
x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
v = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])

no_mask = attention_weights(x, x, AttentionMask(), scale=1.0)[0, 0]
causal = attention_weights(x, x, AttentionMask(is_causal=True), scale=1.0)[0, 0]
both = (("no mask", no_mask), ("causal", causal))
show(SideBySide(*(Heatmap(f"{name}: weights", A, "abc", "abc", 4, 1) for name, A in both)))
show(SideBySide(*(Heatmap(f"{name}: output", A @ v, "abc", "12", 4) for name, A in both)))

# %% tags=["check"]
assert torch.allclose(no_mask[:2, 2], torch.tensor([0.4223, 0.4223]), atol=1e-4)
assert torch.equal(no_mask[2], causal[2])

# %% [markdown]
# The last row is the same in both, because nothing comes after *c*. But without a mask, *a* and *b*
# give 42% of their attention to *c*, which comes later.
#
# A Thinker gets its mask by name, with `ThinkerConfig(attention=...)`. The default is called
# `full`: each token sees all tokens **so far**, so it is causal. With `prefix(p)`, the first p
# tokens also see each other. If p is the length of the text, there is no mask. That is how this
# lesson makes models without one.
#
# ## Who is blind to order?
#
# A score depends on two vectors, not on where they stand. So if tokens get no positions, and there
# is no mask, shuffled tokens must give the same outputs, shuffled. Such a function is called
# **permutation equivariant**. Two tests with random weights:
#
# - *Reversed:* turn the three outputs of *Bob called Ann* around, from (x, y, z) to (z, y, x). How
#   far are they from the outputs of *Ann called Bob*?
# - *Exchanged:* how far does the last output move if *Ann Bob called* becomes *Bob Ann called*?


# %%
def random_model(attention, n_layers=1, positions="none"):
    torch.manual_seed(0)
    size = {"vocab_size": 8, "d_model": 32, "n_layers": n_layers, "n_heads": 2}
    model = Thinker(ThinkerConfig(**size, attention=attention, positions=positions))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # some matrices of a new Thinker are 0, and let nothing through
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def outputs(model, *tokens):
    return model(torch.tensor([tokens]))[0]  # (T, 8): the logits of each token


ANN, CALLED, BOB = 0, 1, 2
kinds = {
    "no mask, 1 layer": random_model("prefix(3)"),
    "causal, 1 layer": random_model("full"),
    "causal, 2 layers": random_model("full", n_layers=2),
}
changes = {}
print("                    reversed  exchanged")
for name, model in kinds.items():
    flipped = outputs(model, BOB, CALLED, ANN).flip(0) - outputs(model, ANN, CALLED, BOB)
    exchanged = outputs(model, BOB, ANN, CALLED)[2] - outputs(model, ANN, BOB, CALLED)[2]
    changes[name] = [float(x.abs().max()) for x in (flipped, exchanged)]
    print(f"{name:>17}: {changes[name][0]:>9.6f} {changes[name][1]:>10.6f}")

# %% tags=["check"]
assert [[x > 0.1 for x in row] for row in changes.values()] == [
    [False, False],
    [True, False],
    [True, True],
]
assert all(x < 1e-5 or x > 0.1 for row in changes.values() for x in row)

# %% [markdown]
# - Without a mask, nothing changes but the order: the model cannot tell *Ann called Bob* from *Bob
#   called Ann*.
# - **The causal mask alone brings in some order**: *called* sees only the name before it.
# - With one layer, the last token still cannot tell the order of the two names before it. With two
#   layers it can: what *Bob* passes on in the second layer depends on whether *Bob* has seen *Ann*
#   in the first.
#
# That is not enough to read well. Lesson 3 adds positions.
#
# ## A model that cheats
#
# Now train two models to predict the next token, one with the causal mask and one without a mask,
# on texts that we know all about: eight tokens, 0 to 7, stand in a circle, and a fair coin decides
# whether the next token is one or two steps further.
#
# Thinker knows its own mask. The token that should be predicted is called the **target**. When
# Thinker computes a loss, it skips a target if the token just before it can already see it:


# %%
def coin_walk(n, generator, T=8):
    steps = torch.randint(1, 3, (n, T), generator=generator)  # 1 or 2
    steps[:, 0] = torch.randint(8, (n,), generator=generator)  # any token
    return steps.cumsum(dim=1) % 8


texts = coin_walk(100, torch.Generator().manual_seed(0))
print(*("".join(map(str, text)) for text in texts[:4].tolist()))
counts = {}
for name in ("full", "prefix(4)", "prefix(8)"):  # causal, the first four see each other, no mask
    model = random_model(name)
    sum_of_losses, counts[name] = model(texts[:, :-1], targets=texts[:, 1:])
    print(f"{name:>9}: Thinker counts {int(counts[name]) / 100:.0f} of 7 targets per text")

# %% tags=["check"]
assert [int(count) for count in counts.values()] == [700, 400, 0]
assert [round(math.log(n), 3) for n in (2, 6, 8, 64)] == [0.693, 1.792, 2.079, 4.159]

# %% [markdown]
# **Question.** With `prefix(4)`, Thinker leaves out three targets. Why not four?
#
# <details><summary>Answer</summary>
#
# The targets are the tokens 1 to 7. Tokens 1, 2 and 3 are seen by the token before them, which
# should predict them. Token 4 is not.
#
# </details>
#
# Without a mask, no target is left. So that we can train such a model, we compute the loss from its
# logits. Many programs do that, and such a loss knows nothing about masks.
#
# How low can it be? Nobody can predict a fair coin. If you know the rule, you give both tokens a
# probability of ½, and the loss is −ln ½ = ln 2 = 0.693 nats per token. This is the **entropy** of
# the source: on new text, no honest model has a lower loss on average. If you give all eight tokens
# the same probability, the loss is ln 8 = 2.079.
#
# Training repeats one step, here 300 times: draw 64 texts (a **batch**), compute their loss and its
# gradient, and move every number of the model a little in the direction that lowers the loss. How
# far is set by the learning rate, `lr`. The **seed** fixes all random numbers.


# %%
def next_token_loss(model, texts):
    return F.cross_entropy(model(texts)[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


def train(attention):
    torch.manual_seed(lesson_seed())
    model = Thinker(
        ThinkerConfig(vocab_size=8, d_model=32, n_layers=1, n_heads=2, attention=attention)
    )
    generator = torch.Generator().manual_seed(lesson_seed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(n_steps := 30 if is_fast() else 300):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / n_steps)
        optimizer.zero_grad()  # forget the old gradient
        next_token_loss(model, coin_walk(64, generator)).backward()  # compute a new one
        optimizer.step()  # move every number of the model
    return model.eval().requires_grad_(False)


models = {"causal": train("full"), "no mask": train("prefix(8)")}
new = coin_walk(2000, torch.Generator().manual_seed(1))
losses = {name: float(next_token_loss(model, new)) for name, model in models.items()}
for name, loss in losses.items():
    print(f"{name:>7}: {loss:.3f} nats per token on new texts")

# %% tags=["check"]
if not is_fast():
    assert math.log(2) - 1e-3 < losses["causal"] < math.log(2) + 0.01
    assert losses["no mask"] < 0.01

# %% [markdown]
# The causal model ends near the entropy of 0.693, and the other at almost 0. (Your run may differ a
# little.) Without a mask, the model has predicted coins, and that is impossible without seeing the
# result: **on many new tokens, a loss clearly below the entropy proves a leak**. If you do not know
# the entropy, a low loss proves nothing, not even on new text, because the model sees the answers
# there, too.
#
# When a model writes, there is no next token to look at. So show both models only the text so far,
# take the loss of the next token, and let them write.

# %%
blind, followed = {}, {}
for name, model in models.items():
    each = [F.cross_entropy(model(new[:, :t])[:, -1], new[:, t]) for t in range(1, 8)]
    blind[name] = float(sum(each)) / len(each)
    written, generator = new[:, :1], torch.Generator().manual_seed(2)
    while written.shape[1] < 8:
        p = model(written)[:, -1].softmax(dim=-1)
        written = torch.cat([written, torch.multinomial(p, 1, generator=generator)], dim=1)
    steps = written.diff(dim=1) % 8
    followed[name] = float(((steps == 1) | (steps == 2)).float().mean())
    print(f"{name:>7}: loss {blind[name]:.2f}; {followed[name]:.0%} correct steps")
    print("  it writes", *("".join(map(str, text)) for text in written[:4].tolist()))

# %% tags=["check"]
assert abs(blind["causal"] - losses["causal"]) < 1e-4
if not is_fast():
    assert followed["no mask"] < 0.6 < 0.99 < followed["causal"]
    assert blind["no mask"] > math.log(8) + 1

# %% [markdown]
# The causal model has the same loss as before, and its texts follow the rule. The other is worse
# than a model that knows nothing: its loss is far above 2.079, because it is sure and wrong. Here
# only 15% of its steps follow the rule. (With other seeds it may be half of them.) It has learned to
# read the answer, and now there is none.
#
# **Question.** BERT (Devlin et al. 2018) has no mask and does not cheat. Why not?
#
# <details><summary>Answer</summary>
#
# It does not predict the next token, but tokens in the middle, and most of these have been replaced
# in its input by a special one. So it cannot look them up. A mask has to fit the task.
#
# </details>
#
# ## Find the leak
#
# You seldom know the entropy of your data, and a leak can be small: one head, or one position too
# far. But you can ask the model. **Change one token, and see which outputs change.** None before
# that token may.


# %%
def influence(model, tokens, ids=None):
    """(T, T): how much each output (row) changes if a token (column) is replaced."""
    position = torch.arange(len(tokens))
    texts = tokens.repeat(len(tokens) + 1, 1)
    texts[position, position] = (tokens + 1) % 8  # row i replaces token i; the last stays
    logits = model(texts, document_ids=None if ids is None else ids.expand(len(texts), -1))
    return (logits[:-1] - logits[-1]).abs().amax(dim=-1).T.detach()


tests = {name: influence(model, new[0, :6]) for name, model in models.items()}
show(SideBySide(*(Heatmap(name, A, "012345", "012345", 1) for name, A in tests.items())))
untrained = Thinker(ThinkerConfig(8, d_model=32, n_layers=1, n_heads=2, attention="prefix(8)"))
print(f"no mask, untrained: largest change {influence(untrained, new[0]).max()}")

# %% tags=["check"]
assert tests["causal"].triu(1).max() < 1e-5 < 0.1 < tests["causal"].diagonal().min()
assert tests["causal"].tril(-1).max() > 0.01
assert influence(untrained, new[0]).max() == 0 < 0.1 < tests["no mask"].triu(1).max()

# %% [markdown]
# The causal model has only zeros above the diagonal (below 0.00001). The other has large numbers
# there: it leaks. (Its last row has no answer to copy, so it depends on all tokens.) But an
# untrained model without a mask passes: Thinker starts with matrices at 0, so nothing gets through.
# **A test for leaks must also check that something arrives**: some number *below* the diagonal must
# not be 0. (The diagonal proves nothing. Each layer adds to the token's own vector, whatever
# attention does.)
#
# ## Several texts in one sequence
#
# Short texts are often joined to save time. With the causal mask alone, the second text sees the
# first. With `document_ids`, one number per token, each token sees only its own text. (The
# positions are RoPE, which lesson 3 explains: they do not mind where in the row a text begins.)

# %%
model = random_model("full", n_layers=2, positions="rope")
joined, ids = torch.tensor([1, 2, 4, 7, 0, 2]), torch.tensor([[1, 1, 1, 2, 2, 2]])
labels = ["A0", "A1", "A2", "B0", "B1", "B2"]
leaky, clean = influence(model, joined), influence(model, joined, ids)
pictures = (("causal", leaky), ("causal, with document_ids", clean))
show(SideBySide(*(Heatmap(name, A, labels, labels, digits=1) for name, A in pictures)))
apart = torch.cat([outputs(model, 1, 2, 4), outputs(model, 7, 0, 2)])
difference = (model(joined[None], document_ids=ids)[0] - apart).abs().max()
print(f"joined texts and separate texts differ by {difference:.6f}")

after, before = outputs(model, 1, 2, 4, 7, 7)[:3], outputs(model, 7, 7, 1, 2, 4)[2:]
masked = model(torch.tensor([[7, 7, 1, 2, 4]]), document_ids=ids[:, 1:])[0, 2:]
padding = [float((found - apart[:3]).abs().max()) for found in (after, before, masked)]
for name, change in zip(("after A", "before A", "before A, masked"), padding):
    print(f"padding {name}: its outputs change by {change:.6f}")

# %% tags=["check"]
assert max(clean[3:, :3].max(), difference) < 1e-4 < 0.1 < leaky[3:, :3].min()
assert max(padding[0], padding[2]) < 1e-4 < 0.1 < padding[1]

# %% [markdown]
# The last lines are about **padding**: tokens without meaning that fill up texts of different
# lengths in one batch. *After* a text, the causal mask hides them; only their targets must not
# count (in Thinker, make them −1). *Before* a text, they must be masked: here they got a document
# of their own.
#
# ## Exercises
#
# **1. Write a mask.** Each token sees the w newest tokens, itself included: `my_mask(T, w)` returns
# a table of shape (T, T), where True means visible. Rows are queries, columns are keys.
# `k = torch.arange(T)` has the positions 0 to T − 1 in a row, and `q = torch.arange(T)[:, None]`
# has them in a column. Then `q - k` is a table of all differences: how far back each key is. `&`
# joins two conditions; put each in parentheses.


# %% tags=["exercise"]
from thinker.lessons.checks.masks import check_cheat, check_weights, check_window


def my_mask(T, w):
    return ...


check_window(my_mask)

# %% [markdown]
# **2. A row on paper.** Tokens 0 and 1 are one text, tokens 2 to 5 another. The mask is causal and
# keeps the texts apart. Token 4 has the scaled scores 3, 3, 0, 1, 3, 2. Which weights do the six
# keys get?

# %% tags=["exercise"]
my_weights = ...  # six numbers, three decimals each
check_weights(my_weights)

# %% [markdown]
# **3. Who has cheated?** Each model was trained on another source. Losses are in nats per token, on
# a great many new tokens. Which model has seen what it should predict?
#
# - A: the coin walk of this lesson. Loss 0.70.
# - B: throws of a fair die. Loss 1.80.
# - C: 64 tokens, each as likely as the others at every step. Loss 3.90.
# - D: 64 tokens in a circle, always one step further. Loss 0.01.

# %% tags=["exercise"]
my_cheat = ...  # "A", "B", "C" or "D"
check_cheat(my_cheat)

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def window_mask(T, w):
    distance = torch.arange(T)[:, None] - torch.arange(T)  # query minus key; later keys: < 0
    return (distance >= 0) & (distance < w)


check_window(window_mask)

# Token 4 sees tokens 2, 3 and 4, with the scores 0, 1, 3. Exponentials: 1, 2.718, 20.086, in all 23.804.
check_weights([0, 0, 1 / 23.804, 2.718 / 23.804, 20.086 / 23.804, 0])

# The entropies are ln 2 = 0.693, ln 6 = 1.792, ln 64 = 4.159, and 0 for D, where nothing is random.
check_cheat("C")

# %% [markdown]
# ## Words of this lesson
#
# - **logits**: the scores of all possible next tokens. **Loss**: −ln of the probability of the
#   token that came, in **nats**.
# - **mask**: which keys each query may see. **Causal**: none that come later.
# - **leak**: a way from the answer to the prediction. **Entropy**: the lowest honest loss.
# - **permutation equivariant**: shuffled inputs give shuffled outputs. **Padding**: filling tokens.
#
# Sources: arXiv [1706.03762](https://arxiv.org/abs/1706.03762) (causal mask),
# [1801.10198](https://arxiv.org/abs/1801.10198) (prefix),
# [1810.04805](https://arxiv.org/abs/1810.04805) (BERT). Next: how a model gets positions.
