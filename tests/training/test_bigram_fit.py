"""The fit to pairs of tokens before the first step: what it computes, and when it is done."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_contract import check_ranks, check_resumes, small_config
from training_runs import read_metrics

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training import bigram_fit
from thinker.training.bigram_fit import PairCounts, add_gradients, fit_weights, pair_loss
from thinker.training.config.config import Config
from thinker.training.objective import next_token_loss
from thinker.training.run import build_trainer

V = 40
CPU = torch.device("cpu")


class Chain:
    """Windows of a Markov chain with random probabilities, whose entropy is known."""

    def __init__(self, n_windows=400, seq_len=64, concentration=0.1, seed=1):
        self.probabilities = np.random.default_rng(1).dirichlet([concentration] * V, size=V)
        random = np.random.default_rng(seed)
        steps = self.probabilities.cumsum(1)
        tokens = np.zeros(n_windows * seq_len + 1, np.int64)
        for place, draw in enumerate(random.random(len(tokens) - 1)):
            drawn = np.searchsorted(steps[tokens[place]], draw)
            tokens[place + 1] = min(drawn, V - 1)
        self.tokens, self.n, self.seq_len = tokens, n_windows, seq_len

    def __len__(self):
        return self.n

    def window(self, index):
        start = index * self.seq_len
        tokens = self.tokens[start : start + self.seq_len + 1]
        return tokens[:-1], tokens[1:]

    def entropy(self):
        """Nats per token, in the stationary distribution."""
        share = np.full(V, 1 / V)
        for _ in range(1000):
            share = share @ self.probabilities
        entropies = -(self.probabilities * np.log(self.probabilities + 1e-300)).sum(1)
        return float(share @ entropies)


def new_model(**changes):
    torch.manual_seed(3)
    shape = {"vocab_size": V, "d_model": 24, "n_layers": 2, "n_heads": 2}
    return Thinker(ThinkerConfig(**shape | changes))


def some_batches(n=3):
    """Batches in which some targets have no loss."""
    torch.manual_seed(4)
    batches = []
    for _ in range(n):
        tokens = torch.randint(V, (5, 18))
        targets = tokens[:, 1:].masked_fill(torch.rand(5, 17) < 0.3, IGNORE_INDEX)
        batches.append((tokens[:, :-1], targets))
    return batches


MODELS = {
    "default": {},
    "value embeddings": {"value_embeddings": True},
    "capped logits": {"logit_softcap": 5.0, "logit_scale": 0.5},
    "token shift": {"token_shift": True, "bigram_rows": 50},
    "scaled embedding": {"embedding_scale": 3.0},
    "LayerNorm": {"norm": "layernorm"},
    "both norms": {"block": "both_norms"},
    "post-norm": {"block": "post_norm"},
    "parallel": {"block": "parallel"},
}


@pytest.mark.parametrize("rows", [7, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_whole_model(name, rows, monkeypatch):
    """The blocks add nothing yet, so a pass over all tokens has the same loss."""
    monkeypatch.setattr(bigram_fit, "MAX_LOGITS", rows * V)
    model = new_model(**MODELS[name]).double()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5)
    batches = some_batches()
    total, count = 0.0, 0
    for inputs, targets in batches:
        logits = model(inputs).flatten(0, 1)
        kept = targets.flatten()
        total = total + F.cross_entropy(logits, kept, ignore_index=IGNORE_INDEX, reduction="sum")
        count += int((kept != IGNORE_INDEX).sum())
    loss = total / count
    loss.backward()
    weights = [model.embedding.weight, model.lm_head.weight]
    expected = [weight.grad.clone() for weight in weights]
    model.zero_grad()

    counts = PairCounts(batches, V, CPU)
    assert counts.total == count
    assert pair_loss(model, counts) == pytest.approx(loss.item(), rel=1e-6)
    add_gradients(model, counts)
    for weight, gradient in zip(weights, expected):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-5, atol=1e-7)


def test_counts_are_those_of_a_loop():
    batches = some_batches()
    expected = torch.zeros(V, V)
    for inputs, targets in batches:
        for token, following in zip(inputs.flatten().tolist(), targets.flatten().tolist()):
            if following != IGNORE_INDEX:
                expected[token, following] += 1
    counts = PairCounts(batches, V, CPU)
    assert torch.equal(counts.rows(slice(0, V)), expected)
    assert torch.equal(counts.rows(slice(11, 23)), expected[11:23])


def counts_of(dataset, share):
    first, last = (round(part * len(dataset)) for part in share)
    windows = [dataset.window(index) for index in range(first, last)]
    batches = [(torch.from_numpy(a)[None], torch.from_numpy(b)[None]) for a, b in windows]
    return PairCounts(batches, V, CPU)


def test_a_chain_is_learned_to_its_entropy():
    chain = Chain(2000)
    model = new_model(d_model=48)
    held_out = counts_of(chain, (0.9, 1))
    start = pair_loss(model, held_out)
    assert start == pytest.approx(math.log(V), rel=1e-6)
    loss = fit_weights(model, counts_of(chain, (0, 0.9)), held_out, 40, start)
    assert loss == pytest.approx(chain.entropy(), rel=0.05)
    assert loss == pytest.approx(pair_loss(model, held_out), rel=1e-6)
    # So it is for the whole model, on text it has not seen.
    other = Chain(200, seed=2)
    inputs, targets = (
        torch.from_numpy(np.stack(part)) for part in zip(*map(other.window, range(200)))
    )
    total, count = model(inputs, targets=targets)
    assert float(total.detach() / count) == pytest.approx(chain.entropy(), rel=0.05)


def test_pairs_that_say_nothing_leave_the_weights_alone():
    """Uniform tokens, hardly more of them than pairs: whatever is learned is by heart."""
    chain = Chain(40, concentration=1e6)
    model = new_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held_out = counts_of(chain, (0.5, 1))
    start = pair_loss(model, held_out)
    assert fit_weights(model, counts_of(chain, (0, 0.5)), held_out, 40, start) == start
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert model.get_parameter(name).grad is None


def test_a_fit_that_ends_above_the_start_is_undone(monkeypatch):
    """As if the random part reversed what was fitted, and the LM head had no steps to follow."""
    monkeypatch.setattr(bigram_fit, "RANDOM_SHARE", -1e6)
    monkeypatch.setattr(bigram_fit, "SHARE_OF_BOTH", 1.0)
    chain, model = Chain(), new_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counts, held_out = counts_of(chain, (0, 0.9)), counts_of(chain, (0.9, 1))
    start = pair_loss(model, held_out)
    assert fit_weights(model, counts, held_out, 40, start) == start
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_one_epoch_is_counted_at_most(tmp_path):
    settings = small_settings(tmp_path)
    loader = BatchLoader(ShuffledDataset(Chain(50, seq_len=16), seed=2), batch_size=4)
    counts, held_out = bigram_fit.count_pairs(loader, settings, CPU)
    assert held_out.total == 2 * 4 * 16  # of 12 batches; the last two windows are in none
    assert counts.total == 10 * 4 * 16
    short = BatchLoader(ShuffledDataset(Chain(39, seq_len=16), seed=2), batch_size=4)
    assert [part.total for part in bigram_fit.count_pairs(short, settings, CPU)] == [0, 0]


def test_reading_ends_with_the_time(tmp_path):
    loader = BatchLoader(ShuffledDataset(Chain(400, seq_len=16), seed=2), batch_size=4)
    counts, held_out = bigram_fit.count_pairs(loader, small_settings(tmp_path), CPU, seconds=0)
    assert (counts.total, held_out.total) == (4 * 16, 4 * 16)


# ---------------------------------------------------------------- runs

# A small model that trains long enough for the fit to be cheap, on enough text for ten batches.
LONG = ["train.batch_size=32", "train.max_steps=150"]
BRIEFLY = ["train.save_every=null", "train.eval_every=null"]
MESSAGE = "fitted the embedding and the LM head to"


def small_settings(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "settings"))
    trainer.batches.close()
    return trainer.settings


def is_fitted(capsys, tmp_path, *overrides, **arguments):
    """Whether a run of these overrides begins with the fit."""
    capsys.readouterr()
    folder = tempfile.mkdtemp(dir=tmp_path)
    trainer = build_trainer(small_config(Path(folder), "run", overrides), **arguments)
    trainer.batches.close()
    done = MESSAGE in capsys.readouterr().err
    assert done == (pair_loss_of_first_batch(trainer) < 0.9 * math.log(256))
    return done


def pair_loss_of_first_batch(trainer):
    batch = trainer.loader.batch(0)
    return pair_loss(trainer.model, PairCounts([batch], trainer.settings.model.vocab_size, CPU))


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_is_fitted_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bigram_fit, "SHARE_OF_RUN", 1e9)
    whole = check_resumes(tmp_path, monkeypatch)
    assert capsys.readouterr().err.count(MESSAGE) == 1
    losses = [line["train_loss"] for line in read_metrics(whole) if "train_loss" in line]
    assert losses[0] < 0.7 * math.log(256)
    # One that is stopped before its first checkpoint begins with the same fit.
    again = build_trainer(small_config(tmp_path, "again"))
    again.batches.close()
    again.run.unlock()
    same = build_trainer(small_config(tmp_path, "again"))
    same.batches.close()
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, same.model.state_dict()[name]), name
    # The key is no switch of a run that has begun.
    with pytest.raises(UserError, match="train.fit_bigrams"):
        build_trainer(small_config(tmp_path, "whole", ["train.fit_bigrams=off"]))


@pytest.mark.usefixtures("one_thread")
def test_two_ranks_have_the_losses_of_one(tmp_path):
    # Half of 3% of its FLOPs is enough for all steps of the fit, so that one rank makes as many.
    long = ["model.d_ff=1024", "train.batch_size=64", "train.max_steps=80"]
    check_ranks(tmp_path, [*long, *BRIEFLY])
    for n_ranks in (1, 2):
        lines = read_metrics(tmp_path / f"ranks-{n_ranks}")
        losses = [line["train_loss"] for line in lines if "train_loss" in line]
        assert losses[0] < 0.8 * math.log(256)


def test_long_runs_of_ordinary_models_are_fitted(tmp_path, capsys):
    def fitted(*overrides, **arguments):
        return is_fitted(capsys, tmp_path, *LONG, *overrides, **arguments)

    assert fitted()
    assert fitted("train.deterministic=true")
    assert not fitted("train.fit_bigrams=off")
    assert not fitted("train.max_steps=3")
    assert not fitted("train.max_minutes=1e-6")
    assert fitted("train.max_steps=null", "train.max_minutes=1000")
    assert not fitted("model.tie_embeddings=true")
    assert not fitted("model.init=normal")
    assert not fitted("model.head_init_std=0.1")
    assert not fitted("model.positions=sinusoidal")
    assert not fitted("data.buffer_tokens=8192")
    assert not fitted("train.batch_size=256")


def test_what_the_user_brings(tmp_path, capsys):
    class SameThinker(Thinker):
        pass

    class OtherThinker(Thinker):
        """Its blocks have an effect from the start."""

        def init_weights(self, generator=None):
            super().init_weights(generator)
            self.blocks[0].mlp.down_proj.weight.data.normal_(0, 0.1)

    def objective(model, batch):
        return next_token_loss(model, batch)

    dataset = Chain(2000, seq_len=16)
    assert is_fitted(capsys, tmp_path, *LONG, model=SameThinker)
    assert not is_fitted(capsys, tmp_path, *LONG, model=OtherThinker)
    assert not is_fitted(capsys, tmp_path, *LONG, objective=objective)
    assert not is_fitted(capsys, tmp_path, *LONG, dataset=dataset)


def test_it_is_no_part_of_fine_tuning(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bigram_fit, "SHARE_OF_RUN", 1e9)
    overrides = [f"run.init_from={tiny_run}", "data.tokenizer=null"]
    tree = small_config(tmp_path, "run", overrides).model_dump(exclude_unset=True)
    del tree["model"]
    build_trainer(Config.model_validate(tree)).batches.close()
    assert MESSAGE not in capsys.readouterr().err


def test_its_time_counts_as_training(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "run", LONG))
    trainer.batches.close()
    assert 0 < trainer.state.elapsed_s < 60
