"""gpt-oss's config.json, its experts in one tensor, and their numbers in MXFP4 as released."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.cases import cases
from tests.helpers.hf import (
    CPU,
    FAMILIES,
    SEQ_LEN,
    build_hf,
    empty_model,
    expected_weights,
    model_options,
    save_hf,
)
from tests.parallel.test_parity import resolve
from titanlite import build
from titanlite.config import Config, ConfigError
from titanlite.config.hf.config_json import hf_config
from titanlite.config.hf.config_json import model_options as options_of_folder
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import Model
from titanlite.hf import stacked_experts
from titanlite.hf.config_files import config_files
from titanlite.hf.load import SINGLE, load_hf_weights
from titanlite.hf.names import from_hf, named_weights
from titanlite.parallel import mesh

RELEASED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
"""The keys and values of openai/gpt-oss-20b's config.json."""


# config.json ---------------------------------------------------------------------------------------------------------


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the released config.json with other values; of None, without the key."""
    values = {key: value for key, value in {**RELEASED, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("without", ["nothing", "layer_types", "quantization_config", "head_dim", "swiglu_limit"])
def test_the_released_config_is_the_named_size(tmp_path: Path, without: str):
    """Missing keys have transformers' defaults, which are those of the release."""
    options = options_of_folder(write_config(tmp_path, **{without: None}))
    assert Model(**options) == Model(flavor="gpt_oss_20b").model_copy(update={"flavor": "debug"})


@pytest.mark.parametrize("flavor", ["gpt_oss_20b", "gpt_oss_120b"])
def test_an_exported_config_is_read_as_the_same_model(tmp_path: Path, flavor: str):
    from transformers import AutoConfig

    arguments = {"max_seq_len": 131072, "torch_dtype": "bfloat16", "bos": 1, "eos": 2}
    exported = hf_config(Model(flavor=flavor), **arguments)
    (tmp_path / "config.json").write_text(json.dumps(exported))
    assert Model(**options_of_folder(tmp_path)) == Model(**SIZES[flavor])
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == "gpt_oss"
    assert theirs.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert theirs.rope_parameters["truncate"] is False
    assert (theirs.swiglu_limit, theirs.swiglu_alpha, theirs.num_local_experts) == (
        7.0,
        1.702,
        SIZES[flavor]["moe"]["n_experts"],
    )


def test_layers_without_a_window_are_written(tmp_path: Path):
    """transformers' default would be layers of two kinds."""
    model = Model(flavor="gpt_oss_20b", layer_pattern=[])
    exported = hf_config(model, max_seq_len=16, torch_dtype="float32", bos=None, eos=None)
    assert exported["layer_types"] == ["full_attention"] * 24
    (tmp_path / "config.json").write_text(json.dumps(exported))
    assert Model(**options_of_folder(tmp_path)).layer_pattern == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r'quantization_config.quant_method = "fp8": expected one of',
        ),
        ({"quantization_config": {"bits": 4}}, r'quant_method is missing: expected one of "mxfp4"'),
        ({"quantization_config": 3}, r"quantization_config = 3: expected an object"),
        ({"rope_scaling": None}, r"rope_scaling is missing: expected the options of the rotary embedding, which YaRN"),
        ({"norm_topk_prob": False}, r"norm_topk_prob = false: expected true"),
        ({"swiglu_limit": 0}, r"swiglu_limit = 0: expected a finite number > 0"),
        ({"swiglu_alpha": "x"}, r'swiglu_alpha = "x": expected a finite number > 0'),
        ({"num_experts_per_tok": 33}, r"expected at most the number of experts, 32"),
        ({"hidden_act": "gelu"}, r'hidden_act = "gelu": expected "silu"'),
        ({"layer_types": ["linear_attention"] * 24}, r"layer_types = a list: expected"),
        (
            {"rope_scaling": {**RELEASED["rope_scaling"], "truncate": 1}},
            r"rope_scaling.truncate = 1: expected true or false",
        ),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_read_is_rejected_in_one_line(tmp_path: Path, changes: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=line) as caught:
        options_of_folder(write_config(tmp_path, **changes))
    assert len(caught.value.problems) == 1


def test_a_key_that_transformers_does_not_read_changes_nothing(tmp_path: Path):
    options = [options_of_folder(write_config(tmp_path, mlp_bias=value)) for value in (None, True)]
    assert options[0] == options[1]


def test_quantized_weights_of_other_types_are_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"quantization_config = an object: .*quantized weights are not read"):
        options_of_folder(write_config(tmp_path, model_type="mixtral", architectures=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_sinks": False},
        {"rope_scaling_type": "longrope", "rope_short_factors": [1.0] * 32, "rope_long_factors": [1.0] * 32},
        *({"moe": {key: 0}} for key in ("expert_bias", "router_bias", "swiglu_limit", "normalize_scores")),
        {"moe": {"balance_bias": True}},
        {"moe": {"n_first_dense_layers": 1}},
        {"moe": {"score_scaling": 2.0}},
        {"moe": {"n_experts": 0}},
        {"qk_norm": True},
        {"layer_pattern": [{"sliding_window": 128}, {"sliding_window": 64}]},
    ],
    ids=str,
)
def test_a_model_that_is_none_of_transformers_is_rejected(changes: dict[str, Any]):
    moe = {**SIZES["gpt_oss_20b"]["moe"], **changes.get("moe", {})}
    moe |= {key: bool(moe[key]) for key in ("expert_bias", "router_bias", "normalize_scores")}
    model = Model(**{**SIZES["gpt_oss_20b"], **changes, "moe": moe})
    with pytest.raises(ConfigError):
        hf_config(model, max_seq_len=16, torch_dtype="float32", bos=None, eos=None)


@pytest.mark.parametrize(
    "flavor", ["qwen3_30b_a3b", "mixtral_8x7b", "olmoe_1b_7b", "deepseek_v3_671b", "glm4.5_355b", "llama3_8b"]
)
@pytest.mark.parametrize("changes", [{"expert_bias": True}, {"router_bias": True}, {"swiglu_limit": 7.0}], ids=str)
def test_what_only_gpt_oss_has_is_in_no_other_config(flavor: str, changes: dict[str, Any]):
    size = {**SIZES[flavor], "attention_sinks": True} if flavor == "llama3_8b" else {**SIZES[flavor]}
    if "moe" in size:
        size["moe"] = {**size["moe"], **changes}
    with pytest.raises(ConfigError):
        hf_config(Model(**size), max_seq_len=16, torch_dtype="float32", bos=None, eos=None)


def test_an_exported_folder_is_not_quantized(tmp_path: Path):
    write_config(tmp_path)
    config, _ = config_files(
        Model(flavor="gpt_oss_20b"), tmp_path, torch_dtype="bfloat16", max_seq_len=131072, bos=None, eos=200002
    )
    assert "quantization_config" not in config
    assert {key: config[key] for key in RELEASED.keys() & config.keys()} == {
        key: value for key, value in RELEASED.items() if key != "quantization_config"
    }


# Experts in one tensor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bug",
    [
        {"w1": ("gate_up_proj", 2, 1), "w3": ("gate_up_proj", 2, 0)},
        {"w1": ("gate_up_proj", 1, 0)},
        {"w3": ("gate_up_proj", 2, 0)},
    ],
    ids=["w1 and w3 swapped", "gates are the first half", "ups are gates"],
)
def test_another_order_of_rows_would_show(tmp_path: Path, monkeypatch, bug: dict[str, Any]):
    hf, options = save_hf(tmp_path, "gpt_oss"), model_options("gpt_oss")
    model = empty_model(options)
    expected = expected_weights(hf, model, options)
    monkeypatch.setattr(stacked_experts, "TENSORS", stacked_experts.TENSORS | bug)
    load_hf_weights(tmp_path, model, options)
    wrong = {name for name, tensor in named_weights(model).items() if not torch.equal(tensor, expected[name])}
    assert {name.rpartition("experts.")[2] for name in wrong} == {f"{key}{end}" for key in bug for end in ("", "_bias")}


def test_one_order_is_the_inverse_of_the_other():
    """And as the model computes it: columns of gates and ups in turn."""
    weights = [torch.randn(4, 6, 5) for _ in range(2)]
    names = [f"layers.0.feed_forward.experts.{name}" for name in ("w1", "w3")]
    tensor = stacked_experts.to_hf(names, weights)
    assert tensor.shape == (4, 5, 12)
    assert torch.equal(tensor[2, :, 6], weights[0][2, 3])
    assert torch.equal(tensor[2, :, 7], weights[1][2, 3])
    assert all(torch.equal(stacked_experts.from_hf(n, tensor), w) for n, w in zip(names, weights, strict=True))


# MXFP4 ---------------------------------------------------------------------------------------------------------------

WIDE = {"dim": 64, "ffn_dim": 96, "head_dim": 16}
"""Groups of 32 fit: two in a row of gate_up_proj, three in one of down_proj."""
EXPERTS = ("gate_up_proj", "down_proj")


def random_mxfp4(rows: int, columns: int, seed: int, n_experts: int = 4) -> tuple[Tensor, Tensor]:
    """Return any bytes, and scales with which the largest number, 6, is still finite."""
    draws = torch.Generator().manual_seed(seed)
    groups = n_experts, rows, columns // 32
    blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=draws)
    return blocks, torch.randint(0, 253, groups, dtype=torch.uint8, generator=draws)


def dequantized_by_transformers(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_bytes_are_dequantized_as_by_transformers(dtype: torch.dtype):
    blocks, scales = random_mxfp4(96, 160, seed=0)
    theirs = dequantized_by_transformers(blocks, scales, dtype)
    for expert, (own_blocks, own_scales) in enumerate(zip(blocks, scales, strict=True)):
        ours = stacked_experts.dequantize(own_blocks, own_scales)
        assert torch.equal(ours.to(dtype), theirs[expert].T)
    assert len(blocks.unique()) == 256
    assert len(scales.unique()) == 253


def test_the_smallest_block_by_hand():
    """In a byte the first number is in the lower half: 0x21 is 0.5 and 1, 0x9F is -6 and -0.5; a scale of 128 is 2."""
    blocks, scales = torch.zeros(1, 1, 16, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0x9F])
    expected = [1.0, 2.0, -12.0, -1.0, *[0.0] * 28]
    assert stacked_experts.dequantize(blocks, scales).tolist() == [expected]


def save_quantized(folder: Path, **other: Any) -> dict[str, Tensor]:
    """Save a model whose experts are in MXFP4, as the release is. Returns what its tensors stand for."""
    sizes = {"hidden_size": WIDE["dim"], "intermediate_size": WIDE["ffn_dim"]}
    build_hf("gpt_oss", torch.bfloat16, **sizes).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    meant = dict(tensors)
    for seed, name in enumerate([name for name in tensors if name.endswith(EXPERTS)]):
        n_experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_mxfp4(rows, columns, seed, n_experts)
        scales = scales % 8 + 118
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = dequantized_by_transformers(blocks, scales)
    tensors |= {name: value for name, value in other.items() if value is not None}
    save_file({name: tensor for name, tensor in tensors.items() if name not in other or other[name] is not None},
              folder / SINGLE, metadata={"format": "pt"})  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = RELEASED["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def wide_options() -> Model:
    return model_options("gpt_oss", **WIDE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_folder_in_mxfp4_is_loaded_as_what_it_stands_for(tmp_path: Path, dtype: torch.dtype):
    meant = save_quantized(tmp_path)
    options = Model(flavor="from_hf", hf_assets_path=str(tmp_path))
    assert options.identity() == wide_options().identity()
    model = empty_model(options, dtype)
    load_hf_weights(tmp_path, model, options)
    for name, tensor in named_weights(model).items():
        (there,) = stacked_names(name, options)
        assert torch.equal(tensor, from_hf(name, meant[there], options).to(dtype)), name


def stacked_names(name: str, options: Model) -> list[str]:
    from titanlite.hf.names import hf_names

    return hf_names(name, options)


def load_on_a_rank(job: Config, folder: Path) -> dict[str, Tensor]:
    """Return the full weights of this rank's parameters, loaded from a folder."""
    model, _ = build.build_model(job, mesh.build_layout(job.parallelism, CPU), CPU)
    load_hf_weights(folder, model, job.model)
    weights = named_weights(model).items()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in weights}


SHARD, TP, EP = ({f"{name}_degree": 2} for name in ("data_parallel_shard", "tensor_parallel", "expert_parallel"))


@cases(
    ("world_size", "layout"),
    [(2, TP), (4, SHARD | TP), (4, SHARD | TP | EP), (3, {}), (2, EP)],
    always=[(4, SHARD | TP)],
    ids=["tp", "shard x tp", "shard x tp, ep", "shard 3, uneven", "shard, ep"],
)
def test_every_layout_reads_its_shard_of_mxfp4(ranks, tmp_path: Path, world_size: int, layout: dict[str, Any]):
    """Tensor parallel has 48 of the 96 columns of w2: its shards begin in the middle of a group of 32."""
    meant = save_quantized(tmp_path)
    ours = FAMILIES["gpt_oss"][0]
    settings = {f"model__moe__{key}": value for key, value in ours["moe"].items()}
    settings |= {f"model__{key}": value for key, value in ours.items() if type(value) in (int, bool, float, str)}
    settings |= {f"model__{key}": value for key, value in WIDE.items()} | {"training__dtype": "float32"}
    job = resolve(tmp_path, world_size, settings | layout | {"training__seq_len": SEQ_LEN})
    for weights in ranks(world_size).run(load_on_a_rank, job=job, folder=tmp_path):
        for name, tensor in weights.items():
            (there,) = stacked_names(name, job.model)
            assert torch.equal(tensor, from_hf(name, meant[there], job.model).float()), name


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({f"{GATE_UP}_scales": None}, f'lacks "{GATE_UP}_scales", which the model needs'),
        ({f"{GATE_UP}_blocks": None}, f'lacks "{GATE_UP}", which the model needs'),
        ({f"{GATE_UP}_scales": torch.zeros(4, 192, 2)}, f"{GATE_UP}_scales has dtype F32: expected one of U8"),
        ({f"{GATE_UP}_scales": torch.zeros(4, 192, 3, dtype=torch.uint8)}, r"the model needs \[4, 192, 2\]"),
        (
            {f"{GATE_UP}_scales": torch.full((4, 192, 2), 255, dtype=torch.uint8)},
            "has a number that is NaN or infinite",
        ),
        ({GATE_UP: torch.zeros(4, 64, 192)}, f'has "{GATE_UP}", which the model lacks'),
    ],
    ids=["no scales", "no blocks", "dtype", "shape", "infinite", "twice"],
)
def test_a_damaged_folder_is_rejected(tmp_path: Path, other: dict[str, Tensor | None], line: str):
    save_quantized(tmp_path, **other)
    with pytest.raises(ConfigError, match=line):
        load_hf_weights(tmp_path, empty_model(wide_options()), wide_options())
