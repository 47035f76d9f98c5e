"""Judge a parity test: a layout's differences from the single-process reference, tolerances, table and verdict."""

import math
import re

import torch

from titanlite.config import Config
from titanlite.tools.parity.reference import Trace, run_reference

FLOAT64_TOLERANCE = 1e-11
"""float64 rounds by 1.1e-16. A layout sums some thousand terms of a gradient in its own order, with a relative error of
1e-13. AdamW divides by the gradient's size, so an update has this error too, unless a gradient is only rounding."""
ROUNDING_FACTOR = 8
"""In lower precision than float64, a layout may differ from the reference by this many times the distance between the
reference and the reference in float64. Two independent rounding errors differ by up to twice their size. The rest of
the factor 8 is for the largest of many thousands of elements, and for sums over ranks, which round once more."""


Numbers = dict[str, float]  # a number for each entry of a trace


def differences(reference: Trace, layout: Trace) -> dict[str, float]:
    """Return the largest absolute difference of each entry of two traces, in the order of computation: the runs diverge
    at the first large difference. Missing entries, unequal shapes and NaN count as infinite."""
    result = dict.fromkeys(reference | layout, math.inf)
    for name in reference.keys() & layout.keys():
        if reference[name].shape == layout[name].shape:
            difference = (reference[name] - layout[name]).abs().max().item()
            result[name] = math.inf if math.isnan(difference) else difference
    return result


def tolerances(config: Config, reference: Trace, device: torch.device, *, steps: int) -> Numbers:
    """Return by how much each entry of a layout's trace may differ from the reference."""
    exact = config.replace(
        training__dtype="float64",
        training__mixed_precision_param="float64",
        float8__enable=False,
        int8__enable=False,
        optimizer__state_dtype="auto",
        optimizer__stochastic_rounding=False,
        optimizer__muon_dtype="float64" if config.optimizer.name == "Muon" else config.optimizer.muon_dtype,
    )
    if config == exact:
        return dict.fromkeys(reference, FLOAT64_TOLERANCE)
    return allowed_for(differences(reference, run_reference(exact, device, steps=steps)))


def allowed_for(rounding: Numbers) -> Numbers:
    """Return the tolerance of each entry. `rounding`: differences between the reference and a float64 reference."""
    # Take the largest error of all steps (of all parameters for final weights): a single error may be 0 by accident.
    for pattern in (r".* loss", r".* losses of datasets", r"step \d+ norm", r"final weight .*"):
        names = [name for name in rounding if re.fullmatch(pattern, name)]
        rounding |= dict.fromkeys(names, max((rounding[name] for name in names), default=0.0))
    return {name: max(ROUNDING_FACTOR * difference, FLOAT64_TOLERANCE) for name, difference in rounding.items()}


def judge(reference: Trace, layout: Trace, tolerances: Numbers) -> tuple[Numbers, Numbers, list[str], str]:
    """Return the differences, the tolerances, the entries that differ by more than their tolerance, and the verdict."""
    actual = differences(reference, layout)
    # Initial weights must agree bit for bit. An entry that the reference lacks has an infinite difference, so it fails.
    allowed = {name: 0.0 if name.startswith("initial weight") else tolerances.get(name, 0.0) for name in actual}
    wrong = [name for name, difference in actual.items() if difference > allowed[name]]
    if wrong:
        name = wrong[0]
        verdict = f"DIFFERENT: first in {name}, by {actual[name]:.1e} where {allowed[name]:.1e} is rounding"
    else:
        name = max(actual, key=lambda name: actual[name] / (allowed[name] or 1))
        verdict = f"equal: the largest difference, in {name}, is {actual[name]:.1e} of {allowed[name]:.1e} allowed"
    return actual, allowed, wrong, verdict


def print_comparison(reference: Trace, layout: Trace, tolerances: dict[str, float]) -> bool:
    """Print the table and the verdict, and return whether every difference is within its tolerance."""
    actual, allowed, wrong, conclusion = judge(reference, layout, tolerances)

    def verdict(*names: str) -> str:
        return "DIFFERS" if any(name in wrong for name in names) else "equal"

    print(f"{'':40} {'single process':>18} {'layout':>18} {'difference':>11} {'allowed':>9}")
    for name in [name for name, tensor in reference.items() if tensor.dim() == 0]:  # scalars: losses and norms
        values = f"{reference[name].item():18.12f} {layout[name].item():18.12f}"
        print(f"{name:40} {values} {actual[name]:11.1e} {allowed[name]:9.1e}  {verdict(name)}")
    print(f"\n{'largest difference':40} {'initial weight':>18} {'gradients':>18} {'final weight':>11}")
    for initial in [name for name in reference if name.startswith("initial weight ")]:
        parameter = initial.removeprefix("initial weight ")
        final = f"final weight {parameter}"
        gradients = [name for name in actual if name.endswith(f" gradient {parameter}")]
        largest = max((actual[name] for name in gradients), default=0.0)  # a frozen weight has no gradient
        values = f"{actual[initial]:18.1e} {largest:18.1e} {actual[final]:11.1e}"
        print(f"{parameter:40} {values} {'':9}  {verdict(initial, *gradients, final)}")
    print(f"\n{conclusion}")
    return not wrong


def print_tolerances(reference: Trace, layout: Trace, tolerances: Numbers) -> bool:
    """Like print_comparison, but print each entry's measured and allowed difference over its largest element."""
    actual, allowed, wrong, conclusion = judge(reference, layout, tolerances)
    print(f"{'largest difference over the largest element':60} {'measured':>9} {'allowed':>9}")
    for name, difference in actual.items():
        size = reference[name].abs().max().item() if name in reference else 0.0
        measured, most = (each / (size or 1.0) for each in (difference, allowed[name]))
        print(f"{name:60} {measured:9.1e} {most:9.1e}  {'DIFFERS' if name in wrong else 'equal'}")
    print(f"\n{conclusion}")
    return not wrong
