"""Train what others have published the loss of, with their settings, and print both.

    python -m benchmarks.others.published_curves nanogpt --text FILE [--runs NAME ...] [--nanogpt CHECKOUT]
    python -m benchmarks.others.published_curves card --text FILE [--steps 500]
    python -m benchmarks.others.published_curves sft --assets FOLDER --torchtitan-python PYTHON [--sequences 8]
    python -m benchmarks.others.published_curves sft-seeds --assets FOLDER --torchtitan-python PYTHON [--as-published]
    python -m benchmarks.others.published_curves plot

FILE is the text that karpathy/char-rnn calls data/tinyshakespeare/input.txt: 1,115,394 bytes, whose checksum is
verified. https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt has it. A character
is a token, the first 90 % of the text are trained on, and the validation loss is that of all of the rest, in windows of
seq_len tokens. The runs are train.py's own, on the TOML files published_*.toml; nothing here trains.

    nanogpt   nanoGPT's README for a machine without a GPU (validation loss 1.88), with a Llama block of as many
              parameters: three seeds, and runs that differ in one option each. --nanogpt runs nanoGPT's train.py itself
              from a checkout, with the README's command, and evaluates its checkpoint on all of the rest, too
    card      the model card bmeyer2025/tiny-gpt-shakespeare: RMSNorm, SwiGLU, rotary embedding. Its dropout is left out
    sft       torchtitan's config sft_debugmodel from the same weights in both programs (published_sft.py)
    sft-seeds the same in torchtitan alone, from other weights, beside the ten losses that it publishes
    plot      the tables, and docs/images/published_curves.png, from the logs

Both nanoGPT and the card draw windows at random offsets, with replacement. Here the windows of an epoch do not overlap,
and each is drawn once per epoch. Every line of the output that begins with a brace is JSON.
"""

import argparse
import hashlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.low_precision_loss import LOSS, VALIDATION, train
from benchmarks.others.published_sft import AS_PUBLISHED, GOLDEN, SEED, run_seeds, run_sft, seeds_table
from benchmarks.python_path import ROOT

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "logs"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
EOS, REST = "<eos>", "rest.txt"
Options = dict[str, Any]
Row = dict[str, Any]

NANOGPT = 1.88
"""The validation loss after 2,000 steps in README.md of karpathy/nanoGPT."""
NANOGPT_COMMAND = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--log_interval=10"]
NANOGPT_COMMAND += ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"]
NANOGPT_COMMAND += ["--max_iters=2000", "--lr_decay_iters=2000"]
CARD = {0: (4.32, 4.32), 500: (1.47, 1.67), 1000: (1.29, 1.53), 1500: (1.21, 1.50), 2000: (1.14, 1.48)}
CARD |= {2500: (1.09, 1.48), 3000: (1.05, 1.48)}
"""Training and validation loss by step, with dropout 0.3: DEVLOG.md of brianmeyer/tinyllm, "Part 2"."""
CARD_DROPOUT_02 = {0: (4.25, 4.25), 500: (1.37, 1.59), 1000: (1.21, 1.50), 1500: (1.12, 1.47), 2000: (1.04, 1.50)}
"""The same with dropout 0.2, in "The Overfitting Disaster"."""

GPT2_BLOCK: Options = {
    **{"model.norm": "layer", "model.activation": "gelu", "model.gated_ffn": "false", "model.ffn_dim": 512},
    **{"model.learned_positions": 64, "model.partial_rotary_factor": 0},
}
"""nanoGPT's block; its norms have no biases, and these do."""
RUNS: dict[str, Options] = {f"seed {seed}": {"debug.seed": seed} for seed in range(3)} | {
    "no positions": {"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 1e9},
    "rope_theta 500,000": {"model.rope_theta": 500_000},
    "untied embeddings": {"model.tie_embeddings": "false"},
    "ffn_dim 512": {"model.ffn_dim": 512},
    "beta2 0.95": {"optimizer.beta2": 0.95},
    "lr 2e-3": {"optimizer.lr": 2e-3},
    "lr 5e-4": {"optimizer.lr": 5e-4},
    "no weight decay": {"optimizer.weight_decay": 0},
    "GPT-2 block": GPT2_BLOCK,
    "GPT-2 block, rotary": {**GPT2_BLOCK, "model.learned_positions": 0, "model.partial_rotary_factor": 1},
}
"""Runs of the first curve: seeds, and one option changed at seed 0."""
CARD_RUN = "card without dropout"


# The text -------------------------------------------------------------------------------------------------------------


def read_text(file: Path) -> str:
    """Return the text; exit if it is another."""
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        sys.exit(f"error: {file} is not data/tinyshakespeare/input.txt of karpathy/char-rnn (sha256 {SHA256})")
    return content.decode()


def write_tokenizer(characters: Iterable[str], folder: Path) -> None:
    """Write a tokenizer.json whose tokens are these characters, in order, and EOS: BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


def prepare(text: str, folder: Path) -> Options:
    """Write both splits of a text and its tokenizer into a folder, and return the options that name them."""
    n_train = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:n_train])
    (folder / REST).write_text(text[n_train:])
    write_tokenizer(sorted(set(text)), folder)
    return {
        "training.dataset_path": folder / "train.txt",
        "training.cache_folder": folder / "cache",
        "validation.dataset_path": folder / REST,
        "model.hf_assets_path": folder,
    }


# The runs -------------------------------------------------------------------------------------------------------------


def report(run: str, rows: list[Row]) -> list[Row]:
    """Print the losses of a run as JSON lines, and return them."""
    losses = [{"run": run, "step": row["step"], **losses_of(row)} for row in rows]
    print("".join(f"{json.dumps(row)}\n" for row in losses), end="", flush=True)
    return losses


def nanogpt_curve(output: str) -> list[Row]:
    """Return the steps that nanoGPT's output has, with training loss and, where it says so, the validation loss."""
    rows: dict[int, Row] = {}
    for step, loss in re.findall(r"^iter (\d+): loss ([\d.]+)", output, re.MULTILINE):
        rows[int(step)] = {"step": int(step), "loss": float(loss)}
    for step, loss in re.findall(r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", output, re.MULTILINE):
        rows.setdefault(int(step), {"step": int(step)})["validation"] = float(loss)
    return [rows[step] for step in sorted(rows)]


EVALUATE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from model import GPT, GPTConfig
saved = torch.load(sys.argv[2], weights_only=True)
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
characters, text = sorted(set(open(sys.argv[3], newline="").read())), open(sys.argv[4], newline="").read()
tokens = torch.tensor([characters.index(character) for character in text])
seq_len = saved["model_args"]["block_size"]
losses, n = 0.0, len(tokens) - 1
with torch.no_grad():
    for begin in range(0, n, seq_len):
        window = tokens[begin : min(begin + seq_len, n) + 1]
        losses += model(window[None, :-1], window[None, 1:])[1].item() * (len(window) - 1)
print(saved["iter_num"], losses / n)
"""


def run_nanogpt(checkout: Path, text: Path, rest: Path, eval_iters: int) -> None:
    """Run nanoGPT's train.py, and print its curve and the validation loss of its checkpoint on all windows. The number
    of batches of its own estimates changes what is drawn after them, so it acts as another seed. `rest` is the file of
    the last tenth of the text."""
    data = checkout / "data" / "shakespeare_char"
    if not (data / "train.bin").exists():
        sys.exit(f"error: {data} has no train.bin: copy the text there as input.txt, and run prepare.py")
    run = f"nanoGPT, eval_iters {eval_iters}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *NANOGPT_COMMAND, f"--eval_iters={eval_iters}", f"--out_dir={folder}"]
        output = subprocess.run(command, cwd=checkout, check=True, text=True, capture_output=True).stdout
        for row in nanogpt_curve(output):
            print(json.dumps({"run": run, **row}), flush=True)
        arguments = [str(each) for each in (checkout, Path(folder) / "ckpt.pt", text, rest)]
        done = subprocess.run([sys.executable, "-c", EVALUATE, *arguments], check=True, text=True, capture_output=True)
    step, loss = done.stdout.split()[-2:]
    print(json.dumps({"run": run, "step": int(step), "all windows": float(loss)}), flush=True)


def nanogpt(arguments: argparse.Namespace) -> None:
    """The first curve."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = prepare(read_text(arguments.text), folder)
        for number, run in enumerate(arguments.runs):
            report(run, train(HERE / "published_nanogpt.toml", options | RUNS[run], folder / f"run-{number}"))
        for eval_iters in (20, 200) if arguments.nanogpt else ():
            run_nanogpt(arguments.nanogpt, arguments.text, folder / REST, eval_iters)


def card(arguments: argparse.Namespace) -> None:
    """The second curve."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = prepare(read_text(arguments.text), folder) | {"training.steps": arguments.steps}
        if not torch.cuda.is_available():
            options["training.local_batch_size"] = 8  # of 64: 0.8 GiB instead of 4.4
        rows = train(HERE / "published_card.toml", options, folder / "run")
    print("\n".join(card_table(report(CARD_RUN, rows))))


# Tables and the figure ------------------------------------------------------------------------------------------------


def losses_of(row: Row) -> dict[str, float]:
    """Return the losses of a line of metrics.jsonl."""
    return {"loss": row[LOSS]} | ({"validation": row[VALIDATION]} if VALIDATION in row else {})


def nanogpt_table(rows: list[Row]) -> list[str]:
    """Return a line for each run: the validation loss after 2,000 steps, and how much less than published it is."""
    lines = [f"{'validation loss after 2,000 steps':40} {'':7}  less than {NANOGPT}"]
    last = {row["run"]: row.get("all windows", row.get("validation")) for row in rows if row["step"] == 2000}
    lines += [f"{run:40} {loss:7.4f} {NANOGPT - loss:+8.4f}" for run, loss in last.items()]
    seeds = [loss for run, loss in last.items() if run.startswith("seed")]
    if len(seeds) > 1:
        lines.append(f"seeds: mean {statistics.mean(seeds):.4f}, standard deviation {statistics.stdev(seeds):.4f}")
    return lines


def card_table(rows: list[Row]) -> list[str]:
    """Return a line for each step of the second curve that was validated or is published."""
    lines = [f"{'step':>5} {'loss':>8} {'validation':>11}   published: training and validation, dropout 0.3 and 0.2"]
    for row in rows:
        published = [str(curve[row["step"]]) for curve in (CARD, CARD_DROPOUT_02) if row["step"] in curve]
        if "validation" in row or published:
            validation = f"{row['validation']:11.4f}" if "validation" in row else " " * 11
            lines.append(f"{row['step']:5} {row['loss']:8.4f} {validation}   {'  '.join(published)}".rstrip())
    return lines


def read_log(log: Path) -> Iterator[Row]:
    """Yield the JSON lines of a log."""
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def curve(rows: Iterable[Row], run: str, key: str) -> list[tuple[int, float]]:
    """Return the steps and values of a run that have this key."""
    return [(row["step"], row[key]) for row in rows if row.get("run") == run and key in row]


def plot(arguments: argparse.Namespace) -> None:
    """Print the tables, and draw the three curves with the published losses as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: [*read_log(LOGS / f"published_curves_{name}.log")] for name in ("nanogpt", "card", "sft")}
    tables = nanogpt_table(rows["nanogpt"]), card_table(rows["card"])
    tables += seeds_table(rows["sft"], SEED), seeds_table(rows["sft"], AS_PUBLISHED)
    print("\n\n".join("\n".join(table) for table in tables))
    panels = [(draw_nanogpt, rows["nanogpt"]), (draw_card, rows["card"]), (draw_sft, rows["sft"])]
    if not curve(rows["card"], CARD_RUN, "validation"):
        del panels[1]  # the log has only the first steps
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained")
    published = {"color": "black", "linestyle": "none", "marker": "o", "label": "published"}
    for each, (draw, own) in zip(axes, panels, strict=True):
        draw(each, own, published)
    for each in axes:
        each.set(xlabel="step", ylabel="loss (nats per token)")
        each.legend(fontsize=8)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.file, dpi=90)


def draw_nanogpt(axes: Any, rows: list[Row], published: dict[str, Any]) -> None:
    """Draw the validation losses of the first curve's runs."""
    for run in RUNS:
        if points := curve(rows, run, "validation"):
            is_seed = run.startswith("seed")
            labels = {"seed 0": "Llama block, three seeds", "no positions": "without positions"}
            label = {**labels, "GPT-2 block": "GPT-2 block"}.get(run)
            if is_seed or label:
                color = "tab:blue" if is_seed else "tab:red" if run == "GPT-2 block" else "tab:orange"
                axes.plot(*zip(*points, strict=True), color=color, label=label)
    for eval_iters in (20, 200):
        if points := curve(rows, f"nanoGPT, eval_iters {eval_iters}", "validation")[1:]:
            label = "nanoGPT, run here" if eval_iters == 20 else None
            axes.plot(*zip(*points, strict=True), color="tab:green", label=label)
    axes.plot([2000], [NANOGPT], **published)
    axes.set(title="nanoGPT's README on tinyshakespeare", ylim=(1.6, 2.6))


def draw_card(axes: Any, rows: list[Row], published: dict[str, Any]) -> None:
    """Draw both losses of the second curve."""
    for key, style in (("loss", "-"), ("validation", "--")):
        axes.plot(*zip(*curve(rows, CARD_RUN, key), strict=True), style, label=key)
    axes.plot([*CARD], [loss for _, loss in CARD.values()], **published | {"label": "published, dropout 0.3"})
    points = [(step, loss) for step, (_, loss) in CARD_DROPOUT_02.items()]
    axes.plot(*zip(*points, strict=True), **published | {"marker": "x", "label": "published, dropout 0.2"})
    axes.set(title="tiny-gpt-shakespeare without dropout")


def draw_sft(axes: Any, rows: list[Row], published: dict[str, Any]) -> None:
    """Draw the losses of both programs from the same weights, and those of torchtitan's other seeds."""
    for run in sorted({row["run"] for row in rows if row["run"].startswith(SEED)}):
        axes.plot(*zip(*curve(rows, run, "loss"), strict=True), color="tab:gray", linewidth=0.8, alpha=0.7)
    for run in ("torchtitan", "titanlite"):
        style = {"linewidth": 4, "alpha": 0.4} if run == "torchtitan" else {}
        axes.plot(*zip(*curve(rows, run, "loss"), strict=True), label=f"{run} on a CPU", **style)
    axes.plot([], [], color="tab:gray", linewidth=0.8, label="torchtitan, other seeds")
    axes.plot(range(1, len(GOLDEN) + 1), GOLDEN, **published)
    axes.set(title="torchtitan's sft_debugmodel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    functions = {"nanogpt": nanogpt, "card": card, "sft": run_sft, "sft-seeds": run_seeds, "plot": plot}
    for name, function in functions.items():
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        if name in ("nanogpt", "card"):
            command.add_argument("--text", type=Path, required=True, help="tinyshakespeare's input.txt")
        if name == "nanogpt":
            command.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS), metavar="NAME")
            command.add_argument("--nanogpt", type=Path, metavar="CHECKOUT", help="also run nanoGPT from a checkout")
        if name == "card":
            command.add_argument("--steps", type=int, default=500)
        if function in (run_sft, run_seeds):
            command.add_argument("--assets", type=Path, required=True, help="data.json and the tokenizer's two files")
            command.add_argument("--torchtitan-python", required=True, help="Python of torchtitan 0.3.0's environment")
        if name == "sft":
            command.add_argument("--sequences", type=int, default=8, help="sequences of a step")
        if name == "sft-seeds":
            command.add_argument("--seeds", type=int, nargs="+", default=[*range(5)], metavar="N")
            command.add_argument("--as-published", action="store_true", help="with the labels and the mask of then")
        if name == "plot":
            command.add_argument("--file", type=Path, default=ROOT / "docs" / "images" / "published_curves.png")
    arguments = parser.parse_args()
    if arguments.function is not plot:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
        print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads", flush=True)
    arguments.function(arguments)


if __name__ == "__main__":
    main()
