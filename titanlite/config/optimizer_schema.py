"""The options of the optimizer and its learning rate, [optimizer] and [lr_scheduler]."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field

from titanlite.config.loader import Section
from titanlite.config.types import Count, CountOrZero, Fraction, NotNegative, Positive, Precision

QUANTIZED_STATES = {"float8": 256, "int8": 256, "int4": 128}
"""Elements that share a float32 scale, by optimizer.state_dtype."""


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
    total_steps: Union[Literal[-1], Count] = -1
    """Length of the schedule: the step after which the decay has ended. -1: training.steps."""
    decay_ratio: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """Fraction of total_steps over which the learning rate decays; -1: all steps after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; sqrt is 1 - sqrt(progress)."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Factor on optimizer.lr at the end of the decay."""
