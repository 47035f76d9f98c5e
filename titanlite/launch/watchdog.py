"""Finds the rank that hangs or has died, and ends all ranks with an error that names it.

Ranks write heartbeats to the launch's store, without collectives, which may hang. A rank is silent if its neighbour
sees no new heartbeat during the timeout. A rank hangs if an activity of its main thread exceeds its longest time so far
plus the timeout. The first rank that has or detects a failure records it in the store, where all other ranks read it
within seconds. The keys in titanlite/ATTEMPT/ have JSON: `end`, the failure; `rank/N`, the heartbeat of rank N."""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import queue
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from titanlite.config import Launch
from titanlite.config.regular_file import open_own
from titanlite.config.schema import Comm
from titanlite.launch import process, progress
from titanlite.launch.failure import RECORD_SECONDS, OneRank, failure, ranks_store
from titanlite.launch.other_processes import children, send, wait_for_end
from titanlite.launch.process_table import machine

INTERVAL_SECONDS = 1.0
"""Seconds between a rank's heartbeats; more if there are over 1,024 ranks, which together send 1,024 per second."""


class Watchdog(OneRank):
    """Writes this rank's heartbeats, and watches other ranks' heartbeats."""

    def __init__(self, launch: Launch, comm: Comm, dump_folder: Path):
        super().__init__(launch)
        self.comm, self.dump_folder = comm, dump_folder
        self.machine = machine()
        self.interval = max(INTERVAL_SECONDS, launch.world_size / 1024)
        self._requests: queue.Queue[tuple[dict[str, Any], queue.Queue[dict[str, Any]]]] = queue.Queue()
        self._answered = progress.now()  # time at which the store last answered
        self._finished, self._begun = threading.Event(), False
        self._looked = -math.inf  # time at which this rank last read all heartbeats
        self._store: Any = None

    @property
    def timeout(self) -> float:
        """Seconds without heartbeats or progress after which a rank counts as hanging; at least 3 times `interval`."""
        return max(3 * self.interval, progress.train_timeout or self.comm.init_timeout_seconds)

    def __enter__(self) -> None:
        if "MASTER_ADDR" in os.environ:
            self._begun = True
            process.signals.stopped = self.stopped
            for target in (self._beat, self._watch):
                threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an exception, the watchdog's two threads run until end() ends the process
            self._finished.set()

    def end(self, message: str, status: int, *, lost_connection: bool = False) -> None:
        """End all ranks after an error; each node prints the first. lost_connection: wait for another rank's error."""
        deadline = time.monotonic() + RECORD_SECONDS
        while lost_connection and self._begun and time.monotonic() < deadline:
            time.sleep(0.1)  # _beat, in its own thread, ends this process when it reads another rank's failure
        self._end(self._recorded(self._record(message, status)))

    def stopped(self) -> None:
        """Tell the other ranks that a signal has ended this rank before there was anything to save."""
        self._recorded(self._record("", status=process.STOPPED if process.STARTED_BY in os.environ else 0))

    def _record(self, message: str, status: int = 1, **more: Any) -> dict[str, Any]:
        return failure(self.launch.rank, message, status) | more

    def _recorded(self, record: dict[str, Any]) -> dict[str, Any]:
        """Record a failure, and return the first failure that any rank has recorded, which need not be `record`."""
        if self._begun:
            answer: queue.Queue[dict[str, Any]] = queue.Queue()
            self._requests.put((record, answer))
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=RECORD_SECONDS)
        return record

    def _end(self, record: dict[str, Any]) -> None:
        """Print a failure, on one rank per node, and end the process."""
        process.begin_to_end()
        own = record["rank"] == self.launch.rank
        speaks = own or (record["machine"] != self.machine and self.launch.local_rank == 0)
        if record["kind"] == "hang":
            process.with_deadline(self._dump_stacks)
            hanging = record["hanging"]
            if hanging.get("silent") and hanging["machine"] == self.machine and hanging["rank"] != self.launch.rank:
                send([hanging["process"]], signal.SIGKILL)  # a rank that is stopped by SIGSTOP cannot end by itself
        process.clean_up()
        if record["message"]:
            if speaks and self.launch.local_world_size > 1:  # print this rank's message last, after other ranks' lines
                wait_for_end({*children(os.getppid())} - {os.getpid()}, RECORD_SECONDS)
            process.print_to_console(record["message"], hidden=not speaks)
        process.exit_process(record["status"])

    def _dump_stacks(self) -> None:
        folder = self.dump_folder / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{self.launch.rank:05d}.txt", "w", opener=open_own) as file:
            file.write(f"{progress.current}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if path := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
            _dump_flight_recorder(Path(f"{path}{self.launch.rank}"))

    def _beat(self) -> None:
        """Write heartbeats, read the next rank's, and record failures. Runs in a thread: the store may be slow."""
        rank, neighbour = self.launch.rank, (self.launch.rank + 1) % self.launch.world_size
        own, theirs = f"rank/{rank}", f"rank/{neighbour}"
        last_beat, seen, failing_since, numbers = None, 0.0, None, itertools.count()
        while not self._finished.is_set():
            try:
                if self._store is None:
                    timeout = self.comm.init_timeout_seconds
                    self._store = ranks_store(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], timeout)
                    self._answered = seen = progress.now()
                self._store.set(own, json.dumps(self._heartbeat(next(numbers))))
                if self._store.check(["end"]):
                    self._end(json.loads(self._store.get("end")))
                beat = self._store.get(theirs) if self._store.check([theirs]) else None
                self._answered, failing_since = progress.now(), None
                if beat != last_beat:
                    last_beat, seen = beat, progress.now()
                if hang := self._hang(neighbour) if progress.now() - seen > self.timeout else self._own_hang():
                    self._end(self._write_end(hang))
                with contextlib.suppress(queue.Empty):
                    record, answer = self._requests.get(timeout=self.interval)
                    answer.put(self._write_end(record))
            except Exception as error:  # a rank without heartbeats would be taken for a dead one
                failing_since = failing_since or progress.now()
                if progress.now() - failing_since > RECORD_SECONDS and not self._finished.is_set():
                    self._lost_store(f"{error}".partition("\n")[0])
                time.sleep(self.interval)

    def _heartbeat(self, number: int) -> dict[str, Any]:
        place = {"node": socket.gethostname(), "machine": self.machine, "process": os.getpid()}
        activity = progress.current
        now = {"activity": f"{activity}", "number": activity.number, "limited": activity.limited}
        return {"beat": number, **place, **now, "seconds": round(progress.now() - activity.since)}

    def _write_end(self, record: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self._store.compare_set("end", "", json.dumps(record)))

    def _own_hang(self) -> dict[str, Any] | None:
        """Return the record of a hang if this rank's main thread takes too long for its activity."""
        now, world_size = progress.now(), self.launch.world_size
        if not progress.is_over(self.comm.init_timeout_seconds) or now - self._looked < 60:
            return None
        self._looked = now
        if world_size > 64:  # stagger the ranks: each reads all heartbeats unless another has recorded the hang
            time.sleep(math.log2(1 + self.launch.rank))
            if self._store.check(["end"]):
                return None
        return self._hang()

    def _watch(self) -> None:
        """End this rank if the store does not answer within the timeout, for example because the network fails."""
        while not self._finished.wait(1):
            if self._store and progress.now() - self._answered > self.timeout:
                self._lost_store(f"no answer for {self.timeout} s")

    def _lost_store(self, reason: str) -> None:
        store = f"the launch's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = f"error: rank {self.launch.rank} on {socket.gethostname()} lost the connection to {store}: {reason}; "
        message += "the first node, its launcher or the network has failed"
        self._end(self._record(message if self.launch.local_rank == 0 else ""))  # one message per node

    def _hang(self, silent: int | None = None) -> dict[str, Any] | None:
        """Return the record of a hang of rank `silent` (by default the slowest); None if all ranks may be compiling."""
        keys, missing = [f"rank/{rank}" for rank in range(self.launch.world_size)], []
        if not self._store.check(keys):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        here = sorted({*range(len(keys))} - {*missing})
        contents = self._store.multi_get([keys[rank] for rank in here])
        beats = {rank: json.loads(content) for rank, content in zip(here, contents, strict=True)}
        hanging: dict[str, Any] = {}
        if silent is not None and silent in beats:
            hanging = {"rank": silent, "silent": True, **beats[silent]}
            text = f"{_where(silent, beats[silent])} has given no sign of life for {self.timeout} s; "
            text += f"its last heartbeat came from {beats[silent]['activity']!r}"
        elif missing:
            more = f" and {len(missing) - 8:,} more" if len(missing) > 8 else ""
            text = f"rank {', '.join(map(str, missing[:8]))}{more} has not started within {self.timeout} s"
        else:
            least = min(beat["number"] for beat in beats.values())
            last = [rank for rank, beat in beats.items() if beat["number"] == least]
            # A rank whose activity has no time limit is waiting for another rank, so it is not the one that hangs.
            behind = [rank for rank in last if beats[rank]["limited"]] or last
            first = beats[behind[0]]
            hanging = {"rank": behind[0], **first}
            compiles = progress.train_timeout is None and progress.current.name == progress.COMPILES
            if len(behind) == len(beats) and compiles:
                return None
            if len(behind) == len(beats):
                text = f"all ranks hang at {first['activity']!r} for {first['seconds']} s"
            else:
                ahead = beats[min(beats.keys() - behind)]
                more = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
                text = f"{_where(behind[0], first)}{more} hangs at {first['activity']!r} for {first['seconds']} s, "
                text += f"while others wait for it at {ahead['activity']!r}"
        return self._record(f"error: {text}; Python stacks: {self.dump_folder}/stacks", kind="hang", hanging=hanging)


def _where(rank: int, beat: dict[str, Any]) -> str:
    return f"rank {rank} on {beat['node']} (process {beat['process']})"


def _dump_flight_recorder(path: Path) -> None:
    """Write NCCL's last collectives to a file, as torch does after a timeout in NCCL. Uses the private function
    torch._C._distributed_c10d._dump_nccl_trace of torch's builds that have NCCL (not tested on a GPU)."""
    from torch._C import _distributed_c10d

    if dump := getattr(_distributed_c10d, "_dump_nccl_trace", None):
        with contextlib.suppress(OSError):
            path.write_bytes(dump())
