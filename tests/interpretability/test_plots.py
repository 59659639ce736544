"""Pictures: the colors that values have, tokens in lines, and shapes that do not fit a simple
heatmap."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from thinker.interpretability import head_reports, plots
from thinker.interpretability.reports import Panel

NOTHING = "#e9e9ec"


def colors(path):
    """Every color of a picture, and how often it is there."""
    pixels, counts = np.unique(
        imread(path)[..., :3].reshape(-1, 3).round(3), axis=0, return_counts=True
    )
    return {tuple(pixel): int(n) for pixel, n in zip(pixels.tolist(), counts)}


def has(found, color):
    return sum(
        n for pixel, n in found.items() if np.abs(np.array(pixel) - to_rgb(color)).max() < 0.01
    )


def test_cells_have_the_colors_of_their_values(tmp_path):
    values = torch.tensor([[0.0, 1.0, torch.nan], [0.5, 0.25, 0.5]])
    plots.plot_panels(
        [Panel("weights", values, ["a", "b"], ["x", "y", "z"], vmax=1.0)],
        tmp_path / "p.png",
        "of it",
    )
    found, blues = colors(tmp_path / "p.png"), colormaps["Blues"]
    assert has(found, NOTHING) > 5000
    assert has(found, blues(1.0)[:3]) > 5000
    assert has(found, blues(0.5)[:3]) > 1.5 * has(found, blues(0.25)[:3]) > 5000


def test_below_zero_is_blue_above_it_red(tmp_path):
    values = torch.tensor([[-2.0, 0.0, 1.0]])
    plots.plot_panels(
        [Panel("$given$", values, [""], ["$a", "b", "c_d"], True, style="text")],
        tmp_path / "p.png",
        "of it",
    )
    found, palette = colors(tmp_path / "p.png"), colormaps["RdBu_r"]
    assert has(found, palette(0.0)[:3]) > 100
    assert has(found, palette(0.75)[:3]) > 100


def test_long_texts_go_on_in_new_lines():
    lines = plots._wrapped(["x" * 50, "y" * 30, "z" * 10, "w" * 200, "v"])
    assert lines == [[0, 1], [2], [3], [4]]


def test_lines_and_tables_and_many_panels(tmp_path):
    steps = torch.rand(5, 9)
    panels = [
        Panel(
            "scores",
            steps,
            ["0", "10", "20", "30", "40"],
            [f"0.{i}" for i in range(9)],
            vmax=1.0,
            style="lines",
        ),
        Panel(
            "said",
            torch.rand(2, 2),
            ["a", "b"],
            ["c", "d"],
            style="table",
            cells=[["$x", "y"], ["z", "{w}"]],
        ),
        Panel(
            "wide",
            torch.rand(3, 300),
            ["a", "b", "c"],
            [str(i) for i in range(300)],
            highlighted_row=1,
        ),
        Panel("all the same", torch.zeros(2, 2), ["a", "b"], ["c", "d"]),
    ]
    plots.plot_panels(panels, tmp_path / "p.png", "four", panels_per_row=2)
    height, width = imread(tmp_path / "p.png").shape[:2]
    assert width <= 16 * 120
    assert height < 1500


def test_a_map_of_all_heads_has_one_tile_for_each(random_model):
    model = random_model(n_layers=3, n_kv_heads=4)
    tokens = torch.arange(20)[None] % 61
    tiles = head_reports._tile_attention_maps(model, tokens)
    assert tiles.shape == (3 * 22 - 2, 4 * 22 - 2)
    weights = model.attention_weights(tokens)[2, 0, 1]
    top = weights[:, 1:].max()
    torch.testing.assert_close(tiles[44:64, 22:42], (weights / top).clamp_max(1), rtol=0, atol=1e-4)
    assert tiles[20:22].isnan().all()
    assert (
        head_reports._tile_attention_maps(
            random_model(max_seq_len=300), torch.ones(1, 300, dtype=int)
        ).shape[0]
        == 60 + 4 + 60
    )


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(IsADirectoryError):
        plots.plot_panels([Panel("p", torch.eye(2), ["a"], ["b"])], tmp_path, "a folder")
