"""Files from strangers end in clean errors: damaged bytes, and well-formed files that say absurd
things."""

import hashlib
import json
import random
import shutil

import pytest
import torch
import yaml
from conftest import ROOT, random_model
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from thinker import checkpoint
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.corpus.shards import DamagedShard, Shard
from thinker.data.tokenizers.tokenizer import FILE_NAME, Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interop import load
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config, validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.state.resume import restore
from thinker.training.state.run_state import RunState, read_state
from thinker.training.step import TrainingStep, build_model

NASTY = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**18), 1e308, -0.0, float("nan"), float("inf"), "",
         "x" * 9999, "\x00", "\ud800", "../../etc/passwd", "/dev/zero", [], {}, [[]], [[[[]]]] * 3, {"a": {"b": []}},
         "1e999", "NaN"]  # fmt: skip
BYTES = [b"", b"\x00", b"\xff" * 8, b"{", b"}" * 9, b"[" * 5000, b'{"a":' * 3000, b"NaN", b"9" * 5000, b"-1", b"null",
         b'"\\ud800"', b"\xed\xa0\x80", b"1e999", b"&a [*a]", b"\r\n",
         b"\xef\xbb\xbf", b"!!python/object/apply:os.system ['touch owned']",
         b"cposix\nsystem\n(S'touch owned'\ntR."]  # fmt: skip


def mutate(data, rng):
    """A few cuts, flips and insertions anywhere, more often near the beginning, where headers
    are."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = (
            rng.randrange(len(data) + 1)
            if rng.random() < 0.5
            else rng.randrange(min(len(data), 120) + 1)
        )
        kind, length = rng.randrange(6), rng.choice((1, 1, 2, 8, 64))
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + length :]
        elif kind == 2:
            data = data[:at] + rng.choice(BYTES) + data[at:]
        elif kind == 3:
            data = data[:at] + rng.randbytes(length) + data[at + length :]
        elif kind == 4:
            data = data[:at] + data[at : at + length] * rng.choice((2, 3, 50)) + data[at + length :]
        else:
            data = data[:at]
    return data


def distort(tree, rng):
    """The same tree with one value, key or branch replaced by something absurd."""
    tree = json.loads(json.dumps(tree))
    node, way = tree, []
    while isinstance(node, (dict, list)) and node and (not way or rng.random() < 0.8):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        way.append((node, key))
        node = node[key]
    if not way:
        return rng.choice(NASTY)
    holder, key = way[-1]
    kind = rng.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        holder[rng.choice(["", "x", "a.b", "\ud800", "../x", "n" * 300])] = holder.pop(key)
    elif kind == 1:
        del holder[key]
    else:
        holder[key] = rng.choice(NASTY)
    return tree


def distorted_json(data, rng):
    return json.dumps(distort(json.loads(data), rng), indent=1).encode() + b"\n"


def distorted_tokenizer(data, rng):
    """With a hash that agrees, so that what it says is looked at too."""
    content = json.loads(data)
    content.pop("sha256")
    content = distort(content, rng)
    if isinstance(content, dict):
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content).encode()


def distorted_yaml(data, rng):
    return yaml.safe_dump(distort(yaml.safe_load(data), rng)).encode("utf-8", "replace")


def distorted_tensors(data, rng):
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(distort(json.loads(data[8 : 8 + size]), rng)).encode("utf-8", "replace")
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


@pytest.fixture(scope="module")
def stage(tmp_path_factory, text_file):
    """A run with one checkpoint, and what reads each of its files; and a shard of tokens."""
    run = RunDirectory(tmp_path_factory.mktemp("fuzz") / "run")
    run.create()
    make_tokenizer("byte", []).save(run.path)
    model_config = random_model(vocab_size=257, d_model=16, n_layers=1).config
    config = validate_config({"train": {"precision": "fp32", "compile": False, "micro_batch_size": 2, "max_steps": 9},
                           "run": {"dir": "x"}})  # fmt: skip
    resolved = resolve_settings(config, model_config, torch.device("cpu"))
    step = TrainingStep(build_model(model_config, 1, torch.device("cpu")), resolved)
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    from thinker.data.batches.prefetch import Batch

    step(Batch(tokens, tokens, 18), 1.0)
    state = RunState(step=1, settings=resolved, pending_losses=1.5, scaler={"scale": 2.0})
    folder = run.checkpoints / "step-00000001"
    checkpoint.save(folder, step.model, state.model_dump(mode="json"), step.optimizers.tensors())
    (run.path / "config.yaml").write_bytes((ROOT / "configs" / "quickstart.yaml").read_bytes())
    run.log({"step": 1, "train_loss": 2.5})
    corpus = prepare_corpus(
        source="text", path=text_file, tokenizer="byte", cache_dir=run.path / "c", progress=False
    )
    shutil.copy(corpus.train.shards[0].path, run.path / "shard")
    random_state = torch.get_rng_state()
    yield {
        "manifest": (folder / "manifest.json", distorted_json, lambda: load(run.path)),
        "model_config": (
            folder / "config.json",
            distorted_json,
            lambda: checkpoint.load_model(folder),
        ),
        "state": (
            folder / "state.json",
            distorted_json,
            lambda: restore(folder, step, read_state(folder)),
        ),
        "model": (
            folder / "model.safetensors",
            distorted_tensors,
            lambda: checkpoint.load_model(folder),
        ),
        "training": (
            folder / "training.safetensors",
            distorted_tensors,
            lambda: restore(folder, step, RunState()),
        ),
        "config": (
            run.path / "config.yaml",
            distorted_yaml,
            lambda: load_config(run.path / "config.yaml", []),
        ),
        "tokenizer": (
            run.path / FILE_NAME,
            distorted_tokenizer,
            lambda: Tokenizer.load(run.path).encode("a é"),
        ),
        "metrics": (run.metrics, distorted_json, lambda: list(run.read_metrics())),
        "shard": (
            run.path / "shard",
            mutate,
            lambda: Shard.open(run.path / "shard", corpus.tokenizer),
        ),
    }
    torch.set_rng_state(random_state)


TARGETS = [
    "manifest",
    "model_config",
    "state",
    "model",
    "training",
    "config",
    "tokenizer",
    "metrics",
    "shard",
]


@pytest.mark.parametrize("target", TARGETS)
def test_only_clean_errors(stage, stress, target, monkeypatch, tmp_path):
    """100,800 inputs with make prove: half of them damaged bytes, half well-formed and absurd."""
    path, distorted, read = stage[target]
    whole, cut = path.read_bytes(), 200_000
    monkeypatch.chdir(tmp_path)
    read()
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=11_200 if stress else 150, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.integers(0, 2**63))
    def feed(seed):
        rng = random.Random(seed)
        data = distorted(whole, rng) if seed % 2 else mutate(whole[:cut], rng)
        path.write_bytes(data)
        try:
            read()
            outcomes["read"] += 1
        except (UserError, DamagedShard):
            outcomes["refused"] += 1

    try:
        feed()
    finally:
        path.write_bytes(whole)
    assert not (tmp_path / "owned").exists()
    print(f"{target}: {outcomes}")
    assert sum(outcomes.values()) >= (11_200 if stress else 150)
    assert outcomes["refused"] or target == "metrics"  # whose lines are left out instead
