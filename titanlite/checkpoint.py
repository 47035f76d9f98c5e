"""Save, load and reshard: torch.distributed.checkpoint (DCP) for tensors, JSON for everything else.

    checkpoint/step-100/            whole: it was renamed into place after its last byte was written
        __0_0.distcp, .metadata     DCP's files: weights, optimizer states and random states by name
        state.json                  step, data position and what must be the same to go on
    checkpoint/step-200.tmp/        being written, or left by a run that died; never read

Tensors are saved by parameter name and loaded into whatever layout asks for them. DCP's .metadata is a pickle of its
own: load checkpoints that you trust.
"""

import json
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from titanlite.config.loader import ConfigError, show

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Args:
    folder: where the steps' folders are.
    identity: what a run that goes on must share with the one that saved (seed, data, dimensions); plain JSON.
    keep_latest_k: how many checkpoints to keep; 0 keeps all.
    async_mode: "async" returns from `save` once the state is copied to host memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: dict[str, Any],
        keep_latest_k: int,
        async_mode: Literal["disabled", "async"],
    ):
        self.folder, self.identity = folder, identity
        self.keep_latest_k, self.async_mode = keep_latest_k, async_mode
        self._writing: tuple[int, Future[Any]] | None = None
        self._deleting: list[threading.Thread] = []
        # A group of its own: an asynchronous save talks to the other ranks from another thread than the training.
        self._group = dist.new_group(backend="gloo")
        if dist.get_rank() == 0:
            for left_over in folder.glob("step-*.tmp"):
                shutil.rmtree(left_over)

    def resume(self, load_step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into model, optimizer and, if there are as many ranks as when it was saved,
        the random generators.

        Args:
            load_step: which step the newest must be; -1: any.

        Returns:
            What `save` was given as `state`, with `step`; None if there is no checkpoint.

        Raises:
            ConfigError: if load_step is not the newest, or the identity is another one.
        """
        there = sorted(complete_steps(self.folder))
        newest = torch.tensor(there[-1] if there else 0)
        dist.broadcast(newest, src=0)  # ranks must agree even if their views of a shared folder differ for a moment
        step = int(newest)
        if load_step not in (-1, step):
            raise ConfigError(
                [
                    f"checkpoint.load_step = {load_step}: expected the newest step in {self.folder}, which has "
                    f"{', '.join(map(str, there)) or 'none'}; to go back, move the newer ones away, since the next "
                    "resume would pick them"
                ]
            )
        if not step:
            return None
        path = self.folder / f"step-{step}"
        saved = json.loads((path / "state.json").read_text())
        self._refuse_other_identity(path, saved["identity"])
        self._load(path, model, optimizer)
        return saved

    def _refuse_other_identity(self, path: Path, saved: dict[str, Any]) -> None:
        problems = [
            f"{path}: saved with {key} = {show(saved.get(key))}, and this run has {show(value)}; go on with the same, "
            "or start in another job.dump_folder (checkpoint.initial_load_path takes the weights along)"
            for key, value in self.identity.items()
            if saved.get(key) != value
        ]
        if problems:
            raise ConfigError(problems)

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        random_states = _random_states()
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if len([name for name in names if name.startswith("random.cpu.")]) != dist.get_world_size():
            random_states = {}  # the ranks' generators stay as this run seeded them
        states = _optimizer_tensors(model, optimizer)
        plain = {name: _plain(state) for name, state in states.items()}
        dcp.load(_model_tensors(model) | plain | random_states, checkpoint_id=path, process_group=self._group)
        for name, state in states.items():
            if state is not plain[name]:
                state.copy_(plain[name])
        for name, value in random_states.items():
            (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Save a step. Every rank must call it.

        Args:
            state: what goes into state.json; plain JSON, the same on every rank.
        """
        self._finish()
        making = self.folder / f"step-{step}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            (making / "state.json").write_text(json.dumps({"step": step, "identity": self.identity, **state}, indent=1))
        dist.barrier()
        states = {name: _plain(state) for name, state in _optimizer_tensors(model, optimizer).items()}
        tensors = _model_tensors(model) | states | _random_states()
        if self.async_mode == "async":
            self._writing = step, dcp.async_save(tensors, checkpoint_id=making, process_group=self._group)
        else:
            dcp.save(tensors, checkpoint_id=making, process_group=self._group)
            self._publish(step)

    def poll(self) -> None:
        """Publish an asynchronous save if it is done; cheap enough for every step."""
        if self._writing and self._writing[1].done():
            self._finish()

    def close(self) -> None:
        """Wait for all that goes on in the background. Raises what an asynchronous save raised. Every rank must call
        it."""
        self._finish()
        for thread in self._deleting:
            thread.join()
        dist.destroy_process_group(self._group)

    def _finish(self) -> None:
        """Wait for an asynchronous save and publish it."""
        if self._writing:
            step, writing = self._writing
            writing.result()
            self._writing = None
            self._publish(step)

    def _publish(self, step: int) -> None:
        """Rename a complete checkpoint into place and delete the oldest. Only rank 0, whose part of a save ends when
        all ranks have written theirs."""
        if dist.get_rank() != 0:
            return
        whole = self.folder / f"step-{step}"
        if whole.exists():  # saved before, by a run that was asked to stop there
            self._delete(whole)
        whole.with_name(f"step-{step}.tmp").rename(whole)
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)  # the rename itself reaches the disk
        os.close(descriptor)
        if self.keep_latest_k:
            for old in sorted(complete_steps(self.folder))[: -self.keep_latest_k]:
                self._delete(self.folder / f"step-{old}")

    def _delete(self, whole: Path) -> None:
        """Delete a checkpoint while training goes on; from the first moment on, it is no longer whole."""
        dying = whole.with_name(f"{whole.name}.old.tmp")
        whole.rename(dying)
        thread = threading.Thread(target=shutil.rmtree, args=(dying,), name="delete checkpoint")
        thread.start()
        self._deleting = [other for other in self._deleting if other.is_alive()] + [thread]


def load_weights(path: Path, model: nn.Module) -> None:
    """Load only the weights of a checkpoint's folder, as the start of another run.

    Raises:
        ConfigError: if it is no whole checkpoint.
    """
    if not (path / "state.json").exists() or path.suffix == ".tmp":
        raise ConfigError([f"checkpoint.initial_load_path = {show(str(path))}: expected a checkpoint's step-N folder"])
    dcp.load(_model_tensors(model), checkpoint_id=path)


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints in a folder are complete."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if (path / "state.json").exists())
    return [int(name) for name in names if name.isdecimal()]


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    # detach shares the memory, so that loading fills the parameters themselves
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors, made if there are none yet, by "optimizer." and DCP's flat name. Rates and betas
    come from the config and are not saved."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}


def _plain(state: Tensor) -> Tensor:
    """The same in float32 where it is kept in 8 bits: scales belong to blocks of a shard, and another layout has other
    shards."""
    local = state.to_local() if isinstance(state, DTensor) else state
    if type(local) is Tensor:
        return state
    wide = local.dequantize().to(torch.float32)
    if not isinstance(state, DTensor):
        return wide
    mesh, placements = state.device_mesh, state.placements
    return DTensor.from_local(wide, mesh, placements, run_check=False, shape=state.shape, stride=state.stride())


def _random_states() -> dict[str, Tensor]:
    """States of this rank's generators, under the rank's number."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states
