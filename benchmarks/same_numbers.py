"""Compare the numbers of two checkouts bit for bit, over short runs that cover whatever touches a step.

    python benchmarks/same_numbers.py OLD NEW [--runs NAME ...] [--log FILE]

OLD and NEW are folders of checkouts, as `git worktree add ../old REVISION` makes them. Each run trains a tiny model in
both, on CPUs with gloo, in the same environment, and compares

- the exit status, and every tag of metrics.jsonl whose value does not depend on the clock;
- every tensor of the last checkpoint: weights, optimizer states, random number generators;
- of each rank, the sequence of collectives from the first optimizer step to the last: operator, ranks of its group,
  bytes of its tensors; and how often the host reads a value of a tensor, for which it would wait for a GPU.

Exit status: 0 all runs are equal; 1 some differ, each with the first difference.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from python_path import with_python_path
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

BASE = {
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.ffn_dim": 64,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.steps": 6,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": 12,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
}
CLOCK = ("time_metrics/", "memory/", "throughput", "tflops", "mfu", "time")
"""Beginnings of the tags that depend on the clock or the machine."""
READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


class Run(NamedTuple):
    """A training run: how many ranks, its options beside BASE, and those of a second launch that resumes it."""

    ranks: int
    options: dict[str, Any]
    then: dict[str, Any] | None = None
    groups: int = 1
    """Replica groups, each a launch of so many ranks."""
    status: int = 0
    """Exit status that every launch must have: a run that does not even start compares nothing."""


TP, PP, CP = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
EXPERTS = {"model.moe.n_experts": 4, "model.moe.n_experts_per_token": 2, "model.moe.expert_dim": 32}
BALANCE = {"model.moe.balance_bias": True, "model.moe.balance_bias_rate": 0.01}
COMPILE = {"compile.enable": True, "compile.backend": "aot_eager"}
INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "model.n_layers": 4}
GROUPS = {"fault_tolerance.enable": True, "fault_tolerance.group_size": 2, "fault_tolerance.min_replica_size": 2}
GROUPS |= {"training.global_batch_size": 8}
DILOCO = {"fault_tolerance.semi_sync_method": "diloco", "fault_tolerance.sync_steps": 2}
CONVERSATIONS = {
    "training.dataset": "json",
    "training.dataset_format": "messages",
    "training.dataset_path": "{data}/conversations.jsonl",
    "model.hf_assets_path": "{data}/assets",
    "model.vocab_size": 512,
}
MIXTURE = [
    {"dataset": "json", "dataset_path": "{data}/one.jsonl", "name": "one", "weight": 1.0},
    {"dataset": "json", "dataset_path": "{data}/two.jsonl", "name": "two", "weight": 2.0},
]
RUNS = {
    "one rank": Run(1, {}),
    "one rank, gradient accumulation": Run(1, {"training.global_batch_size": 6}),
    "one rank, tied embeddings, chunked cross-entropy": Run(
        1, {"model.tie_embeddings": True, "training.loss_chunks": 4}
    ),
    "one rank, documents, best-fit packing": Run(
        1, {"training.document_mask": True, "training.packing": "best_fit", "training.seq_len": 512}
    ),
    "one rank, bfloat16 with stochastic rounding": Run(
        1,
        {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
        | {"optimizer.stochastic_rounding": True, "optimizer.state_dtype": "bfloat16"},
    ),
    "one rank, float16, overflow": Run(
        1, {"training.mixed_precision_param": "float16", "training.initial_loss_scale": 1e9}
    ),
    "one rank, steps that are not finite": Run(
        1, {"optimizer.lr": 1e30, "training.nonfinite_steps_allowed": 2, "training.steps": 5}, status=1
    ),
    "one rank, outlier steps": Run(
        1, {"training.skip_outlier_sigma": 1.5, "training.outlier_window": 12, "training.steps": 12}
    ),
    "one rank, streaming": Run(
        1, {"training.streaming": True, "training.dataset": "json", "training.dataset_path": "{data}/one.jsonl"}
    ),
    "shard 2": Run(2, {}),
    "shard 2, reduced in the last accumulation step": Run(
        2, {"training.global_batch_size": 8, "parallelism.fsdp_reduce_gradients": "last_accumulation_step"}
    ),
    "shard 2, CPU offload": Run(2, {"training.enable_cpu_offload": True}),
    "shard 2, optimizer states in host memory": Run(2, {"optimizer.enable_cpu_offload": True}),
    "shard 2, Muon": Run(2, {"optimizer.name": "Muon"}),
    "shard 2, int8 optimizer states": Run(2, {"optimizer.state_dtype": "int8"}),
    "shard 2, float8": Run(2, {"float8.enable": True, "float8.emulate": True}),
    "shard 2, INT8 products": Run(2, {"int8.enable": True}),
    "shard 2, compiled, selective AC": Run(2, COMPILE | {"activation_checkpoint.mode": "selective"}),
    "shard 2, validation and samples": Run(
        2,
        {"validation.enable": True, "validation.freq": 2, "validation.steps": 2}
        | {"validation.generate_prompts": ["The "], "validation.generate_tokens": 4},
    ),
    "shard 2, mixture with the loss of each dataset": Run(2, {"training.datasets": MIXTURE}),
    "shard 2, fine-tuning": Run(2, CONVERSATIONS),
    "shard 2, asynchronous save, then resumed as tp 2": Run(
        2, {"checkpoint.async_mode": "async", "checkpoint.interval": 2, "training.steps": 4}, {TP: 2}
    ),
    "replicate 2, silent data corruption check": Run(
        2, {"parallelism.data_parallel_replicate_degree": 2, "debug.sdc_check_freq": 2}
    ),
    "tp 2": Run(2, {TP: 2}),
    "ring 2": Run(2, {CP: 2}),
    "Ulysses 2, documents": Run(
        2, {CP: 2, "parallelism.context_parallel_ulysses_degree": 2, "training.document_mask": True}
    ),
    "pp 2, compiled": Run(2, COMPILE | INTERLEAVED | {PP: 2}),
    "pp 2, zero-bubble, validation": Run(
        2,
        {PP: 2, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "model.n_layers": 4}
        | {"validation.enable": True, "validation.freq": 3, "validation.steps": 2},
    ),
    "experts on ep 2, balance bias": Run(2, EXPERTS | BALANCE | {"parallelism.expert_parallel_degree": 2}),
    "latent attention on shard 2": Run(
        2,
        {"model.mla.kv_lora_rank": 16, "model.mla.qk_nope_head_dim": 8, "model.mla.qk_rope_head_dim": 4}
        | {"model.mla.v_head_dim": 8, "model.n_kv_heads": 4},
    ),
    "shard 2 x tp 2": Run(4, {TP: 2}),
    "pp 2 x tp 2, compiled": Run(4, COMPILE | {PP: 2, TP: 2}),
    "replica groups": Run(1, GROUPS, groups=2),
    "replica groups, DiLoCo": Run(1, GROUPS | DILOCO, groups=2),
}


# A rank --------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the collectives and the host's reads of a rank between its first and its last optimizer step."""

    def __init__(self, file: Path):
        super().__init__()
        self.file, self.events = file, list[Any]()
        register_optimizer_step_pre_hook(lambda *_: self.events.append("optimizer step"))
        for name in READS:
            self._count(name, getattr(Tensor, name))
        leave = os._exit

        def save_and_leave(status: int) -> None:
            self.file.write_text(json.dumps(self.events))
            leave(status)

        os._exit = save_and_leave

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile, whose graphs call their collectives through the dispatcher too."""
        return True

    def _count(self, name: str, read: Any) -> None:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.events.append("read")
            return read(tensor, *args, **kwargs)

        setattr(Tensor, name, counted)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they first make local tensors of themselves, and come again
        if function.namespace in ("c10d", "_c10d_functional"):
            self.events.append([str(function), *described([*args, *(kwargs or {}).values()])])
        return function(*args, **(kwargs or {}))


def described(arguments: list[Any]) -> tuple[list[int] | None, int]:
    """Return the ranks of the group and the bytes of the tensors among a collective's arguments."""
    ranks, n_bytes = None, 0
    for argument in arguments:
        for item in argument if isinstance(argument, (list, tuple)) else [argument]:
            for tensor in item if isinstance(item, list) else [item]:
                n_bytes += tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
        elif isinstance(argument, str) and argument in dist.distributed_c10d._world.pg_names.values():
            ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument))
    return ranks, n_bytes


def train(file: str, argv: list[str]) -> None:
    """Train as train.py of the checkout does, and write to a file what the rank did."""
    from titanlite.train import main  # of the checkout, which is first in PYTHONPATH

    with Recorder(Path(f"{file}-{os.environ['RANK']}.json")):
        main(argv)


# The runs ------------------------------------------------------------------------------------------------------------


def write_data(folder: Path) -> None:
    """Write two datasets, conversations, and the assets of a model with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
    for name, start in {"one": 0, "two": 3}.items():
        texts = [" ".join(words[(start + row * step) % 10] for step in range(60)) for row in range(200)]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    talks = [
        [{"role": "user", "content": f"how many {word}?"}, {"role": "assistant", "content": f"{number} of them"}]
        for number in range(40)
        for word in words
    ]
    (folder / "conversations.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    (folder / "assets").mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))


def launch(checkout: Path, folder: Path, data: Path, run: Run, options: dict[str, Any], record: str) -> list[int]:
    """Run the launches of a run at once, one for each replica group; return their exit statuses."""

    def one(group: int) -> int:
        own = {"job.dump_folder": f"{folder}/group-{group}", "training.cache_folder": str(data / "cache")}
        own |= {"fault_tolerance.replica_id": group} if run.groups > 1 else {}
        values = BASE | options | own
        config = folder / f"config-{group}.toml"
        config.write_text("")
        texts = {key: value if isinstance(value, str) else toml(value) for key, value in values.items()}
        argv = [str(config), *(f"--{key}={text.replace('{data}', str(data))}" for key, text in texts.items())]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        command = [sys.executable, *launcher, f"--nproc-per-node={run.ranks}", __file__]
        environment = with_python_path({**os.environ, "OMP_NUM_THREADS": "1"}, checkout)
        with open(folder / f"{record}-{group}.log", "w") as log:
            rank = ["--rank", f"{folder}/{record}-{group}"]
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.run([*command, *rank, *argv], cwd=checkout, env=environment, **streams).returncode

    with ThreadPoolExecutor(run.groups) as threads:
        return list(threads.map(one, range(run.groups)))


def toml(value: Any) -> str:
    """Return a number, a boolean, a list of strings or a list of tables as TOML writes it in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def results(checkout: Path, folder: Path, data: Path, run: Run) -> dict[str, Any]:
    """Train a run with a checkout, and return all that is compared, by what it is."""
    from safetensors import safe_open

    found: dict[str, Any] = {"exit statuses": launch(checkout, folder, data, run, run.options, "first")}
    if run.then is not None:
        options = run.options | {"training.steps": 8} | run.then
        found["exit statuses"] += launch(checkout, folder, data, run, options, "then")
    for file in sorted(folder.glob("group-*/metrics.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            for tag, value in line.items():
                if not tag.startswith(CLOCK):
                    found[f"{file.parent.name}, step {line['step']}, {tag}"] = value
    for group in sorted(folder.glob("group-*")):
        steps = sorted(group.glob("checkpoint/step-*"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
        for file in sorted(steps[-1].glob("*.safetensors")) if steps else []:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                    value = tensors.get_tensor(name)
                    bits = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    found[f"{group.name}, {steps[-1].name}, {file.name}, {name}"] = str(value.dtype), value.shape, bits
    for file in sorted(folder.glob("*-*-*.json")):
        events = json.loads(file.read_text())
        marks = [number for number, event in enumerate(events) if event == "optimizer step"] or [0]
        steps = events[marks[0] : marks[-1]]
        found[f"rank {file.stem}, reads of the host"] = steps.count("read")
        found[f"rank {file.stem}, collectives"] = [event for event in steps if event != "read"]
    return found


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Return which result differs first, and how; None if all are equal bit for bit."""
    for name in old.keys() | new.keys() if old.keys() != new.keys() else old:
        one, other = old.get(name, "nothing"), new.get(name, "nothing")
        if name.endswith("collectives") and one != other and "nothing" not in (one, other):
            place = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            return f"{name}: {len(one)} and {len(other)}; number {place}: {one[place:][:1]} and {other[place:][:1]}"
        if isinstance(one, tuple) and isinstance(other, tuple) and one != other:
            return f"{name}: other bits"
        if repr(one) != repr(other):  # NaN is equal to itself
            return f"{name}: {one} and {other}"
    return None


def main() -> int:
    """Run the program. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--log", type=Path, help="also write the lines here")
    parser.add_argument("--folder", type=Path, help="keep here what the runs write")
    arguments = parser.parse_args()
    lighthouse, lines, n_different = None, [], 0
    if any(RUNS[name].groups > 1 for name in arguments.runs):
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, heartbeat_timeout_ms=5000)
        os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    with tempfile.TemporaryDirectory() as temporary:
        parent = (arguments.folder or Path(temporary)).resolve()
        data = parent / "data"
        data.mkdir(parents=True)
        write_data(data)
        for number, name in enumerate(arguments.runs):
            found = []
            for side in ("old", "new"):
                folder = parent / f"{number}-{side}"
                folder.mkdir()
                found.append(results(getattr(arguments, side).resolve(), folder, data, RUNS[name]))
            wrong = {status for status in found[0]["exit statuses"] if status != RUNS[name].status}
            difference = f"exit status {wrong}, see the logs in --folder" if wrong else first_difference(*found)
            n_different += difference is not None
            kinds = Counter(each for key, value in found[0].items() for each in kinds_of(key, value))
            summary = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
            lines.append(f"{name}: {'equal' if difference is None else f'DIFFERS: {difference}'} ({summary})")
            print(lines[-1], flush=True)
    lines.append(f"{len(arguments.runs)} runs, {n_different} differ; torch {torch.__version__}")
    print(lines[-1])
    if arguments.log:
        arguments.log.write_text("\n".join(lines) + "\n")
    return min(n_different, 1)


def kinds_of(key: str, value: Any) -> list[str]:
    """Return what a result is, once for each thing that was compared, for the summary of a run."""
    if key.endswith("collectives"):
        return ["collectives"] * sum(event != "optimizer step" for event in value)
    if key.endswith("reads of the host"):
        return ["reads"] * value
    return ["tensors"] if isinstance(value, tuple) else ["values"] if ", step" in key else []


if __name__ == "__main__":
    if "--rank" in sys.argv[1:2]:
        train(sys.argv[2], sys.argv[3:])
    sys.exit(main())
