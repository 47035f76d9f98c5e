"""The tables of what widely read guides say, beside plans: a part of docs/memory_tables.md and docs/scaling.md."""

from docs.build import guide_plans as plans
from docs.build.guide_numbers import (
    Records,
    between,
    efficiency,
    gib,
    published_pairs,
    published_tensor,
    relative_speed,
    table,
)
from docs.build.guide_plans import Record
from titanlite.metrics.devices import DEVICES

N_LAYERS = 32
"""Of Llama 3 8B."""


def gb(size: float) -> str:
    """Return bytes in GB, as guides count."""
    return f"{size / 1e9:.1f}"


def states(record: Record) -> int:
    """Return the most bytes of weights, gathered weights, gradients and optimizer states."""
    return sum(record["most"][kind] for kind in ("parameters", "gathered", "gradients", "optimizer"))


def guides_of_memory(log: Records) -> str:
    """Return what guides say of memory beside the plan."""
    one, seventy = log["memory: 7B, one device"], log["memory: 70B, one device"]
    eight, saving = log["memory: 7B, ZeRO-3, 8"], {name: log[f"saving: {name}"] for name in plans.SAVINGS}
    modes = [log[f"memory: 7B, 12 bytes, {mode}, 4"] for mode in plans.MODES]
    schedule = [log[f"schedule: {name}, 16 microbatches"]["activations_by_rank"] for name in ("GPipe", "1F1B")]
    gpipe, one_f = (ranks[0] for ranks in schedule)
    none, full = saving["no AC"], saving["full AC"]
    kept = full["most"]["activations"] / none["most"]["activations"]
    return table(
        "guides say | planned | why they differ",
        [
            [
                "7B takes 122 GB in all: weights 14, gradients 14, Adam's states 56, master weights 28, activations 10",
                f"{gb(one['total'])} GB: float32 weights {gb(one['most']['parameters'])}, their bfloat16 cast "
                f"{gb(one['most']['gathered'])}, gradients {gb(one['most']['gradients'])}, states "
                f"{gb(one['most']['optimizer'])}, activations {gb(one['most']['activations'])}",
                f"Llama 2 7B has {one['parameters'] / 1e9:.2f} billion parameters, not 7. Gradients here are float32, "
                "as they accumulate. Activations are of one sequence of 4,096 tokens with selective AC: they grow with "
                "the batch",
            ],
            [
                "70B takes 1.1 TB",
                f"{seventy['total'] / 1e12:.2f} TB, {gb(states(seventy))} GB of it without activations",
                "16 bytes per parameter; here 18 with float32 gradients, and activations",
            ],
            [
                "7B on 4 devices: 84 GB each, 42 with ZeRO-1, 31.5 with ZeRO-2, 21 with ZeRO-3",
                f"{', '.join(gb(states(mode)) for mode in modes)} GB, and with activations "
                f"{', '.join(gb(mode['total']) for mode in modes)}",
                "12 bytes per parameter: bfloat16 weights and gradients, float32 states. That leaves out the 28 GB of "
                "master weights of the first row, and all activations. Planned with the same types and stochastic "
                "rounding, which needs no master weights. ZeRO-1 and -2 have their shard beside the gathered weights",
            ],
            [
                "on 8 devices 122 GB become 15",
                f"{gb(eight['total'])} GB: states {gb(states(eight))}, activations {gb(eight['most']['activations'])}",
                "ZeRO divides weights, gradients and states, not activations",
            ],
            [
                "of 16 microbatches over 4 stages, GPipe keeps 16 and 1F1B keeps 4",
                f"GPipe keeps {gpipe / one_f:.1f} times 1F1B's on the first rank",
                f"right on the first rank only: 1F1B's ranks keep "
                f"{', '.join(f'{x / one_f:.2f}' for x in schedule[1])} of the first one's",
            ],
            [
                "AC costs about 30 % more compute and keeps a fifth of the activations",
                f"8B, full AC: {relative_speed(full, none)} of the speed without AC, {kept:.0%} of the activations",
                "a third of the matrix products is computed again, but the host, the optimizer and what is "
                "memory-bound are not all repeated. Selective AC keeps more and costs little",
            ],
            [
                "70B on 8 A100 of 80 GB with float8 and 8-bit states",
                f"{gib(log['memory: 70B, 8 A100, 8-bit']['total'])} of 79.2 GiB",
                "A100 has no float8 products. bfloat16 weights, 8-bit states and full AC fit, one sequence of 4,096 at "
                "a time",
            ],
        ],
    )


def guides_of_scaling(log: Records) -> str:
    """Return what guides say of speed beside the plan."""
    batch = next(iter(plans.BATCHES))
    one, eight = (log[f"data: {batch}, FSDP, {n}"] for n in (1, 8))
    times = tuple(8 * value for value in efficiency(eight, one))
    tensor = {n: efficiency(log[f"tensor: 8B, tp {n}"], log["tensor: 8B, tp 1"]) for n in (2, 4, 8, 16)}
    measured = published_tensor()
    kept = [large["tokens/s"] / small["tokens/s"] for small, large in published_pairs().values()]
    unequal = log["schedule: 1F1B, unequal stages, 16 microbatches"]["bubble"]
    bubble = {m: log[f"schedule: 1F1B, {m} microbatches"]["bubble"] for m in plans.MICROBATCHES}
    interleaved = log["schedule: Interleaved1F1B, 16 microbatches"]["bubble"]
    kinds = {name: count for axis, name, count, _ in log["tensor: 8B, tp 8"]["communication"] if axis == "tp"}

    def per_layer(name: str) -> str:
        return f"{kinds[name] / plans.TENSOR_STEPS / N_LAYERS:.0f}"

    return table(
        "guides say | planned | why they differ",
        [
            [
                "data parallel scales at 90 to 95 %: 8 devices are 7.5 times as fast as one",
                f"{between(times, '{:.2f}')} times",
                "FSDP within a node is overlapped with computation, and each device updates an eighth of the weights. "
                f"Published runs keep {min(kept):.0%} to {max(kept):.0%} with 2 to 16 times as many devices, up to 512",
            ],
            [
                "tensor parallel keeps 95 to 98 % at degree 2, 90 to 95 at 4, 80 to 90 at 8, 60 to 75 at 16",
                ", ".join(f"{n}: {value[0]:.0%}" for n, value in tensor.items()),
                f"its collectives are exposed. A published run kept {measured[2]:.0%} at 2 and {measured[4]:.0%} at 4. "
                "Degree 16 leaves the node, which costs far more than guides say",
            ],
            [
                "tensor parallel has four all-reduces per layer",
                f"{per_layer('all_gather')} all-gathers and {per_layer('reduce_scatter')} reduce-scatters",
                "with sequence parallel an all-reduce is a reduce-scatter and an all-gather: the same bytes. Selective "
                "AC repeats two of the four all-gathers",
            ],
            [
                "4 stages have a bubble of 19 % with 16 microbatches, and 9 % with 32",
                f"{bubble[16]:.1%} and {bubble[32]:.1%} of the step",
                "(p - 1) / m is relative to the work, not to the step. Both assume equal stages: with the default "
                f"split of 32 layers, {unequal:.1%} with 16 microbatches",
            ],
            [
                "have at least 4 times as many microbatches as stages",
                f"bubble {bubble[16]:.1%}; with as many as stages {bubble[4]:.1%}, with 16 times as many "
                f"{bubble[64]:.1%}",
                "right, if stages are equal",
            ],
            [
                "interleaved schedules divide the bubble by the stages per rank",
                f"{bubble[16]:.1%} to {interleaved:.1%} with two stages per rank",
                "that holds where stages are equal in the forward and in the backward. Here the last of 8 stages is "
                "the output head alone, and chunked cross-entropy computes its gradients in the forward",
            ],
            [
                "NVLink has 600 GB/s on H100",
                f"{2 * DEVICES['h100'].interconnect_bandwidth / 1e9:,.0f} GB/s, half of it in each direction",
                "600 is A100's",
            ],
        ],
    )
