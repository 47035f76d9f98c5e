"""Choose the next tokens from logits, greedily or at random. Shapes: B sequences, V vocabulary."""

import collections
import dataclasses

import torch
from torch import Tensor

from titanlite.init import parameter_seed


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Describes how a token is drawn: temperature, then top-k, then top-p (nucleus sampling, arXiv:1904.09751)."""

    temperature: float = 0.0  # the logits are divided by this number; 0: always choose the most likely token (greedy)
    top_k: int = 0  # draw from the k most likely tokens; 0: from all tokens
    top_p: float = 1.0  # draw from the smallest set of most likely tokens whose total probability is at least top_p
    seed: int = 42


def prompt_generators(prompts: list[str], seed: int) -> list[torch.Generator]:
    """Return a random number generator for each prompt, seeded by `seed`, the prompt, and the number of equal prompts
    before it. Thus a generated text does not depend on other prompts, and equal prompts get different texts."""
    counts: collections.Counter[str] = collections.Counter()
    generators = []
    for prompt in prompts:
        # repr is valid UTF-8; the text of a command-line argument may not be
        generators.append(torch.Generator().manual_seed(parameter_seed(seed, f"{counts[prompt]}/{prompt!r}")))
        counts[prompt] += 1
    return generators


def probabilities(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the probabilities with which tokens are drawn, in descending order (0 if excluded), and the tokens."""
    logits_BV, tokens_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    logits_BV = (logits_BV - logits_BV[:, :1]) / sampling.temperature  # the largest logit is 0: exp cannot overflow
    if sampling.top_k:
        logits_BV[:, sampling.top_k :] = -torch.inf
    probabilities_BV = logits_BV.softmax(-1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV  # total probability of all more likely tokens
    return probabilities_BV.where(before_BV < sampling.top_p, 0), tokens_BV


def choose(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> list[int]:
    """Return the next token of each sequence. At a temperature above 0, each generator draws one number per call."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    numbers = [torch.rand(1, generator=each, dtype=torch.float64) for each in generators]
    probabilities_BV, tokens_BV = probabilities(logits_BV, sampling)
    cumulative_BV = probabilities_BV.cumsum(-1)
    # Take the first token whose cumulative probability exceeds the threshold: its probability is never 0.
    thresholds_B1 = torch.stack(numbers).to(logits_BV.device) * cumulative_BV[:, -1:]
    return tokens_BV.gather(1, torch.searchsorted(cumulative_BV, thresholds_B1, right=True))[:, 0].tolist()
