"""gpt-oss: the model against transformers, and every layout with attention sinks and experts with biases against one
process in float64."""

import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    FULL,
    OFFLOAD,
    PP,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TP,
    ULYSSES,
    USP,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import compare
from tests.test_model import SMALL, TOLERANCE, build, draw_tokens, gradients, relative, section
from titanlite.hf.names import to_hf
from titanlite.model import ScaledDotProductAttention
from titanlite.parallel import parallelize, tiled_attention
from titanlite.parallel.attention import ATTENTION_BACKENDS
from titanlite.parallel.tiled_attention import TiledAttention
from titanlite.techniques import attention_sinks
from titanlite.techniques.attention_sinks import SinkAttention
from titanlite.techniques.moe import parallel as experts_parallel

YARN = {"rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_original_seq_len": 64, "rope_beta_fast": 8.0}
MOE: dict[str, Any] = {
    **{"n_experts": 6, "n_experts_per_token": 3, "expert_dim": 40, "normalize_scores": True},
    **{"expert_bias": True, "router_bias": True, "swiglu_limit": 0.7},
}
SIZE: dict[str, Any] = {
    **SMALL,
    **YARN,
    **{"head_dim": 24, "attention_bias": "all", "attention_sinks": True, "rope_yarn_truncate": False, "moe": MOE},
    "layer_pattern": [{"sliding_window": 7}, {"sliding_window": 0}],
}
"""With weights of tests/test_model.py, a tenth of the gates is above the limit and a fifth of the ups beyond it."""


# transformers --------------------------------------------------------------------------------------------------------

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.inner_attention": "self_attn",
    "feed_forward.router": "mlp.router",
}


def in_transformers(parameters: dict[str, Tensor], size: dict[str, Any]) -> dict[str, Tensor]:
    """Return parameters, or their gradients, under the names of transformers and in its order."""
    theirs = {}
    for name, value in parameters.items():
        prefix, module = "", name
        if name.startswith("layers."):
            _, layer, module = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        if module.startswith("feed_forward.experts."):
            kind = module.removeprefix("feed_forward.experts.")
            if kind.startswith("w3"):
                continue
            if kind.startswith("w1"):  # the columns of gates and ups alternate
                value = torch.stack((value, parameters[name.replace("w1", "w3")]), 2).flatten(1, 2)
            value = value if kind.endswith("bias") else value.transpose(1, 2)
            module = kind.replace("w1", "gate_up_proj").replace("w2", "down_proj")
            theirs[f"{prefix}mlp.experts.{module}"] = value
        else:
            module, _, kind = module.rpartition(".")
            theirs[f"{prefix}{MODULES[module]}.{kind}"] = to_hf(name, value, section(size))
    return theirs


def gpt_oss(size: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return transformers' model of these options, with these weights of ours."""
    from transformers import GptOssConfig, GptOssForCausalLM

    model = section(size)
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling_factor > 1:
        rope |= {
            **{"rope_type": "yarn", "factor": model.rope_scaling_factor, "beta_fast": model.rope_beta_fast},
            **{"beta_slow": model.rope_beta_slow, "truncate": model.rope_yarn_truncate},
            "original_max_position_embeddings": model.rope_original_seq_len,
        }
    settings = GptOssConfig(
        hidden_size=model.dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.expert_dim,
        vocab_size=model.vocab_size,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=size["max_seq_len"],
        rope_parameters=rope,
        num_local_experts=model.moe.n_experts,
        num_experts_per_tok=model.moe.n_experts_per_token,
        swiglu_limit=model.moe.swiglu_limit,
        swiglu_alpha=model.moe.swiglu_alpha,
        sliding_window=7,
        layer_types=["sliding_attention" if layer.sliding_window else "full_attention" for layer in model.of_layers()],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    hf = GptOssForCausalLM(settings).to(dtype)
    hf.load_state_dict(in_transformers(weights, size))
    return hf


def in_float64(hf: Any, llama: nn.Module) -> None:
    """Have transformers compute its norms in float64, and take our rotary table: both are in float32 there."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    norms = [module for module in hf.modules() if type(module).__name__ == "GptOssRMSNorm"]
    assert len(norms) == 7
    for module in norms:
        module.forward = functools.partial(norm, module)
    hf.model.rotary_emb.forward = lambda x, position_ids: llama.rope[0, position_ids].unbind(-1)


def differences_from_transformers(size: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Return the relative differences of logits and of every gradient."""
    llama = build(dtype, **{key: value for key, value in size.items() if key not in SMALL or SMALL[key] != value})
    hf = gpt_oss(size, {name: p.detach() for name, p in llama.named_parameters()}, dtype)
    if dtype == torch.float64:
        in_float64(hf, llama)
    tokens, targets = draw_tokens(2, 41)[:, :40], draw_tokens(2, 41)[:, 1:]
    ours, theirs = llama(tokens), hf(tokens, use_cache=False).logits
    expected, actual = gradients(hf, theirs, targets), in_transformers(gradients(llama, ours, targets), size)
    assert actual.keys() == expected.keys()
    return {"logits": relative(ours, theirs), **{name: relative(actual[name], expected[name]) for name in expected}}


VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "rounded ramp of YaRN": {"rope_yarn_truncate": True},
    "no scaling": {"rope_scaling_factor": 1.0, "rope_yarn_truncate": True},
    "no windows, another alpha": {"layer_pattern": [], "moe": MOE | {"swiglu_alpha": 1.1}},
    "bounds that few reach": {"moe": MOE | {"swiglu_limit": 7.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name):
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float64)
    assert {key: d for key, d in actual.items() if not d < TOLERANCE} == {}
    assert len([key for key in actual if key.endswith("sinks")]) == 3


@pytest.mark.parametrize("name", ["as released", "rounded ramp of YaRN"])
def test_unchanged_transformers_in_float32(name):
    """TOLERANCE for the 2^29 times larger rounding of float32, as in test_families.py."""
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float32)
    assert {key: d for key, d in actual.items() if not d < TOLERANCE * 2**29} == {}


# Layouts -------------------------------------------------------------------------------------------------------------

GPT_OSS: dict[str, Any] = {
    "model__attention_sinks": True,
    "model__attention_bias": "all",
    "model__layer_pattern": "[{sliding_window = 5}, {sliding_window = 0}]",
    **{f"model__{key}": value for key, value in YARN.items()},
    "model__rope_yarn_truncate": False,
    "model__moe__n_experts": 4,
    "model__moe__n_experts_per_token": 2,
    "model__moe__expert_dim": 24,
    "model__moe__normalize_scores": True,
    "model__moe__expert_bias": True,
    "model__moe__router_bias": True,
    "model__moe__swiglu_limit": 0.1,
}
EP, EP_4, SHARD_4 = ({key: n} for key, n in (
    ("expert_parallel_degree", 2), ("expert_parallel_degree", 4), ("data_parallel_shard_degree", 4)
))  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": SHARD,
    "tp": TP,
    "tp, ep": TP | EP,
    "cp": CP,
    "ulysses": ULYSSES,
    "pp x tp x cp": PP | TP | CP,
    "shard, ep, document mask": SHARD | EP | DOCUMENTS,
}
LAYOUTS |= {
    "one rank": {},
    "math backend": SHARD | {"training__attention_backend": "math"},
    "pp": PP,
    "ring 2 x ulysses 2": USP,
    "ring 2 x ulysses 2, documents": USP | DOCUMENTS,
    "ring 2 x ulysses 2 x tp": USP | TP,
    "replicate x shard, ep": REPLICATE | SHARD | EP,
    "shard x tp": SHARD | TP,
    "shard x tp, ep 4": SHARD | TP | EP_4,
    "shard 4 x tp, fewer heads and experts than ranks": SHARD_4 | {"tensor_parallel_degree": 4}
    | {"model__n_heads": 4, "model__moe__n_experts": 2},
    "shard 4, ep, fewer experts than ranks": SHARD_4 | EP | {"model__moe__n_experts": 2},
    "cp x tp, ep, documents": CP | TP | EP | DOCUMENTS,
    "zero-bubble, shard, ep": schedule("InterleavedZeroBubble") | SHARD | EP,
    "zero-bubble, cp": schedule("InterleavedZeroBubble") | CP,
    "full AC, cp x tp": FULL | CP | TP,
    "selective AC, tp, ep": SELECTIVE | TP | EP,
    "selective AC, ulysses": SELECTIVE | ULYSSES,
    "compiled, shard": COMPILED | SHARD,
    "compiled, selective AC, cp x tp": COMPILED | SELECTIVE | CP | TP,
    "compiled, ulysses x tp, ep": COMPILED | ULYSSES | TP | EP,
    "CPU offload, shard x tp": OFFLOAD | SHARD | TP,
    "Muon, shard x tp, ep": SHARD | TP | EP | {"optimizer__name": "Muon"},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = GPT_OSS | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    added = [
        name for name in actual if name.startswith("step 3 gradient layers.1.") and name.endswith(("sinks", "bias"))
    ]
    assert len(added) == 1 + 4 + 1 + 3
