# %% [markdown]
# # Train one
#
# *How good is a loss of 0.97?* On most texts nobody can say. This lesson trains a small model on
# stories whose best possible loss is known. It takes about 20 minutes. You need to know what a
# softmax is.
#
# You will learn
#
# - what a loss means: nats per token, perplexity, bits per byte, and the floor;
# - what temperature, top-k, top-p and min-p do to a distribution;
# - why the loss falls along a text, and where the rest of it lies.

# %%
import contextlib
import io
import json
import math
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

from thinker.data import tales
from thinker.generation import Generator, SamplingParams
from thinker.generation.sampler import distribution
from thinker.interop import load
from thinker.lessons.pictures import Heatmap, SideBySide, show
from thinker.lessons.practice import is_fast
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure
from thinker.training.config_file import validate_config
from thinker.training.run import train

# %% [markdown]
# ## Stories with a known probability
#
# A grammar writes the stories of the corpus `tales`. It makes one choice after the other: which
# sentence, which word. No choice depends on another, so the probability P of a story is the product
# of those of its choices. −ln of each is its **surprise**, in **nats**, and surprises add up.

# %%
story = tales.generate_story(seed=0, index=3636)
print(story.text.replace(". ", ".\n"), "\n")
hero = story.choices[1]
print(f"{hero.value} is one of {math.exp(-hero.log_prob):.0f} girls and costs {-hero.log_prob:.2f} nats.")
mean = sum(-tales.generate_story(seed=1, index=i).log_prob for i in range(2000)) / 2000
print(f"This story costs {-story.log_prob:.1f} nats in all, and 2,000 others {mean:.0f} on average.")

# %% tags=["check"]
assert [f"{math.exp(-hero.log_prob):.0f}", f"{-hero.log_prob:.2f}", f"{mean:.0f}"] == ["56", "4.03", "123"]

# %% [markdown]
# When *Ella* comes back at the end of the story, she costs nothing, because that is no choice. The
# mean over all stories is the **entropy** of the corpus, about 123 nats per story. No model can
# need less on average.
#
# ## Train
#
# A few settings describe a run: two layers, 700 steps, 14 stories per step, and 3% of the stories
# kept for validation. The losses go to `metrics.jsonl`, together with the **floor**: the nats of
# the validation stories, divided by the number of their tokens.

# %%
folder = tempfile.TemporaryDirectory()
config = {
    "data": {
        "source": "tales", "max_documents": 300 if is_fast() else 20000, "packing": "documents",
        "tokenizer": "bpe:512" if is_fast() else "bpe:3072",  # up to so many different tokens
        "seq_len": 320 if is_fast() else 176,  # one story per sequence
        "val_fraction": 0.03, "cache_dir": folder.name + "/cache",
    },
    "run": {"dir": folder.name + "/run"}, "model": {"d_model": 128, "n_layers": 2, "n_heads": 4},
    "train": {"device": "cpu", "max_steps": 12 if is_fast() else 700, "batch_size": 14, "eval_every": 100},
}  # fmt: skip
with contextlib.redirect_stdout(io.StringIO()):  # hides the summary; one to three minutes
    train(validate_config(config))

lines = [json.loads(line) for line in Path(folder.name, "run/metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if "train_loss" in line]
tests = [line for line in lines if "val_loss" in line]
first, last, floor = steps[0]["train_loss"], tests[-1]["val_loss"], tests[-1]["entropy_floor"]
figure, (axes,) = new_figure(6.5, 3.4)
axes.plot([x["step"] for x in steps], [x["train_loss"] for x in steps], color=BLUE, label="training")
axes.plot([x["step"] for x in tests], [x["val_loss"] for x in tests], "o", color=ORANGE, label="validation")
axes.axhline(floor, color=GREY, linestyle="--", label="floor")
axes.set(xlabel="step", ylabel="nats per token", ylim=(0.8, 2.5))
axes.legend(frameon=False)
show(figure, "The loss falls steeply at first, then slowly, and ends just above the dashed floor.")
print(f"first step {first:.2f}, validation {last:.3f}, floor {floor:.3f}: {last / floor - 1:.1%} above")

# %% tags=["check"]
if not is_fast():
    assert 0.917 < floor < 0.919 < last < 1.12 * floor
    assert abs(last - steps[-1]["train_loss"]) < 0.06

# %% [markdown]
# Both losses stay together, so the model does not just memorize its text. The curve does not jump
# or stay high, so the learning rate is not too high. It ends less than 12% above the floor, so
# little is left to learn.
#
# ## What a loss means
#
# The loss is the mean surprise per token: −ln of the probability that the model gave to the token
# that came.
#
# - **Perplexity** is e to the power of the loss. At 5, the model chooses as if among five tokens.
# - **Bits per byte**: divide by ln 2 = 0.693, because that many nats are a bit, and by the mean
#   number of bytes per token. This number does not depend on how the text is cut into tokens.
#
# Compare with models that know less: the uniform one, to which all tokens are equally likely, and
# the **unigram** model, which knows how often each token occurs and nothing else.

# %%
model, tokenizer = load(folder.name + "/run")
V = tokenizer.vocab_size
texts = [tales.generate_story(seed=2, index=i).text for i in range(2200)]
stories = [[*tokenizer.encode(text), tokenizer.bos_id] for text in texts]  # the end is a token, too
counts = Counter(token for ids in stories[200:] for token in ids)
total = counts.total() + V  # one extra count each, so that no probability is 0
unigram = torch.tensor([math.log(total / (counts[token] + 1)) for ids in stories[:200] for token in ids]).mean()
bytes_per_token = sum(len(text.encode()) for text in texts) / sum(map(len, stories))
print("           nats per token   perplexity   bits per byte")
for name, nats in {"uniform": math.log(V), "unigram": float(unigram), "our model": last, "floor": floor}.items():
    bits = nats / math.log(2) / bytes_per_token
    print(f"{name:>9}   {nats:13.3f}   {math.exp(nats):10.1f}   {bits:13.3f}")
print(f"{bytes_per_token:.2f} bytes per token; metrics.jsonl has {tests[-1]['val_bits_per_byte']:.3f} bits per byte")

# %% tags=["check"]
assert abs(first - math.log(V)) < 1e-3
assert abs(last / math.log(2) / bytes_per_token / tests[-1]["val_bits_per_byte"] - 1) < 0.02
if not is_fast():
    assert [V, round(float(unigram)), round(bytes_per_token, 1)] == [3072, 6, 4.4]

# %% [markdown]
# An untrained model knows nothing: ours starts at ln 3072 = 8.03. Knowing how often tokens occur
# brings about 6. All the rest comes from context.
#
# **Question.** A model has a loss of 0.85 on 100 stories. Has it beaten the grammar?
#
# <details><summary>Answer</summary>
#
# Not for certain. The floor holds for the mean of all stories, and these may have made likelier
# choices. Compare with their own −ln P. A model clearly below that has seen them in training.
#
# </details>
#
# ## Sampling, by hand
#
# To write, we draw from the model's distribution. Four settings change it first:
#
# - **Temperature** T divides the logits, so it raises probabilities to the power of 1 / T. Below 1,
#   likely tokens gain. At 0, only the likeliest is left: **greedy** decoding.
# - **top-k** keeps the k likeliest tokens.
# - **top-p** keeps the fewest likeliest tokens that together reach the probability p.
# - **min-p** keeps tokens that have at least the fraction p of the highest probability.
#
# What is left is divided by its sum. Take 0.6, 0.2, 0.15 and 0.05. At T = 0.5 they are squared:
# 0.36, 0.04, 0.0225 and 0.0025, in all 0.425. top-k 2 leaves 0.6 and 0.2. top-p 0.9 needs a third
# token. min-p 0.1 asks for 0.06, which three tokens have. The first table is by Thinker's sampler.
#
# The others show three places in a story. At its **start**, the grammar has *Once* with probability
# 1/2, *Nobody* and *When* with 1/6 each, or else a name. After *there was a* it allows 55 words (an
# **open** place), and after the last *from* of the story above only *Ely* (a **certain** place).

# %%
generator = Generator(model, tokenizer)
settings = {"T = 0.5": {"temperature": 0.5}, "T = 1.5": {"temperature": 1.5}, "top-k 2": {"top_k": 2},
            "top-p 0.9": {"top_p": 0.9}, "min-p 0.1": {"min_p": 0.1}}  # fmt: skip
opening = "Once upon a time, there was a"
prompts = ["", opening, story.text[: story.text.rindex(" Ely")]]
with torch.no_grad():
    logits = torch.cat([model(torch.tensor([generator.encode(prompt)]))[:, -1].float() for prompt in prompts])
starts = [tokenizer.encode(word)[0] for word in ("Once", "Nobody", "When")]
four, rows, kept = [], [], []
for options in [{}, *settings.values()]:
    params = SamplingParams(**options)
    four.append(distribution(torch.tensor([[0.6, 0.2, 0.15, 0.05]]).log(), params)[0].tolist())
    at_start, at_open, at_certain = distribution(logits, params)
    rows.append([*at_start[starts].tolist(), float(1 - at_start[starts].sum())])
    kept.append([int((at_open > 0).sum()), int((at_certain > 0).sum())])
show(SideBySide(
    Heatmap("four probabilities", four, ["given", *settings], ["1st", "2nd", "3rd", "4th"], digits=3, shade=1.0),
    Heatmap("start", rows, ["model", *settings], ["Once", "Nobody", "When", "other"], shade=1.0),
    Heatmap("tokens kept", kept, ["model", *settings], ["open", "certain"], 0, shade=200),
))  # fmt: skip

# %% tags=["check"]
by_hand = [[0.36 / 0.425, 0.04 / 0.425, 0.0225 / 0.425, 0.0025 / 0.425], [0.6 / 0.8, 0.2 / 0.8, 0, 0]]
by_hand += 2 * [[0.6 / 0.95, 0.2 / 0.95, 0.15 / 0.95, 0]]
assert torch.allclose(torch.tensor(four)[[1, 3, 4, 5]], torch.tensor(by_hand), atol=1e-6)
if not is_fast():
    assert (torch.tensor(rows[0]) - torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])).abs().max() < 0.1
    assert sum(item["a"].startswith("a ") for item in tales.GRAMMAR.lists["trait"]) == 55
    assert [kept[3], [row[1] for row in kept]] == [[2, 2], [V, V, V, 2, 1, 1]]
    assert 40 <= kept[4][0] < 55 <= kept[5][0] < 75

# %% [markdown]
# The model is close to the grammar, and each setting moves away from it. But a model also gives a
# little probability to thousands of wrong tokens, and a long text offers many occasions to draw
# one. A fixed k is too small at open places and too large at certain ones. top-p and min-p adapt:
# they keep one token where one is right. At the open place, top-p drops some of the 55 words, and
# min-p keeps about as many as there are.

# %%
surprise, written, n_stories = {}, {}, 2 if is_fast() else 32
for T in (0.0, 0.5, 1.0, 1.5):
    params = SamplingParams(temperature=T, max_new_tokens=40 if is_fast() else 160, seed=5)
    written[T] = [each.prompt + each.text for each in generator.generate([opening] * n_stories, params)]
    scores = [generator.score(text) for text in written[T]]
    surprise[T] = sum(score.nats for score in scores) / sum(len(score.logprobs) for score in scores)
    print(f"T = {T}: {len(set(written[T]))} different stories, {surprise[T]:.2f} nats per token, such as")
    print(written[T][0][len(opening) : 220].replace("\n\n", " ").replace(". ", ".\n "), "...\n")

# %% tags=["check"]
if not is_fast():
    assert surprise[0] < surprise[0.5] < surprise[1] < 1.25 * floor < 1.3 < surprise[1.5]
    assert len(set(written[0])) == 1

# %% [markdown]
# **Question.** Greedy decoding writes one story 32 times, and at 1.5 sentences fall apart. But
# greedy stories surprise the model least. Why are they not the best?
#
# <details><summary>Answer</summary>
#
# A typical story makes some unlikely choices. One of only the likeliest is not typical, and always
# the same. At T = 1 the surprise is near the loss, as it is for stories of the corpus.
#
# </details>
#
# ## More context, less loss
#
# `score` returns the log-probability of each token. We average the surprise in 200 new stories by
# position, and by **facts**: words such as the town that are drawn once and then repeated.

# %%
sample = [tales.generate_story(seed=3, index=i) for i in range(3 if is_fast() else 200)]
by_position, spent, excess = defaultdict(list), defaultdict(list), 0.0
for each in sample:
    score, nats, at = generator.score(each.text), [0.0] * len(each.text), -1
    excess += (score.nats + each.log_prob) / len(sample)
    for position, (token, logprob) in enumerate(zip(score.token_ids, score.logprobs)):
        at += len(tokenizer.token_bytes(token))
        nats[at] = -logprob  # at the last character of the token
        by_position[position // 20 * 20].append(-logprob)
    at = 0
    for choice in each.choices:
        if choice.kind != "plot":  # find the word, and its repetitions
            word = re.compile(rf"\b{re.escape(choice.value)}\b", re.IGNORECASE)
            first_time, *again = [match.span() for match in word.finditer(each.text, at)]
            at = first_time[1]
            spent[choice.name, "grammar"].append(-choice.log_prob)
            spent[choice.name, "first time"].append(sum(nats[slice(*first_time)]))
            spent[choice.name, "again"] += [sum(nats[slice(*span)]) for span in again]
means = [sum(by_position[start]) / len(by_position[start]) for start in range(0, 140, 20)]
show(Heatmap("nats per token", [means], ["from token"], [str(start) for start in range(0, 140, 20)]))
facts = ["town", "hobby", "friend", "thing", "food", "hero", "password", "surname"]
columns = ["grammar", "first time", "again"]
cost = torch.tensor([[torch.tensor(spent[name, column]).mean() for column in columns] for name in facts])
show(Heatmap("nats per mention", cost, facts, columns))
print(f"together, the model spends {excess:.1f} nats per story more than the grammar")

# %% tags=["check"]
if not is_fast():
    assert min(means[:2]) > 1.2 > 0.65 > max(means[5:])
    assert cost[:, 1].min() > 3.5
    assert cost[0, 2] < 0.1 < 0.7 < cost[5, 2]
    assert cost[:5, 2].max() < 0.5 < 2 < cost[6:, 2].min()

# %% [markdown]
# The end of a story costs about half as much as its beginning, partly because the grammar chooses
# less there. But compare the same words: a town costs about 4 nats the first time and almost
# nothing when it comes back. The model has learned to look it up, in a text that it has never seen:
# **learning in context**.
#
# **Where the rest lies.** Drawn words cost a little more than in the grammar, because the model has
# not made them quite equally likely. And recall still fails where no word announces it. A town
# follows *from*, but a hero can begin any sentence. (So part of this cost is a true choice.)
# Passwords and surnames are rare, and the model has hardly learned to repeat them.
#
# ## Exercises
#
# **1. top-p.** `probabilities` has shape (V,), in any order, and sums to 1. Return what top-p
# leaves of it, with every token at its own place. `sort`, `cumsum` and `scatter` help.


# %% tags=["exercise"]
from thinker.lessons.checks.train_one import check_bits_per_byte, check_diagnoses, check_top_p


def my_top_p(probabilities, p):
    return ...


check_top_p(my_top_p)

# %% [markdown]
# **2. Bits per byte on paper.** A model has a loss of 1.2 nats per token, and a token has 4 bytes
# on average. How many bits per byte are that? Three decimals are enough.

# %% tags=["exercise"]
my_bits_per_byte = ...
check_bits_per_byte(my_bits_per_byte)

# %% [markdown]
# **3. Three runs** on a corpus with a floor of 0.92. Losses at steps 100, 300, 500 and 700:
#
# - A: training 1.60, 0.95, 0.52, 0.31, validation 1.65, 1.25, 1.38, 1.62
# - B: training 3.1, 7.4, 6.2, 6.9, validation 3.2, 7.4, 6.3, 6.9
# - C: training 1.60, 1.02, 0.94, 0.93, validation 1.60, 1.02, 0.94, 0.93
#
# Is each run "overfitting", is its "learning rate" too high, or is it "done"?

# %% tags=["exercise"]
my_diagnoses = ...  # such as ["done", "done", "done"]
check_diagnoses(my_diagnoses)

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def solution(probabilities, p):
    ordered, order = probabilities.sort(descending=True)
    before = ordered.cumsum(0) - ordered  # of all likelier tokens
    kept = ordered * (before < p)  # so the token that crosses p stays
    return torch.zeros_like(kept).scatter(0, order, kept / kept.sum())


check_top_p(solution)

# 1.2 nats are 1.2 / 0.6931 = 1.731 bits. A quarter of that falls on each byte.
check_bits_per_byte(1.731 / 4)

# A is below the floor on its training text, which only memory explains, while the validation loss rises. B had been
# better before it jumped up. C is 1% above the floor, and both of its losses are equal.
check_diagnoses(["overfitting", "learning rate", "done"])

# %% [markdown]
# ## Words of this lesson
#
# - **surprise**: −ln of the probability of what came. **Nat**: its unit; 0.693 nats are a bit.
# - **entropy**, **floor**: the mean surprise of the corpus, which no model can beat on average.
# - **perplexity**: e to the loss. **Bits per byte**: the loss in bits, shared among the bytes.
#
# top-p: [arXiv:1904.09751](https://arxiv.org/abs/1904.09751). min-p:
# [arXiv:2407.01082](https://arxiv.org/abs/2407.01082). Next: which heads look words up.
