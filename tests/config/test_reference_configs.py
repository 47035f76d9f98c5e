"""Every config for GPUs is planned, fits its device, and is as docs/plan.md says."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from docs.build import reference_configs
from titanlite.config.loader import find_config
from titanlite.tools.plan.hints import hints
from titanlite.tools.plan.result import Plan

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").rglob("*.toml"))


def numbers(line: str) -> list[float]:
    """Return the numbers of the columns after the layout."""
    return [float(text.replace(",", "")) for text in re.findall(r"(?<![\w.])-?[\d,]+\.?\d*", line.split("|", 5)[5])]


@pytest.fixture(scope="module")
def plans(request: pytest.FixtureRequest) -> dict[str, Plan]:
    """Plan the configs of the tests that run, two at a time: a plan with one kind of stage uses one core."""
    tests = [item for item in request.session.items if "plans" in item.fixturenames]
    names = sorted({item.callspec.params["name"] for item in tests if not item.get_closest_marker("skip")})
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(reference_configs.planned, names), strict=True))


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # the first one waits for the plans of all
@pytest.mark.parametrize("name", reference_configs.NAMES)
def test_the_page_is_true(plans, name):
    """Memory, speed and pipeline bubble agree to 2 %, by which versions of torch may differ, and all else exactly."""
    planned, page = reference_configs.line_of(name, plans[name]), reference_configs.lines_of_the_page()[name]
    assert planned.split("|")[:5] == page.split("|")[:5]
    assert numbers(planned) == pytest.approx(numbers(page), rel=0.02, abs=0.3)
    spare = float(planned.split("|")[7])
    assert spare > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_with_hints_says_why(plans, name):
    """A config whose plan prints a hint says in a comment why it is as it is."""
    comments = "\n".join(line for line in find_config(name).read_text().splitlines() if "#" in line)
    found = hints(plans[name])
    assert ("hint to compile" in comments) == any("compile.enable" in hint for hint in found)
    assert ("hint about few microbatches" in comments) == any("microbatches for" in hint for hint in found)
    assert len(found) == comments.count("The plan's hint")


def test_every_config_for_gpus_is_on_the_page():
    others = set(CONFIGS) - set(reference_configs.NAMES)
    assert all(name.startswith("debug") for name in others), others
    assert list(reference_configs.lines_of_the_page()) == list(reference_configs.NAMES)
