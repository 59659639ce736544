"""GRPO: its gradient against a formula that runs every answer alone, the difference between
sampling and training, a known optimum, and whole runs."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_model, run_script
from safetensors.torch import load_file, save_file
from training_contract import BASE, SMALL, check_ranks
from training_runs import assert_same_run, read_metrics

from thinker.checkpoint import list_checkpoints
from thinker.data.batches.prefetch import Batch
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.rewards.advantages import group_advantages
from thinker.features.rewards.grpo import GRPOLoss
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.rollouts import Sampler, chosen_prompts, make_rollouts
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
BYTES = make_tokenizer("byte", [])
SEQ_LEN = 32
GROUP, N_ANSWERS = 4, 16
WORDS = ("red", "old cat", "a", "blue")
PROMPTS = [Prompt([BYTES.bos_id, *BYTES.encode(word)], word, {}) for word in WORDS]


class CountVowels:
    """Judges answers without a process of its own."""

    names = ("vowels",)

    def judge(self, answers):
        return [{"vowels": {"reward": sum(c in "aeiou" for c in each.text)}} for each in answers]


def options_of(**options):
    return GRPOConfig(rewards={"vowels": 1.0}, group_size=GROUP, max_new_tokens=9, **options)


@pytest.fixture(scope="module")
def model():
    return random_model(vocab_size=BYTES.vocab_size, std=0.15)


def sampler_of(options):
    return Sampler(options, BYTES, CountVowels(), seed=1)


def rollouts_of(model, options, first=0):
    return make_rollouts(sampler_of(options), model, PROMPTS, first, N_ANSWERS, SEQ_LEN)


def objective_of(options, rollouts):
    objective = GRPOLoss(options, BYTES.vocab_size)
    objective.rollouts = rollouts
    objective.mismatch = torch.zeros(())
    return objective


def batch_of(rollouts, rows):
    n_targets = int((rollouts.targets != IGNORE_INDEX).sum())
    windows = torch.tensor(rows)
    return Batch(rollouts.inputs[rows], rollouts.targets[rows], n_targets, windows=windows)


def test_answers_are_those_of_a_generator_with_their_seed(model):
    """Each alone, whatever the batch; and every prompt is answered in turn."""
    rollouts = rollouts_of(model, options_of(), first=16)
    numbers = chosen_prompts(len(PROMPTS), 4, 4, seed=1)
    assert sorted(numbers) == [0, 1, 2, 3]
    generator = Generator(model, BYTES)
    for row in range(N_ANSWERS):
        prompt = PROMPTS[numbers[row // GROUP]]
        params = SamplingParams(max_new_tokens=9, seed=(1 << 32) + 16 + row)
        (alone,) = generator.generate([prompt.text], params, [prompt.tokens])
        is_target = rollouts.targets[row] != IGNORE_INDEX
        assert rollouts.targets[row][is_target].tolist() == alone.token_ids
        n = len(prompt.tokens) + len(alone.token_ids) - 1
        assert rollouts.inputs[row, :n].tolist() == [*prompt.tokens, *alone.token_ids][:-1]
        expected = torch.tensor(alone.logprobs)
        torch.testing.assert_close(rollouts.sampled[row][is_target], expected, rtol=0, atol=1e-5)


def plain_loss(model, rollouts, options):
    """The definition, with a pass for each answer."""
    total = 0.0
    n_used = int(rollouts.is_used.sum())
    for row in range(N_ANSWERS):
        if not rollouts.is_used[row]:
            continue
        is_target = rollouts.targets[row] != IGNORE_INDEX
        n = int(is_target.nonzero()[-1]) + 1
        log_probs = model(rollouts.inputs[row : row + 1, :n])[0].log_softmax(-1)
        taken = log_probs.gather(1, rollouts.targets[row, :n].clamp(min=0)[:, None])[:, 0]
        answer = 0.0
        for place in is_target.nonzero()[:, 0].tolist():
            ratio = (taken[place] - rollouts.sampled[row, place]).exp()
            advantage = rollouts.advantages[row]
            clipped = torch.clamp(ratio, 1 - options.clip, 1 + options.clip)
            gain = torch.min(ratio * advantage, clipped * advantage)
            difference = taken[place] - rollouts.reference[row, place]
            penalty = ratio.detach() * difference**2 / 2
            answer = answer + options.kl * penalty - gain
        length = int(is_target.sum()) if options.normalize == "group" else options.max_new_tokens
        total = total + answer / length
    return total / n_used


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("normalize", ["group", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_loss_and_gradients_are_those_of_each_answer_alone(model, baseline, normalize, kl):
    """After the policy has moved, however the batch is divided."""
    options = options_of(baseline=baseline, normalize=normalize, kl=kl)
    rollouts = rollouts_of(model, options)
    moved = random_model(vocab_size=BYTES.vocab_size, std=0.15).double()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    rollouts.sampled = rollouts.sampled.double()
    rollouts.advantages = rollouts.advantages.double()
    rollouts.reference = torch.where(rollouts.targets == IGNORE_INDEX, 0.0, rollouts.sampled - 0.3)
    assert 0 < int(rollouts.is_used.sum()) <= N_ANSWERS
    parameters = list(moved.parameters())
    expected = plain_loss(moved, rollouts, options)
    wanted = torch.autograd.grad(expected, parameters)
    largest = max(float(each.abs().max()) for each in wanted)
    for size in (1, 5, N_ANSWERS):
        objective = objective_of(options, rollouts)
        total, n_targets = 0.0, 0
        for start in range(0, N_ANSWERS, size):
            batch = batch_of(rollouts, list(range(start, min(start + size, N_ANSWERS))))
            loss = objective(moved, batch)
            total = total + loss.sum / batch.n_targets
            n_targets += int(loss.n_targets)
        assert n_targets == batch.n_targets
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
        for gradient, each in zip(torch.autograd.grad(total, parameters), wanted):
            torch.testing.assert_close(gradient, each, rtol=0, atol=1e-6 * largest)


MODELS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "window": {"attention": ["window(8)", "full"]},
    "token shift": {"token_shift": True},
    "learned positions": {"positions": "learned"},
    "soft cap": {"attn_logit_softcap": 3.0},
    "head bias": {"head_bias": True},
    "logit scale": {"logit_scale": 0.5},
    "value embeddings": {"value_embeddings": True},
    "more ids than the tokenizer": {"vocab_size": BYTES.vocab_size + 50},
}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("name", MODELS)
def test_sampling_and_training_agree_for_any_model(name, temperature):
    """To a rounding error in fp32, by kernels in C and by torch."""
    model = random_model(std=0.15, **{"vocab_size": BYTES.vocab_size, **MODELS[name]})
    options = options_of(temperature=temperature)
    rollouts = rollouts_of(model, options)
    objective = objective_of(options, rollouts)
    loss = objective(model, batch_of(rollouts, list(range(N_ANSWERS))))
    assert 0 <= float(objective.mismatch) < 2e-5
    if model.config.vocab_size > BYTES.vocab_size:
        loss.sum.backward()
        assert model.lm_head.weight.grad[: BYTES.vocab_size].abs().max() > 0
        assert not model.lm_head.weight.grad[BYTES.vocab_size :].any()
    other = objective_of(options_of(temperature=temperature * 1.01), rollouts)
    other(model, batch_of(rollouts, list(range(N_ANSWERS))))
    assert float(other.mismatch) > 1e-3


def test_anything_that_differs_on_one_side_is_seen(model):
    options = options_of()
    rollouts = rollouts_of(model, options)
    batch = batch_of(rollouts, list(range(N_ANSWERS)))
    objective = objective_of(options, rollouts)
    objective(model, batch)
    assert 0 <= float(objective.mismatch) < 2e-5

    place = tuple((rollouts.targets != IGNORE_INDEX).nonzero()[7].tolist())
    rollouts.sampled[place] += 1e-3
    objective(model, batch)
    assert float(objective.mismatch) == pytest.approx(1e-3, rel=0.05)
    rollouts.sampled[place] -= 1e-3
    with torch.no_grad():
        model.norm.weight[3] *= 1.01
    objective = objective_of(options, rollouts)
    objective(model, batch)
    assert float(objective.mismatch) > 1e-4
    with torch.no_grad():
        model.norm.weight[3] /= 1.01


def test_the_policy_of_a_bandit_is_the_known_optimum():
    """One token to one prompt: the policy becomes the reference times exp(reward / weight),
    normalized."""
    n_tokens, weight, n_answers = 12, 0.5, 512
    model = random_model(
        vocab_size=n_tokens, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, std=0.2
    )
    rewards = torch.linspace(0, 1, n_tokens)[torch.randperm(n_tokens)]
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        reference = model(prompt)[0, -1].log_softmax(-1)
    optimum = (reference + rewards / weight).softmax(-1)
    options = options_of(normalize="none", kl=weight).model_copy(update={"max_new_tokens": 1})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    n_steps = 300
    for step in range(n_steps):
        with torch.no_grad():
            log_probs = model(prompt)[0, -1].log_softmax(-1)
            tokens = torch.multinomial(log_probs.exp(), n_answers, True, generator=generator)
        groups = rewards[tokens].view(-1, n_answers)
        rollouts = SimpleNamespace(
            targets=tokens[:, None],
            sampled=log_probs[tokens][:, None],
            reference=reference[tokens][:, None],
            advantages=group_advantages(groups, "mean", "none")[0],
            is_used=torch.ones(n_answers, dtype=torch.bool),
        )
        objective = objective_of(options, rollouts)
        inputs = prompt.expand(n_answers, 1)
        rows = torch.arange(n_answers)
        batch = Batch(inputs, tokens[:, None], n_answers, windows=rows)
        loss = objective(model, batch)
        optimizer.zero_grad()
        (loss.sum / n_answers).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / n_steps)
        optimizer.step()
        assert float(objective.mismatch) < 1e-5
    with torch.no_grad():
        found = model(prompt)[0, -1].softmax(-1)
    assert float((found - optimum).abs().sum() / 2) < 0.02
    assert float((reference.exp() - optimum).abs().sum() / 2) > 0.2


# Whole runs


MY_REWARDS = """
def score(answer):
    if len(answer.text) % 3 == 1:
        raise ValueError("no idea")
    return {"codes": sum(ord(c) % 5 for c in answer.text), "hint": answer.row["hint"] / 10}
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a model to start from, prompts, a verifier, and the overrides of a run."""
    folder = tmp_path_factory.mktemp("grpo")
    cache = f"data.cache_dir={folder / 'cache'}"
    base = [*SMALL, cache, "data.seq_len=64", f"run.dir={folder / 'base'}", "train.max_steps=5"]
    assert build_trainer(load_config(BASE, base)).train() == 0
    rows = [
        {"prompt": f"Say {number}", "completion": f"It is {number}.", "hint": number % 3}
        for number in range(30)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_rewards.py").write_text(MY_REWARDS)
    kept = [each for each in SMALL if not each.startswith(("model.", "data."))]
    overrides = [
        *kept,
        cache,
        "data.source=jsonl",
        f"data.path={folder / 'rows.jsonl'}",
        "data.max_documents=null",
        "data.tokenizer=null",
        f"data.chat_template={ROOT / 'configs' / 'chat.jinja'}",
        "data.assistant_only_loss=true",
        "data.val_fraction=0.2",
        "data.seq_len=48",
        f"run.init_from={folder / 'base'}",
        f"train.grpo.rewards={{{folder / 'my_rewards.py'}:score: 1}}",
        "train.grpo.max_new_tokens=8",
        "train.grpo.group_size=2",
        "train.grpo.kl=0.1",
        "train.log_every=1",
        "optimizer.lr=0.001",
    ]
    return folder, overrides


def train(folder, name, overrides, *more):
    """Train; returns the run directory."""
    config = load_config(BASE, [*overrides, f"run.dir={folder / name}", *more])
    assert build_trainer(config).train() == 0
    return folder / name


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_goes_on_to_the_same_bits(start, updates):
    """After any step, also between two updates with the same answers."""
    folder, overrides = start
    more = [f"train.grpo.updates={updates}", "train.max_steps=6"]
    whole = train(folder, f"whole-{updates}", overrides, *more)
    lines = [line for line in read_metrics(whole) if "reward" in line]
    assert len(lines) == 6
    assert all(line["policy_mismatch"] < 2e-5 for line in lines)
    assert all(line["groups_with_signal"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert (whole / "reward.png").stat().st_size > 5000
    name = f"reward/{folder / 'my_rewards.py'}:score"
    assert all(line[f"{name}/hint"] <= 0.2 for line in lines)
    assert any(line["answers_failed"] > 0 for line in lines)
    for step in (1, 3):
        cut_off = shutil.copytree(whole, folder / f"cut-{updates}-{step}")
        for path in (cut_off / "checkpoints").iterdir():
            if int(path.name.split("-")[1]) > step:
                shutil.rmtree(path)
        assert_same_run(whole, train(folder, cut_off.name, overrides, *more), 6)


def test_the_best_checkpoint_has_the_highest_reward(start):
    """Also if the run goes on, from a step before it and from one after it."""
    folder, overrides = start
    more = ["train.max_steps=6", "train.eval_every=1", "optimizer.lr=0.02"]
    whole = train(folder, "best", overrides, *more)
    found = {
        line["step"]: line["val_reward"] for line in read_metrics(whole) if "val_reward" in line
    }
    best = max(found, key=found.get)
    (path,) = list_checkpoints(whole / "checkpoints", "best")
    assert int(path.name.split("-")[1]) == best
    state = json.loads((path / "state.json").read_text())
    assert state["rank"] == -found[best]
    for step in (1, 5):
        cut_off = shutil.copytree(whole, folder / f"best-{step}")
        for each in list_checkpoints(cut_off / "checkpoints"):
            if int(each.name.split("-")[1]) > step:
                shutil.rmtree(each)
        train(folder, cut_off.name, overrides, *more)
        assert [each.name for each in list_checkpoints(cut_off / "checkpoints", "best")] == [
            path.name
        ]


def test_micro_batches_change_only_rounding(start):
    folder, overrides = start
    lines = []
    for size in (1, 4):
        more = [f"train.micro_batch_size={size}", "train.max_steps=2"]
        run = train(folder, f"micro-{size}", overrides, *more)
        lines.append([line for line in read_metrics(run) if "reward" in line])
    for one, two in zip(*lines):
        assert one.keys() == two.keys()
        for key in one.keys() & {"train_loss", "policy_loss", "grad_norm", "policy_kl", "reward"}:
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-6)


def test_two_ranks_learn_what_one_does(start, tmp_path):
    """They share the prompts, and have the answers of one."""
    _, overrides = start
    check_ranks(tmp_path, overrides)
    one, two = (read_metrics(tmp_path / f"ranks-{n}") for n in (1, 2))
    for alone, together in zip(one, two):
        for key in alone.keys() & {"reward", "policy_loss", "answer_tokens", "policy_entropy"}:
            assert together[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5)


def test_a_mismatch_stops_the_run(start):
    folder, overrides = start
    more = ["train.grpo.max_mismatch=1e-12", f"run.dir={folder / 'stopped'}"]
    done = run_script("train.py", BASE, *overrides, *more)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "between sampling and training, more than train.grpo.max_mismatch=1e-12" in last


TALES = (
    "data.source=tales data.path=null data.max_documents=20 data.chat_template=null "
    "data.assistant_only_loss=false "
)
CONFLICTS = {
    "train.batch_size=3": "train.batch_size (3) is not a multiple of train.grpo.group_size (2)",
    "data.num_workers=2": "cannot be combined with data.num_workers=2",
    "data.document_masking=true": "cannot be combined with data.document_masking=true",
    "data.shift_windows=true": "cannot be combined with data.shift_windows=true",
    "data.val_tokens=a.bin": "cannot be combined with data.val_tokens",
    "train.patience=3": "cannot be combined with train.patience",
    "model.dropout=0.1": "cannot be combined with model.dropout",
    "train.grpo.rewards={}": "train.grpo.rewards",
    "train.grpo.group_size=1": "train.grpo.group_size",
    "train.grpo.temperature=0.7 train.lora_rank=4": "temperature=0.7 cannot be combined with",
    "train.grpo.max_new_tokens=48": "is short enough",
    "train.grpo.rewards=exat": "did you mean exact?",
    "train.grpo.rewards=regex": "verifiers could not judge any of the first answers",
    "train.grpo.prompt_tokens=3": "prompt_tokens (in thinker eval, --prompt-tokens) is for plain",
    f"{TALES} train.grpo.prompt_tokens=5000": "is as long as train.grpo.prompt_tokens=5000",
    "train.grpo=null data.source=prompts": "data.source=prompts needs train.grpo",
    "train.grpo.rewards=absent.py:score": "absent.py is not a file",
}


@pytest.mark.parametrize("more", CONFLICTS)
def test_mistakes_are_one_line(start, tmp_path, more):
    _, overrides = start
    done = run_script("train.py", BASE, *overrides, f"run.dir={tmp_path / 'run'}", *more.split())
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert CONFLICTS[more] in last


def test_lora_learns_and_resumes(start):
    """The adapters are sampled as they are trained."""
    folder, overrides = start
    more = ["train.lora_rank=4", "train.max_steps=4", "train.grpo.updates=2"]
    whole = train(folder, "lora", overrides, *more)
    lines = [line for line in read_metrics(whole) if "reward" in line]
    assert all(line["policy_mismatch"] < 2e-5 for line in lines)
    cut_off = shutil.copytree(whole, folder / "lora-cut")
    for path in (cut_off / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > 1:
            shutil.rmtree(path)
    assert_same_run(whole, train(folder, "lora-cut", overrides, *more), 4)


def test_limits_may_change_when_a_run_goes_on(start):
    folder, overrides = start
    run = train(folder, "limits", overrides, "train.max_steps=2")
    more = ["train.grpo.timeout=20", "train.grpo.max_mismatch=1"]
    assert train(folder, "limits", overrides, "train.max_steps=3", *more) == run
    for key, value in (("kl", 0.2), ("eval_prompts", 3)):
        changed = [f"run.dir={run}", "train.max_steps=4", f"train.grpo.{key}={value}"]
        done = run_script("train.py", BASE, *overrides, *changed)
        assert done.returncode == 2
        assert f"train.grpo.{key} is {value}, but the run in" in done.stderr


BREAKS = """
from pathlib import Path

calls = Path(__file__).with_name("calls")


def score(answer):
    n = int(calls.read_text() or 0) + 1 if calls.exists() else 1
    calls.write_text(str(n))
    if n == 21:  # the first answer of the sixth step
        Path(__file__).write_text("broken(")
        raise SystemExit(1)
    return len(answer.text)
"""


def test_runs_of_earlier_versions_go_on(start, monkeypatch):
    """They have not saved what later versions compare."""
    folder, overrides = start
    own = [*overrides, "train.grpo.updates=2"]
    whole = GRPOLoss.state_dict

    def earlier(self):
        added = ("grpo_prompts", "grpo_verifiers", "grpo_has_signal")
        return {key: value for key, value in whole(self).items() if key not in added}

    with monkeypatch.context() as patch:
        patch.setattr(GRPOLoss, "state_dict", earlier)
        run = train(folder, "earlier", own, "train.max_steps=2")
    assert train(folder, "earlier", own, "train.max_steps=3") == run


def test_a_verifier_that_has_changed_is_named(start, tmp_path):
    _, overrides = start
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    own = [*overrides, f"train.grpo.rewards={path}:score", f"run.dir={tmp_path / 'run'}"]
    notice = f"{path} has changed since the last save"
    for n_steps, text, is_told in ((1, GOOD, False), (2, GOOD, False), (3, f"{GOOD}\n", True)):
        path.write_text(text)
        done = run_script("train.py", BASE, *own, f"train.max_steps={n_steps}")
        assert done.returncode == 0, done.stderr
        assert (notice in done.stderr) == is_told


def test_samples_are_answers_to_a_prompt(start):
    """To the first one that is held out, in all forms of prompts."""
    folder, overrides = start
    more = ["train.max_steps=1", "train.sample_every=1"]
    run = train(folder, "samples", overrides, *more)
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert re.fullmatch(r"Say \d+", sample["prompt"])
    texts = [*more, *TALES.split(), "train.grpo.prompt_tokens=6", "train.grpo.rewards=length"]
    run = train(folder, "samples-of-texts", overrides, *texts)
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert len(sample["prompt"]) == 6


def test_texts_are_evaluated_from_their_beginning(start):
    """As they are answered, and as the model was trained on them."""
    folder, overrides = start
    texts = [*TALES.split(), "train.grpo.prompt_tokens=6", "train.grpo.rewards=length"]
    run = train(folder, "packing", overrides, *texts, "train.max_steps=1")
    config = load_config(run / "config.yaml", [])
    assert config.data.packing == "documents"


def test_a_few_short_prompts_are_enough(start, tmp_path):
    """Their tokens fill no sequence, and need not."""
    _, overrides = start
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": word, "completion": "!", "hint": 1} for word in ("a", "b", "c")]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = [f"data.path={path}", "data.seq_len=200", "model.max_seq_len=200", "train.max_steps=1"]
    done = run_script("train.py", BASE, *overrides, *own, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr


def test_rows_that_have_changed_are_refused(start, tmp_path):
    """Verifiers read them, also the columns that no token comes from."""
    folder, overrides = start
    path = tmp_path / "rows.jsonl"
    text = (folder / "rows.jsonl").read_text()
    path.write_text(text)
    own = [*overrides, f"data.path={path}", f"run.dir={tmp_path / 'run'}"]
    assert run_script("train.py", BASE, *own, "train.max_steps=1").returncode == 0
    path.write_text(text.replace('"hint": 1', '"hint": 2'))
    done = run_script("train.py", BASE, *own, "train.max_steps=2")
    assert done.returncode == 2
    assert "the rows that verifiers read, have changed" in done.stderr.splitlines()[-1]
    path.write_text(text)
    assert run_script("train.py", BASE, *own, "train.max_steps=2").returncode == 0


GOOD = """
def score(answer):
    return len(answer.text)
"""


def test_a_run_that_could_not_sample_goes_on_to_the_same_bits(start, tmp_path):
    """It does not learn from the answers of the step before, and all other callbacks have seen the
    step."""
    _, overrides = start
    path = tmp_path / "mine.py"
    own = [*overrides, f"train.grpo.rewards={path}:score", "train.max_steps=8"]
    own += ["train.grpo.eval_prompts=0", "train.batch_size=4", "train.ema_decay=0.9"]
    path.write_text(GOOD)
    done = run_script("train.py", BASE, *own, f"run.dir={tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    path.write_text(BREAKS)
    own.append(f"run.dir={tmp_path / 'run'}")
    done = run_script("train.py", BASE, *own)
    assert done.returncode == 2, done.stderr
    assert "cannot judge answers" in done.stderr.splitlines()[-1]
    path.write_text(GOOD)
    done = run_script("train.py", BASE, *own)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "run", 8)


PRINTS = """
def score(answer):
    print("judged")
    return len(answer.text)
"""


def test_a_finished_run_that_is_started_again_samples_nothing(start, tmp_path):
    _, overrides = start
    path = tmp_path / "prints.py"
    path.write_text(PRINTS)
    own = [*overrides, f"train.grpo.rewards={path}:score", f"run.dir={tmp_path / 'run'}"]
    own.append("train.max_steps=2")
    logs = []
    for _ in range(2):
        done = run_script("train.py", BASE, *own)
        assert done.returncode == 0, done.stderr
        assert "nothing was learned" not in done.stderr
        logs.append((tmp_path / "run" / "verifiers.log").read_text())
    assert logs[0].count("judged") > 0
    assert logs[1] == logs[0]


def test_a_reference_with_other_weights_is_refused(start, tmp_path):
    folder, overrides = start
    own = [each for each in overrides if not each.startswith("run.init_from=")]
    shutil.copytree(folder / "base", tmp_path / "base")
    own += [f"run.init_from={tmp_path / 'base'}", f"run.dir={tmp_path / 'run'}"]
    assert run_script("train.py", BASE, *own, "train.max_steps=2").returncode == 0
    (checkpoint,) = list_checkpoints(tmp_path / "base" / "checkpoints")[-1:]
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][0] += 1e-3
    save_file(tensors, path)
    done = run_script("train.py", BASE, *own, "train.max_steps=3")
    assert done.returncode == 2
    assert "has other weights than when this run started" in done.stderr.splitlines()[-1]


def test_a_run_that_learns_nothing_says_so_early(start, tmp_path):
    _, overrides = start
    own = [*overrides, f"run.dir={tmp_path / 'run'}", "train.max_steps=12"]
    done = run_script("train.py", BASE, *own, "train.grpo.rewards=exact")
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "advice: nothing was learned" in line]
    assert len(lines) == 2
    assert lines[0].endswith("(in the first 10 steps)")


def test_a_run_that_learns_nothing_says_so(start, tmp_path):
    _, overrides = start
    own = [*overrides, f"run.dir={tmp_path / 'run'}", "train.max_steps=2"]
    done = run_script("train.py", BASE, *own, "train.grpo.rewards=exact")
    assert done.returncode == 0
    assert done.stderr.count("advice: nothing was learned") == 1
    assert ", reward 0.000, " in done.stderr  # beside the progress bar
    assert "these answers were cut" in done.stdout, done.stdout
