"""Load and check the user's own parts of a run (block, loss, data, ...), given by `--own FILE.py:NAME` or in Python."""

import dataclasses
import hashlib
import os
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.config.loader import ConfigError, check_all, show
from titanlite.config.own import Parts
from titanlite.config.regular_file import read_file
from titanlite.config.schema import Model, Parallelism, Training
from titanlite.launch.arguments import Parser
from titanlite.loss import IGNORED
from titanlite.model import Block, Llama
from titanlite.parallel.own_rules import ShardsWeights
from titanlite.parallel.tensor import BLOCK_STYLES

LARGEST_FILE = 2**24  # largest size, in bytes, of a file of the user's own parts
_LOADED_NOW = set[Path]()
GATHER = "reduce over `group`, or set parallelism.disable_loss_parallel = true"


@dataclasses.dataclass(frozen=True)
class Own(Parts):
    """Holds the user's own parts of a run; the default replaces a part that is not set (titanlite/config/own.py)."""

    digest: str = "in Python"

    def __post_init__(self) -> None:
        parts = {key: getattr(self, key) for key in ("block", "loss", "data", "optimizer", "metrics")}
        wrong = [
            f"own.{key}: {part!r:.40}: expected a function" for key, part in parts.items() if not callable(part or id)
        ]
        names = [name for name, style in self.styles.items() if not isinstance(style, ParallelStyle)]
        wrong += [f"own.styles: {name}: expected a ParallelStyle of torch, as ColwiseParallel()" for name in names]
        check_all(problems=wrong)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.place:
            raise ConfigError(['own: other processes load it from a file; write it there, and give own="FILE.py:NAME"'])
        return load_own, (self.place,)

    def prepare(self, stage: Llama, model: Model, training: Training, parallelism: Parallelism) -> None:
        """Give the user's blocks in a stage their parallel styles, and run each block once on the meta device. Raises
        ConfigError with a line for each problem that would change a block's result under some layout."""
        existing = {name for block in stage.layers.values() for name, _ in block.named_modules()}
        if len(stage.layers) == model.n_layers and (unknown := self.styles.keys() - existing):
            expected = "expected the name of a module in its block, as feed_forward.up"
            raise ConfigError([f"own.styles: {name}: no block has it; {expected}" for name in sorted(unknown)])
        for layer, block in stage.layers.items():
            block.styles = self.styles
            if not self.block:
                continue
            is_sharded = parallelism.tensor_parallel_degree > 1
            found = dict(self._wrong_names(block, is_sharded)) or _wrong_forward(block, model)
            if training.attention_backend != "auto" and "attention.inner_attention" not in dict(block.named_modules()):
                found["attention"] = "has no inner_attention, which context parallel and masks replace"
            if found:  # report only the first wrong layer: most layers have the same problems
                raise ConfigError([f"layers.{layer}.{name}: {problem}" for name, problem in found.items()])

    def _wrong_names(self, block: nn.Module, is_sharded: bool) -> Iterator[tuple[str, str]]:
        """Yield the name of each module or tensor of a block that layouts cannot shard, with the reason."""
        theirs = [name for name, module in block.named_modules() if isinstance(module, ShardsWeights)]
        for name, module in block.named_modules():
            if any(f"{name}.".startswith(f"{each}.") for each in theirs):
                continue
            parameters = dict(module.named_parameters(name, recurse=False))
            if parameters and is_sharded and name not in {*BLOCK_STYLES, *self.styles}:
                kind = f"a {type(module).__name__} without a tensor-parallel style"
                yield name, f"{kind}; give own.styles one, or name it as parallel/tensor.py does, as w1 to w3"
            for key, parameter in parameters.items():
                if not key.endswith(("weight", "bias")) or parameter.dim() not in (1, 2):
                    yield key, "a parameter that init does not know; make it a weight or a bias of 1 or 2 dimensions"
            for key, value in _state(module).items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", "a tensor that is no parameter has no values here; make it in forward"

    def check_loss(
        self, model: Model, parallelism: Parallelism, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Compute the user's loss of random logits in one call, by halves of the tokens, and from vocabulary shards.
        Raises ConfigError unless losses and gradients are equal. Every rank must call `check_loss`."""
        if not self.loss:
            return
        vocab_size, generator = model.vocab_size, torch.Generator(device).manual_seed(0)
        logits_NV = torch.randn(8, vocab_size, generator=generator, device=device).requires_grad_()
        targets_N = torch.randint(vocab_size, (8,), generator=generator, device=device)
        targets_N[2] = IGNORED
        losses_N, problem = self._losses(logits_NV, targets_N, None), ""
        halves = [self._losses(*half, None) for half in zip(logits_NV.split(4), targets_N.split(4), strict=True)]
        if not isinstance(losses_N, Tensor) or losses_N.shape != targets_N.shape or not losses_N.requires_grad:
            returned = f"{tuple(losses_N.shape)}" if isinstance(losses_N, Tensor) else type(losses_N).__name__
            problem = f"returns {returned} for 8 tokens; expected the loss of each, (8,), with a gradient"
        elif losses_N[2] != 0:
            problem = f"is {losses_N[2].item():.4f} where the target is {IGNORED}; expected 0"
        elif not _close(torch.cat(halves), losses_N):
            problem = "of a token depends on the other tokens, which other ranks or chunks may have"
        elif group.size() > 1 and not parallelism.disable_loss_parallel:
            shard_NV = logits_NV.chunk(group.size(), 1)[group.rank()].detach().requires_grad_()
            sharded_N = self._losses(shard_NV, targets_N, group)
            (grad_NV,) = torch.autograd.grad(losses_N.sum(), logits_NV)
            (own_NV,) = torch.autograd.grad(sharded_N.sum(), shard_NV)
            is_close = _close(sharded_N, losses_N)
            if not is_close or not _close(own_NV, grad_NV.chunk(group.size(), 1)[group.rank()]):
                problem = f"another {'gradient' if is_close else 'value'} with the vocabulary on {group.size()} ranks; "
                problem += GATHER
        if problem:
            raise ConfigError([f"own.loss: {problem}"])

    def _losses(self, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None) -> Any:
        try:
            return self.loss(logits_NV, targets_N, group)
        except Exception as error:
            problem = f"fails with logits of {tuple(logits_NV.shape)}: {type(error).__name__}: {error}"
            hint = f"; they are a shard of the vocabulary: {GATHER}" if group else ""
            raise ConfigError([f"own.loss: {problem}{hint}"]) from error


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)  # tolerances that allow the user's loss to round to bfloat16


def _state(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in {**vars(module), **module._buffers}.items() if not key.startswith("_")}


def _wrong_forward(block: nn.Module, model: Model) -> dict[str, str]:
    """Return the problems of a block's forward, by name of the wrong module; empty if there is no problem."""
    if not isinstance(block, Block):
        return {"": f"a {type(block).__name__}; expected a titanlite.model.Block, whose parts may be own"}
    dtype, options = next(block.parameters()).dtype, {"device": "meta"}
    x_ND = torch.empty(16, model.dim, dtype=dtype, **options)
    rope_TK2 = torch.empty(8, model.rope_width // 2, 2, dtype=torch.promote_types(dtype, torch.float32), **options)
    before = {name: _state(module) for name, module in block.named_modules()}
    try:
        y_ND = block(x_ND, rope_TK2, None)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
            return {}  # the forward reads values, which meta tensors lack
        return {"forward": f"fails on x of {tuple(x_ND.shape)}: {str(error).splitlines()[0]}"}
    if y_ND.shape != x_ND.shape:
        return {"forward": f"makes {tuple(y_ND.shape)} of {tuple(x_ND.shape)}; expected the same shape"}
    after = {name: _state(module) for name, module in block.named_modules()}
    text = "changes in forward; a block keeps no state from one sequence to the next"
    return {f"{n}.{key}": text for n in after for key in after[n] if after[n][key] is not before[n].get(key)}


def load_own(place: str | Parts) -> Parts:
    """Return the Own object at `place`, FILE.py:NAME. A Parts object is returned unchanged; "" gives default parts.
    sys.path does not change. Raises ConfigError with one line if the file cannot be read or run, or has no NAME."""
    if _LOADED_NOW:
        problem = 'calls titanlite while it is loaded; put its calls under `if __name__ == "__main__":`'
        raise ConfigError([f"--own {min(_LOADED_NOW)}: {problem}"])
    if not place or isinstance(place, Parts):
        return place or Parts()
    file, _, name = place.rpartition(":")
    path = Path(os.path.expanduser(file)).absolute()
    module = sys.modules[f"own_{path.stem}"] = types.ModuleType(f"own_{path.stem}")
    module.__file__ = str(path)
    try:
        content = read_file(path, LARGEST_FILE)
    except OSError as error:
        raise ConfigError([f"--own {place}: expected FILE.py:NAME: {error}"]) from None
    _LOADED_NOW.add(path)
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [getattr(error, "lineno", None), *(frame.lineno for frame in frames if frame.filename == str(path))]
        where = f"line {lines[-1]}: " if lines[-1] else ""
        problem = f"{where}{type(error).__name__}: {'; '.join(str(error).splitlines())}"
        raise ConfigError([f"--own {place}: {problem}"]) from error
    finally:
        _LOADED_NOW.discard(path)
    if not isinstance(own := getattr(module, name, None), Own):
        there = ", ".join(key for key, value in vars(module).items() if isinstance(value, Own)) or "none"
        raise ConfigError([f"--own {place}: {show(name)} is no titanlite.Own of this file; it has {there}"])
    digest = hashlib.sha256(content).hexdigest()[:16]
    return dataclasses.replace(own, place=f"{path}:{name}", digest=f"{path.name}:{name} {digest}")


def take_own(argv: list[str]) -> tuple[Parts, list[str]]:
    """Return the parts that `--own` names, and all other arguments. Raises ConfigError as load_own does."""
    parser = Parser("titanlite COMMAND CONFIG --own FILE.py:NAME", None)
    parser.add_argument("--own", default="", metavar="FILE.py:NAME")
    arguments, others = parser.parse_known_args(argv)
    return load_own(arguments.own or ":"), others
