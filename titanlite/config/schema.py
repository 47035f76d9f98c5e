"""Every option of a run: its type, its default and its meaning. Each class is a [section]; the docstring below an
option is its text in --help and docs/reference/config.md. An option that also exists in torchtitan 0.2.2 (the last
release with TOML files) has the same name."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Union, get_args

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
"""Values of training.dataset that read files at dataset_path."""
DATASET_OPTIONS: dict[str, tuple[str, ...]] = {
    "dataset_path": (*FILES, "hub"),
    "dataset_config": ("hub",),
    "dataset_split": ("hub",),
    "dataset_text_key": ("json", "parquet", "hub"),
    "dataset_format": ("json", "parquet", "hub"),
    "text_sample_by": ("text",),
}
"""Values of `dataset` with which each option of DatasetOptions is read."""
FORMAT_OPTIONS: dict[str, tuple[str, ...]] = {
    "dataset_text_key": ("text",),
    "dataset_messages_key": ("messages",),
    "dataset_prompt_key": ("prompt_response",),
    "dataset_response_key": ("prompt_response",),
    "long_conversations": ("messages", "prompt_response"),
}
"""Values of dataset_format with which each option of DatasetOptions is read."""
QUANTIZED_STATES = {"float8": 256, "int8": 256, "int4": 128}
"""Number of elements of an optimizer state that share a float32 scale, by optimizer.state_dtype."""


class Job(Section):
    dump_folder: PathText = "./outputs"
    """Folder that the run writes into: config.toml, tb/, metrics.jsonl, checkpoint/, profiles."""
    take_over_lock: bool = True
    """Take over the lock of dump_folder from a stopped run on another node; false: exit with an error and status 2."""
    description: str = ""
    """One line about the run, which is printed first and shown in TensorBoard."""


def identity_of(section: Section, later: Collection[str], exclude: set[str] = frozenset()) -> dict[str, Any]:
    """Return a section as plain JSON, without keys in `later` (which older checkpoints lack) that have the default."""
    values, fields = section.model_dump(exclude=exclude), type(section).model_fields
    return {key: value for key, value in values.items() if key not in later or value != fields[key].default}


class Moe(Section):
    """Mixture of experts (arXiv:1701.06538): a feed-forward layer has many experts, of which a router chooses a few for
    each token. No token is dropped. All other options of this section are read only if n_experts is above 0."""

    n_experts: CountOrZero = 0
    """Number of routed experts of a layer; 0: every feed-forward layer is dense."""
    n_experts_per_token: Count = 1
    """Number of experts that the router chooses for a token."""
    expert_dim: Union[Literal[-1], Count] = -1
    """Width of an expert, which is a SwiGLU feed-forward layer; -1: model.ffn_dim."""
    expert_bias: bool = False
    """Whether the three linear layers of each expert have biases (gpt-oss)."""
    router_bias: bool = False
    """Whether the router's logits have a bias, a trained weight (gpt-oss)."""
    swiglu_limit: NotNegative = 0.0
    """Bound b in the experts' SwiGLU (gpt-oss, arXiv:2508.10925): the gate x is at most b, the other projection y is in
    -b to b, and the product is x sigmoid(swiglu_alpha x) (y + 1); 0: silu(x) y without bounds."""
    swiglu_alpha: Positive = 1.702
    """Factor in the activation of experts with swiglu_limit."""
    n_shared_experts: CountOrZero = 0
    """Shared experts, which every token passes (arXiv:2401.06066): one layer of width n_shared_experts x expert_dim."""
    n_first_dense_layers: CountOrZero = 0
    """Number of dense layers at the beginning of the model."""
    every_n_layers: Count = 1
    """Every n-th layer of the model has experts, except for the first dense layers."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: a softmax over all experts, or the sigmoid of each logit (DeepSeek-V3)."""
    normalize_scores: bool = False
    """Divide the scores of a token's experts by their sum."""
    score_scaling: Positive = 1.0
    """Factor on the scores of a token's experts."""
    n_groups: Count = 1
    """Number of groups that the experts are divided into (DeepSeek-V3's node-limited routing)."""
    n_groups_per_token: Count = 1
    """Number of groups from which the experts of a token are chosen."""
    group_score: Literal["top_2_sum", "max"] = "top_2_sum"
    """How groups are ranked: by the sum of their two best scores (DeepSeek-V3), or by the best score (DeepSeek-V2)."""
    balance_bias: bool = False
    """Balance the experts' load without a loss (arXiv:2408.15664): the router chooses by scores to which each expert's
    bias is added. The biases are saved in checkpoints."""
    balance_bias_rate: NotNegative = 0.001
    """Amount by which each optimizer step raises the bias of experts below the mean load, and lowers it above."""
    balance_loss_weight: NotNegative = 0.0
    """Weight of the auxiliary loss of each layer with E experts: E times the sum over experts of an expert's share of
    the load (in the previous step) times its mean score (in this step), 1 if balanced (arXiv:2101.03961)."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the router z-loss of a layer (arXiv:2202.08906): mean squared log-sum-exp of router logits."""

    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run must share with the run that saved the checkpoint, as plain JSON."""
        later = {"group_score", "expert_bias", "router_bias", "swiglu_limit", "swiglu_alpha"}
        return identity_of(self, later, exclude={"balance_bias_rate", "balance_loss_weight", "z_loss_weight"})


class Mla(Section):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): the keys and values of all heads are computed
    from one small vector per token. All other options of this section are read only if kv_lora_rank is above 0."""

    kv_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's keys and values are computed; 0: no latent attention."""
    q_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's queries are computed; 0: queries have no latent."""
    qk_nope_head_dim: Count = 128
    """Channels without rotary embedding in each head of queries and keys."""
    qk_rope_head_dim: Count = 64
    """Channels with rotary embedding in each head of queries and keys; all heads share these channels of keys."""
    v_head_dim: Count = 128
    """Channels of a value head."""
    mscale_all_dim: NotNegative = 0.0
    """yarn: factor (0.1 mscale_all_dim ln(rope_scaling_factor) + 1)^2 on attention scores, which keeps them sharp."""
    norm_eps: Union[Literal[-1], Positive] = -1
    """Epsilon of the norms of latents; -1: model.norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def parameters(self, dim: int, n_heads: int) -> int:
        """Return the number of parameters in the latent attention of a layer."""
        q_lora, kv_lora, q_dim = self.q_lora_rank, self.kv_lora_rank, n_heads * self.qk_head_dim
        queries = q_lora * (dim + 1 + q_dim) if q_lora else dim * q_dim
        latents = dim * (kv_lora + self.qk_rope_head_dim) + kv_lora
        keys_and_values = kv_lora * n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latents + keys_and_values + n_heads * self.v_head_dim * dim


class LayerKind(Section):
    """One kind of layer in model.layer_pattern. Options that the kind does not set have their value in [model]."""

    count: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Number of consecutive layers of this kind."""
    sliding_window: Union[Literal[-1], CountOrZero] = -1
    """model.sliding_window of these layers; 0: no window; -1: the value in [model]."""
    rope_theta: Union[Literal[-1], Positive] = -1
    """model.rope_theta of these layers; -1: the value in [model]."""
    rope_scaling_factor: Union[Literal[-1], Annotated[float, Field(ge=1, allow_inf_nan=False)]] = -1
    """model.rope_scaling_factor of these layers; 1: no scaling; -1: the value in [model]."""
    partial_rotary_factor: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """model.partial_rotary_factor of these layers; 0: no rotary embedding (NoPE); -1: the value in [model]."""
    experts: bool = True
    """false: these layers are dense in a model with experts."""


def implied_head_dim(values: Any) -> int | None:
    """Return the head_dim that [model.mla] implies; None without latent attention or with a wrong value."""
    try:
        mla = Mla.model_validate(values)
    except ValidationError:  # the validation of [model.mla] itself reports this error
        return None
    return mla.qk_head_dim if mla.kv_lora_rank else None


class Model(Section):
    """`flavor` names a model of titanlite/config/models.toml; from_hf is the model of a Hugging Face config.json. Every
    other key overrides the value of the named model."""

    flavor: Literal[(*SIZES, "from_hf")] = "debug"  # type: ignore[valid-type]
    """Named model whose dimensions are the defaults of this section; from_hf: the model of the config.json in the
    folder hf_assets_path, with the initial weights in that folder (checkpoint.initial_load_path)."""
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
    """Channels of a query, key or value head; -1: dim / n_heads, or the value that [model.mla] implies."""
    ffn_dim: Count
    """Width of the SwiGLU feed-forward layer."""
    vocab_size: Count
    """Rows of the embedding and the output head. Default: the larger of the flavor's and the tokenizer's numbers;
    from_hf: the number of rows in the released weights, unless new_tokens adds rows."""
    new_tokens: Literal["none", "mean"] = "none"
    """Rows of tokens that the initial Hugging Face weights lack. mean: start from the mean row; none: add no rows."""
    norm_eps: Positive
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """Tied embeddings: use the embedding's weight as the output head's weight."""
    attention_bias: Literal["none", "qkv", "all"]
    """Biases of attention projections. qkv: of queries, keys and values (Qwen2); all: also of the output."""
    mlp_bias: bool
    """Whether the linear layers in feed-forward layers have biases."""
    qk_norm: Union[bool, Literal["all_heads"]]
    """RMSNorm of queries and keys before RoPE. true: per head (Qwen3); all_heads: over all heads together (OLMoE)."""
    sliding_window: CountOrZero
    """Sliding-window attention (Mistral): a token attends to this many tokens, including itself; 0: no window."""
    rope_theta: Positive
    """Base of the rotary embedding's frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Factor by which the rotary embedding's wavelengths are stretched for longer sequences; 1: no scaling."""
    rope_scaling_type: Literal["llama3", "linear", "yarn", "longrope"]
    """Which wavelengths rope_scaling_factor stretches. linear: all; llama3 (Llama 3.1) and yarn: long wavelengths;
    longrope: each wavelength by its own factor. yarn and longrope also rescale attention."""
    rope_low_freq_factor: Positive
    """llama3: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_high_freq_factor: Positive
    """llama3: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_fast: Positive
    """yarn: wavelengths below rope_original_seq_len / this factor are not scaled."""
    rope_beta_slow: Positive
    """yarn: wavelengths above rope_original_seq_len / this factor are scaled fully."""
    rope_attention_factor: Union[Literal[-1], Positive]
    """yarn, longrope: factor on the cosines and sines of queries and keys; -1: for yarn 0.1 ln(rope_scaling_factor) +
    1, for longrope sqrt(1 + ln(rope_scaling_factor) / ln(rope_original_seq_len))."""
    rope_original_seq_len: Count
    """llama3, yarn, longrope: sequence length in tokens that the model was trained with before the scaling."""
    rope_short_factors: list[Positive] = Field(default=[])
    """longrope: factor on the wavelength of each rotated pair of channels in sequences up to rope_original_seq_len."""
    rope_long_factors: list[Positive] = Field(default=[])
    """longrope: factors that replace rope_short_factors if training.seq_len is above rope_original_seq_len."""
    partial_rotary_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of a head's channels, counted from the first, that are rotated (Phi-4, GLM-4); 0: none (NoPE)."""
    learned_positions: CountOrZero = 0
    """Number of learned position embeddings (GPT-2), at least seq_len. They are added to token embeddings. 0: none."""
    rope_yarn_truncate: bool = True
    """yarn: round the indices of the first and last partly scaled channel pair to whole numbers (gpt-oss: false)."""
    attention_sinks: bool = False
    """Attention sinks (gpt-oss): the softmax of each query head has one more key, with a learned score and value 0."""
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """rms: RMSNorm; rms_plus_one: RMSNorm whose scale is 1 + weight (Gemma); layer: LayerNorm with a bias (GPT-2)."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Norms are before each attention and feed-forward layer, after it (OLMo 2), or both (Gemma 3, GLM-4)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward layers; gelu_tanh: GELU approximated by tanh."""
    gated_ffn: bool = True
    """Feed-forward layers have a third, gating projection, like SwiGLU; false: two projections (GPT-2, StarCoder2)."""
    embedding_scale: Positive = 1.0
    """Factor on the embeddings of tokens (Gemma: the square root of dim; Granite)."""
    attention_scale: Union[Literal[-1], Positive] = -1
    """Factor on attention scores, the products of queries and keys (Granite, Gemma); -1: 1 / sqrt(head_dim)."""
    residual_scale: Positive = 1.0
    """Factor on the outputs of attention and feed-forward layers that are added to the residual stream (Granite)."""
    logits_scale: Positive = 1.0
    """Factor on the logits (Granite: 1 / logits_scaling)."""
    llama4_scaling_beta: NotNegative = 0.0
    """b in the factor 1 + b ln(1 + floor(p / rope_original_seq_len)) on queries at position p (Llama 4, Ministral 3). A
    seq_len above rope_original_seq_len is rejected, so the factor is always 1; 0: the model has no such factor."""
    layer_pattern: list[LayerKind] = Field(default=[])
    """Kinds of layers, each in a table [[model.layer_pattern]]; the list repeats. Empty: all layers are the same."""
    hf_model_type: str = ""
    """Model type of the exported config.json and of the tensors' names; empty: the first type that supports the model's
    options. from_hf sets this option where the options do not determine the type."""
    moe: Moe = Moe()
    mla: Mla = Mla()

    def kind(self, layer: int) -> LayerKind:
        layer %= sum(kind.count for kind in self.layer_pattern) or 1
        for kind in self.layer_pattern:
            if layer < kind.count:
                return kind
            layer -= kind.count
        return LayerKind()

    def of_layer(self, layer: int) -> Model:
        """Return the options of a layer: the values that its kind sets, and otherwise the model's."""
        kind = self.kind(layer).model_dump(exclude={"count", "experts"})
        return self.model_copy(update={key: value for key, value in kind.items() if value != -1})

    def of_layers(self) -> list[Model]:
        return [self.of_layer(layer) for layer in range(self.n_layers)]

    def rope_kinds(self) -> tuple[list[Model], list[int]]:
        """Return a list of sections [model], one per distinct rotary embedding, and each layer's index in that list."""
        layers = self.of_layers()
        keys = [(each.rope_theta, each.rope_scaling_factor, each.partial_rotary_factor) for each in layers]
        kinds = dict(zip(keys, layers, strict=True))
        return list(kinds.values()), [list(kinds).index(key) for key in keys]

    def has_experts(self, layer: int) -> bool:
        moe = self.moe
        in_turn = layer >= moe.n_first_dense_layers and (layer + 1) % moe.every_n_layers == 0
        return moe.n_experts > 0 and in_turn and self.kind(layer).experts

    @property
    def expert_dim(self) -> int:
        return self.ffn_dim if self.moe.expert_dim == -1 else self.moe.expert_dim

    @property
    def rope_width(self) -> int:
        """Channels in each head of queries and keys that the rotary table covers."""
        return self.mla.qk_rope_head_dim if self.mla.kv_lora_rank else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Channels in each head of queries and keys that are rotated."""
        return int(self.rope_width * self.partial_rotary_factor)

    @property
    def most_positions(self) -> int:
        """Longest sequence that the model supports, in tokens; 0: no limit."""
        return self.learned_positions or (self.rope_original_seq_len if self.llama4_scaling_beta else 0)

    @property
    def query_scale(self) -> float:
        """Factor on queries, in addition to the factor 1 / sqrt(head_dim) that attention applies."""
        return 1.0 if self.attention_scale == -1 else self.attention_scale * math.sqrt(self.head_dim)

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla.kv_lora_rank else self.head_dim

    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run must share with the run that saved the checkpoint, as plain JSON."""
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
            return values  # pydantic reports a section that is no table
        flavor, defaults = values.get("flavor", "debug"), SIZES["debug"]
        if flavor == "from_hf" and defaults.keys() - values.keys():  # a resolved config has all, and needs no folder
            from titanlite.config.hf.config_json import options_from_hf

            defaults = options_from_hf(values.get("hf_assets_path", ""))
        elif isinstance(flavor, str):
            defaults = SIZES.get(flavor, defaults)
        options = {**defaults, **values}
        follows = flavor != "from_hf" or values.get("new_tokens") == "mean"
        if follows and "vocab_size" not in values and (assets := values.get("hf_assets_path")):
            from titanlite.config.hf.tokenizer_size import n_token_ids  # imported here: byte-level tokens need no file

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


def layers_of_head(model: Model, seq_len: int) -> float:
    """Return the number of layers whose forward takes as many floating-point operations as the output head's."""
    idle = 3 * model.dim * model.expert_dim * (model.moe.n_experts - model.moe.n_experts_per_token)
    weights = sum(layer_parameters(model, n) - idle * model.has_experts(n) for n in range(model.n_layers))
    windows = [min(seq_len, layer.sliding_window or seq_len) for layer in model.of_layers()]
    keys = sum(window - window**2 / (2 * seq_len) for window in windows)  # sum over layers of the mean keys per query
    products = weights + model.n_heads * (model.head_dim + model.v_head_dim) * keys
    return model.dim * model.vocab_size * model.n_layers / products


def norm_parameters(model: Model, channels: int) -> int:
    """Return the number of parameters of norms that have this many channels in total."""
    return channels * (2 if model.norm == "layer" else 1)


def count_parameters(model: Model) -> int:
    matrices = 1 if model.tie_embeddings else 2
    layers = sum(layer_parameters(model, layer) for layer in range(model.n_layers))
    embeddings = model.dim * (matrices * model.vocab_size + model.learned_positions)
    return embeddings + layers + norm_parameters(model, model.dim)


class DatasetOptions(Section):
    """The options that name a dataset and tell how to read its documents."""

    dataset: Literal["pydoc_topics", "text", "json", "parquet", "c4", "hub"] = "pydoc_topics"
    """pydoc_topics: the 465 KB of English prose in every CPython; text, json (also JSON lines), parquet: files at
    dataset_path; c4: allenai/c4 `en`; hub: the dataset of the Hugging Face hub that dataset_path names."""
    dataset_path: NodePath = ""
    """File, folder or glob (text, json, parquet), or the dataset's name on the Hugging Face hub (hub)."""
    dataset_config: str = ""
    """Configuration of a hub dataset, if it has several."""
    dataset_split: str = "train"
    """Split of a hub dataset to train on."""
    dataset_text_key: str = "text"
    """Column that contains a document's text (json, parquet, hub)."""
    dataset_format: Literal["text", "messages", "prompt_response"] = "text"
    """Content of a row of a json, parquet or hub dataset. text: a document; messages, prompt_response: a conversation
    for fine-tuning, rendered by the tokenizer's chat template; only the assistant's messages are trained on."""
    dataset_messages_key: str = "messages"
    """messages: column with a list of messages, each with "role" (system, user, assistant, ...) and "content"."""
    dataset_prompt_key: str = "prompt"
    """prompt_response: column with the user's message."""
    dataset_response_key: str = "response"
    """prompt_response: column with the assistant's answer."""
    long_conversations: Literal["reject", "drop", "truncate"] = "reject"
    """What to do with conversations of more than seq_len + 1 tokens. truncate: keep the beginning of a conversation."""
    special_tokens_in_text: Literal["ordinary", "special"] = "ordinary"
    """How special tokens that a text or message spells out are encoded. ordinary: as text; special: as special tokens,
    for text that a chat template has already rendered (no BOS or EOS is added to a text that has them)."""
    text_sample_by: Literal["document", "paragraph", "line"] = "document"
    """Part of a text file (dataset = "text") that becomes one document."""


class MixedDataset(DatasetOptions):
    """One dataset of a mixture."""

    name: str = ""
    """Name of the dataset in metrics and checkpoints, made of letters, digits, "_", "-" and "."."""
    weight: Union[Literal[-1], Positive] = -1
    """Share of a dataset in the mixture, relative to other datasets' weights. -1 in all tables: the dataset's size."""
    tokens: Union[Literal[-1], Annotated[int, Field(ge=1, le=MOST_TOKENS)]] = -1
    """Token budget: tokens that the mixture takes from the dataset, instead of a weight. -1: no budget."""
    epochs: Union[Literal[-1], Positive] = -1
    """Number of epochs, possibly fractional, after which the mixture no longer reads the dataset. -1: no limit."""


class Training(DatasetOptions):
    """The data, the steps, and the data types of a run."""

    datasets: list[MixedDataset] = Field(default=[])
    """A mixture of datasets, each in a table [[training.datasets]]. Weights, token budgets or sizes of the datasets
    determine a fixed order of sequences. After a dataset is used up, the mixture consists of the other datasets."""
    change_mixture_on_resume: bool = False
    """Allow a resumed run's mixture to differ from its checkpoint's; each dataset continues where it stopped."""
    streaming: bool = False
    """Read and tokenize documents during training instead of tokenizing the full dataset before it."""
    streaming_shards: Count = 64
    """Streaming: number of shards of the dataset; packed sequence k is from shard k mod streaming_shards, on any number
    of ranks. The number of shards must be a multiple of the data-parallel degree and, where files cannot be split (hub,
    compressed files, one document per file), at most the number of files."""
    streaming_shuffle_block: Count = 256
    """Streaming with shuffle: number of consecutive sequences of a shard that are shuffled together as a block. A rank
    has one block of each of its shards in memory; a resumed run reads up to one block again."""
    shuffle: bool = True
    """Shuffle the packed sequences by debug.seed: all sequences of an epoch, in a new order each epoch; with streaming,
    the sequences within a block of a streaming shard."""
    cache_folder: NodePath = "~/.cache/titanlite"
    """Folder of the token cache, where the tokens of a dataset stay between runs."""
    seq_len: Count = 2048
    """Tokens of a packed sequence."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """concatenate: put documents end to end, also across the limits of sequences, without padding; best_fit: do not
    split documents that fit into a sequence, with some padding (arXiv:2404.10830)."""
    document_mask: bool = False
    """Attend only within a document, and count positions from its first token; false: attend across documents."""
    local_batch_size: Count = 8
    """Per-device batch size: sequences per data-parallel rank and gradient accumulation step."""
    global_batch_size: Union[Literal[-1], Count] = -1
    """Sequences per optimizer step; -1: local_batch_size x data-parallel ranks; more: gradient accumulation."""
    steps: Count = 10_000
    """Optimizer steps of the run."""
    epochs: NotNegative = 0.0
    """Number of passes over the training data, possibly fractional, instead of `steps`; it is rounded down to full
    steps. An epoch of a mixture has as many tokens as all of its datasets together. 0: train for `steps`."""
    max_norm: Positive = 1.0
    """Gradient clipping: gradients with a larger global norm are scaled down to this norm."""
    nonfinite_steps_allowed: CountOrZero = 0
    """Steps that the run may skip because the loss or gradient norm is not finite; the next such step ends the run."""
    skip_outlier_sigma: NotNegative = 0.0
    """Skip steps whose gradient norm exceeds the recent mean by this many standard deviations; 0: skip none."""
    outlier_window: Annotated[int, Field(ge=4, le=MOST_ITEMS)] = 128
    """Number of recent gradient norms that give mean and deviation. Skipping begins after half as many steps."""
    gc_freq: Count = 50
    """Steps between Python's garbage collections, which would otherwise run at different times on each rank."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the weights, and of optimizer states unless optimizer.state_dtype is set; float64: parity tests."""
    mixed_precision_param: Literal[Precision, "float16"] = "auto"
    """Data type of gathered weights and computation; auto: bfloat16 on CUDA, else `dtype`; float16 scales the loss."""
    mixed_precision_reduce: Precision = "auto"
    """Data type that gradients are accumulated and reduced in; auto: float32, or float64 if `dtype` is float64."""
    attention_backend: Literal["auto", "cpu", "flash", "cudnn", "efficient", "math"] = "auto"
    """auto: torch's scaled_dot_product_attention chooses. With context parallelism, a document mask or a sliding window
    below seq_len, auto is cpu on a CPU; on CUDA flash (bfloat16, float16), efficient (float32) or math (float64)."""
    initial_loss_scale: Positive = 65536.0
    """float16: initial loss scale. A step whose gradients overflow is skipped and halves the loss scale."""
    loss_scale_growth_interval: Count = 2000
    """float16: steps without overflow after which the loss scale doubles."""
    loss_chunks: Union[Literal[-1], Count] = -1
    """Chunked cross-entropy: number of chunks of tokens whose logits and loss are computed sequentially, so that only
    one chunk's logits are in memory. -1: float32 logits of a chunk take at most 2 GiB."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory; only weights in use are also on the device."""


class Optimizer(Section):
    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW decouples weight decay from the gradient; Adam adds it to the gradient; Muon orthogonalizes the momentum of
    the layers' matrices, and updates all other weights as AdamW does, at the same learning rate."""
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
    """Decay rate of Muon's momentum, which is Nesterov momentum."""
    muon_newton_schulz_steps: Count = 5
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_dtype: Precision = "auto"
    """Data type in which Muon computes and communicates; auto: the model's data type, or float32 for float16."""
    qk_clip_threshold: NotNegative = 0.0
    """QK-clip (MuonClip, Kimi K2, arXiv:2507.20534): if a head's largest attention logit in a step is above this
    threshold (Kimi K2: 100), the head's query and key weights are scaled down so that this logit would equal the
    threshold; 0: no QK-clip. It costs one more product of queries and keys in each forward."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """torch's implementation of Adam that takes the step."""
    state_dtype: Literal["auto", "float32", "bfloat16", "float8", "int8", "int4"] = "auto"
    """Data type of exp_avg and exp_avg_sq; auto: training.dtype; float8, int8: 8-bit optimizer states, with a scale per
    256 elements; int4: 4-bit, with a scale per 128. States of the embedding always have training.dtype."""
    enable_cpu_offload: bool = False
    """Keep optimizer states in host memory, and take the step on the CPU; weights and gradients stay on the device."""
    stochastic_rounding: bool = False
    """Round weights stochastically, so that small updates have an effect. Needs training.dtype = "bfloat16"."""


class LRScheduler(Section):
    """Warmup, stable phase and decay: optimizer.lr times the smaller of a ramp up to 1 and a ramp down from 1."""

    warmup_steps: CountOrZero = 200
    """Steps over which the learning rate rises linearly to optimizer.lr. A shorter run ends during the warmup."""
    warmup_ratio: Fraction = 0.0
    """Length of the warmup as a fraction of total_steps, instead of warmup_steps; 0: use warmup_steps."""
    total_steps: Union[Literal[-1], Count] = -1
    """Length of the schedule: the step after which the decay has ended. -1: training.steps."""
    decay_ratio: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """Fraction of total_steps over which the learning rate decays; -1: all steps after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; sqrt is 1 - sqrt(progress)."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor on optimizer.lr at the end of the decay."""


class Ema(Section):
    """Exponential moving average (EMA) of the weights, in float32, which `titanlite export --ema` exports."""

    decay: Fraction = 0.0
    """Decay d, such as 0.999, of each update: average = d average + (1 - d) weights; 0: no average."""
    start_step: Count = 1
    """The average starts as a copy of the weights after this many optimizer steps, not counting skipped steps."""
    warmup: bool = False
    """Use a smaller decay at first: n updates after start_step, it is at most (1 + n) / (10 + n)."""
    validation: bool = False
    """Compute the validation loss, and generate samples, with the average instead of the weights."""


class Parallelism(Section):
    """The world size is the product of the degrees, from the outermost: pp x dp_replicate x dp_shard x cp x tp."""

    data_parallel_replicate_degree: Ranks = 1
    """Number of replicas of the sharded model. Above 1 with a shard degree above 1: hybrid sharding (HSDP)."""
    data_parallel_shard_degree: Union[Literal[-1], Ranks] = -1
    """FSDP: a weight is sharded over this number x context-parallel ranks; -1: world size / other degrees."""
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
    """Number of blocks whose weights are gathered during an earlier block's forward; 0: FSDP's default, 1 on CUDA."""
    fsdp_backward_prefetch: CountOrZero = 0
    """Number of blocks whose weights are gathered during an earlier block's backward; 0: FSDP's default, one block."""
    tensor_parallel_degree: Ranks = 1
    """Number of ranks that shard each layer's heads, channels and vocabulary, and the sequence between layers."""
    disable_loss_parallel: bool = False
    """Gather the logits of tensor-parallel ranks instead of computing the loss from shards of the vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with its matrix products. Needs CUDA and compile.enable."""
    pipeline_parallel_degree: Ranks = 1
    """Number of ranks that the layers are partitioned over."""
    pipeline_parallel_schedule: Literal[get_args(Schedule)] = "1F1B"  # type: ignore[valid-type]
    """Order in which a pipeline's ranks run forwards and backwards of microbatches."""
    pipeline_parallel_microbatch_size: Count = 1
    """Number of sequences in a microbatch of a pipeline; it divides local_batch_size."""
    pipeline_parallel_stages_per_rank: Union[Literal[-1], Count] = -1
    """Number of stages per rank under a schedule that has several; -1: 2, or 1 under GPipe and 1F1B."""
    pipeline_parallel_balance: Literal["layers", "parameters"] = "layers"
    """Quantity that is balanced between the stages of a pipeline."""
    pipeline_parallel_first_stage_less_layers: CountOrZero = 0
    """Number of layers that the embedding counts as, when stages are balanced by layers."""
    pipeline_parallel_last_stage_less_layers: Union[Literal[-1], CountOrZero] = -1
    """Number of layers that the output head counts as, when stages are balanced by layers; -1: from its FLOPs."""
    module_fqns_per_model_part: list[list[str]] = Field(default=[])
    """Modules of each stage, in order (tok_embeddings, layers.0, ..., norm, output); empty: stages are balanced."""
    context_parallel_degree: Ranks = 1
    """Number of ranks that each sequence is split over."""
    context_parallel_ulysses_degree: Ranks = 1
    """Size of the groups of context-parallel ranks that use Ulysses (all-to-all over heads); the groups form a ring."""
    expert_parallel_degree: Ranks = 1
    """Number of ranks that experts are partitioned over; dp_shard x cp x tp / this degree ranks shard each expert."""

    @property
    def n_stages(self) -> int:
        per_rank = self.pipeline_parallel_stages_per_rank
        if per_rank == -1:
            per_rank = 1 if self.pipeline_parallel_schedule in ONE_STAGE else 2
        return self.pipeline_parallel_degree * per_rank

    @property
    def ring_degree(self) -> int:
        return max(self.context_parallel_degree // self.context_parallel_ulysses_degree, 1)

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks, or groups of ranks, that read different sequences (requires a resolved config)."""
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def ranks_per_shard(self) -> int:
        """Product of all degrees except data_parallel_shard_degree, which may be -1."""
        model_parallel = self.pipeline_parallel_degree * self.context_parallel_degree * self.tensor_parallel_degree
        return self.data_parallel_replicate_degree * model_parallel

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees (requires a resolved config)."""
        return self.data_parallel_shard_degree * self.ranks_per_shard


class Lora(Section):
    """LoRA fine-tuning (arXiv:2106.09685) of the weights in checkpoint.initial_load_path (docs/lora.md)."""

    rank: CountOrZero = 0
    """Rank of the adapters; only adapters are trained and saved. 0: no LoRA, and all weights are trained."""
    alpha: Positive = 16.0
    """The product of an adapter's matrices is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["wq", "wk", "wv", "wo", "w1", "w2", "w3"])
    """Linear layers with adapters, by the end of their name in a block: "wq" stands for "attention.wq". "experts" gives
    each routed expert adapters of its three weights, "experts.w1" an adapter of one."""
    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the frozen weights in memory; auto: training.dtype, the data type of the adapters."""


class Float8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit floating point."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "tensorwise"
    """tensorwise: a scale per tensor; rowwise: a scale per row, more accurate; rowwise_with_gw_hp: the same, but weight
    gradients in the model's data type; mxfp8 (OCP Microscaling): a power of two per 32 values, for Blackwell."""
    emulate: bool = False
    """Round to float8 but multiply in the model's data type, for hardware without the recipe's products."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these texts, such as "layers.0." or "attention.wk". The output head is
    always skipped, and so are layers whose weight on a rank has a dimension that 16 (mxfp8: 32) does not divide."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8. Needs the recipe tensorwise."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights together after the optimizer step. Needs enable_fsdp_float8_all_gather."""


class Int8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit integers (INT8), with a scale per row and column."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these texts, and the layers that float8.filter_fqns always skips."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """full: save only a block's inputs, and recompute all else in the backward; selective: see selective_ac_option."""
    selective_ac_option: Union[Literal["op", "every_second_mm", "attention"], Count] = "op"
    """op: save the results of matrix products, attention and collectives, and recompute all others; every_second_mm:
    like op, but recompute every second matrix product; attention: save only the results of attention; N: full
    activation checkpointing every N layers, none in between."""
    layers_per_checkpoint: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Save the inputs of only every k-th block, and recompute the k blocks of a group together; during that, each block
    saves what `mode` (none or full) determines. 1: no groups."""


class Compile(Section):
    enable: bool = False
    """Compile with torch.compile. The first steps take longer."""
    components: list[str] = Field(default=["model", "loss"])
    """What to compile. "model": each block separately; "loss": the output head and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generated kernels; aot_eager: traced, but with torch's own kernels (fast to compile, for tests)."""


LORA_FACTORS = ("lora_a", "lora_b")  # names of an adapter's matrices A and B, beside the frozen weight
SEEDED = "none"  # checkpoint.initial_load_path = "none": draw the weights from debug.seed


class Checkpoint(Section):
    enable: bool = False
    """Save checkpoints, and resume from the newest complete checkpoint in the folder."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints, relative to job.dump_folder."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: CountOrZero = 10
    """Delete all but the newest k good checkpoints; 0 keeps all."""
    load_step: Union[Literal[-1], Count] = -1
    """Step to resume from; -1: the newest checkpoint's."""
    initial_load_path: PathText = ""
    """A checkpoint's step-N folder, or a Hugging Face folder (config.json, safetensors), with the weights of a run that
    has no checkpoint to resume; none: random weights; empty: hf_assets_path for flavor from_hf, else none."""
    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder, step-N-hf in the folder of checkpoints."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of exported weights; auto: the data type of the released initial weights, or else training.dtype."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: copy the state to host memory and write it while training continues."""
    on_corrupt: Literal["stop", "previous"] = "stop"
    """What to do if the newest checkpoint is damaged. previous: rename it to step-N.damaged, and resume from the
    checkpoint before it."""
    on_error: Literal["fail", "continue"] = "fail"
    """What to do if a checkpoint cannot be written. fail: end with status 1. continue: print the error, and train on to
    the next save; if the last save fails, the run still ends with status 1."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between two lines on the console and in metrics.jsonl."""
    enable_tensorboard: bool = True
    """Write the metrics for TensorBoard, too."""
    save_tb_folder: PathText = "tb"
    """Folder of the TensorBoard files, relative to job.dump_folder."""


class Validation(Section):
    enable: bool = False
    """Compute the loss on the validation split."""
    freq: Count = 100
    """Steps between validations; the last step is always validated."""
    steps: Union[Literal[-1], Count] = 16
    """Maximum number of global batches that a validation reads, each of a training step's size; -1: the full split."""
    fraction: Fraction = 0.05
    """Fraction of documents in the validation split, if no split or path is set; training never reads them."""
    dataset_path: PathText = ""
    """Files to validate on, of the same kind as training.dataset or the first of training.datasets."""
    dataset_split: str = ""
    """Split of a hub dataset to validate on; for a mixture, a split of the first dataset."""
    generate_prompts: list[str] = Field(default=[])
    """Prompts that are continued greedily after each validation; the texts are logged, also in TensorBoard."""
    generate_tokens: Count = 32
    """Maximum number of tokens after a prompt, until EOS. Each costs a forward of local_batch_size sequences."""


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
    """Before the first step is done (startup, compilation, loading): seconds without a sign of life or progress from a
    rank after which the run ends. Collectives have 15 s more."""
    train_timeout_seconds: Count = 100
    """After the first step: seconds without a sign of life or progress from a rank after which the run ends."""
    trace_buf_size: CountOrZero = 20_000
    """Number of collectives that NCCL's flight recorder keeps and dumps after a timeout; 0 disables it."""


class FaultTolerance(Section):
    """Training in replica groups that may fail. Options have torchtitan 0.2.2's names."""

    enable: bool = False
    """Train in replica groups, which are launches of the same config that torchft connects. Each step is taken by the
    groups in its quorum. Needs titanlite[ft], and the lighthouse's address in TORCHFT_LIGHTHOUSE."""
    replica_id: CountOrZero = 0
    """Number of this launch's replica group, from 0 to group_size - 1."""
    group_size: CountOrZero = 0
    """Number of groups that the global batch is divided among, whether they run or not."""
    min_replica_size: Count = 1
    """Minimum number of participating groups that take a step. Fewer groups wait for more to join."""
    process_group_timeout_ms: Count = 10_000
    """Milliseconds after which a collective between groups counts as failed; its step is then taken again."""

    @property
    def n_groups(self) -> int:
        return self.group_size if self.enable else 1


class Plan(Section):
    """This section is for `titanlite plan` and `titanlite advise`; training does not read it."""

    device: PathText = "h100"
    """A name in titanlite/metrics/devices.toml, or a TOML file that titanlite calibrate has written."""
    devices_per_node: Union[Literal[-1], Ranks] = -1
    """Devices of a node; -1: the usual number for this device."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Tokens to train on, from which days, hours and costs are computed; 0: the tokens of training.steps."""
    price: NotNegative = 0.0
    """Price of one device for one hour, in any currency."""
    expert_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Load of the planned rank's experts, as a multiple of the mean over its expert-parallel group; 1: balanced."""


class Debug(Section):
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of the weights, the data order and the random number generators."""
    deterministic: bool = False
    """Use only deterministic algorithms of torch."""
    sdc_check_freq: CountOrZero = 0
    """Check for silent data corruption: steps between comparisons of replicas and of a step computed twice; 0: none."""
    fingerprint_freq: CountOrZero = 0
    """Steps between fingerprints, which `titanlite diff` compares, from the first step on; 0: no fingerprints."""


class Config(Section):
    alternatives: ClassVar[dict[str, tuple[str, ...]]] = {
        "training.epochs": ("training.steps", "lr_scheduler.total_steps"),
        "training.steps": ("training.epochs",),
        "lr_scheduler.warmup_ratio": ("lr_scheduler.warmup_steps",),
        "lr_scheduler.warmup_steps": ("lr_scheduler.warmup_ratio",),
    }
    copies: ClassVar[dict[str, tuple[str, str]]] = {"training.steps": ("lr_scheduler", "total_steps")}
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
        return self._own

    def with_own(self, own: Parts) -> Config:
        config = self.model_copy()
        config._own = own
        return config

    def identity(self) -> dict[str, Any]:
        """Return the options, except the seed, that a resumed run must share with the run that saved the checkpoint."""
        lora = {f"lora.{key}": value for key, value in self.lora.model_dump().items()} if self.lora.rank else {}
        return {**self.model.identity(), **lora, **({"own.block": True} if self.own.block else {})}

    @property
    def initial_weights(self) -> str:
        """The folder or checkpoint with the run's initial weights; SEEDED if they are drawn by debug.seed."""
        assets = os.path.expanduser(self.model.hf_assets_path) if self.model.flavor == "from_hf" else SEEDED
        return self.checkpoint.initial_load_path or assets

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of per-device batches in an optimizer step of a rank (requires a resolved config)."""
        sequences = self.training.global_batch_size // self.fault_tolerance.n_groups
        return sequences // self.training.local_batch_size // self.parallelism.data_parallel_degree

    @property
    def n_microbatches(self) -> int:
        """Number of microbatches that a pipeline splits a per-device batch into."""
        return self.training.local_batch_size // self.parallelism.pipeline_parallel_microbatch_size

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch_size * self.training.seq_len

    @property
    def tokens_of_forward(self) -> int:
        """Number of tokens in a rank's forward: a microbatch's in a pipeline, otherwise a per-device batch's."""
        piped = self.parallelism.pipeline_parallel_degree > 1
        sequences = self.parallelism.pipeline_parallel_microbatch_size if piped else self.training.local_batch_size
        return sequences * self.training.seq_len // self.parallelism.context_parallel_degree

    @property
    def windowed(self) -> bool:
        """Whether any layer has a sliding window that is shorter than training.seq_len."""
        return any(0 < layer.sliding_window < self.training.seq_len for layer in self.model.of_layers())

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """Shape of the activations that a pipeline stage sends to the next: [tokens of a microbatch on a rank, dim]."""
        return self.tokens_of_forward // self.parallelism.tensor_parallel_degree, self.model.dim

    def replace(self, **values: Any) -> Config:
        """Return a copy with other values, keyed `section__key`, which are not validated."""
        for name in values:
            if name.replace("__", ".") not in options_of(Config):
                raise AttributeError(f"no option {name.replace('__', '.')}")
        return functools.reduce(_with_value, values.items(), self)

    def toml(self) -> str:
        """Return a TOML file with every option, and with a comment that names the user's own parts of the run."""
        own = f"# own: {self.own.digest}\n" if self.own.digest else ""
        return own + tomli_w.dumps(self.model_dump())


def _with_value(section: Any, item: tuple[str, Any]) -> Any:
    """Return a copy of a section with the new value in `item`: (key, value), or (subsection__key, value)."""
    (name, _, key), value = item[0].partition("__"), item[1]
    value = _with_value(getattr(section, name), (key, value)) if key else value
    return section.model_copy(update={name: value})


def stage_modules(config: Config) -> list[list[str]]:
    parallelism, model = config.parallelism, config.model
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_balance == "layers":
        first, last = (getattr(parallelism, f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
        costs = [first, *[1] * model.n_layers, 0, layers_of_head(model, config.training.seq_len) if last < 0 else last]
    else:
        layers, matrix = [layer_parameters(model, n) for n in range(model.n_layers)], model.dim * model.vocab_size
        costs = [matrix + model.learned_positions * model.dim, *layers, norm_parameters(model, model.dim), matrix]
    return split_into_stages(module_names(model.n_layers), costs, parallelism.n_stages)


def numerics(config: Config) -> list[Any]:
    """Return the options that determine a run's trained weights, as plain JSON, without the paths of files."""
    sections = config.model_dump(include={"optimizer", "lr_scheduler", "parallelism", "float8", "int8"})
    training = config.training.model_dump(exclude={"cache_folder", "dataset_path", "gc_freq"})
    own = {"enable", "replica_id", "min_replica_size", "process_group_timeout_ms"}
    groups = config.fault_tolerance.model_dump(exclude=own)
    return [config.model.identity(), training, sections, config.debug.seed, groups]
