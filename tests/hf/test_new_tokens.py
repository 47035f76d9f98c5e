"""A tokenizer and a model of different sizes: ids without a row, rows for new tokens, and hints that help."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.config import problems
from tests.helpers.data import BYTES, Assets, rejection, training
from tests.helpers.hf import build_hf, empty_model, model_options, save_hf
from tests.techniques.data.test_fine_tuning import CONVERSATIONS, MARKED, SPECIAL_TOKENS, write_rows
from titanlite import config
from titanlite.checkpoint.export import run as export
from titanlite.config.hf import tokenizer_size
from titanlite.config.hf.tokenizer_size import n_token_ids
from titanlite.config.launch import resolve
from titanlite.config.schema import Checkpoint, Model, Parallelism, Validation
from titanlite.data import tokenizer_process
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.open import build_tokenizer, open_sequences, tokenizer_of_run
from titanlite.data.tokenizer import Rows, encode_prompts
from titanlite.hf import load
from titanlite.hf.load import SINGLE, load_hf_weights
from titanlite.launch import launcher
from titanlite.metrics.summary import run_summary
from titanlite.tools import config as config_command
from titanlite.tools.generate.folder import open_folder
from titanlite.tools.tokenize import tokenize

V, NEW = 400, 3
"""Tokens of the tokenizer of tests, and those that are added for a chat."""
CHAT = MARKED.replace("<stop>", "<|turn|>")


@pytest.fixture(autouse=True)
def tokenizer_in_this_process(monkeypatch):
    """A process of its own takes half a second to start."""
    monkeypatch.setattr(tokenizer_process, "TokenizerProcess", HuggingFaceTokenizer)


def add_tokens(assets: Assets, *names: str, special: bool = True) -> None:
    """Add tokens to a tokenizer.json, with the next ids."""
    content = json.loads(assets.file.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = n_token_ids(assets.folder)
    content["added_tokens"] += [
        {"id": first + n, "content": name, "special": special, **flags} for n, name in enumerate(names)
    ]
    assets.file.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def chat(assets: Assets, tmp_path: Path) -> Path:
    """A run.toml that fine-tunes a released model, whose tokenizer has tokens that it has no rows for."""
    build_hf(vocab_size=V).save_pretrained(tmp_path)
    add_tokens(assets, "<|turn|>", "<|end|>", "<|pad|>")
    assets.open(**SPECIAL_TOKENS, chat_template=CHAT)
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    (tmp_path / "run.toml").write_text(
        f'[model]\nflavor = "from_hf"\nhf_assets_path = "{tmp_path}"\n[job]\ndump_folder = "{tmp_path}/run"\n'
        f'[training]\ndataset = "json"\ndataset_path = "{rows}"\ndataset_format = "messages"\npacking = "best_fit"\n'
        f'document_mask = true\nseq_len = 128\nlocal_batch_size = 1\ncache_folder = "{tmp_path}/cache"\n'
    )
    return tmp_path / "run.toml"


# Rows of new tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
@pytest.mark.parametrize("n_new", [0, 3])
def test_rows_of_new_tokens_are_the_mean_of_the_others(family: str, n_new: int, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(load, "ROWS_AT_A_TIME", 7)
    save_hf(tmp_path, family)
    before = empty_model(own := model_options(family))
    load_hf_weights(tmp_path, before, own)
    larger = own.model_copy(update={"vocab_size": own.vocab_size + n_new, "new_tokens": "mean"})
    model = empty_model(larger)
    load_hf_weights(tmp_path, model, larger)
    for name in ("tok_embeddings", "output"):
        old, rows = getattr(before, name).weight, getattr(model, name).weight
        assert torch.equal(rows[: own.vocab_size], old)
        assert torch.equal(rows[own.vocab_size :], old.double().mean(0).float().expand(n_new, -1))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (0 if not n_new else 1 if own.tie_embeddings else 2)
    assert all(" 3 new rows of " in line for line in said)


def test_each_rank_has_its_own_part_of_new_rows(tmp_path: Path):
    """Whatever rows and columns a rank has, they are those of the whole."""
    save_hf(tmp_path)
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        tensor, n = file.get_slice("lm_head.weight"), model_options().vocab_size
        full = torch.arange(n + 5), torch.arange(model_options().dim)
        whole, columns = load._read(tensor, [load.cover(each) for each in full]), torch.arange(3, 9)
        assert whole.shape[0] == n + 5
        for rows in (
            torch.arange(0, 4),
            torch.arange(n - 2, n + 2),
            torch.arange(n + 1, n + 5),
            torch.arange(5, n + 5, 7),
        ):
            part = load._read(tensor, [load.cover(rows), load.cover(columns)])
            assert torch.equal(part, whole[rows][:, columns])


def test_other_shapes_are_still_rejected(tmp_path: Path):
    save_hf(tmp_path)
    own = model_options()
    for changed in ({"new_tokens": "none"}, {"dim": own.dim * 2}, {"vocab_size": own.vocab_size - 1}):
        other = own.model_copy(update={"vocab_size": own.vocab_size + 1, "new_tokens": "mean", **changed})
        assert any(
            "and the model needs" in line
            for line in problems(lambda o=other: load_hf_weights(tmp_path, empty_model(o), o))
        )


# Hints ---------------------------------------------------------------------------------------------------------------


def check(argv: list[Any]) -> None:
    """Do with a config what its run does before it builds a model."""
    launcher.load_and_check([str(each) for each in argv], lambda loaded: None)
    tokenize([str(each) for each in argv])


HINTS = {
    "ids that the template writes": [],
    "a larger model than its weights": ["--model.vocab_size=403"],
    "as many rows as the weights, set": ["--model.vocab_size=400"],
    "no weights, a size that is too small": ["--checkpoint.initial_load_path=none", "--model.vocab_size=400"],
    "of a flavor": ["--model.flavor=debug", "--model.vocab_size=400"],
    "tensor parallel": ["--model.vocab_size=400", "--parallelism.tensor_parallel_degree=2"],
}


@pytest.mark.parametrize("case", HINTS)
def test_a_hint_is_not_rejected_when_it_is_followed(case: str, chat: Path):
    arguments = [chat, *HINTS[case]]
    line = rejection(lambda: check(arguments))
    _, _, advice = line.partition("; set ")
    advised = re.findall(r"(model\.\w+) = (\"?\w+\"?)", advice.split(", or ")[0])
    assert advised, line
    check([*arguments, *(f"--{key}={value}" for key, value in advised)])


def test_new_tokens_are_read_where_weights_are_loaded(chat: Path, tmp_path: Path):
    check([chat, "--model.new_tokens=mean"])
    seeded = rejection(lambda: check([chat, "--model.new_tokens=mean", "--checkpoint.initial_load_path=none"]))
    assert (
        'model.new_tokens = "mean": read only with initial weights (checkpoint.initial_load_path); set "none"' in seeded
    )
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "state.json").write_text("{}")
    assert config.load([str(chat)]).config.model.vocab_size == V
    assert config.load([str(chat), "--model.new_tokens=mean"]).config.model.vocab_size == V + NEW
    identity = config.load([str(chat), "--model.new_tokens=mean"]).config.model.identity()
    assert "new_tokens" not in identity


# Ids without a row ---------------------------------------------------------------------------------------------------


def test_ids_that_no_text_has_do_not_stop_a_run(assets: Assets, tmp_path: Path):
    add_tokens(assets, "<image>")
    assets.open(**SPECIAL_TOKENS)
    model = Model(hf_assets_path=str(assets.folder), vocab_size=V)
    tokenizer = tokenizer_of_run(model, Checkpoint(initial_load_path="none"), Parallelism())
    assert tokenizer.vocab_size == V + 1
    file = write_rows(tmp_path / "a.jsonl", [{"text": "an <image> of it"}] * 9)
    options = training(dataset="json", dataset_path=str(file), cache_folder=str(tmp_path / "cache"))
    sequences, *_ = open_sequences(tokenizer, options, Validation(fraction=0.0), seed=0, builds_cache=True)
    assert sequences.n_sequences > 0
    assert encode_prompts(tokenizer, ["<image>"]), "ordinary text"


@pytest.mark.parametrize("streaming", [False, True])
def test_an_id_that_occurs_is_one_line(assets: Assets, tmp_path: Path, streaming: bool):
    add_tokens(assets, "word", special=False)
    assets.open(**SPECIAL_TOKENS)
    file = write_rows(tmp_path / "a.jsonl", [{"text": "fine"}] * 50 + [{"text": "one word more"}])
    how = {"cache_folder": str(tmp_path / "cache"), "streaming": streaming, "streaming_shards": 1}
    options = training(dataset="json", dataset_path=str(file), **how)

    def read(n: int) -> None:
        tokenizer = build_tokenizer(str(assets.folder)).fit(Rows(n, f"model.vocab_size = {n}", "do this"))
        sequences, *_ = open_sequences(tokenizer, options, Validation(fraction=0.0), seed=0, builds_cache=True)
        items = sequences.read(0, 1)
        for _ in range(20):
            next(items)

    read(V + 1)
    expected = f'model.vocab_size = {V}: "one word more" has the token {V}: expected ids below {V}; do this'
    assert rejection(lambda: read(V)) == expected, "also where the cache of a larger model is there"


def test_a_prompt_with_an_id_without_a_row_is_one_line(assets: Assets):
    add_tokens(assets, "word", special=False)
    tokenizer = assets.open(**SPECIAL_TOKENS).fit(Rows(V, "x", "y"))
    assert encode_prompts(tokenizer, ["a wor d"])
    assert (
        rejection(lambda: encode_prompts(tokenizer, ["a word"]))
        == f'x: "a word" has the token {V}: expected ids below {V}; y'
    )


def test_a_model_has_rows_for_bos_and_eos(assets: Assets):
    add_tokens(assets, "<|end|>")
    tokenizer = assets.open(bos_token="<s>", eos_token="<|end|>")
    assert (
        rejection(lambda: tokenizer.fit(Rows(V, "x", "y"))) == f'x: "EOS" has the token {V}: expected ids below {V}; y'
    )
    assert tokenizer.fit(Rows(V + 1, "x", "y")) is tokenizer
    assert '"EOS" has the token 257' in rejection(lambda: type(BYTES)().fit(Rows(257, "x", "y")))


def test_a_folder_may_have_fewer_rows_than_its_tokenizer_ids(assets: Assets, tmp_path: Path):
    build_hf(vocab_size=V).save_pretrained(tmp_path)
    add_tokens(assets, "<image>")
    assets.open(**SPECIAL_TOKENS)
    assert open_folder(tmp_path).tokenizer(None).vocab_size == V + 1
    assets.open(bos_token="<s>", eos_token="<image>")
    assert "train rows for the token first (model.new_tokens)" in rejection(
        lambda: open_folder(tmp_path).tokenizer(None)
    )


# The size of a flavor ------------------------------------------------------------------------------------------------


def test_the_vocabulary_of_a_flavor_is_at_least_the_tokenizers(assets: Assets):
    def size(*arguments: str) -> int:
        return config.load(["debug", *arguments]).config.model.vocab_size

    path = f"--model.hf_assets_path={assets.folder}"
    assert (size(), size(path), size(f"{path}/tokenizer.json")) == (272, V, V)
    assert size(path, "--model.vocab_size=300") == 300
    assert size(path, "--model.flavor=llama3_8b") == 128_256
    resolved = config.load(["debug", path]).config
    assert f"vocab_size = {V}" in resolved.toml()
    sequences = SimpleNamespace(n_sequences=1)
    for loaded, words in ((resolved, f"{V} for the tokenizer (debug: 272);"), (config.load(["debug"]).config, "272;")):
        assert f"vocabulary {words}" in run_summary(resolve(loaded, 1, on_cuda=False), 1, sequences, None, "", {})  # type: ignore[arg-type]


IDS: dict[str, tuple[Any, int]] = {
    "BPE": ({"model": {"vocab": {"a": 0, "b": 6}}}, 7),
    "Unigram": ({"model": {"vocab": [["a", 0.5], ["b", 0.5]]}, "added_tokens": None}, 2),
    "added": ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 8}, {"id": 3}]}, 9),
    "nothing": ({"model": {"vocab": {}}}, 0),
    "no object": ([], 0),
    "no vocabulary": ({"model": {}}, 0),
    "a text for an id": ({"model": {"vocab": {"a": "9"}}}, 0),
    "a fraction": ({"model": {"vocab": {"a": 1.5}}}, 0),
    "an id that no model has": ({"model": {"vocab": {"a": 2**40}}}, 0),
    "no id": ({"model": {"vocab": {"a": 0}}, "added_tokens": [{}]}, 0),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_of_a_file_are_counted(case: str, tmp_path: Path):
    content, n = IDS[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert n_token_ids(str(tmp_path)) == n


def test_a_file_that_cannot_be_read_has_no_ids(assets: Assets, tmp_path: Path, monkeypatch):
    assert n_token_ids(assets.folder) == V
    monkeypatch.setattr(tokenizer_size, "LARGEST_FILE", 99)
    assert n_token_ids(assets.folder) == 0
    for content in (b"\xff", b"[" * 99, b"9" * 99, b""):
        assets.file.write_bytes(content)
        assert n_token_ids(assets.folder) == 0
    assert [n_token_ids(each) for each in (tmp_path / "no", 3, None, "\0")] == [0] * 4


# The same lines from config and train --------------------------------------------------------------------------------

FOLDERS: dict[str, tuple[list[str], list[str]]] = {
    "no tokenizer": (["--model.hf_assets_path={0}/no"], ["{0}/no"]),
    "no data": (["--training.dataset=json", "--training.dataset_path={0}/no"], ["training.dataset_path"]),
    "no validation data": (
        ["--training.dataset=text", "--training.dataset_path={0}/rows.jsonl", "--validation.enable",
         "--validation.dataset_path={0}/no"], ["validation.fraction", "validation.dataset_path"]),
    "no chat template": (
        ["--model.hf_assets_path={0}/plain", "--training.dataset=json", "--training.dataset_path={0}/rows.jsonl",
         "--training.dataset_format=messages", "--training.packing=best_fit", "--training.document_mask"],
        ["{0}/plain has no chat template"]),
    "no weights": (["--checkpoint.initial_load_path={0}/no"], ["checkpoint.initial_load_path"]),
    "no row for EOS": (["--model.vocab_size=257"], ['model.vocab_size = 257: "EOS" has the token 257']),
    "everything": (
        ["--training.stepz=3", "--checkpoint.initial_load_path={0}/no", "--model.hf_assets_path={0}/no",
         "--training.dataset=json", "--training.dataset_path={0}/no", "--optimizer.lr=-1"],
        ["training.stepz", "optimizer.lr", "checkpoint.initial_load_path", "{0}/no", "training.dataset_path"]),
    "a folder of a model": (
        ["--model.flavor=from_hf", "--model.hf_assets_path={0}/no", "--training.stepz=3", "--optimizer.lr=-1"],
        ["training.stepz", "optimizer.lr", "{0}/no/config.json", "{0}/no cannot be read"]),
    "launch": (
        ["--parallelism.data_parallel_shard_degree=2", "--model.hf_assets_path={0}/no"], ["{0}/no"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_config_says_of_folders_what_train_says(case: str, assets: Assets, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_bytes(assets.file.read_bytes())
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    arguments, phrases = ([each.format(tmp_path) for each in own] for own in FOLDERS[case])
    argv = ["debug", f"--job.dump_folder={tmp_path}/run", *arguments]
    monkeypatch.setattr(launcher, "listen_as_launcher", lambda: None)
    lines = problems(lambda: config_command.main(argv))
    assert lines == problems(lambda: launcher.main(argv))
    assert len(lines) == len(phrases)
    assert all(phrase in line for phrase, line in zip(phrases, lines, strict=True))
    assert ("[job]" in capsys.readouterr().out) == (not {"training.stepz", "validation.fraction"} & {*phrases})
    assert not (tmp_path / "run").exists()


# Export --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_model_with_new_tokens_is_exported_with_its_size(chat: Path, tmp_path: Path, ranks: Any):
    from tests.test_train import run_train

    argv = [str(chat), "--model.new_tokens=mean", "--training.steps=1", "--checkpoint.enable"]
    assert ranks(1).run(run_train, argv=argv) == [""]
    export(tmp_path / "run" / "checkpoint", tmp_path / "out", None)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == V + NEW
    assert load_file(tmp_path / "out" / SINGLE)["lm_head.weight"].shape[0] == V + NEW
