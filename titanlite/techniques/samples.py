"""Samples of a training run: after each validation, prompts are continued with the current weights. Each generated
token takes a forward pass over full sequences, shaped as in validation, so no layout needs a KV cache."""

import torch
from torch import nn

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Model, Training, Validation
from titanlite.data.loader import Batch
from titanlite.data.open import build_tokenizer
from titanlite.data.tokenizer import Rows, continuation, encode_prompts
from titanlite.launch.progress import alive
from titanlite.metrics.logger import Logger
from titanlite.parallel import fsdp
from titanlite.parallel.logits import logits_at
from titanlite.train_step import Observer, TrainStep


class Samples(Observer):
    """Continues validation.generate_prompts greedily. Raises ConfigError if a prompt is too long for a sequence."""

    def __init__(self, training: Training, validation: Validation, model: Model, train_step: TrainStep, logger: Logger):
        self.train_step, self.logger = train_step, logger
        self.training, self.prompts, self.n_tokens = training, validation.generate_prompts, validation.generate_tokens
        rows = Rows(model.vocab_size, "validation.generate_prompts", "change the prompt")
        self.tokenizer = build_tokenizer(model.hf_assets_path).fit(rows)
        self._tokens = encode_prompts(self.tokenizer, self.prompts)
        for text, prompt in zip(self.prompts, self._tokens, strict=True):
            if len(prompt) > (most := training.seq_len - self.n_tokens):
                problem = f"validation.generate_prompts: {show(text)} has {len(prompt)} tokens: expected at most {most}"
                raise ConfigError([f"{problem}, which is training.seq_len - validation.generate_tokens"])

    def after_validation(self, step: int) -> None:
        self.logger.log_samples(step, self.prompts, self.generate())

    @torch.no_grad()
    def generate(self) -> list[str]:
        """Return the text that follows each prompt. Every rank must call it, and all ranks return the same texts."""
        model, device = self.train_step.model, self.train_step.device
        size, texts = self.training.local_batch_size, []
        loss, model.output.loss = model.output.loss, logits_at
        for first in range(0, len(self._tokens), size):
            prompts = self._tokens[first : first + size]
            for prompt, tokens in zip(prompts, self._continue(model, prompts, device), strict=True):
                texts.append(continuation(self.tokenizer, prompt, tokens))
        model.output.loss = loss
        fsdp.reshard(model)
        return texts

    def _continue(self, model: nn.Module, prompts: list[list[int]], device: torch.device) -> list[list[int]]:
        shape = self.training.local_batch_size, self.training.seq_len
        texts, running = [list(prompt) for prompt in prompts], set(range(len(prompts)))
        positions = torch.arange(shape[1]).repeat(shape[0], 1)
        for _ in range(self.n_tokens):
            tokens = torch.zeros(shape, dtype=torch.int64)
            for row, text in enumerate(texts):
                tokens[row, : len(text)] = torch.tensor(text)
            last = torch.tensor([row * shape[1] + len(text) - 1 for row, text in enumerate(texts)])
            batch = Batch(tokens, last, positions, positions if self.training.document_mask else None).to(device)
            chosen = model(batch.tokens, **batch.inputs()).argmax(-1).tolist()
            alive()
            running -= {row for row in running if chosen[row] == self.tokenizer.eos}
            for row in running:
                texts[row].append(chosen[row])
            if not running:
                break
        return [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]
