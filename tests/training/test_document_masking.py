"""A training step keeps a window's documents apart where its batch numbers them; so do its memory
and its diagnosis."""

import pytest
import torch
from conftest import ROOT

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.prefetch import Batch
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.training.config.load import load_config
from thinker.training.nonfinite import diagnose
from thinker.training.settings.memory_estimate import estimate_memory
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

CPU = torch.device("cpu")
SMALL = ["model.d_model=32", "model.n_layers=1", "model.n_heads=2", "train.precision=fp32", "train.compile=false",
         "train.batch_size=2", "train.micro_batch_size=1"]  # fmt: skip


def test_a_step_learns_from_each_document_alone():
    config = load_config(ROOT / "tests" / "fixtures" / "base.yaml", SMALL)
    model = build_model(config.thinker_config(vocab_size=61), 1, CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    x, y, documents = tokens[:, :-1], tokens[:, 1:], torch.tensor([[0] * 5 + [1] * 7] * 2)
    with torch.no_grad():
        alone = (
            sum(model(x[:, part], targets=y[:, part])[0] for part in (slice(0, 5), slice(5, 12)))
            / 24
        )
        together = model(x, targets=y)[0] / 24
    loss, _ = TrainingStep(model, resolve_settings(config, model.config, CPU))(
        Batch(x, y, 24, documents), 0.0
    )
    torch.testing.assert_close(loss, alone)
    assert abs(loss - together) > 1e-3


def test_a_bad_steps_samples_have_the_losses_of_the_step(tmp_path):
    corpus = prepare_corpus(
        source="tales", max_documents=60, tokenizer="byte", cache_dir=tmp_path, progress=False
    )
    config = load_config(
        ROOT / "tests" / "fixtures" / "base.yaml", [*SMALL, "data.document_masking=true"]
    )
    model = build_model(config.thinker_config(vocab_size=257), 1, CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    windows = PackedDataset(corpus.train, 1024, "contiguous", document_masking=True)
    loader = BatchLoader(ShuffledDataset(windows, seed=1), 2, corpus.tokenizer.bos_id)
    samples = diagnose(model, loader, corpus.tokenizer, 0)["samples"]
    inputs, targets = loader.batch(0)
    documents = loader.document_ids(inputs)
    assert documents.max() > 1
    loss, _ = TrainingStep(model, resolve_settings(config, model.config, CPU))(
        Batch(inputs, targets, int((targets >= 0).sum()), documents), 0.0
    )
    assert sum(sample["loss"] for sample in samples) / 2 == pytest.approx(float(loss), rel=1e-4)


def test_memory_is_predicted_with_the_masks_of_documents():
    """A mask for each row, where one served all."""
    config = load_config(
        ROOT / "tests" / "fixtures" / "base.yaml",
        [*SMALL, "model.positions=alibi", "data.seq_len=512"],
    )
    settings = resolve_settings(config, config.thinker_config(vocab_size=61), CPU)
    plain = estimate_memory(settings, 2, CPU).peak
    masked = settings.model_copy(
        update={"data": settings.data.model_copy(update={"document_masking": True})}
    )
    assert estimate_memory(masked, 2, CPU).peak > plain + 2 * 2 * 512 * 512
