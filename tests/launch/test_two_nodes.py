"""Runs on two nodes: the same numbers as on one node, and how they end and resume when a node or the link fails."""

import functools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launches import wait_until
from tests.helpers.two_nodes import ROOT, TwoNodes, reason_to_skip
from tests.test_train import SMALL, Runs, computed, read_metrics
from titanlite.launch.other_processes import children

pytestmark = pytest.mark.nightly
TIMEOUT = 6
"""comm.train_timeout_seconds"""
STEPS = 24
ARGUMENTS = (
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    f"--training.steps={STEPS}",
    f"--lr_scheduler.total_steps={STEPS}",
    f"--comm.train_timeout_seconds={TIMEOUT}",
)


class Training:
    """A run of the small config on two nodes."""

    def __init__(
        self, nodes: TwoNodes, folder: Path, *arguments: str, started: tuple[int, ...] = (0, 1), **environment: str
    ):
        self.nodes, self.run = nodes, folder / "two_nodes"
        command = [sys.executable, "-m", "titanlite", "train", str(folder / "small.toml")]
        command += [f"--job.dump_folder={self.run}", *ARGUMENTS, *arguments]
        self.launchers = [nodes.start(node, *command, **environment) for node in started]
        self.join = lambda node: self.launchers.append(nodes.start(node, *command, **environment))

    def wait_for_step(self, step: int) -> None:
        file = self.run / "metrics.jsonl"

        def reached() -> bool:
            assert not any(launcher.poll() for launcher in self.launchers)
            return file.exists() and file.read_text().count("\n") >= step

        wait_until(reached, f"step {step}")

    def finish(self) -> None:
        """Wait for the end of the run, and assert that it has trained all steps."""
        results = [(*launcher.communicate(timeout=90), launcher.returncode) for launcher in self.launchers]
        assert [status for *_, status in results] == [0, 0], results
        assert (self.run / "checkpoint" / f"step-{STEPS}").is_dir()


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "cut link",
        "killed node",
        "killed node 0",
    ],
)
def test_two_nodes(ranks, tmp_path, fault):
    """Both nodes end soon after a fault, the next run resumes, and the curve is bitwise that of two ranks on one node
    that nothing has disturbed."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    expected = Runs(ranks, tmp_path)(2, "one_node", *ARGUMENTS)
    with TwoNodes() as nodes:
        if fault != "none":
            training = Training(nodes, tmp_path)
            training.wait_for_step(5)
            survivors = [0, 1]
            if fault == "cut link":
                nodes.cut()
            else:
                killed = 0 if fault.endswith("0") else 1
                survivors.remove(killed)
                nodes.kill(killed)
            assert_end_within(nodes, training, survivors, TIMEOUT + 10)
            nodes.connect()
        Training(nodes, tmp_path).finish()
    assert computed(read_metrics(tmp_path / "two_nodes")) == computed(expected)
    newest = tmp_path / "two_nodes" / "checkpoint" / f"step-{STEPS}" / "state.json"
    assert json.loads(newest.read_text())["step"] == STEPS


def assert_end_within(nodes: TwoNodes, training: Training, survivors: list[int], seconds: float) -> None:
    """Assert that the nodes that were not killed end in time, with an error, and that no process of them is left."""
    deadline = time.monotonic() + seconds
    while any(nodes.processes(node) for node in survivors) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {node: nodes.processes(node) for node in survivors}
    assert not any(left.values()), f"after {seconds} s these processes have not ended: {left}"
    assert all(training.launchers[node].wait() > 0 for node in survivors), "the fault is not in the exit status"


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_all_nodes_start_again_when_a_rank_was_killed(ranks, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    expected = Runs(ranks, tmp_path)(2, "one_node", *ARGUMENTS)
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path, MAX_RESTARTS="1")
        training.wait_for_step(5)
        os.kill(children(training.launchers[1].pid)[0], signal.SIGKILL)
        training.finish()
    assert computed(read_metrics(tmp_path / "two_nodes")) == computed(expected)


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_an_elastic_run_goes_on_with_the_node_that_is_left(tmp_path):
    """Where node 0 has the rendezvous, it starts again alone, and resumes."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path, NNODES="1:2", MAX_RESTARTS="1")
        training.wait_for_step(5)
        before = computed(read_metrics(training.run))[:4]
        nodes.kill(1)
        out, error = training.launchers[0].communicate(timeout=120)
    assert training.launchers[0].returncode == 0, error
    assert "resumed after step" in out
    after = computed(read_metrics(training.run))
    assert [step for step, *_ in after] == list(range(1, STEPS + 1))
    assert after[:4] == before


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_a_node_that_joins_an_elastic_run_takes_part(tmp_path):
    """The ranks of the first node save, and all start anew from there. The run is long enough for that."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    long = "--training.steps=100000", "--lr_scheduler.total_steps=100000"
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path, *long, started=(0,), NNODES="1:2", MAX_RESTARTS="1")
        training.wait_for_step(5)
        training.join(1)
        file = training.run / "config.toml"
        wait_until(lambda: "data_parallel_shard_degree = 2" in file.read_text(), "a run on both nodes", seconds=90)
        training.wait_for_step(len(read_metrics(training.run)) + 5)
        training.launchers[0].send_signal(signal.SIGTERM)
        results = [(*launcher.communicate(timeout=60), launcher.returncode) for launcher in training.launchers]
    assert [status for *_, status in results] == [0, 0], results
    steps = [values["step"] for values in read_metrics(training.run)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_nodes_with_different_configs_do_not_train(tmp_path):
    """The file of the second node is an old copy."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path, started=(0,))
        wait_until(lambda: list((training.run / "logs").glob("config-*.json")), "the first node's config")
        (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path).replace("lr = 1e-2", "lr = 1e-3"))
        training.join(1)
        results = [(*launcher.communicate(timeout=60), launcher.returncode) for launcher in training.launchers]
        assert not nodes.processes(0) + nodes.processes(1)
    assert [status for *_, status in results] == [2, 2], results
    lines = [line for _, error, _ in results for line in error.splitlines() if line.startswith("error")]
    assert len(lines) == 1, lines
    values = ["0.01 on rank 0, 0.001 on rank 1", "0.001 on rank 0, 0.01 on rank 1"]  # a node's ranks have any numbers
    beginning, end = "error: the config differs between ranks: optimizer.lr =", "start all nodes with the same config"
    assert lines[0] in [f"{beginning} {value}; {end}" for value in values]
    assert not (training.run / "metrics.jsonl").exists()


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_nodes_with_different_code_do_not_train(tmp_path):
    """The second node's clone has an edited file. One node says where rank 0 prints, as nothing else shows there."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "titanlite", clone / "titanlite")
    with (clone / "titanlite" / "loss.py").open("a") as file:
        file.write("# an edit\n")
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path, started=(0,))
        training.nodes.start = functools.partial(nodes.start, PYTHONPATH=str(clone), PYTHONSAFEPATH="1")
        training.join(1)
        results = [(*launcher.communicate(timeout=90), launcher.returncode) for launcher in training.launchers]
    assert [status for *_, status in results] == [2, 2], results
    lines = [line for _, error, _ in results for line in error.splitlines()]
    (error,) = [line for line in lines if line.startswith("error")]
    assert re.fullmatch(
        r'error: the code differs between ranks: titanlite/loss.py = "\w+" on rank 0, "\w+" on rank 1; start all nodes '
        "with the same code",
        error,
    )
    (silent,) = [line for line in lines if line.startswith("rank 0 is on ")]
    assert silent.startswith("rank 0 is on 10.213.7.")
    assert silent.endswith(f", and prints there; the lines of all ranks are in {training.run}/logs")
    assert not (training.run / "metrics.jsonl").exists()


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
@pytest.mark.parametrize("node", [0, 1])
def test_a_stopped_rank_ends_both_nodes(tmp_path, node):
    """It is the only rank of its node, so that its launcher alone can kill it."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    with TwoNodes() as nodes:
        training = Training(nodes, tmp_path)
        training.wait_for_step(5)
        os.kill(children(training.launchers[node].pid)[0], signal.SIGSTOP)
        assert_end_within(nodes, training, [0, 1], TIMEOUT + 15)
