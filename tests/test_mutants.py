"""The mutants of tests/mutants/ can be made; `python -m tests.mutants` runs them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import NIGHTLY, is_nightly, patterns
from tests.mutants.__main__ import TABLE, known, mutated, table
from tests.mutants.table import MUTANTS, Mutant

PACKAGE = Path(__file__).parents[1] / "titanlite"
FEWEST = 80


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_is_another_program(mutant: Mutant):
    source = (PACKAGE / mutant.file).read_text()
    assert ast.dump(ast.parse(mutated(mutant, source))) != ast.dump(ast.parse(source))


def test_mutants_are_many_and_differ():
    assert len(MUTANTS) >= FEWEST
    assert Counter(mutant.what for mutant in MUTANTS).most_common(1)[0][1] == 1


def test_a_text_that_occurs_twice_is_no_mutant():
    with pytest.raises(ValueError, match="2 times"):
        mutated(Mutant("a.py", "what", "x", "y", ""), "x = x")


def test_the_table_is_that_of_the_results():
    assert TABLE.read_text() == table(MUTANTS, known())


def test_every_mutant_that_was_run_is_noticed_or_explained():
    results, by_name = known(), {mutant.what: mutant for mutant in MUTANTS}
    assert results.keys() <= by_name.keys()
    assert [name for name, each in results.items() if not (each["noticed by"] or by_name[name].survives)] == []


def test_what_notices_a_mutant_runs_every_time():
    lines = patterns(NIGHTLY.read_text())
    assert [name for name in (each["noticed by"] for each in known().values()) if is_nightly(name, lines)] == []
    assert is_nightly("tests/test_chaos.py::test_many_faults", lines)
