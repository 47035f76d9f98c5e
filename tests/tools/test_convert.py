"""titanlite convert: checkpoints in torchtitan's names and format become folders that a run starts from."""

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from titanlite import build
from titanlite.checkpoint.checkpointer import load_weights
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import Config
from titanlite.launch.cli import run_command
from titanlite.tools import convert

MODEL = Config().replace(model__n_layers=1)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in build.meta_model(MODEL).named_parameters()}


def write(folder: Path, tensors: dict[str, Tensor], **others: object) -> Path:
    """Write a checkpoint as torchtitan does."""
    dcp.save({**tensors, **others}, checkpoint_id=str(folder), no_dist=True)
    return folder


def write_full(folder: Path, tensors: dict[str, Tensor], step: object = 3) -> Path:
    states = {"state": {"tok_embeddings.weight": {"exp_avg": torch.ones(3)}}}
    data = {"dp_rank_0": b"\x80\x04position"}
    return write(folder, tensors, optimizer=states, dataloader=data, train_state={"step": step, "ntokens_seen": 9})


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize(("write", "step"), [(write_full, 3), (write, 5)], ids=["full", "weights alone"])
def test_weights_and_step_are_those_of_the_checkpoint(tmp_path: Path, write, step: int):
    expected = weights()
    convert.convert(write(tmp_path / "step-5", expected), MODEL.model, tmp_path / "new")
    assert CheckpointReader(tmp_path / "new").state["step"] == step
    model = build.meta_model(MODEL)
    model.materialize(torch.device("cpu"))
    load_weights(tmp_path / "new", model, MODEL.model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def changed(**tensors: Tensor) -> dict[str, Tensor]:
    return weights() | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize(
    ("tensors", "step", "problem"),
    [
        (changed(norm__weight=torch.ones(3)), 3, "norm.weight is [3], and the model's is [256]"),
        (changed(norm__weight=torch.full((256,), torch.nan)), 3, "norm.weight is not complete, or has numbers that"),
        (changed(norm__bias=torch.ones(3)), 3, 'has "norm.bias", which the model lacks'),
        ({"norm.weight": torch.ones(256)}, 3, "lacks layers.0.attention.wk.weight, which the model has"),
        (changed(), 0, "train_state.step: expected an integer >= 1"),
        (changed(), True, "train_state.step: expected an integer >= 1"),
        (changed(), Path("code"), "train_state.step cannot be read: "),
    ],
)
def test_what_is_not_of_the_model_is_one_line(tmp_path: Path, tensors, step, problem: str, capsys):
    old = write_full(tmp_path / "step-3", tensors, step)
    config = tmp_path / "debug.toml"
    config.write_text("[model]\nn_layers = 1\n")
    assert run_command("convert", [str(old), str(config), str(tmp_path / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {old}: ")
    assert problem in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["debug.toml", "step-3"], "nothing is left behind"


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_files_of_other_folders_and_damaged_ones_are_rejected(tmp_path: Path):
    old = write_full(tmp_path / "step-3", weights())
    metadata = (old / ".metadata").read_bytes()
    (old / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(convert.ConfigError, match="rejected: it does not describe a checkpoint"):
        convert.convert(old, MODEL.model, tmp_path / "new")
    (old / ".metadata").write_bytes(metadata)
    (old / "__0_0.distcp").write_bytes((old / "__0_0.distcp").read_bytes()[:1000])
    with pytest.raises(convert.ConfigError, match="cannot be read"):
        convert.convert(old, MODEL.model, tmp_path / "new")


def by_getattr(*arguments: object) -> bytes:
    """Return the pickle of a call of getattr."""
    return pickle.dumps(type("Call", (), {"__reduce__": lambda self: (getattr, arguments)})())


def test_members_of_enums_are_read_as_python_3_11_0_writes_them():
    unpickled = convert._Unpickler(io.BytesIO(by_getattr(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))).load()
    assert unpickled is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for arguments in ((_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__"), ({}, "get")):
        with pytest.raises(pickle.UnpicklingError, match="is not what DCP writes there"):
            convert._Unpickler(io.BytesIO(by_getattr(*arguments))).load()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_other_models_than_llama_are_rejected(tmp_path: Path):
    old = write_full(tmp_path / "step-3", weights())
    with pytest.raises(convert.ConfigError, match="only a Llama is converted"):
        convert.convert(old, MODEL.replace(model__qk_norm=True).model, tmp_path / "new")
