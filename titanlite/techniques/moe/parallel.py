"""Expert parallel (EP, GShard, arXiv:2006.16668): ranks have different experts and send each other tokens.

The ranks of an expert-parallel group are neighbours among those that share the weights' shards and, under tensor
parallel, the layer: fsdp x tp = efsdp x ep. Of a mixture of experts

    with EP       each rank routes its own tokens, under tensor parallel its shard of the sequence. Experts are sharded
                  over ep, and each by FSDP over efsdp. Router and shared experts are on every rank.
    without EP    under tensor parallel the sequence is gathered, each rank has a shard of the channels of every expert,
                  routed or shared, and the sums over ranks are scattered over the sequence.
"""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from titanlite.techniques.moe import counts
from titanlite.techniques.moe.layer import MixtureOfExperts, inverse, order_by_expert, permute

SEQUENCE = Shard(0)  # of an activation [N, D]


def apply_expert_parallel(blocks: Iterable[nn.Module], tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
    """Shard the mixtures of experts of these blocks over one-dimensional meshes, in place; None: there is no such
    axis."""
    for block in blocks:
        if isinstance(block.feed_forward, MixtureOfExperts):
            _shard(block.feed_forward, tensor, expert)


def _shard(module: MixtureOfExperts, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
    experts = module.experts
    outputs, inputs = (Shard(0), Shard(0)) if expert else (Shard(1), Shard(2))
    for name, placement in (("w1", outputs), ("w2", inputs), ("w3", outputs)):
        _distribute(experts, name, expert or tensor, placement)
    experts.weights = lambda: tuple(local_weight(weight) for weight in (experts.w1, experts.w2, experts.w3))
    if expert:
        module.dispatch = functools.partial(_exchange, experts, expert.get_group())
    if tensor:
        _distribute(module.router, "weight", tensor, Replicate())
        module.router.local_weight = lambda: local_weight(module.router.weight)
        for name, placement in (("w1", Shard(0)), ("w2", Shard(1)), ("w3", Shard(0))) if module.shared else ():
            layer = getattr(module.shared, name)
            _distribute(layer, "weight", tensor, Replicate() if expert else placement)
            layer.forward = functools.partial(_local_linear, layer)
        # Without EP each rank routes all tokens. Then the auxiliary losses of one rank count.
        module.router.contributes = expert is not None or tensor.get_local_rank() == 0
        module.forward = functools.partial(_on_own_tokens if expert else _on_all_tokens, module.forward, tensor)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    weight = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(weight))


def local_weight(weight: DTensor) -> Tensor:
    """Return this rank's shard of a weight. On ranks that all have a weight, its gradient is the sum over them."""
    return weight.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in weight.placements])


def _on_own_tokens(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x_ND: Tensor) -> Tensor:
    return forward(x_ND.to_local())


def _on_all_tokens(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x_ND: Tensor) -> Tensor:
    """Gather the sequence, whose gradients are sums over ranks, and scatter the output, which is one as well."""
    gathered_ND = x_ND.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return DTensor.from_local(forward(gathered_ND), mesh, [Partial()]).redistribute(placements=[SEQUENCE]).to_local()


def _local_linear(layer: nn.Linear, x_ND: Tensor) -> Tensor:
    return F.linear(x_ND, local_weight(layer.weight))


def _exchange(experts: nn.Module, group: dist.ProcessGroup, x_MD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
    """Start to send rows to the ranks that have their experts. Return a function that waits for those of other ranks,
    computes, and sends the results back.

    The rows of rank r's experts are neighbours, since experts are sharded in order. What arrives is sorted by rank, and
    within a rank by expert; it is sorted by expert before it is computed. The host waits for the device once.
    """
    n_ranks = group.size()
    received_RE = all_to_all_single(counts_E, None, None, group).view(n_ranks, -1)
    sent, received = counts.read(torch.stack((counts_E.view(n_ranks, -1).sum(1), received_RE.sum(1))))
    in_flight = _all_to_all(x_MD, received, sent, group)

    def _compute() -> Tensor:
        n_experts = received_RE.shape[1]
        of_block = torch.arange(n_experts, device=x_MD.device).repeat(n_ranks)  # the expert of each rank's rows for it
        expert_of_row = of_block.repeat_interleave(received_RE.flatten(), output_size=sum(received))
        order = order_by_expert(expert_of_row, n_experts)
        back = inverse(order)
        y = permute(experts(permute(in_flight, order, back), received_RE.sum(0)), back, order)
        return _all_to_all(y, sent, received, group)

    return _compute


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows, `sent[r]` to rank r and `received[r]` from it."""
    return all_to_all_single_autograd(x.contiguous(), received, sent, group)
