"""Fine-tuning data: conversations in the tokenizer's chat template, trained on only where the assistant speaks."""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers

from tests.helpers.cases import cases
from tests.helpers.config import assert_rejected, load
from tests.helpers.data import BYTES, as_lists, rejection, training
from titanlite.config.schema import MixedDataset, Validation
from titanlite.data import open as opening
from titanlite.data import shard_builder, token_shards
from titanlite.data.documents import Source, open_dataset
from titanlite.data.open import build_tokenizer
from titanlite.data.token_shards import not_trained_bit
from titanlite.data.tokenizer_process import ShardWorker
from titanlite.data.worker import name_of
from titanlite.loss import IGNORED
from titanlite.techniques.data import chat_template
from titanlite.techniques.data.chat_template import ChatTemplate, Conversation, encode_questions
from titanlite.techniques.data.rows import Row
from titanlite.tools import evaluate

BIT = not_trained_bit("uint16")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PROMPT = "{% if add_generation_prompt %}<stop>assistant\n{% endif %}"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<stop>{{ m.role }}\n{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    + PROMPT
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<stop>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}" + PROMPT
)
"""Two templates of the same text."""

SYSTEM = {"role": "system", "content": "Answer in one word."}
CONVERSATIONS = [
    [{"role": "user", "content": "What color is the sky?"}, {"role": "assistant", "content": "Blue"}],
    [
        SYSTEM,
        {"role": "user", "content": " Hello, \n world "},
        {"role": "assistant", "content": "  Yes: été, 日本 "},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": "No"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "never answered"},
    ],
]


@pytest.fixture
def template(assets) -> Any:
    def open_template(source: str, **settings: Any) -> ChatTemplate:
        return ChatTemplate(assets.open(**SPECIAL_TOKENS, chat_template=source, **settings))

    return open_template


def last_of(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Conversation:
    """The conversation, without the beginnings that are rendered in another way."""
    return template.conversations(Row(messages, tools))[-1]


def encoded(template: ChatTemplate, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and 1 for each that is trained on."""
    (tokens,) = template.encode([last_of(template, messages)], "uint16")
    assert tokens.dtype == np.uint16
    return (tokens & ~np.uint16(BIT)).tolist(), (tokens & BIT == 0).astype(int).tolist()


# Templates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prefixes", "generation blocks"])
def test_tokens_and_masks_are_those_of_transformers(template, assets, source, messages):
    ours = encoded(template(source), messages)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(assets.file), **SPECIAL_TOKENS)
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenize": True}
    theirs = tokenizer.apply_chat_template(messages, chat_template=MARKED, **options)
    assert 0 < sum(ours[1]) < len(ours[1])
    assert ours == (theirs["input_ids"], theirs["assistant_masks"])


def trained_part(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    """The text of each run of tokens that are trained on, of all parts of a conversation."""
    texts = []
    for tokens in template.encode(template.conversations(Row(messages)), "uint16"):
        for is_trained, run in itertools.groupby(tokens.tolist(), lambda token: not token & BIT):
            if is_trained:
                texts.append(template.tokenizer.tokenizer.decode([*run], skip_special_tokens=False))
    return texts


def test_what_is_trained_on_by_hand(template):
    for source in (PLAIN, MARKED):
        assert trained_part(template(source), CONVERSATIONS[1]) == ["Yes: été, 日本</s>", "No</s>"]
        assert trained_part(template(source), CONVERSATIONS[2]) == ["two</s>", "three</s>"]


def test_special_tokens_in_a_message_are_ordinary_text(template, assets):
    messages = [
        {"role": "user", "content": "<stop>assistant\nI agree</s>"},
        {"role": "assistant", "content": "a <s> b\ufdd0\ufdd1\ufdd2 </s>"},
    ]
    for source in (PLAIN, MARKED):
        tokens, trained = encoded(template(source), messages)
        tokenizer = assets.open(**SPECIAL_TOKENS)
        special = [tokenizer.tokenizer.id_to_token(token) for token in tokens if token < 3]
        assert special == ["<s>", "<stop>", "</s>", "<stop>", "</s>"], "those of the template"
        begin = trained.index(1)
        assert trained[begin:] == [1] * (len(trained) - begin)
        assert tokenizer.tokenizer.decode(tokens[begin:-1], skip_special_tokens=False) == messages[1]["content"]


def special_tokens(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    tokens, _ = encoded(template, messages)
    return [template.tokenizer.tokenizer.id_to_token(token) for token in tokens if token < 3]


def test_special_tokens_in_keys_are_ordinary_text(template):
    """As in the arguments of a tool that is called."""
    call = {"function": {"name": "f", "arguments": {"<stop>": {"</s>": ["<s>"]}}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    own = template(PLAIN.replace("{{ m.content | trim }}", "{{ m.content or m.tool_calls | tojson }}"))
    assert '{"<stop>": {"</s>": ["<s>"]}}' in last_of(own, messages)
    assert special_tokens(own, messages) == ["<s>", "<stop>", "</s>", "<stop>", "</s>"], "those of the template"


@pytest.mark.parametrize("read", ["'<stop>' in m.note", "m.note | length == 6", "m.note == '<stop>'"])
def test_a_template_that_reads_special_tokens_without_writing_them_is_rejected(template, read):
    """What is rendered has no trace of the replaced token, and yet differs."""
    source = PLAIN.replace("{{ m.role }}", f"{{{{ m.role }}}}{{% if m.note and {read} %}}!{{% endif %}}")
    messages = [{"role": "user", "content": "a", "note": "<stop>"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=r'reads special tokens in messages.*set training.special_tokens_in_text = "s'):
        last_of(template(source), messages)
    assert last_of(template(PLAIN), messages), "this template does not read the key"


@pytest.mark.parametrize("token", ["<stop>", '"<stop>\\'], ids=["plain", "quoted"])
def test_special_tokens_that_are_words_of_their_own(template, assets, token):
    """The library finds them only where no letter or digit is beside them: other special tokens may be."""
    content = json.loads(assets.file.read_text(encoding="utf-8").replace('"<stop>"', json.dumps(token)))
    content["added_tokens"] = [{**added, "single_word": True} for added in content["added_tokens"]]
    assets.file.write_text(json.dumps(content), encoding="utf-8")
    own = template(PLAIN.replace("<stop>", f"{token}\n").replace("{{ eos_token }}", "\n{{ eos_token }}"))
    tokens, _ = encoded(own, CONVERSATIONS[0])
    assert tokens == own.tokenizer.loaded.apply_chat_template(CONVERSATIONS[0], return_dict=False)
    assert tokens.count(own.tokenizer.tokenizer.token_to_id(token)) == 2
    (text,) = own.tokenizer.encode([f"a {token} b"])
    assert own.tokenizer.tokenizer.token_to_id(token) not in text


def test_special_tokens_that_the_settings_alone_call_so(template, assets):
    """The tokenizer of torchtitan's tests: its tokenizer.json has the tokens in the vocabulary only."""
    expected = encoded(template(PLAIN), CONVERSATIONS[1])
    content = json.loads(assets.file.read_text(encoding="utf-8"))
    special, content["added_tokens"] = content["added_tokens"], []
    assets.file.write_text(json.dumps(content), encoding="utf-8")
    absent = {"content": "<absent>", "special": True}
    named = {str(token["id"]): {"content": token["content"], "special": True} for token in special}
    assert encoded(template(PLAIN, added_tokens_decoder=named | {"999": absent}), CONVERSATIONS[1]) == expected
    alone = template(PLAIN).tokenizer.identity
    assert template(PLAIN, added_tokens_decoder=named).tokenizer.identity != alone  # tokens are cached by it


def test_a_template_has_its_file_or_a_place_in_the_settings(assets):
    file = assets.folder / "chat_template.jinja"

    def text_of(**settings: Any) -> str:
        return str(last_of(ChatTemplate(assets.open(**SPECIAL_TOKENS, **settings)), CONVERSATIONS[0]))

    expected = text_of(chat_template=PLAIN)
    assert expected == "<s><stop>user\nWhat color is the sky?</s><stop>assistant\nBlue</s>"
    assert text_of(chat_template=[{"name": "rag", "template": ""}, {"name": "default", "template": PLAIN}]) == expected
    file.write_text(PLAIN.replace("<stop>", "<stop><stop>"))
    assert text_of(chat_template=PLAIN) == expected.replace("<stop>", "<stop><stop>"), "the file comes first"


def test_what_templates_are_given(template):
    for source, text in [
        ("{{ [1, 'é'] | tojson }}", '[1, "é"]'),
        ("{{ strftime_now is defined }}", "True"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),
    ]:
        own = template(source + "{% generation %}!{% endgeneration %}")
        assert str(last_of(own, CONVERSATIONS[0])) == f"{text}!"


HOSTILE = [
    "{{ self.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ lipsum.__globals__['os'].popen('id') }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(x=1) }}",
    "{{ range(10**9) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{{ raise_exception('only\ntwo roles') }}",
]
HARMLESS = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ messages.__class__ }}",
]
"""Such attributes are undefined values, which print nothing."""


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_has_no_code_and_no_files(template, source):
    own = template(MARKED + source)
    with pytest.raises(ValueError, match=r"^.*tokenizer_config.json cannot render it: [^\n]+$"):
        last_of(own, CONVERSATIONS[0])


@pytest.mark.parametrize("source", HARMLESS)
def test_a_forbidden_attribute_prints_nothing(template, source):
    texts = [str(last_of(template(MARKED + own), CONVERSATIONS[0])) for own in ("", source)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("source", ["{% generation %}", "{{", "{% for %}", "{{ 1 | nosuchfilter }}"])
def test_a_template_that_cannot_be_read_is_one_line(template, source):
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot render it: line 1: [^\n]+$"):
        last_of(template(source), CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("source", "messages", "problem"),
    [
        (PLAIN + "the end", CONVERSATIONS[1], "renders message 3 in another way than an answer begins"),
        ("{{ messages | length }}" + PLAIN, CONVERSATIONS[0], "renders message 2 in another way"),
        (PLAIN, [SYSTEM], 'no message has the role "assistant"'),
        ("{# {% generation %} #}" + PLAIN, CONVERSATIONS[0], "renders nothing that the assistant has said"),
        (PLAIN, [SYSTEM, {"role": "assistant", "content": "a", "x": ["\ud800"]}], None),
        (PLAIN + "{{ messages[1].x }}", [SYSTEM, {"role": "assistant", "content": "a", "x": "\ud800"}], "surrogates"),
    ],
)
def test_a_conversation_whose_spans_are_not_known_is_rejected(template, source, messages, problem):
    if problem is None:
        assert last_of(template(source), messages)
        return
    with pytest.raises(ValueError, match=problem):
        last_of(template(source), messages)


ALLOCATING = [
    "{{ 'x' * 10**10 }}",
    "{{ messages[0].role.center(10**10) }}",
    "{{ '%10000000000d' % messages | length }}",
    "{{ messages[0].role | indent(10**10, first=true) }}",
    "{{ messages | batch(10**10, 'x') | list | length }}",
    "{% set n = namespace(x=messages[0].role) %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
]


@cases("source", ALLOCATING, always=ALLOCATING[:-1])
def test_a_template_that_allocates_is_one_line(assets, source):
    """Never in this process: it would compute the constants when the template is compiled."""
    assets.open(**SPECIAL_TOKENS, chat_template=PLAIN + source)
    tokenizer = build_tokenizer(str(assets.folder))
    line = rejection(lambda: tokenizer.call(encode_questions, ["hello"]))
    assert line == f"--chat: {assets.settings} cannot render it: MemoryError"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source",
    [
        "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (10 + messages | length) ** (10**9) }}",
    ],
)
def test_a_template_that_takes_too_long_is_one_line(assets, tmp_path, source):
    assets.open(**SPECIAL_TOKENS, chat_template=PLAIN + source)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    line = rejection(lambda: Opened(tmp_path, build_tokenizer(str(assets.folder)), file))
    problem = "its tokenizer.json or chat template takes more than 10 s of processor time"
    assert line == f"{assets.folder}: {problem} at {file}, line 1, or near it; correct it"


def test_a_message_may_be_nested_too_deep(template, tmp_path):
    nested: Any = "x"
    for _ in range(600):
        nested = {"a": nested}
    own, messages = template(PLAIN), [SYSTEM, {"role": "assistant", "content": "a", "x": nested}]
    file = write_rows(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS[0]}, {"messages": messages}])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(550)  # from Python 3.12 on, a level of a comprehension takes no frame of its own
    try:
        line = rejection(lambda: Opened(tmp_path, own.tokenizer, file))
    finally:
        sys.setrecursionlimit(limit)
    problems = "a conversation that is too large, or nested too deep: RecursionError", "JSON that is nested too deep"
    assert line.endswith(tuple(f"{file}, line 2: {problem}" for problem in problems))


def test_a_conversation_without_marks_has_so_many_messages(template, monkeypatch):
    """Each answer is found by rendering all messages before it."""
    own = template(PLAIN)
    with pytest.raises(ValueError, match=r"^40,000 messages: expected at most 1,000; divide it, or put what the "):
        last_of(own, CONVERSATIONS[0] * 20_000)
    monkeypatch.setattr(chat_template, "LARGEST_CONVERSATION", 20)
    assert len(trained_part(own, CONVERSATIONS[0] * 10)) == 10
    with pytest.raises(ValueError, match=r"^22 messages: expected at most 20"):
        last_of(own, CONVERSATIONS[0] * 11)
    assert len(trained_part(template(MARKED), CONVERSATIONS[0] * 11)) == 11


def test_a_template_is_a_regular_file(template, assets):
    os.mkfifo(assets.folder / "chat_template.jinja")
    line = rejection(lambda: template(PLAIN))
    file = assets.folder / "chat_template.jinja"
    assert line.endswith(f"[Errno 22] expected a regular file: '{file}'")


def test_without_a_template(assets):
    assert "bytes have no chat template" in rejection(lambda: ChatTemplate(BYTES))
    line = rejection(lambda: ChatTemplate(assets.open(**SPECIAL_TOKENS)))
    assert line.startswith(f"model.hf_assets_path: {assets.folder} has no chat template")


def test_a_prompt_ends_where_the_answer_begins(template):
    own = template(PLAIN)
    (prompt,) = encode_questions(own.tokenizer, [CONVERSATIONS[0][0]["content"]])
    tokens, trained = encoded(own, CONVERSATIONS[0])
    assert prompt == tokens[: trained.index(1)]
    own = template("{{ raise_exception('no') }}")
    assert rejection(lambda: encode_questions(own.tokenizer, ["a"])).startswith("--chat: ")


# Reasoning that a template drops from answers before the last ---------------------------------------------------------

KEEPS_LAST = (
    "{% for m in messages %}<stop>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}<think>{{ parts[0].split('<think>')[-1] if parts | length > 1 }}</think>{% endif %}"
    "{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}" + PROMPT
)
"""As Qwen3's template: reasoning of the last answer only, where an empty one is written too."""
DROPS_ALL = (
    "{% for m in messages %}<stop>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<stop>assistant\n<think>{% endif %}"
)
"""As the templates of DeepSeek's distilled models: reasoning of no answer, and an answer is asked for with <think>."""
REASONING = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>hm</think>two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "<think>well</think>four"},
]


def test_an_answer_is_trained_on_as_the_model_will_see_it(template):
    """What precedes it is what the template writes before an answer is asked for, without the reasoning before."""
    for source, n_parts in ((KEEPS_LAST, 2), (DROPS_ALL, 3)):
        own = template(source)
        parts = own.conversations(Row(REASONING))
        assert len(parts) == n_parts
        loaded = own.tokenizer.loaded
        for answer in (1, 3):
            before = loaded.apply_chat_template(REASONING[:answer], add_generation_prompt=True, tokenize=False)
            thought = REASONING[answer]["content"]
            text = before + thought.removeprefix("<think>" if before.endswith("<think>") else "") + "</s>"
            assert sum(str(part) == text for part in parts) == 1
    assert trained_part(own, REASONING) == ["hm</think>two</s>", "well</think>four</s>"]


def test_an_answer_without_the_reasoning_that_is_asked_for_is_rejected(template):
    with pytest.raises(ValueError, match=r'another way than an answer begins \("<think>"\)'):
        last_of(template(DROPS_ALL), CONVERSATIONS[0])


def test_turns_that_are_rendered_in_another_way_are_documents_of_one_row(template, tmp_path):
    own = template(KEEPS_LAST)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": REASONING}, {"messages": CONVERSATIONS[0]}])
    opened = Opened(tmp_path, own.tokenizer, file)
    expected = ["<think>hm</think>two</s>", "<think>well</think>four</s>", "<think></think>Blue</s>"]
    assert sorted(opened.trained_texts(own.tokenizer)) == sorted(expected)
    assert sum(shard.train_documents for shard in opened.packing.cache.index.shards) == 3


def test_all_turns_of_a_row_are_in_one_split(template, tmp_path):
    own = template(KEEPS_LAST)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": REASONING}] * 8)
    options = training(dataset="json", dataset_path=str(file), dataset_format="messages")
    work = shard_builder.CacheOptions(Source(options), 0.5, name_of(ChatTemplate))
    segments = list(open_dataset(Source(options))[0])
    arguments = (tmp_path / "b", "uint16", 0, segments, work, lambda *counts: None)
    shard = shard_builder.build_shard(*arguments, own.tokenizer)
    assert (shard.train_documents, shard.validation_documents) == (8, 8)
    assert shard.train_tokens == shard.validation_tokens


# Special tokens in messages and texts ---------------------------------------------------------------------------------


def test_special_tokens_that_a_template_looks_for_need_the_option(template):
    """A split at a special token does not find the replaced one."""
    own = template(
        "{% for m in messages %}<stop>{{ m.role }}\n{{ m.content.split('<stop>')[-1] }}</s>{% endfor %}" + PROMPT
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<stop>c"}]
    with pytest.raises(ValueError, match=r'set training.special_tokens_in_text = "special", or remove them$'):
        last_of(own, messages)
    (part,) = own.conversations(Row(messages), special=True)
    tokens = own.encode([part], "uint32")[0] & 0x7FFFFFFF
    assert tokens.tolist() == own.tokenizer.loaded.apply_chat_template(messages, return_dict=False)


def test_special_tokens_in_text_by_the_option(template, tmp_path, capsys):
    tokenizer = template(PLAIN).tokenizer
    text = "<stop>user\nHi</s><stop>assistant\nHello</s>"
    file = write_rows(tmp_path / "a.jsonl", [{"text": text}, {"text": "plain"}])
    options = {"dataset_format": "text", "document_mask": True}
    Opened(tmp_path, tokenizer, file, **options)
    how = "(ordinary text by training.special_tokens_in_text)"
    line = f'not read of its rows: "special token </s> {how}", "special token <stop> {how}"'
    assert line in capsys.readouterr().out
    opened = Opened(tmp_path, tokenizer, file, **options, special_tokens_in_text="special")
    assert "special token" not in capsys.readouterr().out
    theirs = [tokenizer.loaded(each)["input_ids"] for each in (text, "plain")]
    tokens = opened.packing.cache.tokens("train")[:].tolist()
    assert tokens == [*theirs[0], *theirs[1], tokenizer.eos], "EOS once"


def test_special_tokens_in_messages_by_the_option(template, tmp_path, capsys):
    tokenizer = template(PLAIN).tokenizer
    file = write_rows(tmp_path / "a.jsonl", [conversation("a<stop>b")])
    ordinary = Opened(tmp_path, tokenizer, file).packing.cache.tokens("train")[:].tolist()
    assert '"special token <stop> (' in capsys.readouterr().out
    special = (
        Opened(tmp_path, tokenizer, file, special_tokens_in_text="special").packing.cache.tokens("train")[:].tolist()
    )
    stop = tokenizer.tokenizer.token_to_id("<stop>")
    assert [[token & ~BIT for token in tokens].count(stop) for tokens in (ordinary, special)] == [2, 3]
    rows = [{**conversation("b"), "tools": [{"type": "function", "function": {"name": "f<stop>"}}]}]
    Opened(tmp_path, tokenizer, write_rows(tmp_path / "b.jsonl", rows))
    assert '"special token <stop> (' in capsys.readouterr().out, "in tools as in messages"


# Datasets ------------------------------------------------------------------------------------------------------------


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Opened:
    """A dataset's sequences and what they are made of."""

    def __init__(self, tmp_path: Path, tokenizer: Any, file: Path, **options: Any):
        how = {"packing": "best_fit", "document_mask": True, "dataset_format": "messages", "seq_len": 128}
        how |= {"dataset": "parquet" if file.suffix == ".parquet" else "json", "dataset_path": str(file)}
        trained = training(**how | {"cache_folder": str(tmp_path / "cache")} | options)
        validation = Validation(fraction=0.0)
        self.sequences, _, self.identity = opening.open_sequences(
            tokenizer, trained, validation, seed=0, builds_cache=True
        )
        self.packing = self.sequences.packing

    def trained_texts(self, tokenizer: Any) -> list[str]:
        return trained_texts(self.packing, tokenizer)


def trained_texts(packing: Any, tokenizer: Any) -> list[str]:
    """The texts between ignored targets."""
    texts = []
    for index in range(packing.n_sequences):
        run: list[int] = []
        for target in [*as_lists(packing[index])[1], IGNORED]:
            if target != IGNORED:
                run.append(target)
            elif run:
                texts.append(tokenizer.tokenizer.decode(run, skip_special_tokens=False))
                run = []
    return texts


ANSWERS = ["Blue</s>", "Yes: été, 日本</s>", "No</s>", "two</s>", "three</s>"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prefixes", "generation blocks"])
def test_only_what_the_assistant_says_is_a_target(template, tmp_path, suffix, source):
    tokenizer = template(source).tokenizer
    file = write_rows(tmp_path / f"a{suffix}", [{"messages": messages} for messages in CONVERSATIONS])
    opened = Opened(tmp_path, tokenizer, file)
    assert sorted(opened.trained_texts(tokenizer)) == sorted(ANSWERS)
    assert opened.packing.cache.index.dtype == "uint16"
    assert "0 of 3 conversations" in str(opened.sequences)
    tokens = {token for index in range(opened.packing.n_sequences) for token in as_lists(opened.packing[index])[0]}
    assert max(tokens) < tokenizer.vocab_size, "the bit is not part of a token"
    positions = as_lists(opened.packing[0])[2]
    assert positions.count(0) > 1
    assert all(as_lists(opened.packing[0])[0][i] == tokenizer.bos for i, p in enumerate(positions[:-20]) if p == 0)


def test_prompts_and_responses(template, tmp_path):
    tokenizer = template(PLAIN).tokenizer
    rows = [{"question": "2 + 2", "answer": "4"}, {"question": "3 + 3", "answer": "6"}]
    keys = {"dataset_prompt_key": "question", "dataset_response_key": "answer"}
    options = {"dataset_format": "prompt_response", **keys}
    opened = Opened(tmp_path, tokenizer, write_rows(tmp_path / "a.jsonl", rows), **options)
    assert sorted(opened.trained_texts(tokenizer)) == ["4</s>", "6</s>"]
    inputs = as_lists(opened.packing[0])[0]
    text = tokenizer.tokenizer.decode(inputs, skip_special_tokens=False)
    assert text.startswith("<s><stop>user\n2 + 2</s><stop>assistant\n4</s><s><stop>user\n3 + 3")
    file = write_rows(tmp_path / "b.jsonl", [{"question": "a", "response": "b"}])
    line = rejection(lambda: Opened(tmp_path, tokenizer, file, **options))
    assert "line 1: no column" in line
    assert line.endswith("(training.dataset_response_key)")


def test_a_large_vocabulary_takes_32_bits(template, tmp_path, monkeypatch):
    assert [token_shards.dtype_for(n, has_targets=True) for n in (2**15, 2**15 + 1)] == ["uint16", "uint32"]
    tokenizer = template(PLAIN).tokenizer
    monkeypatch.setattr(tokenizer, "vocab_size", 2**15 + 1)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    opened = Opened(tmp_path, tokenizer, file)
    assert opened.packing.cache.index.dtype == "uint32"
    assert sorted(opened.trained_texts(tokenizer)) == sorted(ANSWERS)


def test_other_processes_build_the_same_shards(template, tmp_path):
    own = template(PLAIN)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    options = training(dataset="json", dataset_path=str(file), dataset_format="messages")
    work = shard_builder.CacheOptions(Source(options), 0.0, name_of(ChatTemplate))
    segments = list(open_dataset(Source(options))[0])
    worker = ShardWorker(own.tokenizer.path)
    try:
        shard = worker.build_shard(tmp_path / "a", "uint16", 0, segments, work, lambda *counts: None)
    finally:
        worker.close()
    arguments = (tmp_path / "b", "uint16", 0, segments, work, lambda *counts: None)
    assert shard_builder.build_shard(*arguments, own.tokenizer) == shard
    assert shard.train_documents == 3


def test_the_place_of_conversations_that_are_encoded_is_that_of_the_first(template, tmp_path, monkeypatch):
    """A process that ends in the library is said to have ended there: the last place that it sent."""
    own = template(PLAIN)
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    options = training(dataset="json", dataset_path=str(file), dataset_format="messages")
    work = shard_builder.CacheOptions(Source(options), 0.0, name_of(ChatTemplate))
    monkeypatch.setattr(own.tokenizer, "encode_together", mock.Mock(side_effect=InterruptedError))
    arguments = (tmp_path / "b", "uint16", 0, list(open_dataset(Source(options))[0]), work, lambda *counts: None)
    places: list[tuple[str, int]] = []
    with pytest.raises(InterruptedError):
        shard_builder.build_shard(*arguments, own.tokenizer, lambda *place: places.append(place))
    assert len({begin for _, begin in places}) == 4, "where each conversation begins, and the end"
    assert places[-1] == (str(file), 0)


def conversation(answer: str, question: str = "a") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_long_conversations(template, tmp_path):
    tokenizer = template(PLAIN).tokenizer
    rows = [conversation("b"), conversation("c" * 60), conversation("d", question="e" * 60)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    line = rejection(lambda: Opened(tmp_path, tokenizer, file, seq_len=40))
    assert line.startswith('training.long_conversations = "reject": 2 of 3 conversations have more than the 41 tokens')
    dropped = Opened(tmp_path, tokenizer, file, seq_len=40, long_conversations="drop")
    assert dropped.trained_texts(tokenizer) == ["b</s>"]
    assert str(dropped.sequences).endswith("2 of 3 conversations dropped")
    truncated = Opened(tmp_path, tokenizer, file, seq_len=40, long_conversations="truncate")
    short, long = sorted(truncated.trained_texts(tokenizer))
    assert short == "b</s>"
    assert long == "c" * len(long), "without the end of the turn"
    assert truncated.packing.n_sequences == 2, "a question without an answer is left out"
    assert str(truncated.sequences).endswith("2 of 3 conversations truncated")
    assert dropped.identity != truncated.identity
    missing = {
        "drop": 'conversations of at most 9 tokens; set it higher, or training.long_conversations = "truncate"',
        "truncate": "answers in the first 9 tokens; set it higher",
    }
    for how, what in missing.items():
        line = rejection(lambda how=how: Opened(tmp_path, tokenizer, file, seq_len=8, long_conversations=how))
        assert line == f"training.seq_len = 8: the dataset has no {what}"


def test_a_mixture_of_texts_and_conversations(template, tmp_path):
    """Of a text all tokens are trained on. Each dataset has a format, and a rule for long conversations, of its own."""
    tokenizer = template(PLAIN).tokenizer
    conversations = [{"messages": messages} for messages in CONVERSATIONS]
    rows = {"a": conversations, "b": [{"text": "some text"}, {"text": "x" * 300}], "c": [conversation("d" * 90)] * 2}
    files = {name: str(write_rows(tmp_path / f"{name}.jsonl", own)) for name, own in rows.items()}
    a, b, c = ({"name": name, "dataset": "json", "dataset_path": file, "weight": 1} for name, file in files.items())
    a, c = (table | {"dataset_format": "messages"} for table in (a, c))
    trained = training(
        datasets=[MixedDataset(**table) for table in (a, b, c | {"long_conversations": "truncate"})],
        packing="best_fit",
        document_mask=True,
        seq_len=90,
        cache_folder=str(tmp_path / "cache"),
    )
    validation = Validation(enable=True, fraction=0.5)
    sequences, validated, _ = opening.open_sequences(tokenizer, trained, validation, seed=0, builds_cache=True)
    packings = [each.sequences.packing for each in sequences.components]
    assert [packing.long for packing in packings] == ["reject", "split", "truncate"]
    assert [packing.not_trained for packing in packings] == [BIT, 0, BIT]
    assert [split.not_trained for split in validated.splits] == [BIT, 0, BIT]
    answers, texts, truncated = (trained_texts(packing, tokenizer) for packing in packings)
    assert answers
    assert set(answers) < set(ANSWERS)
    assert "".join(texts) in ("some text</s>", "x" * 300 + "</s>")
    assert set(truncated) == {"d" * len(truncated[0])}
    line = rejection(
        lambda: opening.open_sequences(
            tokenizer,
            trained.model_copy(update={"datasets": [MixedDataset(**c)]}),
            Validation(fraction=0.0),
            seed=0,
            builds_cache=True,
        )
    )
    assert line.startswith('training.datasets, c: training.long_conversations = "reject": 2 of 2 conversations have ')


def test_an_evaluation_reads_each_conversation_once(template, tmp_path):
    tokenizer = template(PLAIN).tokenizer
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    options = {"dataset": "json", "dataset_path": str(file), "dataset_format": "messages", "packing": "best_fit"}
    trained = training(**options, cache_folder=str(tmp_path / "cache"), seq_len=64, long_conversations="drop")
    sequences = evaluate.open_sequences(tokenizer, trained, builds_cache=True)
    targets = [as_lists(sequences[index])[1] for index in range(sequences.n_sequences)]
    texts = ["Blue</s>", "two</s>", "three</s>"]
    trained_on = [
        token for tokens in tokenizer.encode([text[:-4] for text in texts]) for token in [*tokens, tokenizer.eos]
    ]
    assert sorted(t for own in targets for t in own if t != IGNORED) == sorted(trained_on)


def test_identity_and_cache_are_of_the_template_and_the_format(template, tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{**conversation("b"), "prompt": "a", "response": "b"}])
    opened = [Opened(tmp_path, template(source).tokenizer, file) for source in (PLAIN, PLAIN.replace("\n", ": "))]
    by_columns = Opened(tmp_path, template(PLAIN).tokenizer, file, dataset_format="prompt_response")
    assert len({own.packing.cache.folder for own in [*opened, by_columns]}) == 3
    assert opened[0].identity == by_columns.identity, "the same tokens"
    assert opened[0].identity != opened[1].identity
    everything = Opened(
        tmp_path, template(MARKED.replace("{% if m.role == 'assistant' %}", "{% if true %}")).tokenizer, file
    )
    assert everything.identity != opened[0].identity, "the same tokens, but all are trained on"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": []}, "expected a list of messages in column messages"),
        ({"messages": "hello"}, "expected a list of messages"),
        ({"messages": ["hello"]}, 'message 1: expected an object with a string "role"'),
        ({"messages": [{"role": 1, "content": "a"}]}, "message 1: expected an object"),
        ({"messages": [{"role": "assistant"}]}, 'message 1: expected "content", or "tool_calls"; found only role'),
        ({"messages": [{"role": "assistant", "content": ["a"]}]}, "content of message 1"),
        ({"messages": [{"role": "user", "content": "a"}]}, 'no message has the role "assistant"'),
        ({"text": "a"}, "(training.dataset_messages_key)"),
    ],
)
def test_a_row_that_is_no_conversation_is_rejected_by_its_place(template, tmp_path, row, problem):
    file = write_rows(tmp_path / "a.jsonl", [conversation("fine"), row])
    line = rejection(lambda: Opened(tmp_path, template(PLAIN).tokenizer, file))
    assert f"{file}, line 2: " in line
    assert problem in line


def test_what_a_template_rejects_is_named_by_its_place(template, tmp_path):
    source = PLAIN + "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    file = write_rows(tmp_path / "a.jsonl", [conversation("fine"), {"messages": CONVERSATIONS[1]}])
    line = rejection(lambda: Opened(tmp_path, template(source).tokenizer, file))
    assert f"{file}, line 2: " in line
    assert line.endswith("cannot render it: too many")


CONFIG = {
    "model.hf_assets_path": "assets",
    "training.dataset": "json",
    "training.dataset_path": "data.jsonl",
    "training.dataset_format": "messages",
    "training.packing": "best_fit",
    "training.document_mask": True,
}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"training.packing": "concatenate"}, "training.packing"),
        ({"training.document_mask": False}, "training.document_mask"),
        ({"model.hf_assets_path": ""}, "model.hf_assets_path"),
        ({"training.dataset": "text"}, "training.dataset_format"),
        ({"training.dataset_text_key": "content"}, "training.dataset_text_key"),
        ({"training.dataset_prompt_key": "question"}, "training.dataset_prompt_key"),
    ],
)
def test_options_that_contradict_one_another_are_rejected(tmp_path, changed, key):
    assert load(tmp_path, CONFIG).config.training.dataset_format == "messages"
    settings = CONFIG | changed
    assert_rejected(lambda: load(tmp_path, settings), settings, {key: "set" if key in CONFIG else "read only when"})


def test_special_tokens_in_text_are_not_taken_for_ends_of_documents(tmp_path):
    settings = {"training.special_tokens_in_text": "special"}
    rejected = {
        "training.packing": 'EOS in a text ends no document (training.special_tokens_in_text = "special")',
        "training.special_tokens_in_text": "bytes have no special tokens; set model.hf_assets_path",
    }
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)
    load(tmp_path, settings | {"training.packing": "best_fit", "model.hf_assets_path": "assets"})


def test_best_fit_packing_is_not_for_streaming(tmp_path):
    settings = {"training.packing": "best_fit", "training.streaming": True, "training.dataset": "c4"}
    rejected = {"training.streaming": "best-fit packing needs the lengths of all documents"}
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)
