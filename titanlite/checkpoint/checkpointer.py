"""Saving distributed checkpoints, and resuming from them under any layout, with resharding as they are loaded.

    checkpoint/step-100/                complete: it was renamed into place after its last byte was on the disk
        rank-00000.safetensors, ...     weights, optimizer states and random states: the slices that each rank saved
        manifest.json                   which slice of which tensor is in which file, and checksums
        state.json                      step, data position and the identity that a resumed run must share
    checkpoint/step-200.tmp/            being written, or left by a run that died; never read
    checkpoint/step-300.damaged/        renamed by checkpoint.on_corrupt = "previous"

No file holds code: tensors are in safetensors files, everything else is JSON.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.manifest import MANIFEST, STATE, build_manifest
from titanlite.checkpoint.reader import CheckpointReader, complete_steps, plain_shard, shard_slice
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Checkpoint, Model
from titanlite.errors import TrainingError
from titanlite.optimizer import local_shard, n_replicas
from titanlite.progress import progress

Slices = dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]
"""What a rank saves: by name its slice of a tensor, the slice's offset and the full tensor's shape."""


class Checkpointer:
    """Saves and resumes the checkpoints of a run. Every rank must make the same calls.

    checkpoint.folder is relative to `dump_folder`. An "async" save returns once the state is copied to host memory.
    `identity`, plain JSON, is what a resumed run must share with the one that saved: seed, data, dimensions.
    """

    def __init__(self, dump_folder: Path, checkpoint: Checkpoint, identity: dict[str, Any]):
        self.folder, self.checkpoint, self.identity = dump_folder / checkpoint.folder, checkpoint, identity
        self._saving: tuple[int, Future[None], contextlib.ExitStack] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save checkpoint")
        self._host_copies: dict[str, Tensor] = {}
        self._deleting: list[threading.Thread] = []
        # A group of its own: an asynchronous save talks to the other ranks from another thread than the training.
        self._group = dist.new_group(backend="gloo")
        if dist.get_rank() == 0:
            for unfinished in self.folder.glob("step-*.tmp"):
                shutil.rmtree(unfinished)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint into a model and its optimizer, and into the random generators if there are as
        many ranks as when it was saved. Return the `state` that `save` got, with `step`; without one, None.

        Raises:
            ConfigError: if checkpoint.load_step is not the newest step, the identity differs, or the checkpoint is
                damaged; with checkpoint.on_corrupt = "previous", if all are.
        """
        found = [complete_steps(self.folder)]  # ranks must agree even if their views of a shared folder differ
        dist.broadcast_object_list(found, group=self._group)
        steps = found[0]
        if self.checkpoint.load_step not in (-1, *steps[-1:]):
            problem = f"checkpoint.load_step = {self.checkpoint.load_step}: expected the newest step in {self.folder}, "
            problem += f"which has {', '.join(map(str, steps)) or 'none'}; to go back, move the newer ones away, since "
            raise ConfigError([problem + "the next resume would pick them"])
        problems: list[str] = []
        damaged: list[tuple[Path, str]] = []
        while steps and (self.checkpoint.on_corrupt == "previous" or not problems):
            path = self.folder / f"step-{steps.pop()}"
            state, problems = self._try(path, model, optimizer)
            if not problems:
                self._set_aside(damaged)
                return state
            damaged.append((path, problems[0]))
        if problems:
            hint = 'checkpoint.on_corrupt = "previous" resumes from the one before'
            problems[-1] += f"; {hint}" if steps else "; no other checkpoint is left"
            raise ConfigError(problems)
        return None

    def _set_aside(self, damaged: list[tuple[Path, str]]) -> None:
        """Rename damaged checkpoints, so that no later start tries them and none counts as one of the newest k."""
        for path, problem in damaged if dist.get_rank() == 0 else []:
            names = (f"{path.name}.damaged{number}" for number in itertools.chain([""], itertools.count(2)))
            target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
            path.rename(target)
            print(f"{problem}; renamed to {target.name}", flush=True)

    def _try(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
        """Load a checkpoint. Return its state, and what is wrong with it on any rank. Raises ConfigError if it is of
        another run."""
        state: dict[str, Any] = {}
        with collected_problems(self._group) as problems:
            reader = CheckpointReader(path)
            state = reader.state
        if problems:
            return {}, problems
        differences = [
            f"{path}: saved with {key} = {show(state['identity'].get(key))}, and this run has {show(value)}; resume "
            "with the same, or start in another job.dump_folder (checkpoint.initial_load_path loads only the weights)"
            for key, value in self.identity.items()
            if state["identity"].get(key) != value
        ]
        if differences:
            raise ConfigError(differences)
        return state, self._load(reader, model, optimizer)

    def _load(self, reader: CheckpointReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        """Load a checkpoint's tensors and return what is wrong with them on any rank."""
        random_states = _random_states()
        saved = [name for name in reader.shapes if name.startswith("random.cpu.")]
        if len(saved) != dist.get_world_size():
            random_states = {}  # the ranks' generators stay as this run seeded them
        states = _optimizer_tensors(model, optimizer)
        portable = {name: _dequantized(state) for name, state in states.items()}
        tensors = _model_tensors(model) | portable
        problems = _load(reader, tensors, random_states, ("model.", "optimizer."), self._group)
        if not problems:
            for name, state in states.items():
                if state is not portable[name]:
                    local_shard(state).copy_(local_shard(portable[name]))
            with collected_problems(self._group, RuntimeError) as problems:
                for name, value in random_states.items():
                    (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)
        return problems

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Save a step, once an earlier asynchronous save is done; `state` is plain JSON, the same on every rank.

        Raises:
            TrainingError: if this checkpoint, or an earlier asynchronous one, could not be written.
        """
        self._finish()
        folder = self.folder / f"step-{step}.tmp"
        with collected_problems(self._group, OSError) as problems:
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        _raise_unsaved(folder, problems)
        states = {name: _dequantized(state) for name, state in _optimizer_tensors(model, optimizer).items()}
        random_states = {name: (value, (0,), tuple(value.shape)) for name, value in _random_states().items()}
        slices = _slices_to_save(_model_tensors(model) | states) | random_states
        size = torch.tensor(sum(tensor.nbytes for tensor, *_ in slices.values()), dtype=torch.float64)
        dist.all_reduce(size, group=self._group)
        content = json.dumps({"step": step, "identity": self.identity, **state}, indent=1).encode()
        with contextlib.ExitStack() as stack:
            description = f"saving checkpoint step-{step} ({size.item() / 2**30:.1f} GiB)"
            stack.enter_context(progress(description, enabled=dist.get_rank() == 0))
            if self.checkpoint.async_mode == "async":
                future = self._thread.submit(self._write, folder, self._copied_to_host(slices), content)
                self._saving = step, future, stack.pop_all()
            else:
                self._write(folder, slices, content)
                self._publish(step)

    def _copied_to_host(self, slices: Slices) -> Slices:
        """Copy what is to be saved to host memory, which is allocated once, pinned if the tensors are on CUDA."""
        copies = {}
        for name, (tensor, offset, shape) in slices.items():
            copy = self._host_copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[name] = copy
            copies[name] = copy.copy_(tensor, non_blocking=True), offset, shape
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _write(self, folder: Path, slices: Slices, state: bytes) -> None:
        """Write this rank's file; rank 0 also writes state.json and, when all ranks have written, the manifest."""
        rank, stored = dist.get_rank(), None
        name = f"rank-{rank:05d}.safetensors"
        with collected_problems(self._group, OSError) as problems:
            stored = write_file(folder / name, slices)
        _raise_unsaved(folder, problems)
        files: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object((name, stored), files, group=self._group)
        with collected_problems(self._group, OSError) as problems:
            if files is not None:
                _write_synced(folder / STATE, state)
                _write_synced(folder / MANIFEST, build_manifest(dict(files), state))
                _sync_folder(folder)
        _raise_unsaved(folder, problems)

    def poll(self) -> None:
        """Publish an asynchronous save if it is done; cheap enough for every step."""
        if self._saving and self._saving[1].done():
            self._finish()

    def close(self) -> None:
        """Wait for all background work. Raises what an asynchronous save raised."""
        self._finish()
        self._thread.shutdown()
        for thread in self._deleting:
            thread.join()
        dist.destroy_process_group(self._group)

    def _finish(self) -> None:
        """Wait for an asynchronous save and publish it."""
        if self._saving:
            (step, future, stack), self._saving = self._saving, None
            with stack:
                future.result()
            self._publish(step)

    def _publish(self, step: int) -> None:
        """On rank 0, whose save ends after all ranks', rename the checkpoint into place and delete the oldest ones."""
        if dist.get_rank() != 0:
            return
        path = self.folder / f"step-{step}"
        if path.exists():  # saved before, by a run that was asked to stop there
            self._delete(path)
        path.with_name(f"step-{step}.tmp").rename(path)
        _sync_folder(self.folder)  # the rename itself reaches the disk
        if self.checkpoint.keep_latest_k:
            for old in complete_steps(self.folder)[: -self.checkpoint.keep_latest_k]:
                self._delete(self.folder / f"step-{old}")

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint in the background; from then on it is no longer complete."""
        renamed = path.rename(path.with_name(f"{path.name}.old.tmp"))
        thread = threading.Thread(target=shutil.rmtree, args=(renamed,), name="delete checkpoint")
        thread.start()
        self._deleting = [other for other in self._deleting if other.is_alive()] + [thread]


def load_weights(path: Path, model: nn.Module, options: Model) -> None:
    """Load the weights of a checkpoint, or of a Hugging Face folder, into plain tensors or this rank's shards. Every
    rank must call it; a process without ranks may. `options` is the [model] section of the full model. Raises
    ConfigError if the folder is not complete, is damaged or is of another model."""
    with collected_problems() as problems:
        if path.suffix == ".tmp" or ".damaged" in path.name or not path.is_dir():
            expected = "expected a checkpoint's step-N folder, or a Hugging Face folder"
            raise ConfigError([f"checkpoint.initial_load_path = {show(str(path))}: {expected}"])
        is_hugging_face = (path / "config.json").exists()
        if is_hugging_face:
            from titanlite.hf.load import load_hf_weights

            load_hf_weights(path, model, options)
        else:
            reader = CheckpointReader(path)
    if not problems and not is_hugging_face:
        problems = _load(reader, _model_tensors(model), {}, ("model.",))
    if problems:
        raise ConfigError(problems)


def _load(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    random_states: Mapping[str, Tensor],
    prefixes: tuple[str, ...],
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Fill this rank's shards of tensors, which on all ranks must be those of the checkpoint whose names have the
    prefixes, and its random states. Return what is wrong on any rank."""
    saved = {name for name in reader.shapes if name.startswith(prefixes)}
    own = torch.tensor(sum(_is_on_first_rank(name, tensors) for name in tensors))
    if dist.is_initialized():
        dist.all_reduce(own, group=group)  # pipeline stages have different tensors
    with collected_problems(group) as problems:
        reader.check(tensors)
        if own < len(saved):
            problem = f"{len(saved)} tensors, and the model has {own}; it is of another model"
            raise ConfigError([f"{reader.path}: {problem}"])
    if not problems:
        size = sum(entry.bytes for entry in reader.manifest.files.values())
        description = f"loading checkpoint {reader.path.name} ({size / 2**30:.1f} GiB)"
        is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        with progress(description, enabled=is_rank0), collected_problems(group) as problems:
            reader.load({**tensors, **random_states})
    return problems


@contextlib.contextmanager
def collected_problems(
    group: dist.ProcessGroup | None = None, kind: type[Exception] = ConfigError
) -> Iterator[list[str]]:
    """Run the body on every rank. Then the list has a line for each problem that some rank had, the same on all. In a
    process without ranks, the problems are its own."""
    own: list[str] = []
    problems: list[str] = []
    try:
        yield problems
    except kind as error:
        own = error.problems if isinstance(error, ConfigError) else [str(error)]
    gathered = [own]
    if dist.is_initialized():
        gathered = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own, group=group)
    problems += dict.fromkeys(problem for each in gathered for problem in each)


def _raise_unsaved(folder: Path, problems: list[str]) -> None:
    if problems:
        raise TrainingError(f"{folder.with_suffix('')} could not be saved: {'; '.join(problems)}")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _slices_to_save(tensors: Mapping[str, Tensor]) -> Slices:
    """Return which slices this rank saves: each shard is saved by one of the ranks that have it, in turn."""
    slices: Slices = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        offset, size = shard_slice(tensor)
        is_sharded = isinstance(tensor, DTensor)
        saves = _replica(tensor) == index % n_replicas(tensor) if is_sharded else _is_on_first_rank(name, tensors)
        if saves and 0 not in size:
            slices[name] = plain_shard(tensor), offset, tuple(tensor.shape)
    return slices


def _replica(tensor: DTensor) -> int:
    """Return the number of this rank among those that have the same shard."""
    number = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    return number


def _is_on_first_rank(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether this rank is the first of those that have a tensor, or a shard of it. An optimizer state that is a
    plain number is on all ranks of its parameter."""
    if name.startswith("optimizer."):
        name = "model." + name.removeprefix("optimizer.state.").rpartition(".")[0]
    tensor = tensors[name]
    return not isinstance(tensor, DTensor) or not any(tensor.device_mesh.get_coordinate())


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
