"""Nightly cases of a table are skipped by default and run by `pytest -m nightly`, and no case is named in vain."""

import pytest

from tests.helpers.cases import Case, cases

pytest_plugins = ["pytester"]

FILE = """
import pytest
from tests.helpers.cases import Case, cases

@cases("name", {"field": Case({}, always=True), "no": Case({}, always=False), "plain": {}, "list": {}}, always=["list"])
def test_of_a_table(name):
    assert name

@cases(("n", "word"), [(1, "a"), (2, "b")], always=[(2, "b")], ids=["one", "two"])
def test_of_a_list(n, word):
    assert n

@pytest.mark.nightly
def test_marked():
    pass
"""
ALWAYS = ["test_of_a_table[field]", "test_of_a_table[list]", "test_of_a_list[two]"]
NIGHTLY = ["test_of_a_table[no]", "test_of_a_table[plain]", "test_of_a_list[one]", "test_marked"]


@pytest.mark.parametrize(
    ("expression", "passed", "skipped"),
    [("", ALWAYS, NIGHTLY), ("nightly", NIGHTLY, []), ("nightly or not nightly", [*ALWAYS, *NIGHTLY], [])],
)
def test_nightly_cases_run_when_asked_for(pytester, expression, passed, skipped):
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    run = pytester.inline_run(pytester.makepyfile(FILE), "-m", expression)
    names = [[report.nodeid.partition("::")[2] for report in reports] for reports in run.listoutcomes()]
    assert list(map(sorted, names)) == [sorted(passed), sorted(skipped), []]
    assert all(report.longrepr[2] == "Skipped: nightly: pytest -m nightly" for report in run.listoutcomes()[1])


def test_a_case_or_a_field_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"no such cases: \['tq'\]"):
        cases("name", {"tp": {}}, always=["tp", "tq"])
    with pytest.raises(TypeError, match="alway"):
        Case({}, alway=True)
