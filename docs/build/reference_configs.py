"""Plan every config for GPUs, and variants of it, and write their tables in docs/plan.md and benchmarks/NOTEBOOK.md.

    python -m docs.build.reference_configs                 (about ten minutes on two idle cores)
    python -m docs.build.reference_configs 70b 175b        (these and their variants; all other lines stay)

The test of the same name plans the configs again and compares the page with the plans.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from docs.build.page_tables import table_line
from titanlite.config import Config, load
from titanlite.metrics.summary import describe_mesh
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.result import Plan

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("llama2_7b", "llama3_8b", "llama2_13b", "llama_30b", "70b_a100", "70b_lora", "70b", "175b_64", "175b"),
    *("175b_512", "405b_512", "405b", "1t", "llama3_8b_256k", "llama3_8b_1m", "llama3_70b_1m", "moonlight_16b_a3b"),
    *("mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_120b", "qwen3_235b_a22b", "deepseek_v2_236b", "deepseek_v3_671b"),
)
OPERATORS = "--activation_checkpoint.selective_ac_option=op"
SELECTIVE = "selective AC", "--activation_checkpoint.mode=selective", OPERATORS
ATTENTION = (
    *("attention saved", "--activation_checkpoint.mode=selective"),
    "--activation_checkpoint.selective_ac_option=attention",
)
FULL = "full AC", "--activation_checkpoint.mode=full", OPERATORS
BATCH = "--training.local_batch_size=64", "--training.global_batch_size=256"
WITHOUT_EP = "without expert parallel", "--parallelism.expert_parallel_degree=1"
INTERLEAVED = (
    *("--parallelism.pipeline_parallel_schedule=Interleaved1F1B", "--parallelism.pipeline_parallel_stages_per_rank=2"),
    *("--training.local_batch_size=128", "--training.global_batch_size=16384"),
)
PP_4 = "--parallelism.pipeline_parallel_degree=4", "--parallelism.context_parallel_degree=4"
WITHOUT_AC = "--training.local_batch_size=4", "--activation_checkpoint.mode=none"
UNBALANCED = "twice the mean load on one rank", "--plan.expert_imbalance=2"
VARIANTS = (
    ("llama_30b", "2 gradient accumulation steps", "--training.local_batch_size=16"),
    ("70b", "without float8", "--float8.enable=false"),
    ("70b", *SELECTIVE),
    ("175b_64", "on H100", "--plan.device=h100"),
    ("405b_512", *SELECTIVE),
    ("405b_512", "per-device batch of 64 sequences, global batch of 256", *BATCH),
    ("405b", *FULL),
    ("llama3_8b_256k", *SELECTIVE),
    ("llama3_8b_256k", *FULL),
    ("llama3_8b_256k", "unchunked cross-entropy", "--training.loss_chunks=1"),
    ("llama3_70b_1m", "pp 4 x cp 4 x tp 8", *PP_4),
    ("mixtral_8x7b", "float32 optimizer states", "--optimizer.state_dtype=auto"),
    ("mixtral_8x7b", *UNBALANCED),
    ("qwen3_30b_a3b", *SELECTIVE),
    ("qwen3_30b_a3b", *FULL),
    ("qwen3_30b_a3b", *WITHOUT_EP),
    ("qwen3_30b_a3b", *UNBALANCED),
    ("gpt_oss_120b", "no AC, per-device batch of 4 sequences", *WITHOUT_AC),
    ("gpt_oss_120b", "per-device batch of 4 sequences", WITHOUT_AC[0]),
    ("qwen3_235b_a22b", *WITHOUT_EP),
    ("qwen3_235b_a22b", "expert parallel over 4 nodes", "--parallelism.expert_parallel_degree=32"),
    ("qwen3_235b_a22b", *UNBALANCED),
    ("deepseek_v3_671b", "expert parallel over 8 nodes", "--parallelism.expert_parallel_degree=64"),
    ("deepseek_v3_671b", "two stages per rank, global batch of 16,384", *INTERLEAVED),
    ("deepseek_v3_671b", *SELECTIVE),
    ("deepseek_v3_671b", *ATTENTION),
    ("deepseek_v3_671b", *UNBALANCED),
)
PAGE, NOTEBOOK = ROOT / "docs" / "plan.md", ROOT / "benchmarks" / "NOTEBOOK.md"
RESULTS = "GiB, worst rank | spare | tokens/s per device | MFU | pipeline bubble |"
HEAD = f"| config | devices | layout | AC | float8 | {RESULTS}"
HEAD_VARIANTS = f"| config | variant | {RESULTS}"


def planned(name: str, *overrides: str) -> Plan:
    """Return the plan of a config with some options overridden."""
    return make_plan(load([name, *overrides]))


def results(plan: Plan) -> list[str]:
    """Return the last five cells of a line."""
    worst, memory = plan.worst.total / 2**30, plan.device.memory / 2**30
    return [
        f"{worst:.1f}",
        f"{memory - worst:.1f}",
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.mfu:.1%}",
        f"{plan.pipeline_bubble:.1%}" if plan.spans else "-",
    ]


def config_line(name: str) -> str:
    """Plan a config and return its line of the table."""
    return line_of(name, planned(name))


def line_of(name: str, plan: Plan) -> str:
    """Return the line of a config's plan."""
    return table_line(layout(name, plan.config, plan.world_size) + results(plan))


def layout(name: str, config: Config, world_size: int) -> list[str]:
    """Return the cells of a line before the planned figures, from a resolved config."""
    checkpointing = config.activation_checkpoint
    saved = f", {checkpointing.selective_ac_option}" if checkpointing.selective_ac_option != "op" else ""
    degrees, *experts = describe_mesh(config).split(", ")
    mesh = ", ".join([" x ".join(each for each in degrees.split(" x ") if not each.endswith(" 1")), *experts])
    (file,) = (ROOT / "configs").rglob(f"{name}.toml")
    return [
        f"[{name}](../{file.relative_to(ROOT)})",
        f"{world_size:,} {config.plan.device}",
        mesh,
        checkpointing.mode + saved,
        "yes" if config.float8.enable else "no",
    ]


def lines_of_the_page() -> dict[str, str]:
    """Return the lines of the first table of the page, by config."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    return {line.split("]")[0].removeprefix("| ["): line for line in lines}


def lines_of_the_notebook() -> dict[tuple[str, str], str]:
    """Return the lines of the table of variants, by config and variant."""
    lines = NOTEBOOK.read_text().partition(HEAD_VARIANTS)[2].partition("\n\n")[0].splitlines()[2:]
    return {tuple(line.removeprefix("| ").split(" | ")[:2]): line for line in lines}


def write(page: Path, head: str, table: Iterable[str]) -> None:
    """Replace the lines below a table's head on a page."""
    lines = []
    for text in table:
        print(text, flush=True)
        lines.append(text)
    before, _, rest = page.read_text().partition(head)
    after = rest[rest.index("\n\n") :]
    rule = "|" + " --- |" * (head.count("|") - 1)
    page.write_text("\n".join([before + head, rule, *lines]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help="a config; default: all")
    names = parser.parse_args().names or NAMES
    lines, variants = lines_of_the_page(), lines_of_the_notebook()
    write(PAGE, HEAD, (config_line(name) if name in names else lines[name] for name in NAMES))
    write(
        NOTEBOOK,
        HEAD_VARIANTS,
        (
            table_line([name, label, *results(planned(name, *options))]) if name in names else variants[name, label]
            for name, label, *options in VARIANTS
        ),
    )


if __name__ == "__main__":
    main()
