# %% [markdown]
# # Train one
#
# *How good is a loss of 0.96?* On most texts nobody can say. This lesson trains a small model on
# stories whose best possible loss is known. It takes about 20 minutes. You need to know what a
# softmax, a logit and a loss are.
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
import tempfile
from collections import Counter
from pathlib import Path

import torch

from thinker.data.text import tales
from thinker.generation import Generator, SamplingParams
from thinker.generation.sampler import distribution
from thinker.interop import load
from thinker.lessons.materials.practice import is_fast, lesson_seed
from thinker.lessons.materials.story_costs import COLUMNS, story_costs
from thinker.lessons.pictures import Heatmap, show
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure
from thinker.training.config.load import validate_config
from thinker.training.run import train

# %% [markdown]
# ## Stories with a known probability
#
# A grammar writes the stories of the corpus `tales`. It makes choices: which sentence comes, and
# which new word stands in it. A word that comes back, such as the name of the hero, is no choice.
# No choice depends on another, so the probability P of a story is the product of the probabilities
# of its choices. −ln of a probability is its **surprise**, in **nats**. Surprises add up. We also
# say: a choice *costs* so many nats.

# %%
story = tales.generate_story(seed=0, index=3636)
print(story.text.replace(". ", ".\n"), "\n")
hero, nats = story.choices[1], -story.choices[1].log_prob
print(f"{hero.value} is one of {math.exp(nats):.0f} girls and costs {nats:.2f} nats.")
others = [-tales.generate_story(seed=1, index=i).log_prob for i in range(2000)]
mean = sum(others) / 2000
print(f"This story costs {-story.log_prob:.1f} nats, and 2,000 others {mean:.0f} on average.")

# %% tags=["check"]
assert [f"{math.exp(nats):.0f}", f"{nats:.2f}", f"{mean:.0f}"] == ["56", "4.03", "123"]

# %% [markdown]
# The mean over all stories is the **entropy** of the corpus, about 123 nats per story. No model can
# need less on average.
#
# ## Train
#
# A few settings describe a run: two layers, 700 steps, 14 stories per step.
#
# - The tokens are pieces of words. `bpe` (byte-pair encoding) begins with single bytes and joins
#   the two neighbors that occur together most often, again and again, until there are 3,072 tokens.
# - 3% of the stories are kept for **validation**: the model never trains on them, only its loss is
#   measured there.
# - The losses go to the file `metrics.jsonl`, together with the **floor**: the nats of the
#   validation stories by the grammar, divided by the number of their tokens. No model can have a
#   lower loss on average.

# %%
folder = tempfile.TemporaryDirectory()
config = {
    "data": {
        "source": "tales", "max_documents": 300 if is_fast() else 20000,
        "tokenizer": "bpe:512" if is_fast() else "bpe:3072", "packing": "documents",
        "seq_len": 320 if is_fast() else 176,  # one story per sequence
        "val_fraction": 0.03, "cache_dir": folder.name + "/cache",
    },
    "model": {"d_model": 128, "n_layers": 2, "n_heads": 4},
    "train": {
        "device": "cpu", "max_steps": 12 if is_fast() else 700, "batch_size": 14,
        "eval_every": 100,  # measure the validation loss after so many steps
        "precision": "fp32",  # 32 bits per number on every machine, also where 16 are faster
        "fit_bigrams": "off",  # start from random weights, to see the whole curve
    },
    "run": {"dir": folder.name + "/run", "seed": 1 + lesson_seed()},
}  # fmt: skip
with contextlib.redirect_stdout(io.StringIO()):  # hides the summary; one to three minutes
    train(validate_config(config))
model, tokenizer = load(folder.name + "/run")  # the trained model
generator = Generator(model, tokenizer)  # writes and scores texts
part = story.text[story.text.index("Down by") : story.text.index("\n\nSomebody")]
print("|".join(tokenizer.decode([token]) for token in tokenizer.encode(part)))

# %% tags=["folded"]
lines = [
    json.loads(line) for line in Path(folder.name, "run/metrics.jsonl").read_text().splitlines()
]
steps = [line for line in lines if "train_loss" in line]
tests = [line for line in lines if "val_loss" in line]
first, last, floor = steps[0]["train_loss"], tests[-1]["val_loss"], tests[-1]["entropy_floor"]
figure, (axes,) = new_figure(6.5, 3.4)
axes.plot(
    [x["step"] for x in steps], [x["train_loss"] for x in steps], color=BLUE, label="training"
)
axes.plot(
    [x["step"] for x in tests],
    [x["val_loss"] for x in tests],
    "o",
    color=ORANGE,
    label="validation",
)
axes.axhline(floor, color=GREY, linestyle="--", label="floor")
axes.set(xlabel="step", ylabel="nats per token", ylim=(0.8, 2.5))
axes.legend(frameon=False)
show(figure, "The loss falls steeply at first, then slowly, and ends just above the dashed floor.")
print(
    f"first step {first:.2f}, validation {last:.3f}, floor {floor:.3f}: {last / floor - 1:.1%} above"
)

# %% tags=["check"]
if not is_fast():
    assert 0.9 < floor < 0.935 < 0.94 < last < 1.12 * floor
    assert abs(last - steps[-1]["train_loss"]) < 0.1

# %% [markdown]
# The line above the figure shows how `bpe` cuts a text. Most words of these stories are one token,
# together with the space before them. A rare word such as *temple* may be cut into several, here
# into three. (Your run may differ a little.)
#
# Three questions about such a curve:
#
# - **Does the model memorize?** Then the training loss falls further while the validation loss
#   rises. This is called **overfitting**. Here both stay together. They have to: 700 steps of 14
#   stories are 9,800 of about 19,400, so the model reads each story once at most.
# - **Is the learning rate too high?** It is the size of the steps. If they are too large, the loss
#   jumps up or stays high. Here it does neither.
# - **How much is left?** The loss ends at 0.957 here, and the floor is 0.917. The model needs 4.3%
#   more nats than the grammar. On texts without a known floor, nobody can say this.
#
# ## What a loss means
#
# The loss is the mean surprise per token: −ln of the probability that the model gave to the token
# that came. Two other numbers say the same:
#
# - **Perplexity** is e to the power of the loss. At 5, the model is as unsure as if it had to guess
#   among five equally likely tokens.
# - **Bits per byte**: divide the loss by ln 2 = 0.693, because a bit is 0.693 nats. Then divide by
#   the mean number of bytes per token. The result does not depend on how the text is cut into
#   tokens.
#
# Compare with two models that know less. To the **uniform** model, all tokens are equally likely.
# The **unigram** model knows how often each token occurs, and nothing else.

# %%
V = tokenizer.vocab_size
texts = [tales.generate_story(seed=2, index=i).text for i in range(2200)]
end = [tokenizer.bos_id]  # one token ends a story and begins the next
stories = [tokenizer.encode(text) + end for text in texts]
counts = Counter(token for ids in stories[200:] for token in ids)
total = counts.total() + V  # one extra count each, so that no probability is 0
surprises = [math.log(total / (counts[token] + 1)) for ids in stories[:200] for token in ids]
unigram = sum(surprises) / len(surprises)
bytes_per_token = sum(len(text.encode()) for text in texts) / sum(map(len, stories))
losses = {"uniform": math.log(V), "unigram": unigram, "our model": last, "floor": floor}
print(f"{bytes_per_token:.2f} bytes per token\n")
print("           nats per token   perplexity   bits per byte")
for name, nats in losses.items():
    bits = nats / math.log(2) / bytes_per_token
    print(f"{name:>9}   {nats:13.3f}   {math.exp(nats):10.1f}   {bits:13.3f}")

# %% tags=["check"]
assert abs(first - math.log(V)) < 1e-3
assert abs(last / math.log(2) / bytes_per_token / tests[-1]["val_bits_per_byte"] - 1) < 0.02
if not is_fast():
    assert [V, round(unigram), round(bytes_per_token, 1)] == [3072, 6, 4.4]

# %% [markdown]
# Check a row, such as 0.957 nats here: 0.957 / 0.693 is about 1.38 bits per token. Divided by 4.40
# bytes, that is 0.314 bits per byte.
#
# An untrained model knows nothing: ours starts at ln 3072 = 8.03, like the uniform one. Knowing how
# often tokens occur brings the loss down to 5.94. All the rest, down to 0.957 here, comes from context.
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
# To write, we draw the next token from the model's distribution. Four settings change it first, in
# this order. What is left is always divided by its sum. Take four tokens with the probabilities
# 0.6, 0.2, 0.15 and 0.05:
#
# - **Temperature** divides the logits. A probability is e to the power of its logit, divided by a
#   sum. So a temperature of 0.5, which doubles the logits, squares the probabilities: 0.36, 0.04,
#   0.0225 and 0.0025. Divide by their sum, 0.425: 0.847, 0.094, 0.053 and 0.006. Below 1, likely
#   tokens gain; above 1, unlikely ones. At 0, by agreement, only the likeliest is left: **greedy**
#   decoding.
# - **top-k** keeps the k likeliest tokens. top-k 2 keeps 0.6 and 0.2. Divided by 0.8: 0.75 and
#   0.25.
# - **top-p** keeps the fewest likeliest tokens that together reach the probability p. For top-p
#   0.9, 0.6 + 0.2 = 0.8 is too little. With the third token it is 0.95, so three tokens stay.
# - **min-p** keeps tokens that have at least the fraction p of the highest probability. For min-p
#   0.1, that is 0.1 · 0.6 = 0.06. Three tokens have it.
#
# Thinker's sampler computes the same:

# %%
settings = {
    "temperature 0.5": {"temperature": 0.5}, "temperature 1.5": {"temperature": 1.5},
    "top-k 2": {"top_k": 2}, "top-p 0.9": {"top_p": 0.9}, "min-p 0.1": {"min_p": 0.1},
}  # fmt: skip
logits = torch.tensor([[0.6, 0.2, 0.15, 0.05]]).log()
four = [distribution(logits, SamplingParams())[0].tolist()]  # nothing changed
for options in settings.values():
    four.append(distribution(logits, SamplingParams(**options))[0].tolist())
names = ["1st", "2nd", "3rd", "4th"]
show(Heatmap("four probabilities", four, ["given", *settings], names, digits=3, shade=1.0))

# %% tags=["check"]
by_hand = [
    [0.36 / 0.425, 0.04 / 0.425, 0.0225 / 0.425, 0.0025 / 0.425],
    [0.6 / 0.8, 0.2 / 0.8, 0, 0],
]
by_hand += 2 * [[0.6 / 0.95, 0.2 / 0.95, 0.15 / 0.95, 0]]
assert torch.allclose(torch.tensor(four)[[1, 3, 4, 5]], torch.tensor(by_hand), atol=1e-6)

# %% [markdown]
# Now three places in a story, with our model:
#
# - At the **start**, the grammar has *Once* with probability 1/2, *Nobody* and *When* with 1/6
#   each, or else a name. The first table shows what the model has.
# - After *Once upon a time, there was a*, the grammar allows 55 words: an **open** place.
# - After the last *from* of the story about Ella, it allows only *Ely*: a **certain** place.
#
# The second table shows how many tokens can be drawn at the open and at the certain place.

# %% tags=["folded"]
opening = "Once upon a time, there was a"
prompts = ["", opening, story.text[: story.text.rindex(" Ely")]]
with torch.no_grad():
    passes = [model(torch.tensor([generator.encode(prompt)])) for prompt in prompts]
logits = torch.cat([each[:, -1].float() for each in passes])
starts = [tokenizer.encode(word)[0] for word in ("Once", "Nobody", "When")]
rows, kept = [], []
for options in [{}, *settings.values()]:
    at_start, at_open, at_certain = distribution(logits, SamplingParams(**options))
    rows.append([*at_start[starts].tolist(), float(1 - at_start[starts].sum())])
    kept.append([int((at_open > 0).sum()), int((at_certain > 0).sum())])
names = ["Once", "Nobody", "When", "other"]
show(Heatmap("start", rows, ["model", *settings], names, shade=1.0))
show(Heatmap("tokens kept", kept, ["model", *settings], ["open", "certain"], 0, shade=200))

# %% tags=["check"]
if not is_fast():
    assert (torch.tensor(rows[0]) - torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])).abs().max() < 0.15
    assert sum(item["a"].startswith("a ") for item in tales.GRAMMAR.lists["trait"]) == 55
    assert [kept[3], [row[1] for row in kept]] == [[2, 2], [V, V, V, 2, 1, 1]]
    assert all(35 <= n < 80 for n in (kept[4][0], kept[5][0]))

# %% [markdown]
# At the start, the model is close to the grammar: here 0.45, 0.18, 0.21 and 0.16. Every setting
# changes what the model has learned. So why use one? Because the model also gives a little
# probability to thousands of wrong tokens, and in a long text one of them is drawn sooner or later.
#
# - **top-k** keeps 2 tokens at both places: too few at the open place, too many at the certain one.
# - **top-p** and **min-p** adapt. They keep one token where only one is right. At the open place,
#   where 55 words are right, top-p keeps 49 tokens here, and min-p 55.
#
# Now let the model write 32 stories at each of four temperatures:

# %%
surprise, written, n_stories = {}, {}, 2 if is_fast() else 32
n_tokens = 40 if is_fast() else 160
for temperature in (0.0, 0.5, 1.0, 1.5):
    params = SamplingParams(temperature=temperature, max_new_tokens=n_tokens, seed=5)
    done = generator.generate([opening] * n_stories, params)
    texts = [each.prompt + each.text for each in done]
    scores = [generator.score(text) for text in texts]
    n_scored = sum(len(score.logprobs) for score in scores)
    surprise[temperature] = sum(score.nats for score in scores) / n_scored
    written[temperature] = texts
    print(f"temperature {temperature}: {len(set(texts))} different stories,", end=" ")
    print(f"{surprise[temperature]:.2f} nats per token, such as")
    print(texts[0][len(opening) : 220].replace("\n\n", " ").replace(". ", ".\n "), "...\n")

# %% tags=["check"]
if not is_fast():
    assert max(surprise[0], surprise[0.5]) < surprise[1] < 1.25 * floor < 1.3 < surprise[1.5]
    assert len(set(written[0])) == 1

# %% [markdown]
# **Question.** Greedy decoding writes one story 32 times, and at 1.5 sentences fall apart. But
# greedy stories surprise the model less than typical ones. Why are they not the best?
#
# <details><summary>Answer</summary>
#
# A typical story makes some unlikely choices. A story of only the likeliest choices is not typical,
# and it is always the same. At temperature 1, the model's own stories surprise it about as much as
# real ones do: here 1.00 nats per token, beside a validation loss of 0.957. (Not quite the same
# measure: our stories share their beginning, and long ones lack their end.)
#
# </details>
#
# ## More context, less loss
#
# `generator.score(text)` returns the log-probability of each token. We take 200 new stories and
# average −ln p in two ways:
#
# - by position: the first 20 tokens, the next 20, and so on;
# - by **facts**: words such as the town, which are drawn once and then repeated. "grammar" is the
#   cost of the draw, "first time" and "again" are what the model pays per mention, and "excess per
#   story" adds up all mentions, minus the draw, and is a mean over all stories, also those without
#   the word. For the hero, that is 4.79 − 4.03 here, and then 1.07 for each time that the name
#   comes back.

# %%
sample = [tales.generate_story(seed=3, index=i) for i in range(3 if is_fast() else 200)]
facts = ["town", "hobby", "friend", "thing", "food", "hero", "password", "surname"]
means, cost, excess = story_costs(generator, sample, facts, width=20, n_groups=7)
firsts = [str(start) for start in range(0, 140, 20)]
show(Heatmap("nats per token", [means], ["from token"], firsts))
show(Heatmap("nats", cost, facts, COLUMNS))
print(f"together, the model spends {excess:.1f} nats per story more than the grammar")

# %% tags=["check"]
if not is_fast():
    assert min(means[:2]) > 1.2 > 0.65 > max(means[5:])
    assert cost[:, 1].min() > 3.5
    assert cost[0, 2] < 0.1 < 0.5 < cost[5, 2]
    assert cost[:5, 2].max() < 0.5 < 1.5 < cost[6:, 2].min()
    assert cost[5, 3] == cost[:, 3].max() > excess / 3
    assert cost[:5, 3].sum() < min(1, cost[5, 3])

# %% [markdown]
# The end of a story costs about a third of its beginning: here 0.43 nats per token, after 1.34,
# though the loss does not fall evenly. One reason is that the grammar chooses less there. But
# compare the same words: here a town costs 4.21 nats the first time and 0.00 when it comes back. The
# model has learned to look it up, in a text that it has never seen: **learning in context**.
#
# Where do the nats lie that the model spends in addition, here 4.9 per story? (They are 4% of 123.
# The percentage above came from other stories.) The last column says it:
#
# - **Heroes** have the largest part, here 2.79, most of it in column "again". A town follows the
#   word *from*, but nothing announces the name of the hero. Part of this is no fault of the model:
#   whether the name comes, or *she*, or a friend, is often a choice of sentence, which column
#   "grammar" leaves out. Every model pays for it.
# - **Passwords and surnames** have 0.45 and 0.60 here, though few stories contain them. The model
#   has hardly learned to repeat these rare words, as column "again" shows.
# - **The other five facts** have little, nearly all at the first mention.
# - What is missing from the sum lies in the rest of the story.
#
# ## Exercises
#
# The first one needs three steps of torch. This is what they do to three numbers:

# %%
numbers = torch.tensor([0.2, 0.7, 0.1])
values, order = numbers.sort(descending=True)
print("sorted:           ", values, "from the places", order)
print("sums so far:      ", values.cumsum(0))
result = torch.zeros_like(values)  # zeros, as many as values, and of the same type
result[order] = values  # values[0] goes to place order[0], and so on
print("back in its place:", result)

# %% [markdown]
# **1. top-p.** `probabilities` has one number per token, in any order, and sums to 1. Return what
# top-p leaves of it: every token at its own place, 0 for those that are dropped, and the others
# divided by their sum.


# %% tags=["exercise"]
from thinker.lessons.checks.train_one import check_bits_per_byte, check_diagnoses, check_top_p


def my_top_p(probabilities, p):
    return ...


check_top_p(my_top_p)

# %% [markdown]
# **2. Bits per byte on paper.** A model has a loss of 1.2 nats per token, and a token has 4 bytes
# on average. How many bits per byte is that? Three decimals are enough.

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
# Give each run one of these three strings: `"overfitting"`, `"learning rate"` (it is too high), or
# `"done"`.

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
    result = torch.zeros_like(kept)
    result[order] = kept / kept.sum()
    return result


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
# - **validation**: stories that are kept out of training. **Overfitting**: the training loss falls
#   further, and the validation loss rises.
# - **temperature, top-k, top-p, min-p**: change the distribution before a token is drawn.
#
# top-p: [arXiv:1904.09751](https://arxiv.org/abs/1904.09751). min-p:
# [arXiv:2407.01082](https://arxiv.org/abs/2407.01082). Next: which heads look words up.
