"""Plan configs with activation checkpointing over groups of blocks, and print memory and time by the size of a group.

    python -m benchmarks.planner.grouped_checkpoint    (about twenty minutes)

Nothing is run on a GPU.
"""

from docs.build.page_tables import table_line, table_lines
from docs.build.reference_configs import planned
from titanlite.tools.plan.report import GIB
from titanlite.tools.plan.result import Plan

MODE, SIZE = "--activation_checkpoint.mode", "--activation_checkpoint.layers_per_checkpoint"
SIZES = (1, 2, 4, 8, 16)
CONFIGS = {
    "Llama 3 70B on 8 A100, 8,192 tokens": ("configs/reference/70b_a100.toml",),
    "Llama 3 8B on 8 H100, 262,144 tokens": (
        *("configs/reference/llama3_8b_256k.toml", "--activation_checkpoint.selective_ac_option=op"),
        "--training.global_batch_size=1",
    ),
}


def cells(plan: Plan) -> list[str]:
    """Return the peak in GiB, and the seconds of a step."""
    return [f"{plan.worst.total / GIB:.1f}", f"{plan.step_seconds:.2f}"]


def main() -> None:
    head = ["config", "layers_per_checkpoint", 'mode = "none", GiB', "s", 'mode = "full", GiB', "s"]
    print(*table_lines(head, []), sep="\n", flush=True)
    for label, (name, *options) in CONFIGS.items():
        for size in SIZES:
            plans = (planned(name, *options, f"{MODE}={mode}", f"{SIZE}={size}") for mode in ("none", "full"))
            print(table_line([label, str(size), *(cell for plan in plans for cell in cells(plan))]), flush=True)


if __name__ == "__main__":
    main()
