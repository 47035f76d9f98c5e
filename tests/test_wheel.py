"""The wheel is a trainer: installed elsewhere, it trains a config that it comes with, without the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, built from the files that git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    source, site = folder / "source", folder / "site"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    offline = ("--no-index", "--no-deps", "--quiet")
    built = run(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", source, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("titanlite-*.whl")
    installed = run(sys.executable, "-m", "pip", "install", *offline, "--target", site, wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return site


def test_every_package_page_and_config_is_in_the_wheel(site: Path):
    suffixes = (".py", ".html", ".md", ".toml")
    files = [path for suffix in suffixes for path in (ROOT / "titanlite").rglob(f"*{suffix}")]
    expected = {path.relative_to(ROOT) for path in files}
    expected |= {"titanlite" / path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.toml")}
    inside = {path.relative_to(site) for path in (site / "titanlite").rglob("*") if path.suffix in suffixes}
    assert inside == expected


@pytest.mark.nightly
def test_titanlite_train_debug_outside_the_checkout(site: Path, tmp_path: Path):
    options = ["--training.steps=2", "--training.local_batch_size=2", "--training.seq_len=64"]
    options += [f"--training.cache_folder={tmp_path}/cache", "--validation.enable=false"]
    done = run(site / "bin" / "titanlite", "train", "debug", *options, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "outputs" / "debug" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_a_config_to_plan_is_found_by_its_name(site: Path, tmp_path: Path):
    done = run(site / "bin" / "titanlite", "config", "405b", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stderr.startswith("error: model.hf_assets_path: "), "the tokenizer's folder is not there"
    assert done.stderr.count("\n") == 1
    assert 'flavor = "llama3_405b"' in done.stdout


def test_a_name_that_no_config_has_is_one_line(site: Path, tmp_path: Path):
    done = run(site / "bin" / "titanlite", "train", "debugg", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "debugg" in line
    assert "did you mean" in line
