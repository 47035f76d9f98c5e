"""Fingerprints of a layout are those of a single process; `titanlite diff` names the first tensor that differs."""

import functools
import math
import re
import shutil
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save

from tests.parallel.test_parity import _mean_instead_of_sum, _no_sum_over_replicas, resolve
from tests.tools.diff import bugs
from tests.tools.diff.runs import run, single
from titanlite import build, train_step
from titanlite.config import ConfigError
from titanlite.config.schema import Optimizer
from titanlite.launch.cli import run_command
from titanlite.optimizer import clip_factor
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, SIZE, distance, fingerprint, rows_of_slice
from titanlite.tools.diff import compare
from titanlite.tools.diff.compare import compare_runs, constant_ratio
from titanlite.tools.diff.computation import GRADIENT_NORM, inputs_of_entries
from titanlite.tools.diff.report import quantities
from titanlite.tools.parity.reference import RandomSequences
from verification.mutants.table import MUTANTS

FINGERPRINTS = {"debug__fingerprint_freq": 1}


# The fingerprint of a tensor ------------------------------------------------------------------------------------------


def of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fingerprint of a full tensor."""
    rows = rows_of_slice([0] * tensor.dim(), tensor.shape, tensor.shape)
    return fingerprint(name, tensor.reshape(-1, tensor.shape[-1]), rows)


def test_the_fingerprint_is_that_of_random_signs():
    """Of a unit vector it is 1 and N_PRODUCTS signs. Those of two elements, vectors and names do not depend on each
    other."""
    signs = torch.stack([of("x", one.view(16, 12))[1:] for one in torch.eye(192, dtype=torch.float64)])
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert of("x", torch.eye(192)[5].view(16, 12))[0] == 1
    for correlation in (signs.T @ signs / len(signs), signs @ signs.T / N_PRODUCTS):
        apart = correlation - torch.diag(correlation.diag())
        expected = 1 / (len(signs) if len(correlation) == N_PRODUCTS else N_PRODUCTS)
        assert apart.square().sum() / apart.count_nonzero().clamp(min=1) < 2 * expected
    other = torch.stack([of("y", one.view(16, 12))[1:] for one in torch.eye(192, dtype=torch.float64)])
    assert 0.4 < (signs == other).double().mean() < 0.6


@pytest.mark.parametrize("shape", [(48,), (24, 16), (4, 6, 16)])
def test_slices_add_up(shape: tuple[int, ...]):
    """Any split over any dimensions gives the fingerprint of the full tensor."""
    tensor, total = torch.randn(*shape, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for dim in range(len(shape)):
        parts = [torch.zeros(SIZE, dtype=torch.float64)]
        for start, n in ((0, 1), (1, shape[dim] - 1)):
            own = tensor.narrow(dim, start, n)
            offset = [start if d == dim else 0 for d in range(len(shape))]
            matrix, rows = own.reshape(-1, own.shape[-1]), rows_of_slice(offset, own.shape, shape)
            parts.append(fingerprint("x", matrix, rows, offset[-1]))
        total = sum(parts)
        torch.testing.assert_close(total, of("x", tensor), rtol=1e-12, atol=1e-12)
    assert (of("z", tensor) - total)[1:].abs().max() > 1


KINDS = {
    "dense": lambda: torch.randn(64, 48),
    "one column": lambda: (torch.arange(48) == 7) * torch.randn(64, 1),
    "one row": lambda: (torch.arange(64) == 7)[:, None] * torch.randn(1, 48),
    "of rank 1": lambda: torch.randn(64, 1) * torch.randn(1, 48),
    "few elements": lambda: torch.randn(64, 48) * (torch.rand(64, 48) < 0.002),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_distance_is_estimated_within_a_factor_of_2(kind: str):
    torch.manual_seed(1)
    within, squares, n = 0, 0.0, 200
    for number in range(n):
        a, change = torch.randn(64, 48, dtype=torch.float64), 1e-10 * KINDS[kind]().double()
        b = a + change
        true = ((a - b).norm() / max(a.norm(), b.norm())).item()
        estimate = distance(of(f"x{number}", a), of(f"x{number}", b))
        within += true / 2 <= estimate <= true * 2
        squares += (estimate / true) ** 2 / n if true else 1 / n
    assert within >= 0.95 * n
    assert abs(squares - 1) < 5 * math.sqrt(2 / N_PRODUCTS / n)  # five standard deviations of the mean


def test_a_distance_from_what_is_not_finite_is_infinite():
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    b[1, 1] = torch.nan
    assert distance(of("x", a), of("x", b)) == math.inf
    assert distance(of("x", 0 * a), of("x", 0 * a)) == 0


# Layouts --------------------------------------------------------------------------------------------------------------

SOME = {
    "tensor parallel, tied": (2, {"tensor_parallel_degree": 2, "model__tie_embeddings": True}),
    "ring with documents": (2, {"context_parallel_degree": 2, "training__document_mask": True}),
    "HSDP": (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    "V-shaped pipeline": (2, bugs.PIPELINE | {"pipeline_parallel_schedule": "DualPipeV"}),
    "pipeline x tensor parallel, full AC": (
        4,
        bugs.PIPELINE | {"tensor_parallel_degree": 2, "activation_checkpoint__mode": "full"},
    ),
    "experts": (bugs.LAYOUTS["experts"]),
    "Muon": (bugs.LAYOUTS["Muon"]),
    "shards without elements": (
        4,
        {"data_parallel_shard_degree": 4, "model__qk_norm": True, "model__head_dim": 2},
    ),
    "CPU offload": (2, {"training__enable_cpu_offload": True}),
}


def runs_of(
    ranks: Any, tmp_path: Path, world_size: int, options: dict[str, Any], bug: Any = None, steps: int = 2
) -> tuple[Path, Path]:
    """Run a single process, and a layout with a bug or none. Return their folders."""
    options = {"model__n_heads": 8, "model__n_kv_heads": 4, "training__local_batch_size": 4} | FINGERPRINTS | options
    options |= {"training__global_batch_size": 16}
    folders = tmp_path / "single", tmp_path / "layout"
    tmp_path.mkdir(exist_ok=True)
    job = resolve(tmp_path, world_size, options).replace(job__dump_folder=str(folders[1]))
    ranks(world_size).run(run, job=job, steps=steps, bug=bug)
    ranks(1).run(run, job=single(job, folders[0]), steps=steps)
    return folders


@pytest.mark.parametrize("name", SOME)
def test_fingerprints_of_a_layout_are_those_of_a_single_process(ranks, tmp_path, name: str):
    reference, layout = runs_of(ranks, tmp_path, *SOME[name])
    for step in (1, 2):
        (described, a), (of_layout, b) = file.read(reference, step), file.read(layout, step)
        assert a.keys() == b.keys()
        assert described.sequences == of_layout.sequences != [0] * N_PRODUCTS
        assert {phase for phase, *_ in map(str.split, a)} == {"input", "forward", "backward", "gradient", "update"}
        # AdamW turns rounding of some gradients into steps of lr = 1e-2.
        assert max(distance(a[each], b[each]) for each in a) < 1e-10
        assert step > 1 or max(distance(a[each], b[each]) for each in a if "update" not in each) < 1e-13
    steps = list(compare_runs(reference, layout))
    assert [step.first for step in steps] == [None, None]
    assert [step.missing for step in steps] == [([], []), ([], [])]
    states = [each for each in a if each.startswith("input ") and each.count(" ") == 2]
    assert len(states) > 20
    assert described.counts["valid tokens"] < described.counts["tokens"] == 16 * 16


def test_a_step_is_computed_from_what_it_says(ranks, tmp_path):
    reference, _ = runs_of(ranks, tmp_path, 2, {"data_parallel_shard_degree": 2}, steps=2)
    _, names = file.read(reference, 2)
    inputs = inputs_of_entries(names)
    assert {*inputs} == {*names, GRADIENT_NORM}
    order = list(inputs)
    for name, own in inputs.items():
        assert all(order.index(each) < order.index(name) for each in own), name
    assert inputs["forward layers.1"][0] == "forward layers.0"
    assert inputs["backward layers.0"][:2] == ["backward layers.1", "forward layers.0"]
    assert "input layers.1.attention.wq.weight" in inputs["backward layers.0"]
    gradients = [name.removeprefix("gradient layers.1.") for name in order if name.startswith("gradient layers.1.")]
    assert gradients[0] == "feed_forward.w2.weight"
    assert gradients[3:5] == ["ffn_norm.weight", "attention.wo.weight"]
    assert gradients[-1] == "attention_norm.weight"
    weight = "layers.1.attention.wq.weight"
    assert inputs[f"gradient {weight}"] == inputs["backward layers.0"]
    assert inputs[f"update {weight} exp_avg"] == [f"gradient {weight}", GRADIENT_NORM, f"input {weight} exp_avg"]


def test_learned_positions_are_an_input_of_the_first_layer():
    weight = "position_embeddings.weight"
    names = ["forward tok_embeddings", "forward layers.0", "backward layers.0", "backward tok_embeddings"]
    names += [f"{phase} {weight}" for phase in ("input", "gradient", "update")]
    inputs = inputs_of_entries([*names, "input layers.0.attention.wq.weight"])
    assert f"input {weight}" in inputs["forward layers.0"]
    assert inputs[f"gradient {weight}"][0] == "backward tok_embeddings"
    assert inputs[f"update {weight}"] == [f"gradient {weight}", GRADIENT_NORM, f"input {weight}"]


def test_only_every_n_th_step_and_the_first_have_fingerprints(ranks, tmp_path):
    """The weights that a step begins with are those that the step before has left, recorded or not."""
    options = {"debug__fingerprint_freq": 3, "training__dtype": "float32"}
    every, third = tmp_path / "every", tmp_path / "third"
    for folder, freq in ((every, 1), (third, 3)):
        job = resolve(tmp_path, 1, options | {"debug__fingerprint_freq": freq}).replace(job__dump_folder=str(folder))
        ranks(1).run(run, job=job, steps=6)
    assert file.steps_of(every) == [1, 2, 3, 4, 5, 6]
    assert file.steps_of(third) == [1, 3, 6]
    for step in (1, 3, 6):
        (_, a), (_, b) = file.read(every, step), file.read(third, step)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_float16_gradients_are_those_without_the_loss_scale(ranks, tmp_path):
    half = {"training__dtype": "float32", "training__mixed_precision_param": "float16"}
    reference, layout = runs_of(ranks, tmp_path, 2, half | {"data_parallel_shard_degree": 2})
    full, _ = runs_of(ranks, tmp_path / "float32", 2, {"training__dtype": "float32"}, steps=1)
    (_, a), (_, b) = file.read(reference, 1), file.read(full, 1)
    assert max(distance(a[name], b[name]) for name in a if name.startswith(("backward", "gradient"))) < 0.05
    assert all(step.first is None for step in compare_runs(reference, layout))


# Bugs -----------------------------------------------------------------------------------------------------------------


def _clipped_twice(rank: int) -> Any:
    return mock.patch.object(train_step, "clip_factor", lambda *arguments: clip_factor(*arguments) ** 2)


INJECTED = [
    ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, _no_sum_over_replicas, "gradient", 0.5),
    ({"data_parallel_shard_degree": 2}, _mean_instead_of_sum, "gradient", 0.5),
    ({"data_parallel_shard_degree": 2, "training__max_norm": 0.1}, _clipped_twice, "update", None),
]


@pytest.mark.parametrize(("options", "bug", "phase", "ratio"), INJECTED)
def test_a_bug_is_named(ranks, tmp_path, capsys, options: dict[str, Any], bug: Any, phase: str, ratio: float | None):
    reference, layout = runs_of(ranks, tmp_path, 2, options, bug)
    first = next(iter(compare_runs(reference, layout))).first
    assert first is not None
    assert first.name.startswith(f"{phase} ")
    assert ratio is None or first.ratio == pytest.approx(ratio)
    assert run_command("diff", [str(reference), str(layout), f"--html={tmp_path / 'page.html'}"]) == 1
    printed = capsys.readouterr().out
    assert f"DIFFERENT: first in step 1, {phase}" in printed
    assert (ratio == 0.5) == (": data parallel of B = 2" in printed)
    assert first.name in (tmp_path / "page.html").read_text()
    assert run_command("diff", [str(reference), str(reference)]) == 0
    assert "equal: " in capsys.readouterr().out


SAME, OTHERS = "the same, in another order or on other ranks", "not the same"
ORDERS = {
    "swapped": (lambda n: n ^ 1, SAME),
    "another batch": (lambda n: n + 64, OTHERS),
    "one sequence twice": (lambda n: max(n, 1), OTHERS),
}
"""Functions that return which sequence is put into a place of a batch, and what the report says of the tokens."""


def _in_order(order: str, rank: int) -> Any:
    real, (index_of, _) = RandomSequences.__getitem__, ORDERS[order]
    return mock.patch.object(RandomSequences, "__getitem__", lambda own, n: real(own, index_of(n)))


@pytest.mark.parametrize("order", ORDERS)
def test_sequences_in_another_order_are_told_from_others(ranks, tmp_path, capsys, order: str):
    options = {"context_parallel_degree": 2, "data_parallel_shard_degree": 2}
    folders = runs_of(ranks, tmp_path, 4, options, functools.partial(_in_order, order), steps=1)
    assert run_command("diff", list(map(str, folders))) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: first in step 1, input: tokens" in printed
    assert f"the tokens of step 1 are {ORDERS[order][1]}\n" in printed


def test_options_that_differ_are_printed(two_runs, tmp_path, capsys):
    copies = [Path(shutil.copytree(each, tmp_path / each.name)) for each in two_runs]
    assert run_command("diff", list(map(str, copies))) == 0
    assert " | " not in capsys.readouterr().out  # the runs have saved no config
    jobs = [resolve(tmp_path, 1, {"job__dump_folder": each, "job__description": each.name}) for each in copies]
    for folder, job in zip(copies, jobs, strict=True):
        (folder / "config.toml").write_text(job.toml())
    run_command("diff", list(map(str, copies)))
    assert " | " not in capsys.readouterr().out
    (copies[1] / "config.toml").write_text(jobs[1].replace(debug__seed=43, optimizer__lr=0.5).toml())
    run_command("diff", list(map(str, copies)))
    assert ")\noptimizer.lr: 0.01 | 0.5\ndebug.seed: 42 | 43\n\nrelative distance" in capsys.readouterr().out
    (copies[1] / "config.toml").write_text(f"{jobs[1].toml()}\n[option.of.another]\nversion = 1\n")
    assert run_command("diff", list(map(str, copies))) == 0
    assert ")\noption.of.another.version: unset | 1\n\nrelative distance" in capsys.readouterr().out
    (copies[1] / "config.toml").write_text("[job\n")
    assert run_command("diff", list(map(str, copies))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "config.toml: not valid TOML" in line


LOW_PRECISION = {
    "tensorwise": {"float8__enable": True, "float8__emulate": True},
    "rowwise": {"float8__enable": True, "float8__emulate": True, "float8__recipe": "rowwise"},
    "int8": {"int8__enable": True},
    "bfloat16": {},
}
LOW = {
    **{"training__dtype": "float32", "training__mixed_precision_param": "bfloat16", "tensor_parallel_degree": 2},
    **{"model__dim": 64, "model__ffn_dim": 96},
}


def _the_second_block_is_the_first(rank: int) -> Any:
    real = build.build_model

    def build_model(*arguments: Any) -> Any:
        model, stages = real(*arguments)
        model.layers["1"].forward = model.layers["0"].forward
        return model, stages

    return mock.patch.object(build, "build_model", build_model)


def _the_second_block_counts_twice(rank: int) -> Any:
    real = build.build_model

    def build_model(*arguments: Any) -> Any:
        model, stages = real(*arguments)
        forward = model.layers["1"].forward
        model.layers["1"].forward = lambda *inputs: 2 * forward(*inputs)
        return model, stages

    return mock.patch.object(build, "build_model", build_model)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.nightly if kind in ("bfloat16", "rowwise", "tensorwise") else ())
        for kind in LOW_PRECISION
    ],
)
def test_low_precision_is_compared(ranks, tmp_path, capsys, kind: str):
    """Of right layouts no tensor differs and none is too coarse to compare. A tensor that is doubled, zero or has
    nothing in common with the right one is named, except gradients and updates, of which some are too coarse. A few
    tensors with nothing in common seem near, by their 16 products: in benchmarks/logs/fingerprints_low_precision.log at
    most 4 of 585 updates of a precision, so more than 5 of a run's 117 have a probability of 2e-4."""
    reference, layout = runs_of(ranks, tmp_path, 2, LOW | LOW_PRECISION[kind])
    assert run_command("diff", [str(reference), str(layout)]) == 0
    assert "equal: " in capsys.readouterr().out
    described, a = file.read(reference, 1)
    _, b = file.read(layout, 1)
    right = max(distance(a[name], b[name]) for name in b if name.startswith("forward layers"))
    assert right > compare.ROUNDING["float32"]  # the layouts do round differently
    generator, n_near = torch.Generator().manual_seed(0), 0
    for name, tensor in b.items():
        phase, random = name.split()[0], torch.randn(N_PRODUCTS, dtype=torch.float64, generator=generator)
        foreign = torch.cat([tensor[:1], tensor[:1].sqrt() * random])
        for other in (tensor * 2 * torch.tensor([2.0] + [1.0] * N_PRODUCTS), foreign, 0 * tensor):
            entries = compare.compare_step(a, b | {name: other}, (described, described), {}, is_first=True)
            first = next((entry.name for entry in entries if entry.differs), None)
            is_coarse = first is None and any(entry.is_coarse for entry in entries)
            is_near = other is foreign and not (first or is_coarse)
            n_near += is_near
            assert first == name or ((is_coarse or is_near) and phase in ("gradient", "update")), name
    assert n_near <= 5


@pytest.mark.parametrize("kind", ["tensorwise", "int8"])
@pytest.mark.parametrize("bug", [_the_second_block_is_the_first, _the_second_block_counts_twice])
def test_a_bug_is_named_in_low_precision(ranks, tmp_path, capsys, kind: str, bug: Any):
    folders = runs_of(ranks, tmp_path, 2, LOW | LOW_PRECISION[kind], bug, steps=1)
    assert run_command("diff", list(map(str, folders))) == 1
    assert "DIFFERENT: first in step 1, forward: the output of layers.1" in capsys.readouterr().out


def test_a_gradient_that_is_halved_is_named_in_low_precision(ranks, tmp_path, capsys):
    options = LOW | LOW_PRECISION["tensorwise"] | {"tensor_parallel_degree": 1, "data_parallel_shard_degree": 2}
    folders = runs_of(ranks, tmp_path, 2, options, _mean_instead_of_sum, steps=1)
    assert run_command("diff", list(map(str, folders))) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: first in step 1, gradient: " in printed
    assert ": data parallel of B = 2" in printed


def test_a_gradient_that_is_zero_but_for_rounding_is_equal(ranks, tmp_path, capsys):
    """That of the biases of keys, where nothing is rotated. Their distance is that of two random tensors."""
    options = {"model__learned_positions": 16, "model__partial_rotary_factor": 0, "model__attention_bias": "all"}
    reference, layout = runs_of(ranks, tmp_path, 2, options | {"tensor_parallel_degree": 2})
    far = [entry for step in compare_runs(reference, layout) for entry in step.entries if entry.distance > compare.FAR]
    assert {entry.name.split()[1].split(".", 2)[2] for entry in far} == {"attention.wk.bias"}
    assert run_command("diff", [str(reference), str(layout)]) == 0


BUGS = [mutant for mutant in MUTANTS if mutant.what in bugs.NAMED]


def test_every_named_bug_is_a_mutant():
    assert {mutant.what for mutant in BUGS} == {*bugs.NAMED}
    assert len(BUGS) >= 50


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", BUGS, ids=[mutant.what for mutant in BUGS])
@pytest.mark.timeout(600)
def test_every_bug_is_named_under_all_layouts(mutant: Any, layouts_without_a_bug: tuple[Path, Path], tmp_path: Path):
    bugs.with_bug(mutant, tmp_path)
    verdicts = {
        layout: bugs.verdict(mutant, *(folder / layout for folder in (tmp_path, *layouts_without_a_bug)))
        for layout in bugs.LAYOUTS
    }
    assert all(right for right, _ in verdicts.values()), verdicts
    assert any(said != "-" for _, said in verdicts.values())


@pytest.fixture(scope="module")
def layouts_without_a_bug(tmp_path_factory) -> tuple[Path, Path]:
    right, reference = tmp_path_factory.mktemp("right"), tmp_path_factory.mktemp("single")
    bugs.take_steps(right, bugs.LAYOUTS)
    bugs.take_single_steps(reference)
    return right, reference


# Ratios and bad input -------------------------------------------------------------------------------------------------


def test_a_constant_ratio_is_found_and_explained():
    x = torch.randn(64, 48, dtype=torch.float64)
    assert constant_ratio(of("x", x), of("x", 4 * x), tolerance=1e-12) == pytest.approx(4)
    assert constant_ratio(of("x", x), of("x", 4 * x + torch.randn(64, 48)), tolerance=1e-12) == 1
    known = {"step": 1, "compute_dtype": "float64", "weights_dtype": "float64"}
    known["state_dtype"] = "float64"
    a = file.Description(**known, counts={"data parallel": 1.0, "tokens": 2048.0})
    b = file.Description(**known, counts={"data parallel": 2.0, "tokens": 2048.0})
    assert quantities(a, b) == {"tokens": 2048.0, "data parallel of A": 1.0, "data parallel of B": 2.0}


def one_run(ranks: Any, folder: Path, **options: Any) -> Path:
    job = resolve(folder.parent, 1, FINGERPRINTS | options).replace(job__dump_folder=str(folder))
    ranks(1).run(run, job=job, steps=1)
    return folder


def test_what_one_run_lacks_is_named(ranks, tmp_path, capsys):
    a, b = one_run(ranks, tmp_path / "a"), one_run(ranks, tmp_path / "b")
    described, tensors = file.read(b, 1)
    file.write(b, described, {name: each for name, each in tensors.items() if name != "backward layers.1"})
    assert run_command("diff", [str(a), str(b)]) == 2
    printed = capsys.readouterr().out
    assert "B lacks 1 tensors in step 1: backward layers.1" in printed
    assert "INCOMPLETE: " in printed
    assert "equal" not in printed
    changed = {**tensors, "forward layers.2": 2 * tensors["forward layers.2"]}
    file.write(b, described, {name: each for name, each in changed.items() if name != "backward layers.1"})
    assert run_command("diff", [str(a), str(b)]) == 1  # a wrong tensor decides, whatever else is not compared


def _truncate(a: Path, b: Path) -> None:
    path = b / "fingerprints" / "step-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _no_description(a: Path, b: Path) -> None:
    path = b / "fingerprints" / "step-1.safetensors"
    path.write_bytes(save(load_file(path)))


def _another_size(a: Path, b: Path) -> None:
    described, tensors = file.read(b, 1)
    file.write(b, described, tensors | {"forward norm": torch.ones(3)})


def _another_step(a: Path, b: Path) -> None:
    folder = b / "fingerprints"
    (folder / "step-1.safetensors").rename(folder / "step-2.safetensors")


def _another_batch(a: Path, b: Path) -> None:
    described, tensors = file.read(b, 1)
    file.write(b, described.model_copy(update={"counts": described.counts | {"tokens": 7.0}}), tensors)


def _another_dtype(a: Path, b: Path) -> None:
    described, tensors = file.read(b, 1)
    file.write(b, described.model_copy(update={"compute_dtype": "float17"}), tensors)


BAD = {
    _truncate: "cannot be read",
    _no_description: "in its metadata",
    _another_size: f"forward norm.: expected a phase, the name of a tensor, and {SIZE} float64 numbers",
    _another_step: "no step in common: 1 to 1 and 2 to 2",
    _another_batch: "tokens of the global batch",
    _another_dtype: "compute_dtype: Input should be 'float64'",
}


@pytest.fixture(scope="module")
def two_runs(ranks, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return one_run(ranks, folder / "a"), one_run(ranks, folder / "b")


@pytest.mark.parametrize("damage", BAD, ids=[each.__name__ for each in BAD])
def test_bad_input_is_one_line(two_runs, tmp_path, capsys, damage: Any):
    copies = []
    for each in two_runs:
        path = tmp_path / each.name / "fingerprints"
        path.mkdir(parents=True)
        (path / "step-1.safetensors").write_bytes((each / "fingerprints" / "step-1.safetensors").read_bytes())
        copies.append(path.parent)
    damage(*copies)
    assert run_command("diff", [str(each) for each in copies]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(BAD[damage], line)


def test_a_folder_without_fingerprints_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"debug\.fingerprint_freq"):
        list(compare_runs(tmp_path, tmp_path))
    assert run_command("diff", [str(tmp_path / "none"), str(tmp_path)]) == 2


@pytest.mark.parametrize("dtype", [*get_args(Optimizer.model_fields["state_dtype"].annotation), "float16", "float64"])
def test_every_data_type_of_a_config_has_a_rounding(dtype: str):
    assert dtype == "auto" or 0 < compare.ROUNDING[dtype] < 1  # a run writes what auto stands for
    assert compare.ROUNDING["bfloat16"] == 2**-8
    assert {*compare.ROUNDING} == {*get_args(file.Dtype)}
