"""Pipeline parallel (PP): a schedule of torch.distributed.pipelining runs microbatches through the stages of a model.
Schedules: GPipe (arXiv:1811.06965), 1F1B (PipeDream-flush) and interleaved 1F1B (both arXiv:2104.04473), looped BFS
(arXiv:2211.05953), interleaved zero bubble and ZBV (arXiv:2401.10241), DualPipeV (DeepSeek-V3, arXiv:2412.19437)."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils._pytree import register_pytree_node

from titanlite.config.schema import Parallelism
from titanlite.config.stage_split import rank_of_stage
from titanlite.data.loader import Batch
from titanlite.launch.progress import alive
from titanlite.model import Documents, Llama
from titanlite.parallel.fsdp import reshard
from titanlite.torch_workarounds import open_communicator


def pipeline_stage(
    stage: Llama,
    number: int,
    parallelism: Parallelism,
    *,
    group: dist.ProcessGroup,
    hidden_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> PipelineStage:
    """Return the PipelineStage that torch's schedules need. Keyword arguments: as for PipelineRunner."""
    # From example inputs and outputs, torch knows shapes and which tensors need gradients without running a microbatch.
    n_tokens = hidden_shape[0] * parallelism.tensor_parallel_degree  # a tp rank sends only its shard of the tokens
    batch_size = parallelism.pipeline_parallel_microbatch_size
    tokens = torch.empty(batch_size, n_tokens // batch_size, dtype=torch.int64, device="meta")
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
    n_stages = parallelism.n_stages
    inputs = tokens if number == 0 else hidden
    outputs = loss if number == n_stages - 1 else hidden
    return PipelineStage(stage, number, n_stages, device, input_args=inputs, output_args=outputs, group=group)


@dataclasses.dataclass(eq=False)
class PipelineRunner:
    """Runs microbatches through the pipeline stages of this rank."""

    stages: dict[int, Llama]
    """This rank's stages by stage number, ascending."""
    parallelism: Parallelism
    _: dataclasses.KW_ONLY
    group: dist.ProcessGroup
    n_microbatches: int
    hidden_shape: tuple[int, int]
    """Shape of the activations between stages: [tokens of a microbatch on this rank, D]."""
    dtype: torch.dtype
    device: torch.device
    compiles: bool = False
    """Whether `prepare` calls `warm_up`."""
    validates: bool = False
    """Whether `warm_up` also compiles the stages without gradients, for `forward`."""

    def __post_init__(self) -> None:
        schedule = self.parallelism.pipeline_parallel_schedule
        self._rank_of = dict(enumerate(rank_of_stage(schedule, self.group.size(), self.parallelism.n_stages)))
        options = {"group": self.group, "hidden_shape": self.hidden_shape, "dtype": self.dtype, "device": self.device}
        stages = [pipeline_stage(stage, number, self.parallelism, **options) for number, stage in self.stages.items()]
        schedule_class = get_schedule_class(schedule)
        stage_or_stages = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
        # scale_grads=False: `_loss` has already divided by the global number of tokens.
        self._schedule = schedule_class(stage_or_stages, self.n_microbatches, loss_fn=self._loss, scale_grads=False)
        self._loss_sum = self._valid = torch.zeros((), dtype=torch.float64, device=self.device)
        open_communicator(self.group, self._loss_sum)
        for stage in self.stages.values():
            stage.register_forward_pre_hook(lambda *_: alive())  # the watchdog counts each microbatch as progress

    @property
    def order(self) -> dict[int, list]:
        """Return each rank's actions, if the schedule lists them, from the schedule's private `pipeline_order`."""
        return self._schedule.pipeline_order

    def _loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Divide the sum of token losses, the last stage's output for a microbatch, by the number of valid tokens."""
        self._loss_sum += loss.detach()
        return loss / self._valid

    def prepare(self, batch: Batch) -> None:
        if self.compiles:
            self.warm_up(batch.to(self.device))
            self.compiles = False

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of (sum of this batch's token losses) / valid to the parameters of all stages. Return the
        sum in float64 on the rank with the last stage, 0 on others. All ranks of a pipeline pass the same batch."""
        self._valid, self._loss_sum = valid, torch.zeros_like(valid)
        self._schedule.step(
            *((batch.tokens,) if 0 in self.stages else ()),
            target=batch.targets if self.parallelism.n_stages - 1 in self.stages else None,
            return_outputs=False,
            **batch.inputs(),
        )
        return self._loss_sum

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the token losses as `forward_backward` does, without gradients. Under any schedule, stage s
        computes microbatch t - s at tick t. A rank sends all messages of a tick as one batch: single messages could
        wait for each other, and NCCL would open a communicator for each pair of ranks."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        microbatches, n_stages = self._split(batch), self.parallelism.n_stages
        outputs: dict[int, Tensor] = {}  # stage outputs of the previous tick, by the number of the next stage
        for tick in range(len(microbatches) + n_stages - 1):
            due = [number for number in self.stages if 0 <= tick - number < len(microbatches)]
            inputs = {number: outputs.pop(number) for number in due if number in outputs}  # both stages are on one rank
            received = [number for number in due if number and number not in inputs]
            inputs |= {n: torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device) for n in received}
            messages = [(dist.isend, outputs[number], self._rank_of[number]) for number in outputs]
            messages += [(dist.irecv, inputs[number], self._rank_of[number - 1]) for number in received]
            batched = [dist.P2POp(way, x, group=self.group, group_peer=peer) for way, x, peer in messages]
            for work in dist.batch_isend_irecv(batched) if batched else []:
                work.wait()
            outputs = {}
            for number in due:
                microbatch = microbatches[tick - number]
                output = self.stages[number](inputs.get(number, microbatch.tokens), **microbatch.inputs())
                outputs[number + 1] = output.contiguous()
            loss_sum += outputs.pop(n_stages, 0)
        return loss_sum

    def warm_up(self, batch: Batch) -> None:
        """Compile all stages of this rank on one microbatch, without communication. No gradients remain. Without this
        call, each stage would compile when its first input arrives, and later stages would time out."""
        microbatch = self._split(batch)[0]
        for number, stage in self.stages.items():
            for trains in (True, False) if self.validates else (True,):
                hidden = torch.zeros(self.hidden_shape, dtype=self.dtype, device=self.device, requires_grad=trains)
                with torch.set_grad_enabled(trains):
                    output = stage(hidden if number else microbatch.tokens, **microbatch.inputs())
                if trains:
                    output.backward(torch.zeros_like(output))
            reshard(stage)
            stage.zero_grad()

    def _split(self, batch: Batch) -> list[Batch]:
        fields = [[None] * self.n_microbatches if x is None else x.chunk(self.n_microbatches) for x in batch]
        return [Batch(*microbatch) for microbatch in zip(*fields, strict=True)]


# A schedule splits tensor arguments into microbatches and repeats other arguments. It also splits Documents, which is
# therefore registered as a pytree node. The module torch.utils._pytree is private (tested with torch 2.13).
register_pytree_node(Documents, lambda each: ([each.positions_BT], None), lambda tensors, _: Documents(*tensors))
