"""Save a distributed checkpoint, and resume from a checkpoint under any layout: resharding happens while loading.

    rank-00000.safetensors, ...     weights, optimizer states and random states: the slices that each rank saved
    manifest.json                   which slice of which tensor is in which file, and checksums
    state.json                      step, data position and the identity that a resumed run must share

No file contains code: tensors are in safetensors files, everything else is JSON. folder.py lists the states of a
checkpoint, such as unconfirmed or damaged, and the folder name in each state."""

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

from titanlite.checkpoint import tensors
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
from titanlite.checkpoint.manifest import MANIFEST, STATE, build_manifest
from titanlite.checkpoint.ranks import collected_problems, with_all_ranks
from titanlite.checkpoint.run import NoCheckpoints, RunState, Trained
from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Checkpoint, Comm, Model
from titanlite.files.durable import sync_folder, write_synced
from titanlite.launch.process_group import log_rank0
from titanlite.launch.progress import alive, mark, progress

GET_PAST = "to get past this step, lower optimizer.lr or training.max_norm, or raise training.nonfinite_steps_allowed"


class NotSavedError(TrainingError):
    """A checkpoint could not be written."""


class Checkpointer(NoCheckpoints):
    """Saves and resumes the checkpoints of a run. Every rank must make the same calls. checkpoint.folder is relative to
    `dump_folder`. An "async" save returns once the state is copied to host memory. `identity`, plain JSON, contains the
    seed, the data and the model's dimensions; a resumed run must have the same identity, except for the keys in
    `may_differ`. `config`, the run's options by full name, is saved in each checkpoint."""

    def __init__(
        self,
        dump_folder: Path,
        checkpoint: Checkpoint,
        identity: dict[str, Any],
        comm: Comm,
        may_differ: Collection[str] = (),
        config: Mapping[str, Any] | None = None,
        run: Trained | None = None,
    ):
        super().__init__(checkpoint, run)
        self.folder, self.identity = dump_folder / checkpoint.folder, identity
        if "lora.rank" in identity:
            from titanlite.checkpoint.adapters import hash_of_base  # imported here: few runs have LoRA adapters

            self.identity = identity | {"lora.base": hash_of_base(checkpoint.initial_load_path)}
        self.may_differ, self.config, self.comm = may_differ, dict(config or {}), comm
        self.unconfirmed: list[int] = []
        """Steps of complete checkpoints whose weights have given no finite loss yet."""
        self.agreed_step = math.inf
        """The last step at which compared replicas did not differ; infinity if replicas are never compared."""
        self.seconds = 0.0
        """Seconds during which saves have stopped the training since the last call of `metrics`."""
        self._finite_step = 0
        self._last_step = 0
        """The step of the last checkpoint that was saved or resumed from."""
        self._saving: tuple[int, bool, Future[None], contextlib.ExitStack] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save checkpoint")
        self._host_copies: dict[str, Tensor] = {}
        # Saves have a separate process group, since asynchronous saves communicate in a thread during training.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.comm.init_timeout_seconds))
        self._names = CheckpointFolder(self.folder, checkpoint.keep_latest_k)
        if dist.get_rank() == 0:
            self._names.recover()

    def begin(self, options: Model, seed: int) -> dict[str, Any]:
        """Load the newest checkpoint; if there is none, load the weights of checkpoint.initial_load_path, if any."""
        mark("loading a checkpoint")
        if not (saved := self.resume(self.run.model, self.run.optimizer)):
            return super().begin(options, seed)
        if "lora.rank" in self.identity:
            self.load_initial(options)  # the frozen base weights, which a checkpoint of LoRA adapters lacks
        self._last_step = saved["step"]
        log_rank0(f"weights    resumed after step {self._last_step} of {self.run.steps} from {self.folder}")
        if saved["config"] and saved["config"] != self.config:
            from titanlite.checkpoint.changed_options import changes  # imported here: few runs change options

            log_rank0(changes(saved["config"], self.config, self._last_step))
        return saved

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint into model and optimizer, and random states if the number of ranks is unchanged.
        Return the `state` that was passed to `save`, with the key `step`; None without a checkpoint. Raises ConfigError
        if load_step is not the newest step, the identity differs, or the checkpoint is damaged; with on_corrupt =
        "previous", a damaged checkpoint is an error only if every checkpoint is damaged."""
        names = self._from_rank0(self._names.to_resume)  # ranks may see different names on a network disk
        steps = [state_of(Path(name))[0] for name in names]
        if self.checkpoint.load_step not in (-1, *steps[-1:]):
            problem = f"checkpoint.load_step = {self.checkpoint.load_step}: expected the newest step in {self.folder}, "
            problem += f"which has {', '.join(map(str, steps)) or 'none'}; to go back, move the newer ones away, since "
            raise ConfigError([problem + "the next resume would pick them"])
        problems, damaged = list[str](), list[tuple[Path, str]]()
        if names:
            from titanlite.checkpoint.loading import load_checkpoint  # imported here: a new run has no checkpoint
        while names and (self.checkpoint.on_corrupt == "previous" or not problems):
            path = self.folder / names[-1]
            state, problems = load_checkpoint(path, model, optimizer, self)
            if not problems:
                for bad, problem in damaged if dist.get_rank() == 0 else []:  # a renamed checkpoint is not loaded again
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

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        is_last: bool = True,
    ) -> None:
        """Wait for the previous asynchronous save, then save `step`. `state`: plain JSON, the same on every rank.
        Raises TrainingError if either save fails, and checkpoint.on_error is "fail" or `is_last` is true."""
        self.finish()
        with self._stops_training(), self._tolerated(step, is_last):
            with self._saves(step):
                if dist.get_rank() == 0:
                    self._names.create(step)
            states = tensors.optimizer_tensors(model, optimizer)
            states = {name: tensors.dequantized(state) for name, state in states.items()}
            generators = {name: (value, (0,), tuple(value.shape)) for name, value in tensors.random_states().items()}
            slices = tensors.slices_to_save(tensors.model_tensors(model) | states) | generators
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

    def _copied_to_host(self, slices: tensors.Slices) -> tensors.Slices:
        """Copy slices to host memory. The first save allocates this memory, pinned if the tensors are on CUDA."""
        copies = {}
        for name, (tensor, offset, shape) in slices.items():
            copy = self._host_copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[name] = copy
            copies[name] = copy.copy_(tensor, non_blocking=True), offset, shape
            alive()  # the watchdog must not take the slow pinning of memory for a hang
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _write(self, step: int, slices: tensors.Slices, state: bytes) -> None:
        """Write this rank's file. After all ranks have written their files, rank 0 writes state.json and the manifest,
        and renames the folder. In an asynchronous save, a thread does all of this, even if the training then fails."""
        rank, stored, folder = dist.get_rank(), None, self.folder / f"step-{step}{TEMPORARY}"
        file = folder / f"rank-{rank:05d}.safetensors"
        with self._saves(step):
            stored = with_all_ranks(
                lambda: write_file(self._names.named(step, TEMPORARY) / file.name, slices),
                lambda: file.stat().st_size if file.exists() else 0,
                f"writing {file}",
                group=self.group,
                timeout=self.comm.train_timeout_seconds,
            )
        files: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object((file.name, stored), files, group=self.group)
        with self._saves(step):
            if files is not None:
                write_synced(self._names.named(step, TEMPORARY) / STATE, state)
                write_synced(folder / MANIFEST, build_manifest(dict(files), state))
                sync_folder(folder)
                self._names.publish(step)

    def after_step(self, step: int, state: RunState, *, asked: bool, is_last: bool) -> None:
        mark("saving a checkpoint")
        if self._saving and self._saving[2].done():
            self.finish()
        if step % self.checkpoint.interval == 0 or is_last or asked:
            self.run.signals.answered_saves = self.run.signals.saves
            if asked:
                log_rank0(f"asked to save: checkpoint step-{step}")
            self._save(step, state, is_last=is_last)

    def _save(self, step: int, state: RunState, *, is_last: bool) -> None:
        self.save(step, self.run.model, self.run.optimizer, state.save(), is_last=is_last)
        self._last_step = step

    def end(self, step: int, state: RunState, last_loss: Callable[[], float]) -> None:
        if step != self._last_step:
            mark("saving a checkpoint")
            self._save(step, state, is_last=True)
        mark("waiting for the last checkpoint")
        self.finish()
        if self.unconfirmed:
            mark("testing the last checkpoint")
            self.confirm_last(step, last_loss(), may_fail=state.guard.n_nonfinite < state.guard.n_allowed)

    def finish(self) -> None:
        """Wait for an asynchronous save. Raises TrainingError as `save` does."""
        if self._saving:
            (step, is_last, future, stack), self._saving = self._saving, None
            with self._stops_training(), self._tolerated(step, is_last):
                with stack:
                    while not future.done():  # the loop ends: with_all_ranks in the save thread raises after a stall
                        wait([future], timeout=1)
                        alive()
                    future.result()
                self._saved(step)

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()
        self._names.close()
        dist.destroy_process_group(self.group)

    @contextlib.contextmanager
    def finished_on_error(self) -> Iterator[None]:
        """If the `with` body raises, finish an asynchronous save before the run ends, within the timeout in [comm]."""
        try:
            yield
        except Exception:
            step = self._saving[0] if self._saving else 0
            try:
                self.finish()
            except Exception as error:  # print finish()'s error; `raise` below raises the error of the `with` block
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"checkpoint step-{step} was not finished: {reason}", file=sys.stderr, flush=True)
            raise

    def metrics(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, 0.0
        return {"time_metrics/checkpoint(s)": seconds}

    def confirm(self, step: int) -> None:
        self._finite_step = step
        for step in [each for each in self.unconfirmed if each < min(self._finite_step, self.agreed_step)]:
            self.unconfirmed.remove(step)
            try:
                if dist.get_rank() == 0:
                    self._names.confirm(step)
            except OSError as error:
                problem = f"{self.folder}/step-{step}{UNCONFIRMED} could not be renamed to step-{step}: {error}"
                raise TrainingError(problem) from None

    def set_aside(self, suffix: str) -> str:
        """Rename checkpoints whose weights gave no finite loss (`suffix` DIVERGED), or that were saved since replicas
        last agreed (`suffix` SUSPECT). Return a text for the error message. Every rank must call this method."""
        with contextlib.suppress(NotSavedError):
            self.finish()
        steps = [step for step in self.unconfirmed if suffix == SUSPECT or step >= self._finite_step]
        self.unconfirmed = [step for step in self.unconfirmed if step not in steps]
        return self._from_rank0(lambda: self._set_steps_aside(steps, suffix))

    def after_divergence(self) -> str:
        return f"; {self.set_aside(DIVERGED)}; {GET_PAST}"

    def confirm_last(self, step: int, loss: float, *, may_fail: bool) -> None:
        """Confirm the checkpoint of a run's last step if `loss`, computed with the checkpoint's weights, is finite.
        Otherwise raise TrainingError, unless `may_fail` is true: the run is allowed another non-finite step."""
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
                if (path := self._names.named(step, UNCONFIRMED)).exists():
                    words.append(f"step-{step} is now {self._names.set_aside(path, suffix)}: {SET_ASIDE[suffix]}")
        except OSError as error:
            words.append(f"the checkpoints of steps {steps} are not to be used and could not be renamed: {error}")
        good, names = complete_steps(self.folder), self._names.to_resume()
        newest = f"the newest good checkpoint is step-{good[-1]}" if good else "there is no good checkpoint"
        begins = f"resumes from {names[-1]}" if names else "begins anew"
        return "; ".join([*words, f"{newest}, and the next start {begins}"])

    def _from_rank0(self, call: Callable[[], Any]) -> Any:
        """Call a function on rank 0 and return its result on every rank, since ranks may see the folder differently."""
        result = [call() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(result, group=self.group)
        return result[0]

    def _saved(self, step: int) -> None:
        """Record a complete checkpoint as unconfirmed, and confirm it if a later step has had a finite loss already."""
        self.unconfirmed.append(step)
        self.confirm(self._finite_step)

    @contextlib.contextmanager
    def _tolerated(self, step: int, is_last: bool) -> Iterator[None]:
        """If the `with` body cannot write a checkpoint, delete its files; raise if `is_last` or on_error = "fail"."""
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

    @contextlib.contextmanager
    def _saves(self, step: int) -> Iterator[None]:
        """Raise NotSavedError on every rank if the `with` body raises OSError on any rank."""
        with collected_problems(self.group, OSError) as problems:
            yield
        if problems:
            raise NotSavedError(f"{self.folder / f'step-{step}'} could not be saved: {'; '.join(problems)}")
