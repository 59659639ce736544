"""A run that learns from rewards, killed at any moment, ends with the same bits."""

import json
import random
import signal

import pytest
from conftest import ROOT, run_script
from training_contract import BASE, SMALL
from training_runs import assert_same_run, read_metrics

from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("one_thread")]
STEPS = 4
MOMENTS = 5  # of each kind
# Kills the process at an event of a kind: a sampled token, a reply of the verifiers, a pass of
# training, or a file of a checkpoint. Without a number it counts the events. Not decoding steps, of
# which a fast machine takes several at a time.
KILL = """
import os, re, runpy, signal, sys
from thinker.features.rewards.grpo import GRPOLoss
from thinker.features.rewards.verifiers.verifier_process import VerifierProcess
from thinker.generation.sequence import Sequence

kind, number, counts = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.argv = sys.argv[4:]
events = dict.fromkeys(["rollout", "reward", "update", "save"], 0)


def event(name):
    events[name] += 1
    if name == kind and events[name] == number:
        os.kill(os.getpid(), signal.SIGKILL)


def counted(owner, method, name):
    plain = getattr(owner, method)

    def wrapper(*args, **options):
        event(name)
        return plain(*args, **options)

    setattr(owner, method, wrapper)


extend = Sequence.extend


def extend_and_count(self, sampled):
    before = len(self.completion.token_ids)
    result = extend(self, sampled)
    for _ in self.completion.token_ids[before:]:
        event("rollout")
    return result


def hook(name, arguments):
    if name == "open" and re.search(r"checkpoints/\\.step-", str(arguments[0])):
        event("save")


Sequence.extend = extend_and_count
counted(VerifierProcess, "_receive", "reward")
counted(GRPOLoss, "__call__", "update")
sys.addaudithook(hook)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if counts:
        open(counts, "w").write(repr(events))
"""
SCORE = 'def score(answer):\n    return sum(c in "aeiou" for c in answer.text)\n'


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A model to start from, prompts and a verifier."""
    folder = tmp_path_factory.mktemp("kills")
    cache = f"data.cache_dir={folder / 'cache'}"
    base = [*SMALL, cache, "data.seq_len=64", f"run.dir={folder / 'base'}", "train.max_steps=5"]
    assert build_trainer(load_config(BASE, base)).train() == 0
    rows = [{"prompt": f"Say {n}", "completion": f"It is {n}."} for n in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_rewards.py").write_text(SCORE)
    (folder / "kill.py").write_text(KILL)
    kept = [each for each in SMALL if not each.startswith(("model.", "data."))]
    options = [
        *kept,
        cache,
        "data.source=jsonl",
        f"data.path={folder / 'rows.jsonl'}",
        "data.max_documents=null",
        "data.tokenizer=null",
        f"data.chat_template={ROOT / 'configs' / 'chat.jinja'}",
        "data.val_fraction=0.2",
        "data.seq_len=48",
        f"run.init_from={folder / 'base'}",
        f"train.grpo.rewards={folder / 'my_rewards.py'}:score",
        "train.grpo.max_new_tokens=8",
        "train.grpo.group_size=2",
        "train.grpo.updates=2",
        "train.grpo.kl=0.1",
        "train.save_every=1",
        "train.async_save=false",
        "train.log_every=1",
        f"train.max_steps={STEPS}",
    ]
    return folder, options


def train(folder, options, kind="none", number=0, counts=""):
    """Run train.py under the script that kills."""
    script = folder / "kill.py"
    return run_script(script, kind, number, counts, ROOT / "train.py", BASE, *options)


@pytest.fixture(scope="module")
def whole(overrides):
    """The run that nobody disturbs, and its numbers of events."""
    folder, options = overrides
    run, counts = folder / "whole", folder / "counts"
    done = train(folder, [*options, f"run.dir={run}"], counts=counts)
    assert done.returncode == 0, done.stderr
    events = eval(counts.read_text())
    assert min(events.values()) >= STEPS // 2, events
    return run, events


@pytest.mark.parametrize("kind", ["rollout", "reward", "update", "save"])
def test_a_killed_run_goes_on_to_the_same_bits(overrides, whole, kind):
    folder, options = overrides
    run, events = whole
    numbers = random.Random(kind).sample(range(1, events[kind] + 1), min(MOMENTS, events[kind]))
    for number in numbers:
        own = [*options, f"run.dir={folder / f'{kind}-{number}'}"]
        done = train(folder, own, kind, number)
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = train(folder, own)
        assert done.returncode == 0, done.stderr
        killed = folder / f"{kind}-{number}"
        assert len([line for line in read_metrics(killed) if "reward" in line]) == STEPS
        assert_same_run(run, killed, STEPS)
