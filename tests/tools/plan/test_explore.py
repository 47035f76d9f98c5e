"""The page of a grid of plans: it has the numbers of the plans and the rules' messages, and its script shows them."""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.tools.plan.test_plan_figures import plan_of
from titanlite.config import load
from titanlite.config.loader import ConfigError
from titanlite.launch.cli import run_command
from titanlite.tools.plan import explore, planner
from titanlite.tools.plan.explore import make_axes, overrides, plan_chain, planned, write_explorer
from titanlite.tools.plan.planner import make_plan, resolve
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Plan

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ("--training.seq_len=64", "--validation.enable=false", "--plan.device=a100_80", "--plan.devices_per_node=4")
GRID = ["tp=1,2,3", "pp=1", "cp=1", "batch=16", "ac=none", "device=a100_80,b200"]


class Page(HTMLParser):
    """A page's tags, the text of its scripts, and its other text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.scripts, self.text, self.attributes = [""], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        (self.scripts if self.tags[-1] == "script" and data.strip() else self.text).append(data)

    @property
    def grid(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


class InProcess:
    """Stands for a pool of processes: a task is done when it is submitted."""

    def submit(self, function, *arguments):
        future = concurrent.futures.Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """Return the path of a config, which would end a script and begin an element if it were not escaped."""
    folder = tmp_path_factory.mktemp("page") / "<"
    folder.mkdir()
    shutil.copy(CONFIGS / "debug.toml", folder / "script><img>.toml")
    return str(folder / "script><img>.toml")


@pytest.fixture(scope="module")
def plan(config) -> Plan:
    return make_plan(load([config, *SMALL]))


def write(plan: Plan, arguments: list[str], texts: list[str], target: Path, **replaced: Any) -> tuple[bool, Page]:
    """Write a page in this process. Return whether it is complete, and the page."""
    pool = lambda *_, **options: contextlib.nullcontext(InProcess())  # noqa: E731
    axes = make_axes(load(arguments).config, texts)
    with mock.patch.multiple(explore, process_pool=pool, **replaced):
        complete = write_explorer(plan, arguments, axes, 1.0, target)
    return complete, Page(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dry_runs() -> mock.Mock:
    """Return what counts the dry runs of the page."""
    return mock.Mock(wraps=planner._dry_run_stages)


@pytest.fixture(scope="module")
def written(plan, config, dry_runs, tmp_path_factory) -> Page:
    with mock.patch.object(planner, "_dry_run_stages", dry_runs):
        complete, page = write(plan, [config, *SMALL], GRID, tmp_path_factory.mktemp("page") / "explore.html")
    assert complete
    return page


# The page


def test_the_page_has_the_numbers_of_the_plan(plan, written):
    own = written.grid["entries"]["1|1|1|1|16|none|a100_80"]
    assert own.items() >= planned(plan).items()
    assert sum(own["memory"].values()) == plan.worst.total
    assert own["limit"] == plan.device.memory
    assert own["time"] == pytest.approx(time_shares(plan), abs=1e-6)
    assert own["seconds"] == pytest.approx(plan.step_seconds, abs=1e-6)
    assert own["speed"] == pytest.approx(plan.tokens_per_second, abs=1e-3)


def test_every_choice_is_in_the_page(written):
    grid = written.grid
    assert {name: values for name, values in grid["axes"].items() if len(values) > 1} == {
        "tp": [1, 2, 3],
        "device": ["a100_80", "b200"],
    }
    states = {key: entry["state"] for key, entry in grid["entries"].items()}
    assert states == {
        f"{tp}|1|1|1|16|none|{device}": "rejected" if tp == 3 else "fits"
        for tp in (1, 2, 3)
        for device in GRID[-1][7:].split(",")
    }
    used = {name for entry in grid["entries"].values() for name in (*entry.get("memory", ()), *entry.get("time", ()))}
    assert used <= set(grid["colours"])


def test_a_rejected_layout_has_the_message_of_the_rule(config, written):
    entry = written.grid["entries"]["3|1|1|1|16|none|b200"]
    with pytest.raises(ConfigError) as caught:
        resolve(load(shlex.split(entry["command"])[2:]), 4)
    assert entry["lines"] == caught.value.problems
    assert "parallelism.tensor_parallel_degree = 3: expected a divisor of model.n_heads = 16" in entry["lines"][0]
    assert "memory" not in entry


def test_the_command_of_a_choice_makes_its_config(written):
    grid = written.grid
    for key, entry in grid["entries"].items():
        if entry["state"] == "fits":
            command = shlex.split(entry["command"])
            assert command[:2] == ["titanlite", "plan"]
            config, _, world = resolve(load(command[2:]))
            assert key.split("|") == [
                str(x) for x in (config.parallelism.tensor_parallel_degree, 1, 1, 1, 16, "none", config.plan.device)
            ]
            assert world == 4
            assert f"dp_shard {config.parallelism.data_parallel_shard_degree} x" in entry["lines"][1]


def test_the_page_is_self_contained_and_text_is_escaped(written, config):
    assert "http" not in "".join([*written.scripts, *written.text])
    assert not {"link", "img", "iframe"} & set(written.tags)
    assert not [value for name, value in written.attributes if name in ("src", "href")]
    assert len(written.scripts) == 2
    assert any(Path(config).name in text for text in written.text)
    assert not any(config in text for text in written.text)


def test_the_devices_of_a_layout_share_a_dry_run(written, dry_runs):
    assert sum(entry["state"] == "fits" for entry in written.grid["entries"].values()) == 4
    assert dry_runs.call_count == 2


@pytest.mark.nightly
def test_the_plan_of_the_other_device_is_what_the_command_plans(written):
    entry = written.grid["entries"]["2|1|1|1|16|none|b200"]
    assert entry.items() >= planned(make_plan(load(shlex.split(entry["command"])[2:]))).items()


# What is planned


def fake_plans(sizes: dict[str, int]) -> Any:
    """Return a function that stands for make_plan: by device, how many GiB each sequence of a batch takes."""

    def fake(loaded, *, world_size, cache):
        plan = plan_of(1, 0, 3)
        size = sizes[loaded.config.plan.device] * loaded.config.training.local_batch_size * 2**30
        rank = dataclasses.replace(plan.ranks[0], overhead={"x": size - plan.ranks[0].peak.total})
        return dataclasses.replace(plan, ranks=[rank])

    return fake


def chain_of(*devices: str) -> dict[int, dict[str, Any]]:
    arguments = [str(CONFIGS / "debug.toml"), *SMALL]
    return {
        batch: {
            f"{batch} {device}": load([*arguments, f"--plan.device={device}", f"--training.local_batch_size={batch}"])
            for device in devices
        }
        for batch in (4, 1, 2)
    }


def test_a_chain_ends_with_the_batch_that_fits_no_device(monkeypatch):
    monkeypatch.setattr(explore, "make_plan", fake_plans({"a100_80": 50, "b200": 10}))
    entries = plan_chain(chain_of("a100_80", "b200"), 4)
    assert {key: entry["state"] for key, entry in entries.items() if "a100_80" in key} == {
        "1 a100_80": "fits",
        "2 a100_80": "does not fit",
        "4 a100_80": "does not fit",
    }
    entries = plan_chain(chain_of("a100_80"), 4)
    assert [*entries] == ["1 a100_80", "2 a100_80", "4 a100_80"]
    assert entries["2 a100_80"]["lines"][0].startswith("does NOT fit: 100.0 of 79.2 GiB on every rank")
    assert entries["2 a100_80"]["lines"][0].endswith("; 20.8 GiB over")
    assert entries["4 a100_80"] == {"state": "not planned", "lines": ["batch 2 does not fit already"]}


def test_a_layout_that_cannot_be_planned_is_in_the_page(monkeypatch):
    monkeypatch.setattr(explore, "make_plan", mock.Mock(side_effect=RuntimeError("no such kernel")))
    entries = plan_chain(chain_of("a100_80"), 4)
    assert {(x["state"], *x["lines"]) for x in entries.values()} == {("not planned", "RuntimeError: no such kernel")}


def test_what_was_planned_before_an_interrupt_is_written(tmp_path, capsys):
    """The config's own plan is, too: it was made before."""

    def interrupted(futures):
        yield [*futures][1]
        raise KeyboardInterrupt

    arguments, fake = [str(CONFIGS / "debug.toml"), *SMALL], fake_plans({"a100_80": 1})
    plan = dataclasses.replace(plan_of(1, 0, 3), config=resolve(load(arguments))[0], world_size=4)
    texts = ["tp=1,2,3,4", *GRID[1:-1], "device=a100_80"]
    complete, page = write(plan, arguments, texts, tmp_path / "x.html", make_plan=fake, as_completed=interrupted)
    assert not complete
    own, *_, last = entries = [*page.grid["entries"].values()]
    assert [entry["state"] for entry in entries] == ["fits", "fits", "rejected", "not planned"]
    assert own.items() >= planned(plan).items()
    assert last["lines"] == ["the command was interrupted"]
    assert "4 choices, 3 dry runs: " in capsys.readouterr().out


# The choices


@pytest.mark.parametrize(
    "command",
    [
        *("debug", "debug_4d", "llama3_8b", "70b", "llama3_8b_256k", "175b", "mixtral_8x7b"),
        "70b --training.global_batch_size=128",  # two gradient accumulation steps of a pipeline
        "debug --activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2",
    ],
)
def test_the_first_choice_is_the_config_itself(command):
    name, *options = command.split()
    arguments = [name, *options]
    loaded = load(arguments)
    config, device, world = resolve(loaded)
    plan = dataclasses.replace(plan_of(1, 0, 3), config=config, device=device, world_size=world)
    axes = make_axes(loaded.config, [])
    first = {name: values[0] for name, values in axes.items()}
    assert resolve(load([*arguments, *overrides(first, plan, loaded)]), world)[0] == config


def test_the_axes_have_half_and_twice_the_config():
    axes = make_axes(load([str(CONFIGS / "70b.toml")]).config, ["dp_replicate=2", "ac=full,selective 2"])
    assert axes == {
        "tp": [8, 4, 16],
        "pp": [4, 2, 8],
        "cp": [1, 2],
        "dp_replicate": [1, 2],
        "batch": [1, 2],
        "ac": ["none", "full", "selective 2"],
        "device": ["h100"],
    }


def test_a_pipeline_has_all_sequences_of_a_rank_and_the_step_no_fewer_than_the_config():
    arguments = [str(CONFIGS / "llama3_8b.toml")]
    loaded = load(arguments)
    config, device, world = resolve(loaded)
    plan = dataclasses.replace(plan_of(1, 0, 3), config=config, device=device, world_size=world)
    choice = {"tp": 1, "pp": 4, "cp": 1, "dp_replicate": 1, "batch": 2, "ac": "selective attention", "device": "h200"}
    changed = resolve(load([*arguments, *overrides(choice, plan, loaded)]), world)[0]
    assert (changed.n_microbatches, changed.gradient_accumulation_steps) == (16, 1)
    assert changed.training.global_batch_size == config.training.global_batch_size == 64
    assert (changed.parallelism.data_parallel_shard_degree, changed.plan.device) == (2, "h200")
    assert changed.activation_checkpoint.selective_ac_option == "attention"
    replicated = overrides({**choice, "pp": 1, "dp_replicate": 2}, plan, loaded)
    assert resolve(load([*arguments, *replicated]), world)[0].parallelism.data_parallel_shard_degree == 4
    loaded = load([*arguments, "--training.global_batch_size=-1"])
    plan = dataclasses.replace(plan, config=resolve(loaded)[0])
    for batch, sequences in {1: 16, 2: 16, 4: 32, 3: 24}.items():
        line = overrides({**choice, "pp": 1, "batch": batch}, plan, loaded)
        assert f"--training.global_batch_size={sequences}" in line


@pytest.mark.parametrize(
    "text", ["tp", "tp=", "tp=0", "tp=1,x", "ep=2", "ac=half", "batch=-1", "device=", "device=abacus", "=", "pp=1,,2"]
)
def test_a_wrong_axis_is_rejected_before_the_plan(text, capsys, tmp_path):
    with mock.patch("titanlite.tools.plan.planner.make_plan", side_effect=AssertionError("planned")):
        arguments = ["debug", "--explore", str(tmp_path / "x.html"), "--grid", text]
        assert run_command("plan", arguments) == 2
    expected = 'plan.device = "abacus": expected one of' if "abacus" in text else f"--grid {text}: expected AXIS=VALUE"
    assert expected in capsys.readouterr().err


def test_a_grid_needs_the_page(capsys):
    assert run_command("plan", ["debug", "--grid", "tp=2"]) == 2
    assert "--grid is an option of --explore" in capsys.readouterr().err


def test_the_docs_say_how_long_the_run_of_the_log_took():
    log = (CONFIGS.parent / "benchmarks" / "logs" / "plan_explore.log").read_text()
    done, total, minutes, seconds = map(int, re.findall(r"grid: (\d+) of (\d+) dry runs, 0:(\d+):(\d+)", log)[-1])
    page = (CONFIGS.parent / "docs" / "plan.md").read_text()
    assert f"{done} of {total} dry runs took {round(minutes + seconds / 60)} minutes on two cores" in page


# The script

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def run_script(script: str, grid: dict[str, Any], expressions: list[str]) -> list[Any]:
    """Return the values of some expressions after the page's script has run without a document."""
    code = f"{script}\nconst grid = {json.dumps(grid)};\nconsole.log(JSON.stringify([{', '.join(expressions)}]));"
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_script_shows_what_is_chosen(written):
    grid = written.grid
    fits, rejected = grid["entries"]["2|1|1|1|16|none|b200"], grid["entries"]["3|1|1|1|16|none|a100_80"]
    own, chosen, wrong, page, reason, options = run_script(
        written.scripts[1],
        grid,
        [
            "choiceOf(grid, '')",
            "choiceOf(grid, '#device=b200&tp=2')",
            "choiceOf(grid, '#tp=7&device=%3Cb%3E&x=y')",
            "pageOf(grid, choiceOf(grid, '#device=b200&tp=2')).join('<br>')",
            "pageOf(grid, choiceOf(grid, '#tp=3')).join('<br>')",
            "optionsOf(grid, choiceOf(grid, '#tp=2'), 'tp')",
        ],
    )
    first = {name: str(values[0]) for name, values in grid["axes"].items()}
    assert own == wrong == first
    assert chosen == {**first, "device": "b200", "tp": "2"}
    shown, message = Page(page), Page(reason)
    assert [line for line in fits["lines"] if line not in shown.text] == []
    for kind, size in fits["memory"].items():
        assert shown.text[shown.text.index(kind) + 1] == f"{size / 2**30:.2f}"
    for part, seconds in fits["time"].items():
        assert shown.text[shown.text.index(part) + 1] == f"{seconds:.3f}"
    assert fits["command"] in shown.text
    assert f"rejected: {rejected['lines'][0]}" in message.text
    assert "Memory" not in message.text
    assert "img" not in shown.tags
    assert re.findall(r">([^<]+)</option>", options) == ["1", "2", "3 - rejected"]
    assert re.findall(r'value="(\d)" selected', options) == ["2"]


@needs_node
def test_the_script_lists_the_fastest_that_fit_as_links(written):
    entry = {
        "lines": ["x"],
        "memory": {"parameters": 2**30, "overhead": 2**29},
        "time": {},
        "seconds": 1,
        "command": "",
    }
    states = {f"{tp}|none|{device}": "fits" for tp in range(1, 15) for device in ("a100_80", "<b>")}
    states["14|none|a100_80"] = "does not fit"
    speeds = {key: 7 * int(key.split("|")[0]) % 15 for key in states}
    grid = {
        "axes": {"tp": [*range(1, 15)], "ac": ["none"], "device": ["a100_80", "<b>"]},
        "entries": {
            key: {**entry, "limit": 2**31, "state": state, "speed": speeds[key]} for key, state in states.items()
        },
        "colours": {},
    }
    for device in ("a100_80", "<b>"):
        page, links = run_script(
            written.scripts[1],
            grid,
            [
                f"fastest(grid, {json.dumps(device)})",
                f'[...fastest(grid, {json.dumps(device)}).matchAll(/href="([^"]+)"/g)]'
                ".map((found) => choiceOf(grid, found[1].replaceAll('&#38;', '&')))",
            ],
        )
        fitting = [key for key, state in states.items() if state == "fits" and key.endswith(f"|{device}")]
        best = sorted(fitting, key=speeds.get, reverse=True)[:10]
        assert ["|".join(choice.values()) for choice in links] == best
        assert "1.50" in Page(page).text
        assert "b" not in Page(page).tags
