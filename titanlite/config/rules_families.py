"""Rules about options of model families other than Llama: norms, activations, positions, and kinds of layers."""

from titanlite.config.keys import EXPERTS, LATENT, LAYERS, TENSOR
from titanlite.config.loader import Rejections, show
from titanlite.config.model_sizes import COMMON
from titanlite.config.schema import Config, Model

ROTARY, POSITIONS = "model.partial_rotary_factor", "model.learned_positions"
SCALED, SCALING_TYPE = "model.rope_scaling_factor", "model.rope_scaling_type"
FACTORS = ("rope_short_factors", "rope_long_factors")


def family_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options of model families that contradict other options or that the model does not read."""
    model, tensor = config.model, config.parallelism.tensor_parallel_degree
    if model.qk_norm == "all_heads" and model.norm != "rms":
        message = f"all heads together have RMSNorm only, and model.norm = {show(model.norm)}; set true or false"
        reject("model.qk_norm", message, "model.norm")
    positions, seq_len = model.learned_positions, config.training.seq_len
    if positions and positions < seq_len:
        reject(POSITIONS, f"expected 0, or at least training.seq_len = {seq_len}", "training.seq_len")
    elif positions % tensor:
        message = f"expected a divisor of {POSITIONS} = {positions}, which are sharded over these ranks"
        reject(TENSOR, message, POSITIONS)
    if model.moe.n_experts and (model.activation != "silu" or not model.gated_ffn):
        key = "model.activation" if model.activation != "silu" else "model.gated_ffn"
        reject(key, "experts are SwiGLU layers; remove it", EXPERTS)
    _rotary_rules(model, changed, reject)
    if model.llama4_scaling_beta and seq_len > model.rope_original_seq_len:
        message = f"expected at most model.rope_original_seq_len = {model.rope_original_seq_len}: queries at later "
        message += "positions have a factor (model.llama4_scaling_beta), which is unsupported"
        reject("training.seq_len", message, "model.llama4_scaling_beta", "model.rope_original_seq_len")
    for number, kind in enumerate(model.layer_pattern):
        if not (kind.experts or model.moe.n_experts):
            reject(f"{LAYERS}.{number}.experts", f"read only with {EXPERTS}; set that, or remove it", EXPERTS, LAYERS)
    if model.hf_model_type:
        from titanlite.config.hf.families import FAMILIES  # imported here, since few configs set hf_model_type

        if model.hf_model_type not in FAMILIES:
            reject("model.hf_model_type", f"expected one of {', '.join(map(show, FAMILIES))}, or nothing")


def _rotary_rules(model: Model, changed: set[str], reject: Rejections) -> None:
    """Reject wrong numbers of rotated channels or longrope factors, and options of RoPE scaling that no layer reads."""
    layers, reads = model.of_layers(), ("model.head_dim", ROTARY, LAYERS, LATENT)
    odd = [layer.rope_dim for layer in layers if layer.rope_dim % 2]
    if odd and not model.rope_width % 2:
        where = LAYERS if model.layer_pattern else ROTARY
        reject(where, f"expected an even number of rotated channels, got {odd[0]} of {model.rope_width}", *reads)
    if SCALED not in changed and all(layer.rope_scaling_factor == 1 for layer in layers):
        read = {"rope_theta", *FACTORS, "rope_original_seq_len" if model.llama4_scaling_beta else ""}
        names = {key.removeprefix("model.") for key in changed if key.startswith("model.rope_")} - read
        for name in sorted(name for name in names if getattr(model, name) != COMMON.get(name)):
            reject(f"model.{name}", f"read only when {SCALED} is above 1; set that, or remove it", SCALED, LAYERS)
    _longrope_rules(model, reads, reject)


def _longrope_rules(model: Model, reads: tuple[str, ...], reject: Rejections) -> None:
    layers = model.of_layers() if model.rope_scaling_type == "longrope" else []
    pairs = [layer.rope_dim // 2 for layer in layers if layer.rope_scaling_factor > 1 and layer.rope_dim]
    for name in FACTORS:
        n_factors = len(getattr(model, name))
        wrong = [n_pairs for n_pairs in pairs or [0] if n_pairs != n_factors]
        if wrong:
            message = f"expected a factor for each of the {wrong[0]} rotated pairs of channels, got {n_factors}"
            message = message if pairs else 'read only when the rotary embedding is scaled by "longrope"; remove it'
            reject(f"model.{name}", message, SCALING_TYPE, SCALED, *reads)
    if pairs and model.rope_original_seq_len == 1:
        reject("model.rope_original_seq_len", "expected 2 or more; longrope takes its logarithm", SCALING_TYPE, SCALED)
