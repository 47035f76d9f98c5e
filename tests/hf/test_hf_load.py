"""Loading a Hugging Face folder: bit for bit transformers' weights under every layout, and hostile folders."""

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.helpers.cases import cases
from tests.helpers.hf import (
    CPU,
    FAMILIES,
    LOGITS_TOLERANCE,
    OURS,
    WITH_EXPERTS,
    build_hf,
    draw_tokens,
    empty_model,
    expected_weights,
    model_options,
    ours,
    save_hf,
    weights,
)
from tests.parallel.test_parity import resolve
from tests.test_model import relative
from titanlite import build
from titanlite.config import Config, ConfigError
from titanlite.config.schema import Model
from titanlite.hf import load
from titanlite.hf.load import INDEX, SINGLE, load_hf_weights
from titanlite.hf.names import hf_name, hf_names, named_weights
from titanlite.parallel import mesh

SMALL_FILES = {"max_shard_size": "20KB"}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_logits_are_those_of_transformers(family: str, tmp_path: Path):
    hf, options = save_hf(tmp_path, family), Model(flavor="from_hf", hf_assets_path=str(tmp_path))
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    expected = expected_weights(hf, model, options)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_weights(model).items())
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) < LOGITS_TOLERANCE


def test_other_orders_of_rows_would_show(tmp_path: Path, monkeypatch):
    hf, options = save_hf(tmp_path), model_options()
    model = empty_model(options)
    monkeypatch.setattr(load, "hf_rows", lambda name, rows, options: rows)
    load_hf_weights(tmp_path, model, options)
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) > 1e-2


TENSOR_OF_EACH = [family for family in WITH_EXPERTS if family != "gpt_oss"]
"""Families with a tensor for each expert."""


@pytest.mark.parametrize("family", TENSOR_OF_EACH)
@pytest.mark.parametrize("bug", ["another order of experts", "w1 and w3 swapped"])
def test_other_experts_would_show(bug: str, family: str, tmp_path: Path, monkeypatch):
    hf, options, real = save_hf(tmp_path, family), model_options(family), load.hf_names
    swapped = {"experts.w1": "experts.w3", "experts.w3": "experts.w1"} if bug.startswith("w1") else {}

    def changed(name: str, options: Model) -> list[str]:
        end = name[-len("experts.w1") :]
        names = real(name.removesuffix(end) + swapped.get(end, end), options)
        return names if swapped else names[::-1]

    monkeypatch.setattr(load, "hf_names", changed)
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) > 1e-2


def test_other_biases_of_experts_would_show(tmp_path: Path):
    hf, options = save_hf(tmp_path, "deepseek_v3"), model_options("deepseek_v3")
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    for layer in ("1", "2"):
        model.layers[layer].feed_forward.router.balance_bias.zero_()
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) > 1e-2


def test_several_files_are_as_good_as_one(tmp_path: Path):
    hf, options = save_hf(tmp_path, **SMALL_FILES), model_options()
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    expected = expected_weights(hf, model, options)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_weights_are_cast_to_the_dtype_of_the_parameters(saved: torch.dtype, dtype: torch.dtype, tmp_path: Path):
    hf, options = save_hf(tmp_path, dtype=saved), model_options()
    model = empty_model(options, dtype)
    load_hf_weights(tmp_path, model, options)
    for name, expected in expected_weights(hf, model, options).items():
        assert torch.equal(model.get_parameter(name), expected.to(dtype))


def test_frequencies_that_old_versions_saved_are_ignored(tmp_path: Path):
    save_hf(tmp_path)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    change(tmp_path / SINGLE, {"model.rotary_emb.inv_freq": torch.ones(4), **extra})
    load_hf_weights(tmp_path, empty_model(model_options()), model_options())


@pytest.mark.parametrize("family", FAMILIES)
def test_names_may_lack_the_prefix_of_the_model(family: str, tmp_path: Path):
    hf, options = save_hf(tmp_path, family), model_options(family)
    tensors = {re.sub(r"^(model|transformer)\.", "", name): each for name, each in load_file(tmp_path / SINGLE).items()}
    save_file({**tensors, "rotary_emb.inv_freq": torch.ones(4)}, tmp_path / SINGLE)
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    expected = expected_weights(hf, model, options)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_weights(model).items())


def test_a_tied_model_may_have_its_embedding_twice(tmp_path: Path):
    hf, options = save_hf(tmp_path, "llama, tied"), model_options("llama, tied")
    change(tmp_path / SINGLE, {"lm_head.weight": hf.lm_head.weight.detach().clone()})
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    assert torch.equal(model.output.weight, hf.lm_head.weight)


# Layouts -------------------------------------------------------------------------------------------------------------

SHARD, TP, PP = ({f"{name}_parallel_degree": 2} for name in ("data_parallel_shard", "tensor", "pipeline"))
NORMS_AND_BIASES = {"model__qk_norm": True, "model__attention_bias": "all", "model__head_dim": 16}
EP = {"expert_parallel_degree": 2}
QWEN3_MOE, MIXTRAL, OLMOE, DEEPSEEK, DEEPSEEK_V2 = (
    {f"model__moe__{key}": value for key, value in FAMILIES[family][0]["moe"].items()}
    for family in ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "deepseek_v2")
)
QWEN3_MOE |= {"model__qk_norm": True}
OLMOE |= {"model__qk_norm": "all_heads"}
DEEPSEEK |= {f"model__mla__{key}": value for key, value in FAMILIES["deepseek_v3"][0]["mla"].items()}
DEEPSEEK |= {"model__n_kv_heads": 4, "model__norm_eps": 1e-6}
GPT_OSS = {f"model__moe__{key}": value for key, value in FAMILIES["gpt_oss"][0]["moe"].items()}
GPT_OSS |= {"model__attention_sinks": True, "model__attention_bias": "all", "model__head_dim": 16}
DEEPSEEK_V2 = DEEPSEEK | DEEPSEEK_V2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {}),
    # one KV head of 8 channels: the ranks have 2 of its rows each
    "shard 4, heads are cut": (4, {"model__n_kv_heads": 1}),
    # 60 rows of the vocabulary, 48 and 16 of others: 3 ranks have unequal shards, and cut the heads of 8 channels
    "shard 3, uneven": (3, {"model__n_kv_heads": 2}),
    "tp 2": (2, TP),
    "shard x tp": (4, {**TP, "data_parallel_shard_degree": 2}),
    "HSDP": (4, {"data_parallel_replicate_degree": 2}),
    "pp 2": (2, {**PP, "training__local_batch_size": 2}),
    "pp x tp, two stages per rank": (
        4,
        {**PP, **TP, "pipeline_parallel_schedule": "Interleaved1F1B", "model__n_layers": 5},
    ),
    "tp 2, tied": (2, {**TP, "model__tie_embeddings": True}),
    "shard x tp, norms and biases": (4, {**TP, "data_parallel_shard_degree": 2, **NORMS_AND_BIASES}),
    "shard 4, norms and biases, heads are cut": (4, {**NORMS_AND_BIASES, "model__n_kv_heads": 1}),
    "shard 2, CPU offload": (2, {"training__enable_cpu_offload": True}),
    "qwen3_moe, shard 4, a rank has no expert": (4, QWEN3_MOE),
    "qwen3_moe, shard 4 x ep": (4, QWEN3_MOE | EP),
    "mixtral, tp 2": (2, MIXTRAL | TP),
    "mixtral, shard x tp, ep": (4, MIXTRAL | TP | EP | {"data_parallel_shard_degree": 2}),
    "olmoe, tp 2, ep": (2, OLMOE | TP | EP),
    "olmoe, pp x shard": (4, OLMOE | PP | {"data_parallel_shard_degree": 2}),
    "deepseek_v3, shard x tp, ep": (4, DEEPSEEK | TP | EP | {"data_parallel_shard_degree": 2}),
    "gpt_oss, shard x tp, ep": (4, GPT_OSS | TP | EP | {"data_parallel_shard_degree": 2}),
    "gpt_oss, shard x tp": (4, GPT_OSS | TP | {"data_parallel_shard_degree": 2}),
    "deepseek_v3, pp x shard": (4, DEEPSEEK | PP | {"data_parallel_shard_degree": 2}),
    "deepseek_v2, shard x tp, ep": (4, DEEPSEEK_V2 | TP | EP | {"data_parallel_shard_degree": 2}),
}
LAYOUTS |= {
    f"{family}, {name}": (world_size, options | layout)
    for family, options in (
        *(("qwen3_moe", QWEN3_MOE), ("mixtral", MIXTRAL), ("olmoe", OLMOE), ("deepseek_v3", DEEPSEEK)),
        ("gpt_oss", GPT_OSS),
    )
    for name, world_size, layout in (
        ("shard 2", 2, {}),
        ("shard 3, uneven", 3, {}),
        ("shard 2, ep", 2, EP),
        ("HSDP", 4, {"data_parallel_replicate_degree": 2}),
        ("shard x tp", 4, {**TP, "data_parallel_shard_degree": 2}),
        ("shard x tp, ep", 4, {**TP, **EP, "data_parallel_shard_degree": 2}),
        ("pp x tp", 4, {**PP, **TP}),
        ("pp x shard, ep", 4, {**PP, **EP, "data_parallel_shard_degree": 2}),
        ("shard 2, CPU offload", 2, {"training__enable_cpu_offload": True}),
    )
    if f"{family}, {name}" not in LAYOUTS
}


class CountedSlice:
    """A slice of a safetensors file that counts the elements that are read of it."""

    def __init__(self, tensor: Any, counts: list[int]):
        self.tensor, self.counts = tensor, counts

    def get_shape(self) -> list[int]:
        return self.tensor.get_shape()

    def __getitem__(self, key: Any) -> torch.Tensor:
        result = self.tensor[key]
        self.counts.append(result.numel())
        return result


def load_on_a_rank(job: Config, folder: Path) -> tuple[dict[str, torch.Tensor], set[str], int, int]:
    """Load a folder into this rank's modules.

    Returns:
        The full weights of this rank's parameters, the files that it opened, and the numbers of elements that it read
        and has.
    """
    layout = mesh.build_layout(job.parallelism, CPU)
    model, _ = build.build_model(job, layout, CPU)
    opened: set[str] = set()
    counts: list[int] = []
    real_open, real_fill, real_read, real_stacked = load.open_safetensors, load._fill, load._read, load.read

    def n_of(name: str, parameter: Any) -> int:
        """Return the elements that are read: w1 and w3 of gpt-oss are columns of one tensor in turn."""
        in_turn = job.model.moe.expert_bias and ".experts.w" in name and ".w2" not in name
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() * (1 + in_turn)

    def recorded_open(file: Path) -> Any:
        opened.add(file.name)
        return real_open(file)

    def recorded_fill(parameter: Any, name: str, files: dict[str, Path], options: Any) -> None:
        before = sum(counts)
        real_fill(parameter, name, files, options)
        if ".experts." in name:
            assert sum(counts) - before <= n_of(name, parameter), "read what is not of this rank"
            assert sum(counts) - before >= parameter.to_local().numel()

    def recorded_read(tensor: Any, ranges: Any) -> torch.Tensor:
        return real_read(CountedSlice(tensor, counts), ranges)

    def recorded_stacked(name: str, slices: list[Any], *indices: Any) -> Any:
        return real_stacked(name, [CountedSlice(tensor, counts) for tensor in slices], *indices)

    recorded = {"_fill": recorded_fill, "_read": recorded_read, "read": recorded_stacked}
    with mock.patch.multiple(load, open_safetensors=recorded_open, **recorded):
        load_hf_weights(folder, model, job.model)
    tensors = named_weights(model)
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in tensors.items()}
    n_local = sum(n_of(name, p) for name, p in tensors.items())
    return {name: tensor.detach().clone() for name, tensor in full.items()}, opened, sum(counts), n_local


@cases(
    "name",
    LAYOUTS,
    always=[
        *("shard 4, norms and biases, heads are cut", "tp 2, tied", "pp x tp, two stages per rank", "mixtral, tp 2"),
        *("qwen3_moe, shard 4 x ep", "deepseek_v3, shard x tp, ep", "gpt_oss, shard x tp, ep"),
    ],
)
def test_every_layout_loads_the_same_weights(name: str, ranks, tmp_path: Path):
    world_size, layout = LAYOUTS[name]
    settings = {"training__dtype": "float32", "training__local_batch_size": 4, **layout}
    job = resolve(tmp_path, world_size, settings)
    sizes = {"num_hidden_layers": job.model.n_layers, "vocab_size": job.model.vocab_size}
    sizes |= {"num_key_value_heads": job.model.n_kv_heads, "tie_word_embeddings": job.model.tie_embeddings}
    family = name.split(",")[0] if job.model.moe.n_experts else "qwen3, biases" if job.model.qk_norm else "llama"
    if job.model.head_dim * job.model.n_heads == job.model.dim and "head_dim" in FAMILIES[family][2]:
        sizes["head_dim"] = job.model.head_dim
    hf = build_and_save(tmp_path / "hf", family, sizes)
    theirs, loaded = weights(hf), set()
    for actual, opened, n_read, n_local in ranks(world_size).run(load_on_a_rank, job=job, folder=tmp_path / "hf"):
        # The rows that cover a cut head are at most all of it: at both ends, of q and k and their norms in 3 layers.
        cut = 2 * job.model.head_dim * 2 * 3 * (job.model.dim + 2)
        assert n_local <= n_read or job.model.moe.expert_bias  # whose last row of ups has no row behind it
        assert n_read <= n_local + (cut if "shard" in name or "HSDP" in name else 0)
        assert opened
        for name_of_ours, weight in actual.items():
            assert torch.equal(weight, ours(name_of_ours, theirs, job.model)), name_of_ours
        loaded |= actual.keys()
    read = {each for name_of_ours in loaded for each in hf_names(name_of_ours, job.model)}
    assert read == theirs.keys()


def build_and_save(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    hf = build_hf(family, **settings)
    hf.save_pretrained(folder, **SMALL_FILES)
    return hf


def test_a_pipeline_rank_opens_only_files_with_its_layers(ranks, tmp_path: Path):
    job = resolve(tmp_path, 2, {**PP, "training__dtype": "float32"})
    build_and_save(tmp_path / "hf", "llama", {})
    files = json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]
    results = ranks(2).run(load_on_a_rank, job=job, folder=tmp_path / "hf")
    for loaded, opened, _, _ in results:
        assert opened == {files[hf_name(parameter, job.model)] for parameter in loaded}
    assert results[0][1] != results[1][1]


def test_a_rank_that_cannot_read_its_files_raises_alone(ranks, tmp_path: Path):
    """The ranks do not communicate, so the others can be told."""
    job = resolve(tmp_path, 2, {**PP, "training__dtype": "float32"})
    build_and_save(tmp_path / "hf", "llama", {})
    files = json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]
    (tmp_path / "hf" / files["lm_head.weight"]).write_bytes(b"")
    first, last = ranks(2).run(problem_on_a_rank, job=job, folder=tmp_path / "hf")
    assert first is None
    assert files["lm_head.weight"] in last


def problem_on_a_rank(job: Config, folder: Path) -> str | None:
    """Return the ConfigError of loading a folder on this rank."""
    model, _ = build.build_model(job, mesh.build_layout(job.parallelism, CPU), CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        load_hf_weights(folder, model, job.model)
    except ConfigError as error:
        assert all(torch.equal(p.detach().to_local(), before[n].to_local()) for n, p in model.named_parameters())
        return str(error)
    return None


# Folders that are rejected -------------------------------------------------------------------------------------------


def change(file: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a file, or remove those that are None."""
    content = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, file)


def write_header(file: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(folder: Path, content: Any) -> None:
    """Replace the single file by an index and a file that it does not name."""
    with contextlib.suppress(FileNotFoundError):
        (folder / SINGLE).rename(folder / "weights.safetensors")
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())


def weight_map(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return an index of all tensors of the single file, with some of its entries changed."""
    names = load_file(folder / SINGLE)
    entries = {**dict.fromkeys(names, "weights.safetensors"), **changes}
    return {"weight_map": {name: file for name, file in entries.items() if file is not None}}


def only_pickles(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-100])


def one_tensor(**header: Any) -> Callable[[Path], None]:
    entry = {"dtype": "F32", "shape": [32], "data_offsets": [0, 128], **header}
    return lambda folder: write_header(folder / SINGLE, {"model.norm.weight": entry}, bytes(128))


def tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: change(folder / SINGLE, {name: value})


def index(content: Any) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, content)


def entry(file: Any, name: str = DOWN) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, weight_map(folder, **{name: file}))


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an empty folder": (lambda folder: (folder / SINGLE).unlink(), "expected the folder of a Hugging Face model"),
    "no folder": (shutil.rmtree, "expected the folder of a Hugging Face model"),
    "pickles": (only_pickles, "convert them to safetensors"),
    "both an index and a single file": (
        lambda folder: (folder / INDEX).write_text("{}"), "has both model.safetensors and"),
    "a folder instead of the file": (
        lambda folder: ((folder / SINGLE).unlink(), (folder / SINGLE).mkdir()),
        "expected the folder of a Hugging Face model"),
    "a pipe": (
        lambda folder: (entry("pipe.safetensors")(folder), os.mkfifo(folder / "pipe.safetensors")), "no such file"),
    "no bytes": (lambda folder: (folder / SINGLE).write_bytes(b""), "cannot be read as safetensors"),
    "truncated": (truncate, "cannot be read as safetensors"),
    "a header of 2^63 bytes": (
        lambda folder: (folder / SINGLE).write_bytes(struct.pack("<Q", 2**63) + b"{}"),
        "cannot be read as safetensors"),
    "a header that is no JSON": (
        lambda folder: write_header(folder / SINGLE, b"\x80\x04}q\x00."), "cannot be read as safetensors"),
    "a deeply nested header": (
        lambda folder: write_header(folder / SINGLE, b'{"a":' * 10**5), "cannot be read as safetensors"),
    "a header that is a list": (lambda folder: write_header(folder / SINGLE, []), "cannot be read as safetensors"),
    "bytes outside of the file": (one_tensor(data_offsets=[64, 192]), "cannot be read as safetensors"),
    "bytes before the file": (one_tensor(data_offsets=[-128, 0]), "cannot be read as safetensors"),
    "fewer bytes than the shape": (one_tensor(shape=[64]), "cannot be read as safetensors"),
    "a shape beyond 64 bits": (one_tensor(shape=[2**62, 2**62]), "cannot be read as safetensors"),
    "an unknown dtype": (one_tensor(dtype="F33"), "cannot be read as safetensors"),
    "an index that is no JSON": (index("{"), "not valid JSON"),
    "an index that is not UTF-8": (index(b"\xff\xfe{}"), "not valid JSON"),
    "a deeply nested index": (index("[" * 10**5), "not valid JSON"),
    "an index that is a list": (index([1]), "expected a JSON object"),
    "an index without a map": (index({"metadata": {}}), 'expected an object with "weight_map"'),
    "a map that is a list": (index({"weight_map": ["a"]}), 'expected an object with "weight_map"'),
    "an empty map": (index({"weight_map": {}}), 'lacks "lm_head.weight" and 29 other tensors'),
    "a number for a file": (entry(3), "weight_map has 3 for"),
    "a folder for a file": (entry("../weights.safetensors"), "weight_map has \"../weights.safetensors\""),
    "an absolute path": (entry("/etc/passwd.safetensors"), "weight_map has \"/etc/passwd.safetensors\""),
    "another system's path": (entry("a\\weights.safetensors"), "expected the name of a .safetensors file"),
    "a pickle in the index": (entry("weights.bin"), "weight_map has \"weights.bin\""),
    "a line break in a name": (entry("a\nb.safetensors"), "weight_map has \"a\\nb.safetensors\""),
    "a file that is not there": (entry("other.safetensors"), "other.safetensors: no such file"),
    "a tensor in the index alone": (
        lambda folder: (entry("weights.safetensors")(folder), change(folder / "weights.safetensors", {DOWN: None})),
        f'weights.safetensors: lacks "{DOWN}", which model.safetensors.index.json says it has'),
    "a missing tensor": (tensor(DOWN, None), f'lacks "{DOWN}", which the model needs'),
    "no output head": (tensor("lm_head.weight", None), "unless model.tie_embeddings = true"),
    "another tensor": (
        tensor("model.layers.0.self_attn.q_proj.lora_A", torch.ones(4)),
        'has "model.layers.0.self_attn.q_proj.lora_A", which the model lacks'),
    "a layer too many": (tensor("model.layers.3.input_layernorm.weight", torch.ones(32)), "which the model lacks"),
    "quantized": (tensor(DOWN.replace("weight", "weight_scale"), torch.ones(1)), "quantized weights are not read"),
    "another shape": (
        tensor(DOWN, torch.ones(48, 32)), f"{DOWN} has shape [48, 32], and the model needs [32, 48]"),
    "another number of dimensions": (tensor(DOWN, torch.ones(32 * 48)), "has shape [1536]"),
    "integers": (tensor(DOWN, torch.ones(32, 48, dtype=torch.int8)), f"{DOWN} has dtype I8: expected one of F32"),
    "float64": (tensor(DOWN, torch.ones(32, 48, dtype=torch.float64)), f"{DOWN} has dtype F64: expected one of F32"),
    "float8": (tensor(DOWN, torch.ones(32, 48).to(torch.float8_e4m3fn)), f"{DOWN} has dtype F8_E4M3"),
}  # fmt: skip
"""What is done to a good folder, and a phrase of the line."""


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_folder_is_one_line_and_changes_no_weight(case: str, tmp_path: Path):
    spoil, phrase = HOSTILE[case]
    options = model_options()
    save_hf(tmp_path / "hf")
    model = empty_model(options)
    load_hf_weights(tmp_path / "hf", model, options)  # the folder is good
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    spoil(tmp_path / "hf")
    with pytest.raises(ConfigError) as caught:
        load_hf_weights(tmp_path / "hf", model, options)
    (line,) = caught.value.problems
    assert phrase in line
    assert str(tmp_path / "hf") in line
    assert "\n" not in line
    assert all((parameter == 7).all() for parameter in model.parameters())


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_a_number_that_is_not_finite_is_one_line(family: str, number: float, tmp_path: Path):
    """The line names the tensor, an expert's and a bias's too, and its file among several."""
    save_hf(tmp_path, family, max_shard_size="20KB")
    options, files = model_options(family), json.loads((tmp_path / INDEX).read_text())["weight_map"]
    expert = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    name = {"mixtral": expert, "deepseek_v3": bias}.get(family, DOWN)
    changed = load_file(tmp_path / files[name])[name]
    changed.flatten()[-1] = number
    change(tmp_path / files[name], {name: changed})
    with pytest.raises(ConfigError) as caught:
        load_hf_weights(tmp_path, empty_model(options), options)
    (line,) = caught.value.problems
    problem = f"{tmp_path / files[name]}: {name} has a number that is NaN or infinite; expected finite ones; "
    assert line == f"{problem}download or export the file again, or take another model"


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path, capsys):
    """Released files of DeepSeek-V3 have a layer behind the last one, with tensors of its own besides a block's."""
    hf, options = save_hf(tmp_path, "deepseek_v3"), model_options("deepseek_v3")
    further = {
        "model.layers.3.eh_proj.weight": torch.ones(32, 64),
        "model.layers.3.embed_tokens.weight": torch.ones(60, 32),
        "model.layers.3.mlp.experts.0.gate_proj.weight": torch.ones(16, 32),
        "model.layers.3.shared_head.head.weight": torch.ones(60, 32),
    }
    change(tmp_path / SINGLE, further)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(config))
    model = empty_model(options)
    load_hf_weights(tmp_path, model, options)
    expected = expected_weights(hf, model, options)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_weights(model).items())
    words = "skipped 4 tensors of layers for multi-token prediction, from layer 3 on"
    assert capsys.readouterr().err.endswith(f"{tmp_path}: {words}\n")
    for number in (0, None, "1"):
        file.write_text(json.dumps({**config, "num_nextn_predict_layers": number}))
        with pytest.raises(
            ConfigError, match=r'has "model.layers.3.eh_proj.weight" and 3 other tensors, which the model'
        ):
            load_hf_weights(tmp_path, model, options)


def test_what_deepseek_has_in_other_ways_is_rejected(tmp_path: Path):
    save_hf(tmp_path, "deepseek_v3")
    file, options = tmp_path / "config.json", model_options("deepseek_v3")
    without = options.model_copy(update={"moe": options.moe.model_copy(update={"balance_bias": False})})
    with pytest.raises(
        ConfigError, match=r'mlp.gate.e_score_correction_bias" and 1 other tensors, which the model lacks'
    ):
        load_hf_weights(tmp_path, empty_model(without), without)
    config = file.read_text()
    file.write_text(json.dumps({**json.loads(config), "rope_interleave": False}))
    with pytest.raises(ConfigError, match=r"config.json: rope_interleave = false: expected true"):
        load_hf_weights(tmp_path, empty_model(options), options)
    file.write_text(config)
    scale = {"model.layers.0.mlp.down_proj.weight_scale_inv": torch.ones(1, 1)}
    change(tmp_path / SINGLE, scale)
    with pytest.raises(ConfigError, match=r"quantized weights are not read; take or make ones in bfloat16"):
        load_hf_weights(tmp_path, empty_model(options), options)


@pytest.mark.parametrize("family", TENSOR_OF_EACH)
def test_a_missing_expert_is_rejected(family: str, tmp_path: Path):
    save_hf(tmp_path, family)
    name = hf_names("layers.2.feed_forward.experts.w2", model_options(family))[3]
    change(tmp_path / SINGLE, {name: None})
    with pytest.raises(ConfigError, match=f'lacks "{name}", which the model needs'):
        load_hf_weights(tmp_path, empty_model(model_options(family)), model_options(family))


def test_experts_in_one_tensor_are_rejected(tmp_path: Path):
    save_hf(tmp_path, "olmoe", save_original_format=False)
    with pytest.raises(ConfigError) as caught:
        load_hf_weights(tmp_path, empty_model(model_options("olmoe")), model_options("olmoe"))
    (line,) = caught.value.problems
    assert 'has "model.layers.0.mlp.experts.gate_up_proj" and 2 other tensors: expected a tensor for each' in line


def test_a_tied_model_with_another_output_head_is_rejected(tmp_path: Path):
    hf, options = save_hf(tmp_path, "llama, tied"), model_options("llama, tied")
    head = hf.lm_head.weight.detach().clone()
    head[59, 31] += 1
    change(tmp_path / SINGLE, {"lm_head.weight": head})
    model = empty_model(options)
    with pytest.raises(ConfigError, match=r"differs from model.embed_tokens.weight.*set model.tie_embeddings = false"):
        load_hf_weights(tmp_path, model, options)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    change(tmp_path / SINGLE, {"lm_head.weight": head[:, :16].contiguous()})
    with pytest.raises(ConfigError, match=r"lm_head.weight has shape \[60, 16\]"):
        load_hf_weights(tmp_path, model, options)


def test_a_model_without_the_options_of_the_folder_is_rejected(tmp_path: Path):
    save_hf(tmp_path)
    options = model_options(n_layers=OURS["n_layers"] - 1)
    with pytest.raises(ConfigError, match=r'input_layernorm\.weight" and 8 other tensors, which'):
        load_hf_weights(tmp_path, empty_model(options), options)
