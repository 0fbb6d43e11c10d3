"""Hooks of the documentation site (mkdocs.yml): Markdown written for the repository becomes pages.

Pages that stand outside docs/ join the site, and links are followed from where their file stands in the repository. A
link to what is no page (a folder, a script) is left as its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "past_opsd/tasks/embedded_model/README.md": "embedded-model.md",
    "past_opsd/tasks/embedded_expert/README.md": "embedded-expert.md",
}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages that stand elsewhere."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Links as the site has them."""
    here = page.file.src_uri
    source = next((path for path, name in ELSEWHERE.items() if name == here), f"docs/{here}")

    def follow(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / target).exists():
            raise SystemExit(f"{source}: the link to {path} leads nowhere")
        name = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text
        return f"[{text}]({posixpath.relpath(name, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(follow, markdown)
