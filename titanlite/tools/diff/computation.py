"""Find the inputs from which a step computes each of its tensors, by the names of the fingerprints."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

GRADIENT_NORM = "gradient norm"
"""Name of the norm over all gradients, which clipping uses. compare.py computes it, since fingerprint files lack it."""
BACKWARD_ORDER = (
    *(r"ffn_post_norm\.", r"feed_forward\.(.+\.)?w2", r"feed_forward\.", r"ffn_norm\."),
    *(r"attention_post_norm\.", r"attention\.wo", r"attention\.", r"attention_norm\."),
)  # patterns of the names of a block's parameters, in the order in which the backward computes their gradients


def inputs_of_entries(names: Collection[str]) -> dict[str, list[str]]:
    """Return the inputs of each entry, in the order of computation. Entries with the same inputs share one list."""
    found, weights, states, updated = _grouped(names)
    of_module = defaultdict[str, list[str]](list)
    for name in sorted(found["gradient"], key=_backward_order):
        of_module[module_of(name)].append(f"gradient {name}")
    present, recorded = {*names, GRADIENT_NORM}, {*found["forward"], *found["backward"]} - {"loss"}
    modules = in_order(recorded | of_module.keys() - {"output", "position_embeddings"})  # these two record no output

    def known(*entries: str) -> list[str]:
        return [each for each in entries if each in present]

    inputs = {name: [] for name in ("input tokens", "input targets", *(f"input {each}" for each in found["input"]))}
    own, inputs_of_module = known("input tokens"), {}
    for module in modules:
        inputs_of_module[module] = inputs[f"forward {module}"] = own + weights[module]
        own = known(f"forward {module}") or own
        if module == "tok_embeddings":
            own = own + weights["position_embeddings"]  # the model adds positions to the token embeddings
    own = [*own, *(weights["output"] or weights["tok_embeddings"]), *known("input targets")]
    inputs["forward loss"] = inputs_of_loss = own
    inputs |= dict.fromkeys(of_module["output"], own)
    for module in reversed(modules):
        inputs[f"backward {module}"] = own
        own = [f"backward {module}", *inputs_of_module[module]] if f"backward {module}" in present else own
        inputs |= dict.fromkeys(of_module[module], own)
    inputs |= dict.fromkeys(of_module["position_embeddings"], own)
    if "gradient output.weight" not in present and "gradient tok_embeddings.weight" in present:  # the weights are tied
        inputs["gradient tok_embeddings.weight"] = own + inputs_of_loss
    inputs[GRADIENT_NORM] = [f"gradient {name}" for name in found["gradient"]]
    for weight, entries in updated.items():
        of_all = known(f"gradient {weight}", GRADIENT_NORM)
        inputs |= {name: of_all + known(name.replace("update", "input", 1)) for name in entries if name.count(" ") > 1}
        inputs[f"update {weight}"] = [*of_all, *known(f"input {weight}"), *states[weight]]
    inputs |= {name: [] for name in sorted(present - inputs.keys())}  # tensors that no model of titanlite has
    return {name: own for name, own in inputs.items() if name in present}


def _grouped(names: Collection[str]) -> tuple[defaultdict[str, list[str]], ...]:
    """Return the tensors of each phase, the weights of each module, and the states and the update of each weight."""
    found, weights, states, updated = (defaultdict[str, list[str]](list) for _ in range(4))
    for name in in_order(names, lambda name: name.partition(" ")[2]):
        phase, _, tensor = name.partition(" ")
        found[phase].append(tensor)
        if phase == "input":  # this phase has weights, buffers, optimizer states
            weight, _, state = tensor.partition(" ")
            (states[weight] if state else weights[module_of(tensor)]).append(name)
        elif phase == "update":
            updated[tensor.split(" ")[0]].append(name)
    return found, weights, states, updated


def _backward_order(parameter: str) -> int:
    name = re.sub(r"^layers\.\d+\.", "", parameter)
    return next((n for n, pattern in enumerate(BACKWARD_ORDER) if re.match(pattern, name)), 0)


def in_order(names: Iterable[str], tensor_of: Callable[[str], str] = str) -> list[str]:
    """Sort names in the model's order, unknown names last. `tensor_of` returns the module or tensor in a name."""
    first = ["tok_embeddings", "position_embeddings", "layers", "norm", "output"]

    def key(name: str) -> tuple[int, int, str]:
        head, number, *_ = [*tensor_of(name).split(" ")[0].split("."), "0"]
        number = int(number) if head == "layers" and number.isdigit() else 0
        return first.index(head) if head in first else len(first), number, tensor_of(name)

    return sorted(set(names), key=key)


def module_of(tensor: str) -> str:
    """Return the module that a tensor belongs to: layers.3 for layers.3.attention.wq.weight."""
    names = tensor.split(" ")[0].split(".")
    return ".".join(names[: 2 if names[0] == "layers" else 1])
