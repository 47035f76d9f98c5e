"""Compare the kernels of a profiled step with the plan of the same config, by kind and by shape of product.

    python -m benchmarks.planner.step_trace TRACE.json.gz CONFIG.toml [--section.key=value ...] --plan.device=h200

The trace is of torch's profiler, of one step of one rank with as many gradient accumulation steps as the config. A gap
between kernels counts as idle. Planned products with the most FLOPs are the longest ones of their type in the trace.

Prints milliseconds and numbers of kernels by kind, products by FLOPs, the longest other kernels, and how far the host
was ahead of the device: the time from the launch of a kernel to its begin.
"""

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config import load
from titanlite.tools.plan.cost_model import CostModel
from titanlite.tools.plan.dry_run import dry_run_accumulation_steps
from titanlite.tools.plan.op_trace import Work
from titanlite.tools.plan.planner import make_plan, takes_cudnn
from titanlite.tools.plan.segments import Pass, is_layer

KINDS = {
    "products, float8": r"nvjet_\w*qqtst|e4m3",
    "products, 16 bits": r"nvjet|gemm",
    "attention, backward": r"sdpa\w*bprop|cudnn::fusion|flash_bwd",
    "attention, forward": r"sdpa\w*fprop|flash_fwd",
    "compiled kernels of blocks": r"triton_(?!\w*log_softmax)",
    "gradient norm": r"LpNorm|lpnorm",
    "optimizer": r"FusedOptimizer",
}
"""The first pattern that a kernel's name contains gives its kind."""
OTHER, LONGEST = "loss, eager kernels, copies", 16


def kind_of_work(work: Work, category: str, *, in_layer: bool) -> str:
    """Return the kind of a planned operator."""
    if category == "matmul":
        return "products, float8" if work.dtype == "fp8" else "products, 16 bits"
    if category == "attention":
        return f"attention, {'backward' if 'backward' in work.name else 'forward'}"
    if "fused_adam" in work.name or "foreach_norm" in work.name:
        return "optimizer" if "adam" in work.name else "gradient norm"
    return "compiled kernels of blocks" if in_layer else OTHER


def planned(arguments: list[str]) -> Iterator[tuple[str, Work, float, float]]:
    """Yield the operators of a planned step: kind, operator, seconds, and how often the step runs it."""
    loaded, runs = load(arguments), {}
    plan = make_plan(loaded, world_size=1, cache=runs)
    ((run,),) = runs.values()
    config, device = plan.config, plan.device
    rates = {"cudnn": takes_cudnn(config, device), "name": Path(config.plan.device).stem}
    model = CostModel(device, run.axes, 1, **rates)
    times = {("update",): run.scale}
    for number, count in dry_run_accumulation_steps(config.gradient_accumulation_steps).items():
        times |= {(Pass.FORWARD, number): count, (Pass.BACKWARD, number): count}
    for phase, count in times.items():
        for segment in run.phases[phase]:
            for work in (event for event in segment.events if isinstance(event, Work)):
                category, seconds = model.work_seconds(work)
                yield kind_of_work(work, category, in_layer=is_layer(segment)), work, seconds, count
    print(f"planned step {1e3 * plan.step_seconds:.1f} ms, of which idle {1e3 * plan.cost.seconds['host']:.1f}")


def main() -> None:
    trace = json.loads(gzip.decompress(Path(sys.argv[1]).read_bytes()))
    events: list[dict[str, Any]] = trace["traceEvents"]
    print(*(f"{device['name']}, {device['totalGlobalMem']} bytes" for device in trace["deviceProperties"]))
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_device.sort(key=lambda kernel: kernel["ts"])
    launches = {each["args"].get("correlation"): each["ts"] for each in events if "cuda_" in each.get("cat", "")}
    measured: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    end, gaps, ahead = on_device[0]["ts"], [], []
    for kernel in on_device:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel["name"])), OTHER)
        measured[kind].append(kernel)
        gaps.append(max(kernel["ts"] - end, 0.0))
        ahead.append(kernel["ts"] - launches.get(kernel["args"]["correlation"], kernel["ts"]))
        end = max(end, kernel["ts"] + kernel["dur"])
    ms, number, products = Counter(), Counter(), defaultdict(list)
    for kind, work, seconds, count in planned(sys.argv[2:]):
        ms[kind] += 1e3 * seconds * count
        number[kind] += count
        if kind.startswith("products"):
            products[kind].append((work.flops, seconds, " x ".join(map(str, work.sizes[1:]))))
    long = [gap for gap in gaps if gap > 10]
    print(f"measured step {(end - on_device[0]['ts']) / 1e3:.1f} ms, of which idle {sum(gaps) / 1e3:.1f}: ", end="")
    print(f"{len(gaps)} gaps, {sum(long) / 1e3:.1f} ms in the {len(long)} above 10 us")
    print(f"host ahead by {min(ahead) / 1e3:.2f} to {max(ahead) / 1e3:.2f} ms\n")
    print(f"{'kind':34}{'ms':>9}{'planned':>9}{'kernels':>9}{'planned':>9}")
    for kind in [*KINDS, OTHER]:
        took = sum(kernel["dur"] for kernel in measured[kind]) / 1e3
        print(f"{kind:34}{took:9.1f}{ms[kind]:9.1f}{len(measured[kind]):9}{round(number[kind]):9}")
    print(f"\n{'products, m x n x k of one':34}{'number':>9}{'us':>9}{'planned':>9}{'TFLOP/s':>9}{'planned':>9}")
    for kind, own in products.items():
        longest, groups = sorted((kernel["dur"] for kernel in measured[kind]), reverse=True), defaultdict(list)
        own.sort(reverse=True)
        for (flops, seconds, sizes), took in zip(own, longest, strict=True):
            groups[flops].append((took, 1e6 * seconds, sizes))
        for flops, rows in groups.items():
            took, plan = (sum(column) / len(rows) for column in list(zip(*rows, strict=True))[:2])
            rates = f"{flops / took / 1e6:9.0f}{flops / plan / 1e6:9.0f}"
            print(f"{f'{kind[10:]}, {rows[0][2]}':34}{len(rows):9}{took:9.1f}{plan:9.1f}{rates}")
    others: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in (kernel for kind in [*KINDS, OTHER][4:] for kernel in measured[kind]):
        others[kernel["name"]].append(kernel["dur"])
    print(f"\n{'ms':>9}{'number':>9}{'us':>9}  the longest other kernels")
    for name, took in sorted(others.items(), key=lambda item: -sum(item[1]))[:LONGEST]:
        print(f"{sum(took) / 1e3:9.1f}{len(took):9}{sum(took) / len(took):9.1f}  {name[:140]}")


if __name__ == "__main__":
    main()
