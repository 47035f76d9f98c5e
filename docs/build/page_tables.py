"""Tables in Markdown, and where they stand on a page; several benchmarks share this."""

from collections.abc import Iterable


def table_line(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def table_lines(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table."""
    columns = list(columns)
    return [table_line(cells) for cells in (columns, ["---"] * len(columns), *rows)]


def markers(name: str) -> tuple[str, str]:
    """Return what stands before and after a table on a page."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def with_table(text: str, name: str, table: str) -> str:
    """Return a page with the text between the markers of a table replaced. Raises ValueError if it lacks them."""
    begin, end = markers(name)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks the markers of {name}")
    return f"{before}{begin}\n\n{table}\n{end}{after}"
