"""What every objective and every callback of training must fulfil: tests call these functions for
each of them."""

import shutil

import fork_server
import pytest
import torch
from conftest import ROOT
from training_runs import assert_same_run, train_losses
from training_workers import train_each

from thinker.data.batches.prefetch import Batch
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.config.load import load_config
from thinker.training.reports import summary
from thinker.training.run import train

BASE = ROOT / "tests" / "fixtures" / "base.yaml"
N_STEPS = 6
SMALL = [
    "model.d_model=16",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.dropout=0.1",
    "data.seq_len=16",
    "data.max_documents=40",
    "data.tokenizer=byte",
    "train.batch_size=4",
    "train.micro_batch_size=2",
    "train.eval_sequences=2",
    "train.device=cpu",
    "train.precision=fp32",
    "train.compile=false",
    "train.eval_every=3",
    "train.save_every=1",
    "train.keep_last=20",
    f"train.max_steps={N_STEPS}",
]


def small_config(folder, name, more=()):
    """The config of a run of N_STEPS steps that saves after each."""
    where = [f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / name}"]
    return load_config(BASE, [*SMALL, *where, *more])


def check_resumes(
    folder, monkeypatch, more=(), make_callbacks=list, objective=None, make_dataset=lambda: None
):
    """A run that is cut off after any step goes on to the same bits as one that is not.

    make_callbacks, make_dataset: make new ones for each run. Returns the complete run's folder.
    """
    monkeypatch.setattr(summary, "print_summary", lambda *arguments: None)

    def run(name):
        config = small_config(folder, name, more)
        options = {"callbacks": make_callbacks(), "objective": objective}
        assert train(config, dataset=make_dataset(), **options) == 0
        return folder / name

    whole = run("whole")
    for step in (1, 4):
        cut_off = shutil.copytree(whole, folder / f"cut-{step}")
        for path in (cut_off / "checkpoints").iterdir():
            if int(path.name.split("-")[1]) > step:
                shutil.rmtree(path)
        assert_same_run(whole, run(cut_off.name), N_STEPS)
    return whole


def check_ranks(folder, more=()):
    """Two ranks have the losses of one process, but for rounding."""
    losses = []
    for n_ranks in (1, 2):
        run = folder / f"ranks-{n_ranks}"
        where = [f"data.cache_dir={folder / 'cache'}", f"run.dir={run}"]
        overrides = [*SMALL, "model.dropout=0", "train.parallel=ddp", *where, *more]
        done = fork_server.run_ranks(n_ranks, train_each, str(BASE), [overrides])
        assert done == [[0]] * n_ranks
        losses.append(train_losses(run))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def a_batch(vocab_size, rows=4, seq_len=12, seed=0):
    """A batch of which some targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORE_INDEX
    n_targets = int((targets != IGNORE_INDEX).sum())
    windows = torch.arange(rows)
    return Batch(tokens[:, :-1].contiguous(), targets, n_targets, windows=windows)


def check_objective(objective, model, plain_loss):
    """Its sum and gradient are those of plain_loss(logits, batch), however the batch is split.

    And it counts the targets, fills in the loss of each, and says what its parts are.
    """
    batch = a_batch(model.config.vocab_size)
    parameters = list(model.parameters())
    expected = plain_loss(model(batch.inputs), batch)
    expected_gradients = torch.autograd.grad(expected, parameters)
    for size in (1, 3, 4):
        losses, filled, total = [], [], 0.0
        for start in range(0, 4, size):
            part = batch.rows(slice(start, start + size), torch.device("cpu"))
            part = part._replace(target_losses=torch.full(part.targets.shape, torch.nan))
            losses.append(objective(model, part))
            filled.append(part.target_losses)
            total = total + losses[-1].sum
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
        assert sum(int(loss.n_targets) for loss in losses) == batch.n_targets
        gradients = torch.autograd.grad(total, parameters)
        for found, wanted in zip(gradients, expected_gradients):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)

        by_target = torch.nn.functional.cross_entropy(
            model(batch.inputs).flatten(0, 1),
            batch.targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        torch.testing.assert_close(torch.cat(filled).flatten(), by_target, rtol=1e-4, atol=1e-4)
        for loss in losses:
            reported = loss.sum if loss.cross_entropy is None else loss.cross_entropy
            assert reported.dim() == 0
            assert list(loss.parts) == list(losses[0].parts)
