"""Linear layers whose matrix products take 8-bit operands: float8 (torchao), MXFP8 and INT8.

Each product of a layer (output, input gradient, weight gradient) quantizes both operands by their current values
(dynamic scaling); all other tensors keep their dtypes.

- MXFP8 (OCP Microscaling, arXiv:2310.10537): float8_e4m3fn, in which 32 neighbours along the summed dimension share a
  scale: the smallest power of two with which none of the 32 overflows (NVIDIA's recipe, arXiv:2506.08027).
- INT8 (SwitchBack, arXiv:2304.13013, but in all three products): each row of the left operand and each column of the
  right operand has a scale. INT8 products are summed exactly, in int32.

This file multiplies local shards, because torchao's own layers do not work with DTensor: a DTensor hides torchao's
MXFP8 weight wrapper from the products, and aten._int_mm has no sharding strategy for DTensors."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite.config import ConfigError
from titanlite.config.schema import Float8, Int8
from titanlite.model import Llama

MX_BLOCK = 32  # number of values that share a scale in MXFP8
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def convert_linear_layers(
    stage: Llama,
    float8: Float8,
    int8: Int8,
    *,
    model: Callable[[], nn.Module] | None = None,
    tensor_parallel_degree: int,
    device: torch.device,
) -> None:
    """Convert linear layers of a model or a pipeline stage on the meta device, in place, before weights are sharded.

    The output head, whose rounding changes the loss most, and the router and the experts of a mixture are not
    converted. The hardware requires that both sides of a rank's weight are multiples of 16 (MXFP8: MX_BLOCK); other
    layers are not converted either. `model()` returns the full model; None: `stage` is the full model. Raises
    ConfigError if the device has no 8-bit products, or no layer of the full model is converted."""
    section, options = ("float8", float8) if float8.enable else ("int8", int8)
    is_mxfp8 = float8.enable and float8.recipe == "mxfp8"
    skipped, multiple = options.filter_fqns, (MX_BLOCK if is_mxfp8 else 16) * tensor_parallel_degree
    needed, products = ((10, 0), "MXFP8") if is_mxfp8 else ((8, 9), "float8")
    on_cuda = float8.enable and not float8.emulate and device.type == "cuda"
    if on_cuda and torch.cuda.get_device_capability(device) < needed:
        name, advice = torch.cuda.get_device_name(device), "set float8.emulate = true, or this to false"
        raise ConfigError([f"float8.enable = true: {name} has no {products} products; {advice}"])
    names = _convertible(stage, skipped, multiple)
    if not names and not (model and _convertible(model(), skipped, multiple)):
        raise ConfigError([f"{section}.enable = true: no layer is converted; see {section}.filter_fqns, or set false"])
    if float8.enable and not is_mxfp8:
        from titanlite.parallel.float8 import convert_to_float8  # imported here: torchao takes a second to import

        convert_to_float8(stage, float8, names)
        return
    product = "int8" if int8.enable else "mxfp8, emulated" if float8.emulate else "mxfp8"
    for name in names:
        layer = stage.get_submodule(name)
        layer.__class__, layer.product = LowPrecisionLinear, product


def _convertible(model: nn.Module, skipped: list[str], multiple: int) -> list[str]:
    linear = [(name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name, weight in linear if all(side % multiple == 0 for side in weight.shape)]
    skipped = (".feed_forward.shared.", *skipped)
    return [name for name in names if name != "output" and not any(fqn in name for fqn in skipped)]


class LowPrecisionLinear(nn.Linear):
    """A linear layer whose products have 8-bit operands. `product` is a key of PRODUCTS."""

    product: str

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [..., O] for x [..., I]. If the weight is a DTensor, ranks multiply local shards."""
        weight_OI = self.weight
        if isinstance(weight_OI, DTensor):
            mesh, (placement,) = weight_OI.device_mesh, weight_OI.placements
            inputs, input_gradient, output, weight_gradient = placements_of_products(placement, x.dim() - 1)
            local = x.redistribute(placements=[inputs]).to_local(grad_placements=[input_gradient])
            weight = weight_OI.to_local(grad_placements=[weight_gradient])
            out = DTensor.from_local(_Products.apply(local, weight, self.product), mesh, [output], run_check=False)
        else:
            out = _Products.apply(x, weight_OI, self.product)
        return out if self.bias is None else out + self.bias


def placements_of_products(weight: Placement, last: int) -> tuple[Placement, Placement, Placement, Placement]:
    """Return the placements of a layer's input, input gradient, output and weight gradient, given the placement of the
    weight [O, I]. `last`: index of the input's last dimension."""
    if weight == Shard(0):  # column-wise tensor parallel
        return Replicate(), Partial(), Shard(last), weight
    if weight == Shard(1):  # row-wise tensor parallel
        return Shard(last), Shard(last), Partial(), weight
    return Shard(0), Shard(0), Shard(0), Partial()  # replicated weight: the tokens are sharded


class _Products(torch.autograd.Function):
    """The three products of a linear layer. Each product quantizes its operands along the dimension it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.kind = kind
        return PRODUCTS[kind](x.flatten(0, -2), weight_OI).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight_OI), product = ctx.saved_tensors, PRODUCTS[ctx.kind]
        gradient_NO, of_input, of_weight = gradient.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            of_input = product(gradient_NO, weight_OI.t()).view_as(x)
        if ctx.needs_input_grad[1]:
            of_weight = product(gradient_NO.t(), x.flatten(0, -2).t())
        return of_input, of_weight, None


def to_mxfp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as float8_e4m3fn [M, K], K padded with zeros to a multiple of MX_BLOCK, and each block's scale as an
    exponent of 2 from -127 to 127: [M, K / MX_BLOCK], float32 or float64. A NaN makes all values of its block NaN."""
    wide = F.pad(x_MK, (0, -x_MK.shape[1] % MX_BLOCK)).to(torch.promote_types(x_MK.dtype, torch.float32))
    blocks = wide.unflatten(1, (-1, MX_BLOCK))
    exponents = (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil().clamp(-127, 127)
    # Clamp to 448, float8's largest value: the logarithm's rounding may let a value exceed it, and infinity exceeds it.
    values = (blocks * (-exponents).exp2()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(1), exponents.squeeze(-1)


def from_mxfp8(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `to_mxfp8` times the scales of their blocks, [M, K] in `dtype`."""
    blocks = values.unflatten(1, (-1, MX_BLOCK)).to(exponents.dtype) * exponents.exp2().unsqueeze(-1)
    return blocks.flatten(1).to(dtype)


def _mxfp8_emulated(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    left, right = (from_mxfp8(*to_mxfp8(operand), operand.dtype) for operand in (left_MK, right_NK))
    return left @ right.t()


def scales_of_mxfp8(exponents: Tensor) -> Tensor:
    """Return the scales of MXFP8 blocks as float8_e8m0fnu, in the order that cuBLAS expects."""
    from torchao.prototype.mx_formats.utils import to_blocked

    biased = torch.where(exponents.isnan(), 255, exponents + 127).to(torch.uint8)
    return to_blocked(biased.view(torch.float8_e8m0fnu))


def _mxfp8(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return the MXFP8 product in bfloat16, on a GPU of compute capability 10.0 or higher. Uses the private function
    torch._scaled_mm with a scale per block (called as torchao calls it; not run on any GPU yet)."""
    (left, of_left), (right, of_right) = map(to_mxfp8, (left_MK, right_NK))
    scales = scales_of_mxfp8(of_left), scales_of_mxfp8(of_right)
    return torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16)


def to_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as int8 [M, K] from -127 to 127, and the scales of its rows, [M, 1], in float32 or float64."""
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32))
    scales = wide.abs().amax(-1, keepdim=True) / 127
    return (wide / scales.clamp(min=torch.finfo(wide.dtype).tiny)).round().to(torch.int8), scales


def _int8(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return the INT8 product. Operands are padded with zeros: on CUDA, the private torch._int_mm needs M > 16 and K in
    multiples of 8; on some CPUs, it returns 0 for K = 1 (torch 2.11). N, a weight's side, is a multiple of 8."""
    (left, left_scales), (right, right_scales) = map(to_int8, (left_MK, right_NK))
    rows, columns = max(17 - len(left), 0), -left.shape[1] % 8
    if rows or columns:
        left, right = F.pad(left, (0, columns, 0, rows)), F.pad(right, (0, columns))
    sums = torch._int_mm(left.contiguous(), right.contiguous().t())[: len(left_MK)]
    return (sums * left_scales * right_scales.t()).to(left_MK.dtype)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mxfp8": _mxfp8,
    "mxfp8, emulated": _mxfp8_emulated,
    "int8": _int8,
}
"""Functions that multiply operands [M, K] and [N, K]. Each returns [M, N] in the dtype of the first operand."""
