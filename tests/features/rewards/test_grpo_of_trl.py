"""The loss of sampled answers and its gradients beside those of TRL's trainer, on the same exported
model and answers."""

import copy

import pytest
import torch
from conftest import random_model
from test_grpo import BYTES, GROUP, N_ANSWERS, batch_of, objective_of, options_of, sampler_of

from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.rollouts import make_rollouts
from thinker.interop import save
from thinker.interop.export_huggingface import export_huggingface
from thinker.interop.huggingface import hf_tensors
from thinker.runtime.constants import IGNORE_INDEX

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
NEW = 9  # tokens of the longest answer
PROMPTS = [Prompt([BYTES.bos_id, *BYTES.encode(word)], word, {}) for word in ("red", "old", "and")]


def trl_trainer(tmp_path, folder, loss_type, temperature):
    """TRL's trainer with an exported model."""
    options = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        loss_type=loss_type,
        temperature=temperature,
        beta=0.0,
        epsilon=0.2,
        num_generations=GROUP,
        max_completion_length=NEW,
        per_device_train_batch_size=N_ANSWERS,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * N_ANSWERS),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )


def inputs_of_trl(rollouts):
    """The same answers as TRL has them: prompts and completions apart, with masks."""
    n_prompt = len(PROMPTS[0].tokens)
    answer = slice(n_prompt - 1, n_prompt - 1 + NEW)
    targets = rollouts.targets[:, answer]
    mask = (targets != IGNORE_INDEX).long()
    return {
        "prompt_ids": rollouts.inputs[:, :n_prompt],
        "prompt_mask": torch.ones(N_ANSWERS, n_prompt, dtype=torch.int64),
        "completion_ids": targets.clamp(min=0),
        "completion_mask": mask,
        "advantages": rollouts.advantages,
        "old_per_token_logps": rollouts.sampled[:, answer],
        "num_items_in_batch": mask.sum(),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("normalize", "loss_type"), [("group", "grpo"), ("none", "dr_grpo")])
def test_loss_and_gradients(tmp_path, normalize, loss_type, temperature):
    options = options_of(normalize=normalize, temperature=temperature)
    policy = random_model(vocab_size=BYTES.vocab_size, std=0.15)
    rollouts = make_rollouts(sampler_of(options), policy, PROMPTS, 0, N_ANSWERS, 32)
    rollouts.is_used[:] = True  # TRL leaves no group out
    with torch.no_grad():  # since then the policy has moved
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    save(policy, BYTES, tmp_path / "saved")
    export_huggingface(tmp_path / "saved", tmp_path / "exported")

    trainer = trl_trainer(tmp_path, tmp_path / "exported", loss_type, temperature)
    # In fp32 the two round differently, by about 1e-6 of the largest gradient.
    policy.double()
    trainer.model.double()
    theirs = trainer._compute_loss(trainer.model, inputs_of_trl(rollouts))
    theirs.backward()
    names = dict(trainer.model.named_parameters())

    objective = objective_of(options, rollouts)
    batch = batch_of(rollouts, list(range(N_ANSWERS)))
    ours = objective(policy, batch).sum / batch.n_targets
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5, abs=1e-7)

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
