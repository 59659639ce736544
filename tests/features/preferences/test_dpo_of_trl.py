"""The loss of DPO and its gradients beside those of TRL's trainer, on the same exported model and
rows."""

import copy
import json

import pytest
import torch
from conftest import random_model
from test_pairs import corpus_of

from thinker.features.preferences.dpo import dpo_loss
from thinker.features.preferences.pair_log_probs import pair_batch, pair_log_probs
from thinker.features.preferences.pair_windows import PairWindows
from thinker.interop import save
from thinker.interop.export_huggingface import export_huggingface
from thinker.interop.huggingface import hf_tensors

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
BETA = 0.2
LENGTHS = [(3, 9), (12, 2), (5, 5), (20, 7)]


def trl_trainer(tmp_path, folders):
    """TRL's trainer for the rows of corpus_of(), with the models in two folders: policy,
    reference."""
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy, reference = (load(folder, dtype=torch.float32) for folder in folders)
    options = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        beta=BETA,
        per_device_train_batch_size=len(rows),
        max_length=None,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    return trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=options,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folders[0]),
    )


def test_loss_and_gradients(tmp_path):
    corpus = corpus_of(tmp_path, LENGTHS)
    folders = []
    models = []
    for name, seed in (("policy", 0), ("reference", 1)):
        model = random_model(vocab_size=corpus.tokenizer.vocab_size, seed=seed)
        save(model, corpus.tokenizer, tmp_path / "saved" / name)
        export_huggingface(tmp_path / "saved" / name, tmp_path / name)
        models.append(model)
        folders.append(tmp_path / name)
    policy, reference = models

    trainer = trl_trainer(tmp_path, folders)
    theirs = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    theirs.backward()
    names = dict(trainer.model.named_parameters())

    windows = PairWindows(corpus.train, 64)
    indices = list(range(len(windows)))
    inputs, targets = windows.batch(indices)
    pairs = pair_batch(windows, indices, torch.device("cpu"))
    with torch.no_grad():
        of_reference = pair_log_probs(reference, inputs, targets, pairs)
    log_probs = pair_log_probs(policy, inputs, targets, pairs)
    ours = dpo_loss(log_probs, of_reference, BETA).loss.mean()
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)

    gradients = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter, own in zip(gradients.parameters(), policy.parameters()):
            parameter.copy_(own.grad)
    found = hf_tensors(gradients, "qwen3")
    assert found.keys() == names.keys()
    largest = max(float(gradient.abs().max()) for gradient in found.values())
    for name, gradient in found.items():
        wanted = names[name].grad
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6 * largest, msg=name)
