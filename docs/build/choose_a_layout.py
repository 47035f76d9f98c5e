"""Plan the layouts that guides name by model size and devices, search for faster ones, and write the table of
docs/choose_a_layout.md.

    python -m docs.build.choose_a_layout            (about 20 minutes on two cores, without its log)

All layouts of a row train the same tokens per step in bfloat16, compiled, on H100 80 GB. Of a mesh, candidates of
`titanlite advise` are planned until one fits, without activation checkpointing (AC), with selective and with full AC;
of a pipeline with one stage per rank and with two, in microbatches of 1, 2 and 4 sequences. Then `titanlite advise`
searches. Every plan that was made is a line of benchmarks/logs/choose_a_layout.jsonl, and what stands there is not
planned again. A test compares the page with it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch

from docs.build import page_tables
from titanlite.config import load
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.metrics.devices import DEVICES
from titanlite.tools.advise.estimates import estimate_bytes
from titanlite.tools.advise.search import PlannedLayout, plan_candidate, search
from titanlite.tools.advise.search_space import GIB, Candidate, Mesh, Task, candidates
from titanlite.tools.plan.planner import resolve
from titanlite.tools.plan.result import range_of, spread_of_difference

ROOT = Path(__file__).resolve().parents[2]
LOG, PAGE = ROOT / "benchmarks" / "logs" / "choose_a_layout.jsonl", ROOT / "docs" / "choose_a_layout.md"
BEGIN, END = page_tables.markers("layouts")
TOKENS, MANY_TOKENS = 2**22, 2**24
"""Tokens of a step: of Llama 2 and 3 up to 70B, and of Llama 3 405B."""
MOST_TRIES = 3
"""Plans of a mesh, a mode of AC, a number of stages and a microbatch until one fits."""
DOUBT = 1.25
"""By which factor the estimate of memory may be too high: what it says needs more is not planned."""

Log = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """A rule of thumb: a model on some devices, the mesh that guides name, and others to plan."""

    model: str
    seq_len: int
    n_devices: int
    guides: Mesh
    others: tuple[Mesh, ...] = ()
    tokens: int = TOKENS
    untied: bool = False
    """Whether the output head has weights of its own, against the model's default, as a pipeline needs it. The layout
    search has no such option, so it is left out."""
    config: str = ""
    """A reference config with the guides' mesh and the row's tokens, which is planned too."""


def mesh(*, pp: int = 1, replicate: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> Mesh:
    """Return a mesh with a ring for context parallelism."""
    return Mesh(pp, replicate, dp, cp, 1, tp)


ROWS = {
    "7B, 1": Row("llama2_7b", 4096, 1, mesh()),
    "7B, 8": Row("llama2_7b", 4096, 8, mesh(replicate=8)),
    "13B": Row("llama2_13b", 4096, 8, mesh(dp=4, tp=2)),
    "30B": Row("llama_30b", 2048, 16, mesh(pp=2, dp=2, tp=4)),
    "70B": Row("llama3_70b", 8192, 64, mesh(pp=4, dp=2, tp=8)),
    "175B": Row(
        *("gpt_175b", 2048, 256, mesh(pp=8, dp=4, tp=8)),
        (mesh(dp=256), mesh(dp=64, tp=4), mesh(dp=32, tp=8), mesh(pp=2, dp=16, tp=8), mesh(pp=2, dp=32, tp=4)),
        untied=True,
    ),
    "405B": Row(
        *("llama3_405b", 8192, 2**14, mesh(pp=16, dp=128, tp=8), (mesh(dp=1024, cp=2, tp=8),), MANY_TOKENS),
        config="405b",
    ),
    "8B, 1M": Row("llama3_8b", 2**20, 128, mesh(pp=4, cp=4, tp=8)),
}


def task_of(row: Row) -> Task:
    """Return the task of a row, as `titanlite advise` makes it."""
    return Task(row.model, row.seq_len, row.tokens // row.seq_len, row.n_devices, "h100", DEVICES["h100"])


def of_mesh(task: Task, degrees: Mesh, checkpointing: str) -> list[Candidate]:
    """Return the candidates of a mesh with a mode of AC that may fit, those with the largest batch first; of full AC at
    least the one that needs the least memory."""
    one_replica = degrees._replace(dp_replicate=1, dp_shard=degrees.dp)  # the search replicates over full nodes only
    found = [
        candidate._replace(mesh=degrees)
        for candidate in candidates(task)
        if candidate.mesh == one_replica and candidate.compiled and candidate.checkpointing == checkpointing
    ]
    sizes = {candidate: estimate_bytes(task, candidate) for candidate in found}
    fitting = [candidate for candidate in found if sizes[candidate] <= DOUBT * task.device.memory]
    if checkpointing == "full" and not fitting:
        return [min(found, key=sizes.__getitem__)]
    return sorted(fitting, key=lambda candidate: (-candidate.local_batch, candidate.microbatch))


def load_layout(row: Row, candidate: Candidate) -> LoadedConfig:
    """Return a candidate's config. Raises ConfigError if train.py would reject it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "layout.toml")
        file.write_text(tomli_w.dumps(candidate.options(task_of(row))))
        config = load([str(file), *(["--model.tie_embeddings=false"] if row.untied else [])])
    resolve(config, row.n_devices)
    return config


def plan_mesh(name: str, row: Row, degrees: Mesh, log: Log) -> None:
    """Plan candidates of a mesh with each mode of AC."""
    task = task_of(row)
    kinds = [(stages, size) for stages in (1, 2) for size in (1, 2, 4)] if degrees.pp > 1 else [(1, None)]
    for stages, microbatch in kinds:
        for checkpointing in ("none", "selective", "full"):
            found = [each for each in of_mesh(task, degrees, checkpointing) if each.stages == stages]
            plan_until_one_fits(name, row, [x for x in found if microbatch in (None, x.microbatch)], log)


def plan_until_one_fits(name: str, row: Row, found: list[Candidate], log: Log) -> None:
    """Plan candidates until one fits."""
    task, tried = task_of(row), 0
    for candidate in found:
        if tried == MOST_TRIES:
            break
        if key_of(name, candidate) not in log:
            try:
                config = load_layout(row, candidate)
            except ConfigError:
                continue
            add(name, plan_candidate(config, candidate, row.n_devices), log)
        tried += 1
        if log[key_of(name, candidate)]["bytes"] <= task.device.memory:
            break


def plan_config(name: str, row: Row, log: Log) -> None:
    """Plan a row's reference config, without async TP, as all other rows."""
    loaded = load([row.config, "--parallelism.enable_async_tensor_parallel=false"])
    config, *_ = resolve(loaded)
    batch = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    stages = config.parallelism.n_stages // config.parallelism.pipeline_parallel_degree
    pipeline = config.parallelism.pipeline_parallel_schedule, stages
    candidate = Candidate(row.guides, *pipeline, *batch, config.activation_checkpoint.mode)
    if config.tokens_per_step != row.tokens:
        raise ValueError(f"{row.config} has {config.tokens_per_step:,} tokens per step, not {row.tokens:,}")
    if key_of(name, candidate) not in log:
        add(name, plan_candidate(loaded, candidate, row.n_devices), log)


def search_row(name: str, row: Row, log: Log) -> None:
    """Search the layouts of a row as `titanlite advise` does, and log what it plans and recommends."""
    if row.untied or row.n_devices == 1 or any(plan["row"] == name and plan["is_recommended"] for plan in log.values()):
        return
    result = search(task_of(row))
    recommended = result.recommended()
    for layout in result.planned:
        if not layout.problem and (layout is recommended or key_of(name, layout.candidate) not in log):
            add(name, layout, log, is_recommended=layout is recommended)


def key_of(name: str, candidate: Candidate) -> str:
    """Return the key of a plan in the log."""
    return f"{name}: {json.dumps(candidate)}"


def add(name: str, layout: PlannedLayout, log: Log, *, is_recommended: bool = False) -> None:
    """Add a plan to the log."""
    if layout.problem:
        raise RuntimeError(f"{name}, {layout.candidate}: {layout.problem}")
    fields = ("bytes", "seconds", "tokens_per_second", "mfu", "pipeline_bubble", "shares", "spread")
    plan = {"row": name, "candidate": layout.candidate, "is_recommended": is_recommended, "torch": torch.__version__}
    text = json.dumps({**plan, **{field: getattr(layout, field) for field in fields}})
    print(f"{name}: {layout.candidate}: {layout.bytes / GIB:.1f} GiB, {layout.tokens_per_second:,.0f}", flush=True)
    with LOG.open("a") as file:
        file.write(text + "\n")
    log[key_of(name, layout.candidate)] = json.loads(text)


def read_log() -> Log:
    """Return the plans by row and candidate."""
    plans = map(json.loads, LOG.read_text().splitlines() if LOG.exists() else [])
    return {f"{plan['row']}: {json.dumps(plan['candidate'])}": plan for plan in plans}


def of_row(name: str, log: Log) -> list[dict[str, Any]]:
    """Return the plans of a row that fit, the fastest first."""
    task = task_of(ROWS[name])
    plans = [plan for plan in log.values() if plan["row"] == name and plan["bytes"] <= task.device.memory]
    return sorted(plans, key=lambda plan: plan["seconds"])


def has_mesh(plan: dict[str, Any], degrees: Mesh) -> bool:
    return Mesh(*plan["candidate"][0]) == degrees


def described(plan: dict[str, Any]) -> str:
    """Return a layout in words."""
    candidate = Candidate(Mesh(*plan["candidate"][0]), *plan["candidate"][1:])
    pipeline = [candidate.pipeline, f"microbatch {candidate.microbatch}"] if candidate.mesh.pp > 1 else []
    return ", ".join([str(candidate.mesh), *pipeline, f"AC {candidate.checkpointing}"])


def numbers(plan: dict[str, Any]) -> str:
    """Return memory, speed and the range of the speed."""
    speed, seconds = plan["tokens_per_second"], plan["seconds"]
    shortest, longest = range_of(seconds, plan["spread"])
    low, high = (speed * seconds / end for end in (longest, shortest))
    return f"{plan['bytes'] / GIB:.1f} GiB, {speed:,.0f} ({low:,.0f} to {high:,.0f})"


def table_line(name: str, log: Log) -> str:
    """Return a row of the table: the guides' layout beside the one that the layout search recommends or, where it was
    not searched or the search found none as fast, the fastest one that was planned."""
    row, fitting = ROWS[name], of_row(name, log)
    guides = [plan for plan in fitting if has_mesh(plan, row.guides)]
    cells = [name.partition(",")[0], f"{row.n_devices:,}", f"{row.seq_len:,}"]
    if guides:
        cells.append(f"{described(guides[0])}: {numbers(guides[0])}")
    else:
        least = min((plan for plan in log.values() if plan["row"] == name and has_mesh(plan, row.guides)), key=_bytes)
        cells.append(f"{described(least)}: does not fit, {least['bytes'] / GIB:.1f} GiB")
    best = next((plan for plan in fitting if plan["is_recommended"]), fitting[0] if fitting else None)
    if best is None:
        return page_tables.table_line([*cells, "nothing fits", ""])
    if guides and guides[0]["seconds"] <= best["seconds"]:
        return page_tables.table_line([*cells, "the same", ""])
    cells.append(f"{described(best)}: {numbers(best)}")
    if not guides:
        return page_tables.table_line([*cells, ""])
    faster = guides[0]["seconds"] / best["seconds"] - 1
    doubt = spread_of_difference(guides[0]["spread"], best["spread"])[0] / best["seconds"]
    return page_tables.table_line([*cells, f"{faster:+.0%}, may be wrong by {doubt:.0%}"])


def _bytes(plan: dict[str, Any]) -> int:
    return plan["bytes"]


def table(log: Log) -> str:
    """Return the table of the page."""
    head = ["model", "devices", "sequence", "layout of guides", "layout by the plan", "faster by"]
    return "\n".join([*page_tables.table_lines(head, []), *(table_line(name, log) for name in ROWS)])


def page(text: str, log: Log) -> str:
    """Return the page with its table."""
    return page_tables.with_table(text, "layouts", f"{table(log)}\n")


def main() -> None:
    log = read_log()
    for name, row in ROWS.items():
        for degrees in (row.guides, *row.others):
            plan_mesh(name, row, degrees, log)
        if row.config:
            plan_config(name, row, log)
        search_row(name, row, log)
    PAGE.write_text(page(PAGE.read_text(), log))


if __name__ == "__main__":
    main()
