"""Files from strangers: pipes, devices, files without end, YAML and JSON that take forever."""

import contextlib
import os
import random
import re
import time

import pytest

from thinker.runtime import reading
from thinker.runtime.errors import UserError
from thinker.runtime.yaml_files import read_yaml

READERS = [reading.read_text, reading.read_json, read_yaml]


@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "endless"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read(tmp_path / name)
    for name in ("nowhere", "a\0b", "\ud800", "x" * 300):
        with pytest.raises(UserError, match="does not exist|cannot be read"):
            read(tmp_path / name)


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_is_too_large_or_no_text(tmp_path, read):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(reading.MAX_FILE_BYTES + 1)  # takes no space on the disk
    with pytest.raises(UserError, match="is too large; the limit is 64 MB"):
        read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is UTF-16 text|is not valid JSON"):
        read(path)


def test_yaml_aliases_are_refused_before_they_are_expanded(tmp_path):
    path = tmp_path / "a.yaml"
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11)]
    path.write_text("\n".join(["a0: &a0 [1]", *levels]))
    start = time.monotonic()
    with pytest.raises(
        UserError, match=r"a.yaml, line 2: invalid YAML: aliases such as \*a0 are not supported"
    ):
        read_yaml(path)
    assert time.monotonic() - start < 60  # expanded they would take hours
    path.write_text("base: &base {a: 1}\nother:\n  <<: *base\n")
    with pytest.raises(UserError, match="line 3: invalid YAML: aliases"):
        read_yaml(path)


@pytest.mark.parametrize("read", [reading.read_json, read_yaml])
@pytest.mark.parametrize(
    "text", ["[" * 9999, '{"a":' * 9999, "[1]", "7", "a: 2024-99-99", "{", "'", "\t", "a: 1\na: 2"]
)
def test_broken_files_are_one_line(tmp_path, read, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match="file") as error:
        read(tmp_path / "file")
    assert len(str(error.value)) < 1000


def test_random_yaml_is_read_or_refused(tmp_path):
    rng, path = random.Random(0), tmp_path / "a.yaml"
    for _ in range(300):
        path.write_text("".join(rng.choices("ab:-[]{}&*!|>#'\"%@ \n\t01.~<", k=rng.randrange(30))))
        with contextlib.suppress(UserError):
            assert isinstance(read_yaml(path), dict)


@pytest.mark.parametrize(
    "pattern", ["((([a-z_.0-9])+)+)+Z", "(a*b?)*c", "(a{2,}){2,}", ".*.*.*.*.*Z", "(x+x+)+y"]
)
def test_a_pattern_that_may_take_forever_is_refused(pattern):
    with pytest.raises(re.error, match="it has nested repetitions, or more than 4"):
        reading.checked_pattern(pattern)


def test_patterns_that_people_use_are_accepted():
    for pattern in (
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.(\d+)\.self_attn\.(q|k|v)_proj",
        r".*(gate|up|down)_proj$",
    ):
        assert reading.checked_pattern(pattern) == pattern
