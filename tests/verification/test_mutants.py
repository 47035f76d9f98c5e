"""The mutants of verification/mutants/ can be made; `python -m verification.mutants` runs them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from verification.mutants import public_bugs
from verification.mutants.__main__ import ROOT, TABLE, copy_project, first_failure, known, mutated, table
from verification.mutants.public_bugs import PUBLIC_BUGS
from verification.mutants.table import MUTANTS, Mutant

PACKAGE = Path(__file__).parents[2] / "titanlite"
FEWEST = 80
OF_PUBLIC_BUGS = list(dict.fromkeys(bug.mutant for bug in PUBLIC_BUGS))
ALL = {mutant.what: mutant for mutant in [*MUTANTS, *OF_PUBLIC_BUGS]}.values()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.what)
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


def test_what_notices_a_mutant_runs_every_time(request):
    assert [each for each in known().values() if each["noticed by"] and "::" not in each["noticed by"]] == []
    nightly = {item.nodeid for item in request.session.items if item.get_closest_marker("nightly")}
    assert nightly & {each["noticed by"] for each in known().values()} == set()


def test_a_test_that_fails_notices_and_a_file_that_cannot_be_imported_does_not(tmp_path):
    (tmp_path / "conftest.py").write_text("import hypothesis\nhypothesis.settings.register_profile('mutants')\n")
    (tmp_path / "test_one.py").write_text("def test_a():\n    assert 0, 'wrong'\n")
    assert first_failure(tmp_path, ["test_one.py"]) == ("test_one.py::test_a", "AssertionError: wrong")
    (tmp_path / "test_two.py").write_text("open('no such file')\n")
    with pytest.raises(RuntimeError, match=r"test_two\.py - FileNotFoundError"):
        first_failure(tmp_path, ["test_two.py"])


def test_mutants_are_made_in_a_copy_of_all_files(tmp_path):
    copy_project(tmp_path)
    assert {"examples", "tests", "titanlite", "README.md"} <= {path.name for path in tmp_path.iterdir()}
    assert any((tmp_path / "benchmarks" / "logs").iterdir())
    assert not (tmp_path / ".git").exists()


# Public bugs ---------------------------------------------------------------------------------------------------------


def test_public_bugs_are_named_once_and_have_a_row_each():
    assert Counter((bug.url, bug.what) for bug in PUBLIC_BUGS).most_common(1)[0][1] == 1
    assert {bug.state for bug in PUBLIC_BUGS} == {"open", "closed", "merged"}
    head, _, *rows = public_bugs.table().splitlines()
    assert [row.count(" | ") for row in rows] == [head.count(" | ")] * len(PUBLIC_BUGS)


def test_what_catches_a_public_bug_exists(request):
    options, names = request.config.option, {item.nodeid for item in request.session.items}
    files = {name.partition("::")[0] for name in names}
    is_full_run = len(files) == len(list((ROOT / "tests").rglob("test_*.py"))) and not (
        options.keyword or options.markexpr
    )
    for bug in PUBLIC_BUGS:
        file, _, name = bug.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
        assert bug.test in names or not is_full_run


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_without_the_mistakes_of_public_bugs_their_tests_pass():
    assert public_bugs.error_without(PUBLIC_BUGS) == ""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", OF_PUBLIC_BUGS, ids=lambda mutant: mutant.what)
def test_the_mistake_of_a_public_bug_fails(mutant: Mutant):
    assert public_bugs.error_with(mutant)
