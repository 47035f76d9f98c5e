"""Compare token ids with those of transformers.

Kinds of tokenizers x texts, long texts, prompts and conversations.

python -m verification.same_tokens [--long] prints a table by counts, and each case that differs. --long also cuts texts
at the sizes of a run, and tries every tokenizer class of the installed transformers.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.auto import tokenization_auto

from titanlite.config.loader import ConfigError
from titanlite.data import hf_tokenizer
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.tokenizer import encode_prompts
from titanlite.techniques.data.chat_template import ChatTemplate
from titanlite.techniques.data.rows import Row

PROSE = [topics[name] for name in sorted(topics)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Kind(NamedTuple):
    """A kind of tokenizer: how it is built, and what the other files of its folder say."""

    tokenizer: Callable[[], tokenizers.Tokenizer]
    settings: Mapping[str, Any] = MappingProxyType({})
    files: Mapping[str, Any] = MappingProxyType({})


def byte_level(prefix_space: bool = False, normalizer: Any = None, split: str = "") -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not split)
    built.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), level]) if split else level
    )
    if normalizer:
        built.normalizer = normalizer
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(PROSE[:8], trainer)
    return built


def sentencepiece(
    scheme: str = "prepend", split: bool = True, byte_fallback: bool = True, fuse_unk: bool = True
) -> tokenizers.Tokenizer:
    """BPE with the words of sentencepiece: a space before each text by a normalizer or by Metaspace."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=fuse_unk))
    if scheme == "prepend":
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{i:02X}>" for i in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + fallback, show_progress=False)
    built.train_from_iterator(" ".join(PROSE[:10]).split(), trainer)
    content = json.loads(built.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < len(SPECIAL)]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unigram(scheme: str = "always", normalizer: Any = None) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.Unigram())
    built.normalizer = normalizer or normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    built.train_from_iterator(PROSE[:8], trainer)
    return built


def word_piece(lowercase: bool = True) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=100))
    built.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    built.pre_tokenizer, built.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    built.train_from_iterator(
        PROSE[:8], trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    )
    built.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return built


def word_level() -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.train_from_iterator(
        PROSE[:4], trainers.WordLevelTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    )
    return built


def added(built: tokenizers.Tokenizer, **flags: bool) -> tokenizers.Tokenizer:
    """Add tokens with flags, special ones and others."""
    built.add_special_tokens([AddedToken("<|x|>", **flags), AddedToken("<S>", **flags)])
    built.add_tokens([AddedToken("<think>", **flags), AddedToken("</think>", **flags), AddedToken("\n\n", **flags)])
    return built


def processed(built: tokenizers.Tokenizer, template: str) -> tokenizers.Tokenizer:
    ids = [(token, number) for number, token in enumerate(SPECIAL) if token in template]
    built.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return built


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAST = {**NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}
KINDS = {
    "byte-level BPE": Kind(byte_level, FAST),
    "byte-level BPE, add_bos_token = false": Kind(byte_level, {**FAST, "add_bos_token": False}),
    "byte-level BPE, add_bos_token = true": Kind(byte_level, {**FAST, "add_bos_token": True, "add_eos_token": True}),
    "byte-level BPE, no settings": Kind(byte_level),
    "byte-level BPE, prefix space": Kind(lambda: byte_level(True), {**FAST, "add_prefix_space": True}),
    "byte-level BPE, NFC": Kind(lambda: byte_level(normalizer=normalizers.NFC(), split=LLAMA3), FAST),
    "byte-level BPE, post-processor": Kind(lambda: processed(byte_level(split=LLAMA3), "<s> $A"), FAST),
    "byte-level BPE, BOS and EOS": Kind(lambda: processed(byte_level(), "<s> $A </s>"), FAST),
    "byte-level BPE, two tokens before": Kind(lambda: processed(byte_level(), "[INST] <s> $A"), FAST),
    "byte-level BPE, trimmed offsets": Kind(lambda: trimmed(byte_level()), FAST),
    "GPT2Tokenizer": Kind(byte_level, {**NAMED, "tokenizer_class": "GPT2Tokenizer"}),
    "Qwen2Tokenizer": Kind(
        lambda: byte_level(normalizer=normalizers.NFC()), {**NAMED, "tokenizer_class": "Qwen2Tokenizer"}
    ),
    "Prepend": Kind(sentencepiece, FAST),
    "Prepend, BOS": Kind(lambda: processed(sentencepiece(), "<s> $A"), FAST),
    "LlamaTokenizerFast": Kind(
        sentencepiece, {**NAMED, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    ),
    "GemmaTokenizerFast": Kind(sentencepiece, {**NAMED, "tokenizer_class": "GemmaTokenizerFast"}),
    "Metaspace always": Kind(lambda: sentencepiece("always"), FAST),
    "Metaspace first": Kind(lambda: sentencepiece("first"), FAST),
    "Metaspace never": Kind(lambda: sentencepiece("never"), FAST),
    "Metaspace first, unsplit": Kind(lambda: sentencepiece("first", split=False), FAST),
    "Metaspace, unknown tokens": Kind(lambda: sentencepiece("always", byte_fallback=False), FAST),
    "Unigram": Kind(unigram, FAST),
    "Unigram first": Kind(lambda: unigram("first"), FAST),
    "Unigram, stripped": Kind(
        lambda: unigram(normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])), FAST
    ),
    "T5Tokenizer": Kind(lambda: processed(unigram(), "$A </s>"), {**NAMED, "tokenizer_class": "T5TokenizerFast"}),
    "WordPiece": Kind(word_piece, FAST),
    "WordPiece, cased": Kind(lambda: word_piece(lowercase=False), FAST),
    "WordLevel": Kind(word_level, FAST),
    "added tokens": Kind(lambda: added(byte_level(), normalized=False), FAST),
    "added tokens, lstrip": Kind(lambda: added(byte_level(), lstrip=True), FAST),
    "added tokens, rstrip": Kind(lambda: added(byte_level(), rstrip=True), FAST),
    "added tokens, lstrip and rstrip, Prepend": Kind(lambda: added(sentencepiece(), lstrip=True, rstrip=True), FAST),
    "added tokens, single_word": Kind(lambda: added(byte_level(), single_word=True), FAST),
    "added tokens, normalized, Prepend": Kind(lambda: added(sentencepiece(), normalized=True), FAST),
    "added tokens, normalized, lower case": Kind(
        lambda: added(byte_level(normalizer=normalizers.Lowercase()), normalized=True), FAST
    ),
    "added tokens, normalized, Unigram": Kind(lambda: added(unigram(), normalized=True), FAST),
    "special_tokens_map.json": Kind(
        byte_level, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"special_tokens_map.json": NAMED}
    ),
    "special_tokens_map.json, objects": Kind(
        byte_level,
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": True}}},
    ),
    "added_tokens.json": Kind(byte_level, FAST, {"added_tokens.json": {"<extra>": 500}}),
    "additional_special_tokens": Kind(byte_level, {**FAST, "additional_special_tokens": ["<|x|>", "<call>"]}),
    "added_tokens_decoder": Kind(
        byte_level,
        {
            **FAST,
            "added_tokens_decoder": {
                "500": {"content": "<call>", "special": True},
                "3": {"content": "<|im_start|>", "special": False},
            },
        },
    ),
    "split_special_tokens": Kind(byte_level, {**FAST, "split_special_tokens": True}),
    "extra ids, config.json": Kind(byte_level, FAST, {"config.json": {"model_type": "llama", "vocab_size": 500}}),
}
TEXTS = ["", "a", "Hello, world", " leading", "trailing ", "  two  spaces  ", "\n", "line\n\nline\r\n\ttab \n"]
TEXTS += ["naïve — 東京 🎉 \ufb01 \uff21\uff22 é e\u0301", "1234567 3.14", "<0x41> <think>x</think> \n\n", "</ s> <s"]
TEXTS += ["x" * 200, "\u200b\ufeff\u00a0\u3000\u0000\u0007", "ACGT" * 50, "İstanbul ẞ ǅ"]
SPELLED = [
    "one</s><s>two <|im_end|>",
    "<s>",
    "a<unk>b [INST] x [/INST]",
    "<s>a</s>",
    "</s>",
    " <|im_start|>user\n",
    "<S> <|x|><s> ",
]
"""Texts that spell special tokens out."""

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SYSTEM, USER, ANSWER = (
    {"role": role, "content": text}
    for role, text in {"system": "Be brief.", "user": "What is the weather? ", "assistant": " Sunny, 東京: é."}.items()
)
AGAIN, LAST = {"role": "user", "content": "Again?\n"}, {"role": "assistant", "content": "No.\n\nNever."}
THOUGHT = {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nIt is sunny."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, ANSWER],
    "system first": [SYSTEM, USER, ANSWER],
    "assistant first": [ANSWER, USER, LAST],
    "system, assistant": [SYSTEM, ANSWER, USER, LAST],
    "two turns": [USER, ANSWER, AGAIN, LAST],
    "same role twice": [USER, ANSWER, LAST, AGAIN],
    "tool call": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        ANSWER,
    ],
    "tool call with words": [USER, {**ANSWER, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "sun"}, LAST],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]},
        ANSWER,
    ],
    "reasoning": [USER, THOUGHT],
    "reasoning, two turns": [USER, THOUGHT, AGAIN, {**THOUGHT, "content": "<think>\nhm\n</think>\n\nNo."}],
    "reasoning_content": [
        USER,
        {**ANSWER, "reasoning_content": "let me see"},
        AGAIN,
        {**LAST, "reasoning_content": "hm"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "white space": [{"role": "user", "content": " \n"}, {"role": "assistant", "content": "\n\n x \n"}],
    "unknown role": [{"role": "developer", "content": "Be brief."}, USER, ANSWER],
}
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
CONTENT = "{% if m.content is string %}{{ m.content }}{% elif m.content %}" + PARTS + "{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
CALLS += "{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + CONTENT + CALLS + "<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = """{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' %}
    {%- generation %}
      CONTENT{{- '<|im_end|>' }}
    {%- endgeneration %}
    {{- '\\n' }}
  {%- else %}
    {{- (m.content if m.content is string else '') + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = MARKED.replace("CONTENT", (CONTENT + CALLS).replace("{{", "{{-").replace("{%", "{%-"))
TOOLS_FIRST = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
KEEPS_LAST = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + (c | tojson) + '</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen3's: reasoning of the answers after the last question only."""
DROPS_ALL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = (m.content or '').split('</think>')[-1] %}[/INST]{{ content }}</s>"
    "{% else %}[INST]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[/INST]PROMPT{% endif %}"
)
"""As those of DeepSeek's distilled models: reasoning of no answer."""
TEMPLATES = {
    "ChatML": CHATML,
    "ChatML, generation": MARKED,
    "default system, tools": TOOLS_FIRST + CHATML,
    "[INST]": INST,
    "alternating": ALTERNATING,
    "no special tokens": PLAIN,
    "reasoning of the last turn": KEEPS_LAST,
    "reasoning dropped": DROPS_ALL.replace("PROMPT", ""),
    "reasoning dropped, asked for": DROPS_ALL.replace("PROMPT", "<think>\n"),
    "with the date": "{{ strftime_now('%Y') }} " + CHATML,
}


def trimmed(built: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    built.post_processor = processors.ByteLevel(trim_offsets=True)
    return built


def write(folder: Path, kind: Kind, built: tokenizers.Tokenizer | None = None) -> None:
    """Write the folder of a kind of tokenizer."""
    for file in folder.iterdir():
        file.unlink()
    (built or kind.tokenizer()).save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": dict(kind.settings)} if kind.settings else {}
    for name, content in {**files, **kind.files}.items():
        (folder / name).write_text(json.dumps(content))


def load(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def long_text(n: int) -> str:
    """Prose, with what may be cut badly: runs of spaces, digits and letters, and text that is not English."""
    odd = [
        " " * 90,
        "1234567" * 9,
        "acgt" * 40,
        "東京都は" * 20,
        "🎉é" * 15,
        "\n" * 9 + " \n\t ",
        "x",
        "aaaa" * 30,
        "<think>\n\n</think>",
    ]
    parts, size = [], 0
    while size < n:
        text = PROSE[len(parts) % len(PROSE)][:700] if len(parts) % 3 else odd[len(parts) // 3 % len(odd)]
        parts.append(text)
        size += len(text)
    return "".join(parts)[:n]


BOTH = "transformers raises an error, too"
Case = tuple[str, bool | None, str]
"""What was compared, whether it is equal (None: a line instead), and what differs."""


def compared(name: str, own: Callable[[], list[int]], theirs: Callable[[], list[int]]) -> Case:
    """Compare the tokens of one input; an error of transformers is equal to a line."""
    try:
        expected = theirs()
    except Exception as error:
        with contextlib.suppress(ConfigError, ValueError):
            own()
            return name, False, f"transformers raises {error!r}"
        return name, None, BOTH
    try:
        tokens = own()
    except (ConfigError, ValueError) as error:
        return name, None, str(error)
    return name, tokens == expected, f"{len(tokens)} tokens, {len(expected)} of transformers"


def texts(own: HuggingFaceTokenizer, theirs: Any) -> Iterator[Case]:
    for text in TEXTS:
        plain = own.encode([text], special=True)[0].tolist()
        yield compared("text", lambda text=text: own.encode([text])[0].tolist(), lambda plain=plain: plain)
        yield compared(
            "text", lambda plain=plain: plain, lambda text=text: theirs(text, add_special_tokens=False)["input_ids"]
        )
        if text:
            yield compared(
                "prompt", lambda text=text: encode_prompts(own, [text])[0], lambda text=text: theirs(text)["input_ids"]
            )
    special = set(theirs.all_special_ids) - {theirs.unk_token_id}
    for text in SPELLED:
        tokens = own.encode([text])[0].tolist()
        yield "special tokens in a text are ordinary", not special & set(tokens), repr(text)
        yield compared(
            "special tokens in a text, by the option",
            lambda text=text: own.encode([text], special=True)[0].tolist(),
            lambda text=text: theirs(text, add_special_tokens=False)["input_ids"],
        )


def long_texts(own: HuggingFaceTokenizer, theirs: Any, size: int) -> Iterator[Case]:
    """Compare texts over each cut."""
    same = ("a" * size, " " * size, "word " * (size // 5), "東" * size, "12" * (size // 2))
    for text in (long_text(size), *same[: len(same) if size < 10**4 else 1]):  # of one letter all is one word
        yield compared(
            "long text",
            lambda text=text: own.encode([text])[0].tolist(),
            lambda text=text: theirs(text, add_special_tokens=False)["input_ids"],
        )


def conversations(own: HuggingFaceTokenizer, templates: Collection[str]) -> Iterator[Case]:
    for template in templates:
        own.loaded.chat_template = source = TEMPLATES[template]
        chat = ChatTemplate(own)
        for name, messages in CONVERSATIONS.items():
            for tools in (None, TOOLS) if "tools" in source else (None,):
                case = f"conversation, {template}"

                def tokens(messages: Any = messages, tools: Any = tools, chat: Any = chat) -> list[int]:
                    return (
                        chat.encode(chat.conversations(Row(messages, tools))[-1:], "uint32")[0] & 0x7FFFFFFF
                    ).tolist()

                def expected(messages: Any = messages, tools: Any = tools, **options: Any) -> list[int]:
                    return own.loaded.apply_chat_template(messages, tools=tools, return_dict=False, **options)

                _, is_equal, what = compared(case, tokens, expected)
                yield case, is_equal, what if is_equal is None else f"{name}: {what}"
                yield from masks(chat, own, case, name, messages, tools)
        question = [{"role": "user", "content": "Why?"}]
        yield compared(
            "chat prompt",
            lambda chat=chat: chat.prompt("Why?"),
            lambda question=question: own.loaded.apply_chat_template(
                question, add_generation_prompt=True, return_dict=False
            ),
        )


def squeezed(text: str) -> str:
    return "".join(text.replace("▁", " ").split())


def masks(chat: Any, own: Any, case: str, name: str, messages: list[dict[str, Any]], tools: Any) -> Iterator[Case]:
    """Compare what is trained on, decoded, with the answers: each answer's text once, and no other message's."""
    with contextlib.suppress(ConfigError, ValueError):
        parts = chat.conversations(Row(messages, tools))
        trained = []
        for stored in chat.encode(parts, "uint32"):
            trained.append(
                own.tokenizer.decode([token for token in stored.tolist() if token < 2**31], skip_special_tokens=False)
            )
        found = squeezed("".join(trained))
        for message in messages:
            text = message.get("content")
            text = text.split("</think>")[-1] if isinstance(text, str) else ""
            normal = squeezed(own.tokenizer.decode(own.encode([text])[0].tolist(), skip_special_tokens=False))
            if len(normal) > 3 and "<unk>" not in normal:
                times = sum(each == message for each in messages)
                is_right = found.count(normal) == (times if message["role"] == "assistant" else 0)
                yield f"mask, {case}", is_right, f"{name}: {normal!r} in {found!r}"


def classes() -> Iterator[str]:
    """Yield the names of the tokenizer classes that AutoTokenizer knows."""
    names = {name for name in tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name}
    yield from sorted(names)


def sweep(
    kinds: dict[str, Kind], folder: Path, size: int, templates: Collection[str] = TEMPLATES.keys()
) -> Iterator[tuple[str, Case]]:
    """Yield the cases of some kinds of tokenizers; without templates, those of long texts alone."""
    for name, kind in kinds.items():
        write(folder, kind)
        try:
            theirs = load(folder)
        except Exception as error:
            yield name, compared("folder", lambda: HuggingFaceTokenizer(folder).prefix, raising(error))
            continue
        yield name, compared("folder", lambda: [*HuggingFaceTokenizer(folder).prefix[:0]], lambda: [])
        with contextlib.suppress(ConfigError):  # it has no fast tokenizer
            yield from of_kind(name, HuggingFaceTokenizer(folder), theirs, size, templates)


def of_kind(
    name: str, own: HuggingFaceTokenizer, theirs: Any, size: int, templates: Collection[str]
) -> Iterator[tuple[str, Case]]:
    """Yield the cases of one tokenizer."""
    cases = (texts(own, theirs), conversations(own, templates)) if templates else ()
    for case in itertools.chain(long_texts(own, theirs, size), *cases):
        yield name, case


def raising(error: Exception) -> Callable[[], list[int]]:
    def call() -> list[int]:
        raise error

    return call


def class_kinds() -> dict[str, Kind]:
    """Return a kind for each tokenizer class of transformers, on a tokenizer.json of its kind of model."""
    built = {"BPE": byte_level(), "Unigram": unigram(), "WordPiece": word_piece(), "WordLevel": word_level()}
    kinds = {}
    for name in classes():
        try:
            model = getattr(tokenization_auto.tokenizer_class_from_name(name), "model", None)
        except ImportError:  # it needs a package that is not installed
            model = None
        own = built.get(getattr(model, "__name__", "BPE"), built["BPE"])
        kinds[f"class {name}"] = Kind(lambda own=own: own, {**NAMED, "tokenizer_class": name})
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true")
    is_long, chunk, overlap = parser.parse_args().long, hf_tokenizer.CHUNK, hf_tokenizer.OVERLAP
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
    counts: dict[str, Counter[str]] = {}

    def run(kinds: dict[str, Kind], size: int, *templates: Collection[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for kind, (name, is_equal, what) in sweep(kinds, Path(folder), size, *templates):
                result = {True: "equal", False: "differs", None: "a line"}[is_equal]
                result = "both reject" if what == BOTH else result
                counts.setdefault(name, Counter())[result] += 1
                if is_equal is False:
                    print(f"differs: {kind}: {name}: {what}", flush=True)

    hf_tokenizer.CHUNK, hf_tokenizer.OVERLAP = 1000, 400
    run(KINDS | (class_kinds() if is_long else {}), 4000)
    hf_tokenizer.CHUNK, hf_tokenizer.OVERLAP = chunk, overlap
    if is_long:
        run(KINDS, 2 * chunk + 12_345, ())
    for name, count in counts.items():
        results = ("equal", "both reject", "a line", "differs")
        print(f"{name:50}" + "".join(f"{result} {count[result]:>6,}  " for result in results))


if __name__ == "__main__":
    main()
