"""What a run that resumes has changed: its options that differ from those of the checkpoint."""

from collections.abc import Mapping
from typing import Any

from titanlite.config.differences import differences, shown
from titanlite.config.schema import LRScheduler, Optimizer
from titanlite.files.durable import parse
from titanlite.optimizer import lr_factor


def changes(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
    """Return a line with the options that differ from a checkpoint's and, if the learning-rate schedule is another one,
    the learning rates of `step`, the checkpoint's, and of the next one. Raises ConfigError if its schedule is not
    valid."""
    changed = differences(old, new)
    line = f"changed since the checkpoint: {listed(changed)}"
    if "optimizer.lr" in changed or any(key.startswith("lr_scheduler.") for key in changed):
        line += f"; the learning-rate schedule is computed anew: lr {learning_rate(old, step):.3e} at step {step}, "
        line += f"{learning_rate(new, step + 1):.3e} at step {step + 1}"
    return line


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return options with their old and new values."""
    return ", ".join(f"{key} {shown(before)} -> {shown(after)}" for key, (before, after) in changed.items())


def changed_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the options by which a run has other data than a checkpoint, and what a validation set does, in brackets;
    without such options, nothing."""
    sections = ("training.dataset", "training.text", "training.packing", "training.seq_len", "training.shuffle")
    sections += ("training.long", "training.streaming", "validation.dataset", "validation.fraction", "model.hf_assets")
    changed = {key: values for key, values in differences(old, new).items() if key.startswith(sections)}
    why = "; without a validation set of its own, a run leaves validation.fraction of the documents out of training"
    why *= any(key.startswith("validation.") for key in changed)
    return f" (changed: {listed(changed)}{why})" if changed else ""


def learning_rate(options: Mapping[str, Any], step: int) -> float:
    """Return the learning rate that the options of a run give at a step."""
    sections: list[Any] = []
    for name, kind in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler)):
        values = {key: options[f"{name}.{key}"] for key in kind.model_fields if f"{name}.{key}" in options}
        sections.append(parse(kind, values, f"the checkpoint's config: {name}"))
    optimizer, lr_scheduler = sections
    return optimizer.lr * lr_factor(step, lr_scheduler)
