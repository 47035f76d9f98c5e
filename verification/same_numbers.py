"""Compare the numbers of two checkouts bit for bit, over short runs that cover whatever touches a step.

    python -m verification.same_numbers OLD NEW [--runs NAME ...] [--log FILE] [--folder FOLDER]

OLD and NEW are folders of checkouts, as `git worktree add ../old REVISION` makes them. Each run trains a tiny model in
both at once, on CPUs with gloo, in the environment of this process, and compares

- exit status: of each launch, and the text in its log by which it did what its name says;
- values: every tag of metrics.jsonl that does not depend on the clock, generated samples, and state.json of the last
  checkpoint without the config, and without a loss scale of 1, which runs in other types than float16 had once;
- tensors: weights, optimizer states and every other tensor of the last checkpoint, but
- random states: the states of the random number generators in it;
- collectives: of each rank, from the first optimizer step to the last, in their order: operator, reduction, ranks of
  the group, types and sizes of the tensors;
- reads: of each rank, between the same two steps, how often the main thread reads a value of a tensor, for which the
  host would wait for a GPU: item, tolist, numpy, cpu, bool, int, float, equal, nonzero and what else needs the values.

Collectives and reads are recorded by hooks of torch: of titanlite only train.py in the root of a checkout is named, so
files may move. The ranks are forked from a process that has imported torch, which would take each of them seconds.

All differences are counted; the first of each kind is printed. Exit status: 0 all runs are equal; 1 some differ.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.python_path import with_python_path

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
READ_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods of tensors that read values. Some end in an operator of READ_OPERATORS, and are counted once."""
COLLECTIVES = ("all", "reduce", "broadcast", "gather", "scatter", "barrier", "monitored_barrier", "send", "recv")
"""Beginnings of the methods of a process group that communicate. Most end in an operator, whose arguments are then
recorded: not those that are called in a custom operator, such as ring attention, which no TorchDispatchMode sees."""
READ_OPERATORS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount", "unique_dim")
"""Operators for which the host needs the values of a tensor: item, bool, int and float end in the first."""
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.experimental", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"),
    *("torch.nn.attention.flex_attention", "torch.utils.tensorboard", "safetensors.torch", "numpy", "pydantic.main"),
    "torchft",
)
"""Modules beside torch that the ranks find imported, where they are installed."""
TIMEOUT = 900
"""Seconds after which a launch is killed."""
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
    shows: str = ""
    """Text that the log of the last launch must have: a run that does not do what its name says compares nothing."""
    calls: str = ""
    """Beginning of the name of a collective that must be recorded of each rank."""
    stopped_after: int = 0
    """Optimizer step before which the first rank gets SIGTERM."""


TP, PP, CP = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
EXPERTS = {"model.moe.n_experts": 4, "model.moe.n_experts_per_token": 2, "model.moe.expert_dim": 32}
BALANCE = {"model.moe.balance_bias": True, "model.moe.balance_bias_rate": 0.01}
COMPILE = {"compile.enable": True, "compile.backend": "aot_eager"}
INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "model.n_layers": 4}
GROUPS = {"fault_tolerance.enable": True, "fault_tolerance.group_size": 2, "fault_tolerance.min_replica_size": 2}
GROUPS |= {"training.global_batch_size": 8}
CONVERSATIONS = {
    "training.dataset": "json",
    "training.dataset_format": "messages",
    "training.dataset_path": "{data}/conversations.jsonl",
    "training.document_mask": True,
    "training.packing": "best_fit",
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
        1,
        {"training.mixed_precision_param": "float16", "training.initial_loss_scale": 1e9},
        shows="gradients overflow at loss scale",
    ),
    "one rank, steps that are not finite": Run(
        1,
        {"optimizer.lr": 1e30, "training.nonfinite_steps_allowed": 2, "training.steps": 5, "checkpoint.interval": 1},
        status=1,
        shows="2 of 2 allowed",
    ),
    "one rank, outlier steps": Run(
        1,
        {"training.skip_outlier_sigma": 1.5, "training.outlier_window": 12, "training.steps": 12},
        shows="skipped without an update",
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
    "shard 2, MXFP8": Run(2, {"float8.enable": True, "float8.recipe": "mxfp8", "float8.emulate": True}),
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
        2,
        {"checkpoint.async_mode": "async", "checkpoint.interval": 2, "training.steps": 4},
        {TP: 2},
        shows="resumed after step 4",
    ),
    "shard 2, stopped by SIGTERM": Run(2, {}, stopped_after=3, shows="asked to stop: ended after step"),
    "replicate 2, silent data corruption check": Run(
        2, {"parallelism.data_parallel_replicate_degree": 2, "debug.sdc_check_freq": 2}
    ),
    "tp 2": Run(2, {TP: 2}),
    "ring 2": Run(2, {CP: 2}, calls="send"),
    "Ulysses 2, documents": Run(
        2,
        {CP: 2, "parallelism.context_parallel_ulysses_degree": 2, "training.document_mask": True},
        calls="all_to_all",
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
    "replicate 2 x shard 2": Run(4, {"parallelism.data_parallel_replicate_degree": 2}),
    "shard 2 x tp 2": Run(4, {TP: 2}),
    "pp 2 x tp 2, compiled": Run(4, COMPILE | {PP: 2, TP: 2}),
    "replica groups": Run(1, GROUPS, groups=2),
}


# A rank --------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the collectives and the host's reads of a rank, and its optimizer steps."""

    def __init__(self, stopped_after: int):
        super().__init__()
        self.events, self.n_steps, self.stopped_after = list[Any](), 0, stopped_after
        register_optimizer_step_pre_hook(lambda *_: self._step())
        for name in READ_METHODS:
            self._record(Tensor, name, lambda name, _: name)
        for name in [name for name in dir(dist.ProcessGroup) if name.lstrip("_").startswith(COLLECTIVES)]:
            self._record(dist.ProcessGroup, name, lambda name, arguments: [name, *described(arguments)])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile, whose graphs call their collectives through the dispatcher too."""
        return True

    def _step(self) -> None:
        self.events.append("optimizer step")
        self.n_steps += 1
        if self.n_steps == self.stopped_after and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # a thread takes note of it

    def _record(self, owner: Any, name: str, event: Any) -> None:
        """Have a method record its calls by the main thread, unless an operator in it does."""
        method = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            n_before = len(self.events)
            result = method(*args, **kwargs)
            if threading.current_thread() is threading.main_thread() and len(self.events) == n_before:
                self.events.append(event(name, [*args, *kwargs.values()]))
            return result

        setattr(owner, name, recorded)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they first make local tensors of themselves, and come again
        if function.namespace in ("c10d", "_c10d_functional"):
            self.events.append([str(function), *described([*args, *(kwargs or {}).values()])])
        elif function._schema.name.removeprefix("aten::") in READ_OPERATORS:
            self.events.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def described(arguments: list[Any]) -> list[Any]:
    """Return what is compared of a collective's arguments: the ranks of its group, the type and size of its tensors,
    and the numbers and texts, such as the rank that sends and the reduction."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            argument = dist.ProcessGroup.unbox(argument)
        if isinstance(argument, dist.ProcessGroup):
            registered = argument in dist.distributed_c10d._world.pg_map  # torchft's are not
            found.append(dist.get_process_group_ranks(argument) if registered else f"{argument.size()} replica groups")
        elif isinstance(argument, str) and argument in dist.distributed_c10d._world.pg_names.values():
            found.append(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument)))
        elif isinstance(argument, Tensor):
            found.append(f"{argument.dtype} x {argument.numel()}")
        elif isinstance(argument, (list, tuple)):
            found.append(described([*argument]))
        elif isinstance(argument, (bool, int, str)):
            found.append(argument)
    return found


def train(file: Path, checkout: Path, argv: list[str], stopped_after: int) -> None:
    """Run train.py of a checkout in this process, which is new, write what it did to a file, and end the process."""
    process, leave, recorder = os.getpid(), os._exit, Recorder(stopped_after)

    def save_and_leave(status: int) -> None:
        if os.getpid() == process:  # not a process that the rank has forked
            own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "titanlite"}
            foreign = [name for name, module in own.items() if not str(module.__file__).startswith(f"{checkout}/")]
            file.write_text(json.dumps({"events": recorder.events, "foreign": foreign}))
        leave(status)

    os._exit = save_and_leave
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    sys.argv = [str(checkout / "train.py"), *argv]
    status = 0
    try:
        with recorder:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    save_and_leave(status)


class Start(NamedTuple):
    """A launch of a run's ranks."""

    checkout: Path
    ranks: int
    argv: list[str]
    files: str
    """Beginning of the path of each file that its ranks write for this script."""
    environment: dict[str, str]
    stopped_after: int


def start_ranks(start: Start) -> None:
    """Fork the ranks, as torchrun starts them, and end with the status of the first one that fails."""
    ranks: dict[int, int] = {}
    for rank in range(start.ranks):
        if not (process := os.fork()):
            log = os.open(f"{start.files}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            os.environ |= start.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            train(Path(f"{start.files}-{rank}.json"), start.checkout, start.argv, start.stopped_after)
        ranks[process] = rank
    deadline, failed = time.monotonic() + TIMEOUT, 0
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            time.sleep(0.02)
        elif process in ranks:
            del ranks[process]
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, deadline = code, min(deadline, time.monotonic() + 20)  # the others end by themselves
        if time.monotonic() > deadline:
            failed = failed or 99
            for each in ranks:
                os.kill(each, signal.SIGKILL)
            deadline += TIMEOUT
    os._exit(failed % 256)


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


def arguments_of(options: dict[str, Any], data: Path) -> list[str]:
    """Return the arguments of train.py for the options of a run."""
    texts = {key: value if isinstance(value, str) else toml(value) for key, value in (BASE | options).items()}
    return [f"--{key}={text.replace('{data}', str(data))}" for key, text in texts.items()]


def launch(checkout: Path, folder: Path, data: Path, run: Run, options: dict[str, Any], record: str) -> list[int]:
    """Run the launches of a run at once, one for each replica group; return their exit statuses."""

    def one(group: int) -> int:
        own = {
            "job.dump_folder": f"{folder}/group-{group}",
            "training.cache_folder": f"{folder.parent}/cache-{folder.name[-3:]}",
        }
        own |= {"fault_tolerance.replica_id": group} if run.groups > 1 else {}
        config = folder / f"config-{group}.toml"
        config.write_text("")
        argv = [str(config), *arguments_of(options | own, data)]
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(run.ranks)}
        environment |= {"LOCAL_WORLD_SIZE": str(run.ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "same_numbers"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= {"TORCHFT_LIGHTHOUSE": lighthouse.address()} if lighthouse else {}
        environment |= {"PYTHONPATH": with_python_path({**os.environ}, checkout)["PYTHONPATH"]}
        start = Start(checkout, run.ranks, argv, f"{folder}/{record}-{group}", environment, run.stopped_after)
        process = multiprocessing.get_context("forkserver").Process(target=start_ranks, args=(start,))
        process.start()
        process.join()
        return process.exitcode or 0

    lighthouse = None
    if run.groups > 1:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=run.groups, heartbeat_timeout_ms=5000)
    with ThreadPoolExecutor(run.groups) as threads:
        statuses = list(threads.map(one, range(run.groups)))
    if lighthouse:
        lighthouse.shutdown()
    return statuses


def toml(value: Any) -> str:
    """Return a number, a boolean, a list of strings or a list of tables as TOML writes it in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


KINDS = ("exit status", "values", "tensors", "random states", "collectives", "reads")


def results(checkout: Path, folder: Path, data: Path, run: Run) -> dict[str, dict[str, Any]]:
    """Train a run with a checkout, and return all that is compared, by its kind and by what it is."""
    folder.mkdir()
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    found["exit status"]["first launch"] = launch(checkout, folder, data, run, run.options, "first")
    if run.then is not None:
        options = run.options | {"training.steps": 8} | run.then
        found["exit status"]["second launch"] = launch(checkout, folder, data, run, options, "second")
    for file in sorted(folder.glob("group-*/metrics.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            for tag, value in line.items():
                if not tag.startswith(CLOCK):
                    found["values"][f"{file.parent.name}, step {line['step']}, {tag}"] = value
    for file in sorted(folder.glob("*.log")):
        samples = [line for line in file.read_text().splitlines() if ": sample " in line]
        found["values"] |= {f"{file.stem}, line {number}": line for number, line in enumerate(samples)}
    for group in sorted(folder.glob("group-*")):
        steps = sorted(group.glob("checkpoint/step-*"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
        found["values"][f"{group.name}, checkpoints"] = [step.name for step in steps]
        if steps:
            read_checkpoint(steps[-1], f"{group.name}, {steps[-1].name}", found)
    for file in sorted(folder.glob("*-*-*.json")):
        events = json.loads(file.read_text())["events"]
        marks = [number for number, event in enumerate(events) if event == "optimizer step"] or [0]
        steps = [event for event in events[marks[0] : marks[-1]] if event != "optimizer step"]
        found["collectives"][f"rank {file.stem}"] = [event for event in steps if isinstance(event, list)]
        found["reads"][f"rank {file.stem}"] = Counter(event for event in steps if isinstance(event, str))
    return found


def read_checkpoint(folder: Path, name: str, found: dict[str, dict[str, Any]]) -> None:
    """Add the tensors and the state of a checkpoint to what is compared."""
    from safetensors import safe_open

    for key, value in json.loads((folder / "state.json").read_text()).items():
        if key == "data":
            value = {name: part for name, part in value.items() if (name, part) != ("streaming_shards", {})}
        # The config has the folder of the run.
        if key != "config" and not (key == "loss_scale" and value[0] == 1):
            found["values"][f"{name}, {key}"] = value
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dictionary)
                value = tensors.get_tensor(key)
                bits = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                kind = "random states" if key.startswith("random.") else "tensors"
                found[kind][f"{name}, {file.name}, {key}"] = str(value.dtype), tuple(value.shape), bits


def mistakes(folder: Path, run: Run, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return why the results of a run in one checkout compare nothing, or not what its name says."""
    wrong = [f"{each}: {statuses}" for each, statuses in found["exit status"].items() if {*statuses} != {run.status}]
    logs = sorted(folder.glob("second-*.log")) or sorted(folder.glob("first-*.log"))
    if run.shows and not any(run.shows in log.read_text() for log in logs):
        wrong.append(f"no log has {run.shows!r}")
    records = sorted(folder.glob("*-*-*.json"))
    if len(records) != run.ranks * run.groups * (1 + (run.then is not None)):
        wrong.append(f"only {len(records)} ranks left a record")
    for file in records:
        if foreign := json.loads(file.read_text())["foreign"]:
            wrong.append(f"rank {file.stem} imported {foreign[0]} of another checkout")
    wrong += [f"{rank}: no collective" for rank, events in found["collectives"].items() if not events]
    for rank, events in found["collectives"].items():
        if run.calls and not any(name.startswith(run.calls) for name, *_ in events):
            wrong.append(f"{rank}: no collective {run.calls!r}")
    needed = ("values",) if run.status else ("values", "tensors", "random states")  # a run that diverges saves none
    return wrong + [f"no {kind}" for kind in needed if not found[kind]]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return which results of a kind are not equal bit for bit, and how they differ."""
    found = [f"{name}: only in {'OLD' if name in old else 'NEW'}" for name in old.keys() ^ new.keys()]
    for name in [name for name in old if name in new]:
        one, other = old[name], new[name]
        if isinstance(one, Counter):
            if one.total() != other.total():
                found.append(f"{name}: {one.total()} and {other.total()}: {dict(one - other)} and {dict(other - one)}")
        elif isinstance(one, tuple):
            if one != other:
                how = "other bits" if one[:2] == other[:2] else f"{one[:2]} and {other[:2]}"
                found.append(f"{name}: {how}")
        elif name.startswith("rank") and one != other:
            place = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            found.append(
                f"{name}: {len(one)} and {len(other)}; number {place}: {one[place:][:1]} and {other[place:][:1]}"
            )
        elif repr(one) != repr(other):  # NaN is equal to itself
            found.append(f"{name}: {one} and {other}")
    return found


def compare(name: str, sides: dict[str, Path], parent: Path, data: Path) -> tuple[list[str], set[str]]:
    """Train a run with both checkouts at once. Return the lines about it, and the kinds of results that differ."""
    run, begin = RUNS[name], time.monotonic()
    folders = {side: parent / f"{[*RUNS].index(name)}-{side}" for side in sides}
    with ThreadPoolExecutor(len(sides)) as threads:
        started = {
            side: threads.submit(results, checkout, folders[side], data, run) for side, checkout in sides.items()
        }
        found = {side: each.result() for side, each in started.items()}
    lines, kinds = [], set()
    for side in sides:
        if wrong := mistakes(folders[side], run, found[side]):
            kinds.add("exit status")
            lines.append(f"    {side} does not do what it is for: {'; '.join(wrong)}; see {folders[side]}")
    for kind in KINDS:
        if each := differences(found["old"][kind], found["new"][kind]):
            kinds.add(kind)
            lines.append(f"    {kind}: {len(each)} of {len(found['old'][kind])} differ; first {each[0]}")
    sums = {kind: len(found["old"][kind]) for kind in ("values", "tensors", "random states")}
    sums["collectives"] = sum(map(len, found["old"]["collectives"].values()))
    sums["reads"] = sum(each.total() for each in found["old"]["reads"].values())
    summary = ", ".join(f"{count:,} {kind}" for kind, count in sums.items())
    verdict = "equal" if not kinds else "only random states differ" if kinds == {"random states"} else "DIFFERS"
    return [f"{name}: {verdict} ({summary}; {time.monotonic() - begin:.0f} s)", *lines], kinds


def main() -> int:
    """Run the program. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--log", type=Path, help="also write the lines here")
    parser.add_argument("--folder", type=Path, help="keep here what the runs write")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"RUST_LOG": "warn", "PYTHONWARNINGS": "ignore:resource_tracker"}  # lines that tell nothing here
    multiprocessing.set_forkserver_preload(["torch", *PRELOADED])
    sides = {side: getattr(arguments, side).resolve() for side in ("old", "new")}
    lines, differing = [], list[set[str]]()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        parent = (arguments.folder or Path(temporary)).resolve()
        data = parent / "data"
        data.mkdir(parents=True)
        write_data(data)
        for name in arguments.runs:
            own, kinds = compare(name, sides, parent, data)
            print("\n".join(own), flush=True)
            lines += own
            differing.append(kinds)
    n_random = sum(kinds == {"random states"} for kinds in differing)
    lines.append(
        f"{len(differing)} runs: {sum(map(bool, differing)) - n_random} differ, {n_random} in random states only; "
        f"torch {torch.__version__}, {time.monotonic() - begin:.0f} s"
    )
    print(lines[-1])
    if arguments.log:
        arguments.log.write_text("\n".join(lines) + "\n")
    return int(any(differing))


if __name__ == "__main__":
    sys.exit(main())
