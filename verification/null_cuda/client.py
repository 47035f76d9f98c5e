"""A process that runs cases on the null CUDA, as tests and the table of memory use it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verification.null_cuda import build

ROOT = Path(__file__).parents[2]


class Server:
    """Runs cases one after the other on the pools of server.py. `folder` is for the libraries."""

    def __init__(self, folder: Path, **variables: str):
        environment = build.variables(folder) | {"NULL_CUDA_DEVICES": "8"} | variables
        command = [sys.executable, "-m", "verification.null_cuda.server"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
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
