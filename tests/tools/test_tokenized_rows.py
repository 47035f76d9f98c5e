"""titanlite tokenize --show prints what the loader gives the model: each input, and which targets are trained on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data import rejection, some_texts, write
from tests.techniques.data.test_fine_tuning import CONVERSATIONS, PLAIN, SPECIAL_TOKENS
from titanlite.config import load
from titanlite.config.launch import resolve
from titanlite.data.loader import Batch, Loader, Share
from titanlite.data.open import open_sequences, tokenizer_of_run
from titanlite.data.tokenizer import Tokenizer
from titanlite.loss import IGNORED
from titanlite.tools import tokenize as command
from titanlite.tools.tokenized_rows import names_of_special_tokens

ROWS, T = 3, 96
OF_A_RUN = ["--training.local_batch_size=1", "--training.global_batch_size=2", f"--training.seq_len={T}"]
TEXTS = ["--training.dataset=json", "--training.dataset_path={}/a.jsonl"]
CHAT = [
    *("--model.hf_assets_path={}/assets", "--model.vocab_size=400", "--training.dataset=json"),
    *("--training.dataset_path={}/chat.jsonl", "--training.dataset_format=messages", "--training.packing=best_fit"),
    "--training.document_mask",
]
MIXTURE = """
[[training.datasets]]
name = "texts"
dataset = "json"
dataset_path = "{0}/a.jsonl"
weight = 1.0

[[training.datasets]]
name = "chats"
dataset = "json"
dataset_path = "{0}/chat.jsonl"
dataset_format = "messages"
weight = 2.0

[training]
packing = "best_fit"
document_mask = true
"""
CASES: dict[str, list[str]] = {
    "documents end to end": TEXTS,
    "documents end to end, a mask": [*TEXTS, "--training.document_mask"],
    "documents put together": [*TEXTS, "--training.packing=best_fit"],
    "streamed": [*TEXTS, "--training.streaming", "--training.streaming_shards=2"],
    "bytes in a built-in text": [],
    "a tokenizer": [*TEXTS, "--model.hf_assets_path={}/assets", "--model.vocab_size=400"],
    "conversations": CHAT,
    "conversations, truncated": [*CHAT, "--training.long_conversations=truncate", "--training.seq_len=32"],
}


@pytest.fixture
def folder(tmp_path: Path, assets) -> Path:
    """A folder with texts, conversations and a tokenizer that has a chat template."""
    write(tmp_path / "a.jsonl", [f"[{text}] é" for text in some_texts()])
    rows = [json.dumps({"messages": messages}) for messages in CONVERSATIONS * 3]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    (tmp_path / "assets").mkdir()
    assets.file.rename(tmp_path / "assets" / "tokenizer.json")
    settings = {**SPECIAL_TOKENS, "chat_template": PLAIN}
    (tmp_path / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def in_folder(folder: Path) -> list[str]:
    """Return the arguments of a run whose files are in a folder."""
    (folder / "run.toml").write_text("")
    return [str(folder / "run.toml"), *OF_A_RUN, f"--training.cache_folder={folder}/cache"]


def batches_of(arguments: list[str]) -> tuple[Tokenizer, list[Batch]]:
    """Return a run's tokenizer, and its first rows as its loader returns them."""
    config = resolve(load(arguments).config, 1, on_cuda=False)
    tokenizer = tokenizer_of_run(config.model, config.checkpoint, config.parallelism)
    seed = config.debug.seed
    sequences, *_ = open_sequences(tokenizer, config.training, config.validation, seed=seed, builds_cache=True)
    loader = Loader(sequences, config.training, Share(0, 1), n_copies=1, pin=False, state=None)
    try:
        return tokenizer, [batch for _ in range(ROWS) for batch in loader.next()][:ROWS]
    finally:
        loader.close()


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the text of tokens, with the names of special tokens."""
    names = tokenizer.call(names_of_special_tokens, tokens)
    parts, plain = "", list[int]()
    for token, name in zip([*tokens, -1], [*names, "end"], strict=True):
        if name:
            parts, plain = f"{parts}{tokenizer.decode(plain) if plain else ''}«{name}»", []
        else:
            plain.append(token)
    return parts.removesuffix("«end»")


def spans(values: list[bool]) -> list[tuple[int, int]]:
    """Return where each run of true values begins and ends."""
    edges = [at for at, pair in enumerate(zip([False, *values], [*values, False], strict=True)) if pair[0] != pair[1]]
    return [*zip(edges[::2], edges[1::2], strict=True)]


def check(arguments: list[str], out: str) -> int:
    """Compare what was printed with the batches of the loader, and return the number of documents in them."""
    tokenizer, batches = batches_of(arguments)
    begun = list[int]()
    shown = re.split(r"\n+row \d+ of step \d+[^\n]*\n", out)[1:]
    assert len(shown) == len(batches)
    for text, batch in zip(shown, batches, strict=True):
        tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
        trained = [target != IGNORED for target in targets]
        assert all(targets[at] == tokens[at + 1] for at in range(len(tokens) - 1) if trained[at])
        documents = re.split(r"--- document \d+: \d+ tokens\n", text.removesuffix("\n"))[1:]
        printed = [found for each in documents for found in re.findall(r"⟦([^⟧]*)⟧", each, re.DOTALL)]
        assert printed == [text_of(tokenizer, targets[begin:end]) for begin, end in spans(trained)]
        inputs = "".join(each.removesuffix("\n") for each in documents).replace("⟦", "").replace("⟧", "")
        inputs = inputs.replace("\ufffd\ufffd", "é")  # a row that begins within a character trains on its second byte
        last = targets[-1:] if trained[-1] else []
        assert text_of(tokenizer, [*tokens, *last]).startswith(inputs)  # only padding follows
        begun.append(len(documents))
    return sum(begun)


@pytest.mark.parametrize("case", CASES)
def test_what_is_shown_is_what_the_loader_returns(case: str, folder: Path, capsys):
    options = [option.format(folder) for option in CASES[case]]
    arguments = [*in_folder(folder), *options]
    command.tokenize([*arguments, "--show", str(ROWS)])
    out = capsys.readouterr().out
    assert check(arguments, out) >= ROWS
    if "conversations" in case:
        assert "user\nWhat color is the sky?" in out
        assert "⟦Blue«</s>»⟧" in out
    assert f"(training.document_mask = {str('--training.document_mask' in options).lower()})" in out


def test_a_mixture_is_shown_with_the_names_of_its_datasets(folder: Path, capsys):
    assets = f'\n[model]\nhf_assets_path = "{folder}/assets"\nvocab_size = 400\n'
    file = folder / "mixture.toml"
    options = f'seq_len = {T}\nlocal_batch_size = 1\nglobal_batch_size = 2\ncache_folder = "{folder}/cache"\n'
    array, _, table = MIXTURE.format(folder).partition("[training]\n")
    file.write_text(f"[training]\n{table}{options}{array}{assets}")
    command.tokenize([str(file), "--show", str(ROWS)])
    out = capsys.readouterr().out
    check([str(file)], out)
    assert {"texts", "chats"} == set(re.findall(r"row \d of step \d, (\w+):", out))


def test_counts_and_limits_of_documents(tmp_path: Path, capsys):
    write(tmp_path / "a.jsonl", ["abc", "defgh"])
    options = [option.format(tmp_path) for option in TEXTS] + ["--training.packing=best_fit", "--training.seq_len=48"]
    command.tokenize([*in_folder(tmp_path), *options, "--show", "1"])
    out = capsys.readouterr().out
    assert out.partition("\n\n")[2] == (
        "row 1 of step 1: 10 of 48 targets trained on, 2 not, 36 padding; documents: 2\n"
        "--- document 1: 5 tokens\n«BOS»⟦abc«EOS»⟧\n"
        "--- document 2: 7 tokens\n«BOS»⟦defgh«EOS»⟧\n\n"
    )


def test_text_cannot_command_a_terminal_and_the_page_has_the_same_rows(tmp_path: Path, capsys):
    write(tmp_path / "a.jsonl", ["a\x1b[31m <b> [bold]x[/]"] * 9)
    options = [option.format(tmp_path) for option in TEXTS]
    page = tmp_path / "rows.html"
    command.tokenize([*in_folder(tmp_path), *options, "--show", "1", "--html", str(page)])
    out = capsys.readouterr().out
    assert "a\\x1b[31m <b> [bold]x[/]" in out
    assert out.endswith(f"wrote {page}\n")
    assert "a\\x1b[31m &lt;b&gt; [bold]x[/]" in page.read_text()
    assert re.search('<span style="[^"]*color: #008000[^"]*">⟦a', page.read_text())


def test_a_page_needs_rows(tmp_path: Path):
    arguments: list[Any] = ["debug", "--html", str(tmp_path / "a.html")]
    assert rejection(lambda: command.tokenize(arguments)).startswith("command line: --html is an option of --show")
