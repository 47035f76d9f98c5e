"""The options of the model, by which all other sections are measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, model_validator

from titanlite.config.loader import Section
from titanlite.config.mla_schema import Mla, implied_head_dim
from titanlite.config.model_sizes import SIZES
from titanlite.config.moe_schema import Moe
from titanlite.config.types import MOST_LAYERS, Count, CountOrZero, NodePath, Positive


class Model(Section):
    """`flavor` names a model of titanlite/config/model_sizes.py; from_hf is the model of a Hugging Face config.json.
    Every other key overrides its value there."""

    flavor: Literal[(*SIZES, "from_hf")] = "debug"  # type: ignore[valid-type]
    """Named model whose dimensions are the defaults of this section; from_hf: those of the config.json in the folder
    hf_assets_path, whose weights the run starts from (checkpoint.initial_load_path)."""
    hf_assets_path: NodePath = ""
    """A Hugging Face tokenizer.json, or the folder that contains one; empty: byte-level tokens."""
    dim: Count
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Number of transformer blocks."""
    n_heads: Count
    """Number of query heads."""
    n_kv_heads: Count
    """Number of KV heads; fewer than n_heads is grouped-query attention."""
    head_dim: Union[Literal[-1], Count]
    """Channels of a query, key or value head; -1: dim / n_heads, or what [model.mla] says."""
    ffn_dim: Count
    """Width of the SwiGLU feed-forward layer."""
    vocab_size: Count
    """Size of the vocabulary in the embedding and the output head; at least the tokenizer's."""
    norm_eps: Positive
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """Tied embeddings: use the embedding's weight as the output head's weight."""
    attention_bias: Literal["none", "qkv", "all"]
    """Biases of the attention layers; qkv: of the projections to queries, keys and values (Qwen2); all: of the output
    projection too."""
    mlp_bias: bool
    """Biases of the three feed-forward layers."""
    qk_norm: Union[bool, Literal["all_heads"]]
    """RMSNorm of queries and of keys before the rotary embedding. true: of every head (Qwen3); all_heads: of all heads
    together (OLMoE)."""
    sliding_window: CountOrZero
    """Sliding-window attention (Mistral): a token attends to itself and the sliding_window - 1 tokens before it, within
    its document; 0: to all tokens before it."""
    rope_theta: Positive
    """Base of the rotary embedding's frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Factor by which the rotary embedding's wavelengths are stretched for longer sequences; 1: no scaling."""
    rope_scaling_type: Literal["llama3", "linear", "yarn"]
    """Which wavelengths are stretched, if rope_scaling_factor is above 1. linear: all; llama3: long ones, as in Llama
    3.1; yarn: long ones, and attention is rescaled (YaRN)."""
    rope_low_freq_factor: Positive
    """llama3: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_high_freq_factor: Positive
    """llama3: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_fast: Positive
    """yarn: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_slow: Positive
    """yarn: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_attention_factor: Union[Literal[-1], Positive]
    """yarn: factor on queries and keys, in the cosines and sines; -1: 0.1 ln(rope_scaling_factor) + 1."""
    rope_original_seq_len: Count
    """llama3, yarn: sequence length in tokens that the model was trained with before the scaling."""
    moe: Moe = Moe()
    mla: Mla = Mla()

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's feed-forward layer is a mixture of experts."""
        moe = self.moe
        return moe.n_experts > 0 and layer >= moe.n_first_dense_layers and (layer + 1) % moe.every_n_layers == 0

    @property
    def expert_dim(self) -> int:
        """Width of an expert."""
        return self.ffn_dim if self.moe.expert_dim == -1 else self.moe.expert_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head of queries and keys with rotary embedding."""
        return self.mla.qk_rope_head_dim if self.mla.kv_lora_rank else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Channels of a head of values."""
        return self.mla.v_head_dim if self.mla.kv_lora_rank else self.head_dim

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one that saved: every dimension, as plain JSON."""
        dimensions = self.model_dump(exclude={"flavor", "hf_assets_path", "moe", "mla"})
        latents = self.mla.model_dump() if self.mla.kv_lora_rank else {}
        dimensions |= {f"mla.{key}": value for key, value in latents.items()}
        experts = self.moe.identity() if self.moe.n_experts else {}
        return dimensions | {f"moe.{key}": value for key, value in experts.items()}

    @model_validator(mode="before")
    @classmethod
    def _fill_from_flavor(cls, values: dict[str, Any]) -> dict[str, Any]:
        flavor, defaults = values.get("flavor", "debug"), SIZES["debug"]
        if flavor == "from_hf":
            if defaults.keys() - values.keys():  # a resolved config has them all, and needs the folder no more
                from titanlite.config.hf_config import options_from_hf

                defaults = options_from_hf(values.get("hf_assets_path", ""))
        elif isinstance(flavor, str):
            defaults = SIZES.get(flavor, defaults)
        options = {**defaults, **values}
        for name in ("moe", "mla"):
            if isinstance(values.get(name), dict):
                options[name] = {**defaults.get(name, {}), **values[name]}
        latent_head_dim = implied_head_dim(options.get("mla", {}))
        if latent_head_dim and values.get("head_dim", -1) == -1:
            options["head_dim"] = latent_head_dim
        dim, n_heads = options["dim"], options["n_heads"]
        if options["head_dim"] == -1 and type(dim) is type(n_heads) is int and 0 < n_heads <= dim and not dim % n_heads:
            options["head_dim"] = dim // n_heads
        return options


def layer_parameters(model: Model, layer: int) -> int:
    """Return the number of parameters of a layer."""
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    matrices = 2 * model.dim * (q_dim + kv_dim)
    if model.mla.kv_lora_rank:
        matrices = model.mla.parameters(model.dim, model.n_heads)
    if model.has_experts(layer):
        moe = model.moe
        matrices += model.dim * (moe.n_experts + 3 * model.expert_dim * (moe.n_experts + moe.n_shared_experts))
    else:
        matrices += 3 * model.dim * model.ffn_dim
    biases = {"none": 0, "qkv": q_dim + 2 * kv_dim, "all": q_dim + 2 * kv_dim + model.dim}[model.attention_bias]
    biases += (2 * model.ffn_dim + model.dim) * (model.mlp_bias and not model.has_experts(layer))
    norms = {False: 0, True: 2 * model.head_dim, "all_heads": q_dim + kv_dim}[model.qk_norm]
    return matrices + biases + 2 * model.dim + norms


def count_parameters(model: Model) -> int:
    """Return the number of parameters of the full model."""
    matrices = 1 if model.tie_embeddings else 2
    layers = sum(layer_parameters(model, layer) for layer in range(model.n_layers))
    return matrices * model.dim * model.vocab_size + layers + model.dim
