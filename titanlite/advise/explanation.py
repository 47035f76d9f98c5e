"""Which layout to train a model with on so many devices.

Every layout that divides the devices is a candidate. A closed-form estimate of its bytes and seconds (`estimate`) only
orders the candidates and drops what exceeds the memory by far. Whether one is legal the config's own rules decide, when
its turn comes. The most promising ones are planned (titanlite/plan/__init__.py), a few at a time, and what a plan says
of a layout corrects the estimates of those that are like it: whether less recomputation fits, and whether another
schedule is worth a plan. What is advised has been planned.
"""

import argparse
import functools
import itertools
import math
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from titanlite import devices, plan
from titanlite.config import load
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import (
    ActivationCheckpoint,
    Compile,
    Float8,
    Job,
    Model,
    Parallelism,
    Training,
    count_parameters,
)
from titanlite.config.schema import Plan as PlanOptions
from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED
from titanlite.plan.cost_model import EFFICIENCY, EXPOSED, CostModel
from titanlite.plan.report import time_shares

GIB = 2**30
TOKENS = 4 * 2**20
"""Of an optimizer step, unless told: what models of 7 to 70 billion parameters are trained with (Llama 2 and 3)."""
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
"""With their stages a rank."""
RECOMPUTATION = ("none", "selective", "full")
"""From least to most."""
ROUNDS, A_ROUND = 3, 4
"""How many candidates are planned: rounds, and how many a round, whatever the number of cores."""
WORTH = 1.02
"""How many times as fast as a planned layout of its family another must promise to be."""
FAR = 1.15
"""How many times as long as the best plan's an estimate may be and still be planned."""
HOPELESS = 1.5
"""Of a device's memory: an estimate above it is not planned."""


class Task(NamedTuple):
    """What is to be trained, on what.

    Attributes:
        flavor: of titanlite/sizes.py.
        sequences: of an optimizer step, the same for every layout, so that their speeds can be compared.
        device_name: in titanlite/devices.py, or a TOML file.
        float8: try that too.
    """

    flavor: str
    seq_len: int
    sequences: int
    n_devices: int
    device_name: str
    device: devices.Device
    float8: bool = False

    @property
    def model(self) -> Model:
        return _model(self.flavor)

    @property
    def n_parameters(self) -> int:
        return count_parameters(self.model)

    @property
    def cost_model(self) -> CostModel:
        return CostModel(self.device, {}, self.device.devices_per_node)


@functools.cache
def _model(flavor: str) -> Model:
    return Model.model_validate({"flavor": flavor})


class Mesh(NamedTuple):
    """Degrees, outermost first; `cp` is of a ring times `ulysses`."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    ulysses: int
    tp: int

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def family(self) -> tuple[int, int, bool]:
        """Meshes that differ only in how the rest is dealt to data and context parallel are about as fast."""
        return self.pp, self.tp, self.cp > 1

    @property
    def cuts(self) -> int:
        """In how many ways the model is cut."""
        return sum(degree > 1 for degree in (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    def __str__(self) -> str:
        ring = self.cp // self.ulysses
        kinds = [f"ring {ring}"] * (ring > 1) + [f"ulysses {self.ulysses}"] * (self.ulysses > 1)
        parts = [f"pp {self.pp}"] * (self.pp > 1)
        parts += [f"dp_replicate {self.dp_replicate}"] * (self.dp_replicate > 1)
        parts += [f"dp_shard {self.dp_shard}"] * (self.dp_shard > 1)
        parts += [f"cp {self.cp} ({' x '.join(kinds)})"] * (self.cp > 1) + [f"tp {self.tp}"] * (self.tp > 1)
        return " x ".join(parts) or "one device"


class Candidate(NamedTuple):
    """A layout. `stages` are a rank's; `local_batch` and `microbatch` are sequences, the same without a pipeline."""

    mesh: Mesh
    schedule: str
    stages: int
    local_batch: int
    microbatch: int
    recomputation: str
    compiled: bool = True
    float8: bool = False

    @property
    def pipeline(self) -> str:
        """In words; without a pipeline, nothing."""
        return f"{self.schedule}, {self.stages} a rank" if self.mesh.pp > 1 else ""

    def loss_chunks(self, task: Task) -> int:
        """As many as keep a rank's logits, in bfloat16 and in float32, within 1 GiB."""
        mesh, model = self.mesh, task.model
        logits = self.microbatch * task.seq_len / mesh.cp * model.vocab_size / mesh.tp * 6
        return 2 ** max(0, math.ceil(math.log2(logits / GIB)))

    def options(self, task: Task) -> dict[str, dict[str, Any]]:
        """What a config says that trains so, by section: only what differs from the defaults."""
        mesh = self.mesh
        training: dict[str, Any] = {"dataset": "c4", "streaming": True, "shuffle": False, "seq_len": task.seq_len}
        training |= {"local_batch_size": self.local_batch, "global_batch_size": task.sequences}
        training |= {"loss_chunks": self.loss_chunks(task)}
        streams = Training().streaming_shards  # each data-parallel rank must have whole ones
        training["streaming_shards"] = streams if streams % mesh.dp == 0 else math.ceil(streams / mesh.dp) * mesh.dp
        parallelism = {
            "data_parallel_replicate_degree": mesh.dp_replicate,
            "data_parallel_shard_degree": mesh.dp_shard,
            "tensor_parallel_degree": mesh.tp,
            "context_parallel_degree": mesh.cp,
            "context_parallel_ulysses_degree": mesh.ulysses,
        }
        if mesh.pp > 1:
            parallelism |= {
                "pipeline_parallel_degree": mesh.pp,
                "pipeline_parallel_schedule": self.schedule,
                "pipeline_parallel_stages_per_rank": self.stages,
                "pipeline_parallel_microbatch_size": self.microbatch,
            }
        assets = "" if task.flavor == "debug" else f"./assets/{task.flavor.partition('_')[0]}"
        named = {"description": f"{task.flavor}, {mesh}", "dump_folder": f"./outputs/{task.flavor}"}
        sections = {
            "job": (Job(), named),
            "model": (Model.model_validate({}), {"flavor": task.flavor, "hf_assets_path": assets}),
            "training": (Training(), training),
            "parallelism": (Parallelism(), parallelism),
            "compile": (Compile(), {"enable": self.compiled}),
            "float8": (Float8(), {"enable": self.float8}),
            "activation_checkpoint": (ActivationCheckpoint(), {"mode": self.recomputation}),
            "plan": (PlanOptions(), {"device": task.device_name}),
        }
        options = {
            section: {key: value for key, value in values.items() if value != getattr(defaults, key)}
            for section, (defaults, values) in sections.items()
        }
        return {section: values for section, values in options.items() if values}


# Candidates ----------------------------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def meshes(task: Task) -> Iterator[Mesh]:
    """All degrees that multiply to the devices, with tensor parallel inside a host, and a sequence for each
    data-parallel rank. Weights are replicated only over groups of whole hosts, and only from 8 hosts on: below that,
    sharding over all of them costs little and saves memory."""
    devices_per_node = task.device.devices_per_node
    for tp in _divisors(math.gcd(task.n_devices, devices_per_node)):
        for pp in _divisors(task.n_devices // tp):
            for cp in _divisors(task.n_devices // (tp * pp)):
                dp = task.n_devices // (tp * pp * cp)
                if task.sequences % dp:
                    continue
                far = dp * cp * tp >= 8 * devices_per_node
                replicas = (
                    [n for n in _divisors(dp) if n > 1 and dp // n * cp * tp % devices_per_node == 0] if far else []
                )
                for replicate, ulysses in itertools.product([1, *replicas], _divisors(cp)):
                    yield Mesh(pp, replicate, dp // replicate, cp, ulysses, tp)


def candidates(task: Task) -> Iterator[Candidate]:
    """Of each mesh: batches, schedules, recomputation, precisions; legal or not. All are compiled: see `Search`."""
    for mesh in meshes(task):
        share = task.sequences // mesh.dp
        batches = [("1F1B", 1, size, size) for size in (1, 2, 4, 8) if share % size == 0]
        if mesh.pp > 1:
            # A step in more microsteps waits for the pipeline to fill as often, but keeps fewer messages.
            batches = [
                (schedule, stages, share // parts, size)
                for (schedule, stages), parts, size in itertools.product(SCHEDULES, (1, 2, 4, 8), (1, 2, 4))
                if share % (parts * size) == 0
            ]
        for batch, recomputation, float8 in itertools.product(batches, RECOMPUTATION, {False, task.float8}):
            yield Candidate(mesh, *batch, recomputation, float8=float8)


def loaded(task: Task, candidate: Candidate) -> LoadedConfig:
    """A candidate's config, through the very check that train.py does.

    Raises:
        ConfigError: if it is refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "advised.toml")
        file.write_text(tomli_w.dumps(candidate.options(task)))
        config = load([str(file)])
    plan.resolve(config, task.n_devices)
    return config


# The estimate --------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Of the worst rank, in bytes; of a step, in seconds."""

    bytes: float
    seconds: float


CLOSE = 1.03
"""How many times as long as the fastest a layout may take and be advised all the same: plans do not tell such apart."""
HIDDEN = 0.5
"""Of a step: collectives beside the computing that take longer are mentioned."""
LONG, PIECE = 32_768, 8192
"""Tokens from which on the common guide cuts a sequence, and what it then leaves to a device."""
STATE_BYTES = 16
"""Of a weight: itself, its gradient and two moments in float32."""
UPDATE_BYTES = 40
"""Of a weight, read and written: norm, clipping, AdamW."""
COPY_BYTES = 22
"""Of a gathered weight, read and written in a microstep: twice out of the gather, and its gradient into the reduction,
in bfloat16 and float32; the head's and the embedding's also as they are made."""
EAGER_PASSES = 2.6
"""How many times as often as fused operators those of eager mode go over memory: norms, rotations and SwiGLU are
several operators each, some of them in float32."""


def estimate(task: Task, candidate: Candidate) -> Estimate:
    """Bytes and seconds from the dimensions alone.

    Arithmetic: 2 operations a weight and token forward, twice that backward; attention 2 D T a token under the causal
    mask, 2.5 times that backward; recomputation in full takes the forward twice. All other operators pass over memory.
    Links: FSDP's collectives run beside all that; those of tensor parallel and Ulysses are waited for; a ring's
    messages run beside its attention. A pipeline adds its bubble. Rates and collectives are the plan's (cost.py).
    """
    mesh, model, schedule = candidate.mesh, task.model, candidate.schedule
    layer = _Layer(task, candidate)
    share = task.sequences // mesh.dp
    matrix = model.dim * model.vocab_size / mesh.tp
    microsteps, microbatches = share // candidate.local_batch, candidate.local_batch // candidate.microbatch

    # Weights of a rank. A pipeline's embedding and head count as a layer each when layers are dealt.
    n_layers = model.n_layers
    if mesh.pp > 1:
        n_stages = mesh.pp * candidate.stages
        n_layers = candidate.stages * math.ceil((n_layers + 2) / n_stages)
    weights = n_layers * layer.weights + (2 if mesh.pp == 1 and not model.tie_embeddings else mesh.pp == 1) * matrix
    shards = mesh.dp_shard * mesh.cp
    states = weights / shards * STATE_BYTES

    # Seconds of a microbatch, of the rank with the most layers; the last one has the head for one or two of them.
    head = layer.product(3 * matrix, 1) if mesh.pp == 1 else max(layer.product(3 * matrix, 1) - layer.seconds, 0)
    microbatch = n_layers * layer.seconds + head
    gather = _collective(task, "all_gather", 2 * weights, shards, mesh.tp, n_layers)
    reduce = _collective(task, "reduce_scatter", 4 * weights, shards, mesh.tp, n_layers)
    replicas = _collective(task, "all_reduce", 4 * weights / shards, mesh.dp_replicate, mesh.tp * shards, n_layers)
    moving = task.device.memory_bandwidth * EFFICIENCY["memory"][0]
    if mesh.pp == 1:
        # Weights are gathered for the forward and again for the backward.
        copies = weights * COPY_BYTES / moving
        step = microsteps * max(microbatch + copies, 2 * gather + reduce) + replicas
        gathered = max(2 * 2 * layer.weights, 2 * matrix)
        reducing = max(6 * layer.weights, 6 * matrix)
        held, in_flight, messages = gathered + reducing, n_layers, 0.0
    else:
        bubble = (mesh.pp - 1) * microbatch / candidate.stages
        if schedule in V_SHAPED:
            bubble /= 3
        step = microsteps * (microbatches * microbatch + bubble + reduce) + replicas
        # Weights stay gathered and gradients whole within a microstep; the shards of those are in `states` already.
        held = weights * (2 + 4)
        in_flight = n_layers / candidate.stages * _chunks_in_flight(candidate, microbatches)
        message = layer.tokens * model.dim * 2
        # Buffers for what each stage receives both ways, and what was sent but for 1F1B: for all microbatches.
        messages = message * microbatches * (2 if schedule == "1F1B" else 3.5 * candidate.stages)
    logits = 10 * matrix / model.dim * layer.tokens * mesh.tp / candidate.loss_chunks(task)
    if mesh.pp > 1 and schedule in SPLIT_BACKWARD:
        held += mesh.pp * n_layers / candidate.stages * layer.halfway
    total = states + held + in_flight * layer.kept + max(layer.working, logits) + messages
    degrees = (mesh.pp, mesh.dp_replicate, shards, mesh.tp, mesh.cp // mesh.ulysses, mesh.ulysses)
    total = total * (1 + plan.FRAGMENTATION) + sum(plan.allowance(task.device, degrees).values())
    return Estimate(total, step + UPDATE_BYTES * weights / shards / moving)


def _chunks_in_flight(candidate: Candidate, microbatches: int) -> float:
    """Forwards of a stage whose backward is yet to come, at most, on the rank that has the most: the first."""
    pp, stages = candidate.mesh.pp, candidate.stages
    if candidate.schedule in V_SHAPED:
        return min(2 * pp, 2 * microbatches)
    ahead = (stages - 1) * pp + 2 * (pp - 1) + 1 if stages > 1 else pp
    return min(ahead, microbatches * stages)


class _Layer:
    """A block of one rank, for one microbatch.

    Attributes:
        tokens: that a rank has between the blocks; each block's products are as if it had so few, and all weights.
        weights: of a rank, all shards gathered.
        seconds: forward and backward.
        kept: bytes from the forward for the backward.
        working: bytes while it computes.
        halfway: bytes between the two halves of a backward, where a schedule has that, beside those kept.
    """

    def __init__(self, task: Task, candidate: Candidate):
        mesh, model = candidate.mesh, task.model
        self.task, self.float8, self.tp = task, candidate.float8, mesh.tp
        self.tokens = candidate.microbatch * task.seq_len / (mesh.cp * mesh.tp)
        dim, keys = model.dim, 2 * model.dim * model.n_kv_heads // model.n_heads
        matrices = 1 if model.tie_embeddings else 2
        all_weights = (task.n_parameters - matrices * dim * model.vocab_size - dim) / model.n_layers
        self.weights = all_weights / mesh.tp
        full, selective = candidate.recomputation == "full", candidate.recomputation == "selective"
        # The plan takes a compiled block as one that computes elementwise results again, as inductor's partitioner has
        # it.
        again = full or selective or candidate.compiled

        forwards = 2 if full else 1
        products = self.product(self.weights, forwards + 2)
        rate = task.device.bf16
        attention = EFFICIENCY["attention"][0], EFFICIENCY["attention, backward"][0]
        if not task.device.fp8:
            attention = (EFFICIENCY["attention, Ampere"][0],) * 2
        attending = 2 * dim * task.seq_len * self.tokens / rate * (forwards / attention[0] + 2.5 / attention[1])
        ring = mesh.cp // mesh.ulysses
        passed = _collective(task, "send", 2 * keys * self.tokens, 2, mesh.tp * mesh.ulysses, 1) * (ring - 1)
        passed *= forwards + 3  # back: keys and values again, and their gradients in float32
        # Values read or written a token: two norms and two residual sums over D, rotations of queries and keys, SwiGLU
        # from two of F into one; the backward takes about twice that. What tensor parallel gathers is not cut.
        uncut = mesh.tp * dim if mesh.tp > 1 else 0
        passes = (15 * dim + 2 * keys + 4 * model.ffn_dim) * (1 if candidate.compiled else EAGER_PASSES) + 5 * uncut
        passes *= 3 + again
        moving = 2 * passes * self.tokens / (task.device.memory_bandwidth * EFFICIENCY["memory"][0])
        activations = 2 * dim * self.tokens * mesh.tp
        gathers, reductions = (6 if again else 4), (5 if full else 4)
        waiting = _collective(task, "all_gather", gathers * activations, mesh.tp, 1, gathers)
        waiting += _collective(task, "reduce_scatter", reductions * activations, mesh.tp, 1, reductions)
        traded = 2 * (2 * dim + keys) * self.tokens * (forwards + 1)
        waiting += _collective(task, "all_to_all", traded, mesh.ulysses, mesh.tp, 2 * (forwards + 1))
        self.seconds = products + max(attending, passed) + moving + waiting

        # Kept: the block's input and the results of its products and of attention (under tensor parallel, before they
        # are reduced); eager, all else too, with what was gathered.
        results = 5 * dim + keys + 2 * model.ffn_dim + 2 * uncut
        everything = 12 * dim + 3 * keys + 4 * model.ffn_dim + 2 * uncut
        self.kept = 2 * self.tokens * (dim if full else results if again else everything)
        self.working = 2 * self.tokens * (everything if full else everything - results)
        # Between the two halves of a backward: what the first computed again, or the gradients that the other needs.
        self.halfway = 2 * self.tokens * (everything if full else results / 2)

    def product(self, weights: float, times: float) -> float:
        """Seconds of a rank's tokens with these weights of it, so many times."""
        kind = "fp8" if self.float8 and self.task.device.fp8 else "bf16"
        rate = getattr(self.task.device, kind) * EFFICIENCY[f"product, {kind}"][0]
        return 2 * weights * self.tokens * self.tp * times / rate


@functools.cache
def _line(task: Task, name: str, n: int, stride: int) -> tuple[float, float]:
    """Seconds of an empty collective over n ranks so far apart, and of each byte."""
    ranks = list(range(0, n * stride, stride))
    empty, full = (task.cost_model.collective(name, size, ranks) for size in (0, GIB))
    return empty, (full - empty) / GIB


def _collective(task: Task, name: str, size: float, n: int, stride: int, times: int) -> float:
    """Seconds of so many that have this size in all."""
    if n == 1:
        return 0.0
    empty, a_byte = _line(task, name, n, stride)
    return empty * times + a_byte * size


# The search ----------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """What the plan says of a candidate.

    Attributes:
        bytes: of the worst rank.
        seconds: of a step.
        tokens_per_second: of a device.
        bubble: share of the pipeline's time.
        links: seconds of all collectives and messages.
        hidden: of them, what runs beside the computing.
        shares: seconds of the step by what takes them (report.time_shares).
        problem: why there is no plan; empty: there is one.
    """

    candidate: Candidate
    bytes: int = 0
    seconds: float = math.inf
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    bubble: float = 0.0
    links: float = 0.0
    hidden: float = 0.0
    shares: dict[str, float] | None = None
    problem: str = ""


def evaluate(config: LoadedConfig, candidate: Candidate, n_devices: int) -> Planned:
    """Plan a candidate."""
    try:
        made = plan.make_plan(config, world_size=n_devices)
    except Exception as error:  # one layout that cannot be rehearsed is reported, and the others are still compared
        return Planned(candidate, problem=f"{type(error).__name__}: {error}")
    links = {name: seconds for name, seconds in made.cost.seconds.items() if name.startswith("link: ")}
    waited = sum(links.get(f"link: {axis}", 0.0) for axis in EXPOSED)
    total = sum(links.values())
    rates = made.tokens_per_second, made.mfu, made.bubble, total, total - waited
    return Planned(candidate, made.worst.total, made.step_seconds, *rates, dict(time_shares(made)))


# Whose plans tell of each other, from nearest to farthest.
KINSHIPS: tuple[Callable[[Candidate], Any], ...] = (
    lambda one: (one.mesh, one.compiled, one.schedule, one.stages, one.recomputation == "full"),
    lambda one: (one.mesh, one.compiled, one.schedule, one.stages),
    lambda one: (one.mesh, one.compiled),
    lambda one: (one.mesh.pp > 1, one.compiled),
)


class Search:
    """Chooses which candidates to plan, and learns from each.

    Attributes:
        planned: so far.
        usual: the degrees of the common guide.
        refused: a line with which one was refused, by mesh.
    """

    def __init__(self, task: Task):
        self.task, self.usual = task, usual_mesh(task)
        self.planned: list[Planned] = []
        self.refused: dict[Mesh, str] = {}
        self.open = {candidate: estimate(task, candidate) for candidate in candidates(task)}
        self._leanest = min((guess.bytes for guess in self.open.values()), default=math.inf)
        most = HOPELESS * task.device.memory
        self.open = {candidate: guess for candidate, guess in self.open.items() if guess.bytes < most}

    def fits(self, size: float) -> bool:
        return size <= self.task.device.memory

    def best(self) -> list[Planned]:
        """Those that fit, the fastest first; of those that are equally fast, what computes and cuts least."""
        fitting = [one for one in self.planned if not one.problem and self.fits(one.bytes)]
        return sorted(fitting, key=lambda one: (round(one.seconds, 3), *_simplicity(one.candidate)))

    def advised(self) -> Planned:
        """Of those that are as good as the fastest, the common guide's, which many have trained with; else the one that
        is on links least, since these are what is slower than planned first. There must be one that fits."""
        fitting = self.best()
        close = [one for one in fitting if one.seconds <= CLOSE * fitting[0].seconds]
        return min(close, key=lambda one: (one.candidate.mesh != self.usual, one.links))

    def leanest(self) -> float:
        """Bytes of the candidate that takes least, planned or not."""
        return min([self._leanest, *(one.bytes for one in self.planned if not one.problem)])

    def corrected(self) -> Callable[[Candidate], Estimate]:
        """Estimates, times what the plans of the nearest kin were of theirs."""
        known: dict[tuple, list[tuple[float, float]]] = {}
        for one in self.planned:
            if not one.problem:
                guess = estimate(self.task, one.candidate)
                for distance, kinship in enumerate(KINSHIPS):
                    ratios = one.bytes / guess.bytes, one.seconds / guess.seconds
                    known.setdefault((distance, kinship(one.candidate)), []).append(ratios)

        def correct(candidate: Candidate) -> Estimate:
            guess = self.open.get(candidate) or estimate(self.task, candidate)
            for distance, kinship in enumerate(KINSHIPS):
                ratios = known.get((distance, kinship(candidate)))
                if ratios:
                    size, time = (sum(column) / len(ratios) for column in zip(*ratios, strict=True))
                    return Estimate(guess.bytes * size, guess.seconds * time)
            return guess

        return correct

    def next_round(self) -> list[tuple[Candidate, LoadedConfig]]:
        """What to plan now, with its config: of some families the most promising legal candidate; of the usual mesh and
        of sharding alone too, until one of each fits. Empty: nothing promises to be among the best."""
        correct = self.corrected()
        guesses = {candidate: correct(candidate) for candidate in self.open}
        order = sorted(
            (candidate for candidate, guess in guesses.items() if self.fits(guess.bytes)),
            key=lambda one: (round(guesses[one].seconds, 6), *_simplicity(one)),
        )
        fastest: dict[tuple, float] = {}
        for one in self.best():
            fastest.setdefault(one.candidate.mesh.family, one.seconds)
        slowest = FAR * min(fastest.values(), default=math.inf)
        fitting = {one.candidate.mesh for one in self.best()}
        wanted = {self.usual, Mesh(1, 1, self.task.n_devices, 1, 1, 1)} - fitting
        chosen: dict[tuple, tuple[Candidate, LoadedConfig]] = {}
        for must in (True, False):
            for candidate in order:
                seconds, family = guesses[candidate].seconds, candidate.mesh.family
                if len(chosen) == A_ROUND or (seconds > slowest and not must):
                    break
                if family in chosen or candidate not in self.open or (must and candidate.mesh not in wanted):
                    continue
                if seconds * WORTH > fastest.get(family, math.inf) and not must:
                    continue
                config = self._load(candidate)
                if config is not None:
                    chosen[family] = candidate, config
        return list(chosen.values())

    def _load(self, candidate: Candidate) -> LoadedConfig | None:
        """Take a candidate out of the open ones. Returns its config, or None if it is refused."""
        del self.open[candidate]
        try:
            return loaded(self.task, candidate)
        except ConfigError as error:
            self.refused.setdefault(candidate.mesh, error.problems[0])
            if "compile.enable" in str(error):  # not everything can be compiled
                eager = candidate._replace(compiled=False)
                self.open[eager] = estimate(self.task, eager)
        return None


def _simplicity(one: Candidate) -> tuple[int, int]:
    """Sorts what recomputes less, and then what is cut in fewer ways, to the front."""
    return RECOMPUTATION.index(one.recomputation), one.mesh.cuts


def usual_mesh(task: Task) -> Mesh:
    """The degrees that the common guide gives, as Megatron's papers, torchtitan and Llama 3's (arXiv:2407.21783,
    section 3.3.2) have it: FSDP alone for what is small; else tensor parallel over a host, a pipeline across hosts
    until half of a device holds its stage, context parallel for long sequences, data parallel with what remains."""
    n, room = task.n_devices, task.device.memory / 2
    host = math.gcd(n, task.device.devices_per_node)
    states = STATE_BYTES * task.n_parameters
    small, tp, pp, cp = states / task.device.devices_per_node <= room, 1, 1, 1
    if not small or task.seq_len > LONG:
        tp = host
    while not small and states / (tp * pp) > room and n % (2 * pp * tp) == 0:
        pp *= 2
    piece = PIECE if task.seq_len > LONG else LONG
    while (task.seq_len / (cp * tp) > piece or n // (cp * tp * pp) > task.sequences) and n % (2 * cp * pp * tp) == 0:
        cp *= 2
    return Mesh(pp, 1, n // (pp * cp * tp), cp, 1, tp)


def search(task: Task, progress: Callable[[str, int], None]) -> Search:
    """Plan the most promising candidates.

    Args:
        progress: told what is being done, and how many plans are done.
    """
    progress("estimating", 0)
    found = Search(task)
    with plan.processes(A_ROUND, preload="titanlite.advise") as pool:
        for number in range(1, ROUNDS + 1):
            chosen = found.next_round()
            if not chosen:
                break
            futures = [pool.submit(evaluate, config, candidate, task.n_devices) for candidate, config in chosen]
            for future in as_completed(futures):
                progress(f"round {number} of {ROUNDS}: planning {len(futures)} layouts", len(found.planned))
                found.planned.append(future.result())
    return found


# What is said of it --------------------------------------------------------------------------------------------------


def table(task: Task, found: Search, top: int) -> Table:
    """The fastest that fit."""
    shown = Table(title=f"planned, the fastest first; {len(found.planned)} of them", title_justify="left")
    for name in ("", "layout", "schedule", "batch", "recomputation", "float8"):
        if name != "float8" or task.float8:
            shown.add_column(name)
    for name in ("GiB", "tokens/s a device", "MFU"):
        shown.add_column(name, justify="right")
    for number, one in enumerate(found.best()[:top], 1):
        candidate = one.candidate
        batch = f"{candidate.local_batch}" + (f" by {candidate.microbatch}" if candidate.mesh.pp > 1 else "")
        row = [
            f"{number} *" if one is found.advised() else str(number),
            str(candidate.mesh),
            candidate.pipeline or "-",
            batch,
            _recomputes(candidate),
        ]
        row += [("yes" if candidate.float8 else "no")] * task.float8
        row += [f"{one.bytes / GIB:.1f}", f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}"]
        shown.add_row(*row, style="bold" if one is found.advised() else "")
    shown.caption = (
        "batch: sequences that a data-parallel rank takes a microstep, and a pipeline a microbatch; *: advised"
    )
    return shown


def _recomputes(candidate: Candidate) -> str:
    return candidate.recomputation + ("" if candidate.compiled else ", not compiled")


def explain(task: Task, found: Search) -> list[str]:
    """Why `found.advised()`, a line a choice."""
    best, fastest = found.advised(), found.best()[0]
    candidate, mesh = best.candidate, best.candidate.mesh
    states = STATE_BYTES * task.n_parameters
    waiting = best.shares.get("links, not overlapped", 0.0) / best.seconds
    lines = [
        f"Weights, gradients and moments are {STATE_BYTES} bytes a parameter, {states / GIB:,.0f} GiB: at least "
        f"{math.ceil(states / task.device.memory)} of {task.n_devices} devices must share them."
    ]
    if mesh.tp > 1:
        lines.append(
            f"TP {mesh.tp}, inside the host of {task.device.devices_per_node}: it cuts weights and activations alike. Nothing "
            f"overlaps its collectives; {waiting:.1%} of the step waits for links."
        )
    else:
        lines.append(
            "No TP: its collectives would be waited for in every layer; FSDP's run beside the computing, and "
            f"{waiting:.1%} of the step waits for links."
        )
    if mesh.pp > 1:
        count = candidate.local_batch // candidate.microbatch
        lines.append(
            f"PP {mesh.pp}, across: neighbours send one another a microbatch's activations only. {candidate.schedule} "
            f"with {candidate.stages} stage(s) a rank and {count} microbatches: {best.bubble:.1%} of it is bubble."
        )
    else:
        lines.append("No PP: the memory does not need it, and no stage waits for another.")
    if mesh.dp > 1:
        how = f"sharded over {mesh.dp_shard} and replicated {mesh.dp_replicate} times (hybrid)"
        how = how if mesh.dp_replicate > 1 else "sharded (FSDP)"
        lines.append(f"DP {mesh.dp} with what remains, {how}; {candidate.local_batch} sequence(s) a microstep each.")
    if mesh.cp > 1:
        length = "for the length" if task.seq_len > LONG else "in place of recomputation or more TP"
        lines.append(
            f"CP {mesh.cp} {length}, ring {mesh.cp // mesh.ulysses} x ulysses {mesh.ulysses}: of {task.seq_len:,} "
            f"tokens a device keeps {task.seq_len // (mesh.cp * mesh.tp):,} between layers."
        )
    else:
        lines.append(f"No CP: a device has room for the {task.seq_len // mesh.tp:,} tokens of a sequence.")
    lines.append(_why_recomputation(task, found, best))
    if best.hidden > HIDDEN * best.seconds:
        lines.append(
            f"FSDP's collectives and a ring's messages take {best.hidden / best.seconds:.0%} as long as the step and "
            "are counted as running beside it; a network that is slower than planned shows."
        )
    lines.append(_beside_the_usual(task, found, best))
    if fastest is not best:
        gain = fastest.tokens_per_second / best.tokens_per_second - 1
        why = "and the guide's has been trained with"
        if mesh != found.usual:
            why = (
                f"and it is on links for {fastest.links / fastest.seconds:.0%} of its step, hidden or not, this for "
                f"{best.links / best.seconds:.0%}, so this loses less where they are slower than planned"
            )
        lines.append(
            f"The fastest, {fastest.candidate.mesh} ({_detail(fastest)}), promises {gain:.1%} more: too little to tell "
            f"apart by a plan, {why}."
        )
    return lines


def _detail(one: Planned) -> str:
    candidate = one.candidate
    parts = (candidate.pipeline, f"recomputation {_recomputes(candidate)}", f"{one.bytes / GIB:.1f} GiB")
    return ", ".join(part for part in parts if part)


def _why_recomputation(task: Task, found: Search, best: Planned) -> str:
    candidate, chosen = best.candidate, best.candidate.recomputation
    spare = (task.device.memory - best.bytes) / GIB
    if chosen == "none":
        compiled = "; the compiler still computes elementwise results again" if candidate.compiled else ""
        return f"No recomputation: everything fits, with {spare:.1f} GiB to spare{compiled}."
    # Selective keeps as much as none does when the compiler decides the rest, so it is the next step down from full.
    less = candidate._replace(recomputation=RECOMPUTATION[RECOMPUTATION.index(chosen) - 1])
    of_less = [one.bytes for one in found.planned if one.candidate == less and not one.problem]
    size = of_less[0] if of_less else found.corrected()(less).bytes
    how = "planned" if of_less else "estimated"
    if found.fits(size):
        return f"Recomputation {chosen}, {spare:.1f} GiB to spare: {less.recomputation} fits, but is no faster."
    return (
        f"Recomputation {chosen}, {spare:.1f} GiB to spare: {less.recomputation} would need {size / GIB:.1f} of "
        f"{task.device.memory / GIB:.1f} GiB ({how})."
    )


def _beside_the_usual(task: Task, found: Search, best: Planned) -> str:
    """How it differs from the common guide, and what that is worth."""
    usual = found.usual
    if best.candidate.mesh == usual:
        return f"This is the common guide's layout: {usual}."
    says = f"The common guide (TP inside the host, PP across, DP with the rest, CP for length) gives {usual}"
    if task.sequences % usual.dp:
        return f"{says}, whose {usual.dp} data-parallel ranks cannot share {task.sequences} sequences evenly."
    fitting = [one for one in found.best() if one.candidate.mesh == usual]
    if fitting:
        other = fitting[0]
        longer = {what: other.shares.get(what, 0.0) - best.shares.get(what, 0.0) for what in other.shares | best.shares}
        causes = sorted(((seconds, what) for what, seconds in longer.items() if seconds > 0), reverse=True)[:2]
        why = "; of a step it spends more on " + " and ".join(f"{what} ({s:+.2f} s)" for s, what in causes)
        less = 1 - other.tokens_per_second / best.tokens_per_second
        return (
            f"{says}: {other.tokens_per_second:,.0f} tokens/s a device, {less:.1%} less ({_detail(other)})"
            f"{why if causes else ''}."
        )
    too_large = [one.bytes for one in found.planned if one.candidate.mesh == usual and not one.problem]
    if too_large:
        return f"{says}, which does not fit: {min(too_large) / GIB:.1f} GiB planned."
    if usual in found.refused:
        return f"{says}, which is refused: {found.refused[usual]}"
    return f"{says}, which does not fit by the estimate."


def toml(task: Task, found: Search) -> str:
    """The advised layout as a config, with where it came from."""
    best = found.advised()
    lines = [
        f"{task.flavor} on {task.n_devices} x {task.device_name}: {best.candidate.mesh}.",
        "",
        "Advised by: python -m titanlite.plan --advise "
        f"--gpus {task.n_devices} --device {task.device_name} --model {task.flavor} --seq-len {task.seq_len} "
        f"--global-batch {task.sequences * task.seq_len}" + " --float8" * task.float8,
        f"Planned: {best.bytes / GIB:.1f} of {task.device.memory / GIB:.1f} GiB, "
        f"{best.tokens_per_second:,.0f} tokens/s a device, MFU {best.mfu:.1%}.",
        *explain(task, found),
        "",
        "It is a layout only: the tokenizer, the learning rate, the steps and checkpoints are still to be chosen.",
    ]
    wrapped = [part for line in lines for part in (textwrap.wrap(line, 117, break_on_hyphens=False) or [""])]
    comments = "\n".join(f"# {line}".rstrip() for line in wrapped)
    return f"{comments}\n{tomli_w.dumps(best.candidate.options(task))}"


# The command ---------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of --advise. They have no defaults, so that one that is given without it is seen."""
    group = parser.add_argument_group("advice")
    group.add_argument("--advise", action="store_true", help="search the layouts of --model on --gpus")
    for name, kind, what in (
        ("--gpus", int, "devices"),
        ("--device", str, "in titanlite/devices.py, or a TOML file (default h100)"),
        ("--model", str, "in titanlite/sizes.py"),
        ("--seq-len", int, "tokens of a sequence"),
        ("--global-batch", int, f"tokens of an optimizer step, at least one sequence (default {TOKENS:,})"),
        ("--top", int, "layouts in the table (default 5)"),
        ("--write", Path, "write the best as a config"),
    ):
        group.add_argument(name, type=kind, help=what)
    group.add_argument("--float8", action="store_true", default=None, help="try float8 too")


OPTIONS = ("gpus", "device", "model", "seq_len", "global_batch", "top", "write", "float8")


def reject_mixtures(arguments: argparse.Namespace, others: Sequence[str]) -> None:
    """A config is planned, or a layout is advised.

    Args:
        others: arguments that are not options: a config and its overrides.

    Raises:
        ConfigError: if it is some of both.
    """
    problems = [
        f"--{name.replace('_', '-')} is read only with --advise"
        for name in OPTIONS
        if not arguments.advise and getattr(arguments, name) is not None
    ]
    if arguments.advise:
        problems = [f"{other}: --advise takes no config and no other options" for other in others]
        problems += ["--html draws one config's plan: write the advised one, and plan that"] * bool(arguments.html)
    if problems:
        raise ConfigError(problems)


def make_task(arguments: argparse.Namespace) -> Task:
    """What the options ask for.

    Raises:
        ConfigError: with every option that is missing or wrong.
    """
    wanted = ("gpus", "model", "seq_len")
    names = {name: f"--{name.replace('_', '-')}" for name in (*wanted, "top", "global_batch")}
    problems = [f"--advise needs {names[name]}" for name in wanted if getattr(arguments, name) is None]
    for name in names:
        value = getattr(arguments, name)
        if isinstance(value, int) and value < 1:
            problems.append(f"{names[name]} = {value}: expected a whole number at least 1")
    if arguments.model and arguments.model not in SIZES:
        problems.append(f'--model = "{arguments.model}": expected one of {", ".join(SIZES)}')
    if arguments.write and not arguments.write.parent.is_dir():
        problems.append(f"--write = {arguments.write}: no such folder: {arguments.write.parent}")
    if problems:
        raise ConfigError(problems)
    device_name = arguments.device or PlanOptions().device
    n, tokens = arguments.gpus, arguments.global_batch or TOKENS
    sequences = max(1, tokens // arguments.seq_len)
    if sequences > n:  # so that it can be dealt evenly to any data-parallel degree
        sequences -= sequences % n
    device, float8 = find_device(device_name), bool(arguments.float8)
    return Task(arguments.model, arguments.seq_len, sequences, n, device_name, device, float8)


def main(arguments: argparse.Namespace) -> int:
    """Advise. Returns the exit status: 0, or 1 if nothing fits.

    Raises:
        ConfigError: with what is wrong in the options.
    """
    task = make_task(arguments)
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 120
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("", total=ROUNDS * A_ROUND)
        found = search(task, lambda what, done: bar.update(line, description=what, completed=done))
    out.print(
        f"{task.flavor}, {task.n_parameters:,} parameters, on {task.n_devices} x {task.device_name} "
        f"({task.device.devices_per_node} a host); a step has {task.sequences:,} sequences of {task.seq_len:,} tokens, "
        f"{task.sequences * task.seq_len:,} in all",
        soft_wrap=True,
    )
    for one in found.planned:
        if one.problem:
            out.print(f"left out, since it cannot be planned: {one.candidate.mesh}: {one.problem}", markup=False)
    if not found.best():
        least, most = found.leanest() / GIB, task.device.memory / GIB
        out.print(
            f"nothing fits: the leanest layout needs {least:,.1f} of {most:,.1f} GiB; take more or larger devices"
        )
        return 1
    out.print(table(task, found, arguments.top or 5))
    for line in explain(task, found):
        out.print(f"- {line}", markup=False, soft_wrap=True)
    if arguments.write:
        arguments.write.write_text(toml(task, found))
        out.print(f"written: {arguments.write}")
    return 0
