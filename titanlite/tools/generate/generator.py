"""Generate text in batches: a forward for each prompt, then one forward per new token for all prompts of a batch."""

from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.build_llama import build_llama
from titanlite.config.loader import ConfigError
from titanlite.parallel.logits import logits_at
from titanlite.parallel.parallelize import shard_weights
from titanlite.tools.generate.cache import attach_cache
from titanlite.tools.generate.folder import ModelFolder

Choose = Callable[[torch.Tensor, range], list[int]]
"""Returns the next token of each sequence, given the logits [B, V] and the indices of the batch's prompts."""


class Generator:
    """Continues prompts with a model, at most `batch_size` prompts at a time.

    Under tensor parallelism every rank must make the same calls, and gets the same logits. Tensor parallelism shards
    activations over tokens, so the number of tokens of a forward must be a multiple of the degree. Prompts are padded
    at their end, and batches are padded with copies of the first sequence.

    Args:
        mesh: the tensor-parallel ranks; None: this process alone.
        expert_parallel: whether each rank of `mesh` has some of the experts, instead of a shard of each expert.
        longest: number of tokens of the longest prompt."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        dtype: torch.dtype,
        device: torch.device,
        mesh: DeviceMesh | None,
        expert_parallel: bool = False,
        batch_size: int,
        longest: int,
        max_new_tokens: int,
    ):
        self.path, self.device, self.max_new_tokens = folder.path, device, max_new_tokens
        self.windows = {layer.sliding_window for layer in folder.options.of_layers()}
        self.degree = 1 if mesh is None else mesh.size()
        self.n_sequences, length = self._padded(batch_size), self._padded(longest + max_new_tokens)
        self.model = build_llama(folder.options, max_seq_len=length).to(dtype)
        shard_weights(self.model, mesh, mesh if expert_parallel else None)
        self.model.materialize(device)
        folder.load(self.model)
        self.model.output.loss = logits_at
        n_kv_heads = folder.options.n_kv_heads // self.degree
        self.step = attach_cache(self.model, n_sequences=self.n_sequences, length=length, n_kv_heads=n_kv_heads)

    def _padded(self, count: int) -> int:
        return -(-count // self.degree) * self.degree

    def generate(self, prompts: list[list[int]], stop: set[int], choose: Choose) -> Iterator[list[int]]:
        """Yield, batch by batch, the tokens that continue each prompt, without the token of `stop` that ends a text."""
        for first in range(0, len(prompts), self.n_sequences):
            batch = prompts[first : first + self.n_sequences]
            yield from self._generate_batch(batch, range(first, first + len(batch)), stop, choose)

    @torch.no_grad()
    def _generate_batch(
        self, prompts: list[list[int]], indices: range, stop: set[int], choose: Choose
    ) -> list[list[int]]:
        logits_BV = torch.cat([self._prefill(sequence, prompt) for sequence, prompt in enumerate(prompts)])
        positions = [len(prompt) for prompt in prompts]
        texts: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        for remaining in range(self.max_new_tokens, 0, -1):
            if not logits_BV.isfinite().all():
                problem = f"{self.path}: the logits are NaN or infinite; expected finite ones"
                raise ConfigError([f"{problem}; take undamaged weights, or another --dtype"])
            tokens = choose(logits_BV, indices)
            running -= {sequence for sequence in running if tokens[sequence] in stop}
            for sequence in running:
                texts[sequence].append(tokens[sequence])
            if not running or remaining == 1:
                break
            logits_BV = self._decode(tokens, positions)[: len(prompts)]
            positions = [position + 1 for position in positions]
        return texts

    def _prefill(self, sequence: int, prompt: list[int]) -> torch.Tensor:
        """Put a prompt into the cache. Returns the logits of the prompt's last token, [1, V]."""
        self.step.sequence = sequence
        tokens = [*prompt, *[0] * (self._padded(len(prompt)) - len(prompt))]
        positions_BT = torch.arange(len(tokens), device=self.device)[None]
        last_B = torch.tensor([len(prompt) - 1], device=self.device)
        return self.model(torch.tensor([tokens], device=self.device), positions_BT, targets=last_B)

    def _decode(self, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """Add one token to each sequence. Returns the logits of the added tokens, [B, V]."""
        missing = self.n_sequences - len(tokens)
        tokens, positions = [*tokens, *tokens[:1] * missing], [*positions, *positions[:1] * missing]
        self.step.decode(positions, self.windows, self.device)
        tokens_B1 = torch.tensor(tokens, device=self.device)[:, None]
        return self.model(tokens_B1, self.step.positions_B[:, None], targets=self.step.sequences_B)
