"""The project speaks the field's language: retired words stay out, and the words that people search for are found."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("titanlite", "tests", "verification", "benchmarks", "configs", "docs", "examples")
ENDINGS = (".py", ".md", ".toml", ".sh", ".yml", ".yaml")
# This file lists the retired words, and the change log must name the old ones.
EXEMPT = ("tests/test_language.py", "CHANGELOG.md")

RETIRED = {
    r"micro-?steps?": "gradient accumulation step",
    r"refus(e|es|ed|ing|als?)": "reject, unsupported",
    r"by chance": "stochastic rounding",
    r"(first|second|8-bit|int8|low-bit|two|4-bit) moments?": "optimizer states, exp_avg, exp_avg_sq",
    r"loss in (\d+ )?parts": "chunked cross-entropy",
    r"recomputation": "activation checkpointing",
    r"every n-th block": "selective AC, every N layers",
    r"held against": "compared with",
    r"held[- _]out": "validation split",
    r"(proof|proven) (sequences|in|by|against)": "parity test, verified",
    r"goes? red|went red": "fails",
    r"broken on purpose": "injected bug",
    r"the house": "architecture",
    r"without a word": "silently",
    r"what travels|goes round|on its way": "is sent, is communicated",
    r"rehears(e|es|ed|al|als|ing)": "dry run",
    r"the tape|tapes?": "op trace",
    r"passages?": "phase",
    r"ledger": "MemoryTimeline",
    r"pric(er|ed|ing)": "cost model",
    r"economies": "optimization summary",
    r"allowance": "non-tensor overhead",
    r"key heads?": "KV heads",
    r"head[ _]size": "head_dim",
    r"attention[ _]kernels?": "attention backend",
    r"rungs?|the ladder": "reference configs",
    r"dealt|deals": "partitioned, assigned",
    r"common guide|usual layout": "heuristic baseline",
    r"pictures?": "figures",
    r"lean(er)?": "memory-efficient",
    r"speaks? for all": "contributes the loss",
    r"(begin|end|ending) marks?|marks of": "special tokens: BOS, EOS",
    r"hosts|per[_ ]host|devices_per_host|a host|one host|each host|several hosts": "node",
}
"""Regular expression of a word that may not come back, and what the field says instead."""

RETIRED_IN_PROSE = {
    r"living|(that|which|it|who|groups?|ranks?|runs?|process|still) lives?": "participating, runs, stays",
    r"heal(s|ed|ing)": "recovering, recovered",
    r"(go|goes|going|went) on(?! (the|a|an|each|every|this|that|top|to)\b)": "continue, resume",
    r"tak(e|es|en|ing) note": "record, register",
    r"but for": "except",
}
"""The same, for the package and the pages."""

CONNECTIVES = re.compile(
    r"(that of|those of|of|which|what|whose|no|so|as|by|for|in|with|from|to|than|also|only|not|its|and|or|but|because|"
    r"since|where|when|else)\b",
    re.IGNORECASE,
)
"""The beginning of a trailing comment without a subject: the reader has to find the noun that it belongs to."""

ANY_RETIRED = re.compile("|".join(RETIRED), re.IGNORECASE)

TERMS = {
    "gradient accumulation": "titanlite/train_step.py",
    "activation checkpointing": "titanlite/parallel/activation_checkpoint.py",
    "selective AC": "titanlite/parallel/activation_checkpoint.py",
    "full AC": "titanlite/parallel/activation_checkpoint.py",
    "chunked cross-entropy": "titanlite/loss.py",
    "cross-entropy": "titanlite/loss.py",
    "sequence packing": "titanlite/data/packing.py",
    "packed sequence": "titanlite/data/packing.py",
    "document mask": "titanlite/data/loader.py",
    "tokenizer": "titanlite/data/tokenizer.py",
    "special tokens": "titanlite/data/tokenizer.py",
    "streaming": "titanlite/techniques/data/streaming.py",
    "Hugging Face": "titanlite/data/documents.py",
    "JSON lines": "titanlite/config/schema.py",
    "validation split": "titanlite/data/packing.py",
    "out of memory": "titanlite/metrics/profilers.py",
    "memory snapshot": "titanlite/metrics/profilers.py",
    "Chrome trace": "titanlite/metrics/profilers.py",
    "multi-node": "titanlite/launch/launcher.py",
    "torchrun": "titanlite/launch/launcher.py",
    "SLURM": "slurm.sh",
    "HSDP": "titanlite/parallel/fsdp.py",
    "FSDP2": "titanlite/parallel/fsdp.py",
    "fully_shard": "titanlite/parallel/fsdp.py",
    "ZeRO-3": "titanlite/parallel/fsdp.py",
    "ZeRO-1": "titanlite/parallel/fsdp.py",
    "CPU offload": "titanlite/parallel/fsdp.py",
    "mixed precision": "titanlite/parallel/fsdp.py",
    "prefetch": "titanlite/parallel/fsdp.py",
    "tensor parallel": "titanlite/parallel/tensor.py",
    "sequence parallel": "titanlite/parallel/tensor.py",
    "loss parallel": "titanlite/parallel/tensor.py",
    "parallelize_module": "titanlite/parallel/tensor.py",
    "async tensor parallel": "titanlite/techniques/async_tensor_parallel.py",
    "torch.compile": "titanlite/parallel/compile.py",
    "pipeline parallel": "titanlite/parallel/pipeline.py",
    "microbatch": "titanlite/parallel/pipeline.py",
    "zero-bubble": "titanlite/parallel/pipeline.py",
    "1F1B": "titanlite/parallel/pipeline.py",
    "pipeline bubble": "titanlite/tools/plan/schedule.py",
    "context parallel": "titanlite/parallel/tiled_attention.py",
    "ring attention": "titanlite/parallel/ring.py",
    "Ulysses": "titanlite/parallel/ulysses.py",
    "zig-zag": "titanlite/parallel/tiles.py",
    "attention backend": "titanlite/parallel/attention.py",
    "log-sum-exp": "titanlite/parallel/attention.py",
    "DeviceMesh": "titanlite/parallel/mesh.py",
    "flight recorder": "titanlite/launch/process_group.py",
    "float8": "titanlite/parallel/float8.py",
    "8-bit optimizer states": "titanlite/techniques/low_bit_adam.py",
    "stochastic rounding": "titanlite/techniques/low_bit_adam.py",
    "AdamW": "titanlite/optimizer.py",
    "learning-rate schedule": "titanlite/optimizer.py",
    "gradient clipping": "titanlite/optimizer.py",
    "gradient norm": "titanlite/optimizer.py",
    "loss scaling": "titanlite/techniques/loss_scale.py",
    "resharding": "titanlite/checkpoint/checkpointer.py",
    "distributed checkpoint": "titanlite/checkpoint/checkpointer.py",
    "resume": "titanlite/checkpoint/checkpointer.py",
    "MFU": "titanlite/metrics/logger.py",
    "TensorBoard": "titanlite/metrics/logger.py",
    "tokens per second": "titanlite/metrics/logger.py",
    "grouped-query attention": "titanlite/model.py",
    "rotary": "titanlite/model.py",
    "SwiGLU": "titanlite/model.py",
    "RMSNorm": "titanlite/model.py",
    "tied embeddings": "titanlite/config/schema.py",
    "weight decay": "titanlite/config/schema.py",
    "warmup": "titanlite/config/schema.py",
    "global batch size": "titanlite/config/schema.py",
    "DTensor": "titanlite/init.py",
    "fake tensors": "titanlite/tools/plan/op_trace.py",
    "dry run": "titanlite/tools/plan/dry_run.py",
    "NVLink": "titanlite/metrics/devices.py",
    "all-gather": "titanlite/parallel/tensor.py",
    "layout search": "titanlite/tools/advise/search.py",
    "parity test": "titanlite/tools/parity/compare.py",
    "single-process reference": "titanlite/tools/parity/reference.py",
}
"""Term of the field, and the file that does it."""


def sources() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    files = [path for path in files if path.suffix in ENDINGS and "__pycache__" not in path.parts]
    return sorted(path for path in files if str(path.relative_to(ROOT)) not in EXEMPT)


def plain_sources() -> list[Path]:
    """Return the files of the package, the pages and README."""
    return [*sorted((ROOT / "titanlite").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def retired_words(text: str, retired: dict[str, str] = RETIRED) -> list[str]:
    """Return the lines of a text that hold a retired word, each with the word to use."""
    any_retired = ANY_RETIRED if retired is RETIRED else re.compile("|".join(retired), re.IGNORECASE)
    return [
        f"line {number}: {match[0]!r}: say {instead}"
        for number, line in enumerate(text.replace("_", " ").splitlines(), 1)
        if any_retired.search(line)  # most lines have none: one search instead of one for each word
        for pattern, instead in retired.items()
        if (match := re.search(rf"(?<![\w-])({pattern})(?![\w-])", line, re.IGNORECASE))
    ]


def comments_without_subject(code: str) -> list[str]:
    """Return the trailing comments of a module that begin with a bare connective, with their lines."""
    return [
        f"line {token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
        if CONNECTIVES.match(token.string.lstrip("# "))
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_retired_word(path: Path):
    assert retired_words(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", ["A microstep ends.", "def refuse(key):", "the n_microsteps", "is held against one"])
def test_a_retired_word_is_found(line: str):
    assert len(retired_words(f"a good line\n{line}")) == 1


@pytest.mark.parametrize("path", plain_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_plain(path: Path):
    text = path.read_text(encoding="utf-8")
    assert retired_words(text, RETIRED_IN_PROSE) == []
    assert path.suffix != ".py" or comments_without_subject(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "the living groups",
        "a lock whose run lives",
        "the healed one",
        "training goes on",
        "it takes note",
        "all but for x",
    ],
)
def test_a_retired_word_of_prose_is_found(line: str):
    assert len(retired_words(f"the lives of tensors go on a heap\n{line}", RETIRED_IN_PROSE)) == 1


@pytest.mark.parametrize("comment", ["of the layer", "What is left", "that of a rank", "no copy", "else it waits"])
def test_a_comment_without_a_subject_is_found(comment: str):
    code = f"# of a line of its own\nnumber = 1  # the rank of this process\ntext = '# of'\nx = 2  # {comment}\n"
    assert comments_without_subject(code) == [f"line 4: # {comment}"]


def normalized(text: str) -> str:
    """Return a text on one line, in lower case and without the characters that break or decorate words."""
    return re.sub(r"[\s#*`_-]+", " ", text).lower()


PAGES = normalized("\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]))


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_is_found(term: str):
    assert normalized(term) in PAGES, "README and docs"
    assert normalized(term) in normalized((ROOT / TERMS[term]).read_text()), TERMS[term]


def test_enough_terms_are_checked():
    assert len(TERMS) >= 60
