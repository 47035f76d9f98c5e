"""Plans every config that is for GPUs, and writes the table of docs/ladder.md.

    python benchmarks/ladder.py            (about a minute and a half on two idle cores)

The test of the same name plans them again and holds the table against that.
"""

from pathlib import Path

from titanlite import build, plan
from titanlite.config import load

ROOT = Path(__file__).resolve().parents[1]
LADDER = (
    *("llama2_7b", "llama3_8b", "llama2_13b", "llama_30b", "70b", "175b", "405b_512", "405b"),
    *("llama3_8b_256k", "llama3_8b_1m"),
)
PAGE = ROOT / "docs" / "ladder.md"
HEAD = "| config | devices | layout | recompute | float8 | GiB, worst rank | spare | tokens/s a device | MFU | bubble |"


def row(name: str) -> str:
    """A config's line of the table."""
    made = plan.make_plan(load([str(ROOT / "configs" / f"{name}.toml")]))
    worst, room = made.worst.total / 2**30, made.device.memory / 2**30
    degrees = build.describe_mesh(made.config).split(" x ")
    layout = " x ".join(degree for degree in degrees if not degree.endswith(" 1"))
    cells = [
        f"[{name}](../configs/{name}.toml)",
        f"{made.world_size:,} {made.config.plan.device}",
        layout,
        made.config.activation_checkpoint.mode,
        "yes" if made.config.float8.enable else "no",
        f"{worst:.1f}",
        f"{room - worst:.1f}",
        f"{made.tokens_per_second:,.0f}",
        f"{made.mfu:.1%}",
        f"{made.bubble:.1%}" if made.spans else "-",
    ]
    return f"| {' | '.join(cells)} |"


def written() -> dict[str, str]:
    """The lines that stand in docs/ladder.md, by config."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    return {line.split("]")[0].removeprefix("| ["): line for line in lines}


def main() -> None:
    rows = {}
    for name in LADDER:
        rows[name] = row(name)
        print(rows[name], flush=True)
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest[rest.index("\n\n") :]
    rule = "|" + " --- |" * HEAD.count(" | ") + " --- |"
    PAGE.write_text("\n".join([before + HEAD, rule, *rows.values()]) + after)


if __name__ == "__main__":
    main()
