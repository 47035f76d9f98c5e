"""Run cases on pools of ranks of the null CUDA: a line of JSON with a case in, a line with what it asked out.

    python -m verification.null_cuda.server < CASES > REPORTS

A case has "world_size", "config" (the text of a TOML file), "arguments" of the command line and "steps"; to find races,
also "bug", a name in steps.BUGS. Its report has "ranks": what each was asked, or its races. Or it has
"unsupported": why the config is rejected. Or "error": a traceback.
"""

import functools
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from titanlite import config
from titanlite.tools.parity.process_pool import ProcessPool, RankError
from verification.null_cuda.steps import find_races, take_steps


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the ranks print is no answer
    pool: ProcessPool | None = None
    for line in sys.stdin:
        case = json.loads(line)
        if pool and (pool.broken or pool.world_size != case["world_size"]):
            pool.close()
            pool = None
        try:
            job = resolved(case)
        except config.ConfigError as error:
            print(json.dumps({"unsupported": str(error)}), file=answers, flush=True)
            continue
        try:
            if not pool:  # CUDA does not survive a fork
                how = {"backend": "cpu:gloo,cuda:nccl", "context": multiprocessing.get_context("spawn")}
                pool = ProcessPool(case["world_size"], timeout_seconds=300, **how)
            call = functools.partial(find_races, injected=case["bug"]) if "bug" in case else take_steps
            answer: Any = {"ranks": pool.run(call, job=job, steps=case["steps"])}
        except RankError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    if pool:
        pool.close()


def resolved(case: dict[str, Any]) -> config.Config:
    ranks = case["world_size"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "null.toml"
        file.write_text(case["config"])
        return config.check(config.load([str(file), *case["arguments"]]), config.Launch(0, 0, ranks, ranks, ranks))


if __name__ == "__main__":
    assert torch.cuda.is_available(), "not on the null CUDA"
    main()
