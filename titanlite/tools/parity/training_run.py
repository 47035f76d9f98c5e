"""Take training steps under a layout, with the functions that titanlite/train.py calls."""

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import build
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.tensors import named_tensors
from titanlite.config import Config, Launch
from titanlite.data.loader import Batch
from titanlite.launch.process import Signals
from titanlite.launch.process_group import device_of
from titanlite.launch.progress import progress
from titanlite.optimizer import set_lr
from titanlite.parallel import mesh
from titanlite.techniques.data.dataset_losses import DatasetLosses
from titanlite.tools.parity.reference import RandomSequences, Trace, trace_of
from titanlite.train_step import Totals


class TrainingRun:
    """A rank's model, optimizer and loader as train.py builds them, with random sequences as data. With a checkpointer,
    the run resumes from the newest checkpoint, whose step is `last_step` (0 without a checkpoint)."""

    def __init__(self, config: Config, device: torch.device, checkpointer: Checkpointer | None = None):
        self.device = device
        self.layout = mesh.build_layout(config.parallelism, device)
        self.model, stages = build.build_model(config, self.layout, device)
        run = build.Run(config, self.layout, device, self.model, stages)
        self.train_step = build.build_train_step(run)
        self.optimizer = build.build_optimizer(config, self.model, stages.values(), self.layout)
        saved = checkpointer.resume(self.model, self.optimizer) if checkpointer else None
        self.last_step, state = (saved["step"], saved["data"]) if saved else (0, None)
        sequences, config = RandomSequences(config), config.replace(training__datasets=[])
        self.loader = build.build_loader(run._replace(config=config), sequences, state)
        self.guard = build.build_guard(config.training, device)
        self.parameters = dict(self.model.named_parameters())

    def step(self, batches: list[Batch]) -> None:
        self.update(self.totals(*self.gradients(batches)))

    def gradients(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Compute gradients; return this rank's sum of token losses and the global number of valid tokens."""
        return self.train_step.gradients(0, batches, self.guard.loss_scale)

    def totals(self, loss_sum: Tensor, valid: Tensor) -> Totals | None:
        """Sum the results of `gradients` over all ranks. Return None if a replica group was lost in this step."""
        return self.train_step.groups.totals(loss_sum, valid, self.parameters.values(), Signals())

    def update(self, totals: Totals) -> None:
        """Clip the gradients and update the weights, unless the step is not finite."""
        self.train_step.update(self.optimizer, totals.norm, self.guard.taken(totals))
        self.optimizer.zero_grad()

    def trace_of_all_stages(self, kind: str, tensors: dict[str, Tensor]) -> Trace:
        """Gather tensors of all pipeline stages under the names "KIND NAME"."""
        pipeline = self.layout.mesh["pp"]
        stages: list[Trace] = [{}] * pipeline.size()
        dist.all_gather_object(stages, trace_of(kind, tensors), pipeline.get_group())
        return {name: tensor for stage in stages for name, tensor in stage.items()}


def run_layout(config: Config, launch: Launch, *, steps: int, checkpointer: Checkpointer | None = None) -> Trace:
    """Train; with a checkpointer, save at the end. Every rank must call this function, and gets the full trace."""
    run = TrainingRun(config, device_of(launch), checkpointer)
    last_step, sections = run.last_step + steps, (run.train_step, config.training)
    dataset_losses = DatasetLosses(run.loader.sequences, run.loader, *sections, data_rank=run.layout.data_rank)
    run.train_step.observers.append(dataset_losses)
    trace = run.trace_of_all_stages("initial weight", run.parameters)
    with progress("layout", total=steps, unit="steps", enabled=launch.rank == 0) as advance:
        for step in run.train_step.groups.steps(run.last_step, last_step):
            set_lr(run.optimizer, step, config.optimizer, config.lr_scheduler)
            totals = run.totals(*run.gradients(run.loader.next()))
            sums, counts = dataset_losses.totals().T
            loss, norm, *_ = totals.numbers
            numbers = {"loss": loss, "losses of datasets": sums / counts.clamp(min=1), "norm": norm}
            trace |= trace_of(f"step {step}", numbers)
            gradients = {name: p.grad for name, p in run.parameters.items()}
            trace |= run.trace_of_all_stages(f"step {step} gradient", gradients)
            run.update(totals)
            advance(1)
    trace |= run.trace_of_all_stages("final weight", named_tensors(run.model))
    if checkpointer:
        checkpointer.save(last_step, run.model, run.optimizer, {"data": run.loader.state()})
    trace["validation loss"] = torch.tensor(run.train_step.validate(run.loader.next()), dtype=torch.float64)
    run.loader.close()
    return trace
