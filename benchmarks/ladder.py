"""Plans every config that is for GPUs, and what it might have been instead, and writes the tables of docs/ladder.md.

    python benchmarks/ladder.py            (about three minutes on two idle cores)

The test of the same name plans the configs again and holds the page against that.
"""

from collections.abc import Iterable
from pathlib import Path

from titanlite import build, plan
from titanlite.config import load

ROOT = Path(__file__).resolve().parents[1]
LADDER = (
    *("llama2_7b", "llama3_8b", "llama2_13b", "llama_30b", "70b", "175b", "405b_512", "405b"),
    *("llama3_8b_256k", "llama3_8b_1m"),
)
SELECTIVE = "--activation_checkpoint.mode=selective"
BATCH = "--training.local_batch_size=64", "--training.global_batch_size=256"
INSTEAD = (
    ("llama_30b", "in two microsteps", "--training.local_batch_size=16"),
    ("70b", "without float8", "--float8.enable=false"),
    ("405b_512", "selective recomputation", SELECTIVE),
    ("405b_512", "64 sequences a microstep, 256 a step", *BATCH),
    ("405b", "selective recomputation", SELECTIVE),
    ("llama3_8b_256k", "selective recomputation", SELECTIVE),
    ("llama3_8b_256k", "the loss at once", "--training.loss_chunks=1"),
)
PAGE = ROOT / "docs" / "ladder.md"
HEAD = "| config | devices | layout | recompute | float8 | GiB, worst rank | spare | tokens/s a device | MFU | bubble |"
HEAD_INSTEAD = "| config | instead | GiB, worst rank | spare | tokens/s a device | MFU | bubble |"


def planned(name: str, *overrides: str) -> plan.Plan:
    return plan.make_plan(load([str(ROOT / "configs" / f"{name}.toml"), *overrides]))


def figures(made: plan.Plan) -> list[str]:
    """The last five cells of a line."""
    worst, room = made.worst.total / 2**30, made.device.memory / 2**30
    return [
        f"{worst:.1f}",
        f"{room - worst:.1f}",
        f"{made.tokens_per_second:,.0f}",
        f"{made.mfu:.1%}",
        f"{made.bubble:.1%}" if made.spans else "-",
    ]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row(name: str) -> str:
    """A config's line of the table."""
    made = planned(name)
    degrees = build.describe_mesh(made.config).split(" x ")
    layout = " x ".join(degree for degree in degrees if not degree.endswith(" 1"))
    cells = [
        f"[{name}](../configs/{name}.toml)",
        f"{made.world_size:,} {made.config.plan.device}",
        layout,
        made.config.activation_checkpoint.mode,
        "yes" if made.config.float8.enable else "no",
    ]
    return line(cells + figures(made))


def written() -> dict[str, str]:
    """The lines that stand in docs/ladder.md, by config."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    return {line.split("]")[0].removeprefix("| ["): line for line in lines}


def write(head: str, rows: Iterable[str]) -> None:
    """Put rows below a table's head instead of what is there."""
    lines = []
    for text in rows:
        print(text, flush=True)
        lines.append(text)
    before, _, rest = PAGE.read_text().partition(head)
    after = rest[rest.index("\n\n") :]
    rule = "|" + " --- |" * (head.count("|") - 1)
    PAGE.write_text("\n".join([before + head, rule, *lines]) + after)


def main() -> None:
    write(HEAD, map(row, LADDER))
    write(HEAD_INSTEAD, (line([name, what, *figures(planned(name, *options))]) for name, what, *options in INSTEAD))


if __name__ == "__main__":
    main()
