"""The page of scripts/inspect_model.py in a real Chromium: how fast it opens, and how it answers."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import finish
from thinker.data.tokenizer_factory import make_tokenizer
from thinker.interpretability import html_report, reports
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

DRAWN = """async () => {
    while (typeof state !== "object" || !state.map?.shape) await new Promise(requestAnimationFrame);
    return performance.now(); // milliseconds since the navigation
}"""
CLICK = """async () => {
    const begin = performance.now(), cells = document.querySelectorAll("[role=gridcell]");
    cells[Math.floor(cells.length / 2) + 1].click();
    while (state.wanted !== `${state.layer}-${state.head}` || waiting) await new Promise(requestAnimationFrame);
    return performance.now() - begin;
}"""
FRAMES = """async (what) => {
    const buttons = document.querySelectorAll("#tokens button"), slider = document.getElementById("layer");
    const found = [];
    for (let step = 0; step < 120; step++) {
        if (what === "slide") {
            slider.value = step % facts.layers;
            slider.dispatchEvent(new Event("input"));
        } else {
            const event = { bubbles: true, clientX: 200, clientY: 200 };
            buttons[(step * 7) % buttons.length].dispatchEvent(new PointerEvent("pointerover", event));
        }
        const begin = performance.now();
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        found.push((performance.now() - begin) / 2);
    }
    return found;
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5, help="how often it is opened")
    parser.add_argument("--out", type=Path, help="a file that the result is appended to")


def run(arguments: argparse.Namespace) -> None:
    """A random model's page, and the same with weights that cannot be compressed; print medians and a line of JSON."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise UserError("this needs Chromium: apt-get install chromium")
    explorer = random_explorer(arguments.tokens, arguments.layers, arguments.heads)
    noise = {head: zlib.compress(os.urandom(len(zlib.decompress(data)))) for head, data in explorer.weights.items()}
    shape = {name: getattr(arguments, name) for name in ("tokens", "layers", "heads")}
    result = {"benchmark": "page", **shape, "repeats": arguments.repeats, "pages": []}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        result["browser"] = browser.version
        for name, shown in (("random model", explorer), ("noise", replace(explorer, weights=noise))):
            path = Path(folder) / "page.html"
            html_report.write_html_report(path, name, None, shown)
            row = {"weights": name, "megabytes": path.stat().st_size / 1e6, **measure(browser, path, arguments.repeats)}
            result["pages"].append(row)
            print(
                f"{name}: {row['megabytes']:.1f} MB, opens in {row['open_s']:.2f} s, a head in {row['click_s']:.3f} s; "
                f"frames take {row['slide_ms']:.0f} ms sliding (95%: {row['slide_95_ms']:.0f}), "
                f"{row['hover_ms']:.0f} ms hovering (95%: {row['hover_95_ms']:.0f})"
            )
        browser.close()
    finish(result, arguments.out)


def random_explorer(tokens: int, layers: int, heads: int) -> html_report.Explorer:
    """Of a model whose heads look sharply at tokens, all differently."""
    torch.manual_seed(1)
    shape = {"vocab_size": 257, "d_model": 8 * heads, "n_layers": layers, "n_heads": heads, "max_seq_len": tokens}
    model = Thinker(ThinkerConfig(**shape, qk_norm=False)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            if name.endswith("q_proj.weight"):
                parameter.view(heads, -1).mul_(torch.linspace(1, 6, heads)[:, None])
    words = ["the", "fox", "and", "a", "bird", "said", "saw", "little", "then", "who", "one", "day"]
    text = " ".join(random.Random(1).choices(words, k=tokens))[: tokens - 1]
    tokenizer = make_tokenizer("byte", [])
    return html_report.gather(model, tokenizer, reports.Prompt.read(model, tokenizer, text))


def measure(browser: Any, path: Path, repeats: int) -> dict[str, float]:
    """Medians: seconds until the first head is drawn and after a click on another, milliseconds of frames."""
    opened, clicked, slid, hovered = [], [], [], []
    for _ in range(repeats):
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(path.as_uri(), wait_until="commit")
        opened.append(tab.evaluate(DRAWN) / 1000)
        clicked.append(tab.evaluate(CLICK) / 1000)
        slid += tab.evaluate(FRAMES, "slide")
        hovered += tab.evaluate(FRAMES, "hover")
        tab.close()
    late = {"slide_95_ms": slid, "hover_95_ms": hovered}
    every = {"open_s": opened, "click_s": clicked, "slide_ms": slid, "hover_ms": hovered}
    found = {name: statistics.median(values) for name, values in every.items()}
    return found | {name: statistics.quantiles(values, n=20)[-1] for name, values in late.items()}
