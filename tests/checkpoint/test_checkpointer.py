"""What a checkpoint of one rank has of a model, its optimizer and a run, and that all of it comes back."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.build import optimizer_for
from titanlite.build_llama import build_llama
from titanlite.checkpoint import checkpointer
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.checkpoint.run import RunState, Trained
from titanlite.checkpoint.tensors import dequantized, model_tensors, optimizer_tensors
from titanlite.config.schema import Checkpoint, Comm, Model, Optimizer
from titanlite.launch.process import Signals

WEIGHT, STATE = "model.layer.weight", {"data": {"next_sequence": 0}, "skipped": 0}


def parts(state_dtype: str = "auto") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of one matrix, and its optimizer after a step."""
    model = nn.Module()
    model.tok_embeddings, model.layer = None, nn.Linear(64, 64, bias=False)
    optimizer = optimizer_for(model, Optimizer(state_dtype=state_dtype))
    model.layer.weight.grad = torch.randn(64, 64)
    optimizer.step()
    return model, optimizer


def open_checkpointer(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, Checkpoint(enable=True, **options), {"seed": 1}, Comm())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = {name: dequantized(state).clone() for name, state in optimizer_tensors(model, optimizer).items()}
    weights = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    return weights | states | {"random": torch.get_rng_state()}


def save_and_resume(folder: str, state_dtype: str) -> list[str]:
    """Return the names of what differs after a resume from what was saved."""
    torch.manual_seed(0)
    model, optimizer = parts(state_dtype)
    saving, saved = open_checkpointer(Path(folder)), everything(model, optimizer)
    saving.save(3, model, optimizer, STATE)
    saving.close()
    model, optimizer = parts(state_dtype)
    resuming, other = open_checkpointer(Path(folder)), everything(model, optimizer)
    assert [name for name in saved if torch.equal(saved[name], other[name]) and not name.endswith(".step")] == []
    assert resuming.resume(model, optimizer)["step"] == 3
    resumed = everything(model, optimizer)
    resuming.close()
    return [name for name in saved if not torch.equal(saved[name], resumed[name])]


def test_a_resume_restores_everything_bit_for_bit(ranks, tmp_path):
    for state_dtype in ("auto", "int8"):
        assert ranks(1).run(save_and_resume, folder=str(tmp_path / state_dtype), state_dtype=state_dtype) == [[]]


def smallest_square_after_a_change_of_type(folder: str) -> float:
    """Save states in float32 and resume with 8-bit ones; return the smallest exp_avg_sq."""
    model, optimizer = parts()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight]["exp_avg_sq"].fill_(1).view(-1)[::2] = 1e-8  # too small for the blocks' 8 bits
    saving = open_checkpointer(Path(folder))
    saving.save(3, model, optimizer, STATE)
    saving.close()
    model, optimizer = parts("int8")
    resuming = open_checkpointer(Path(folder))
    resuming.resume(model, optimizer)
    resuming.close()
    states = optimizer_tensors(model, optimizer)
    return min(dequantized(state).min().item() for name, state in states.items() if name.endswith("exp_avg_sq"))


def test_no_square_is_rounded_to_zero_when_it_is_loaded(ranks, tmp_path):
    """With an exp_avg_sq of 0, the next step would be exp_avg / eps."""
    assert ranks(1).run(smallest_square_after_a_change_of_type, folder=str(tmp_path))[0] > 0


def save_while_the_weights_change(folder: str) -> list[bool]:
    """Return whether each of two asynchronous saves has the weights of when it began."""
    model, optimizer = parts()
    saved, changed, write_file = [], threading.Event(), checkpointer.write_file

    def write_later(*arguments: Any) -> Any:
        assert changed.wait(30)
        return write_file(*arguments)

    saving = open_checkpointer(Path(folder), async_mode="async")
    with mock.patch.object(checkpointer, "write_file", write_later):
        for step in (1, 2):
            saved.append(model.layer.weight.detach().clone())
            saving.save(step, model, optimizer, STATE)
            with torch.no_grad():
                model.layer.weight.add_(1)
            changed.set()
            saving.finish()
            changed.clear()
        saving.close()
    steps = sorted((Path(folder) / "checkpoint").iterdir())
    return [torch.equal(CheckpointReader(step).read(WEIGHT), weight) for step, weight in zip(steps, saved, strict=True)]


def test_an_asynchronous_save_has_the_weights_of_its_step(ranks, tmp_path):
    assert ranks(1).run(save_while_the_weights_change, folder=str(tmp_path)) == [[True, True]]


def test_the_state_of_a_run_has_that_of_each_part():
    loader, guard, groups = (SimpleNamespace(state=lambda name=name: {name: 1}) for name in ("loader", "guard", "ft"))
    assert RunState(loader, guard, groups).save() == {"guard": 1, "data": {"loader": 1}, "ft": 1}


def test_a_step_is_saved_when_it_is_due_or_asked_for(tmp_path):
    with mock.patch.multiple(dist, get_rank=lambda: 0, new_group=mock.Mock()):
        trained = Trained(nn.Module(), mock.Mock(), 10, Signals())
        options = Checkpoint(enable=True, interval=4)
        checkpoints = Checkpointer(tmp_path, options, {}, Comm(), run=trained)
        checkpoints.save = mock.Mock()
        for step in range(1, 11):
            checkpoints.after_step(step, mock.Mock(spec=RunState), asked=step == 6, is_last=step == 10)
    assert [call.args[0] for call in checkpoints.save.call_args_list] == [4, 6, 8, 10]


def test_routers_are_saved_with_what_balances_their_experts():
    moe = {"n_experts": 4, "n_experts_per_token": 2, "balance_bias": True}
    section = Model.model_validate({"flavor": "debug", "n_layers": 1, "moe": moe})
    names = set(model_tensors(build_llama(section, max_seq_len=8)))
    assert {"model.layers.0.feed_forward.router.balance_bias", "model.layers.0.feed_forward.router.load"} <= names


def test_what_a_killed_run_has_not_finished_is_no_checkpoint(tmp_path):
    for name in ("step-2", "step-3.unconfirmed", "step-4.tmp", "step-1.diverged"):
        (tmp_path / name).mkdir()
    assert CheckpointFolder(tmp_path, keep_latest_k=0).to_resume() == ["step-2", "step-3.unconfirmed"]


def test_a_lower_number_to_keep_makes_space_before_the_next_save(tmp_path):
    """As after a full disk. Until then a start deletes nothing, and an unconfirmed checkpoint does not count."""
    for name in ("step-1", "step-2", "step-3", "step-4.unconfirmed"):
        (tmp_path / name).mkdir()
    folder = CheckpointFolder(tmp_path, keep_latest_k=1)
    folder.recover()
    assert folder.to_resume() == ["step-1", "step-2", "step-3", "step-4.unconfirmed"]
    folder.create(5)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4.unconfirmed", "step-5.tmp"}


@pytest.mark.parametrize("change", ["create", "publish", "confirm"])
def test_in_the_place_of_its_folder_nothing_of_others_is_changed(tmp_path, change):
    """While a run trains, its folder is moved, and a link to that of another run gets the name."""
    other, own = tmp_path / "other", tmp_path / "own"
    names = "step-1", "step-2", "step-3.unconfirmed", "step-4.tmp"
    for path in (other / name for name in names):
        path.mkdir(parents=True)
        (path / "file").write_text(path.name)
    folder = CheckpointFolder(own, keep_latest_k=1)
    own.mkdir()
    own.rename(tmp_path / "moved")
    own.symlink_to(other)
    with pytest.raises(OSError, match="leads to another folder since the run has begun"):
        getattr(folder, change)({"create": 4, "publish": 4, "confirm": 3}[change])
    folder.close()
    assert {path.name: (path / "file").read_text() for path in other.iterdir()} == dict(zip(names, names, strict=True))


@pytest.mark.parametrize("change", ["create", "publish", "confirm", "remove_unfinished"])
def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path, change):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    folder = CheckpointFolder(tmp_path / "own", keep_latest_k=1)
    folder.create(1).rmdir()
    for suffix in (".tmp", ".unconfirmed"):
        (tmp_path / "own" / f"step-1{suffix}").symlink_to(other)
    expected = pytest.raises(OSError, match="not a link") if change != "remove_unfinished" else contextlib.nullcontext()
    with expected:
        getattr(folder, change)(1)
    assert [path.name for path in other.iterdir()] == ["file"]


def test_deleting_the_oldest_checkpoints_deletes_a_link_and_not_what_it_leads_to(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    (tmp_path / "own" / "step-2").mkdir(parents=True)
    (tmp_path / "own" / "step-1").symlink_to(other)
    folder = CheckpointFolder(tmp_path / "own", keep_latest_k=1)
    folder.create(3)
    assert {path.name for path in folder.path.iterdir()} == {"step-2", "step-3.tmp"}
    assert [path.name for path in other.iterdir()] == ["file"]


def test_the_only_checkpoint_stays_until_the_next_one_is_complete(tmp_path):
    """A run that dies while it saves can resume from the one before, also with keep_latest_k = 1."""
    folder, seen = CheckpointFolder(tmp_path, keep_latest_k=1), []
    for step in (1, 2):
        for change in (folder.create, folder.publish, folder.confirm):
            change(step)
            seen.append(folder.to_resume())
    folder.close()
    assert seen == [[], ["step-1.unconfirmed"], ["step-1"], ["step-1"], ["step-1", "step-2.unconfirmed"], ["step-2"]]
