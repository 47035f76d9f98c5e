"""DiLoCo (arXiv:2311.08105): replica groups that synchronize every fault_tolerance.sync_steps steps, for slow links.

Between two synchronizations a group trains by itself. Then groups average by how much their weights have changed, and
each takes the same outer step with it, from the weights of the last synchronization: SGD with Nesterov momentum. A
group that joins waits for the next synchronization, adds nothing to its average, and gets the others' state.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint.tensors import plain_tensors
from titanlite.config.errors import TrainingError
from titanlite.config.schema import FaultTolerance
from titanlite.launch.progress import mark
from titanlite.parallel.shards import local_shard
from titanlite.techniques.replicas.torchft import AskedToStop, Replicas
from titanlite.train_step import OneGroup, SavedState


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

    Args:
        outer: the outer optimizer. Its state is the same in all groups.
        global_batch_size: sequences of a step, of all groups.
        arguments: those of Replicas.
    """

    def __init__(self, outer: OuterOptimizer, global_batch_size: int, *arguments: Any):
        super().__init__(*arguments)
        self.outer, self._global_batch_size = outer, global_batch_size
        self.step, self._synchronized, self._batches = 0, 0, 0

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the outer optimizer, by name."""
        return self.outer.tensors()

    def begin(
        self, last_step: int, saved: Mapping[str, Any], state: SavedState, abandon: Callable[[int], None]
    ) -> None:
        """Connect with the other groups, and begin after a step, which may be between two synchronizations."""
        super().begin(last_step, saved, state, abandon)
        self.step, self._synchronized, self._batches = last_step, last_step, self.manager.batches_committed()
        if saved.get("synchronized_step") is None:
            self.outer.begin()
        else:
            self._load_counts(saved)
        self._set_torchft_step(goes_on=last_step > self._synchronized)

    def _load_counts(self, state: Mapping[str, Any]) -> None:
        self._batches, self._synchronized = state["batches_of_groups"], state["synchronized_step"]

    def _set_torchft_step(self, *, goes_on: bool) -> None:
        """Set torchft's number of the step, by which it decides which groups are behind: twice the step of the last
        synchronization, plus 1 if this group has gone on from there, or goes on now. A group that is started is behind
        those that go on, so it always gets their state."""
        self.manager.load_state_dict({"step": 2 * self._synchronized + goes_on, "batches_committed": self._batches})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the groups, as plain JSON."""
        counts = {"batches_of_groups": self._batches, "synchronized_step": self._synchronized}
        return {**counts, "history": self._history}

    @property
    def batches(self) -> int:
        """Number of batches of groups that the weights are trained on: those of all groups up to the last
        synchronization, and this group's own since."""
        return self._batches + self.step - self._synchronized

    def steps(self, last_step: int, last: int) -> Iterator[int]:
        """Yield the number of each step until `last` has been taken.

        Raises:
            TrainingError: as `updated` does, and if this group resumes from a checkpoint of the step `last` that was
                saved between two synchronizations.
        """
        self._last = last
        if self.step >= last and self.step > self._synchronized:
            problem = f"the weights after step {self.step} are of this group alone, since step {self._synchronized}"
            raise TrainingError(f"{problem}; raise training.steps, so that groups synchronize")
        if self.step < last and (self.step == self._synchronized or self._is_due(self.step)):
            self._synchronize(has_trained=self.step > self._synchronized)
        while self.step < last:
            yield self.step + 1

    def _is_due(self, step: int) -> bool:
        """Return whether groups synchronize after a step."""
        return step == self._last or step % self.section.sync_steps == 0

    # Between two synchronizations a step is one group's: it divides the losses by its own number of tokens.
    count = OneGroup.count
    totals = OneGroup.totals

    def updated(self, step: int, *, stopping: bool) -> bool:
        """Synchronize, if it is time. A group that is asked to stop, also while it waits for others, leaves that to its
        next start, unless the training ends with it.

        Raises:
            AskedToStop: if the training ends with it.
            TrainingError: if this group has other weights than the others had after the last synchronization, or some
                that are not finite.
        """
        self.step = step
        if not self._is_due(step) or (stopping and step < self._last):
            return True
        try:
            return self._synchronize(has_trained=True)
        except AskedToStop:
            if step == self._last:
                raise
            self.stopping = True
            return True

    def _synchronize(self, *, has_trained: bool) -> bool:
        """Take the outer step with the groups that live. `has_trained`: whether this group has taken steps since the
        last one. Return False if these are lost, as others have gone on without it."""
        counts, committed = has_trained, False
        while not committed:
            self._join()
            healed = self._healed
            counts = has_trained and not healed
            mark("synchronizing replica groups", self.step)
            n, step, gradients = 0, self._synchronized, list[Tensor]()
            if sums := self._exchange([counts, counts * self.step], self._synchronized):
                n = round(sums[0])
            if n:
                step = self._common_step(sums[1] / n, counts=counts)
                gradients = self._summed_gradients(counts=counts)
            committed = self._committed(step, f"step {self.step}: not synchronized")
        if n:
            for gradient in gradients:
                gradient.div_(n)
            self.outer.step(gradients)
            self._batches += n * (step - self._synchronized)
        if healed:
            self._start_data(self._position + (step - self._synchronized) * self._global_batch_size)
        self.step = self._synchronized = step
        self._set_torchft_step(goes_on=True)
        return counts or not has_trained

    def _common_step(self, mean: float, *, counts: bool) -> int:
        """Return the step up to which the groups have trained, which is the mean of theirs."""
        if counts and mean != self.step:
            raise TrainingError(f"step {self.step}: other replica groups synchronize after another step")
        return round(mean)

    def _summed_gradients(self, *, counts: bool) -> list[Tensor]:
        """Return the sum of the groups' outer gradients. If it fails, `_committed` returns False."""
        gradients = self.outer.gradients()
        if counts and not all(gradient.isfinite().all() for gradient in gradients):
            raise TrainingError(f"step {self.step}: the weights are not finite, and are not sent to other groups")
        self._sum_shards(gradients)
        return gradients

    def _start_data(self, position: int) -> None:
        """Go on in the data with the sequence of this number."""
        state = self._state.save()
        self._state.load({**state, "data": {**state["data"], "next_sequence": position}})

    def _shared_tensors(self) -> list[Tensor]:
        """Return the shards of the outer optimizer's state: nothing else is the same in all groups."""
        return plain_tensors(self.outer.tensors())

    _sent_tensors = _shared_tensors

    def _saved(self) -> dict[str, Any]:
        """Return this rank's outer state, and where the data was at the last synchronization. Inner optimizer states
        are not sent: torchft sends each rank of a group the state of another group, and they would not fit together."""
        position = self._state.save()["data"]["next_sequence"]
        position -= (self.step - self._synchronized) * self._global_batch_size
        return {"tensors": self._sent_tensors(), "position": position, **self.state()}

    def _replace_state(self, saved: dict[str, Any]) -> None:
        """Set the weights to those of the last synchronization, which another group has sent."""
        self.outer.restore()
        self._abandon(self._synchronized)
        self._load_counts(saved)
        self._position = saved["position"]
