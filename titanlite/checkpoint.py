"""Saving, resuming and resharding with PyTorch distributed checkpoint (DCP) for tensors, JSON for everything else.

    checkpoint/step-100/            complete: it was renamed into place after its last byte was written
        __0_0.distcp, .metadata     DCP's files: weights, optimizer states and random states by name
        state.json                  step, data position and the identity that a resumed run must share
    checkpoint/step-200.tmp/        being written, or left by a run that died; never read

Tensors are saved by parameter name and loaded into whatever layout asks for them. DCP's .metadata is a pickle: load
only checkpoints that you trust.
"""

import contextlib
import json
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Checkpoint
from titanlite.optimizer import local_shard, n_replicas
from titanlite.progress import progress


class Checkpointer:
    """Saves and resumes the checkpoints of a run. Every rank must make the same calls.

    checkpoint.folder is relative to `dump_folder`. An "async" save returns once the state is copied to host memory.
    `identity`, plain JSON, is what a resumed run must share with the one that saved: seed, data, dimensions.
    """

    def __init__(self, dump_folder: Path, checkpoint: Checkpoint, identity: dict[str, Any]):
        self.folder, self.checkpoint, self.identity = dump_folder / checkpoint.folder, checkpoint, identity
        self._saving: tuple[int, Future[Any], contextlib.ExitStack] | None = None
        self._deleting: list[threading.Thread] = []
        # A group of its own: an asynchronous save talks to the other ranks from another thread than the training.
        self._group = dist.new_group(backend="gloo")
        if dist.get_rank() == 0:
            for unfinished in self.folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into a model and its optimizer, and into the random generators if there
        are as many ranks as when it was saved. Return the `state` that `save` got, with `step`; without one, None.
        Raise ConfigError if checkpoint.load_step is not the newest step, or the identity differs."""
        steps = sorted(complete_steps(self.folder))
        newest = torch.tensor(steps[-1] if steps else 0)
        dist.broadcast(newest, src=0)  # ranks must agree even if their views of a shared folder differ for a moment
        step = int(newest)
        if self.checkpoint.load_step not in (-1, step):
            problem = f"checkpoint.load_step = {self.checkpoint.load_step}: expected the newest step in {self.folder}, "
            problem += f"which has {', '.join(map(str, steps)) or 'none'}; to go back, move the newer ones away, since "
            raise ConfigError([problem + "the next resume would pick them"])
        if not step:
            return None
        path = self.folder / f"step-{step}"
        saved = json.loads((path / "state.json").read_text())
        problems = [
            f"{path}: saved with {key} = {show(saved['identity'].get(key))}, and this run has {show(value)}; resume "
            "with the same, or start in another job.dump_folder (checkpoint.initial_load_path loads only the weights)"
            for key, value in self.identity.items()
            if saved["identity"].get(key) != value
        ]
        if problems:
            raise ConfigError(problems)
        self._load(path, model, optimizer)
        return saved

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        random_states = _random_states()
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if len([name for name in names if name.startswith("random.cpu.")]) != dist.get_world_size():
            random_states = {}  # the ranks' generators stay as this run seeded them
        states = _optimizer_tensors(model, optimizer)
        portable = {name: _dequantized(state) for name, state in states.items()}
        _read(path, _model_tensors(model) | portable | random_states, self._group)
        for name, state in states.items():
            if state is not portable[name]:
                state.copy_(portable[name])
        for name, value in random_states.items():
            (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Save a step, once an earlier asynchronous save is done; `state` is plain JSON, the same on every rank."""
        self._finish()
        folder = self.folder / f"step-{step}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "state.json").write_text(json.dumps({"step": step, "identity": self.identity, **state}, indent=1))
        states = {name: _dequantized(state) for name, state in _optimizer_tensors(model, optimizer).items()}
        tensors = _model_tensors(model) | states | _random_states()
        size = torch.tensor(sum(local_shard(tensor).nbytes / n_replicas(tensor) for tensor in tensors.values()))
        dist.all_reduce(size, group=self._group)  # also makes the ranks wait until the folder is there
        with contextlib.ExitStack() as stack:
            description = f"saving checkpoint step-{step} ({size.item() / 2**30:.1f} GiB)"
            stack.enter_context(progress(description, enabled=dist.get_rank() == 0))
            if self.checkpoint.async_mode == "async":
                future = dcp.async_save(tensors, checkpoint_id=folder, process_group=self._group)
                self._saving = step, future, stack.pop_all()
            else:
                dcp.save(tensors, checkpoint_id=folder, process_group=self._group)
                self._publish(step)

    def poll(self) -> None:
        """Publish an asynchronous save if it is done; cheap enough for every step."""
        if self._saving and self._saving[1].done():
            self._finish()

    def close(self) -> None:
        """Wait for all background work. Raises what an asynchronous save raised."""
        self._finish()
        for thread in self._deleting:
            thread.join()
        dist.destroy_process_group(self._group)

    def _finish(self) -> None:
        """Wait for an asynchronous save and publish it."""
        if self._saving:
            step, future, stack = self._saving
            with stack:
                future.result()
            self._saving = None
            self._publish(step)

    def _publish(self, step: int) -> None:
        """On rank 0, whose save ends after all ranks', rename the checkpoint into place and delete the oldest ones."""
        if dist.get_rank() != 0:
            return
        path = self.folder / f"step-{step}"
        if path.exists():  # saved before, by a run that was asked to stop there
            self._delete(path)
        path.with_name(f"step-{step}.tmp").rename(path)
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)  # the rename itself reaches the disk
        os.close(descriptor)
        if self.checkpoint.keep_latest_k:
            for old in sorted(complete_steps(self.folder))[: -self.checkpoint.keep_latest_k]:
                self._delete(self.folder / f"step-{old}")

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint in the background; from then on it is no longer complete."""
        renamed = path.rename(path.with_name(f"{path.name}.old.tmp"))
        thread = threading.Thread(target=shutil.rmtree, args=(renamed,), name="delete checkpoint")
        thread.start()
        self._deleting = [other for other in self._deleting if other.is_alive()] + [thread]


def load_weights(path: Path, model: nn.Module) -> None:
    """Load only the weights of a checkpoint, to start another run from. Raises ConfigError if it is not complete."""
    if not (path / "state.json").exists() or path.suffix == ".tmp":
        raise ConfigError([f"checkpoint.initial_load_path = {show(str(path))}: expected a checkpoint's step-N folder"])
    _read(path, _model_tensors(model))


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints in a folder are complete."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if (path / "state.json").exists())
    return [int(name) for name in names if name.isdecimal()]


def _read(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    size = sum(file.stat().st_size for file in path.iterdir())
    with progress(f"loading checkpoint {path.name} ({size / 2**30:.1f} GiB)", enabled=dist.get_rank() == 0):
        dcp.load(tensors, checkpoint_id=path, process_group=group)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    # detach shares the memory, so that loading fills the parameters themselves
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer states by "optimizer." and DCP's flat name; create them if there are none yet. Learning
    rates and betas come from the config and are not saved."""
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}


def _dequantized(state: Tensor) -> Tensor:
    """Return an 8-bit optimizer state in float32, since its scales belong to blocks of a shard and another layout has
    other shards; return any other state as it is."""
    local = local_shard(state)
    if type(local) is Tensor:
        return state
    wide = local.dequantize().to(torch.float32)
    if not isinstance(state, DTensor):
        return wide
    mesh, placements = state.device_mesh, state.placements
    return DTensor.from_local(wide, mesh, placements, run_check=False, shape=state.shape, stride=state.stride())


def _random_states() -> dict[str, Tensor]:
    """Return the states of this rank's generators, by the rank's number."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states
