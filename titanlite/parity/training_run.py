"""Training steps of a layout, by the same functions as titanlite/train.py."""

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import build
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.tensors import named_tensors
from titanlite.config import Config, Launch
from titanlite.data.loader import Batch
from titanlite.dataset_losses import DatasetLosses
from titanlite.optimizer import build_loss_scale, clip_factor, clipped_step, gradient_norm, lr_factor, set_lr
from titanlite.parallel import mesh
from titanlite.parity.reference import RandomSequences, Trace, trace_of
from titanlite.progress import progress


class TrainingRun:
    """This rank's model, optimizer and loader as train.py builds them, with random sequences as the data.

    With a checkpointer, it resumes from the newest checkpoint. `last_step` is the step of that; 0 without one.
    """

    def __init__(self, config: Config, device: torch.device, checkpointer: Checkpointer | None = None):
        self.device, self.max_norm = device, config.training.max_norm
        self.layout = mesh.build_layout(config.parallelism, device)
        self.model, stages = build.build_model(config, self.layout, device)
        self.train_step = build.build_train_step(config, self.layout, self.model, stages, device)
        self.optimizer = build.build_optimizer(config, self.model, stages.values(), self.layout)
        saved = checkpointer.resume(self.model, self.optimizer) if checkpointer else None
        self.last_step, state = (saved["step"], saved["data"]) if saved else (0, None)
        sequences, config = RandomSequences(config), config.replace(training__datasets=[])
        self.loader = build.build_loader(config, self.layout, sequences, device=device, state=state)
        self.dataset_losses = DatasetLosses(
            sequences, self.train_step, config.training, data_rank=self.layout.data_rank
        )
        self.parameters = dict(self.model.named_parameters())

    def step(self, batch: list[Batch]) -> None:
        """Take one optimizer step with the current learning rate."""
        self.train_step.forward_backward(batch)
        self.update(gradient_norm(self.parameters.values(), self.device))

    def update(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm is `norm`, and update the weights."""
        clipped_step(self.optimizer, clip_factor(norm, self.max_norm), norm.isfinite())
        if self.train_step.balance:
            self.train_step.balance.update(norm.isfinite())
        self.optimizer.zero_grad()

    def trace_of_all_stages(self, kind: str, tensors: dict[str, Tensor]) -> Trace:
        """Gather tensors of all pipeline stages under the names "KIND NAME"."""
        pipeline = self.layout.mesh["pp"]
        stages: list[Trace] = [{}] * pipeline.size()
        dist.all_gather_object(stages, trace_of(kind, tensors), pipeline.get_group())
        return {name: tensor for stage in stages for name, tensor in stage.items()}


def run_layout(config: Config, launch: Launch, *, steps: int, checkpointer: Checkpointer | None = None) -> Trace:
    """Take training steps of a resolved config on all ranks, and with a checkpointer save after the last one.

    Every rank must call it. Each returns the trace of the full model.
    """
    run = TrainingRun(config, mesh.device_of(launch), checkpointer)
    scale, last_step = build_loss_scale(config.training).value, run.last_step + steps
    trace = run.trace_of_all_stages("initial weight", run.parameters)
    with progress("layout", total=steps, unit="steps", enabled=launch.rank == 0) as advance:
        for step in range(run.last_step + 1, last_step + 1):
            set_lr(run.optimizer, config.optimizer.lr * lr_factor(step, config.lr_scheduler))
            batches = run.loader.next()
            run.dataset_losses.begin_step()
            loss_sum, valid = run.train_step.forward_backward(batches, scale)
            run.dataset_losses.end_step(run.loader.position)
            dist.all_reduce(loss_sum)
            sums, counts = run.dataset_losses.totals().T
            norm = gradient_norm(run.parameters.values(), run.device)
            numbers = {"loss": loss_sum / valid, "losses of datasets": sums / counts.clamp(min=1), "norm": norm}
            trace |= trace_of(f"step {step}", numbers)
            gradients = {name: p.grad for name, p in run.parameters.items()}
            trace |= run.trace_of_all_stages(f"step {step} gradient", gradients)
            run.update(norm)
            advance(1)
    trace |= run.trace_of_all_stages("final weight", named_tensors(run.model))
    if checkpointer:
        checkpointer.save(last_step, run.model, run.optimizer, {"data": run.loader.state()})
    trace["validation loss"] = torch.tensor(run.train_step.validate(run.loader.next()), dtype=torch.float64)
    run.loader.close()
    return trace
