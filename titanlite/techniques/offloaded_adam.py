"""Adam with optimizer states in host memory; the CPU takes the optimizer step (ZeRO-Offload, arXiv:2101.06840). Weights
and gradients stay on the device. While the CPU updates one shard by torch's fused Adam, the next shard and its gradient
are copied to host memory, and the previous shard is copied back."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.schema import Optimizer
from titanlite.parallel.shards import local_shard

STATES = "exp_avg", "exp_avg_sq"
SLOTS = 3
"""Number of shards in host memory at a time: one is copied from the device, one is updated, and one is copied back."""


class Slot:
    """Buffers in host memory for a shard of a weight and its gradient, pinned if the device is a GPU."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        on_cuda = device.type == "cuda"
        self.weight, self.gradient = (torch.empty(size, dtype=dtype, pin_memory=on_cuda) for _ in range(2))
        self.copied, self.free = (torch.cuda.Event() if on_cuda else None for _ in range(2))

    def wait_until_copied(self) -> None:
        if self.copied:
            self.copied.synchronize()

    def wait_until_free(self) -> None:
        if self.free:
            self.free.synchronize()


class OffloadedAdam(torch.optim.Optimizer):
    """Adam or AdamW with optimizer states in host memory, which have the type and placements of their weight."""

    _step_supports_amp_scaling = True  # `step` reads grad_scale and found_inf

    def __init__(self, groups: Iterable[dict[str, Any]], optimizer: Optimizer):
        betas = optimizer.beta1, optimizer.beta2
        super().__init__(groups, {"lr": optimizer.lr, "betas": betas, "eps": optimizer.eps})
        self._kernel = torch._fused_adamw_ if optimizer.name == "AdamW" else torch._fused_adam_
        shards = [local_shard(weight) for group in self.param_groups for weight in group["params"]]
        self._device, size = shards[0].device, max(shard.numel() for shard in shards)
        self._slots = [Slot(size, shards[0].dtype, self._device) for _ in range(SLOTS)]
        on_cuda = self._device.type == "cuda"
        self._to_host, self._to_device = (torch.cuda.Stream(self._device) if on_cuda else None for _ in range(2))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with gradients divided by `grad_scale`; change nothing if `found_inf` is 1."""
        scaling = {name: getattr(self, name).cpu() for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        if self._to_host:
            self._to_host.wait_stream(torch.cuda.current_stream(self._device))  # wait for the gradients
        work = [(group, weight) for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        for number in range(len(work) + 1):
            if number < len(work):
                self._copy_to_host(work[number][1], self._slots[number % SLOTS])
            if number:
                self._update(*work[number - 1], self._slots[(number - 1) % SLOTS], scaling)
        if self._to_device:
            torch.cuda.current_stream(self._device).wait_stream(self._to_device)

    def _copy_to_host(self, weight: nn.Parameter, slot: Slot) -> None:
        slot.wait_until_free()
        shard, gradient = local_shard(weight), local_shard(weight.grad)
        with torch.cuda.stream(self._to_host):  # on a CPU _to_host is None, which torch.cuda.stream ignores
            slot.weight[: shard.numel()].copy_(shard.flatten(), non_blocking=True)
            slot.gradient[: shard.numel()].copy_(gradient.flatten(), non_blocking=True)
            if slot.copied:
                slot.copied.record()

    def _update(self, group: dict[str, Any], weight: nn.Parameter, slot: Slot, scaling: dict[str, Tensor]) -> None:
        shard, state = local_shard(weight), self._state_of(weight)
        size = shard.numel()
        slot.wait_until_copied()
        state["step"] += 1 - scaling.get("found_inf", 0)
        own = slot.weight[:size], slot.gradient[:size], *(local_shard(state[name]).view(-1) for name in STATES)
        (beta1, beta2), lists = group["betas"], [[tensor] for tensor in own]
        numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        numbers |= {"weight_decay": group["weight_decay"], "amsgrad": False, "maximize": False}
        self._kernel(*lists, [], [state["step"]], **numbers, **scaling)
        with torch.cuda.stream(self._to_device):
            shard.copy_(slot.weight[:size].view(shard.shape), non_blocking=True)
            if slot.free:
                slot.free.record()

    def _state_of(self, weight: nn.Parameter) -> dict[str, Tensor]:
        if not (state := self.state[weight]):
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(weight, device="cpu") for name in STATES}
        return state
