"""Every config for GPUs is planned, fits, and is as docs/ladder.md says."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import ladder  # noqa: E402


def numbers(line: str) -> list[float]:
    """Those of the columns behind the layout."""
    return [float(text.replace(",", "")) for text in re.findall(r"(?<![\w.])-?[\d,]+\.?\d*", line.split("|", 5)[5])]


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Two at a time: a plan of one kind of stage has work for one core."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ladder.LADDER, pool.map(ladder.row, ladder.LADDER), strict=True))


@pytest.mark.parametrize("name", ladder.LADDER)
def test_the_page_is_true(rows, name):
    """Memory, speed and bubble to 2 %, which is what versions of torch may differ by; all else to the letter."""
    planned, page = rows[name], ladder.written()[name]
    assert planned.split("|")[:5] == page.split("|")[:5]
    assert numbers(planned) == pytest.approx(numbers(page), rel=0.02, abs=0.3)
    spare = float(planned.split("|")[7])
    assert spare > 0


def test_every_config_for_gpus_is_on_it():
    others = {path.stem for path in (ROOT / "configs").glob("*.toml")} - set(ladder.LADDER)
    assert all(name.startswith("debug") for name in others), others
    assert list(ladder.written()) == list(ladder.LADDER)
