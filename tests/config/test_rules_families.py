"""The rules about families: norms, positions, partial and long rotary embedding, and kinds of layers."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from tests.helpers.config import problems
from titanlite import config
from titanlite.config.schema import Model
from titanlite.rope import rope_table

LONG = {"rope_scaling_type": "longrope", "rope_scaling_factor": 2.0, "rope_original_seq_len": 64}
PAIRS = [1.0] * 8
"""The debug model has heads of 16 channels."""


def load(folder: Path, model: dict[str, Any], **sections: dict[str, Any]) -> config.LoadedConfig[config.Config]:
    (folder / "run.toml").write_text(tomli_w.dumps({"model": model, **sections}))
    return config.load([str(folder / "run.toml")])


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        ({"norm": "layer", "qk_norm": "all_heads"}, {}, 'model.qk_norm = "all_heads": all heads together have RMSNorm'),
        (
            {"learned_positions": 64},
            {},
            "model.learned_positions = 64: expected 0, or at least training.seq_len = 2048",
        ),
        (
            {"learned_positions": 2049},
            {"parallelism": {"tensor_parallel_degree": 2}},
            "parallelism.tensor_parallel_degree = 2: expected a divisor of model.learned_positions = 2049",
        ),
        ({"activation": "gelu", "moe": {"n_experts": 4}}, {}, 'model.activation = "gelu": experts are SwiGLU layers'),
        ({"gated_ffn": False, "moe": {"n_experts": 4}}, {}, "model.gated_ffn = false: experts are SwiGLU layers"),
        ({"partial_rotary_factor": 0.45}, {}, "model.partial_rotary_factor = 0.45: expected an even number of rotated"),
        (
            {"layer_pattern": [{"partial_rotary_factor": 0.45}, {}]},
            {},
            "model.layer_pattern = ",
        ),
        (
            {"layer_pattern": [{"experts": False}]},
            {},
            "model.layer_pattern.0.experts = false: read only with model.moe",
        ),
        ({"hf_model_type": "bert"}, {}, 'model.hf_model_type = "bert": expected one of "llama", "mistral"'),
        (
            {"rope_long_factors": PAIRS},
            {},
            "model.rope_long_factors = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]: read only",
        ),
        (
            {**LONG, "rope_long_factors": PAIRS, "rope_short_factors": [1.0]},
            {},
            "model.rope_short_factors = [1.0]: expected a factor for each of the 8 rotated pairs of channels, got 1",
        ),
        (
            {**LONG, "rope_original_seq_len": 1, "rope_long_factors": PAIRS, "rope_short_factors": PAIRS},
            {},
            "model.rope_original_seq_len = 1: expected 2 or more; longrope takes its logarithm",
        ),
        (
            {"llama4_scaling_beta": 0.1, "rope_original_seq_len": 64},
            {},
            "training.seq_len = 2048 (default): expected at most model.rope_original_seq_len = 64",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_rejected(tmp_path: Path, model: dict[str, Any], sections: dict[str, Any], expected: str):
    (line,) = problems(lambda: load(tmp_path, model, **sections))
    assert line.partition(": ")[2].startswith(expected), line


def test_options_of_a_scaling_that_some_layers_have_are_read(tmp_path: Path):
    model = {"rope_beta_slow": 9.0, "layer_pattern": [{}, {"rope_scaling_factor": 2.0}]}
    assert load(tmp_path, model).config.model.rope_beta_slow == 9
    assert load(tmp_path, {"llama4_scaling_beta": 0.1, "rope_original_seq_len": 4096}).config.model.rope_theta


def test_longrope_has_as_many_factors_as_each_layer_has_pairs(tmp_path: Path):
    pattern = [{}, {"partial_rotary_factor": 0.5}]
    model = {**LONG, "rope_long_factors": PAIRS, "rope_short_factors": PAIRS, "layer_pattern": pattern}
    lines = problems(lambda: load(tmp_path, model))
    assert len(lines) == 2
    assert all("expected a factor for each of the 4 rotated pairs of channels, got 8" in line for line in lines)


def test_latent_attention_rejects_what_it_lacks(tmp_path: Path):
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = {"mla": mla, "n_kv_heads": 16, "norm": "layer", "attention_scale": 0.1, "partial_rotary_factor": 0.5}
    keys = [line.partition(": ")[2].partition(" = ")[0] for line in problems(lambda: load(tmp_path, model))]
    assert sorted(keys) == ["model.attention_scale", "model.norm", "model.partial_rotary_factor"]


def test_a_pattern_repeats_and_may_end_early():
    pattern = [{"count": 2, "sliding_window": 7, "rope_theta": 100.0}, {"partial_rotary_factor": 0.0, "experts": False}]
    model = Model.model_validate({"layer_pattern": pattern, "n_layers": 5, "moe": {"n_experts": 4}})
    assert [layer.sliding_window for layer in model.of_layers()] == [7, 7, 0, 7, 7]
    assert [layer.rope_theta for layer in model.of_layers()] == [100.0, 100.0, 10_000.0, 100.0, 100.0]
    assert [layer.rope_dim for layer in model.of_layers()] == [16, 16, 0, 16, 16]
    assert [model.has_experts(layer) for layer in range(5)] == [True, True, False, True, True]
    kinds, numbers = model.rope_kinds()
    assert numbers == [0, 0, 1, 0, 0]
    assert [kind.rope_theta for kind in kinds] == [100.0, 10_000.0]


def test_longrope_has_long_factors_in_longer_sequences_only():
    factors = {"rope_short_factors": [1.0] * 8, "rope_long_factors": [2.0] * 8}
    model = Model.model_validate({**LONG, **factors, "rope_attention_factor": 1.0})
    plain = Model.model_validate({})
    half = Model.model_validate({"rope_scaling_type": "linear", "rope_scaling_factor": 2.0})
    for length, same in ((64, plain), (65, half)):
        ours, expected = (rope_table(each, length, torch.float64) for each in (model, same))
        assert (ours == expected).all()


def test_options_that_differ_from_their_default_are_of_the_identity():
    """So a checkpoint from before there were these options resumes, and one that has others does not."""
    assert not {"norm", "layer_pattern", "activation"} & Model.model_validate({}).identity().keys()
    assert Model.model_validate({"norm": "layer"}).identity()["norm"] == "layer"
