"""Replica groups that may fail: launches of the same config that torchft (github.com/pytorch/torchft) connects. A
torchft Manager connects each rank with the rank of the same number in each other group. In each step, participating
groups sum token counts and gradients, so the step equals a single process's step on all samples. If a group fails
during a step, the other groups repeat the step. A group that returns copies a participant's state and step number."""

import itertools
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from pydantic import Field
from torch import Tensor, nn

from titanlite.checkpoint.tensors import model_tensors, optimizer_tensors, plain_tensors, random_states
from titanlite.config.errors import TrainingError
from titanlite.config.launch import require_torchft
from titanlite.config.loader import ConfigError
from titanlite.config.rules import MAX_GROUPS
from titanlite.config.schema import Comm, FaultTolerance
from titanlite.files.durable import Int63, parse_part
from titanlite.launch.process import Signals
from titanlite.launch.process_group import log_rank0, set_group_timeout
from titanlite.launch.progress import alive, mark, progress
from titanlite.optimizer import gradient_norm
from titanlite.parallel.shards import local_shard
from titanlite.techniques.sdc import hash_of_bits
from titanlite.train_step import OneGroup, SavedState, Totals, sum_over_ranks

BUCKET_ELEMENTS = 2**24  # number of gradient elements that are summed over the groups at a time
ATTEMPT = timedelta(seconds=20)
"""Interval at which a group that waits for other groups checks whether it was asked to stop."""
ATTEMPTS_BEFORE_STOP = 2
"""Number of failed attempts at a step after which a group that is asked to stop ends without completing the step."""
WAITING = "waiting for other replica groups"
MODULUS = 2**53
"""Hashes that groups compare are below this number: float64 represents all integers up to it."""
History = Annotated[list[tuple[int, int, list[int]]], Field(max_length=1_000_000)]
"""The participants of past steps, as (first step, quorum, participants)."""


class GroupState(Enum):
    JOINING = "waits for the quorum of the next step"
    RECOVERING = "copies the state of a participant; an error is its own, and ends it"
    PARTICIPANT = "takes a step"


class Ballot(NamedTuple):
    """A group's row in a table by which groups compare their states before a step. The table is summed over groups."""

    groups: float  # number of groups with this group's number; more than 1 is an error
    tokens: float
    is_member: float
    """Whether the group has taken part in a step."""
    identity: float
    state: float
    """Hash of the group's weights and optimizer states; 0 if the quorum is unchanged since the previous step."""


class Replicas(OneGroup):
    """Connects this rank's group with the other groups. Every rank of a group must make the same calls, and all groups
    of a run must have the same `identity`, plain JSON. `signals` tells whether this rank was asked to stop. Raises
    ConfigError if torchft is not installed."""

    def __init__(
        self,
        section: FaultTolerance,
        comm: Comm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        identity: list[Any],
        device: torch.device,
        signals: Signals,
    ):
        self.section, self.device, self.signals = section, device, signals
        self.identity = xxhash.xxh3_64_intdigest(json.dumps(identity, sort_keys=True).encode()) % MODULUS
        self.participants: list[int] = []
        """Numbers of the last step's participants."""
        self._group_state, self._quorum, self._n_failures = GroupState.JOINING, -1, 0
        self._before: list[int] = []
        """Numbers of the participants of the last step that this group took; empty before the group's first step."""
        self._recovered = False
        """Whether this group has copied the state of another group since its last step."""
        self._state_hash: int | None = None
        self._history: list[tuple[int, int, list[int]]] = []
        self._model, self._optimizer, self._timeout = model, optimizer, comm.init_timeout_seconds
        require_torchft()

    def _connect(self) -> None:
        section = self.section
        # Silence torchft: titanlite logs a failure in one line. torchft reads RUST_LOG when it is imported.
        os.environ.setdefault("RUST_LOG", "error")
        import torchft

        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", module="torch.distributed._serialization")  # torch warns of read-only bytes
        self._groups = (torchft.ProcessGroupNCCL if self.device.type == "cuda" else torchft.ProcessGroupGloo)(
            timedelta(milliseconds=section.process_group_timeout_ms)
        )
        self._ranks = dist.new_group(backend="gloo")  # a separate process group, whose timeout `_join` sets
        place: list[Any] = [socket.gethostname(), 0]
        if dist.get_rank() == 0:
            self._store = dist.TCPStore(*place, is_master=True, wait_for_workers=False)
            place[1] = self._store.port
        dist.broadcast_object_list(place)
        try:
            self.manager = torchft.Manager(
                self._groups,
                load_state_dict=self._load,
                state_dict=self._saved,
                min_replica_size=section.min_replica_size,
                use_async_quorum=False,
                timeout=timedelta(seconds=self._timeout),
                quorum_timeout=ATTEMPT,
                connect_timeout=ATTEMPT,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                store_addr=place[0],
                store_port=place[1],
                replica_id=f"group-{section.replica_id}",
                hostname=place[0],
                init_sync=False,
            )
        except RuntimeError as error:
            where = os.environ["TORCHFT_LIGHTHOUSE"]
            problem = f"environment: TORCHFT_LIGHTHOUSE = {where}: the lighthouse does not answer: {error}"
            raise ConfigError([problem]) from None

    def begin(
        self, last_step: int, saved: Mapping[str, Any], state: SavedState, abandon: Callable[[int], None]
    ) -> None:
        """Connect with the other groups, and begin after `last_step`. Raises ConfigError if no lighthouse answers."""
        mark("connecting to the lighthouse")
        self._connect()
        batches = parse_part(saved, "batches_of_groups", Int63 | None)
        batches = last_step * self.section.group_size if batches is None else batches
        self.manager.load_state_dict({"step": last_step, "batches_committed": batches})
        self._state, self._abandon, self._history = state, abandon, parse_part(saved, "history", History | None) or []
        mark("starting the loop")

    def state(self) -> dict[str, Any]:
        return {"batches_of_groups": self.manager.batches_committed(), "history": self._history}

    def steps(self, last_step: int, last: int) -> Iterator[int]:
        """Yield the number of each step until `last` has been taken. After a failure, the state is restored, and the
        step is yielded again. Raises TrainingError if the group was asked to stop while it waited for other groups."""
        while self.manager.current_step() < last:
            self._join()
            if self.manager.current_step() < last:  # `_join` may have copied another group's state of step `last`
                yield self.manager.current_step() + 1

    def _join(self) -> None:
        """Wait for the quorum of the next step, and copy another group's state if this group is behind. All ranks of
        this group wait for each other; if a rank failed to copy, all ranks copy the state again. Uses the private
        attribute Manager._quorum_future, which keeps a failed attempt's error (torchft-nightly 2026.10.26)."""
        mark(WAITING, limited=False)
        set_group_timeout(self._ranks, self._timeout)
        failed = True
        with progress(WAITING, enabled=dist.get_rank() == 0):
            while failed:
                failed = False
                if self._n_failures > 1:
                    time.sleep(1)
                lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0")
                # A lazy gloo connection has no timeout, so other groups would never notice a hanging group.
                os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
                try:
                    self.manager.start_quorum()
                except Exception:  # too few groups, or the lighthouse does not answer
                    failed, self.manager._quorum_future = True, None
                    if self._group_state is GroupState.RECOVERING:
                        raise
                    time.sleep(1)
                finally:
                    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
                step = self.manager.current_step()
                flags = torch.tensor([failed, self.signals.stopping, step, -step], dtype=torch.int64)
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._ranks)
                any_failed, stopping, newest, oldest = flags.tolist()
                failed = bool(any_failed) or newest != -oldest
                self.manager.load_state_dict({**self.manager.state_dict(), "step": -oldest})
                if stopping and (failed or self._n_failures > ATTEMPTS_BEFORE_STOP):
                    problem = "asked to stop while this replica group waited for others; ended without saving"
                    raise TrainingError(problem)
        self._group_state = GroupState.PARTICIPANT

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the participants, in place. If the sum fails, `_committed` returns False."""
        self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()

    def count(self, valid: Tensor) -> None:
        """Sum a step's number of tokens over the participants, in place, and compare the groups' configs and weights.
        Does nothing unless this group takes a step. Raises ConfigError if this group is new and does not fit the rest,
        TrainingError if no group is new and this group's weights differ from those of a group of smaller replica_id."""
        if self._group_state is not GroupState.PARTICIPANT:
            return
        state, quorum = 0, self.manager._quorum_id
        if quorum != self._quorum:
            if self._state_hash is None:
                self._state_hash = sum(hash_of_bits(tensor).item() for tensor in self._tensors()) % MODULUS
            state = self._state_hash
        table = torch.zeros(MAX_GROUPS, len(Ballot._fields), dtype=torch.float64, device=self.device)
        own = Ballot(1, valid.item(), bool(self._before), self.identity, state)
        table[self.section.replica_id] = table.new_tensor(own)
        self.sum(table)
        rows = table.tolist()  # tolist() waits for the device: NCCL's errors are raised here
        if self.manager.errored() or self._groups.errored():
            return
        self._quorum = quorum
        ballots = {number: Ballot(*row) for number, row in enumerate(rows) if row[0]}
        self.participants, of_groups = list(ballots), ballots.values()
        different = "fault_tolerance.enable = true: replica groups have different"
        number, most = max(ballots.items(), key=lambda item: item[1].groups)
        if most.groups > 1:
            problem = f"fault_tolerance.replica_id = {number}: {most.groups:.0f} participants"
        elif any(each.identity != self.identity for each in of_groups):
            problem = f"{different} configs or data"
        elif any(each.state != state for each in of_groups):
            problem = f"{different} weights after step {self.manager.current_step()}"
        else:
            valid.fill_(sum(each.tokens for each in of_groups))
            return
        if not self._before:
            raise ConfigError([f"{problem}; see docs/reliability.md"])
        if all(each.is_member for each in of_groups) and self.section.replica_id > self.participants[0]:
            raise TrainingError(f"{problem}; group {self.participants[0]} continues, and this one can be started again")
        self.manager.report_error(RuntimeError(problem))

    def totals(
        self, loss_sum: Tensor, valid: Tensor, parameters: Iterable[nn.Parameter], signals: Signals, *counts: float
    ) -> Totals | None:
        """Sum a step's results over this group's ranks and the participants; return None if a sum failed. Print the
        participants if they changed. The gradient norm is the mean over groups, whose norms differ only by rounding."""
        members = list(parameters)
        self._sum_shards([local_shard(parameter.grad) for parameter in members if parameter.grad is not None])
        norm = gradient_norm(members, self.device)
        loss, stopping, saving, *counted = sum_over_ranks(loss_sum, signals, *counts)
        sums = torch.stack([loss, norm, *counted])
        self.sum(sums)
        step = self.manager.current_step() + 1
        if not self._committed(step):
            return None
        loss, norm, *counted = sums
        return Totals(torch.stack([loss / valid, norm / max(len(self.participants), 1), stopping, saving, *counted]))

    def _sum_shards(self, shards: list[Tensor]) -> None:
        """Sum plain tensors over the participants, in place, in buckets of BUCKET_ELEMENTS."""
        chunks = [chunk for shard in shards for chunk in _chunks(shard)]
        while chunks:
            bucket = [chunks.pop()]
            n = bucket[0].numel()
            while chunks and chunks[-1].dtype == bucket[0].dtype and n + chunks[-1].numel() <= BUCKET_ELEMENTS:
                bucket.append(chunks.pop())
                n += bucket[-1].numel()
            flat = torch.cat([chunk.reshape(-1) for chunk in bucket]).to(self.device)
            self.sum(flat)
            for chunk, summed in zip(bucket, flat.split([chunk.numel() for chunk in bucket]), strict=True):
                chunk.copy_(summed.view_as(chunk))
            alive()

    def _committed(self, step: int) -> bool:
        """Return whether all ranks of this group completed a step's sums; if not, print that the step is repeated."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the watchdog still limits this wait for the device
        self._group_state, error = GroupState.JOINING, self.manager.errored()
        mark(WAITING, limited=False)  # another group may be copying this group's state
        committed = self.manager.should_commit()
        mark("updating the weights")
        if not committed:
            self._n_failures += 1
            reason = f"{error.original_exception}".partition("\n")[0] if error else "another rank has lost a group"
            if self.manager.num_participants() < self.section.min_replica_size:
                reason = "fewer than fault_tolerance.min_replica_size"
            log_rank0(f"step {step}: not taken, and repeated with the replica groups that are left: {reason}")
            return False
        self._n_failures, self._state_hash = 0, None
        if self.participants != self._before or self._recovered:
            recovered = "; this one has got its state from another" * self._recovered
            groups = ", ".join(map(str, self.participants))
            log_rank0(f"step {step}: replica groups {groups} of {self.section.group_size}{recovered}")
        if not self._history or self._history[-1][1:] != (self._quorum, self.participants):
            self._history = [*self._history, (step, self._quorum, self.participants)]
        self._recovered, self._before = False, self.participants
        return True

    def final_step(self, step: int) -> int:
        """Return the last step that this group has taken, or whose state it copied from another group."""
        return self.manager.current_step()

    def metrics(self) -> dict[str, float]:
        return {"replica_groups": len(self.participants)}

    def _tensors(self) -> list[Tensor]:
        """Return plain tensors that share the memory of this rank's weights and optimizer states, which must be equal
        in all groups. Missing states are created with the values from before the first step."""
        is_new, states = not self._optimizer.state, optimizer_tensors(self._model, self._optimizer)
        for name, state in states.items():
            if is_new and name.endswith(".step"):
                state.zero_()  # undo the step that optimizer_tensors takes to create states
        return plain_tensors(model_tensors(self._model) | states)

    def _saved(self) -> dict[str, Any]:
        """Return this rank's state for the same rank of another group. torchft calls `_saved` in a thread."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        state = {"state": self._state.save(), "history": self._history}
        return {"tensors": self._tensors(), "random": random_states(), **state}

    @torch.no_grad()
    def _load(self, saved: dict[str, Any]) -> None:
        self._group_state, self._state_hash = GroupState.RECOVERING, None
        for tensor, other in zip(self._tensors(), saved["tensors"], strict=True):
            tensor.copy_(other)
        shared, self._history = last_shared_step(self._history, saved["history"]), saved["history"]
        if shared is not None:
            self._abandon(shared)
        for name, value in saved["random"].items():
            (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)
        self._state.load(saved["state"])
        self._group_state, self._recovered = GroupState.JOINING, True


def last_shared_step(own: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> int | None:
    """Return the last step up to which the histories of two groups agree; None if the histories are equal."""
    n_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False)))
    return min((steps[n_shared][0] - 1 for steps in (own, other) if n_shared < len(steps)), default=None)


def _chunks(tensor: Tensor) -> Iterable[Tensor]:
    """Return views of a tensor with at most BUCKET_ELEMENTS each. A tensor that is not contiguous is one chunk."""
    return tensor.view(-1).split(BUCKET_ELEMENTS) if tensor.is_contiguous() else [tensor]
