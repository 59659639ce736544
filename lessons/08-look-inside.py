# %% [markdown]
# # Look inside it
#
# *How does a model continue a text that it has never seen?* This lesson trains a tiny model, finds
# the two heads that do the work, and tests whether they really do. Then it looks into a model of
# stories. It takes about 20 minutes. You need lessons 1, 2 and 4.
#
# You will learn
#
# - what an induction head is, and why it needs a second head;
# - how to describe a head by numbers: entropy, distance, previous-token and induction score;
# - how to test whether a head matters: ablation and patching;
# - what an attention map does not tell;
# - which heads look up facts in stories, and whether any follows the grammar.

# %%
import torch

from thinker.data.text.story_words import find_words
from thinker.data.text.tales import generate_story
from thinker.interpretability import attribution, content_heads, flow, heads
from thinker.lessons.materials.practice import is_fast, train_on_tales, train_on_task
from thinker.lessons.pictures import Heatmap, show
from thinker.model import ThinkerConfig

# %% [markdown]
# ## A text that repeats
#
# Each text is a few different letters in random order, then the same letters again: `qmaxdtqmaxdt`.
# Nobody can guess the first half. The second half is easy if you look back: find where the current
# letter stood before, and say what came after it. Only the second half counts for the loss.


# %%
def make_batch(generator, n=None, texts=16):
    n = n or int(torch.randint(6, 21, (), generator=generator))  # 6 to 20
    once = torch.rand(texts, 26, generator=generator).argsort(dim=1)[:, :n]
    tokens = once.repeat(1, 2)
    targets = torch.full_like(tokens, -1)  # -1 is not counted
    targets[:, n:-1] = tokens[:, n + 1 :]
    return tokens, targets


size = {"vocab_size": 26, "d_model": 64, "n_layers": 2, "d_ff": 1, "head_init_std": 0.1}
model, losses = train_on_task(ThinkerConfig(n_heads=1, **size), make_batch, 400, lr=5e-3)
tenths = torch.tensor(losses).reshape(10, -1).mean(dim=1)
print("mean loss of each tenth:", [round(x, 2) for x in tenths.tolist()])

# %% tags=["check"]
assert is_fast() or tenths[1] > 2.5 > 0.05 > tenths[-1]

# %% [markdown]
# The model has two layers with one head each. (Its MLPs are one number wide, so attention has to do
# the work.) A blind guess among 26 letters costs ln 26 = 3.26 nats, and at first the model hardly
# does better. Then the loss falls to almost 0. (Your run may differ a little.) Every batch is new,
# so the model has not memorized texts. What has it found?
#
# ## Look at the weights
#
# `attention_weights` returns the weights of all layers and heads. Rows are queries.

# %%
text = "qmaxdt" * 2
letters = torch.tensor([list(text.encode())]) - 97  # a is 0, b is 1, ...
first, second = model.attention_weights(letters)[:, 0, 0]  # layers, texts, heads
show(Heatmap("layer 0", first, list(text), list(text), digits=1, shade=1.0))
show(Heatmap("layer 1", second, list(text), list(text), digits=1, shade=1.0))

# %% tags=["check"]
assert is_fast() or torch.equal(first.argmax(dim=1)[1:], torch.arange(11))
assert is_fast() or torch.equal(second.argmax(dim=1)[6:-1], torch.arange(1, 6))

# %% [markdown]
# **Layer 0**: each letter looks at the letter before it. This is a **previous-token head**.
#
# **Layer 1**: the second *q* looks at *m*, the second *m* at *a*: each letter looks at what
# *followed* its first copy. This is an **induction head**. (Its weights in the first half mean
# nothing: there is no earlier copy, and no loss.)
#
# Together they continue the text. In layer 0, the first *m* notes "*q* came before me": the layer
# adds this to the vector of *m*, and layer 1 makes its keys from the sum. In layer 1, the second
# *q* asks "who comes after a *q*?", and the key of *m* answers. The head copies *m*.
#
# **Question.** Could a single layer do this?
#
# <details><summary>Answer</summary>
#
# No. In the first layer, a key knows only its own letter and position. The second *q* could find
# the first *q*, but the value there says *q*. Nothing in the key of *m* says that it follows a *q*.
# (With `token_shift`, as in lessons 4 and 5, it would: then each vector contains the one before.)
#
# </details>
#
# ## Put numbers on a head
#
# A few numbers sum up each map. Take the weights of three tokens from the first lesson:
#
# - **Entropy** of a row: −Σ weight · ln weight, where 0 · ln 0 counts as 0. 0 if one key has it
#   all, ln n if n keys share it.
# - **Mean distance** of a row: Σ weight · distance. The token itself has distance 0.
# - **Previous-token score**: the mean weight of the token before, over all rows but the first.
#
# The distance of the last row is 0.2119 · 2 + 0.2119 · 1 = 0.6358 (before rounding). Rows 2 and 3
# give 0.2689 and 0.2119 to the token before: the mean, 0.2404, is the previous-token score.

# %%
hidden = -torch.inf
A = torch.tensor([[1, hidden, hidden], [0, 1, hidden], [1, 1, 2]]).softmax(dim=-1)
entropy = -(A * A.clamp_min(1e-12).log()).sum(dim=1) + 0.0  # 0 · ln 0 counts as 0
distance = (A * torch.tensor([[0, 0, 0], [1, 0, 0], [2, 1, 0]])).sum(dim=1)
previous = A.diagonal(-1).mean()
rows = torch.cat([A, entropy[:, None], distance[:, None]], dim=1)
show(Heatmap("weights", rows, "abc", [*"abc", "entropy", "distance"], digits=4, shade=1.0))
print(f"previous-token score: {previous:.4f}")

# %% tags=["check"]
answers = [
    [1, 0, 0, 0, 0],
    [0.2689, 0.7311, 0, 0.5822, 0.2689],
    [0.2119, 0.2119, 0.5761, 0.9753, 0.6358],
]
assert torch.allclose(rows, torch.tensor(answers), atol=1e-4)
assert abs(previous - 0.2404) < 1e-4
ours = torch.stack([entropy.mean(), distance.mean(), previous])
assert torch.allclose(
    ours, torch.stack([heads.entropy(A), heads.mean_distance(A), heads.previous_token(A)])
)

# %% [markdown]
# The **induction score** needs n letters and their repetition. In row i of the second half, the
# first copy is at i − n, and what followed it at i − n + 1. The score is the mean of these weights.
# The module `heads` has all four scores. Here they are for 64 new texts of 13 letters:

# %%
probes, targets = make_batch(torch.Generator().manual_seed(1), n=13, texts=64)
MEASURES = (heads.entropy, heads.mean_distance, heads.previous_token, heads.induction)


def score(model):  # (layers, heads, measures)
    maps = model.attention_weights(probes)
    return torch.stack([measure(maps).mean(dim=1) for measure in MEASURES], dim=-1)


def loss_with(model, patches):  # of the second halves, for the next part
    with torch.no_grad(), model.patch(patches):
        total, count = model(probes, targets=targets)
    return float(total / count)


scores = score(model)[:, 0]
names = ["entropy", "distance", "previous", "induction"]
show(Heatmap("means of 64 texts", scores, ["layer 0", "layer 1"], names, shade=10.0))

# %% tags=["check"]
by_hand = [model.attention_weights(probes)[1, :, 0, i, i - 13 + 1] for i in range(13, 26)]
assert torch.allclose(torch.stack(by_hand).mean(), scores[1, 3])
assert is_fast() or all(
    (scores[0, 2] > 0.6, scores[0, 3] < 0.1, scores[1, 2] < 0.2, scores[1, 3] > 0.85)
)

# %% [markdown]
# ## Take it out
#
# So far we have only watched. To know whether a head *matters*, change it. **Ablation** sets the
# output of a head to zero and measures the loss again.

# %%
LOWER, UPPER = "blocks.0.attention.heads.0", "blocks.1.attention.heads.0"
cases = {}, {LOWER: "zero"}, {UPPER: "zero"}
clean, no_lower, no_upper = [loss_with(model, patches) for patches in cases]
print(f"loss {clean:.2f}; without layer 0 {no_lower:.2f}; without layer 1 {no_upper:.2f}")
with torch.no_grad(), model.patch({LOWER: "zero"}):
    lonely = score(model)[1, 0, 3]
print(f"induction score without layer 0: {lonely:.2f}")

# %% tags=["check"]
assert is_fast() or all((clean < 0.05, 3.26 < no_upper < 4.5, no_lower > 4.5, lonely < 0.2))

# %% [markdown]
# If one of the two heads is gone, the model is no better than a blind guess (3.26). And they form a
# chain: without layer 0, no key says what came before it, and the induction score falls to almost
# 0, here from 0.94 to 0.08.
#
# **Question.** Without layer 0, the loss is above 4.5 nats. Why is that worse than a blind guess?
#
# <details><summary>Answer</summary>
#
# It still copies a letter from wherever it looks. To be sure and wrong costs more than to guess.
#
# </details>
#
# ## Put something else in
#
# Ablation says *that* a head matters. **Patching** shows *what* it carries: take two texts that
# differ in one letter, and move one **activation** (a vector that the model computes on its way)
# from one run into the other. Here it is the output of the head in layer 1 at the last position.

# %%
ours, other = torch.tensor([list(b"qmaxdtqmax"), list(b"qmaxktqmax")]) - 97
with model.record(UPPER) as recorded:
    says = [model(tokens[None])[0, -1].argmax() for tokens in (ours, other)]
from_other = recorded[UPPER]  # (1, 10, 64): the last run, at its 10 positions
with model.patch({UPPER: lambda z: torch.cat([z[:, :-1], from_other[:, -1:]], 1)}):
    says.append(model(ours[None])[0, -1].argmax())
print("ours → {}; other → {}; ours, patched → {}".format(*(chr(97 + i) for i in says)))

# %% tags=["check"]
assert is_fast() or bytes(97 + i for i in says) == b"dkk"

# %% [markdown]
# The model reads *d* and yet says *k*: the output of one head at one position decides.
#
# ## Two shortcuts, and where they fail
# You can skip this part; the next one does not need it. To take out every head at every position
# costs many runs. Two methods try to see what matters in one run.
#
# **Rollout** multiplies the weights of all layers to see where information can come from. A layer
# adds its output to its input, so rollout takes half of each: Ã = (A + I) / 2, where I has 1 on its
# diagonal and 0 elsewhere. If both layers have our 3 × 3 weights A, the last row of Ã is (0.1060,
# 0.1060, 0.7881). What reaches the last token through two layers is the sum of the rows of Ã,
# weighted by this last row: Ã · Ã.

# %%
mixed = (A + torch.eye(3)) / 2
print("by hand:", (mixed @ mixed)[2])
print("library:", flow.rollout(A.expand(2, 1, 3, 3))[-1, 2])  # 2 layers, 1 head

# %% tags=["check"]
assert torch.allclose(mixed[2], torch.tensor([0.1060, 0.1060, 0.7881]), atol=1e-4)
assert torch.allclose((mixed @ mixed)[2], torch.tensor([0.2037, 0.1752, 0.6210]), atol=1e-4)
assert torch.allclose(flow.rollout(A.expand(2, 1, 3, 3))[-1], mixed @ mixed)

# %% [markdown]
# **Gradient × attention** asks how the logit of *d* would change if a weight grew a little, and
# multiplies this gradient by the weight. Here are both for the second *x* of `qmaxdtqmax`:

# %%
letter_d = ord("d") - 97
maps = model.attention_weights(ours[None])[:, 0]  # (layers, heads, rows, columns)
pushes = attribution.gradient_times_attention(model, ours, letter_d)[:, 0]
rows = torch.stack([maps[1, 0, -1], flow.rollout(maps)[-1, -1], pushes[1, -1]])
rows = rows.round(decimals=2) + 0.0  # no -0.00
labels = ["weight, layer 1", "rollout", "gradient × attention"]
show(Heatmap("what reaches the second x", rows, labels, list("qmaxdtqmax"), shade=1.0))
logits = [model(ours[None])[0, -1, letter_d]]
with model.patch({LOWER: "zero"}):
    logits.append(model(ours[None])[0, -1, letter_d])
change = (logits[1] - logits[0]).item()
print(f"layer 0, d to x: weight {maps[0, 0, 4, 3]:.2f}, gradient × weight {pushes[0, 4, 3]:.2f}")
print(f"logit of d without the notes of layer 0: {change:+.1f}")

# %% tags=["check"]
assert is_fast() or all((rows[0, 4] > 0.8, 0.2 < rows[1, 4] < 0.35, rows[2, 4] > 0.5))
assert is_fast() or all((maps[0, 0, 4, 3] > 0.6, pushes[0, 4, 3] < 0.2, change < -1))

# %% [markdown]
# Both miss something. Rollout gives *d* only about a quarter, because it assumes half and half. The
# gradient finds *d* in layer 1, but in layer 0 it does not find that *d* has to look at *x*: here
# its product is −0.21. Yet without the notes of layer 0, the logit falls, here by 10.2. A gradient
# knows only small changes, and the weight in layer 1 is near 1 already: slightly weaker notes change
# almost nothing, but none at all do.
#
# ## What a map does not tell
#
# Now with four heads per layer. The cost of a head is the rise of the loss if it is set to zero.

# %%
four_heads = ThinkerConfig(n_heads=4, head_dim=32, **size)
crowd, _ = train_on_task(four_heads, make_batch, n_steps=400, lr=1e-2)
grid = [[f"blocks.{i}.attention.heads.{head}" for head in range(4)] for i in (0, 1)]
clean = loss_with(crowd, {})
losses = [[loss_with(crowd, {name: "zero"}) for name in layer] for layer in grid]
cost = torch.tensor(losses) - clean
table = torch.cat([score(crowd)[..., 2:], cost[..., None]], -1).flatten(0, 1)
labels = [f"layer {layer}, head {head}" for layer in (0, 1) for head in range(4)]
show(Heatmap("four heads", table, labels, ["previous", "induction", "cost"], shade=1.0))
for n in range(1, 5):
    patches = dict.fromkeys(grid[1][:n], "zero")
    print(f"{n} of 4 heads of layer 1 off: loss {loss_with(crowd, patches):.2f}")

# %% tags=["check"]
assert torch.allclose(
    heads.importance_by_ablation(crowd, probes, "zero", targets).value, cost, atol=1e-4
)
assert is_fast() or all(
    (clean < 0.05, table[4:, 1].min() > 0.75, cost[1].max() < 0.4, cost[1].min() < 0.1)
)
assert is_fast() or all(
    (loss_with(crowd, patches) > 3.26, ((table[:4, 0] > 0.3) & (cost[0] < 0.1)).any())
)

# %% [markdown]
# All four heads of layer 1 are induction heads, here with scores from 0.85 to 0.91. Yet each costs
# little, here at most 0.08 nats, because the others do the same work. Without all four, the model is
# worse than a blind guess. In layer 0, too, some heads look at the token before, and cost almost
# nothing: here heads 1 and 2.
#
# - A map tells **where a head reads**, but not **what it passes on**, nor whether anyone uses it.
# - Ablation tells whether a head **is missed**. If others can replace it, take them out together.
#
# ## Heads in stories: names and grammar
#
# Letters are a toy. Now train a model on short stories, for about a minute (lesson 7 is about
# them). A grammar writes these stories, so their parse is known: which words are names or verbs,
# which subject a verb has, and which words are **facts** that return, such as the town of a child.
#
# Here is a story. For each fact that returns, the table shows where each head looks from the word
# *before* it: how much weight does the head give to the fact's first mention? (Head 1.0 is head 0
# of layer 1.) The last column is the loss of the model on the fact, in nats. A stroke shows where
# the tokenizer cuts a fact into several tokens; the loss is that of the first.

# %%
stories_model, tokenizer = train_on_tales()


def find_facts(told):
    """For each fact of a story that returns: weights of all heads on it, loss, number of tokens."""
    pairs = told.relations["next fact"]  # (T, T): from the token before a fact to its first mention
    queries = pairs.any(dim=1).nonzero().flatten()
    maps = stories_model.attention_weights(told.tokens[None])[:, 0]  # (layers, heads, T, T)
    on_fact = (maps[:, :, queries] * pairs[queries]).sum(dim=-1).flatten(0, 1).T  # (facts, 8)
    with torch.no_grad():
        p = stories_model(told.tokens[None])[0].softmax(dim=-1)  # (T, V)
    fact_losses = -p[queries, told.tokens[queries + 1]].log()
    return on_fact, fact_losses, pairs[queries].sum(dim=1)


told = content_heads.make_story(tokenizer, 0)  # new to the model
on_fact, fact_losses, _ = find_facts(told)
rows = torch.cat([on_fact, fact_losses[:, None]], dim=1)

story = generate_story(content_heads.SEED, 0)
words = find_words(story)
text = [story.text[word.start : word.end] for word in words]
places = [i for i, word in enumerate(words) if word.first_mention is not None]
names = [f"{i}.{head}" for i in (0, 1) for head in range(4)]
print(story.text.replace(". ", ".\n"), "\n")
labels = []
for i in places:
    pieces = [tokenizer.decode([token]).strip() for token in tokenizer.encode(" " + text[i])]
    labels.append(f"{text[i - 1]} → {'|'.join(pieces)}")
show(Heatmap("weight on the fact", rows, labels, [*names, "loss"], shade=1.0))

# %% tags=["check"]
assert len(places) == len(on_fact) == 10

# %% [markdown]
# Which heads look at which facts? Go through the rows: a head that gives a fact more than half of
# its weight has **found** it. Every run divides the work among its heads in another way, so your
# table may look different. A head of layer 0 needs no other layer for this: *loved* can ask for any
# hobby, and the story has only one.
#
# One story proves little. Here are the facts of 32 new stories, and what the model pays for them:

# %%
stories = content_heads.make_stories(stories_model, tokenizer, 2 if is_fast() else 32)
found_facts = [find_facts(told) for told in stories]
on_fact, fact_losses, n_tokens = (torch.cat(parts) for parts in zip(*found_facts))
is_found = on_fact.amax(dim=1) > 0.5  # by some head
kinds = {"one token": n_tokens == 1, "several tokens": n_tokens > 1, "all": n_tokens > 0}
shares, paid = {}, {}
print("                facts   found   loss if found   loss if not")
for kind, chosen in kinds.items():
    shares[kind] = float(is_found[chosen].float().mean())
    paid[kind] = [float(fact_losses[chosen & each].mean()) for each in (is_found, ~is_found)]
    print(f"{kind:>14} {int(chosen.sum()):6} {shares[kind]:7.0%}", end=" ")
    print(f"{paid[kind][0]:15.2f} {paid[kind][1]:13.2f}")

# %% tags=["check"]
if not is_fast():
    assert shares["all"] > 0.2
    assert paid["all"][0] < paid["all"][1] / 2

# %% [markdown]
# - Where a head has found the fact, the loss is less than half of that elsewhere: here 0.91 nats,
#   and 3.77 for facts that no head has found.
# - To find a fact does not always mean to know it. Here a found fact of one token costs 0.29 nats,
#   but one of several tokens 1.52. The head may look at a later piece of it, and the model needs the
#   first. (In some runs, both cost about as little.)
#
# (Not all of the loss is the fault of heads: whether the hero's name comes, or *she*, is often a
# choice of the grammar.)
#
# Is that more than chance? A head that always looks at the near past also meets facts and subjects.
# So the next table compares each head with one that sees **only distances**: it gives each distance
# the weight that the real head gives it on average, whatever the words are. For example, if a head
# gives 30% to the token two places back, on average, and the subject is two places back, then
# chance is 30%. The numbers are means over the same 32 stories.
#
# - **next fact**: from the word before a fact that returns to its first mention, as above.
# - **subject**: from a verb to its subject.
# - **class**: from a word to earlier words of the same class, such as names.
# - **cost**: by how much the loss on facts that return rises, in nats, if the head is set to zero.

# %%
found = content_heads.score_content(stories_model.attention_weights, stories).relations
inputs, fact_targets = content_heads.fact_targets(stories)
cost = heads.importance_by_ablation(stories_model, inputs, "zero", fact_targets).value
columns = {"cost": cost}
for name in ("class", "subject", "next fact"):
    columns = {name: found[name].score, f"{name}, chance": found[name].chance, **columns}
table = torch.stack([column.flatten() for column in columns.values()], dim=1)
show(Heatmap("heads in 32 stories", table, names, list(columns), shade=0.3))
best = {}
for name in ("next fact", "subject", "class"):
    above = (found[name].score - found[name].chance).flatten()
    i = int(above.argmax())
    best[name] = float(found[name].score.flatten()[i]), float(found[name].chance.flatten()[i])
    print(f"{name:>9}: furthest above chance is head {names[i]},", end=" ")
    print(f"with {best[name][0]:.0%} of its weight, where chance is {best[name][1]:.0%}")
i = int(cost.flatten().argmax())
print(f"without head {names[i]}, the loss on facts rises most, by {cost.max():.1f} nats")

# %% tags=["check"]
if not is_fast():
    assert best["next fact"][0] > 0.1 > 0.05 > found["next fact"].chance.max()
    assert max(best[name][0] - best[name][1] for name in ("subject", "class")) < 0.1
    assert cost.max() > 0.5

# %% [markdown]
# - *Next fact*: the best head gives many times as much of its weight to the fact that comes next as
#   chance would. And it is no mere picture: the model needs such heads, as the last line shows.
# - *Subject* and *class*: no head is far above chance, and most are near it or below. A picture of a
#   head that looks from a verb to its subject would have looked like grammar, but distance explains
#   most of it.
#
# So the weights follow references. Beyond distance, they hardly follow subjects and classes. The
# model may still know the grammar: a map does not tell everything. The command `python
# scripts/inspect_model.py content` makes this report for any model of tales.
#
# ## Exercises
#
# Replace the dots, run the cell, and read what it says.
#
# **1. Another score.** A duplicate-token head looks at the earlier copy of the same letter. Write
# its score: the mean over the second half. weights has shape (2n, 2n), for n letters and their
# repetition. (`A.diagonal(-1)` has the numbers one place below the diagonal of A.)


# %% tags=["exercise"]
from thinker.lessons.checks.look_inside import check_heads, check_row, check_score


def my_score(weights):
    return ...


check_score(my_score)

# %% [markdown]
# **2. A row on paper.** The fifth token has the weights 0.5, 0, 0.25, 0 and 0.25. Which entropy (in
# nats) and which mean distance does this row have?

# %% tags=["exercise"]
my_row = ...  # such as [0.9, 1.2]
check_row(my_row)

# %% [markdown]
# **3. Who did it?** Which head does induction for this model, and which only looks like it? (Head
# 0.1 is head 1 of layer 0.)
#
# | head | previous | induction | cost |
# |---|---|---|---|
# | 0.0 | 0.88 | 0.02 | 3.90 |
# | 0.1 | 0.41 | 0.03 | 0.00 |
# | 1.0 | 0.06 | 0.91 | 0.01 |
# | 1.1 | 0.08 | 0.84 | 2.70 |

# %% tags=["exercise"]
my_heads = ...  # such as ["0.0", "0.1"]: who does it, who only looks like it
check_heads(my_heads)

# %% [markdown]
# ## Solutions

# %% tags=["solution"]
# Rows are queries. The earlier copy is n columns to the left, so these weights form the diagonal -n.
check_score(lambda weights: weights.diagonal(-(len(weights) // 2)).mean())

# Entropy: 0.5 · ln 2 + 2 · 0.25 · ln 4 = 0.347 + 0.693. Distance: 0.5 · 4 + 0.25 · 2 + 0.25 · 0.
check_row([1.040, 2.5])

# 0.0 costs more, but it looks at the token before. 1.0 has the highest score, but nobody misses it.
# Without 1.1, the loss rises by 2.70, so no other head can do its work.
check_heads(["1.1", "1.0"])

# %% [markdown]
# ## Words of this lesson
#
# - **previous-token head**: looks at the token before. **Induction head**: after an earlier copy.
# - **ablation**: take an activation out. **Patching**: put in the one of another run.
#
# Induction: Olsson et al. 2022 ([arXiv:2209.11895](https://arxiv.org/abs/2209.11895)). Rollout:
# arXiv:2005.00928. Gradients: arXiv:2004.11207. Patching: arXiv:2202.05262. Next: a smaller model.
