"""titanlite logprobs: a transformers model is the trainer and the engine, right and wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.hf import build_hf
from titanlite.launch.cli import run_command
from titanlite.techniques.moe.router import Router

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, PROMPT, BOS = 96, 10, 1


def build(family: str = "llama", theta: float = 10000.0) -> Any:
    """Return a model of transformers, whose logits are as far apart as those of a trained one, rounded to bfloat16."""
    rope = {"rope_type": "default", "rope_theta": theta}
    hf = build_hf(family, max_position_embeddings=LENGTH + 1, rope_parameters=rope)
    with torch.no_grad():
        hf.lm_head.weight *= 4
    for parameter in hf.parameters():  # rotary frequencies, a buffer, remain in float32
        parameter.data = parameter.data.bfloat16()
    return hf


@torch.no_grad()
def logprobs(hf: Any, tokens: Tensor, temperature: float = 1.0) -> list[float | None]:
    logits = hf(tokens[None]).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return [None, *logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logprobs") / "hf"
    build().save_pretrained(path)
    return path


def draw(n: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.cat([torch.tensor([BOS]), torch.randint(3, 60, (LENGTH - 1,), generator=generator)]) for _ in range(n)
    ]


def run(
    capsys: Any, folder: Path, rows: list[dict[str, Any]] | str, *arguments: str
) -> tuple[int, list[Any], list[str]]:
    """Return the exit status, the logprobs of each row, and the lines on standard error."""
    file = folder.parent / "rows.jsonl"
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()  # transformers prints its progress
    status = run_command("logprobs", [str(folder), str(file), *arguments])
    out, error = capsys.readouterr()
    return status, [json.loads(line)["logprobs"] for line in out.splitlines()], error.splitlines()


def off(one: list[float | None], other: list[float | None]) -> float:
    assert [x is None for x in one] == [x is None for x in other]
    return max(abs(x - y) for x, y in zip(one, other, strict=True) if x is not None)


def test_the_logprobs_are_those_of_transformers(folder: Path, capsys):
    """Its norms and rotary table are in float32."""
    hf, rows = build().double(), draw()
    prompts = [{"prompt_token_ids": row[:PROMPT].tolist(), "token_ids": row[PROMPT:].tolist()} for row in rows]
    status, ours, error = run(capsys, folder, [{"token_ids": row.tolist()} for row in rows], "--temperature=0.7")
    assert (status, error) == (0, [])
    assert max(off(own, logprobs(hf, row, 0.7)) for own, row in zip(ours, rows, strict=True)) < 1e-5
    _, same, _ = run(capsys, folder, prompts, "--temperature=0.7")
    assert max(off(own, row[PROMPT:]) for own, row in zip(same, ours, strict=True)) < 1e-12
    _, rounded, _ = run(capsys, folder, prompts, "--dtype=bfloat16")
    assert off(rounded[0], run(capsys, folder, prompts)[1][0]) > 1e-3


# Rollouts ------------------------------------------------------------------------------------------------------------

Reports = Callable[[Any, Tensor], list[float | None]]


def one_wrong(hf: Any, tokens: Tensor) -> list[float | None]:
    values = logprobs(hf, tokens)
    return [*values[:50], values[50] - 0.5, *values[51:]]


def a_little_wrong(hf: Any, tokens: Tensor) -> list[float | None]:
    """No logprob is farther off than the rounding of some."""
    return [x and x - 0.15 for x in logprobs(hf, tokens)]


def with_bos_twice(hf: Any, tokens: Tensor) -> list[float | None]:
    return [None, *logprobs(hf, torch.cat([torch.tensor([BOS]), tokens]))[2:]]


def without_bos(hf: Any, tokens: Tensor) -> list[float | None]:
    return [None, None, *logprobs(hf, tokens[1:])[1:]]


ENGINES: dict[str, tuple[Reports, str]] = {
    "rounding": (logprobs, "rounding"),
    "shifted by one": (
        lambda hf, tokens: [None, *logprobs(hf, tokens)[2:], -1.0],
        "the engine; first in line 1 at position 1",
    ),
    "BOS twice": (with_bos_twice, "the engine; first in line 1 at position "),
    "no BOS": (without_bos, "the engine; first in line 1 at position "),
    "another rope theta": (
        lambda _, tokens: logprobs(build(theta=1e6), tokens),
        "the engine; first in line 1 at position ",
    ),
    "temperature 1.1": (lambda hf, tokens: logprobs(hf, tokens, 1.1), "the engine; first in line 1 at position "),
    "a little everywhere": (a_little_wrong, "the engine; first in line 1 at position "),
    "one token": (one_wrong, "the engine; first in line 1 at position 50"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_verdict_names_the_engine(name: str, folder: Path, capsys):
    report, expected = ENGINES[name]
    trainer, engine = build(), build()
    rows = [
        {"token_ids": x.tolist(), "trainer_logprobs": logprobs(trainer, x), "engine_logprobs": report(engine, x)}
        for x in draw()
    ]
    status, _, (of_trainer, of_engine, verdict) = run(capsys, folder, rows)
    assert status == (expected != "rounding")
    assert "logprobs, " in of_trainer
    assert "allowed for bfloat16: " in of_engine
    assert f": {expected}" in verdict
    swapped = [
        {**row, "trainer_logprobs": row["engine_logprobs"], "engine_logprobs": row["trainer_logprobs"]} for row in rows
    ]
    assert f": {expected.replace('engine', 'trainer')}" in run(capsys, folder, swapped)[2][-1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_allowed_is_the_rounding_of_the_named_type(dtype: str, folder: Path, capsys):
    """Rounding to bfloat16 is no rounding to a finer type."""
    fine = build().to(getattr(torch, dtype))
    rows = [
        {"token_ids": x.tolist(), "trainer_logprobs": logprobs(fine, x), "engine_logprobs": logprobs(build(), x)}
        for x in draw()
    ]
    assert run(capsys, folder, rows, f"--trainer-dtype={dtype}")[2][-1].endswith(": rounding")
    assert ": the engine; first in line 1 at " in run(capsys, folder, rows, f"--engine-dtype={dtype}")[2][-1]
    both = run(capsys, folder, rows, f"--trainer-dtype={dtype}", f"--engine-dtype={dtype}", "--temperature=1.2")[2][-1]
    assert ": the trainer; first in line 1 at position 1 and the engine; first in line 1 at position 1" in both


def test_what_rounding_hides_is_too_coarse(tmp_path: Path, capsys):
    hf = build()
    with torch.no_grad():
        hf.lm_head.weight.mul_(0.02).add_(50)  # logits are large, and nearly equal
    hf.save_pretrained(tmp_path / "hf")
    rows = [{"token_ids": x.tolist(), "engine_logprobs": logprobs(hf, x)} for x in draw(1)]
    status, _, lines = run(capsys, tmp_path / "hf", rows)
    assert status == 2
    assert lines[-1].endswith("too coarse to compare: for the engine, rounding explains a shift by one token")


def test_tokens_go_to_the_experts_of_the_rows(tmp_path: Path, capsys, monkeypatch):
    """Of three layers the first is dense. An engine leaves out the last token, whose experts change nothing."""
    build("qwen3_moe").save_pretrained(tmp_path / "hf")
    (tokens,), chosen, choose = draw(1), [], Router.choose
    monkeypatch.setattr(Router, "choose", lambda self, scores: chosen.append(choose(self, scores)) or chosen[-1])
    own = run(capsys, tmp_path / "hf", [{"token_ids": tokens.tolist()}])[1]
    experts = [[[0, 0, 0], *each] for each in torch.stack(chosen, 1).tolist()]
    assert len(experts) == LENGTH - 1
    same = {"token_ids": tokens.tolist(), "routed_experts": experts}
    assert run(capsys, tmp_path / "hf", [same, {**same, "routed_experts": [*experts, experts[0]]}])[1] == own * 2
    others = [*experts[:-1], [[0, 0, 0], *([[n for n in range(6) if n not in ids][:3] for ids in experts[-1][1:]])]]
    (changed,) = run(capsys, tmp_path / "hf", [{**same, "routed_experts": others}])[1]
    assert off(changed[:-1], own[0][:-1]) < 1e-12
    assert abs(changed[-1] - own[0][-1]) > 1e-3


# What is wrong -------------------------------------------------------------------------------------------------------

ROW = '{"token_ids": [1, 5, 6], '
DESCRIBED = "; --help describes a row"
BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "has no row; expected a JSON object on each line"),
    "blank lines": ("\n \n", "has no row; expected a JSON object on each line"),
    "no JSON": ("token_ids 1 2", f"line 2: Invalid JSON: expected ident at line 1 column 2{DESCRIBED}"),
    "torn": ('{"token_ids": [1, 5', "line 2: Invalid JSON: EOF while parsing a list"),
    "nested": ("[" * 100_000, "line 2: Invalid JSON: recursion limit exceeded"),
    "a list": ("[1, 2]", "line 2: Input should be an object"),
    "no ids": ("{}", "line 2: token_ids: Field required"),
    "no tokens": ('{"token_ids": []}', "line 2: token_ids: List should have at least 1 item"),
    "text": ('{"token_ids": "abc"}', "line 2: token_ids: Input should be a valid array"),
    "a fraction": ('{"token_ids": [1, 1.5]}', "line 2: token_ids.1: Input should be a valid integer"),
    "true": ('{"token_ids": [1, true]}', "line 2: token_ids.1: Input should be a valid integer"),
    "negative": ('{"token_ids": [1, -1]}', "line 2: token_ids.1: Input should be greater than or equal to 0"),
    "large id": ('{"token_ids": [1, 60]}', "line 2: the id 60: expected ids below 60; take the model that had these"),
    "huge id": ('{"token_ids": [1, 1' + "0" * 400 + "]}", "line 2: the id 10"),
    "large id of the prompt": ('{"token_ids": [1], "prompt_token_ids": [99]}', "line 2: the id 99"),
    "one token": ('{"token_ids": [1]}', "line 2: 1 tokens with the prompt: expected 2 to 97, as the model takes"),
    "long": (json.dumps({"token_ids": [5] * 98}), "line 2: 98 tokens with the prompt: expected 2 to 97"),
    "few numbers": (
        ROW + '"engine_logprobs": [null, -1]}',
        "line 2: engine_logprobs: expected 3 numbers, one for each",
    ),
    "many numbers": (ROW + '"trainer_logprobs": [null, -1, -1, -1]}', "line 2: trainer_logprobs: expected 3 numbers"),
    "of the first": (
        ROW + '"trainer_logprobs": [-1, -1, -1]}',
        "line 2: trainer_logprobs.0: nothing predicts the first",
    ),
    "NaN": (ROW + '"engine_logprobs": [null, NaN, -1]}', "line 2: engine_logprobs.1: Input should be a finite number"),
    "infinite": (
        ROW + '"engine_logprobs": [null, -1, -Infinity]}',
        "line 2: engine_logprobs.2: Input should be a finite",
    ),
    "1e999": (ROW + '"engine_logprobs": [null, -1, -1e999]}', "line 2: engine_logprobs.2: Input should be a finite"),
    "unknown key": (ROW + '"trainer_logprob": []}', "line 2: trainer_logprob: Extra inputs are not permitted"),
    "experts": (ROW + '"routed_experts": [[[0]]]}', "line 2: routed_experts: expected 3 tokens or one less, 3 layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_line(name: str, folder: Path, capsys):
    text, expected = BAD[name]
    right = "" if name in ("empty", "blank lines") else ROW + '"engine_logprobs": [null, -1, -2]}\n'
    status, out, (line,) = run(capsys, folder, right + text + "\n")
    assert (status, out) == (2, [])
    assert line.startswith(f"error: {folder.parent / 'rows.jsonl'}: {expected}")
    assert len(line) < 700


@pytest.mark.parametrize(
    "experts",
    [
        [[[0, 0, 0], [0, 1, 2], [0, 1, 2]]],
        [[[0, 0, 0], [0, 1, 2]]] * 2,
        [[[0, 0, 0], [0, 1, 2], [0, 1, 6]]] * 2,
        [[[0, 0, 0], [0, 1, 2], [0, 1, 1]]] * 2,
        [[[0, 0, 0], [0, 1, 2], [0, 1]]] * 2,
        [[], [[0, 0, 0], [0, 1, 2], [0, 1, 2]]],
        [[[], [0, 1, 2], []]] * 2,
    ],
    ids=["tokens", "layers", "above", "twice", "few", "none", "empty"],
)
def test_experts_that_do_not_fit_are_one_line(experts: list[Any], tmp_path: Path, capsys):
    build("qwen3_moe").save_pretrained(tmp_path / "hf")
    status, out, (line,) = run(capsys, tmp_path / "hf", [{"token_ids": [1, 5, 6], "routed_experts": experts}])
    assert (status, out) == (2, [])
    assert "line 1: routed_experts: expected 3 tokens or one less, 3 layers, 3 of 6 experts; write what" in line


WRONG: dict[tuple[str, ...], str] = {
    ("--temperature=0",): "expected a finite number > 0",
    ("--temperature=nan",): "expected a finite number > 0",
    ("--dtype=float16",): "invalid choice: 'float16'",
    ("--engine-dtype=fp8",): "invalid choice: 'fp8'",
    ("--dtype=bfloat16",): "--dtype = bfloat16, --engine-dtype = bfloat16: to tell what rounding explains, expected",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], folder: Path, capsys):
    status, out, (line,) = run(capsys, folder, ROW + '"engine_logprobs": [null, -1, -2]}', *arguments)
    assert (status, out) == (2, [])
    assert WRONG[arguments] in line


def test_a_missing_file_and_logits_that_are_not_finite_are_one_line(folder: Path, tmp_path: Path, capsys):
    assert run_command("logprobs", [str(folder), str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl: cannot be read" in capsys.readouterr().err
    hf = build()
    with torch.no_grad():
        hf.lm_head.weight.fill_(3e38)
    hf.save_pretrained(tmp_path / "hf")
    rows = [{"token_ids": [1, 5, 6], "engine_logprobs": [None, -1, -1]}]
    status, _, (line,) = run(capsys, tmp_path / "hf", rows, "--engine-dtype=float16")
    assert status == 2
    assert "line 1: logits in float16 are NaN or infinite; expected finite ones; take undamaged weights, or" in line
