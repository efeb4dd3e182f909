"""A hook of mkdocs: the site has only the pages of docs/, so links to other files of the repository need care there."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Return the page with each link out of docs/ replaced: by one to the repository's own site where mkdocs.yml has
    its `repo_url`, else by the file's path."""
    repository = config["repo_url"]

    def replacement(link: re.Match[str]) -> str:
        text, path = link.groups()
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path})"
        return f"{text} (`{path}`)"

    return OUTSIDE.sub(replacement, markdown)
