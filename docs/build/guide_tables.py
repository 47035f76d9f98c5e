"""Write the tables of docs/memory_tables.md and docs/scaling.md from logs of plans.

    python -m docs.build.guide_tables
    python -m docs.build.guide_tables --price h100=2 --price a100_80=1    (prints the table of costs, at other prices)

The logs are those of guide_plans.py and plan_accuracy.py. Nothing is planned here. guide_figure.py draws the figure.
A test fails if a page differs from what this script writes.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.build import guide_plans as plans
from docs.build.guide_numbers import (
    GIB,
    GUIDES_OF_TENSOR,
    Records,
    Row,
    between,
    efficiency,
    fastest,
    gib,
    moved_bytes,
    published_pairs,
    published_tensor,
    sent_bytes,
    speed_range,
    table,
)
from docs.build.guide_plans import ROOT, Record
from docs.build.guide_statements import guides_of_memory, guides_of_scaling
from docs.build.page_tables import with_table
from titanlite.metrics.devices import DEVICES

MEMORY_PAGE, SCALING_PAGE = ROOT / "docs" / "memory_tables.md", ROOT / "docs" / "scaling.md"


# docs/memory_tables.md ------------------------------------------------------------------------------------------------


def cells_of_components(record: Record) -> Row:
    """Return the most bytes of each component, what is not of a component at the peak, and the peak."""
    most = record["most"]
    overhead = record["total"] - sum(record["at_peak"].values())
    other = most["temporary"] + most["communication"] + overhead
    sizes = [most["parameters"], most["gathered"], most["gradients"], most["optimizer"]]
    sizes += [most["activations"] + most["logits"], other, record["total"]]
    fits = "yes" if record["total"] <= DEVICES["h100"].memory else "no"
    return [*map(gib, sizes), fits]


def components(log: Records) -> str:
    """Return memory by component, mode of data parallel and number of devices."""
    rows = []
    for model in plans.MODELS:
        rows.append([model, "one device", "1", *cells_of_components(log[f"memory: {model}, one device"])])
        for mode in (*plans.MODES, plans.FULL_AC):
            replicates = mode == "data parallel"
            for n in (8,) if replicates else plans.DEVICES:
                devices = "4, 8, 64" if replicates else str(n)
                rows.append([model, mode, devices, *cells_of_components(log[f"memory: {model}, {mode}, {n}"])])
    head = "model | mode | devices | weights | gathered weights | gradients | optimizer states | activations | other"
    return table(f"{head} | peak | fits 80 GB", rows)


def communication(log: Records) -> str:
    """Return the bytes that each mode sends in a step, and relative to data parallel."""
    rows = []
    for dtype, steps in plans.SENT:
        bases = {}
        for mode in plans.MODES:
            record = log[plans.name_of_sent(mode, dtype, steps)]
            bases[mode] = sent_bytes(record)
            kinds = [gib(moved_bytes(record, kind)) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
            ratio = f"{bases[mode] / bases['data parallel']:.2f}"
            rows.append([dtype, str(steps), mode, *kinds, gib(bases[mode]), ratio])
    head = "gradients reduced in | accumulation steps | mode | all-gather, GiB | reduce-scatter, GiB | all-reduce, GiB"
    return table(f"{head} | sent by a rank, GiB | relative to data parallel", rows)


def schedules(log: Records) -> str:
    """Return memory, pipeline bubble and speed by schedule."""
    records = {name: log[f"schedule: {name}, 16 microbatches"] for name in plans.SCHEDULES}
    first = records["1F1B"]["activations_by_rank"][0]
    rows = []
    for name, record in records.items():
        activations = record["activations_by_rank"]
        rows.append(
            [
                name,
                str(plans.SCHEDULES[name]),
                *(gib(size) for size in activations),
                f"{max(activations) / first:.2f}",
                gib(record["total"]),
                f"{record['bubble']:.1%}",
                f"{speed_range(record)[0]:,.0f}",
            ]
        )
    head = "schedule | stages per rank | activations: rank 0 | rank 1 | rank 2 | rank 3 | relative to 1F1B"
    return table(f"{head} | peak, worst rank | pipeline bubble | tokens/s per device", rows)


def savings(log: Records) -> str:
    """Return what each technique saves, and its speed."""
    base = log["saving: as the config is"]
    rows = []
    for name in plans.SAVINGS:
        record = log[f"saving: {name}"]
        change = (record["total"] - base["total"]) / GIB
        relative = between(efficiency(record, base)) if record is not base else "100%"
        offloaded = sum(record["offloaded"].values())
        cells = [gib(record["total"]), f"{change:+.1f}", gib(offloaded) if offloaded else "-"]
        rows.append([name, *cells, between(speed_range(record), "{:,.0f}"), relative])
    head = "8B on 8 H100 | peak, GiB | change, GiB | in host memory, GiB | tokens/s per device (range) | relative speed"
    return table(f"{head} (range)", rows)


# docs/scaling.md ------------------------------------------------------------------------------------------------------


def tensor_parallel(log: Records) -> str:
    """Return the efficiency of tensor parallel by degree."""
    guides = {n: f"{low} to {high}%" for n, (low, high) in GUIDES_OF_TENSOR.items()}
    measured = {n: f"{ratio:.0%}" for n, ratio in published_tensor().items()}
    rows = []
    for n in plans.TENSOR_DEGREES:
        where = "one device" if n == 1 else "within a node" if n <= 8 else "2 nodes"
        cells = [str(n), where]
        for size in plans.TENSOR_MODELS:
            record, base = (log[f"tensor: {size}, tp {degree}"] for degree in (n, 1))
            cells += [f"{speed_range(record)[0]:,.0f}", between(efficiency(record, base)) if n > 1 else "100%"]
        rows.append([*cells, measured.get(n, "-"), guides.get(n, "-")])
    head = "tp | where | 8B: tokens/s per device | 8B: efficiency (range) | 70B: tokens/s per device"
    return table(f"{head} | 70B: efficiency (range) | KempnerForge 7B, H200, published | guides", rows)


def data_parallel(log: Records) -> str:
    """Return the efficiency of FSDP and HSDP by number of devices."""
    rows = []
    for batch in plans.BATCHES:
        base = log[f"data: {batch}, FSDP, 8"]
        for n in plans.BATCH_DEVICES[batch]:
            cells = [batch, f"{n:,}"]
            for name in plans.REPLICAS:
                record = log.get(f"data: {batch}, {name}, {n}")
                cells.append(
                    between(efficiency(record, base))
                    if record and record is not base
                    else "-"
                    if not record
                    else "100%"
                )
            rows.append([*cells, f"{speed_range(log[f'data: {batch}, FSDP, {n}'])[0]:,.0f}"])
    return table(f"per-device batch | devices | {' | '.join(plans.REPLICAS)} | FSDP: tokens/s per device", rows)


LLAMA_3 = 430.0, 400.0
"""TFLOP/s of 405B on 8,192 and 16,384 H100, with the same global batch: arXiv:2407.21783, table 4."""


def published_scaling(log: Records) -> str:
    """Return the efficiency of published runs beside that of their plans."""
    rows = []
    for label, (small, large) in published_pairs().items():
        ratios = (f"{large[key] / small[key]:.1%}" for key in ("tokens/s", "planned"))
        devices = f"{small['devices']:,} to {large['devices']:,}"
        rows.append([f"[{label}]({large['url']})", devices, *ratios])
    small, large = (log[f"data: 405B, tp 8 x pp 16, {n}"] for n in (8192, 16384))
    label = "[Llama 3, 405B, tp 8 x pp 16, half the batch per pipeline](https://arxiv.org/abs/2407.21783)"
    planned = between(efficiency(large, small), "{:.1%}")
    rows.append([label, "8,192 to 16,384", f"{LLAMA_3[1] / LLAMA_3[0]:.1%}", planned])
    return table("run | devices | published efficiency | planned efficiency", rows)


def bubbles(log: Records) -> str:
    """Return the pipeline bubble by number of microbatches."""
    rows, p = [], 4
    for m in plans.MICROBATCHES:
        names = (*plans.BUBBLES, "1F1B, unequal stages")
        records = [log[f"schedule: {name}, {m} microbatches"] for name in names]
        cells = [str(m), f"{(p - 1) / m:.1%}", f"{(p - 1) / (m + p - 1):.1%}"]
        cells += [f"{record['bubble']:.1%}" for record in records]
        rows.append([*cells, between(speed_range(records[0]), "{:,.0f}")])
    head = "microbatches | (p - 1) / m | (p - 1) / (m + p - 1) | 1F1B, simulated | Interleaved1F1B, 2 stages per rank"
    return table(f"{head} | ZBVZeroBubble | 1F1B, unequal stages | 1F1B: tokens/s per device (range)", rows)


TOKENS = {"8B": 160e9, "70B": 1.4e12}
"""Tokens of a run: 20 per parameter."""
PRICES = {"a100_80": 1.3, "h100": 3.0, "b200": 5.25}
"""US dollars per device and hour that are assumed: docs/scaling.md has the source."""


def costs(log: Records, prices: Mapping[str, float]) -> str:
    """Return days, device-hours, energy and money of a run."""
    rows = []
    for size, (_, n, _, candidates) in plans.COST_MODELS.items():
        for device in candidates:
            for dtype in ("bf16", "float8"):
                if not (best := fastest(log, size, device, dtype)):
                    continue
                name, record = best
                rates = speed_range(record)
                hours = tuple(TOKENS[size] / rates[i] / 3600 for i in (0, 2, 1))
                cells = [f"{size}, {TOKENS[size] / 1e9:,.0f}", f"{n} {device}", dtype, name, f"{rates[0]:,.0f}"]
                cells.append(between(tuple(x / n / 24 for x in hours), "{:,.1f}"))
                cells.append(between(tuple(x / 1000 for x in hours), "{:,.1f}"))
                cells.append(between(tuple(x * record["watts"] / 1e6 for x in hours), "{:,.1f}"))
                cells.append(between(tuple(x * prices[device] / 1000 for x in hours), "{:,.1f}"))
                rows.append(cells)
    head = "model, billion tokens | devices | products | AC, sequences per device | tokens/s per device"
    return table(f"{head} | days (range) | 1,000 device-hours (range) | MWh (range) | 1,000 $ (range)", rows)


META_HOURS = {
    "Llama 2 7B": (184_320, 2.0, "https://github.com/meta-llama/llama/blob/main/MODEL_CARD.md"),
    "Llama 2 70B": (1_720_320, 2.0, "https://github.com/meta-llama/llama/blob/main/MODEL_CARD.md"),
    "Llama 3 8B": (1.3e6, 15.0, "https://github.com/meta-llama/llama3/blob/main/MODEL_CARD.md"),
    "Llama 3 70B": (6.4e6, 15.0, "https://github.com/meta-llama/llama3/blob/main/MODEL_CARD.md"),
}
"""GPU-hours that model cards state, and trillions of tokens."""


def published_hours(log: Records) -> str:
    """Return the device-hours that model cards state beside those that are planned."""
    rows = []
    for name, (hours, trillions, url) in META_HOURS.items():
        size, device = name.split()[-1], "A100" if name.startswith("Llama 2") else "H100"
        record = log[f"cost: {name}"] if device == "A100" else fastest(log, size, "h100", "bf16")[1]
        rates = speed_range(record)
        planned = tuple(trillions * 1e12 / rates[i] / 3600 / 1000 for i in (0, 2, 1))
        cells = [f"[{name}]({url})", device, f"{trillions:g}", f"{hours / 1000:,.0f}", between(planned, "{:,.0f}")]
        rows.append([*cells, f"{hours / 1000 / planned[0]:.2f}"])
    head = "model | device | trillion tokens | published, 1,000 device-hours | planned (range)"
    return table(f"{head} | published / planned", rows)


# Pages ----------------------------------------------------------------------------------------------------------------

TABLES: dict[Path, dict[str, Callable[[Records], str]]] = {
    MEMORY_PAGE: {
        "components": components,
        "guides": guides_of_memory,
        "communication": communication,
        "schedules": schedules,
        "savings": savings,
    },
    SCALING_PAGE: {
        "tensor": tensor_parallel,
        "data": data_parallel,
        "published": published_scaling,
        "bubbles": bubbles,
        "costs": lambda log: costs(log, PRICES),
        "hours": published_hours,
        "guides": guides_of_scaling,
    },
}


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with the text between the markers of each table replaced."""
    for name, content in tables.items():
        text = with_table(text, name, content)
    return text


def page(path: Path, log: Records) -> str:
    """Return a page with its tables as the logs have them."""
    return with_tables(path.read_text(), {name: write(log) for name, write in TABLES[path].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", action="append", default=[], metavar="DEVICE=DOLLARS", help="per device and hour")
    prices, log = parser.parse_args().price, plans.read_log()
    if prices:
        own = {device: float(price) for device, _, price in (text.partition("=") for text in prices)}
        print(costs(log, PRICES | own), end="")
        return
    for path in TABLES:
        path.write_text(page(path, log))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
