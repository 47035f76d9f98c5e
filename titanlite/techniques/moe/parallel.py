"""Expert parallel (EP, GShard, arXiv:2006.16668): each rank has some of the experts, and ranks exchange tokens.

The fsdp x tp ranks that shard a layer form EP groups of consecutive ranks: fsdp x tp = efsdp x ep.

    with EP       Each rank routes its own tokens (under tensor parallel, its shard of the sequence). Experts are
                  sharded over ep, and FSDP shards each over efsdp. Router and shared experts are replicated over tp.
    without EP    Under tensor parallel the sequence is gathered, each rank has a shard of the channels of every expert,
                  routed or shared, and the outputs are summed over ranks and scattered over the sequence.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # this import registers torch.ops._c10d_functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from titanlite.techniques.moe import counts
from titanlite.techniques.moe.fsdp import shard_block_with_experts
from titanlite.techniques.moe.layer import Experts, Keep, MixtureOfExperts, Permute, inverse, order_by_expert
from titanlite.techniques.moe.operators import Operators

SEQUENCE = Shard(0)  # placement of activations [N, D] whose tokens are sharded over the tensor-parallel ranks


class ShardableMixture(MixtureOfExperts):
    fully_shard_block = staticmethod(shard_block_with_experts)

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Shard experts over `expert`, or without EP over `tensor`. parallel/own_rules.py defines the method."""
        if not (tensor or expert):
            return
        experts = self.experts
        outputs, inputs = (Shard(0), Shard(0)) if expert else (Shard(1), Shard(2))
        of_bias = {"w1_bias": outputs, "w2_bias": Shard(0) if expert else Replicate(), "w3_bias": outputs}
        placements = {"w1": outputs, "w2": inputs, "w3": outputs, **of_bias}
        for name, _ in list(experts.named_parameters()):
            _distribute(experts, name, expert or tensor, placements[name])
        is_first = expert is not None or tensor.get_local_rank() == 0  # one rank adds the bias to the sum
        experts.weights = functools.partial(_local_weights, experts, is_first)
        if expert:
            self.sort_key = functools.partial(_by_local_expert, expert.size(), self.router.n_experts)
            self.compute = functools.partial(_exchange, experts, expert.get_group())
        if tensor:
            for name, _ in list(self.router.named_parameters()):
                _distribute(self.router, name, tensor, Replicate())
            self.router.local_weights = lambda: [local_weight(weight) for weight in self.router.parameters()]
            for name, layer in self.shared.named_children() if self.shared else ():
                _distribute(layer, "weight", tensor, Replicate() if expert else Shard(1 if name == "w2" else 0))
                layer.forward = functools.partial(_local_linear, layer)
            self.router.contributes = is_first  # without EP, all TP ranks route the same tokens: one records the load
            self.forward = functools.partial(_on_own_tokens if expert else _on_all_tokens, self.forward, tensor)

    def add_adapter(self, name: str, adapter: nn.Module, expert: DeviceMesh | None) -> None:
        """Adapt a weight of the routed experts (techniques/lora.py), after `shard_weights`."""
        self.experts.adapters[name] = adapter
        if expert:
            self.sort_key = super().sort_key
            self.compute = functools.partial(_exchange_at_once, self.experts, expert.get_group())


def _local_weights(experts: Experts, adds_bias: bool) -> list[Tensor]:
    w1, w2, w3, *biases = (local_weight(weight) for weight in experts.parameters(recurse=False))
    if biases and not adds_bias:
        biases[1] = biases[1] * 0
    return [w1, w2, w3, *biases]


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    weight = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(weight))


def local_weight(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight. The backward sums the gradient of a replicated weight over the ranks."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in weight.placements])


def _on_own_tokens(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x_ND: Tensor) -> Tensor:
    return forward(x_ND.to_local())


def _on_all_tokens(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x_ND: Tensor) -> Tensor:
    """Gather the sequence, compute `forward`, reduce-scatter the output; the backward does the same with gradients."""
    gathered_ND = x_ND.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return DTensor.from_local(forward(gathered_ND), mesh, [Partial()]).redistribute(placements=[SEQUENCE]).to_local()


def _local_linear(layer: nn.Linear, x_ND: Tensor) -> Tensor:
    return F.linear(x_ND, local_weight(layer.weight))


def _by_local_expert(n_ranks: int, n_experts: int, experts_NK: Tensor) -> Tensor:
    """Return keys that sort rows first by the expert's index on its rank, then by rank."""
    n_local = n_experts // n_ranks
    return experts_NK % n_local * n_ranks + experts_NK // n_local


def _exchange(experts: Experts, group: dist.ProcessGroup, x_MD: Tensor, scores_M: Tensor, counts_E: Tensor) -> Tensor:
    """Send rows to the ranks of their experts, compute the experts there, and send the results back. `x_MD` and the
    result are sorted by the keys of _by_local_expert. The host waits for the device once."""
    n_ranks = group.size()
    sent_RL = counts_E.view(n_ranks, -1)
    received_RL = _wait(_start(counts_E, None, None, group)).view(n_ranks, -1)
    sent, received = counts.read(torch.stack((sent_RL, received_RL)))
    exchange = _Exchange(group, sent, received)
    orders = _transposed(sent_RL.t(), len(x_MD)), _transposed(received_RL, sum(map(sum, received)))
    weights = experts.weights()
    with torch.no_grad():
        received_scores, arrived, gates, ups = _send(exchange, x_MD, scores_M, *orders, *weights)
    kept = Keep.apply(scores_M, *weights, received_scores, *orders, *arrived, *gates, *ups)
    rows = received_scores, gates, ups
    return _ExchangedExperts.apply(exchange, experts.operators, experts.clamp, kept, rows, x_MD, scores_M, *weights)


def _exchange_at_once(
    experts: Experts, group: dist.ProcessGroup, x_MD: Tensor, scores_M: Tensor, counts_E: Tensor
) -> Tensor:
    """Do the same as _exchange for experts with adapters, by operators that autograd differentiates. No row is in
    flight while experts compute. `x_MD` and the result are sorted by expert."""
    sent_RL = counts_E.view(group.size(), -1)
    received_RL = _wait(_start(counts_E, None, None, group)).view_as(sent_RL)
    sent, received = ([sum(row) for row in each] for each in counts.read(torch.stack((sent_RL, received_RL))))
    order = _transposed(received_RL, sum(received))
    back = inverse(order)
    swap = torch.ops._c10d_functional_autograd.all_to_all_single  # private API of torch (tested with 2.13)
    arriving = (_wait(swap(rows, received, sent, group.group_name)) for rows in (x_MD, scores_M))
    y = experts.forward(*(Permute.apply(rows, order, back) for rows in arriving), received_RL.sum(0))
    return _wait(swap(Permute.apply(y, back, order), sent, received, group.group_name))


def _transposed(counts_AB: Tensor, n_rows: int) -> Tensor:
    """Return the permutation from rows sorted by (a, b) to rows sorted by (b, a). `counts_AB`: rows per (a, b)."""
    n_a, n_b = counts_AB.shape
    b_of_row = torch.arange(n_b, device=counts_AB.device).repeat(n_a)
    return order_by_expert(b_of_row.repeat_interleave(counts_AB.flatten(), output_size=n_rows), n_b)


class _Exchange:
    """Sends rows between R ranks with L experts each. `sent` and `received`, [R][L]: how many rows this rank sends for
    each rank's experts, and receives from each rank for its own experts."""

    def __init__(self, group: dist.ProcessGroup, sent: list[list[int]], received: list[list[int]]):
        self.group, both = group, (sent, received)
        self.sent_LR, self.received_LR = ([list(sizes) for sizes in zip(*each, strict=True)] for each in both)
        self.sent_R, self.received_R = ([sum(sizes) for sizes in each] for each in both)

    def of_own_experts(self, scores: Tensor) -> tuple[Tensor, ...]:
        return scores.split([sum(sizes) for sizes in self.received_LR])

    def send_rows(self, x_MD: Tensor) -> list[Tensor]:
        """Start to send all rows. Return the rows of each expert on this rank; call `_wait` before using them."""
        chunks = x_MD.split([sum(sizes) for sizes in self.sent_LR])
        sizes = zip(chunks, self.received_LR, self.sent_LR, strict=True)
        return [_start(x, received, sent, self.group) for x, received, sent in sizes]

    def return_rows(self, number: int, y: Tensor, out_MD: Tensor) -> dist.Work:
        """Start to send back the results of this rank's expert `number`, and to receive results in `out_MD`."""
        out = out_MD.split([sum(sizes) for sizes in self.sent_LR])[number]
        sent, received = self.received_LR[number], self.sent_LR[number]
        return dist.all_to_all_single(out, y, received, sent, group=self.group, async_op=True)


def _send(
    exchange: _Exchange, x_MD: Tensor, scores_M: Tensor, by_rank_M: Tensor, by_expert: Tensor,
    w1: Tensor, _: Tensor, w3: Tensor, *biases: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Send rows and scores to the ranks of their experts, and multiply the rows there by w1 and w3 while later rows are
    in flight. Return received scores and, by expert, received rows and their products with w1 and w3 plus biases."""
    sent_scores = _start(scores_M[by_rank_M], exchange.received_R, exchange.sent_R, exchange.group)
    arriving = exchange.send_rows(x_MD)
    scores, gates, ups = _wait(sent_scores)[by_expert], [], []
    w1_bias, _, w3_bias = biases or [[None] * len(w1)] * 3
    for x, own_w1, own_w3, *own_biases in zip(map(_wait, arriving), w1, w3, w1_bias, w3_bias, strict=True):
        gates.append(F.linear(x, own_w1, own_biases[0]))
        ups.append(F.linear(x, own_w3, own_biases[1]))
    return scores, arriving, gates, ups


class _ExchangedExperts(torch.autograd.Function):
    """Combines the products of _send, multiplies them by w2, and sends the results back to the ranks that sent the
    rows. The backward covers _send, too. While one expert computes, the results of earlier experts are in flight. A
    split backward runs `backward` twice: for gradients of rows, and for gradients of weights. Uses the private function
    torch._C._will_engine_execute_node (tested with torch 2.11 to 2.15)."""

    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, operators: Operators, clamp: tuple[float, ...], kept: Tensor,
        rows: tuple[Tensor, list[Tensor], list[Tensor]],
        x_MD: Tensor, scores_M: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *biases: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the results [M, D]. `rows`: scores and products of _send; `kept`: Keep's result, for the backward."""
        ctx.exchange, ctx.operators, ctx.clamp, ctx.keeper = exchange, operators, clamp, kept.grad_fn
        ctx.n_weights = 3 + len(biases)
        ctx.of_rows, ctx.of_weights = x_MD.grad_fn, w1.grad_fn
        scores, gates, ups = rows
        y_MD, sent = torch.empty_like(x_MD), []
        of_expert = zip(gates, ups, exchange.of_own_experts(scores), w2, strict=True)
        for number, (gate, up, score, own_w2) in enumerate(of_expert):
            y = F.linear(operators.swiglu(gate, up, score, *clamp), own_w2)
            if biases:
                y.addr_(score.to(y.dtype), biases[1][number])
            sent.append(exchange.return_rows(number, y, y_MD))
        for work in sent:
            work.wait()
        return y_MD

    @staticmethod
    def backward(ctx: Any, d_y_MD: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`."""
        exchange, d_x_MD = ctx.exchange, torch.empty_like(d_y_MD)
        arriving = exchange.send_rows(d_y_MD.contiguous())
        saved = ctx.keeper.saved_tensors
        weights, (scores, by_rank_M, by_expert, *rows) = saved[: ctx.n_weights], saved[ctx.n_weights :]
        nodes = ctx.of_rows, ctx.of_weights  # autograd nodes; None for frozen weights
        for_rows, for_weights = (node is not None and torch._C._will_engine_execute_node(node) for node in nodes)
        (w1, w2, w3, *biases), d_weights = weights, list(map(torch.empty_like, weights)) if for_weights else weights
        sent, d_scores, n = [], [], len(w1)
        x_gate_up = rows[:n], rows[n : 2 * n], rows[2 * n :]
        of_expert = zip(arriving, *x_gate_up, exchange.of_own_experts(scores), w1, w2, w3, *d_weights, strict=True)
        for number, (d_y, x, gate, up, score, own_w1, own_w2, own_w3, *own_d_ws) in enumerate(of_expert):
            d_y = _wait(d_y)
            d_gate, d_up, d_score, hidden = ctx.operators.swiglu_backward(d_y @ own_w2, gate, up, score, *ctx.clamp)
            if biases:
                d_score = d_score + (d_y @ biases[1][number]).to(d_score.dtype)
            if for_rows:
                sent.append(exchange.return_rows(number, torch.mm(d_gate, own_w1).addmm_(d_up, own_w3), d_x_MD))
            if for_weights:
                for own_d_w, d_out, inputs in zip(own_d_ws[:3], (d_gate, d_y, d_up), (x, hidden, x), strict=True):
                    torch.mm(d_out.t(), inputs, out=own_d_w)
            if for_weights and biases:
                d_outs = d_gate, d_y * score.to(d_y.dtype).unsqueeze(1), d_up
                for own_d_bias, d_out in zip(own_d_ws[3:], d_outs, strict=True):
                    torch.sum(d_out, 0, out=own_d_bias)
            d_scores.append(d_score)
        d_scores_R = _unsorted(torch.cat(d_scores), by_expert)
        sent_scores = _start(d_scores_R, exchange.sent_R, exchange.received_R, exchange.group)
        d_scores_M = _unsorted(_wait(sent_scores), by_rank_M)
        for work in sent:
            work.wait()
        return None, None, None, None, None, d_x_MD, d_scores_M, *d_weights


def _unsorted(x_M: Tensor, order_M: Tensor) -> Tensor:
    return torch.empty_like(x_M).scatter_(0, order_M, x_M)


def _start(x: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Start to send `sent[r]` rows to each rank r and to receive `received[r]`; None: the same number for each rank.
    Uses the private torch.ops._c10d_functional: selective AC can save its results (tested with torch 2.11 to 2.15)."""
    sizes = [len(x) // group.size()] * group.size()
    return torch.ops._c10d_functional.all_to_all_single(x, received or sizes, sent or sizes, group.group_name)


def _wait(x: Tensor) -> Tensor:
    """Let the following operators wait for a tensor in flight."""
    return torch.ops._c10d_functional.wait_tensor(x)
