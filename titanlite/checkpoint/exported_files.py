"""Files of an exported folder beside the model's: those of the tokenizer, and the model card."""

import json
import re
from pathlib import Path
from typing import Any

from titanlite import __version__
from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import show
from titanlite.config.regular_file import read_file
from titanlite.data.tokenizer import Tokenizer

BESIDE_THE_TOKENIZER = (
    *("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
LARGEST_FILE = 2**28
"""Bytes at most of a file that is read."""


def tokenizer_files(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name. Where tokenizer_config.json lacks them, it gets the class that read the
    text of the training, so that no other program guesses one, and the number of positions."""
    path = Path(tokenizer.path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    found = [name for name in BESIDE_THE_TOKENIZER if (file.parent / name).is_file()]
    files = {name: read_file(file.parent / name, LARGEST_FILE) for name in found}
    name = "tokenizer_config.json"
    config = read_json_object(file.parent / name) if name in files else {}
    config.setdefault("tokenizer_class", tokenizer.call(class_of))
    known = config.get("model_max_length")
    config["model_max_length"] = max(known, max_seq_len) if isinstance(known, int) else max_seq_len
    files[name] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return {**files, "tokenizer.json": read_file(file, LARGEST_FILE)}  # the given file may have another name


def class_of(tokenizer: Tokenizer) -> str:
    """Return the name of transformers' class of a tokenizer, by which version 4 knows it, too."""
    name = type(tokenizer.loaded).__name__  # type: ignore[attr-defined]
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name


def model_card(name: str, path: Path, state: dict[str, Any], config: dict[str, Any], source: Path | None) -> bytes:
    """Return README.md: what the model is from, the data, steps, loss and config, and the license of the source."""
    run, training = path.resolve().parents[1], config.get("training", {})
    head = {"library_name": "transformers", "tags": ["titanlite"]}
    license_line = "No model was the source of this one, so the license is yours to state."
    if source:
        released = read_json_object(source / "config.json")
        head["base_model"] = released.get("_name_or_path") or source.resolve().name
        license_line = "The source's README.md states no license: look it up before you publish this model."
        if stated := license_of(source / "README.md"):
            head["license"], license_line = stated, f"The license of the source is {stated}."
    names = [each.get("name") for each in training.get("datasets") or ()]
    data = ", ".join(map(str, names)) or training.get("dataset_path") or training.get("dataset", "not known")
    facts = {
        "base model": head.get("base_model", "none: initial weights were random"),
        "data": data,
        "steps": f"{state['step']:,}",
        **losses(run / "metrics.jsonl", state["step"]),
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", "", f"# {name}", ""]
    lines += [f"Trained with titanlite {__version__}.", "", *(f"- {key}: {value}" for key, value in facts.items())]
    lines += ["", license_line, ""]
    if config:
        text = (run / "config.toml").read_text(encoding="utf-8")
        lines += ["The config of the run, with every option:", "", "````toml", text.rstrip(), "````", ""]
    return "\n".join(lines).encode()


def license_of(card: Path) -> str:
    """Return the license that the head of a model card states; "" if it states none."""
    text = read_file(card, LARGEST_FILE).decode("utf-8", "replace") if card.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license: *[\"']?([\w.-]+)", head[1], re.MULTILINE) if head else None
    return found[1] if found else ""


def losses(file: Path, step: int) -> dict[str, str]:
    """Return the last losses in a metrics.jsonl up to a step, in words, by what they are."""
    found: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name, what in (("loss", "loss"), ("validation", "validation loss")):
            value = row.get(f"{name}_metrics/global_avg_loss")
            if value is not None and row["step"] <= step:
                found[what] = f"{show(value)} nats per token, at step {row['step']:,}"
    return found
