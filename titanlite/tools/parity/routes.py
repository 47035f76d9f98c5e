"""Send the tokens of a recorded step to the experts that the verified trainer recorded, or else to the routers' choice.

Rounding can change the choice between two experts with nearly the same score. A trainer's choices are right if their
scores equal the best scores within rounding. Both passes (in float64 and in the trainer's dtypes) use the recorded
choices, so that rounding changes no choice. Shapes: N tokens, E experts, K experts per token."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titanlite.config.schema import Model
from titanlite.model import Llama
from titanlite.techniques.moe.router import Router
from titanlite.tools.parity.recorded_step import BalanceLoss, RecordedStep


class Routes:
    """Sends the tokens of a forward to the recorded experts, and stores what the routers would choose. Without recorded
    experts, sends tokens to the experts that the routers choose."""

    def __init__(self, recorded: RecordedStep):
        self.recorded, self.sequences = recorded, torch.arange(len(recorded.tokens_BT))
        self.forwards: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        """By layer, for each forward: the scores of the experts that the router chooses, [N, K], the largest first; the
        scores of the experts that the tokens are sent to, likewise; and the router's choices, in ascending order."""

    def follow(self, model: Llama) -> None:
        """Make a model's routers choose recorded experts. `self.sequences`: rows of the batch in the next forward."""
        for name, router in routers(model).items():
            router.choose = functools.partial(self._choose, name, router.choose)

    def _choose(self, layer: str, choose: Callable[[Tensor], Tensor], scores_NE: Tensor) -> Tensor:
        taken_NK = chosen_NK = choose(scores_NE)
        if self.recorded.experts is not None:
            taken_NK = self.recorded.experts[layer][self.sequences].flatten(0, 1)
        best_NK, scores_NK = (
            scores_NE.gather(-1, experts_NK).double().sort(-1, descending=True).values
            for experts_NK in (chosen_NK, taken_NK)
        )
        self.forwards.setdefault(layer, []).append((best_NK, scores_NK, chosen_NK.sort(-1).values))
        return taken_NK

    def of_step(self, layer: str) -> list[Tensor]:
        """Return a layer's entries in `self.forwards`, concatenated over all tokens of the step."""
        return [torch.cat(each) for each in zip(*self.forwards[layer], strict=True)]

    def others(self, rounded: "Routes") -> tuple[int, int]:
        """Return how many choices (one per token and layer) differ from the recorded choices, and how many choices
        there are. Without recorded choices, those of `rounded` are used."""
        experts, n, n_choices = self.recorded.experts, 0, 0
        for layer in self.forwards:
            theirs = rounded.of_step(layer)[2] if experts is None else experts[layer].flatten(0, 1).sort(-1).values
            differs_N = (self.of_step(layer)[2] != theirs).any(-1)
            n, n_choices = n + int(differs_N.sum()), n_choices + len(differs_N)
        return n, n_choices

    def rows(self, rounded: "Routes") -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """Yield each layer's name, the scores of the recorded experts and of the best experts for the token where these
        differ most, and the largest relative rounding error of any token's best scores."""
        for layer in self.forwards if self.recorded.experts is not None else ():
            (best_NK, taken_NK, _), rounded_NK = self.of_step(layer), rounded.of_step(layer)[0]
            norm_N = best_NK.norm(dim=1)
            worst = int(((best_NK - taken_NK).norm(dim=1) / norm_N).argmax())
            yield layer, taken_NK[worst], best_NK[worst], ((best_NK - rounded_NK).norm(dim=1) / norm_N).max().item()


def routers(model: Llama) -> dict[str, Router]:
    found = {f"layers.{layer}": getattr(block.feed_forward, "router", None) for layer, block in model.layers.items()}
    return {name: router for name, router in found.items() if router is not None}


def with_balance_loss(model: Model, loss: BalanceLoss | None) -> Model:
    """Return a model's options with the weight of `loss`; if `loss` is None, the weight is 0."""
    weight = 0.0
    if loss is not None:
        # For all layers together, mean share * mean score is a sum over pairs of layers, divided by n_layers ** 2.
        n_layers = sum(map(model.has_experts, range(model.n_layers))) if loss.layers == "together" else 1
        weight = loss.weight * model.moe.n_experts_per_token / n_layers
    moe = model.moe.model_copy(update={"balance_loss_weight": weight, "z_loss_weight": 0.0})
    return model.model_copy(update={"moe": moe})


def set_loads(model: Llama, recorded: RecordedStep, sequences: Tensor, loss_scale: float) -> None:
    """Set the routers' loads, factors of the balance loss: how many tokens of `sequences` each expert has."""
    if (loss := recorded.step.balance_loss) is None:
        return
    found, n_experts = routers(model), recorded.model.moe.n_experts
    loads = {name: recorded.experts[name][sequences].flatten().bincount(minlength=n_experts) for name in found}
    for name, router in found.items():
        router.load = sum(loads.values()) if loss.layers == "together" else loads[name]
        router.tokens_per_step, router.loss_scale = recorded.tokens_BT.numel(), loss_scale
