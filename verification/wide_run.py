"""Measure what grows with the number of ranks, up to 16,384, on one machine.

    python -m verification.wide_run [groups] [ranks] [store] [index]

groups: one rank of a world whose other ranks do not exist makes all process groups of its start with gloo: seconds,
    and calls of the store.
ranks: all ranks exist, and train two steps with a checkpoint: calls of the store by each until the end. They are forked
    from one process that has imported the program; --worlds says how many.
store: the watchdog's own loop against a TCPStore in another process, as fast as it can; 2,048 connections;
    and the search for the rank that hangs among the heartbeats of all ranks.
index: the checkpoint's manifest of configs/reference/405b.toml, from the slices that each rank would save: bytes that
    rank 0 gathers, its size, and the seconds to build it, to read it, and to find in it what a rank loads.

Worlds of `groups` and `index` are 405b.toml with fewer data-parallel ranks: pp 16 x tp 8 x dp_shard 1 to 128. Each line
is JSON.
"""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import tomllib
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.memory.resident_memory import cpu_seconds
from benchmarks.python_path import ROOT, with_python_path
from titanlite import build
from titanlite.checkpoint import tensors
from titanlite.checkpoint.manifest import DTYPE_NAMES, FileEntry, Manifest, Stored, build_manifest, read_manifest
from titanlite.checkpoint.tensors import Slices, model_tensors, slices_to_save
from titanlite.config import Config, Launch, check, load_values
from titanlite.config.launch import raise_open_file_limit
from titanlite.config.schema import Comm, stage_modules
from titanlite.launch import process as rank_process
from titanlite.launch import process_group, watchdog
from titanlite.parallel import mesh
from titanlite.parallel.shards import Slice
from titanlite.tools.plan.op_trace import fake_world

WORLDS = 128, 1024, 4096, 16_384
CPU = torch.device("cpu")
SERVER = """
import sys, torch.distributed as dist
from titanlite.config.launch import raise_open_file_limit
raise_open_file_limit()
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class CountingStore(dist.Store):
    """Passes calls on to another store, and counts them and the bytes of values."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.calls, self.bytes = store, Counter[str](), 0

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls[name] += 1
        result = getattr(self.store, name)(*arguments)
        values = [each for each in (*arguments[1:], result) if isinstance(each, str | bytes)]
        self.bytes += sum(map(len, values))
        return result

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return self._call("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._call("multi_get", keys)
        self.bytes += sum(map(len, values))
        return values

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._call("check", keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._call("wait", keys, *timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call."""
        result = {"calls": dict(self.calls), "bytes": self.bytes}
        self.calls, self.bytes = Counter(), 0
        return result


def of_405b(world: int) -> Config:
    """Return the config of 405B with so many ranks."""
    shards = world // 128
    options = [f"--parallelism.data_parallel_shard_degree={shards}", f"--training.global_batch_size={16 * shards}"]
    launch = Launch(world - 1, 7, world, 8, n_devices=8)
    content = tomllib.loads((ROOT / "configs" / "reference" / "405b.toml").read_text())
    content["training"] = {key: content["training"][key] for key in ("seq_len", "local_batch_size", "steps")}
    del content["model"]["hf_assets_path"]  # no data is read
    return check(load_values(content, "405b", options), launch)


# One rank makes its process groups ----------------------------------------------------------------------------------


def make_groups(world: int) -> None:
    """Be the last rank of a world, make its groups, and print what that took."""
    variables = {
        "WORLD_SIZE": world,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    store, launch = CountingStore(dist.HashStore()), Launch(world - 1, 7, world, 8, n_devices=0)
    parallelism = of_405b(world).parallelism
    steps: dict[str, Callable[[], object]] = {
        "process group of all ranks": process_group.process_group(launch, Comm(init_timeout_seconds=30), "").__enter__,
        "mesh and its groups": lambda: mesh.build_layout(parallelism, CPU),
        "group of the data": lambda: dist.new_group(backend="gloo"),
        "group of the checkpoints": lambda: dist.new_group(backend="gloo"),
    }
    with mock.patch.object(process_group, "ranks_store", return_value=store):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            seconds = round(time.process_time() - begin, 3)
            print(json.dumps({"world": world, "what": name, "CPU s": seconds, **store.take()}), flush=True)
    os._exit(0)  # the groups cannot be destroyed without the other ranks


def groups(worlds: Iterable[int] = WORLDS) -> None:
    for world in worlds:
        child = multiprocessing.get_context("fork").Process(target=make_groups, args=(world,))
        child.start()
        child.join()


# All ranks train ------------------------------------------------------------------------------------------------------


def train_rank(rank: int, world: int, port: int, folder: Path, results: Any) -> None:
    """Be one rank of a training run, and report its calls of the store, its memory, threads and files."""
    from titanlite import train

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in variables.items()})
    stores: list[CountingStore] = []
    real = process_group.ranks_store

    def counting(*arguments: Any) -> CountingStore:
        stores.append(CountingStore(real(*arguments)))
        return stores[-1]

    def report(status: int) -> None:
        calls = dict(sum((each.calls for each in stores), Counter()))
        results.put({"rank": rank, "status": status, "calls": calls, "bytes": sum(each.bytes for each in stores)})
        os._exit(0)

    options = [f"--parallelism.data_parallel_shard_degree={world}", f"--job.dump_folder={folder / 'run'}"]
    options += ["--model.n_layers=1", "--model.dim=128", "--model.n_heads=4", "--model.n_kv_heads=4"]
    options += ["--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=2"]
    options += [f"--training.cache_folder={folder / 'cache'}", "--validation.enable=false", "--checkpoint.enable=true"]
    options += ["--comm.init_timeout_seconds=900", "--comm.train_timeout_seconds=900"]
    torch.set_num_threads(1)
    # The watchdog's calls depend on time, not on the start: its store is not counted.
    with (
        mock.patch.object(process_group, "ranks_store", counting),
        mock.patch.object(rank_process, "exit_process", report),
    ):
        train.main(["debug", *options])


@contextlib.contextmanager
def server_process() -> Iterator[tuple[int, int]]:
    """Run a store in another process, and yield its port and its process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, text=True, env=with_python_path(os.environ), **pipes) as server:
        yield int(server.stdout.readline()), server.pid
        server.stdin.close()


def train_ranks(world: int) -> None:
    """Fork the ranks of a world and print what they asked the store for. This process must have no other thread."""
    context = multiprocessing.get_context("fork")
    queue, begin = context.SimpleQueue(), time.monotonic()
    with server_process() as (port, _), tempfile.TemporaryDirectory() as name:
        arguments = [(rank, world, port, Path(name), queue) for rank in range(world)]
        processes = [context.Process(target=train_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        values = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    assert {each["status"] for each in values} == {0}
    calls = [sum(each["calls"].values()) for each in values]
    summary = {"world": world, "s": round(time.monotonic() - begin, 1), "calls of all": sum(calls)}
    summary |= {"of a rank, least and most": [min(calls), max(calls)], "of rank 0": calls_of_rank0(values)}
    summary |= {"by name": dict(sum((Counter(each["calls"]) for each in values), Counter()))}
    print(json.dumps(summary | {"bytes of all": sum(each["bytes"] for each in values)}), flush=True)


def calls_of_rank0(values: list[dict[str, Any]]) -> int:
    return next(sum(each["calls"].values()) for each in values if each["rank"] == 0)


def ranks(worlds: Iterable[int]) -> None:
    for world in worlds:
        command = [sys.executable, __file__, "--train-ranks", str(world)]
        subprocess.run(command, env=with_python_path(os.environ), check=True, timeout=600)


# The store ------------------------------------------------------------------------------------------------------------


def made_up(rank: int, world: int, port: int) -> watchdog.Watchdog:
    """Return the watchdog of a rank that will connect to the store."""
    launch = Launch(rank, rank % 8, world, 8, n_devices=8)
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    return watchdog.Watchdog(launch, Comm(), Path("."))


def beat(rank: int, world: int, port: int, seconds: float, counts: Any) -> None:
    """Run the watchdog's loop without pause, and report how many heartbeats it wrote."""
    dog, n = made_up(rank, world, port), 0
    real, dog.interval = dog._heartbeat, 0

    def heartbeat(number: int) -> dict[str, Any]:
        nonlocal n
        n = number
        return real(number)

    dog._heartbeat = heartbeat  # type: ignore[method-assign]
    threading.Timer(seconds, dog._finished.set).start()
    dog._beat()
    counts.put(n)


def store_rate(port: int, world: int, server: int, n_processes: int = 2, seconds: float = 5) -> dict[str, Any]:
    """Return how many heartbeats the store serves, with all that a rank asks with each, and its CPU time for one."""
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    arguments = [(rank, world, port, seconds, counts) for rank in range(0, 2 * n_processes, 2)]
    processes, begin = [context.Process(target=beat, args=each) for each in arguments], cpu_seconds(server)
    for each in processes:
        each.start()
    total = sum(counts.get() for _ in processes)
    for each in processes:
        each.join()
    interval, server_us = made_up(0, world, port).interval, 1e6 * (cpu_seconds(server) - begin) / total
    line = {"heartbeats/s served": round(total / seconds), "needed": round(world / interval), "interval s": interval}
    return {"world": world, **line, "CPU us of the store per heartbeat": round(server_us, 1)}


def connections(port: int, n: int, server: int) -> dict[str, Any]:
    """Open n connections to the store, as many as there are ranks, and return what they cost."""

    def rss() -> float:
        return int(Path(f"/proc/{server}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    before, begin = rss(), time.monotonic()
    kept = [watchdog.ranks_store("localhost", port, 300) for _ in range(n)]
    return {"connections": len(kept), "s": round(time.monotonic() - begin, 1), "server MiB": round(rss() - before, 1)}


def search(port: int, world: int, n_missing: int, server: int) -> dict[str, Any]:
    """Return what the search for the rank that hangs takes one rank."""
    dog = made_up(0, world, port)
    dog._store = watchdog.ranks_store("localhost", port, 300)
    beat_of_rank = {**dog._heartbeat(1000), "activity": "step 1000: forward and backward", "number": 9000}
    keys = [f"rank/{rank}" for rank in range(world)]
    for key in keys[:n_missing]:
        dog._store.delete_key(key)
    for key in keys[n_missing:]:
        dog._store.set(key, json.dumps(beat_of_rank))
    counting = dog._store = CountingStore(dog._store)
    begin, of_server, wall = time.process_time(), cpu_seconds(server), time.monotonic()
    dog._hang()
    seconds = {"CPU s": cpu_seconds_since(begin), "CPU s of the store": round(cpu_seconds(server) - of_server, 2)}
    seconds["s"] = round(time.monotonic() - wall, 2)
    return {"world": world, "missing": n_missing, "search": seconds, **counting.take()}


def store() -> None:
    with server_process() as (port, server):
        for world in WORLDS:
            print(json.dumps(store_rate(port, world, server)), flush=True)
        for world in WORLDS:
            print(json.dumps(search(port, world, 0, server)), flush=True)
            print(json.dumps(search(port, world, world // 2, server)), flush=True)
        print(json.dumps(connections(port, 2048, server)), flush=True)


# The index of a checkpoint --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tensors_of_stage(config: Config, pipeline_rank: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights and optimizer states of the ranks of a pipeline stage, on the meta device, in a fake world."""
    world, degree = config.parallelism.world_size, config.parallelism.pipeline_parallel_degree
    mesh.forget_layouts()
    with fake_world(pipeline_rank * world // degree, world):
        layout, weights = mesh.build_layout(config.parallelism, CPU), {}
        for number, modules in enumerate(stage_modules(config)):
            if number % degree == pipeline_rank:
                weights |= model_tensors(build.build_stage(config, layout, modules, torch.device("meta")))
        states = {}
        for name, weight in weights.items():
            state = name.replace("model.", "optimizer.state.", 1)
            states |= {f"{state}.step": torch.tensor(1.0), f"{state}.exp_avg": weight, f"{state}.exp_avg_sq": weight}
        yield weights | states


KNOWN_SLICES: dict[Any, Slice] = {}
"""By the shape of a tensor, its placements and the place in the mesh."""


@functools.cache
def empty(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@contextlib.contextmanager
def made_up_places(all_tensors: dict[str, Tensor]) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that puts this process at another place of the tensors' mesh: (shard, tensor-parallel rank).
    What depends only on the place, a tensor's shape and its placements is computed once.

    Uses the private attribute DeviceMesh._coordinate_on_dim (tested with torch 2.13).
    """
    real, place = tensors.shard_slice, (0, 0)
    meshes = {id(each.device_mesh): each.device_mesh for each in all_tensors.values() if isinstance(each, DTensor)}

    def stand_at(shard: int, tp: int) -> None:
        nonlocal place
        place = shard, tp
        for each in meshes.values():
            by_name = {"fsdp": shard, "tp": tp}
            each._coordinate_on_dim = tuple(by_name.get(axis, 0) for axis in each.mesh_dim_names)

    def shard_slice(tensor: Tensor) -> Slice:
        case = tensor.shape, getattr(tensor, "placements", ()), place
        if case not in KNOWN_SLICES:
            KNOWN_SLICES[case] = real(tensor)
        return KNOWN_SLICES[case]

    def plain_shard(tensor: Tensor) -> Tensor:
        return empty(shard_slice(tensor).size, tensor.dtype)

    def get_local_rank(self: DeviceMesh, axis: int) -> int:
        return self._coordinate_on_dim[axis]

    with (
        mock.patch.multiple(tensors, shard_slice=shard_slice, plain_shard=plain_shard),
        mock.patch.object(DeviceMesh, "get_local_rank", get_local_rank),
    ):
        yield stand_at


def stored_by_ranks(config: Config) -> Iterator[tuple[str, Stored]]:
    """Yield the name of each rank's file and what it has, as titanlite.checkpoint.files.write_file returns it."""
    parallelism, numbers = config.parallelism, itertools.count()
    for pipeline_rank in range(parallelism.pipeline_parallel_degree):
        with tensors_of_stage(config, pipeline_rank) as all_tensors, made_up_places(all_tensors) as stand_at:
            for shard in range(parallelism.data_parallel_shard_degree):
                for tp in range(parallelism.tensor_parallel_degree):
                    stand_at(shard, tp)
                    rank = next(numbers)
                    yield f"rank-{rank:05d}.safetensors", stored_of(slices_to_save(all_tensors), rank)


def stored_of(slices: Slices, rank: int) -> Stored:
    generators = {f"random.cpu.{rank}": 5056, f"random.cuda.{rank}": 16}
    grouped: dict[Any, list[str]] = {}
    for name, (tensor, offset, shape) in slices.items():
        grouped.setdefault((DTYPE_NAMES[tensor.dtype], shape, Slice(offset, tuple(tensor.shape))), []).append(name)
    for name, size in generators.items():
        grouped[("U8", (size,), Slice((0,), (size,)))] = [name]
    return Stored(FileEntry(bytes=10**9, xxh3_64=f"{rank:016x}"), grouped)


def index_of(world: int) -> None:
    config, begin = of_405b(world), time.process_time()
    gathered = [pickle.dumps(each) for each in stored_by_ranks(config)]
    line = {"world": world, "CPU s to make up": cpu_seconds_since(begin)}
    largest = max(map(len, gathered))
    line |= {"bytes of a rank": largest, "MB gathered by rank 0": round(largest * world / 1e6, 1)}
    begin = time.process_time()
    files = dict(map(pickle.loads, gathered))
    line["CPU s to unpickle"] = cpu_seconds_since(begin)
    begin = time.process_time()
    content = build_manifest(files, b"{}")
    line |= {"CPU s to build": cpu_seconds_since(begin), "manifest MB": round(len(content) / 1e6, 2)}
    del files, gathered
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "manifest.json").write_bytes(content)
        begin = time.process_time()
        manifest = read_manifest(Path(name))
        line["CPU s to read"] = cpu_seconds_since(begin)
    line |= {"layouts": len(manifest.layouts), "tensors": len(manifest.tensors)}
    line["to load"] = to_load(manifest, config)
    if world > WORLDS[0]:
        line["to load on half as many ranks"] = to_load(manifest, of_405b(world // 2))
    line["peak GiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    print(json.dumps(line), flush=True)


def cpu_seconds_since(begin: float) -> float:
    return round(time.process_time() - begin, 2)


def to_load(manifest: Manifest, config: Config) -> dict[str, Any]:
    """Return what the first rank needs to find its slices, and how many files it opens."""
    with tensors_of_stage(config, 0) as all_tensors:
        wanted = {name: tensors.shard_slice(tensor) for name, tensor in all_tensors.items()}
    begin = time.process_time()
    files = {file for name, each in wanted.items() for file, _ in manifest.slices(name, each)}
    for file in files:
        manifest.names_of_file(file)
    return {"CPU s": cpu_seconds_since(begin), "files": len(files)}


def index() -> None:
    for world in WORLDS:
        command = [sys.executable, __file__, "--index-of", str(world)]
        subprocess.run(command, env=with_python_path(os.environ), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["groups", "ranks", "store", "index"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16], help="those of `ranks`")
    parser.add_argument("--make-groups", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--train-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--index-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_open_file_limit()
    torch.set_num_threads(1)
    if arguments.make_groups:
        groups(arguments.make_groups)
    elif arguments.train_ranks:
        train_ranks(arguments.train_ranks)
    elif arguments.index_of:
        index_of(arguments.index_of)
    else:
        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores", flush=True)
        sections = {"groups": groups, "ranks": lambda: ranks(arguments.worlds), "store": store, "index": index}
        for name in arguments.what:
            print(name, flush=True)
            sections[name]()


if __name__ == "__main__":
    main()
