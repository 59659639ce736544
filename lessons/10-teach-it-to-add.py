# %% [markdown]
# # Teach it to add
#
# *Can a model learn to add from someone who gets every fifth sum wrong?* Training imitates its
# text, mistakes included. This lesson goes further: the model writes answers of its own, and the
# good ones become more probable. It takes 20 minutes. You need to know what a loss and a
# temperature are (lesson 7).
#
# You will learn
#
# - how rewards become a gradient: groups, baselines and advantages;
# - why a model can know more than its likeliest answer shows;
# - what happens if a reward has a hole.

# %% tags=["folded"]
import io
import json
import random
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from thinker.features.rewards.advantages import group_advantages
from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.lessons.materials.practice import is_fast, lesson_seed
from thinker.lessons.pictures import show
from thinker.runtime.plot_style import BLUE, GREY, new_figure
from thinker.training.config.load import validate_config
from thinker.training.run import train

folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## A reward by hand
#
# A model answers the prompt `47+85=` four times: 122, 132, 122, 131. Only the second answer is
# right. A function that judges an answer is called a **verifier**, and its verdict a **reward**: here
# 0, 1, 0, 0.
#
# The four answers to one prompt are a **group**. Their mean reward is the **baseline**: 1 / 4. An
# answer that is better than the baseline should become more probable, a worse one less probable.
# Its **advantage** says by how much: reward minus baseline, divided by the standard deviation of
# the group. (Its square is the sum of the squared differences, divided by 4 − 1.)

# %%
rewards = torch.tensor([0.0, 1.0, 0.0, 0.0])
differences = rewards - rewards.mean()
deviation = (differences.square().sum() / (4 - 1)).sqrt()
advantages = differences / deviation
print("differences", differences.tolist())
print(f"standard deviation {deviation:.3f}")
print("advantages ", advantages.tolist())

# %% tags=["check"]
assert torch.allclose(advantages, torch.tensor([-0.5, 1.5, -0.5, -0.5]))
assert torch.allclose(advantages, group_advantages(rewards[None], "mean", "group")[0], atol=1e-5)

# %% [markdown]
# The loss is −advantage · ln P(answer), averaged over the answers. So a step along its gradient
# raises ln P of the right answer and lowers that of the others. Nobody has to tell the model what
# the right answer is; it only learns which of its own answers was better. This is **GRPO**,
# group-relative policy optimization.
#
# Let us do one step. A tiny model has one logit for each of the three answers, and 122 is its
# favorite. You can check it on paper: the advantages of a group add up to 0, so a step with the
# learning rate 1 adds to each logit the advantages of its answers, divided by 4. The logit of 122
# falls by (0.5 + 0.5) / 4 = 0.25.

# %%
answers, group = ["122", "131", "132"], [0, 2, 0, 1]  # the four answers, by their number
logits = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
before = logits.softmax(dim=0)
loss = -(advantages * before.log()[group]).mean()
loss.backward()
after = (logits - logits.grad).softmax(dim=0)  # a step with the learning rate 1
for name, p, q in zip(answers, before.tolist(), after.tolist()):
    print(f"P({name}): {p:.3f} before, {q:.3f} after")

# %% tags=["check"]
assert [round(p, 3) for p in before.tolist()] == [0.576, 0.212, 0.212]
assert [round(p, 3) for p in after.tolist()] == [0.475, 0.198, 0.327]

# %% [markdown]
# **Question.** What does the model learn from a group in which all four answers are wrong? And
# from one in which all are right?
#
# <details><summary>Answer</summary>
#
# Nothing: all advantages are 0. (Thinker leaves such groups out.) A model learns from prompts that
# it solves sometimes.
#
# </details>
#
# ## Somebody who forgets carries
#
# Our rows are sums of two numbers with two digits, as bytes. Whoever wrote them forgets every
# second carry: 47 + 85 becomes 122, since 7 + 5 = 12, and the 1 is lost. There are 4,000 rows,
# about half of all pairs. The other sums are new to the model.

# %%
numbers = random.Random(1)
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
numbers.shuffle(pairs)


def has_carry(a, b):
    return a % 10 + b % 10 >= 10


rows, n_wrong = [], 0
for a, b in pairs[:4000]:
    forgets = has_carry(a, b) and numbers.random() < 0.5
    n_wrong += forgets
    rows.append({"text": f"{a}+{b}={a + b - 10 * forgets}"})
print(*[row["text"] for row in rows[:5]], sep="\n")
print(f"{n_wrong} of 4,000 rows are wrong, {n_wrong / 4000:.0%}")

# %% tags=["check"]
assert 0.2 < n_wrong / 4000 < 0.25

# %% [markdown]
# Two helpers do the work from here on:
#
# - `fit(name, ...)` trains a model and returns it with its tokenizer;
# - `answers_of(model)` lets a model answer 300 new sums eight times each.


# %% tags=["folded"]
def fit(name, texts, **sections):
    """Train on texts, which are the lines of a file; returns model and tokenizer."""
    path = Path(folder.name, f"{name}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    data = {"source": "jsonl", "path": str(path), "cache_dir": f"{folder.name}/cache"}
    sections["data"] = data | {"seq_len": 12} | sections.get("data", {})
    run = {"dir": f"{folder.name}/{name}", "seed": 1 + lesson_seed()}
    sections["run"] = run | sections.get("run", {})
    sections["train"] = {"device": "cpu", "precision": "fp32", "log_every": 1} | sections["train"]
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        train(validate_config(sections))
    return load(sections["run"]["dir"])


tests = pairs[-20:] if is_fast() else pairs[-300:]  # (a, b) of new sums


def answers_of(model, n=8):
    """The answers to each test: a list of n texts per sum."""
    generator = Generator(model, tokenizer)
    prompts = [f"{a}+{b}=" for a, b in tests for _ in range(n)]
    texts = [each.text for each in generator.generate(prompts, SamplingParams(4, seed=1))]
    return [texts[start : start + n] for start in range(0, len(texts), n)]


# %%
shape = {"d_model": 64, "n_layers": 2, "n_heads": 4}
own = {"tokenizer": "byte", "packing": "documents", "val_fraction": 0.1}
steps = {"max_steps": 3 if is_fast() else 700, "batch_size": 100}
imitator, tokenizer = fit("rows", rows, data=own, model=shape, train=steps)  # half a minute


def report(model):
    """Print the shares of right answers and of sums with one among eight; returns both by kind."""
    groups = answers_of(model)
    shares = {}
    print("                  right   at least one of eight")
    for kind, wanted in (("without a carry", False), ("with a carry", True)):
        chosen = [
            [text == str(a + b) for text in group]
            for (a, b), group in zip(tests, groups)
            if has_carry(a, b) == wanted
        ]
        one = sum(map(sum, chosen)) / sum(map(len, chosen))
        any_of_8 = sum(map(any, chosen)) / len(chosen)
        shares[kind] = one, any_of_8
        print(f"{kind:>15} {one:7.0%} {any_of_8:23.0%}")
    return shares


first = report(imitator)

# %% tags=["check"]
if not is_fast():
    assert first["without a carry"][0] > 0.9
    assert 0.35 < first["with a carry"][0] < 0.65
    assert first["with a carry"][1] > max(0.75, first["with a carry"][0] + 0.25)

# %% [markdown]
# The model has become like its teacher: it adds well without a carry, and forgets about every
# second carry. More rows of this kind would not help. The best that imitation can do is to say
# "132 or 122, one as likely as the other", as that is what the rows say.
#
# But look at the last number. For most sums with a carry, the right answer is among eight. The
# model finds it; it does not know that it is the right one. The share of prompts with at least one
# right answer among k is called **pass@k**.
#
# ## Let it check its own sums
#
# A sum is hard to guess and easy to check. So we write a verifier, a function in a file, and let
# the model train on its own answers. Each step takes 32 prompts and 8 answers to each. No row has a
# result; a row's first six bytes, such as `47+85=`, are a prompt.

# %%
Path(folder.name, "verifiers.py").write_text('''
def right(answer):
    """1 for the right sum."""
    a, b = answer.prompt.removesuffix("=").split("+")
    return float(answer.text == str(int(a) + int(b)))


def not_too_small(answer):
    """Who forgets a carry ends 10 too low, so this should do as well."""
    a, b = answer.prompt.removesuffix("=").split("+")
    return float(answer.text.isdigit() and int(answer.text) >= int(a) + int(b))
''')


def reinforce(name, n_steps):
    """Train the imitator with a verifier; returns the model and the mean reward of each step."""
    grpo = {"rewards": f"{folder.name}/verifiers.py:{name}", "group_size": 8}
    grpo |= {"prompt_tokens": 6, "max_new_tokens": 4}
    prompts = [{"text": f"{a}+{b}="} for a, b in pairs[4000:-300]]
    own = {"max_steps": 2 if is_fast() else n_steps, "batch_size": 256, "grpo": grpo}
    options = {"run": {"init_from": f"{folder.name}/rows"}, "optimizer": {"lr": 0.002}}
    model, _ = fit(name, prompts, train=own, **options)
    lines = Path(folder.name, name, "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return model, [line["reward"] for line in logged if "reward" in line]


adder, curve = reinforce("right", 300)  # a minute
second = report(adder)

# %% tags=["folded"]
figure, (axes,) = new_figure(6.5, 3.2)
smooth = []
for step in range(len(curve)):
    newest = curve[max(0, step - 20) : step + 1]
    smooth.append(sum(newest) / len(newest))
axes.plot(range(1, len(curve) + 1), curve, ".", color=GREY, markersize=3, label="a step")
axes.plot(range(1, len(curve) + 1), smooth, color=BLUE, label="mean of the last 21 steps")
axes.set(xlabel="step", ylabel="share of right answers", ylim=(0.55, 1.02))
axes.legend(frameon=False)
show(figure, "The share of right answers rises from about 0.7 to above 0.95 within 300 steps.")

# %% tags=["check"]
if not is_fast():
    assert second["with a carry"][0] > 0.8 > first["with a carry"][0] + 0.2
    assert second["without a carry"][0] > 0.9

# %% [markdown]
# Nearly all carries are there, though nobody has given the model another right sum. Its own answers
# and a yes or no were enough: it found right answers by chance, and they became more probable.
#
# **Question.** One of eight answers was right for most sums before, too. What has changed?
#
# <details><summary>Answer</summary>
#
# Pass@8 has risen by a few points, but the share of right answers by about fifty. Rewards mostly
# move probability to what a model could already do. Where pass@8 is 0, there is nothing to reward.
#
# </details>
#
# ## A verifier with a hole
#
# Whoever forgets a carry ends too low. So the verifier `not_too_small` asks only for an answer that
# is at least as large as the sum. In the rows, every such answer is right! Will it do?

# %%
cheater, _ = reinforce("not_too_small", 100)
generator = Generator(cheater, tokenizer)
prompts = [f"{a}+{b}=" for a, b in tests[:5]]
cheats = [each.text for each in generator.generate(prompts, SamplingParams(4, temperature=0))]
for (a, b), prompt, text in zip(tests, prompts, cheats):
    print(f"{prompt}{text:<5} the sum is {a + b}")
third = report(cheater)
groups = answers_of(cheater)
n_passed = 0
for (a, b), group in zip(tests, groups):
    n_passed += sum(text.isdigit() and int(text) >= a + b for text in group)
passed = n_passed / (8 * len(tests))
print(f"{passed:.0%} of the answers satisfy the verifier")

# %% tags=["check"]
if not is_fast():
    assert passed > 0.95
    assert max(third[kind][0] for kind in third) < 0.2

# %% [markdown]
# The verifier is content with nearly all answers, and nearly all of them are wrong. The model has
# found that a larger number is always large enough. No row has such an answer, but training does
# not stay with the answers of the rows: it goes wherever the reward is. This is called
# **reward hacking**, and no curve of rewards shows it. So read the answers.
#
# ## Exercises
#
# Replace the dots, run the cell, and read what it says. Then run it again.
#
# **1. Advantages.** Return the advantages of a group of rewards (a tensor), with the mean of the
# *other* answers as the baseline of each, and without dividing by a standard deviation. (This is
# called RLOO.)


# %% tags=["exercise"]
from thinker.lessons.checks.teach_it_to_add import check_advantages, check_pass_at_2, check_verifier


def my_advantages(rewards):
    return ...


check_advantages(my_advantages)

# %% [markdown]
# **2. Pass@2 on paper.** A model answers a prompt eight times, and two answers are right. You draw
# two of the eight at random. How probable is it that at least one of them is right?

# %% tags=["exercise"]
my_pass_at_2 = ...
check_pass_at_2(my_pass_at_2)

# %% [markdown]
# **3. Close the hole.** Write a verifier for sums, from prompt and answer to a reward between 0 and
# 1: the right sum gets 1. A wrong sum gets 0.5 if its last digit is right, otherwise 0. What is no
# number gets 0.


# %% tags=["exercise"]
def my_verifier(prompt, text):
    return ...


check_verifier(my_verifier)

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def leave_one_out(rewards):
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


check_advantages(leave_one_out)

# Both are wrong with probability 6/8 · 5/7 = 15/28.
check_pass_at_2(1 - 15 / 28)


def verify(prompt, text):
    a, b = prompt.removesuffix("=").split("+")
    right = str(int(a) + int(b))
    if text == right:
        return 1.0
    if text.isdigit() and text[-1] == right[-1]:
        return 0.5
    return 0.0


check_verifier(verify)

# %% [markdown]
# ## Words of this lesson
#
# - **verifier**: a function that gives an answer its **reward**.
# - **group**: the answers to one prompt. **Baseline**: what they are compared with.
# - **advantage**: how much better an answer is than its baseline.
# - **pass@k**: the share of prompts with at least one right answer among k.
# - **reward hacking**: high rewards for answers that nobody wanted.
#
# GRPO: [arXiv:2402.03300](https://arxiv.org/abs/2402.03300). RLOO:
# [arXiv:2402.14740](https://arxiv.org/abs/2402.14740). pass@k:
# [arXiv:2107.03374](https://arxiv.org/abs/2107.03374).
#
# ## What you can do now
#
# This was the last lesson. You can now
#
# - compute attention on paper, and check other people's numbers (lessons 1 to 3);
# - say what heads, patterns and a cache cost, and measure what they bring (lessons 4 to 6);
# - train a model, and judge its loss and its texts (lesson 7);
# - explain what a part does, and test that by taking it away (lesson 8);
# - make a model small, and compare it fairly with others (lesson 9);
# - let a model learn from its own answers, and see when a reward misleads it (lesson 10).
#
# Next, train a model on your own text. About 1 MB of plain text is enough, such as a long book.
# Save it as `my.txt` in Thinker's folder, and run these commands there. Training takes ten minutes.
#
# ```text
# python train.py configs/small-text.yaml data.path=my.txt run.dir=runs/mine
# python generate.py runs/mine --prompt "The first words"
# ```
#
# `docs/getting-started.md` explains each step. `features/rewards/guide.md` has the commands for
# what this lesson did.
