"""Every config for GPUs and every variant is planned, fits its device, and is as docs/plan.md says."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from docs.build import reference_configs
from titanlite.config import load
from titanlite.config.loader import find_config
from titanlite.tools.plan.hints import hints
from titanlite.tools.plan.planner import resolve
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
    print(f"{name}: {spare} GiB spare")
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


@pytest.mark.parametrize("name", reference_configs.NAMES)
def test_a_config_is_legal_on_its_device_has_the_layout_of_the_page_and_fits(name):
    """In every run: the layout that the page's plan had is the config's, and the plan has memory to spare."""
    config, device, world_size = resolve(load([name]))
    cells = [cell.strip() for cell in reference_configs.lines_of_the_page()[name].strip("|").split("|")]
    assert cells[:5] == reference_configs.layout(name, config, world_size)
    total, spare = map(float, cells[5:7])
    assert spare > 0
    assert total + spare == pytest.approx(device.memory / 2**30, abs=0.11), "rounded twice"


TOO_LARGE = {
    ("70b", "without float8"),
    ("175b_64", "on H100"),
    ("405b_512", "selective AC"),
    ("llama3_8b_256k", "selective AC"),
    ("llama3_70b_1m", "pp 4 x cp 4 x tp 8"),
    ("mixtral_8x7b", "float32 optimizer states"),
    ("qwen3_30b_a3b", "selective AC"),
    ("qwen3_30b_a3b", "without expert parallel"),
    ("gpt_oss_120b", "no AC, per-device batch of 4 sequences"),
    ("qwen3_235b_a22b", "without expert parallel"),
    ("deepseek_v3_671b", "two stages per rank, global batch of 16,384"),
    ("deepseek_v3_671b", "selective AC"),
    ("deepseek_v3_671b", "attention saved"),
}
"""The variants that the notebook shows because they do not fit: what a config avoids."""
VARIANTS = {(name, label): options for name, label, *options in reference_configs.VARIANTS}


@pytest.mark.parametrize(("name", "label"), VARIANTS, ids=map(", ".join, VARIANTS))
def test_a_variant_is_legal_and_fits_or_is_known_to_be_too_large(name, label):
    config, *_ = resolve(load([name, *VARIANTS[name, label]]))
    assert config != resolve(load([name]))[0]
    spare = float(reference_configs.lines_of_the_notebook()[name, label].split("|")[4])
    assert (spare <= 0) == ((name, label) in TOO_LARGE)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "label"), VARIANTS, ids=map(", ".join, VARIANTS))
def test_the_notebook_is_true(name, label):
    """The planned figures of a variant, as those of a config, and whether it fits."""
    planned = reference_configs.results(reference_configs.planned(name, *VARIANTS[name, label]))
    print(f"{name}, {label}: {planned[1]} GiB spare")
    notebook = [cell.strip() for cell in reference_configs.lines_of_the_notebook()[name, label].strip("|").split("|")]
    figures = [[float(cell.strip("%-").replace(",", "") or 0) for cell in cells] for cells in (planned, notebook[2:])]
    assert figures[0] == pytest.approx(figures[1], rel=0.02, abs=0.3)
    assert (float(planned[1]) <= 0) == ((name, label) in TOO_LARGE)


def test_every_config_for_gpus_is_on_the_page():
    others = set(CONFIGS) - set(reference_configs.NAMES)
    assert all(name.startswith("debug") for name in others), others
    assert list(reference_configs.lines_of_the_page()) == list(reference_configs.NAMES)
