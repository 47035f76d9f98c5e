"""The rules between the options of float8 and int8 products and others."""

from titanlite.config.loader import Rejections, show
from titanlite.config.schema import Config

GATHER, ASYNC_TENSOR = "float8.enable_fsdp_float8_all_gather", "parallelism.enable_async_tensor_parallel"
TENSOR, CONTEXT = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
MOST_INT8_TOKENS = (2**31 - 1) // 127**2
"""Products of two 8-bit integers whose sum cannot overflow in 32 bits."""


def low_precision_rules(config: Config, reject: Rejections) -> None:
    """Reject options that contradict those of products in 8 bits, of a config that enables them."""
    float8, int8 = config.float8, config.int8
    section = "float8.enable" if float8.enable else "int8.enable"
    if float8.enable and int8.enable:
        reject("int8.enable", "float8.enable = true converts the same layers; set one of them false", "float8.enable")
    if float8.enable and float8.enable_fsdp_float8_all_gather and float8.recipe != "tensorwise":
        part = "block" if float8.recipe == "mxfp8" else "row"
        message = f"{show(float8.recipe)} has a scale per {part}, which FSDP cannot gather; set false, or "
        reject(GATHER, message + 'float8.recipe = "tensorwise"', "float8.recipe")
    if float8.enable and float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        message = f"the scales are for weights gathered in float8; set {GATHER} = true, or this to false"
        reject("float8.precompute_float8_dynamic_scale_for_fsdp", message, GATHER)
    wants_overlap = config.parallelism.enable_async_tensor_parallel and config.parallelism.tensor_parallel_degree > 1
    if wants_overlap and (int8.enable or float8.recipe == "mxfp8"):
        products = "INT8" if int8.enable else "MXFP8"
        message = f"torch.compile overlaps no collective with {products} products; set false"
        reject(ASYNC_TENSOR, message, section, "float8.recipe", TENSOR)
    _int8_range_rules(config, reject)


def _int8_range_rules(config: Config, reject: Rejections) -> None:
    """Reject a weight gradient that sums so many tokens that 32 bits may overflow."""
    training, parallelism = config.training, config.parallelism
    piped = parallelism.pipeline_parallel_degree > 1
    key = "parallelism.pipeline_parallel_microbatch_size" if piped else "training.local_batch_size"
    sequences = parallelism.pipeline_parallel_microbatch_size if piped else training.local_batch_size
    tokens = sequences * training.seq_len // parallelism.context_parallel_degree
    if config.int8.enable and tokens > MOST_INT8_TOKENS:
        message = f"the weight gradients of INT8 sum {tokens} tokens in 32 bits, which {MOST_INT8_TOKENS} cannot "
        reject(key, message + "overflow; set less", "int8.enable", "training.seq_len", CONTEXT)


def float8_device_rules(config: Config, on_cuda: bool, needs_cuda: str, reject: Rejections) -> None:
    """Reject float8 products that the launch's device, its compiler or the model's dtype has not."""
    param, emulated, options = config.training.mixed_precision_param, config.float8.emulate, config.compile
    if not emulated and not on_cuda:
        reject("float8.enable", f"{needs_cuda} float8.emulate = true, or this to false")
    elif not emulated and param != "bfloat16":
        message = f"float8 products are bfloat16, and the model computes in {param}; set float8.emulate = true, or "
        reject("float8.enable", message + "this to false")
    compiles_model = options.enable and "model" in options.components and options.backend == "inductor"
    if compiles_model and config.float8.recipe == "mxfp8" and not on_cuda:  # an assertion of inductor (torch 2.13)
        message = "inductor's C++ fails on the blocks of MXFP8, and this run is on a CPU; set"
        reject("compile.backend", f'{message} "aot_eager", or compile.enable = false')
