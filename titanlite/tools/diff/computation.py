"""What a step computes from what, by the names of its fingerprints."""

import re
from collections.abc import Collection, Iterable

GRADIENT_NORM = "gradient norm"
"""The norm over all gradients, by which they are clipped. No file has it: it follows from the gradients' norms."""
BACKWARD_ORDER = (
    *(r"ffn_post_norm\.", r"feed_forward\.(.+\.)?w2", r"feed_forward\.", r"ffn_norm\."),
    *(r"attention_post_norm\.", r"attention\.wo", r"attention\.", r"attention_norm\."),
)
"""What the names of a block's parameters begin with, in the order in which the backward comes to them."""


def inputs_of_entries(names: Collection[str]) -> dict[str, list[str]]:
    """Return what each entry of a step is computed from, entries among `names` or GRADIENT_NORM, in the order of
    computation: inputs, forward, backward with the gradients of weights, update."""
    parameters = in_order(name.removeprefix("gradient ") for name in names if name.startswith("gradient "))
    modules = in_order(name.removeprefix("forward ") for name in names if name.startswith("forward "))
    modules = [module for module in modules if module != "loss"]
    inputs: dict[str, list[str]] = {name: [] for name in ("input tokens", "input targets")}
    tensors = in_order(name.removeprefix("input ") for name in names if name.startswith("input "))
    inputs |= {f"input {tensor}": [] for tensor in tensors if f"input {tensor}" not in inputs}

    def weights_of(module: str) -> list[str]:  # buffers, too, but no optimizer states
        return [f"input {name}" for name in tensors if name.startswith(f"{module}.") and " " not in name]

    def parameters_of(module: str) -> list[str]:
        return sorted((name for name in parameters if name.startswith(f"{module}.")), key=_backward_order)

    before = ["input tokens"]
    inputs_of_module = {}
    for module in modules:
        inputs_of_module[module] = before + weights_of(module)
        inputs[f"forward {module}"] = inputs_of_module[module]
        before = [f"forward {module}"]
        if module == "tok_embeddings":
            before += weights_of("position_embeddings")  # which are added to its output
    inputs_of_loss = [*before, *(weights_of("output") or weights_of("tok_embeddings")), "input targets"]
    inputs["forward loss"] = inputs_of_loss
    own = inputs_of_loss
    of_gradients = {f"gradient {name}": own for name in parameters_of("output")}
    for module in reversed(modules):
        of_gradients[f"backward {module}"] = own
        own = [f"backward {module}", *inputs_of_module[module]]
        of_gradients |= {f"gradient {name}": own for name in parameters_of(module)}
    of_gradients |= {f"gradient {name}": own for name in parameters_of("position_embeddings")}
    if "gradient output.weight" not in names and "gradient tok_embeddings.weight" in of_gradients:  # tied
        of_gradients["gradient tok_embeddings.weight"] = own + inputs_of_loss
    inputs |= of_gradients
    inputs[GRADIENT_NORM] = [f"gradient {name}" for name in parameters]
    for name in parameters:
        states = [tensor for tensor in tensors if tensor.startswith(f"{name} ")]
        of_all = [f"gradient {name}", GRADIENT_NORM]
        updated = in_order(each.removeprefix("update ") for each in names if each.startswith(f"update {name} "))
        inputs |= {f"update {state}": [*of_all, f"input {state}"] for state in updated}
        inputs[f"update {name}"] = [*of_all, f"input {name}", *(f"input {state}" for state in states)]
    present = {*names, GRADIENT_NORM}
    return {name: [each for each in own if each in present] for name, own in inputs.items() if name in present}


def _backward_order(parameter: str) -> int:
    name = re.sub(r"^layers\.\d+\.", "", parameter)
    return next((n for n, pattern in enumerate(BACKWARD_ORDER) if re.match(pattern, name)), 0)


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of modules or of their tensors in the order of the model: embedding, layers by number, norm, output
    head; others last."""
    first = ["tok_embeddings", "position_embeddings", "layers", "norm", "output"]

    def key(name: str) -> tuple[int, int, str]:
        head, *rest = name.split()[0].split(".")
        number = int(rest[0]) if head == "layers" and rest and rest[0].isdigit() else 0
        return first.index(head) if head in first else len(first), number, name

    return sorted(set(names), key=key)


def module_of(tensor: str) -> str:
    """Return the module that a tensor belongs to: layers.3 of layers.3.attention.wq.weight."""
    names = tensor.split(" ")[0].split(".")
    return ".".join(names[: 2 if names[0] == "layers" else 1])
