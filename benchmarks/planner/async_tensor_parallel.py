"""Plan configs with and without asynchronous tensor parallel (async TP), and print what it saves.

    python -m benchmarks.planner.async_tensor_parallel    (about five minutes)

Nothing is run on a GPU. The last two rows are layouts of torchtitan's table of async TP, on its H100 at 500 W.
"""

from pathlib import Path

from docs.build.page_tables import table_line, table_lines
from docs.build.reference_configs import planned
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Plan, spread_of_difference

ASYNC = "--parallelism.enable_async_tensor_parallel"
SELECTIVE, FULL = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.mode=full")
TORCHTITAN = (
    *("--training.seq_len=8192", "--training.mixed_precision_param=bfloat16", "--compile.enable"),
    *("--parallelism.tensor_parallel_degree=8", f"--plan.device={Path(__file__).parent / 'h100_500w.toml'}"),
)
EVERY_SECOND_MM = SELECTIVE, "--activation_checkpoint.selective_ac_option=every_second_mm"
OF_8B = "--model.flavor=llama3_8b", "--parallelism.data_parallel_shard_degree=8", "--training.local_batch_size=12"
OF_70B = "--model.flavor=llama3_70b", "--parallelism.data_parallel_shard_degree=32", "--training.local_batch_size=16"
CASES = (
    ("70b.toml: float8, no AC", "70b"),
    ("the same in bfloat16 with selective AC", "70b", "--float8.enable=false", SELECTIVE),
    ("405b.toml: bfloat16, selective AC", "405b"),
    ("the same with full AC", "405b", FULL),
    ("8B, dp_shard 8 x tp 8, 12 sequences, every second mm saved", "debug", *OF_8B, *EVERY_SECOND_MM, *TORCHTITAN),
    ("70B, dp_shard 32 x tp 8, 16 sequences, full AC", "debug", *OF_70B, FULL, *TORCHTITAN),
)


def overlapped(plan: Plan) -> str:
    """Return how many of the gathers and scatters over tp overlap with products."""
    counts = {name: count for (axis, name), (count, _) in plan.cost.communication.items() if axis == "tp"}
    counts.pop("all_reduce", None)
    hidden = sum(count for name, count in counts.items() if name.endswith("overlapped"))
    return f"{hidden / sum(counts.values()):.0%}"


def main() -> None:
    head = ["config", "overlapped collectives", "exposed communication", "products, s", "a step, s"]
    head += ["saved, s", "tokens/s per device"]
    print(*table_lines(head, []), sep="\n", flush=True)
    for label, name, *options in CASES:
        plain, split = (planned(name, *options, f"{ASYNC}={value}") for value in ("false", "true"))
        exposed = [time_shares(plan)["exposed communication"] / plan.step_seconds for plan in (plain, split)]
        products = [plan.cost.seconds["matmul"] for plan in (plain, split)]
        saved, (error, _) = plain.step_seconds - split.step_seconds, spread_of_difference(plain.spread, split.spread)
        cells = [label, overlapped(split), " to ".join(f"{share:.1%}" for share in exposed)]
        cells += [
            " to ".join(f"{x:.2f}" for x in pair) for pair in (products, (plain.step_seconds, split.step_seconds))
        ]
        cells.append(f"{saved:.2f} ± {error:.2f}")
        more = split.tokens_per_second / plain.tokens_per_second - 1
        cells.append(f"{plain.tokens_per_second:,.0f} to {split.tokens_per_second:,.0f}, {more:+.1%}")
        print(table_line(cells), flush=True)


if __name__ == "__main__":
    main()
