"""The tokenizer's files and the model card of an exported Hugging Face folder."""

import io
import json
import re
from pathlib import Path
from typing import Any

from titanlite import __version__
from titanlite.checkpoint.folder import state_of
from titanlite.config.hf.values import read_json_object
from titanlite.config.regular_file import read_file
from titanlite.data.tokenizer import Tokenizer
from titanlite.files.appended_file import row_of

BESIDE_THE_TOKENIZER = (
    *("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
LARGEST_FILE = 2**28  # maximum size, in bytes, of a file that is read


def tokenizer_files(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name. If tokenizer_config.json lacks tokenizer_class, add the class used in
    training, which other programs could only guess; if it lacks model_max_length, add `max_seq_len`."""
    path, name = Path(tokenizer.path).expanduser(), BESIDE_THE_TOKENIZER[0]
    file = path / "tokenizer.json" if path.is_dir() else path
    found = [each for each in BESIDE_THE_TOKENIZER if (file.parent / each).is_file()]
    files = {each: read_file(file.parent / each, LARGEST_FILE) for each in found}
    config = {"tokenizer_class": tokenizer.call(class_of), "model_max_length": max_seq_len}
    config |= read_json_object(file.parent / name) if name in files else {}
    files[name] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return {**files, "tokenizer.json": read_file(file, LARGEST_FILE)}  # `file` may have another name


def class_of(tokenizer: Tokenizer) -> str:
    """Return the name of a tokenizer's class, in a spelling that both transformers 4 and transformers 5 know."""
    name = type(tokenizer.loaded).__name__  # type: ignore[attr-defined]
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name


def model_card(path: Path, name: str, config: dict[str, Any], source: Path | None, *, ema: bool = False) -> bytes:
    """Return README.md for the model in a step-N folder: its base model, license, data, steps, losses and config."""
    run, (step, _) = path.resolve().parents[1], state_of(path)
    training = config["training"] if isinstance(config.get("training"), dict) else {}
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["titanlite"]}
    base, license_name = "none, initial weights were random", ""
    if source:
        released = read_json_object(source / "config.json").get("_name_or_path")
        base = head["base_model"] = released or source.resolve().name
        card = source / "README.md"
        text = read_file(card, LARGEST_FILE).decode("utf-8", "replace") if card.is_file() else ""
        found = re.match(r"---\n(?:.*\n)*?license: *[\"']?([\w.-]+)", text.partition("\n---")[0])
        license_name = head["license"] = found[1] if found else "other"
    lora = config["lora"] if isinstance(config.get("lora"), dict) else {}
    if lora.get("rank"):
        base += f", with adapters (LoRA, rank {lora['rank']}, alpha {lora.get('alpha')}) merged"
    datasets = training.get("datasets") if isinstance(training.get("datasets"), list) else []
    names = [str(each.get("name")) for each in datasets if isinstance(each, dict)]
    template = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return template.format(
        head="\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        **{"name": name, "version": __version__, "steps": step, "base": base, "losses": _losses(run, step)},
        average=" The weights are their average (EMA); the losses are those of the weights themselves." * ema,
        data=", ".join(names) or training.get("dataset_path") or training.get("dataset", "data that is not known"),
        license=license_name if license_name != "other" else "not stated there; look it up before you publish",
        config=(run / "config.toml").read_text(encoding="utf-8") if config else "",
    ).encode()


def _losses(run: Path, step: int) -> str:
    """Return lines with the last training loss and the last validation loss that a run logged up to a step."""
    metrics, losses = run / "metrics.jsonl", dict[str, str]()
    for row in map(row_of, io.BytesIO(read_file(metrics, LARGEST_FILE)) if metrics.is_file() else ()):
        for what in ("loss", "validation") if row and row["step"] <= step else ():
            if type(value := row.get(f"{what}_metrics/global_avg_loss")) is float:
                losses[what] = f"- {what}: {value:.4f} nats per token, at step {row['step']:,}\n"
    return "".join(losses.values())
