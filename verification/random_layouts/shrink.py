"""Shrink a layout that fails: remove options and make degrees and sizes smaller while it still fails."""

from collections.abc import Callable, Iterator

from titanlite.config import ConfigError
from verification.random_layouts.degrees import Options, prime_factors
from verification.random_layouts.draw import Layout

SIZES = ("model.n_layers", "model.moe.n_experts", "training.seq_len", "training.local_batch_size")
GROUPS = ("lr_scheduler.", "optimizer.", "model.moe.", "model.mla.", "model.rope_", "model.", "activation_checkpoint.")
GROUPS += ("compile.", "float8.", "debug.", "training.", "parallelism.pipeline_parallel_", "parallelism.fsdp_")


def shrink(layout: Layout, fails: Callable[[Layout], bool]) -> Layout:
    """Return a layout that fails, and of whose options none can be removed or made smaller. `fails` says whether a
    layout fails in the same way."""
    tried: set[str] = set()
    while True:
        for options in smaller(layout.options):
            candidate = Layout(options)
            if candidate.arguments in tried or not is_accepted(candidate):
                continue
            tried.add(candidate.arguments)
            if fails(candidate):
                layout = candidate
                break
        else:
            return layout


def is_accepted(layout: Layout) -> bool:
    try:
        layout.config  # noqa: B018
    except ConfigError:
        return False
    return True


def smaller(options: Options) -> Iterator[Options]:
    """Yield options that are fewer or smaller: first those that leave fewer ranks, then those that remove many."""
    degrees = [key for key in options if key.endswith("_degree")]
    for key in degrees:
        yield without(options, key)
        yield without(options, key, "parallelism.context_parallel_ulysses_degree", "parallelism.expert_parallel_degree")
        for prime in dict.fromkeys(prime_factors(options[key])):
            yield options | {key: options[key] // prime}
    for group in GROUPS:
        experts = {"parallelism.expert_parallel_degree"} if group == "model.moe." else set()
        yield without(options, *experts, *(key for key in options if key.startswith(group) and key not in degrees))
    for key in options:
        if key not in degrees:
            yield without(options, key)
    for key in (key for key in SIZES if key in options):
        for size in (1, options[key] // 2, options[key] - 1):
            if 0 < size < options[key]:
                yield options | {key: size, **_batch(options, key, size)}


def without(options: Options, *keys: str) -> Options:
    return {key: value for key, value in options.items() if key not in keys}


def _batch(options: Options, key: str, size: int) -> Options:
    """Return the global batch size that goes with a smaller local one."""
    total = "training.global_batch_size"
    return (
        {total: options[total] // options[key] * size} if key.endswith("local_batch_size") and total in options else {}
    )
