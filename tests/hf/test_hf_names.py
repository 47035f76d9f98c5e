"""The weights' names and order of rows in transformers and here."""

import pytest
import torch

from tests.helpers.hf import FAMILIES, build_hf, model_options, weights
from titanlite.hf.names import (
    from_hf,
    hf_name,
    hf_names,
    hf_rows,
    hf_shape,
    hf_tensors,
    rotated_channels,
    tensor_shapes,
    to_hf,
)
from titanlite.rope import apply_rotary_emb, rope_table

WQ, WV = "layers.0.attention.wq.weight", "layers.0.attention.wv.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(family: str):
    options = model_options(family)
    theirs = {name: tensor.shape for name, tensor in weights(build_hf(family)).items()}
    shapes = tensor_shapes(options)
    found = hf_tensors(options, shapes)
    assert {each: hf_shape(names, shapes, options) for there, names in found.items() for each in there} == theirs
    for name in shapes:
        if "experts" not in name and "router" not in name:
            renamed = family.startswith("deepseek") and "q_norm" in name
            assert hf_names(name, options) == [hf_name(name, options)] or renamed


def test_rows_of_a_head_are_those_of_the_two_halves_in_turn():
    options = model_options(dim=16)  # K = 4
    tensor = torch.arange(8.0).view(8, 1)
    assert from_hf(WQ, tensor, options).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert hf_rows(WQ, torch.tensor([5, 6]), options).tolist() == [6, 5]
    assert from_hf("layers.0.attention.wq.bias", tensor.flatten(), options).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert from_hf("layers.0.attention.k_norm.weight", tensor[:4, 0], options).tolist() == [0, 2, 1, 3]
    assert to_hf([WV], [tensor], options) is from_hf(WV, tensor, options) is tensor


def test_one_order_is_the_inverse_of_the_other():
    options = model_options(dim=64)
    for name, size in ((WQ, (64, 3)), (WQ.replace("wq", "wk"), (32, 3)), ("layers.0.attention.q_norm.weight", (16,))):
        assert rotated_channels(name, options) == 16
        tensor = torch.randn(size)
        assert torch.equal(to_hf([name], [from_hf(name, tensor, options)], options), tensor)
        assert torch.equal(from_hf(name, to_hf([name], [tensor], options), options), tensor)
        assert not torch.equal(from_hf(name, tensor, options), tensor)


def test_the_order_is_that_of_the_rotary_embeddings():
    """Rotate queries as transformers does and reorder their channels: the same as reordering, and rotating ours. Both
    compute two products and a sum, so they are equal up to two roundings of 2^-53."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    options = model_options(dim=64)
    table = rope_table(options, 5, torch.float64)
    cos, sin = (torch.cat((half, half), -1)[None] for half in table.unbind(-1))
    q_BHTK = torch.randn(1, 4, 5, options.head_dim, dtype=torch.float64)
    rotated, _ = apply_rotary_pos_emb(q_BHTK, q_BHTK, cos, sin)

    def reorder(x_BHTK: torch.Tensor) -> torch.Tensor:
        return from_hf("layers.0.attention.q_norm.weight", x_BHTK.movedim(-1, 0), options).movedim(0, -1)

    ours = apply_rotary_emb(reorder(q_BHTK).transpose(1, 2).contiguous(), table).transpose(1, 2)
    torch.testing.assert_close(ours, reorder(rotated), rtol=0, atol=2**-50)
