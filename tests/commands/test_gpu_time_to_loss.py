"""Time to a loss on a GPU, rehearsed on the CPU: its corpus, its clocks, and what it writes."""

import argparse
import gzip
import io
import json
import lzma
import os
import random
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script, start_script
from scipy.stats import t

from thinker.benchmarks.baselines import PlainGPT
from thinker.benchmarks.gpu import gpu_corpus, gpu_time_to_loss
from thinker.benchmarks.gpu.gpu import Recorder
from thinker.benchmarks.gpu.gpu_corpus import Documents, order_of, unpack_corpus
from thinker.benchmarks.gpu.gpu_time_to_loss import Side, comparisons, train_plain, train_thinker
from thinker.benchmarks.gpu.plain_training import PlainTraining, lr_factor
from thinker.benchmarks.pages import pages
from thinker.benchmarks.pages.recorded import load_results
from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.document import Document
from thinker.data.text.sources import Source, open_source
from thinker.data.text.split import split_documents
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.config.sections import TrainConfig
from thinker.training.step import TrainingStep

BENCHMARK = ROOT / "scripts" / "benchmark.py"
pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "and",
    "then",
    "it",
    "was",
    "red",
    "big",
]


def prose(seed, n_words=300):
    """A text of random words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words)) + "\n"


def write_package(path, files):
    """A package of Debian: an archive of ar with data.tar.xz."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./usr/share/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())):
            file.write(
                f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
            )
            file.write(content + b"\n" * (len(content) % 2))


def tar_of(files):
    """A compressed archive in a package."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Two packages: manuals, and an archive of C files."""
    folder = tmp_path_factory.mktemp("packages")
    texts = {f"doc/{i}.txt": prose(i).encode() for i in range(120)}
    packed = gzip.compress(prose(1000).encode())
    texts |= {"doc/again.txt": prose(0).encode(), "doc/packed.txt.gz": packed}
    texts |= {"doc/short.txt": b"short", "doc/latin.txt": b"\xe9" * 600, "doc/x.png": b"x" * 600}
    write_package(folder / "manuals_1.0_all.deb", texts)
    code = {f"src/{i}.c": f"/* {prose(2000 + i)} */\n".encode() for i in range(60)}
    write_package(folder / "source_2.0_all.deb", {"src/source.tar.xz": tar_of(code)})
    return folder


def make_corpus(packages, folder, *arguments):
    """The manifest of a new corpus."""
    parser = argparse.ArgumentParser()
    gpu_corpus.add_arguments(parser)
    line = ["--packages", packages, "--names", "manuals,source", "--folder", folder]
    line += ["--vocabulary", 300, "--val-fraction", 0.2, *arguments]
    return gpu_corpus.run(parser.parse_args([str(each) for each in line]))


@pytest.fixture(scope="session")
def corpus(packages, tmp_path_factory):
    """A corpus of gpu_corpus."""
    folder = tmp_path_factory.mktemp("corpus") / "packed"
    make_corpus(packages, folder)
    return folder


# The corpus


def texts_of(corpus, tokens):
    found = []
    for shard in tokens.shards:
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:]):
            found.append(corpus.tokenizer.decode(shard.tokens[start + 1 : end].tolist()))
    return found


def test_the_corpus_has_each_text_once_and_is_split_by_documents(corpus, tmp_path):
    manifest = unpack_corpus(corpus, tmp_path)
    made = prepare_corpus(source="tokens", path=str(tmp_path), tokenizer=str(tmp_path))
    train, val = texts_of(made, made.train), texts_of(made, made.val)
    assert not set(train) & set(val)
    wanted = [prose(i) for i in [*range(120), 1000]]
    wanted += [f"/* {prose(2000 + i)} */\n" for i in range(60)]
    assert sorted(train + val) == sorted(wanted)
    assert manifest["sha256"] == made.sha256
    assert (manifest["prose"], manifest["code"]) == (121, 60)
    assert (manifest["train_tokens"], manifest["val_tokens"]) == (
        made.train.n_tokens,
        made.val.n_tokens,
    )
    assert manifest["compressed_bytes"] < 0.6 * sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )


def test_the_same_packages_give_the_same_bytes(packages, corpus, tmp_path):
    make_corpus(packages, tmp_path / "again")
    names = {path.name for path in corpus.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    for name in names:
        assert (corpus / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_code_follows_prose_up_to_the_size(packages, tmp_path):
    n_prose = sum(len(prose(i)) for i in [*range(120), 1000])
    megabytes = (n_prose + 3500) / 1e6
    manifest = make_corpus(packages, tmp_path / "small", "--megabytes", megabytes)
    assert manifest["prose"] == 121
    assert 1 <= manifest["code"] <= 3


def test_the_order_of_documents_says_nothing_about_their_split():
    """Otherwise the code that is kept would all be held out."""
    texts = [prose(i, 20) for i in range(2000)]
    first = sorted(texts, key=lambda text: order_of(text.encode()))[:200]
    source = Source("test", "key", lambda start=None: map(Document, first))
    splits = [split for split, _ in split_documents(source, 0.2)]
    assert splits.count("val") == pytest.approx(40, abs=20)


def test_documents_with_the_lowest_hashes_are_kept():
    texts = [prose(i).encode() for i in range(100)]
    kept = Documents(9000)
    for text in [*texts, *texts]:
        kept.add(text)
    by_hash = sorted(texts, key=order_of)
    n_kept = len(kept.by_hash)
    assert 9000 < sum(map(len, by_hash[:n_kept])) <= 18_000
    # Those that were dropped and came again are the only ones that may be among them.
    first = int(np.searchsorted(np.cumsum([len(text) for text in by_hash]), 9000))
    assert sorted(kept.by_hash.values(), key=order_of)[:first] == by_hash[:first]


def test_mistakes_with_packages(packages, corpus, tmp_path):
    (tmp_path / "broken_1_all.deb").write_bytes(b"no archive")
    whole = (packages / "manuals_1.0_all.deb").read_bytes()
    (tmp_path / "short_1_all.deb").write_bytes(whole[: len(whole) - 3])
    (tmp_path / "shortest_1_all.deb").write_bytes(whole[:30])
    middle = len(whole) // 2
    changed = whole[:middle] + bytes(100) + whole[middle + 100 :]
    (tmp_path / "changed_1_all.deb").write_bytes(changed)
    cases = {
        "lacks nothing; run `apt-get download nothing` there": ("--names", "nothing"),
        "exists; remove it": ("--folder", corpus),
        "is not a package of Debian": ("--packages", tmp_path, "--names", "broken"),
        "is not complete; download it again": ("--packages", tmp_path, "--names", "short"),
        "has no data.tar; download it again": ("--packages", tmp_path, "--names", "shortest"),
        "data.tar.xz cannot be read": ("--packages", tmp_path, "--names", "changed"),
        "--megabytes is nan; use a positive number": ("--megabytes", "nan"),
    }
    for message, arguments in cases.items():
        with pytest.raises(UserError, match=message):
            make_corpus(packages, tmp_path / "new", *arguments)
    with pytest.raises(UserError, match=r"has no manifest.json"):
        unpack_corpus(tmp_path, tmp_path / "out")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in corpus.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    packed = next(damaged.glob("train*.xz"))
    packed.write_bytes(lzma.compress(b"other"))
    with pytest.raises(UserError, match="is damaged or missing; copy"):
        unpack_corpus(damaged, tmp_path / "out")


# The clocks


@pytest.fixture(scope="module")
def overrides(corpus, tmp_path_factory):
    """The config of a rehearsal."""
    folder = tmp_path_factory.mktemp("clock")
    unpack_corpus(corpus, folder / "corpus")
    return [
        *gpu_time_to_loss.data_overrides(folder / "corpus"),
        *gpu_time_to_loss.TOY,
        f"run.dir={folder / 'run'}",
    ]


TRAIN = {"adamw": train_plain, "muon": train_plain, "thinker": train_thinker}


class Clock:
    """A clock that goes on by a hundredth of a second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


@pytest.mark.parametrize("name", TRAIN)
def test_clocks_stop_for_evaluations_and_warm_up(name, overrides, monkeypatch, tmp_path):
    """Each of both takes 100 seconds here."""
    clock = Clock()
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(time, "perf_counter", clock)
    owners = (gpu_time_to_loss.HeldOut, PlainTraining, TrainingStep)
    for owner, method in zip(owners, ("__call__", "warm_up", "__init__")):
        known = getattr(owner, method)

        def slow(self, *arguments, known=known, **options):
            clock.now += 100
            return known(self, *arguments, **options)

        monkeypatch.setattr(owner, method, slow)
    side = Side(name, 1.0, 1e-3, evaluations=3)
    length = [f"train.max_minutes={side.seconds / 60}", f"run.dir={tmp_path / name}"]
    rows = list(TRAIN[name](side, [*overrides, *length]))
    seconds = [row["seconds"] for row in rows]
    assert len(rows) == 4
    # Each step takes a few hundredths, and the last one begins within the time.
    for found, wanted in zip(seconds, (0, 1 / 3, 2 / 3, 1)):
        assert wanted <= found < wanted + 0.1
    assert all(row["tokens"] == row["step"] * 8 * 64 for row in rows)
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    assert clock.now > 500


def test_a_slow_step_counts_and_the_schedule_ends_with_the_time():
    """A clock that the test moves: each step takes a second."""
    torch.manual_seed(0)
    model = PlainGPT(1, 32, 1, 256, 16)
    tokens = torch.randint(256, (4, 17))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], 64)
    training = PlainTraining(model, "adamw", 1e-3, lambda step: batch, 40.0, 2, "fp32")
    training.compiled = model
    factors = []
    while training.progress < 1:
        training.train_step()
        training.seconds = float(training.step)
        factors.append(training.optimizers[0].param_groups[0]["lr"] / 1e-3)
    assert len(factors) == 40
    assert max(factors) == pytest.approx(factors[2], rel=0.02) == pytest.approx(1, rel=0.02)
    assert factors[0] < 0.05
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=0.01)
    # Halfway between the warm-up and the end: halfway between 1 and a tenth.
    assert lr_factor(0.525) == pytest.approx(0.55)
    assert lr_factor(1.0) == pytest.approx(0.1)


def test_a_plain_gpt_ignores_the_padding_at_the_end_of_an_epoch():
    torch.manual_seed(0)
    model = PlainGPT(1, 32, 1, 256, 16)
    tokens = torch.randint(256, (4, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    with torch.no_grad():
        whole = model(inputs[:3], targets[:3]) * 48
        part = model(inputs[3:, :5], targets[3:, :5]) * 5
        targets[3, 5:] = IGNORE_INDEX
        found = model(inputs, targets)
    assert float(found) == pytest.approx(float(whole + part) / 53, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_warm_up_leaves_no_trace_in_a_plain_gpt(optimizer):
    tokens = torch.randint(256, (4, 17))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], 64)
    losses = []
    for warms_up in (False, True):
        torch.manual_seed(0)
        model = PlainGPT(1, 32, 1, 256, 16)
        training = PlainTraining(model, optimizer, 1e-3, lambda step: batch, 1e9, 2, "fp32")
        training.compiled = model
        if warms_up:
            training.warm_up(Batch(batch.targets, batch.inputs, 64))
        for _ in range(3):
            training.train_step()
        losses.append(float(training.losses(batch.inputs, batch.targets)))
    assert losses[0] == losses[1]


def test_the_warm_up_leaves_no_trace_in_thinker(overrides, monkeypatch, tmp_path):
    side = Side("thinker", 1e6, 0.0, evaluations=1 << 60)  # after each step
    rows = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(gpu_time_to_loss, "warm_up", lambda *arguments: None)
        length = ["train.max_minutes=1e8", f"run.dir={tmp_path / name}"]
        found = train_thinker(side, [*overrides, *length])
        rows.append([next(found)["block_losses"] for _ in range(3)])
        found.close()
    assert rows[0] == rows[1]
    assert rows[0][0] != rows[0][1]


def test_a_plain_gpt_computes_what_transformers_gpt2_does():
    """The held-out loss of the plain GPT is the cross-entropy of GPT-2 with the same weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = PlainGPT(2, 64, 2, 100, 16)
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=2, activation_function="gelu",
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    reference = transformers.GPT2LMHeadModel(config).eval()
    own = model.state_dict()
    names = {
        "wte.weight": "embedding.weight",
        "wpe.weight": "positions.weight",
        "ln_f.weight": "norm.weight",
    }
    for number in range(2):
        for theirs, ours in {
            "ln_1": "attention_norm", "ln_2": "mlp_norm", "attn.c_attn": "qkv_proj",
            "attn.c_proj": "o_proj", "mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj",
        }.items():  # fmt: skip
            names[f"h.{number}.{theirs}.weight"] = f"blocks.{number}.{ours}.weight"
    with torch.no_grad():
        for name, tensor in reference.transformer.named_parameters():
            if name.endswith(".bias"):
                tensor.zero_()
                continue
            weight = own[names[name]]
            is_transposed = "c_" in name  # Conv1D
            tensor.copy_(weight.T if is_transposed else weight)
    tokens = torch.randint(100, (4, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    training = PlainTraining(model, "adamw", 1e-3, None, 1.0, 2, "fp32")
    training.compiled = model
    with torch.no_grad():
        logits = reference(input_ids=inputs).logits
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    assert float(training.losses(inputs, targets)) == pytest.approx(float(wanted), rel=1e-5)
    # Residual projections begin smaller, as in nanoGPT.
    assert own["blocks.0.o_proj.weight"].std() == pytest.approx(0.01, rel=0.1)
    assert own["blocks.0.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)


# What comes out


def rows_of(stage, losses, seconds):
    rows = []
    for number, value in enumerate(losses):
        blocks = [value + offset for offset in (-0.3, 0.0, 0.3)]
        rows.append({"stage": stage, "name": "x", "seconds": seconds * (number + 1), "epochs": 1.0,
                     "planned_s": seconds * len(losses), "val_loss": value, "block_losses": blocks})  # fmt: skip
    return rows


def test_when_a_loss_is_reached():
    rows = rows_of("adamw", [4.0, 3.0], 120) + rows_of("thinker", [5.0, 3.01, 2.9, 2.8], 20)
    rows[-2]["block_losses"] = [2.72, 2.9, 3.08]  # differences of 0.02, -0.1 and -0.22
    [found] = comparisons(rows)
    assert (found["plain_loss"], found["plain_s"]) == (3.0, 240)
    assert (found["reached_s"], found["certain_s"]) == (60, 80)
    assert found["difference"] == found["low"] == found["high"] == pytest.approx(-0.2)
    differences = np.array([0.02, -0.1, -0.22])
    half = t.ppf(0.975, 2) * differences.std(ddof=1) / 3**0.5
    found = gpu_time_to_loss.difference_of(rows[-2], rows[1])
    assert (found.low, found.high) == pytest.approx((-0.1 - half, -0.1 + half), abs=1e-5)
    assert found.high > 0
    [never] = comparisons(rows_of("muon", [2.0], 240) + rows_of("thinker", [2.1], 80))
    assert never["reached_s"] is None
    assert never["certain_s"] is None
    assert list(comparisons(rows_of("adamw", [3.0], 1))) == []


def test_a_stopped_side_is_not_compared_and_its_next_run_is():
    stopped = rows_of("thinker", [5.0, 2.0, 1.0], 40)[:-1]
    plain = rows_of("adamw", [4.0, 3.0], 120)
    assert list(comparisons(plain + stopped)) == []
    assert list(comparisons(plain[:-1] + rows_of("thinker", [2.0], 80))) == []
    [found] = comparisons(plain + stopped + rows_of("thinker", [5.0, 2.9], 40))
    assert (found["reached_s"], found["thinker_loss"]) == (80, 2.9)


def test_sides_on_two_cards_are_not_compared():
    cards = {"adamw": "NVIDIA H100 80GB HBM3", "thinker": "NVIDIA H200"}
    rows = []
    for side, card in cards.items():
        for row in rows_of(side, [4.0, 3.0], 120):
            rows.append(row | {"card": card})
    assert list(comparisons(rows)) == []
    rows += [row | {"card": cards["thinker"]} for row in rows_of("adamw", [4.5, 3.5], 120)]
    [found] = comparisons(rows)
    assert found["plain_loss"] == 3.5


def test_only_data_vocabulary_and_length_differ_from_the_config(overrides):
    """With the warmup: 50 steps would be half of a run of 80 seconds."""
    changed = gpu_time_to_loss.data_overrides(Path(overrides[1].removeprefix("data.path=")))
    names = {each.partition("=")[0] for each in changed}
    assert names - {"model.vocab_size", "train.max_steps", "train.warmup_steps"} == {
        "data.source", "data.path", "data.tokenizer", "data.config", "data.max_documents",
    }  # fmt: skip
    assert f"train.warmup_steps={TrainConfig().warmup_steps}" in changed


def test_the_page_has_table_and_picture_once_there_are_rows(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    results = load_results(ROOT / "benchmarks" / "results")
    results.pop("gpu_time_to_loss", None)
    marked = [line for line in page.splitlines() if line == "<!-- table: gpu-time-to-loss -->"]
    text = f"{marked[0]}\n<!-- end -->\n"
    assert "No card has completed it yet." in pages.with_tables(text, results)
    rows = [{"stage": "environment", "name": "environment", "gpu": "NVIDIA H100", "processor": "x",
             "torch": "2.11", "date": "2026-12-01", "threads": "4"}]  # fmt: skip
    rows += rows_of("adamw", [4.0, 3.0], 120) + rows_of("thinker", [5.0, 3.01, 2.9, 2.8], 20)
    recorded = tmp_path / "gpu_time_to_loss.jsonl"
    recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = pages.with_tables(text, results | load_results(tmp_path))
    assert "| AdamW | 240 (1.0) | 3.0000 | 60 | 60 | 80 (1.0) | 2.8000 |" in found
    assert "![Validation loss by seconds of training](../images/gpu-time-to-loss.png)" in found
    assert "*NVIDIA H100, torch 2.11, 2026-12-01: `gpu_time_to_loss.jsonl`*" in found
    # The command writes both, in a copy of the pages.
    docs = tmp_path / "docs"
    for folder in ("benchmarks", "explanations", "images"):
        (docs / folder).mkdir(parents=True)
    (docs / "benchmarks.md").write_text("")
    (docs / "explanations" / "accumulation.md").write_text("")
    (docs / "benchmarks" / "gpu.md").write_text(text)
    monkeypatch.setattr(pages, "DOCS", docs)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.run(None) == {"changed": ["benchmarks/gpu.md", "images/gpu-time-to-loss.png"]}
    assert (docs / "images" / "gpu-time-to-loss.png").read_bytes().startswith(b"\x89PNG")


def test_rates_that_fail_are_recorded_and_none_is_best(overrides, tmp_path):
    """Here, as there is no time."""
    corpus = Path(overrides[1].removeprefix("data.path="))
    recorder = Recorder(tmp_path / "results.jsonl", "loss")
    trials = [Side("muon", 1.0, rate, 1) for rate in (0.01, 0.02)]
    arguments = argparse.Namespace(out=corpus.parent, rehearse=True)
    options = {"log": tmp_path / "log.txt", "eager": True}
    assert gpu_time_to_loss.best_rate(trials, arguments, recorder, 0.0, options) is None
    errors = [row["error"] for row in recorder.results]
    assert errors == 2 * ["TimeoutError: no result in time"]


SHORT = ("--rehearse", "--plain-seconds", 6, "--thinker-seconds", 4)


@pytest.mark.more
def test_rehearsal(corpus, tmp_path):
    out = tmp_path / "out"
    command = (BENCHMARK, "gpu_time_to_loss", "--corpus", corpus, "--out", out, *SHORT)
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["failures"] == []
    [compared] = last["comparisons"]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    by_side = {}
    for side, seconds in (("adamw", 6), ("thinker", 4)):
        points = [row for row in rows if row["stage"] == side]
        by_side[side] = points
        assert 2 <= len(points) <= 21  # few on a busy machine
        assert points[-2]["seconds"] < seconds <= points[-1]["seconds"]
        assert len({row["val_tokens"] for row in points}) == 1
        for row in points:
            assert row["low"] < row["val_loss"] < row["high"]
            assert row["val_loss"] == pytest.approx(np.mean(row["block_losses"]), abs=1e-4)
    ends = [by_side[side][-1] for side in ("adamw", "thinker")]
    assert compared["plain_loss"] == ends[0]["val_loss"]
    assert compared["thinker_loss"] == ends[1]["val_loss"]
    environment = next(row for row in rows if row["stage"] == "environment")
    assert environment["corpus"] == json.loads((corpus / "manifest.json").read_text())
    assert (out / "time-to-loss.png").read_bytes().startswith(b"\x89PNG")
    # Muon with two rates in a run of its own; the better one trains in full.
    arguments = ("--sides", "muon", "--rates", "0.02,1e-5", "--trial-seconds", 1)
    done = run_script(*command[:-4], "--plain-seconds", 3, *arguments)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    trials = {row["rate"]: row["val_loss"] for row in rows if row["stage"] == "muon, trial"}
    assert set(trials) == {0.02, 1e-5}
    best = min(trials, key=trials.get)  # by the last loss of each
    assert {row["rate"] for row in rows if row["stage"] == "muon"} == {best}


@pytest.mark.more
def test_a_side_without_a_result_is_an_error(corpus, tmp_path):
    arguments = ("--corpus", corpus, "--out", tmp_path, *SHORT, "--minutes", "0.01")
    done = run_script(BENCHMARK, "gpu_time_to_loss", *arguments)
    assert done.returncode == 1, done.stderr
    assert "no result of adamw, thinker; see" in done.stderr.splitlines()[-1]


@pytest.mark.more
def test_a_killed_run_keeps_its_rows(corpus, tmp_path):
    out = tmp_path / "out"
    arguments = ("--corpus", corpus, "--out", out, "--rehearse", "--plain-seconds", 600)
    process = start_script(BENCHMARK, "gpu_time_to_loss", *map(str, arguments))
    results = out / "results.jsonl"
    try:
        end = time.monotonic() + 120
        while not (results.exists() and '"adamw"' in results.read_text()):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["stage"] for row in rows][:2] == ["start", "environment"]
    assert "val_loss" in rows[-1]
    end_workers(out)


def end_workers(out):
    """End the process that trained for a command that was killed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if str(out / "log.txt") in files:
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_mistakes(corpus, tmp_path):
    known = ("--corpus", corpus, "--out", tmp_path)
    for arguments, message in {
        (): "no CUDA GPU is available; --rehearse",
        ("--sides", "sgd"): "--sides has 'sgd'; choose from adamw, muon, thinker",
        ("--rates", "1,2", "--sides", "adamw,muon"): "--rates is for one side",
        ("--rates", "x"): "--rates x is no list of numbers",
        ("--rates", "0.1,0"): "--rates 0.1,0 has one that is not positive",
        ("--plain-seconds", "-1"): "--plain-seconds is -1.0; use a positive number",
        ("--minutes", "nan"): "--minutes is nan; use a positive number",
    }.items():
        done = run_script(BENCHMARK, "gpu_time_to_loss", *known, *arguments)
        assert done.returncode == 2
        assert message in done.stderr


def test_documents_are_read_from_the_unpacked_corpus(corpus, tmp_path):
    unpack_corpus(corpus, tmp_path)
    assert len(list(open_source("tokens", path=str(tmp_path)).documents())) == 181
