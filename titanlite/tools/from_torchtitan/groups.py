"""Convert torchtitan's keys group by group: model, schedule, data, float8, pipeline, checkpoints."""

import math
from pathlib import Path
from typing import Any, get_args

from titanlite.config.differences import shown
from titanlite.config.keys import END_LAYERS
from titanlite.config.loader import show
from titanlite.config.model_sizes import SIZES
from titanlite.config.stage_split import ONE_STAGE, Schedule
from titanlite.tools.from_torchtitan.conversion import (
    DATASETS,
    DEEPSEEK_ORIGINAL_SEQ_LEN,
    MISSING,
    MODELS,
    NOTES,
    OPTIONS,
    RENAMED,
    SAME,
    TAKEN,
    Conversion,
)

MODEL, FLAVOR, ASSETS = "model.name", "model.flavor", "model.hf_assets_path"
FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"
PIPELINE = "parallelism.pipeline_parallel_degree"


def convert(values: dict[str, Any]) -> Conversion:
    """Convert the contents of a TOML file of torchtitan."""
    conversion = Conversion(values)
    for key in SAME:
        conversion.put(key, conversion.get(key), key)
    for note in NOTES:
        if conversion.have(note.when) and not (note.unless and conversion.have(note.unless)):
            for key in note.keys:
                conversion.note_if_set(key, note.text, note.status)
    groups = _model, _schedule, _data, _validation, _activation_checkpoint, _float8, _pipeline, _experts, _checkpoint
    for group in groups:
        group(conversion)
    conversion.finish()
    return conversion


def _model(to: Conversion) -> None:
    name, flavor, path = to.get(MODEL), to.get(FLAVOR), to.get(ASSETS)
    if isinstance(path, str) and path.endswith("tokenizer.model"):
        to.note(ASSETS, "titanlite does not read this format: name a tokenizer.json, or its folder")
    elif isinstance(path, str) and not Path(path).is_absolute():
        to.note(ASSETS, "relative to the folder that the run is started in", "")
    key = FLAVOR if FLAVOR in to.values or MODEL not in to.values else MODEL
    changes = dict(MODELS.get(str(name), {}).get(str(flavor), {}))
    if not changes:
        to.put(FLAVOR, f"{name} {flavor}", key)
        models = ", ".join(sorted(MODELS))
        to.note(key, f"titanlite has no such model; of {models} it has torchtitan's flavors", MISSING)
        if key != MODEL:
            to.note_if_set(MODEL, "see model.flavor", MISSING)
        return
    to.put(FLAVOR, ours := changes.pop("flavor"), key)
    if not changes:
        to.statuses[key] = RENAMED  # a method of `to`, called below, may replace this status
    if changes.pop("document_mask", False):
        to.put("training.document_mask", True, key)
    if name == "deepseek_v3" and to.number("training.seq_len", 2048) <= DEEPSEEK_ORIGINAL_SEQ_LEN:
        changes |= {"rope_scaling_factor": 1.0, "mla.mscale_all_dim": 0.0}
        to.note(key, f"without YaRN, which torchtitan has above {DEEPSEEK_ORIGINAL_SEQ_LEN} tokens only")
    for option, value in changes.items():
        to.put(f"model.{option}", value, key)
    if key != MODEL:
        to.note_if_set(MODEL, f"part of model.flavor = {show(ours)}", RENAMED)


def _schedule(to: Conversion) -> None:
    """Convert the warmup and the decay so that every step has the same learning rate as in torchtitan, which shortens a
    warmup or a decay that exceeds the total, and counts a first step of the decay that still has the peak rate."""
    warmup_key, ratio_key = "lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio"
    steps = to.number("training.steps", 10_000)
    total = to.number("lr_scheduler.total_steps", steps)
    total = steps if total == -1 else total
    warmup = to.get(warmup_key)
    if type(warmup) is int and warmup > total:
        to.note(warmup_key, f"torchtitan shortens it to the {total} steps of the schedule")
        warmup = total
    to.put(warmup_key, warmup, warmup_key)
    ratio = to.values.get(ratio_key)
    is_ratio = ratio is None or (type(ratio) in (int, float) and 0 <= ratio <= 1)
    if type(warmup) is not int or type(total) is not int or total < 1 or not is_ratio:
        if ratio is not None:  # keep a wrong ratio, which the schema reports
            to.put(ratio_key, ratio, ratio_key)
        return
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    to.put(ratio_key, max(decay - 1, 0) / total, ratio_key)
    if decay > 0:
        text = f"torchtitan's decay of {decay} steps is one of {decay - 1} here: its first step is at the peak"
        to.note(ratio_key, f"{text}; with other steps than {total}, set it anew")


def _data(to: Conversion) -> None:
    key = "training.dataset"
    kind, path, options = _dataset(to, "training")
    for option, value in options.items():
        from_path = option == "dataset_path" and "training.dataset_path" in to.values
        to.put(f"training.{option}", value, "training.dataset_path" if from_path else key)
    to.put("training.shuffle", False, key)
    shard, replicate = (to.number(f"parallelism.data_parallel_{name}_degree", 1) for name in ("shard", "replicate"))
    shards, degree = OPTIONS["training.streaming_shards"].default, shard * replicate
    if options.get("streaming") and degree > 0 and shards % degree:
        to.put("training.streaming_shards", math.ceil(shards / degree) * degree, key)
    if "dataset_path" not in options:
        to.note_if_set("training.dataset_path", "empty: the dataset's own path", TAKEN)
    if kind not in DATASETS:
        to.note(key, "of torchtitan's datasets c4, c4_validation and c4_test are known; see training.dataset", MISSING)
    elif kind == "c4_test" and not path:
        to.note(key, "relative to torchtitan's repository; set training.dataset_path to where it is")
    elif kind != "c4_test":
        to.note(key, "the same documents, in another order: titanlite's does not depend on the number of ranks")


def _dataset(to: Conversion, section: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the name, the path and the options of a dataset. An unknown name is kept, and the schema reports it."""
    name, path = to.get(f"{section}.dataset"), to.get(f"{section}.dataset_path") or ""
    kind = name.lower() if isinstance(name, str) else shown(name)
    if kind == "c4" and not path:
        return kind, path, {"dataset": "c4", "streaming": True}
    return kind, path, DATASETS.get(kind, {"dataset": kind}) | ({"dataset_path": path} if path else {})


def _validation(to: Conversion) -> None:
    key, path_key, enable_key = "validation.dataset", "validation.dataset_path", "validation.enable"
    if to.get(enable_key) is not True:
        return
    kind, path, wanted = _dataset(to, "validation")
    trained = {option: to.options.get(f"training.{option}", ("", ""))[0] for option in ("dataset", "dataset_path")}
    if kind == "c4_validation" and not path and trained["dataset"] == "c4":
        to.note(key, "c4's own validation split", TAKEN)
    elif wanted["dataset"] == trained["dataset"] == "json":
        to.put(path_key, wanted["dataset_path"], path_key if path_key in to.values else key)
        to.note(key, "files at validation.dataset_path, of the kind that training.dataset names")
    elif wanted["dataset"] == trained["dataset"] == "hub" and wanted["dataset_path"] == trained["dataset_path"]:
        to.put("validation.dataset_split", wanted["dataset_split"], key)
        to.note(path_key, "the path of training.dataset_path", TAKEN)
    else:
        to.put(enable_key, False, enable_key)
        text = f"to validate on {shown(kind)}, titanlite needs training data of its kind and path"
        to.note(enable_key, text, MISSING)
        for name in ("dataset", "dataset_path", "local_batch_size", "seq_len", "freq", "steps"):
            to.note(f"validation.{name}", "see validation.enable", MISSING)
        return
    to.put("validation.freq", to.get("validation.freq"), "validation.freq")
    to.note("validation.freq", "the last step is validated too; the first is not")
    if not path:
        to.note_if_set(path_key, "empty: the dataset's own path", TAKEN)
    _validation_batches(to)


def _validation_batches(to: Conversion) -> None:
    """Convert the number of validation batches: torchtitan counts batches of a rank, titanlite global batches."""
    steps, size = to.get("validation.steps"), to.number("validation.local_batch_size", 8)
    batch, seq_len = to.number("training.global_batch_size", -1), to.get("validation.seq_len")
    shard, replicate = (to.number(f"parallelism.data_parallel_{key}_degree", -1) for key in ("shard", "replicate"))
    key = "validation.steps"
    if type(steps) is not int or steps < 1:
        to.put(key, steps, key)
    elif batch == -1 or shard > 0:
        ranks, batch = (1, to.number("training.local_batch_size", 8)) if batch == -1 else (shard * replicate, batch)
        to.put(key, max(math.ceil(steps * size * ranks / batch), 1), key)
        to.note(key, "global batches, with about as many sequences in all")
    else:
        to.put(key, steps, key)
        to.note(key, f"global batches of {batch}; torchtitan reads {size} sequences on each data-parallel rank instead")
    to.note_if_set("validation.local_batch_size", "validation has the batch size of training; see validation.steps")
    if seq_len != to.get("training.seq_len"):
        text = f"validation sequences have training.seq_len = {shown(to.get('training.seq_len'))} tokens, not {seq_len}"
        to.note("validation.seq_len" if "validation.seq_len" in to.values else key, text)
    else:
        to.note_if_set("validation.seq_len", "the same as training.seq_len", TAKEN)


def _activation_checkpoint(to: Conversion) -> None:
    mode_key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, option = to.get(mode_key), str(to.get(option_key))
    if mode == "selective" and option.isdecimal() and not int(option):
        mode = "full"
        to.note(option_key, "0 is every layer in torchtitan")
    to.put(mode_key, mode, mode_key)
    if mode == "selective" and option == "op":
        to.put(option_key, "every_second_mm", option_key)
        to.note(option_key, 'torchtitan\'s "op" saves every second matrix product; titanlite\'s "op" saves all')
    elif mode == "selective":
        to.put(option_key, int(option) if option.isdecimal() else option, option_key)
        to.note(option_key, "of so many layers one is recomputed; here the first, in torchtitan the last of them")
    elif option_key in to.values and option_key not in to.notes:
        to.unread([option_key], f"the mode is {shown(mode)}")


def _float8(to: Conversion) -> None:
    switch, of_0_1 = "model.converters", {"float8": FLOAT8, "mx": MX}
    converters = [of_0_1.get(name, name) for name in to.names(switch)]
    kind = next((name for name in (FLOAT8, MX) if name in converters), "")
    others = [name for name in converters if name != (kind or FLOAT8)]
    _mxfp8(to, switch, enabled=kind == MX)
    if others:
        to.note(switch, f"titanlite has no {', '.join(others)}", MISSING)
    elif not kind:
        to.note_if_set(switch, "none", TAKEN)
    recipe_key, filter_key, emulate_key = (f"{FLOAT8}.{name}" for name in ("recipe_name", "filter_fqns", "emulate"))
    gathers = [f"{FLOAT8}.enable_fsdp_float8_all_gather", f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"]
    if kind != FLOAT8:
        to.unread([recipe_key, filter_key, emulate_key, *gathers], f"{switch} does not turn float8 on")
        return
    to.put("float8.enable", True, switch)
    for key in (*gathers, emulate_key):
        to.put(key.replace(FLOAT8, "float8"), to.get(key) or False, key)
    to.put("float8.recipe", to.get(recipe_key) or "tensorwise", recipe_key)
    filters = to.names(filter_key)
    to.put("float8.filter_fqns", [name for name in filters if name != "auto_filter_small_kn"], filter_key)
    if "auto_filter_small_kn" in filters:
        to.note(filter_key, "there is no auto_filter_small_kn: name the layers that are too small")
    if SIZES.get(to.options[FLAVOR][0], {}).get("moe"):
        to.note(switch, "of a mixture of experts only attention and dense layers are converted")
    if not any(name in "output" for name in filters):
        text = "torchtitan would convert the output head, too; titanlite never does"
        to.note(filter_key if filter_key in to.values else switch, text)


def _mxfp8(to: Conversion, switch: str, *, enabled: bool) -> None:
    recipe_key, filter_key = f"{MX}.recipe_name", f"{MX}.filter_fqns"
    if not enabled:
        to.unread([recipe_key, filter_key], f"{switch} does not turn MXFP8 on")
        return
    recipe = to.get(recipe_key) or "mxfp8_cublas"
    is_known = recipe in ("mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated")
    to.put("float8.enable", True, switch)
    to.put("float8.recipe", "mxfp8" if is_known else recipe, recipe_key)
    if recipe == "mxfp8_emulated":
        to.put("float8.emulate", True, recipe_key)
    if is_known and recipe != "mxfp8_cublas_rceil":
        to.note(recipe_key, "scales are rounded up, as by mxfp8_cublas_rceil; torchtitan's are rounded down")
    to.put("float8.filter_fqns", [name for name in to.names(filter_key) if name != "output"], filter_key)
    to.note(switch, "layers whose sides are not multiples of 32 on a rank are left alone (torchtitan: 16)")


def _pipeline(to: Conversion) -> None:
    schedule_key = "parallelism.pipeline_parallel_schedule"
    layers_key = "parallelism.pipeline_parallel_layers_per_stage"
    degree, name = to.number(PIPELINE, 1), str(to.get(schedule_key))
    names = {each.lower(): each for each in get_args(Schedule)}
    schedule = names.get(name.lower().replace("_", ""), name)
    to.put(schedule_key, schedule, schedule_key)
    if degree > 1:
        text = "0.2.2 leaves gradients of a pipeline multiplied by the number of tokens, so that it clips every step"
        to.note(PIPELINE if PIPELINE in to.values else schedule_key, f"{text}; titanlite divides them")
    flavor = SIZES.get(to.options[FLAVOR][0], {})
    n_layers = to.options.get("model.n_layers", (flavor.get("n_layers", 0), ""))[0]
    per_stage = to.values.get(layers_key)
    if degree == 1:
        to.unread([layers_key, *END_LAYERS], f"{PIPELINE} is 1")
        for key in END_LAYERS:
            del to.options[key]
    if per_stage is None or degree == 1:
        return
    ends = sum(to.number(key, 1) for key in END_LAYERS)
    n_stages = math.ceil((n_layers + ends) / per_stage) if type(per_stage) is int and per_stage > 0 else 0
    if n_stages and n_stages % degree == 0 and (n_stages // degree == 1) == (schedule in ONE_STAGE):
        to.put("parallelism.pipeline_parallel_stages_per_rank", n_stages // degree, layers_key)
    else:
        to.note(layers_key, f"no number of stages per rank under {show(schedule)}; torchtitan rejects it, too", MISSING)


def _experts(to: Conversion) -> None:
    key, (flavor, _) = "parallelism.expert_parallel_degree", to.options[FLAVOR]
    if SIZES.get(flavor, {}).get("moe"):
        to.put(key, to.get(key), key)
    else:
        to.unread([key], "the model has no experts")


def _checkpoint(to: Conversion) -> None:
    mode_key, last_key, export_key = "checkpoint.async_mode", "checkpoint.last_save_in_hf", "checkpoint.export_dtype"
    mode = to.get(mode_key)
    mode = mode.lower() if isinstance(mode, str) else mode
    to.put(mode_key, "async" if mode == "async_with_pinned_mem" else mode, mode_key)
    if mode == "async_with_pinned_mem":
        to.note(mode_key, "the state is copied to host memory, and written without a process of its own")
    if to.get("checkpoint.enable") is not True:
        return
    to.put(last_key, to.get(last_key) or False, last_key)
    if to.get(last_key) is True:
        export = to.get(export_key)
        to.put(export_key, "auto" if export == "float32" else export, export_key)
        if export == "float32":
            to.note(export_key, "torchtitan leaves the weights in training.dtype then")
    _initial_weights(to)


def _initial_weights(to: Conversion) -> None:
    path_key, hf_key, only_key = (f"checkpoint.initial_load_{name}" for name in ("path", "in_hf", "model_only"))
    path, from_hf = to.get(path_key) or "", to.get(hf_key) is True
    if path or from_hf:
        to.put("checkpoint.initial_load_path", path or to.get(ASSETS), path_key if path else hf_key)
    else:
        to.note_if_set(path_key, "none", TAKEN)
    if path and not from_hf:
        to.note(path_key, "titanlite reads its own checkpoints and Hugging Face folders, so export this one to that")
    if path or not from_hf:
        to.note_if_set(hf_key, "a folder with a config.json is a Hugging Face folder", TAKEN)
    lost = path and to.values.get(only_key) is False
    text = "initial weights only: optimizer states and the step are not loaded" if lost else "weights only, as here"
    to.note_if_set(only_key, text, MISSING if lost else TAKEN)
