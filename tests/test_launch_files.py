"""The files that start a run on a cluster: slurm.sh, and those of launch/, with the cluster's commands replaced."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launches import wait_until
from titanlite import launcher
from titanlite.config import load

ROOT = Path(__file__).parents[1]
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
TITANLITE = """#!/bin/bash
trap 'kill %1; sleep 0.2; echo saved > "$LOGS/saved"; exit 0' TERM
echo $$ > "$LOGS/started"
printf '%s\\n' "$@" > "$LOGS/arguments"
env > "$LOGS/environment"
sleep "$SECONDS_OF_RUN" & wait $!
exit "$STATUS"
"""


class Commands:
    """Starts a script with commands of a cluster replaced by those of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "titanlite": TITANLITE}.items():
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


# SLURM ----------------------------------------------------------------------------------------------------------------


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


# Kubernetes and SkyPilot ----------------------------------------------------------------------------------------------


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch" / name).read_text()))


def started_with(commands: Commands, config: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of titanlite, whose first one is `config`, and its environment."""
    command, given, *arguments = commands.read("arguments")
    assert (command, given) == ("train", config)
    variables = dict(line.split("=", 1) for line in commands.read("environment") if "=" in line)
    return arguments, variables


def assert_the_launcher_takes(config: str, arguments: list[str], environment: dict[str, str], nodes: int) -> None:
    loaded = load([config, *arguments])
    assert loaded.config.checkpoint.enable, "without checkpoints a restarted run begins anew"
    assert loaded.config.job.dump_folder == "/data/run"
    assert launcher.nodes_of(environment) == (nodes, nodes)
    launcher.require_place(environment)
    assert environment["NODE_RANK"] == str(nodes - 1)
    assert environment["MAX_RESTARTS"] == "3"


@pytest.fixture
def pod() -> dict[str, Any]:
    """The pod template of launch/kubernetes.yaml."""
    return documents("kubernetes.yaml")[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def start_container(commands: Commands, pod: dict[str, Any], **case: Any) -> subprocess.Popen[bytes]:
    """Start what the last pod's container runs, with its environment."""
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return commands.start(*container["command"], *container["args"], **variables, NODE_RANK="7", **case)


def test_kubernetes_starts_the_launcher(commands, pod):
    assert start_container(commands, pod).wait(timeout=20) == 0
    arguments, environment = started_with(commands, "/data/run.toml")
    assert_the_launcher_takes("configs/70b.toml", arguments, environment, nodes=8)
    assert environment["MASTER_ADDR"] == "titanlite-node-0-0.titanlite"
    assert commands.start(*pod["containers"][0]["command"], *pod["containers"][0]["args"], status=2).wait(20) == 2


def test_kubernetes_restarts_a_pod_that_was_stopped(commands, pod):
    """The launcher's exit status is 0 after SIGTERM; that of the pod must not be, or the job would be complete."""
    container = start_container(commands, pod, seconds=60)
    commands.wait_for("environment")
    container.terminate()
    assert container.wait(timeout=20) == 143
    assert commands.read("saved") == ["saved"], "the pod has not waited for the launcher"


def test_kubernetes_names_agree(pod):
    claim, jobset = documents("kubernetes.yaml")
    assert (claim["kind"], jobset["kind"]) == ("PersistentVolumeClaim", "JobSet")
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (job,), (container,), name = jobset["spec"]["replicatedJobs"], pod["containers"], jobset["metadata"]["name"]
    spec = job["template"]["spec"]
    variables = {each["name"]: each for each in container["env"]}
    nodes = variables["NNODES"]["value"]
    assert str(spec["parallelism"]) == str(spec["completions"]) == nodes
    assert spec["completionMode"] == "Indexed"
    index = variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["MASTER_ADDR"]["value"] == f"{name}-{job['name']}-0-0.{name}"
    assert str(container["ports"][0]["containerPort"]) == variables["MASTER_PORT"]["value"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]


def test_skypilot_starts_the_launcher(commands):
    (task,) = documents("skypilot.yaml")
    cluster = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert commands.start("bash", "-c", task["run"], **task["envs"], **cluster).wait(timeout=20) == 0
    arguments, environment = started_with(commands, task["envs"]["CONFIG"])
    assert_the_launcher_takes(task["envs"]["CONFIG"], arguments, environment, nodes=task["num_nodes"])
    assert environment["MASTER_ADDR"] == "10.0.0.1"
    assert "/data" in task["volumes"]
