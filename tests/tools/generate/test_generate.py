"""Generated text: the KV cache computes what the full model does, for every family and under tensor parallel; sampling
draws from the distribution that it says; and the command."""

import functools
import gzip
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import cases
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.config import problems, python
from tests.helpers.hf import CPU, FAMILIES, WITH_EXPERTS, build_hf, empty_model, save_hf
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config import ConfigError, Launch
from titanlite.config.loader import printable
from titanlite.config.schema import Model, Moe, Parallelism
from titanlite.data.tokenizer import ByteTokenizer, continuation
from titanlite.launch.cli import run_command
from titanlite.parallel import mesh
from titanlite.tools.generate import command, sampling
from titanlite.tools.generate.cache import CachedAttention
from titanlite.tools.generate.folder import ModelFolder, open_folder
from titanlite.tools.generate.generator import Generator
from titanlite.tools.generate.sampling import Sampling, choose, probabilities, prompt_generators

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS, NEW, EOS = (3, 17, 1, 9, 12, 6), 20, 2
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES}
CASES["llama, llama3 scaling"] = ("llama", {"rope_parameters": LLAMA3_ROPE})
"""Family of the model, and settings of transformers that differ. Mistral's window is 8, less than every text here."""
LEAST_GAP = 1e-4
"""Between the largest two logits, which are about 1. transformers' norms and rotary tables are in float32, so its
float64 logits are off by some 1e-6: a text whose gaps are larger is the same in both, and others are left out."""


def save(folder: Path, case: str = "llama", **settings: Any) -> Any:
    """Save a model of transformers and return it in float64."""
    family, different = CASES[case]
    hf = build_hf(family, **different, **settings)
    hf.save_pretrained(folder)
    return hf.double()


def draw_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def greedy(logits: Tensor, batch: range) -> list[int]:
    return choose(logits, Sampling(), [])


def build(folder: ModelFolder, prompts: list[list[int]], batch_size: int, **changes: Any) -> Generator:
    """Return a generator in float64 that has room for these prompts and no more."""
    arguments = {"dtype": torch.float64, "device": CPU, "mesh": None, "max_new_tokens": NEW, **changes}
    return Generator(folder, batch_size=batch_size, longest=max(map(len, prompts)), **arguments)


def generate(path: Path, prompts: list[list[int]], batch_size: int = 4, **changes: Any) -> list[list[int]]:
    return list(build(open_folder(path), prompts, batch_size, **changes).generate(prompts, {EOS}, greedy))


# The cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case: str, tmp_path: Path):
    hf, prompts, compared = save(tmp_path, case), draw_prompts(), 0
    for prompt, text in zip(prompts, generate(tmp_path, prompts), strict=True):
        tokens = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
        theirs = hf.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        best = torch.stack([logits[0].topk(2).values for logits in theirs.logits])
        if (best[:, 0] - best[:, 1]).min() > LEAST_GAP:
            compared += len(text) > 8  # beyond mistral's window
            assert text == [token for token in theirs.sequences[0, len(prompt) :].tolist() if token != EOS]
    assert compared >= 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "random"])
def test_logits_that_are_not_finite_are_one_line(sampling: Sampling, tmp_path: Path):
    """The weights are finite, and their products are not."""
    hf, prompts = build_hf(), draw_prompts((3, 5))
    with torch.no_grad():
        hf.lm_head.weight.fill_(3e38)
    hf.save_pretrained(tmp_path)
    generator = build(open_folder(tmp_path), prompts, 2, dtype=torch.float32)
    chosen = generator.generate(prompts, {EOS}, lambda logits, batch: choose(logits, sampling, [torch.Generator()] * 2))
    (line,) = problems(lambda: list(chosen))
    expected = "the logits are NaN or infinite; expected finite ones; take undamaged weights, or another --dtype"
    assert line == f"{tmp_path}: {expected}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case", ["llama, llama3 scaling", "mistral", "qwen3, biases", "qwen3_moe", "olmoe", "deepseek_v3"]
)
def test_logits_are_those_of_the_full_model(case: str, dtype: torch.dtype, tmp_path: Path):
    """The tolerances are rounding: of sums over at most 48 terms in other orders, through three layers."""
    save(tmp_path, case)
    folder, prompts, seen = open_folder(tmp_path), draw_prompts((3, 17, 9)), []

    def record(logits: Tensor, batch: range) -> list[int]:
        seen.append(logits.clone())
        return greedy(logits, batch)

    texts = list(build(folder, prompts, 3, dtype=dtype).generate(prompts, set(), record))
    model = empty_model(folder.options, dtype)
    folder.load(model)
    model.rope = build(folder, prompts, 3, dtype=dtype).model.rope  # a longer one
    for sequence, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text[:-1]]]))[0, len(prompt) - 1 :]
        actual = torch.stack([each[sequence] for each in seen])
        assert (actual - logits).abs().max() < (1e-13 if dtype == torch.float64 else 2e-5)
        assert torch.equal(actual.argmax(-1), torch.tensor(text))


def test_a_text_does_not_depend_on_its_batch(tmp_path: Path):
    save(tmp_path, "mistral")
    prompts = draw_prompts()
    texts = generate(tmp_path, prompts, 1)
    assert len({len(text) for text in texts}) > 1, "all texts end at once"
    for batch_size in (2, 4, 6):
        assert generate(tmp_path, prompts, batch_size) == texts
    assert generate(tmp_path, prompts[::-1], 4) == texts[::-1]


def test_the_cache_is_allocated_once(tmp_path: Path):
    save(tmp_path)
    prompts = draw_prompts()
    generator = build(open_folder(tmp_path), prompts, 4)
    attention = [module for module in generator.model.modules() if isinstance(module, CachedAttention)]
    assert len(attention) == 3
    caches = [cache for module in attention for cache in (module.k_BGSK, module.v_BGSK)]
    assert {cache.shape for cache in caches} == {(4, 2, 17 + NEW, 8)}
    before = [cache.data_ptr() for cache in caches]
    list(generator.generate(prompts, {EOS}, greedy))
    assert [cache.data_ptr() for module in attention for cache in (module.k_BGSK, module.v_BGSK)] == before
    assert generator.model.rope.shape[1] == 17 + NEW


def test_a_new_token_costs_one_token(tmp_path: Path):
    """After the prompts, each forward is of one token for each sequence, and only the last token has logits."""
    save(tmp_path)
    prompts = draw_prompts((5, 9))
    generator, sizes = build(open_folder(tmp_path), prompts, 2), []
    generator.model.layers["0"].feed_forward.register_forward_hook(lambda module, x, out: sizes.append(len(out)))
    texts = list(generator.generate(prompts, set(), greedy))
    assert sizes == [5, 9, *[2] * (NEW - 1)]
    assert [len(text) for text in texts] == [NEW, NEW]


def test_a_window_bounds_the_keys_that_are_read(tmp_path: Path):
    save(tmp_path, "mistral")
    prompts = draw_prompts((17, 12))
    generator, keys = build(open_folder(tmp_path), prompts, 2), []
    decode = generator.step.decode
    with mock.patch.object(generator.step, "decode", lambda *a: (decode(*a), keys.append(generator.step.keys[8][0]))):
        list(generator.generate(prompts, set(), greedy))
    assert keys[0] == slice(12 - 7, 17 + 1)
    assert {each.stop - each.start for each in keys} == {13}  # the window of 8, and 5 between the two


@pytest.mark.gpu
def test_a_gpu_generates_the_same(tmp_path: Path):
    save(tmp_path, "mistral")
    device, prompts = torch.device("cuda"), draw_prompts()
    assert generate(tmp_path, prompts, device=device) == generate(tmp_path, prompts)
    for dtype in (torch.float32, torch.bfloat16):  # which take other attention backends
        assert len(generate(tmp_path, prompts, device=device, dtype=dtype)) == len(prompts)


# Checkpoints with experts --------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, hf_folder: Path) -> None:
    """Save the model of a Hugging Face folder as a checkpoint of a run, with a load of its experts."""
    options = open_folder(hf_folder).options
    model = empty_model(options)
    open_folder(hf_folder).load(model)
    weights = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    weights |= {name: torch.arange(len(load)) for name, load in weights.items() if name.endswith(".load")}
    write_checkpoint(folder, weights, step=3, identity={"seed": 1, "data": "x", **options.identity()})


@pytest.mark.parametrize("case", ["olmoe", "deepseek_v3"])
def test_a_checkpoint_of_experts_generates_what_its_folder_does(case: str, tmp_path: Path):
    save(tmp_path / "hf", case)
    save_checkpoint(tmp_path / "checkpoint" / "step-3", tmp_path / "hf")
    prompts = draw_prompts()
    assert generate(tmp_path / "checkpoint", prompts) == generate(tmp_path / "hf", prompts)


def test_a_checkpoint_with_other_biases_of_experts_is_rejected(tmp_path: Path):
    save(tmp_path / "hf", "deepseek_v3")
    path = tmp_path / "checkpoint" / "step-3"
    save_checkpoint(path, tmp_path / "hf")
    options = open_folder(path).options
    without = options.model_copy(update={"moe": options.moe.model_copy(update={"balance_bias": False})})
    with pytest.raises(ConfigError, match="51 tensors, and the model has 49; it is of another model"):
        load_weights(path, empty_model(without), without)
    other = empty_model(without)
    other_path = write_checkpoint(tmp_path / "other" / "step-3", model_tensors(other), step=3, identity={})
    with pytest.raises(ConfigError, match=r"layers.1.feed_forward.router.balance_bias and 1 more is not in the check"):
        load_weights(other_path, empty_model(options), options)


# Tensor parallel -----------------------------------------------------------------------------------------------------


def generate_on_a_rank(
    path: Path,
    prompts: list[list[int]],
    degree: int,
    *,
    expert_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> list[list[int]]:
    parallelism = Parallelism(tensor_parallel_degree=degree, data_parallel_shard_degree=1)
    axis = mesh.build_layout(parallelism, CPU).mesh["tp"]
    random, generators = Sampling(**settings), prompt_generators([str(prompt) for prompt in prompts], 1)
    generator = build(open_folder(path), prompts, 5, mesh=axis, expert_parallel=expert_parallel, dtype=dtype)
    if expert_parallel:
        weight = generator.model.layers["2"].feed_forward.experts.w1
        assert weight.to_local().shape == (len(weight) // degree, *weight.shape[1:])

    def draw(logits: Tensor, batch: range) -> list[int]:
        return choose(logits, random, generators[batch.start : batch.stop])

    return list(generator.generate(prompts, {EOS}, draw))


@cases("case", ["llama, tied", "mistral", "qwen3, biases", "mixtral", "qwen3_moe", "olmoe"], always=["qwen3, biases"])
def test_tensor_parallel_generates_the_same(case: str, ranks, tmp_path: Path):
    """Prompts and batches are no multiples of the ranks."""
    save(tmp_path, case)
    prompts = draw_prompts()
    first, second = ranks(2).run(generate_on_a_rank, path=tmp_path, prompts=prompts, degree=2)
    assert first == second == generate(tmp_path, prompts)


@cases("case", WITH_EXPERTS, always=["deepseek_v2", "gpt_oss"])
def test_expert_parallel_generates_the_same(case: str, ranks, tmp_path: Path):
    """With one prompt, each rank adds one token at a time, and most experts have none."""
    save(tmp_path, case)
    arguments = {"path": tmp_path, "degree": 2, "expert_parallel": True}
    for prompts in (draw_prompts(), draw_prompts((5,))):
        first, second = ranks(2).run(generate_on_a_rank, prompts=prompts, **arguments)
        assert first == second == generate(tmp_path, prompts)


@pytest.mark.nightly
@pytest.mark.parametrize("case", WITH_EXPERTS)
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_experts_over_four_ranks(expert_parallel: bool, case: str, ranks, tmp_path: Path):
    """Qwen3-MoE's 6 experts are not divided by 4, and KV heads are as many as ranks."""
    experts = {"num_experts": 8} if case == "qwen3_moe" else {}
    save(tmp_path, case, num_key_value_heads=4, **experts)
    prompts, arguments = draw_prompts(), {"path": tmp_path, "degree": 4, "expert_parallel": expert_parallel}
    results = ranks(4).run(generate_on_a_rank, prompts=prompts, **arguments)
    assert results == [generate(tmp_path, prompts)] * 4


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.nightly), torch.float32], ids=str)
def test_a_rank_whose_experts_get_no_token(dtype: torch.dtype, ranks, tmp_path: Path):
    """Of equal scores the first two of four experts are chosen, which the first rank has."""
    hf = save(tmp_path, "mixtral").float()
    for layer in hf.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)
    hf.save_pretrained(tmp_path)
    arguments = {"path": tmp_path, "prompts": draw_prompts(), "dtype": dtype}
    first, second = ranks(2).run(generate_on_a_rank, degree=2, expert_parallel=True, **arguments)
    assert first == second == generate(**arguments)


def test_tensor_parallel_ranks_draw_the_same(ranks, tmp_path: Path):
    save(tmp_path)
    drawn = {"temperature": 0.8, "top_p": 0.9}
    first, second = ranks(2).run(generate_on_a_rank, path=tmp_path, prompts=draw_prompts(), degree=2, **drawn)
    assert first == second


def load_problem(path: Path) -> str | None:
    parallelism = Parallelism(tensor_parallel_degree=2, data_parallel_shard_degree=1)
    try:
        build(open_folder(path), [[1]], 1, mesh=mesh.build_layout(parallelism, CPU).mesh["tp"])
    except ConfigError as error:
        return str(error)
    return None


def test_all_ranks_know_what_one_cannot_read(ranks, tmp_path: Path):
    save(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(9000)
    first, second = ranks(2).run(load_problem, path=tmp_path)
    assert first == second
    assert "cannot be read as safetensors" in first


# Sampling ------------------------------------------------------------------------------------------------------------

P = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)
LOGITS = P.log()[None] + 3


def kept(**settings: Any) -> dict[int, float]:
    """Return the probabilities of the tokens that can be drawn, which add up to 1."""
    values, tokens = probabilities(LOGITS, Sampling(**{"temperature": 1.0, **settings}))
    total = values.sum().item()
    return {token: p / total for token, p in zip(tokens[0].tolist(), values[0].tolist(), strict=True) if p}


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [1, 3, 2, 4, 0]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [1, 3, 2, 4, 0]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 2]),
        ({"top_p": 1.0}, [1, 3, 2, 4, 0]),
        ({"top_k": 2, "top_p": 0.56}, [1]),  # 0.4 of 0.7 is 0.57
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"temperature": 0.5, "top_p": 0.58}, [1, 3]),  # 0.16 of 0.285 is 0.56
        ({"temperature": 0.5, "top_p": 0.55}, [1]),
    ],
)
def test_the_smallest_set_is_kept(settings: dict[str, Any], tokens: list[int]):
    weights = {token: P[token].item() ** (1 / settings.get("temperature", 1)) for token in tokens}
    expected = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    assert kept(**settings) == pytest.approx(expected, rel=1e-12)
    assert list(kept(**settings)) == tokens


def test_a_temperature_near_0_draws_the_most_likely_token():
    logits, generators = torch.tensor([[3.0, 5.0, 4.0]]), prompt_generators(["a"], 1)
    assert choose(logits, Sampling(temperature=1e-320), generators) == [1]


def test_frequencies_are_the_probabilities():
    """Of n draws with probability p, the standard deviation is sqrt(n p (1 - p)), and 5 of them are exceeded once in
    two million times; the seed is fixed."""
    n, settings = 20_000, Sampling(temperature=0.7, top_k=4, top_p=0.97)
    generators = prompt_generators([str(i) for i in range(n)], 5)
    counts = torch.bincount(torch.tensor(choose(LOGITS.expand(n, -1), settings, generators)), minlength=5).tolist()
    expected = kept(temperature=0.7, top_k=4, top_p=0.97)
    assert len(expected) == 4
    for token in range(5):
        p = expected.get(token, 0.0)
        assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)), token


def test_top_k_of_one_is_greedy():
    logits = torch.randn(50, 60, generator=torch.Generator().manual_seed(0))
    for settings in (Sampling(temperature=3.0, top_k=1), Sampling(temperature=3.0, top_p=1e-9)):
        assert choose(logits, settings, prompt_generators(["a"] * 50, 0)) == logits.argmax(-1).tolist()


def test_a_token_of_probability_0_is_never_drawn():
    """The largest number that a generator draws is 1 - 2^-53."""
    last = torch.full((1,), 1 - 2**-53, dtype=torch.float64)
    with mock.patch.object(sampling.torch, "rand", return_value=last):
        assert choose(LOGITS, Sampling(temperature=1.0, top_k=3), [torch.Generator()]) == [2]
        assert choose(LOGITS, Sampling(temperature=1.0), [torch.Generator()]) == [0]


def test_the_seed_and_the_prompt_decide():
    def numbers(prompts: list[str], seed: int = 1) -> list[float]:
        return [torch.rand((), generator=each).item() for each in prompt_generators(prompts, seed)]

    a, b, again = numbers(["a", "b", "a"])
    assert len({a, b, again}) == 3
    assert numbers(["b", "a", "c", "a"])[:2] == [b, a]
    assert numbers(["b", "a", "c", "a"])[3] == again
    assert numbers(["a"], seed=2) != [a]


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A model of bytes: 258 tokens, of which the last two are BOS and EOS."""
    save_hf_of_bytes(tmp_path / "hf")
    return tmp_path / "hf"


def save_hf_of_bytes(folder: Path, family: str = "llama") -> None:
    build_hf(family, vocab_size=258, bos_token_id=256, eos_token_id=257).save_pretrained(folder)


def run(capsys: Any, *arguments: Any) -> tuple[int, str, list[str]]:
    """Run the command in this process. Returns its exit status, its output, and its lines on stderr."""
    status = run_command("generate", [str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    return status, output, [line for line in errors.splitlines() if line.startswith(("error: ", "prompt "))]


def test_the_command_prints_the_texts(hf_folder: Path, capsys, tmp_path: Path):
    arguments = (hf_folder, "--tokenizer", "bytes", "--max-new-tokens", 12, "--dtype", "float64")
    one, two = (run(capsys, *arguments, text) for text in ("abc", "a longer prompt"))
    assert one[0] == two[0] == 0
    assert len(one[1]) > 2
    both = run(capsys, *arguments, "abc", "a longer prompt")
    assert both[1] == f"--- prompt 1 of 2\n{one[1]}--- prompt 2 of 2\n{two[1]}"
    (tmp_path / "a.txt").write_text("abc\na longer prompt\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "a longer prompt", "id": 3}\n')
    for file in ("a.txt", "a.jsonl"):
        assert run(capsys, *arguments, "--prompts", tmp_path / file, "--batch-size", 1) == both
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\ufeffa\x0cb\u2028c\r\nd\x85e\n".encode()))
    assert command.read_prompts(tmp_path / "b.txt.gz") == ["a\x0cb\u2028c", "d\x85e"], "lines of training data"
    drawn = (*arguments, "--temperature", 2.0, "--seed", 3)
    assert run(capsys, *drawn, "abc") == run(capsys, *drawn, "abc")
    assert run(capsys, *drawn, "abc")[1] in run(capsys, *drawn, "x", "abc")[1]
    assert run(capsys, *drawn, "abc") != run(capsys, *drawn[:-1], 4, "abc")
    assert run(capsys, *drawn, "--top-k", 1, "abc") == one


def test_an_empty_text_is_said_where_a_person_reads_it(hf_folder: Path, capsys, monkeypatch):
    monkeypatch.setattr("titanlite.data.tokenizer.continuation", lambda _, prompt, *__: "b" * (len(prompt) > 2))
    assert run(capsys, hf_folder, *BYTES, "a") == (0, "\n", ["prompt 1: the model answered with nothing"])
    status, output, errors = run(capsys, hf_folder, *BYTES, "aa", "a")
    assert (status, output) == (0, "--- prompt 1 of 2\nb\n--- prompt 2 of 2\n\n")
    assert errors == ["prompt 2: the model answered with nothing"]


def test_a_text_has_no_control_characters_but_line_feeds_and_tabs(hf_folder: Path, capsys, monkeypatch):
    """A model can be trained to write what changes a terminal, or what a terminal types."""
    odd = "a\tb\n\x1b]0;title\x07\x1b[2J\r\0\x9b\u202e é 漢字"
    monkeypatch.setattr("titanlite.data.tokenizer.continuation", lambda *_: odd)
    expected = "a\tb\n\\x1b]0;title\\x07\\x1b[2J\\r\\x00\\x9b\\u202e é 漢字\n"
    assert run(capsys, hf_folder, *BYTES, "--max-new-tokens", 1, "a") == (0, expected, [])


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "more"), [("llama", []), ("olmoe", []), ("olmoe", ["--expert-parallel"])])
def test_the_command_starts_the_ranks_of_tensor_parallel(family: str, more: list[str], tmp_path: Path, capsys):
    save_hf_of_bytes(tmp_path, family)
    arguments = [str(tmp_path), "abc", "--tokenizer=bytes", "--max-new-tokens=5", "--dtype=float64"]
    degree = "--tensor-parallel-degree=2"
    variables = {"PATH": str(Path(sys.executable).parent), "CUDA_VISIBLE_DEVICES": ""}
    status, output, errors = python("-m", "titanlite", "generate", *arguments, degree, *more, **variables)
    assert status == 0, errors
    assert output == run(capsys, *arguments)[1]


def test_the_tokenizer_of_the_folder_is_used(assets, tmp_path: Path, capsys):
    tokenizer = assets.open(bos_token="<s>", eos_token="</s>")
    build_hf("llama", vocab_size=400).save_pretrained(tmp_path / "hf")
    for file in (assets.file, assets.settings):
        (tmp_path / "hf" / file.name).write_text(file.read_text())
    prompt = [tokenizer.bos, *tokenizer.encode(["some text"])[0].tolist()]
    (text,) = generate(tmp_path / "hf", [prompt])
    status, output, _ = run(capsys, tmp_path / "hf", "some text", "--max-new-tokens", NEW, "--dtype", "float64")
    assert (status, output) == (0, printable(continuation(tokenizer, prompt, text), "\n\t") + "\n")


def test_decoding(assets):
    tokenizer, text = assets.open(), "ein Träger, 木, and so on"
    for each in (tokenizer, ByteTokenizer()):
        tokens = each.encode([text])[0].tolist()
        assert each.decode([*tokens, each.eos]) == text
        for split in range(4, 12):
            prompt = each.encode([text[:split]])[0].tolist()
            rest = each.encode([text[split:]])[0].tolist()
            assert continuation(each, prompt, rest) == text[split:]
    assert ByteTokenizer().decode([0xC3, 257, 260]) == "�"


def test_a_decoder_that_drops_the_first_space(assets):
    """As those of Llama 2 and Mistral, whose words begin with a mark for the space before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assets.file.write_text(tokenizer.to_str())
    opened = assets.open()
    assert opened.decode([1]) == "b"
    assert continuation(opened, [0], [1, 0]) == " b a"


def test_other_end_tokens_stop_too(hf_folder: Path):
    folder = open_folder(hf_folder)
    assert folder.stop_tokens(ByteTokenizer()) == {257}
    file = hf_folder / "generation_config.json"
    for value, tokens in ((None, {257}), (5, {257, 5}), ([5, 6], {257, 5, 6})):
        file.write_text(json.dumps({"eos_token_id": value}))
        assert folder.stop_tokens(ByteTokenizer()) == tokens
    file.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match="expected token ids"):
        folder.stop_tokens(ByteTokenizer())


BYTES = ("--tokenizer", "bytes")
WRONG: dict[tuple[str, ...], str] = {
    ("hf",): "expected a prompt, or --prompts FILE",
    ("hf", "a"): "has no tokenizer.json; name the tokenizer with --tokenizer FOLDER",
    ("hf", "a", "--tokenizer", "nowhere"): "cannot be read as a tokenizer",
    ("nowhere", "a"): "nowhere: expected a Hugging Face folder, a step-N folder, or the folder of a run",
    ("hf", "a", *BYTES, "--max-new-tokens", "0"): "--max-new-tokens: 0: expected an integer >= 1",
    ("hf", "a", *BYTES, "--max-new-tokens", "-1"): "--max-new-tokens: -1: expected an integer >= 1",
    ("hf", "a", *BYTES, "--max-new-tokens", "abc"): "--max-new-tokens: abc: expected an integer >= 1",
    ("hf", "a", *BYTES, "--max-new-tokens", "2000000000"): "--max-new-tokens = 2000000000: with the 2 tokens of "
    "the longest prompt, expected at most 1,048,576, in batches of 1; shorten it, or set --batch-size lower",
    ("hf", *BYTES, "--prompts", "long.txt"): "--max-new-tokens = 64: with the 2,000,001 tokens of the longest prompt, "
    "expected at most 1,048,576",
    ("hf", *BYTES, "--prompts", "pipe"): "--prompts pipe: cannot be read: OSError: [Errno 22] expected a regular file",
    (
        "hf",
        *BYTES,
        "--prompts",
        "/dev/zero",
    ): "--prompts /dev/zero: cannot be read: OSError: [Errno 22] expected a regular",
    ("hf", "a", *BYTES, "--temperature", "-1"): "expected a finite number >= 0",
    ("hf", "a", *BYTES, "--temperature", "nan"): "expected a finite number >= 0",
    ("hf", "a", *BYTES, "--temperature", "1", "--top-p", "0"): "expected a number above 0 and at most 1",
    ("hf", "a", *BYTES, "--top-k", "5"): "--top-k = 5: read only when --temperature is above 0",
    ("hf", "a", *BYTES, "--seed", "5"): "--seed = 5: read only when --temperature is above 0",
    ("hf", "a", *BYTES, "--max-new", "5"): "unrecognized arguments: --max-new 5",
    ("hf", "a", *BYTES, "--dtype", "float16"): "invalid choice: 'float16'",
    ("hf", "a", *BYTES, "--prompts", "nowhere"): "--prompts nowhere: cannot be read",
    ("hf", "--prompts", "wrong.jsonl"): 'wrong.jsonl: line 2: expected a JSON object with a string "prompt"',
    ("hf", "a", *BYTES, "--tensor-parallel-degree", "3"): "= 3: expected a divisor of model.n_heads = 4",
    ("hf", "a", *BYTES, "--expert-parallel"): "--expert-parallel: the model has no experts",
    (): "the following arguments are required: FOLDER",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_arguments_are_lines(arguments: tuple[str, ...], hf_folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(hf_folder.parent)
    os.mkfifo("pipe")
    Path("long.txt").write_text("x" * 2_000_000)
    Path("wrong.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    status, output, errors = run(capsys, *arguments)
    assert (status, output) == (2, "")
    assert WRONG[arguments] in errors[0]
    assert len(errors) == (2 if "3" in arguments else 1)  # 4 heads and 2 KV heads cannot be shared by 3 ranks


def test_the_keys_and_values_have_room_in_memory():
    options = mock.Mock(n_layers=2**10, n_kv_heads=2**10, head_dim=2**10, most_positions=0)
    check_length = functools.partial(command.check_length, options, longest=2, itemsize=0.5)
    check_length(new=1, batch_size=1)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(
        ConfigError, match=f"^--max-new-tokens = 1000000: .* at most {memory // 2**30:,}, in batches of"
    ):
        check_length(new=1_000_000, batch_size=1)


@pytest.mark.parametrize("limit", [{"learned_positions": 8}, {"llama4_scaling_beta": 0.1, "rope_original_seq_len": 8}])
def test_a_text_has_no_more_tokens_than_the_model_has_positions(limit: dict[str, Any]):
    options = Model.model_validate(limit)
    command.check_length(options, longest=2, new=6, batch_size=1, itemsize=0.5)
    with pytest.raises(ConfigError, match="expected at most 8, "):
        command.check_length(options, longest=2, new=7, batch_size=1, itemsize=0.5)


def test_half_of_a_surrogate_pair_is_replaced(assets, tmp_path: Path, capsys):
    """As in a document."""
    build_hf("llama", vocab_size=400).save_pretrained(tmp_path / "hf")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a\udcffb"}))
    arguments = (tmp_path / "hf", "--tokenizer", assets.folder, "--max-new-tokens", 3)
    assert run(capsys, *arguments, "--prompts", tmp_path / "prompts.jsonl") == run(capsys, *arguments, "a\ufffdb")


def test_a_model_with_fewer_tokens_than_the_tokenizer(tmp_path: Path, capsys):
    save_hf(tmp_path)
    status, _, (error,) = run(capsys, tmp_path, "a", *BYTES)
    assert status == 2
    assert '"BOS" has the token 256: expected ids below 60; name its own tokenizer with --tokenizer' in error


def test_an_empty_prompt_needs_a_bos(assets, tmp_path: Path, capsys):
    content = json.loads(assets.file.read_text())
    assets.file.write_text(json.dumps(content | {"post_processor": None}))
    assets.open(eos_token="</s>")
    build_hf("llama", vocab_size=400).save_pretrained(tmp_path / "hf")
    status, _, (error,) = run(capsys, tmp_path / "hf", "a", "", "--tokenizer", assets.folder)
    assert status == 2
    assert 'prompt "": has no tokens, and the tokenizer adds none' in error


def test_a_launch_of_another_size_is_rejected():
    options = mock.Mock(n_heads=4, n_kv_heads=4, ffn_dim=8, vocab_size=12, moe=Moe())
    check = functools.partial(command.check_degree, options, 4, expert_parallel=False)
    check(Launch(0, 0, 1, 1, 0))
    check(Launch(0, 0, 4, 4, 4))
    with pytest.raises(ConfigError, match="at most the 2 devices"):
        check(Launch(0, 0, 1, 1, 2))
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks"):
        check(Launch(0, 0, 2, 2, 0))


def test_experts_that_cannot_be_sharded_are_rejected():
    sizes = {"n_heads": 4, "n_kv_heads": 4, "ffn_dim": 8, "vocab_size": 12, "expert_dim": 8}

    def check(degree: int, expert_parallel: bool, **changes: Any) -> None:
        options = mock.Mock(**{**sizes, "moe": Moe(n_experts=changes.pop("n_experts", 6)), **changes})
        command.check_degree(options, degree, Launch(0, 0, degree, degree, 0), expert_parallel=expert_parallel)

    check(4, False)
    check(2, True)
    check(4, True, n_experts=8, expert_dim=9)
    with pytest.raises(ConfigError, match=r"= 4: expected a divisor of model.moe.n_experts = 6"):
        check(4, True)
    with pytest.raises(ConfigError, match=r"= 4: expected a divisor of model.moe.expert_dim = 9"):
        check(4, False, expert_dim=9)
    with pytest.raises(ConfigError, match="--expert-parallel: only with --tensor-parallel-degree above 1"):
        check(1, True)
