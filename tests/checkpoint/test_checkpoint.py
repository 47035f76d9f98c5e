"""The format of checkpoints: what is written, what is read under another layout, and what is rejected."""

import json
import math
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.helpers.checkpoint import (
    FILES,
    change_header,
    change_manifest,
    change_state,
    flip,
    replace_file,
    tensors,
    write_checkpoint,
)
from tests.helpers.data import Code, numbered_sequences, open_loader, rejection
from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, Stored, build_manifest
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import ConfigError
from titanlite.files.safetensors import BLOCK_BYTES
from titanlite.launch.cli import run_command
from titanlite.parallel.shards import Slice
from titanlite.step_guard import StepGuard
from titanlite.techniques.data.mixture import Component, MixedSequences
from titanlite.techniques.data.streaming import StreamingSequences
from titanlite.techniques.loss_scale import LossScale
from titanlite.techniques.outlier_steps import OutlierSteps
from titanlite.techniques.replicas.torchft import Replicas

FIRST, SECOND = FILES


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "step-7")


def load(step: Path) -> dict[str, Tensor]:
    """Load everything as a run does: into tensors that exist."""
    targets = {name: torch.zeros_like(value) for name, value in tensors().items()}
    CheckpointReader(step).load(targets)
    return targets


def problem(step: Path) -> str:
    """Return the one line with which a checkpoint is rejected."""
    with pytest.raises(ConfigError) as error:
        load(step)
    (line,) = error.value.problems
    assert "\n" not in line
    return line


# What is written and read --------------------------------------------------------------------------------------------


def test_every_tensor_is_read_bit_for_bit(step: Path):
    loaded, reader = load(step), CheckpointReader(step)
    for name, value in tensors().items():
        assert torch.equal(loaded[name], value)
        assert torch.equal(reader.read(name), value)
        assert (reader.shapes[name], reader.dtypes[name]) == (value.shape, value.dtype)


def test_any_slice_can_be_read(step: Path):
    """Slices that begin and end anywhere, of rows and of columns, in and across files and checksummed blocks."""
    value, reader = tensors()["model.a"], CheckpointReader(step)
    for offset, size in [((0, 0), (1, 1)), ((1299, 5), (2, 7)), ((1023, 0), (300, 1024)), ((100, 1000), (2500, 24))]:
        target = torch.zeros(size, dtype=torch.float64)
        for file, _ in reader.manifest.slices("model.a", Slice(offset, size)):
            reader._file(file).read_into(target, "model.a", Slice(offset, size))
        rows, columns = (slice(a, a + n) for a, n in zip(offset, size, strict=True))
        assert torch.equal(target, value[rows, columns].double())


def test_the_files_are_safetensors_and_json(step: Path):
    assert {path.name for path in step.iterdir()} == {*FILES, MANIFEST, STATE}
    with safe_open(step / SECOND, "pt") as file:
        assert set(file.keys()) == {"model.a", "model.b", "random.cpu.0"}
        assert torch.equal(file.get_tensor("model.a"), tensors()["model.a"][1300:])
    json.loads((step / MANIFEST).read_text())


def test_only_blocks_with_wanted_rows_are_read(step: Path, monkeypatch: pytest.MonkeyPatch):
    """One row of a slice of 1300 x 4 KiB costs one block of 4 MiB."""
    from titanlite.files import safetensors

    counted = []
    real = safetensors.read_fully
    monkeypatch.setattr(
        safetensors, "read_fully", lambda file, data, begin: counted.append(len(data)) or real(file, data, begin)
    )
    reader, wanted = CheckpointReader(step), Slice((3, 0), (1, 1024))
    reader._fill(torch.zeros(1, 1024), "model.a", wanted)
    assert counted == [BLOCK_BYTES]


def sharded_manifest(n_files: int, tensor_parallel: int) -> Manifest:
    """Return the manifest of 20 layers whose matrices are sharded over n_files ranks, columns over tensor_parallel."""
    data_parallel, shape = n_files // tensor_parallel, (8192, 8192)
    size = shape[0] // data_parallel, shape[1] // tensor_parallel
    stored = {}
    for rank in range(n_files):
        row, column = divmod(rank, tensor_parallel)
        box = Slice((row * size[0], column * size[1]), size)
        names = [f"model.layers.{layer}.feed_forward.w2.weight" for layer in range(20)]
        stored[f"rank-{rank:05d}.safetensors"] = Stored(
            FileEntry(bytes=1, xxh3_64="0" * 16), {("F32", shape, box): names}
        )
    return Manifest.model_validate_json(build_manifest(stored, b"{}"))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "n_files"),
    [
        ((4096, 1), (4096, 1), 1),
        ((4096, 8), (4096, 8), 1),
        ((4096, 1), (512, 1), 8),
        ((4096, 8), (4096, 4), 2),
        ((512, 8), (4096, 8), 1),
        ((4096, 1), (4096, 8), 8),
        ((64, 8), (4096, 1), 8),
    ],
    ids=str,
)
def test_a_rank_of_thousands_opens_few_files(saved_by: tuple[int, int], loaded_by: tuple[int, int], n_files: int):
    """Of 4096 files a rank opens those that hold its slices; which they are is the same for all layers."""
    manifest, (world, columns) = sharded_manifest(*saved_by), loaded_by
    size = 8192 * columns // world, 8192 // columns
    for rank in (0, world // 2 + 1, world - 1):
        row, column = divmod(rank, columns)
        wanted = Slice((row * size[0], column * size[1]), size)
        opened = {file for name in manifest.tensors for file, _ in manifest.slices(name, wanted)}
        assert len(opened) == n_files


def test_layers_that_are_sharded_alike_share_their_entry():
    manifest = sharded_manifest(4096, 8)
    assert (len(manifest.layouts), len(manifest.layouts[0])) == (1, 4096)


# What is rejected ----------------------------------------------------------------------------------------------------


def swap(step: Path) -> None:
    (step / FIRST).rename(step / "third")
    (step / SECOND).rename(step / FIRST)
    (step / "third").rename(step / SECOND)


def truncate(name: str, n_bytes: int) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / name, max((step / name).stat().st_size + n_bytes, 0))


def append(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes((step / name).read_bytes() + b" ")


def flipped(name: str, position: int) -> Callable[[Path], None]:
    return lambda step: flip(step / name, position)


def from_another(name: str) -> Callable[[Path], None]:
    """Return a change that takes a file from another checkpoint of the same tensors."""

    def change(step: Path) -> None:
        other = write_checkpoint(step.parent / "other" / "step-7", tensors(seed=1), data={"next_sequence": 1})
        shutil.copy(other / name, step / name)

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda step: (step / name).write_text(text)


def removed(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def as_fifo(step: Path) -> None:
    (step / FIRST).unlink()
    os.mkfifo(step / FIRST)


def as_folder(step: Path) -> None:
    (step / FIRST).unlink()
    (step / FIRST).mkdir()


def as_zeros(step: Path) -> None:
    (step / FIRST).unlink()
    (step / FIRST).symlink_to("/dev/zero")


def header_length(length: int) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        data = (step / FIRST).read_bytes()
        (step / FIRST).write_bytes(length.to_bytes(8, "little") + data[8:])

    return change


# The first tensor's bytes follow the header; the last one's end the file.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (removed(FIRST), f"{FIRST}: cannot be read: No such file"),
    "missing second file": (removed(SECOND), f"{SECOND}: cannot be read: No such file"),
    "renamed file": (
        lambda step: (step / FIRST).rename(step / "rank-00009.safetensors"),
        f"{FIRST}: cannot be read: No such file",
    ),
    "truncated by one byte": (truncate(FIRST, -1), f"{FIRST}: "),
    "truncated by half": (truncate(SECOND, -2_000_000), f"{SECOND}: "),
    "empty file": (truncate(FIRST, -(10**9)), f"{FIRST}: 0 bytes"),
    "one byte too many": (append(FIRST), f"{FIRST}: "),
    "flipped bit in the last byte": (flipped(FIRST, -1), f"{FIRST}: random.cpu.0: the checksum of the "),
    "flipped bit in a number": (flipped(FIRST, -23), f"{FIRST}: optimizer.state.a.step: the checksum of the "),
    "flipped bit in a small weight": (flipped(FIRST, -30), f"{FIRST}: model.b: the checksum of the "),
    "flipped bit in a large weight": (flipped(FIRST, -100), f"{FIRST}: model.a: the checksum of the "),
    "flipped bit in its first block": (flipped(FIRST, 4096), f"{FIRST}: model.a: the checksum of the "),
    "flipped bit in its second block": (flipped(SECOND, 4_500_000), f"{SECOND}: model.a: the checksum of the "),
    "flipped bit in the header's length": (flipped(FIRST, 0), f"{FIRST}: "),
    "flipped bit in the header": (flipped(FIRST, 20), f"{FIRST}: the header's checksum differs"),
    "flipped bit in a checksum": (flipped(FIRST, 90), f"{FIRST}: the header's checksum differs"),
    "files swapped": (swap, f"{FIRST}: "),
    "file of another checkpoint": (from_another(SECOND), f"{SECOND}: the header's checksum differs"),
    "a folder for a file": (as_folder, f"{FIRST}: cannot be read: Is a directory"),
    "a pipe for a file": (as_fifo, f"{FIRST}: cannot be read: expected a regular file"),
    "a device for a file": (as_zeros, f"{FIRST}: cannot be read: expected a regular file"),
    "a header without end": (header_length(2**63), f"{FIRST}: no safetensors file"),
    "a header longer than the file": (header_length(20_000_000), f"{FIRST}: no safetensors file"),
    "a shorter header": (header_length(16), f"{FIRST}: the header's checksum differs"),
    "another file in its place": (
        lambda step: (step / FIRST).write_bytes(b"x" * (step / FIRST).stat().st_size),
        f"{FIRST}: no safetensors file",
    ),
    "missing manifest": (removed(MANIFEST), f"{MANIFEST}: no such file, so "),
    "empty manifest": (written(MANIFEST, ""), f"{MANIFEST}: not valid JSON"),
    "truncated manifest": (truncate(MANIFEST, -20), f"{MANIFEST}: not valid JSON"),
    "changed manifest": (
        lambda step: (step / MANIFEST).write_text((step / MANIFEST).read_text().replace("2600", "2601")),
        f"{MANIFEST}: the checksum differs",
    ),
    "manifest that is a list": (written(MANIFEST, "[]"), f"{MANIFEST}: expected a JSON object"),
    "manifest of deep lists": (written(MANIFEST, "[" * 100_000), f"{MANIFEST}: not valid JSON"),
    "manifest that is no text": (
        lambda step: (step / MANIFEST).write_bytes(b"\xff\xfe\x00{"),
        f"{MANIFEST}: not valid JSON",
    ),
    "manifest of another checkpoint": (from_another(MANIFEST), f"{STATE}: it is not the file that the manifest"),
    "older format": (
        lambda step: (step / MANIFEST).rename(step / ".metadata"),
        "is not a complete checkpoint; if it is of torchtitan, export it there to Hugging Face",
    ),
    "newer version": (
        lambda step: change_manifest(step, lambda content: content.update(version=2)),
        f'{MANIFEST}: format "titanlite checkpoint", version 2: expected',
    ),
    "other format": (
        lambda step: change_manifest(step, lambda content: content.update(format="pt")),
        f'{MANIFEST}: format "pt", version 1: expected',
    ),
    "missing state": (removed(STATE), f"{STATE}: cannot be read: No such file"),
    "truncated state": (truncate(STATE, -3), f"{STATE}: it is not the file that the manifest describes"),
    "flipped bit in the state": (flipped(STATE, 11), f"{STATE}: it is not the file that the manifest describes"),
    "state of another checkpoint": (from_another(STATE), f"{STATE}: it is not the file that the manifest describes"),
    "missing folder": (shutil.rmtree, "no such file, so "),
    "folder of another step": (
        lambda step: change_state(step, lambda state: state.update(step=8)),
        f"{STATE}: step = 8, which is not the folder's",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(step: Path, damage: str):
    change, message = DAMAGES[damage]
    change(step)
    assert message in problem(step)


def manifest_with(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda step: change_manifest(step, change)


def state_with(**values: Any) -> Callable[[Path], None]:
    return lambda step: change_state(step, lambda state: state.update(values))


def header_with(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda step: change_header(step, FIRST, change)


def first_slice(values: list[Any]) -> Callable[[Any], None]:
    """Return a change of the first slice of model.a, [file, offset, size]."""

    def change(content: Any) -> None:
        content["layouts"][content["tensors"]["model.a"]["layout"]][0] = values

    return change


def of_model_a(**values: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"]["model.a"].update(values)


def renamed_file(name: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["files"] = {name if key == FIRST else key: value for key, value in content["files"].items()}

    return change


def wider(step: Path) -> None:
    shutil.rmtree(step)
    write_checkpoint(step, tensors() | {"model.a": torch.zeros(2600, 1025)})


DIFFERS = f"{FIRST}: the header does not describe the tensors that the manifest has"
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle for a file": (
        lambda step: replace_file(step, FIRST, pickle.dumps(Code())),
        f"{FIRST}: no safetensors file",
    ),
    "a pickle for the manifest": (written(MANIFEST, pickle.dumps(Code(), 0).decode()), f"{MANIFEST}: not valid JSON"),
    "a pickle for the state": (
        lambda step: replace_file(step, STATE, pickle.dumps(Code())),
        f"{STATE}: not valid JSON",
    ),
    "a pickle of torchtitan": (
        lambda step: (step / MANIFEST).rename(step / ".metadata").write_bytes(pickle.dumps(Code())),
        f"{MANIFEST}: no such file, so ",
    ),
    "a path outside": (manifest_with(renamed_file("../rank.safetensors")), "files: "),
    "an absolute path": (manifest_with(renamed_file("/etc/passwd")), "files: "),
    "a name with NUL": (manifest_with(renamed_file("a\0.safetensors")), "files: "),
    "no state file": (manifest_with(lambda content: content["files"].pop(STATE)), "files: state.json is missing"),
    "slices that overlap": (manifest_with(first_slice([0, [0, 0], [1301, 1024]])), "overlap or leave gaps"),
    "slices with a gap": (manifest_with(first_slice([0, [0, 0], [1299, 1024]])), "overlap or leave gaps"),
    "a slice outside": (manifest_with(first_slice([0, [2000, 0], [1300, 1024]])), "is not inside the shape"),
    "a slice of other dimensions": (manifest_with(first_slice([0, [0], [1300]])), "is not inside the shape"),
    "a negative offset": (manifest_with(first_slice([0, [-1, 0], [1301, 1024]])), "greater than or equal to 0"),
    "an empty slice": (manifest_with(first_slice([0, [0, 0], [0, 1024]])), "is not inside the shape"),
    "a file that does not exist": (manifest_with(first_slice([9, [0, 0], [1300, 1024]])), "the file must exist"),
    "a file twice": (manifest_with(first_slice([1, [0, 0], [1300, 1024]])), "must be in another file"),
    "a number for a file": (manifest_with(first_slice([0.0, [0, 0], [1300, 1024]])), "valid integer"),
    "a layout that does not exist": (manifest_with(of_model_a(layout=99)), "there is no layout 99"),
    "an unknown type": (manifest_with(of_model_a(dtype="object")), "Input should be"),
    "a type of other size": (manifest_with(of_model_a(dtype="F64")), DIFFERS),
    "a type of the same size": (manifest_with(of_model_a(dtype="I32")), DIFFERS),
    "a giant shape": (manifest_with(of_model_a(shape=[2**62, 1024])), "overlap or leave gaps"),
    "a shape beyond integers": (manifest_with(of_model_a(shape=[2**70, 1024])), "less than or equal to"),
    "an unknown key": (manifest_with(of_model_a(code="os.system")), "Extra inputs are not permitted"),
    "a tensor without shape": (
        manifest_with(lambda content: content["tensors"]["model.a"].pop("shape")),
        "Field required",
    ),
    "a tensor that is missing": (
        manifest_with(lambda content: content["tensors"].pop("model.a")),
        "model.a is not in the checkpoint",
    ),
    "a tensor that no file has": (
        manifest_with(lambda content: content["tensors"].update({"model.c": content["tensors"]["model.b"]})),
        DIFFERS,
    ),
    "a tensor of another shape": (
        wider,
        "model.a has shape [2600, 1025], expected [2600, 1024]",
    ),
    "bytes outside the file": (
        header_with(lambda header: header["model.a"].update(data_offsets=[2**40, 2**40 + 1300 * 4096])),
        DIFFERS,
    ),
    "bytes before the file": (
        header_with(lambda header: header["model.a"].update(data_offsets=[-1300 * 4096, 0])),
        DIFFERS,
    ),
    "offsets that are text": (header_with(lambda header: header["model.a"].update(data_offsets="ab")), DIFFERS),
    "a header without checksums": (header_with(lambda header: header.pop("__metadata__")), DIFFERS),
    "too few checksums": (
        header_with(lambda header: header["__metadata__"].update({"xxh3_64 of every 4 MiB": '{"model.a": []}'})),
        DIFFERS,
    ),
    "a header that is a list": (header_with(lambda header: [1, 2]), DIFFERS),
    "a superfluous tensor": (
        header_with(lambda header: header.update(more=header["model.b"])),
        f"{FIRST}: more is not in the manifest",
    ),
    "a step that is text": (state_with(step="7"), f"{STATE}: step: "),
    "a negative step": (state_with(step=-7), f"{STATE}: step: "),
    "an identity that is a list": (state_with(identity=[1]), f"{STATE}: identity: "),
    "an identity with code": (state_with(identity={"dim": {"code": 1}}), f"{STATE}: identity.dim"),
    "skipped steps that are none": (state_with(skipped=-1), f"{STATE}: skipped"),
    "data that is text": (state_with(data="x"), f"{STATE}: data"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_rejected(step: Path, case: str, monkeypatch: pytest.MonkeyPatch):
    """All checksums are right: only what the files say is wrong."""
    monkeypatch.chdir(step.parent)
    change, message = HOSTILE[case]
    change(step)
    assert message in problem(step)
    assert not (step.parent / "code_ran").exists()


def load_guard(state: dict[str, Any]) -> None:
    cpu = torch.device("cpu")
    StepGuard(0, LossScale(8.0, growth_interval=2), OutlierSteps(2.0, 4, cpu)).load(state)


def load_data(state: dict[str, Any]) -> None:
    open_loader(numbered_sequences(), state=state["data"]).close()


def load_stream(state: dict[str, Any]) -> None:
    StreamingSequences.resumed(mock.Mock(), state["data"])


def load_mixture(state: dict[str, Any]) -> None:
    component = Component("a", numbered_sequences(), "content", 1, None)
    MixedSequences([component], seed=1).resumed(state["data"])


def load_groups(state: dict[str, Any]) -> None:
    groups = mock.Mock(section=mock.Mock(group_size=2))
    Replicas.begin(groups, 7, state, mock.Mock(), mock.Mock())


def shards(**shard: Any) -> dict[str, Any]:
    return {"data": {"next_sequence": 1, "streaming_shards": {"0": {"position": None, "used": 0} | shard}}}


MIXTURE = {"identity": "", "first": 0, "counts": {}, "phase": {}, "read": {}}
HOSTILE_PARTS: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any], str]] = {
    "a loss scale of three": (load_guard, {"loss_scale": [1.0, 0, 0]}, "loss_scale: "),
    "a loss scale that is no number": (load_guard, {"loss_scale": [math.nan, 0]}, "loss_scale.0: "),
    "outliers that are text": (load_guard, {"outliers": "x"}, "outliers: Input should be"),
    "outliers without keys": (load_guard, {"outliers": {}}, "outliers.skipped: Field required"),
    "a norm that is infinite": (load_guard, {"outliers": {"skipped": 0, "norms": [math.inf]}}, "outliers.norms.0: "),
    "norms without a number": (load_guard, {"outliers": {"norms": []}}, "outliers.skipped: Field required"),
    "no data position": (load_data, {"data": {}}, "data.next_sequence: Input should"),
    "a negative data position": (load_data, {"data": {"next_sequence": -1}}, "data.next_sequence: Input should"),
    "a giant data position": (load_data, {"data": {"next_sequence": 2**63}}, "data.next_sequence: Input should"),
    "a data position of text": (load_data, {"data": {"next_sequence": "1"}}, "data.next_sequence: Input should"),
    "three counts": (load_data, {"data": {"next_sequence": 1, "counts": [1, 2, 3]}}, "data.counts"),
    "a streaming shard without a number": (
        load_stream,
        {"data": {"next_sequence": 1, "streaming_shards": {"a": {"position": None, "used": 0}}}},
        "data.streaming_shards.a",
    ),
    "a negative number of used tokens": (load_stream, shards(used=-1), "data.streaming_shards.0.used: "),
    "a place before the file": (load_stream, shards(position=[0, -1]), "data.streaming_shards.0.position"),
    "an unknown key of a shard": (load_stream, shards(code="os.system"), "data.streaming_shards.0.code: "),
    "a mixture without counts": (
        load_mixture,
        {"data": {"next_sequence": 1, "mixture": {}}},
        "data.mixture.identity: Field required",
    ),
    "a mixture without a position": (load_mixture, {"data": {"mixture": MIXTURE}}, "data.next_sequence: Input should"),
    "a negative count of a mixture": (
        load_mixture,
        {"data": {"next_sequence": 1, "mixture": MIXTURE | {"counts": {"a": -1}}}},
        "data.mixture.counts.a: ",
    ),
    "batches of text": (load_groups, {"batches_of_groups": "1"}, "batches_of_groups: "),
    "a history of text": (load_groups, {"history": [[1, 2, "x"]]}, "history.0.2: "),
}


@pytest.mark.parametrize("case", HOSTILE_PARTS)
def test_hostile_parts_are_rejected_by_their_owners(step: Path, case: str):
    """All checksums are right, and what every checkpoint has is good: only the part of one owner is wrong."""
    owner, change, message = HOSTILE_PARTS[case]
    change_state(step, lambda state: state.update(change))
    state = CheckpointReader(step).state
    assert rejection(lambda: owner(state)).startswith(f"checkpoint: {STATE}: {message}")


OWNERS: dict[Callable[[dict[str, Any]], None], dict[str, Any]] = {
    load_guard: {"loss_scale": [1.0, 0], "outliers": {"skipped": 1, "norms": [0.5]}},
    load_data: {"data": {"next_sequence": 1, "counts": [1, 2, 3, 4]}},
    load_stream: shards(used=1),
    load_mixture: {"data": {"next_sequence": 0, "mixture": MIXTURE | {"identity": "other"}}},
    load_groups: {"batches_of_groups": 3, "history": [[1, 2, [0, 1]]]},
}


@pytest.mark.parametrize("owner", OWNERS)
def test_good_parts_are_accepted_and_those_of_no_owner_are_not_read(step: Path, owner: Any):
    change_state(step, lambda state: state.update(OWNERS[owner]))
    change_state(step, lambda state: state.update(unknown="os.system"))
    change_state(step, lambda state: state["data"].update(unknown="os.system"))
    owner(CheckpointReader(step).state)


def test_nothing_is_changed_by_a_checkpoint_of_another_model(step: Path):
    targets = {"model.b": torch.zeros(8, 6), "model.missing": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"model\.missing is not in the checkpoint; it is of another model"):
        CheckpointReader(step).load(targets)
    assert not targets["model.b"].any()


def test_the_helpers_change_only_what_they_should(step: Path):
    """A manifest, a state or a header that is written again without a change is accepted."""
    change_manifest(step, lambda content: None)
    change_state(step, lambda state: None)
    change_header(step, FIRST, lambda header: None)
    assert torch.equal(load(step)["model.a"], tensors()["model.a"])


@pytest.mark.parametrize("create", [Path.touch, os.mkfifo, lambda path: path.symlink_to("/nowhere")])
@pytest.mark.parametrize("name", ["step-1", "step-1.tmp", "step-1.unconfirmed", "step-1.replaced", "step-1-hf.tmp"])
def test_what_has_the_name_of_a_checkpoint_and_is_no_folder_is_rejected(tmp_path: Path, name: str, create: Any):
    create(tmp_path / name)
    with pytest.raises(ConfigError) as error:
        CheckpointFolder(tmp_path, keep_latest_k=1).recover()
    assert error.value.problems == [f"{tmp_path}/{name}: expected the folder of a checkpoint; move or remove this"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["step-1.tmp", "step-1.replaced"])
def test_a_link_to_a_checkpoint_is_removed_and_the_checkpoint_stays(tmp_path: Path, name: str):
    elsewhere = write_checkpoint(tmp_path / "elsewhere" / "step-7")
    (tmp_path / "step-1").mkdir()
    (tmp_path / name).symlink_to(elsewhere)
    CheckpointFolder(tmp_path, keep_latest_k=1).recover()
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "step-1"}
    assert load(elsewhere)


def test_a_full_disk_is_an_error(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "file", {"model.b": (torch.zeros(8192), (0,), (8192,))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# titanlite checkpoint ------------------------------------------------------------------------------------------------


def test_the_command_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoint" / "step-7")
    write_checkpoint(run / "checkpoint" / "step-10", step=10)
    (run / "checkpoint" / "step-11.tmp").mkdir()
    assert run_command("checkpoint", [str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run / 'checkpoint' / 'step-7'}: step 7, 2,662,448 parameters, 4 tensors, 0.01 GiB in 3 ")
    assert second.startswith(f"{run / 'checkpoint' / 'step-10'}: step 10, ")
    flip(run / "checkpoint" / "step-7" / SECOND, -1)
    assert run_command("checkpoint", [str(run / "checkpoint")]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1, "the other checkpoint is verified all the same"
    assert captured.err.startswith("error: ")
    assert "random.cpu.0: the checksum of the " in captured.err
    assert run_command("checkpoint", [str(tmp_path / "nothing")]) == 2
    assert run_command("checkpoint", []) == 2
