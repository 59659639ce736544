# %% [markdown]
# # Make it small
#
# *How much of a trained model can you throw away before it notices?* This lesson stores weights in
# few bits, cuts parts out, and lets a small model learn from a large one. It takes 20 minutes. You
# need to know what a loss (lesson 2) and a KV cache (lesson 6) are.
#
# You will learn
#
# - how a weight becomes a small integer, and what that costs;
# - how to find the parts that a model needs least, and how it recovers without them;
# - what a teacher tells a student, and how to compare small models fairly.

# %% tags=["folded"]
import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from thinker import checkpoint
from thinker.data.text import tales
from thinker.features.pruning import pruning
from thinker.features.pruning.saliency import score_parts
from thinker.features.quantization_study.sensitivity import round_vectors, stored_bytes
from thinker.generation import Generator
from thinker.generation.caches.quantized_cache import cache_bytes
from thinker.generation.decoders.fused_matrices import fused_matrices
from thinker.interop import load
from thinker.lessons.materials.practice import is_fast, lesson_seed
from thinker.lessons.pictures import Heatmap, show
from thinker.runtime.plot_style import BLUE, ORANGE, new_figure
from thinker.training.config.load import validate_config
from thinker.training.run import train

folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## Round four weights by hand
#
# A weight in fp32 takes 32 bits. An integer of 8 bits takes a quarter of that.
#
# - The integer of a weight is its **code**. With 8 bits, codes go from −127 to 127, with 4 bits
#   from −7 to 7. In general, the highest code is 2^(bits−1) − 1: 2⁷ − 1 = 127 and 2³ − 1 = 7.
# - A row of weights shares a **scale**, the size of one step: the row's largest magnitude divided
#   by the highest code.
# - Divide a weight by the scale and round: that is its code. Code times scale gives the weight
#   back, almost. (A row of zeros would get the scale 0, and 0 / 0 is no number. So Thinker takes a
#   tiny scale instead. The exercise has no such row.)

# %%
weights, errors = torch.tensor([0.614, -0.352, 0.107, -1.27]), {}
for bits, highest in ((8, 127), (4, 7)):
    scale = weights.abs().max() / highest
    codes = (weights / scale).round()
    errors[bits] = (codes * scale - weights).abs()
    print(f"{bits} bits: scale 1.27 / {highest} = {scale:.4f}, half of it {scale / 2:.4f}")
    print("        codes" + "".join(f"{code:9.0f}" for code in codes))
    print("code · scale " + "".join(f"{x:9.4f}" for x in codes * scale))
    print("       error " + "".join(f"{x:9.4f}" for x in errors[bits]))
    assert torch.equal(codes * scale, round_vectors(weights, bits))  # plain rounding

# %% tags=["check"]
for bits, right in ((8, [0.004, 0.002, 0.003, 0.0]), (4, [0.0697, 0.0109, 0.0744, 0.0])):
    assert torch.allclose(errors[bits], torch.tensor(right), atol=5e-5)
    assert max(right) <= 1.27 / {8: 127, 4: 7}[bits] / 2
assert round_vectors(torch.tensor([0.614, -0.352, 0.107, -12.7]), 4)[:3].abs().max() == 0

# %% [markdown]
# Rounding moves a number by half a step at most. With 4 bits, a step is 127 / 7 = 18 times as
# large.
#
# **Question.** The last weight becomes −12.7. What happens to the other three in 4 bits?
#
# <details><summary>Answer</summary>
#
# A step becomes 12.7 / 7 = 1.81, and half of it 0.91. The others are smaller, so they all become 0.
# One large weight spoils the row. That is why only a few weights share a scale.
#
# </details>
#
# ## A model to shrink
#
# We train a model with two layers of eight heads on Thinker's tales, which takes a minute or two.
# Your run may differ a little. Three helpers do the work from here on:
#
# - `fit(name, steps, ...)` trains a model, and returns it with its tokenizer;
# - `loss_of(model, ...)` is the loss on 60 new stories, the same for all models;
# - `model_bytes(model, bits)` counts its bytes.


# %% tags=["folded"]
def fit(name, n_steps, run=None, **sections):
    """Train on tales, from scratch or from a model; returns model and tokenizer."""
    n_docs, n_steps, n_val = (120, 2, 2) if is_fast() else (6000, n_steps, 48)
    data = {"source": "tales", "max_documents": n_docs, "seq_len": 256}
    data |= {"cache_dir": folder.name} | ({} if run else {"tokenizer": "bpe:1024"})
    steps = {"device": "cpu", "precision": "fp32", "batch_size": 8, "max_steps": n_steps}
    steps["fit_bigrams"] = "off"  # start from random weights
    sections["train"] = steps | {"eval_sequences": n_val} | sections.get("train", {})
    run = {"dir": f"{folder.name}/{name}", "seed": 1 + lesson_seed()} | (run or {})
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        train(validate_config({"run": run, "data": data} | sections))
    return load(run["dir"])


def loss_of(model, **options):
    """Nats per token of the stories, as a Generator with these options reads them."""
    generator = Generator(model, tokenizer, **options)
    scores = [generator.score(story).logprobs for story in stories]
    return -sum(map(sum, scores)) / sum(map(len, scores))


def model_bytes(model, bits=None):
    """Bytes of a model with its matrices in so many bits, and the rest in fp32."""
    matrices = fused_matrices(model).values() if bits else ()
    n_rounded = sum(linear.weight.numel() for linears in matrices for linear in linears)
    n_others = sum(p.numel() for p in model.parameters()) - n_rounded
    return sum(stored_bytes(linears, bits) for linears in matrices) + 4 * n_others


# %%
model, tokenizer = fit("base", 400, model={"d_model": 128, "n_layers": 2, "n_heads": 8})
stories = [tales.generate_story(7, i).text for i in range(2 if is_fast() else 60)]

# %% [markdown]
# ## The whole model in 8 and 4 bits
#
# `Generator(model, tokenizer, bits=8)` rounds all matrices, without training. In each row, 32
# weights share a scale of 16 bits. So 8-bit codes take 8 + 16 / 32 = 8.5 bits per weight, and 4-bit
# codes take 4.5. (Our four weights were rounded plainly. For 4-bit matrices, Thinker does a bit
# better: it also uses the code −8 and takes the best of three scales.) The embedding stays in fp32.
# Few bits would save bytes there but no time, as reading a token takes only one row.

# %%
fp32, losses = loss_of(model), {bits: loss_of(model, bits=bits) for bits in (None, 8, 4)}
sizes = {bits: model_bytes(model, bits) for bits in losses}
print("         bytes   of fp32   nats per token   change")
for bits, size in sizes.items():
    loss, share = losses[bits], size / sizes[None]
    print(f"{bits or 32:>2} bits {size:9,} {share:7.0%} {loss:14.4f} {loss - fp32:+13.4f}")

# %% tags=["check"]
assert list(sizes.values()) == [2_755_328, 1_118_976, 840_448]
assert [f"{sizes[bits] / sizes[None]:.0%}" for bits in (8, 4)] == ["41%", "31%"]
assert 4 * model.embedding.weight.numel() == 524_288
if not is_fast():
    assert 0.8 < fp32 < 1.05
    assert abs(losses[8] - fp32) < min(0.003, losses[4] - fp32)
    assert losses[4] - fp32 < 0.05

# %% [markdown]
# With 8 bits, the loss hardly changes, here by 0.0001 nats. That is chance: on other stories, it may
# rise or fall as much. 4 bits cost 0.0075 nats here. (The loss of lesson 7 had another tokenizer.
# bf16 takes half of fp32.)
#
# **Question.** 4.5 of 32 bits are 14%. Why is the 4-bit model 31% as large?
#
# <details><summary>Answer</summary>
#
# 524,288 of its 840,448 bytes, 62%, are the embedding: 1,024 tokens · 128 numbers · 4 bytes. With
# more layers, its share is smaller.
#
# </details>
#
# ## The cache in few bits
#
# Keys and values can be rounded as well. Each key and each value of a head has its own scale of 16
# bits.

# %%
print("          bytes at 256 tokens   at 4,096   nats per token")
cache_losses = {bits: loss_of(model, cache_bits=bits) for bits in (None, 8, 4)}
for bits, loss in cache_losses.items():
    short, long = (cache_bytes(model, 1, length, bits=bits) for length in (256, 4096))
    print(f"{bits or 32:>2} bits {short:20,} {long:12,} {loss:14.4f}")
n_tokens = sum(len(tokenizer.encode(story)) for story in stories)
print(f"a story has {n_tokens / len(stories):.0f} tokens on average")

# %% tags=["check"]
cache_sizes = [
    cache_bytes(model, 1, length, bits=bits) for bits in (None, 8, 4) for length in (256, 4096)
]
assert cache_sizes == [524_288, 8_388_608, 147_456, 2_359_296, 212_992, 1_441_792]
assert is_fast() or max(abs(loss - fp32) for loss in cache_losses.values()) < 0.003

# %% [markdown]
# **Bytes**: at 4,096 tokens, 4 bits take 17% of fp32. But at 256 tokens, they need *more* than 8
# bits. The reason: with 4 bits, Thinker also keeps the newest 64 tokens in fp32, since that took
# away most of the harm when we tried it (`docs/development/experiments.md`). The sum for 256 tokens:
#
# - A token has a key and a value in 8 heads of 2 layers: 2 · 8 · 2 = 32 vectors of 128 / 8 = 16
#   numbers.
# - In fp32, they take 32 · 16 · 4 = 2,048 bytes.
# - In 4 bits, a vector takes 16 / 2 = 8 bytes, and its scale 2. So a token takes 32 · 10 = 320
#   bytes.
# - 256 tokens in 4 bits, and 64 of them in fp32 as well: 256 · 320 + 64 · 2,048 = 212,992 bytes.
#
# **Loss**: it hardly changes. But that was measured on single stories of
# 198 tokens on average, whose newest 64 are in fp32. So it says nothing about 4,096 tokens.
#
# ## Cut parts out
#
# **Pruning** removes parts: attention heads, or **neurons**. A neuron is one of the numbers that an
# MLP computes between its matrices, here 384 per layer. Which parts does the model need least? Each
# part gets a score:
#
# > score = |gradient · output|
#
# An example: a neuron has the output 0.5, and the gradient of the loss there is −0.2. If the output
# rises a little, the loss falls 0.2 times as much. Without the neuron, the output falls by 0.5, so
# the loss should rise by about 0.2 · 0.5 = 0.1. That is the score. In a sequence, gradient · output
# is first added up over all tokens; then comes the absolute value; then the sum over 64 sequences.
#
# Lesson 8 has shown that a gradient knows only small changes, and this change is large. But the
# scores only have to put the parts in order.
#
# In each layer we remove 2 of 8 heads, half of the 384 neurons, or both: those with the lowest
# scores, or, for comparison, three random choices.

# %%
texts = [tales.generate_story(8, i).text for i in range(200)]
ids = [i for text in texts for i in [tokenizer.bos_id, *tokenizer.encode(text)]]
rows = torch.tensor(ids[: (2 if is_fast() else 64) * 257]).view(-1, 257)


def cut(method, heads, neurons, seed=0):
    """A copy without so many heads and neurons per layer: those with the lowest scores."""
    scores = score_parts(model, rows[:, :-1], rows[:, 1:], method, seed)
    gone = [(i, int(j)) for i, x in enumerate(scores.groups) for j in x.argsort()[:heads]]
    kept = [x.argsort()[neurons:] for x in scores.neurons]
    return pruning.prune_neurons(pruning.prune(model, gone), kept)


print(f"nats per token, {fp32:.3f} before   least needed   random")
damage, cuts = {}, {"2 of 8 heads": (2, 0), "half the neurons": (0, 192), "both": (2, 192)}
for name, parts in cuts.items():
    others = [loss_of(cut("random", *parts, seed)) for seed in (0, 1, 2)]
    damage[name] = loss_of(cut("gradient", *parts)), others
    print(f"{name:>34} {damage[name][0]:11.3f}     ", *(f"{loss:.3f} " for loss in others))

# %% tags=["check"]
assert [sum(p.numel() for p in each.parameters()) for each in (cut("random", 2, 192), model)] == [
    508_608,
    688_832,
]
if not is_fast():
    for x, others in damage.values():
        assert fp32 + 2 * (losses[4] - fp32) < x < sum(others) / 3
    assert damage["both"][0] < min(damage["both"][1])

# %% [markdown]
# The least needed parts cost less than random ones do on average. Without both kinds, they cost less
# than each of the random choices: the loss is 1.147 here instead of 1.351 to 1.590. But the whole
# model has 0.922 here, and 4 bits cost it only 0.0075.
#
# ## Healing
#
# The remaining parts have never worked without the others. So we train on, for 60 steps. For
# comparison, we do the same with one of the random choices, and with the original.

# %%
models = {"least needed": cut("gradient", 2, 192), "random": cut("random", 2, 192, 1)}
models, healed = models | {"original": model}, {}
for name, start in models.items():
    checkpoint.save(Path(folder.name, name), start, {"step": 0})
    tokenizer.save(Path(folder.name, name))
    options = {"run": {"init_from": f"{folder.name}/{name}"}, "optimizer": {"lr": 0.0026}}
    healed[name], _ = fit(f"healed {name}", 60, **options)
    print(f"{name:>12}: {loss_of(start):.3f} before, {loss_of(healed[name]):.3f} after")

# %% tags=["check"]
after, other, original = (loss_of(each) for each in healed.values())
if not is_fast():
    assert original < min(after, fp32 + 0.01)
    assert after < min(other, fp32 + 0.3 * (damage["both"][0] - fp32))

# %% [markdown]
# Pruning had raised the loss from 0.922 to 1.147 here, and healing brings it back to 0.951: it heals
# most of the damage. With the random choice, too: here the loss falls from 1.451 to 0.984. So the
# choice of parts matters less than before.
#
# But 60 more steps may help the original, too. To be fair, compare models with equal training: the
# first line with the *last*, which is 0.920 here.
#
# ## What a teacher says
#
# The text says which token came. A trained model, the **teacher**, says how probable every token
# was. Its probabilities are **soft targets** for a smaller model, the **student**.
#
# The **KL divergence** compares the two: the sum of p · ln(p / s), with p of the teacher and s of
# the student. It is the extra surprise, in nats, of someone who expects s when p is true. It is 0
# if they agree, and never negative. Here it is for three tokens:

# %%
teacher, student = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
terms = teacher * (teacher / student).log()
table = torch.stack([torch.tensor([1.0, 0.0, 0.0]), teacher, student, terms])
names = ["text", "teacher p", "student s", "p · ln(p / s)"]
title = f"three tokens; KL = {terms.sum():.4f}"
show(Heatmap(title, table, names, ["1st", "2nd", "3rd"], digits=4, shade=1.0))

# %% tags=["check"]
assert [round(x, 4) for x in terms.tolist()] == [0.2355, -0.0811, -0.0693]
assert round(float(terms.sum()), 4) == 0.0851 == round(0.2355 - 0.0811 - 0.0693, 4)

# %% [markdown]
# ## What each technique saves and costs
#
# Now train three students of half the width: one alone, one on the teacher's probabilities instead
# of the text (`train.distill`), and one alone for twice as many steps.
#
# The last two cost about the same. For each token, a weight takes 2 operations to compute the output
# (multiply, add), and 4 more in training, for its gradients: 6 in all. The teacher only computes
# its output, but its matrices have 557,056 / 172,032 = 3.2 times as many weights: 4 times in the
# layers, and twice in the matrix for the logits. So a step with a teacher costs 6 + 2 · 3.2 = 12.4
# operations per weight of the student, and two steps alone cost 2 · 6 = 12.
#
# An MB is a million bytes. The change is in nats per token, from the original in fp32.

# %%
shape, students = {"d_model": 64, "n_layers": 2, "n_heads": 4}, {}
distill = {"distill": {"teacher": f"{folder.name}/base"}}
plans = {"alone": (200, {}), "taught": (200, distill), "alone, longer": (400, {})}
for name, (n_steps, options) in plans.items():
    student, _ = fit(name, n_steps, model=shape, train=options)
    students[f"student {name}"] = student, n_steps

originals = {"original": (model, 400), "original, 60 more steps": (healed["original"], 460)}
pruned, small = models["least needed"], healed["least needed"]
originals |= {"pruned": (pruned, 400), "pruned, healed": (small, 460)}
results = {}  # by name and bits: megabytes, and nats per token above the original in fp32
print("                                 fp32               4 bits")
print("                         steps    MB    change       MB    change")
for name, (each, n_steps) in (originals | students).items():
    for bits in (None, 4):
        change = loss_of(each, bits=bits) - fp32
        results[name, bits] = model_bytes(each, bits) / 1e6, change
    cells = (f"{MB:6.2f} {x:+9.3f}" for MB, x in (results[name, None], results[name, 4]))
    print(f"{name:>23} {n_steps:6}", "   ".join(cells))

# %% [markdown]
# In the picture, a line joins the sizes of a model: fp32 on the right, 4 bits on the left.

# %% tags=["folded"]
results["original", 8] = sizes[8] / 1e6, losses[8] - fp32
figure, (axes,) = new_figure(7.2, 4.2)
places = {"original": (8, 2), "original, 60 more steps": (-70, -16), "pruned, healed": (-4, 8)}
for name in originals | students:
    points = [results[name, bits] for bits in (None, 8, 4) if (name, bits) in results]
    color = ORANGE if name in students else BLUE
    axes.plot(*zip(*points), marker="o", color=color)
    axes.annotate(
        name, points[0], places.get(name, (8, -4)), textcoords="offset points", color=color
    )
axes.set(xlabel="size in MB", ylabel="change of the loss in nats per token", xlim=(0, 3.2))
axes.set_ylim(bottom=-0.06)
alt = "Size against loss: original and healed models lie low, at 0.7 to 2.8 MB. "
show(
    figure, alt + "Of the students, at 0.4 and 1 MB, only the one that trained longer comes close."
)

# %% tags=["check"]
linears = [
    [linear for group in fused_matrices(x).values() for linear in group] for x in (model, student)
]
assert [sum(linear.weight.numel() for linear in group) for group in linears] == [557_056, 172_032]
names = list(originals | students)
assert [f"{results[name, 4][0]:.2f}" for name in names] == [
    "0.84",
    "0.84",
    "0.74",
    "0.74",
    "0.36",
    "0.36",
    "0.36",
]
for bits in (None, 4):
    first, more, cut_only, small, alone, taught, longer = (results[name, bits][1] for name in names)
    if not is_fast():
        assert max(first, more) < min(small, longer)
        assert max(small, longer) < cut_only
        assert longer + 0.05 < taught < alone
assert is_fast() or results["original", 4][1] < results["student alone, longer", None][1]

# %% [markdown]
# - **Few bits** cost least. In 4 bits, the original takes 0.84 MB instead of 2.76, here at +0.007. In
#   8 bits (the point in the middle), it takes 1.12 MB, and no cost can be measured.
# - **Pruning** goes a little further: healed and in 4 bits, the pruned model takes 0.74 MB, here at
#   +0.042. The fair comparison is the original with 60 more steps in 4 bits, here +0.005 at 0.84 MB.
# - **A student** is smallest: trained longer and in 4 bits, it takes 0.36 MB, here at +0.081. In fp32
#   it is larger than the original in 4 bits, and worse.
# - **A teacher** helps if the steps are equal: here +0.336 instead of +0.481. But 200 steps are too
#   few for a student, even with a teacher: 400 steps alone, which cost about as much, lead to +0.059
#   here. Without that row, the teacher would look better than it is.
#
# ## Exercises
#
# Replace the dots, run the cell, and read what it says. Then run it again.
#
# **1. Round a row.** Round `row` to `bits` bits with one scale, and return code times scale.


# %% tags=["exercise"]
from thinker.lessons.checks.make_it_small import check_bytes, check_choice, check_round


def my_round(row, bits):
    return ...


check_round(my_round)

# %% [markdown]
# **2. Bytes on paper.** A model has 1,000,000 weights in matrices, in 4 bits with a scale of 16
# bits per 32 weights. Its embedding has 200,000 numbers in fp32. How many bytes does it take?

# %% tags=["exercise"]
my_bytes = ...
check_bytes(my_bytes)

# %% [markdown]
# **3. Which one do you choose?** Your model may have at most 0.9 MB (900,000 bytes), and its loss
# on new stories may rise by at most 0.020. Answer with "A", "B" or "C".
#
# - A: 8 bits, 1.06 MB, +0.001 on new stories.
# - B: a student, 0.55 MB, +0.004 on the stories that it learned from.
# - C: pruned, healed and in 8 bits, 0.85 MB, +0.012 on new stories.

# %% tags=["exercise"]
my_choice = ...
check_choice(my_choice)

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def round_row(row, bits):
    scale = row.abs().max() / (2 ** (bits - 1) - 1)  # 127 steps with 8 bits, 7 with 4
    return (row / scale).round() * scale


check_round(round_row)

# 4 + 16 / 32 = 4.5 bits per weight: 4.5 · 1,000,000 / 8 = 562,500 bytes. The embedding takes 4 · 200,000.
check_bytes(562_500 + 800_000)

# A is too large. B may know its stories by heart, so nobody knows its loss on new ones. C fits.
check_choice("C")

# %% [markdown]
# ## Words of this lesson
#
# - **quantization**: storing numbers as small integers (**codes**) with a shared **scale**.
# - **pruning**: removing parts. **Healing**: training what is left for a few steps.
# - **distillation**: training a student on **soft targets**, the probabilities of a teacher.
# - **KL divergence**: how far one distribution is from another, in nats.
#
# Distillation: [arXiv:1503.02531](https://arxiv.org/abs/1503.02531). Scores for pruning:
# [arXiv:1906.10771](https://arxiv.org/abs/1906.10771).
#
# The commands for what this lesson did are in `docs/guides/smaller-models.md`.
