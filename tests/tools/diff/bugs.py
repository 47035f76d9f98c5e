"""Inject bugs and see whether `titanlite diff` names the module and the phase of each.

    python -m tests.tools.diff.bugs                       all bugs under all layouts: a table, about half an hour
    python -m tests.tools.diff.bugs --only "loss.py"      those whose file or description has this text

A bug is a mutant of verification/mutants. Its edit is made in a copy of the project, which takes three steps of each
layout in float64. They are compared with a single process without the bug. A bug that changes no number under a layout
is of no interest there: its fingerprints are those of the layout without it, but for rounding.

Exit status: 0 if every bug that changes a number is named rightly.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.parallel.test_parity import resolve
from tests.tools.diff.runs import run, single
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import distance
from titanlite.tools.diff.compare import compare_runs
from titanlite.tools.parity.process_pool import ProcessPool, RankError
from verification.mutants.__main__ import copy_project, mutated
from verification.mutants.table import MUTANTS, Mutant

STEPS = 3
ROUNDING = 1e-9
"""Three steps of AdamW turn rounding of float64 into no more than this."""
BASE: dict[str, Any] = {
    "debug__fingerprint_freq": 1,
    "model__n_heads": 8,
    "model__n_kv_heads": 4,
    "model__qk_norm": True,
    "model__attention_bias": "all",
    "training__local_batch_size": 4,
    "training__document_mask": True,
    "training__loss_chunks": 3,
}
EXPERTS = {
    "model__moe__n_experts": 4,
    "model__moe__n_experts_per_token": 2,
    "model__moe__expert_dim": 24,
    "model__moe__n_shared_experts": 1,
    "model__moe__normalize_scores": True,
    "model__moe__balance_bias": True,
    "model__moe__balance_bias_rate": 1e-2,
}
PIPELINE = {"pipeline_parallel_degree": 2, "model__n_layers": 5}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "replicas": (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "FSDP x tp": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "ring": (4, {"context_parallel_degree": 4}),
    "Ulysses": (2, {"context_parallel_degree": 2, "context_parallel_ulysses_degree": 2}),
    "1F1B": (2, PIPELINE),
    "zero bubble": (2, PIPELINE | {"pipeline_parallel_schedule": "InterleavedZeroBubble"}),
    "experts": (
        4,
        EXPERTS | {"expert_parallel_degree": 2, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    ),
    "Muon": (2, {"optimizer__name": "Muon", "data_parallel_shard_degree": 2}),
}

LOSS, LOSS_BACKWARD, FIRST, UPDATE = "forward loss", "backward norm|gradient output.*", "forward layers.0", "update .*"
LAST_BACKWARD = r"(gradient|backward) layers\.\d.*"
NAMED = {
    "a rank counts its own valid tokens only": LOSS_BACKWARD,
    "each tensor-parallel rank counts the tokens that all of them share": LOSS_BACKWARD,
    "ranks that share their tokens each add the loss": LOSS,
    "gradients are clipped to a norm of 1 whatever the option says": UPDATE,
    "the load of experts is never balanced": r"input .*\.router\..*",
    "norms and biases decay": r"update .*(norm\.weight|bias)",
    "the decay of the learning rate ends one step early": UPDATE,
    "the warm-up is one step behind": UPDATE,
    "the squares of replicated gradients are counted once for each replica": UPDATE,
    "the gradient norm is that of this rank's shards": UPDATE,
    "the learning rate is set in the first parameter group only": UPDATE,
    "the largest logit is that of this rank's shard of the vocabulary": LOSS,
    "the first token of each shard of the vocabulary is no target": LOSS,
    "ignored targets add to the loss under loss parallel": LOSS,
    "ignored targets have gradients under loss parallel": LOSS_BACKWARD,
    "each rank subtracts 1 at a target, also if another one has it": LOSS_BACKWARD,
    "the output head's gradient is that of the last chunk": "gradient output.weight",
    "gradients of the last activations are not summed over the vocabulary's shards": "backward norm",
    "token 0 is taken for an ignored target when tokens are counted": f"{LOSS}|{LOSS_BACKWARD}",
    "all parameters of a shape begin with the same numbers": "input .*",
    "outputs into the residual stream are scaled by the layers, not by twice as many": r"input .*\.(wo|w2)\.weight",
    "biases begin at 1": "input .*bias",
    "a frequency is that of the next pair of channels": FIRST,
    "angles are computed from frequencies in float32": FIRST,
    "the norm of queries also norms keys": "gradient .*q_norm.*",  # both norms begin at 1
    "the gate of SwiGLU is the other product": FIRST,
    "the second norm of a block is skipped": FIRST,
    "a document's first token attends to the document before": FIRST,
    "positions are ignored": FIRST,
    "gradients are divided by the ranks": "gradient .*",
    "replicas do not sum their gradients": "gradient .*",
    "gradients are divided by the microbatches": "gradient .*",
    "the loss is that of the last microbatch": LOSS,
    "the loss is divided by the number of tokens of the first step": LOSS_BACKWARD,
    "tokens of other ranks' shards get the embedding of row 0": "forward tok_embeddings",
    "replicas read the same sequences": "input tokens",
    "the ranks of a ring read different sequences": "input tokens",
    "results over other keys are merged with each other's weights": FIRST,
    "gradients of values of other ranks are lost": LAST_BACKWARD,
    "gradients of keys do not end at their owner": LAST_BACKWARD,
    "queries attend to later keys of an earlier rank": FIRST,
    "queries attend to the document before theirs": FIRST,
    "heads come back in another order": FIRST,
    "all data-parallel ranks read the same sequences": "input tokens",
    "a token's scores have the bias that balances the experts": r"forward layers\.\d",
    "scores are not normalized": r"forward layers\.\d",
    "the biases push tokens to busy experts": r"input .*\.router\..*",
    "a token gets the result of one of its experts": r"forward layers\.\d",
    "the gradient of a gate lacks the score": LAST_BACKWARD,
    "shared experts are left out": r"forward layers\.\d",
    "the scores of other ranks arrive in another order": r"forward layers\.\d",
    "the gradient of rows that were received lacks that through w3": LAST_BACKWARD,
    "gradients of weights that all ranks have are not summed": r"gradient .*\.router\..*|gradient .*",
    "an update is scaled by the shorter side of a matrix": UPDATE,
    "momentum does not look one gradient ahead": UPDATE,
    "weights do not decay under Muon": UPDATE,
}
"""What should be named first, by the description of a mutant: a pattern of "PHASE TENSOR"."""


def take_steps(folder: Path, layouts: Iterable[str]) -> None:
    """Take the steps of layouts by the code that is imported here, and write each one's fingerprints to a folder of its
    name. A layout that fails writes its error there."""
    pools: dict[int, ProcessPool] = {}
    for name in layouts:
        world_size, options = LAYOUTS[name]
        own = folder / name
        own.mkdir()
        job = resolve(own, world_size, BASE | options | {"job__dump_folder": own, "training__global_batch_size": 16})
        if world_size not in pools or pools[world_size].broken:
            pools[world_size] = ProcessPool(world_size, timeout_seconds=20)
        try:
            pools[world_size].run(run, job=job, steps=STEPS)
        except RankError as error:
            (own / "error").write_text(str(error)[-2000:])
    for pool in pools.values():
        pool.close()


def take_single_steps(folder: Path) -> None:
    """Take the steps of a single process for each layout."""
    pool = ProcessPool(1)
    for name, (world_size, options) in LAYOUTS.items():
        own = folder / name
        own.mkdir()
        job = resolve(own, world_size, BASE | options | {"training__global_batch_size": 16})
        pool.run(run, job=single(job, own), steps=STEPS)
    pool.close()


def with_bug(mutant: Mutant, folder: Path) -> None:
    """Take the steps of all layouts by a copy of the project that has a bug."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        copy_project(copy)
        path = copy / "titanlite" / mutant.file
        path.write_text(mutated(mutant, path.read_text()))
        environment = os.environ | {"PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.tools.diff.bugs", "--take-steps", str(folder)]
        subprocess.run(command, cwd=copy, env=environment, check=True, stderr=subprocess.DEVNULL)


def are_equal(a: Path, b: Path) -> bool:
    """Return whether the steps of two runs differ by nothing but rounding."""
    for step in range(1, STEPS + 1):
        (_, in_a), (_, in_b) = file.read(a, step), file.read(b, step)
        if max(distance(in_a[name], in_b[name]) for name in in_a) > ROUNDING:
            return False
    return True


def verdict(mutant: Mutant, with_it: Path, without: Path, reference: Path) -> tuple[bool, str]:
    """Return whether what is named first is right, and what is to be said about it. The paths are folders of runs."""
    if (with_it / "error").exists():
        return True, "fails"
    if are_equal(with_it, without):
        return True, "-"
    steps = list(compare_runs(reference, with_it))
    first = next((step for step in steps if step.first), None)
    if first is None or first.first is None:
        return False, "NOT SEEN"
    said = f"{first.number} {first.first.name}" + (f" x {first.first.ratio:.4g}" if first.first.ratio != 1 else "")
    return bool(re.fullmatch(NAMED[mutant.what], first.first.name)), said


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--take-steps", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.take_steps:
        take_steps(arguments.take_steps, LAYOUTS)
        return 0
    bugs = [each for each in MUTANTS if each.what in NAMED and arguments.only in f"{each.file} {each.what}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, take in (("right", lambda own: take_steps(own, LAYOUTS)), ("single", take_single_steps)):
            (folder / kind).mkdir()
            take(folder / kind)
        for layout in LAYOUTS:  # without a bug, nothing is named
            assert all(
                step.first is None for step in compare_runs(folder / "single" / layout, folder / "right" / layout)
            )
        n_seen, wrong = 0, []
        for number, mutant in enumerate(bugs):
            own = folder / str(number)
            own.mkdir()
            with_bug(mutant, own)
            print(f"{mutant.file}: {mutant.what}", flush=True)
            for layout in LAYOUTS:
                right, said = verdict(mutant, own / layout, folder / "right" / layout, folder / "single" / layout)
                n_seen += said not in ("-", "fails")
                if said != "-":
                    print(f"    {layout:<12} {'' if right else 'WRONG '}{said}", flush=True)
                if not right:
                    wrong.append((mutant.what, layout))
    print(f"{len(bugs)} bugs, {len(LAYOUTS)} layouts: {n_seen} runs differ, {n_seen - len(wrong)} are named rightly")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
