"""The losses of torchtitan's supervised fine-tuning test, and those of torchtitan and titanlite on this machine's CPU.

torchtitan's file tests/assets/losses/sft_debugmodel_cuda.txt has the losses of ten steps of its config sft_debugmodel,
in bfloat16 on CUDA, from weights that were drawn there. Neither its seed nor the number of its ranks is known. A CPU
draws other numbers, so the losses are compared in two steps:

    1. torchtitan 0.3.0 itself runs on the CPU (torchtitan_sft.py), once per seed. The mean of these losses and their
       standard deviation are compared with the file.
    2. titanlite trains from the same weights, on the same conversations, in float32. The losses are compared step by
       step.

Every sequence of 2,048 tokens has all ten conversations, in an order of its own, and padding. Attention stays within a
conversation, so all sequences have the same loss but for rounding, and neither the number of sequences of a step nor
that of the ranks matters. The seeds of the first step therefore take one sequence a step, and the second step eight.

torchtitan renders the chat template without its variables bos_token and eos_token, so EOS does not follow what the user
says; it adds BOS and the last EOS by itself. TEMPLATE writes the same tokens, which is verified before training.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loss.low_precision_loss import LOSS, train
from benchmarks.python_path import with_python_path
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.token_shards import not_trained_bit
from titanlite.techniques.data.chat_template import ChatTemplate
from titanlite.techniques.data.rows import Row

HERE = Path(__file__).resolve().parent
TOML = HERE / "published_sft.toml"
GOLDEN = (8.296810, 7.725588, 6.295646, 4.756095, 4.087054, 3.630588, 3.247299, 2.962486, 2.781911, 2.674215)
"""tests/assets/losses/sft_debugmodel_cuda.txt of pytorch/torchtitan, 30 March 2026 (#2556), rounded to six decimals."""
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message.role }}
{{ message.content }}{% endfor %}{% if add_generation_prompt %}assistant
{% else %}{{ eos_token }}{% endif %}"""
IGNORED = -100
SEED, AS_PUBLISHED = "torchtitan, seed", "torchtitan as published, seed"
Conversation = tuple[list[int], list[int]]
"""The inputs and the labels of a conversation."""


def write_tokenizer(assets: Path, folder: Path) -> None:
    """Copy the tokenizer, and write the template that renders a conversation as torchtitan does."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(assets / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def conversations(assets: Path, folder: Path) -> list[Conversation]:
    """Return the conversations of the data as titanlite reads them."""
    template = ChatTemplate(HuggingFaceTokenizer(folder))
    rows = json.loads((assets / "data.json").read_text())
    texts = [
        text
        for row in rows
        if (answer := row["answer"])
        for text in template.conversations(
            Row([{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}])
        )
    ]
    bit, result = not_trained_bit("uint16"), []
    for stored in template.encode(texts, "uint16"):
        tokens = stored.astype(np.int64) & ~bit
        labels = np.where(stored & bit, IGNORED, tokens)
        result.append((tokens[:-1].tolist(), labels[1:].tolist()))
    return result


def run_torchtitan(python: str, assets: Path, folder: Path, *options: str) -> tuple[list[Conversation], list[Any]]:
    """Run torchtitan, and return the conversations and its steps. The folder gets the weights that it starts from."""
    command = [python, str(HERE / "torchtitan_sft.py"), f"--assets={assets.resolve()}", f"--out={folder}", *options]
    done = subprocess.run(command, cwd=folder, env=with_python_path(os.environ), text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stderr}error: status {done.returncode} of {' '.join(command)}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [tuple(pair) for pair in rows[0]["conversations"]], rows[1:]


def run_titanlite(assets: Path, folder: Path, sequences: int) -> list[dict[str, float]]:
    """Train from the weights in the folder, and return the lines of metrics.jsonl."""
    options = {
        "model.hf_assets_path": folder,
        "training.dataset_path": assets.resolve() / "data.json",
        "training.cache_folder": folder / "cache",
        "training.local_batch_size": sequences,
    }
    return train(TOML, options, folder / "titanlite")


def run_sft(arguments: argparse.Namespace) -> None:
    """Run both programs from torchtitan's weights of seed 0, and print their losses and gradient norms."""
    assets = arguments.assets
    with tempfile.TemporaryDirectory() as name:
        folder, python = Path(name), arguments.torchtitan_python
        theirs, steps = run_torchtitan(python, assets, folder, f"--sequences={arguments.sequences}")
        write_tokenizer(assets, folder)
        ours = conversations(assets, folder)
        if sorted(ours) != sorted(theirs):
            sys.exit("error: the two programs read different tokens or labels")
        n_trained = sum(label != IGNORED for _, labels in ours for label in labels)
        n_inputs = sum(len(inputs) for inputs, _ in ours)
        print(f"the same {len(ours)} conversations: {n_inputs} inputs, {n_trained} targets", flush=True)
        rows = run_titanlite(assets, folder, arguments.sequences)
    for run, results in (("torchtitan", steps), ("titanlite", [{**row, "loss": row[LOSS]} for row in rows])):
        for row in results:
            norm = row.get("norm", row.get("grad_norm"))
            print(json.dumps({"run": run, "step": row["step"], "loss": row["loss"], "norm": norm, "lr": row["lr"]}))
    print(f"\n{'step':>4} {'torchtitan':>11} {'titanlite':>11} {'difference':>11}   gradient norm: relative difference")
    for step, row in zip(steps, rows, strict=True):
        difference, norm = row[LOSS] - step["loss"], row["grad_norm"] / step["norm"] - 1
        print(f"{step['step']:4} {step['loss']:11.6f} {row[LOSS]:11.6f} {difference:+11.1e}   {norm:+.1e}", flush=True)


def run_seeds(arguments: argparse.Namespace) -> None:
    """Run torchtitan with several seeds as it is."""
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as name:
            options = f"--seed={seed}", "--sequences=1", "--decay-norms", *["--as-published"] * arguments.as_published
            _, steps = run_torchtitan(arguments.torchtitan_python, arguments.assets, Path(name), *options)
        run = f"{AS_PUBLISHED if arguments.as_published else SEED} {seed}"
        for step in steps:
            row = {"run": run, "step": step["step"], "loss": step["loss"], "norm": step["norm"]}
            print(json.dumps(row), flush=True)


def seeds_table(rows: list[dict[str, Any]], runs: str) -> list[str]:
    """Return a line for each step: what torchtitan has published, and the losses of its seeds on a CPU. `runs` is SEED
    or AS_PUBLISHED."""
    losses: dict[int, list[float]] = {}
    for row in rows:
        if row["run"].startswith(runs):
            losses.setdefault(row["step"], []).append(row["loss"])
    lines = [
        runs,
        f"{'step':>4} {'published':>10} {'mean of seeds':>14} {'deviation':>10}   published - mean, in deviations",
    ]
    for step, values in losses.items():
        golden, mean, deviation = GOLDEN[step - 1], statistics.mean(values), statistics.stdev(values)
        lines.append(f"{step:4} {golden:10.4f} {mean:14.4f} {deviation:10.4f} {(golden - mean) / deviation:+9.1f}")
    return lines
