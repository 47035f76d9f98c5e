"""Links of the documentation to files outside docs/, which the built site does not contain."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page in which each link to a file outside docs/ is the file's path. mkdocs calls this for each page."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def without_link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(docs):
            return match[0]
        name = path.relative_to(docs.parent).as_posix()
        return f"`{name}`" if text.strip("`/") in name else f"{text} (`{name}`)"

    return LINK.sub(without_link, markdown)
