"""Measure the devices of all ranks, for `plan.device`."""

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.launch.progress_bar import progress_bar
from titanlite.metrics.devices import Device, find_by_gpu_name
from titanlite.tools.calibrate.collectives import best_bandwidths, measure_collectives, measure_slowdown
from titanlite.tools.calibrate.host import measure_dispatch, measure_host_link, measure_host_memory, measure_storage
from titanlite.tools.calibrate.operators import best_rates, measure_attention, measure_matmul, measure_operators
from titanlite.tools.calibrate.timing import Timer


def measure_device(
    device: torch.device, *, ranks_per_node: int, checkpoint_folder: Path | None = None, show_progress: bool = False
) -> Device:
    """Measure the devices of all ranks, and return one Device with the results, the same on all ranks. Every rank must
    call this function. Values that cannot be measured (power and, on a single node, the network) come from the data
    sheet of a known GPU. Storage is measured in `checkpoint_folder`, which must exist."""
    timer, world = Timer(device), dist.get_world_size()
    with progress_bar("calibrate", total=7, unit="groups of measurements", enabled=show_progress) as advance:

        def done(result: Any) -> Any:
            spreads.append(statistics.median(timer.spreads or [0.0]))
            timer.spreads.clear()
            advance(1)
            return result

        spreads: list[float] = []
        measured: dict[str, Any] = {"torch": torch.__version__, "ranks": world}
        measured["operators"] = done(measure_operators(timer))
        measured["matmul"] = done(measure_matmul(timer))
        measured["attention"], measured["attention_backward"] = done(measure_attention(timer))
        measured["operator_seconds"], measured["dtensor_seconds"] = done(measure_dispatch(timer, measured["operators"]))
        measured["collectives"] = done(measure_collectives(timer, ranks_per_node) if world > 1 else [])
        measured["slowdown"] = done(measure_slowdown(timer))
        host = {"host_memory_bandwidth": measure_host_memory(timer)}
        if device.type == "cuda":
            host["host_bandwidth"] = measure_host_link(timer)
        if checkpoint_folder is not None:
            host["storage_bandwidth"] = measure_storage(timer, checkpoint_folder, ranks_per_node)
        done(host)
    names = "memory", "matmul", "attention", "host", "interconnect"
    measured["spread"] = dict(zip(names, spreads, strict=False)) | {"network": spreads[4], "offload": spreads[6]}
    is_cpu = device.type == "cpu"
    name = platform.processor() or platform.machine() if is_cpu else torch.cuda.get_device_name(device)
    known = None if is_cpu else find_by_gpu_name(name)
    bandwidths = best_bandwidths(measured["collectives"])
    within = bandwidths.get(False, known.interconnect_bandwidth if known else 1e9)
    node_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        **best_rates(measured["matmul"], measured["operators"]),
        **host,
        memory=node_memory / ranks_per_node if is_cpu else torch.cuda.get_device_properties(device).total_memory,
        interconnect_bandwidth=within,
        network_bandwidth=bandwidths.get(True, known.network_bandwidth if known else within),
        watts=known.watts if known else 15.0,
        devices_per_node=ranks_per_node,
        source=f"measured by titanlite calibrate: {name}, {world} ranks, torch {torch.__version__}",
        kind="cpu" if is_cpu else "gpu",
        measured=measured,
    )
