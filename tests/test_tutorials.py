"""The tutorials' commands run, in order and as printed, and their output is the one that the tutorial shows."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOT_RUN = {
    ("laptop_to_64_gpus", "needs nodes with GPUs"): 3,
    ("fine_tune", "needs a network"): 1,
}
"""Tutorial and reason: how many of its commands no test runs."""
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>.+?) -->\n)?^```(?P<kind>\w+)(?P<title>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE
)
NUMBER = re.compile(r"-?\d[\d,.:]*(?:e[+-]\d+)?")


@dataclass
class Block:
    """A fenced block of a page: shell commands, a file (`title`), or the output of the commands before it."""

    kind: str
    text: str
    title: str = ""
    status: int = 0
    not_run: str = ""


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page. A comment above one says its exit status, or that it is not run."""
    result = []
    for match in BLOCK.finditer(page):
        title, mark = re.search(r'title="(.+?)"', match["title"]), match["mark"] or ""
        status = re.fullmatch(r"exit status (\d)", mark)
        not_run = re.fullmatch(r"not run: (.+)", mark)
        assert not mark or status or not_run, f"an unknown mark: {mark}"
        result.append(
            Block(
                kind=match["kind"],
                text=match["text"],
                title=title[1] if title else "",
                status=int(status[1]) if status else 0,
                not_run=not_run[1] if not_run else "",
            )
        )
    return result


def pattern_of(line: str) -> str:
    """Return a regular expression for a line of output: every number may be another one, and ... is anything."""
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in NUMBER.split(line)]
    return r"-?[\d.,:e+-]+".join(parts).replace(re.escape("..."), ".*")


def missing_lines(shown: str, output: str) -> list[str]:
    """Return the lines of a block of output that the commands did not print, in this order, but for their numbers."""
    missing, lines = [], iter(output.splitlines())
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        expected = re.compile(pattern_of(line.strip()))
        if not any(expected.fullmatch(actual.strip()) for actual in lines):
            missing.append(line)
    return missing


def run_page(page: str, folder: Path, environment: dict[str, str]) -> None:
    """Write the files of a page, run its commands and compare what they print."""
    output = ""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.kind == "sh" and not block.not_run:
            done = subprocess.run(
                ["bash", "-e", "-c", block.text], cwd=folder, env=environment, capture_output=True, text=True
            )
            output = done.stdout + done.stderr
            assert done.returncode == block.status, f"{block.text}\nexit status {done.returncode}\n{output}"
        elif block.kind == "text":
            assert missing_lines(block.text, output) == [], output


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which `titanlite` is this checkout's, as after `pip install -e .`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "titanlite").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titanlite "$@"\n')
    (commands / "titanlite").chmod(0o755)
    ranks = {"NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK", "WORLD_SIZE", "RANK"}
    return {
        **{name: value for name, value in os.environ.items() if name not in ranks},
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_run(path: Path, tmp_path: Path, environment: dict[str, str]):
    folder = tmp_path / "reader"
    folder.mkdir()
    run_page(path.read_text(), folder, environment)


def test_what_is_not_run_is_listed():
    skipped: dict[tuple[str, str], int] = {}
    for path in TUTORIALS:
        for block in blocks(path.read_text()):
            if block.not_run:
                key = path.stem, block.not_run
                skipped[key] = skipped.get(key, 0) + 1
    assert skipped == NOT_RUN


@pytest.mark.parametrize(
    "page",
    [
        "```sh\ntrue\nfalse\n```\n",
        "```sh\nfalse\ntrue\n```\n",
        "<!-- exit status 1 -->\n```sh\ntrue\n```\n",
        "```sh\necho loss 1.5\n```\n\n```text\nnorm 1.5\n```\n",
        "```sh\necho loss is high\n```\n\n```text\nloss is 3\n```\n",
        '```toml title="a.toml"\nx = 1\n```\n\n```sh\ngrep y a.toml\n```\n',
        "```sh\ntitanlite trian debug\n```\n",
    ],
)
def test_a_wrong_page_is_found(page: str, tmp_path: Path, environment: dict[str, str]):
    with pytest.raises(AssertionError):
        run_page(page, tmp_path, environment)


def test_a_right_page_passes(tmp_path: Path, environment: dict[str, str]):
    page = '```toml title="a.toml"\nloss = 1.5e-3\n```\n\n<!-- exit status 3 -->\n```sh\ncat a.toml\nexit 3\n```\n\n'
    run_page(page + "```text\n...\nloss  =  27\n```\n", tmp_path, environment)
