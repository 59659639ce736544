"""Cleaning: planted duplicates are found, rules drop what they name, and the index says what was
dropped and why."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.document import Document
from thinker.data.text.sources import open_source
from thinker.features.cleaning.cleaning import Cleaning, CleaningRules, repeated_lines, symbols
from thinker.features.cleaning.near_duplicates import NearDuplicates
from thinker.runtime.errors import UserError

LETTERS = random.Random(0)
WORDS = ["".join(LETTERS.choices("etaoinshrdlu", k=LETTERS.randrange(2, 10))) for _ in range(3000)]
FREQUENCIES = [1 / rank for rank in range(1, len(WORDS) + 1)]  # as in natural languages (Zipf)


def make_text(draw, n_words):
    return " ".join(draw.choices(WORDS, FREQUENCIES, k=n_words))


def edit_words(draw, text, share):
    """Replace this share of the words by other ones."""
    words = text.split(" ")
    for i in draw.sample(range(len(words)), round(share * len(words))):
        words[i] = draw.choice(WORDS)
    return " ".join(words)


def edit_characters(draw, text, share):
    """Replace this share of the characters by other ones."""
    letters = list(text)
    for i in draw.sample(range(len(letters)), round(share * len(letters))):
        letters[i] = draw.choice("xyzwvu")
    return "".join(letters)


def find_groups(folder, texts):
    near = NearDuplicates(folder)
    for text in texts:
        near.add(text)
    return near.find()


@pytest.mark.parametrize("edit", [edit_words, edit_characters])
def test_planted_near_duplicates_are_found_and_others_are_not(tmp_path, edit, stress):
    """Exact copies: all. 5% edited: at least 95%. 30% edited, and texts of the same words: at most
    5%."""
    draw, n = random.Random(1), 2000 if stress else 300
    originals = [make_text(draw, draw.randrange(60, 400)) for _ in range(n)]
    copies = {share: [edit(draw, text, share) for text in originals] for share in (0.0, 0.05, 0.3)}
    found = {}
    for share, texts in copies.items():
        groups = find_groups(tmp_path, originals + texts)
        assert groups[:n].tolist() == list(
            range(n)
        )  # the originals are no duplicates of each other
        found[share] = float((groups[n:] == np.arange(n)).mean())
    assert found[0.0] == 1.0
    assert found[0.05] >= 0.95
    assert found[0.3] <= 0.05


def test_near_duplicates_on_modules_of_python(tmp_path):
    """On real code, whose modules have much in common."""
    draw = random.Random(2)
    texts = [
        d.text for d in open_source("pysource", max_documents=150).documents() if len(d.text) > 2000
    ]
    edited = [edit_characters(draw, text, 0.03) for text in texts]
    groups = find_groups(tmp_path, texts + edited)
    assert (groups[: len(texts)] == np.arange(len(texts))).mean() > 0.97
    assert (groups[len(texts) :] == groups[: len(texts)]).mean() > 0.97


@given(texts=st.lists(st.text(max_size=12), max_size=30))
def test_groups_are_consistent(tmp_path_factory, texts):
    """The first of a group leads it; equal texts are in one group; short texts do not fail."""
    groups = find_groups(tmp_path_factory.mktemp("near"), texts)
    assert (groups[groups] == groups).all()
    assert (groups <= np.arange(len(texts))).all()
    for i, text in enumerate(texts):
        assert groups[i] == groups[texts.index(text)]


def test_shares_of_lines_and_symbols():
    assert repeated_lines("a\nbb\n\na\n a ") == pytest.approx(2 / 5)
    assert repeated_lines("") == 0
    assert symbols("ab é1 !?") == pytest.approx(2 / 8)
    assert symbols("日本 語") == 0
    assert symbols("नमस्ते दुनिया สวัสดี") == 0  # combining marks belong to letters
    assert symbols("") == 0


def test_each_rule_drops_what_it_names_and_the_report_says_so():
    texts = [
        "short",
        "x" * 100,
        "same\nsame\nsame\nother",
        "{}();;--",
        "some words",
        "a text",
        "a text",
    ]
    documents = [("train", Document(text)) for text in texts]
    cleaning = Cleaning(CleaningRules(6, 90, 0.4, 0.5, "exact"))
    cleaning.decide(documents, None, progress=False)
    kept = [document.text for _, document in cleaning.drop(documents)]
    assert kept == ["some words", "a text"]
    assert {reason: entry["count"] for reason, entry in cleaning.report.items()} == {
        "shorter than min_characters": 1,
        "longer than max_characters": 1,
        "above max_repeated_lines": 1,
        "above max_symbols": 1,
        "exact duplicates": 1,
    }
    assert cleaning.report["exact duplicates"]["examples"] == ["a text"]
    assert cleaning.summary().startswith("cleaning: dropped 5 of 7 documents (71.4%): 1 ")


def test_rules_see_the_contents_of_messages():
    """Not the JSON around them."""
    talks = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
             for content in ("same\nsame\nsame\nsame", "ok", "a long and plain answer")]  # fmt: skip
    documents = [("train", Document(json.dumps(talk), messages=talk)) for talk in talks]
    cleaning = Cleaning(CleaningRules(min_characters=6, max_repeated_lines=0.5, max_symbols=0.2))
    cleaning.decide(documents, None, progress=False)
    assert [document.messages for _, document in cleaning.drop(documents)] == talks[2:]
    assert set(cleaning.report) == {"above max_repeated_lines", "shorter than min_characters"}


def test_an_empty_split_after_cleaning_says_so(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ["tiny"] * 9 + ["a longer text"])
    for tokenizer in ("byte", "bpe:300"):
        with pytest.raises(
            UserError,
            match=r"split is empty; cleaning: dropped 9 of 10 documents .*; loosen the rules",
        ):
            prepare_corpus(source="jsonl", path=path, tokenizer=tokenizer, cache_dir=tmp_path / "cache",
                           val_fraction=0.5, progress=False, document_filter=Cleaning(CleaningRules(min_characters=6)))  # fmt: skip


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_a_corpus_is_cleaned_once_and_its_index_names_what_was_dropped(tmp_path, capfd):
    draw = random.Random(3)
    texts = [make_text(draw, 80) for _ in range(200)]
    copies = [edit_words(draw, text, 0.03) for text in texts[:60]]
    path = write_rows(tmp_path / "a.jsonl", [*texts, *copies, *texts[:20], "tiny"])
    options = {"source": "jsonl", "path": path, "tokenizer": "byte", "cache_dir": tmp_path / "cache",
               "val_fraction": 0.3, "progress": False}  # fmt: skip
    plain = prepare_corpus(**options)
    clean = prepare_corpus(
        **options, document_filter=Cleaning(CleaningRules(min_characters=20, duplicates="near"))
    )
    assert plain.train.n_documents + plain.val.n_documents == 281
    assert clean.train.n_documents + clean.val.n_documents == 200
    said = capfd.readouterr().err
    assert (
        "cleaning: dropped 81 of 281 documents (28.8%): 60 near duplicates, 20 exact duplicates, 1 shorter"
        in said
    )
    index = json.loads((clean.folder / "corpus.json").read_text())
    assert index["dropped"]["near duplicates"]["count"] == 60
    assert len(index["dropped"]["near duplicates"]["examples"]) == 5
    assert str(clean.folder) in said
    assert sorted(path.suffix for path in clean.folder.iterdir()) == [
        ".json",
        ".json",
        ".tokens",
        ".tokens",
    ]
    prepare_corpus(
        **options, document_filter=Cleaning(CleaningRules(min_characters=20, duplicates="near"))
    )
    assert capfd.readouterr().err == ""
    assert plain.folder != clean.folder


def test_of_a_group_over_both_splits_the_validation_document_stays(tmp_path):
    """So no training document resembles a validation document."""
    draw = random.Random(5)
    groups = [
        [text, *(edit_words(draw, text, 0.03) for _ in range(4))]
        for text in (make_text(draw, 80) for _ in range(40))
    ]
    documents = [
        ("val" if draw.random() < 0.3 else "train", Document(text))
        for group in groups
        for text in group
    ]
    cleaning = Cleaning(CleaningRules(duplicates="near"))
    cleaning.decide(documents, tmp_path, progress=False)
    kept = [(split, document.text) for split, document in cleaning.drop(documents)]
    assert len(kept) == 40
    for (split, text), group, start in zip(kept, groups, range(0, 200, 5)):
        assert text in group
        has_val = any(each == "val" for each, _ in documents[start : start + 5])
        assert split == ("val" if has_val else "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "text"}, "data.clean cannot clean a single text file"),
        (
            {"source": "jsonl", "val_tokens": "x", "tokenizer": "tiktoken:gpt2"},
            "data.clean cannot be combined with",
        ),
    ],
)
def test_what_cannot_be_cleaned_says_so(tmp_path, options, message):
    path = write_rows(tmp_path / "a.jsonl", ["a", "b"])
    if options["source"] == "text":
        path = str(tmp_path / "a.txt")
        Path(path).write_text("a\nb\n")
    with pytest.raises(UserError, match=message):
        prepare_corpus(
            path=path,
            document_filter=Cleaning(CleaningRules(min_characters=1)),
            cache_dir=tmp_path,
            **options,
        )
