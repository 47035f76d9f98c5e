"""Write the HTML pages of commands, with text and SVG figures in one file. Equal contents give byte-identical files."""

import html
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

WIDTH = 11.0  # width of a figure in inches of 96 pixels
STYLE = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9}


def page(title: str, body: str) -> str:
    """Return an HTML page. `title` is plain text, and `body` is HTML."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("[[TITLE]]", html.escape(title)).replace("[[BODY]]", body)


def printed(content: RenderableType, width: int = 150) -> str:
    """Return text and tables of rich as HTML that looks like a terminal of `width` columns. The default has room for
    the names of all kinds of memory in a plan's table."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(content)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def figure_style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws figures in the pages' style and ignores the user's matplotlibrc."""
    return style.context(["default", STYLE])


def svg_figure(figure: Figure, name: str, caption: str, *, title: str) -> str:
    """Return a figure with its caption, as HTML. `name` prefixes the figure's ids, which must be unique in a page."""
    file = io.StringIO()
    with style.context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]  # drop the XML header
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # Cut the coordinates of SVG paths to a hundredth of a point, so that the file is smaller.
    text = re.sub(r'\bd="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    caption = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f"<h2>{title}</h2>\n<figure>\n{text}{caption}\n</figure>\n"
