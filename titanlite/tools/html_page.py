"""HTML pages of the commands: text and figures in one self-contained file.

Figures are SVG inside the page, with their text as text. The same content gives the same bytes.
"""

import html
import io
import re
from contextlib import AbstractContextManager

from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

WIDTH = 11.0
"""Width of a figure in inches; an inch is 96 pixels on a screen."""
STYLE = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 2em auto; max-width: 1080px; padding: 0 1em; font: 15px/1.45 sans-serif; color: #111; \
background: #fff; }}
h1 {{ font-size: 1.5em; margin-bottom: 0.2em; }} h2 {{ font-size: 1.15em; margin: 2em 0 0.3em; }}
p {{ margin: 0.3em 0; }} svg {{ display: block; width: 100%; height: auto; }}
figure {{ margin: 0.5em 0 1.5em; break-inside: avoid; }}
figcaption {{ font-size: 0.87em; color: #444; max-width: 60em; }}
pre {{ font: 12px/1.2 "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; }}
@media print {{ body {{ margin: 0; max-width: none; padding: 0; }} pre {{ font-size: 6.5pt; overflow: visible; }} }}
</style></head><body>
{body}
</body></html>
"""


def page(title: str, body: str) -> str:
    """Return a page with a title, which is plain text, and a body, which is HTML."""
    return PAGE.format(title=html.escape(title), body=body)


def printed(content: RenderableType, width: int) -> str:
    """Return content as HTML, in the form that a terminal of `width` columns shows it."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(content)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def figure_style() -> AbstractContextManager[None]:
    """Return a context in which figures have the pages' style, whatever the user's matplotlibrc says."""
    return style.context(["default", STYLE])


def svg_figure(figure: Figure, name: str, caption: str, *, title: str = "") -> str:
    """Return a figure with its caption, as HTML. The name prefixes its ids, which must be unique in a page."""
    heading = f"<h2>{title}</h2>\n" if title else ""
    caption = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f"{heading}<figure>\n{_svg(figure, name)}{caption}\n</figure>\n"


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element."""
    file = io.StringIO()
    with style.context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]  # drops the XML header
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # A precision of a hundredth of a point is enough.
    return re.sub(r'\bd="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
