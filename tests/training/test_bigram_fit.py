"""The fit to pairs of tokens before the first step: what it computes, and when it is done."""

import math

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
from thinker.training.run import build_trainer

V = 40
CPU = torch.device("cpu")
OVERRIDES = ["train.fit_bigrams=true"]


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
    monkeypatch.setattr(bigram_fit, "ROWS", rows)
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


def test_one_epoch_is_counted_at_most(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "run"))
    trainer.batches.close()
    chain = Chain(50, seq_len=16)
    loader = BatchLoader(ShuffledDataset(chain, seed=2), batch_size=4)
    counts, held_out = bigram_fit.count_pairs(loader, trainer.settings, CPU)
    assert held_out.total == 2 * 4 * 16  # of 12 batches, the last windows are in none
    assert counts.total == 10 * 4 * 16


def first_loss(folder):
    return next(line["train_loss"] for line in read_metrics(folder) if "train_loss" in line)


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_is_fitted_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
    whole = check_resumes(tmp_path, monkeypatch, OVERRIDES)
    assert capsys.readouterr().err.count("fitted the embedding and the LM head") == 1
    assert first_loss(whole) < 0.7 * math.log(256)
    config = (whole / "config.yaml").read_text()
    assert "fit_bigrams: true" in config


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one(parallel, tmp_path):
    check_ranks(tmp_path, [*OVERRIDES, f"train.parallel={parallel}"])


def fitted(tmp_path, name, *overrides, **arguments):
    """Whether a run of these overrides begins with the fit."""
    trainer = build_trainer(small_config(tmp_path, name, overrides), **arguments)
    trainer.batches.close()
    return trainer.settings.train.fit_bigrams


LONG = "train.max_steps=100000"


def test_auto_fits_only_long_runs_of_untied_models(tmp_path):
    assert not fitted(tmp_path, "short")
    assert fitted(tmp_path, "long", LONG)
    assert not fitted(tmp_path, "off", LONG, "train.fit_bigrams=false")
    assert not fitted(tmp_path, "tied", LONG, "model.tie_embeddings=true")
    assert not fitted(tmp_path, "normal", LONG, "model.init=normal")
    assert not fitted(tmp_path, "copies", LONG, "model.head_init_std=0.1")
    assert not fitted(tmp_path, "stream", LONG, "data.buffer_tokens=1600")
    minutes = ["train.max_steps=null", "train.max_minutes=1000"]
    assert fitted(tmp_path, "minutes", *minutes)
    assert not fitted(tmp_path, "seconds", "train.max_steps=null", "train.max_minutes=0.001")


def test_auto_leaves_classes_and_objectives_of_the_user_alone(tmp_path):
    class OwnThinker(Thinker):
        pass

    def objective(model, batch):
        from thinker.training.objective import next_token_loss

        return next_token_loss(model, batch)

    assert not fitted(tmp_path, "class", LONG, model=OwnThinker)
    assert not fitted(tmp_path, "objective", LONG, objective=objective)
    assert fitted(tmp_path, "asked", LONG, *OVERRIDES, objective=objective)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.tie_embeddings=true", "embedding and LM head are one table"),
        ("model.init=normal", "choose other weights"),
        ("data.buffer_tokens=1600", "the text is a stream"),
    ],
)
def test_asking_for_the_impossible_is_refused(override, problem, tmp_path):
    with pytest.raises(UserError, match=problem):
        fitted(tmp_path, "run", *OVERRIDES, override)


def test_it_is_refused_for_an_initial_model(tiny_run, tmp_path):
    overrides = [*OVERRIDES, f"run.init_from={tiny_run}", "data.tokenizer=null"]
    tree = small_config(tmp_path, "run", overrides).model_dump(exclude_unset=True)
    del tree["model"]
    config = Config.model_validate(tree)
    with pytest.raises(UserError, match="run.init_from names the weights; set it to false"):
        build_trainer(config)


def test_its_time_counts_as_training(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "run", OVERRIDES))
    trainer.batches.close()
    assert 0 < trainer.state.elapsed_s < 60
