"""Count a rank's process groups and gloo's TCP connections in these groups, by the mesh and by gloo's algorithms.

Two ranks connect over gloo when one first sends to the other (launch/process_group.py). All-gather, reduce-scatter and
all-reduce connect each rank to its two neighbours in a ring. A barrier and a broadcast connect each rank to the ranks
at distances 1, 2, 4 and so on; an all-to-all connects all ranks. A save sends records of all ranks to rank 0."""

from titanlite.config import Config
from titanlite.config.schema import stage_modules
from titanlite.config.stage_split import module_names, rank_of_stage
from titanlite.tools.plan.result import Plan


def process_groups(plan: Plan) -> list[tuple[str, int]]:
    """Return the purpose and the size of each process group of a rank."""
    parallelism = plan.config.parallelism
    groups = [(axis, len(ranks)) for axis, ranks in plan.axes.items()]
    if parallelism.expert_parallel_degree > 1:  # these axes have separate groups for expert weights
        groups += [(axis, n) for axis, n in groups if axis in ("pp", "dp_replicate")]
    if isinstance(parallelism.fsdp_reshard_after_forward, int):  # torch makes two groups for each FSDP unit
        shards, n = parallelism.fsdp_reshard_after_forward, dict(groups)["fsdp"]
        groups += [("reshard", shards), ("reshard", n // shards)] * _n_fsdp_units(plan.config)
    return groups + [("checkpoint", plan.world_size)] * plan.config.checkpoint.enable


def gloo_connections(plan: Plan) -> tuple[int, int]:
    """Return upper bounds on the number of connections that gloo opens on rank 0, and on any other rank."""
    groups = process_groups(plan)
    if plan.device.kind == "gpu":  # NCCL serves the mesh's groups; gloo sends tensors in host memory
        groups = [("all", plan.world_size), *(group for group in groups if group[0] == "checkpoint")]
    most = [_connections(name, n, plan.world_size) for name, n in groups]
    first = [n - 1 if name == "checkpoint" else m for (name, n), m in zip(groups, most, strict=True)]
    return sum(first), sum(most)


def _connections(name: str, n: int, world_size: int) -> int:
    """Return how many connections gloo opens at most in a group of n ranks, on a rank other than rank 0."""
    if name in ("ulysses", "ep"):
        return n - 1
    neighbours = {1 % n, -1 % n}
    at_powers_of_two = {distance % n for i in range((n - 1).bit_length()) for distance in (2**i, -(2**i))}
    if name == "checkpoint":
        return min(len(at_powers_of_two) + 1, n - 1)
    return len((at_powers_of_two if n == world_size else neighbours) - {0})


def _n_fsdp_units(config: Config) -> int:
    """Return how many modules FSDP reshards after forward on the first pipeline rank."""
    parallelism, degree = config.parallelism, config.parallelism.pipeline_parallel_degree
    stages = stage_modules(config) if degree > 1 else [module_names(config.model.n_layers)]
    ranks = rank_of_stage(parallelism.pipeline_parallel_schedule, degree, len(stages))
    names = [name for stage, rank in zip(stages, ranks, strict=True) if rank == 0 for name in [*stage, "the stage"]]
    if config.model.tie_embeddings:
        names.remove("tok_embeddings")
    return len([name for name in names if name not in ("norm", "output")])  # FSDP keeps norm and output gathered
