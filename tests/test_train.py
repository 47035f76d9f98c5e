"""Whole runs: what they write, how they stop, and how they go on."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import train
from titanlite import build, config, metrics
from titanlite.build import meta_model
from titanlite.config import Config
from titanlite.optimizer import LossScale, init_optimizer
from titanlite.parity.training_run import TrainingRun
from titanlite.train_step import TrainStep

ROOT = Path(__file__).parents[1]
SMALL = """
[job]
dump_folder = "{folder}/run"

[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48

[training]
cache_folder = "{folder}/cache"
seq_len = 64
local_batch_size = 2
global_batch_size = 8
steps = 6

[optimizer]
lr = 1e-2

[lr_scheduler]
warmup_steps = 2
total_steps = 12

[metrics]
log_freq = 1

[checkpoint]
interval = 3
"""
TAGS = {
    "loss_metrics/global_avg_loss",
    "loss_metrics/global_max_loss",
    "grad_norm",
    "lr",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(%)",
    "memory/max_active(GiB)",
    "memory/max_reserved(GiB)",
    "n_tokens_seen",
}
COMPUTED = ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen")
"""What depends on the numbers alone and not on the clock."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    return tmp_path


class Runs:
    """Runs of the small config, in the ranks of a pool."""

    def __init__(self, ranks: Any, folder: Path):
        self.ranks, self.folder = ranks, folder

    def __call__(self, world_size: int, run: str, *arguments: str, **case: Any) -> list[dict[str, Any]]:
        """Train into a folder, and return the rows of its metrics.jsonl."""
        self.ranks(world_size).run(
            run_train,
            argv=[str(self.folder / "small.toml"), f"--job.dump_folder={self.folder / run}", *arguments],
            **case,
        )
        return rows(self.folder / run)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def computed(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], *(row.get(tag) for tag in (*COMPUTED, "validation_metrics/global_avg_loss"))) for row in rows]


@pytest.fixture
def runs(ranks: Any, folder: Path) -> Runs:
    return Runs(ranks, folder)


Steps = tuple[tuple[int, int], ...]
"""(rank, step)"""


def run_train(argv: list[str], stop_after: int = 10**9, not_finite: Steps = (), overflow: Steps = ()) -> str:
    """On every rank: train, and return what a user would be told if it is refused or stopped.

    Args:
        stop_after: rank 0 is asked to stop during this step.
        not_finite: whose loss is to be infinite.
        overflow: whose gradients are to be infinite, and the loss not.
    """
    launch = config.Launch.from_environment(n_devices=0)
    job = config.check(config.load(argv), launch)
    real, calls = TrainStep.forward_backward, itertools.count(1)

    def forward_backward(*arguments: Any, **others: Any) -> Any:
        loss_sum, valid = real(*arguments, **others)
        step = launch.rank, next(calls)
        if step in overflow:
            next(arguments[0].model.parameters()).grad.to_local().fill_(math.inf)
        return loss_sum * (math.inf if step in not_finite else 1), valid

    asked = itertools.count(1)
    try:
        with mock.patch.object(TrainStep, "forward_backward", forward_backward):
            train.train(job, launch, lambda: launch.rank == 0 and next(asked) >= stop_after)
    except (config.ConfigError, train.TrainingError) as error:
        return str(error)
    return ""


def refusal(runs: Runs, world_size: int, run: str, *arguments: str, **case: Any) -> str:
    """The one message that every rank ends with."""
    argv = [str(runs.folder / "small.toml"), f"--job.dump_folder={runs.folder / run}", *arguments]
    (message,) = set(runs.ranks(world_size).run(run_train, argv=argv, **case))
    return message


# What a run leaves --------------------------------------------------------------------------------------------------


def test_files_of_a_run(runs, folder):
    found = runs(1, "run", "--validation.enable", "--validation.freq=2", "--validation.fraction=0.1")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    validated = {"validation_metrics/global_avg_loss"}
    assert [set(row) - {"step"} for row in found] == [TAGS, TAGS | validated] * 3
    assert found[-1]["loss_metrics/global_avg_loss"] < found[0]["loss_metrics/global_avg_loss"] - 0.5
    assert abs(found[0]["loss_metrics/global_avg_loss"] - math.log(272)) < 0.1, "nothing is known at first"
    assert all(row["n_tokens_seen"] == row["step"] * 8 * 64 for row in found)
    assert all(row["memory/max_active(GiB)"] > 0.05 and row["mfu(%)"] > 0 for row in found)
    assert all(row["loss_metrics/global_max_loss"] == row["loss_metrics/global_avg_loss"] for row in found)

    resolved = config.load([str(folder / "run" / "config.toml")]).config
    assert resolved.parallelism.data_parallel_shard_degree == 1
    assert resolved.training.mixed_precision_param == "float32"
    assert f"torch {torch.__version__}" in (folder / "run" / "config.toml").read_text()


def test_tensorboard_has_the_same_values(runs, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = runs(1, "run")
    events = EventAccumulator(str(folder / "run" / "tb")).Reload()
    assert set(events.Tags()["scalars"]) == TAGS
    for tag in COMPUTED:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [(row["step"], pytest.approx(row[tag], rel=1e-6)) for row in found]  # float32 there
    (text,) = events.Tensors("config/text_summary")
    assert b"global_batch_size = 8" in text.tensor_proto.string_val[0]


def test_float16_scales_the_loss(runs, folder):
    """From a scale at which gradients overflow, it is halved until they do not; a checkpoint remembers it."""
    half = [
        "--training.mixed_precision_param=float16",
        "--checkpoint.enable",
        "--training.loss_scale_growth_interval=2",
    ]
    half += ["--lr_scheduler.total_steps=12", f"--training.initial_loss_scale={2**21}"]
    found = runs(2, "run", *half)
    state = json.loads((folder / "run" / "checkpoint" / "step-6" / "state.json").read_text())
    good = [row for row in found if row["grad_norm"] is not None]
    assert len(good) < len(found), "none has overflowed"
    assert state["skipped"] == 0, "an overflow is not a step that went wrong"
    assert len(good) > 2
    assert good[-1]["loss_metrics/global_avg_loss"] < found[0]["loss_metrics/global_avg_loss"] - 0.05
    plain = runs(2, "plain", "--lr_scheduler.total_steps=12", "--training.steps=1")
    assert good[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.02), "of the true gradients"
    whole = runs(2, "whole", *half, "--training.steps=8")
    parts = runs(2, "run", *half, "--training.steps=8")
    assert computed(whole)[6:] == computed(parts)[6:]


def test_one_ranks_overflow_skips_the_step_on_all(runs, folder):
    half = ["--training.mixed_precision_param=float16", "--checkpoint.enable"]
    found = runs(2, "run", *half, overflow=((1, 3),))
    assert [row["step"] for row in found if row["grad_norm"] is None] == [3]
    state = json.loads((folder / "run" / "checkpoint" / "step-6" / "state.json").read_text())
    assert (state["loss_scale"], state["skipped"]) == ([2**15, 3], 0)
    assert "the gradient norm is inf" in refusal(runs, 2, "float32", overflow=((1, 3),))


def test_loss_scale():
    scale = LossScale(8.0, growth_interval=2)
    values = []
    for overflowed in (True, False, True, False, False, False, False, False):
        scale.update(overflowed=overflowed)
        values.append(scale.value)
    assert values == [4, 4, 2, 2, 4, 4, 8, 8]
    other = LossScale(1.0, growth_interval=2)
    other.load(json.loads(json.dumps(scale.state())))
    other.update(overflowed=False)
    assert other.value == 16
    fixed = LossScale()
    fixed.load([8.0, 0])
    fixed.update(overflowed=True)
    assert fixed.value == 1


@pytest.mark.parametrize("stochastic", [True, False])
def test_stochastic_rounding_keeps_small_updates(stochastic):
    """Of 1 in bfloat16 an update of 1e-3 is a quarter of the last digit: to the nearest it is lost each time; by chance
    the mean of many weights moves as it should, to 3 deviations of its own."""
    steps, lr, digit = 10, 1e-3, 2**-8
    model = meta_model(Config()).to(torch.bfloat16).to_empty(device="cpu")
    weight = model.layers["0"].feed_forward.w1.weight
    with torch.no_grad():
        weight.fill_(1)
    options = Config().optimizer.model_dump() | {"lr": lr, "weight_decay": 0.0, "stochastic_rounding": stochastic}
    optimizer = init_optimizer(model, **options)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1 - weight.double().mean().item()
    allowed = 3 * digit * math.sqrt(steps) / math.sqrt(weight.numel())
    assert moved == (pytest.approx(steps * lr, abs=allowed) if stochastic else 0)


@pytest.mark.parametrize("options", [["state_dtype=int8"], ["state_dtype=bfloat16"]], ids=str)
def test_low_bit_moments_train(runs, options):
    wide = ["--model.dim=128", "--model.ffn_dim=256", "--optimizer.lr=2e-3"]
    found = runs(2, "run", *wide, *(f"--optimizer.{option}" for option in options))
    plain = runs(2, "plain", *wide)
    losses, expected = ([row["loss_metrics/global_avg_loss"] for row in rows] for rows in (found, plain))
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses != expected


PRECISIONS = {
    "float32": ("float32, compute float32, gradients float32, reduced in float32, moments float32: 16 bytes", []),
    "bfloat16 compute": (
        "float32, compute bfloat16, gradients float32, reduced in float32, moments float32: 16 bytes",
        ["training.mixed_precision_param=bfloat16"],
    ),
    "bfloat16": (
        "bfloat16 (rounded by chance), compute bfloat16, gradients bfloat16, reduced in float32, "
        "moments bfloat16: 8 bytes",
        ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
    ),
    "bfloat16, float32 moments": (
        "bfloat16 (rounded by chance), compute bfloat16, gradients bfloat16, reduced in float32, "
        "moments float32: 12 bytes",
        ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true", "optimizer.state_dtype=float32"],
    ),
    "bfloat16 moments": (
        "float32, compute float32, gradients float32, reduced in float32, moments bfloat16: 12 bytes",
        ["optimizer.state_dtype=bfloat16"],
    ),
    "int8": (
        "float32, compute float32, gradients float32, reduced in float32, moments int8: 10.03 bytes",
        ["optimizer.state_dtype=int8"],
    ),
}


def kept(argv: list[str]) -> tuple[str, float]:
    """What a run's first lines say of its precision; and bytes a parameter of the blocks' matrices as they are."""
    launch = config.Launch.from_environment(n_devices=0)
    job, device = config.check(config.load(argv), launch), torch.device("cpu")
    run = TrainingRun(job, device)
    run.train_step.forward_backward(run.loader.next())
    run.optimizer.step()
    run.loader.close()
    size, elements = 0, 0
    for name, weight in run.model.named_parameters():
        if "feed_forward" in name:
            moments = [run.optimizer.state[weight][moment].to_local() for moment in ("exp_avg", "exp_avg_sq")]
            held = [weight.to_local(), weight.grad.to_local()]
            held += [part for m in moments for part in ([m.codes, m.scale] if hasattr(m, "codes") else [m])]
            size += sum(part.numel() * part.itemsize for part in held)
            elements += weight.to_local().numel()
    return build.describe_precision(job), size / elements


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_first_lines_say_what_is_kept(ranks, folder, name):
    says, options = PRECISIONS[name]
    wide = ["--model.dim=128", "--model.ffn_dim=256", *(f"--{option}" for option in options)]
    for text, size in ranks(2).run(kept, argv=[str(folder / "small.toml"), *wide]):
        assert text == f"weights {says} a parameter"
        assert float(says.split(": ")[1].split()[0]) == pytest.approx(size, abs=0.01)


def test_a_peak_measured_in_a_slow_moment_is_measured_again():
    peak = metrics.PeakFlops(torch.device("cpu"), torch.float32)
    true, peak.flops = peak.flops, peak.flops / 100
    assert 0.02 < peak.share(true / 2) < 5, "half of the true rate is not 50 times the peak"
    peak.flops = 100 * true
    assert peak.share(true) == pytest.approx(0.01, rel=1e-12), "far below the peak, nothing is measured"


def test_largest_loss_is_the_worst_ranks(runs):
    found = runs(2, "run", "--metrics.enable_tensorboard=false")
    assert all(row["loss_metrics/global_max_loss"] > row["loss_metrics/global_avg_loss"] for row in found)


def test_log_freq(runs):
    found = runs(1, "run", "--metrics.log_freq=4")
    assert [row["step"] for row in found] == [1, 4, 6]


def test_a_new_run_moves_the_old_one_aside(runs, folder):
    first = runs(1, "run", "--training.steps=2")
    second = runs(1, "run", "--training.steps=3")
    assert len(second) == 3
    (previous,) = (folder / "run" / "previous").iterdir()
    assert rows(previous) == first
    assert {path.name for path in previous.iterdir()} == {"metrics.jsonl", "config.toml", "tb"}


def test_profile_traces(runs, folder):
    runs(2, "run", "--profiling.enable_profiling", "--profiling.profile_freq=4")
    traces = sorted(path.relative_to(folder / "run") for path in (folder / "run").rglob("*.json"))
    assert traces == [Path(f"profile_traces/step_4/rank{rank}.json") for rank in (0, 1)]
    events = json.loads((folder / "run" / traces[0]).read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)


def test_validation_does_not_change_the_training(runs):
    without = runs(2, "without")
    same = runs(2, "with", "--validation.enable", "--validation.freq=1")
    assert [row[tag] for row in without for tag in COMPUTED] == [row[tag] for row in same for tag in COMPUTED]


@pytest.mark.parametrize("layout", ["always", "never"])
def test_validation_loss_is_the_same_for_any_ranks(runs, layout):
    arguments = ["--validation.enable", "--validation.freq=3", "--training.dtype=float64"]
    arguments += [f"--parallelism.fsdp_reshard_after_forward={layout}"]
    one, two, four = (runs(n, f"ranks{n}", *arguments) for n in (1, 2, 4))
    for a, b, c in zip(computed(one), computed(two), computed(four), strict=True):
        for value in (b, c):
            assert [value[i] for i in (1, 3, -1)] == [a[i] and pytest.approx(a[i], rel=1e-11) for i in (1, 3, -1)]


# Stopping and going on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_gives_bit_for_bit_the_same(runs, folder, world_size, mode):
    arguments = ["--checkpoint.enable", f"--checkpoint.async_mode={mode}", "--validation.enable", "--validation.freq=2"]
    whole = runs(world_size, "whole", *arguments)
    runs(world_size, "parts", *arguments, "--training.steps=2")
    parts = runs(world_size, "parts", *arguments)
    assert computed(parts) == computed([whole[0], whole[1], *whole[2:]])
    assert len(parts) == 6
    assert sorted(path.name for path in (folder / "parts" / "checkpoint").iterdir()) == ["step-2", "step-3", "step-6"]


def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(runs, folder):
    """Steps 4 and 5 were reported but not saved: they are taken again, and reported once."""
    whole = runs(1, "whole", "--checkpoint.enable")
    cut = folder / "cut"
    runs(1, "cut", "--checkpoint.enable", "--training.steps=5")
    for path in (cut / "checkpoint" / "step-5").iterdir():
        path.unlink()
    (cut / "checkpoint" / "step-5").rename(cut / "checkpoint" / "step-5.tmp")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss')
    assert computed(runs(1, "cut", "--checkpoint.enable")) == computed(whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_a_run_goes_on_at_another_number_of_ranks(runs, before, after):
    arguments = ["--checkpoint.enable", "--training.dtype=float64"]
    whole = runs(1, "whole", *arguments)
    runs(before, "parts", *arguments, "--training.steps=3")
    parts = runs(after, "parts", *arguments)
    for ours, reference in zip(parts, whole, strict=True):
        for tag in ("loss_metrics/global_avg_loss", "grad_norm"):
            assert ours[tag] == pytest.approx(reference[tag], rel=1e-11)


def test_the_resume_tests_can_fail(runs, folder):
    """A data position that is off by one sequence shows in the losses."""
    whole = runs(1, "whole", "--checkpoint.enable")
    runs(1, "parts", "--checkpoint.enable", "--training.steps=3")
    file = folder / "parts" / "checkpoint" / "step-3" / "state.json"
    state = json.loads(file.read_text())
    state["data"]["next_sequence"] += 1
    file.write_text(json.dumps(state))
    parts = computed(runs(1, "parts", "--checkpoint.enable"))
    assert parts[:3] == computed(whole)[:3]
    assert parts[3] != computed(whole)[3]


def test_an_optimizer_state_that_is_lost_shows(runs, folder):
    whole = runs(1, "whole", "--checkpoint.enable")
    runs(1, "parts", "--checkpoint.enable", "--training.steps=3")
    start = folder / "parts" / "checkpoint" / "step-3"
    fresh = runs(1, "fresh", f"--checkpoint.initial_load_path={start}")
    assert fresh[0]["loss_metrics/global_avg_loss"] < whole[0]["loss_metrics/global_avg_loss"] - 0.3, "weights came"
    assert fresh[1]["grad_norm"] != whole[4]["grad_norm"]


def test_saved_scalars_are_json_and_tensors_are_dcps(runs, folder):
    runs(2, "run", "--checkpoint.enable")
    step = folder / "run" / "checkpoint" / "step-6"
    assert {path.name for path in step.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}
    state = json.loads((step / "state.json").read_text())
    assert (state["step"], state["skipped"], state["data"]) == (6, 0, {"next_sequence": 48, "streams": {}})

    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()), "a pickled object"
    assert {name.split(".")[0] for name in entries} == {"model", "optimizer", "random"}


def test_keep_latest_k(runs, folder):
    runs(1, "run", "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    assert sorted(path.name for path in (folder / "run" / "checkpoint").iterdir()) == ["step-5", "step-6"]


def test_asked_to_stop_all_ranks_end_after_the_same_step_and_save(runs, folder):
    whole = runs(2, "whole", "--checkpoint.enable")
    stopped = runs(2, "parts", "--checkpoint.enable", "--metrics.log_freq=100", stop_after=2)
    assert [row["step"] for row in stopped] == [1, 2]
    assert sorted(path.name for path in (folder / "parts" / "checkpoint").iterdir()) == ["step-2"]
    assert computed(runs(2, "parts", "--checkpoint.enable")) == computed(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--debug.seed=7"], "saved with seed = 42, and this run has 7"),
        (["--model.n_layers=3"], "saved with n_layers = 2, and this run has 3"),
        (["--training.seq_len=32"], "saved with data = "),
        (["--checkpoint.load_step=2"], "checkpoint.load_step = 2: expected the newest step in "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_go_on_is_refused(runs, arguments, message):
    runs(2, "run", "--checkpoint.enable", "--training.steps=3")
    assert message in refusal(runs, 2, "run", "--checkpoint.enable", *arguments)


# Numbers that are not finite ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_every_rank(runs, folder):
    message = refusal(runs, 2, "run", not_finite=((1, 3),))
    assert message == "step 3: the loss is inf because of rank 1 (training.nonfinite_steps_allowed = 0, all used)"
    assert [row["step"] for row in rows(folder / "run")] == [1, 2]


def test_allowed_steps_are_skipped_without_an_update(runs, folder):
    allowed = ["--training.nonfinite_steps_allowed=1", "--checkpoint.enable", "--checkpoint.interval=1"]
    whole = runs(2, "whole")
    skipped = runs(2, "run", *allowed, "--training.steps=4", not_finite=((1, 3),))
    assert skipped[2]["loss_metrics/global_avg_loss"] is None
    assert computed(skipped[:2]) == computed(whole[:2])
    weights = []
    for step in (2, 3, 4):
        dcp_to_torch_save(folder / "run" / "checkpoint" / f"step-{step}", folder / "whole.pt")
        weights.append(torch.load(folder / "whole.pt", weights_only=True)["model.layers.0.attention.wq.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    again = refusal(runs, 2, "run", *allowed, not_finite=((0, 1),))  # its first step is the fifth
    assert again == "step 5: the loss is inf because of rank 0 (training.nonfinite_steps_allowed = 1, all used)"


def test_a_gradient_that_is_not_finite_names_the_step(runs):
    """The learning rate is so large that weights overflow: the forward is not finite on any rank."""
    message = refusal(runs, 2, "run", "--optimizer.lr=1e38", "--optimizer.weight_decay=0")
    assert message.startswith("step 2: the loss is nan because of rank 0, 1 (")


# Programs -----------------------------------------------------------------------------------------------------------


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_one_rank_and_no_needless_imports(folder):
    """train.py alone is one rank; what a run does not use is not imported."""
    script = folder / "spy.py"
    script.write_text(
        "import sys, train\n"
        "leave = train.mesh.leave\n"
        "heavy = ('torchao', 'transformers', 'matplotlib', 'datasets', 'tokenizers', 'pandas')\n"
        "def spy(status):\n"
        "    print('imported', [name for name in heavy if name in sys.modules])\n"
        "    leave(status)\n"
        "train.mesh.leave = spy\n"
        "train.main(sys.argv[1:])\n"
    )
    status, out, error = finish(
        start(sys.executable, str(script), str(folder / "small.toml"), "--training.steps=2", PYTHONPATH=str(ROOT))
    )
    assert (status, error) == (0, "")
    assert "step 2/2  loss" in out
    assert out.endswith("imported []\n")


def test_torchrun(folder):
    status, out, _ = finish(
        start(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"),
            *(str(folder / "small.toml"), "--training.steps=2"),
        )
    )
    assert status == 0
    assert out.count("step 2/2  loss") == 1, "one rank speaks"
    assert "dp_shard 2" in out


def test_run_train_starts_the_ranks_and_ends_on_sigterm(folder):
    arguments = ["--parallelism.data_parallel_shard_degree=2", "--checkpoint.enable", "--training.steps=100000"]
    process = start("./run_train.sh", str(folder / "small.toml"), *arguments, "--lr_scheduler.total_steps=-1")
    for line in process.stdout:
        if "step      4/" in line:
            process.send_signal(signal.SIGTERM)
            break
    status, out, error = finish(process)
    assert status == 0, error
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("[rank0]:asked to stop: ended after step ")
    newest = folder / "run" / "checkpoint" / f"step-{last.split()[-1]}"
    assert json.loads((newest / "state.json").read_text())["step"] == rows(folder / "run")[-1]["step"]


def test_sigterm_to_one_rank_alone(folder):
    process = start(sys.executable, "train.py", str(folder / "small.toml"), "--checkpoint.enable")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 0
    assert "asked to stop: ended after step 1" in out
    assert [path.name for path in (folder / "run" / "checkpoint").iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    "command", [[sys.executable, "train.py"], ["./run_train.sh"]], ids=["train.py", "run_train.sh"]
)
def test_a_wrong_config_is_one_line_and_status_2(folder, command):
    status, out, error = finish(start(*command, str(folder / "small.toml"), "--training.stepss=3"))
    line = "error: command line: training.stepss = 3: unknown key; did you mean training.steps?\n"
    assert (status, out, error) == (2, "", line)


def test_data_that_cannot_be_had_is_one_line_and_status_2(folder):
    arguments = ["--training.dataset=text", "--training.dataset_path=/nowhere/*.txt"]
    status, _, error = finish(start(sys.executable, "train.py", str(folder / "small.toml"), *arguments))
    line = 'error: training.dataset_path = "/nowhere/*.txt": no such file or folder\n'
    assert (status, error) == (2, line)


def test_a_failure_is_status_1(folder):
    arguments = ["--optimizer.lr=1e38", "--training.steps=4"]
    status, _, error = finish(start(sys.executable, "train.py", str(folder / "small.toml"), *arguments))
    assert status == 1
    assert error.startswith("error: step 2: the loss is nan because of rank 0")
    assert error.count("\n") == 1
