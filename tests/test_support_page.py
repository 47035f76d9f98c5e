"""docs/reference/support.md has every parity test, and pages name only tests that exist."""

import re
from pathlib import Path

import pytest

from docs.build import pages
from tests.parallel import test_layouts, test_parity

ROOT = Path(__file__).parents[1]
PAGE = pages.SUPPORT_PAGE.read_text()
NAMING_TESTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "NOTEBOOK.md"]
IDS = {*test_parity.TEST_CASES, *test_layouts.LAYOUTS, *test_layouts.LOW_PRECISION, *test_layouts.TO}


def entries(page: str, title: str) -> list[tuple[str, str, bool]]:
    """Return each technique and layout in a section of the page, and whether it is nightly."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    result = []
    for line in section.strip().splitlines()[2:]:
        technique, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        result += [(technique, layout, n == 1) for n, cell in enumerate(cells) for layout in cell.split("; ") if layout]
    return result


@pytest.mark.parametrize("title", pages.tables())
def test_every_test_case_is_on_the_page_once(title: str):
    cases, nightly = pages.tables()[title]
    expected = [(*pages.split_id(name, options), name in nightly) for name, options in cases.items()]
    assert len(set(expected)) == len(cases)
    assert sorted(entries(PAGE, title)) == sorted(expected)


def test_every_test_id_is_in_a_table():
    assert {name for cases, _ in pages.tables().values() for name in cases} >= IDS


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("cp x tp", {}, ("parallelism alone, 2 axes", "cp x tp")),
        ("1F1B 2", {}, ("schedule 1F1B", "1F1B 2")),
        ("full AC, ulysses, document mask", {}, ("full AC, document mask", "ulysses")),
        ("4 ranks, HSDP, ZeRO-1", {}, ("ZeRO-1", "4 ranks, HSDP")),
        ("8-bit states", {"data_parallel_shard_degree": 2}, ("8-bit states", "shard 2")),
        ("document mask", {}, ("document mask", "one rank")),
    ],
)
def test_a_test_id_names_a_technique_and_a_layout(name: str, options: dict[str, int], expected: tuple[str, str]):
    assert pages.split_id(name, options) == expected


def unknown_tests(page: str) -> set[str]:
    """Return the names of test functions on a page that do not exist."""
    sources = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"`(test_\w+)`", page)) - set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))


@pytest.mark.parametrize("path", NAMING_TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_test_exists(path: Path):
    assert unknown_tests(path.read_text()) == set()


def test_unknown_names_are_found():
    assert unknown_tests("`test_of_nothing` and `test_unknown_names_are_found`") == {"test_of_nothing"}
