"""Write what a program did in one optimizer step as a folder for `titanlite parity --against FOLDER`.

It needs torch and safetensors only. docs/verify_your_trainer.md describes the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_folder(
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    step: Mapping[str, Any],
    gradients: Mapping[str, Tensor] | None = None,
    weights_after: Mapping[str, Tensor] | None = None,
    document_positions: Tensor | None = None,
    experts: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder; files of an earlier step in it are replaced. The second step is written into FOLDER/second.

    Args:
        config: the content of the model's config.json.
        weights: full tensors before the step, by the names of transformers or of Llama.
        tokens: [B, T] token ids of the global batch.
        targets: [B, T] the id to predict at each position; -100: none.
        step: the content of step.json.
        gradients: full tensors before clipping, by the names of the weights.
        weights_after: full tensors after the step.
        document_positions: [B, T] the position of each token in its document, if documents do not attend to each other.
        experts: [B, T, experts per token] the experts of each token, by layer: "layers.0".
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("gradients.safetensors", "weights_after.safetensors", "experts.safetensors"):
        (folder / file).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    (folder / "step.json").write_text(json.dumps(dict(step), indent=2) + "\n")
    batch = {"tokens": tokens, "targets": targets}
    if document_positions is not None:
        batch["document_positions"] = document_positions
    _save(batch, folder / "batch.safetensors")
    _save(weights, folder / "model.safetensors")
    if gradients is not None:
        _save(gradients, folder / "gradients.safetensors")
    if weights_after is not None:
        _save(weights_after, folder / "weights_after.safetensors")
    if experts is not None:
        _save(experts, folder / "experts.safetensors")


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU, which a later step does not change; of DTensors all of them must be gathered first."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
