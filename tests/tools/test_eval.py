"""Evaluation: its loss is transformers' and the one that a run logs. Samples of a run: the text of its checkpoint."""

import contextlib
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.config import python
from tests.helpers.data import BYTES, flat, some_texts, write
from tests.helpers.hf import CPU, build_hf
from tests.test_train import SMALL, read_metrics, run_train
from titanlite import config
from titanlite.config import ConfigError, Launch
from titanlite.data.text import continuation, encode_prompts
from titanlite.launch.cli import run_command
from titanlite.metrics import logger as metrics
from titanlite.tools import evaluate
from titanlite.tools.generate.folder import open_folder
from titanlite.tools.generate.generator import Generator
from titanlite.tools.generate.sampling import Sampling, choose

SEQ_LEN, EOS = 24, 257
FAMILY = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": EOS}


def evaluate_on_a_rank(folder: Path, cache: Path, **training: Any) -> tuple[float, int]:
    launch, opened = Launch.from_environment(n_devices=0), open_folder(folder)
    values = {
        "model": opened.options.model_dump(),
        "training": {"cache_folder": str(cache), "dtype": "float64", "local_batch_size": 2, **training},
        "validation": {"steps": -1},
    }
    return evaluate.evaluate(config.check(config.load_values(values, "test", []), launch), launch, opened, BYTES)


def loss_of_transformers(hf: Any, texts: list[str], *, document_mask: bool) -> tuple[float, int]:
    """Return the mean over all targets of the packed sequences; none follows the end of a document."""
    tokens, losses = torch.tensor(flat(texts)), []
    starts = range(0, len(tokens) - 1, SEQ_LEN)
    for start in starts:
        inputs, targets = tokens[start : start + SEQ_LEN], tokens[start + 1 : start + SEQ_LEN + 1]
        inputs = inputs[: len(targets)]
        ends = (inputs == EOS).nonzero().flatten() + 1 if document_mask else torch.tensor([], dtype=torch.int64)
        with torch.no_grad():
            parts = [hf(part[None], use_cache=False).logits[0] for part in inputs.tensor_split(ends) if len(part)]
        losses.append(F.cross_entropy(torch.cat(parts), targets, reduction="none")[inputs != EOS])
    return torch.cat(losses).mean().item(), len(starts)


@pytest.mark.parametrize(
    "document_mask", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["packed", "document mask"]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "olmoe"])
def test_the_loss_is_that_of_transformers(family: str, document_mask: bool, ranks, tmp_path: Path):
    """transformers' norms and rotary tables are in float32, so the losses differ by rounding of that size."""
    hf = build_hf(family, **FAMILY)
    hf.save_pretrained(tmp_path / "hf")
    texts = some_texts(30)
    options = {"dataset": "json", "dataset_path": str(write(tmp_path / "a.jsonl", texts)), "seq_len": SEQ_LEN}
    options |= {"document_mask": document_mask, "cache": tmp_path / "cache"}
    ((loss, n_sequences),) = ranks(1).run(evaluate_on_a_rank, folder=tmp_path / "hf", **options)
    expected, n_expected = loss_of_transformers(hf.double(), texts, document_mask=document_mask)
    assert n_sequences == n_expected
    assert loss == pytest.approx(expected, rel=1e-6)
    if not document_mask:
        other, _ = loss_of_transformers(hf, texts, document_mask=True)
        assert abs(other - expected) > 1e-3
        results = ranks(2).run(evaluate_on_a_rank, folder=tmp_path / "hf", **options)
        assert results == [(pytest.approx(loss, rel=1e-12), n_sequences)] * 2


def test_a_loss_that_is_not_finite_is_one_line(ranks, tmp_path: Path):
    """The weights are finite, and their products are not."""
    hf = build_hf("llama", **FAMILY)
    with torch.no_grad():
        hf.lm_head.weight.fill_(3e38)
    hf.save_pretrained(tmp_path / "hf")
    options = {"dataset": "json", "dataset_path": str(write(tmp_path / "a.jsonl", some_texts(3))), "seq_len": SEQ_LEN}
    (line,) = ranks(1).run(problem_on_a_rank, folder=tmp_path / "hf", cache=tmp_path / "cache", **options)
    problem = f"{tmp_path / 'hf'}: the loss is nan; expected a finite number"
    assert line == f"{problem}; take undamaged weights, or another --dtype"


def problem_on_a_rank(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        evaluate_on_a_rank(**arguments, dtype="float32")
    return str(caught.value)


# Runs ----------------------------------------------------------------------------------------------------------------

PROMPTS, N_TOKENS, STEPS = ["The ", "A list of ", "x"], 6, 4
LAYOUTS = {
    "shard 2": [],
    "tp 2, document mask": ["--parallelism.tensor_parallel_degree=2", "--training.document_mask"],
    "shard 2, compiled": ["--compile.enable", "--compile.backend=aot_eager"],
}


def texts_in_tensorboard(folder: Path) -> dict[tuple[str, int], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    found = [(tag, event) for tag in tags for event in events.Tensors(tag)]
    return {(tag.split("/")[1], event.step): event.tensor_proto.string_val[0].decode() for tag, event in found}


def train_and_count_graphs(argv: list[str]) -> tuple[str, int, bool]:
    """Train, and return the error, how many graphs were compiled for samples, and whether one was for anything else."""
    from torch._dynamo.utils import counters

    from titanlite.techniques.samples import Samples

    generate, begin, of_samples = Samples.generate, counters["stats"]["unique_graphs"], 0

    def counted(*arguments: Any) -> list[str]:
        nonlocal of_samples
        before = counters["stats"]["unique_graphs"]
        texts = generate(*arguments)
        of_samples += counters["stats"]["unique_graphs"] - before
        return texts

    with mock.patch.object(Samples, "generate", counted):
        error = run_train(argv)
    return error, of_samples, counters["stats"]["unique_graphs"] > begin + of_samples


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_logs_the_loss_and_the_texts_of_its_checkpoint(layout: str, ranks, tmp_path: Path):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    file, run = write(tmp_path / "validation.jsonl", some_texts(40)), tmp_path / "run"
    train = write(tmp_path / "train.jsonl", some_texts(400))
    arguments = ["--training.dataset=json", f"--training.dataset_path={train}", "--validation.enable"]
    arguments += [f"--validation.dataset_path={file}", "--validation.steps=-1", f"--training.steps={STEPS}"]
    arguments += ["--validation.freq=2", f"--validation.generate_prompts={PROMPTS}", "--checkpoint.enable"]
    arguments += [f"--validation.generate_tokens={N_TOKENS}", "--training.dtype=float64", *LAYOUTS[layout]]
    results = ranks(2).run(train_and_count_graphs, argv=[str(tmp_path / "small.toml"), *arguments])
    assert results == [("", 0, "compiled" in layout)] * 2

    options = {"dataset": "json", "dataset_path": str(file), "seq_len": 64, "cache": tmp_path / "cache"}
    options["document_mask"] = "document mask" in layout
    ((loss, _),) = ranks(1).run(evaluate_on_a_rank, folder=run, **options)
    assert loss == pytest.approx(read_metrics(run)[-1][metrics.VALIDATION_LOSS], rel=1e-12)

    folder, prompts = open_folder(run), encode_prompts(BYTES, PROMPTS)
    longest = max(map(len, prompts))
    arguments = {"batch_size": 2, "longest": longest, "max_new_tokens": N_TOKENS}
    generator = Generator(folder, dtype=torch.float64, device=CPU, mesh=None, **arguments)
    results = generator.generate(prompts, {EOS}, lambda logits, batch: choose(logits, Sampling(), []))
    texts = [continuation(BYTES, prompt, tokens) for prompt, tokens in zip(prompts, results, strict=True)]
    logged = texts_in_tensorboard(run / "tb")
    assert [logged[str(index), STEPS] for index in range(3)] == [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    assert {step for _, step in logged} == {2, STEPS}
    assert any(texts), "no text"


def test_a_prompt_that_is_too_long_is_rejected(ranks, tmp_path: Path):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    arguments = ["--validation.enable", f"--validation.generate_prompts={['a' * 58]}", "--validation.generate_tokens=6"]
    (message,) = ranks(1).run(run_train, argv=[str(tmp_path / "small.toml"), *arguments])
    assert "has 59 tokens: expected at most 58, which is training.seq_len" in message


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_command_prints_the_loss(ranks, tmp_path: Path):
    build_hf("llama", **FAMILY).save_pretrained(tmp_path / "hf")
    file = write(tmp_path / "a.txt", some_texts(30))
    arguments = ["--dataset=text", f"--dataset-path={file}", "--tokenizer=bytes", f"--seq-len={SEQ_LEN}"]
    arguments += ["--training.cache_folder", str(tmp_path / "cache"), "--dtype=float64"]
    status, output, errors = python("-m", "titanlite", "eval", str(tmp_path / "hf"), *arguments)
    assert status == 0, errors
    options = {"dataset": "text", "dataset_path": str(file), "seq_len": SEQ_LEN}
    ((loss, n),) = ranks(1).run(evaluate_on_a_rank, folder=tmp_path / "hf", cache=tmp_path / "cache", **options)
    perplexity = f"perplexity {math.exp(loss):.4f}"
    assert output.startswith(f"{tmp_path / 'hf'}: {n} sequences of 24 tokens\nloss {loss:.6f} nats per token, ")
    assert perplexity in output


WRONG: dict[tuple[str, ...], str] = {
    (): "the following arguments are required: --dataset",
    ("--dataset=text",): 'training.dataset_path = "" (default): training.dataset = "text" needs a file, folder or glob',
    ("--dataset=texts",): 'command line: training.dataset = "texts": expected one of "pydoc_topics"',
    ("--dataset=text", "--dataset-path=nowhere"): "no such file or folder",
    ("--dataset=pydoc_topics", "--split=test"): "training.dataset_split",
    ("--dataset=pydoc_topics", "--training.loss_chunks", "0"): "training.loss_chunks = 0: expected -1, or an integer",
    ("--dataset=pydoc_topics", "--seq-len=0"): "--seq-len: 0: expected an integer >= 1",
    ("--dataset=pydoc_topics", "--optimizer.lr=1"): "command line: --optimizer.lr=1: expected one of --training.",
    ("--dataset=pydoc_topics", "more"): "command line: more: expected one of --training.",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], tmp_path: Path, monkeypatch, capsys):
    build_hf("llama", **FAMILY).save_pretrained(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("titanlite.launch.process_group.process_group", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(evaluate, "evaluate", open_data_only)
    assert run_command("eval", [str(tmp_path), "--tokenizer=bytes", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert WRONG[arguments] in line


def open_data_only(job: Any, launch: Launch, folder: Any, tokenizer: Any) -> Any:
    evaluate.open_sequences(tokenizer, job.training, builds_cache=True)
    raise ConfigError(["not rejected"])
