"""docs/support.md names all parity tests, and only tests that exist."""

import re
from pathlib import Path

from tests import test_layouts, test_parity

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "support.md").read_text()
PLACEHOLDERS = {
    "N": ("1", "2", "4"),
    "SCHEDULE": test_layouts.SCHEDULES,
    "RECIPE": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "MODE": ("full", "selective"),
}
IDS = {str(case.id) for case in test_parity.TEST_CASES} | {*test_layouts.LAYOUTS}
IDS |= {*test_layouts.LOW_PRECISION, *test_layouts.TO}
NOT_IDS = {"reshard always", "op", "model", "loss"}
"""What the page quotes besides ids: values of options, and the end of several ids."""


def named_ids(page: str) -> set[str]:
    """Return the test ids in double quotes on a page, once for each value of a placeholder."""
    prose = re.sub(r"`[^`]*`", "", page)  # code spans quote values of options
    names = {" ".join(name.split()) for name in re.findall(r'"([^"]*)"', prose)} - NOT_IDS
    for placeholder, values in PLACEHOLDERS.items():
        names = {re.sub(rf"\b{placeholder}\b", value, name) for name in names for value in values}
    return names


def unknown_tests(page: str) -> set[str]:
    """Return the test ids and the names of test functions on a page that do not exist."""
    sources = "".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    functions = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    return (set(re.findall(r"`(test_\w+)`", page)) - functions) | (named_ids(page) - IDS)


def test_every_named_test_exists():
    assert unknown_tests(PAGE) == set()


def test_unknown_names_are_found():
    unknown = {"tp 3", "test_of_nothing", *(f"{schedule} 3" for schedule in test_layouts.SCHEDULES)}
    assert unknown_tests(PAGE + '"tp 3", "SCHEDULE 3", `test_of_nothing`, "tp\n2"') == unknown


def test_every_test_id_is_on_the_page():
    assert IDS - named_ids(PAGE) == set()
