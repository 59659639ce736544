"""The playground: one self-contained page that talks to the HTTP API of its server."""

import re
from functools import cache
from pathlib import Path

from thinker.interop.find import find_run_directory
from thinker.runtime.yaml_files import read_yaml

FOLDER = Path(__file__).parent / "page"
# Relative to this folder; the first of each is shared by all pages.
STYLES = ("../../runtime/page/page_base.css", "playground.css")
SCRIPTS = (
    "../../runtime/page/page_base.js",
    "playground_api.js",
    "playground_tokens.js",
    "playground_popover.js",
    "playground_settings.js",
    "playground_pane.js",
    "playground_write.js",
    "playground_chat.js",
    "playground.js",
)


@cache
def playground_page() -> str:
    """Return the page as HTML, with its style and scripts inlined."""
    parts = {"style": _concatenate(STYLES), "script": _concatenate(SCRIPTS)}
    page = (FOLDER / "playground.html").read_text("utf-8")
    return re.sub(r"<!--(style|script)-->", lambda match: parts[match[1]], page)


def example_prompt(path: Path) -> str | None:
    """The prompt of the samples of the run at a path or around a checkpoint; None without one.

    The page offers it to whoever sees the model for the first time. Raises UserError for a config
    that cannot be read.
    """
    run = find_run_directory(path)
    if run is None:
        return None
    section = read_yaml(run / "config.yaml").get("train")
    prompt = section.get("sample_prompt") if isinstance(section, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        return None
    return prompt


def _concatenate(names: tuple[str, ...]) -> str:
    """The text of these files, one after the other."""
    text = ""
    for name in names:
        text += (FOLDER / name).read_text("utf-8")
    return text
