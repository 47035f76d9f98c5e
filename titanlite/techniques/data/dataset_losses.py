"""The loss of each dataset of a mixture, summed from the token losses of training steps."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from titanlite.config.schema import Training
from titanlite.data.loader import Batch, Loader
from titanlite.loss import IGNORED
from titanlite.techniques.data.mixture import MixedSequences
from titanlite.train_step import Observer, TrainStep


class DatasetLosses(Observer):
    """Adds up the token losses of each dataset over training steps; each rank adds up its own tokens' losses. The
    output head records the token losses of each microbatch, in the order of this rank's sequences. The host reads the
    sums only in `totals`. `data_rank`: this rank's data-parallel index; `loader` has the position in the mixture."""

    def __init__(
        self, mixture: MixedSequences, loader: Loader, train_step: TrainStep, training: Training, *, data_rank: int
    ):
        self.mixture, self.loader, self.data_rank, self.device = mixture, loader, data_rank, train_step.device
        self.batch_size, self.degree = training.global_batch_size, train_step.parallelism.data_parallel_degree
        self.tokens = training.seq_len // train_step.parallelism.context_parallel_degree  # a rank's tokens per sequence
        self._recorded: list[Tensor] | None = None
        self._totals = self._zeros()
        if train_step.contributes_loss:
            output = train_step.model.output
            output.loss = functools.partial(output.loss, record=self._record)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.mixture.names), 2, dtype=torch.float64, device=self.device)

    def _record(self, losses_N: Tensor, targets_N: Tensor) -> None:
        if self._recorded is not None:
            both = torch.stack([losses_N.double(), (targets_N != IGNORED).double()], 1)
            self._recorded.append(both.unflatten(0, (-1, self.tokens)).sum(1))

    def before_backward(self, step: int) -> None:
        self._recorded = []

    def after_backward(self, step: int, batches: list[Batch], loss_sum: Tensor, *, is_test: bool) -> None:
        """Add a step's recorded losses, or none if one is not finite. The loader is at the end of this global batch."""
        recorded, self._recorded = self._recorded, None
        position = self.loader.position
        if recorded and not is_test:
            positions = range(position - self.batch_size + self.data_rank, position, self.degree)
            datasets = torch.tensor(self.mixture.datasets_of(positions))
            of_datasets = one_hot(datasets, len(self.mixture.names)).double().to(self.device, non_blocking=True)
            sums = torch.cat(recorded)
            self._totals += of_datasets.T @ sums.where(sums.isfinite().all(), 0)

    def totals(self) -> Tensor:
        """Return the sum of the token losses and the number of valid tokens of each dataset, [datasets, 2] in float64,
        over all ranks and all steps since `totals` was last called. Every rank must call `totals`."""
        totals, self._totals = self._totals, self._zeros()
        dist.all_reduce(totals)
        return totals

    def metrics(self) -> dict[str, float]:
        """Return each dataset's tokens and epochs read, and its mean loss (nats), by tag. Every rank must call this."""
        rows = zip(self.mixture.names, self.totals().tolist(), strict=True)
        losses = {f"data/{name}/loss": loss / n_tokens for name, (loss, n_tokens) in rows if n_tokens}
        return self.mixture.metrics(self.loader.position) | losses
