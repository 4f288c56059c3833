"""What the site needs beyond mkdocs: clients in the navigation, and the repository's files that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
#: Relative links that may leave the folder of the docs: target and anchor.
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Fill the section of the clients, or leave it out where there are none."""
    pages = sorted(path.name for path in Path(config.docs_dir, "integrations").glob("*.md"))
    for entry in list(config.nav):
        if "Clients" in entry:
            entry["Clients"] = [f"integrations/{name}" for name in pages]
            if not pages:
                config.nav.remove(entry)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Have links to files of the repository lead to copies within the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def copied(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/") or not (ROOT / path).is_file():
            return link[0]
        uri = f"repository/{path}"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        return f"]({posixpath.relpath(uri, folder or '.')})"

    return LINK.sub(copied, markdown)
