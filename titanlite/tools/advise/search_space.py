"""The search space: degrees, batch size, pipeline schedule, activation checkpointing, float8."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from titanlite.config import load_values
from titanlite.config.launch import loss_chunks
from titanlite.config.loader import LoadedConfig
from titanlite.config.schema import Config, Model, count_parameters, layers_of_head
from titanlite.config.stage_split import SPLIT_BACKWARD
from titanlite.metrics import devices
from titanlite.tools.plan.planner import resolve

GIB = 2**30
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
"""Pipeline schedules to try, each with its stages per rank."""
CHECKPOINTING = ("none", "selective", "full")  # modes of activation checkpointing, in order of recomputed work
LONG_SEQUENCE, LOCAL_SEQUENCE = 32_768, 8192
"""The heuristic baseline splits sequences of more than LONG_SEQUENCE tokens into LOCAL_SEQUENCE tokens per device."""
MOST_NODES = 4  # largest number of nodes over which the experts of a layer are partitioned
STATE_BYTES = 16  # bytes per parameter: a weight, its gradient and two optimizer states in float32


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train, and the devices to train it on."""

    flavor: str  # name of a size in titanlite/config/models.toml
    seq_len: int
    sequences: int  # sequences of an optimizer step, equal for all layouts so that their throughputs are comparable
    n_devices: int
    device_name: str  # name in titanlite/metrics/devices.toml, or a TOML file
    device: devices.Device
    float8: bool = False

    @functools.cached_property
    def model(self) -> Model:
        return Model.model_validate({"flavor": self.flavor})

    @functools.cached_property
    def n_parameters(self) -> int:
        return count_parameters(self.model)

    @functools.cached_property
    def layers_of_head(self) -> float:
        return layers_of_head(self.model, self.seq_len)

    @functools.cached_property
    def share_with_experts(self) -> float:
        n_layers = self.model.n_layers
        return sum(map(self.model.has_experts, range(n_layers))) / n_layers if self.model.moe.n_experts else 0.0


class Mesh(NamedTuple):
    """Parallel degrees, outermost first. `cp` is the ring degree times `ulysses`; `ep` divides dp_shard x cp x tp."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    ulysses: int
    tp: int
    ep: int = 1

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        context = {"ring": self.cp // self.ulysses, "ulysses": self.ulysses}
        kinds = " x ".join(f"{name} {degree}" for name, degree in context.items() if degree > 1)
        named = {name: degree for name, degree in self._asdict().items() if name not in ("ulysses", "ep")}
        degrees = [(name, degree) for name, degree in named.items() if degree > 1]
        names = [f"cp {degree} ({kinds})" if name == "cp" else f"{name} {degree}" for name, degree in degrees]
        return (" x ".join(names) or "one device") + f", ep {self.ep}" * (self.ep > 1)


class Candidate(NamedTuple):
    """A layout to plan. Each pipeline rank has `stages` stages. `local_batch` (the per-device batch size) and
    `microbatch` are numbers of sequences; without a pipeline they are equal."""

    mesh: Mesh
    schedule: str
    stages: int
    local_batch: int
    microbatch: int
    checkpointing: str
    compiled: bool = True
    float8: bool = False

    @property
    def pipeline(self) -> str:
        return f"{self.schedule}, {self.stages} per rank" if self.mesh.pp > 1 else ""

    def loss_chunks(self, task: Task) -> int:
        """Return the number of chunks of cross-entropy: the default of `training.loss_chunks`."""
        return loss_chunks(self.microbatch * task.seq_len // self.mesh.cp, task.model.vocab_size / self.mesh.tp)

    def options(self, task: Task) -> dict[str, dict[str, Any]]:
        """Return the options of a config with this layout that differ from the defaults, by section."""
        mesh, defaults = self.mesh, Config()
        pipeline = {
            "pipeline_parallel_degree": mesh.pp,
            "pipeline_parallel_schedule": self.schedule,
            "pipeline_parallel_stages_per_rank": self.stages,
            "pipeline_parallel_microbatch_size": self.microbatch,
        }
        sections: dict[str, dict[str, Any]] = {
            "job": {"description": f"{task.flavor}, {mesh}", "dump_folder": f"./outputs/{task.flavor}"},
            "model": {"flavor": task.flavor},
            "training": {
                "dataset": "c4",
                "streaming": True,
                "shuffle": False,
                "seq_len": task.seq_len,
                "local_batch_size": self.local_batch,
                "global_batch_size": task.sequences,
                # Each data-parallel rank needs the same number of streaming shards.
                "streaming_shards": math.ceil(defaults.training.streaming_shards / mesh.dp) * mesh.dp,
            },
            "parallelism": {
                "data_parallel_replicate_degree": mesh.dp_replicate,
                "data_parallel_shard_degree": mesh.dp_shard,
                "tensor_parallel_degree": mesh.tp,
                "context_parallel_degree": mesh.cp,
                "context_parallel_ulysses_degree": mesh.ulysses,
                "expert_parallel_degree": mesh.ep,
                **(pipeline if mesh.pp > 1 else {}),
            },
            "compile": {"enable": self.compiled},
            "float8": {"enable": self.float8},
            "activation_checkpoint": {"mode": self.checkpointing},
            "plan": {"device": task.device_name},
        }
        if task.flavor != "debug":  # the debug model needs no tokenizer: its tokens are bytes
            sections["model"]["hf_assets_path"] = f"./assets/{task.flavor.partition('_')[0]}"
        changed = {
            name: {key: value for key, value in options.items() if value != getattr(getattr(defaults, name), key)}
            for name, options in sections.items()
        }
        return {name: options for name, options in changed.items() if options}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def meshes(task: Task) -> Iterator[Mesh]:
    """Yield all meshes whose degrees multiply to the number of devices, with tensor parallelism inside a node and the
    sequences divided evenly over the data-parallel ranks. Weights are replicated only on 8 nodes or more, with full
    nodes in each replica; on fewer nodes, sharding over all nodes costs little and saves memory."""
    per_node = task.device.devices_per_node
    for tp in _divisors(math.gcd(task.n_devices, per_node)):
        for pp in (pp for pp in _divisors(task.n_devices // tp) if pp <= task.model.n_layers):
            for cp in _divisors(task.n_devices // (tp * pp)):
                dp = task.n_devices // (tp * pp * cp)
                if task.sequences % dp or cp * tp > task.seq_len:
                    continue
                replicas = [1]
                if dp * cp * tp >= 8 * per_node:
                    replicas += [n for n in _divisors(dp) if n > 1 and dp // n * cp * tp % per_node == 0]
                for replicate, ulysses in itertools.product(replicas, _divisors(math.gcd(cp, task.model.n_kv_heads))):
                    for ep in expert_degrees(task, dp // replicate * cp * tp):
                        yield Mesh(pp, replicate, dp // replicate, cp, ulysses, tp, ep)


def expert_degrees(task: Task, n_ranks: int) -> list[int]:
    """Return the expert-parallel degrees to try on n ranks: 1, the largest within a node, larger ones."""
    within_node = math.gcd(n_ranks, task.device.devices_per_node, task.model.moe.n_experts)
    degrees = _divisors(math.gcd(n_ranks, task.model.moe.n_experts)) if task.model.moe.n_experts else [1]
    return [ep for ep in degrees if ep == 1 or within_node <= ep <= MOST_NODES * within_node]


def candidates(task: Task) -> Iterator[Candidate]:
    """Yield each mesh with every batch size, schedule, checkpointing mode and precision, even if a config rule rejects
    the combination. Zero-bubble schedules and models with experts are not compiled."""
    for mesh in meshes(task):
        local_sequences = task.sequences // mesh.dp
        batches = [("1F1B", 1, size, size) for size in (1, 2, 4, 8) if local_sequences % size == 0]
        if mesh.pp > 1:
            # With more gradient accumulation steps, a pipeline fills more often, and keeps fewer messages in memory.
            batches = [
                (schedule, stages, local_sequences // steps, size)
                for (schedule, stages), steps, size in itertools.product(SCHEDULES, (1, 2, 4, 8), (1, 2, 4))
                if local_sequences % (steps * size) == 0
            ]
        for batch, checkpointing, float8 in itertools.product(batches, CHECKPOINTING, {False, task.float8}):
            # A compiled block can neither split its backward nor contain experts.
            compiled = batch[0] not in SPLIT_BACKWARD and not task.model.moe.n_experts
            yield Candidate(mesh, *batch, checkpointing, compiled, float8)


def load_candidate(task: Task, candidate: Candidate) -> LoadedConfig:
    """Return a candidate's config. Raises ConfigError if train.py would reject the config."""
    config = load_values(candidate.options(task), "layout.toml", [])
    resolve(config, task.n_devices)
    return config


def heuristic_baseline(task: Task) -> Mesh:
    """Return the degrees of the heuristic of Megatron's papers, torchtitan and Llama 3 (arXiv:2407.21783, section
    3.3.2): FSDP alone for small models; otherwise tensor parallelism within a node, a pipeline across nodes until a
    stage fits half of a device's memory, context parallelism for long sequences, data parallelism over the rest. A
    model with experts has expert parallelism within a node, in place of tensor parallelism."""
    n, memory = task.n_devices, task.device.memory / 2
    states = STATE_BYTES * task.n_parameters
    small, tp, pp, cp, ep = states / task.device.devices_per_node <= memory, 1, 1, 1, 1
    if task.model.moe.n_experts:
        ep = math.gcd(n, task.device.devices_per_node, task.model.moe.n_experts)
    elif not small or task.seq_len > LONG_SEQUENCE:
        tp = math.gcd(n, task.device.devices_per_node)
    while not small and states / (tp * ep * pp) > memory and n % (2 * pp * tp * ep) == 0:
        pp *= 2
    most = LOCAL_SEQUENCE if task.seq_len > LONG_SEQUENCE else LONG_SEQUENCE
    while (task.seq_len / (cp * tp) > most or n // (cp * tp * pp) > task.sequences) and n % (2 * cp * pp * tp) == 0:
        cp *= 2
    return Mesh(pp, 1, n // (pp * cp * tp), cp, 1, tp, ep)
