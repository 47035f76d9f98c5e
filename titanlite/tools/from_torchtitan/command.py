"""Convert a TOML file of torchtitan 0.2, and list what became of each key."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titanlite.config import ConfigError, load_values
from titanlite.config.loader import parse_toml, print_problems, printable, read_toml, show
from titanlite.tools.from_torchtitan.conversion import MISSING, TAKEN, UNKNOWN, WHATEVER_THE_FILE_SAYS, Conversion, Row
from titanlite.tools.from_torchtitan.groups import convert


def listing(rows: list[Row]) -> Table:
    """Return a table that says what became of each key of the file, grouped by status."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("torchtitan", overflow="fold", ratio=2)
    table.add_column("titanlite", overflow="fold", ratio=3)
    for number, row in enumerate(rows):
        is_first = not number or rows[number - 1].status != row.status
        if is_first and number:
            table.add_section()
        target = "" if row.status == TAKEN else row.target
        text = Text(target).append("\n" * bool(target and row.note)).append(row.note, style="italic")
        table.add_row(row.status if is_first else "", Text(row.source), text)
    return table


def main(argv: list[str]) -> int:
    """Write the config, and the listing to standard error. Return 0, or 2 if titanlite would reject the config."""
    if len(argv) not in (1, 2) or any(not name or name.startswith("-") for name in argv):
        raise ConfigError(["expected titanlite config --from-torchtitan FILE [TARGET.toml]"])
    source, *targets = argv
    conversion = convert(read_toml(source))
    problems = problems_of(conversion, targets[0] if targets else "the converted config")
    text = conversion.toml(header(source, conversion.rows, problems))
    if targets:
        target = Path(targets[0])
        try:
            if target.exists() and target.samefile(source):
                raise ConfigError([f"{target}: is the file to convert; name another"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"{target}: cannot be written: {error.strerror}"]) from None
    else:
        print(text, end="")
    console = Console(stderr=True, highlight=False, markup=False, width=max(Console(stderr=True).width, 140))
    console.print(listing(conversion.rows))
    console.print("Differs whatever the file says:", *(f"- {line}" for line in WHATEVER_THE_FILE_SAYS), sep="\n")
    if targets:
        console.print(f"written: {targets[0]}")
    print_problems(ConfigError(problems))
    return 2 if problems else 0


def header(source: str, rows: list[Row], problems: list[str]) -> list[str]:
    """Return the comments at the config's top: source file, unknown keys, keys that titanlite lacks, and problems."""
    lacks = [row for row in rows if row.matters and row.status in (MISSING, UNKNOWN)]
    lines = [f"Converted from torchtitan's {show(source)} by titanlite config --from-torchtitan."]
    lines += [f"{row.status}: {row.source}: {row.note}" for row in lacks]
    return [printable(line) for line in [*lines, *(f"error: {problem}" for problem in problems)]]


def problems_of(conversion: Conversion, name: str) -> list[str]:
    try:
        load_values(parse_toml(conversion.toml([])), name, [])
    except ConfigError as error:
        return error.problems
    return []
