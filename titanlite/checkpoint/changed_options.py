"""Describe the options of a resumed run that differ from the options in its checkpoint."""

from collections.abc import Mapping
from typing import Any

from titanlite.config.differences import differences, shown
from titanlite.config.schema import LRScheduler, Optimizer
from titanlite.files.durable import parse
from titanlite.optimizer import lr_factor

OF_DATA = ("training.dataset", "training.text", "training.packing", "training.seq_len", "training.shuffle")
OF_DATA += ("training.long", "training.streaming", "validation.dataset", "validation.fraction", "model.hf_assets_path")
"""An option whose name begins with one of these strings decides which data a run reads."""


def changes(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
    """Return a line with the options that differ between a checkpoint (`old`) and this run (`new`). If the
    learning-rate schedules differ, the line also has the old learning rate of `step` and the new one of the next step.
    Raises ConfigError if the checkpoint's options are not valid."""
    line = f"changed since the checkpoint: {listed(old, new)}"
    if any(key == "optimizer.lr" or key.startswith("lr_scheduler.") for key in differences(old, new)):
        before, last = learning_rate(old, step), new["lr_scheduler.total_steps"]
        after = f"{learning_rate(new, step + 1):.3e} at step {step + 1}" if step < last else f"it ends at step {last}"
        line += f"; the learning-rate schedule is computed anew: lr {before:.3e} at step {step}, {after}"
    return line


def listed(old: Mapping[str, Any], new: Mapping[str, Any], begins: tuple[str, ...] = ("",)) -> str:
    """Return, with both values, the options that differ and whose names begin with one of the strings in `begins`."""
    changed = {key: values for key, values in differences(old, new).items() if key.startswith(begins)}
    return ", ".join(f"{key} {shown(before)} -> {shown(after)}" for key, (before, after) in changed.items())


def learning_rate(options: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of a step. `options`: a run's options by full name, such as "optimizer.lr"."""
    sections: list[Any] = []
    for name, kind in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler)):
        values = {key: options[f"{name}.{key}"] for key in kind.model_fields if f"{name}.{key}" in options}
        sections.append(parse(kind, values, f"the checkpoint's config: {name}"))
    optimizer, lr_scheduler = sections
    return optimizer.lr * lr_factor(step, lr_scheduler)
