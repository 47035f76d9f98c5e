"""Runs the ranks of this node with torchrun's elastic agent, inside the launcher's process. Unlike torchrun, the
launcher exits with the ranks' status, tells all nodes which rank a signal killed, does not restart after a wrong
config, and ends soon after its ranks, even if another node does not answer."""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo, registry

from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import open_own
from titanlite.launch import process
from titanlite.launch.failure import RECORD_SECONDS, failure, ranks_store
from titanlite.launch.other_processes import LauncherSignals, children, send, wait_for_end
from titanlite.launch.process import print_to_console
from titanlite.launch.progress import progress

SECONDS_AFTER_A_FAILURE = RECORD_SECONDS + 2
"""Seconds in which ranks of this node must end by themselves after a failure of any rank, before they are killed."""
SECONDS_AFTER_THE_END = 30.0
"""Seconds for which the launcher waits for other nodes after its own ranks have finished."""
SECONDS_TO_SAVE = 600
"""Seconds that ranks have to save a checkpoint when nodes join, before all ranks are restarted."""


class NewStores:
    """torchrun's rendezvous, with a new store for the ranks of each attempt. If all attempts shared torch's one store,
    a joining node would not get the store's address, and new ranks would read keys of earlier attempts."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters, address: str):
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # do not let torch create a store of its own
        self.handler, self.address = registry.get_rendezvous_handler(parameters), address
        self.server: dist.Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes of an attempt, and create the store on the first node."""
        met, port = self.handler.next_rendezvous(), None
        if met.rank == 0:
            self.server = dist.TCPStore(self.address, 0, is_master=True, multi_tenant=True)
            port = self.server.port
        place = RendezvousStoreInfo.build(met.rank, dist.PrefixStore("titanlite", met.store), self.address, port)
        if met.rank:
            lines = f"the lines of all ranks are in {os.environ[process.LOG_FOLDER]}"
            print_to_console(f"rank 0 is on {place.master_addr}, and prints there; {lines}")
        return RendezvousInfo(met.store, met.rank, met.world_size, place)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join. If any do, stop the ranks here, which save; the agent restarts them."""
        if n_waiting := self.handler.num_nodes_waiting():
            ranks = children(os.getpid())
            send(ranks, signal.SIGTERM)
            wait_for_end(ranks, SECONDS_TO_SAVE)
        return n_waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)


class NoRestartError(Exception):
    """Raised if ranks have failed and the agent must not start them again."""


class Agent(LocalElasticAgent):
    """torchrun's agent for one node; it overrides _monitor_workers, which torch intends for extensions."""

    signals: LauncherSignals
    restarts = 0
    """How often all ranks have been restarted after a failure."""
    statuses: Mapping[int, int] = {}
    """Exit status, by rank, of the ranks that failed first in this attempt. A status of -N stands for signal N."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: worker.id for worker in worker_group.workers}
        failed = {rank: status for rank, pid in pids.items() if (status := status_of(pid))}
        messages = [self._record(*each) for each in failed.items()]
        if failed:  # torch's agent would send SIGTERM to other ranks at once, and wait for 30 s
            wait_for_end(pids.values(), SECONDS_AFTER_A_FAILURE)
            failed = {rank: status for rank, pid in pids.items() if (status := status_of(pid))}
            send((pid for pid in pids.values() if status_of(pid) is None), signal.SIGKILL)
        result = super()._monitor_workers(worker_group)
        if not failed:  # status_of may have missed a failure that torch's agent knows
            failed = {rank: failure.exitcode for rank, failure in result.failures.items()}
            messages = [self._record(*each) for each in failed.items()]
        for message in filter(None, messages):
            print_to_console(message)
        self.statuses = failed
        if failed and ({2, process.STOPPED} & {*failed.values()} or self.signals.stopping):
            raise NoRestartError  # restarting would not help after a wrong config or a stop
        if result.is_failed() and self.restarts < worker_group.spec.max_restarts:
            self.restarts += 1
            print_to_console(f"restart {self.restarts} of {worker_group.spec.max_restarts}")
        return result

    def ranks_store(self) -> dist.Store:
        group = self.get_worker_group()
        return ranks_store(group.master_addr, group.master_port, timeout_seconds=3)

    def _record(self, rank: int, status: int) -> str:
        """Record the failure of a rank, such as death by a signal, so that all ranks end. Return a message to print
        later; "" if the rank was asked to stop, or another rank failed first."""
        is_alone = self.get_worker_group().workers[0].world_size == 1
        if status == 2 or (status == 1 and (self.signals.stopping or is_alone)):
            return ""
        message, log = "", process.log_file(os.environ[process.LOG_FOLDER], rank)
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; the kernel does that when memory runs out (dmesg tells)" if name == "SIGKILL" else ""
            message = f"error: rank {rank} on {socket.gethostname()} was killed by {name}{hint}"
        elif status != process.STOPPED:
            message = f"error: rank {rank} on {socket.gethostname()} ended with status {status}; {log} says why"
        record = failure(rank, message, 1 if message else process.STOPPED)
        with contextlib.suppress(dist.DistError):
            if json.loads(self.ranks_store().compare_set("end", "", json.dumps(record))) != record:
                return ""
        if status < 0:
            with contextlib.suppress(OSError), open(log, "a", opener=open_own) as file:
                print(message, file=file)
        return message


def run_ranks(
    command: list[str], ranks: int, environment: Mapping[str, str], signals: LauncherSignals, *, max_restarts: int
) -> int:
    """Run a command as each rank of this node, and return the exit status. Ranks inherit `environment`, by which nodes
    find each other. After a failure, restart all ranks up to max_restarts times. Only the main thread may call this."""
    os.environ.update(environment)
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # silence torch's reports: this module prints its own
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # LauncherSignals passes other signals on to the ranks
    signal.pthread_sigmask(signal.SIG_BLOCK, process.SIGNALS)  # ranks inherit the mask until their handlers exist
    parameters, local_address = rendezvous(environment)
    store, place = NewStores(parameters, local_address), {"local_world_size": ranks, "local_addr": local_address}
    program = {"entrypoint": command[0], "args": tuple(command[1:])}
    spec = WorkerSpec("rank", **place, **program, rdzv_handler=store, max_restarts=max_restarts)
    agent, finished = Agent(spec, DefaultLogsSpecs(log_dir=os.devnull)), threading.Event()
    agent.signals = signals
    threading.Thread(target=_watch, args=(agent, signals, finished), name="ranks", daemon=True).start()
    threading.Thread(target=_kill_stopped_ranks, args=(agent, finished), name="stopped ranks", daemon=True).start()
    try:
        agent.run()
    except Exception as error:  # the rendezvous or its store has failed
        if not agent.statuses:
            print_to_console(f"error: the launch failed: {error}".replace("\n", " "))
            return 0 if signals.stopping else 1
    finished.set()
    with contextlib.suppress(Exception):  # another node may have closed the store or have ended
        store.shutdown()
    return exit_status(agent.statuses.values(), signals)


def rendezvous(environment: Mapping[str, str]) -> tuple[RendezvousParameters, str]:
    """Return torchrun's rendezvous and this node's address. Raises ConfigError if MASTER_ADDR cannot be resolved."""
    least, _, most = (environment.get("NNODES") or "1").partition(":")
    if (most or least) == "1":  # torch asks DNS for the node's name unless the address is localhost
        address = "localhost"
        return RendezvousParameters("c10d", f"{address}:0", uuid.uuid4().hex, 1, 1, address, is_host=True), address
    first, port = environment["MASTER_ADDR"], int(environment.get("MASTER_PORT") or 29500)
    run_id, is_host = environment.get("JOB_ID") or "titanlite", int(environment["NODE_RANK"]) == 0
    # By default, torch tells other nodes this node's host name. If the host name is not MASTER_ADDR, or belongs to
    # another network interface, all nodes wait forever.
    with progress(f"waiting until MASTER_ADDR = {first} has an address"):
        address = _address_towards(first, port)
    nodes, options = (int(least), int(most or least)), {"is_host": is_host, "read_timeout": 300}  # timeout in seconds
    return RendezvousParameters("c10d", f"{first}:{port}", run_id, *nodes, address, **options), address


def _address_towards(host: str, port: int, seconds: float = 60.0) -> str:
    """Return this node's address on the network by which it reaches `host`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a UDP connect sends nothing, but chooses the interface
                return probe.getsockname()[0]
        except (OSError, UnicodeError) as error:  # UnicodeError: DNS cannot have such a name
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", "") or error
                raise ConfigError([f"environment: MASTER_ADDR = {host}: no way to this address: {reason}"]) from None
            time.sleep(1)


def _watch(agent: Agent, signals: LauncherSignals, finished: threading.Event) -> None:
    """Pass stop signals on to ranks that start later. End the launcher after its ranks, even if other nodes run on."""
    ended_since = None
    while not finished.wait(0.2):
        signals.pass_on()
        statuses = [status_of(pid) for pid in children(os.getpid())]
        if None in statuses or not (statuses or (signals.stopping and signals.ranks_exist)):
            ended_since = None
            continue
        ended_since = ended_since or time.monotonic()
        limit = SECONDS_AFTER_A_FAILURE if any(statuses) or not statuses else SECONDS_AFTER_THE_END
        if time.monotonic() - ended_since > limit:
            statuses += agent.statuses.values()
            process.clean_up()
            os._exit(exit_status([status for status in statuses if status], signals))


def _kill_stopped_ranks(agent: Agent, finished: threading.Event) -> None:
    """Kill ranks of this node that still run after a recorded failure. Runs in a thread: the store may not answer."""
    port, store = None, None
    while not finished.wait(2):
        with contextlib.suppress(Exception):  # the store may not exist yet, or may be gone already
            ranks = children(os.getpid())
            if port != agent.get_worker_group().master_port:  # each attempt has its own store
                port, store = agent.get_worker_group().master_port, agent.ranks_store()
            if store.check(["end"]) and not finished.wait(SECONDS_AFTER_A_FAILURE):
                send(set(ranks) & set(children(os.getpid())), signal.SIGKILL)


def status_of(pid: int) -> int | None:
    """Return a child's exit status without reaping it: 0 if it was reaped before, None if it runs or is unknown."""
    if not hasattr(os, "waitid"):  # macOS lacks waitid
        return None
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def exit_status(failures: Iterable[int], signals: LauncherSignals) -> int:
    stopped = {process.STOPPED, -signal.SIGTERM} if signals.stopping else {process.STOPPED}
    failed = [status for status in failures if status not in stopped]
    return 2 if 2 in failed else 1 if failed else 0
