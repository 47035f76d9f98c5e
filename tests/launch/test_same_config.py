"""All ranks train with the same config: those of a node have their launcher's, and those of different nodes compare."""

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.helpers.cases import cases
from tests.helpers.launches import finish, launched
from tests.test_train import SMALL
from titanlite import config
from titanlite.checkpoint.changed_options import changes
from titanlite.config.loader import options_of, table_of, value_of
from titanlite.launch import checked_config, launcher, process, same_config
from titanlite.launch.checked_config import CHECKED_CONFIG, load_for_rank
from titanlite.launch.process_group import options_of_run
from titanlite.launch.same_config import name_ranks, require_same

ROOT = Path(__file__).parents[2]
MIXTURE = {"datasets": [{"name": "a", "dataset": "text", "dataset_path": "a", "weight": 2}, {"name": "b", "weight": 1}]}


def load(**sections: dict[str, Any]) -> config.Config:
    return config.load_values(sections, "a.toml", []).config


def problem_of(options: list[dict[str, Any]]) -> str:
    """Return what is wrong with the options of the ranks, one of which has each, as this rank finds it."""
    try:
        require_same(options[dist.get_rank()])
        return ""
    except config.ConfigError as error:
        return "\n".join(error.problems)


DIFFERENT = {
    "numbers": (
        [{"optimizer": {"lr": 1e-3}}, {"optimizer": {"lr": 2e-3, "weight_decay": 0.0}}] * 2,
        "optimizer.lr = 0.001 on ranks 0, 2, 0.002 on ranks 1, 3; "
        "optimizer.weight_decay = 0.1 on ranks 0, 2, 0.0 on ranks 1, 3",
    ),
    "steps": ([{"training": {"steps": n}} for n in (5, 5, 5, 9)], "training.steps = 5 on ranks 0-2, 9 on rank 3"),
    "a table": (
        [{"training": {**MIXTURE, "datasets": MIXTURE["datasets"][: 2 - rank // 2]}} for rank in range(4)],
        'training.datasets.1.dataset = "pydoc_topics" on ranks 0-1, unset on ranks 2-3',
    ),
    "paths of nodes": ([{"training": {"cache_folder": f"{rank}"}} for rank in range(4)], ""),
    "paths of nodes in a table": (
        [{"training": {"datasets": [{**MIXTURE["datasets"][0], "dataset_path": f"{rank}"}]}} for rank in range(4)],
        "",
    ),
}


@cases("case", DIFFERENT, always=["steps", "a table", "paths of nodes", "paths of nodes in a table"])
def test_all_ranks_find_the_options_that_differ(ranks, case):
    sections, expected = DIFFERENT[case]
    found = ranks(4).run(problem_of, options=[options_of_run(load(**each)) for each in sections])
    assert len(set(found)) == 1
    if not expected:
        assert found[0] == ""
        return
    assert found[0].startswith("the config differs between ranks: ")
    assert expected in found[0]
    assert found[0].endswith("; start all nodes with the same config")


def test_versions_are_compared(ranks):
    other = {"torch": "2.0"}
    (problem,) = set(ranks(4).run(problem_of, options=[options_of_run(load()), options_of_run(load()) | other] * 2))
    assert ' on ranks 0, 2, "2.0" on ranks 1, 3; ' in problem


def require_same_code(changed: list[dict[str, str]]) -> str:
    """Return what is wrong with the files of the ranks, one of which has each change, as this rank finds it."""
    files = {name: value for name, value in {**same_config.code(), **changed[dist.get_rank()]}.items() if value}
    with mock.patch.object(same_config, "code", return_value=files):
        return problem_of([options_of_run(load())] * len(changed))


def test_ranks_with_other_code_are_named_with_its_files(ranks):
    """One has edited a file, one lacks one, and one has one more. Of many files, the first are named."""
    model, loss, new = "titanlite/model.py", "titanlite/loss.py", "titanlite/new.py"
    changed = [{model: "m", loss: "l"}, {model: "0", loss: "l"}, {model: "m", loss: ""}, {model: "1", new: "2"}]
    changed[3][loss] = "l"
    (problem,) = set(ranks(4).run(require_same_code, changed=changed))
    parts = [
        f'{model} = "m" on ranks 0, 2, "0" on rank 1, "1" on rank 3',
        f'{loss} = "l" on ranks 0-1, 3, unset on rank 2',
    ]
    parts.append(f'{new} = unset on ranks 0-2, "2" on rank 3')
    expected = f"the code differs between ranks: {'; '.join(parts)}; start all nodes with the same code"
    assert sorted(problem.split("; ")) == sorted(expected.split("; "))
    changed = [{}, {}, {}, {f"titanlite/{number}.py": "0" for number in range(20)}]
    (problem,) = set(ranks(4).run(require_same_code, changed=changed))
    assert problem.count(".py = ") == 8
    assert problem.endswith("; 12 more; start all nodes with the same code")


def test_the_code_is_every_file_of_the_package():
    paths = [path for suffix in (".py", ".toml") for path in (ROOT / "titanlite").rglob(f"*{suffix}")]
    files = {str(path.relative_to(ROOT)) for path in paths}
    assert "titanlite/config/models.toml" in files
    assert same_config.code().keys() == files
    assert len(set(same_config.code().values())) == len({(ROOT / name).read_bytes() for name in files})


def test_every_other_option_is_compared():
    may_differ = {"training.dataset_path", "training.cache_folder", "model.hf_assets_path"}
    tables = {key for key, option in options_of(config.Config).items() if table_of(option)}
    compared = options_of(config.Config).keys() - may_differ - tables
    assert options_of_run(load()).keys() == compared | {"titanlite", "torch"}


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "rank 3"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"), ([0, 1], "ranks 0-1")]
)
def test_names_of_ranks(numbers, text):
    assert name_ranks(numbers) == text


RANK = """
import os, sys
from titanlite.train import main
del os.environ["TITANLITE_CONFIG"]  # it reads the file itself, as one of another node does
main(["small.toml", "--training.steps=" + ("3" if os.environ["RANK"] == "0" else "4")])
"""


@pytest.mark.nightly
def test_a_run_ends_with_one_line_and_status_2(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    with launched(tmp_path, RANK, max_restarts=1) as run:
        status, out, error = finish(run)
    problem = "training.steps = 3 on rank 0, 4 on rank 1; start all nodes with the same config"
    assert (status, error) == (2, f"error: the config differs between ranks: {problem}\n")
    assert out == "listening\n", "the run has begun"


# The config that a launcher gives to its ranks ------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch):
    """A function that gives a config to this process, as if it were a rank."""
    monkeypatch.setattr(process, "at_exit", exits := [])
    monkeypatch.setattr(checked_config, "at_exit", exits)

    def give(loaded: config.LoadedConfig) -> Path:
        for name, value in launcher.launch_variables(loaded).items():
            monkeypatch.setenv(name, value)
        return Path(os.environ[CHECKED_CONFIG])

    yield give
    process.clean_up()
    assert not Path(os.environ[CHECKED_CONFIG]).exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").rglob("*.toml")))
def test_a_rank_has_the_config_of_its_launcher(tmp_path, given, name):
    loaded = config.load([name, f"--job.dump_folder={tmp_path}", "--optimizer.lr=0.1"])
    given(loaded)
    assert load_for_rank(["no_such_file.toml"]) == loaded


def test_a_rank_reads_no_file_that_was_changed_and_names_the_old_origin(tmp_path, given):
    file = tmp_path / "a.toml"
    text = f'[job]\ndump_folder = "{tmp_path}"\n[optimizer]\nlr = 0.1\n'
    tables = '[[training.datasets]]\nname = "a"\nweight = 1.0\n[[training.datasets]]\nname = "b"\nweight = 2.0\n'
    file.write_text(text + tables)
    argv = [str(file), "--training.global_batch_size=8"]
    given(config.load(argv))
    file.write_text("not TOML")
    loaded = load_for_rank(argv)
    assert value_of(loaded.config, "training.datasets.1").model_fields_set == {"name", "weight"}
    assert loaded.config.optimizer.lr == 0.1
    with pytest.raises(
        config.ConfigError, match=r"^command line: training\.global_batch_size = 8: expected a multiple "
    ):
        config.check(loaded, config.Launch(0, 0, 3, 3, 0))


def test_a_config_may_be_long(tmp_path, given):
    """The environment of a process has 128 KiB for a variable."""
    values = {"job": {"dump_folder": str(tmp_path)}, "validation": {"enable": True, "generate_prompts": ["é" * 10**6]}}
    loaded = config.load_values(values, "a.toml", [])
    given(loaded)
    assert load_for_rank([]) == loaded


def test_without_the_launchers_file_a_rank_says_so(tmp_path, given):
    file = given(config.load(["debug", f"--job.dump_folder={tmp_path}"]))
    file.unlink()
    line = f"^{file}: cannot be read: No such file or directory; start the run again, which writes it$"
    with pytest.raises(config.ConfigError, match=line):
        load_for_rank(["debug"])


# Options that a resumed run has changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["much", -1.0, None])
def test_a_checkpoint_with_no_valid_schedule_is_one_line(value):
    options = options_of_run(load())
    with pytest.raises(config.ConfigError, match=r"^the checkpoint's config: optimizer: lr: Input should be "):
        changes({**options, "optimizer.lr": value}, options, 3)


def test_no_rate_is_shown_for_a_step_that_no_schedule_has():
    options = options_of_run(load()) | {"lr_scheduler.total_steps": 5}
    shorter = changes(options, options | {"lr_scheduler.total_steps": 3}, 3)
    assert re.search(r"; the learning-rate schedule is computed anew: lr \S+ at step 3, it ends at step 3$", shorter)
    assert "e-" in changes(options, options | {"lr_scheduler.total_steps": 4}, 3).partition("at step 3, ")[2]


def test_a_long_value_is_not_shown_in_full():
    line = changes({"model.a": ["layers.0"] * 99, "model.b": 1}, {"model.a": ["layers.0"] * 98, "model.c": True}, 3)
    assert re.fullmatch(
        r'changed since the checkpoint: model\.a (\["layers\.0", .{84}\.\.\.) \([0-9a-f]{8}\) -> \1 \([0-9a-f]{8}\), '
        r"model\.c unset -> true, model\.b 1 -> unset",
        line,
    )
