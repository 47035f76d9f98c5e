"""LoRA: every layout against one process, in float64 and with low-precision bases; what is frozen, and rejected."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.cases import Case, cases
from tests.helpers.config import assert_rejected, load, problems
from tests.parallel.test_layouts import (
    BIASES_AND_NORMS,
    CHUNKED_LOSS,
    COMPILED,
    CP,
    DOCUMENTS,
    EVERY_2_LAYERS,
    EVERY_SECOND_MM,
    FLOAT8,
    FULL,
    GROUPS_OF_3,
    IN_FLOAT32,
    INT8_PRODUCTS,
    MODEL,
    MXFP8,
    OFFLOAD,
    ONE_ACCUMULATION_STEP,
    PP,
    PREFETCH,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TIED,
    TP,
    ULYSSES,
    USP,
    by_ranks,
    graphs,
    largest,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import CPU, STEPS, ZERO_1, ZERO_2, CountCalls, compare, resolve, trace
from tests.techniques.moe.test_moe import EP, EP_4, EXPERTS, LOSSES
from tests.techniques.test_mla import LATENT
from titanlite import build, config
from titanlite.metrics.summary import optimization_summary, run_summary
from titanlite.parallel import fsdp, mesh
from titanlite.techniques.lora import AdapterOfExperts, add_factors
from titanlite.techniques.moe.parallel import ShardableMixture
from titanlite.tools import config as config_command
from titanlite.tools.parity.compare import differences, tolerances
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.training_run import TrainingRun

RANK = 3
"""No degree divides it, and it is less than the number of ranks that some layouts have."""
LORA = {"lora__rank": RANK, "lora__alpha": 12.0}
BFLOAT16_BASE = {"lora__base_dtype": "bfloat16"}
SOME = {"lora__targets": '["wq", "wo", "feed_forward.w2"]'}
FROZEN_EXPERTS = EXPERTS | {"lora__targets": '["wq", "wk", "wv", "wo"]'}
ADAPTED_EXPERTS = EXPERTS | {"lora__targets": '["wq", "wk", "wv", "wo", "experts"]'}
ONLY_W2 = EXPERTS | {"lora__targets": '["experts.w2"]'}
LATENT_TARGETS = {"lora__targets": '["wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"]'}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": Case({}, always=True),
    "one rank, reduced once": {"fsdp_reduce_gradients": "last_accumulation_step"},
    "shard 2": Case(SHARD, always=True),
    "shard 4": {"data_parallel_shard_degree": 4},
    "ZeRO-1": SHARD | ZERO_1,
    "ZeRO-2": SHARD | ZERO_2,
    "replicate 2": REPLICATE,
    "HSDP": REPLICATE | SHARD,
    "tp 2": Case(TP, always=True),
    "tp 4": {"tensor_parallel_degree": 4},
    "tp 2, some targets": TP | SOME,
    "tp 2, no loss parallel": TP | {"disable_loss_parallel": True},
    "tp 2, tied embeddings": TP | TIED,
    "tp 2, biases and norms": TP | BIASES_AND_NORMS,
    "shard x tp": Case(SHARD | TP, always=True),
    "HSDP x tp": REPLICATE | SHARD | TP,
    "tp 2, norm over all heads": Case(TP | {"model__qk_norm": "all_heads"}, always=True),
    "pp 2": Case(PP, always=True),
    "pp 4": PP | {"pipeline_parallel_degree": 4, "model__n_layers": 5, "training__local_batch_size": 4},
    "GPipe": schedule("GPipe"),
    "Interleaved1F1B": schedule("Interleaved1F1B"),
    "LoopedBFS": schedule("LoopedBFS"),
    "InterleavedZeroBubble": schedule("InterleavedZeroBubble"),
    "ZBVZeroBubble": schedule("ZBVZeroBubble"),
    "DualPipeV x shard": schedule("DualPipeV") | SHARD | ONE_ACCUMULATION_STEP,
    "pp x tp": PP | TP,
    "pp x shard x tp": PP | SHARD | TP,
    "cp 2": Case(CP, always=True),
    "cp x tp": CP | TP,
    "pp x cp": PP | CP,
    "ulysses 2": ULYSSES,
    "ring 2 x ulysses 2": USP,
    "document mask, cp 2": DOCUMENTS | CP,
    "full AC, shard x tp": FULL | SHARD | TP,
    "selective AC, shard x tp": SELECTIVE | SHARD | TP,
    "every second mm, shard": EVERY_SECOND_MM | SHARD,
    "AC every 2 layers, pp": EVERY_2_LAYERS | PP,
    "full AC, groups of 3, shard x tp": GROUPS_OF_3 | FULL | SHARD | TP,
    "none AC, groups of 3, pp": GROUPS_OF_3 | PP,
    "compiled, full AC, groups of 3, shard": COMPILED | GROUPS_OF_3 | FULL | SHARD,
    "compiled, shard": COMPILED | SHARD,
    "compiled, tp": COMPILED | TP,
    "compiled, full AC, shard x tp": COMPILED | FULL | SHARD | TP,
    "compiled, pp": COMPILED | PP,
    "chunked cross-entropy, shard": CHUNKED_LOSS | SHARD,
    "chunked cross-entropy, pp x tp": CHUNKED_LOSS | PP | TP,
    "CPU offload, shard": OFFLOAD | SHARD,
    "prefetch, shard": PREFETCH | SHARD,
    "bfloat16 base, one rank": Case(BFLOAT16_BASE, always=True),
    "bfloat16 base, shard x tp": BFLOAT16_BASE | SHARD | TP,
    "bfloat16 base, pp x cp": BFLOAT16_BASE | PP | CP,
    "bfloat16 base, tied embeddings, tp": BFLOAT16_BASE | TIED | TP,
    "float32 base, shard": {"lora__base_dtype": "float32"} | SHARD,
    "experts, shard x tp": FROZEN_EXPERTS | SHARD | TP,
    "experts, shard, ep": Case(FROZEN_EXPERTS | SHARD | EP, always=True),
    "experts, tp, ep, losses": FROZEN_EXPERTS | TP | EP | LOSSES,
    "experts, pp x shard x tp, ep 4": FROZEN_EXPERTS | PP | SHARD | TP | EP_4,
    "experts, cp x tp, ep 4, full AC": FROZEN_EXPERTS | CP | TP | EP_4 | FULL,
    "experts, compiled, shard, ep": FROZEN_EXPERTS | COMPILED | SHARD | EP,
    "experts, ZBVZeroBubble, ep": FROZEN_EXPERTS | schedule("ZBVZeroBubble") | SHARD | EP | ONE_ACCUMULATION_STEP,
    "adapted experts, one rank": ADAPTED_EXPERTS,
    "adapted experts, only w2": ONLY_W2,
    "adapted experts, only w2, full AC, shard, ep": ONLY_W2 | FULL | SHARD | EP,
    "adapted experts, only w2, tp": ONLY_W2 | TP,
    "adapted experts, only w2, pp": ONLY_W2 | PP | {"model__n_layers": 4},
    "adapted experts, shard": ADAPTED_EXPERTS | SHARD,
    "adapted experts, tp": Case(ADAPTED_EXPERTS | TP, always=True),
    "adapted experts, shard, ep": Case(ADAPTED_EXPERTS | SHARD | EP, always=True),
    "adapted experts, shard x tp": ADAPTED_EXPERTS | SHARD | TP,
    "adapted experts, tp, ep, losses": ADAPTED_EXPERTS | TP | EP | LOSSES,
    "adapted experts, shard x tp, ep": ADAPTED_EXPERTS | SHARD | TP | EP,
    "adapted experts, pp, ep": ADAPTED_EXPERTS | PP | SHARD | EP,
    "adapted experts, pp x shard x tp, ep 4": ADAPTED_EXPERTS | PP | SHARD | TP | EP_4,
    "adapted experts, cp x tp, ep 4, full AC": ADAPTED_EXPERTS | CP | TP | EP_4 | FULL,
    "adapted experts, selective AC, shard, ep": ADAPTED_EXPERTS | SELECTIVE | SHARD | EP,
    "adapted experts, HSDP, ep": ADAPTED_EXPERTS | REPLICATE | SHARD | EP,
    "adapted experts, compiled, shard, ep": ADAPTED_EXPERTS | COMPILED | SHARD | EP,
    "adapted experts, ZBVZeroBubble, ep":
        ADAPTED_EXPERTS | schedule("ZBVZeroBubble") | SHARD | EP | ONE_ACCUMULATION_STEP,
    "adapted experts, bfloat16 base, shard, ep": ADAPTED_EXPERTS | BFLOAT16_BASE | SHARD | EP,
    "adapted experts, CPU offload, shard, ep": ADAPTED_EXPERTS | OFFLOAD | SHARD | EP,
    "latent attention, tp": Case(LATENT | LATENT_TARGETS | TP, always=True),
    "latent attention, pp x shard x tp": LATENT | LATENT_TARGETS | PP | SHARD | TP,
}  # fmt: skip


def n_adapters(options: dict[str, Any]) -> int:
    """Return the number of adapted layers of a config of the table."""
    targets, n_layers = options.get("lora__targets", "0,1,2,3,4,5,6"), (MODEL | options)["model__n_layers"]
    of_experts = 3 * ('"experts"' in targets) + ("experts.w2" in targets)  # the first layer is dense
    return n_layers * (targets.count(",") + 1 - targets.count("experts")) + (n_layers - 1) * of_experts


@cases("name", by_ranks(LAYOUTS))
def test_layout_matches_reference(ranks: Any, tmp_path: Any, name: str):
    layout = LORA | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    of_step = [each for each in actual if each.startswith("step 2 gradient")]
    assert len(of_step) == 2 * n_adapters(layout)
    assert all(each.endswith((".lora_a", ".lora_b")) for each in of_step)
    n_weights = sum(each.startswith(("initial weight", "final weight")) for each in actual)
    assert len(actual) == n_weights + STEPS * (len(of_step) + 3) + 1


def test_the_load_is_recorded_where_nothing_before_the_router_is_trained(tmp_path: Path):
    job = resolve(tmp_path, 1, with_batches(LORA | ONLY_W2))
    loads = {name: load for name, load in run_reference(job, CPU, steps=1).items() if name.endswith(".router.load")}
    n_rows = job.training.global_batch_size * job.training.seq_len * job.model.moe.n_experts_per_token
    assert [load.sum().item() for load in loads.values()] == [n_rows] * (job.model.n_layers - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("base", [{}, FLOAT8], ids=["float64", "float8"])
def test_blocks_with_adapters_are_compiled_once(ranks: Any, tmp_path: Path, base: dict[str, Any]):
    """torch.compile ends with an error at the ninth graph of a function: a model of more blocks would not train."""
    few, many = (
        ranks(1).run(graphs, job=resolve(tmp_path, 1, MODEL | LORA | base | COMPILED | {"model__n_layers": n}))[0]
        for n in (2, 10)
    )
    assert few == many > 0


@pytest.mark.parametrize(("dtype", "calls"), [(torch.float64, 0), (torch.float32, 9)])
def test_adapted_experts_compute_what_merged_ones_do(dtype: torch.dtype, calls: int):
    """In float64 by a product per expert, in float32 by grouped ones; with a base frozen, also if there are no rows."""
    lora, dim = config.schema.Lora(rank=4, alpha=12.0), 32
    moe = {"n_experts": 4, "n_experts_per_token": 2, "expert_dim": 16}
    with torch.device("meta"):
        mixture = ShardableMixture(config.schema.Model(flavor="debug", dim=dim, moe=moe)).to(dtype)
        for name in ("w1", "w2", "w3"):
            adapter = AdapterOfExperts()
            add_factors(adapter, getattr(mixture.experts, name), lora)
            mixture.add_adapter(name, adapter, None)
    experts = mixture.experts.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(each.shape, generator=generator).to(dtype) for name, each in experts.named_parameters()}
    x_MD, weighting_MD = torch.randn(2, 20, dim, generator=generator).to(dtype)
    counts_E, scores_M, merged = torch.tensor([7, 0, 12, 1]), torch.rand(20, generator=generator).to(dtype), {}
    factors = {name: each.requires_grad_() for name, each in values.items() if "lora" in name}
    for name in ("w1", "w2", "w3"):
        a_EIR, b_EOR = (factors[f"adapters.{name}.lora_{each}"] for each in "ab")
        merged |= {name: values[name] + 3 * b_EOR @ a_EIR.mT, f"adapters.{name}.lora_b": torch.zeros_like(b_EOR)}
    with CountCalls("aten") as products:
        actual = torch.func.functional_call(experts, values, (x_MD, scores_M, counts_E))
    assert products.calls["_grouped_mm"] == calls
    expected = torch.func.functional_call(experts, values | merged, (x_MD, scores_M, counts_E))
    gradients = [torch.autograd.grad((each * weighting_MD).sum(), [*factors.values()]) for each in (actual, expected)]
    # A number is the sum of at most dim x rank rounded products, in the order of either side.
    for one, other in zip((actual, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (one - other).abs().max() < dim * lora.rank * torch.finfo(dtype).eps * other.abs().max()
    assert torch.func.functional_call(experts, values, (x_MD[:0], scores_M[:0], counts_E * 0)).shape == (0, dim)


# Bases of low precision: each layout is compared with a reference in the same precision.
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "bfloat16 base and products, shard x tp":
        IN_FLOAT32 | BFLOAT16_BASE | {"training__mixed_precision_param": "bfloat16"} | SHARD | TP,
    "float8 rowwise, tp": FLOAT8 | {"float8__recipe": "rowwise"} | TP,
    "float8 tensorwise, shard": FLOAT8 | SHARD,
    "mxfp8, tp": Case(MXFP8 | TP, always=True),
    "int8 products, pp": INT8_PRODUCTS | PP,
}  # fmt: skip


@cases("name", by_ranks(LOW_PRECISION))
def test_low_precision_base_matches_reference(ranks: Any, tmp_path: Path, name: str):
    """A layout differs from the reference by its rounding, and both differ from full precision."""
    options = LORA | LOW_PRECISION[name] | ONE_ACCUMULATION_STEP
    n = world_size(options)
    job = resolve(tmp_path, n, with_batches(options))
    reference = run_reference(job, CPU, steps=STEPS)
    allowed = tolerances(job, reference, CPU, steps=STEPS)
    for kind in ("a", "b"):  # B begins at 0, so Adam turns rounding into a step of lr for some elements, in some layer
        names = [each for each in allowed if " gradient " in each and each.endswith(f".lora_{kind}")]
        allowed |= dict.fromkeys(names, max(allowed[each] for each in names))
    layout, *_ = ranks(n).run(trace, job=job)
    actual = differences(reference, layout)
    assert {name: (d, allowed[name]) for name, d in actual.items() if d > allowed[name]} == {}
    full = {"float8__enable": False, "int8__enable": False, "training__mixed_precision_param": job.training.dtype}
    exact = run_reference(job.replace(**full), CPU, steps=STEPS)
    by_option = largest(differences(exact, reference))
    assert 0.2 * by_option < largest(differences(exact, layout)) < 5 * by_option


# What is frozen -------------------------------------------------------------------------------------------------------


class Reduced(TorchDispatchMode):
    """This mode counts the numbers that reduce-scatters of c10d get."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_reduce_scatter_base_" in str(function):
            self.numbers += args[1].numel()
        return function(*args, **(kwargs or {}))


def run_a_step(job: config.Config) -> tuple[set[str], set[str], int, int, Counter[str]]:
    """Return on a rank the names of the parameters with gradients, and of those with optimizer states; the numbers that
    were reduce-scattered, and those of all trained parameters; and the collectives of tensor parallel in a forward."""
    run = TrainingRun(job, CPU)
    batches, forward, reduced = run.loader.next(), CountCalls("_c10d_functional"), Reduced()
    with torch.no_grad(), forward:
        run.train_step.runner.forward(batches[0].to(CPU))
    fsdp.reshard(run.model)
    with reduced:
        run.train_step.forward_backward(batches)
    gradients = {name for name, parameter in run.parameters.items() if parameter.grad is not None}
    run.optimizer.step()
    states = {name for name, parameter in run.parameters.items() if run.optimizer.state.get(parameter)}
    trained = sum(parameter.numel() for parameter in run.parameters.values() if parameter.requires_grad)
    run.loader.close()
    return gradients, states, reduced.numbers, trained, forward.calls


def test_frozen_weights_have_no_gradients_states_and_reductions(ranks: Any, tmp_path: Path):
    """With a chunked loss, whose gradients are computed in its forward."""
    rank_4 = LORA | {"lora__rank": 4}
    job = resolve(tmp_path, 2, with_batches(rank_4 | SHARD | CHUNKED_LOSS | ONE_ACCUMULATION_STEP))
    gradients, states, reduced, trained, _ = ranks(2).run(run_a_step, job=job)[0]
    assert gradients == states
    assert len(gradients) == 2 * n_adapters(rank_4)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in gradients)
    assert reduced == trained


def test_an_adapter_adds_no_collective_to_the_forward_of_tensor_parallel(ranks: Any, tmp_path: Path):
    options = TP | ONE_ACCUMULATION_STEP
    jobs = [resolve(tmp_path, 2, with_batches(each)) for each in (options, LORA | options)]
    plain, adapted = (ranks(2).run(run_a_step, job=job)[0][-1] for job in jobs)
    assert plain == adapted != Counter()


# What is rejected -----------------------------------------------------------------------------------------------------

REJECTED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"lora.alpha": 8.0}, {"lora.alpha": "read only when lora.rank is above 0"}),
    ({"lora.rank": 4, "lora.targets": []}, {"lora.targets": 'expected names of linear layers, as ["wq", "wv"]'}),
    ({"lora.rank": 4, "optimizer.name": "Muon"}, {"optimizer.name": 'set "AdamW" or "Adam"'}),
    (
        {"lora.rank": 4, "fault_tolerance.enable": True, "fault_tolerance.group_size": 2},
        {"fault_tolerance.enable": "set false, or lora.rank = 0"},
    ),
    ({"lora.rank": 4, "debug.fingerprint_freq": 1}, {"debug.fingerprint_freq": "set 0, or lora.rank = 0"}),
    (
        {"lora.rank": 4, "float8.enable": True, "float8.enable_fsdp_float8_all_gather": True},
        {"float8.enable_fsdp_float8_all_gather": "set false, or lora.rank = 0"},
    ),
    (
        {"lora.rank": 4, "model.moe.n_experts": 4, "model.moe.balance_bias": True},
        {"model.moe.balance_bias_rate": "LoRA freezes the routers; set 0"},
    ),
]


def test_the_summary_names_the_base(tmp_path: Path):
    for path, base in (("none", "random weights (checkpoint.initial_load_path)"), ("./a/nonesuch", "./a/nonesuch")):
        job = load(tmp_path, {"lora.rank": 4, "checkpoint.initial_load_path": path, "checkpoint.enable": True}).config
        assert optimization_summary(job, "; trains 1")[0].endswith(f", w3; trains 1; base: {base}")


def summary_of_stage(job: config.Config) -> str:
    """Return a rank's line about LoRA, from the last pipeline stage."""
    layout, sizes = mesh.build_layout(job.parallelism, CPU), build.parameter_sizes(job)
    stage = build.build_stage(job, layout, config.schema.stage_modules(job)[-1], CPU)
    sequences: Any = SimpleNamespace(n_sequences=1)
    (line,) = (
        each
        for each in run_summary(job, sum(sizes.values()), sequences, None, "", {1: stage}).splitlines()
        if each.startswith("LoRA")
    )
    return line


def test_the_summary_counts_what_all_stages_train(ranks: Any, tmp_path: Path):
    options = with_batches(LORA | {"lora__targets": '["wq", "experts"]'} | EXPERTS | PP | {"model__n_layers": 4})
    job = resolve(tmp_path, 2, options)
    line, model = ranks(2).run(summary_of_stage, job=job)[0], job.model
    of_wq = RANK * (model.dim + model.n_heads * model.head_dim)
    of_expert = RANK * 3 * (model.dim + model.moe.expert_dim)
    n_trained, n_base = 4 * of_wq + 3 * 4 * of_expert, sum(build.parameter_sizes(job).values())
    assert f"; trains {n_trained:,} of {n_base:,} parameters ({100 * n_trained / n_base:.2g} %); base: " in line


@pytest.mark.parametrize(("settings", "rejected"), REJECTED, ids=lambda each: next(reversed(each)))
def test_options_that_contradict_lora_are_rejected(tmp_path: Path, settings: Any, rejected: Any):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


LAYERS = "expected names of linear layers: w1, w2, w3, wk, wo, wq, wv"
TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": (
        {"lora__rank": 33},
        "lora.rank = 33: layers.0.attention.wq has 32 inputs and 32 outputs; expected at most 32",
    ),
    "unknown": ({"lora__targets": '["wq", "q_proj"]'}, f'lora.targets: "q_proj": no layer has it; {LAYERS}'),
    "not affine": (
        {"lora__targets": '["wq", "ffn_norm"]'},
        'lora.targets: "ffn_norm": layers.0.ffn_norm is a RMSNorm, whose forward is not affine; name linear layers',
    ),
    "experts": (
        EXPERTS,
        'lora.targets: "w1": layers.1.feed_forward.shared.w1 is a Linear of a mixture, which has adapters of',
    ),
    "no target in a pipeline stage": (
        PP | EXPERTS | {"model__moe__n_shared_experts": 0, "lora__targets": '["w1"]'},
        'lora.targets = ["w1"]: a pipeline stage has none of these layers; set targets that each stage has',
    ),
}


def last_stage(job: config.Config) -> list[str]:
    """Return the lines of the error with which a rank does not build the last pipeline stage."""
    layout = mesh.build_layout(job.parallelism, CPU)
    modules = config.schema.stage_modules(job)[-1] if job.parallelism.pipeline_parallel_degree > 1 else None
    return problems(lambda: build.build_stage(job, layout, modules, CPU))


def test_titanlite_config_names_wrong_adapters_beside_other_problems():
    argv = ["debug", "--lora.rank=4", '--lora.targets=["norm"]', "--training.dataset=text"]
    lines = problems(lambda: config_command.main([*argv, "--training.dataset_path=/no/such/file"]))
    assert [line.partition(":")[0] for line in lines] == ["lora.targets", 'training.dataset_path = "/no/such/file"']


@pytest.mark.parametrize("name", TARGETS)
def test_titanlite_config_rejects_them_with_the_same_line(tmp_path: Path, name: str, capsys):
    options, expected = TARGETS[name]
    file, job = tmp_path / "job.toml", resolve(tmp_path, world_size(options), with_batches(LORA | options))
    file.write_text(job.toml())
    argv = [str(file), "--model.vocab_size=272"]  # the tokens of bytes need rows
    (line,) = problems(lambda: config_command.main(argv))
    assert line.startswith(expected)
    file.write_text(job.replace(lora__rank=0).toml())
    assert config_command.main(argv) == 0
    assert "[lora]\nrank = 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_no_adapter_fits_are_rejected(ranks: Any, tmp_path: Path, name: str):
    options, expected = TARGETS[name]
    n = world_size(options)
    (line,) = ranks(n).run(last_stage, job=resolve(tmp_path, n, with_batches(LORA | options)))[0]
    assert line.startswith(expected)
