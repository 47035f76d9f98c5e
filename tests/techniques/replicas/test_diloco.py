"""DiLoCo: what replica groups that synchronize every few steps compute, also when groups die, return and resume."""

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launches import wait_until
from tests.parallel.test_parity import resolve
from tests.techniques.replicas import test_fault_tolerance as groups_of_test
from tests.techniques.replicas.test_fault_tolerance import (
    GROUPS,
    ROOT,
    Groups,
    Launch,
    assert_equal,
    checkpoint_of,
    forward_backward,
    needs_torchft,
    plain_step,
)
from tests.test_train import SMALL
from titanlite import build
from titanlite.config import Config, ConfigError
from titanlite.config.errors import TrainingError
from titanlite.config.schema import FaultTolerance
from titanlite.techniques.replicas.diloco import DiLoCo, OuterOptimizer
from titanlite.tools.parity.reference import trace_of

lighthouse = groups_of_test.lighthouse
SYNC_STEPS = 3
DILOCO = {**GROUPS, "fault_tolerance__semi_sync_method": "diloco", "fault_tolerance__sync_steps": SYNC_STEPS}


def end_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_round(dying_ranks: tuple[int, ...] = (), during: str = "") -> dict[str, Any]:
    """Take steps until groups have synchronized; return what that computed. Ranks in `dying_ranks` kill themselves
    `during` "training", in the second step, or "synchronizing"."""
    run, replicas = groups_of_test._group["run"], groups_of_test._group["replicas"]
    dies = dist.get_rank() in dying_ranks
    if dies and during == "synchronizing":
        replicas._sum_shards = end_process
    contributed = False
    for step in groups_of_test._group["steps"]:
        _, loss_sum, valid = forward_backward(step)
        if dies and during == "training" and step % SYNC_STEPS == 2:
            end_process()
        run.update(run.totals(loss_sum, valid))
        contributed = replicas.updated(step, stopping=False)
        if replicas.step % SYNC_STEPS == 0:
            break
    weights = run.trace_of_all_stages("weight", run.parameters)
    (inner_steps,) = {state["step"].item() for state in run.optimizer.state.values()}
    counts = {"step": replicas.step, "batches": replicas.batches, "inner_steps": inner_steps}
    return counts | {"contributed": contributed, "living": replicas.living} | weights


class Reference:
    """DiLoCo in one process: for each group a model and its inner AdamW, and torch's SGD as the outer optimizer."""

    def __init__(self, config: Config):
        self.config, self.step, self.batches = config, 0, 0
        self.model = groups_of_test.plain_model(config)
        section = config.fault_tolerance
        momentum = {"momentum": section.outer_momentum, "nesterov": True}
        self.outer = torch.optim.SGD(self.model.parameters(), section.outer_lr, **momentum)
        self.inner = [self._inner_of(copy.deepcopy(self.model)) for _ in range(2)]

    def _inner_of(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, build.build_optimizer(self.config, model)

    def start(self, group: int) -> None:
        """Begin a group without states of its inner optimizer."""
        self.inner[group] = self._inner_of(copy.deepcopy(self.model))

    def synchronize(self, step: int, contributed: list[int]) -> dict[str, Any]:
        """Train the groups that contribute up to a step, and take the outer step."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in contributed:
            model, inner = self.inner[group]
            model.load_state_dict(self.model.state_dict())
            for number in range(self.step + 1, step + 1):
                plain_step(self.config, model, inner, number, [group])
            for mine, parameter in zip(model.parameters(), self.model.parameters(), strict=True):
                parameter.grad += (parameter.detach() - mine.detach()) / len(contributed)
        self.outer.step()
        self.batches += (step - self.step) * len(contributed)
        self.step = step
        return {"batches": self.batches} | trace_of("weight", dict(self.model.named_parameters()))


@needs_torchft
@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_synchronization_is_that_of_the_groups_that_trained(tmp_path, lighthouse, deaths):
    """Groups join, die in a step, die in the sums of a synchronization, fully and in part, and return. In float64
    weights agree to 1e-11 after every synchronization with those of one process, and are bit for bit the same in both
    groups. A group that has got its state from another has no part in the average, be it new or one that has trained
    from a state of long ago."""
    options = {**DILOCO, "data_parallel_shard_degree": 2, "training__global_batch_size": 16, "optimizer__lr": 1e-4}
    configs = [resolve(tmp_path, 2, {**options, "fault_tolerance__replica_id": number}) for number in (0, 1)]
    groups = Groups(configs, lighthouse, take_round)
    try:
        groups.start(0, 1)
        groups.both()
        groups.step()
        groups.step(dying=1, ranks=(0, 1), during="training")
        groups.start(1)
        groups.both()
        if deaths == 3:
            groups.step(dying=0, ranks=(1,), during="synchronizing")
            groups.start(0)
            groups.both()
            groups.kill(1)
            groups.step()
            groups.start(1, last_step=2)
            groups.both()
            groups.step()
    finally:
        groups.close()
    seen = assert_as_one_process(groups)
    assert {((0, 1), ()), ((0,), (1,)), ((0,), ())} <= seen
    assert (((1,), (0,)) in seen) == (deaths == 3)


def assert_as_one_process(groups: Groups) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Assert that groups have computed what the reference does. Return which ones were in an average, and which have
    got their state from another, at any synchronization."""
    (first, second), config, seen = groups.records, groups.configs[0], set()
    reference = Reference(config)
    initial = copy.deepcopy(reference.model.state_dict())
    for step in sorted(first | second):
        records = {number: each[step] for number, each in enumerate(groups.records) if step in each}
        contributed = [number for number, record in records.items() if record["contributed"]]
        (living,) = {tuple(record["living"]) for record in records.values()}
        for number in contributed:
            if records[number]["inner_steps"] == step - reference.step:
                reference.start(number)
        expected = reference.synchronize(step, contributed)
        healed = [number for number in living if number not in contributed]
        for number in set(healed) & records.keys():  # it has trained a step from the initial weights
            reference.start(number)
            model, inner = reference.inner[number]
            model.load_state_dict(initial)
            plain_step(config, model, inner, 3, [number])
        seen.add((tuple(contributed), tuple(healed)))
        print(step, contributed, healed)
        for record in records.values():
            assert_equal(record, expected)
        if len(records) == 2:
            assert_equal(first[step], {name: x for name, x in second[step].items() if "weight" in name}, 0.0)
    return seen


@pytest.mark.nightly
@needs_torchft
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_layouts_inside_the_groups(tmp_path, lighthouse, axis):
    """A group of two ranks that share a model dies and returns. Then the group that sends it its state dies before the
    synchronization counts: the other goes on from that state, and from where the data was then."""
    options = {**DILOCO, f"{axis}_parallel_degree": 2, "training__global_batch_size": 16, "optimizer__lr": 1e-4}
    configs = [resolve(tmp_path, 2, {**options, "fault_tolerance__replica_id": number}) for number in (0, 1)]
    groups = Groups(configs, lighthouse, take_round)
    try:
        groups.start(0, 1)
        groups.both()
        groups.step(dying=1, ranks=(0, 1), during="training")
        groups.start(1)
        groups.both()
        groups.kill(1)
        groups.step()
        groups.start(1)
        groups.step(dying=0, ranks=(0, 1), during="synchronizing")
        groups.step()
    finally:
        groups.close()
    seen = assert_as_one_process(groups)
    assert {((0, 1), ()), ((0,), (1,)), ((1,), ())} <= seen


class ManagerOfOneGroup:
    """What torchft's DiLoCo calls of a Manager, for one group whose collectives change nothing."""

    _use_async_quorum = False

    def current_step(self) -> int:
        return 0

    def should_commit(self) -> bool:
        return True

    def allreduce(self, tensor: Tensor, **_: Any) -> Any:
        future = torch.futures.Future[Tensor]()
        future.set_result(tensor)
        return future

    def _nothing(self, *_: Any) -> None:
        pass

    start_quorum = allow_state_dict_read = disallow_state_dict_read = register_state_dict_fn = _nothing


@needs_torchft
def test_the_outer_step_is_that_of_torchft():
    """Twelve steps of AdamW in float64, synchronized every third: torchft's DiLoCo with torch's SGD has the same
    weights."""
    from torchft import local_sgd

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    theirs = copy.deepcopy(model)
    inner, inner_of_theirs = (torch.optim.AdamW(each.parameters(), 0.05) for each in (model, theirs))
    section = FaultTolerance(semi_sync_method="diloco", sync_steps=3, outer_lr=0.6, outer_momentum=0.8)
    outer = OuterOptimizer(dict(model.named_parameters()), section)
    outer.begin()
    sgd = torch.optim.SGD(theirs.parameters(), 0.6, momentum=0.8, nesterov=True)
    changes = []
    with local_sgd.DiLoCo(ManagerOfOneGroup(), [theirs], inner_of_theirs, sgd, sync_every=3):
        for step in range(1, 13):
            inputs = torch.randn(4, 5, dtype=torch.float64)
            for each, optimizer in ((model, inner), (theirs, inner_of_theirs)):
                optimizer.zero_grad()
                each(inputs).square().sum().backward()
                optimizer.step()
            if step % 3 == 0:
                gradients = outer.gradients()
                changes.append(max(gradient.abs().max().item() for gradient in gradients))
                outer.step(gradients)
                for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
                    torch.testing.assert_close(mine, other, rtol=0, atol=1e-14)
    assert min(changes) > 1e-3


def train(folder: Path, ranks: int, *options: str) -> str:
    """Run titanlite train with the first of two groups, and return what it printed."""
    command = [sys.executable, "-m", "titanlite", "train", str(folder / "small.toml"), *options]
    command += ["--training.dtype=float64", "--fault_tolerance.enable", "--fault_tolerance.group_size=2"]
    command += ["--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=5", "--training.steps=12"]
    command += [f"--parallelism.tensor_parallel_degree={ranks}", "--checkpoint.enable", "--checkpoint.interval=7"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RUST_LOG": "error"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=folder)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.nightly
@needs_torchft
def test_a_run_resumes_between_two_synchronizations(tmp_path, lighthouse):
    """The checkpoint of step 7 is two steps after a synchronization. A run that resumes from it has the same bits after
    step 12 as the one that went on, and under another layout the same weights, up to rounding in float64. Weights and
    momentum of the outer optimizer are not at their beginning: without them the weights differ by far more."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    checkpoints, found = tmp_path / "run" / "checkpoint", []
    for ranks in (1, 1, 2):
        if checkpoints.exists():
            shutil.rmtree(checkpoints / "step-12")
        out = train(tmp_path, ranks)
        assert ("resumed after step 7 of 12" in out) == bool(found)
        found.append(checkpoint_of(tmp_path / "run", 12))
    first, again, sharded = found
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    whole = {name: tensor for (_, name), tensor in first.items() if name.startswith(("model.", "outer."))}
    assert sum(name.startswith("outer.momentum.") and tensor.any().item() for name, tensor in whole.items()) > 10
    of_ranks = [{name: tensor for (file, name), tensor in sharded.items() if f"0000{rank}" in file} for rank in (0, 1)]
    compared = 0
    for name, tensor in whole.items():
        shards = [saved[name] for saved in of_ranks if name in saved]
        sharded_dims = [dim for dim, size in enumerate(tensor.shape) if shards[0].shape[dim] != size]
        together = torch.cat(shards, *sharded_dims) if sharded_dims else shards[0]
        torch.testing.assert_close(together, tensor, rtol=0, atol=1e-12)
        compared += 1
    assert compared > 30


@pytest.mark.nightly
@needs_torchft
def test_a_killed_group_returns_and_both_stop(tmp_path, lighthouse):
    """kill -9 of a group: the other goes on. The group, started again, gets the weights and the outer state; both save
    the same ones after the same synchronization, with inner optimizer states of their own. SIGTERM then ends both with
    a checkpoint, wherever they are."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    options = "--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=5"
    launches = [Launch(tmp_path, number, *options) for number in (0, 1)]
    first, second = launches
    try:
        wait_until(lambda: second.step(groups=2) > 10, "both groups train")
        first.kill()
        left = second.step()
        wait_until(lambda: second.step(groups=1) > left + 5, "the second group synchronizes alone")
        first.start()
        left = second.step()
        wait_until(lambda: second.step(groups=2) > left, "both groups train again")
        back = second.step()
        wait_until(lambda: min(first.step(), second.step()) > back + 25, "a checkpoint")
        for launch in launches:
            launch.process.terminate()
        assert [launch.process.wait(60) for launch in launches] == [0, 0]
    finally:
        for launch in launches:
            launch.kill()
        print(first.log()[-2000:], second.log()[-2000:])
    assert "this one has got its state from another" in first.log()
    saved = [{int(path.name[5:]) for path in (launch.folder / "checkpoint").glob("step-*")} for launch in launches]
    assert all(f"ended after step {max(steps)}" in launch.log() for launch, steps in zip(launches, saved, strict=True))
    step = max(step for step in saved[0] & saved[1] if step % 20 == 0)
    assert step > back
    one, other = (checkpoint_of(launch.folder, step) for launch in launches)
    assert one.keys() == other.keys()
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert {name for name in one if name[1].startswith(("model.", "outer."))} <= same
    assert any(name[1].endswith("exp_avg") for name in one.keys() - same)


@pytest.mark.nightly
@needs_torchft
def test_steps_that_are_lost_are_not_in_the_metrics(tmp_path, lighthouse):
    """A group that was killed resumes between two synchronizations, while the other has gone on: at the next one it
    gets the state of the other, and what it has trained since their last common synchronization is not the past of its
    weights."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    options = "--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=5", "--checkpoint.interval=7"
    first, second = launches = [Launch(tmp_path, number, *options) for number in (0, 1)]

    def saved() -> dict[int, Path]:
        folders = (second.folder / "checkpoint").glob("step-*")
        return {int(folder.name.partition(".")[0][5:]): folder for folder in folders if folder.suffix != ".tmp"}

    def has_saved_between() -> bool:
        shared = {line["step"] for line in second.lines() if line["replica_groups"] == 2}
        return any(step % 5 and step - step % 5 in shared for step in saved())

    try:
        wait_until(has_saved_between, "the second group saves between two synchronizations", 200)
        second.kill()
        for step, folder in saved().items():
            if step % 5 == 0:
                shutil.rmtree(folder)
        died = max(saved())
        wait_until(lambda: first.step(groups=1) > died + 10, "the first group goes on alone", 100)
        alone = first.step()
        second.start()
        wait_until(lambda: second.step(groups=2) > alone, "both groups train again", 200)
    finally:
        for launch in launches:
            launch.kill()
        print(first.log()[-2000:], second.log()[-2000:])
    resumed = int(re.findall("resumed after step ([0-9]+) of", second.log())[-1])
    last_shared = resumed - resumed % 5
    steps = [line["step"] for line in second.lines()]
    assert resumed > last_shared
    assert last_shared in steps
    assert min(step for step in steps if step > last_shared) > alone


def test_what_must_not_be_synchronized_ends_the_group():
    diloco = object.__new__(DiLoCo)  # without a lighthouse
    diloco.step, diloco._synchronized = 7, 5
    assert diloco._common_step(6.0, counts=False) == 6
    with pytest.raises(TrainingError, match="step 7: other replica groups synchronize after another step"):
        diloco._common_step(6.5, counts=True)
    with pytest.raises(TrainingError, match=r"since step 5; raise training\.steps"):
        next(diloco.steps(7, 7))
    weight = nn.Parameter(torch.ones(3))
    diloco.outer = OuterOptimizer({"weight": weight}, FaultTolerance())
    diloco.outer.begin()
    weight.data[1] = torch.nan
    with pytest.raises(TrainingError, match="step 7: the weights are not finite"):
        diloco._summed_gradients(counts=True)
    diloco.section, diloco._last = FaultTolerance(sync_steps=5), 100
    assert diloco.updated(10, stopping=True)  # left to the next start


def test_options_of_diloco_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="outer step is rounded"):
        resolve(tmp_path, 1, {**DILOCO, "training__dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"fault_tolerance.sync_steps"):
        resolve(tmp_path, 1, {**GROUPS, "fault_tolerance__sync_steps": 7})
