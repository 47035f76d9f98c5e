# ruff: noqa: F403, F405
"""The rules between options: what they reject, what they leave alone, and some of their messages in full."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.config import *
from titanlite import config
from titanlite.config.schema import numerics

NAME, HOST_STATES = "optimizer.name", "optimizer.enable_cpu_offload"

# ---------------------------------------------------------------------------------------------------------------------
# Wrong configs: settings, and a phrase of the message for each option that is rejected

# fmt: off
REJECTED = [
    # model
    ({DIM: 100}, {HEADS: "divisor of model.dim = 100"}),
    ({f"--{HEADS}": 24}, {HEADS: "divisor of model.dim = 256"}),
    ({DIM: 240}, {HEADS: "even head_dim, got 240 / 16 = 15"}),
    ({HEAD_DIM: 15}, {HEAD_DIM: "expected an even number"}),
    ({DIM: 240, f"--{HEAD_DIM}": 15}, {HEAD_DIM: "expected an even number"}),
    ({DIM: 100, HEAD_DIM: -1}, {HEADS: "divisor of model.dim = 100; the quotient is head_dim, unless that is set"}),
    ({KV_HEADS: 3}, {KV_HEADS: "divisor of model.n_heads = 16"}),
    ({FLAVOR: "llama3_8b", ROPE_LOW: 4}, {ROPE_LOW: "expected a number below model.rope_high_freq_factor = 4.0"}),
    ({ROPE_SCALING: 2.0, ROPE_TYPE: "yarn", ROPE_SLOW: 32.5},
     {ROPE_SLOW: "expected at most model.rope_beta_fast = 32.0"}),
    ({ROPE_SCALING: 2.0, ROPE_TYPE: "yarn", ROPE_THETA: 1.0}, {ROPE_THETA: "expected a number above 1"}),
    # experts
    ({EXPERTS: 8, PER_TOKEN: 9}, {PER_TOKEN: "expected at most model.moe.n_experts = 8"}),
    ({EXPERTS: 8, "model.moe.n_first_dense_layers": 6}, {EXPERTS: "none of 6 layers has experts"}),
    ({EXPERTS: 8, "model.moe.every_n_layers": 7}, {EXPERTS: "none of 6 layers has experts"}),
    ({EXPERTS: 8, GROUPS: 3}, {GROUPS: "expected a divisor of model.moe.n_experts = 8"}),
    ({EXPERTS: 8, GROUPS: 2, CHOSEN_GROUPS: 3}, {CHOSEN_GROUPS: "expected at most model.moe.n_groups = 2"}),
    ({EXPERTS: 8, GROUPS: 8}, {GROUPS: "expected at least two experts in a group"}),
    ({EXPERTS: 8, "model.moe.group_score": "max"},
     {"model.moe.group_score": "read only with fewer groups per token than model.moe.n_groups = 1; remove it"}),
    ({EXPERTS: 8, GROUPS: 4, PER_TOKEN: 3}, {CHOSEN_GROUPS: "model.moe.n_experts_per_token = 3 experts"}),
    ({EXPERTS: 8, BIAS_RATE: 0.1}, {BIAS_RATE: "read only when model.moe.balance_bias is true"}),
    ({EXPERTS: 8, "model.mlp_bias": True}, {"model.mlp_bias": "experts have model.moe.expert_bias instead"}),
    ({EXPERTS: 6, EXPERT: 4}, {EXPERT: "expected a divisor of model.moe.n_experts = 6"}),
    ({EXPERTS: 8, TENSOR: 8, "model.moe.expert_dim": 12}, {TENSOR: "the experts' width 12"}),
    ({EXPERTS: 8, RESHARD: 2}, {RESHARD: "unsupported with experts"}),
    ({EXPERTS: 8, IMBALANCE: 1.5}, {IMBALANCE: "read only when parallelism.expert_parallel_degree is above 1"}),
    ({EXPERTS: 8, EXPERT: 2, IMBALANCE: 2.5}, {IMBALANCE: "expected at most 2, with which a rank receives all"}),
    ({EXPERTS: 8, PER_TOKEN: 6, EXPERT: 4, IMBALANCE: 2.0}, {IMBALANCE: "expected at most 1.333, with which a rank"}),
    # checkpoints, and the scaling of the rotary embedding
    *(({f"checkpoint.{key}": value}, {f"checkpoint.{key}": "read only when checkpoint.enable is true"})
      for key, value in {"load_step": 3, "interval": 5, "keep_latest_k": 0, "folder": "x", "async_mode": "async",
                         "on_corrupt": "previous", "on_error": "continue"}.items()),
    *(({f"model.rope_{key}": value}, {f"model.rope_{key}": "read only when model.rope_scaling_factor is above 1"})
      for key, value in {"scaling_type": "yarn", "low_freq_factor": 2.0, "high_freq_factor": 8.0, "beta_fast": 9.0,
                         "beta_slow": 2.0, "attention_factor": 1.5, "original_seq_len": 9,
                         "yarn_truncate": False}.items()),
    # replica groups
    ({REPLICA_GROUPS: 2}, {REPLICA_GROUPS: "read only when fault_tolerance.enable is true"}),
    ({REPLICAS: True}, {REPLICA_GROUPS: "expected 2 to 1024 replica groups"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2000}, {REPLICA_GROUPS: "expected 2 to 1024 replica groups"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, "fault_tolerance.replica_id": 2},
     {"fault_tolerance.replica_id": "expected a number below fault_tolerance.group_size = 2"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, "fault_tolerance.min_replica_size": 3},
     {"fault_tolerance.min_replica_size": "expected at most fault_tolerance.group_size = 2"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, DATASET: "text", PATH: "x", STREAMING: True},
     {STREAMING: "the position in a stream is lost with a group"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, EXPERTS: 8}, {EXPERTS: "the load of experts is balanced in one group"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, "debug.fingerprint_freq": 5},
     {"debug.fingerprint_freq": "fingerprints are those of one group"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, "debug.sdc_check_freq": 5},
     {"debug.sdc_check_freq": "a step is computed again in one group only"}),
    ({REPLICAS: True, REPLICA_GROUPS: 2, FLOAT8: True, GATHER: True, PRECOMPUTE: True},
     {PRECOMPUTE: "the scales of weights that another group sends are not known"}),
    # data
    ({DATASET: "text"}, {PATH: 'training.dataset = "text" needs a file'}),
    ({DATASET: "json"}, {PATH: 'training.dataset = "json" needs a file'}),
    ({DATASET: "parquet", PATH: ""}, {PATH: 'training.dataset = "parquet" needs a file'}),
    ({DATASET: "hub"}, {PATH: 'training.dataset = "hub" needs a name'}),
    ({DATASET: "c4", PATH: "x", "training.dataset_config": "en"},
     {PATH: 'is "text" or "json" or "parquet" or "hub"; set that', "training.dataset_config": 'is "hub"; set that'}),
    ({DATASET: "text", PATH: "x", "training.dataset_split": "test", TEXT_KEY: "body", VALIDATION_SPLIT: "test"},
     {"training.dataset_split": 'is "hub"; set that', VALIDATION_SPLIT: 'is "hub"; set that',
     TEXT_KEY: 'is "json" or "parquet" or "hub"; set that'}),
    ({DATASET: "json", PATH: "x", "training.text_sample_by": "line"},
     {"training.text_sample_by": 'is "text"; set that'}),
    ({"training.change_mixture_on_resume": True},
     {"training.change_mixture_on_resume": "read only with training.datasets; set that"}),
    ({DATASET: "hub", PATH: "x", VALIDATION_PATH: "y"},
     {VALIDATION_PATH: 'is "text" or "json" or "parquet"; set that'}),
    ({STREAMING: True, SHUFFLE: False}, {STREAMING: "the built-in text is in memory"}),
    ({**C4_STREAM, SHUFFLE_BLOCK: 8}, {SHUFFLE_BLOCK: "read only with training.shuffle = true"}),
    ({SHUFFLE_BLOCK: 8}, {SHUFFLE_BLOCK: "is true; set that"}),
    ({**C4_STREAM, FRACTION: 0.1}, {FRACTION: "streaming cannot split off validation documents"}),
    ({**TEXT_STREAM, VALIDATE: True}, {VALIDATE: "streaming cannot split off validation documents"}),
    ({STREAMING_SHARDS: 8}, {STREAMING_SHARDS: "is true; set that"}),
    ({DATASET: "c4", FRACTION: 0.1}, {FRACTION: "the dataset has a validation split of its own"}),
    ({VALIDATE: True, FRACTION: 0.0}, {FRACTION: "validation.enable needs documents"}),
    # samples
    ({PROMPTS: ["a"]}, {PROMPTS: "read only when validation.enable is true"}),
    ({VALIDATE: True, PROMPTS: ["a"], PIPELINE: 2}, {PROMPTS: "parallelism.pipeline_parallel_degree = 2; set []"}),
    ({VALIDATE: True, PROMPTS: ["a"], f"--{CONTEXT}": 2}, {PROMPTS: "parallelism.context_parallel_degree = 2; set []"}),
    ({VALIDATE: True, "validation.generate_tokens": 5},
     {"validation.generate_tokens": "read only with validation.generate_prompts"}),
    # steps
    ({GLOBAL_BATCH: 12, TOTAL_STEPS: 5}, {GLOBAL_BATCH: "multiple of training.local_batch_size = 8",
     TOTAL_STEPS: "expected at least training.steps = 10000"}),
    ({DTYPE: "float64", PARAM: "bfloat16", REDUCE_DTYPE: "float32"},
     {PARAM: "computes and reduces in float64", REDUCE_DTYPE: "computes and reduces in float64"}),
    ({"training.outlier_window": 8}, {"training.outlier_window": "when training.skip_outlier_sigma is above 0; set"}),
    ({STEPS: 4, TOTAL_STEPS: 5, f"--{STEPS}": 6}, {TOTAL_STEPS: "expected at least training.steps = 6"}),
    # activation checkpointing and compilation
    ({SAC: 2}, {SAC: 'is "selective"; set that'}),
    ({AC_MODE: "full", SAC: 1}, {SAC: 'is "selective"; set that'}),
    ({COMPILE: True, COMPONENTS: ["model", "optimizer"]}, {COMPONENTS: 'expected "model", "loss" or both'}),
    # precision
    ({LOSS_SCALE: 8.0, GROWTH: 10}, {LOSS_SCALE: 'is "float16"; set that', GROWTH: 'is "float16"; set that'}),
    ({DTYPE: "bfloat16", PARAM: "float16"}, {PARAM: "float16 gradients need float32 weights"}),
    ({ROUNDING: True}, {ROUNDING: "the weights are float32"}),
    ({DTYPE: "float64", PARAM: "float16", ROUNDING: True, STATES: "bfloat16"},
     {PARAM: "computes and reduces in float64", ROUNDING: "the weights are float64", STATES: "is for parity tests"}),
    ({STATES: "int8", IMPLEMENTATION: "foreach"}, {IMPLEMENTATION: "torchao computes the step"}),
    ({HOST_STATES: True, STATES: "int8"}, {HOST_STATES: "the CPU's step is that of Adam and AdamW"}),
    ({HOST_STATES: True, NAME: "Muon"}, {HOST_STATES: "the CPU's step is that of Adam and AdamW"}),
    ({HOST_STATES: True, IMPLEMENTATION: "foreach"}, {IMPLEMENTATION: "is fused; remove it"}),
    ({HOST_STATES: True, "training.enable_cpu_offload": True}, {HOST_STATES: "keeps the states in host memory too"}),
    ({NAME: "Muon", STATES: "int8"}, {STATES: "low-bit steps are those of Adam"}),
    ({NAME: "Muon", DTYPE: "bfloat16", ROUNDING: True}, {ROUNDING: "low-bit steps are those of Adam"}),
    ({NAME: "Muon", "training.enable_cpu_offload": True},
     {"training.enable_cpu_offload": "Muon multiplies matrices, on the device"}),
    ({"optimizer.muon_momentum": 0.9}, {"optimizer.muon_momentum": 'read only when optimizer.name is "Muon"'}),
    ({DTYPE: "bfloat16", ROUNDING: True, f"--{IMPLEMENTATION}": "for-loop"},
     {IMPLEMENTATION: "torchao computes the step"}),
    ({FLOAT8: True, RECIPE: "rowwise", GATHER: True}, {GATHER: '"rowwise" has a scale per row'}),
    ({FLOAT8: True, GATHER: True, f"--{RECIPE}": "rowwise_with_gw_hp"},
     {GATHER: '"rowwise_with_gw_hp" has a scale per row'}),
    ({FLOAT8: True, RECIPE: "mxfp8", GATHER: True}, {GATHER: '"mxfp8" has a scale per block'}),
    ({FLOAT8: True, INT8: True}, {INT8: "float8.enable = true converts the same layers"}),
    ({INT8: True, COMPILE: True, TENSOR: 2, ASYNC: True}, {ASYNC: "no collective with INT8 products"}),
    ({FLOAT8: True, RECIPE: "mxfp8", COMPILE: True, TENSOR: 2, ASYNC: True}, {ASYNC: "with MXFP8 products"}),
    ({INT8: True, BATCH: 2, SEQ_LEN: 131072}, {BATCH: "sum 262144 tokens in 32 bits"}),
    ({INT8: True, PIPELINE: 2, MICROBATCH: 2, BATCH: 4, SEQ_LEN: 131072}, {MICROBATCH: "sum 262144 tokens"}),
    ({FLOAT8: True, PRECOMPUTE: True}, {PRECOMPUTE: "the scales are for weights gathered in float8"}),
    # tensor parallelism
    ({TENSOR: 2, HEADS: 1, KV_HEADS: 1}, {TENSOR: ("divisor of model.n_heads = 1", "divisor of model.n_kv_heads = 1")}),
    ({f"--{TENSOR}": 16}, {TENSOR: "divisor of model.n_kv_heads = 8"}),
    ({TENSOR: 4, FFN_DIM: 770, VOCABULARY: 270},
     {TENSOR: ("divisor of model.ffn_dim = 770", "divisor of model.vocab_size = 270")}),
    ({TENSOR: 4, SEQ_LEN: 30}, {SEQ_LEN: "multiple of 4, to"}),
    # without compiling, and with a backend that does not overlap
    ({TENSOR: 2, ASYNC: True}, {ASYNC: "torch.compile creates the overlap"}),
    ({COMPILE: True, COMPILER: "aot_eager", TENSOR: 2, f"--{ASYNC}": True},
     {ASYNC: "torch.compile creates the overlap"}),
    # context parallelism
    ({CONTEXT: 4, ULYSSES: 3}, {ULYSSES: "divisor of parallelism.context_parallel_degree = 4"}),
    # the ring degree is unknown then, and its chunks are not checked
    ({SEQ_LEN: 12, CONTEXT: 4, ULYSSES: 8}, {ULYSSES: "divisor of parallelism.context_parallel_degree = 4"}),
    ({ULYSSES: 2}, {ULYSSES: "divisor of parallelism.context_parallel_degree = 1"}),
    # heads of the model, and of a tensor-parallel rank
    ({CONTEXT: 32, ULYSSES: 32}, {ULYSSES: ("the 16 query heads of a rank (model.n_heads = 16)",
     "the 8 KV heads of a rank (model.n_kv_heads = 8)")}),
    ({CONTEXT: 4, ULYSSES: 4, TENSOR: 4},
     {ULYSSES: "the 2 KV heads of a rank (model.n_kv_heads = 8, sharded by tensor parallel 4)"}),
    # a ring, without and with Ulysses; Ulysses alone; each of them with tensor parallelism
    ({SEQ_LEN: 6, CONTEXT: 2}, {SEQ_LEN: "multiple of 4, to"}),
    ({SEQ_LEN: 12, CONTEXT: 4, ULYSSES: 2}, {SEQ_LEN: "multiple of 8, to"}),
    ({SEQ_LEN: 7, CONTEXT: 2, ULYSSES: 2}, {SEQ_LEN: "multiple of 2, to"}),
    ({SEQ_LEN: 6, CONTEXT: 2, ULYSSES: 2, TENSOR: 2}, {SEQ_LEN: "multiple of 4, to"}),
    ({SEQ_LEN: 12, CONTEXT: 2, TENSOR: 4}, {SEQ_LEN: "multiple of 8, to"}),
    ({f"--{CONTEXT}": 3}, {SEQ_LEN: "multiple of 6, to"}),
    # pipeline parallelism
    ({TIED: True, PIPELINE: 2}, {TIED: "embedding and the output head on two stages"}),
    ({FLAVOR: "llama3_1b", f"--{PIPELINE}": 2}, {TIED: "embedding and the output head on two stages"}),
    ({PIPELINE: 2, STAGES: 2}, {STAGES: 'expected 1 under "1F1B", or -1'}),
    ({PIPELINE: 2, STAGES: 2, SCHEDULE: "GPipe"}, {STAGES: 'expected 1 under "GPipe", or -1'}),
    ({PIPELINE: 2, STAGES: 1, f"--{SCHEDULE}": "LoopedBFS"}, {STAGES: 'expected at least 2 under "LoopedBFS", or -1'}),
    ({PIPELINE: 2, STAGES: 1, f"--{SCHEDULE}": "InterleavedZeroBubble"},
     {STAGES: 'expected at least 2 under "InterleavedZeroBubble", or -1'}),
    ({PIPELINE: 2, STAGES: 1, f"--{SCHEDULE}": "ZBVZeroBubble"}, {STAGES: 'expected 2 under "ZBVZeroBubble", or -1'}),
    ({PIPELINE: 2, STAGES: 3, f"--{SCHEDULE}": "DualPipeV"}, {STAGES: 'expected 2 under "DualPipeV", or -1'}),
    ({PIPELINE: 2, MICROBATCH: 3}, {MICROBATCH: "divisor of training.local_batch_size = 8"}),
    # only the number of microbatches is unknown then
    ({PIPELINE: 2, MICROBATCH: 16, REDUCE: "last_accumulation_step", MODULES: [["norm"]]},
     {REDUCE: "a pipeline reduces gradients", MODULES: "expected 2 lists, one per stage, got 1",
     MICROBATCH: "divisor of training.local_batch_size = 8"}),
    ({PIPELINE: 4, MICROBATCH: 4}, {BATCH: '"1F1B" needs as many microbatches as its 4 stages'}),
    ({PIPELINE: 2, MICROBATCH: 4, f"--{SCHEDULE}": "DualPipeV"},
     {BATCH: '"DualPipeV" needs as many microbatches as its 4 stages'}),
    ({BATCH: 5, PIPELINE: 2, f"--{SCHEDULE}": "Interleaved1F1B"},
     {BATCH: '"Interleaved1F1B" runs its microbatches in 2 equal rounds'}),
    ({BATCH: 14, PIPELINE: 3, MICROBATCH: 2, f"--{SCHEDULE}": "InterleavedZeroBubble"},
     {BATCH: '"InterleavedZeroBubble" runs its microbatches in 2 equal rounds'}),
    ({PIPELINE: 2, RESHARD: "always", f"--{SCHEDULE}": "InterleavedZeroBubble"},
     {RESHARD: '"InterleavedZeroBubble" computes'}),
    ({PIPELINE: 2, RESHARD: "always", f"--{SCHEDULE}": "ZBVZeroBubble"}, {RESHARD: '"ZBVZeroBubble" computes'}),
    ({AC_MODE: "selective", PIPELINE: 2, SCHEDULE: "ZBVZeroBubble"}, {SAC: '"ZBVZeroBubble" computes'}),
    # torch builds the groups on some of the ranks only
    ({PIPELINE: 2, RESHARD: 2}, {RESHARD: "hangs under parallelism.pipeline_parallel_degree;"}),
    ({TENSOR: 2, PIPELINE: 2, RESHARD: 2},
     {RESHARD: "hangs under parallelism.tensor_parallel_degree and parallelism.pipeline_parallel_degree;"}),
    ({PIPELINE: 2, RESHARD: "always", f"--{SCHEDULE}": "DualPipeV"}, {RESHARD: '"DualPipeV" computes'}),
    ({PIPELINE: 2, REDUCE: "last_accumulation_step"}, {REDUCE: "a pipeline reduces gradients"}),
    ({COMPILE: True, PIPELINE: 2, f"--{SCHEDULE}": "InterleavedZeroBubble"},
     {COMPILE: '"InterleavedZeroBubble" computes'}),
    ({COMPILE: True, PIPELINE: 2, f"--{SCHEDULE}": "ZBVZeroBubble"}, {COMPILE: '"ZBVZeroBubble" computes'}),
    ({COMPILE: True, PIPELINE: 2, f"--{SCHEDULE}": "DualPipeV"}, {COMPILE: '"DualPipeV" computes'}),
    # pipeline stages
    ({PIPELINE: 7}, {PIPELINE: "7 stages need at least as many layers, and model.n_layers = 6"}),
    ({PIPELINE: 2, LAYERS: 3, f"--{SCHEDULE}": "LoopedBFS"},
     {PIPELINE: "4 stages need at least as many layers, and model.n_layers = 3"}),
    ({PIPELINE: 2, LAYERS: 5, f"--{SCHEDULE}": "LoopedBFS", f"--{STAGES}": 3},
     {PIPELINE: "6 stages need at least as many layers, and model.n_layers = 5"}),
    ({PIPELINE: 2, BALANCE: "parameters", FIRST: 2, LAST: 0},
     {FIRST: 'is "layers"; set that', LAST: 'is "layers"; set that'}),
    ({LAYERS: 4, PIPELINE: 2, FIRST: 5, LAST: 1000},
     {FIRST: "expected at most model.n_layers = 4", LAST: "expected at most model.n_layers = 4"}),
    ({LAYERS: 4, PIPELINE: 2, FIRST: 4, LAST: 5}, {LAST: "expected at most model.n_layers = 4"}),
    ({LAYERS: 2, MODULES: TWO_STAGES, PIPELINE: 2, BALANCE: "parameters", FIRST: 2, LAST: 0},
     {BALANCE: "names the stages' modules", FIRST: "names the stages' modules", LAST: "names the stages' modules"}),
    # number of lists, layers, order and names of modules
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0", "layers.1", "norm", "output"]]},
     {MODULES: "expected 2 lists, one per stage, got 1"}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": TWO_STAGES, f"--{SCHEDULE}": "LoopedBFS"},
     {MODULES: "expected 4 lists, one per stage, got 2"}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]},
     {MODULES: "expected at least one layer in each stage"}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"]]},
     {MODULES: 'got "layers.1" where "layers.0" belongs'}),
    ({LAYERS: 3, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "head"]]},
     {MODULES: 'got "norm" where "layers.2" belongs'}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "head"]]},
     {MODULES: 'got "head" where "output" belongs'}),
    # an empty name, one name short, and one too many
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0"], ["layers.1", "norm", ""]]},
     {MODULES: 'got "" where "output" belongs'}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0"], ["layers.1", "norm"]]},
     {MODULES: 'got nothing where "output" belongs'}),
    ({LAYERS: 2, PIPELINE: 2, f"--{MODULES}": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output", "head"]]},
     {MODULES: 'got "head" where nothing belongs'}),
]
# fmt: on


@pytest.mark.parametrize(("settings", "rejected"), named(REJECTED))
def test_rejected(tmp_path: Path, settings: Settings, rejected: Rejected):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


# Each of these has a bad value, and a rule that would apply to the default in its place.
# fmt: off
BAD_VALUES = [
    ({DIM: 0, HEADS: 24}, {DIM: "expected an integer >= 1"}),
    ({DIM: 0, HEADS: 256}, {DIM: "expected an integer >= 1"}),
    ({FLAVOR: 3, HEADS: 256}, {FLAVOR: 'expected one of "debug"'}),
    ({HEADS: "x", KV_HEADS: 3}, {HEADS: "expected an integer >= 1"}),
    ({FLAVOR: "llama", HEADS: 24, KV_HEADS: 5, ROPE_SCALING: 8, ROPE_LOW: 9}, {FLAVOR: 'expected one of "debug"'}),
    ({ROPE_SCALING: 8, ROPE_LOW: 9, ROPE_HIGH: 0}, {ROPE_HIGH: "expected a finite number > 0"}),
    ({FLAVOR: "llama3_8b", ROPE_SCALING: 0, ROPE_LOW: 9}, {ROPE_SCALING: "expected a finite number >= 1"}),
    ({DATASET: "c5", PATH: "x", STREAMING: True, SHUFFLE: False, VALIDATE: True},
     {DATASET: 'expected one of "pydoc_topics"'}),
    ({**TEXT_STREAM, VALIDATE: True, VALIDATION_PATH: 3}, {VALIDATION_PATH: "expected a string"}),
    ({DATASET: "text", PATH: "x", VALIDATE: True, FRACTION: 0.0, VALIDATION_PATH: 3},
     {VALIDATION_PATH: "expected a string"}),
    ({DATASET: "hub", PATH: "x", VALIDATE: True, FRACTION: 0.0, VALIDATION_SPLIT: 3},
     {VALIDATION_SPLIT: "expected a string"}),
    ({STREAMING: "yes", STREAMING_SHARDS: 8, VALIDATE: True, FRACTION: 0.0}, {STREAMING: "expected true or false"}),
    ({BATCH: 0, GLOBAL_BATCH: 12, STEPS: "many", DTYPE: "f64", PARAM: "bfloat16", TOTAL_STEPS: 5},
     {BATCH: "expected an integer >= 1", STEPS: "expected an integer >= 1", DTYPE: 'expected one of "float32"'}),
    ({TENSOR: 0, LOSS_PARALLEL: True, ASYNC: True, CONTEXT: 8, ULYSSES: 16},
     {TENSOR: "expected an integer >= 1", ULYSSES: "divisor of parallelism.context_parallel_degree = 8"}),
    ({TENSOR: "x", CONTEXT: 16, ULYSSES: 16}, {TENSOR: "expected an integer >= 1"}),
    ({KV_HEADS: 0, TENSOR: 16}, {KV_HEADS: "expected an integer >= 1"}),
    ({FLAVOR: "llama", TENSOR: 32}, {FLAVOR: 'expected one of "debug"'}),
    ({BACKEND: "math", CONTEXT: 0, ULYSSES: 2}, {CONTEXT: "expected an integer >= 1"}),
    ({CONTEXT: 3, ULYSSES: "all"}, {ULYSSES: "expected an integer >= 1"}),
    ({SEQ_LEN: "long", CONTEXT: 3}, {SEQ_LEN: "expected an integer >= 1"}),
    ({PIPELINE: 0, SCHEDULE: "GPipe", BALANCE: "layers", MODULES: [["x"]]}, {PIPELINE: "expected an integer >= 1"}),
    ({PIPELINE: 4, SCHEDULE: "BFS", STAGES: 2, MODULES: [["x"]]}, {SCHEDULE: 'expected one of "GPipe"'}),
    ({PIPELINE: 4, SCHEDULE: "BFS", MODULES: [["x"]]}, {SCHEDULE: 'expected one of "GPipe"'}),
    ({PIPELINE: 2, LAYERS: 0, MODULES: TWO_STAGES}, {LAYERS: "expected an integer >= 1"}),
    ({BATCH: 5, PIPELINE: 2, SCHEDULE: "Interleaved1F1B", MICROBATCH: "all"}, {MICROBATCH: "expected an integer >= 1"}),
    ({PIPELINE: "two", MODULES: [["x"]]}, {PIPELINE: "expected an integer >= 1"}),
    ({PIPELINE: 2, STAGES: "two", MODULES: [["x"]]}, {STAGES: "expected -1, or an integer >= 1"}),
    ({LAYERS: 0, BATCH: 0, PIPELINE: 7, MICROBATCH: 3},
     {LAYERS: "expected an integer >= 1", BATCH: "expected an integer >= 1"}),
    ({TIED: 1, LAYERS: 32, BATCH: 8, PIPELINE: 16, MICROBATCH: "all"},
     {TIED: "expected true or false", MICROBATCH: "expected an integer >= 1"}),
    ({PIPELINE: 2, BALANCE: 3, SCHEDULE: "DualPipeV", RESHARD: "sometimes", REDUCE: "seldom"},
     {RESHARD: 'expected one of "default"', REDUCE: 'expected one of "every_accumulation_step"',
     BALANCE: 'expected one of "layers"'}),
    ({MASK: "yes", BACKEND: "math"}, {MASK: "expected true or false"}),
    ({COMPILE: "yes", COMPILER: "aot_eager", TENSOR: 2, ASYNC: True}, {COMPILE: "expected true or false"}),
    ({COMPILE: True, COMPILER: "eager", TENSOR: 2, ASYNC: True}, {COMPILER: 'expected one of "inductor"'}),
    ({AC_MODE: "op", SAC: 2}, {AC_MODE: 'expected one of "none"'}),
    ({PARAM: "fp16", LOSS_SCALE: 8.0, GROWTH: 10}, {PARAM: 'expected one of "auto"'}),
    ({DTYPE: "bf16", ROUNDING: True}, {DTYPE: 'expected one of "float32"'}),
    ({FLOAT8: "yes", EMULATE: True}, {FLOAT8: "expected true or false"}),
    ({FLOAT8: True, GATHER: 1, PRECOMPUTE: True}, {GATHER: "expected true or false"}),
    # balanced stages would be too many, with options that are not read
    ({PIPELINE: 7, MODULES: ["layers.0"], BALANCE: "parameters", FIRST: 2},
     {MODULES: "expected a list of lists of strings"}),
]
# fmt: on


@pytest.mark.parametrize(("settings", "rejected"), named(BAD_VALUES))
def test_rules_that_read_a_bad_value_are_silent(tmp_path: Path, settings: Settings, rejected: Rejected):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


MESSAGES = {
    "even head_dim": (
        {DIM: 240},
        "FILE: model.n_heads = 16 (default): expected an even head_dim, got 240 / 16 = 15; rotary embedding acts on "
        "pairs of channels",
    ),
    "unread option": (
        {GROWTH: 10},
        'FILE: training.loss_scale_growth_interval = 10: read only when training.mixed_precision_param is "float16"; '
        "set that, or remove it",
    ),
    "validation of a stream": (
        {**TEXT_STREAM, VALIDATE: True},
        "FILE: validation.enable = true: streaming cannot split off validation documents; set validation.dataset_path "
        "(files) or validation.dataset_split (hub), or training.streaming = false",
    ),
    "torchao": (
        {STATES: "int8", IMPLEMENTATION: "foreach"},
        'FILE: optimizer.implementation = "foreach": torchao computes the step with state_dtype or '
        "stochastic_rounding; remove it",
    ),
    "float8 all-gather": (
        {FLOAT8: True, RECIPE: "rowwise", GATHER: True},
        'FILE: float8.enable_fsdp_float8_all_gather = true: "rowwise" has a scale per row, which FSDP cannot gather; '
        'set false, or float8.recipe = "tensorwise"',
    ),
    "tensor degree": (
        {TENSOR: 16, HEADS: 64},
        "FILE: parallelism.tensor_parallel_degree = 16: expected a divisor of model.n_kv_heads = 8, sharded over these "
        "ranks",
    ),
    "ulysses degree": (
        {CONTEXT: 4, ULYSSES: 4, TENSOR: 4},
        "FILE: parallelism.context_parallel_ulysses_degree = 4: expected a divisor of the 2 KV heads of a rank "
        "(model.n_kv_heads = 8, sharded by tensor parallel 4); the other ranks can form a ring",
    ),
    "ring chunks": (
        {f"--{CONTEXT}": 3},
        "FILE: training.seq_len = 2048 (default): expected a multiple of 6, to split evenly over context parallel 3 x "
        "tensor parallel 1 (a ring needs two chunks per rank)",
    ),
    "reshard groups": (
        {TENSOR: 2, RESHARD: 2},
        "FILE: parallelism.fsdp_reshard_after_forward = 2: torch builds these groups as if all ranks had one model, "
        'and hangs under parallelism.tensor_parallel_degree; set "always" or "never"',
    ),
    "split backward": (
        {COMPILE: True, PIPELINE: 2, SCHEDULE: "DualPipeV"},
        'FILE: compile.enable = true: "DualPipeV" computes input gradients and weight gradients apart, and a compiled '
        'block would compute both of them twice; set false, or the schedule to "Interleaved1F1B"',
    ),
    "stages per rank": (
        {PIPELINE: 2, STAGES: 2},
        'FILE: parallelism.pipeline_parallel_stages_per_rank = 2: expected 1 under "1F1B", or -1',
    ),
    "gradients of a pipeline": (
        {PIPELINE: 2, REDUCE: "last_accumulation_step"},
        'FILE: parallelism.fsdp_reduce_gradients = "last_accumulation_step": a pipeline reduces gradients in every '
        'gradient accumulation step, after its last microbatch; set "every_accumulation_step", and a larger '
        "local_batch_size for fewer such steps",
    ),
    "too few microbatches": (
        {PIPELINE: 4, MICROBATCH: 4},
        'FILE: training.local_batch_size = 8 (default): "1F1B" needs as many microbatches as its 4 stages, '
        "and there are 2; set it to at least 16, or a smaller parallelism.pipeline_parallel_microbatch_size than 4",
    ),
    "rounds of microbatches": (
        {BATCH: 14, PIPELINE: 3, MICROBATCH: 2, SCHEDULE: "InterleavedZeroBubble"},
        'FILE: training.local_batch_size = 14: "InterleavedZeroBubble" runs its microbatches in 2 equal rounds, and '
        "there are 7; set it to a multiple of 6 (parallelism.pipeline_parallel_microbatch_size = 2)",
    ),
    "named stages": (
        {LAYERS: 2, PIPELINE: 2, MODULES: [["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"]]},
        'FILE: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.1"], ["layers.0", "norm", '
        '"output"]]: expected tok_embeddings, every layers.N in order, norm, output; got "layers.1" where "layers.0" '
        "belongs",
    ),
}


@pytest.mark.parametrize(("settings", "message"), MESSAGES.values(), ids=MESSAGES)
def test_message(tmp_path: Path, settings: Settings, message: str):
    assert problems(lambda: load(tmp_path, settings)) == [message.replace("FILE", str(tmp_path / "run.toml"))]


UNREAD = {
    f"{EXPERTS} is above 0": {PER_TOKEN: 2, EXPERT: 2, "model.moe.expert_dim": 8, "model.moe.n_shared_experts": 1},
    f"{TENSOR} is above 1": {LOSS_PARALLEL: True, ASYNC: True},
    f"{PIPELINE} is above 1": {SCHEDULE: "GPipe", MICROBATCH: 3, STAGES: 2, BALANCE: "parameters"}
    | {FIRST: 1, LAST: 2, MODULES: TWO_STAGES},
    f"{COMPILE} is true": {COMPILER: "aot_eager", COMPONENTS: ["model"]},
    f"{FLOAT8} is true": {RECIPE: "rowwise", EMULATE: True, "float8.filter_fqns": ["layers.0."], GATHER: True},
    f"{INT8} is true": {"int8.filter_fqns": ["layers.0."]},
}


@pytest.mark.parametrize(
    ("key", "value", "condition"),
    [pytest.param(key, value, condition, id=key) for condition, keys in UNREAD.items() for key, value in keys.items()],
)
def test_option_whose_feature_is_off(tmp_path: Path, key: str, value: Any, condition: str):
    """Without its feature the option does nothing, which its user did not know. An explicit degree of 1 turns a feature
    of the file off, as does enable = false: then the option may stay."""
    message = f"read only when {condition}; set that, or remove it"
    assert_rejected(lambda: load(tmp_path, {key: value}), {key: value}, {key: message})
    feature = condition.split()[0]
    off, used = (False, True) if feature.endswith(".enable") else (0, 8) if feature == EXPERTS else (1, 2)
    n_ranks = value if key == EXPERT else 1
    for settings in {key: value, feature: off}, {key: value, feature: used, f"--{feature}": off}:
        loaded = load(tmp_path, settings)
        assert of(config.check(loaded, on(n_ranks, devices=n_ranks)), key) == of(loaded.config, key) == value


# ---------------------------------------------------------------------------------------------------------------------
# Right configs

ACCEPTED = {
    "empty": {},
    "groups of one expert, ranked by their best score": {EXPERTS: 8, GROUPS: 8, "model.moe.group_score": "max"},
    "stream of c4, validated on its own split": {**C4_STREAM, VALIDATE: True},
    "stream of text, validated on files": {**TEXT_STREAM, VALIDATE: True, VALIDATION_PATH: "y"},
    "number of streaming shards": {**C4_STREAM, STREAMING_SHARDS: 6},
    "defaults that are not read, written out": {
        STREAMING_SHARDS: 64,
        "training.dataset_split": "train",
        LOSS_SCALE: 65536.0,
        GROWTH: 2000,
        EMULATE: False,
        SAC: "op",
    },
    "hub dataset": {
        DATASET: "hub",
        PATH: "allenai/c4",
        "training.dataset_config": "en",
        "training.dataset_split": "test",
        TEXT_KEY: "text",
        VALIDATION_SPLIT: "validation",
    },
    "json at a path": {DATASET: "json", PATH: "x", TEXT_KEY: "body"},
    "text by lines": {DATASET: "text", PATH: "x", "training.text_sample_by": "line"},
    "samples, turned off": {VALIDATE: False, PROMPTS: ["a"]},
    "samples under tensor parallel": {VALIDATE: True, PROMPTS: ["a"], "validation.generate_tokens": 5, TENSOR: 2},
    "validation split of the built-in text": {VALIDATE: True, FRACTION: 0.1},
    "no validation split and no validation": {FRACTION: 0.0},
    "float64": {DTYPE: "float64"},
    "gradient accumulation": {GLOBAL_BATCH: 64},
    "schedule longer than the run": {STEPS: 5, TOTAL_STEPS: 9},
    "warmup longer than the run": {STEPS: 5, "lr_scheduler.warmup_steps": 9},
    "rope factors that are turned off": {ROPE_SCALING: 1.0, ROPE_LOW: 9.0, ROPE_SLOW: 99.0},
    "rope factors of another type": {ROPE_SCALING: 2.0, ROPE_TYPE: "linear", ROPE_LOW: 9.0, ROPE_SLOW: 99.0},
    "heads of any width": {DIM: 100, HEAD_DIM: 6},
    "window longer than the sequence": {WINDOW: 1 << 30},
    "one KV head": {KV_HEADS: 1},
    "compiled": {COMPILE: True},
    "compiled by another backend": {COMPILE: True, COMPILER: "aot_eager"},
    "default backend, written out": {COMPILER: "inductor"},
    "full activation checkpointing": {AC_MODE: "full"},
    "activation checkpointing turned off": {AC_MODE: "none", SAC: 2},
    "float16 turned off": {PARAM: "auto", LOSS_SCALE: 8.0},
    "float8 turned off": {FLOAT8: False, PRECOMPUTE: True},
    "every block checkpointed": {AC_MODE: "selective", SAC: 1},
    "float16": {PARAM: "float16"},
    "float16 from the smallest scale": {PARAM: "float16", LOSS_SCALE: 1e-30, GROWTH: 1},
    "8-bit optimizer states": {STATES: "int8", IMPLEMENTATION: "fused"},
    "stochastic rounding": {DTYPE: "bfloat16", ROUNDING: True},
    "optimizer states in host memory": {HOST_STATES: True, NAME: "Adam"},
    "Muon": {NAME: "Muon", "optimizer.muon_newton_schulz_steps": 6, IMPLEMENTATION: "foreach"},
    "all that torchao computes": {DTYPE: "bfloat16", ROUNDING: True, STATES: "bfloat16", NAME: "Adam"},
    "torch's own step, another implementation": {DTYPE: "bfloat16", IMPLEMENTATION: "foreach"},
    "float8 of some layers, rowwise": {FLOAT8: True, RECIPE: "rowwise", "float8.filter_fqns": ["layers.0.", "wk"]},
    "float8 all-gather": {FLOAT8: True, GATHER: True},
    "mxfp8 of some layers": {FLOAT8: True, RECIPE: "mxfp8", "float8.filter_fqns": ["wk"]},
    "int8 of some layers": {INT8: True, "int8.filter_fqns": ["layers.0.", "wk"]},
    "int8 turned off": {INT8: False, FLOAT8: True},
    "int8 of as many tokens as 32 bits can sum": {INT8: True, BATCH: 1, SEQ_LEN: 131072},
    "float8 all-gather, precomputed scales": {FLOAT8: True, GATHER: True, PRECOMPUTE: True},
}


@pytest.mark.parametrize("settings", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_and_the_resolved_config_loads_again(tmp_path: Path, settings: Settings):
    """The config that a run writes into its dump folder can be run again."""
    loaded = load(tmp_path, settings)
    assert {key: of(loaded.config, key) for key in settings} == settings
    resolved = config.check(loaded, on(2, devices=8))
    assert load(tmp_path, resolved.toml()).config == resolved


# Neighbors of the wrong configs above, with a launch and the resolved degrees: pipeline, replicate, shard, context, of
# that Ulysses, tensor.
# fmt: off
ACCEPTED_DEGREES = [
    # tensor parallelism
    ({TENSOR: 8, LOSS_PARALLEL: True, FFN_DIM: 776}, on(8), (1, 1, 1, 1, 1, 8)),
    ({COMPILE: True, TENSOR: 2, ASYNC: True}, on(4, devices=4), (1, 1, 2, 1, 1, 2)),
    ({TENSOR: 4, SEQ_LEN: 32}, on(4), (1, 1, 1, 1, 1, 4)),
    # context parallelism
    ({CONTEXT: 4, ULYSSES: 2}, on(4), (1, 1, 1, 4, 2, 1)),
    # as many as there are KV heads; the others form a ring
    ({CONTEXT: 32, ULYSSES: 8}, on(32), (1, 1, 1, 32, 8, 1)),
    ({CONTEXT: 4, ULYSSES: 2, TENSOR: 4}, on(16), (1, 1, 1, 4, 2, 4)),
    ({SEQ_LEN: 8, CONTEXT: 2}, on(2), (1, 1, 1, 2, 1, 1)),
    ({SEQ_LEN: 16, CONTEXT: 4, ULYSSES: 2}, on(4), (1, 1, 1, 4, 2, 1)),
    # without a ring, one chunk per rank
    ({SEQ_LEN: 12, CONTEXT: 4, ULYSSES: 4}, on(4), (1, 1, 1, 4, 4, 1)),
    ({SEQ_LEN: 6, CONTEXT: 2, ULYSSES: 2}, on(2), (1, 1, 1, 2, 2, 1)),
    ({SEQ_LEN: 4, CONTEXT: 2, ULYSSES: 2, TENSOR: 2}, on(4), (1, 1, 1, 2, 2, 2)),
    ({SEQ_LEN: 8, CONTEXT: 2, TENSOR: 4}, on(8), (1, 1, 1, 2, 1, 4)),
    ({BACKEND: "cpu", CONTEXT: 2}, on(2), (1, 1, 1, 2, 1, 1)),
    ({BACKEND: "cudnn", CONTEXT: 2, ULYSSES: 2}, on(2, devices=2), (1, 1, 1, 2, 2, 1)),
    ({BACKEND: "math", CONTEXT: 2}, on(2), (1, 1, 1, 2, 1, 1)),
    # a feature that is turned off: its other options are not read, be they in the file or on the command line
    ({CONTEXT: 4, ULYSSES: 4, f"--{CONTEXT}": 1}, on(1), (1, 1, 1, 1, 1, 1)),
    ({CONTEXT: 1, f"--{ULYSSES}": 3}, on(2), (1, 1, 2, 1, 1, 1)),
    # the sequence is not split, and no heads are exchanged
    ({SEQ_LEN: 7, HEADS: 4, KV_HEADS: 2, CONTEXT: 1, ULYSSES: 8}, on(1), (1, 1, 1, 1, 1, 1)),
    ({TENSOR: 2, ASYNC: True, f"--{TENSOR}": 1}, on(1), (1, 1, 1, 1, 1, 1)),
    # pipeline parallelism
    ({TIED: False, PIPELINE: 2}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, STAGES: 1, SCHEDULE: "GPipe"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, STAGES: 3, f"--{SCHEDULE}": "LoopedBFS"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, STAGES: 2, f"--{SCHEDULE}": "DualPipeV"}, on(2, devices=2), (2, 1, 1, 1, 1, 1)),
    # as many microbatches as stages, or more; fewer under a schedule that allows it
    ({BATCH: 10, PIPELINE: 4, MICROBATCH: 2}, on(4), (4, 1, 1, 1, 1, 1)),
    ({PIPELINE: 4, MICROBATCH: 2}, on(4), (4, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, MICROBATCH: 2, f"--{SCHEDULE}": "DualPipeV"}, on(2, devices=2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 4, MICROBATCH: 4, SCHEDULE: "GPipe"}, on(4), (4, 1, 1, 1, 1, 1)),
    # rounds of equal size; less than two rounds; other schedules take any number
    ({BATCH: 6, PIPELINE: 2, f"--{SCHEDULE}": "Interleaved1F1B"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({BATCH: 10, PIPELINE: 3, MICROBATCH: 2, f"--{SCHEDULE}": "InterleavedZeroBubble"}, on(3), (3, 1, 1, 1, 1, 1)),
    ({BATCH: 5, PIPELINE: 2, f"--{SCHEDULE}": "LoopedBFS"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, RESHARD: "never", f"--{SCHEDULE}": "ZBVZeroBubble"}, on(2, devices=2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, RESHARD: "always", BALANCE: "layers"}, on(4), (2, 1, 2, 1, 1, 1)),
    # compiled; a zero-bubble schedule that is not read
    ({COMPILE: True, COMPILER: "aot_eager", PIPELINE: 2}, on(2), (2, 1, 1, 1, 1, 1)),
    ({COMPILE: True, PIPELINE: 2, f"--{SCHEDULE}": "Interleaved1F1B"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({COMPILE: False, PIPELINE: 2, f"--{SCHEDULE}": "InterleavedZeroBubble"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({COMPILE: True, PIPELINE: 1, f"--{SCHEDULE}": "DualPipeV"}, on(1), (1, 1, 1, 1, 1, 1)),
    # no pipeline
    ({REDUCE: "last_accumulation_step", RESHARD: "never"}, on(2), (1, 1, 2, 1, 1, 1)),
    ({TIED: True, LAYERS: 1, PIPELINE: 1}, on(2), (1, 1, 2, 1, 1, 1)),
    # pipeline stages
    ({PIPELINE: 6}, on(6), (6, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, LAYERS: 4, f"--{SCHEDULE}": "LoopedBFS"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, BALANCE: "parameters"}, on(2), (2, 1, 1, 1, 1, 1)),
    ({PIPELINE: 2, FIRST: 2, LAST: 0}, on(2), (2, 1, 1, 1, 1, 1)),
    ({LAYERS: 2, MODULES: TWO_STAGES, PIPELINE: 2}, on(2), (2, 1, 1, 1, 1, 1)),
    # launch
    ({RESHARD: 2, CONTEXT: 2}, on(4), (1, 1, 2, 2, 1, 1)),
    ({RESHARD: 4, CONTEXT: 8}, on(8), (1, 1, 1, 8, 1, 1)),
    ({PIPELINE: 2, REPLICATE: 2, CONTEXT: 2, TENSOR: 4, SHARD: 2}, on(64), (2, 2, 2, 2, 1, 4)),
    ({PIPELINE: 2, REPLICATE: 2, CONTEXT: 2, TENSOR: 4}, on(96), (2, 2, 3, 2, 1, 4)),
    ({TENSOR: 2, GLOBAL_BATCH: 32}, on(4), (1, 1, 2, 1, 1, 2)),
    ({**C4_STREAM, STREAMING_SHARDS: 3, TENSOR: 2, CONTEXT: 2}, on(12), (1, 1, 3, 2, 1, 2)),
    # float8 with hardware for it, emulated, and turned off
    ({FLOAT8: True}, on(1, devices=1), (1, 1, 1, 1, 1, 1)),
    ({FLOAT8: True, EMULATE: True}, on(1), (1, 1, 1, 1, 1, 1)),
    ({FLOAT8: True, f"--{FLOAT8}": False}, on(1), (1, 1, 1, 1, 1, 1)),
    ({INT8: True}, on(1), (1, 1, 1, 1, 1, 1)),
    ({FLOAT8: True, RECIPE: "mxfp8", EMULATE: True, COMPILE: True}, on(1, devices=1), (1, 1, 1, 1, 1, 1)),
]
# fmt: on


@pytest.mark.parametrize(("settings", "launch", "degrees"), named(ACCEPTED_DEGREES))
def test_accepted_degrees(tmp_path: Path, settings: Settings, launch: config.Launch, degrees: tuple[int, ...]):
    resolved = config.check(load(tmp_path, settings), launch)
    assert tuple(of(resolved, key) for key in (PIPELINE, REPLICATE, SHARD, CONTEXT, ULYSSES, TENSOR)) == degrees
    assert load(tmp_path, resolved.toml()).config == resolved


def test_attention_backend_is_read_under_a_document_mask(tmp_path: Path):
    loaded = load(tmp_path, {MASK: True, BACKEND: "math"})
    assert of(config.check(loaded, on(1)), BACKEND) == "math"


OTHER_VALUES = {"optimizer__lr": 1.0, "float8__enable": True, "int8__enable": True, "training__seq_len": 1}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_replica_groups_compare_what_decides_their_weights(key):
    other = config.Config().replace(**{key: OTHER_VALUES[key]})
    assert numerics(other) != numerics(config.Config())
