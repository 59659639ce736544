"""A training step keeps a window's documents apart where its batch numbers them."""

import torch
from conftest import ROOT

from data.ahead import Batch
from training.recipe import load_recipe
from training.step import TrainingStep, draw

SMALL = ["model.d_model=32", "model.n_layers=1", "model.n_heads=2", "train.precision=fp32", "train.compile=false",
         "train.batch_size=2", "train.micro_batch_size=1"]  # fmt: skip


def test_a_step_learns_from_each_document_alone():
    recipe = load_recipe(ROOT / "tests" / "fixtures" / "base.yaml", SMALL)
    thinker = draw(recipe.thinker_config(vocab_size=61), 1, torch.device("cpu"))
    for parameter in thinker.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    x, y, documents = tokens[:, :-1], tokens[:, 1:], torch.tensor([[0] * 5 + [1] * 7] * 2)
    with torch.no_grad():
        alone = sum(thinker(x[:, part], targets=y[:, part])[0] for part in (slice(0, 5), slice(5, 12))) / 24
        together = thinker(x, targets=y)[0] / 24
    loss, _ = TrainingStep(thinker, recipe)(Batch(x, y, 24, documents), 0.0)
    torch.testing.assert_close(loss, alone)
    assert abs(loss - together) > 1e-3
