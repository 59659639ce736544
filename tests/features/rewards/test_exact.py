"""train.exact: sampling and training have the same bits, anything that differs is seen, and
gradients are those of the ordinary mode."""

import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from batch_cases import PROMPTS as TEXTS
from batch_cases import TOKENIZER, check_equal, random_params, run_batch
from conftest import random_model, run_script
from test_grpo import (
    BASE,
    BYTES,
    MODELS,
    N_ANSWERS,
    PROMPTS,
    SEQ_LEN,
    CountVowels,
    batch_of,
    options_of,
    train,
)
from test_grpo import start as start  # the fixture
from training_contract import check_ranks
from training_runs import assert_same_run, read_metrics

from thinker.features.rewards import rollouts as rollouts_module
from thinker.features.rewards.exact import exact_decoder
from thinker.features.rewards.exact.engine_log_probs import EngineLogProbs, with_values
from thinker.features.rewards.grpo import GRPOLoss
from thinker.features.rewards.policy_loss import policy_losses
from thinker.features.rewards.rollouts import Sampler, make_rollouts
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.interop import load, save
from thinker.model import Thinker, ThinkerConfig, proof
from thinker.native import compiler, operations
from thinker.native.compiler import has_compiler
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import RunError, UserError
from thinker.training.config.load import load_config
from thinker.training.kernels import Kernels
from thinker.training.run import build_trainer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
ROWS = list(range(N_ANSWERS))
# By model: what the message says where the kernels do not know it, or "".
PROBLEMS = {
    "plain": "",
    "tied": "",
    "soft cap": "",
    "head bias": "",
    "window": "exact needs full attention in all layers and no ALiBi",
    "token shift": "they do not know token shift",
    "learned positions": "they do not know learned positions",
    "logit scale": "they do not know LM head TransformedHead",
    "value embeddings": "they do not know value embeddings",
    "more ids than the tokenizer": "",
}


def model_of(name="plain"):
    return random_model(std=0.15, **{"vocab_size": BYTES.vocab_size, **MODELS[name]})


def exact_rollouts(model, options):
    sampler = Sampler(options, BYTES, CountVowels(), seed=1, exact=True)
    return make_rollouts(sampler, model, PROMPTS, 0, N_ANSWERS, SEQ_LEN)


def mismatch_of(model, rollouts, options, size=N_ANSWERS, temperature=None):
    """The largest difference in a batch, in micro-batches of this size."""
    if temperature is None:
        temperature = options.temperature
    objective = GRPOLoss(options, BYTES.vocab_size, EngineLogProbs(BYTES, temperature))
    objective.rollouts = rollouts
    objective.mismatch = torch.zeros(())
    objective.parts = SimpleNamespace(model=model, kernels=Kernels({}))
    for first in range(0, N_ANSWERS, size):
        objective(model, batch_of(rollouts, ROWS[first : first + size]))
    return float(objective.mismatch)


def test_models_are_those_of_the_other_test():
    assert PROBLEMS.keys() == MODELS.keys()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if not problem])
def test_sampling_and_training_have_the_same_bits(name, temperature):
    """However the batch is divided; and the ratios are exactly 1."""
    model = model_of(name)
    options = options_of(temperature=temperature)
    rollouts = exact_rollouts(model, options)
    for size in (1, 5, N_ANSWERS):
        assert mismatch_of(model, rollouts, options, size) == 0
    engine = EngineLogProbs(BYTES, temperature)
    log_probs = engine(model, rollouts.inputs, rollouts.targets)
    advantages = rollouts.advantages[:, None]
    ratio = policy_losses(log_probs, rollouts.sampled, advantages, 0.2).ratio
    assert bool((ratio == 1).all())
    is_target = rollouts.targets != IGNORE_INDEX
    logits = model.double()(rollouts.inputs)[:, :, : BYTES.vocab_size] / temperature
    known = logits.log_softmax(-1).gather(2, rollouts.targets.clamp(min=0)[:, :, None])[:, :, 0]
    torch.testing.assert_close(log_probs[is_target], known[is_target].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem])
def test_other_models_are_refused(name):
    with pytest.raises(UserError) as raised:
        exact_rollouts(model_of(name), options_of())
    assert PROBLEMS[name] in str(raised.value)


def test_an_ulp_on_one_side_is_seen():
    """In a weight, a stored log-probability, or the temperature."""
    model, options = model_of(), options_of(temperature=0.7)
    rollouts = exact_rollouts(model, options)
    assert mismatch_of(model, rollouts, options) == 0

    next_temperature = torch.tensor(0.7).nextafter(torch.tensor(1.0)).item()
    assert mismatch_of(model, rollouts, options, temperature=next_temperature) > 0

    place = tuple((rollouts.targets != IGNORE_INDEX).nonzero()[7].tolist())
    stored = rollouts.sampled[place].clone()
    rollouts.sampled[place] = stored.nextafter(torch.tensor(0.0))
    assert 0 < mismatch_of(model, rollouts, options) < 1e-6
    rollouts.sampled[place] = stored

    with torch.no_grad():
        weight = model.norm.weight
        weight.copy_(weight.nextafter(torch.full_like(weight, 2.0)))
    assert 0 < mismatch_of(model, rollouts, options) < 1e-4


@pytest.mark.more
def test_an_ulp_in_a_kernel_of_one_side_is_seen(tmp_path, monkeypatch):
    """In a factor of its exponential function."""
    model, options = model_of(), options_of()
    rollouts = exact_rollouts(model, options)
    assert mismatch_of(model, rollouts, options) == 0

    changed = tmp_path / "native"
    shutil.copytree(compiler.FOLDER, changed)
    header = changed / "vectors.h"
    text = header.read_text(encoding="utf-8")
    factor = "5.0000001201e-1f"
    assert text.count(factor) == 1
    above = math.ulp(0.5) * 2**29  # an ulp of fp32
    header.write_text(text.replace(factor, f"{0.5 + above!r}f"), encoding="utf-8")
    monkeypatch.setattr(compiler, "FOLDER", changed)
    library = compiler.compiled("decode.c", compiler.SIGNATURES)
    library.max_rows.restype = compiler.ctypes.c_int64
    monkeypatch.setattr(operations, "load_library", lambda: library)
    assert 0 < mismatch_of(model, rollouts, options) < 1e-4


def test_gradients_are_those_of_the_ordinary_mode():
    """After the policy has moved, so that ratios are not 1."""
    model, options = model_of(), options_of(kl=0.3)
    rollouts = exact_rollouts(model, options)
    rollouts.reference = torch.where(rollouts.targets == IGNORE_INDEX, 0.0, rollouts.sampled - 0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    found = []
    for engine in (None, EngineLogProbs(BYTES, 1.0)):
        objective = GRPOLoss(options, BYTES.vocab_size, engine)
        objective.rollouts = rollouts
        objective.mismatch = torch.zeros(())
        objective.parts = SimpleNamespace(model=model, kernels=Kernels({}))
        loss = objective(model, batch_of(rollouts, ROWS))
        assert float(objective.mismatch) > 1e-3
        found.append(torch.autograd.grad(loss.sum, list(model.parameters())))
    largest = max(float(each.abs().max()) for each in found[0])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * largest)


def test_values_of_one_computation_with_the_gradient_of_another():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 4)
    y = with_values(x.sin(), values)
    assert torch.equal(y, values.double())
    (gradient,) = torch.autograd.grad((y**2).sum(), x)
    torch.testing.assert_close(gradient, 2 * values.double() * x.detach().cos())


# Option of Generator


def test_texts_have_the_same_bits_in_any_batch():
    model = model_of()
    generator = Generator(model, BYTES, exact=True)
    assert generator.is_batch_invariant
    prompts = ["a", "the cat", "b" * 40, "the dog"]
    params = [SamplingParams(max_new_tokens=12, seed=seed) for seed in range(4)]
    together = generator.generate(prompts, params)
    for prompt, one, completion in zip(prompts, params, together):
        (alone,) = generator.generate([prompt], [one])
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == completion.logprobs


def test_requests_of_a_continuous_batch_have_the_bits_of_each_alone():
    """Which share passes of any sizes, as in the server."""
    numbers = random.Random(0)
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160)
    generator = Generator(model, TOKENIZER, exact=True)
    requests = [(numbers.choice(TEXTS), random_params(numbers, index)) for index in range(12)]
    sequences = run_batch(generator, requests, numbers)
    assert len(sequences) == len(requests)
    check_equal(generator, sequences)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 8}, "exact cannot be combined with window"),
        ({"cache_bits": 8}, "exact cannot be combined with cache_bits"),
        ({"compile": False}, "exact needs kernels in C; leave out compile=False"),
        ({"use_cache": False}, "exact needs the KV cache"),
        ({"early_exit": 0.9}, "options of two features ask for a decoder each"),
        ({"dtype": "fp16"}, "kernels in C support fp32 and bf16, not float16"),
    ],
    ids=str,
)
def test_other_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Generator(model_of(), BYTES, exact=True, **options)


def test_kernels_that_depend_on_the_batch_are_refused(monkeypatch):
    """As if the processor rounded a product otherwise when a pass has several rows."""
    monkeypatch.setattr(proof, "_kept", {})
    run = operations.Workspace.run

    def run_unlike(self, steps, n_rows, *more):
        run(self, steps, n_rows, *more)
        if n_rows > 1:
            last = steps[len(steps) - 1]
            operations.ctypes.cast(last.out, operations.POINTER(operations.c_float))[0] += 1

    monkeypatch.setattr(operations.Workspace, "run", run_unlike)
    model = model_of()
    assert not exact_decoder.has_equal_rows(model, torch.float32)
    with pytest.raises(UserError, match="exact"):
        Generator(model, BYTES, exact=True)


# Whole runs


EXACT = ["train.exact=true", "train.precision=fp32"]


@pytest.mark.parametrize("updates", [1, 2])
def test_runs_have_no_mismatch_and_go_on_to_the_same_bits(start, updates):
    """Of the first update with the same answers; and at first nothing differs from the reference.
    The second one has moved."""
    folder, overrides = start
    more = [*EXACT, f"train.grpo.updates={updates}", "train.max_steps=6"]
    whole = train(folder, f"exact-{updates}", overrides, *more)
    lines = [line for line in read_metrics(whole) if "reward" in line]
    assert len(lines) == 6
    assert all(line["policy_mismatch"] == 0 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    assert lines[0]["policy_kl"] == 0
    assert lines[-1]["policy_kl"] > 0
    for step in (1, 3):
        cut_off = shutil.copytree(whole, folder / f"exact-{updates}-{step}")
        for path in (cut_off / "checkpoints").iterdir():
            if int(path.name.split("-")[1]) > step:
                shutil.rmtree(path)
        assert_same_run(whole, train(folder, cut_off.name, overrides, *more), 6)


@pytest.mark.more
@pytest.mark.parametrize(
    "more", [[], ["train.lora_rank=4"], ["train.grpo.temperature=0.8"]], ids=str
)
def test_no_mismatch_in_200_steps(start, more):
    folder, overrides = start
    name = "-".join(["long", *more])
    whole = train(folder, name, overrides, *EXACT, "train.max_steps=200", *more)
    lines = [line for line in read_metrics(whole) if "reward" in line]
    assert len(lines) == 200
    assert all(line["policy_mismatch"] == 0 for line in lines)


def test_two_ranks_have_no_mismatch(start, tmp_path):
    _, overrides = start
    check_ranks(tmp_path, [*overrides, *EXACT])
    for n in (1, 2):
        lines = [line for line in read_metrics(tmp_path / f"ranks-{n}") if "reward" in line]
        assert lines
        assert all(line["policy_mismatch"] == 0 for line in lines)


CONFLICTS = {
    "train.precision=bf16": "train.exact needs train.precision=fp32",
    "train.device=cuda": "train.exact needs train.device=cpu",
    "train.grpo=null": "train.exact needs train.grpo; set train.grpo.rewards",
}


@pytest.mark.parametrize("more", CONFLICTS)
def test_mistakes_are_one_line(start, tmp_path, more):
    _, overrides = start
    done = run_script("train.py", BASE, *overrides, f"run.dir={tmp_path}", *EXACT, more)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert CONFLICTS[more] in last


def test_a_model_that_the_kernels_do_not_know_is_refused(start, tmp_path):
    folder, overrides = start
    known, tokenizer = load(folder / "base")
    config = known.config.to_dict() | {"attention": "window(8)"}
    save(Thinker(ThinkerConfig.from_dict(config)), tokenizer, tmp_path / "windows")
    own = [each for each in overrides if not each.startswith("run.init_from=")]
    own += [f"run.init_from={tmp_path / 'windows'}", f"run.dir={tmp_path / 'run'}", *EXACT]
    done = run_script("train.py", BASE, *own)
    assert done.returncode == 2, done.stderr
    assert "exact needs full attention in all layers" in done.stderr.strip().splitlines()[-1]


def test_other_bits_end_a_run(start, monkeypatch):
    """As if another processor had sampled the answers. Without train.exact the run goes on."""
    folder, overrides = start
    rows = rollouts_module.answer_rows

    def rows_of_another_processor(*arguments):
        inputs, targets, sampled = rows(*arguments)
        return inputs, targets, sampled.nextafter(torch.zeros(()))

    more = [*EXACT, "train.max_steps=3"]
    config = load_config(BASE, [*overrides, f"run.dir={folder / 'moved'}", *more])
    with monkeypatch.context() as patch:
        patch.setattr(rollouts_module, "answer_rows", rows_of_another_processor)
        with pytest.raises(RunError, match="step 1: ln P of a sampled token differs by .*exact"):
            build_trainer(config).train()
    train(folder, "moved", overrides, *more, "train.exact=false")
