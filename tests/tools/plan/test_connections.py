"""Process groups, connections and threads of a rank: no more than the plan computes, however many ranks there are."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_layouts import MODEL, PP, SHARD, TP, with_batches, world_size
from tests.parallel.test_parity import CPU, resolve
from titanlite import config
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.parallel import mesh
from titanlite.tools.parity.process_pool import ProcessPool
from titanlite.tools.parity.training_run import run_layout
from titanlite.tools.plan.connections import gloo_connections, process_groups
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.result import Plan

pytestmark = pytest.mark.nightly
EXPERTS = {"model__moe__n_experts": 4, "model__moe__expert_dim": 16, "expert_parallel_degree": 4}
THREADS_OF_A_GROUP = 3  # gloo's: two that run collectives, one that waits for its sockets
OTHER_THREADS = 10  # the main thread, and what Python, autograd, the loader, DCP and CUDA builds of torch may have
ESTABLISHED = "01"


def n_connections() -> int:
    """Return how many established TCP connections this process has."""
    descriptors = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    inodes = {name.removeprefix("socket:[").rstrip("]") for name in descriptors if name.startswith("socket:")}
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(row[3] == ESTABLISHED and row[9] in inodes for row in rows)


def connect(job: config.Config) -> int:
    """Build the mesh on this rank and return its connections."""
    mesh.build_layout(job.parallelism, CPU)
    return n_connections()


def train(job: config.Config, folder: Path) -> dict[str, int]:
    """Take a step, validate, save and load on this rank. Return its process groups, connections and threads."""
    checkpointer = Checkpointer(folder, job.checkpoint, {}, job.comm)
    run_layout(job, config.Launch.from_environment(n_devices=0), steps=1, checkpointer=checkpointer)
    dist.barrier()  # as at the end of a run
    counts = {"groups": len(dist.distributed_c10d._world.pg_map)}
    path = folder / "checkpoint" / "step-1.unconfirmed"
    CheckpointReader(path).load({f"random.cpu.{dist.get_rank()}": torch.get_rng_state()})
    return counts | {"connections": n_connections(), "threads": len(list(Path("/proc/self/task").iterdir()))}


def counts_and_plan(tmp_path: Path, layout: dict[str, Any]) -> tuple[list[dict[str, int]], Plan]:
    """Return what each rank counts, in processes that do nothing else, and the plan of the same config."""
    options = with_batches(MODEL | layout | {"checkpoint__enable": True, "plan__device": "cpu"})
    job = resolve(tmp_path, world_size(options), options)
    loaded = config.LoadedConfig(job, "config.toml", {})
    pool = ProcessPool(world_size(options), timeout_seconds=60 if world_size(options) <= 8 else 900)
    try:
        assert pool.run(connect, job=job) == [0] * pool.world_size, "connections before the first collective"
        return pool.run(train, job=job, folder=tmp_path), make_plan(loaded)
    finally:
        pool.close()


def assert_as_planned(counts: list[dict[str, int]], plan: Plan) -> None:
    groups, (first, others) = process_groups(plan), gloo_connections(plan)
    assert {count["groups"] for count in counts} == {len(groups)}
    assert [
        (rank, count) for rank, count in enumerate(counts) if count["connections"] > (others if rank else first)
    ] == []
    assert max(count["threads"] for count in counts) <= THREADS_OF_A_GROUP * len(groups) + OTHER_THREADS


@pytest.mark.parametrize(
    "layout",
    [PP | TP, {"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": 2}, EXPERTS | SHARD | TP],
    ids=["pp x tp", "reshard to groups of 2", "shard x tp, ep"],
)
def test_four_ranks_connect_when_they_first_communicate(tmp_path, layout):
    assert_as_planned(*counts_and_plan(tmp_path, layout))


@pytest.mark.timeout(1800)
def test_connections_of_32_ranks(tmp_path):
    """A full mesh of every group would be 71 connections on each rank: 2 x 31 + 7 + 1 + 1."""
    counts, plan = counts_and_plan(tmp_path, PP | SHARD | TP | {"data_parallel_shard_degree": 8})
    assert gloo_connections(plan) == (44, 23)
    assert_as_planned(counts, plan)
