"""Closed-form estimates of a layout's memory and step time, which decide whether the layout is worth a plan."""

import math

from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED
from titanlite.tools.advise.search_space import STATE_BYTES, Candidate, Mesh, Task
from titanlite.tools.plan.planner import FRAGMENTATION, overhead_bytes

COMPUTE, LINKS, REPEATED = 0.57, 0.8, {"none": 1.0, "selective": 1.03, "full": 1.2}
"""Shares of peak FLOP/s and bandwidths that steps reach; FLOPs by AC mode, as a multiple of the FLOPs without AC."""
HOST, SLOWDOWN = 8e-4, 0.15  # fixed seconds of a layer's kernels; seconds lost per second of overlapped communication


def estimate_bytes(task: Task, candidate: Candidate) -> float:
    """Estimate the bytes of the rank that needs most, from the model's dimensions: weights, gradients, optimizer
    states, gathered weights, activations of microbatches in flight, logits, messages and non-tensor overhead."""
    mesh, model, schedule = candidate.mesh, task.model, candidate.schedule
    layer_weights, own_weights = _layer_weights(task, mesh)
    saved, working, between = _layer_bytes(task, candidate)
    tokens = candidate.microbatch * task.seq_len / (mesh.cp * mesh.tp)
    matrix = model.dim * model.vocab_size / mesh.tp
    shards = mesh.dp_shard * mesh.cp
    n_layers = model.n_layers
    if mesh.pp > 1:  # pipeline stages count the output head as task.layers_of_head layers
        n_layers = candidate.stages * math.ceil((n_layers + task.layers_of_head) / (mesh.pp * candidate.stages))
    weights, own_weights = n_layers * layer_weights, n_layers * own_weights
    if mesh.pp == 1:
        own_weights += (1 if model.tie_embeddings else 2) * matrix / shards
        # FSDP has the gathered weights of two layers at a time, and the unsharded gradients of one layer.
        gathered = max(4 * layer_weights, 2 * matrix) + max(6 * layer_weights, 6 * matrix)
        in_flight, messages = n_layers, 0.0
    else:
        # A pipeline's weights stay gathered, and its gradients unsharded, during a gradient accumulation step.
        gathered = weights * (2 + 4)
        n_microbatches = candidate.local_batch // candidate.microbatch
        in_flight = n_layers / candidate.stages * _forwards_in_flight(candidate, n_microbatches)
        # Each stage has receive buffers in both directions and, except under 1F1B, keeps sent messages.
        messages = 2 * tokens * model.dim * n_microbatches * (2 if schedule == "1F1B" else 3.5 * candidate.stages)
        if schedule in SPLIT_BACKWARD:
            gathered += mesh.pp * n_layers / candidate.stages * between
    # A compiled loss needs 2 bytes for a logit and its gradient together, an uncompiled loss 8 more bytes per logit.
    logits = (2 if candidate.compiled else 10) * matrix / model.dim * tokens * mesh.tp / candidate.loss_chunks(task)
    total = own_weights * STATE_BYTES + gathered + in_flight * saved + max(working, logits) + messages
    degrees = [mesh.pp, mesh.dp_replicate, shards, mesh.tp, mesh.cp // mesh.ulysses, mesh.ulysses]
    degrees += [mesh.ep, shards * mesh.tp // mesh.ep, mesh.dp_replicate] if mesh.ep > 1 else []
    return total * (1 + FRAGMENTATION) + sum(overhead_bytes(task.device, degrees).values())


def estimate_seconds(task: Task, candidate: Candidate) -> float:
    """Estimate the seconds of a step from a rank's FLOPs and bytes and the device's rates.

    `layer` is a token's time on a rank in a layer: FLOPs (6 per used weight, and attention's); `dim` 2-byte values to
    each other rank of tp in 8 collectives (12 under full AC); keys and values to each other rank of a ring, once
    forward and twice backward; the all-to-alls of Ulysses and experts. HOST is added per microbatch, layer and ring
    step. With s stages per rank, n microbatches take as long as max(n, pp) + (min(n, pp) - 1) / s without a bubble. In
    a gradient accumulation step FSDP gathers 2-byte weights twice (in a pipeline once) and reduces 4-byte gradients,
    overlapped except in a pipeline. Messages between stages are not counted."""
    mesh, model, device, full = candidate.mesh, task.model, task.device, candidate.checkpointing == "full"
    n, n_accumulated = candidate.local_batch // candidate.microbatch, task.sequences / mesh.dp / candidate.local_batch
    ring, shards, n_layers = mesh.cp // mesh.ulysses, mesh.dp_shard * mesh.cp, model.n_layers / mesh.pp
    q_dim, kv_dim = model.n_heads * model.head_dim, 2 * model.n_kv_heads * model.head_dim

    def rate(stride: int, n_ranks: int, adapters: int = device.devices_per_node) -> float:
        nodes = stride * n_ranks / device.devices_per_node
        network = device.network_bandwidth * max(adapters // stride, 1) * 0.94 ** math.log2(max(nodes / 4, 1))
        return LINKS * (min(device.interconnect_bandwidth, network) if nodes > 1 else device.interconnect_bandwidth)

    products = model.dim * model.vocab_size * (1 / model.n_layers + 1 / task.layers_of_head)
    layer = 6 * products * REPEATED[candidate.checkpointing] / (COMPUTE * device.bf16)
    layer += (24 if full else 16) * model.dim * (mesh.tp - 1) / rate(1, mesh.tp)
    layer += 6 * kv_dim * (ring - 1) / rate(mesh.tp, mesh.cp)
    layer += 8 * (q_dim + kv_dim) * (1 - 1 / mesh.ulysses) / rate(mesh.tp, mesh.cp, 1)
    routed = task.share_with_experts * model.moe.n_experts_per_token * model.dim
    layer += (12 if full else 8) * routed * (1 - 1 / mesh.ep) / rate(1, mesh.ep, 1)
    tokens = candidate.microbatch * task.seq_len / (mesh.cp * mesh.tp)
    slots = max(n, mesh.pp) + (min(n, mesh.pp) - 1) / candidate.stages
    busy = n_accumulated * n_layers * (tokens * layer + HOST * ring) * slots
    gathered = n_accumulated * n_layers * _layer_weights(task, mesh)[0]
    fsdp = gathered * (6 if mesh.pp > 1 else 8) * (1 - 1 / shards) / rate(mesh.tp, shards)
    fsdp += gathered / shards * 8 * (1 - 1 / mesh.dp_replicate) / rate(mesh.tp * shards, mesh.dp_replicate)
    return busy + fsdp if mesh.pp > 1 else max(busy, fsdp) + SLOWDOWN * min(busy, fsdp)


def _forwards_in_flight(candidate: Candidate, n_microbatches: int) -> float:
    """Return how many stage forwards wait for their backward at once on the first pipeline rank, where most wait."""
    pp, stages = candidate.mesh.pp, candidate.stages
    if candidate.schedule in V_SHAPED:
        return min(2 * pp, 2 * n_microbatches)
    ahead = (stages - 1) * pp + 2 * (pp - 1) + 1 if stages > 1 else pp
    return min(ahead, n_microbatches * stages)


def _layer_weights(task: Task, mesh: Mesh) -> tuple[float, float]:
    """Return two mean numbers of weights per layer: those that FSDP gathers on a rank, and those in a rank's shard."""
    model, shards = task.model, mesh.dp_shard * mesh.cp
    matrices = 1 if model.tie_embeddings else 2
    total = (task.n_parameters - matrices * model.dim * model.vocab_size - model.dim) / model.n_layers
    experts = task.share_with_experts * 3 * model.dim * model.expert_dim * model.moe.n_experts
    others = (total - experts) / mesh.tp
    # Experts are split over EP ranks, or over TP ranks if ep is 1. With FSDP, an expert weight has shards * tp shards.
    return others + experts / (mesh.ep if mesh.ep > 1 else mesh.tp), others / shards + experts / (shards * mesh.tp)


def _expert_values(task: Task, mesh: Mesh) -> float:
    """Return how many 2-byte activations per token experts have, on average over layers. Selective AC saves none."""
    model, moe = task.model, task.model.moe
    if not moe.n_experts:
        return 0.0
    # Without expert parallelism, each tensor-parallel rank has all tokens and a shard of each expert's channels.
    tokens = mesh.tp if mesh.ep == 1 else 1
    rows, hidden = tokens * moe.n_experts_per_token * model.dim, moe.n_experts_per_token * model.expert_dim
    router = tokens * (2 * model.dim + 8 * moe.n_experts)
    return task.share_with_experts * (2 * rows + 4 * hidden + 4 * moe.n_shared_experts * model.expert_dim + router)


def _layer_bytes(task: Task, candidate: Candidate) -> tuple[float, float, float]:
    """Return a layer's bytes per microbatch: saved for backward, temporary, kept between a backward's two halves."""
    mesh, model = candidate.mesh, task.model
    tokens = candidate.microbatch * task.seq_len / (mesh.cp * mesh.tp)
    dim, q_dim, kv_dim = model.dim, model.n_heads * model.head_dim, 2 * model.n_kv_heads * model.head_dim
    dense, is_split = 1 - task.share_with_experts, mesh.tp > 1
    hidden, products = dense * (2 if model.gated_ffn else 1) * model.ffn_dim, dense * model.ffn_dim
    norms = (2 * dim if model.norm_placement == "both" else 0) + (q_dim + kv_dim // 2) * bool(model.qk_norm)
    channels, unsharded = 2 * q_dim + kv_dim, 2 * mesh.tp * dim if is_split else 0
    # `saved` counts values per token. Under tensor parallelism, matrix products read all-gathered inputs; without AC,
    # these inputs are saved. The backward of a compiled block recomputes additions and pointwise results.
    full = candidate.checkpointing == "full"
    if full:
        saved = dim
    elif candidate.checkpointing == "selective":
        saved = (1 if is_split else 2 if candidate.compiled else 3) * dim + hidden + channels
        saved += 0 if candidate.compiled else unsharded  # uncompiled blocks save sums over tensor-parallel ranks
    else:
        saved = (2 if is_split else 4) * dim + hidden + (products if candidate.compiled else hidden) + channels
        saved += norms + _expert_values(task, mesh) + unsharded
    results = 3 * dim + channels + hidden
    everything = 9 * dim + 3 * q_dim + 3 * kv_dim + 2 * hidden + norms + _expert_values(task, mesh)
    working = (everything if full else everything - results) + unsharded
    between = everything if full else results / 2
    return 2 * tokens * saved, 2 * tokens * working, 2 * tokens * between
