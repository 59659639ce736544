# %% [markdown]
# # Masks
#
# *A model predicts almost without error, and then it writes nonsense. What happened?* This lesson
# removes the mask from attention, trains a model that cheats, and tests for the cheat. It takes
# about 20 minutes. You need lesson 1, and you should know what a loss is.
#
# You will learn
#
# - what the causal mask changes, and what order has to do with it;
# - how a loss can prove that a model has seen what it should predict;
# - a test for leaks that you can run on every model, and how to keep texts apart.

# %%
import math

import torch
import torch.nn.functional as F

from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.lessons.practice import is_fast
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attention_weights

# %% [markdown]
# ## The same numbers, twice
#
# These are the three tokens of lesson 1, again not scaled. Queries and keys are equal. **Full
# attention** hides nothing; **causal attention** hides later tokens.

# %%
x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
v = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])

full = attention_weights(x, x, AttentionMask(), scale=1.0)[0, 0]
causal = attention_weights(x, x, AttentionMask(is_causal=True), scale=1.0)[0, 0]
both = (("full", full), ("causal", causal))
show(SideBySide(*(Heatmap(f"{name}: weights", A, "abc", "abc", 4, 1) for name, A in both)))
show(SideBySide(*(Heatmap(f"{name}: output", A @ v, "abc", "12", 4) for name, A in both)))

# %% tags=["check"]
assert torch.allclose(full[:2, 2], torch.tensor([0.4223, 0.4223]), atol=1e-4)
assert torch.equal(full[2], causal[2])

# %% [markdown]
# The last row is the same in both, because nothing comes after *c*. But with full attention, *a*
# and *b* give 42% of their attention to *c*, which comes later.
#
# A model gets its mask by name, with `ThinkerConfig(attention=...)`. Take care: `full`, the
# default, means **all tokens so far** and is causal. `prefix(p)` also lets the first p tokens see
# each other. If p is the length of the text, nothing is hidden.
#
# ## Who is blind to order?
#
# A score depends on two vectors, not on where they stand. So if tokens get no positions and you
# shuffle them, full attention gives the same outputs, shuffled: it is **permutation equivariant**.
# Test it with random weights. (Some matrices of a new Thinker are 0, so fill them all.)


# %%
def random_model(attention, n_layers=1, positions="none"):
    torch.manual_seed(0)
    config = ThinkerConfig(8, 32, n_layers, 2, attention=attention, positions=positions)
    model = Thinker(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def outputs(model, *tokens):
    return model(torch.tensor([tokens]))[0]  # (T, 8): one row per token


ANN, CALLED, BOB = 0, 1, 2
changes = []
for attention, n_layers in (("prefix(3)", 1), ("full", 1), ("full", 2)):
    model = random_model(attention, n_layers)
    shuffled = outputs(model, BOB, CALLED, ANN) - outputs(model, ANN, CALLED, BOB).flip(0)
    last = outputs(model, BOB, ANN, CALLED)[2] - outputs(model, ANN, BOB, CALLED)[2]
    changes.append(pair := [float(x.abs().max()) for x in (shuffled, last)])
    print(f"{attention:>9}, layers: {n_layers}", " shuffled {:.0e}, last {:.0e}".format(*pair))

# %% tags=["check"]
assert [[x > 0.1 for x in row] for row in changes] == [[False, False], [True, False], [True, True]]
assert all(x < 1e-4 or x > 0.1 for row in changes for x in row)

# %% [markdown]
# *Shuffled* compares the outputs of *Bob called Ann* with the reversed outputs of *Ann called Bob*.
# With full attention (`prefix(3)`) they agree up to rounding. With the causal mask they do not:
# **the mask alone brings in some order**, because *called* sees only the name before it.
#
# *Last* is the change of the last output if *Ann Bob called* becomes *Bob Ann called*. One layer
# sees no order in what comes before a token. Two layers do, because the keys of the second depend
# on what each token has seen. Lesson 3 adds positions.
#
# ## A model that cheats
#
# Now train two models to predict the next token, one with the causal mask and one without a mask,
# on texts that we know all about: eight tokens, 0 to 7, stand in a circle, and a fair coin decides
# whether the next token is one or two steps further.


# %%
def coin_walk(n, generator, T=8):
    steps = torch.randint(1, 3, (n, T), generator=generator)  # 1 or 2
    steps[:, 0] = torch.randint(8, (n,), generator=generator)  # any token
    return steps.cumsum(dim=1) % 8


texts = coin_walk(100, torch.Generator().manual_seed(0))
print(*("".join(map(str, text)) for text in texts[:4].tolist()))
counts = {}
for name in ("full", "prefix(4)", "prefix(8)"):
    _, counts[name] = random_model(name)(texts[:, :-1], targets=texts[:, 1:])
    print(f"{name:>9}: Thinker counts {int(counts[name]) / 100:.0f} of 7 targets per text")

# %% tags=["check"]
assert [int(count) for count in counts.values()] == [700, 400, 0]
assert [round(math.log(n), 3) for n in (2, 6, 8, 64)] == [0.693, 1.792, 2.079, 4.159]

# %% [markdown]
# Nobody can predict a fair coin. If you know the rule, you give both tokens a probability of ½, and
# the loss is −ln ½ = ln 2 = 0.693 nats per token. This is the **entropy** of the source: on new
# text, no honest model has a lower loss on average. If you give all eight tokens the same
# probability, the loss is ln 8 = 2.079.
#
# **Question.** Thinker leaves out targets that a prefix can see. Why only three for `prefix(4)`?
#
# <details><summary>Answer</summary>
#
# The targets are the tokens 1 to 7. Tokens 1, 2 and 3 are seen by the token before them, which
# should predict them. Token 4 is not.
#
# </details>
#
# So we compute the loss from the logits. Such code is common, and it cannot know the mask.


# %%
def next_token_loss(model, texts):
    return F.cross_entropy(model(texts)[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


def train(attention):
    torch.manual_seed(0)
    model = Thinker(ThinkerConfig(8, 32, 1, n_heads=2, attention=attention))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(n_steps := 30 if is_fast() else 300):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / n_steps)
        optimizer.zero_grad()
        next_token_loss(model, coin_walk(64, generator)).backward()
        optimizer.step()
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
# The causal model ends within 0.01 of the entropy, the other below 0.01. It has predicted coins,
# and that is impossible without seeing the result: **on new text, a loss below the entropy proves a
# leak**. If you do not know the entropy, new text reveals nothing: the answers are visible there
# too.
#
# When a model writes, there is no next token to look at. So show both only the text so far, take
# the loss of the next token, and let them write.

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
# than a model that knows nothing: its loss is far above 2.079, because it is sure and wrong, and at
# least four in ten of its steps break the rule. (How many depends on the seed.) It has learned to
# read the answer, and now there is none.
#
# **Question.** BERT (Devlin et al. 2018) has full attention and does not cheat. Why not?
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
untrained = Thinker(ThinkerConfig(8, 32, 1, n_heads=2, attention="prefix(8)"))
print(f"no mask, untrained: largest change {influence(untrained, new[0]).max()}")

# %% tags=["check"]
assert tests["causal"].triu(1).max() < 1e-5 < 0.1 < tests["causal"].diagonal().min()
assert influence(untrained, new[0]).max() == 0 < 0.1 < tests["no mask"].triu(1).max()

# %% [markdown]
# The causal model has only zeros above the diagonal. The other has large numbers there: it leaks.
# But an untrained model without a mask passes: Thinker starts with matrices at 0, so nothing gets
# through. **A test for leaks must also check that something arrives**: the diagonal must not be 0.
#
# ## Several texts in one sequence
#
# Short texts are often joined to save time. With the causal mask alone, the second text sees the
# first. With `document_ids`, one number per token, each token sees only its own text.

# %%
model = random_model("full", n_layers=2, positions="rope")
joined, ids = torch.tensor([1, 2, 4, 7, 0, 2]), torch.tensor([[1, 1, 1, 2, 2, 2]])
labels = ["A0", "A1", "A2", "B0", "B1", "B2"]
leaky, clean = influence(model, joined), influence(model, joined, ids)
pictures = (("causal", leaky), ("causal, with document_ids", clean))
show(SideBySide(*(Heatmap(name, A, labels, labels, digits=1) for name, A in pictures)))
apart = torch.cat([outputs(model, 1, 2, 4), outputs(model, 7, 0, 2)])
difference = (model(joined[None], document_ids=ids)[0] - apart).abs().max()
print(f"joined texts and separate texts differ by {difference:.0e}")

after, before = outputs(model, 1, 2, 4, 7, 7)[:3], outputs(model, 7, 7, 1, 2, 4)[2:]
masked = model(torch.tensor([[7, 7, 1, 2, 4]]), document_ids=ids[:, 1:])[0, 2:]
padding = [float((found - apart[:3]).abs().max()) for found in (after, before, masked)]
print("padding: after {:.0e}, before {:.0e}, before and masked {:.0e}".format(*padding))

# %% tags=["check"]
assert max(clean[3:, :3].max(), difference) < 1e-4 < 0.1 < leaky[3:, :3].min()
assert max(padding[0], padding[2]) < 1e-4 < 0.1 < padding[1]

# %% [markdown]
# The last line shows how **padding** changes the outputs of text A. Padding fills up texts of
# different lengths in one batch. *After* a text, the causal mask hides it; only its targets must
# not count (in Thinker, make them −1). *Before* a text, it must be masked: here it got a document
# of its own.
#
# ## Exercises
#
# **1. Write a mask.** Each token sees the w newest tokens, itself included: `my_mask(T, w)` returns
# a table of shape (T, T), where True means visible.


# %% tags=["exercise"]
from thinker.lessons.checks.masks import check_cheat, check_weights, check_window


def my_mask(T, w):
    return ...


check_window(my_mask)

# %% [markdown]
# **2. A row on paper.** Tokens 0 and 1 are one text, tokens 2 to 5 another. The mask is causal and
# keeps the texts apart. Token 4 has the scaled scores 3, 3, 0, 1, 1, 2. Which weights do the six
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

# Token 4 sees tokens 2, 3 and 4, with the scores 0, 1, 1. Exponentials: 1, 2.718, 2.718, in all 6.437.
check_weights([0, 0, 1 / 6.437, 2.718 / 6.437, 2.718 / 6.437, 0])

# The entropies are ln 2 = 0.693, ln 6 = 1.792, ln 64 = 4.159, and 0 for D, where nothing is random.
check_cheat("C")

# %% [markdown]
# ## Words of this lesson
#
# - **mask**: which keys each query may see. **Causal**: none that come later.
# - **leak**: a way from the answer to the prediction. **Entropy**: the lowest honest loss.
# - **permutation equivariant**: shuffled inputs give shuffled outputs. **Padding**: filling tokens.
#
# Sources: arXiv [1706.03762](https://arxiv.org/abs/1706.03762) (causal mask),
# [1801.10198](https://arxiv.org/abs/1801.10198) (prefix),
# [1810.04805](https://arxiv.org/abs/1810.04805) (BERT). Next: how a model gets positions.
