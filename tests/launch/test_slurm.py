"""slurm.sh, which starts a run on a SLURM cluster, with the cluster's commands replaced."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launches import wait_until

ROOT = Path(__file__).parents[2]
SLURM = {
    "SLURM_NNODES": "8",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[0-7]",
    "SLURM_CPUS_ON_NODE": "96",
}
SRUN = """#!/bin/bash
trap 'kill %1; sleep 0.2; echo "run ended" >> "$LOGS/events"; exit "$STOPPED_STATUS"' TERM
echo "$$ $MASTER_ADDR" > "$LOGS/srun"
sleep "$SECONDS_OF_RUN" & wait $!
exit "$STATUS"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node0\\nnode1\\n'; else echo "$@" >> "$LOGS/events"; fi
"""
SCANCEL = """#!/bin/bash
echo "scancel $@" >> "$LOGS/events"
read -r pid _ < "$LOGS/srun"
kill -TERM "$pid"
"""


class Commands:
    """Starts a script with commands of a cluster replaced by those of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, *command: str, seconds: float = 0, status: int = 0, **environment: str) -> subprocess.Popen[bytes]:
        """Start a script, in which the run takes so many seconds and ends with a status."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        case = {"PATH": path, "LOGS": str(self.folder), "SECONDS_OF_RUN": str(seconds), "STATUS": str(status)}
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | case | environment)

    def read(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines() if (self.folder / name).exists() else []

    def wait_for(self, name: str) -> None:
        wait_until(lambda: bool(self.read(name)), f"{name} is written", seconds=20)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.mark.parametrize(("status", "requeue"), [(0, ["requeue 17"]), (3, [])], ids=["saved", "failed"])
def test_slurm_requeues_a_run_that_it_has_stopped_and_that_was_saved(commands, status, requeue):
    job = commands.start("./slurm.sh", "debug", seconds=60, STOPPED_STATUS=str(status), **SLURM)
    commands.wait_for("srun")
    job.send_signal(signal.SIGUSR1)
    job.send_signal(signal.SIGUSR1)  # a second one, as on preemption near the time limit, changes nothing
    assert job.wait(timeout=20) == status
    assert commands.read("events") == ["scancel --signal=TERM 17", "run ended", *requeue]


@pytest.mark.parametrize("status", [0, 2, 137])
def test_slurm_does_not_requeue_a_run_that_has_ended(commands, status):
    assert commands.start("./slurm.sh", "debug", status=status, **SLURM).wait(timeout=20) == status
    assert commands.read("events") == []
    assert commands.read("srun")[0].endswith(" node0")


def test_slurm_signals_the_script_before_the_time_limit():
    directives = [line for line in (ROOT / "slurm.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in directives
    assert "#SBATCH --signal=B:USR1@120" in directives, "without B: the launchers get the signal, and not the script"
