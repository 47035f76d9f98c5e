"""Counters that no test can count up to: the last steps that a config allows, billions of sequences, 2^53 tokens."""

import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.helpers.checkpoint import change_state
from tests.helpers.data import built_in_texts
from tests.test_train import COMPUTED, LOSS, Runs, folder, read_metrics, runs  # noqa: F401
from titanlite import build, config
from titanlite.checkpoint.folder import complete_steps
from titanlite.config.schema import Optimizer
from titanlite.config.types import MOST_ITEMS, MOST_TOKENS
from titanlite.data.shuffle import permuted
from titanlite.optimizer import build_adam

SEQ_LEN, BATCH = 64, 8
"""Of tests.test_train.SMALL: tokens of a sequence, and sequences of a step."""
OPTIONS = [
    "--training.shuffle=false",
    "--checkpoint.enable=true",
    "--lr_scheduler.decay_ratio=0",
    f"--lr_scheduler.total_steps={MOST_ITEMS}",
    "--training.skip_outlier_sigma=6",
    "--training.outlier_window=4",
]
STREAMING = ["--training.streaming=true", "--training.streaming_shards=2", "--training.dataset=text"]


def sequences_of_an_epoch(argv: list[str]) -> int:
    job = config.check(config.load(argv), config.Launch.from_environment(n_devices=0))
    return build.build_data(job, builds_cache=True).train.n_sequences


def shown_in_tensorboard(run: Path) -> dict[int, dict[str, float]]:
    """Return the values of each step by tag."""
    values: dict[int, dict[str, float]] = {}
    for path in sorted((run / "tb").glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            scalars = {each.tag: each.tensor.float_val[0] for each in event.summary.value if each.tensor.float_val}
            if scalars:
                values[event.step] = scalars
    return values


def moved(run: Path, old: int, new: int, position: int) -> None:
    """Make the checkpoint of a step one of another step, at another position in the data."""
    path, moved_data = (
        run / "checkpoint" / f"step-{old}",
        {"next_sequence": position, "counts": [position * SEQ_LEN, 0, 0, 0]},
    )
    change_state(path, lambda state: state.update(step=new, data=state["data"] | moved_data))
    path.rename(path.with_name(f"step-{new}"))


@pytest.mark.parametrize("streaming", [False, True], ids=["token cache", "streaming"])
def test_the_last_steps_that_a_config_allows(runs, folder, streaming):  # noqa: F811
    (folder / "texts.txt").write_text("\n\n".join(built_in_texts()[:40]))
    of_file = [f"--training.dataset_path={folder / 'texts.txt'}", "--training.text_sample_by=line"]
    options = [*OPTIONS, *(STREAMING + of_file) * streaming]
    early = runs(1, "early", *options)  # six steps, saved after three and six
    period = 2  # two streaming shards know their own places
    if not streaming:
        (period,) = runs.ranks(1).run(sequences_of_an_epoch, argv=[str(folder / "small.toml")])
    position = 3 * BATCH + (MOST_TOKENS // SEQ_LEN // period + 1) * period  # the sequences of step 4, far later
    (folder / "late" / "checkpoint").mkdir(parents=True)
    (folder / "early" / "checkpoint" / "step-3").rename(folder / "late" / "checkpoint" / "step-3")
    shutil.copytree(folder / "late" / "checkpoint" / "step-3", folder / "late" / "checkpoint" / "step-9")
    moved(folder / "late", 3, MOST_ITEMS - 3, position)
    change_state(folder / "late" / "checkpoint" / "step-9", lambda state: state.update(step=9))
    late = runs(1, "late", *options, f"--training.steps={MOST_ITEMS}")

    steps = [MOST_ITEMS - 2, MOST_ITEMS - 1, MOST_ITEMS]
    tokens = [(position + BATCH * n) * SEQ_LEN for n in (1, 2, 3)]
    assert max(tokens) > MOST_TOKENS
    assert [row["step"] for row in late] == steps
    assert [row["n_tokens_seen"] for row in late] == tokens
    for tag in {*COMPUTED} - {"n_tokens_seen"}:
        assert [row[tag] for row in late] == [row[tag] for row in early[3:]], tag
    shown = shown_in_tensorboard(folder / "late")
    assert list(shown) == steps
    for tag in COMPUTED:  # TensorBoard has float32
        expected = pytest.approx([row[tag] for row in late], rel=2**-24)
        assert [values[tag] for values in shown.values()] == expected, tag
    assert complete_steps(folder / "late" / "checkpoint") == [9, MOST_ITEMS - 3, MOST_ITEMS - 1, MOST_ITEMS]


def test_every_sequence_comes_once_in_a_far_epoch():
    n, epoch = 1000, MOST_TOKENS // 1000
    order = [permuted(index, n, 42, epoch) for index in range(n)]
    assert sorted(order) == list(range(n))
    for other in (epoch + 1, epoch % 2**32):
        assert order != [permuted(index, n, 42, other) for index in range(n)]


def test_adam_goes_on_where_its_counter_ends():
    """torch counts Adam's steps in float32, which 2^24 is the last of; by then the bias corrections are 1."""
    updated = []
    for count in (2**24 - 2**20, 2**24):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = build_adam([{"params": [weight]}], Optimizer(), "AdamW")
        state = {"step": torch.tensor(float(count)), "exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 0.1)}
        optimizer.state[weight] = state
        for _ in range(2):
            weight.grad = torch.arange(4.0)
            optimizer.step()
        updated.append((weight.detach().clone(), state["step"].item()))
    assert torch.equal(updated[0][0], updated[1][0])
    assert not torch.equal(updated[0][0], torch.ones(4))
    assert updated[1][1] == 2**24, "it no longer counts"
