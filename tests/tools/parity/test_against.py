"""titanlite parity --against: a hand-written loop is the other program, with and without injected bugs."""

import copy
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from titanlite.config import load_values
from titanlite.config.loader import printable
from titanlite.hf.names import hf_name, tensor_shapes, to_hf
from titanlite.launch import progress
from titanlite.launch.cli import run_command
from titanlite.tools.parity import against, recorded_step
from titanlite.tools.parity.against import FLOAT64, forward_backward
from titanlite.tools.parity.ratios import Row, clusters, describe
from titanlite.tools.parity.recorded_step import RecordedStep, read_step

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ADAM = {"lr": 2e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.2}
MAX_NORM = 0.5
WK, NORM = "layers.1.attention.wk.weight", "layers.0.ffn_norm.weight"


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "verify" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_folder = load_example("folder").write_folder


# The other program ---------------------------------------------------------------------------------------------------


def initial_weights() -> dict[str, Tensor]:
    """Return weights by Llama's names, float64."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"wq": (32, 32), "wk": (16, 32), "wv": (16, 32), "wo": (32, 32)}
    sizes |= {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (60, 32)}
    for layer in range(2):
        for name, shape in sizes.items():
            module = "attention" if name in ("wq", "wk", "wv", "wo") else "feed_forward"
            shapes[f"layers.{layer}.{module}.{name}.weight"] = shape
        shapes |= {f"layers.{layer}.{norm}.weight": (32,) for norm in ("attention_norm", "ffn_norm")}
    shapes |= {"norm.weight": (32,), "output.weight": (60, 32)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: 0.1 * x + 1 if x.dim() == 1 else 0.2 * x for name, x in drawn.items()}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document positions of eight sequences, of which row r has 4 (r + 1) targets."""
    ids = torch.randint(60, (8, 33), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    for row in range(8):
        targets[row, 4 * (row + 1) :] = -100
    return ids[:, :-1].contiguous(), targets, torch.arange(32).remainder(12).expand(8, 32).contiguous()


def rotate(x: Tensor, theta: float, positions: Tensor) -> Tensor:
    """Rotate neighbouring channels of [B, H, T, K], in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** -(torch.arange(0, HEAD_DIM, 2, dtype=wide) / HEAD_DIM)
    angles = positions[:, None, :, None] * frequencies
    even, odd = x.to(wide)[..., 0::2], x.to(wide)[..., 1::2]
    pairs = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)


def forward(w: dict[str, Tensor], tokens: Tensor, *, theta: float, eps: float, positions: Tensor) -> Tensor:
    """Return logits [B, T, V]. Tokens attend to those of their document, which begins at position 0."""
    x = w["tok_embeddings.weight"][tokens]
    document = (positions == 0).cumsum(1)
    visible = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    for layer in range(2):
        own = {name.removeprefix(f"layers.{layer}."): each for name, each in w.items()}
        normed = F.rms_norm(x, (32,), own["attention_norm.weight"], eps)
        q, k, v = (normed @ own[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        q, k, v = (each.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for each in (q, k, v))
        q, k = rotate(q, theta, positions), rotate(k, theta, positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(~visible, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ own["attention.wo.weight"].T
        normed = F.rms_norm(x, (32,), own["ffn_norm.weight"], eps)
        gate, up = normed @ own["feed_forward.w1.weight"].T, normed @ own["feed_forward.w3.weight"].T
        x = x + (F.silu(gate) * up) @ own["feed_forward.w2.weight"].T
    return F.rms_norm(x, (32,), w["norm.weight"], eps) @ w["output.weight"].T


def take_step(
    folder: Path,
    *,
    weights: str = "float32",
    compute: str | None = None,
    factor: float = 1.0,
    documents: bool = False,
    masks_documents: bool = True,
    n_means: int = 0,
    theta: float = 10000.0,
    norm_eps: float = 1e-5,
    adam: dict[str, float] | None = None,
    degrees: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    after_clipping: bool = False,
    norm_factor: float = 1.0,
    names: str = "llama",
    without: tuple[str, ...] = (),
    n_tokens: int = 0,
    z_loss: float = 0.0,
    stated_z_loss: float | None = None,
) -> Path:
    """Take a step as another program would, and write its folder. `factor` multiplies the loss; `n_means`: it is a mean
    over as many means; `change` changes the gradients; with `n_tokens` the batch is one sequence. `z_loss` is a weight,
    and `stated_z_loss` that of step.json."""
    dtype, compute_dtype = getattr(torch, weights), getattr(torch, compute or weights)
    before = {name: each.to(dtype) for name, each in initial_weights().items()}
    parameters = {name: each.clone().requires_grad_() for name, each in before.items()}
    tokens, targets, positions = batch()
    if n_tokens:
        tokens = torch.randint(60, (1, n_tokens), generator=torch.Generator().manual_seed(2))
        targets = tokens.roll(-1, 1)
    used = positions if documents and masks_documents else torch.arange(tokens.shape[1]).expand_as(tokens)
    cast = {name: each.to(compute_dtype) for name, each in parameters.items()}
    logits = forward(cast, tokens, theta=theta, eps=norm_eps, positions=used)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    if n_means:
        valid = (targets != -100).view(n_means, -1).sum(1)
        loss = (losses.view(n_means, -1).sum(1) / valid).mean()
    else:
        loss = losses.sum() / (targets != -100).sum()
    valid = targets != -100
    z = (wide.logsumexp(-1).square() * valid).sum() / valid.sum()
    (loss * factor + z_loss * z).backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    if change:
        change(gradients)
    written = copy.deepcopy(gradients)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM).item()
    options = {**ADAM, **(adam or {})}
    betas = options["beta1"], options["beta2"]
    decay = [{"params": [p], "weight_decay": 0.2 * (p.dim() == 2)} for p in parameters.values()]
    torch.optim.AdamW(decay, options["lr"], betas, options["eps"]).step()
    step = {
        "program": "a loop",
        "dtypes": {"weights": weights, "compute": compute or weights, "reduce": weights},
        "optimizer": {"name": "AdamW", **ADAM, "weight_decay_dims": [2]},
        "max_norm": MAX_NORM,
        "degrees": degrees or {},
        "loss": loss.item(),
        "gradient_norm": norm * norm_factor,
        "z_loss_weight": stated_z_loss,
    }
    results = {"gradients": gradients if after_clipping else written, "weights_after": parameters}
    tensors = {"weights": before, **{name: each for name, each in results.items() if name not in without}}
    if names == "transformers":
        tensors = {name: in_transformers(each) for name, each in tensors.items()}
    tensors |= {"document_positions": positions} if documents else {}
    config = CONFIG | ({"max_position_embeddings": n_tokens, "rope_theta": theta} if n_tokens else {})
    write_folder(folder, config=config, tokens=tokens, targets=targets, step=step, **tensors)
    return folder


def in_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    model = load_values({"model": model_section()}, "test", []).config.model
    assert tensors.keys() == tensor_shapes(model).keys()
    return {hf_name(name, model): to_hf([name], [tensor], model) for name, tensor in tensors.items()}


def model_section() -> dict[str, Any]:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return {**sizes, "ffn_dim": 48, "vocab_size": 60}


def compare(recorded: RecordedStep) -> dict[str, list[Row]]:
    return against.compare(recorded, *(forward_backward(recorded, each) for each in (FLOAT64, recorded.step.dtypes)))


def verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit status of the command, and its lines behind the table."""
    status = run_command("parity", ["--against", str(folder)])
    out, error = capsys.readouterr()
    assert not error
    return status, out.partition("\n\n")[2].partition("\n\n")[2].splitlines()


# What is right -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "float64"},
        {"weights": "float64", "documents": True},
        {"weights": "float32"},
        {"weights": "float32", "documents": True, "names": "transformers"},
        {"weights": "float32", "compute": "bfloat16"},
        {"weights": "float32", "compute": "float16", "degrees": {"loss_scale": 64}},
        {"weights": "bfloat16"},
        {"weights": "float64", "without": ("gradients",)},
        {"weights": "float32", "without": ("gradients",)},
        {"weights": "bfloat16", "without": ("gradients", "weights_after")},
        {"weights": "float64", "change": lambda gradients: gradients[NORM].mul_(1 + 5e-11)},  # of a 15th of the norm
        {"weights": "float64", "z_loss": 1e-4, "stated_z_loss": 1e-4},
        {"weights": "float32", "compute": "bfloat16", "documents": True, "z_loss": 1e-2, "stated_z_loss": 1e-2},
        {"weights": "float32", "n_tokens": 1024, "theta": 1.5},  # whose angles are large: in float32 they lose digits
    ],
    ids=str,
)
def test_a_right_step_is_equal(options: dict[str, Any], tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, **options), capsys)
    assert status == 0, lines
    assert lines[0].startswith("equal: the largest distance, of ")


# Injected bugs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("factor", "degrees", "line"),
    [
        (144, {}, "gradients are 144.0 x too large: valid tokens = 144"),
        (144 / 256, {}, "gradients are 1.77778 x too small: all tokens / valid tokens = 256 / 144"),
        (1 / 2, {"dp": 2}, "gradients are 2.0 x too small: dp = 2"),
        (4, {"accumulation_steps": 4}, "gradients are 4.0 x too large: accumulation steps = 4"),
        (1 / 8, {"cp": 2, "dp": 4, "tp": 16}, "gradients are 8.0 x too small: sequences = 8, or dp x cp = 4 x 2, or "),
        (2, {"dp": 2, "pp": 2}, "gradients are 2.0 x too large: dp = 2, or pp = 2"),
        (3.3, {"dp": 2}, "gradients are 3.3 x too large: none of the known numbers"),
        (1024, {"loss_scale": 1024}, "gradients are 1024.0 x too large: loss scale = 1024"),
    ],
)
def test_a_ratio_is_named(factor: float, degrees: dict[str, int], line: str, dtype: str, tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, weights=dtype, factor=factor, degrees=degrees), capsys)
    assert (status, lines[0]) == (1, "DIFFERENT")
    if dtype == "bfloat16":  # which knows three digits of a ratio, the last one not exactly
        lines = [re.sub(r"[\d.]+ x too", "? x too", each) for each in lines]
        line = re.sub(r"[\d.]+ x too", "? x too", line)
    assert any(each.startswith(line) for each in lines), lines
    assert "gradient norm is that of the program's own gradients" in lines
    assert lines[-1] == "equal: loss, updates, computed from the program's own gradients"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"n_means": 4, "degrees": {"accumulation_steps": 4}},
            "gradients and loss are those of a mean over 4 accumulation steps, each a mean over its own tokens",
        ),
        (
            {"n_means": 4, "degrees": {"accumulation_steps": 2, "dp": 2}},
            "gradients and loss are those of a mean over 4 accumulation steps of all data-parallel ranks, each a mean "
            "over its own tokens",
        ),
        (
            {"documents": True, "masks_documents": False},
            "gradients and loss are those without the document mask",
        ),
        (
            {"n_means": 8, "without": ("gradients", "weights_after")},
            "loss are those of a mean over 8 sequences, each a mean over its own tokens",
        ),
        (
            {"z_loss": 2.5e-5, "stated_z_loss": 1e-4, "degrees": {"accumulation_steps": 4}},
            "gradients are right, except that the z-loss is 4.0 x too small: accumulation steps = 4",
        ),
        ({"stated_z_loss": 1e-4}, "gradients are right, except that they lack the z-loss"),
        ({"z_loss": 1e-4}, "gradients are different, and not by a factor; the most: gradient norm.weight, by "),
        ({"after_clipping": True}, "gradients are 5.13916 x too small: gradient norm / max_norm = 5.13916"),
        (
            {"norm_factor": math.sqrt(0.5), "degrees": {"dp": 2}},
            "gradient norm is, for the program's own gradients, 1.41421 x too small: sqrt(dp) = 1.41421",
        ),
        ({"adam": {"lr": 1e-3}}, "updates are 2.0 x too small: none of the known numbers"),
        ({"adam": {"eps": 1e-5}}, "updates are different, and not by a factor; the most: update layers."),
        (
            {"adam": {"eps": 1e-5}, "n_means": 4},  # whatever the gradients are
            "updates are different, and not by a factor; the most: update layers.",
        ),
        ({"theta": 500000.0}, "gradients are different, and not by a factor; the most: gradient layers.0.attention.w"),
        ({"norm_eps": 1e-6}, "gradients are different, and not by a factor; the most: gradient "),
        (
            {"change": lambda gradients: gradients[NORM].mul_(0.5), "degrees": {"tp": 2}},
            f"gradient {NORM} is 2.0 x too small: tp = 2",
        ),
        (
            {"change": lambda gradients: gradients[WK][0].add_(1e-3)},
            f"gradient {WK} is different, and not by a factor; the most: gradient {WK}, by ",
        ),
    ],
    ids=str,
)
def test_a_bug_is_named(options: dict[str, Any], line: str, tmp_path: Path, capsys):
    status, lines = verdict(take_step(tmp_path, **options), capsys)
    assert (status, lines[0]) == (1, "DIFFERENT")
    assert any(each.startswith(line) for each in lines), lines


def test_what_another_loss_explains_is_said_once(tmp_path: Path, capsys):
    assert verdict(take_step(tmp_path, n_means=4, degrees={"microbatches": 4}), capsys)[1] == [
        "DIFFERENT",
        "gradients and loss are those of a mean over 4 microbatches, each a mean over its own tokens",
        "gradient norm is that of the program's own gradients",
        "equal: updates, computed from the program's own gradients",
    ]


def test_tensors_are_named_that_share_a_ratio(tmp_path: Path, capsys):
    def halve(gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            gradient *= 0.5 if "wv" in name or "norm" in name else 1

    lines = verdict(take_step(tmp_path, change=halve, degrees={"tp": 2}), capsys)[1]
    line = "7 of 21 gradients, the first gradient layers.0.attention_norm.weight, are 2.0 x too small: tp = 2"
    assert line in lines


def test_updates_may_differ_more_without_gradients(tmp_path: Path):
    """Adam makes a full step of what is rounding in a gradient, in one matrix or another."""
    allowed = {}
    for name, without in {"with": (), "without": ("gradients",)}.items():
        rows = compare(read_step(take_step(tmp_path / name, without=without)))["updates"]
        allowed[name] = {row.allowed for row in rows if row.ours.dim() == 2}
    assert len(allowed["without"]) == 1
    assert len(allowed["with"]) > 10
    assert min(allowed["without"]) > max(allowed["with"])


def test_the_distance_nearest_to_its_limit_is_named(tmp_path: Path, capsys):
    folder = take_step(tmp_path)
    rows = [row for rows in compare(read_step(folder)).values() for row in rows]
    nearest = max(rows, key=lambda row: row.distance / row.allowed)
    assert f"equal: the largest distance, of {nearest.name}, is " in verdict(folder, capsys)[1][0]


def test_a_difference_below_rounding_in_bfloat16_is_found_in_float64(tmp_path: Path, capsys):
    options = {"change": lambda gradients: gradients[WK].mul_(1 + 1e-6)}
    assert verdict(take_step(tmp_path / "a", weights="bfloat16", **options), capsys)[0] == 0
    assert verdict(take_step(tmp_path / "b", weights="float64", **options), capsys)[0] == 1


def test_a_number_of_a_ratio_is_known_to_its_precision():
    assert describe(0.5, 1e-6, {"dp": 2, "tp": 1}) == "2.0 x too small: dp = 2"
    assert describe(2.02, 1e-6, {"dp": 2}).startswith("2.02 x too large: none")
    assert describe(2.02, 0.02, {"dp": 2, "pp": 1}) == "2.02 x too large: dp = 2"
    assert describe(1.5, 1e-6, {"dp": 2, "cp": 3}) == "1.5 x too large: cp / dp = 3 / 2"
    assert describe(1 + 1e-7, 1e-9, {"dp": 2}) == "too large by 1.0e-07 of its size, where 1.0e-09 is rounding"


def test_a_factor_that_rounding_explains_is_none():
    """What differs by more than rounding, and by a factor that is less than rounding, differs by no factor."""
    ours, other = (F.normalize(torch.randn(999, dtype=torch.float64), dim=0) for _ in range(2))
    noise = F.normalize(other - (other @ ours) * ours, dim=0)
    row = Row("a", (1 + 1.3e-4) * ours + 2.4e-4 * noise, ours, 2.6e-4)
    assert not row.equal
    assert row.ratio == pytest.approx(1 + 1.3e-4)
    assert clusters([row]) == ({}, [row])


def test_rows_of_a_ratio_are_in_the_order_of_computation():
    ours = torch.ones(4, dtype=torch.float64)
    rows = [Row(name, 2 * ours, ours, allowed) for name, allowed in (("a", 2e-6), ("b", 1e-6), ("c", 3e-6))]
    assert [[row.name for row in members] for members in clusters(rows)[0].values()] == [["a", "b", "c"]]


# What rounding explains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doubled", [False, True])
def test_a_limit_that_explains_half_a_tensor_is_too_coarse(doubled: bool, tmp_path: Path, capsys, monkeypatch):
    """Whether a comparison could have failed depends on the distance: a small one excludes a wrong factor."""
    monkeypatch.setattr(against, "ROUNDING_FACTOR", 1e9)
    change = (lambda gradients: gradients[WK].mul_(2)) if doubled else None
    status, lines = verdict(take_step(tmp_path, change=change, norm_factor=0.9), capsys)
    assert status == (2 if doubled else 0)
    assert lines[0].startswith(f"TOO COARSE TO COMPARE: 1 of 44, the first gradient {WK}: " if doubled else "equal: ")


def test_weights_in_bfloat16_are_compared_with_the_same_rounding(tmp_path: Path):
    """Their rounding is larger than some updates. What is rounded in the same way is no guess."""
    rows = compare(read_step(take_step(tmp_path, weights="bfloat16")))["updates"]
    assert max(row.allowed for row in rows) > 0.5
    assert {row.verdict for row in rows} == {"equal"}
    halves = [row._replace(theirs=row.theirs / 2) for row in rows]
    assert {row.verdict for row in halves} <= {"coarse", "DIFFERS"}


@pytest.mark.parametrize("factor", [1, 1.02, math.sqrt(2)])
def test_a_norm_of_millions_of_squares_in_float32(factor: float, tmp_path: Path, capsys, monkeypatch):
    """torch sums them in float32, and loses more than the gradients' rounding."""
    vocab_size, generator = 50_304, torch.Generator().manual_seed(3)
    monkeypatch.setitem(CONFIG, "vocab_size", vocab_size)
    larger = {
        name: 0.02 * torch.randn(vocab_size, 32, generator=generator, dtype=torch.float64)
        for name in ("tok_embeddings.weight", "output.weight")
    }
    weights = initial_weights() | larger
    monkeypatch.setattr("tests.tools.parity.test_against.initial_weights", lambda: weights)
    options = {"without": ("gradients", "weights_after"), "norm_factor": factor}
    folder = take_step(tmp_path, **options)
    (row,) = compare(read_step(folder))["gradient norm"]
    status, lines = verdict(folder, capsys)
    if factor == 1:
        assert row.distance > 1e-5  # eight times the rounding of these gradients is 8.8e-6
        assert status == 0, lines
    else:
        assert f"gradient norm is {factor:.2f}"[:20] in " ".join(lines)
        assert status == 1


def test_a_norm_in_float64_has_no_rounding_of_float32(tmp_path: Path):
    (row,) = compare(read_step(take_step(tmp_path, weights="float64")))["gradient norm"]
    assert row.allowed == 1e-11


def test_a_large_batch_is_computed_in_parts_with_progress(tmp_path: Path, capsys, monkeypatch):
    folder = take_step(tmp_path, weights="float64", documents=True, n_means=4, degrees={"accumulation_steps": 4})
    expected = compare(read_step(folder))
    status, lines = verdict(folder, capsys)
    monkeypatch.setattr(against, "CHUNK_LOGITS", 3 * 32 * 60)
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.001)
    actual = compare(read_step(folder))
    assert "one step in float64: 3 of 8 sequences" in capsys.readouterr().err
    for kind, rows in expected.items():
        for one, other in zip(rows, actual[kind], strict=True):
            torch.testing.assert_close(one.ours, other.ours, rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 10.0)
    assert verdict(folder, capsys) == (status, lines)


VANISHING: dict[str, tuple[Callable[[str], float], Callable[[Tensor], Any] | None, int]] = {
    "all weights": (lambda name: 0.0, None, 0),
    "all weights, nearly": (lambda name: 1e-170, None, 0),
    "norms": (lambda name: 0.0 if "norm" in name else 1.0, None, 0),
    "embeddings": (lambda name: 0.0 if "tok" in name else 1.0, None, 0),
    "the output head": (lambda name: 0.0 if "output" in name else 1.0, None, 0),
    "outputs of blocks": (lambda name: 0.0 if "wo" in name or "w2" in name else 1.0, None, 0),
    "outputs of blocks, nearly": (lambda name: 1e-170 if "wo" in name or "w2" in name else 1.0, None, 0),
    "outputs, and gradients are another's": (lambda name: 1e-170 if "wo" in name else 1.0, lambda x: x.add_(1e-3), 1),
    "gradients": (lambda name: 1.0, Tensor.zero_, 1),
    "gradients, nearly": (lambda name: 1.0, lambda x: x.mul_(3e-163), 1),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", VANISHING)
def test_what_vanishes_is_compared(name: str, dtype: str, tmp_path: Path, capsys, monkeypatch):
    scale, change, expected = VANISHING[name]
    weights = {name: scale(name) * tensor for name, tensor in initial_weights().items()}
    monkeypatch.setattr("tests.tools.parity.test_against.initial_weights", lambda: weights)
    changed = (lambda own: [change(each) for each in own.values()]) if change else None
    folder = take_step(tmp_path, weights=dtype, compute="float32", change=changed)
    status = run_command("parity", ["--against", str(folder)])
    out, error = capsys.readouterr()
    assert (status, error) == (expected, "")
    assert "nan" not in out


def test_weights_whose_step_is_too_large_for_float64_are_one_line(tmp_path: Path, capsys, monkeypatch):
    weights = {name: 1e30 * tensor for name, tensor in initial_weights().items()}
    monkeypatch.setattr("tests.tools.parity.test_against.initial_weights", lambda: weights)
    assert run_command("parity", ["--against", str(take_step(tmp_path, weights="float64"))]) == 2
    assert "has numbers that are NaN or infinite" in capsys.readouterr().err


def test_no_escape_of_a_file_reaches_the_console(tmp_path: Path, capsys):
    folder = take_step(tmp_path)
    in_json(STEP, program="\x1b[2Jevil\nequal: all\u202e")(folder)
    run_command("parity", ["--against", str(folder)])
    out = capsys.readouterr().out
    assert "\\x1b[2Jevil\\nequal: all\\u202e" in out.splitlines()[0]
    in_tensors(GRADIENTS, lambda t: t.update({"\x1b[31m\n": torch.zeros(1)}))(folder)
    assert run_command("parity", ["--against", str(folder)]) == 2
    error = capsys.readouterr().err
    assert printable(error, "\n") == error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["model", "gradients", "batch"])
def test_a_folder_that_changes_while_it_is_read_is_one_line(name: str, tmp_path: Path, capsys, monkeypatch):
    folder, real = take_step(tmp_path), recorded_step._read_weights

    def read_weights(place: Path, *shapes: Any, **options: Any) -> dict[str, Tensor]:
        os.utime(folder / f"{name}.safetensors", (1, 1))
        return real(place, *shapes, **options)

    monkeypatch.setattr(recorded_step, "_read_weights", read_weights)
    assert run_command("parity", ["--against", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"{name}.safetensors: changed while it was read" in error
    assert error.count("\n") == 1


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_step(tmp_path_factory.mktemp("against") / "step")


def in_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return what changes keys of a JSON file; None removes a key."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def in_tensors(file: str, change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)

    return change_file


def put(tensors: dict[str, Tensor], name: str, place: tuple[int, ...], value: float) -> None:
    tensors[name][place] = value


def cast(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    tensors[name] = tensors[name].to(dtype)


MODEL, BATCH, STEP = "model.safetensors", "batch.safetensors", "step.json"
GRADIENTS, AFTER = "gradients.safetensors", "weights_after.safetensors"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no step.json": (lambda f: (f / STEP).unlink(), "step.json: no such file"),
    "no config.json": (lambda f: (f / "config.json").unlink(), "no such file"),
    "no weights": (lambda f: (f / MODEL).unlink(), "expected the folder of a Hugging Face model"),
    "no batch": (lambda f: (f / BATCH).unlink(), "batch.safetensors: no such file"),
    "no JSON": (lambda f: (f / STEP).write_text("{"), "step.json: not valid JSON"),
    "NaN in JSON": (lambda f: (f / STEP).write_text('{"loss": NaN}'), "NaN is no JSON number"),
    "a key twice": (
        lambda f: (f / STEP).write_text('{"loss": 4.1, "loss": 4.2}'),
        'not valid JSON: "loss" is there twice',
    ),
    "a number of the JSON that is infinite": (
        lambda f: (f / STEP).write_text((f / STEP).read_text().replace('"loss": ', '"loss": 1e999, "old": ')),
        "step.json: loss: Input should be a finite number",
    ),
    "a long program": (in_json(STEP, program="x" * 1001), "step.json: program: String should have at most 1000"),
    "least loss scale": (in_json(STEP, degrees={"loss_scale": 5e-324}), "step.json: degrees.loss_scale: Input should"),
    "largest loss scale": (in_json(STEP, degrees={"loss_scale": 1e308}), "step.json: degrees.loss_scale: Input should"),
    "a negative z-loss": (in_json(STEP, z_loss_weight=-1.0), "step.json: z_loss_weight: Input should be greater"),
    "a pipe": (lambda f: (f / AFTER).unlink() or os.mkfifo(f / AFTER), "weights_after.safetensors: no such file"),
    "a folder": (lambda f: (f / GRADIENTS).unlink() or (f / GRADIENTS).mkdir(), "gradients.safetensors: expected the"),
    "a broken link": (
        lambda f: (f / GRADIENTS).unlink() or (f / GRADIENTS).symlink_to("nothing"),
        "gradients.safetensors: no such file",
    ),
    "unknown key": (in_json(STEP, learning_rate=1), "step.json: learning_rate: Extra inputs are not permitted"),
    "missing key": (in_json(STEP, dtypes=None), "step.json: dtypes: Field required"),
    "text for a number": (in_json(STEP, loss="4.1"), "step.json: loss: Input should be a valid number"),
    "unknown dtype": (
        in_json(STEP, dtypes={"weights": "float8", "compute": "float32", "reduce": "float32"}),
        "step.json: dtypes.weights: Input should be 'float64'",
    ),
    "unknown optimizer": (
        in_json(STEP, optimizer={"name": "SGD", **ADAM, "weight_decay_dims": [2]}),
        "step.json: optimizer.name: Input should be 'AdamW' or 'Adam'",
    ),
    "no ranks": (in_json(STEP, degrees={"dp": 0}), "step.json: degrees.dp: Input should be greater than"),
    "no optimizer": (in_json(STEP, optimizer=None), "weights_after.safetensors: "),
    "other model": (in_json("config.json", intermediate_size=64), "has shape [48, 32], and the model of config.json"),
    "unknown model": (in_json("config.json", model_type="bloom"), 'model_type = "bloom": unsupported'),
    "heads": (in_json("config.json", num_key_value_heads=3), "expected a divisor of model.n_heads = 4"),
    "too long": (in_json("config.json", max_position_embeddings=16), "32 tokens a sequence, and max_position"),
    "foreign tokenizer": (in_json("config.json", vocab_size=30), "was it another model's tokenizer?"),
    "missing tensor": (in_tensors(GRADIENTS, lambda t: t.pop(WK)), f'lacks "{WK}"; expected the tensors'),
    "unknown tensor": (
        in_tensors(AFTER, lambda t: t.update(bias=torch.zeros(1))),
        'weights_after.safetensors: has the unknown tensor "bias"',
    ),
    "no tensors": (in_tensors(GRADIENTS, lambda t: t.clear()), "lacks"),
    "shape": (
        in_tensors(GRADIENTS, lambda t: t.update({WK: t[WK].T})),
        f"{WK} has shape [32, 16], and the model of config.json [16, 32]",
    ),
    "NaN": (in_tensors(GRADIENTS, lambda t: put(t, WK, (0, 0), math.nan)), f"{WK} has a number that is NaN"),
    "infinity": (in_tensors(MODEL, lambda t: put(t, WK, (0, 0), math.inf)), f"{WK} has a number that is NaN"),
    "narrow dtype": (
        in_tensors(MODEL, lambda t: cast(t, WK, torch.bfloat16)),
        f"{WK} has dtype BF16, and dtypes.weights of step.json is float32",
    ),
    "integers": (in_tensors(GRADIENTS, lambda t: cast(t, WK, torch.int64)), f"{WK} has dtype I64"),
    "truncated": (
        lambda f: (f / GRADIENTS).write_bytes((f / GRADIENTS).read_bytes()[:-9]),
        "gradients.safetensors: cannot be read as safetensors",
    ),
    "no safetensors": (lambda f: (f / BATCH).write_bytes(b"PK\3\4" * 9), "cannot be read as safetensors"),
    "no tokens": (in_tensors(BATCH, lambda t: t.pop("tokens")), 'lacks "tokens"'),
    "other batch": (in_tensors(BATCH, lambda t: t.update(mask=t["tokens"].clone())), 'has the unknown tensor "mask"'),
    "int32": (in_tensors(BATCH, lambda t: cast(t, "tokens", torch.int32)), "tokens has dtype I32 and shape"),
    "flat": (in_tensors(BATCH, lambda t: t.update(tokens=t["tokens"].flatten())), "dtype I64 and shape [256]"),
    "other shape": (
        in_tensors(BATCH, lambda t: t.update(targets=t["targets"][:, 1:])),
        "targets has shape [8, 31], and tokens has [8, 32]",
    ),
    "negative token": (in_tensors(BATCH, lambda t: put(t, "tokens", (0, 0), -1)), "tokens has the id -1"),
    "large target": (in_tensors(BATCH, lambda t: put(t, "targets", (7, 0), 60)), "targets has the id 60"),
    "nothing valid": (in_tensors(BATCH, lambda t: t["targets"].fill_(-100)), "targets has no valid token"),
    "not shifted": (
        in_tensors(BATCH, lambda t: t["targets"].copy_(t["tokens"])),
        "targets are the tokens themselves",
    ),
    "positions": (
        in_tensors(BATCH, lambda t: t.update(document_positions=torch.ones(8, 32, dtype=torch.int64))),
        "document_positions: expected 0 where a document begins",
    ),
    "tied, with another head": (
        in_json("config.json", tie_word_embeddings=True),
        "output.weight differs from tok_embeddings.weight, and tie_word_embeddings",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, right_folder: Path, tmp_path: Path, capsys):
    change, expected = BAD[name]
    folder = tmp_path / "step"
    folder.mkdir()
    for file in right_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    assert run_command("parity", ["--against", str(folder)]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error


def test_a_folder_without_results_is_one_line(tmp_path: Path, capsys):
    folder = take_step(tmp_path, without=("gradients", "weights_after"))
    in_json(STEP, loss=None, gradient_norm=None)(folder)
    assert run_command("parity", ["--against", str(folder)]) == 2
    assert "has no result of the step to compare" in capsys.readouterr().err


def test_a_step_that_overflows_is_one_line(tmp_path: Path, capsys):
    folder = take_step(tmp_path, compute="float16", degrees={"loss_scale": 1e9})
    assert run_command("parity", ["--against", str(folder)]) == 2
    assert "with compute float16 and loss_scale 1e+09" in capsys.readouterr().err


@pytest.mark.parametrize("others", [["debug"], ["--steps=2"], ["--dtype=float32"], ["--training.seq_len=8"]])
def test_no_other_argument_is_taken(others: list[str], capsys):
    assert run_command("parity", ["--against=folder", *others]) == 2
    assert "--against FOLDER takes no config and no other option" in capsys.readouterr().err
