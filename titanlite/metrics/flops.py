"""Count the floating-point operations of a model, for MFU."""

from collections.abc import Mapping

from titanlite.config.schema import Model


def flops_per_token(sizes: Mapping[str, int], model: Model, seq_len: int) -> int:
    """Return the floating-point operations to train on one token: 6 N + 12 L H K T (L layers, H heads, K head_dim, T
    tokens; torchtitan, PaLM: arXiv:2204.02311, appendix B). `sizes`: the elements of each parameter of the full model.
    N counts every weight that multiplies a token's activations: an input embedding counts only if it is tied to the
    output head, and of experts only as many as a token uses. 12 L H K T (6 L H (K + V) T with values of width V) counts
    attention without a causal mask; T is at most the layer's sliding window. Recomputed activations are not counted."""
    looked_up = ("position_embeddings",) if model.tie_embeddings else ("position_embeddings", "tok_embeddings")
    counted = [n for name, n in sizes.items() if not name.startswith(looked_up)]
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    inactive = experts - experts * model.moe.n_experts_per_token // max(model.moe.n_experts, 1)
    attended = sum(min(seq_len, layer.sliding_window or seq_len) for layer in model.of_layers())
    channels = model.n_heads * (model.head_dim + model.v_head_dim)
    return 6 * (sum(counted) - inactive) + 6 * channels * attended
