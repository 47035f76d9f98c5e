"""Prompts as tokens, and tokens as the text that follows a prompt."""

from titanlite.config.loader import ConfigError, show
from titanlite.data.tokenizer import Tokenizer


def encode_prompts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each prompt, with what the tokenizer adds around a text. Raises ConfigError for a prompt
    without tokens, or with one that the model lacks."""
    prompts = [[*tokenizer.prefix, *tokens.tolist(), *tokenizer.suffix] for tokens in tokenizer.encode(texts)]
    for text, prompt in zip(texts, prompts, strict=True):
        if not prompt:
            raise ConfigError([f"prompt {show(text)}: has no tokens, and the tokenizer adds none; give it some text"])
    return with_rows(tokenizer, texts, prompts)


def with_rows(tokenizer: Tokenizer, texts: list[str], prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of texts. Raises ConfigError for one that the tokenizer's model has no row for."""
    for text, prompt in zip(texts, prompts, strict=True) if tokenizer.rows else ():
        tokenizer.rows.require(text, prompt)
    return prompts


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Return the text of the tokens that follow a prompt. They are decoded behind it, since some decoders drop the
    space that a text begins with."""
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
