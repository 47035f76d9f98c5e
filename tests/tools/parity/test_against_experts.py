"""titanlite parity --against, with experts: models of transformers are the other program, right and with mistakes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.tools.parity.test_against import batch, verdict, write_folder
from titanlite.launch.cli import run_command

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEEPSEEK = {
    **{"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"first_k_dense_replace": 1, "rope_scaling": None, "head_dim": 4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 8, "rope_scaling": None, "layer_types": ["full_attention"] * 2},
}
BALANCE = 0.1
Tensors = dict[str, Tensor]


def build(family: str, **options: Any) -> nn.Module:
    """Return a small random model, whose balance biases, if any, are random, too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "sinks", "weight", "proj")):
            nn.init.normal_(tensor, std=0.05 if "bias" in name else 0.2)
        if "norm" in name:
            nn.init.normal_(tensor, mean=1, std=0.1)
    return model.float()


def take_step(
    folder: Path,
    family: str = "qwen3_moe",
    *,
    degrees: dict[str, int] | None = None,
    balance: float = 0.0,
    stated: float | None = None,
    change: Callable[[Tensors], None] | None = None,
    mistake: Callable[[nn.Module], None] | None = None,
    separate: bool = False,
    equal_scores: bool = False,
    recorded: bool = True,
    dtype: str = "float32",
) -> Path:
    """Take a step in transformers and write its folder. `change` changes the gradients, `mistake` the model once its
    weights are written. The gradients have `balance` times the auxiliary loss; step.json says `stated`."""
    model, (tokens, targets, _) = build(family), batch()
    model = model.to(getattr(torch, dtype))
    buffers = {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
    if equal_scores:
        for layer in model.model.layers:
            layer.mlp.gate.weight.data[1:4] = layer.mlp.gate.weight.data[0]
    weights = copy.deepcopy({**dict(model.named_parameters()), **buffers})
    config = model.config.to_dict()
    if mistake:
        mistake(model)
    chosen: Tensors = {}
    for number, layer in enumerate(model.model.layers):
        for router in [each for each in layer.mlp.modules() if type(each).__name__.endswith("Router")]:
            router.register_forward_hook(
                lambda module, args, output, number=number: chosen.update(
                    {f"layers.{number}": output[2].view(*tokens.shape, -1).clone()}
                )
            )
    output = model(tokens, output_router_logits=balance > 0)
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / (targets != -100).sum()
    (loss + balance * output.aux_loss if balance else loss).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if change:
        change(gradients)
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
    step: dict[str, Any] = {
        "program": family,
        "dtypes": {"weights": dtype, "compute": dtype, "reduce": dtype},
        "degrees": degrees or {},
        "loss": loss.item(),
        "gradient_norm": norm.item(),
    }
    if stated is not None:
        step["balance_loss"] = {"weight": stated, "layers": "together"}
    tensors = {"weights": weights, "gradients": gradients, "experts": chosen if recorded else None}
    write_folder(folder, config=config, tokens=tokens, targets=targets, step=step, **tensors)
    if separate:
        model.load_state_dict(weights, strict=False)
        disable_progress_bar()
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_step_is_equal(family: str, separate: bool, tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, family, separate=separate), capsys)
    assert status == 0, lines


def test_a_right_balance_loss_is_equal(tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, balance=BALANCE, stated=BALANCE), capsys)
    assert status == 0, lines


# Mistakes ------------------------------------------------------------------------------------------------------------

EP, TP_EP, PP_EP = {"ep": 2}, {"tp": 4, "ep": 2}, {"pp": 3, "ep": 2}
WEIGHTS = "6 of 27 gradients, the first gradient layers.0.feed_forward.experts.w1, are"
ROUTERS = "2 of 27 gradients, the first gradient layers.0.feed_forward.router.weight, are"


def scaled(part: str, factor: float) -> Callable[[Tensors], None]:
    """Return a mistake of the gradients of the parameters whose names have a part."""

    def change(gradients: Tensors) -> None:
        for name in gradients:
            if part in name:
                gradients[name] = gradients[name] * factor

    return change


def without_an_expert(gradients: Tensors) -> None:
    gradients["model.layers.1.mlp.experts.down_proj"][3] = 0


def without_biases(model: nn.Module) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()


def without_groups(model: nn.Module) -> None:
    model.model.layers[1].mlp.gate.topk_group = 4


def without_normalization(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False


def partial_scores(model: nn.Module) -> None:
    """Have the router's gradient come from the experts of the first of two ranks alone (transformers 48687)."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, args, output: (
                output[0],
                torch.where(output[2] < 4, output[1], output[1].detach()),
                output[2],
            )
        )


def drops_tokens(model: nn.Module) -> None:
    """Have each expert take no more than 60 of its tokens, as with a capacity."""

    def drop(gate: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        place = F.one_hot(output[2], 8).flatten(0, 1).cumsum(0).gather(1, output[2].view(-1, 1)).view_as(output[2])
        return output[0], output[1].where(place <= 60, 0), output[2]

    model.model.layers[0].mlp.gate.register_forward_hook(drop)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"degrees": EP, "change": scaled(".experts.", 2)}, f"{WEIGHTS} 2.0 x too large: ep = 2, or top-k = 2"),
        ({"degrees": TP_EP, "change": scaled(".experts.", 1 / 16)}, f"{WEIGHTS} 16.0 x too small: "),
        ({"degrees": TP_EP, "change": scaled(".gate.", 4)}, f"{ROUTERS} 4.0 x too large: tp = 4, or "),
        ({"degrees": PP_EP, "change": scaled(".experts.", 6)}, f"{WEIGHTS} 6.0 x too large: ep x pp = 2 x 3, or "),
        ({"degrees": PP_EP, "change": scaled("", 1 / 3)}, "gradients are 3.0 x too small: pp = 3"),
        (
            {"degrees": EP, "change": without_an_expert},
            "gradient layers.1.feed_forward.experts.w2 is different, and not",
        ),
        ({"degrees": EP, "mistake": partial_scores}, "feed_forward.router.weight, by 8.0e-01 where "),
        ({"degrees": EP, "mistake": drops_tokens}, "loss is"),
        ({"mistake": without_normalization}, "gradients are different"),
        (
            {"family": "deepseek_v3", "mistake": without_biases},
            "experts are not those with the best scores, in 1 of 1 layers, first experts of layers.1: ",
        ),
        (
            {"family": "deepseek_v3", "mistake": without_groups},
            "experts are not those with the best scores, in 1 of 1 layers, first experts of layers.1: ",
        ),
        (
            {"degrees": {"ep": 4}, "balance": 4 * BALANCE, "stated": BALANCE},
            "gradients are right, except that the balance loss is 4.0 x too large: ep = 4",
        ),
        ({"stated": BALANCE}, "gradients are right, except that they lack the balance loss"),
    ],
    ids=lambda each: each.split(",")[0][:60] if isinstance(each, str) else "",
)
def test_a_mistake_is_named(options: dict[str, Any], line: str, tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, **options), capsys)
    assert status == 1
    assert any(line in each for each in lines), lines


# Ties ----------------------------------------------------------------------------------------------------------------


def takes_the_last(model: nn.Module) -> None:
    """Have the gates choose the expert with the larger number where scores are equal; titanlite takes the smaller."""

    def choose(gate: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scores = output[0].softmax(-1)
        chosen = 7 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :2]
        taken = scores.gather(1, chosen)
        return output[0], taken / taken.sum(-1, keepdim=True), chosen

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(choose)


def test_choices_between_equal_scores_are_ties_if_they_are_recorded(tmp_path: Path, capsys):
    folder = take_step(tmp_path, equal_scores=True, mistake=takes_the_last)
    assert run_command("parity", ["--against", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "recorded choices of a token's experts are not those of float64" in out
    (folder / "experts.safetensors").unlink()
    status, lines = verdict(folder, capsys)
    assert (status, lines[0]) == (1, "DIFFERENT")


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda experts: experts.pop("layers.1"), 'experts.safetensors: lacks "layers.1"; expected a tensor for each'),
        (
            lambda experts: experts.update(x=experts["layers.1"].clone()),
            'experts.safetensors: has the unknown tensor "x"; expected a tensor for each',
        ),
        (lambda experts: experts["layers.1"].add_(7), "layers.1: expected different experts of a token, from 0 to 7"),
        (lambda experts: experts["layers.1"].fill_(1), "layers.1: expected different experts of a token, from 0 to 7"),
        (
            lambda experts: experts.update({"layers.1": experts["layers.1"][..., :1].contiguous()}),
            "layers.1 has dtype torch.int64 and shape [8, 32, 1]; expected int64 and [8, 32, 2]",
        ),
    ],
)
def test_wrong_choices_are_one_line(change: Callable[[Tensors], Any], line: str, tmp_path: Path, capsys):
    folder = take_step(tmp_path)
    experts = load_file(folder / "experts.safetensors")
    change(experts)
    save_file(experts, folder / "experts.safetensors")
    assert run_command("parity", ["--against", str(folder)]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_balance_loss_needs_choices(tmp_path: Path, capsys):
    folder = take_step(tmp_path, stated=BALANCE, recorded=False)
    assert run_command("parity", ["--against", str(folder)]) == 2
    assert "balance_loss needs experts.safetensors" in capsys.readouterr().err
