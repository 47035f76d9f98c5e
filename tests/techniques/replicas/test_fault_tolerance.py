"""Replica groups that may die: what a step computes when groups die and return, and runs of titanlite train."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from tests.helpers.launches import wait_until
from tests.parallel.test_parity import CPU, resolve
from tests.test_train import SMALL
from titanlite import build
from titanlite import config as config_module
from titanlite.checkpoint.run import RunState
from titanlite.config import Config, ConfigError
from titanlite.init import init_weights
from titanlite.launch.process import Signals
from titanlite.loss import IGNORED, cross_entropy
from titanlite.optimizer import set_lr
from titanlite.tools.parity.process_pool import ProcessPool, RankDied
from titanlite.tools.parity.reference import RandomSequences, trace_of
from titanlite.tools.parity.shrink import shrink
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.tools.plan import planner

ROOT = Path(__file__).parents[3]
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason='torchft is not installed: pip install -e ".[ft]"'
)
GROUPS = {"fault_tolerance__enable": True, "fault_tolerance__group_size": 2}
HEARTBEAT_MS = 1000


@pytest.fixture
def lighthouse(monkeypatch) -> Iterator[str]:
    """A lighthouse that takes a group for dead a second after its last heartbeat; its default is five."""
    monkeypatch.setenv("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=HEARTBEAT_MS)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", server.address())
    yield server.address()
    server.shutdown()


# Functions that run on every rank of a group's pool ------------------------------------------------------------------

_group: dict[str, Any] = {}
"""What this rank keeps between calls."""


def join(config: Config, address: str, identity: int = 7) -> None:
    """Build this rank's model and connect its group with the others."""
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    from titanlite.techniques.replicas.torchft import Replicas

    run = TrainingRun(config, CPU)
    sections = config.fault_tolerance, config.comm
    replicas = Replicas(*sections, run.model, run.optimizer, [identity], CPU, Signals())
    replicas.begin(0, {}, RunState(run.loader, run.guard, replicas), lambda last_shared_step: None)
    run.train_step = dataclasses.replace(run.train_step, groups=replicas)
    _group.update(config=config, run=run, replicas=replicas, steps=replicas.steps(0, 100))


def take_step(dying_ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    """Take the next step, again if another group dies; return what it computed, and the weights after it. Ranks in
    `dying_ranks` kill themselves after the backward."""
    config, run, replicas, attempts = _group["config"], _group["run"], _group["replicas"], 0
    for step in _group["steps"]:
        attempts += 1
        set_lr(run.optimizer, step, config.optimizer, config.lr_scheduler)
        batches = run.loader.next()
        loss_sum, valid = run.gradients(batches)
        if dist.get_rank() in dying_ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(1, dtype=torch.float64)
        replicas.sum(ones)
        counts = run.loader.step_counts
        totals = replicas.totals(loss_sum, valid, run.parameters.values(), Signals(), *counts)
        if totals is not None:
            break
        run.optimizer.zero_grad()
        run.loader.take_back(batches)
    run.update(totals)
    weights = run.trace_of_all_stages("weight", run.parameters)
    loss, norm, _, _, positions, masked, *_ = totals.read()
    numbers = {"loss": loss, "norm": norm, "ones": ones.item(), "valid": valid.item()}
    numbers |= {"positions": positions, "masked": masked}
    return {"step": step, "attempts": attempts, "living": replicas.participants, **numbers} | weights


# The reference -------------------------------------------------------------------------------------------------------


def one_process(config: Config, living_in_steps: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Train one process on the sequences of the groups that lived in each step; yield what each step computed."""
    model = plain_model(config)
    optimizer = build.build_optimizer(config, model)
    for step, living in enumerate(living_in_steps, 1):
        numbers = plain_step(config, model, optimizer, step, living)
        yield numbers | {"ones": len(living)} | trace_of("weight", dict(model.named_parameters()))


def plain_model(config: Config) -> nn.Module:
    model = build.meta_model(config)
    model.materialize(CPU)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=CPU)
    return model


def plain_step(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, groups: list[int]
) -> dict[str, float]:
    """Take a step on the sequences of some groups, without anything of titanlite's training step."""
    sequences, size, ranks = RandomSequences(config), 16, config.parallelism.data_parallel_degree
    set_lr(optimizer, step, config.optimizer, config.lr_scheduler)
    fed = [n for n in range((step - 1) * size, step * size) if n % (2 * ranks) // ranks in groups]
    tokens, targets = (torch.stack([torch.from_numpy(sequences[n][k]) for n in fed]) for k in range(2))
    valid = (targets != IGNORED).sum()
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).sum() / valid
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
    optimizer.step()
    numbers = {"loss": loss, "norm": norm, "valid": valid, "masked": (targets == IGNORED).sum()}
    return {name: value.item() for name, value in numbers.items()} | {"positions": targets.numel()}


def assert_equal(record: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-11) -> None:
    for name, value in expected.items():
        difference = torch.as_tensor(record[name], dtype=torch.float64) - torch.as_tensor(value, dtype=torch.float64)
        assert difference.abs().max() <= tolerance, (record["step"], name, difference.abs().max().item())


class Groups:
    """Two groups of two ranks, which are killed and started anew. Their ranks call `take_step`."""

    def __init__(self, configs: list[Config], address: str):
        self.configs, self.address, self.threads = configs, address, ThreadPoolExecutor(2)
        self.pools: list[ProcessPool | None] = [None, None]
        self.records: list[dict[int, dict[str, Any]]] = [{}, {}]
        """By group and step."""

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.pools[number] = ProcessPool(2)
        list(self.threads.map(lambda n: self.pools[n].run(join, config=self.configs[n], address=self.address), numbers))

    def kill(self, number: int) -> None:
        self.pools[number].close()
        self.pools[number] = None

    def step(self, dying: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        """Take a step with all groups that live; one may take more, if another joins only then.

        In it `ranks` of the group `dying` kill themselves. The group is then killed, as torchrun does it.
        """

        def call(number: int) -> None:
            if number == dying:
                with contextlib.suppress(RankDied):
                    self.pools[number].run(take_step, dying_ranks=ranks)
                return
            for record in self.pools[number].run(take_step):
                self.records[number][record["step"]] = record

        calls = {number: self.threads.submit(call, number) for number in (0, 1) if self.pools[number]}
        while not all(each.done() for each in calls.values()):
            time.sleep(0.2)
            if dying is not None and not all(process.is_alive() for process in self.pools[dying]._processes):
                for process in self.pools[dying]._processes:
                    process.kill()
            for number, each in calls.items():
                if each.done() and number != dying and not all(other.done() for other in calls.values()):
                    each.result()
                    calls[number] = self.threads.submit(call, number)  # the other waits for its next step
        for each in calls.values():
            each.result()
        if dying is not None:
            self.pools[dying] = None

    def both(self) -> None:
        """Take steps until both groups have taken part in one. A group that has just joined may miss the first."""
        while True:
            self.step()
            last = max(max(records, default=0) for records in self.records)
            if all(last in records for records in self.records):
                return

    def close(self) -> None:
        for pool in self.pools:
            if pool:
                pool.close()
        self.threads.shutdown()


@needs_torchft
@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_step_is_that_of_one_process_fed_what_the_living_groups_were_fed(tmp_path, lighthouse, deaths):
    """Both groups die once, one of them twice, in the middle of a step and between two, fully and in part, and
    return. In float64 weights agree to 1e-11 after every step, and are bit for bit the same in both groups. A sum that
    were an average would have half the norm and half the number of tokens."""
    options = {**GROUPS, "data_parallel_shard_degree": 2, "training__global_batch_size": 16, "optimizer__lr": 2e-3}
    configs = [resolve(tmp_path, 2, {**options, "fault_tolerance__replica_id": number}) for number in (0, 1)]
    groups = Groups(configs, lighthouse)
    try:
        groups.start(0, 1)
        groups.both()
        groups.step(dying=1, ranks=(1,))  # one connection of two is lost: the other rank's sums must not count
        groups.start(1)
        groups.both()
        if deaths == 3:
            groups.both()
            groups.step(dying=1, ranks=(0, 1))
            groups.step()
            groups.start(1)
            groups.both()
            groups.both()
            groups.kill(0)
            groups.step()
            groups.start(0)
            groups.both()
            groups.both()
    finally:
        groups.close()
    first, second = groups.records
    history = [(first.get(step) or second[step]) for step in range(1, max(first | second) + 1)]
    print([(record["step"], record["living"], record["attempts"]) for record in history])
    lived = [record["living"] for record in history]
    assert {tuple(living) for living in lived} == ({(0,), (1,), (0, 1)} if deaths == 3 else {(0,), (0, 1)})
    assert sum(record["attempts"] > 1 for record in history) >= (2 if deaths == 3 else 1)
    for record, expected in zip(history, one_process(configs[0], lived), strict=True):
        assert_equal(record, expected)
    common = first.keys() & second.keys()
    assert len(common) >= 2 * deaths
    for step in common:
        assert_equal(first[step], {name: value for name, value in second[step].items() if "weight" in name}, 0.0)


@pytest.mark.nightly
@needs_torchft
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_layouts_inside_the_groups(tmp_path, lighthouse, axis):
    """A group of two ranks that share a model dies and returns."""
    options = {**GROUPS, f"{axis}_parallel_degree": 2, "training__global_batch_size": 16, "optimizer__lr": 2e-3}
    configs = [resolve(tmp_path, 2, {**options, "fault_tolerance__replica_id": number}) for number in (0, 1)]
    groups = Groups(configs, lighthouse)
    try:
        groups.start(0, 1)
        groups.both()
        groups.step(dying=1, ranks=(0, 1))
        groups.start(1)
        groups.both()
    finally:
        groups.close()
    first, _ = groups.records
    lived = [first[step]["living"] for step in sorted(first)]
    assert {tuple(living) for living in lived} == {(0,), (0, 1)}
    assert lived[-1] == [0, 1]
    for record, expected in zip(first.values(), one_process(configs[0], lived), strict=True):
        assert_equal(record, expected)


def problem_of_first_step(address: str, config: Config, identity: int = 7) -> str:
    """Join the other groups, take a step and leave them; return the problem, if there is one."""
    join(config, address, identity)
    try:
        take_step()
    except ConfigError as error:
        return f"{error}"
    finally:
        _group["replicas"].manager.shutdown(wait=False)
        _group["run"].loader.close()
    return ""


@pytest.mark.nightly
@needs_torchft
def test_groups_that_must_not_train_together_say_so(tmp_path, lighthouse):
    """Two groups of one rank: with different options, with the same number, with different weights."""
    options = {**GROUPS, "training__global_batch_size": 16, "fault_tolerance__min_replica_size": 2}
    first, second, changed = (
        resolve(tmp_path, 1, {**options, **others})
        for others in (
            {},
            {"fault_tolerance__replica_id": 1},
            {"fault_tolerance__replica_id": 1, "debug__seed": 43},
        )
    )
    cases = [
        ({"config": second, "identity": 8}, "replica groups have different configs or data"),
        ({"config": first}, "fault_tolerance.replica_id = 0: 2 participants"),
        ({"config": changed}, "replica groups have different weights after step 0"),
    ]
    pools = [ProcessPool(1), ProcessPool(1)]
    try:
        with ThreadPoolExecutor(2) as threads:
            for other, expected in cases:
                calls = [{"config": first}, other]
                runs = [
                    threads.submit(pool.run, problem_of_first_step, address=lighthouse, **call)
                    for pool, call in zip(pools, calls, strict=True)
                ]
                for run in runs:
                    (problem,) = run.result()
                    assert expected in problem
    finally:
        for pool in pools:
            pool.close()


# Pasts ----------------------------------------------------------------------------------------------------------------

BOTH = (1, 5, [0, 1])
"""Two groups take step 1 in torchft's quorum 5."""
PASTS = {
    "the same": ([BOTH], [BOTH], None),
    "this one was away": ([BOTH], [BOTH, (9, 6, [1])], 8),
    "they died in turns": ([BOTH, (6, 7, [0])], [BOTH, (9, 6, [1])], 5),
    "nothing is shared": ([(1, 2, [0])], [(1, 3, [1]), (4, 5, [0, 1])], 0),
    "a new group": ([], [BOTH], 0),
}


@needs_torchft
@pytest.mark.parametrize("case", PASTS)
def test_the_last_step_that_two_groups_share(case):
    from titanlite.techniques.replicas.torchft import last_shared_step

    own, other, step = PASTS[case]
    assert last_shared_step(own, other) == last_shared_step(other, own) == step


# Runs ----------------------------------------------------------------------------------------------------------------


class Launch:
    """A group: titanlite train with two ranks, in a session of its own."""

    def __init__(self, folder: Path, number: int, *arguments: str):
        self.folder, self.number, self.arguments = folder / f"group-{number}", number, arguments
        self.file = folder / "small.toml"
        self.start()

    def start(self) -> None:
        options = {
            "fault_tolerance.enable": "true",
            "fault_tolerance.group_size": 2,
            "fault_tolerance.replica_id": self.number,
            "parallelism.data_parallel_shard_degree": 2,
            "job.dump_folder": self.folder,
            "training.steps": 100_000,
            "lr_scheduler.total_steps": 100_000,
            "checkpoint.enable": "true",
            "checkpoint.keep_latest_k": 0,
            "checkpoint.interval": 20,
            "metrics.enable_tensorboard": "false",
        }
        command = [sys.executable, "-m", "titanlite", "train", str(self.file)]
        command += [f"--{key}={value}" for key, value in options.items()] + list(self.arguments)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RUST_LOG": "error"}
        self.out = (self.folder.parent / f"group-{self.number}.log").open("a")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.out, stderr=self.out, start_new_session=True, cwd=self.folder.parent
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the ranks end with their launcher
        self.process.wait()

    def lines(self) -> list[dict[str, Any]]:
        """Return what metrics.jsonl has, without a line that is being written."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()[:-1]] if file.exists() else []

    def log(self) -> str:
        return (self.folder.parent / f"group-{self.number}.log").read_text()

    def step(self, groups: int = 0) -> int:
        """Return the last step that was taken, with so many groups if that is given; 0: none."""
        steps = [line["step"] for line in self.lines() if groups in (0, line["replica_groups"])]
        return steps[-1] if steps else 0


def checkpoint_of(folder: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of a checkpoint, by file and name."""
    tensors = {}
    for file in (folder / "checkpoint" / f"step-{step}").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {(file.name, name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.nightly
@needs_torchft
def test_a_killed_group_does_not_stop_the_others_and_returns(tmp_path, lighthouse):
    """kill -9 of all processes of a group: the other goes on within seconds. The group, started again, gets the other's
    state from its memory, and both save the same bits from then on."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    first = Launch(tmp_path, 0)
    second = Launch(tmp_path, 1)
    try:
        wait_until(lambda: second.step(groups=2) > 5, "both groups train")
        first.kill()
        killed, alone = time.monotonic(), second.step()
        wait_until(lambda: second.step(groups=1) > max(alone, second.step(groups=2)), "the second group goes on alone")
        seconds = time.monotonic() - killed
        print(f"the other group went on after {seconds:.1f} s")
        assert seconds < 30
        left = second.step()
        first.start()
        began = time.monotonic()
        wait_until(lambda: second.step(groups=2) > left, "both groups train again")
        print(f"the killed group was back after {time.monotonic() - began:.1f} s")
        back = second.step()
        wait_until(lambda: min(first.step(), second.step()) > back + 25, "a checkpoint")
    finally:
        for group in (first, second):
            group.kill()
        print(first.log()[-2000:], second.log()[-2000:])
    assert "this one has got its state from another" in first.log()
    common = [
        {int(path.name[5:]) for path in (group.folder / "checkpoint").glob("step-*[0-9]")} for group in (first, second)
    ]
    step = max(common[0] & common[1])
    assert step > left
    one, other = (checkpoint_of(group.folder, step) for group in (first, second))
    assert one.keys() == other.keys()
    assert len(one) > 50
    assert all(torch.equal(one[name], other[name]) for name in one)


# Launches that cannot be ---------------------------------------------------------------------------------------------

WITHOUT_TORCHFT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torchft" else find_spec(name, *rest)
START
"""


@pytest.mark.nightly
@needs_torchft
def test_groups_that_die_in_turns_have_the_metrics_of_their_weights(tmp_path, lighthouse):
    """Each trains alone while the other is dead. Then the one that is behind gets the state of the other, and the steps
    that it has taken alone are no longer the past of its weights."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    first, second = groups = [Launch(tmp_path, number, "--checkpoint.interval=5") for number in (0, 1)]
    try:
        wait_until(lambda: all(group.step(groups=2) and len(group.lines()) > 15 for group in groups), "both save", 200)
        second.kill()
        died = second.step()
        wait_until(lambda: first.step(groups=1) > died + 12, "the first trains alone", 100)
        first.kill()
        second.start()
        wait_until(lambda: second.step(groups=1) > died + 25, "the second trains alone", 100)
        last = second.step()
        first.start()
        wait_until(lambda: min(group.step(groups=2) for group in groups) > last, "both train again", 200)
    finally:
        for group in groups:
            group.kill()
    losses = [{line["step"]: line["loss_metrics/global_avg_loss"] for line in group.lines()} for group in groups]
    shared = losses[0].keys() & losses[1].keys()
    assert [step for step in sorted(shared) if losses[0][step] != losses[1][step]] == []
    assert min(shared) <= died < last < max(shared)


STARTS = {
    "launcher": 'from titanlite.launch.cli import run_command; sys.exit(run_command("train", sys.argv[1:]))',
    "rank": "from titanlite.train import main; main(sys.argv[1:])",
}


@pytest.mark.nightly
@pytest.mark.parametrize("start", STARTS)
def test_a_launch_without_torchft_or_lighthouse_ends_with_a_line_for_each(tmp_path, start):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    script = WITHOUT_TORCHFT.replace("START", STARTS[start])
    options = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2"]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHFT_LIGHTHOUSE"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "small.toml"), *options],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    install = 'pip install "titanlite[ft]", or set false'
    assert first == f"error: fault_tolerance.enable = true: torchft is not installed; {install}"
    assert second.startswith(
        'error: environment: TORCHFT_LIGHTHOUSE = "": expected the address of torchft\'s lighthouse'
    )


@pytest.mark.nightly
def test_plan_and_parity_are_of_one_group(tmp_path):
    """A plan divides the global batch by the groups, and says so; parity compares the layout of one group."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    options = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2", "--plan.device=cpu"]
    loaded = config_module.load([str(tmp_path / "small.toml"), *options])
    resolved, _, _ = planner.resolve(loaded, 1)
    assert (resolved.training.global_batch_size, resolved.gradient_accumulation_steps) == (4, 2)
    launch = config_module.Launch(0, 0, 1, 1, 0)
    run = config_module.check(loaded, launch)
    assert (run.training.global_batch_size, run.gradient_accumulation_steps) == (8, 2)
    smaller, changes = shrink(dataclasses.replace(loaded, config=run), "float64")
    assert "fault_tolerance.enable True -> False" in changes
    assert config_module.check(smaller, launch).training.global_batch_size == 4
    with pytest.raises(ConfigError, match=r"multiple of local_batch_size x data-parallel ranks = 2 x 3 = 6"):
        config_module.check(config_module.load([str(loaded.file), *options, "--fault_tolerance.group_size=3"]), launch)
