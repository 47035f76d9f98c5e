"""Saving distributed checkpoints, and resuming from them under any layout, with resharding as they are loaded.

    rank-00000.safetensors, ...     weights, optimizer states and random states: the slices that each rank saved
    manifest.json                   which slice of which tensor is in which file, and checksums
    state.json                      step, data position and the identity that a resumed run must share

No file holds code: tensors are in safetensors files, everything else is JSON. folder.py has the names of
checkpoints that are not complete, or not good.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.checkpoint.changed_options import OF_DATA, listed
from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.folder import (
    DAMAGED,
    DIVERGED,
    SET_ASIDE,
    SUSPECT,
    TEMPORARY,
    UNCONFIRMED,
    CheckpointFolder,
    complete_steps,
    state_of,
)
from titanlite.checkpoint.initial_weights import is_hugging_face
from titanlite.checkpoint.manifest import MANIFEST, STATE, build_manifest
from titanlite.checkpoint.ranks import collected_problems, with_all_ranks
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.checkpoint.tensors import (
    Slices,
    dequantized,
    is_on_first_rank,
    load_quantized,
    model_tensors,
    optimizer_tensors,
    random_states,
    slices_to_save,
)
from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Checkpoint, Comm, Model
from titanlite.files.durable import sync_folder, write_synced
from titanlite.launch.progress import alive, progress

GET_PAST = "to get past this step, lower optimizer.lr or training.max_norm, or raise training.nonfinite_steps_allowed"


class NotSavedError(TrainingError):
    """A checkpoint could not be written."""


class Checkpointer:
    """Saves and resumes the checkpoints of a run. Every rank must make the same calls.

    checkpoint.folder is relative to `dump_folder`. An "async" save returns once the state is copied to host memory.
    `identity`, plain JSON, is what a resumed run must share with the one that saved, but for the keys in `may_differ`:
    seed, data, dimensions. `config` is saved with each step.
    """

    def __init__(
        self,
        dump_folder: Path,
        checkpoint: Checkpoint,
        identity: dict[str, Any],
        comm: Comm,
        may_differ: Collection[str] = (),
        config: Mapping[str, Any] | None = None,
    ):
        self.folder, self.checkpoint, self.identity = dump_folder / checkpoint.folder, checkpoint, identity
        self.may_differ, self.config, self.comm = may_differ, dict(config or {}), comm
        self.unconfirmed: list[int] = []
        """Steps of complete checkpoints that do not count as good yet."""
        self.agreed_step = math.inf
        """The last step whose replicas agreed; infinite if they are not compared."""
        self.seconds = 0.0
        """Time that saves have stopped the training for, until `take_seconds`."""
        self._finite_step = 0
        self._saving: tuple[int, bool, Future[None], contextlib.ExitStack] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save checkpoint")
        self._host_copies: dict[str, Tensor] = {}
        # A group of its own: an asynchronous save talks to the other ranks from another thread than the training.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.comm.init_timeout_seconds))
        self._names = CheckpointFolder(self.folder, checkpoint.keep_latest_k)
        if dist.get_rank() == 0:
            self._names.recover()

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint into a model and its optimizer, and into the random generators if there are as
        many ranks as when it was saved. Return the `state` that `save` got, with `step`; without one, None. Raises
        ConfigError if checkpoint.load_step is not the newest step, the identity differs, or the checkpoint is damaged;
        with checkpoint.on_corrupt = "previous", if all are."""
        names = self._from_rank0(self._names.to_resume)  # ranks must agree, even if they see the folder differently
        steps = [state_of(Path(name))[0] for name in names]
        if self.checkpoint.load_step not in (-1, *steps[-1:]):
            problem = f"checkpoint.load_step = {self.checkpoint.load_step}: expected the newest step in {self.folder}, "
            problem += f"which has {', '.join(map(str, steps)) or 'none'}; to go back, move the newer ones away, since "
            raise ConfigError([problem + "the next resume would pick them"])
        problems, damaged = list[str](), list[tuple[Path, str]]()
        while names and (self.checkpoint.on_corrupt == "previous" or not problems):
            path = self.folder / names[-1]
            state, problems = self._try(path, model, optimizer)
            if not problems:
                for bad, problem in damaged if dist.get_rank() == 0 else []:  # so that no later start tries them
                    print(f"{problem}; renamed to {self._names.set_aside(bad, DAMAGED)}", flush=True)
                paths = [Path(name) for name in names if name.endswith(UNCONFIRMED)]
                self.unconfirmed = [state_of(path)[0] for path in paths]
                return state
            damaged.append((path, problems[0]))
            names.pop()
        if problems:
            hint = 'checkpoint.on_corrupt = "previous" resumes from the one before'
            problems[-1] += f"; {hint}" if names else "; no other checkpoint is left"
            raise ConfigError(problems)
        return None

    def _try(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
        """Load a checkpoint. Return its state, and what is wrong with it on any rank. Raises ConfigError if it is of
        another run."""
        with collected_problems(self.group) as problems:
            reader = CheckpointReader(path)
        if problems:
            return {}, problems
        state, options = reader.state, {"mixture": ", set training.change_mixture_on_resume = true"}
        if changed := listed(state["config"], self.config, OF_DATA):
            why = "; without data of its own, validation takes validation.fraction of the documents from the training"
            options["data"] = f" (changed: {changed}{why * ('validation.' in changed)})"
        saved = _with_optimizer(state["identity"], state["config"])
        own = _with_optimizer(self.identity, self.config if state["config"] else {})
        differences = [
            f"{path}: saved with {key} = {show(saved.get(key))}, and this run has {show(value)}; resume "
            f"with the same{options.get(key, '')}, or start in another job.dump_folder "
            "(checkpoint.initial_load_path loads only the weights)"
            for key, value in {**dict.fromkeys(saved), **own}.items()
            if saved.get(key) != value and key not in self.may_differ
        ]
        if differences:
            raise ConfigError(differences)
        return state, self._load(reader, model, optimizer)

    def _load(self, reader: CheckpointReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        """Load a checkpoint's tensors and return what is wrong with them on any rank."""
        n_saved = sum(name.startswith("random.cpu.") for name in reader.shapes)
        generators = random_states() if n_saved == dist.get_world_size() else {}  # else as this run has seeded them
        states = optimizer_tensors(model, optimizer)
        portable = {name: dequantized(state) for name, state in states.items()}
        tensors = model_tensors(model) | portable
        limits = {"group": self.group, "timeout": self.comm.init_timeout_seconds}
        problems = _load(reader, tensors, generators, ("model.", "optimizer."), **limits)
        if not problems:
            for name, state in states.items():
                if state is not portable[name]:
                    load_quantized(state, portable[name], optimizer.store, is_square=name.endswith(".exp_avg_sq"))
            with collected_problems(self.group, RuntimeError) as problems:
                for name, value in generators.items():
                    (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)
        return problems

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        is_last: bool = True,
    ) -> None:
        """Save a step, once an earlier asynchronous save is done; `state` is plain JSON, the same on every rank. Raises
        TrainingError if this checkpoint, or an earlier asynchronous one, could not be written, and checkpoint.on_error
        = "fail" or `is_last`."""
        with self._stops_training():
            self._finish()
        with self._stops_training(), self._tolerated(step, is_last):
            with collected_problems(self.group, OSError) as problems:
                if dist.get_rank() == 0:
                    self._names.create(step)
            self._raise_unsaved(step, problems)
            states = {name: dequantized(state) for name, state in optimizer_tensors(model, optimizer).items()}
            generators = {name: (value, (0,), tuple(value.shape)) for name, value in random_states().items()}
            slices = slices_to_save(model_tensors(model) | states) | generators
            size = torch.tensor(sum(tensor.nbytes for tensor, *_ in slices.values()), dtype=torch.float64)
            dist.all_reduce(size, group=self.group)
            content = {"step": step, "identity": self.identity, "config": self.config, **state}
            state_json = json.dumps(content, indent=1).encode()
            with contextlib.ExitStack() as stack:
                description = f"saving checkpoint step-{step} ({size.item() / 2**30:.1f} GiB)"
                stack.enter_context(progress(description, enabled=dist.get_rank() == 0))
                if self.checkpoint.async_mode == "async":
                    future = self._thread.submit(self._write, step, self._copied_to_host(slices), state_json)
                    self._saving = step, is_last, future, stack.pop_all()
                else:
                    self._write(step, slices, state_json)
                    self._saved(step)

    def _copied_to_host(self, slices: Slices) -> Slices:
        """Copy what is to be saved to host memory, which is allocated once, pinned if the tensors are on CUDA."""
        copies = {}
        for name, (tensor, offset, shape) in slices.items():
            copy = self._host_copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[name] = copy
            copies[name] = copy.copy_(tensor, non_blocking=True), offset, shape
            alive()  # the first time, pinning memory takes long
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _write(self, step: int, slices: Slices, state: bytes) -> None:
        """Write this rank's file. When all ranks have, rank 0 writes state.json and the manifest and renames the
        folder, so that an asynchronous save is complete even if the training has failed since."""
        rank, stored, folder = dist.get_rank(), None, self.folder / f"step-{step}{TEMPORARY}"
        file = folder / f"rank-{rank:05d}.safetensors"
        with collected_problems(self.group, OSError) as problems:
            stored = with_all_ranks(
                lambda: write_file(self._names.named(step, TEMPORARY) / file.name, slices),
                lambda: file.stat().st_size if file.exists() else 0,
                f"writing {file}",
                group=self.group,
                timeout=self.comm.train_timeout_seconds,
            )
        self._raise_unsaved(step, problems)
        files: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object((file.name, stored), files, group=self.group)
        with collected_problems(self.group, OSError) as problems:
            if files is not None:
                write_synced(self._names.named(step, TEMPORARY) / STATE, state)
                write_synced(folder / MANIFEST, build_manifest(dict(files), state))
                sync_folder(folder)
                self._names.publish(step)
        self._raise_unsaved(step, problems)

    def poll(self) -> None:
        """Register an asynchronous save that is done; cheap enough for every step."""
        if self._saving and self._saving[2].done():
            self.finish()

    def finish(self) -> None:
        """Wait for an asynchronous save. Raises TrainingError as `save` does."""
        with self._stops_training():
            self._finish()

    def close(self) -> None:
        """Wait for all background work. Raises what an asynchronous save raised."""
        self._finish()
        self._thread.shutdown()
        self._names.close()
        dist.destroy_process_group(self.group)

    @contextlib.contextmanager
    def finished_on_error(self) -> Iterator[None]:
        """If the body raises, finish an asynchronous save before the exception ends the run. The timeouts
        of comm.* bound the wait for ranks that are dead."""
        try:
            yield
        except Exception:
            step = self._saving[0] if self._saving else 0
            try:
                self._finish()
            except Exception as error:  # the first error is the one to report; this one only says what was lost
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"checkpoint step-{step} was not finished: {reason}", file=sys.stderr, flush=True)
            raise

    def take_seconds(self) -> float:
        """Return for how many seconds saves have stopped the training since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def confirm(self, step: int) -> None:
        """Register that a step was finite: checkpoints of earlier steps are good. Cheap if there is nothing to do.
        Raises TrainingError if one cannot be renamed."""
        self._finite_step = step
        self._confirm()

    def _confirm(self) -> None:
        for step in [each for each in self.unconfirmed if each < min(self._finite_step, self.agreed_step)]:
            self.unconfirmed.remove(step)
            try:
                if dist.get_rank() == 0:
                    self._names.confirm(step)
            except OSError as error:
                problem = f"{self.folder}/step-{step}{UNCONFIRMED} could not be renamed to step-{step}: {error}"
                raise TrainingError(problem) from None

    def set_aside(self, suffix: str) -> str:
        """Rename the checkpoints that a failure has made useless, and return words about it for the error's message.

        `suffix` is DIVERGED, for those whose weights gave no finite step, or SUSPECT, for those that were saved since
        the replicas last agreed. Every rank must call it.
        """
        with contextlib.suppress(NotSavedError):
            self._finish()
        steps = [step for step in self.unconfirmed if suffix == SUSPECT or step >= self._finite_step]
        self.unconfirmed = [step for step in self.unconfirmed if step not in steps]
        return self._from_rank0(lambda: self._set_steps_aside(steps, suffix))

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite step. Return what to tell the user."""
        return f"; {self.set_aside(DIVERGED)}; {GET_PAST}"

    def confirm_last(self, step: int, loss: float, *, may_fail: bool) -> None:
        """Register the loss that the weights of a run's last step give. If it is not finite, they stay unconfirmed.
        Raises TrainingError unless it is, or `may_fail`, as the config allows steps that are not finite."""
        if math.isfinite(loss):
            self.confirm(step + 1)
        elif not may_fail:
            problem = f"the loss is {loss} with the weights of the last step, {step}"
            raise TrainingError(problem + self.after_divergence())
        elif dist.get_rank() == 0:
            print(f"step-{step} remains unconfirmed: the loss is {loss} with its weights", flush=True)

    def _set_steps_aside(self, steps: list[int], suffix: str) -> str:
        words = []
        try:
            if steps:
                self._names.delete_set_aside(suffix)
                self._names.close()
            for step in steps:
                path = self._names.named(step, UNCONFIRMED)
                if path.exists():
                    words.append(f"step-{step} is now {self._names.set_aside(path, suffix)}: {SET_ASIDE[suffix]}")
        except OSError as error:
            words.append(f"the checkpoints of steps {steps} are not to be used and could not be renamed: {error}")
        good, names = complete_steps(self.folder), self._names.to_resume()
        newest = f"the newest good checkpoint is step-{good[-1]}" if good else "there is no good checkpoint"
        begins = f"resumes from {names[-1]}" if names else "begins anew"
        return "; ".join([*words, f"{newest}, and the next start {begins}"])

    def _from_rank0(self, call: Callable[[], Any]) -> Any:
        """Return on every rank what a call returns on rank 0: its view of the folder is the one that counts."""
        result = [call() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(result, group=self.group)
        return result[0]

    def _finish(self) -> None:
        """Wait for an asynchronous save."""
        if self._saving:
            (step, is_last, future, stack), self._saving = self._saving, None
            with self._tolerated(step, is_last):
                with stack:
                    while not future.done():  # `with_all_ranks` ends it if a rank stalls
                        wait([future], timeout=1)
                        alive()
                    future.result()
                self._saved(step)

    def _saved(self, step: int) -> None:
        """Register a complete checkpoint, which is good at once if a later step has been finite already."""
        self.unconfirmed.append(step)
        self._confirm()

    @contextlib.contextmanager
    def _tolerated(self, step: int, is_last: bool) -> Iterator[None]:
        """If a checkpoint cannot be written, free its space and do what checkpoint.on_error says."""
        try:
            yield
        except NotSavedError as error:
            if dist.get_rank() == 0:
                self._names.remove_unfinished(step)
            if is_last or self.checkpoint.on_error == "fail":
                raise
            if dist.get_rank() == 0:
                print(f'{error}; the training continues (checkpoint.on_error = "continue")', flush=True)

    @contextlib.contextmanager
    def _stops_training(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def _raise_unsaved(self, step: int, problems: list[str]) -> None:
        if problems:
            raise NotSavedError(f"{self.folder / f'step-{step}'} could not be saved: {'; '.join(problems)}")


def load_weights(path: Path, model: nn.Module, options: Model) -> None:
    """Load the weights of a checkpoint, or of a Hugging Face folder, into plain tensors or this rank's shards. Every
    rank must call it; a process without ranks may. `options` is the [model] section of the full model. Raises
    ConfigError if the folder is not complete, is damaged or is of another model."""
    with collected_problems() as problems:
        if is_hf := is_hugging_face(path):
            from titanlite.hf.load import load_hf_weights

            load_hf_weights(path, model, options)
        else:
            reader = CheckpointReader(path)
    if not problems and not is_hf:
        problems = _load(reader, model_tensors(model), {}, ("model.",))
    if problems:
        raise ConfigError(problems)


def _load(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    generators: Mapping[str, Tensor],
    prefixes: tuple[str, ...],
    group: dist.ProcessGroup | None = None,
    timeout: float = 0,
) -> list[str]:
    """Fill this rank's shards of tensors, which on all ranks must be those of the checkpoint whose names have the
    prefixes, and its random states (`generators`). Return what is wrong on any rank. With a group, each rank may take
    as long as it needs, if it reads a byte within `timeout` seconds."""
    saved = {name for name in reader.shapes if name.startswith(prefixes)}
    own = torch.tensor(sum(is_on_first_rank(name, tensors) for name in tensors))
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
            wanted = {**tensors, **generators}
            if group is None:
                reader.load(wanted)
            else:
                options = {"description": f"reading {reader.path}", "group": group, "timeout": timeout}
                with_all_ranks(lambda: reader.load(wanted), lambda: reader.bytes_read, **options)
    return problems


def _with_optimizer(identity: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with the optimizer whose states a run saves, if its config is known."""
    name = config.get("optimizer.name")
    return identity | ({"optimizer.name": "Muon" if name == "Muon" else "Adam or AdamW"} if name else {})
