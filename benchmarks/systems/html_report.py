"""Speed of the HTML report of scripts/inspect_model.py in Chromium."""

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

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import html_report, reports
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

WAIT_UNTIL_SHOWN = """async () => {
    while (typeof state !== "object" || !state.map?.shape) await new Promise(requestAnimationFrame);
    return performance.now(); // milliseconds since navigation
}"""
CLICK_HEAD = """async () => {
    const begin = performance.now(), cells = document.querySelectorAll("[role=gridcell]");
    cells[Math.floor(cells.length / 2) + 1].click();
    while (state.wanted !== `${state.layer}-${state.head}` || waiting) await new Promise(requestAnimationFrame);
    return performance.now() - begin;
}"""
TIME_FRAMES = """async (action) => {
    const buttons = document.querySelectorAll("#tokens button"), slider = document.getElementById("layer");
    const times = [];
    for (let step = 0; step < 120; step++) {
        if (action === "slide") {
            slider.value = step % facts.layers;
            slider.dispatchEvent(new Event("input"));
        } else {
            const event = { bubbles: true, clientX: 200, clientY: 200 };
            buttons[(step * 7) % buttons.length].dispatchEvent(new PointerEvent("pointerover", event));
        }
        const begin = performance.now();
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        times.push((performance.now() - begin) / 2);
    }
    return times;
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--tokens", type=int, default=512, help="tokens in the prompt")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    parser.add_argument("--heads", type=int, default=12, help="heads per layer")
    parser.add_argument("--repeats", type=int, default=5, help="number of times to open each page")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the page of a random model, and one whose weights cannot be compressed; print
    medians."""
    from playwright.sync_api import sync_playwright

    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        raise UserError("chromium is not installed; run apt-get install chromium")
    explorer = random_explorer(arguments.tokens, arguments.layers, arguments.heads)
    noise = {
        head: zlib.compress(os.urandom(len(zlib.decompress(data))))
        for head, data in explorer.weights.items()
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, page in (("random model", explorer), ("noise", replace(explorer, weights=noise))):
            path = Path(folder) / "page.html"
            html_report.write_html_report(path, name, None, page)
            row = {
                "weights": name,
                "megabytes": path.stat().st_size / 1e6,
                **measure(browser, path, arguments.repeats),
            }
            rows.append(row)
            print(
                f"{name}: {row['megabytes']:.1f} MB, opens in {row['open_s']:.2f} s, shows a head in "
                f"{row['click_s']:.3f} s; a frame takes {row['slide_ms']:.0f} ms sliding (95%: "
                f"{row['slide_95_ms']:.0f}), {row['hover_ms']:.0f} ms hovering (95%: {row['hover_95_ms']:.0f})"
            )
        version = browser.version
        browser.close()
    settings = {name: getattr(arguments, name) for name in ("tokens", "layers", "heads", "repeats")}
    return {**settings, "pages": rows, "browser": version}


def random_explorer(tokens: int, layers: int, heads: int) -> html_report.Explorer:
    """The page of a random model whose heads attend sharply to different tokens."""
    torch.manual_seed(1)
    shape = {
        "vocab_size": 257,
        "d_model": 8 * heads,
        "n_layers": layers,
        "n_heads": heads,
        "max_seq_len": tokens,
    }
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
    return html_report.make_explorer(
        model, tokenizer, reports.Prompt.from_text(model, tokenizer, text)
    )


def measure(browser: Any, path: Path, repeats: int) -> dict[str, float]:
    """Medians: seconds until the first head is shown and after a click on another, and milliseconds
    per frame."""
    opened, clicked = [], []
    frames: dict[str, list[float]] = {"slide": [], "hover": []}
    for _ in range(repeats):
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(path.as_uri(), wait_until="commit")
        opened.append(tab.evaluate(WAIT_UNTIL_SHOWN) / 1000)
        clicked.append(tab.evaluate(CLICK_HEAD) / 1000)
        for action, times in frames.items():
            times += tab.evaluate(TIME_FRAMES, action)
        tab.close()
    result = {"open_s": statistics.median(opened), "click_s": statistics.median(clicked)}
    for action, times in frames.items():
        result |= {
            f"{action}_ms": statistics.median(times),
            f"{action}_95_ms": statistics.quantiles(times, n=20)[-1],
        }
    return result
