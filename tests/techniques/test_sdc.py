"""Silent data corruption: one flipped bit is found and its rank is named, and nothing else is."""

import os
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoint.test_faults_of_saves import names
from tests.helpers.cases import cases
from tests.test_train import computed, error_message, folder, run_train, runs  # noqa: F401
from titanlite.checkpoint.reader import plain_shard
from titanlite.techniques.sdc import CHUNK_ELEMENTS, hash_of_bits
from titanlite.train_step import TrainStep

CHECKED = ["--debug.sdc_check_freq=2", "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_and_position_counts(dtype: torch.dtype):
    values = torch.randn(7, 5).to(dtype)
    before = hash_of_bits(values)
    flat = values.view(-1).view(torch.uint8)
    hashes = set()
    for byte in range(len(flat)):
        for bit in (1, 128):
            flat[byte] ^= bit
            hashes.add(hash_of_bits(values).item())
            flat[byte] ^= bit
    assert len(hashes) == 2 * len(flat), "two flips have the same hash"
    assert before.item() not in hashes
    assert torch.equal(hash_of_bits(values), before)
    rows = torch.arange(1, 9).view(2, 4)
    assert hash_of_bits(rows) != hash_of_bits(rows.flip(0))


def test_chunks_are_hashed_as_one_tensor():
    values = torch.zeros(CHUNK_ELEMENTS + 3, dtype=torch.int16)
    for position in (0, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 2):
        values[position] = 1
        assert hash_of_bits(values) == 2 * position + 1
        values[position] = 0


def train_with_a_flip(argv: list[str], rank: int, calls: tuple[int, ...], what: str, name: str) -> str:
    """Train as run_train, where one rank flips the lowest bit of a weight or a gradient (the n-th that has it locally),
    or of its loss, during some forward and backward passes, counted from 1."""
    real, counted = TrainStep.forward_backward, iter(range(1, 1000))

    def forward_backward(self: TrainStep, *arguments: Any) -> Any:
        loss_sum, valid = real(self, *arguments)
        if int(os.environ["RANK"]) == rank and next(counted) in calls:
            parameter = dict(self.model.named_parameters())[name]
            flipped = {"weight": parameter, "gradient": parameter.grad, "loss": loss_sum}[what]
            plain_shard(flipped).view(-1)[:1].view(torch.uint8)[0] ^= 1
        return loss_sum, valid

    with mock.patch.object(TrainStep, "forward_backward", forward_backward):
        return run_train(argv)


NORM = "layers.1.attention_norm.weight"
REPLICATE, TENSOR = "--parallelism.data_parallel_replicate_degree", "--parallelism.tensor_parallel_degree"
TWICE, OTHER_BITS = "computed twice with different results", "with other bits than replicas"
FLIPS = {
    # Steps 1 and 2 are the passes 1, 2 and 3; steps 3 and 4 are 4, 5 and 6.
    "a weight, 2 replicas": (2, [f"{REPLICATE}=2"], (0, (4,), "weight"), f"{NORM} {OTHER_BITS}: rank 0, 1;"),
    "a weight, 4 replicas": (4, [f"{REPLICATE}=4"], (2, (4,), "weight"), f"{NORM} {OTHER_BITS}: rank 2;"),
    "a norm, tp": (2, [f"{TENSOR}=2"], (1, (4,), "weight"), f"{NORM} {OTHER_BITS}: rank 0, 1;"),
    "a gradient": (2, [], (1, (5,), "gradient"), f"the gradient of {NORM} {TWICE} (or got it from a rank "),
    "the second gradient": (2, [], (0, (6,), "gradient"), f"{NORM} {TWICE} (or got it from a rank that did): rank 0;"),
    "the loss": (4, [f"{REPLICATE}=2", f"{TENSOR}=2"], (2, (6,), "loss"), f"the loss {TWICE}: rank 2;"),
}


@cases("flip", FLIPS, always=["a gradient", "a weight, 4 replicas"])
def test_one_flipped_bit_is_named(runs, folder, flip):  # noqa: F811
    """The check of step 2 agrees, so the checkpoint of step 1 is good; that of step 4 does not."""
    world_size, arguments, (rank, calls, what), words = FLIPS[flip]
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *CHECKED, *arguments]
    flipped = {"rank": rank, "calls": calls, "what": what, "name": NORM}
    (message,) = set(runs.ranks(world_size).run(train_with_a_flip, argv=argv, **flipped))
    assert message.startswith("step 4: silent data corruption: ")
    assert words in message
    assert "; step-3 is now step-3.suspect: it was saved after the last comparison of replicas that agreed; " in message
    assert message.endswith("the newest good checkpoint is step-1, and the next start resumes from step-1")
    assert names(folder) == {"step-1", "step-3.suspect"}


LAYOUTS = {
    "fsdp": (2, []),
    "hsdp": (4, [f"{REPLICATE}=2"]),
    "tp": (4, [f"{TENSOR}=2", "--training.document_mask"]),
    "cp": (4, ["--parallelism.context_parallel_degree=4", "--parallelism.context_parallel_ulysses_degree=2"]),
    "pp": (4, ["--parallelism.pipeline_parallel_degree=2", f"{REPLICATE}=2", "--optimizer.state_dtype=bfloat16"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_raises_a_false_alarm_or_trains_otherwise(runs, folder, layout):  # noqa: F811
    world_size, arguments = LAYOUTS[layout]
    assert error_message(runs, world_size, "run", *CHECKED, *arguments, "--training.steps=5") == ""
    assert names(folder) == {"step-5"}, "the last save is good after a check of its own"
    if layout == "hsdp":
        unchecked = runs(world_size, "unchecked", *arguments, "--training.steps=5")
        assert computed(runs(world_size, "run2", *CHECKED, *arguments, "--training.steps=5")) == computed(unchecked)
