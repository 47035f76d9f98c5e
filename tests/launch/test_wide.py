"""What a launch of up to 16,384 ranks asks of the store, the watchdog and a checkpoint's index, with made-up ranks."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import FileEntry, Stored
from titanlite.config import Launch
from titanlite.config.schema import Comm
from titanlite.config.types import MOST_RANKS
from titanlite.launch import progress, watchdog
from titanlite.parallel.shards import Slice

ROOT = Path(__file__).parents[2]
WORLD = 16_384
HEARTBEATS_PER_SECOND = 1024


@dataclasses.dataclass
class FakeStore:
    """The heartbeats of a world, and how often they are asked for."""

    values: dict[str, bytes]
    calls: int = 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [self.values[key] for key in keys]


def made_up(world: int, **timeouts: int) -> watchdog.Watchdog:
    return watchdog.Watchdog(Launch(0, 0, world, 8, n_devices=8), Comm(**timeouts), Path("run"))


@pytest.fixture(autouse=True)
def trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "train_timeout", 1)


@pytest.mark.parametrize("world", [2, 256, 1024, WORLD, MOST_RANKS])
def test_a_heartbeat_that_is_looked_at_just_before_it_comes_is_no_silence(world):
    dog = made_up(world)
    assert dog.timeout >= 3 * dog.interval
    assert world / dog.interval <= HEARTBEATS_PER_SECOND, "all ranks together"


def heartbeats(dog: watchdog.Watchdog, missing: int = 0, behind: int = 0) -> FakeStore:
    """Return a store in which the first ranks are missing, and the next ones are behind."""
    late, others = (json.dumps({**dog._heartbeat(1), "number": number}).encode() for number in (6, 7))
    ranks = range(missing, dog.launch.world_size)
    return FakeStore({f"rank/{rank}": late if rank < missing + behind else others for rank in ranks})


@pytest.mark.parametrize(
    ("missing", "behind", "text"),
    [
        (2, 0, "error: rank 0, 1 has not started within "),
        (MOST_RANKS // 2, 0, "error: rank 0, 1, 2, 3, 4, 5, 6, 7 and 32,760 more has not started within "),
        (0, MOST_RANKS // 2, " (and 32767 more) hangs at "),
    ],
    ids=["two are missing", "half is missing", "half is behind"],
)
def test_the_search_for_what_hangs_is_linear(missing, behind, text):
    dog, seconds = made_up(MOST_RANKS), []
    for of_case in ((missing, behind), (0, 0)):
        dog._store = heartbeats(dog, *of_case)
        begin = time.process_time()
        record: dict[str, Any] = dog._hang()
        seconds.append(time.process_time() - begin)
        assert len(record["message"]) < 500
        assert dog._store.calls <= 2 + MOST_RANKS * (of_case[0] > 0)
        assert of_case == (0, 0) or text in record["message"]
    assert seconds[0] < 3 * seconds[1] + 0.1, "much longer than where all ranks are at the same activity"


def test_few_ranks_search_at_once_for_what_hangs(monkeypatch):
    """All ranks of a world that hangs may find it in the same second. The heartbeats of 16,384 ranks are 3 MB."""
    waits = []
    monkeypatch.setattr(progress, "is_over", lambda seconds: True)
    monkeypatch.setattr(watchdog.time, "sleep", waits.append)
    for rank in (*range(100), WORLD - 1):
        dog = watchdog.Watchdog(Launch(rank, 0, WORLD, 8, n_devices=8), Comm(), Path("run"))
        dog._store = FakeStore({"end": b"{}"})  # another rank has found it meanwhile
        assert dog._own_hang() is None
        assert dog._store.calls == 1
    assert [sum(wait < seconds for wait in waits) for seconds in (1, 2, 5)] == [1, 3, 31]
    assert max(waits) < 15


def test_a_rank_makes_its_groups_with_as_many_calls_of_the_store_in_any_world():
    command = [sys.executable, str(ROOT / "verification" / "wide_run.py"), "--make-groups", "1024", str(WORLD)]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=True
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    small, large = (
        [(each["what"], each["calls"], each["bytes"]) for each in lines if each["world"] == world]
        for world in (1024, WORLD)
    )
    assert small == large
    assert sum(sum(calls.values()) for _, calls, _ in large) == 7


def manifest_of(n_ranks: int, n_names: int = 20) -> bytes:
    """Return the manifest of so many ranks that each have a row of every tensor."""
    files = {
        f"rank-{rank:05d}.safetensors": Stored(
            FileEntry(bytes=10**9, xxh3_64=f"{rank:016x}"),
            {
                ("F32", (n_ranks, 8), Slice((rank, 0), (1, 8))): [f"model.{number}" for number in range(n_names)],
                ("U8", (5056,), Slice((0,), (5056,))): [f"random.cpu.{rank}"],
            },
        )
        for rank in range(n_ranks)
    }
    return manifest.build_manifest(files, b"{}")


def test_the_index_of_a_checkpoint_is_linear(tmp_path):
    small, large = manifest_of(256), manifest_of(4096)
    assert len(large) / 4096 == pytest.approx(len(small) / 256, rel=0.1), "bytes per rank"
    assert len(large) / 4096 * MOST_RANKS < manifest.LARGEST_MANIFEST
    (tmp_path / "manifest.json").write_bytes(large)
    read = manifest.read_manifest(tmp_path)
    assert read.slices("model.3", Slice((17, 0), (1, 8))) == [(17, Slice((17, 0), (1, 8)))]
