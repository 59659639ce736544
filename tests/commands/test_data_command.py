"""scripts/data.py: the numbers are those of the corpus, and the page shows the sequences that
training reads."""

import html
import itertools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, run_script
from installed import needs

from thinker.data.batches.windows import PackedDataset
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.reports.data_page import page
from thinker.training.reports.data_report import CONTROL_PICTURES, make_data_report, table

CONFIG = ROOT / "tests" / "fixtures" / "base.yaml"
SOURCES = "[{source: tales, max_documents: 80}, {source: pysource, max_documents: 6, val_fraction: 0.3, name: a_b}]"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    place = f"data.cache_dir={tmp_path_factory.mktemp('cache')}"
    return [place, "data.tokenizer=bpe:400", "data.seq_len=64", "data.source=null", "data.max_documents=null",
            f"data.sources={SOURCES}", "train.batch_size=6", "train.device=cpu"]  # fmt: skip


@needs("mixtures")
@pytest.mark.parametrize("packing", ["contiguous", "documents", "best_fit"])
def test_the_numbers_are_those_of_the_corpus(overrides, packing):
    config = load_config(CONFIG, [*overrides, f"data.packing={packing}"])
    report = make_data_report(config, step=3, n_sequences=4)
    corpus = prepare_training_data(config)
    for source, part in zip(report.sources, corpus.parts.values(), strict=True):
        assert source.train_documents == part.train.n_documents == len(source.lengths)
        assert source.lengths.sum() == part.train.n_tokens - len(part.train.shards)
        assert source.bytes_per_token == pytest.approx(
            (part.train.n_bytes + part.val.n_bytes) / (part.train.n_tokens + part.val.n_tokens)
        )
        windows = PackedDataset(part.train, 64, packing)
        n_padding = sum(int((windows[i][1] < 0).sum()) for i in range(len(windows)))
        assert source.share_padding == pytest.approx(n_padding / (64 * len(windows)))
    rows = {name: cells for name, *cells in table(report)}
    assert rows[""] == ["tales", "a_b"]
    assert all(len(cells) == 2 for cells in rows.values())


@needs("mixtures")
@pytest.mark.parametrize("packing", ["contiguous", "documents", "best_fit"])
def test_the_page_has_the_tokens_that_training_reads(overrides, packing):
    config = load_config(CONFIG, [*overrides, f"data.packing={packing}"])
    report = make_data_report(config, step=3, n_sequences=4)
    corpus = prepare_training_data(config)
    loader = open_loader(config, corpus, prefix_len=0)
    inputs, targets = loader.batch(3)
    shown = re.findall(r"<div class=sequence>(.*?)</div>", page(report), re.DOTALL)
    assert len(shown) == len(report.sequences) == 4
    for sequence, text, row, target in zip(
        report.sequences, shown, inputs.tolist(), targets.tolist()
    ):
        kinds = [kind for _, _, kind in sequence.tokens]
        assert [kind == "padding" for kind in kinds] == [t < 0 and token == corpus.tokenizer.bos_id
                                                          for token, t in zip(row, target)]  # fmt: skip
        spans = re.findall(r"<span class='d[01] (\w*)'>(.*?)</span>", text, re.DOTALL)
        plain = "".join(
            html.unescape(content) for kind, content in spans if kind not in ("bos", "padding")
        )
        used = [token for token, kind in zip(row, kinds) if kind not in ("bos", "padding")]
        whole = corpus.tokenizer.decode(used).translate(CONTROL_PICTURES)
        assert plain.strip("\N{REPLACEMENT CHARACTER}") in whole  # the last character may be cut
        assert len(plain) >= len(whole) - 2
    assert [sequence.sample_id for sequence in report.sequences] == loader.sample_ids(3)[:4]


@needs("cleaning")
def test_equal_documents_and_what_cleaning_dropped_are_counted(tmp_path):
    texts = [f"text number {i % 30} of several words" for i in range(50)] + ["x"] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = [
        "data.source=jsonl",
        f"data.path={tmp_path / 'a.jsonl'}",
        "data.tokenizer=byte",
        "data.max_documents=null",
    ]
    data += [
        f"data.cache_dir={tmp_path}",
        "data.seq_len=16",
        "data.val_fraction=0.2",
        "train.device=cpu",
    ]
    plain = make_data_report(load_config(CONFIG, data), 0, 1).sources[0]
    (shard,) = prepare_training_data(load_config(CONFIG, data)).train.shards
    distinct = {
        shard.tokens[a:b].tobytes() for a, b in itertools.pairwise(shard.offsets[:].tolist())
    }
    assert plain.n_equal == plain.train_documents - len(distinct) > 5
    clean = [*data, "data.clean.duplicates=exact", "data.clean.min_characters=5"]
    cleaned = make_data_report(load_config(CONFIG, clean), 0, 1).sources[0]
    assert cleaned.n_equal == 0
    assert cleaned.dropped == {"exact duplicates": 20, "shorter than min_characters": 3}


def test_emoji_and_control_characters_are_shown(tmp_path):
    """With a tokenizer of bytes, several tokens are one character."""
    texts = [f"🎉 é \x1b[31m \x00 <b>{i}</b> שלום" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = [
        "data.source=jsonl",
        f"data.path={tmp_path / 'a.jsonl'}",
        "data.tokenizer=byte",
        "data.max_documents=null",
    ]
    data += [
        f"data.cache_dir={tmp_path}",
        "data.seq_len=64",
        "data.packing=documents",
        "train.device=cpu",
    ]
    text = page(make_data_report(load_config(CONFIG, data), 0, 2))
    plain = html.unescape(re.sub("<[^>]*>", "", text))
    assert re.search(r"🎉 é ␛\[31m ␀ <b>\d+</b> שלום", plain)
    assert "\x1b" not in text


@needs("mixtures")
def test_the_command_writes_a_table_a_plot_and_a_page(overrides, tmp_path):
    files = ["--html", tmp_path / "data.html", "--png", tmp_path / "lengths.png"]
    done = run_script(
        ROOT / "scripts/data.py", CONFIG, *overrides, *files, "--step", "5", "--sequences", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "bytes per token" in done.stdout
    for file in ("data.html", "lengths.png"):
        assert f"wrote {tmp_path / file}\n" in done.stderr
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "data.html").read_text()
    assert text.count("<div class=sequence>") == 2
    assert "Sequences of step 5" in text
    assert not re.search(r"(src|href)=['\"]?https?:", text)
    done = run_script(ROOT / "scripts/data.py", CONFIG, *overrides, "--json")
    (tales, code) = json.loads(done.stdout)
    assert tales["name"] == "tales"
    assert np.diff(list(code["lengths"].values())).min() >= 0
    for wrong in (
        ["--step", "-1"],
        ["--step", "6"],
        ["--sequences", "0"],
        ["--html", tmp_path / "none" / "a.html"],
    ):
        assert run_script(ROOT / "scripts/data.py", CONFIG, *overrides, *wrong).returncode == 2
