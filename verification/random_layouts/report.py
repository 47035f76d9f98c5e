"""Count what the layouts of a log have had: results, options and their values, and pairs of techniques."""

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verification.random_layouts.run import EQUAL

LINE = re.compile(r"seed (\d+) \| (\d+) ranks? \| (\w[\w ]*?) \| (.*) \| ([\d.]+) s \| (.*)")
Values = dict[str, str]
"""Options as they stand in the log."""

TECHNIQUES: dict[str, Callable[[Values], bool]] = {
    "replicate": lambda o: "parallelism.data_parallel_replicate_degree" in o,
    "shard": lambda o: int(o.get("parallelism.data_parallel_shard_degree", 1)) > 1,
    "tp": lambda o: "parallelism.tensor_parallel_degree" in o,
    "ring": lambda o: (
        o.get("parallelism.context_parallel_degree") != o.get("parallelism.context_parallel_ulysses_degree")
    ),
    "Ulysses": lambda o: "parallelism.context_parallel_ulysses_degree" in o,
    "ep": lambda o: "parallelism.expert_parallel_degree" in o,
    "one stage per rank": lambda o: (
        o.get("parallelism.pipeline_parallel_schedule", "1F1B") in ("GPipe", "1F1B")
        and "parallelism.pipeline_parallel_degree" in o
    ),
    "interleaved": lambda o: o.get("parallelism.pipeline_parallel_schedule") in ("Interleaved1F1B", "LoopedBFS"),
    "split backward": lambda o: (
        o.get("parallelism.pipeline_parallel_schedule", "") in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    "reshard always": lambda o: o.get("parallelism.fsdp_reshard_after_forward") == "always",
    "reshard never": lambda o: o.get("parallelism.fsdp_reshard_after_forward") == "never",
    "reduce last": lambda o: "parallelism.fsdp_reduce_gradients" in o,
    "prefetch": lambda o: any("prefetch" in key for key in o),
    "no loss parallel": lambda o: "parallelism.disable_loss_parallel" in o,
    "experts": lambda o: "model.moe.n_experts" in o,
    "latent attention": lambda o: "model.mla.kv_lora_rank" in o,
    "window": lambda o: o.get("model.sliding_window", "0") != "0",
    "documents": lambda o: "training.document_mask" in o,
    "tied embeddings": lambda o: o.get("model.tie_embeddings") == "True",
    "biases": lambda o: o.get("model.attention_bias", "none") != "none" or o.get("model.mlp_bias") == "True",
    "norms of queries and keys": lambda o: o.get("model.qk_norm", "False") != "False",
    "full AC": lambda o: o.get("activation_checkpoint.mode") == "full",
    "selective AC": lambda o: o.get("activation_checkpoint.mode") == "selective",
    "groups of blocks": lambda o: "activation_checkpoint.layers_per_checkpoint" in o,
    "compile": lambda o: "compile.enable" in o,
    "loss chunks": lambda o: o.get("training.loss_chunks", "1") != "1",
    "CPU offload": lambda o: "training.enable_cpu_offload" in o,
    "states offload": lambda o: "optimizer.enable_cpu_offload" in o,
    "Muon": lambda o: o.get("optimizer.name") == "Muon",
    "low-bit states": lambda o: "optimizer.state_dtype" in o,
    "float8": lambda o: "float8.enable" in o,
    "int8": lambda o: "int8.enable" in o,
    "16 bits": lambda o: "float16" in str(o) and "float8.enable" not in o,
    "text": lambda o: "training.dataset" in o or "training.datasets" in o,
}


def read(log: Path) -> list[tuple[int, int, str, float, Values]]:
    """Return the seed, the ranks, the kind of result, the seconds and the options of each layout of a log."""
    layouts = []
    for match in filter(None, map(LINE.fullmatch, log.read_text().splitlines())):
        seed, ranks, kind, _, seconds, arguments = match.groups()
        options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments.split())
        layouts.append((int(seed), int(ranks), kind, float(seconds), options))
    return layouts


def report(log: Path) -> str:
    """Return the counts of a log, in lines."""
    layouts = read(log)
    lines = [f"{len(layouts)} layouts: " + _counts(Counter(kind for _, _, kind, _, _ in layouts))]
    lines.append("ranks: " + _counts(Counter(ranks for _, ranks, *_ in layouts)))
    seconds = [each for _, _, _, each, _ in layouts]
    lines.append(f"seconds: median {statistics.median(seconds):.1f}, in all {sum(seconds):.0f}")
    sizes = [len(options) for *_, options in layouts]
    lines.append(f"options that are set: median {statistics.median(sizes):.0f}, {min(sizes)} to {max(sizes)}")
    found = [{name for name, has in TECHNIQUES.items() if has(options)} for *_, options in layouts]
    lines.append("techniques: " + _counts(Counter(name for names in found for name in names)))
    lines.append(f"techniques in a layout: median {statistics.median(len(names) for names in found):.0f}")
    pairs = Counter(pair for names in found for pair in itertools.combinations(sorted(names), 2))
    possible = list(itertools.combinations(sorted(TECHNIQUES), 2))
    lines.append(f"pairs of techniques: {len(pairs)} of {len(possible)} occur; the others:")
    lines.append("    " + ", ".join(f"{a} + {b}" for a, b in possible if (a, b) not in pairs))
    values: dict[str, Counter[str]] = {}
    for *_, options in layouts:
        for key, value in options.items():
            values.setdefault(key, Counter())[value] += 1
    for key, counts in sorted(values.items()):
        lines.append(f"{key}: {counts.total()}: {_counts(counts)}")
    lines += [f"seed {seed}: {kind}" for seed, _, kind, _, _ in layouts if kind != EQUAL]
    return "\n".join(lines)


def _counts(counter: Counter, most: int = 40) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in counter.most_common(most))
    return shown + (f" and {len(counter) - most} others" if len(counter) > most else "")
