"""What titanlite reads and others may have written: of each a strategy of inputs, and what must be true of those that
are accepted."""

import contextlib
import copy
import functools
import gzip
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.helpers import checkpoint as checkpoint_helpers
from tests.helpers import hf as hf_helpers
from tests.helpers.config import OPTIONS, ROOT, on
from tests.helpers.data import BYTES, source, write
from tests.helpers.lock_holder import open_lock
from titanlite import config
from titanlite.checkpoint.files import bytes_of
from titanlite.checkpoint.manifest import MANIFEST, STATE
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.hf import config_json
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Model
from titanlite.data import cache_builder, token_shards
from titanlite.data.documents import open_dataset, read_documents
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.open import open_cache
from titanlite.files.durable import checksum
from titanlite.hf.load import INDEX, SINGLE, load_hf_weights
from titanlite.hf.names import from_hf, hf_name, named_weights
from titanlite.launch import folder_lock
from titanlite.metrics import logger as metrics
from titanlite.metrics.devices import find_device
from titanlite.techniques.data.chat_template import ChatTemplate
from titanlite.tools.generate.folder import ModelFolder
from titanlite.tools.plan.measured_rates import collective_seconds, seconds_at, work_seconds
from titanlite.tools.plan.op_trace import Work
from verification.fuzz.mutations import TOML, changed, damaged, json_files, safetensors_files, to_json, toml_files

Check = Callable[[Any], None]
"""Reads an input. Raises ConfigError or TrainingError for a wrong one, and AssertionError if what it accepts is not
what it should be."""
TARGETS: dict[str, Callable[[Path], tuple[st.SearchStrategy[Any], Check]]] = {}
"""Each returns the inputs and the check of one reader, which writes files into the folder."""


def target(function: Any) -> Any:
    TARGETS[function.__name__] = function
    return function


def forged(value: Any, *, sort_keys: bool) -> bytes:
    """Return a JSON object with the checksum of its content, as an attacker would write it."""
    own = {"xxh3_64": checksum(json.dumps(value, sort_keys=sort_keys).encode())}
    return to_json({**value, **own} if isinstance(value, dict) else value)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


@target
def config_file(folder: Path) -> Any:
    """A TOML file and overrides. What is accepted is the same when it is read from the config.toml of the run."""
    shipped = st.sampled_from(sorted((ROOT / "configs").glob("debug*.toml"))).map(Path.read_bytes).flatmap(toml_files)
    values = TOML.map(bytes.decode)
    texts = st.one_of(values, st.text(max_size=12)).filter(lambda text: "\0" not in text)

    def about(options: list[str]) -> st.SearchStrategy[tuple[bytes, list[str]]]:
        """Return files and arguments about a few options and their sections, so that they meet."""
        keys = st.sampled_from([*options, *(key.rpartition(".")[0] for key in options), "x", f"{options[0]}.x"])
        lines = st.lists(st.builds("{} = {}".format, keys, values), max_size=3).map("\n".join)
        arguments = st.one_of(st.builds("--{}={}".format, keys, texts), texts.map("-{}".format))
        return st.tuples(st.one_of(lines.map(str.encode), shipped), st.lists(arguments, max_size=2))

    def check(data: tuple[bytes, list[str]]) -> None:
        write_files(folder, {"run.toml": data[0]})
        loaded = config.load([str(folder / "run.toml"), *data[1]])
        degrees = loaded.config.parallelism
        launch = on(degrees.ranks_per_shard * abs(degrees.data_parallel_shard_degree))
        for accepted in (loaded.config, config.check(loaded, launch)):
            write_files(folder, {"config.toml": accepted.toml().encode()})
            assert config.load([str(folder / "config.toml")]).config == accepted

    return st.lists(st.sampled_from([*OPTIONS]), min_size=1, max_size=3).flatmap(about), check


@target
def hf_config_json(folder: Path) -> Any:
    """A config.json of each family. What is accepted is a model, and is the same when it is exported and read."""
    families = [{**hf_helpers.THEIRS, **keys, "model_type": kind} for _, kind, keys in hf_helpers.FAMILIES.values()]

    def check(data: bytes) -> None:
        write_files(folder, {"config.json": data})
        model = Model.model_validate(config_json.model_options(folder))
        exported = config_json.hf_config(model, max_seq_len=16, torch_dtype="float32", bos=None, eos=0)
        write_files(folder, {"config.json": to_json(exported)})
        assert Model.model_validate(config_json.model_options(folder)) == model
        loaded = config.load(["debug", "--model.flavor=from_hf", f"--model.hf_assets_path={folder}"])
        assert loaded.config.model.dim == model.dim

    return st.sampled_from(families).flatmap(json_files), check


@target
def generation_config_json(folder: Path) -> Any:
    """A generation_config.json. What is accepted names token ids."""
    model = ModelFolder(folder, hf_helpers.model_options(), torch.float32, True, {})

    def check(data: bytes) -> None:
        write_files(folder, {"generation_config.json": data})
        tokens = model.stop_tokens(SimpleNamespace(eos=5))  # type: ignore[arg-type]
        assert 5 in tokens
        assert all(type(token) is int for token in tokens)

    return json_files({"eos_token_id": [5, 7]}) | json_files({"eos_token_id": 7}), check


@target
def hf_weights(folder: Path) -> Any:
    """A model.safetensors, or an index and two files. What is accepted has the weights that safetensors reads."""
    options = hf_helpers.model_options(n_layers=1)
    own = named_weights(hf_helpers.empty_model(options))
    weights = [
        (hf_name(name, options), torch.arange(tensor.numel()).view(tensor.shape) / 64) for name, tensor in own.items()
    ]
    files = {
        name: safetensors.torch.save(dict(half))
        for name, half in (("a.safetensors", weights[:3]), ("b.safetensors", weights[3:]))
    }
    index = {"weight_map": {name: min(files) if i < 3 else max(files) for i, (name, _) in enumerate(weights)}}
    single = safetensors.torch.save(dict(weights))

    def check(data: tuple[str, bytes]) -> None:
        for path in folder.iterdir():
            path.unlink()
        written = dict([data]) if data[0] == SINGLE else {INDEX: to_json(index), **files, data[0]: data[1]}
        write_files(folder, written)
        model, found = hf_helpers.empty_model(options), dict[str, torch.Tensor]()
        load_hf_weights(folder, model, options)
        for name in written.keys() - {INDEX}:
            found |= safetensors.torch.load(written[name])
        for name, tensor in named_weights(model).items():
            expected = from_hf(name, found[hf_name(name, options)], options).to(tensor.dtype)
            assert bytes(bytes_of(tensor.detach())) == bytes(bytes_of(expected)), name  # as NaN differs from NaN

    cases = [st.tuples(st.just(name), safetensors_files(data)) for name, data in {SINGLE: single, **files}.items()]
    return st.one_of(st.tuples(st.just(INDEX), json_files(index)), *cases), check


@st.composite
def moved(draw: Any, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest in which a slice is elsewhere, is there twice or not at all, or two overlap: they cover a
    smaller tensor."""
    manifest = copy.deepcopy(manifest)
    layouts = manifest["layouts"]
    entry = draw(st.sampled_from([each for each in manifest["tensors"].values() if len(layouts[each["layout"]]) > 1]))
    slices = layouts[entry["layout"]]
    place = draw(st.integers(0, len(slices) - 1))
    how, distance = draw(st.sampled_from(["move", "overlap", "repeat", "remove"])), draw(st.integers(-3, 3))
    if how == "move":
        offset = slices[place][1]
        offset[draw(st.integers(0, len(offset) - 1))] += distance
    elif how == "overlap":
        slices[-1][1][0] += distance
        entry["shape"][0] += distance
    elif how == "repeat":
        slices.append(slices[place])
    else:
        del slices[place]
    return manifest


@target
def checkpoint(folder: Path) -> Any:
    """A manifest, a state.json or a file of tensors, of which the manifest has the checksums. Each tensor of what is
    accepted has the bytes that are in the files, all of them, once."""
    values = {"a": torch.arange(24.0).view(6, 4), "b": torch.ones(4, 3).bfloat16(), "step": torch.tensor(3.0)}
    path = checkpoint_helpers.write_checkpoint(folder / "step-7", values)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    manifest = json.loads(files[MANIFEST])
    del manifest["xxh3_64"]

    def stored(file: str, name: str, dtype: torch.dtype) -> torch.Tensor:
        content = (path / file).read_bytes()
        tensors = 8 + int.from_bytes(content[:8], "little")
        begin, end = json.loads(content[8:tensors])[name]["data_offsets"]
        return torch.frombuffer(bytearray(content[tensors:][begin:end]), dtype=dtype)

    def check(data: tuple[str, bytes]) -> None:
        write_files(path, {**files, data[0]: data[1]})
        if data[0] != MANIFEST:
            checkpoint_helpers.replace_file(path, *data)
        reader = CheckpointReader(path)
        read = {name: reader.read(name) for name in reader.shapes}
        assert sum(reader.verify()) >= sum(tensor.nbytes for tensor in read.values())
        assert reader.state["step"] == 7
        for name, tensor in read.items():
            expected = torch.empty(reader.shapes[name], dtype=reader.dtypes[name])
            count = torch.zeros(tensor.shape, dtype=torch.int)
            for number, offset, size in reader.manifest.layouts[reader.manifest.tensors[name].layout]:
                place = tuple(slice(begin, begin + n) for begin, n in zip(offset, size, strict=True))
                expected[place] = stored(reader.manifest.file_names[number], name, tensor.dtype).view(size)
                count[place] += 1
            assert bytes(bytes_of(tensor)) == bytes(bytes_of(expected))
            assert (count == 1).all()

    manifests = (changed(manifest) | moved(manifest)).map(functools.partial(forged, sort_keys=True))
    cases = {MANIFEST: manifests | damaged(files[MANIFEST]), STATE: json_files(json.loads(files[STATE]))}
    cases |= {name: safetensors_files(files[name]) for name in checkpoint_helpers.FILES}
    return st.one_of([st.tuples(st.just(name), inputs) for name, inputs in cases.items()]), check


@target
def token_cache(folder: Path) -> Any:
    """A tokens.json or a shard. Whatever the damage is, the cache has the same tokens: it is built again. An attacker
    can write other numbers into tokens.json; then as many tokens as it says can be read."""
    dataset = source("json", write(folder / "a.jsonl", [f"text {number}" for number in range(30)]))
    fast = functools.partial(folder_lock.FolderLock, beat_seconds=0.001)

    @mock.patch.object(cache_builder, "FolderLock", fast)
    def build_and_read() -> tuple[token_shards.TokenCache, list[Any]]:
        cache = open_cache(dataset, BYTES, 0.25, cache_folder=str(folder / "cache"), builds_cache=True)
        return cache, [cache.tokens(split)[:].tolist() for split in ("train", "validation")]

    cache, expected = build_and_read()
    files = {file.name: file.read_bytes() for file in cache.folder.iterdir()}
    index = json.loads(files[token_shards.INDEX])
    del index["xxh3_64"]

    def check(data: tuple[str, bytes, bool]) -> None:
        write_files(cache.folder, {**files, data[0]: data[1]})
        opened, tokens = build_and_read()
        counts = [(shard.train_tokens, shard.validation_tokens) for shard in opened.index.shards]
        assert [len(split) for split in tokens] == [sum(each) for each in zip(*counts, strict=True)]
        assert data[2] or tokens == expected
        if (cache.folder / data[0]).read_bytes() != data[1]:
            raise ConfigError(["it was built again"])

    cases = [st.tuples(st.just(name), damaged(data), st.just(False)) for name, data in files.items()]
    indexes = changed(index).map(functools.partial(forged, sort_keys=False))
    return st.one_of(st.tuples(st.just(token_shards.INDEX), indexes, st.just(True)), *cases), check


@target
def rows(folder: Path) -> Any:
    """Files of rows. What is accepted is text, and the same text when it is read in two segments."""
    row = {"text": "é", "id": 1}
    lines = st.lists(json_files(row), max_size=4).map(b"\n".join)
    table = write(folder / "seed.parquet", ["a", "é", "b\n", ""] * 2).read_bytes()
    footer = len(table) - 8 - int.from_bytes(table[-8:-4], "little")  # for damaged ones, pyarrow may end the process
    parquet = damaged(table[:footer]).map(lambda pages: pages + table[footer:])
    zipped = lines.map(gzip.compress) | damaged(gzip.compress(to_json(row)))
    names = {"a.jsonl": lines, "a.json": json_files([row] * 3), "a.jsonl.gz": zipped, "a.parquet": parquet}
    names |= {f"{how}.txt": damaged("a\n\né\r\n \n\nb".encode()) for how in ("line", "paragraph", "document")}

    def check(data: tuple[str, bytes]) -> None:
        write_files(folder, dict([data]))
        name, ending = data[0].split(".")[:2]
        how = {"text_sample_by": name} if ending == "txt" else {}
        dataset = source({"txt": "text", "parquet": "parquet"}.get(ending, "json"), folder / data[0], **how)
        for segment in open_dataset(dataset)[0]:
            documents = list(read_documents(dataset, segment))
            assert all(text.encode() is not None for _, text in documents)
            for limit in {0, 1, len(documents) // 2, segment.bytes // 2, segment.bytes}:
                if segment.begin <= limit <= segment.end != 1:
                    halves = [segment._replace(end=limit), segment._replace(begin=limit)]
                    assert [each for half in halves for each in read_documents(dataset, half)] == documents

    return st.one_of([st.tuples(st.just(name), inputs) for name, inputs in names.items()]), check


@target
def tokenizer(folder: Path) -> Any:
    """A tokenizer.json, its settings, a chat template or a row of messages. Of what is accepted each token is one of
    the vocabulary, and no message has a special token."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    built = Tokenizer(models.BPE({text: number for number, text in enumerate(vocabulary)}, [("h", "e")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.add_special_tokens(["<s>", "</s>"])
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}"
    template += (
        "{{ m.content | trim }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    )
    settings = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    row = {"messages": [{"role": "user", "content": "he </s>"}, {"role": "assistant", "content": "<s>é"}]}
    seeds = {"tokenizer.json": json.loads(built.to_str()), "tokenizer_config.json": settings, "a.jsonl": row}

    def check(data: tuple[str, bytes]) -> None:
        write_files(folder, {**{name: to_json(value) for name, value in seeds.items()}, data[0]: data[1]})
        dataset = source("json", folder / "a.jsonl", dataset_format="messages")
        tokenizer = HuggingFaceTokenizer(folder)
        chat = ChatTemplate(tokenizer)
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        counts = list[int]()

        def document(values: dict[str, Any]) -> Any:
            counts.append(1 + len(values["messages"]))  # special tokens of the template: BOS, and EOS of each message
            return chat.document(dataset.training, values, set())[-1]

        for segment in open_dataset(dataset)[0]:
            for _, conversation in read_documents(dataset, segment, document):
                tokens = chat.encode([conversation], "uint32")[0] % 2**31  # type: ignore[list-item]
                assert (tokens < tokenizer.vocab_size).all()
                special = [each for each in tokens.tolist() if each in added and added[each].special]
                assert data[0] != "a.jsonl" or len(special) == counts[-1]

    cases = [st.tuples(st.just(name), json_files(value)) for name, value in seeds.items()]
    templates = damaged(template.encode()).map(
        lambda text: {**settings, "chat_template": text.decode(errors="replace")}
    )
    return st.one_of(*cases, st.tuples(st.just("tokenizer_config.json"), templates.map(to_json))), check


@target
def metrics_jsonl(folder: Path) -> Any:
    """A metrics.jsonl. Every line is kept, moved to metrics.jsonl.damaged, or of a later step."""
    path, aside = folder / "metrics.jsonl", folder / "metrics.jsonl.damaged"

    def step_of(line: bytes) -> Any:
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            step = json.loads(line)["step"]
            return step if type(step) is int else None

    def check(data: bytes) -> None:
        write_files(folder, {path.name: data, aside.name: b""})
        metrics._remove_later_steps(path, 5)
        steps = [(line, step_of(line)) for line in data.split(b"\n") if line]
        assert path.read_bytes() == b"".join(line + b"\n" for line, step in steps if step is not None and step <= 5)
        found = [line for line in aside.read_bytes().split(b"\n") if line]
        assert found == [line for line, step in steps if step is None]

    line = {"step": 4, "loss_metrics/global_avg_loss": 1.5, "lr": None}
    return st.lists(json_files(line) | st.just(to_json(line)), max_size=5).map(b"\n".join), check


@target
def run_lock(folder: Path) -> Any:
    """A run.lock. The folder is taken over and nothing is left, or it is in use."""
    holder = {"beat": "000000000001", "node": "n", "machine": "m", "pid": 7, "start_time": "1", "since": "now"}
    here = {**holder, "token": "t", "machine": folder_lock.machine(), "pid": os.getpid()}
    alive = {**here, "start_time": folder_lock.process_start_time(os.getpid())}

    def check(data: bytes) -> None:
        write_files(folder, {"run.lock": data})
        with open_lock(folder, beat_seconds=0.0005, patience=2) as lock:
            assert lock.is_held()
        assert list(folder.iterdir()) == []

    return st.sampled_from([{**holder, "token": "t"}, here, alive]).flatmap(json_files), check


DEVICE = """bf16 = 1e12\nfp8 = 0\nfp32 = 1e12\nmemory = 1e9\nmemory_bandwidth = 1e10\ninterconnect_bandwidth = 1e9
network_bandwidth = 1e9\nwatts = 100\ndevices_per_node = 8\nsource = "a test"\n[measured]\ntorch = "2.13"\nranks = 1
matmul.fp32 = [[64.0, 64.0, 64.0, 1e11], [512.0, 64.0, 64.0, 2e11]]\noperators.mul = [[1024, 1e-6], [1e6, 1e-4]]
attention = [[128, 64, 1e10], [1024, 64, 2e10]]\nattention_backward = [[128, 64, 1e10]]\noperator_seconds = 1e-6
dtensor_seconds = 1e-5\nslowdown = 0.1\nspread.mul = 0.2\n[[measured.collectives]]\nname = "all_reduce"\nranks = 2
nodes = 1\npoints = [[1024, 1e-6], [1e6, 1e-4]]\n"""


@target
def device_file(folder: Path) -> Any:
    """A TOML file of plan.device. What is accepted gives finite seconds, at a measured size those that were measured,
    or a line that says what was not measured."""
    works = [Work("aten.mul", 0, "", 5000, 5000, (), ()), Work("aten.mm", 9, "fp32", 0, 0, (), (), (1, 100, 80, 60))]
    works.append(Work("aten.attention", 9, "fp32", 0, 0, (), (), (300, 300, 64)))

    def check(data: bytes) -> None:
        write_files(folder, {"device.toml": data})
        measured = find_device(str(folder / "device.toml")).measured
        if measured:
            seconds = [work_seconds(measured, work) for work in works]
            seconds.append(collective_seconds(measured, "all_reduce", 10_000, 4, 2))
            assert all(math.isfinite(each) and each > 0 for each in seconds)
            for points in [*measured.operators.values(), *(row.points for row in measured.collectives)]:
                assert all(math.isclose(seconds_at(points, size), each, rel_tol=1e-9) for size, each in points)

    return toml_files(DEVICE.encode()), check
