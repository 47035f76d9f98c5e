"""Fingerprint files are believed in nothing: what is wrong in one is a line, and takes no long time to find."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from titanlite.config.loader import printable
from titanlite.launch.cli import run_command
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, SIZE, fingerprint
from titanlite.tools.diff import compare
from titanlite.tools.diff.computation import inputs_of_entries

COUNTS = {"data parallel": 1, "sequences": 4, "tokens": 64, "accumulation steps": 1}
DESCRIPTION = {
    **{"step": 1, "compute_dtype": "float32", "weights_dtype": "float32", "state_dtype": "float32"},
    "counts": COUNTS,
}
STEP = "fingerprints/step-1.safetensors"
Tensors = dict[str, torch.Tensor]


def names(n_layers: int) -> list[str]:
    """Return the names of a step of a small model."""
    modules = ["tok_embeddings", *(f"layers.{number}" for number in range(n_layers)), "norm"]
    weights = [f"{module}.weight" for module in [*modules, "output"]]
    result = ["input tokens", "input targets", "forward loss"]
    result += [f"{phase} {module}" for phase in ("forward", "backward") for module in modules]
    return result + [f"{phase} {weight}" for phase in ("input", "gradient", "update") for weight in weights]


def tensors(n_layers: int = 2) -> Tensors:
    """Return the fingerprints of a step, each of a tensor of its own."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(names(n_layers)), 4, 8, generator=generator)
    return {name: fingerprint(name, x, torch.arange(4)) for name, x in zip(names(n_layers), drawn, strict=True)}


def content(description: Any = DESCRIPTION, **changes: Any) -> bytes:
    """Return the bytes of a file. Of the description, given as text or as an object, some keys may be changed."""
    text = description if isinstance(description, str) else json.dumps({**description, **changes})
    return save(tensors(), {file.KEY: text})


def with_tensors(**changes: Any) -> bytes:
    """Return the bytes of a file with other tensors; a name has _ for its first blank."""
    own = tensors() | {name.replace("_", " ", 1): tensor for name, tensor in changes.items()}
    return save(own, {file.KEY: json.dumps(DESCRIPTION)})


def with_name(name: str) -> bytes:
    return save(tensors() | {name: tensors()["forward norm"]}, {file.KEY: json.dumps(DESCRIPTION)})


def with_header(header: str, data: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def one_tensor(metadata: str = "", twice: bool = False) -> bytes:
    """Return the bytes of a file with one tensor, whose header may name it twice."""
    entry = '"input tokens":{"dtype":"F64","shape":[17],"data_offsets":[0,136]}'
    return with_header(f"{{{','.join([entry] * (1 + twice) + [metadata] * bool(metadata))}}}", bytes(136))


NORM = tensors()["forward norm"]
DESCRIBED = json.dumps({file.KEY: json.dumps(DESCRIPTION)})
FILES: dict[str, tuple[bytes, str]] = {
    "negative norm": (with_tensors(forward_norm=NORM * torch.tensor([-1.0] + [1.0] * N_PRODUCTS)), "forward norm"),
    "norm of nothing": (with_tensors(forward_norm=NORM * torch.tensor([0.0] + [1.0] * N_PRODUCTS)), "forward norm"),
    "larger products": (with_tensors(forward_norm=NORM * torch.tensor([1.0] + [1e3] * N_PRODUCTS)), "forward norm"),
    "infinite products": (with_tensors(forward_norm=NORM * torch.tensor([1.0] + [torch.inf] * 16)), "forward norm"),
    "half precision": (with_tensors(forward_norm=NORM.half()), "17 float64 numbers"),
    "integers": (with_tensors(forward_norm=NORM.long()), "17 float64 numbers"),
    "a matrix": (with_tensors(forward_norm=torch.ones(17, 17, dtype=torch.float64)), "17 float64 numbers"),
    "a scalar": (with_tensors(forward_norm=torch.ones((), dtype=torch.float64)), "17 float64 numbers"),
    "no phase": (with_name("layers.0.weight"), '"layers.0.weight": expected a phase'),
    "another phase": (with_name("sideways layers.0"), '"sideways layers.0": expected a phase'),
    "no name": (with_name(""), '"": expected a phase'),
    "nothing but a phase": (with_name("forward "), '"forward ": expected a phase'),
    "an escape in a name": (with_name("forward \x1b[2J\x1b]0;x\x07"), "\\u001b[2J"),
    "a line in a name": (with_name("forward x\nequal: all"), "forward x\\nequal"),
    "a direction in a name": (with_name("forward \u202eevif"), "\\u202e"),
    "mathematics in a name": (with_name("forward $x_"), "forward $x_"),
    "a digit that is none": (with_name("forward layers.²"), "expected a phase"),
    "a layer of 5,000 digits": (with_name(f"forward layers.{'9' * 5000}"), "expected a phase"),
    "a name of a megabyte": (with_name("forward " + "x" * 2**20), "expected a phase"),
    "zero count": (content(counts=COUNTS | {"data parallel": 0}), "counts.data parallel: Input should be greater"),
    "negative count": (content(counts=COUNTS | {"data parallel": -2}), "counts.data parallel: Input should be"),
    "smallest count": (content(counts=COUNTS | {"data parallel": 5e-324}), "counts.data parallel: Input should be"),
    "largest count": (content(counts=COUNTS | {"data parallel": 1e308}), "counts.data parallel: Input should be less"),
    "infinite count": (content(json.dumps(DESCRIPTION).replace("64", "1e999")), "counts.tokens: Input should be"),
    "NaN": (content(json.dumps(DESCRIPTION).replace("64", "NaN")), "NaN is no JSON number"),
    "a count that is text": (content(counts=COUNTS | {"tokens": "64"}), "counts.tokens: Input should be a valid"),
    "a count that is true": (content(counts=COUNTS | {"tokens": True}), "counts.tokens: Input should be a valid"),
    "a huge count": (content(json.dumps(DESCRIPTION).replace("64", "9" * 5000)), "not valid JSON"),
    "an escape in a count": (content(counts=COUNTS | {"\x1b[31m": 2}), "counts.\\x1b[31m"),
    "many counts": (content(counts=COUNTS | {f"a{n}": 2 for n in range(100)}), "at most 40 items"),
    "no counts": (content(counts={"data parallel": 1}), "and counts of sequences and tokens"),
    "a key twice": (content(json.dumps(DESCRIPTION)[:-1] + ', "step": 1}'), '"step" is there twice'),
    "a count twice": (content(json.dumps(DESCRIPTION)[:-2] + ', "tokens": 65}}'), '"tokens" is there twice'),
    "unknown key": (content(model="llama"), "model: Extra inputs are not permitted"),
    "unknown type": (content(compute_dtype="float17\x1b[2J"), "compute_dtype: Input should be 'float64'"),
    "a type of torch": (content(weights_dtype="complex64"), "weights_dtype: Input should be 'float64'"),
    "no type": (content(state_dtype=None), "state_dtype: Input should be 'float64'"),
    "another step": (content(step=2), "step = 1"),
    "negative step": (content(step=-1), "step: Input should be greater than or equal to 0"),
    "a hash of text": (content(sequences=["\x1b[2J"]), "sequences.0: Input should be a valid integer"),
    "a long hash": (content(sequences=[1] * 17), "sequences: List should have at most 16 items"),
    "a huge hash": (content(sequences=[2**60]), "sequences.0: Input should be less than or equal to"),
    "a list": (content("[]"), "expected a JSON object, got a list"),
    "nested": (content('{"a":' * 100_000), "not valid JSON"),
    "half a letter": (content('{"\\ud800": 1}'), "in its metadata: Invalid JSON"),
    "no description": (save(tensors()), "in its metadata: step: Field required"),
    "no tensors": (save({}, {file.KEY: json.dumps(DESCRIPTION)}), "expected some tensors"),
    "metadata of null": (one_tensor('"__metadata__":null'), "in its metadata: step: Field required"),
    "metadata of numbers": (one_tensor('"__metadata__":{"a":1}'), "cannot be read as safetensors"),
    "a tensor twice": (one_tensor(f'"__metadata__":{DESCRIBED}', twice=True), '"input tokens" is there twice'),
    "empty": (b"", "cannot be read as safetensors"),
    "a header of exabytes": (b"\xff" * 7 + b"\x7f", "cannot be read as safetensors"),
    "shapes that overflow": (
        with_header('{"forward norm":{"dtype":"F64","shape":[4294967296,4294967297],"data_offsets":[0,8]}}', bytes(8)),
        "cannot be read as safetensors",
    ),
    "a huge shape": (
        with_header('{"forward norm":{"dtype":"F64","shape":[1099511627776],"data_offsets":[0,8796093022208]}}'),
        "cannot be read as safetensors",
    ),
    "a huge shape without elements": (
        with_header('{"forward norm":{"dtype":"F64","shape":[0,4294967296],"data_offsets":[0,0]},'
                    f'"__metadata__":{DESCRIBED}}}'),
        "17 float64 numbers",
    ),
    "bytes of no tensor": (one_tensor() + b"\0", "cannot be read as safetensors"),
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs with the same fingerprints."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        (folder / "fingerprints").mkdir(parents=True)
        (folder / STEP).write_bytes(content())
    return folders


def run(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the exit status of the command, and what it prints to each stream."""
    status = run_command("diff", list(map(str, runs)))
    return status, *capsys.readouterr()


def assert_one_line(runs: list[Path], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = run(runs, capsys)
    assert (status, out) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert printable(error, "\n") == error
    assert len(error) < 1000
    assert expected in error


def test_the_same_file_is_equal(runs, capsys):
    status, out, error = run(runs, capsys)
    assert (status, error) == (0, "")
    assert f"equal: {len(names(2)) + 1} tensors of 1 steps" in out


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_line(runs, capsys, name: str):
    damaged, expected = FILES[name]
    (runs[1] / STEP).write_bytes(damaged)
    assert_one_line(runs, expected, capsys)


def sparse(path: Path) -> None:
    with path.open("wb") as own:
        own.truncate(10 * 2**30)


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "cannot be read: expected a regular file"),
    "folder": (Path.mkdir, "cannot be read: Is a directory"),
    "broken link": (lambda path: path.symlink_to("nothing"), "cannot be read: No such file"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "cannot be read: expected a regular file"),
    "10 GiB": (sparse, "cannot be read: expected at most 134,217,728 bytes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_fingerprint_file_is_one_line(runs, capsys, kind: str):
    make, expected = KINDS[kind]
    (runs[1] / STEP).unlink()
    make(runs[1] / STEP)
    assert_one_line(runs, expected, capsys)


@pytest.mark.parametrize("name", ["step-01", "step-1 ", "step-+1", "step-\u0661", "step-1e1", "step-" + "9" * 30])
def test_a_file_with_another_name_is_no_step(runs, capsys, name: str):
    (runs[1] / "fingerprints" / f"{name}.safetensors").write_bytes(b"")
    assert run(runs, capsys)[0] == 0
    (runs[1] / STEP).unlink()
    assert_one_line(runs, "no fingerprints; set debug.fingerprint_freq", capsys)


# What is compared -----------------------------------------------------------------------------------------------------


def write(folder: Path, own: Tensors, **changes: Any) -> None:
    own = {name: tensor.clone() for name, tensor in own.items()}  # safetensors rejects those that share memory
    (folder / STEP).write_bytes(save(own, {file.KEY: json.dumps({**DESCRIPTION, **changes})}))


def test_every_tensor_is_compared(runs, capsys):
    """Also those that no model of ours has, and those whose module or gradient is not there."""
    own = tensors() | {f"{phase} foreign.weight": NORM for phase in ("input", "gradient", "backward", "update")}
    own |= {
        "backward loss": NORM,
        "forward output": NORM,
        "update frozen.weight": NORM,
        "update norm.weight step": NORM,
    }
    for name in own:
        write(runs[0], own)
        write(runs[1], own | {name: 2 * own[name] * torch.tensor([2.0] + [1.0] * N_PRODUCTS)})
        status, out, _ = run(runs, capsys)
        assert status in (1, 2), name
        assert name.split()[1].rsplit(".weight")[0] in out.partition("\n\n")[2].partition("\n\n")[2], name


@pytest.mark.parametrize("lacks", [0, 1])
def test_what_one_run_lacks_is_not_equal(runs, capsys, lacks: int):
    for name in tensors():
        write(runs[lacks], {each: tensor for each, tensor in tensors().items() if each != name})
        status, out, _ = run(runs, capsys)
        assert status == 2, name
        assert f"{'AB'[lacks]} lacks 1 tensors in step 1: {name}" in out
        assert "INCOMPLETE: one run lacks tensors of the other" in out or "TOO COARSE TO COMPARE" in out


def test_nothing_in_common_is_not_equal(runs, capsys):
    write(runs[0], {"input tokens": NORM})
    write(runs[1], {"input targets": NORM})
    assert run(runs, capsys)[0] == 2


@pytest.mark.parametrize("larger", [0, 1])
def test_a_norm_that_is_another_is_a_distance(runs, capsys, larger: int):
    """The inner products may be the same."""
    write(runs[larger], tensors() | {"forward norm": NORM * torch.tensor([100.0] + [1.0] * N_PRODUCTS)})
    status, out, _ = run(runs, capsys)
    assert status == 1
    assert "DIFFERENT: first in step 1, forward: the output of norm" in out
    assert "distance 9.0e-01" in out


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_of_both_runs_that_are_not_finite_are_named(runs, capsys, value: float):
    for phase in ("gradient", "forward", "update"):
        name = next(each for each in tensors() if each.startswith(phase))
        for folder in runs:
            write(folder, tensors() | {name: torch.full_like(NORM, value)})
        status, out, _ = run(runs, capsys)
        assert status == 1
        assert "it is not finite" in out


def test_precisions_that_explain_everything_are_too_coarse(runs, capsys):
    """With weights in bfloat16, an update that is smaller than their rounding may be right or wrong."""
    generator, large = torch.Generator().manual_seed(1), torch.tensor([1e4] + [1e2] * N_PRODUCTS)
    inputs = {name: tensor * large for name, tensor in tensors().items() if name.startswith("input layers")}
    for folder in runs:
        changes = {name: torch.randn(SIZE, generator=generator, dtype=torch.float64) for name in inputs}
        updates = {name.replace("input", "update"): inputs[name] + change / 10 for name, change in changes.items()}
        write(folder, tensors() | inputs | updates, weights_dtype="bfloat16")
    status, out, _ = run(runs, capsys)
    assert status == 2
    assert "TOO COARSE TO COMPARE: first in step 1, update: the change of layers.0.weight" in out
    assert "1 more tensors of this step may be right or wrong: update layers.1.weight" in out
    assert "equal" not in out


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["layers.{}", "layers.0.x{}", "foreign{}"])
def test_the_time_is_linear_in_the_number_of_tensors(kind: str):
    """Of as many modules, of one, and of modules that no model of ours has."""

    def seconds(n: int) -> float:
        own = [f"{phase} {kind.format(i)}.weight" for phase in ("input", "gradient", "update") for i in range(n // 4)]
        own += [f"forward {kind.format(i)}" for i in range(n // 4)]
        fingerprints = {name: NORM for name in own}
        description = file.Description(**DESCRIPTION)
        begin = time.process_time()
        assert len(inputs_of_entries(own)) == n + 1
        compare.compare_step(fingerprints, fingerprints, (description, description), {}, is_first=True)
        return time.process_time() - begin

    seconds(100)  # the first call imports and allocates
    small, large = (min(seconds(n) for _ in range(3)) for n in (2000, 8000))
    assert large < 8 * small  # 4 times as many: 16 times as long, if it were quadratic
