"""Measure what fewer, larger attention calls could save where documents have one call each, as they do in a ring.

    python benchmarks/ring_document_calls.py [--lengths 16 64 256 1024] [--repeats 9]

A CPU is enough; every process has one thread, and everything is float32.

(a) Attention of 2048 tokens, forward and backward, with the heads of the debug model and of Llama 3.2 1B: one call per
    document of the given length, against one call for all of them in the batch dimension. This is the best that
    grouping could do, since nothing is padded or copied. The last line of each model has documents of 16 to 1024 tokens
    (log-uniform): one call per document, against one call per size class (the next power of two), with the documents
    copied into a padded tensor and back.
(b) The forward and backward of the debug model on two ranks of a ring, with one sequence of 4096 tokens: without a
    document mask, and with documents of each length. The last column is the most that (a) could save of it, as a
    share of the step.

The sides run alternately, and each figure is a median. Prints its samples as JSON lines, then the tables.
"""

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config import Launch, check, load
from titanlite.model import Documents
from titanlite.parallel.context import ContextAttention, local_positions
from titanlite.parallel.mesh import device_of, retain_freed_memory
from titanlite.parity.process_pool import ProcessPool
from titanlite.parity.training_run import TrainingRun

TOKENS, RING = 2048, 2
SHAPES = {"debug": (16, 8, 16), "llama3_1b": (32, 8, 64)}
"""Query heads, KV heads, head_dim."""
DEBUG_LAYERS = 6
CONFIG = Path(__file__).parents[1] / "configs" / "debug.toml"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BTHK, k_BTGK, v_BTGK) to out_BTHK"""


def document_lengths(mean: int | None) -> list[int]:
    """Return the lengths of the documents of 2048 tokens: equal ones or, for None, a mix of 16 to 1024."""
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        length = mean or round(math.exp(draw.uniform(math.log(16), math.log(1024))))
        lengths.append(min(length, TOKENS - sum(lengths)))
    return lengths


# ---------------------------------------------------------------------------------------------------------------------
# (a) Attention alone


def one_call_each(attention: ContextAttention, lengths: list[int]) -> Attention:
    documents = Documents(torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0))
    return lambda q, k, v: attention(q, k, v, documents)


def one_call(attention: ContextAttention, length: int) -> Attention:
    """Return attention of documents of one length, as the sequences of one batch."""

    def run(*qkv: Tensor) -> Tensor:
        out = attention(*(x.view(-1, length, *x.shape[2:]) for x in qkv))
        return out.reshape(qkv[0].shape)

    return run


def one_call_per_class(attention: ContextAttention, lengths: list[int]) -> Attention:
    """Return attention with one call for all documents whose lengths have the same next power of two."""
    classes: dict[int, list[Tensor]] = {}
    begin = 0
    for length in lengths:
        classes.setdefault(1 << (length - 1).bit_length(), []).append(torch.arange(begin, begin + length))
        begin += length
    indices = []
    for size, members in classes.items():
        places = torch.cat([torch.arange(len(tokens)) + n * size for n, tokens in enumerate(members)])
        indices.append((size, len(members), torch.cat(members), places))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        for size, count, tokens, places in indices:
            padded = [
                x.new_zeros(count * size, *x.shape[2:]).index_copy(0, places, x[0, tokens]).unflatten(0, (count, size))
                for x in (q, k, v)
            ]
            result = result.index_copy(1, tokens, attention(*padded).flatten(0, 1)[places].unsqueeze(0))
        return result

    return run


def milliseconds_of_attention(attention: Attention, qkv: list[Tensor], grad: Tensor) -> float:
    start = time.perf_counter()
    torch.autograd.grad(attention(*qkv), qkv, grad)
    return 1000 * (time.perf_counter() - start)


def compare_attention(model: str, length: int | None, repeats: int) -> tuple[float, float]:
    """Print the samples of one case, and return the medians with and without grouping, in milliseconds."""
    heads, kv_heads, head_dim = SHAPES[model]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, TOKENS, n, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads)]
    grad = torch.randn(qkv[0].shape, generator=generator)
    qkv = [x.requires_grad_() for x in qkv]
    attention, lengths = ContextAttention(ring_group=None, ulysses_group=None, backend="cpu"), document_lengths(length)
    grouped = one_call(attention, length) if length else one_call_per_class(attention, lengths)
    sides = [one_call_each(attention, lengths), grouped]
    torch.testing.assert_close(*(side(*qkv) for side in sides), rtol=1e-4, atol=1e-5)
    samples = [[milliseconds_of_attention(side, qkv, grad) for side in sides] for _ in range(repeats + 1)][1:]
    print(json.dumps({"attention": model, "length": length, "documents": len(lengths), "ms": samples}), flush=True)
    separate, together = (statistics.median(column) for column in zip(*samples, strict=True))
    return separate, together


# ---------------------------------------------------------------------------------------------------------------------
# (b) A step of the model


@functools.cache
def training_run() -> TrainingRun:
    retain_freed_memory()  # as train.py does
    launch = Launch.from_environment(n_devices=0)
    options = {
        "parallelism.context_parallel_degree": RING,
        "parallelism.data_parallel_shard_degree": 1,
        "training.document_mask": "true",
        "training.seq_len": TOKENS * RING,
        "training.local_batch_size": 1,
    }
    arguments = [f"--{key}={value}" for key, value in options.items()]
    return TrainingRun(check(load([str(CONFIG), *arguments]), launch), device_of(launch))


def seconds_of_step(length: int | None) -> float:
    """Time forward and backward on this rank, with documents of `length` tokens; None: without a document mask."""
    run = training_run()
    batch = run.loader.next()[0]
    positions = local_positions(TOKENS * RING, ring=RING, ulysses=1, rank=dist.get_rank()).unsqueeze(0)
    if length:
        positions = positions % length
    batch = batch._replace(positions=positions, document_positions=positions if length else None)
    dist.barrier()
    start = time.perf_counter()
    run.train_step.forward_backward([batch])
    seconds = time.perf_counter() - start
    run.optimizer.zero_grad()
    return seconds


def compare_steps(lengths: list[int], repeats: int) -> dict[int | None, float]:
    """Print the samples, and return the median milliseconds of the slower rank for each length of documents."""
    pool, cases = ProcessPool(RING, timeout_seconds=600), [None, *lengths]
    samples: dict[int | None, list[float]] = {length: [] for length in cases}
    for number in range(repeats + 1):
        for length in cases:
            milliseconds = 1000 * max(pool.run(seconds_of_step, length=length))
            if number:  # the first one is warm-up
                samples[length].append(milliseconds)
    pool.close()
    for length in cases:
        print(json.dumps({"step": "debug", "length": length, "ms": samples[length]}), flush=True)
    return {length: statistics.median(samples[length]) for length in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if wrong := [length for length in options.lengths if TOKENS % length]:
        parser.error(f"--lengths: {wrong[0]} does not divide {TOKENS}")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, {TOKENS} tokens per rank")
    cases = [(model, length) for model in SHAPES for length in [*options.lengths, None]]
    attention = {case: compare_attention(*case, options.repeats) for case in cases}
    steps = compare_steps(options.lengths, options.repeats)
    print(f"{'model':10} {'length':>6} {'documents':>9} {'one each, ms':>12} {'grouped, ms':>11} {'ratio':>6}")
    for (model, length), (each, grouped) in attention.items():
        count = len(document_lengths(length))
        print(f"{model:10} {length or 'mix':>6} {count:9} {each:12.2f} {grouped:11.2f} {grouped / each:6.3f}")
    print(f"{'length':>6} {'step, ms':>9} {'without, ms':>11} {'saving at most':>14}")
    for length in options.lengths:
        each, grouped = attention["debug", length]
        share = DEBUG_LAYERS * (each - grouped) / steps[length]
        print(f"{length:6} {steps[length]:9.0f} {steps[None]:11.0f} {share:14.1%}")


if __name__ == "__main__":
    main()
