"""Show the first rows of a run's data as text, with marks at trained tokens, special tokens and limits of documents."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from titanlite.config.loader import printable
from titanlite.config.schema import Training
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from titanlite.data.packing import Mixture, Sequence, Sequences

TRAINED, SPECIAL, FRAME = "bold green", "cyan", "dim"
"""Rich's styles of tokens that are trained on, of special tokens, and of headings."""
OF_BYTES = {256: "BOS", 257: "EOS"}


def show_rows(
    tokenizer: Tokenizer, sequences: Sequences | Mixture, training: Training, n: int, html: Path | None
) -> None:
    """Print the first n rows that a run trains on, in order; if `html` is a path, also write these rows as a page."""
    console, attention = Console(highlight=False, soft_wrap=True), "crosses the limits of documents"
    attention = "stays within a document" if training.document_mask else attention
    marks = ("⟦trained on⟧", TRAINED), " not trained on ", ("«special token»", SPECIAL)
    option = f"training.document_mask = {str(training.document_mask).lower()}"
    texts = [Text.assemble(*marks, f"; attention {attention} ({option})")]
    console.print(texts[0])
    for number, (sequence, _) in enumerate(itertools.islice(sequences.read(0, 1), n)):
        place = f"row {number + 1} of step {number // training.global_batch_size + 1}"
        if training.datasets:
            (dataset,) = sequences.datasets_of([number])
            place += f", {training.datasets[dataset].name}"
        texts.append(row_text(tokenizer, sequence, training, place))
        console.print(texts[-1])
    if html:
        from titanlite.tools.html_page import page, printed  # late import: matplotlib takes a second

        html.write_text(page("Rows of a run", "".join(printed(text, 110) for text in texts)), encoding="utf-8")
        print(f"wrote {html}")


def row_text(tokenizer: Tokenizer, sequence: Sequence, training: Training, place: str) -> Text:
    """Return a row's text: all inputs, then the last target. Tokens that are targets count as trained on."""
    from titanlite.data.loader import SequenceShard, collate, count  # late import: it imports torch
    from titanlite.data.packing import PADDING
    from titanlite.loss import IGNORED

    batch = collate([sequence], SequenceShard(), document_mask=training.document_mask, pin=False)
    size, n_masked, n_padding, _ = count([sequence]).tolist()
    targets = batch.targets[0].tolist()
    n_inputs = int((sequence.targets != PADDING).sum())
    tokens = [*batch.tokens[0].tolist()[:n_inputs], *(targets[-1:] if targets[-1] != IGNORED else [])]
    is_trained = [False, *(target != IGNORED for target in targets)][: len(tokens)]
    begins = [at for at in range(n_inputs) if sequence.document_positions[at] == 0]
    counts = f"{size - n_masked - n_padding:,} of {size:,} targets trained on, {n_masked:,} not, {n_padding:,} padding"
    text = Text().append(f"\n{place}: {counts}; documents: {len(begins):,}\n", FRAME)
    for number, (begin, end) in enumerate(itertools.pairwise([*begins, len(tokens)]), 1):
        text.append(f"--- document {number:,}: {end - begin:,} tokens\n", FRAME)
        text.append_text(_document(tokenizer, tokens[begin:end], is_trained[begin:end]))
    return text


def _document(tokenizer: Tokenizer, tokens: list[int], is_trained: list[bool]) -> Text:
    text, was_trained = Text(), False
    for trained, name, content in tokenizer.call(runs_of, tokens, is_trained):
        text.append("⟦" if trained > was_trained else "⟧" if trained < was_trained else "", TRAINED)
        text.append(printable(content, "\n\t"), SPECIAL if name and not trained else TRAINED if trained else "")
        was_trained = trained
    return text.append("⟧\n" if was_trained else "\n", TRAINED)


def names_of_special_tokens(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return a name for each special token and each token without text; "" for all other tokens."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return [OF_BYTES.get(token, f"token {token}") if token > 255 else "" for token in tokens]
    special = {n: each.content for n, each in tokenizer.tokenizer.get_added_tokens_decoder().items() if each.special}
    known = tokenizer.tokenizer.id_to_token
    return [special.get(token, "" if known(token) is not None else f"token {token}") for token in tokens]


def runs_of(tokenizer: Tokenizer, tokens: list[int], is_trained: list[bool]) -> list[tuple[bool, str, str]]:
    """Split tokens into runs of one kind. Return for each run whether it is trained on, its name ("" for text) and its
    text. Tokens are decoded together with all earlier tokens, because some decoders drop a leading space."""
    before, runs, begin = "", [], 0
    keys = zip(is_trained, names_of_special_tokens(tokenizer, tokens), strict=True)
    for (trained, name), run in itertools.groupby(keys):
        end = begin + len([*run])
        text = tokenizer.decode(tokens[:end])
        plain = tokenizer.decode(tokens[begin:end]) if before.endswith("\ufffd") else text[len(before) :]
        runs.append((trained, name, f"«{name}»" * (end - begin) if name else plain))
        before, begin = text, end
    return runs
