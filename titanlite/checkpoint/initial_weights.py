"""Check, before any rank starts, the weights from which a run starts if it has no checkpoint to resume."""

from collections.abc import Collection
from pathlib import Path

from titanlite.checkpoint.folder import REPLACED, UNCONFIRMED, checkpoints, state_of, why_not_read
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import SEEDED, Checkpoint, Job, Model

KEY = "checkpoint.initial_load_path"
SIZES = {"dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "moe.n_experts"}
"""Options of [model] that must agree with the weights, even if the user has set other values."""


def check_initial_weights(job: Job, checkpoint: Checkpoint, model: Model, is_set: Collection[str]) -> None:
    """Raise ConfigError if a run without a checkpoint to resume would start from a folder that lacks weights, or whose
    config.json describes another model. Options in `is_set`, which the user has set, may differ from config.json."""
    place = checkpoint.initial_load_path
    saved = checkpoints(Path(job.dump_folder) / checkpoint.folder, "", UNCONFIRMED, REPLACED)
    if place == SEEDED or (checkpoint.enable and saved):
        return
    if not is_hugging_face(Path(place)):
        if model.new_tokens != "none":
            problem = f"model.new_tokens = {show(model.new_tokens)}: read only with weights of a Hugging Face folder"
            raise ConfigError([f'{problem}, and {place} has a checkpoint; set "none"'])
        return
    from titanlite.config.hf.config_json import WEIGHTS  # imported here: few runs load Hugging Face weights
    from titanlite.hf.config_files import model_of

    option = f"{KEY if KEY in is_set else 'model.hf_assets_path'} = {show(place)}"
    if not any((Path(place) / name).is_file() for name in WEIGHTS):
        problem = f"{option}: has a config.json, but no {' or '.join(WEIGHTS)}; put the weights there"
        raise ConfigError([f'{problem}, or set {KEY} = "{SEEDED}" to train from initial weights'])
    own, other = model.identity(), model_of(Path(place)).identity()
    lacks_rows, advice = own["vocab_size"] > other["vocab_size"], "[model] to the options of its weights"
    if lacks_rows and model.new_tokens == "mean":
        own["vocab_size"] = other["vocab_size"]
    differences = {
        key: f"model.{key} = {show(other.get(key))} (this run: {show(own.get(key))})"
        for key in {**own, **other}
        if own.get(key) != other.get(key) and (key in SIZES or f"model.{key}" not in is_set)
    }
    if differences:
        if lacks_rows and len(differences) == 1:
            advice = 'model.new_tokens = "mean", which adds rows'
        problem = f"{option}: its config.json has {', '.join(differences.values())}; set {advice}"
        raise ConfigError([f'{problem}, or {KEY} = "{SEEDED}" to train from initial weights'])


def is_hugging_face(path: Path) -> bool:
    """Return whether a folder with weights is a Hugging Face folder (True) or a checkpoint (False). Raises ConfigError
    if the folder does not exist, is an incomplete or set-aside checkpoint, or has weights without a config.json."""
    state = state_of(path)
    if (state and state[1] not in ("", UNCONFIRMED)) or not path.is_dir():
        from titanlite.config.hf.values import how_to_download  # imported here: only an error message needs it

        expected = f"expected a checkpoint's step-N folder, or a Hugging Face folder{why_not_read(path)}"
        raise ConfigError([f"{KEY} = {show(str(path))}: {expected}{how_to_download(path)}"])
    if not (has_config := (path / "config.json").exists()) and any(path.glob("model*.safetensors")):
        raise ConfigError([f"{KEY} = {show(str(path))}: has weights, but no config.json; put the model's there"])
    return has_config


def step_folders(folder: Path, *suffixes: str) -> list[Path]:
    """Return the folder itself if it is a checkpoint. Otherwise return the checkpoints in it or in its subfolder
    `checkpoint` that have one of `suffixes` (default: good ones), oldest first. Raises ConfigError if there is none."""
    state = state_of(folder)
    if state and state[1] in ("", UNCONFIRMED) and folder.is_dir():
        return [folder]
    reason = why_not_read(folder)
    for place in (folder, folder / "checkpoint"):
        if found := checkpoints(place, *(suffixes or ("",))):
            return found
        if unconfirmed := checkpoints(place, UNCONFIRMED):
            reason = f"; {unconfirmed[-1]}, whose weights have given no finite step yet, is read if it is named"
    raise ConfigError([f"{folder}: expected a step-N folder, or a folder that contains one{reason}"])
