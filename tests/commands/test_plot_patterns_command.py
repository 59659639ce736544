"""scripts/plot_patterns.py as a user runs it, and its plots cell by cell against loops."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_script
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from thinker.interpretability.pattern_plots import (
    COLORS,
    FUTURE,
    FUTURE_VISIBLE,
    GALLERY,
    MASKED,
    SUMMED,
    VISIBLE,
    describe_cache,
    make_pattern_plot,
    plot_patterns,
)
from thinker.model import ThinkerConfig
from thinker.model.kernels.linear_attention import LinearState
from thinker.model.kv_cache import KVCache, RingLayer
from thinker.model.patterns.pattern_parser import PATTERNS, parse_pattern

SCRIPT = ROOT / "scripts" / "plot_patterns.py"


def test_a_users_own_style_of_plots_is_not_read(tmp_path):
    for folder in ("plain", "own"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own" / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 9\n")
    for folder, variables in (("plain", {}), ("own", {"MPLBACKEND": "nonsense"})):
        command = [sys.executable, SCRIPT, "window(3)", "--png", "a.png"]
        done = subprocess.run(
            command,
            cwd=tmp_path / folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "own" / "a.png").read_bytes() == (tmp_path / "plain" / "a.png").read_bytes()
    (tmp_path / "own" / "matplotlibrc").write_bytes(b"\xff\xfe")
    done = subprocess.run(command, cwd=tmp_path / "own", capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: matplotlib failed to start; check your matplotlibrc"
    )


WINDOW = """\
window(3)
██
████
██████
· ██████
· · ██████
· · · ██████
2.5 keys per query, 2.9 at length 24; cache: the newest 3
"""
PREFIX = """\
prefix(3) | global(1)
██▓▓▓▓
████▓▓
██████
████████
██████████
████████████
4.0 keys per query, 12.6 at length 24; cache: all
"""
LINEAR = """\
linear(9) (sums over features)
░░
░░░░
░░░░░░
░░░░░░░░
░░░░░░░░░░
░░░░░░░░░░░░
3.5 keys per query, 12.5 at length 24; cache: 9 sums
"""
LEGEND = (
    "rows: queries, columns: keys; ██ attended to, ▓▓ attended to, after the query, "
    "░░ attended to (sums over features), · masked\n"
)


def test_text_from_another_folder(tmp_path):
    done = run_script(
        SCRIPT, "window(3)", "prefix(3)  | global(1)", "linear(9)", "--length", "6", cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"{WINDOW}\n{PREFIX}\n{LINEAR}\n{LEGEND}",
        "",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["windw(3)"], "unknown pattern windw; did you mean window?"),
        (["LLLG"], "LLLG is not a list of layers; use the letters L (model.window) and G (full)"),
        (["random(1, 16777216)"], "random(1, 16777216) is too large: 16,777,216 (maximum: 256)"),
        (["linear(16777216)"], "linear(16777216) is too large: 16,777,216 (maximum: 65,536)"),
        (["--length", "0"], "--length is 0; use 1 to 128"),
        (["--heads", "two"], "invalid int value: 'two'"),
    ],
)
def test_mistakes(arguments, message, tmp_path):
    done = run_script(SCRIPT, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("png", "reason"),
    [
        (
            "nowhere/a.png",
            "cannot write nowhere/a.png: its folder does not exist or is not writable",
        ),
        (".", "cannot write .: it is a folder; give a file name"),
        ("a.jpg", "cannot write plot a.jpg: plots are PNG files; give a name that ends in .png"),
    ],
)
def test_a_file_that_cannot_be_written(png, reason, tmp_path):
    done = run_script(SCRIPT, "full", "--png", png, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {reason}\n")
    assert list(tmp_path.iterdir()) == []


def expected(attends, head, length):
    """A head's cells, from a predicate in plain Python."""
    kinds = {
        (False, False): FUTURE,
        (True, False): MASKED,
        (False, True): FUTURE_VISIBLE,
        (True, True): VISIBLE,
    }
    return [
        [kinds[k <= q, bool(attends(head, q, k))] for k in range(length)] for q in range(length)
    ]


def test_pixels(tmp_path):
    mixed = "heads(window(2), block(3), prefix(4))"
    both = {
        "dilated(6, 2) | global(1)": lambda head, q, k: k <= q and (q - k in (0, 2, 4) or k == 0),
        mixed: lambda head, q, k: (
            (k <= q and (q - k < 2, q // 3 == k // 3, True)[head]) or (head == 2 and k < 4)
        ),
    }
    done = run_script(SCRIPT, *both, "--length", "12", "--png", "a.png", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "wrote a.png\n"), done.stderr
    pixels = imread(tmp_path / "a.png")
    figure, panels = plot_patterns([make_pattern_plot(text, 12) for text in both])
    figure.set_dpi(160)  # as the file's
    figure.draw_without_rendering()
    assert pixels.shape[:2] == (figure.bbox.height, figure.bbox.width)
    for axes, (text, attends) in zip(panels, both.items()):
        for head in range(3 if text == mixed else 1):
            for q, row in enumerate(expected(attends, head, 12)):
                for k, cell in enumerate(row):
                    if cell == FUTURE:
                        continue  # labels stand there
                    x, y = axes.transData.transform(
                        (head % 2 * 13 + k + 0.5, head // 2 * 13 + q + 0.5)
                    )
                    color = pixels[int(len(pixels) - y), int(x), :3]
                    assert color == pytest.approx(to_rgb(COLORS[cell]), abs=0.01), (
                        text,
                        head,
                        q,
                        k,
                    )


def test_the_gallery_has_every_kind():
    text = "; ".join([*GALLERY, *(parse_pattern(each).text for each in GALLERY)])
    assert [name for name in PATTERNS.names() if name not in text] == []


@pytest.mark.parametrize(
    "text", [*GALLERY, "global(2)", "topk(4) & window(8)", "retrieve(2, 1) & window(8)"]
)
def test_the_described_cache_is_what_the_cache_keeps(text):
    shape = {"vocab_size": 9, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 64}
    (layer,) = KVCache(
        ThinkerConfig(**shape, attention=text), 1, 1000, torch.device("cpu"), None
    ).layers
    if isinstance(layer, LinearState):
        kind = f"{layer.sums.shape[2]} sums"
    elif isinstance(layer, RingLayer):
        kind = f"the newest {layer.size - layer.n_global}"
        if layer.n_global:
            kind = f"the first {layer.n_global} and {kind}"
    else:
        kind = "all"
    assert describe_cache(parse_pattern(text)) == kind


def test_examples_of_patterns_that_depend_on_data():
    topk, token = make_pattern_plot("topk(3)", 20), make_pattern_plot("token(5, 8)", 20)
    assert (topk.cells == VISIBLE).sum(-1).tolist() == [[min(3, q + 1) for q in range(20)]]
    special = (3, 10, 17)
    assert token.cells[0].tolist() == expected(
        lambda _, q, k: k <= q and {q, k} & {*special}, 0, 20
    )
    assert "random" in topk.note
    retrieve = make_pattern_plot("retrieve(4, 2)", 20)
    assert (retrieve.cells == VISIBLE).sum(-1).tolist() == [
        [4 * min(2, q // 4) + q % 4 + 1 for q in range(20)]
    ]
    assert "random" in retrieve.note
    assert "every 7th" in token.note
    assert set(make_pattern_plot("linear(4)", 20).cells.unique().tolist()) == {FUTURE, SUMMED}
    assert [
        len(make_pattern_plot("bigbird(4, 2, 4, 2)", 20, heads).cells) for heads in (None, 2)
    ] == [4, 2]
