"""config.json and generation_config.json of an exported folder. If the run started from a released model, that model's
values are kept, except values that the run changed or that describe files."""

from pathlib import Path
from typing import Any

from titanlite.config import ConfigError, load_values
from titanlite.config.hf.config_json import NO_OPTION, hf_config, model_options
from titanlite.config.hf.families import FAMILIES, TOGETHER
from titanlite.config.hf.values import read_json_object, token_ids
from titanlite.config.schema import Model, count_parameters


def model_of(folder: Path) -> Model:
    """Return the model that a folder's config.json describes. Raises ConfigError if it is unusable or too large."""
    file, weights = folder / "config.json", folder.glob("*.safetensors")
    sizes = [each.stat().st_size for each in weights if each.is_file()]
    model = load_values({"model": model_options(folder), "training": {"seq_len": 1}}, str(file), []).config.model
    if sizes and (n_parameters := count_parameters(model)) > max(2 * sum(sizes), 2**28):  # at most two weights per byte
        problem = f"has {n_parameters} parameters, and the *.safetensors beside it {sum(sizes)} bytes"
        raise ConfigError([f"{file}: its model {problem}; expected the config.json of these weights"])
    return model


def config_files(
    options: Model, source: Path | None, *, torch_dtype: str, max_seq_len: int, bos: int | None, eos: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json of a model. `source` is the folder of the released model that the
    run started from. Its BOS and EOS ids are kept if the tokenizer's are among them. Other arguments: as for hf_config.
    Raises ConfigError if transformers has no such model, or a file of the release is wrong."""
    arguments: dict[str, Any] = {"max_seq_len": max_seq_len, "torch_dtype": torch_dtype}
    if source is None:
        config = hf_config(options, **arguments, bos=bos, eos=eos)
        return config, _generation(config)
    released, file = read_json_object(source / "config.json"), source / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    special_tokens = {"bos_token_id": bos, "eos_token_id": eos}
    for key, own in list(special_tokens.items()):
        known = token_ids(released, key, source / "config.json") + token_ids(generation, key, file)
        if own is None or own in known:
            del special_tokens[key]
    after = hf_config(options, **arguments, bos=None, eos=None)
    before = hf_config(model_of(source), **arguments, bos=None, eos=None)
    before |= {key: released.get(key) for key in NO_OPTION if key in before}
    changed = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    if "max_position_embeddings" in changed and after["rope_scaling"]:
        changed.add("rope_scaling")  # rope_scaling may take its original context length from max_position_embeddings
    if released["model_type"] not in FAMILIES:  # kimi_k2, which transformers loads as deepseek_v3
        changed.add("model_type")
    if "model_type" in changed:  # the new type has other defaults for missing keys
        changed |= after.keys() - released.keys()
    for keys in TOGETHER:
        changed |= keys if changed & keys else set()
    dtype = [key for key in ("dtype", "torch_dtype") if key in released] or ["torch_dtype"]
    changed |= {"auto_map", "quantization_config"}  # an export has no code and no quantized weights
    config = {key: value for key, value in released.items() if key not in changed}
    config |= {key: value for key, value in after.items() if key in changed} | special_tokens
    config |= dict.fromkeys(dtype, torch_dtype)
    return config, generation | special_tokens if generation else _generation(config)


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    """Return a generation_config.json that repeats the special tokens of config.json."""
    special_tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
    return {"_from_model_config": True, **{key: ids for key, ids in special_tokens.items() if ids is not None}}
