"""The report of a run: what it says is what the run did, and the run is as without it."""

import json
import math
import re
import signal
from itertools import pairwise

import fork_server
import pytest
import torch
from conftest import ROOT
from installed import if_installed
from training_contract import N_STEPS, SMALL, small_config
from training_runs import assert_same_tensors, metrics_without_times, read_metrics
from training_workers import train_each

from thinker.evaluation.text_baselines import text_baselines
from thinker.features.run_report.attention_picture import attention_picture
from thinker.features.run_report.report_facts import gather_facts
from thinker.features.run_report.run_report import RunReport
from thinker.interop import load
from thinker.runtime.errors import RunError
from thinker.training.callback import Callback, find_callback
from thinker.training.reports.fit import MEANINGS
from thinker.training.run import build_trainer, train

pytestmark = pytest.mark.usefixtures("one_thread")
BASE = ROOT / "tests" / "fixtures" / "base.yaml"
FILES = ("report.html", "report.md")
SAMPLED = ["train.sample_every=2", "train.sample_prompt=Once"]
TEXT = ["data.max_documents=400", "train.eval_sequences=8"]  # enough for a comparison


class At(Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_step_end(self, info):
        if info.step == self.step:
            self.action()


def cells(markdown):
    """The rows of all tables of a page, by their first cell; without the escapes."""
    rows = {}
    for line in markdown.splitlines():
        if line.startswith("| "):
            first, *others = line.strip("| ").replace("\\", "").split(" | ")
            rows.setdefault(first, others)
    return rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(small_config(folder, "run", [*SAMPLED, *TEXT])) == 0
    return folder / "run"


def test_it_says_what_the_run_did(finished):
    text = (finished / "report.md").read_text(encoding="utf-8")
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "Finished: 6 steps." in text
    lines = read_metrics(finished)
    rows = cells(text)
    train_lines = {line["step"]: line for line in lines if "train_loss" in line}
    evaluations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    for before, line in pairwise([{"step": 0}, *evaluations]):
        losses = [
            train_lines[step]["train_loss"] for step in range(before["step"] + 1, line["step"] + 1)
        ]
        wanted = [sum(losses) / len(losses), line["val_loss"], line["val_bits_per_byte"]]
        assert rows[str(line["step"])][1:4] == [f"{loss:.4f}" for loss in wanted]
        assert all(f"<td>{loss:.4f}</td>" in page for loss in wanted)
    model, tokenizer = load(finished)
    assert rows["parameters"] == [f"{sum(p.numel() for p in model.parameters()):,}"]
    assert rows["tokenizer"] == [f"byte, {tokenizer.vocab_size} tokens"]
    tokens = re.search(r"finished: 6 steps, ([\d,]+) tokens", text)[1]
    assert rows["tokens"] == [tokens]
    assert int(tokens.replace(",", "")) == lines[-1]["tokens"]
    (verdict,) = rows["verdict"]
    assert rows[verdict] == [MEANINGS[verdict]]
    assert "What the words mean" in page
    assert MEANINGS[verdict] in page
    for name in ("Sample from it", "Advice", "What was trained", "Speed and memory"):
        assert name in text
        assert name in page
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [2, 4, 6]
    for sample in samples:
        assert f"Step {sample['step']}:\n\n```" in text


def test_simple_models_are_drawn_at_their_nats_per_token(finished, tmp_path):
    config = small_config(tmp_path, "run", TEXT)
    kept = Keeper()
    assert train(config, callbacks=[kept]) == 0
    bits = text_baselines(kept.run.corpus)
    levels = {level.kind: level.loss for level in kept.facts.curves.levels}
    evaluation = [line for line in read_metrics(tmp_path / "run") if "val_loss" in line][-1]
    scale = evaluation["val_loss"] / evaluation["val_bits_per_byte"]
    assert levels["ngram"] == pytest.approx(bits["5-gram"] * scale)
    assert levels["gzip"] == pytest.approx(bits["gzip"] * scale)
    # A token of this tokenizer is a byte or the end of a document.
    assert scale == pytest.approx(math.log(2), rel=0.02)


def test_its_tokens_are_those_that_the_run_prints(tmp_path):
    """Where only a few tokens are not trained on, and where many are padding."""
    for packing in ("contiguous", "documents"):
        config = small_config(tmp_path, packing, [*TEXT, f"data.packing={packing}"])
        kept = Keeper()
        assert train(config, callbacks=[kept]) == 0
        tokens = dict(kept.facts.key_numbers)["tokens"]
        assert f" {tokens} tokens" in kept.facts.result[0]


class Keeper(Callback):
    """Keeps what a report would say when the run ends."""

    def on_start(self, run):
        self.run = run

    def on_end(self, is_evaluated):
        report = find_callback(self.run.parts.callbacks, RunReport)
        self.facts = gather_facts(
            self.run,
            report.history,
            report.summary,
            report.attention,
            "finished",
            report.saved_step,
        )


def test_settings_are_those_that_differ(finished):
    rows = cells((finished / "report.md").read_text())
    given = dict(override.split("=") for override in [*SMALL, *SAMPLED, *TEXT])
    defaults = {"train.batch_size": "16", "data.seq_len": "256", "model.dropout": "0"}
    for key, value in given.items():
        if key in ("train.device", "train.precision", "train.eval_sequences"):
            continue
        assert rows[key][0] == value, key
    for key, value in defaults.items():
        assert rows[key][1] == value
    assert not {"model.qk_norm", "train.log_every", "train.report", "optimizer.name"} & rows.keys()


def test_it_says_running_paused_and_finished(tmp_path):
    config = small_config(tmp_path, "run", SAMPLED)
    path = tmp_path / "run" / "report.md"
    seen = {}

    def look(step):
        return At(step, lambda: seen.update({step: path.read_text()}))

    interrupt = At(5, lambda: signal.raise_signal(signal.SIGINT))
    assert train(config, callbacks=[look(1), look(4), interrupt]) == 130
    assert "Running: this page was written at step 0 of 6" in seen[1]
    assert "No step has been logged yet." in seen[1]
    assert "Running: this page was written at step 3 of 6" in seen[4]
    text = path.read_text()
    assert "Paused at step 5 of 6, 83% of the run, and saved. Run the same command again" in text
    assert "Step 2:" in text
    assert "Step 4:" in text
    assert train(config, callbacks=[look(6)]) == 0
    assert "Running" in seen[6]
    assert "Finished: 6 steps." in path.read_text()
    # What it kept of the first part is there, too.
    assert [key for key in cells(path.read_text()) if key in ("3", "6")] == ["3", "6"]


def test_a_finished_run_that_is_started_again_says_the_same(finished):
    before = [(finished / name).read_text(encoding="utf-8") for name in FILES]
    (finished / "report.html").unlink()
    assert train(small_config(finished.parent, "run", [*SAMPLED, *TEXT])) == 0
    assert before == [(finished / name).read_text(encoding="utf-8") for name in FILES]


def test_it_says_stopped_after_an_error(tmp_path):
    def fail():
        raise RunError("it diverged")

    with pytest.raises(RunError):
        train(small_config(tmp_path, "run", ["train.save_every=2"]), callbacks=[At(5, fail)])
    text = (tmp_path / "run" / "report.md").read_text()
    assert "Stopped by an error at step 5 of 6" in text
    assert "The same command resumes it from step 4." in text
    with pytest.raises(RunError):
        train(small_config(tmp_path, "other", ["train.save_every=null"]), callbacks=[At(2, fail)])
    text = (tmp_path / "other" / "report.md").read_text()
    assert "There is no checkpoint, so the same command starts over." in text


def test_without_it_nothing_is_written(tmp_path):
    assert train(small_config(tmp_path, "run", ["train.report=false"])) == 0
    assert not list((tmp_path / "run").glob("report*"))


MIXTURE = "data.sources=[{source: tales, name: a}, {source: tales, name: b, max_documents: 30}]"
OPTIONS = {
    "plain": (1, []),
    "average": (1, ["train.ema_decay=0.9", *SAMPLED]),
    "bf16": (
        1,
        ["train.precision=bf16", "model.attention=[full,window(4)]", "data.packing=documents"],
    ),
    "linear": (1, ["model.attention=linear(8)", "train.deterministic=true"]),
    "prefix": (1, ["model.attention=prefix(4)"]),
    "ddp": (2, ["train.parallel=ddp"]),
    "fsdp": (2, ["train.parallel=fsdp", "model.tie_embeddings=true"]),
}
OPTIONS |= dict(
    if_installed(
        "mixtures", ("mixture", (1, [MIXTURE, "data.source=null", "data.max_documents=null"]))
    )
) | dict(if_installed("pruning", ("gates", (1, ["train.prune.heads=0.5", "train.prune.by=gates"]))))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_weights_are_those_without_it(name, tmp_path):
    n_ranks, more = OPTIONS[name]
    for report in ("true", "false"):
        where = [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / report}"]
        overrides = [*SMALL, *where, *more, f"train.report={report}"]
        done = fork_server.run_ranks(n_ranks, train_each, str(BASE), [overrides])
        assert done == [[0]] * n_ranks
    on, off = tmp_path / "true", tmp_path / "false"
    assert metrics_without_times(on) == metrics_without_times(off)
    assert_same_tensors(on, off, N_STEPS)
    text = (on / "report.md").read_text()
    assert "Finished: 6 steps." in text
    assert ("the weights are sharded" in text) == (name == "fsdp")
    assert ("Mean attention on the start" in text) == (name != "fsdp")
    if name == "mixture":
        assert {"validation, a", "validation, b"} <= cells(text).keys()
        assert "| a | b |" in text
    if n_ranks > 1:
        assert cells(text)["ranks"] == [f"2 ({name})"]


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    assert train(small_config(tmp_path, "whole", SAMPLED)) == 0
    interrupt = At(4, lambda: signal.raise_signal(signal.SIGINT))
    assert train(small_config(tmp_path, "parts", SAMPLED), callbacks=[interrupt]) == 130
    assert train(small_config(tmp_path, "parts", SAMPLED)) == 0
    assert_same_tensors(tmp_path / "whole", tmp_path / "parts", N_STEPS)
    pages = [(tmp_path / name / "report.md").read_text() for name in ("whole", "parts")]
    tables = [cells(page) for page in pages]
    for key in ("3", "6", "validation loss", "bits per byte", "0", "1"):
        assert tables[0][key][:5] == tables[1][key][:5]


# ---------------------------------------------------------------- attention


def test_the_picture_is_the_attention_of_the_evaluated_weights(tmp_path):
    keeper = Keeper()
    config = small_config(tmp_path, "run", ["train.ema_decay=0.5", "model.dropout=0.3"])
    assert train(config, callbacks=[keeper]) == 0
    picture = keeper.facts.attention
    model, _ = load(tmp_path / "run")  # the averaged weights, as they were evaluated
    tokens = torch.tensor([keeper.run.corpus.val.shards[0].tokens[:16].tolist()])
    wanted = model.attention_weights(tokens)[:, 0]  # (layers, H, T, T)
    torch.testing.assert_close(picture.weights, wanted, rtol=0, atol=1e-6)
    assert len(picture.labels) == 16
    assert picture.labels[0] == "<|bos|>"
    for layer, shares in enumerate(picture.shares()):
        mean = wanted[layer].mean(dim=0)
        positions = range(2, 16)
        previous = sum(mean[q, q - 1].item() for q in positions) / 14
        first = sum(mean[q, 0].item() for q in positions) / 14
        itself = sum(mean[q, q].item() for q in positions) / 14
        assert shares == pytest.approx((previous, first, itself), abs=1e-6)


def test_there_is_a_reason_for_no_picture(tmp_path):
    trainer = build_trainer(small_config(tmp_path, "run", ["model.attention=prefix(16)"]))
    said = attention_picture(trainer.model, trainer.corpus)
    trainer._close()
    assert said.startswith("There is no picture of attention: it needs 16 tokens")
    assert "Attention\n\nThere is no picture" not in (tmp_path / "run" / "report.md").read_text()


# ---------------------------------------------------------------- files


def test_links_and_folders_in_its_place(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.html").symlink_to(mine)
    assert train(small_config(tmp_path, "run")) == 0
    assert mine.read_text() == "precious"
    assert not (run / "report.html").is_symlink()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        train(small_config(tmp_path, "run"))


def test_a_folder_that_is_gone_ends_the_run(tmp_path):
    move = At(1, lambda: (tmp_path / "run").rename(tmp_path / "away"))
    config = small_config(tmp_path, "run", ["train.eval_every=2", "train.save_every=null"])
    with pytest.raises(RunError, match="was removed, moved or replaced"):
        train(config, callbacks=[move])
    assert not (tmp_path / "run").exists()


def test_a_finished_run_says_where_its_report_is(finished, capsys):
    assert train(small_config(finished.parent, "run", [*SAMPLED, *TEXT])) == 0
    assert f"report {finished / 'report.html'}\n" in capsys.readouterr().err
