"""The rules between the options of Muon and of low-bit optimizers and others."""

from titanlite.config.loader import Rejections
from titanlite.config.schema import Config

DTYPE, NAME = "training.dtype", "optimizer.name"
STATES, ROUNDING = "optimizer.state_dtype", "optimizer.stochastic_rounding"
OFFLOAD, ALL = "optimizer.enable_cpu_offload", "training.enable_cpu_offload"


def optimizer_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options that contradict those of an optimizer that is not torch's own. `changed` has the keys whose value
    is not the default."""
    training, optimizer = config.training, config.optimizer
    low_bit, offload = optimizer.state_dtype != "auto" or optimizer.stochastic_rounding, optimizer.enable_cpu_offload
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
    if offload and (low_bit or optimizer.name == "Muon"):
        message = "the CPU's step is that of Adam and AdamW in the weights' data type; set false, or remove the other"
        reject(OFFLOAD, message, NAME, STATES, ROUNDING)
    if offload and "optimizer.implementation" in changed:
        reject("optimizer.implementation", f"the step with {OFFLOAD} is fused; remove it", OFFLOAD)
    if offload and training.enable_cpu_offload:
        reject(OFFLOAD, "training.enable_cpu_offload keeps the states in host memory too; set one of the two", ALL)
    if optimizer.name == "Muon" and training.enable_cpu_offload:
        message = 'Muon multiplies matrices, on the device; set false, or optimizer.name = "AdamW"'
        reject(ALL, message, NAME)
