"""titanlite source: which lines it prints, and which it folds."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests import test_architecture
from titanlite.tools import source

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "source_debug.txt"
OWN = """from torch.optim import SGD

from titanlite import Own


def optimizer(model, section):
    if section.lr < 0:
        print("never")
    return SGD(model.parameters(), section.lr)


def unused():
    print("never")


own = Own(optimizer=optimizer)
"""
OWN_PRINTED = """
       ... 3 line(s) not run
    4
    5
    6  def optimizer(model, section):
    7      if section.lr < 0:
               ... 1 line(s) not run
    9      return SGD(model.parameters(), section.lr)
       ... 7 line(s) not run
"""
HEADING = re.compile(r"^(\S+\.py): (\d+) of (\d+) lines run$", re.MULTILINE)


def printed(*arguments: str) -> str:
    """Return what the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert source.main([*arguments]) == 0
    return out.getvalue()


def files_of(text: str) -> dict[str, str]:
    """Return what is printed of each file, by its path."""
    _, *parts = HEADING.split(text)
    return dict(zip(parts[::4], parts[3::4], strict=True))


@pytest.fixture(scope="module")
def debug() -> str:
    return printed("debug")


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def debug_cp(own_file: Path) -> str:
    """Return the lines of ring attention and Ulysses, with an own optimizer. The blocks are not compiled."""
    return printed("debug_cp", "--compile.enable", f"--own={own_file}:own")


def test_the_page_of_debug_is_up_to_date(debug: str):
    assert debug == PAGE.read_text(), "run `python -m docs.build.pages`"


def test_a_plain_llama_is_printed_and_nothing_else(debug: str):
    files = files_of(debug)
    assert [*files][:2] == ["titanlite/train.py", "titanlite/build.py"]
    assert "   return self.wo(self.inner_attention(q_BTHK, k_BTGK, v_BTGK, documents)" in files["titanlite/model.py"]
    assert "import torch" not in files["titanlite/model.py"]
    assert not {"titanlite/parallel/ring.py", "titanlite/parallel/pipeline.py"} & files.keys()
    assert not [file for file in files if file.startswith("titanlite/techniques/")]


def test_a_line_of_the_thread_of_the_data_is_printed(debug: str):
    assert "self._ready.put((batches, shard_states," in files_of(debug)["titanlite/data/loader.py"]


def test_a_branch_of_another_config_is_folded(debug: str):
    assert "if self.norms_all_heads:\n                   ... 1 line(s) not run\n" in debug
    assert "self.k_norm(k)" not in debug
    assert "class Documents" not in debug


def test_the_layout_decides(debug_cp: str):
    files = files_of(debug_cp)
    assert {"titanlite/parallel/ring.py", "titanlite/parallel/ulysses.py"} <= files.keys()
    assert "titanlite/parallel/compile.py" not in files


def test_an_own_file_is_printed(debug_cp: str, own_file: Path):
    assert f"{own_file}: 3 of 16 lines run\n" in debug_cp
    assert files_of(debug_cp)[str(own_file)].rstrip() == OWN_PRINTED.rstrip()


@pytest.mark.parametrize("config", ["debug", "debug_cp"])
def test_the_numbers_at_the_end_are_those_of_the_lines(config: str, request: pytest.FixtureRequest):
    text = request.getfixturevalue(config)
    found = re.findall(r"\d[\d,]*", text.splitlines()[-1])
    n_run, n_files, n_printed, heart = (int(number.replace(",", "")) for number in found)
    headings = HEADING.findall(text)
    assert n_files == len(headings)
    assert n_run == sum(int(ran) for _, ran, _ in headings) < n_printed
    assert n_printed == len(re.findall(r"^ {0,4}\d+(?:  .*)?$", text, re.MULTILINE))
    folded = sum(map(int, re.findall(r"^ +\.\.\. (\d+) line\(s\) not run$", text, re.MULTILINE)))
    assert n_printed + folded == sum(int(n_lines) for *_, n_lines in headings)
    assert heart == test_architecture.lines_by_part()["heart"]


def test_the_heart_is_the_one_that_has_a_ceiling():
    paths = [path for path in source.PACKAGE.rglob("*.py") if re.fullmatch(source.HEART, str(path))]
    names = {str(path.relative_to(source.PACKAGE).with_suffix("")) for path in paths}
    assert names == {*test_architecture.HEART}
