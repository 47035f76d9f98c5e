"""The rules between the options of Muon and of low-bit optimizers and others."""

from titanlite.config.loader import Rejections
from titanlite.config.schema import Config

DTYPE, NAME = "training.dtype", "optimizer.name"
STATES, ROUNDING = "optimizer.state_dtype", "optimizer.stochastic_rounding"


def optimizer_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options that contradict those of an optimizer that is not torch's own. `changed` has the keys whose value
    is not the default."""
    training, optimizer = config.training, config.optimizer
    low_bit = optimizer.state_dtype != "auto" or optimizer.stochastic_rounding
    if optimizer.stochastic_rounding and training.dtype != "bfloat16":
        reject(ROUNDING, f'the weights are {training.dtype}; set false, or {DTYPE} = "bfloat16"', DTYPE)
    if optimizer.state_dtype != "auto" and training.dtype == "float64":
        reject(STATES, f'{DTYPE} = "float64" is for parity tests; set "auto"', DTYPE)
    if low_bit and "optimizer.implementation" in changed:
        message = "torchao computes the step with state_dtype or stochastic_rounding; remove it"
        reject("optimizer.implementation", message, STATES, ROUNDING)
    if optimizer.name == "Muon" and low_bit:
        message = 'low-bit steps are those of Adam; remove it, or set optimizer.name = "AdamW"'
        reject(ROUNDING if optimizer.stochastic_rounding else STATES, message, NAME)
    if optimizer.name == "Muon" and training.enable_cpu_offload:
        message = 'Muon multiplies matrices, on the device; set false, or optimizer.name = "AdamW"'
        reject("training.enable_cpu_offload", message, NAME)
