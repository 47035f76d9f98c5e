"""Hold a config's layout against one process: loss, gradient norm, every gradient, every weight.

`run` takes some steps with the same parts and the same functions as train.py, cut over the ranks of the launch.
`run_alone` takes the same steps in one process with none of them: plain tensors, the whole global batch in one forward,
torch's own clipping. Equal means that the layout computes what the model means.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite import build, mesh
from titanlite.config import Config, Launch
from titanlite.init import init_weights
from titanlite.loss import IGNORED, cross_entropy_sum
from titanlite.model import Llama
from titanlite.optimizer import clip_factor, gradient_norm, lr_factor, scale_gradients, set_lr
from titanlite.step import forward_backward


@dataclasses.dataclass
class Trace:
    """What some steps computed: full tensors on the CPU, by parameter name."""

    initial: dict[str, Tensor]
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    """A step's gradients before clipping."""
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class ProofSequences:
    """Random tokens by global index, with a very different number of valid targets in each sequence: a mean over
    ranks or microsteps instead of over tokens shows at once."""

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int):
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.RandomState((self.seed, index))
        tokens = generator.randint(self.vocab_size, size=self.seq_len + 1)
        targets = tokens[1:].copy()
        targets[generator.randint(1, self.seq_len + 1) :] = IGNORED
        return tokens[:-1], targets

    def read(
        self, first: int, stride: int, streams: dict[int, Any]
    ) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], None]]:
        """As data.PackedSequences.read."""
        while True:
            yield self[first], None
            first += stride


def _sequences(config: Config) -> ProofSequences:
    return ProofSequences(vocab_size=config.model.vocab_size, seq_len=config.training.seq_len, seed=config.debug.seed)


def run(config: Config, launch: Launch, *, steps: int) -> Trace:
    """Take some steps over all ranks of the process group. Every rank must call it, and each gets the trace.

    Args:
        config: as `config.check` resolved it.
    """
    device = mesh.device_of(launch)
    model = build.build_model(config, build.build_mesh(config, device), device)
    optimizer = build.build_optimizer(config, model)
    loader = build.build_loader(config, _sequences(config), rank=launch.rank, device=device, state=None)
    parameters = list(model.parameters())
    trace = Trace(initial=_whole(dict(model.named_parameters())))
    for step in range(1, steps + 1):
        set_lr(optimizer, config.optimizer.lr * lr_factor(step, **config.lr_scheduler.model_dump()))
        loss_sum, valid = forward_backward(
            model,
            loader.next(),
            device=device,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            reduce_gradients=config.parallelism.fsdp_reduce_gradients,
        )
        dist.all_reduce(loss_sum)
        norm = gradient_norm(parameters)
        trace.losses.append((loss_sum / valid).item())
        trace.norms.append(norm.item())
        trace.gradients.append(_whole({name: p.grad for name, p in model.named_parameters()}))
        scale_gradients(parameters, clip_factor(norm, config.training.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    loader.close()
    trace.weights = _whole(dict(model.named_parameters()))
    return trace


def run_alone(config: Config, device: torch.device, *, steps: int) -> Trace:
    """Take the same steps in this process alone, without FSDP, accumulation or anything distributed."""
    training, dtype = config.training, getattr(torch, config.training.dtype)
    with torch.device("meta"):
        model = Llama(**build.model_dimensions(config), max_seq_len=training.seq_len).to(dtype)
    model.materialize(device)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    optimizer = build.build_optimizer(config, model)
    sequences, batch_size = _sequences(config), training.global_batch_size
    trace = Trace(initial=_whole(dict(model.named_parameters())))
    for step in range(1, steps + 1):
        set_lr(optimizer, config.optimizer.lr * lr_factor(step, **config.lr_scheduler.model_dump()))
        rows = [sequences[index] for index in range((step - 1) * batch_size, step * batch_size)]
        tokens, targets = (torch.from_numpy(np.stack(parts)).to(device) for parts in zip(*rows, strict=True))
        loss = cross_entropy_sum(model(tokens), targets) / (targets != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append(_whole({name: p.grad for name, p in model.named_parameters()}))
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm).item())
        optimizer.step()
    trace.weights = _whole(dict(model.named_parameters()))
    return trace


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, gathered where they are shards."""
    gathered = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in gathered.items()}


def differences(one: Trace, other: Trace) -> dict[str, float]:
    """Largest absolute difference of each thing compared, in the order in which it was computed: so the first one
    that is too large is where the runs part. Infinite where one of them lacks a name or has no number."""
    found: dict[str, float] = {}

    def compare(what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        for name in a | b:
            same_shape = name in a and name in b and a[name].shape == b[name].shape
            difference = (a[name] - b[name]).abs().max().item() if same_shape else float("inf")
            found[f"{what} {name}"] = difference if difference == difference else float("inf")

    compare("initial weight", one.initial, other.initial)
    for step, (a, b) in enumerate(zip(one.gradients, other.gradients, strict=True), 1):
        scalars = [
            {"loss": torch.tensor(trace.losses[step - 1]), "norm": torch.tensor(trace.norms[step - 1])}
            for trace in (one, other)
        ]
        compare(f"step {step}", *scalars)
        compare(f"step {step} gradient", a, b)
    compare("final weight", one.weights, other.weights)
    return found
