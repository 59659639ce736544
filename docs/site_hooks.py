"""The guides of optional features on the site; mkdocs.yml names this file.

A guide lies in the folder of its feature, features/NAME/guide.md, and goes with it. On the site, it
is guides/NAME.html. Links are written as paths in the repository, so they work there, too. Here
they become paths of the site.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")  # text, path, anchor
GUIDE = re.compile(r"features/(\w+)/guide\.md")
log = logging.getLogger("mkdocs.hooks.features")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the guides, and the reference pages that features generate, to the navigation."""
    sections = {}
    for entry in config.nav:
        sections.update(entry)
    listed = set()
    for pages in (sections["Features"], sections["Reference"]):
        for page in pages:
            listed.update(page.values())
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        name = f"reference/{path.name}"
        if name not in listed:
            sections["Reference"].append(name)
    for path in guides():
        sections["Features"].append(f"guides/{path.parent.name}.md")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the guides to the pages."""
    for path in guides():
        name = f"guides/{path.parent.name}.md"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links from and to guides lead to pages of the site.

    A link to the guide of a feature that has been deleted becomes plain text.
    """
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def in_site(link: re.Match) -> str:
        text, path, anchor = link.groups(default="")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        guide = GUIDE.fullmatch(target)
        if guide and not (ROOT / target).is_file():
            log.info(f"{source}: no link to {target}, which is not there")
            return text
        if guide:
            target = f"docs/guides/{guide[1]}.md"
        if not target.startswith("docs/"):
            return link[0]
        shown = posixpath.dirname(f"docs/{page.file.src_uri}")
        return f"[{text}]({posixpath.relpath(target, shown)}{anchor})"

    return LINK.sub(in_site, markdown)


def guides() -> list[Path]:
    """The guides of the features that are there."""
    return sorted((ROOT / "features").glob("*/guide.md"))
