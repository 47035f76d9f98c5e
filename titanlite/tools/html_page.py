"""HTML pages of the commands: text and figures in one self-contained file.

Figures are SVG inside the page, with their text as text. The same content gives the same bytes.
"""

import html
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

WIDTH = 11.0
"""Width of a figure in inches; an inch is 96 pixels on a screen."""
STYLE = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9}


def page(title: str, body: str) -> str:
    """Return a page with a title, which is plain text, and a body, which is HTML."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("[[TITLE]]", html.escape(title)).replace("[[BODY]]", body)


def printed(content: RenderableType, width: int) -> str:
    """Return content as HTML, in the form that a terminal of `width` columns shows it."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(content)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def figure_style() -> AbstractContextManager[None]:
    """Return a context in which figures have the pages' style, whatever the user's matplotlibrc says."""
    return style.context(["default", STYLE])


def svg_figure(figure: Figure, name: str, caption: str, *, title: str) -> str:
    """Return a figure with its caption, as HTML. The name prefixes its ids, which must be unique in a page."""
    file = io.StringIO()
    with style.context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]  # drops the XML header
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # A precision of a hundredth of a point is enough.
    text = re.sub(r'\bd="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    caption = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f"<h2>{title}</h2>\n<figure>\n{text}{caption}\n</figure>\n"
