"""Every option of a run: its type, its default and its meaning.

A class is a [section]; the docstring below an option is its text in --help and docs/reference/config.md. Names follow
torchtitan 0.2.2 (its last release with TOML files) where an option means the same. rules.py: rules between options.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args

import tomli_w
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from titanlite.config.loader import Section, options_of
from titanlite.config.model_sizes import SIZES
from titanlite.config.own import Parts
from titanlite.config.stage_split import ONE_STAGE, Schedule, module_names, split_into_stages
from titanlite.config.types import (
    MOST_ITEMS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_TOKENS,
    Count,
    CountOrZero,
    Fraction,
    NodePath,
    NotNegative,
    PathText,
    Positive,
    Precision,
    Ranks,
)

FILES = ("text", "json", "parquet")
"""Datasets that are files at a path."""
DATASET_OPTIONS: dict[str, tuple[str, ...]] = {
    "dataset_path": (*FILES, "hub"),
    "dataset_config": ("hub",),
    "dataset_split": ("hub",),
    "dataset_text_key": ("json", "parquet", "hub"),
    "dataset_format": ("json", "parquet", "hub"),
    "text_sample_by": ("text",),
}
"""Options of DatasetOptions, and the datasets that read them."""
FORMAT_OPTIONS: dict[str, tuple[str, ...]] = {
    "dataset_text_key": ("text",),
    "dataset_messages_key": ("messages",),
    "dataset_prompt_key": ("prompt_response",),
    "dataset_response_key": ("prompt_response",),
    "long_conversations": ("messages", "prompt_response"),
}
"""Options of DatasetOptions, and the values of dataset_format with which they are read."""
QUANTIZED_STATES = {"float8": 256, "int8": 256, "int4": 128}
"""Number of elements that share a float32 scale, by optimizer.state_dtype."""


class Job(Section):
    dump_folder: PathText = "./outputs"
    """Folder that the run writes into: config.toml, tb/, metrics.jsonl, checkpoint/, profiles."""
    take_over_lock: bool = True
    """Take over the lock of dump_folder from a stopped run on another node; false: end with a line and status 2."""
    description: str = ""
    """One line about the run. It is printed first and is shown in TensorBoard."""


def identity_of(section: Section, later: Collection[str], exclude: set[str] = frozenset()) -> dict[str, Any]:
    """Return the values of a section, as plain JSON. Options in `later`, which older checkpoints lack, are included
    only if they differ from their default."""
    values, fields = section.model_dump(exclude=exclude), type(section).model_fields
    return {key: value for key, value in values.items() if key not in later or value != fields[key].default}


class Moe(Section):
    """Mixture of experts (arXiv:1701.06538): feed-forward layers of many experts, of which a router chooses a few for
    each token. No token is dropped. All but n_experts is read only when that is above 0."""

    n_experts: CountOrZero = 0
    """Number of routed experts of a layer; 0: every feed-forward layer is dense."""
    n_experts_per_token: Count = 1
    """Number of experts that the router chooses for a token."""
    expert_dim: Union[Literal[-1], Count] = -1
    """Width of the SwiGLU feed-forward layer that an expert is; -1: model.ffn_dim."""
    expert_bias: bool = False
    """Biases of the three layers of each expert (gpt-oss)."""
    router_bias: bool = False
    """Bias of the router's logits (gpt-oss), a trained weight."""
    swiglu_limit: NotNegative = 0.0
    """Bound on the numbers in the experts' SwiGLU layers (gpt-oss, arXiv:2508.10925): the activation's input x is at
    most this, its factor y is between this and its negative, and the product is x sigmoid(swiglu_alpha x) (y + 1); 0:
    silu(x) y without bounds."""
    swiglu_alpha: Positive = 1.702
    """Factor in the activation of experts with swiglu_limit."""
    n_shared_experts: CountOrZero = 0
    """Shared experts, which every token passes (DeepSeekMoE, arXiv:2401.06066): together one feed-forward layer of this
    many times expert_dim."""
    n_first_dense_layers: CountOrZero = 0
    """Layers at the beginning that are dense."""
    every_n_layers: Count = 1
    """Every n-th layer has experts, counted from the first layer of the model, except for the first dense layers."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores. softmax: over all experts; sigmoid: each by itself (DeepSeek-V3,
    arXiv:2412.19437)."""
    normalize_scores: bool = False
    """Divide the scores of a token's experts by their sum."""
    score_scaling: Positive = 1.0
    """Factor on the scores of a token's experts."""
    n_groups: Count = 1
    """Groups of experts for routing that is limited to some of them (DeepSeek-V3's node-limited routing)."""
    n_groups_per_token: Count = 1
    """Number of groups that a token's experts may be in."""
    group_score: Literal["top_2_sum", "max"] = "top_2_sum"
    """What ranks the groups. top_2_sum: the sum of their two best scores (DeepSeek-V3); max: their best score
    (DeepSeek-V2)."""
    balance_bias: bool = False
    """Balance the experts' load without a loss (arXiv:2408.15664): the router chooses by scores to which each expert's
    bias is added. The biases are saved in checkpoints."""
    balance_bias_rate: NotNegative = 0.001
    """An optimizer step adds this to the bias of an expert with less than the mean load, and subtracts it with more."""
    balance_loss_weight: NotNegative = 0.0
    """Weight of the auxiliary loss of each layer with experts, E times the sum over the E experts of share of the load
    times mean score, 1 if balanced (Switch Transformer, arXiv:2101.03961). The shares are of the global batch of
    the step before, the mean scores of this one."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the router z-loss of each layer with experts (ST-MoE, arXiv:2202.08906): the mean over the global batch
    of the squared log-sum-exp of a token's logits."""

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one that saved, as plain JSON."""
        later = {"group_score", "expert_bias", "router_bias", "swiglu_limit", "swiglu_alpha"}
        return identity_of(self, later, exclude={"balance_bias_rate", "balance_loss_weight", "z_loss_weight"})


class Mla(Section):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): the keys and values of all heads are computed
    from one small vector per token. All but kv_lora_rank is read only when that is above 0."""

    kv_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's keys and values are computed; 0: attention has none."""
    q_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's queries are computed; 0: queries have none."""
    qk_nope_head_dim: Count = 128
    """Channels of a head of queries and keys without rotary embedding."""
    qk_rope_head_dim: Count = 64
    """Channels of a head of queries and keys with rotary embedding; those of keys are the same in all heads."""
    v_head_dim: Count = 128
    """Channels of a head of values."""
    mscale_all_dim: NotNegative = 0.0
    """yarn: the scores of attention are multiplied by (0.1 mscale_all_dim ln(rope_scaling_factor) + 1)^2, so that it is
    as sharp as before the scaling."""
    norm_eps: Union[Literal[-1], Positive] = -1
    """Epsilon of the norms of latents; -1: model.norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        """Channels of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def parameters(self, dim: int, n_heads: int) -> int:
        """Return the number of parameters of a layer's latent attention."""
        q_lora, kv_lora, q_dim = self.q_lora_rank, self.kv_lora_rank, n_heads * self.qk_head_dim
        queries = q_lora * (dim + 1 + q_dim) if q_lora else dim * q_dim
        latents = dim * (kv_lora + self.qk_rope_head_dim) + kv_lora
        keys_and_values = kv_lora * n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latents + keys_and_values + n_heads * self.v_head_dim * dim


class LayerKind(Section):
    """One kind of layer in model.layer_pattern. Options that it does not set are as in [model]."""

    count: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Layers of this kind in a row."""
    sliding_window: Union[Literal[-1], CountOrZero] = -1
    """model.sliding_window of these layers; 0: none; -1: the model's."""
    rope_theta: Union[Literal[-1], Positive] = -1
    """model.rope_theta of these layers; -1: the model's."""
    rope_scaling_factor: Union[Literal[-1], Annotated[float, Field(ge=1, allow_inf_nan=False)]] = -1
    """model.rope_scaling_factor of these layers; 1: no scaling; -1: the model's."""
    partial_rotary_factor: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """model.partial_rotary_factor of these layers; 0: no rotary embedding (NoPE); -1: the model's."""
    experts: bool = True
    """false: these layers are dense in a model with experts."""


def implied_head_dim(values: Any) -> int | None:
    """Return the head_dim that values of [model.mla] imply; None if there is no latent attention, or they are wrong."""
    try:
        mla = Mla.model_validate(values)
    except ValidationError:  # the section itself reports them
        return None
    return mla.qk_head_dim if mla.kv_lora_rank else None


class Model(Section):
    """`flavor` names a model of titanlite/config/models.toml; from_hf is the model of a Hugging Face config.json.
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
    """Size of the vocabulary in the embedding and the output head, unless it is set: the flavor's, or the tokenizer's
    if that is larger; from_hf: that of its weights, unless new_tokens adds to them."""
    new_tokens: Literal["none", "mean"] = "none"
    """Initial rows of tokens for which a Hugging Face folder with initial weights has none, as tokens added for chat.
    mean: the mean of its rows, in the embedding and the output head."""
    norm_eps: Positive
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """Tied embeddings: use the embedding's weight as the output head's weight."""
    attention_bias: Literal["none", "qkv", "all"]
    """Biases of the attention layers; qkv: of queries, keys and values (Qwen2); all: of the output projection too."""
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
    rope_scaling_type: Literal["llama3", "linear", "yarn", "longrope"]
    """Which wavelengths are stretched, if rope_scaling_factor is above 1. linear: all; llama3: long ones, as in Llama
    3.1; yarn: long ones, and attention is rescaled (YaRN); longrope: each by a factor of its own, and attention is
    rescaled (LongRoPE)."""
    rope_low_freq_factor: Positive
    """llama3: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_high_freq_factor: Positive
    """llama3: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_fast: Positive
    """yarn: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_slow: Positive
    """yarn: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_attention_factor: Union[Literal[-1], Positive]
    """yarn, longrope: factor on queries and keys, in the cosines and sines; -1: yarn's is 0.1 ln(rope_scaling_factor)
    + 1, longrope's sqrt(1 + ln(rope_scaling_factor) / ln(rope_original_seq_len))."""
    rope_original_seq_len: Count
    """llama3, yarn, longrope: sequence length in tokens that the model was trained with before the scaling."""
    rope_short_factors: list[Positive] = Field(default=[])
    """longrope: factor on the wavelength of each rotated pair of channels in sequences up to rope_original_seq_len."""
    rope_long_factors: list[Positive] = Field(default=[])
    """longrope: the same in longer sequences (training.seq_len)."""
    partial_rotary_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of a head's channels that the rotary embedding rotates, the first ones (Phi-4, GLM-4); 0: none (NoPE)."""
    learned_positions: CountOrZero = 0
    """Positions with a learned embedding, which is added to the token's (GPT-2): at least training.seq_len; 0: none."""
    rope_yarn_truncate: bool = True
    """yarn: round the first and the last rotated pair that are scaled in part to whole numbers (gpt-oss: false)."""
    attention_sinks: bool = False
    """Attention sinks (gpt-oss): the softmax of each query head has one more key, with a learned score and value 0."""
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """rms: RMSNorm; rms_plus_one: RMSNorm whose scale is 1 + weight (Gemma); layer: LayerNorm with a bias (GPT-2)."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where a norm is: before each attention and feed-forward layer, after it (OLMo 2), or both (Gemma 3, GLM-4)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward layers; gelu_tanh: GELU approximated by tanh."""
    gated_ffn: bool = True
    """Feed-forward layers multiply the activation by a third projection, as SwiGLU and GeGLU; false: they have two
    projections (GPT-2, StarCoder2)."""
    embedding_scale: Positive = 1.0
    """Factor on the embeddings of tokens (Gemma: the root of dim; Granite)."""
    attention_scale: Union[Literal[-1], Positive] = -1
    """Factor on the scores of attention, products of queries and keys (Granite, Gemma); -1: 1 / sqrt(head_dim)."""
    residual_scale: Positive = 1.0
    """Factor on what a layer adds to the residual stream (Granite)."""
    logits_scale: Positive = 1.0
    """Factor on the logits (Granite: 1 / logits_scaling)."""
    llama4_scaling_beta: NotNegative = 0.0
    """Queries at position p are multiplied by 1 + this ln(1 + floor(p / rope_original_seq_len)) (Llama 4, Ministral 3):
    by 1 in sequences up to that length, and longer ones are rejected; 0: queries have no such factor."""
    layer_pattern: list[LayerKind] = Field(default=[])
    """Layers of several kinds, each in a table [[model.layer_pattern]] in their order: the pattern repeats over the
    layers, and its last repetition may end early. Empty: all layers are as [model] says."""
    hf_model_type: str = ""
    """Model type of the exported config.json, and the names of its tensors; empty: the first one that has the model's
    options. from_hf sets it where the config.json's own is another one."""
    moe: Moe = Moe()
    mla: Mla = Mla()

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        layer %= sum(kind.count for kind in self.layer_pattern) or 1
        for kind in self.layer_pattern:
            if layer < kind.count:
                return kind
            layer -= kind.count
        return LayerKind()

    def of_layer(self, layer: int) -> Model:
        """Return the options of a layer: what its kind sets, and otherwise the model's."""
        kind = self.kind(layer).model_dump(exclude={"count", "experts"})
        return self.model_copy(update={key: value for key, value in kind.items() if value != -1})

    def of_layers(self) -> list[Model]:
        """Return the options of each layer."""
        return [self.of_layer(layer) for layer in range(self.n_layers)]

    def rope_kinds(self) -> tuple[list[Model], list[int]]:
        """Return options with each rotary embedding that layers have, and which one of them each layer has."""
        layers = self.of_layers()
        keys = [(each.rope_theta, each.rope_scaling_factor, each.partial_rotary_factor) for each in layers]
        kinds = dict(zip(keys, layers, strict=True))
        return list(kinds.values()), [list(kinds).index(key) for key in keys]

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's feed-forward layer is a mixture of experts."""
        moe = self.moe
        in_turn = layer >= moe.n_first_dense_layers and (layer + 1) % moe.every_n_layers == 0
        return moe.n_experts > 0 and in_turn and self.kind(layer).experts

    @property
    def expert_dim(self) -> int:
        """Width of an expert."""
        return self.ffn_dim if self.moe.expert_dim == -1 else self.moe.expert_dim

    @property
    def rope_width(self) -> int:
        """Channels of a head of queries and keys that the rotary table covers."""
        return self.mla.qk_rope_head_dim if self.mla.kv_lora_rank else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head of queries and keys with rotary embedding."""
        return int(self.rope_width * self.partial_rotary_factor)

    @property
    def most_positions(self) -> int:
        """Most tokens of a sequence; 0: without a limit."""
        return self.learned_positions or (self.rope_original_seq_len if self.llama4_scaling_beta else 0)

    @property
    def query_scale(self) -> float:
        """Factor on queries besides 1 / sqrt(head_dim), which attention applies."""
        return 1.0 if self.attention_scale == -1 else self.attention_scale * math.sqrt(self.head_dim)

    @property
    def v_head_dim(self) -> int:
        """Channels of a head of values."""
        return self.mla.v_head_dim if self.mla.kv_lora_rank else self.head_dim

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one that saved: every dimension, as plain JSON."""
        later = {key for key, field in Model.model_fields.items() if not field.is_required()}
        dimensions = identity_of(self, later, exclude={"flavor", "hf_assets_path", "new_tokens", "moe", "mla"})
        latents = identity_of(self.mla, {"norm_eps"}) if self.mla.kv_lora_rank else {}
        dimensions |= {f"mla.{key}": value for key, value in latents.items()}
        experts = self.moe.identity() if self.moe.n_experts else {}
        return dimensions | {f"moe.{key}": value for key, value in experts.items()}

    @model_validator(mode="before")
    @classmethod
    def _fill_from_flavor(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # pydantic reports it
        flavor, defaults = values.get("flavor", "debug"), SIZES["debug"]
        if flavor == "from_hf":
            if defaults.keys() - values.keys():  # a resolved config has all values, and does not need the folder
                from titanlite.config.hf.config_json import options_from_hf

                defaults = options_from_hf(values.get("hf_assets_path", ""))
        elif isinstance(flavor, str):
            defaults = SIZES.get(flavor, defaults)
        options = {**defaults, **values}
        follows = flavor != "from_hf" or values.get("new_tokens") == "mean"
        if follows and "vocab_size" not in values and (assets := values.get("hf_assets_path")):
            from titanlite.config.hf.tokenizer_size import n_token_ids  # imported here: a run on bytes needs no file

            options["vocab_size"] = max(options["vocab_size"], n_token_ids(assets))
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
    n_projections = 3 if model.gated_ffn else 2
    if model.has_experts(layer):
        moe = model.moe
        matrices += model.dim * (moe.n_experts + 3 * model.expert_dim * (moe.n_experts + moe.n_shared_experts))
        matrices += moe.n_experts * (moe.router_bias + moe.expert_bias * (2 * model.expert_dim + model.dim))
    else:
        matrices += n_projections * model.dim * model.ffn_dim
    biases = {"none": 0, "qkv": q_dim + 2 * kv_dim, "all": q_dim + 2 * kv_dim + model.dim}[model.attention_bias]
    ffn_biases = (n_projections - 1) * model.ffn_dim + model.dim
    biases += ffn_biases * (model.mlp_bias and not model.has_experts(layer)) + model.n_heads * model.attention_sinks
    norms = {False: 0, True: 2 * model.head_dim, "all_heads": q_dim + kv_dim}[model.qk_norm]
    norms += (4 if model.norm_placement == "both" else 2) * model.dim
    return matrices + biases + norm_parameters(model, norms)


def norm_parameters(model: Model, channels: int) -> int:
    """Return the number of parameters of norms over this total number of channels."""
    return channels * (2 if model.norm == "layer" else 1)


def count_parameters(model: Model) -> int:
    """Return the number of parameters of the full model."""
    matrices = 1 if model.tie_embeddings else 2
    layers = sum(layer_parameters(model, layer) for layer in range(model.n_layers))
    embeddings = model.dim * (matrices * model.vocab_size + model.learned_positions)
    return embeddings + layers + norm_parameters(model, model.dim)


class DatasetOptions(Section):
    """The options that name a dataset, and that say how its documents are read."""

    dataset: Literal["pydoc_topics", "text", "json", "parquet", "c4", "hub"] = "pydoc_topics"
    """pydoc_topics: the 465 KB of English prose in every CPython; text, json (also JSON lines), parquet: files at
    dataset_path; c4: allenai/c4 `en`; hub: the Hugging Face hub's dataset that dataset_path names."""
    dataset_path: NodePath = ""
    """File, folder or glob (text, json, parquet), or the name on the hub (hub)."""
    dataset_config: str = ""
    """Configuration of a hub dataset, if it has several."""
    dataset_split: str = "train"
    """Split of a hub dataset to train on."""
    dataset_text_key: str = "text"
    """Column that contains a document's text (json, parquet, hub)."""
    dataset_format: Literal["text", "messages", "prompt_response"] = "text"
    """What a row of json, parquet or hub has. text: a document; messages, prompt_response: a conversation for
    fine-tuning, rendered by the tokenizer's chat template; only what the assistant says is trained on."""
    dataset_messages_key: str = "messages"
    """messages: column with a list of messages, each with "role" (system, user, assistant, ...) and "content"."""
    dataset_prompt_key: str = "prompt"
    """prompt_response: column with what the user says."""
    dataset_response_key: str = "response"
    """prompt_response: column with what the assistant answers."""
    long_conversations: Literal["reject", "drop", "truncate"] = "reject"
    """What becomes of conversations of more than seq_len + 1 tokens. truncate: their beginning is kept."""
    special_tokens_in_text: Literal["ordinary", "special"] = "ordinary"
    """Encoding of special tokens that a text or a message spells out: as ordinary text, or as special tokens, for text
    that a chat template has already rendered. BOS and EOS are not added to such a text if it has them."""
    text_sample_by: Literal["document", "paragraph", "line"] = "document"
    """What one document of dataset = "text" is: a file, a paragraph or a line."""


class MixedDataset(DatasetOptions):
    """One dataset of a mixture."""

    name: str = ""
    """Name of the dataset in metrics and checkpoints, made of letters, digits, "_", "-" and "."."""
    weight: Union[Literal[-1], Positive] = -1
    """Share of the sequences, relative to the others' weights. -1 in all: its own number of sequences or tokens."""
    tokens: Union[Literal[-1], Annotated[int, Field(ge=1, le=MOST_TOKENS)]] = -1
    """Token budget, instead of a weight: it is the share, and the dataset drops out once it is used up. -1: none."""
    epochs: Union[Literal[-1], Positive] = -1
    """How often it may be read at most, also a fraction; then it drops out. -1: without a limit."""


class Training(DatasetOptions):
    """The data, the steps, and the data types that a run computes in."""

    datasets: list[MixedDataset] = Field(default=[])
    """A mixture of datasets instead of one, each in a table [[training.datasets]]. Their sequences are mixed in a fixed
    order, by weights, token budgets or their size; when a dataset is used up, the others share its part."""
    change_mixture_on_resume: bool = False
    """A run that resumes may have another mixture than the checkpoint: other weights, budgets, limits or datasets. Each
    dataset, by its name, continues where it was."""
    streaming: bool = False
    """Read and tokenize documents during training instead of tokenizing the full dataset before it."""
    streaming_shards: Count = 64
    """Streaming: shards that the dataset is partitioned into; packed sequence k is from shard k mod streaming_shards,
    on any number of ranks. It must be a multiple of the data-parallel degree and, where files cannot be split (hub,
    compressed files, a document a file), at most the number of files."""
    streaming_shuffle_block: Count = 256
    """Streaming with shuffle: sequences of a shard that are shuffled among themselves. A rank has them in memory, for
    each of its shards; a run that resumes reads up to one block again."""
    shuffle: bool = True
    """Shuffle the packed sequences, seeded by debug.seed: all of an epoch, anew each epoch or, with streaming, blocks
    of them within each streaming shard."""
    cache_folder: NodePath = "~/.cache/titanlite"
    """Folder of the token cache, where the tokens of a dataset stay between runs."""
    seq_len: Count = 2048
    """Tokens of a packed sequence."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """concatenate: documents end to end, also over the limits of sequences, without padding; best_fit: documents that
    fit into a sequence stay whole, with some padding (arXiv:2404.10830)."""
    document_mask: bool = False
    """Attend only within a document, with positions from its start; false: across all documents of a sequence."""
    local_batch_size: Count = 8
    """Per-device batch size: sequences per data-parallel rank and gradient accumulation step."""
    global_batch_size: Union[Literal[-1], Count] = -1
    """Sequences per optimizer step; above local_batch_size x data-parallel ranks: gradient accumulation; -1: none."""
    steps: Count = 10_000
    """Optimizer steps of the run."""
    epochs: NotNegative = 0.0
    """Epochs of the run, also a fraction, instead of `steps`: how often it reads the training data, in full steps. An
    epoch of a mixture has as many tokens as all of its datasets together. 0: the run has `steps`."""
    max_norm: Positive = 1.0
    """Gradient clipping: gradients with a larger global norm are scaled down to this norm."""
    nonfinite_steps_allowed: CountOrZero = 0
    """Steps that the run may skip because the loss or gradient norm is not finite; the next such step stops it."""
    skip_outlier_sigma: NotNegative = 0.0
    """Skip steps whose gradient norm is above the mean of recent ones by this many standard deviations; 0: none."""
    outlier_window: Annotated[int, Field(ge=4, le=MOST_ITEMS)] = 128
    """Steps whose gradient norms count as recent. None is skipped until half as many have been taken."""
    gc_freq: Count = 50
    """Steps between Python's garbage collections, which would otherwise run at different times on each rank."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the weights, and of optimizer states unless optimizer.state_dtype is set; float64: parity tests."""
    mixed_precision_param: Literal[Precision, "float16"] = "auto"
    """Data type that FSDP gathers weights in and the model computes in; auto: bfloat16 on CUDA, `dtype` on a CPU.
    float16 scales the loss (initial_loss_scale)."""
    mixed_precision_reduce: Precision = "auto"
    """Data type that gradients are accumulated and reduced in; auto: float32, or float64 if `dtype` is float64."""
    attention_backend: Literal["auto", "cpu", "flash", "cudnn", "efficient", "math"] = "auto"
    """auto: torch's scaled_dot_product_attention chooses. With context parallelism, a document mask or a sliding window
    below seq_len, auto is cpu on a CPU; on CUDA flash (bfloat16, float16), efficient (float32) or math (float64)."""
    initial_loss_scale: Positive = 65536.0
    """float16: initial factor on the loss. A step whose gradients overflow is skipped and halves it."""
    loss_scale_growth_interval: Count = 2000
    """float16: steps without overflow after which the loss scale doubles."""
    loss_chunks: Union[Literal[-1], Count] = -1
    """Chunked cross-entropy: chunks of tokens in the output head and the loss; only one chunk's logits are resident.
    -1: as many as keep a chunk's logits on a rank within 2 GiB in float32, which is 1 for small vocabularies."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory; copy a layer's weights to the device when used."""


class Optimizer(Section):
    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW decouples weight decay from the gradient; Adam adds it to the gradient; Muon orthogonalizes the momentum of
    the layers' matrices, and is AdamW for all other weights, at the same learning rate."""
    lr: Positive = 8e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay rate of exp_avg, the running mean of gradients."""
    beta2: Fraction = 0.95
    """Decay rate of exp_avg_sq, the running mean of squared gradients."""
    eps: Positive = 1e-8
    """Epsilon added to the root of exp_avg_sq."""
    weight_decay: NotNegative = 0.1
    """Weight decay of weight matrices and embeddings; norms and biases have none."""
    muon_momentum: Fraction = 0.95
    """Decay rate of the momentum of matrices, which is Nesterov's."""
    muon_newton_schulz_steps: Count = 5
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_dtype: Precision = "auto"
    """Data type of these iterations, and of the matrices that ranks exchange for them; auto: what the model computes
    in, which is bfloat16 on CUDA; float32 instead of float16."""
    qk_clip_threshold: NotNegative = 0.0
    """QK-clip (MuonClip, Kimi K2, arXiv:2507.20534): after a step, the weights of queries and keys of each head whose
    largest attention logit in it is above this are scaled so that it would have been this (Kimi K2: 100); 0: none. It
    costs one more product of queries and keys in each forward."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's implementations of Adam runs."""
    state_dtype: Literal["auto", "float32", "bfloat16", "float8", "int8", "int4"] = "auto"
    """Data type of exp_avg and exp_avg_sq; auto: training.dtype; float8, int8: 8-bit optimizer states, a scale per 256;
    int4: 4-bit optimizer states, a scale per 128. Those of the embedding keep training.dtype."""
    enable_cpu_offload: bool = False
    """Keep optimizer states in host memory, and take the step on the CPU, while shards of weights and gradients are
    copied there and back. Weights and gradients stay on the device."""
    stochastic_rounding: bool = False
    """Round weights stochastically: small updates of bfloat16 weights survive. Needs training.dtype = "bfloat16"."""


class LRScheduler(Section):
    """Warmup, stable, decay: the factor on optimizer.lr is the smaller of a ramp up and a ramp down."""

    warmup_steps: CountOrZero = 200
    """Steps over which the learning rate rises linearly to optimizer.lr. A shorter run ends during the warmup."""
    warmup_ratio: Fraction = 0.0
    """The same as a fraction of total_steps, instead of warmup_steps; 0: warmup_steps."""
    total_steps: Union[Literal[-1], Count] = -1
    """Length of the schedule: the step after which the decay has ended. -1: training.steps."""
    decay_ratio: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """Fraction of total_steps over which the learning rate decays; -1: all steps after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; sqrt is 1 - sqrt(progress)."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor on optimizer.lr at the end of the decay."""


class Ema(Section):
    """Exponential moving average (EMA) of the weights: one more copy of each shard, in float32. Training does not read
    it. `titanlite export --ema` writes it as a Hugging Face folder."""

    decay: Fraction = 0.0
    """Factor on the average in each update of it, whose other share is the weights', as 0.999; 0: no average."""
    start_step: Count = 1
    """The average begins with the weights after this many updates. Skipped steps do not count, here and below."""
    warmup: bool = False
    """Forget faster at first: n updates after start_step, the decay is at most (1 + n) / (10 + n)."""
    validation: bool = False
    """Compute the validation loss, and generate samples, with the average instead of the weights."""


class Parallelism(Section):
    """The world size is the product of the degrees: pp x dp_replicate x dp_shard x cp x tp, outermost first."""

    data_parallel_replicate_degree: Ranks = 1
    """Replicas of the sharded model. Above 1 with a shard degree above 1: hybrid sharding (HSDP)."""
    data_parallel_shard_degree: Union[Literal[-1], Ranks] = -1
    """FSDP: ranks that each weight is sharded over, besides the context-parallel ranks; -1: the ranks that remain."""
    fsdp_reshard_after_forward: Union[
        Literal["default", "always", "never"], Annotated[int, Field(ge=2, le=MOST_RANKS)]
    ] = "default"
    """always: free the gathered weights after a layer's forward and gather them again for its backward (ZeRO-3); never:
    gather them once per step (ZeRO-1, ZeRO-2); N: keep them sharded over groups of N ranks in between. default: always,
    but never in a pipeline, where every microbatch would gather them again, and where there is only a single shard."""
    fsdp_reduce_gradients: Literal["every_accumulation_step", "last_accumulation_step"] = "every_accumulation_step"
    """When gradients are reduced: in every gradient accumulation step (ZeRO-2, ZeRO-3: gradients are sharded), or in
    the last only (ZeRO-1, replicate: less communication, but gradients are unsharded)."""
    fsdp_forward_prefetch: CountOrZero = 0
    """Blocks to gather weights of during an earlier block's forward; 0: FSDP's default, on CUDA the next block."""
    fsdp_backward_prefetch: CountOrZero = 0
    """The same for the backward; 0: FSDP's default, one block."""
    tensor_parallel_degree: Ranks = 1
    """Ranks that shard each layer's heads, channels and vocabulary, and, between the layers, the sequence."""
    disable_loss_parallel: bool = False
    """Gather the logits of tensor-parallel ranks instead of computing the loss from shards of the vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with its matrix products. Needs CUDA and compile.enable."""
    pipeline_parallel_degree: Ranks = 1
    """Ranks that the layers are partitioned over."""
    pipeline_parallel_schedule: Literal[get_args(Schedule)] = "1F1B"  # type: ignore[valid-type]
    """Order in which a pipeline's ranks run forwards and backwards of microbatches."""
    pipeline_parallel_microbatch_size: Count = 1
    """Sequences of a pipeline's microbatch; it divides local_batch_size."""
    pipeline_parallel_stages_per_rank: Union[Literal[-1], Count] = -1
    """Stages per rank under a schedule that has several; -1: 2, or 1 under GPipe and 1F1B."""
    pipeline_parallel_balance: Literal["layers", "parameters"] = "layers"
    """What is balanced between the stages."""
    pipeline_parallel_first_stage_less_layers: CountOrZero = 1
    """Number of layers that the embedding counts as, when stages are balanced by layers."""
    pipeline_parallel_last_stage_less_layers: CountOrZero = 1
    """Number of layers that the norm and the output head count as, when stages are balanced by layers."""
    module_fqns_per_model_part: list[list[str]] = Field(default=[])
    """Modules of each stage, in order (tok_embeddings, layers.0, ..., norm, output); empty: stages are balanced."""
    context_parallel_degree: Ranks = 1
    """Ranks that each sequence is split over."""
    context_parallel_ulysses_degree: Ranks = 1
    """How many of these ranks exchange sequence for heads by all-to-all (Ulysses); the others form a ring."""
    expert_parallel_degree: Ranks = 1
    """Ranks that the experts of a layer are partitioned over. They are not additional: the degree divides dp_shard x
    cp x tp, and each expert is sharded over the quotient."""

    @property
    def n_stages(self) -> int:
        """Number of stages of the pipeline."""
        per_rank = self.pipeline_parallel_stages_per_rank
        if per_rank == -1:
            per_rank = 1 if self.pipeline_parallel_schedule in ONE_STAGE else 2
        return self.pipeline_parallel_degree * per_rank

    @property
    def ring_degree(self) -> int:
        """Number of ranks of a ring of ring attention."""
        return max(self.context_parallel_degree // self.context_parallel_ulysses_degree, 1)

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks, or groups of ranks, that read different sequences (of a resolved config)."""
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def ranks_per_shard(self) -> int:
        """Product of all degrees except data_parallel_shard_degree, which may be -1; it divides the world size."""
        model_parallel = self.pipeline_parallel_degree * self.context_parallel_degree * self.tensor_parallel_degree
        return self.data_parallel_replicate_degree * model_parallel

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees (of a resolved config)."""
        return self.data_parallel_shard_degree * self.ranks_per_shard


class Lora(Section):
    """LoRA fine-tuning (arXiv:2106.09685) of the weights in checkpoint.initial_load_path: docs/lora.md."""

    rank: CountOrZero = 0
    """Rank of the adapters, which alone are trained and saved; 0: no LoRA, and all weights are trained."""
    alpha: Positive = 16.0
    """The product of an adapter's matrices is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["wq", "wk", "wv", "wo", "w1", "w2", "w3"])
    """Linear layers with adapters, by their names in a block or the ends of these: "wq" is "attention.wq"."""
    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the frozen weights in memory; auto: training.dtype, which is that of the adapters."""


class Float8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit floating point."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "tensorwise"
    """tensorwise: a scale per tensor; rowwise: a scale per row, more accurate; rowwise_with_gw_hp: rowwise, with weight
    gradients in the model's data type; mxfp8: a power of two as the scale of each 32 values (OCP Microscaling), for
    compute capability 10.0 (Blackwell)."""
    emulate: bool = False
    """Round to float8 but multiply in the model's data type, for hardware without the recipe's products."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these, as in ["layers.0.", "attention.wk"]. The output head is always
    skipped, and layers whose weight on a rank has a dimension that is not a multiple of 16 (mxfp8: 32)."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8. Tensorwise only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights together after the optimizer step. Needs enable_fsdp_float8_all_gather."""


class Int8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit integers, with a scale per row and column (INT8
    mixed-precision training)."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these. The output head is always skipped, and layers whose weight on a
    rank has a dimension that is not a multiple of 16."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """full: save only a block's inputs for backward and recompute the rest; selective: see selective_ac_option."""
    selective_ac_option: Union[Literal["op", "every_second_mm", "attention"], Count] = "op"
    """op: save the results of matrix products, attention and collectives, recompute the rest; every_second_mm: the
    same, except that every second matrix product is recomputed; attention: save the results of attention, recompute the
    rest; N: full activation checkpointing every N layers, none in between."""
    layers_per_checkpoint: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Save the inputs of only every k-th block, and recompute its k blocks together; each of them then saves what mode
    none or full says. 1: mode alone decides."""


class Compile(Section):
    enable: bool = False
    """Compile with torch.compile. The first steps take longer."""
    components: list[str] = Field(default=["model", "loss"])
    """What to compile: "model", each block by itself; "loss", the output head and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generated kernels; aot_eager: traced, but run with torch's own kernels (fast to compile, for tests)."""


LORA_FACTORS = ("lora_a", "lora_b")  # an adapter's matrices A and B, by their names beside the base's weight
SEEDED = "none"  # checkpoint.initial_load_path = "none": draw the weights from debug.seed


class Checkpoint(Section):
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints, relative to job.dump_folder."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: CountOrZero = 10
    """Delete all but the newest k good checkpoints; 0 keeps all."""
    load_step: Union[Literal[-1], Count] = -1
    """Step to resume from; -1: the newest."""
    initial_load_path: PathText = ""
    """A checkpoint's step-N folder, or a Hugging Face folder (config.json, safetensors), whose weights the run starts
    from if there is nothing to resume; none: initial weights; empty: hf_assets_path of flavor from_hf, else none."""
    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder, step-N-hf in the folder of checkpoints."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights of last_save_in_hf; auto: that of the released model that the run started from, or else
    training.dtype."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: copy the state to host memory and write it while training continues."""
    on_corrupt: Literal["stop", "previous"] = "stop"
    """What to do if the newest checkpoint is damaged or incomplete. previous: rename it to step-N.damaged and resume
    from the one before."""
    on_error: Literal["fail", "continue"] = "fail"
    """What to do if a checkpoint cannot be written. fail: end with status 1. continue: print it, and train on to the
    next save; if the run's last save cannot be written, it still ends with status 1."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between two lines on the console and in metrics.jsonl."""
    enable_tensorboard: bool = True
    """Write the same values for TensorBoard."""
    save_tb_folder: PathText = "tb"
    """Folder of the TensorBoard files, relative to job.dump_folder."""


class Validation(Section):
    enable: bool = False
    """Compute the loss on the validation split."""
    freq: Count = 100
    """Steps between validations; the last step is always validated."""
    steps: Union[Literal[-1], Count] = 16
    """Global batches that a validation reads at most: as many sequences as the same number of training steps reads. -1:
    the full validation split. The first lines of a run say how much is read."""
    fraction: Fraction = 0.05
    """Fraction of documents in the validation split, if no split or path is set; training never reads them."""
    dataset_path: PathText = ""
    """Files to validate on (text, json, parquet), of the kind of training.dataset or the first of training.datasets."""
    dataset_split: str = ""
    """Split of a hub dataset to validate on; of a mixture, of its first dataset."""
    generate_prompts: list[str] = Field(default=[])
    """Prompts that are continued greedily after each validation; the texts are logged, also in TensorBoard."""
    generate_tokens: Count = 32
    """Tokens to continue each prompt by, or until EOS. Each costs a forward of local_batch_size sequences."""


class Profiling(Section):
    enable_profiling: bool = False
    """Write a Chrome trace of one step every profile_freq steps."""
    profile_freq: Annotated[int, Field(ge=4, le=MOST_ITEMS)] = 10
    """Steps between traces (the profiler waits, warms up for 3 steps, and records one)."""
    save_traces_folder: PathText = "profile_traces"
    """Folder of the traces, relative to job.dump_folder."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots (for pytorch.org/memory_viz) every profile_freq steps."""
    save_memory_snapshot_folder: PathText = "memory_snapshot"
    """Folder of the snapshots, relative to job.dump_folder."""


class Comm(Section):
    init_timeout_seconds: Count = 300
    """Seconds after which a rank without a sign of life, or without progress, ends the run, until the first step is
    done (startup, compilation, loading). Collectives have 15 s more."""
    train_timeout_seconds: Count = 100
    """The same, after the first step is done."""
    trace_buf_size: CountOrZero = 20_000
    """Collectives that NCCL's flight recorder keeps and dumps after a timeout; 0 disables it."""


class FaultTolerance(Section):
    """Replica groups that may fail. torchtitan 0.2.2 has the same names."""

    enable: bool = False
    """Train in replica groups: launches of the same config, each with all of its ranks, that torchft connects. The
    groups in the quorum take each step. Needs titanlite[ft], and the lighthouse's address in TORCHFT_LIGHTHOUSE."""
    replica_id: CountOrZero = 0
    """Which group this launch is, from 0 to group_size - 1."""
    group_size: CountOrZero = 0
    """Number of groups that the global batch is divided among, whether they run or not."""
    min_replica_size: Count = 1
    """Fewest participating groups that may take a step. Fewer wait for others."""
    process_group_timeout_ms: Count = 10_000
    """Milliseconds after which a collective between groups has failed, and its step is taken again."""

    @property
    def n_groups(self) -> int:
        return self.group_size if self.enable else 1


class Plan(Section):
    """This section is for `titanlite plan` and `titanlite advise`; training does not read it."""

    device: PathText = "h100"
    """A name in titanlite/metrics/devices.toml, or a TOML file with the same keys, as titanlite calibrate writes it."""
    devices_per_node: Union[Literal[-1], Ranks] = -1
    """Devices of a node; -1: the usual number for this device."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Tokens to train on, for days, hours and costs; 0: those of training.steps."""
    price: NotNegative = 0.0
    """Price of one device for one hour, in any currency."""
    expert_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Load of the planned rank's experts, relative to the mean over its expert-parallel group; 1: a balanced load."""


class Debug(Section):
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of the weights, the data order and the random number generators."""
    deterministic: bool = False
    """Use only deterministic algorithms of torch."""
    sdc_check_freq: CountOrZero = 0
    """Silent data corruption: steps between comparisons of replicas and of a step computed twice; 0: none."""
    fingerprint_freq: CountOrZero = 0
    """Steps between fingerprints, by which `titanlite diff` finds where two runs differ first; 0: none. The first step
    has them, too."""


class Config(Section):
    job: Job = Field(default_factory=Job)
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    ema: Ema = Field(default_factory=Ema)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    lora: Lora = Field(default_factory=Lora)
    float8: Float8 = Field(default_factory=Float8)
    int8: Int8 = Field(default_factory=Int8)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    validation: Validation = Field(default_factory=Validation)
    profiling: Profiling = Field(default_factory=Profiling)
    comm: Comm = Field(default_factory=Comm)
    fault_tolerance: FaultTolerance = Field(default_factory=FaultTolerance)
    plan: Plan = Field(default_factory=Plan)
    debug: Debug = Field(default_factory=Debug)
    _own: Parts = PrivateAttr(default_factory=Parts)

    @property
    def own(self) -> Parts:
        """The user's own parts of the run, which no TOML file can name."""
        return self._own

    def with_own(self, own: Parts) -> Config:
        config = self.model_copy()
        config._own = own
        return config

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed run must share with the one that saved, except the seed."""
        lora = {f"lora.{key}": value for key, value in self.lora.model_dump().items()} if self.lora.rank else {}
        return {**self.model.identity(), **lora, **({"own.block": True} if self.own.block else {})}

    @property
    def initial_weights(self) -> str:
        """The folder or checkpoint whose weights the run starts from; SEEDED: none."""
        assets = os.path.expanduser(self.model.hf_assets_path) if self.model.flavor == "from_hf" else SEEDED
        return self.checkpoint.initial_load_path or assets

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of per-device batches that a rank takes in an optimizer step (of a resolved config)."""
        sequences = self.training.global_batch_size // self.fault_tolerance.n_groups
        return sequences // self.training.local_batch_size // self.parallelism.data_parallel_degree

    @property
    def n_microbatches(self) -> int:
        """Number of microbatches that a pipeline splits a per-device batch into."""
        return self.training.local_batch_size // self.parallelism.pipeline_parallel_microbatch_size

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of the global batch."""
        return self.training.global_batch_size * self.training.seq_len

    @property
    def tokens_of_forward(self) -> int:
        """Number of tokens in a forward of a rank: its part of a microbatch or, without a pipeline, of a batch."""
        piped = self.parallelism.pipeline_parallel_degree > 1
        sequences = self.parallelism.pipeline_parallel_microbatch_size if piped else self.training.local_batch_size
        return sequences * self.training.seq_len // self.parallelism.context_parallel_degree

    @property
    def windowed(self) -> bool:
        """Whether attention is over fewer tokens than a sequence has."""
        return any(0 < layer.sliding_window < self.training.seq_len for layer in self.model.of_layers())

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """Shape of what one pipeline stage sends to the next: [tokens of a microbatch on a rank, dim]."""
        return self.tokens_of_forward // self.parallelism.tensor_parallel_degree, self.model.dim

    def replace(self, **values: Any) -> Config:
        """Return a copy with other values, keyed `section__key`, which are not validated."""
        for name in values:
            if name.replace("__", ".") not in options_of(Config):
                raise AttributeError(f"no option {name.replace('__', '.')}")
        return functools.reduce(_with_value, values.items(), self)

    def toml(self) -> str:
        """Return a TOML file with every option, and a comment that names own parts."""
        own = f"# own: {self.own.digest}\n" if self.own.digest else ""
        return own + tomli_w.dumps(self.model_dump())


def _with_value(section: Any, item: tuple[str, Any]) -> Any:
    """Return a copy of a section with another value of `key`, or of `key` in the section `name` for `name__key`."""
    (name, _, key), value = item[0].partition("__"), item[1]
    value = _with_value(getattr(section, name), (key, value)) if key else value
    return section.model_copy(update={name: value})


def stage_modules(config: Config) -> list[list[str]]:
    """Return the names of the modules of each pipeline stage, in order."""
    parallelism, model = config.parallelism, config.model
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_balance == "layers":
        first = parallelism.pipeline_parallel_first_stage_less_layers
        costs = [first, *[1] * model.n_layers, 0, parallelism.pipeline_parallel_last_stage_less_layers]
    else:
        layers, matrix = [layer_parameters(model, n) for n in range(model.n_layers)], model.dim * model.vocab_size
        costs = [matrix + model.learned_positions * model.dim, *layers, norm_parameters(model, model.dim), matrix]
    return split_into_stages(module_names(model.n_layers), costs, parallelism.n_stages)


def numerics(config: Config) -> list[Any]:
    """Return the options that decide which weights a run trains, as plain JSON, without the paths of files."""
    sections = config.model_dump(include={"optimizer", "lr_scheduler", "parallelism", "float8", "int8"})
    training = config.training.model_dump(exclude={"cache_folder", "dataset_path", "gc_freq"})
    own = {"enable", "replica_id", "min_replica_size", "process_group_timeout_ms"}
    groups = config.fault_tolerance.model_dump(exclude=own)
    return [config.model.identity(), training, sections, config.debug.seed, groups]
