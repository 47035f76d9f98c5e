"""Hold a config's layout against one process: loss, gradient norm, every gradient, every weight.

    python -m titanlite.parity CONFIG.toml [--section.key=value ...] [--steps=3] [--dtype=float64]
    torchrun ... -m titanlite.parity CONFIG.toml [...]            on the ranks and devices of the launch

The model is shrunk, the layout is not: as many ranks as the config asks for, cut as it says, with the same schedule,
microbatches and precision settings, on a model that fits. Alone, the command starts the ranks on this machine's CPUs.
Prints what differs by how much, and exits with 0 only if nothing differs by more than rounding can explain.

`run` takes some steps with the same parts and the same functions as train.py, cut over the ranks of the launch.
`run_alone` takes the same steps in one process with none of them: plain tensors, the whole global batch in one forward,
torch's own clipping. Equal means that the layout computes what the model means.
"""

import argparse
import dataclasses
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite import build
from titanlite.checkpoint import Checkpointer
from titanlite.config import Config, ConfigError, Launch, LoadedConfig, check, load, loader
from titanlite.config.schema import Comm
from titanlite.data.packing import Sequence, positions_in_documents
from titanlite.init import init_weights
from titanlite.launcher import ranks_wanted
from titanlite.loss import IGNORED, cross_entropy_sum
from titanlite.optimizer import build_loss_scale, clip_factor, gradient_norm, lr_factor, scale_gradients, set_lr
from titanlite.parallel import mesh
from titanlite.parity.process_pool import Pool


@dataclasses.dataclass
class Trace:
    """What some steps computed: full tensors on the CPU, by parameter name."""

    initial: dict[str, Tensor]
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    """A step's gradients before clipping."""
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """After the last step."""
    validation: float = math.nan
    """Loss on the batch that follows, without gradients."""


class ProofSequences:
    """Random tokens by global index, with a very different number of valid targets in each sequence: a mean over
    ranks or microsteps instead of over tokens shows at once."""

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int):
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed

    def __getitem__(self, index: int) -> Sequence:
        generator = np.random.RandomState((self.seed, index))
        tokens = generator.randint(self.vocab_size, size=self.seq_len + 1)
        ends = generator.random_sample(self.seq_len) < 3 / self.seq_len  # about four documents
        targets = np.where(ends, IGNORED, tokens[1:])
        targets[generator.randint(1, self.seq_len + 1) :] = IGNORED
        return Sequence(tokens[:-1], targets, positions_in_documents(ends))

    def read(self, first: int, stride: int, streams: dict[int, Any]) -> Iterator[tuple[Sequence, None]]:
        """As data.PackedSequences.read."""
        while True:
            yield self[first], None
            first += stride


def proof_sequences(config: Config) -> ProofSequences:
    return ProofSequences(vocab_size=config.model.vocab_size, seq_len=config.training.seq_len, seed=config.debug.seed)


class Parts:
    """What train.py builds, with proof sequences for data.

    Args:
        config: as `config.check` resolved it.
        checkpointer: whose newest checkpoint to go on from.

    Attributes:
        last_step: of the checkpoint; 0 without one.
    """

    def __init__(self, config: Config, device: torch.device, checkpointer: Checkpointer | None = None):
        self.device, self.max_norm = device, config.training.max_norm
        self.layout = build.build_layout(config, device)
        self.model, stages = build.build_model(config, self.layout, device)
        self.work = build.build_step(config, self.layout, self.model, stages, device)
        self.optimizer = build.build_optimizer(config, self.model, stages.values())
        saved = checkpointer.resume(self.model, self.optimizer) if checkpointer else None
        self.last_step, state = (saved["step"], saved["data"]) if saved else (0, None)
        sequences = proof_sequences(config)
        self.loader = build.build_loader(config, self.layout, sequences, device=device, state=state)
        self.parameters = list(self.model.parameters())

    def step(self, batch: Any) -> None:
        """A training step, but for its learning rate."""
        self.work.forward_backward(batch)
        self.update(gradient_norm(self.parameters, self.device))

    def update(self, norm: Tensor) -> None:
        """What follows the backward."""
        scale_gradients(self.parameters, clip_factor(norm, self.max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(config: Config, launch: Launch, *, steps: int, checkpointer: Checkpointer | None = None) -> Trace:
    """Take some steps over all ranks of the process group. Every rank must call it, and each gets the trace of all
    modules.

    Args:
        config: as `config.check` resolved it.
        checkpointer: go on from its newest checkpoint, to which `steps` are added, and save after the last one.
    """
    parts = Parts(config, mesh.device_of(launch), checkpointer)
    model, loader, pipeline = parts.model, parts.loader, parts.layout.mesh["pp"]
    scale = build_loss_scale(config.training)

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all pipeline stages."""
        of_stages: list[dict[str, Tensor]] = [{}] * pipeline.size()
        dist.all_gather_object(of_stages, _whole(tensors), pipeline.get_group())
        gathered = {name: tensor for stage in of_stages for name, tensor in stage.items()}
        return {name: gathered[name] for name in sorted(gathered, key=_depth)}

    trace = Trace(initial=whole(dict(model.named_parameters())))
    last_step = parts.last_step + steps
    for step in range(parts.last_step + 1, last_step + 1):
        set_lr(parts.optimizer, config.optimizer.lr * lr_factor(step, config.lr_scheduler))
        loss_sum, valid = parts.work.forward_backward(loader.next(), scale.value)
        dist.all_reduce(loss_sum)
        norm = gradient_norm(parts.parameters, parts.device)
        trace.losses.append((loss_sum / valid).item())
        trace.norms.append(norm.item())
        trace.gradients.append(whole({name: p.grad for name, p in model.named_parameters()}))
        parts.update(norm)
    trace.weights = whole(dict(model.named_parameters()))
    if checkpointer:
        checkpointer.save(last_step, model, parts.optimizer, {"data": loader.state()})
    trace.validation = parts.work.validate(loader.next())
    loader.close()
    return trace


def run_alone(config: Config, device: torch.device, *, steps: int) -> Trace:
    """Take the same steps in this process alone, without FSDP, accumulation or anything distributed."""
    training = config.training
    model = build.meta_model(config)
    if config.float8.enable:
        from titanlite.parallel.float8 import convert_to_float8  # here: the import takes a second

        float8 = config.float8.model_copy(update={"enable_fsdp_float8_all_gather": False})
        degree = config.parallelism.tensor_parallel_degree
        convert_to_float8(model, float8, tensor_parallel_degree=degree, device=device)
    model.materialize(device)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    optimizer = build.build_optimizer(config, model)
    sequences, batch_size = proof_sequences(config), training.global_batch_size
    compute = getattr(torch, training.mixed_precision_param)
    scale = build_loss_scale(config.training).value
    parameters = list(model.parameters())

    def loss_of_step(step: int) -> Tensor:
        """Mean over the valid tokens of the whole global batch."""
        rows = [sequences[index] for index in range((step - 1) * batch_size, step * batch_size)]
        tokens, targets, documents = (torch.from_numpy(np.stack(p)).to(device) for p in zip(*rows, strict=True))
        places = (documents, documents) if training.document_mask else (None, None)
        weights = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (tokens, *places))
        return cross_entropy_sum(logits, targets) / (targets != IGNORED).sum()

    trace = Trace(initial=_whole(dict(model.named_parameters())))
    for step in range(1, steps + 1):
        set_lr(optimizer, config.optimizer.lr * lr_factor(step, config.lr_scheduler))
        loss = loss_of_step(step)
        optimizer.zero_grad()
        (loss * scale).backward()
        scale_gradients(parameters, 1 / scale)
        trace.losses.append(loss.item())
        trace.gradients.append(_whole({name: p.grad for name, p in model.named_parameters()}))
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm).item())
        optimizer.step()
    trace.weights = _whole(dict(model.named_parameters()))
    with torch.no_grad():
        trace.validation = loss_of_step(steps + 1).item()
    return trace


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, gathered where they are shards."""
    # It warns that gathering over two axes of a mesh takes two collectives, which nobody waits for here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gathered = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in gathered.items()}


def _depth(name: str) -> int:
    """How deep in the model a parameter's module is, for an order that does not depend on stages."""
    first, *others = name.split(".")
    return {"tok_embeddings": -1, "layers": int(others[0]) if first == "layers" else 0}.get(first, 2**31)


def differences(one: Trace, other: Trace) -> dict[str, float]:
    """Largest absolute difference of each thing compared, in the order in which it was computed: so the first one
    that is too large is where the runs part. Infinite where one of them lacks a name or has no number."""
    found: dict[str, float] = {}

    def compare(what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        for name in a | b:
            same_shape = name in a and name in b and a[name].shape == b[name].shape
            difference = (a[name] - b[name]).abs().max().item() if same_shape else float("inf")
            found[f"{what} {name}"] = difference if difference == difference else float("inf")

    def scalars(what: str, **pairs: tuple[float, float]) -> None:
        a, b = ({k: torch.tensor(pair[i], dtype=torch.float64) for k, pair in pairs.items()} for i in (0, 1))
        compare(what, a, b)

    compare("initial weight", one.initial, other.initial)
    for step, (a, b) in enumerate(zip(one.gradients, other.gradients, strict=True), 1):
        losses, norms = zip(one.losses, other.losses, strict=True), zip(one.norms, other.norms, strict=True)
        scalars(f"step {step}", loss=[*losses][step - 1], norm=[*norms][step - 1])
        compare(f"step {step} gradient", a, b)
    compare("final weight", one.weights, other.weights)
    scalars("validation", loss=(one.validation, other.validation))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The command


ALLOWED_IN_FLOAT64 = 1e-11
"""float64 has 1.1e-16. A gradient sums at most some thousand terms, in another order: 1e-13 of its size. AdamW divides
by the gradient's own size, so that error is at most magnified to that share of a step of lr = 1e-2, for gradients that
are not themselves rounding."""
ALLOWED_ROUNDINGS = 8
"""Where something rounds (`rounds`): how many times farther from one process a layout may be than that process, by
rounding alone, is from the same process in float64. Two roundings of one size differ by twice that; the largest of many
thousands of elements, and sums over ranks in one more rounding each, take the rest."""
GIB_A_RANK = 0.15
"""Memory of a rank of the shrunk model on a CPU: 0.10 to 0.13 GiB were measured."""


def shrink(loaded: LoadedConfig[Config], dtype: str) -> tuple[LoadedConfig[Config], list[str]]:
    """The same layout on a model, a sequence and a batch as small as it allows; and what was changed, in words.

    What is kept: all degrees and the schedule, stages named one by one, whether gradients are accumulated, whether
    query heads share key heads, whether embeddings are tied, whether documents are masked, the optimizer.
    """
    config, parallelism = loaded.config, loaded.config.parallelism
    model, training = config.model, config.training
    tensor, ulysses = parallelism.tensor_parallel_degree, parallelism.context_parallel_ulysses_degree
    context = parallelism.context_parallel_degree
    n_kv_heads = tensor * ulysses * min(2, model.n_kv_heads // (tensor * ulysses))
    n_heads = n_kv_heads * min(2, model.n_heads // model.n_kv_heads)
    n_layers = model.n_layers
    if not parallelism.module_fqns_per_model_part:
        n_layers = min(n_layers, max(parallelism.n_stages + 1, 2))
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    local_batch_size = min(training.local_batch_size, 2)
    if parallelism.pipeline_parallel_degree > 1:  # the least that keeps every rank busy; all schedules accept it
        local_batch_size = min(microbatches, max(2 * parallelism.pipeline_parallel_degree, parallelism.n_stages))
    data_ranks = config.parallelism.data_parallel_degree
    microsteps = training.global_batch_size // (training.local_batch_size * data_ranks)
    small = {
        "model__n_layers": n_layers,
        "model__n_heads": n_heads,
        "model__n_kv_heads": n_kv_heads,
        # Float8 leaves smaller layers alone.
        "model__dim": (16 if config.float8.enable else 8) * n_heads,
        "model__ffn_dim": (16 if config.float8.enable else 12) * max(tensor, 2),
        "model__vocab_size": tensor * math.ceil(60 / tensor),
        "training__seq_len": min(training.seq_len, math.lcm(2 * context, context * tensor) * 4),
        "training__local_batch_size": local_batch_size,
        "training__global_batch_size": local_batch_size * data_ranks * min(microsteps, 2),
        "parallelism__pipeline_parallel_microbatch_size": 1,
    }
    changed = [
        f"{name.replace('__', '.')} {_value(config, name)} -> {value}"
        for name, value in small.items()
        if _value(config, name) != value
    ]
    small |= {
        "training__dtype": "float64" if dtype == "float64" else "float32",
        "training__mixed_precision_param": dtype if dtype in ("bfloat16", "float16") else "auto",
        "training__mixed_precision_reduce": "auto",
        "training__steps": 100,
        "training__max_norm": 0.1,  # so that clipping is at work
        # Adam's first steps are of the size of lr wherever the gradient is rounding only, in either direction: in low
        # precision they must stay small against the weights (0.02), or the runs part for no fault of the layout.
        "optimizer__lr": 1e-2 if dtype == "float64" and not config.float8.enable else 1e-4,
        "lr_scheduler__warmup_steps": 2,
        "lr_scheduler__total_steps": -1,
    }
    if dtype == "float64":  # in which low-bit moments have no meaning
        small |= {"optimizer__state_dtype": "auto", "optimizer__stochastic_rounding": False}
    if dtype != "bfloat16":  # the kernel of the config may not take this type
        small["training__attention_backend"] = "auto"
    return dataclasses.replace(loaded, config=config.replace(**small)), changed


def _value(config: Config, name: str) -> Any:
    section, key = name.split("__")
    return getattr(getattr(config, section), key)


def trace_of_rank_0(config: Config, n_devices: int, steps: int) -> Trace | None:
    """What a rank of a pool does."""
    launch = Launch.from_environment(n_devices)
    trace = run(config, launch, steps=steps)
    return trace if launch.rank == 0 else None


def rounds(config: Config) -> bool:
    """Whether anything is computed in less than float64."""
    low_bit = config.optimizer.state_dtype != "auto" or config.optimizer.stochastic_rounding
    return config.training.dtype != "float64" or config.float8.enable or low_bit


def allowed(config: Config, alone: Trace, device: torch.device, *, steps: int) -> dict[str, float]:
    """How much each thing compared may differ, by `differences`' names."""
    if not rounds(config):
        return {what: ALLOWED_IN_FLOAT64 for what in differences(alone, alone)}
    exact = config.replace(
        training__dtype="float64",
        training__mixed_precision_param="float64",
        float8__enable=False,
        optimizer__state_dtype="auto",
        optimizer__stochastic_rounding=False,
    )
    rounding = differences(alone, run_alone(exact, device, steps=steps))
    # A single number may be off by nothing, by chance: the worst of all steps counts. Likewise Adam turns rounding into
    # a step of lr for few elements, in one parameter or another: the worst of all parameters counts.
    for kind in (r".* loss", r"step \d+ norm", r"final weight .*"):
        same = [what for what in rounding if re.fullmatch(kind, what)]
        rounding |= dict.fromkeys(same, max(rounding[what] for what in same))
    return {what: ALLOWED_ROUNDINGS * difference for what, difference in rounding.items()}


def report(alone: Trace, layout: Trace, bounds: dict[str, float]) -> bool:
    """Print the table and the verdict; whether all is equal."""
    found = differences(alone, layout)
    bounds = {what: 0.0 if what.startswith("initial weight") else bound for what, bound in bounds.items()}
    wrong = [what for what, difference in found.items() if difference > bounds.get(what, 0.0)]
    steps = range(1, len(alone.losses) + 1)

    def verdict(*names: str) -> str:
        return "DIFFERS" if any(name in wrong for name in names) else "equal"

    print(f"{'':40} {'one process':>18} {'layout':>18} {'difference':>11} {'allowed':>9}")
    pairs = {f"step {step} loss": (alone.losses[step - 1], layout.losses[step - 1]) for step in steps}
    pairs |= {f"step {step} norm": (alone.norms[step - 1], layout.norms[step - 1]) for step in steps}
    pairs["validation loss"] = alone.validation, layout.validation
    for name, (one, other) in pairs.items():
        print(f"{name:40} {one:18.12f} {other:18.12f} {found[name]:11.1e} {bounds[name]:9.1e}  {verdict(name)}")
    print(f"\n{'largest difference':40} {'initial weight':>18} {'gradients':>18} {'final weight':>11}")
    for name in alone.initial:
        gradients = [f"step {step} gradient {name}" for step in steps]
        initial, final = f"initial weight {name}", f"final weight {name}"
        largest = max(found[gradient] for gradient in gradients)
        values = f"{found[initial]:18.1e} {largest:18.1e} {found[final]:11.1e}"
        print(f"{name:40} {values} {'':9}  {verdict(initial, *gradients, final)}")
    if wrong:
        first = wrong[0]
        print(f"\nDIFFERENT: first in {first}, by {found[first]:.1e} where {bounds.get(first, 0):.1e} is rounding")
    else:
        largest = max(found, key=lambda what: found[what] / (bounds[what] or 1))
        print(
            f"\nequal: the largest difference, in {largest}, is {found[largest]:.1e} of {bounds[largest]:.1e} allowed"
        )
    return not wrong


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 equal, 1 different, 2 the config or the launch is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "float16"], default="float64")
    arguments, others = parser.parse_known_args(argv)
    steps, launched = arguments.steps, "WORLD_SIZE" in os.environ
    n_devices = torch.cuda.device_count() if launched else 0
    try:
        loaded = load(others)
        launch = Launch.from_environment(n_devices)
        if not launched:
            world = ranks_wanted(loaded, os.environ, n_devices=0)
            launch = Launch(0, 0, world, world, 0)
        resolved = check(runnable(loaded, on_cpu=not n_devices), launch)
        small, changed = shrink(dataclasses.replace(loaded, config=resolved), arguments.dtype)
        config = check(small, launch)
        if not launched:
            _refuse_too_many(loaded, launch.world_size)
    except ConfigError as error:
        loader.print_problems(error)
        return 2
    if launch.rank == 0:
        print(
            f"{loaded.file}: {build.describe_mesh(config)} = {launch.world_size} rank(s), {arguments.dtype}, "
            f"{steps} steps"
        )
        print(f"shrunk: {', '.join(changed) or 'nothing'}\n", flush=True)
    began = time.monotonic()
    if launched:
        with mesh.process_group(launch, Comm(init_timeout_seconds=600, trace_buf_size=0), "."):
            trace = run(config, launch, steps=steps)
    else:
        pool = Pool(launch.world_size, timeout_seconds=600)
        trace = pool.run(trace_of_rank_0, config=config, n_devices=0, steps=steps)[0]
        pool.close()
    if launch.rank != 0:
        return 0
    device = mesh.device_of(launch)
    alone = run_alone(config, device, steps=steps)
    equal = report(alone, trace, allowed(config, alone, device, steps=steps))
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if equal else 1


def runnable(loaded: LoadedConfig[Config], *, on_cpu: bool) -> LoadedConfig[Config]:
    """Without what a CPU lacks, so that a config for GPUs can be proven on one."""
    if not on_cpu:
        return loaded
    lacking = {
        "training__attention_backend": "auto",
        "parallelism__enable_async_tensor_parallel": False,
        "float8__emulate": loaded.config.float8.enable,
        # The same graphs, without a C++ compiler's minutes.
        "compile__backend": "aot_eager",
    }
    return dataclasses.replace(loaded, config=loaded.config.replace(**lacking, profiling__enable_memory_snapshot=False))


def _refuse_too_many(loaded: LoadedConfig[Config], world_size: int) -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if world_size * GIB_A_RANK > available:
        raise ConfigError(
            [
                f"{loaded.file}: {world_size} ranks need about {world_size * GIB_A_RANK:.0f} GiB, and this machine has "
                f"{available:.0f} free; lower a data-parallel degree on the command line, or start it with torchrun on "
                "the machines that the config is for"
            ]
        )


if __name__ == "__main__":
    from titanlite import parity  # the functions under their true names, by which a pool's ranks find them

    mesh.exit_process(parity.main(sys.argv[1:]))
