"""What training asks of a GPU, counted on the null CUDA (build.py): waits of the host, kernels, communicators, memory.

    pip install torch==2.11.0              the build with CUDA, as PyPI has it
    pytest -m nightly tests/null_cuda

Nothing here is measured on a GPU.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.null_cuda import build
from tests.null_cuda.cases import case, layouts

ROOT = Path(__file__).parents[2]
H200_MIB, H100_MIB = 143_771, 81_559
LAYOUTS = layouts()

pytestmark = [
    pytest.mark.skipif(bool(build.why_not()), reason=build.why_not()),
    pytest.mark.timeout(900),
]


class Server:
    """Runs cases one after the other on the pools of server.py."""

    def __init__(self, folder: Path, **variables: str):
        self.errors = (folder / "errors.txt").open("w")
        environment = build.variables(folder / "libraries") | {"NULL_CUDA_DEVICES": "8"} | variables
        command = [sys.executable, "-m", "tests.null_cuda.server"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)

    def run(self, case: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Return what each rank was asked: in building the run, and in each step. Skip a test whose config this
        version of torch or this device does not have."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]
        if "unsupported" in answer:
            pytest.skip(answer["unsupported"])
        assert "error" not in answer, answer["error"]
        return answer["ranks"]

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("null_cuda"))
    yield server
    server.close()


# Every option and axis ------------------------------------------------------------------------------------------------

EXPERTS_READ = "titanlite/techniques/moe/counts.py read"
CLIP = ("titanlite/optimizer.py gradient_norm", "titanlite/optimizer.py clipped_step")


def allowed_waits(options: dict[str, Any]) -> dict[str, set[str]]:
    """Return the lines that may make the host wait between the first forward and the last update of a step, each with
    the reason."""
    lines: dict[str, set[str]] = {}
    if options.get("expert_parallel_degree", 1) > 1 or "experts of any sides" in options:
        lines["the host gives what experts get its size"] = {EXPERTS_READ}
    if options.get("training__enable_cpu_offload"):
        lines["gradients are copied to the host, whose optimizer updates the weights"] = {"?", *CLIP}
        lines["gradients are copied to the host, whose optimizer updates the weights"] |= {
            "titanlite/parallel/pipeline.py forward_backward"
        }
    if options.get("optimizer__enable_cpu_offload"):
        lines["the host updates weights that are copied from and to the device meanwhile"] = {
            f"titanlite/techniques/offloaded_adam.py {name}"
            for name in ("wait_until_copied", "wait_until_free", "<dictcomp>")  # the last reads the clip factor
        }
    return lines


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step(server: Server, name: str):
    """Three steps: after the second, nothing is compiled anew and no communicator is made. In none does the host wait
    for the device, but for the reasons of `allowed_waits`."""
    options = LAYOUTS[name]
    allowed = set().union(*allowed_waits(options).values())
    for _, first, second, third in server.run(case(options)):
        for step in (second, third):
            assert step["communicators"] == []
            assert step["graphs"] == first["graphs"]
            lines = {wait.partition(": ")[2] for wait in step["waits"]}
            assert lines <= allowed
        if not options.get("training__document_mask"):  # the tiles of a ring are those of the documents
            assert third["launches"] == second["launches"]


# Memory that several streams use --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose devices are never done, so that only the order of streams lets memory be used again."""
    server = Server(tmp_path_factory.mktemp("busy"), NULL_CUDA_IS_BUSY="1")
    yield server
    server.close()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "compiled" not in name])
def test_streams_are_ordered(busy_server: Server, name: str):
    """What a stream reads is what was written for it, and nobody overwrites it meanwhile. (Compiled blocks launch
    their kernels without operators that could be seen.)"""
    assert [races for races in busy_server.run(case(LAYOUTS[name], steps=4) | {"bug": ""}) if races] == []


@pytest.mark.parametrize(
    ("name", "bug", "operators"),
    [
        ("experts, shard, ep", "forget the stream", ["aten::add_", "fsdp::chunk_cat"]),
        ("cp 2", "do not wait for the ring", ["ncclRecv", "aten::_scaled_dot_product_flash_attention"]),
        ("optimizer offload, pp", "update before the copy", ["aten::copy_", "aten::_fused_adamw_"]),
    ],
)
def test_streams_without_order_are_found(busy_server: Server, name: str, bug: str, operators: list[str]):
    for races in busy_server.run(case(LAYOUTS[name], steps=4) | {"bug": bug}):
        assert operators in [race[:2] for race in races]


# The whole program ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def train(libraries: Path, folder: Path, *arguments: str, ranks: int = 1) -> list[list[dict[str, Any]]]:
    """Run `titanlite train` on ranks, and return what each step but the last asked of each rank's device."""
    variables = build.variables(libraries) | {"NULL_CUDA_DEVICES": str(ranks)}
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    options = [*arguments, f"--job.dump_folder={folder}", "--metrics.enable_tensorboard=false"]
    command = [sys.executable, "-m", *torchrun, "-m", "tests.null_cuda.rank", str(folder), *options]
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    reports = [(folder / f"asked_of_{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [[json.loads(line) for line in lines] for lines in reports]


def test_a_step_of_training_waits_once(libraries: Path, tmp_path: Path):
    """When its loss and norm are read; when it is logged, once more."""
    arguments = ["configs/debug.toml", "--training.steps=7", "--metrics.log_freq=4", "--validation.enable=false"]
    (steps,) = train(libraries, tmp_path, *arguments)
    read = {"sync stream: titanlite/train_step.py read": 1, "copy pageable: titanlite/train_step.py read": 1}
    assert [step["waits"] for step in steps[1:3]] == [read] * 2
    assert steps[3]["waits"] == read | {"sync stream: titanlite/train_step.py largest_loss": 1}
    assert steps[4]["waits"] == read


def test_no_communicator_is_made_after_the_first_step(libraries: Path, tmp_path: Path):
    """Neither by a validation, whose forward has no backward."""
    arguments = ["configs/debug_pp.toml", "--training.steps=5", "--validation.enable", "--validation.freq=2"]
    arguments += ["--parallelism.data_parallel_shard_degree=2", "--training.global_batch_size=-1"]
    for steps in train(libraries, tmp_path, *arguments, ranks=4):
        assert [step["communicators"] for step in steps[1:]] == [[], [], []]
