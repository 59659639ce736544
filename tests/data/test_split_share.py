"""How much of a folder of texts is held out for validation, and what a run says of it."""

import hashlib

import pytest

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.sources import open_source
from thinker.data.text.split import split_documents


def write_folder(folder, sizes):
    """Files of these many bytes, none of which equals another."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        line = f"This is line N of file {number}, which is about é.\n".encode()
        (folder / f"{number:03}.txt").write_bytes((line * (size // len(line) + 1))[: size // 2 * 2])
        text = (folder / f"{number:03}.txt").read_bytes().decode(errors="ignore")
        (folder / f"{number:03}.txt").write_text(text)
    return str(folder)


def hash_share(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def read_split(path, fraction, **options):
    parts = {"train": [], "val": []}
    source = open_source("text", path=path, **options)
    for split, document in split_documents(source, fraction):
        parts[split].append(document)
    return parts


def share(parts):
    n_bytes = {name: sum(len(d.text.encode()) for d in part) for name, part in parts.items()}
    return n_bytes["val"] / (n_bytes["train"] + n_bytes["val"])


# A file in five is long. By their hashes alone, these hold out 3% to 38% of the text.
SIZES = [40_000 if i % 5 == 0 else 4_000 + 37 * i for i in range(60)]


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("shift", range(6))
def test_the_share_is_near_what_was_asked(tmp_path, fraction, shift):
    path = write_folder(tmp_path / "folder", [size + 2 * shift for size in SIZES])
    assert share(read_split(path, fraction)) == pytest.approx(fraction, rel=0.25)


def test_only_long_documents_are_cut_and_only_if_needed(tmp_path):
    path = write_folder(tmp_path / "folder", SIZES)
    source = open_source("text", path=path)
    texts = {document.number: document.text for document in source.documents()}
    total = sum(len(text.encode()) for text in texts.values())
    n_even = 0
    for fraction in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5):
        held_out = sum(len(t.encode()) for t in texts.values() if hash_share(t) < fraction)
        parts = read_split(path, fraction)
        train = {document.number: document.text for document in parts["train"]}
        val = {document.number: document.text for document in parts["val"]}
        cut = train.keys() & val.keys()
        assert train.keys() | val.keys() == texts.keys()
        for number, text in texts.items():
            assert train.get(number, "") + val.get(number, "") == text  # its end is held out
            if number in cut:
                assert len(val[number].encode()) == pytest.approx(
                    len(text.encode()) * fraction, abs=4
                )
            else:
                assert (number in val) == (hash_share(text) < fraction)
        if abs(held_out / total - fraction) <= fraction / 4:
            n_even += 1
            assert not cut
        else:
            whole = texts.keys() - cut
            least = min(len(texts[number]) for number in cut)
            assert max(len(texts[number]) for number in whole) <= least
    assert 0 < n_even < 7


def test_equal_documents_are_cut_alike(tmp_path):
    path = write_folder(tmp_path / "folder", [9000] * 3)
    for number in range(5):
        (tmp_path / "folder" / f"copy{number}.txt").write_bytes(
            (tmp_path / "folder" / "000.txt").read_bytes()
        )
    parts = read_split(path, 0.1)
    assert not {d.text for d in parts["train"]} & {d.text for d in parts["val"]}
    assert share(parts) == pytest.approx(0.1, rel=0.25)


def test_short_documents_stay_whole(tmp_path):
    path = write_folder(tmp_path / "folder", [200 + 2 * i for i in range(30)])
    parts = read_split(path, 0.1)
    assert len(parts["train"]) + len(parts["val"]) == 30


def test_a_bound_on_the_bytes_read_cuts_the_same_documents(tmp_path):
    """A stream reads its start alone for validation, and all of it for training."""
    path = write_folder(tmp_path / "folder", SIZES)
    for fraction in (0.02, 0.05, 0.1):
        everything = read_split(path, fraction)
        start = read_split(path, fraction, first_bytes=200_000)
        n = len(start["val"])
        assert 0 < n < len(everything["val"])
        assert start["val"] == everything["val"][:n]


def prepare(tmp_path, path, fraction, **options):
    return prepare_corpus(
        **{"source": "text", "path": path, "tokenizer": "byte", "val_fraction": fraction,
           "cache_dir": tmp_path / "cache", **options}
    )  # fmt: skip


def test_a_share_far_from_what_was_asked_is_said(tmp_path, capsys):
    """At each start, also with cached tokens."""
    path = write_folder(tmp_path / "folder", [200 + 2 * i for i in range(30)])
    n_said = 0
    for fraction in (0.14, 0.2, 0.3, 0.4, 0.5):
        real = share(read_split(path, fraction))
        for _ in range(2):
            prepare(tmp_path, path, fraction)
            expected = (
                f"data.source=text: {real:.1%} of the text is held out for validation, not "
                f"{fraction:.1%} (data.val_fraction={fraction}): its documents are few or of very "
                "different lengths\n"
            )
            said = expected in capsys.readouterr().err
            is_far = abs(real - fraction) > fraction / 4
            assert said == is_far
            n_said += said
    assert 0 < n_said < 10
    prepare(tmp_path, path, 0.14, progress=False)
    assert "held out" not in capsys.readouterr().err
