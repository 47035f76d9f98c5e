"""DiLoCo (arXiv:2311.08105): replica groups that synchronize every fault_tolerance.sync_steps steps, for slow links.

Between two synchronizations a group trains by itself. Then groups average by how much their weights have changed, and
each takes the same outer step with it, from the weights of the last synchronization: SGD with Nesterov momentum. A
group that joins waits for the next synchronization, adds nothing to its average, and gets the others' state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.fault_tolerance_schema import FaultTolerance
from titanlite.errors import TrainingError
from titanlite.fault_tolerance import AskedToStop, Replicas, plain_tensors
from titanlite.progress import mark
from titanlite.shards import local_shard


class OuterOptimizer:
    """SGD with Nesterov momentum on the weights of the last synchronization. These and the momentum are in host memory,
    sharded like the weights and of their type.

    Args:
        weights: this rank's parameters by name.
        section: outer_lr and outer_momentum.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], section: FaultTolerance):
        self.section, self.weights = section, dict(weights)
        self.synchronized, self.momentum = (
            {name: torch.zeros_like(weight.detach(), device="cpu") for name, weight in self.weights.items()}
            for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has, by name."""
        states = {"weights": self.synchronized, "momentum": self.momentum}
        return {f"outer.{kind}.{name}": tensor for kind, each in states.items() for name, tensor in each.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Take the weights as they are for those of a synchronization."""
        for synchronized, weight in self._pairs():
            synchronized.copy_(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the weights to those of the last synchronization."""
        for synchronized, weight in self._pairs():
            weight.copy_(synchronized)

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the shards of the outer gradient, in host memory: the last synchronization's weights minus the weights
        now."""
        return [synchronized - weight.cpu() for synchronized, weight in self._pairs()]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Take a step from the last synchronization's weights, and set the weights to its result."""
        lr, factor = self.section.outer_lr, self.section.outer_momentum
        momenta = map(local_shard, self.momentum.values())
        for (synchronized, weight), momentum, gradient in zip(self._pairs(), momenta, gradients, strict=True):
            momentum.mul_(factor).add_(gradient)
            synchronized.sub_(gradient.add_(momentum, alpha=factor), alpha=lr)
            weight.copy_(synchronized)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, weight in self.weights.items():
            yield local_shard(self.synchronized[name]), local_shard(weight.detach())


class DiLoCo(Replicas):
    """Connects this rank's group with the others every sync_steps steps. Every rank of a group must make the same
    calls.

    torchft sends a newcomer the state of a group whose number is largest: twice the step of its last synchronization,
    plus 1 once the group is connected. So a group that is started never takes part with a state of its own if another
    one is training.
    """

    def __init__(self, outer: OuterOptimizer, *arguments: Any):
        super().__init__(*arguments)
        self.outer, self.step, self._last, self._synchronized, self._batches = outer, 0, 0, 0, 0

    def continue_from(self, last_step: int, saved: dict[str, Any], *state: Any) -> None:
        """Begin after a step, which may be between two synchronizations."""
        super().continue_from(last_step, saved, *state)
        self.step = last_step
        self._batches, self._synchronized = self.manager.batches_committed(), last_step
        if saved.get("synchronized_step") is None:
            self.outer.begin()
        else:
            self._load_numbers(saved)
        self._set_number(connected=last_step > self._synchronized)

    def _load_numbers(self, state: dict[str, Any]) -> None:
        self._batches, self._synchronized = state["batches_of_groups"], state["synchronized_step"]

    def _set_number(self, *, connected: bool) -> None:
        self.manager.load_state_dict({"step": 2 * self._synchronized + connected, "batches_committed": self._batches})

    def state(self) -> dict[str, Any]:
        return {"batches_of_groups": self._batches, "synchronized_step": self._synchronized}

    @property
    def batches(self) -> int:
        """Number of batches of groups that the weights are trained on: those of all groups up to the last
        synchronization, and this group's own since."""
        return self._batches + self.step - self._synchronized

    def steps(self, last: int) -> Iterator[int]:
        """Yield the number of each step until `last` has been taken.

        Raises:
            TrainingError: as `updated` does.
        """
        self._last = last
        if self._is_due(self.step) and self.step < last:
            self._synchronize(has_trained=self.step > self._synchronized)
        while self.step < last:
            yield self.step + 1

    def _is_due(self, step: int) -> bool:
        return step in (self._synchronized, self._last) or step % self.section.sync_steps == 0

    def count(self, valid: Tensor) -> None:
        """Do nothing: a group divides the losses of a step by its own number of tokens."""

    def sum_gradients(self, parameters: Any) -> None:
        """Do nothing: a step is one group's."""

    def agree(self, loss_sum: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return loss_sum, norm

    def commits(self) -> bool:
        return True

    def updated(self, step: int) -> bool:
        """Synchronize, if it is time. A group that is asked to stop while it waits for others leaves that to its next
        start, unless the training ends with it.

        Raises:
            AskedToStop: if the training ends with it.
            TrainingError: if this group has other weights than the others had after the last synchronization, or some
                that are not finite.
        """
        self.step = step
        if not self._is_due(step):
            return True
        try:
            return self._synchronize(has_trained=True)
        except AskedToStop:
            if step == self._last:
                raise
            self.stopping = True
            return True

    def _synchronize(self, *, has_trained: bool) -> bool:
        """Take the outer step with the groups that live. Return whether the steps that this group has trained, if it
        has, are part of it."""
        was_training, committed = has_trained, False
        while not committed:
            self._join()
            has_trained = has_trained and not self._healed
            mark("synchronizing replica groups", self.step)
            n, step, gradients = 0, self._synchronized, list[Tensor]()
            if sums := self._exchange([has_trained, has_trained * self.step], self._synchronized):
                n = round(sums[0])
            if n:
                step, gradients = round(sums[1] / n), self._summed_gradients(has_trained=has_trained)
            committed = self._committed(step, "synchronized")
        if n:
            for gradient in gradients:
                gradient.div_(n)
            self.outer.step(gradients)
            self._batches += n * (step - self._synchronized)
            self._synchronized = step
        self.step = self._synchronized
        self._set_number(connected=True)
        return has_trained or not was_training

    def _summed_gradients(self, *, has_trained: bool) -> list[Tensor]:
        """Return the sum of the groups' outer gradients. If it fails, `_committed` returns False."""
        gradients = self.outer.gradients()
        if has_trained and not all(gradient.isfinite().all() for gradient in gradients):
            raise TrainingError(f"the weights are not finite after step {self.step}, and are not sent to other groups")
        self._sum_shards(list(gradients))
        return gradients

    def _shared_tensors(self) -> list[Tensor]:
        return plain_tensors(self.outer.tensors())

    def _sent_tensors(self) -> list[Tensor]:
        return plain_tensors(self.outer.tensors() | self._optimizer_states())

    def _load(self, saved: dict[str, Any]) -> None:
        """Continue from the state of another group."""
        super()._load(saved)
        self._load_numbers(saved["state"])
        self.outer.restore()
