"""Kill a training run at the file events of its saves with ckpt-chaos, and resume it.

    pip install --target FOLDER ckpt-chaos==0.1.8
    PYTHONPATH=FOLDER python -m verification.kill_at_file_events [--points 90] [--modes before,torn,unsynced]

A run of six steps saves three checkpoints. It is killed at a file event from its first save on, resumed by the same
command, and its last checkpoint is compared with that of a run without a kill, byte by byte. `before`: the event is
prevented. `torn`: the file is cut to half its size. `unsynced`: files without fsync are lost. LOST_WORK means that the
resume did not begin at the newest complete checkpoint.

In mode `unsynced` ckpt-chaos 0.1.8 takes each path that the program opens for writing as a file, also the folder that
Python's tempfile opens with O_TMPFILE: it reads the folder when it is opened, and removes it when it kills, so that the
program gets an IsADirectoryError that no file system has given. Here, the tool ignores folders.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ARGUMENTS = """debug --training.steps=6 --checkpoint.enable --checkpoint.interval=2 --checkpoint.keep_latest_k=0
--model.dim=32 --model.n_layers=1 --model.n_heads=4 --model.n_kv_heads=2 --model.ffn_dim=64 --training.seq_len=32
--training.local_batch_size=2 --job.dump_folder={out}"""
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONE_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
START = """
import os
from ckpt_chaos import inject
note = inject._note_open_for_write
inject._note_open_for_write = lambda path: None if os.path.isdir(path) else note(path)
if os.environ.get("CKPT_CHAOS_WATCH") and not os.environ.get("CKPT_CHAOS_ARMED"):
    from ckpt_chaos.targets.common import arm_from_env
    arm_from_env(0, lazy=True)
    os.environ["CKPT_CHAOS_ARMED"] = "1"
"""
"""The sitecustomize.py of the killed program, which Python imports first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=90, help="kills, divided among the modes")
    parser.add_argument("--modes", default="before,torn,unsynced")
    arguments = parser.parse_args()
    from ckpt_chaos import byo
    from ckpt_chaos.runner import print_table

    def select(events: list[Any], n_points: int, modes: tuple[str, ...]) -> list[tuple[int, str]]:
        first = next(number for number, (_, _, name, _) in enumerate(events) if "step-" in name)
        return all_events(events[first:], n_points, modes)

    os.environ |= ONE_RANK
    all_events, byo._select = byo._select, select
    with tempfile.TemporaryDirectory() as folder:
        byo.BOOT = Path(folder, "boot")
        byo.BOOT.mkdir()
        (byo.BOOT / "sitecustomize.py").write_text(START)
        rows = byo.run_byo(
            [sys.executable, "-m", "titanlite.rank", *ARGUMENTS.split()],
            None,
            Path(folder, "runs"),
            max_points=arguments.points,
            modes=tuple(arguments.modes.split(",")),
            checkpoint_glob="{out}/checkpoint/step-*",
            step_regex=r"resumed after step (\d+)",
            result_file="{out}/checkpoint/step-6/rank-00000.safetensors",
            ignore_size=False,
        )
    print_table(rows)
    return int(any(row.verdict != "PASS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
