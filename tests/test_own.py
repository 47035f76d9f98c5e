"""Own parts (config/own.py, techniques/own.py): a user's own block, loss, data, optimizer and metrics."""

import dataclasses
import gc
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import titanlite
from tests.parallel.test_parity import resolve
from titanlite.build_llama import build_block
from titanlite.checkpoint import export
from titanlite.config import ConfigError
from titanlite.config.own import take_own
from titanlite.config.schema import Training
from titanlite.data.packing import Sequence
from titanlite.launch.other_processes import children
from titanlite.metrics.logger import MetricsLogger
from titanlite.parallel import mesh
from titanlite.techniques.data.own import OwnSequences
from titanlite.techniques.own import Own, load_own
from titanlite.tools.generate.folder import open_folder
from titanlite.tools.parity import command, standard_set
from titanlite.tools.parity.compare import judge, tolerances
from titanlite.tools.parity.process_pool import trace_of_rank_0
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.training_run import TrainingRun

ROOT = Path(__file__).parents[1]
OWN = ROOT / "examples" / "own"
CPU = torch.device("cpu")
RIGHT = ("squared_relu", "gated_attention", "z_loss", "arithmetic", "layer_norms")
FSDP, TP, PP, CP = (
    {f"{name}_degree": 2}
    for name in ("data_parallel_shard", "tensor_parallel", "pipeline_parallel", "context_parallel")
)

LAYOUTS = {"FSDP 2": FSDP, "TP 2": TP, "PP 2": PP, "CP 2": CP}
EVERY_RUN = {
    *(("squared_relu", "FSDP 2"), ("squared_relu", "PP 2"), ("gated_attention", "TP 2"), ("gated_attention", "CP 2")),
    *(("z_loss", "TP 2"), ("arithmetic", "CP 2")),
}
"""What is tested in every run; the others are for the night."""
SMALLEST = ["--model.n_layers=2", "--model.dim=32", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=48"]
SMALLEST += [
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.steps=2",
    "--validation.enable=false",
]


def verdict(ranks, folder: Path, name: str, options: dict[str, Any]) -> str:
    """Return the verdict of an example under a layout of two ranks, as `titanlite parity` gives it."""
    own = load_own(f"{OWN / name}.py:own")
    options = {"data_parallel_shard_degree": 1, "training__local_batch_size": 4} | options
    job = resolve(folder, 2, options).with_own(own)
    trace = ranks(2).run(trace_of_rank_0, config=job, steps=2)[0]
    reference = run_reference(job, CPU, steps=2)
    assert len(trace) > 40
    return judge(reference, trace, tolerances(job, reference, CPU, steps=2))[-1]


def examples() -> Iterator[Any]:
    """Yield every example under every layout."""
    for name, layout in itertools.product(RIGHT, LAYOUTS):
        marks = [] if (name, layout) in EVERY_RUN else [pytest.mark.nightly]
        yield pytest.param(name, LAYOUTS[layout], marks=marks, id=f"{name} under {layout}")


@pytest.mark.parametrize(("name", "options"), examples())
def test_examples_are_equal_to_one_process(ranks, tmp_path: Path, name: str, options: dict[str, Any]):
    assert verdict(ranks, tmp_path, name, options).startswith("equal: ")


def test_the_example_that_is_wrong_under_tensor_parallel_is_found(ranks, tmp_path: Path):
    assert verdict(ranks, tmp_path, "wrong_under_tp", FSDP).startswith("equal: ")
    assert verdict(ranks, tmp_path, "wrong_under_tp", TP).startswith("DIFFERENT: first in step 1 loss, by ")


@pytest.mark.parametrize("name", [*RIGHT, "wrong_under_tp"])
def test_examples_are_short(name: str):
    assert 15 <= len((OWN / f"{name}.py").read_text().splitlines()) <= 40


# What cannot be right is one line -------------------------------------------------------------------------------------


class Up(nn.Module):
    """A feed-forward whose layers have names of its own."""

    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Scaled(Up):
    def __init__(self, dim: int):
        super().__init__(dim)
        self.alpha = nn.Parameter(torch.empty(dim))


class Slopes(Up):
    def __init__(self, dim: int):
        super().__init__(dim)
        self.register_buffer("slopes", torch.ones(dim))


class Remembers(Up):
    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


class Narrow(Up):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :8]


class Item(Up):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


def own_of(kind: type[Up]) -> Own:
    def block(model: Any, layer: int) -> nn.Module:
        built = build_block(model, layer)
        built.feed_forward = kind(model.dim)
        return built

    return Own(block=block)


def blocks_of(own: Own, folder: Path, **options: Any) -> None:
    from titanlite import build

    job = resolve(folder, 2, options).with_own(own)
    own.prepare(build.meta_model(job), job.model, job.training, job.parallelism)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        (Up, TP, "layers.0.feed_forward.up: a Linear without a tensor-parallel style; give own.styles one, or name it"),
        (Scaled, {}, "layers.0.feed_forward.alpha: a parameter that init does not know"),
        (Slopes, {}, "layers.0.feed_forward.slopes: a tensor that is no parameter has no values here"),
        (Remembers, {}, "layers.0.feed_forward.last: changes in forward; a block keeps no state from one sequence"),
        (Narrow, {}, "layers.0.forward: fails on x of (16, 32): "),
    ],
    ids=["a name without a style", "a parameter", "a buffer", "state", "a shape"],
)
def test_a_block_that_cannot_be_right_is_a_line(tmp_path: Path, kind: type[Up], options: dict[str, int], line: str):
    with pytest.raises(ConfigError) as caught:
        blocks_of(own_of(kind), tmp_path, **options)
    assert any(problem.startswith(line) for problem in caught.value.problems), caught.value.problems


def test_a_style_that_no_module_has_is_a_line(tmp_path: Path):
    own = dataclasses.replace(own_of(Up), styles={"up": ColwiseParallel(), "feed_forward.up": ColwiseParallel()})
    with pytest.raises(ConfigError) as caught:
        blocks_of(own, tmp_path, **TP)
    line = "own.styles: up: no block has it; expected the name of a module in its block, as feed_forward.up"
    assert caught.value.problems == [line]


def test_a_block_that_is_right_is_none(tmp_path: Path):
    blocks_of(own_of(Up), tmp_path)
    blocks_of(own_of(Item), tmp_path)  # it reads a value, which only a real tensor has
    blocks_of(own_of(Up), tmp_path, model__attention_sinks=True)
    blocks_of(load_own(f"{OWN / 'gated_attention'}.py:own"), tmp_path, **TP)
    with pytest.raises(ConfigError, match=r"expected a titanlite\.model\.Block"):
        blocks_of(Own(block=lambda model, layer: nn.Linear(model.dim, model.dim)), tmp_path)


def mean(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def ignores_nothing(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    return logits.logsumexp(1)


def centred(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses - losses.mean()) * (targets != -100)


def ignores_the_group(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    penalty = 1e-1 * logits.logsumexp(1).square() * (targets != -100)
    return titanlite_loss(logits, targets, group) + penalty


def sums_gradients(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    import torch.distributed.nn.functional as functional

    total = logits.exp().sum(1)
    total = total if group is None else functional.all_reduce(total, group=group)
    return titanlite_loss(logits, targets, group) + 1e-1 * total.log().square() * (targets != -100)


def torch_s(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def without_gradient(*arguments: Any) -> torch.Tensor:
    return titanlite_loss(*arguments).detach()


def nothing(*arguments: Any) -> None:
    pass


def titanlite_loss(*arguments: Any) -> torch.Tensor:
    from titanlite.loss import cross_entropy

    return cross_entropy(*arguments)


def problem_of_loss(loss: Any, job: Any) -> str:
    group = mesh.build_layout(job.parallelism, CPU).mesh["tp"].get_group()
    try:
        Own(loss=loss).check_loss(job.model, job.parallelism, group, CPU)
    except ConfigError as error:
        return error.problems[0]
    return ""


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (mean, "own.loss: returns () for 8 tokens; expected the loss of each, (8,)"),
        (ignores_nothing, "where the target is -100; expected 0"),
        (centred, "of a token depends on the other tokens"),
        (ignores_the_group, "own.loss: another value with the vocabulary on 2 ranks; reduce over `group`"),
        (sums_gradients, "own.loss: another gradient with the vocabulary on 2 ranks"),
        (torch_s, "own.loss: fails with logits of (8, 30): IndexError: Target "),
        (without_gradient, "own.loss: returns (8,) for 8 tokens; expected the loss of each, (8,), with a gradient"),
        (nothing, "own.loss: returns NoneType for 8 tokens"),
    ],
    ids=[
        "a mean",
        "no ignored targets",
        "mixed tokens",
        "no group",
        "gradients summed twice",
        "torch's",
        "detached",
        "nothing",
    ],
)
def test_a_loss_that_cannot_be_right_is_a_line(ranks, tmp_path: Path, loss: Any, line: str):
    problems = ranks(2).run(problem_of_loss, loss=loss, job=resolve(tmp_path, 2, TP))
    assert line in problems[0]
    assert len({*problems}) == 1


def test_a_loss_of_gathered_logits_needs_no_group(ranks, tmp_path: Path):
    job = resolve(tmp_path, 2, TP | {"disable_loss_parallel": True})
    assert ranks(2).run(problem_of_loss, loss=ignores_the_group, job=job) == ["", ""]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("own = 1", "'own' is no titanlite.Own"),
        ("x = 1\ny = z", "line 2: NameError: name 'z' is not defined"),
        ("x = (", "line 1: SyntaxError: "),
        (None, "expected FILE.py:NAME: "),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
        ("x = 1\n\nopen('/nowhere')", "line 3: FileNotFoundError: "),
        ("x = '\0'", ":own: SyntaxError: source code string cannot contain null bytes"),
        ("from titanlite import Own\nmine = Own()", "'own' is no titanlite.Own of this file; it has mine"),
        ("from titanlite import Own\nown = Own(loss=3)", "line 2: ConfigError: own.loss: 3: expected a function"),
        (
            "from titanlite import Own\nown = Own(styles={'feed_forward.up': 'colwise'})",
            "line 2: ConfigError: own.styles: feed_forward.up: expected a ParallelStyle of torch, as ColwiseParallel()",
        ),
    ],
)
def test_a_file_that_is_wrong_is_a_line(tmp_path: Path, text: str | None, line: str):
    file = tmp_path / "my_own.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_own(f"{file}:own")
    assert line.replace("'own'", '"own"') in caught.value.problems[0]


@pytest.mark.parametrize("own", ["", ", own=__file__ + ':own'", ", own=own"])
def test_a_file_that_trains_while_it_is_loaded_is_a_line(own: str, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(f"import titanlite\nown = titanlite.Own()\ntitanlite.run(['debug']{own})\n")
    with pytest.raises(ConfigError, match=r"line 3: .* calls titanlite while it is loaded; put its calls under `if"):
        load_own(f"{file}:own")


def test_a_pipe_and_an_empty_name_are_lines(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match=r"pipe\.py:own: expected FILE\.py:NAME: .*expected a regular file"):
        load_own(f"{tmp_path / 'pipe.py'}:own")
    with pytest.raises(ConfigError, match=r"expected FILE\.py:NAME"):
        take_own(["debug", "--own="])


def test_styles_count_without_an_own_block(tmp_path: Path):
    from titanlite import build

    own = Own(styles={"feed_forward.w1": ColwiseParallel()})
    job = resolve(tmp_path, 2, TP).with_own(own)
    stage = build.meta_model(job)
    own.prepare(stage, job.model, job.training, job.parallelism)
    assert all(block.styles == own.styles for block in stage.layers.values())


def test_no_folder_comes_onto_the_path(tmp_path: Path):
    (tmp_path / "my_part.py").write_text("x = 1\n")
    (tmp_path / "my_own.py").write_text("import my_part\n")
    before = [*sys.path]
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        load_own(f"{tmp_path / 'my_own.py'}:own")
    assert sys.path == before


# Metrics, data, the optimizer ----------------------------------------------------------------------------------------


def layer_norms(job: Any) -> dict[str, float]:
    run = TrainingRun(job, CPU)
    run.train_step.observers.append(load_own(f"{OWN / 'layer_norms'}.py:own").metrics(run.train_step))
    run.gradients(run.loader.next())
    run.loader.close()
    return run.train_step.observers[0].metrics()


@pytest.mark.parametrize("options", [TP, pytest.param(PP, marks=pytest.mark.nightly)], ids=["TP 2", "PP 2"])
def test_the_norms_of_layers_are_those_of_one_process(ranks, tmp_path: Path, options: dict[str, int]):
    job = resolve(tmp_path, 2, {"data_parallel_shard_degree": 1, "training__local_batch_size": 4} | options)
    gradients = run_reference(job, CPU, steps=1)
    norms = ranks(2).run(layer_norms, job=job)
    assert norms[0] == norms[1]
    assert len(norms[0]) == 3
    for layer in range(3):
        own = [g for name, g in gradients.items() if name.startswith(f"step 1 gradient layers.{layer}.")]
        norm = torch.stack([each.norm() for each in own]).norm().item()
        assert norms[0][f"gradient_norm/layer_{layer:03}"] == pytest.approx(norm, rel=1e-10)


SGD = """
import torch
from titanlite import Own
def optimizer(model, section):
    return torch.optim.SGD(model.parameters(), section.lr, momentum=0.9)
own = Own(optimizer=optimizer)
"""


def test_an_own_optimizer_is_equal_to_one_process_and_another_one(ranks, tmp_path: Path):
    (tmp_path / "my_sgd.py").write_text(SGD)
    plain = resolve(tmp_path, 2, TP)
    job = plain.with_own(load_own(f"{tmp_path / 'my_sgd.py'}:own"))
    trace = ranks(2).run(trace_of_rank_0, config=job, steps=2)[0]
    reference = run_reference(job, CPU, steps=2)
    allowed = tolerances(job, reference, CPU, steps=2)
    assert judge(reference, trace, allowed)[-1].startswith("equal: ")
    assert judge(run_reference(plain, CPU, steps=2), trace, allowed)[-1].startswith("DIFFERENT: ")


class Counts:
    """Data that counts how often it was continued, and remembers it in checkpoints."""

    def __init__(self, length: int):
        self.length, self.loaded, self.validation = length, [], [np.arange(length)] * 3

    def __getitem__(self, index: int) -> np.ndarray:
        return (index + np.arange(self.length)) % 200

    def state(self, position: int) -> dict[str, Any]:
        return {"position": position, "starts": len(self.loaded) + 1}

    def load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_the_state_of_own_data_is_in_checkpoints(tmp_path: Path):
    made = []

    def data(training: Any, vocab_size: int, seed: int) -> Counts:
        made.append(Counts(training.seq_len + 1))
        return made[-1]

    argv = ["debug", *SMALLEST[:-1], "--validation.enable", f"--job.dump_folder={tmp_path}", "--checkpoint.enable"]
    first = titanlite.run(argv, own=Own(data=data))
    assert first.metrics["validation_metrics/global_avg_loss"] > 5
    second = titanlite.run([*argv, "--training.steps=3"], own=Own(data=data))
    assert second.metrics["n_tokens_seen"] == 3 * 2 * 16
    assert [each.loaded for each in made] == [[], [{"position": 4, "starts": 1}]]


def test_a_run_that_fails_closes_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a full disk has delayed is written, or a line says that it is lost."""
    closed = []
    monkeypatch.setattr(MetricsLogger, "close", lambda logger: closed.append(logger))

    def fail(train_step: Any) -> Any:
        raise RuntimeError("from the user's code")

    with pytest.raises(RuntimeError, match="from the user's code"):
        titanlite.run(["debug", *SMALLEST, f"--job.dump_folder={tmp_path}"], own=Own(metrics=fail))
    assert closed == []  # nothing was logged yet

    def data(*arguments: Any) -> Any:
        return [np.arange(17)] * 2 + [np.arange(16)] * 6

    with pytest.raises(ConfigError, match=r"own\.data: sequence"):
        titanlite.run(["debug", *SMALLEST, f"--job.dump_folder={tmp_path}"], own=Own(data=data))
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("item", "line"),
    [
        (np.arange(16), "own.data: sequence 0 has inputs of shape (15,), int64; expected 17 integers"),
        (np.linspace(0, 1, 17), "float64; expected 17 integers, or a Sequence of three arrays of 16"),
        (np.arange(17) + 300, "own.data: sequence 0 has inputs of 300; expected 0 to 271"),
        (None, "own.data: sequence 0 has inputs of shape (0,), object; expected 17 integers"),
        (7, "own.data: sequence 0 has inputs of shape (0,), int64; expected 17 integers"),
    ],
)
def test_wrong_own_data_is_a_line(tmp_path: Path, item: np.ndarray, line: str):
    argv = ["debug", *SMALLEST, f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        titanlite.run(argv, own=Own(data=lambda *arguments: [item] * 8))
    assert line in caught.value.problems[0]


class NoArray:
    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise OSError("cannot be read")


SOME = np.arange(4)


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ([1, 2, [3, 4], 5, 6], "is no array: setting an array element with a sequence."),
        (torch.ones(5, requires_grad=True), "is no array: Can't call numpy() on Tensor that requires grad."),
        (torch.arange(5).bfloat16(), "is no array: Got unsupported ScalarType BFloat16"),
        (torch.empty(5, device="meta"), "is no array: can't convert meta device type tensor to numpy."),
        (NoArray(), "is no array: cannot be read"),
        (np.zeros(5, [("token", int)]), "has inputs of shape (4,), [('token', '<i8')]"),
        (np.arange(5) - 1, "has inputs of -1; expected 0 to 271"),
        ([0, 1, 2, 3, 272], "has targets of 272; expected 0 to 271"),
        ([], "has inputs of shape (0,), float64"),
        (((1, 2),) * 5, "has inputs of shape (4, 2), int64"),
        ([None] * 5, "has inputs of shape (4,), object"),
        ([2**70] * 5, "has inputs of shape (4,), object"),
        (b"12345", "has inputs of shape (0,), |S5"),
        ((token for token in range(5)), "has inputs of shape (0,), object"),
        (Sequence([1, [2, 3], 4, 5], SOME, SOME), "is no array: setting an array element with a sequence."),
        (Sequence(SOME, SOME, None), "has document_positions of shape (), object"),
        (Sequence(SOME, SOME / 2, SOME), "has targets of shape (4,), float64"),
        (Sequence(SOME, SOME, SOME / 2), "has document_positions of shape (4,), float64"),
        (Sequence(SOME, SOME, SOME - 1), "has document_positions of -1; expected 0 to 3"),
        (Sequence(SOME, SOME, SOME + 1), "has document_positions of 4; expected 0 to 3"),
        (Sequence(SOME, SOME - 101, SOME), "has targets of -101; expected 0 to 271"),
    ],
)
def test_a_wrong_item_is_a_line(item: Any, line: str):
    with pytest.raises(ConfigError) as caught:
        OwnSequences([item], Training(seq_len=4), 272)[0]
    (problem,) = caught.value.problems
    assert problem.startswith(f"own.data: sequence 0 {line}")
    assert (
        problem.endswith("; expected 5 integers, or a Sequence of three arrays of 4") or "; expected 0 to " in problem
    )


@pytest.mark.parametrize(
    "item",
    [
        [*range(5)],
        range(5),
        torch.arange(5),
        np.arange(5, dtype=np.uint64),
        Sequence([0, 1, 2, 3], torch.tensor([1, 2, 3, 4]), SOME),
        Sequence(SOME.astype(np.uint64), SOME + 1, SOME.astype(np.uint8)),
    ],
)
def test_an_item_of_integers_is_a_sequence(item: Any):
    sequence = OwnSequences([item], Training(seq_len=4), 5)[0]
    assert [each.tolist() for each in sequence] == [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3]]
    assert {each.dtype for each in sequence} == {np.dtype(np.int64)}


@pytest.mark.parametrize("data", [[], None, iter([])], ids=["empty", "None", "an iterator"])
def test_own_data_without_sequences_is_a_line(tmp_path: Path, data: Any):
    argv = ["debug", *SMALLEST, f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError, match=r"own\.data: (list|NoneType|list_iterator) has no sequences"):
        titanlite.run(argv, own=Own(data=lambda *arguments: data))


class Drawn:
    """Data that draws other tokens whenever a sequence is read."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.randint(272, size=17)


def test_data_that_changes_is_a_line(tmp_path: Path):
    argv = ["debug", *SMALLEST, f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError, match=r"own\.data: sequence 0 differs when it is read again"):
        titanlite.run(argv, own=Own(data=lambda *arguments: Drawn()))


def test_options_for_other_data_are_rejected(tmp_path: Path):
    argv = ["debug", *SMALLEST[:-1], "--validation.enable", f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError, match=r"validation\.enable = true: own\.data has no `validation`"):
        titanlite.run(argv, own=Own(data=lambda *arguments: [np.arange(17)]))


# The page ------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "extend.md").read_text()


def test_the_file_of_the_page_is_equal_to_one_process(ranks, tmp_path: Path):
    blocks = re.findall(r'^```python title="my_block.py"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_block.py").write_text(blocks[1])
    job = resolve(tmp_path, 2, TP).with_own(load_own(f"{tmp_path / 'my_block.py'}:own"))
    trace = ranks(2).run(trace_of_rank_0, config=job, steps=1)[0]
    reference = run_reference(job, CPU, steps=1)
    assert judge(reference, trace, tolerances(job, reference, CPU, steps=1))[-1].startswith("equal: ")


def test_the_lines_of_the_page_are_the_program_s(ranks, tmp_path: Path):
    job = resolve(tmp_path, 2, TP)
    with pytest.raises(ConfigError) as caught:
        blocks_of(own_of(Up), tmp_path, **TP)
    (loss, _) = ranks(2).run(problem_of_loss, loss=sums_gradients, job=job)
    lines = re.findall(r"^error: (.+)$", PAGE, re.MULTILINE)
    assert lines == [caught.value.problems[0], loss]


# From Python ---------------------------------------------------------------------------------------------------------


def test_the_public_names_are_frozen():
    names = ["ConfigError", "Own", "RunResult", "TrainingError", "load", "parity", "plan", "run"]
    assert titanlite.__all__ == names
    callables = ("load", "parity", "plan", "run")
    signatures = {name: str(inspect.signature(getattr(titanlite, name))) for name in callables}
    signatures = {name: text.replace("titanlite.techniques.own.", "") for name, text in signatures.items()}
    assert signatures == {
        "load": "(argv: list[str]) -> titanlite.config.schema.Config",
        "parity": "(argv: list[str], own: Own | str = '', *, dtype: str = 'float64', steps: int = 3) -> dict[str, str]",
        "plan": "(argv: list[str], own: Own | str = '') -> titanlite.tools.plan.result.Plan",
        "run": "(argv: list[str], own: Own | str = '') -> titanlite.api.RunResult",
    }
    assert [field.name for field in dataclasses.fields(Own)][:6] == [
        "block",
        "styles",
        "loss",
        "data",
        "optimizer",
        "metrics",
    ]
    for name in names:
        assert getattr(titanlite, name).__doc__
    with pytest.raises(AttributeError):
        titanlite.train_everything  # noqa: B018


def test_the_import_is_light():
    code = "import sys, titanlite; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False False\n"


def left_behind() -> dict[str, Any]:
    """Return what a run could leave in this process: native threads, Python's, files, handlers, folders on the path."""
    gc.collect()
    return {
        "groups": dist.is_initialized(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": {each.name for each in threading.enumerate()},
        "handlers": [
            signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        ],
        "path": [*sys.path],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "children": children(os.getpid()),
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files in /proc")
def test_runs_in_one_process_return_and_leave_nothing(tmp_path: Path):
    argv = ["debug", *SMALLEST, "--checkpoint.enable", "--debug.deterministic"]
    results: list[titanlite.RunResult] = []
    for number in range(3):
        if number == 1:
            diverges = [*argv, f"--job.dump_folder={tmp_path}/nan", "--optimizer.lr=1e38", "--training.steps=9"]
            with pytest.raises(titanlite.TrainingError, match=r"not finite|is nan|is inf"):
                titanlite.run(diverges)
            before = left_behind()  # the imports of the first runs remain
        folder = f"--job.dump_folder={tmp_path / str(number)}"
        results.append(titanlite.run([*argv, folder], own=f"{OWN}/layer_norms.py:own"))
    assert left_behind() == before
    assert results[0].loss == results[1].loss == results[2].loss
    assert results[0].folder == tmp_path / "0"
    assert results[0].metrics["gradient_norm/layer_001"] > 0
    lines = [json.loads(line) for line in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss_metrics/global_avg_loss"] == results[0].loss
    assert "# own: layer_norms.py:own " in (tmp_path / "0" / "config.toml").read_text()


def test_processes_do_not_run_a_script_again(tmp_path: Path):
    """Without `if __name__ == "__main__"`, too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from titanlite.tools.parity.process_pool import ProcessPool\n"
        "print('this line runs once')\n"
        "pool = ProcessPool(1)\n"
        "pool.run(dist.barrier)\n"
        "pool.close()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["this line runs once"]), done.stderr


def test_more_ranks_than_this_process_are_a_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"needs 2 ranks, and this process is one; start this script with torchrun"):
        titanlite.run(["debug_tp", f"--job.dump_folder={tmp_path}"])


def test_cells_of_a_notebook_run_twice(tmp_path: Path, monkeypatch, capsys):
    """IPython and nbclient are not among the test packages: cells are run as they would run them."""
    monkeypatch.chdir(tmp_path)
    cells = (OWN / "notebook.py").read_text().split("\n# %%")
    assert len(cells) == 4
    for _ in range(2):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells:
            exec(compile(f"#{cell}", "cell", "exec"), namespace)
    losses = [line for line in capsys.readouterr().out.splitlines() if line.endswith("with squared ReLU")]
    assert len({*losses}) == 1
    assert len(losses) == 2


def test_a_checkpoint_of_own_blocks_is_rejected_in_a_line(tmp_path: Path):
    argv = ["debug", *SMALLEST, "--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    titanlite.run(argv, own=f"{OWN}/squared_relu.py:own")
    with pytest.raises(ConfigError, match=r"has weights of own blocks \(--own\)"):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"has weights of own blocks \(--own\)"):
        export.run(tmp_path / "checkpoint" / "step-2", tmp_path / "out", None)
    with pytest.raises(ConfigError, match=r"saved with own\.block = true, and this run has no own\.block"):
        titanlite.run(argv)


def test_a_resume_with_another_own_file_is_said(tmp_path: Path, capsys):
    argv = ["debug", *SMALLEST, "--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    titanlite.run(argv, own=f"{OWN}/layer_norms.py:own")
    titanlite.run([*argv, "--training.steps=3"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since")]
    assert ' own "layer_norms.py:own ' in line


@pytest.mark.nightly
def test_a_plan_counts_own_blocks(tmp_path: Path):
    argv = ["debug", *SMALLEST, "--plan.device=h100"]
    plain, squared = (titanlite.plan(argv, own=own) for own in ("", f"{OWN}/squared_relu.py:own"))
    assert plain.n_parameters - squared.n_parameters == 2 * 32 * 48  # w3 of two layers
    assert squared.worst.peak.bytes["parameters"] < plain.worst.peak.bytes["parameters"]


# The commands --------------------------------------------------------------------------------------------------------


def titanlite_train(folder: Path, own: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titanlite", "train", "debug", *SMALLEST, f"--own={own}", "--job.dump_folder=run"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_the_command_trains_with_an_own_file(tmp_path: Path):
    done = titanlite_train(tmp_path, f"{OWN}/arithmetic.py:own")
    assert done.returncode == 0, done.stderr
    assert "data       own: sequences of Sums; validation: none" in done.stdout


@pytest.mark.nightly
def test_under_torchrun_every_rank_calls_run(tmp_path: Path):
    argv = ["debug", *SMALLEST, "--parallelism.tensor_parallel_degree=2", f"--job.dump_folder={tmp_path}"]
    script = f"import titanlite\nprint('loss', titanlite.run({argv}, own='{OWN}/z_loss.py:own').loss, flush=True)\n"
    (tmp_path / "my_script.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, str(tmp_path / "my_script.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    losses = re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 2, done.stderr
    assert len({*losses}) == 1


@pytest.mark.nightly
def test_the_command_says_in_a_line_that_there_is_no_such_file(tmp_path: Path):
    done = titanlite_train(tmp_path, "nothing.py:own")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --own nothing.py:own: expected FILE.py:NAME: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*RIGHT, "wrong_under_tp"])
def test_parity_of_the_standard_set(name: str):
    found = titanlite.parity(["debug"], own=f"{OWN}/{name}.py:own")
    assert len(found) == 20
    wrong = {layout for layout, verdict in found.items() if not verdict.startswith("equal: ")}
    assert wrong == ({layout for layout in found if "TP 2" in layout} if name == "wrong_under_tp" else set())


def test_the_table_of_parity_all(monkeypatch, capsys):
    monkeypatch.setattr(standard_set, "AXES", {name: standard_set.AXES[name] for name in ("FSDP 2", "TP 2", "CP 2")})
    monkeypatch.setattr(standard_set, "REWRITES", {})
    monkeypatch.setattr(itertools, "combinations", lambda axes, n: [])
    status = command.main(
        [
            "debug",
            f"--own={OWN}/wrong_under_tp.py:own",
            "--all",
            "--steps=1",
            "--model.n_heads=8",
            "--training.seq_len=18",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2].rstrip(":") for line in lines[:3]] == ["equal", "DIFFERENT", "impossible"]
    assert lines[3] == "1 of 3 layouts are equal to a single process"
    assert status == 1
