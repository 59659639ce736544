# %% [markdown]
# # Make it small
#
# *How much of a trained model can you throw away before it notices?* This lesson stores weights in
# few bits, cuts parts out, and lets a small model learn from a large one. It takes 20 minutes. You
# need to know what a loss (lesson 7) and a KV cache (lesson 6) are.
#
# You will learn
#
# - how a weight becomes a small integer, and what that costs;
# - how to find the parts that a model needs least, and how it recovers without them;
# - what a teacher tells a student, and how to compare small models fairly.

# %%
import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from thinker import checkpoint
from thinker.compression import pruning
from thinker.compression.saliency import score_parts
from thinker.compression.sensitivity import round_vectors, stored_bytes
from thinker.data import tales
from thinker.generation import Generator
from thinker.generation.inference_model import fused_matrices
from thinker.generation.quantized_cache import cache_bytes
from thinker.interop import load
from thinker.lessons.pictures import Heatmap, show
from thinker.lessons.practice import is_fast
from thinker.training.config_file import validate_config
from thinker.training.run import train

folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## Round four weights by hand
#
# A weight in fp32 takes 32 bits. An integer of 8 bits takes a quarter of that, but only goes from
# −127 to 127. So a row of weights shares a **scale**, the size of one step: its largest magnitude
# divided by 127. Each weight is divided by the scale and rounded to an integer, its **code**. Code
# times scale gives the weight back, almost. With 4 bits, codes go from −7 to 7.

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
    assert torch.equal(codes * scale, round_vectors(weights, bits))  # as Thinker does it

# %% tags=["check"]
for bits, right in ((8, [0.004, 0.002, 0.003, 0.0]), (4, [0.0697, 0.0109, 0.0744, 0.0])):
    assert torch.allclose(errors[bits], torch.tensor(right), atol=5e-5)
    assert max(right) <= 1.27 / {8: 127, 4: 7}[bits] / 2
assert round_vectors(torch.tensor([0.614, -0.352, 0.107, -12.7]), 4)[:3].abs().max() == 0

# %% [markdown]
# Rounding moves a number by half a step at most. With 4 bits, a step is 18 times as large.
#
# **Question.** The last weight becomes −12.7. What happens to the other three in 4 bits?
#
# <details><summary>Answer</summary>
#
# Half a step becomes 12.7 / 7 / 2 = 0.91. The others are smaller than that, so they all become 0.
# One large weight spoils the row. That is why only a few weights share a scale.
#
# </details>
#
# ## A model to shrink
#
# We train a model with two layers of eight heads on Thinker's tales, which takes a minute or two.
# Its loss, and all others below, are those of the same 60 new stories, so only the models differ.


# %%
def fit(name, n_steps, run=None, **sections):
    """Train on tales, from scratch or from a model; returns model and tokenizer."""
    n_docs, n_steps, n_val = (120, 2, 2) if is_fast() else (6000, n_steps, 48)
    data = {"source": "tales", "max_documents": n_docs, "seq_len": 256}
    data |= {"cache_dir": folder.name} | ({} if run else {"tokenizer": "bpe:1024"})
    steps = {"device": "cpu", "precision": "fp32", "batch_size": 8, "max_steps": n_steps}
    sections["train"] = steps | {"eval_sequences": n_val} | sections.get("train", {})
    run = {"dir": f"{folder.name}/{name}"} | (run or {})
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


model, tokenizer = fit("base", 400, model={"d_model": 128, "n_layers": 2, "n_heads": 8})
stories = [tales.generate_story(7, i).text for i in range(2 if is_fast() else 60)]

# %% [markdown]
# ## The whole model in 8 and 4 bits
#
# `Generator(model, tokenizer, bits=8)` rounds all matrices like this, without training. A scale of
# 16 bits for 32 weights makes 8 + 16 / 32 = 8.5 bits per weight, or 4.5. The embedding stays in
# fp32, because reading a token takes only one of its rows.

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
assert is_fast() or (0.8 < fp32 < 1.05 and abs(losses[8] - fp32) < 0.003 < losses[4] - fp32 < 0.05)

# %% [markdown]
# 8 bits change the loss by less than 0.003 nats. 4 bits cost more, but less than 0.05.
#
# **Question.** 4.5 of 32 bits are 14%. Why is the 4-bit model 31% as large?
#
# <details><summary>Answer</summary>
#
# 524,288 of its 840,448 bytes are the embedding: 1,024 tokens · 128 numbers · 4 bytes. In larger
# models, its share is smaller.
#
# </details>
#
# ## The cache in few bits
#
# Keys and values can be rounded as well. Those of each token and head have their own scale.

# %%
print("          bytes at 256 tokens   at 4,096   nats per token")
cache_losses = {bits: loss_of(model, cache_bits=bits) for bits in (None, 8, 4)}
for bits, loss in cache_losses.items():
    short, long = (cache_bytes(model, 1, length, bits=bits) for length in (256, 4096))
    print(f"{bits or 32:>2} bits {short:20,} {long:12,} {loss:14.4f}")

# %% tags=["check"]
cache_sizes = [cache_bytes(model, 1, length, bits=bits) for bits in (None, 8, 4) for length in (256, 4096)]
assert cache_sizes == [524_288, 8_388_608, 147_456, 2_359_296, 212_992, 1_441_792]
assert is_fast() or max(abs(loss - fp32) for loss in cache_losses.values()) < 0.003

# %% [markdown]
# In a short text, 4 bits need *more* memory than 8. With 4 bits, Thinker also keeps the newest 64
# tokens in fp32, because a query attends most to what is near. So the loss stays within 0.003.
#
# ## Cut parts out
#
# **Pruning** removes attention heads, or **neurons**, the hidden units of the MLP. The gradient
# says how much the loss reacts to what a part computes. Multiplied by what it computes, it
# estimates how the loss would change without the part: its score. In each layer we remove two of
# eight heads, half of the neurons, or both: those with the lowest scores, or three random choices.

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
assert [sum(p.numel() for p in each.parameters()) for each in (cut("random", 2, 192), model)] == [508_608, 688_832]
assert is_fast() or all(fp32 + 2 * (losses[4] - fp32) < x < min(others) for x, others in damage.values())

# %% [markdown]
# The least needed parts cost less than each random choice, though a multiple of what 4 bits cost.
#
# ## Healing
#
# The remaining parts have never worked without the others. So train on, for 60 steps. For
# comparison, do the same with the second random choice, and with the original.

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
assert is_fast() or original < min(after, fp32) <= after < min(other, fp32 + 0.3 * (damage["both"][0] - fp32))

# %% [markdown]
# Healing wins back more than 70% of what was lost, and the choice of parts matters less. More steps
# help the original, too, so the fair price of pruning is the difference from the *last* line.
#
# ## What a teacher says
#
# The text says which token came. A trained model, the **teacher**, says how probable every token
# was. These are **soft targets** for a **student**, and even softer if logits are divided by a
# **temperature**. A temperature of 2 takes the roots of the probabilities, up to a factor. Take
# 36/49, 9/49 and 4/49: their roots are in the ratio 6 : 3 : 2, so they become 6/11, 3/11 and 2/11.
# The student is compared by the **KL divergence**: the sum of p · ln(p / s), with p of the teacher
# and s of the student. It is 0 if they agree, and never negative.

# %%
logits, student = torch.tensor([36.0, 9.0, 4.0]).log(), torch.tensor([0.5, 0.3, 0.2])
teacher, soft = logits.softmax(0), (logits / 2).softmax(0)
terms = teacher * (teacher / student).log()
table = torch.stack([torch.tensor([1.0, 0.0, 0.0]), teacher, soft, student, terms])
names = ["text", "teacher p", "p at temperature 2", "student s", "p · ln(p / s)"]
title = f"three tokens; KL = {terms.sum():.4f}"
show(Heatmap(title, table, names, ["1st", "2nd", "3rd"], digits=4, shade=1.0))

# %% tags=["check"]
assert torch.allclose(table[1:3], torch.tensor([[36 / 49, 9 / 49, 4 / 49], [6 / 11, 3 / 11, 2 / 11]]))
assert torch.allclose(terms, torch.tensor([0.2827, -0.0901, -0.0732]), atol=1e-4)
assert round(float(terms.sum()), 4) == 0.1195

# %% [markdown]
# ## What each technique saves and costs
#
# Now train three students of half the width: one alone, one on the teacher's probabilities instead
# of the text (`train.distill`), and one alone for twice as many steps. That costs about as much: a
# teacher takes 2 operations per token and weight, training 6 per weight of the student.

# %%
shape, students = {"d_model": 64, "n_layers": 2, "n_heads": 4}, {}
distill = {"distill": {"teacher": f"{folder.name}/base"}}
plans = {"alone": (200, {}), "taught": (200, distill), "alone, longer": (400, {})}
for name, (n_steps, options) in plans.items():
    student, _ = fit(name, n_steps, model=shape, train=options)
    students[f"student {name}"] = model_bytes(student), loss_of(student), n_steps

small, n_bytes = healed["least needed"], model_bytes(healed["least needed"])
table = {f"{bits or 32} bits": (sizes[bits], losses[bits], 0) for bits in sizes}
table["pruned"] = n_bytes, damage["both"][0], 0
table["pruned, healed"] = n_bytes, loss_of(small), 60
table["... and in 4 bits"] = model_bytes(small, 4), loss_of(small, bits=4), 60
print("                           bytes  share  change  steps")
for name, (size, loss, steps) in (table | students).items():
    print(f"{name:>22} {size:9,} {size / sizes[None]:6.0%} {loss - fp32:+7.3f} {steps:6}")

# %% tags=["check"]
n_teacher, n_student = (sum(p.numel() for p in x.parameters()) - x.embedding.weight.numel() for x in (model, student))
assert 2 < (2 * n_teacher + 6 * n_student) / (6 * n_student) < 2.1
alone, taught, longer = (row[1] for row in students.values())
assert [table["... and in 4 bits"][0], students["student alone"][0]] == [739_072, 951_808]
assert is_fast() or (longer + 0.1 < taught < alone - 0.03 and losses[4] < longer)

# %% [markdown]
# - 8 bits are the best bargain. Pruned, healed and in 4 bits, the model takes 27% of its bytes.
# - With 4 bits, the large model takes fewer bytes than the students, and is better than all three.
# - With as many steps, the taught student beats the one alone. But twice as many steps alone cost
#   as much, and help far more. Without the last line, the teacher would look better than it is.
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
# **3. Which one do you ship?** At most 0.9 MB, and +0.020 in loss on new stories: "A", "B" or "C"?
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

# 4 + 16 / 32 = 4.5 bits per weight: 562,500 bytes. The embedding takes 4 · 200,000.
check_bytes(562_500 + 800_000)

# A is too large. B may know its stories by heart, so nobody knows its loss on new ones.
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
# [arXiv:1906.10771](https://arxiv.org/abs/1906.10771). This was the last lesson.
