"""Pass the metrics of a run on to trackio, Weights & Biases or MLflow, while it trains or later.

    python examples/follow_metrics.py outputs/metrics.jsonl wandb [--project NAME] [--once]

A step is passed on once, even if this script or the run is started again. --once: end at the last line there is.
"""

import argparse
import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path


def start(tracker: str, project: str, run: str) -> tuple[Callable, Callable]:
    """Open a tracker's run of this name, which may exist. Return what logs a step, and what ends the run."""
    module = importlib.import_module(tracker)
    if tracker == "mlflow":
        module.set_experiment(project)
        found = module.search_runs(filter_string=f"attributes.run_name = '{run}'", output_format="list")
        module.start_run(run_id=found[0].info.run_id if found else None, run_name=run)
        return module.log_metrics, module.end_run
    module.init(project=project, resume="allow", **{"name" if tracker == "trackio" else "id": run})
    return module.log, module.finish


def follow(file: Path, tracker: str, project: str, once: bool) -> None:
    """Pass on the rows of the run that a file is of, until a new run, whose first row is another, takes its place."""
    while not (first := file.open("rb").readline() if file.exists() else b"").endswith(b"\n"):
        time.sleep(2)  # the run has logged nothing yet
    run, state = hashlib.sha256(first).hexdigest()[:12], file.with_name(f"{file.name}.{tracker}")
    known = json.loads(state.read_text()) if state.exists() else {}
    last = known["step"] if known.get("run") == run else -1
    log, end = start(tracker, project, run)
    while (lines := file.read_bytes().splitlines(keepends=True) if file.exists() else [first])[:1] == [first]:
        for row in (json.loads(line) for line in lines if line.endswith(b"\n")):
            if (step := row.pop("step")) > last:
                last = step
                state.write_text(json.dumps({"run": run, "step": step}))  # before the row: none is passed on twice
                values = {re.sub(r"[^\w.:/ -]+", "_", name).strip("_"): value for name, value in row.items()}
                log({name: value for name, value in values.items() if value is not None}, step=step)
        if once:
            break
        time.sleep(2)
    end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tracker", choices=("trackio", "wandb", "mlflow"))
    parser.add_argument("--project", default="titanlite")
    parser.add_argument("--once", action="store_true")
    arguments = vars(parser.parse_args())
    follow(**arguments)
    while not arguments["once"]:
        follow(**arguments)
