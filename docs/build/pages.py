"""Write the pages, and the part of README.md, that say what the code and the tests have.

    python -m docs.build.pages

It writes the reading order in README.md, the table of parts there and in docs/architecture.md, the table of complex
functions there, and commands.md, support.md and source_debug.txt in docs/reference/. tests/test_docs.py and
tests/tools/test_source.py fail until they are what this script writes. It also writes config.md there (config_page.py).
"""

import argparse
import ast
import contextlib
import importlib
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from docs.build import config_page
from docs.build.page_tables import with_table
from tests import test_architecture, test_families, test_families_by_options
from tests.helpers.cases import Case, marks_for
from tests.parallel import test_layouts, test_parity
from tests.techniques import test_ema, test_gpt_oss, test_lora, test_mla, test_qk_clip
from tests.techniques.moe import test_moe
from titanlite.launch.arguments import Parser
from titanlite.launch.cli import COMMANDS
from titanlite.tools import source

ROOT = Path(__file__).parents[2]
README, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "architecture.md"
REFERENCE = ROOT / "docs" / "reference"
COMMANDS_PAGE, SUPPORT_PAGE, SOURCE_PAGE = (
    REFERENCE / name for name in ("commands.md", "support.md", "source_debug.txt")
)
LINES_PER_MINUTE = 15
"""How fast a reader of code is taken to be, comments and docstrings included. Nobody was timed."""
COLUMNS = 100


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# The reading order of README.md ---------------------------------------------------------------------------------------


def reading_order() -> str:
    """Return the block of README.md with the files of the heart, in the order to read them, and how long they are."""
    paths = [ROOT / "titanlite" / f"{name}.py" for name in test_architecture.HEART]
    lines = {path: test_architecture.n_lines(path) for path in paths}
    rows = [
        [f"[{path.relative_to(ROOT / 'titanlite')}]({path.relative_to(ROOT)})", f"{n:,}", minutes(n)]
        for path, n in lines.items()
    ]
    total = sum(lines.values())
    n_run, _, n_with_comments = re.findall(r"\d[\d,]*", SOURCE_PAGE.read_text().splitlines()[-1])[:3]
    text = (
        f"The heart is these {len(paths)} files: {total:,} lines, {total / LINES_PER_MINUTE / 60:.1f} hours at an "
        f"assumed {LINES_PER_MINUTE} lines per minute. Training a plain Llama (`debug`) executes "
        f"[{n_run} lines of the heart](docs/reference/source_debug.txt), {n_with_comments} with docstrings and "
        "comments: `titanlite source debug`. A debug run with checkpoints imports at most "
        f"{test_architecture.LINES_OF_A_DEBUG_RUN:,} lines of titanlite, or "
        f"{test_architecture.LINES_WITH_A_TOKEN_CACHE:,} if its token cache exists. Each part has a ceiling of lines:"
    )
    return f"{table(['file in titanlite/', 'lines', 'minutes'], rows)}\n{wrapped(text)}\n{parts_table()}"


def parts_table() -> str:
    """Return the table of the parts of the package: their lines, and the most that they may have."""
    lines, ceilings = test_architecture.lines_by_part(), test_architecture.CEILINGS
    rows = [lines | {"all": sum(lines.values())}, ceilings | {"all": test_architecture.LINES_OF_THE_PACKAGE}]
    words = zip(("lines", "ceiling"), rows, strict=True)
    return table(["", *rows[0]], [[word, *(f"{n:,}" for n in row.values())] for word, row in words])


def complexity_table() -> str:
    """Return the table of the functions whose complexity is above the limit."""
    found = test_architecture.complex_functions_of_the_package()
    rows = [(*name.split(" "), f"{number}", test_architecture.MORE_COMPLEX[name]) for name, number in found.items()]
    return table(("file", "function", "complexity", "why"), rows)


def minutes(n_lines: int) -> str:
    """Return how long a reader takes for some lines."""
    return f"{max(1, round(n_lines / LINES_PER_MINUTE))}"


def readme(text: str) -> str:
    """Return README.md with its block of the reading order rewritten."""
    return with_table(text, "lines", reading_order())


def architecture(text: str) -> str:
    """Return docs/architecture.md with its tables of the parts and of complex functions rewritten."""
    return with_table(text, "parts", f"{parts_table()}\n{complexity_table()}")


# docs/reference/commands.md -------------------------------------------------------------------------------------------


def wrapped(text: str) -> str:
    """Return a paragraph in lines of prose."""
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"


def is_preformatted(line: str) -> bool:
    return line.startswith((" ", "titanlite ")) or (line.startswith("usage:"))


def markdown_of(help_text: str) -> str:
    """Return a help text as Markdown: what is indented, or shows a command, is a block of code."""
    result, lines = [], help_text.strip().splitlines()
    while lines:
        kind = is_preformatted(lines[0])
        group = []
        while lines and is_preformatted(lines[0]) == kind and lines[0].strip():
            group.append(lines.pop(0))
        if group and kind:
            result.append(f"```text\n{textwrap.dedent(chr(10).join(group))}\n```\n")
        elif group:
            result.append(wrapped(" ".join(group)))
        while lines and not lines[0].strip():
            lines.pop(0)
    return "\n".join(result)


def parser_of(main: Callable[[list[str]], int]) -> argparse.ArgumentParser | None:
    """Return the parser that prints the help of a command; None if the command prints a text of its own."""
    parsers = []
    with (
        mock.patch.object(Parser, "print_help", lambda self, file=None: parsers.append(self)),
        mock.patch("builtins.print"),
        contextlib.suppress(SystemExit),
    ):
        main(["--help"])
    return parsers[0] if parsers else None


def arguments_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Return a row for each argument of a parser: its name and its help."""
    rows = []
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        values = "|".join(map(str, action.choices or ())) if not action.metavar else str(action.metavar)
        name = " ".join(filter(None, [*action.option_strings[-1:], values if action.nargs != 0 else ""]))
        meaning = (action.help or "") % {**vars(action), "prog": ""}
        if action.default not in (None, False) and "default" not in meaning:
            meaning += f" (default: {action.default})"
        rows.append([f"`{name or action.dest}`".replace("|", "\\|"), meaning.strip()])
    return rows


def commands_page() -> str:
    """Return the page of all commands: what `--help` of each prints."""
    parts = [
        "# Commands\n",
        wrapped(
            "`titanlite COMMAND` and `python -m titanlite COMMAND` are the same. This page is what `--help` of each "
            "command prints, written by `python -m docs.build.pages`. `CONFIG` is the path of a TOML file, or the bare "
            "name of a config that comes with titanlite, such as `debug` or `70b`. Any option of the config can follow "
            "as `--section.key=value` ([options](config.md)). [Exit statuses](../reliability.md#exit-statuses) are the "
            "same for all commands."
        ),
        table(["command", "does"], [[f"[`titanlite {n}`](#titanlite-{n})", does] for n, (_, does) in COMMANDS.items()]),
    ]
    for name, (module_name, _) in COMMANDS.items():
        module = importlib.import_module(module_name)
        text, parser = module.__doc__ or "", parser_of(module.main)
        parts.append(f"## titanlite {name}\n")
        if parser and f"    titanlite {name} " not in text:
            parts.append(f"```text\n{textwrap.dedent(' ' * 7 + parser.usage)}\n```\n")
        parts.append(markdown_of(text))
        if parser:
            parts.append(table(["argument", "means"], arguments_of(parser)))
    return "\n".join(parts)


# docs/reference/support.md --------------------------------------------------------------------------------------------

Cases = Mapping[str, dict[str, Any]]
DEGREES = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
}
AXES = (*DEGREES.values(), "HSDP", "ulysses", "ring", "ep", "uneven shards", "zero-bubble", *test_layouts.SCHEDULES)
LAYOUT = re.compile(rf"(?:\d ranks|single process|all five axes|(?:{'|'.join(AXES)})(?: \d)?(?: x .*)?)$")


def split_id(name: str, options: dict[str, Any]) -> tuple[str, str]:
    """Return the technique and the layout that a test id names. If it names no layout, that of the options is taken."""
    words = name.split(", ")
    layout = ", ".join(word for word in words if LAYOUT.match(word))
    technique = ", ".join(word for word in words if not LAYOUT.match(word))
    degrees = [f"{axis} {options[key]}" for key, axis in DEGREES.items() if options.get(key, 1) > 1]
    layout = layout or " x ".join(degrees) or "one rank"
    if not technique:
        schedule = re.split(r" (?=\d|x )", layout)[0]
        n_axes = 5 if layout.startswith("all five") else 1 + layout.count(" x ")
        alone = "parallelism alone, " + ("one axis" if n_axes == 1 else f"{n_axes} axes")
        technique = f"schedule {schedule}" if schedule in test_layouts.SCHEDULES else alone
    return technique, layout


def support_rows(cases: Cases, nightly: set[str]) -> list[list[str]]:
    """Return a row for each technique: the layouts that it is verified under in every run of the tests, and nightly."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for name, options in cases.items():
        technique, layout = split_id(name, options)
        rows.setdefault(technique, ([], []))[name in nightly].append(layout)
    return [[technique, "; ".join(always), "; ".join(others)] for technique, (always, others) in rows.items()]


def tables() -> dict[str, tuple[Cases, set[str]]]:
    """Return for each section of the page its test cases, and the ids of those that are nightly."""
    parity = {name: options for name, (_, options) in test_parity.TEST_CASES.items()}
    by_options = test_families_by_options
    families = {
        ", ".join(case): Case(by_options.LAYOUTS[case[1]], always=case in by_options.ALWAYS)
        for case in by_options.CASES
    }
    sections: dict[str, tuple[Cases, set[str]]] = {}
    for title, module, cases in (
        ("Data parallel", test_parity, parity),
        ("All layouts", test_layouts, test_layouts.LAYOUTS),
        ("Low precision", test_layouts, test_layouts.LOW_PRECISION),
        ("Mixture of experts", test_moe, test_moe.LAYOUTS),
        ("Latent attention", test_mla, test_mla.LAYOUTS),
        ("LoRA", test_lora, test_lora.LAYOUTS),
        ("LoRA with bases of low precision", test_lora, test_lora.LOW_PRECISION),
        ("Biases, norms, head_dim and a window together", test_families, test_families.LAYOUTS),
        ("Families by options", by_options, families),
        ("gpt-oss", test_gpt_oss, test_gpt_oss.LAYOUTS),
        ("QK-clip", test_qk_clip, test_qk_clip.LAYOUTS),
        ("Averages of the weights (EMA)", test_ema, test_ema.LAYOUTS),
        ("Resume of a checkpoint of pp 2 x shard 2 x cp 2", test_layouts, test_layouts.TO),
    ):
        nightly = {name for name, options in cases.items() if marks_for(options)}
        sections[f"{title} ({Path(module.__file__).relative_to(ROOT)})"] = cases, nightly
    return sections


def first_paragraph(path: Path) -> str:
    """Return the first paragraph of a file's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def support_page() -> str:
    """Return the page of what is tested, from the tables of the parity tests and the docstrings of all test files."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    parts = [
        "# What is tested: supported layouts and techniques\n",
        wrapped(
            "`python -m docs.build.pages` writes this page from the tables of the tests. Each entry is a parity test: "
            "real processes on gloo take three AdamW steps with gradient clipping, with different numbers of valid "
            "tokens on the ranks. Loss, gradient norm, every gradient, every updated weight and the validation loss "
            "are compared with a single process. In float64 they agree to 1e-11, and to 1e-12 for data parallel alone; "
            "initial weights agree bit for bit. Low precision is compared with a reference in the same precision, "
            "within 8 times that reference's own rounding error, and must differ from full precision."
        ),
        wrapped(
            "A row is a technique, a cell the layouts that it is tested under: in every run of the tests, or nightly "
            '(`pytest -m nightly`). `pytest tests/parallel/test_layouts.py -k "cp and tp"` runs the cases that have '
            "both names. To verify a config of your own, run `titanlite parity CONFIG.toml`. What is unsupported, and "
            "why: [parallelism](../parallelism.md#unsupported), [memory and speed](../memory.md#unsupported). What "
            "has run on GPUs: [one H200](../benchmarks.md#on-one-h200)."
        ),
    ]
    for title, (cases, nightly) in tables().items():
        parts += [f"## {title}\n", table(["technique", "every run", "nightly"], support_rows(cases, nightly))]
    rows = [[f"`{path.relative_to(ROOT / 'tests')}`", first_paragraph(path)] for path in files]
    parts += ["## What each test file verifies\n", table(["file in tests/", "verifies"], rows)]
    return "\n".join(parts)


def source_page() -> str:
    """Return what `titanlite source debug` prints: the lines that a plain Llama executes."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        source.main(["debug"])
    return out.getvalue()


def main() -> None:
    SOURCE_PAGE.write_text(source_page())
    README.write_text(readme(README.read_text()))
    ARCHITECTURE.write_text(architecture(ARCHITECTURE.read_text()))
    COMMANDS_PAGE.write_text(commands_page())
    SUPPORT_PAGE.write_text(support_page())
    config_page.PAGE.write_text(config_page.reference_markdown())


if __name__ == "__main__":
    main()
