"""Pipeline parallelism: the model cut into stages by its modules' names, and the schedule that runs microbatches
through them (torch.distributed.pipelining).

GPipe (arXiv:1811.06965), 1F1B (PipeDream-flush, arXiv:2104.04473), interleaved 1F1B (the same, section 2.2), looped BFS
(arXiv:2211.05953), interleaved zero-bubble and ZBV (arXiv:2401.10241), DualPipeV (after DeepSeek-V3, arXiv:2412.19437).
One microbatch under GPipe is the naive split.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titanlite.config.stage_split import Schedule, rank_of_stage
from titanlite.data import Batch
from titanlite.model import Llama


def pipeline_stage(
    stage: Llama,
    number: int,
    n_stages: int,
    group: dist.ProcessGroup,
    *,
    hidden_shape: tuple[int, int, int],
    n_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PipelineStage:
    """A stage as torch's schedules take it. Arguments: see Pipeline."""
    # Shapes are given, so that none are inferred by running a microbatch. Tensors that need gradients say so.
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
    tokens = torch.empty(hidden_shape[0], n_tokens, dtype=torch.int64, device="meta")
    return PipelineStage(
        stage,
        number,
        n_stages,
        device,
        input_args=tokens if number == 0 else hidden,
        output_args=loss if number == n_stages - 1 else hidden,
        group=group,
    )


class Pipeline:
    """This rank's stages, and how microbatches pass through all ranks' stages.

    Args:
        stages: this rank's, by number, ascending.
        n_stages: of the whole model.
        group: the pipeline's ranks.
        n_microbatches: pieces that a rank's batch is cut into.
        hidden_shape: of what passes between stages, [microbatch, tokens of this rank, D].
        n_tokens: of a sequence on this rank, before tensor parallelism cuts it.
        dtype: of what passes between stages.
    """

    def __init__(
        self,
        stages: dict[int, Llama],
        *,
        n_stages: int,
        group: dist.ProcessGroup,
        schedule: Schedule,
        n_microbatches: int,
        hidden_shape: tuple[int, int, int],
        n_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.stages, self.n_stages, self.group, self.n_microbatches = stages, n_stages, group, n_microbatches
        self.hidden_shape, self.dtype, self.device = hidden_shape, dtype, device
        self._rank_of = dict(enumerate(rank_of_stage(schedule, group.size(), n_stages)))
        parts = [
            pipeline_stage(
                stage, number, n_stages, group, hidden_shape=hidden_shape, n_tokens=n_tokens, dtype=dtype, device=device
            )
            for number, stage in stages.items()
        ]
        kind = get_schedule_class(schedule)
        self._schedule = kind(
            parts if issubclass(kind, PipelineScheduleMulti) else parts[0],
            n_microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # the loss is divided by the number of tokens, and gradients only add up
        )
        self._loss_sum = self._valid = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def order(self) -> dict[int, list]:
        """Each rank's actions, where the schedule runs from such a list (private to torch: pipeline_order)."""
        return self._schedule.pipeline_order

    def _loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """The last stage has made the loss of a microbatch already."""
        self._loss_sum += loss.detach()
        return loss / self._valid

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of this batch's share of the loss to the parameters of all stages.

        Args:
            batch: the same on all ranks of the pipeline, on the device.
            valid: what the sum of token losses is divided by.

        Returns:
            Sum of the token losses, float64, on the rank with the last stage; 0 on the others.
        """
        self._valid = valid
        self._loss_sum = torch.zeros_like(valid)
        self._schedule.step(
            *((batch.tokens,) if 0 in self.stages else ()),
            target=batch.targets if self.n_stages - 1 in self.stages else None,
            return_outputs=False,
            **_beside_tokens(batch),
        )
        return self._loss_sum

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Sum of the token losses, as from `forward_backward`, without gradients."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        pieces = [part.chunk(self.n_microbatches) if part is not None else None for part in batch]
        pieces = [Batch(*(part[i] if part else None for part in pieces)) for i in range(self.n_microbatches)]
        handed_over: list[Tensor] = []  # to the next stage, where that is on this rank too
        sending: list[tuple[dist.Work, Tensor]] = []
        me = self.group.rank()
        for number, stage in self.stages.items():
            before, after = self._rank_of.get(number - 1), self._rank_of.get(number + 1)
            waiting: list[Tensor] = []
            for piece in pieces:
                hidden = piece.tokens
                if before == me:
                    hidden = handed_over.pop(0)
                elif before is not None:
                    hidden = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)
                    dist.recv(hidden, group=self.group, group_src=before)
                hidden = stage(hidden, **_beside_tokens(piece))
                if after is None:
                    loss_sum += hidden
                elif after == me:
                    handed_over.append(hidden)
                else:
                    waiting.append(hidden.contiguous())
                    if before != after:
                        sending += self._send(waiting, after)
            # From and to one and the same rank: all is received before any is sent, since NCCL wants messages between
            # two ranks in one order on both sides.
            sending += self._send(waiting, after)
        for work, _ in sending:
            work.wait()
        return loss_sum

    def _send(self, tensors: list[Tensor], to: int | None) -> list[tuple[dist.Work, Tensor]]:
        """Begin to send, and empty the list."""
        sent = [(dist.isend(tensor, group=self.group, group_dst=to), tensor) for tensor in tensors]
        tensors.clear()
        return sent


def _beside_tokens(batch: Batch) -> dict[str, Tensor]:
    beside = {"positions": batch.positions, "document_positions": batch.document_positions, "targets": batch.targets}
    return {name: part for name, part in beside.items() if part is not None}
