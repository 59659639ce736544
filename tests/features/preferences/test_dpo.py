"""DPO: its loss and gradients against a formula that runs every answer alone, a known optimum, and
whole runs."""

import json
import math
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, random_model, run_script
from training_contract import BASE, SMALL, check_ranks
from training_runs import assert_same_run, read_metrics

from thinker import evaluate
from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import prepare_corpus
from thinker.features.preferences.dpo import DPOLoss, dpo_loss
from thinker.features.preferences.dpo_evaluator import PreferenceEvaluator
from thinker.features.preferences.keys import DPOConfig
from thinker.features.preferences.pair_log_probs import all_log_probs, pair_batch, pair_log_probs
from thinker.features.preferences.pair_windows import PairWindows
from thinker.interop import load
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
BETA = 0.3


GOOD = ["red", "cat", "sat"]
BAD = ["blue", "old", "ran"]


def words(rng, vocabulary, n):
    return " ".join(rng.choice(vocabulary) for _ in range(n))


def write_pairs(path, n=40, seed=0):
    """Rows of texts of several lengths, whose chosen answers have other words than the
    rejected."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        row = {"prompt": words(rng, GOOD + BAD, rng.randint(1, 3)) + ":"}
        for side, vocabulary in (("chosen", GOOD), ("rejected", BAD)):
            row[side] = " " + words(rng, vocabulary, rng.randint(1, 4))
        rows.append(row)
    path.write_text("\n".join(map(json.dumps, rows)))
    return rows


@pytest.fixture(scope="module")
def rows_and_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = write_pairs(folder / "pairs.jsonl")
    options = {"tokenizer": "byte", "val_fraction": 0.2, "cache_dir": folder / "cache"}
    path = str(folder / "pairs.jsonl")
    corpus = prepare_corpus(source="preferences", path=path, progress=False, **options)
    return rows, corpus


def answer_log_prob(model, tokenizer, prompt, answer):
    """ln P of an answer and of the end of the text, by a pass of its own."""
    before = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    ids = torch.tensor([*before, *tokenizer.encode(answer), tokenizer.eos_id])
    log_probs = model(ids[None, :-1])[0].log_softmax(-1)
    taken = log_probs.gather(1, ids[1:, None])[:, 0]
    return taken[len(before) - 1 :].sum()


def plain_loss(log_probs, reference, beta):
    """-ln of the probability that Bradley and Terry give to the chosen answer."""
    chosen, rejected = (beta * (log_probs[i] - reference[i]) for i in (0, 1))
    return -(chosen.exp() / (chosen.exp() + rejected.exp())).log()


def pair_texts(corpus, split="train"):
    """(prompt, chosen, rejected) of the pairs of a split, from the tokens of the corpus."""
    (shard,) = getattr(corpus, split).shards
    offsets = shard.offsets[:].tolist()
    tokens, mask = shard.tokens[:], shard.loss_mask[:]
    found = []
    for first in range(0, len(offsets) - 1, 2):
        parts = []
        for start, end in zip(offsets[first : first + 2], offsets[first + 1 : first + 3]):
            ids = tokens[start + 1 : end]
            is_answer = mask[start + 1 : end].astype(bool)
            parts.append(
                [corpus.tokenizer.decode(ids[keep].tolist()) for keep in (~is_answer, is_answer)]
            )
        (prompt, chosen), (same, rejected) = parts
        assert prompt == same
        found.append((prompt, chosen, rejected))
    return found


def test_a_corpus_has_the_answers_of_each_row_side_by_side(rows_and_corpus):
    rows, corpus = rows_and_corpus
    wanted = {(row["prompt"], row["chosen"], row["rejected"]) for row in rows}
    texts = pair_texts(corpus)
    assert set(texts) < wanted
    assert len(texts) + corpus.val.n_documents // 2 == len(rows)


@pytest.mark.parametrize("seq_len", [80, 200])
def test_loss_and_gradients_are_those_of_each_answer_alone(rows_and_corpus, seq_len):
    """Packed and padded windows, prompts without loss, and any division into micro-batches."""
    _, corpus = rows_and_corpus
    tokenizer = corpus.tokenizer
    windows = PairWindows(corpus.train, seq_len)
    texts = pair_texts(corpus)
    assert windows.n_pairs == len(texts)
    model, reference = (
        random_model(vocab_size=tokenizer.vocab_size, seed=seed, max_seq_len=256).double()
        for seed in (0, 1)
    )
    indices = list(range(min(6, len(windows))))
    numbers = [number for index in indices for number in windows.pairs(index)]
    if seq_len == 200:
        assert len(numbers) > len(indices)  # several pairs in a window

    # Each answer in a pass of its own.
    losses = []
    for number in numbers:
        prompt, *answers = texts[number]
        of_model = [answer_log_prob(model, tokenizer, prompt, answer) for answer in answers]
        with torch.no_grad():
            of_reference = [answer_log_prob(reference, tokenizer, prompt, each) for each in answers]
        losses.append(plain_loss(of_model, of_reference, BETA))
    expected = torch.stack(losses).mean()
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad(expected, parameters)
    largest = max(float(each.abs().max()) for each in expected_gradients)

    inputs, targets = windows.batch(indices)
    for size in (1, 2, len(indices)):
        total = 0.0
        for start in range(0, len(indices), size):
            part = slice(start, start + size)
            pairs = pair_batch(windows, indices[part], torch.device("cpu"))
            log_probs = pair_log_probs(model, inputs[part], targets[part], pairs)
            with torch.no_grad():
                of_reference = pair_log_probs(reference, inputs[part], targets[part], pairs)
            total = total + dpo_loss(log_probs, of_reference, BETA).loss.sum()
        found = total / len(numbers)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for gradient, wanted in zip(torch.autograd.grad(found, parameters), expected_gradients):
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9 * largest)


def overrides_of(corpus_path, base, *more):
    """Overrides of a run on pairs that starts from a run."""
    kept = [each for each in SMALL if not each.startswith(("model.", "data."))]
    return [
        *kept,
        "data.source=preferences",
        f"data.path={corpus_path}",
        "data.max_documents=null",
        "data.tokenizer=null",
        "data.val_fraction=0.2",
        "data.seq_len=100",
        "model.dropout=0.1",
        f"run.init_from={base}",
        "train.dpo.beta=0.3",
        "train.log_every=1",
        "train.warmup_steps=0",
        "train.decay_fraction=0",
        "train.schedule=wsd",
        "optimizer.name=adamw",
        "optimizer.lr=0.01",
        *more,
    ]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a model to start from, pairs, and the overrides of a run on them."""
    folder = tmp_path_factory.mktemp("dpo")
    write_pairs(folder / "pairs.jsonl")
    cache = f"data.cache_dir={folder / 'cache'}"
    base = [*SMALL, cache, "data.seq_len=128", f"run.dir={folder / 'base'}", "train.max_steps=20"]
    assert build_trainer(load_config(BASE, base)).train() == 0
    return folder, [*overrides_of(folder / "pairs.jsonl", folder / "base"), cache]


def train(folder, name, overrides, *more):
    """Train; returns the run directory."""
    config = load_config(BASE, [*overrides, f"run.dir={folder / name}", *more])
    assert build_trainer(config).train() == 0
    return folder / name


def test_a_run_learns_and_resumes_bit_for_bit(start):
    folder, overrides = start
    whole = train(folder, "whole", overrides, "train.max_steps=6")
    train(folder, "parts", overrides, "train.max_steps=3")
    assert_same_run(whole, train(folder, "parts", overrides, "train.max_steps=6"), 6)
    lines = [line for line in read_metrics(whole) if "dpo_loss" in line]
    assert lines[0]["dpo_loss"] == pytest.approx(math.log(2), abs=0.05)  # but for dropout
    last = read_metrics(whole)[-1]
    assert last["val_dpo_loss"] < math.log(2) - 0.01


def test_an_evaluation_reads_each_answer_alone(start):
    """As it was trained, although several pairs share a sequence."""
    folder, overrides = start
    config = load_config(BASE, [*overrides, f"run.dir={folder / 'alone'}", "train.max_steps=3"])
    trainer = build_trainer(config)
    assert trainer.train() == 0
    model, tokenizer = load(folder / "alone")
    nats, n_tokens = 0.0, 0
    for prompt, *both in pair_texts(trainer.corpus, "val"):
        for text in both:
            with torch.no_grad():
                nats -= float(answer_log_prob(model, tokenizer, prompt, text))
            n_tokens += len(tokenizer.encode(text)) + 1
    (found,) = evaluate(folder / "alone")
    assert found.n_tokens == n_tokens
    assert found.nats_per_token.mean == pytest.approx(nats / n_tokens, abs=1e-5)


def test_the_bar_shows_the_accuracy(start, tmp_path):
    _, overrides = start
    run = tmp_path / "run"
    more = [f"run.dir={run}", "train.max_steps=2", "optimizer.lr=3.0"]
    done = run_script("train.py", BASE, *overrides, *more)
    assert done.returncode == 0, done.stderr
    last = [line for line in read_metrics(run) if "dpo_accuracy" in line][-1]
    assert f"right order {last['dpo_accuracy']:.1%}" in done.stderr
    worse = read_metrics(run)[-1]["val_dpo_loss"] > math.log(2)
    assert worse
    assert "above ln 2 = 0.693, where training began" in done.stdout


def test_the_reference_is_kept(start):
    folder, overrides = start
    run = train(folder, "kept", overrides, "train.max_steps=2")
    data = (run / "reference.npy").read_bytes()
    command = ["train.py", BASE, *overrides, f"run.dir={run}", "train.max_steps=4"]
    (run / "reference.npy").write_bytes(data[::-1])
    done = run_script(*command)
    assert done.returncode == 1
    assert "reference.npy has changed since the run started; restore it" in done.stderr
    (run / "reference.npy").unlink()
    assert "No such file or directory; restore it to resume" in run_script(*command).stderr
    (run / "reference.npy").write_bytes(data)
    assert run_script(*command).returncode == 0


OPTIONS = {
    "plain": [],
    "LoRA": ["train.lora_rank=4"],
    "bf16": ["train.precision=bf16"],
    "recomputed": ["train.checkpoint_every_n_blocks=1"],
    "average": ["train.ema_decay=0.9"],
    "without kernels": ["train.kernels=off"],
    "together": [
        "train.lora_rank=4",
        "train.precision=bf16",
        "train.checkpoint_every_n_blocks=1",
        "train.ema_decay=0.9",
        "train.micro_batch_size=1",
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_is_the_model_at_the_start(start, name):
    """With any option of training, no pair has a margin before the first update, and every one has
    one after it."""
    folder, overrides = start
    more = ["model.dropout=0", "train.max_steps=4", *OPTIONS[name]]
    lines = read_metrics(train(folder, f"start-{name}", overrides, *more))
    first, second = [line for line in lines if "dpo_loss" in line][:2]
    tolerance = 0.05 if name in ("bf16", "together") else 1e-5
    assert first["dpo_loss"] == pytest.approx(math.log(2), abs=tolerance)
    assert first["chosen_reward"] == pytest.approx(0, abs=tolerance)
    assert first["rejected_reward"] == pytest.approx(0, abs=tolerance)
    assert abs(second["rejected_reward"]) > tolerance


def test_micro_batches_change_only_rounding(start):
    folder, overrides = start
    lines = []
    for size in (1, 2, 4):
        more = [f"train.micro_batch_size={size}", "model.dropout=0", "train.max_steps=2"]
        run = train(folder, f"micro-{size}", overrides, *more)
        lines.append([line for line in read_metrics(run) if "dpo_loss" in line])
    for other in lines[1:]:
        for one, two in zip(lines[0], other):
            for key in ("train_loss", "dpo_loss", "dpo_margin", "grad_norm", "rejected_loss"):
                assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-6)


COMPARED = {"dpo_loss", "dpo_margin", "rejected_loss", "val_dpo_loss", "grad_norm"}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_learn_what_one_does(start, tmp_path, parallel):
    _, overrides = start
    check_ranks(tmp_path, [*overrides, "model.dropout=0", f"train.parallel={parallel}"])
    one, two = (read_metrics(tmp_path / f"ranks-{n}") for n in (1, 2))
    for alone, together in zip(one, two):
        keys = alone.keys() & COMPARED
        assert keys
        for key in keys:
            assert together[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5)


# The objective and the evaluator of a run


class Pairs(NamedTuple):
    """Pairs in windows and as texts, a model, and ln P of all answers by another."""

    windows: PairWindows
    texts: list
    model: torch.nn.Module
    reference: np.ndarray


@pytest.fixture(scope="module")
def pairs(rows_and_corpus):
    _, corpus = rows_and_corpus
    windows = PairWindows(corpus.train, 200)
    model, reference = (
        random_model(vocab_size=corpus.tokenizer.vocab_size, seed=seed, max_seq_len=256)
        for seed in (0, 1)
    )
    return Pairs(windows, pair_texts(corpus), model, all_log_probs(reference, windows, 3))


def answer_log_probs(pairs, tokenizer, numbers):
    """ln P of both answers of pairs, each by a pass of its own, and their numbers of tokens."""
    log_probs, n_tokens = [], []
    for number in numbers:
        prompt, *answers = pairs.texts[number]
        sides = [answer_log_prob(pairs.model, tokenizer, prompt, each) for each in answers]
        log_probs.append(torch.stack(sides))
        n_tokens.append([len(tokenizer.encode(each)) + 1 for each in answers])
    return torch.stack(log_probs), torch.tensor(n_tokens).float()


def objective_of(pairs, indices):
    """The objective of a run whose batch has these windows."""
    objective = DPOLoss(DPOConfig(beta=BETA))
    loader = SimpleNamespace(sample_ids=lambda step: indices)
    objective.run = SimpleNamespace(loader=loader, state=SimpleNamespace(step=0))
    objective.windows = pairs.windows
    objective.reference = SimpleNamespace(train=pairs.reference)
    return objective


def test_the_step_minimizes_the_mean_over_pairs(pairs, rows_and_corpus):
    """Though it divides by the number of targets; and the log has the means that it says."""
    _, corpus = rows_and_corpus
    indices = list(range(4))
    numbers = [number for index in indices for number in pairs.windows.pairs(index)]
    log_probs, n_tokens = answer_log_probs(pairs, corpus.tokenizer, numbers)
    rewards = BETA * (log_probs - torch.from_numpy(pairs.reference[numbers]).float())
    margin = rewards[:, 0] - rewards[:, 1]
    expected = (1 + (-margin).exp()).log().mean()
    parameters = list(pairs.model.parameters())
    wanted = torch.autograd.grad(expected, parameters, retain_graph=True)
    largest = max(float(each.abs().max()) for each in wanted)

    inputs, targets = pairs.windows.batch(indices)
    n_targets = int((targets != IGNORE_INDEX).sum())
    for size in (1, 3):
        objective = objective_of(pairs, indices)
        total, nats, sums = 0.0, 0.0, {}
        filled = torch.full(targets.shape, torch.nan)
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            windows = torch.tensor(indices[rows])
            batch = Batch(inputs[rows], targets[rows], n_targets, windows=windows)
            loss = objective(pairs.model, batch._replace(target_losses=filled[rows]))
            total = total + loss.sum / n_targets
            nats += float(loss.cross_entropy) / n_targets
            for name, (a, b) in loss.parts.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(a), before[1] + float(b))
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
        for gradient, each in zip(torch.autograd.grad(total, parameters), wanted):
            torch.testing.assert_close(gradient, each, rtol=0, atol=1e-5 * largest)
        chosen = float(-log_probs[:, 0].sum() / n_tokens[:, 0].sum())
        assert nats == pytest.approx(chosen, rel=1e-5)
        assert {name: a / b for name, (a, b) in sums.items()} == pytest.approx(
            {
                "dpo_loss": float(expected),
                "dpo_accuracy": float((margin > 0).float().mean()),
                "dpo_margin": float(margin.mean()),
                "chosen_reward": float(rewards[:, 0].mean()),
                "rejected_reward": float(rewards[:, 1].mean()),
                "rejected_loss": float(-log_probs[:, 1].sum() / n_tokens[:, 1].sum()),
                "chosen_tokens": float(n_tokens[:, 0].mean()),
                "rejected_tokens": float(n_tokens[:, 1].mean()),
            },
            rel=1e-4,
        )
        assert float(filled.sum()) == pytest.approx(float(-log_probs.sum()), rel=1e-5)


@pytest.mark.parametrize("limit", [None, 2])
def test_the_evaluator(pairs, rows_and_corpus, limit):
    _, corpus = rows_and_corpus
    tokenizer = corpus.tokenizer
    dataset = SimpleNamespace(reference=SimpleNamespace(val=pairs.reference))
    byte_lengths = np.ones(tokenizer.vocab_size)
    byte_lengths[tokenizer.eos_id] = 0
    evaluator = PreferenceEvaluator(pairs.windows, 3, BETA, dataset, byte_lengths, limit)
    found = evaluator(pairs.model)
    indices = range(len(pairs.windows))[:limit]
    numbers = [number for index in indices for number in pairs.windows.pairs(index)]
    with torch.no_grad():
        log_probs, n_tokens = answer_log_probs(pairs, tokenizer, numbers)
    log_probs, n_tokens = log_probs.double(), n_tokens.double()
    rewards = BETA * (log_probs - torch.from_numpy(pairs.reference[numbers]))
    margin = rewards[:, 0] - rewards[:, 1]
    nats = float(-log_probs[:, 0].sum())
    assert found.n_tokens == int(n_tokens[:, 0].sum())
    assert found.loss == pytest.approx(nats / found.n_tokens, rel=1e-5)
    n_bytes = found.n_tokens - len(numbers)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert found.metrics == pytest.approx(
        {
            "val_dpo_loss": float((1 + (-margin).exp()).log().mean()),
            "val_dpo_accuracy": float((margin > 0).double().mean()),
            "val_dpo_margin": float(margin.mean()),
            "val_rejected_loss": float(-log_probs[:, 1].sum() / n_tokens[:, 1].sum()),
        },
        rel=1e-4,
    )
    assert evaluator(pairs.model, stop=lambda: True) is None


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.attention=prefix(8)"], "with a bidirectional prefix in model.attention"),
        (["data.seq_len=12"], "pairs for training are longer than data.seq_len=12"),
    ],
)
def test_mistakes_of_a_run(start, overrides, text):
    folder, own = start
    base = folder / "prefix"
    if "prefix" in overrides[0] and not base.exists():
        more = [f"run.dir={base}", "train.max_steps=1", "data.seq_len=128", *overrides]
        assert build_trainer(load_config(BASE, [*SMALL, *more])).train() == 0
        own = [*own, f"run.init_from={base}"]
        overrides = []
    with pytest.raises(UserError, match=text):
        build_trainer(load_config(BASE, [*own, f"run.dir={folder / 'no'}", *overrides]))


# Known optima


def test_the_implied_rewards_of_preferences_are_the_true_ones():
    """Answers of one token to one prompt, and choices that follow Bradley and Terry: DPO finds the
    differences of the rewards that made them."""
    n_answers, n_pairs = 8, 40_000
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(n_answers, generator=generator).double()
    pairs = torch.randint(n_answers, (n_pairs, 2), generator=generator)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    is_first = (
        torch.rand(len(pairs), generator=generator)
        < (rewards[pairs[:, 0]] - rewards[pairs[:, 1]]).sigmoid()
    )
    chosen = torch.where(is_first, pairs[:, 0], pairs[:, 1])
    rejected = torch.where(is_first, pairs[:, 1], pairs[:, 0])

    model = random_model(vocab_size=n_answers + 1, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2)
    prompt = torch.full((1, 1), n_answers)
    with torch.no_grad():
        reference = model(prompt)[0, -1].log_softmax(-1)[:n_answers]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        log_probs = model(prompt)[0, -1].log_softmax(-1)[:n_answers]
        both = torch.stack([log_probs[chosen], log_probs[rejected]], dim=1)
        of_reference = torch.stack([reference[chosen], reference[rejected]], dim=1)
        loss = dpo_loss(both, of_reference, BETA).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        log_probs = model(prompt)[0, -1].log_softmax(-1)[:n_answers]
    implied = BETA * (log_probs - reference).double()
    slope, _ = np.polyfit(rewards - rewards.mean(), implied - implied.mean(), 1)
    assert slope == pytest.approx(1, abs=0.05)
    assert np.corrcoef(rewards, implied)[0, 1] > 0.999


# Other losses


def guide_losses():
    """The classes in the guide's my_losses.py."""
    guide = (ROOT / "features" / "preferences" / "guide.md").read_text()
    code = guide.partition("```python\n# my_losses.py\n")[2].partition("```")[0]
    names = {}
    exec(compile(code, "my_losses.py", "exec"), names)
    return names


def test_the_losses_of_the_guide_are_those_of_their_papers():
    generator = torch.Generator().manual_seed(3)
    log_probs, reference = (-5 * torch.rand(6, 2, generator=generator).double() for _ in range(2))
    n_tokens = torch.randint(1, 9, (6, 2), generator=generator).double()
    names = guide_losses()

    def found(name):
        objective = names[name](DPOConfig(beta=BETA))
        return objective.compare(log_probs, reference, n_tokens).loss

    ratio = log_probs - reference
    h = ratio[:, 0] - ratio[:, 1]
    torch.testing.assert_close(found("IPO") / BETA**2, (h - 1 / (2 * BETA)) ** 2)

    mean = log_probs / n_tokens
    gap = BETA * mean[:, 0] - BETA * mean[:, 1] - 0.5
    torch.testing.assert_close(found("SimPO"), (1 + (-gap).exp()).log())

    P = mean.exp()
    odds = (P / (1 - P)).log()
    of_odds = 1 / (1 + (odds[:, 1] - odds[:, 0]).exp())
    torch.testing.assert_close(found("ORPO"), -mean[:, 0] - BETA * of_odds.log())

    z = max(float((BETA * ratio).mean()), 0)
    value = 1 / (1 + (z - BETA * ratio[:, 0]).exp())
    other = 1 / (1 + (BETA * ratio[:, 1] - z).exp())
    torch.testing.assert_close(found("KTO"), 1 - value + 1 - other)


def test_a_run_needs_a_model_to_start_from(start):
    folder, overrides = start
    more = ["run.init_from=null", "data.tokenizer=byte", f"run.dir={folder / 'none'}"]
    with pytest.raises(UserError, match="needs a model to start from; set run.init_from"):
        build_trainer(load_config(BASE, [*overrides, *more]))


def test_a_run_with_another_loss(start):
    """A form of DPOLoss is used in its place; what is no form of it is refused."""
    folder, overrides = start
    config = load_config(BASE, [*overrides, f"run.dir={folder / 'ipo'}", "train.max_steps=2"])
    objective = guide_losses()["IPO"](config.train.dpo)
    assert build_trainer(config, objective=objective).train() == 0
    line = read_metrics(folder / "ipo")[0]
    assert line["dpo_loss"] == pytest.approx(0.25, abs=0.05)
    other = load_config(BASE, [*overrides, f"run.dir={folder / 'other'}"])
    with pytest.raises(UserError, match="cannot be combined with another objective"):
        build_trainer(other, objective=lambda model, batch: None)
