"""Compute the single-process reference: plain tensors, the full global batch in one forward, torch's own clipping; no
FSDP, gradient accumulation or torch.distributed. A layout that agrees with it computes what the model defines."""

import logging
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite import build
from titanlite.checkpoint.tensors import named_tensors
from titanlite.config import Config, ConfigError
from titanlite.data.packing import PackedSequences, Sequence, positions_in_documents
from titanlite.init import init_weights
from titanlite.launch.progress import progress
from titanlite.loss import IGNORED, TokenLoss, cross_entropy
from titanlite.model import Documents
from titanlite.optimizer import scale_gradients, set_lr
from titanlite.techniques.data.own import open_own
from titanlite.techniques.lora import Adapters

Trace = dict[str, Tensor]
"""Results of training steps in order, as full tensors on the CPU: "initial weight NAME" for every parameter; for every
step "step N loss", "step N losses of datasets" (float64 [datasets]), and before clipping "step N norm" and "step N
gradient NAME"; "final weight NAME", for buffers too; "validation loss", the loss of the batch after the last step."""


def trace_of(kind: str, tensors: dict[str, Tensor]) -> Trace:
    """Copy tensors to the CPU, all-gathering sharded ones, and return them under the names f"{kind} {name}"."""
    # Hide DTensor's warning that a gather over two mesh axes takes two collectives: a parity test may be slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    given = {name: t for name, t in tensors.items() if t is not None}  # a frozen weight has no gradient
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in given.items()}
    return {f"{kind} {name}": tensor.detach().cpu().clone() for name, tensor in full.items()}


class RandomSequences:
    """Sequences of random tokens, computed from the seed and the global index alone, or the sequences of own.data. The
    numbers of valid targets differ widely, so that a loss averaged over ranks or gradient accumulation steps instead of
    tokens differs from the reference. The sequences belong to three datasets in turn, as in a mixture."""

    names = ("a", "b", "c")

    def __init__(self, config: Config):
        self.vocab_size, self.seq_len, self.seed = config.model.vocab_size, config.training.seq_len, config.debug.seed
        build, sections = config.own.data, (config.model, config.training, config.debug)
        self.own = open_own(build, *sections)[0] if build else None

    def __getitem__(self, index: int) -> Sequence:
        if self.own:
            return self.own[index]
        generator = np.random.RandomState((self.seed % 2**32, index))  # numpy's seeds are below 2**32
        tokens = generator.randint(self.vocab_size, size=self.seq_len + 1)
        ends = generator.random_sample(self.seq_len) < 3 / self.seq_len  # about four documents per sequence
        ends[0] = False  # each sequence has a valid target, so that each step has a loss
        targets = np.where(ends, IGNORED, tokens[1:])
        targets[generator.randint(1, self.seq_len + 1) :] = IGNORED
        return Sequence(tokens[:-1], targets, positions_in_documents(ends))

    def datasets_of(self, positions: Iterable[int]) -> list[int]:
        return [position % len(self.names) for position in positions]

    read = PackedSequences.read


def token_losses(
    model: nn.Module,
    compute_dtype: torch.dtype,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    *masked: Tensor | Documents,
    loss: TokenLoss | None = None,
) -> Tensor:
    """Return the loss of each token in nats, [B, T], and 0 where the target is IGNORED. All weights except routers' are
    cast to `compute_dtype`. `masked`: document positions and Documents under a document mask, otherwise nothing."""
    weights = {
        name: parameter if ".router." in name else parameter.to(compute_dtype)
        for name, parameter in model.named_parameters()
    }
    logits = torch.func.functional_call(model, weights, (tokens_BT, *masked))
    return (loss or cross_entropy)(logits.flatten(0, 1), targets_BT.flatten(), None).view_as(targets_BT)


def run_reference(config: Config, device: torch.device, *, steps: int) -> Trace:
    """Take training steps of a resolved config in this process alone, and return their trace."""
    training, model = config.training, build.meta_model(config)
    if config.lora.rank:
        adapters = Adapters(model, config.lora, lambda: model)
    if config.float8.enable or config.int8.enable:
        from titanlite.techniques.low_precision import convert_linear_layers

        float8 = config.float8.model_copy(update={"enable_fsdp_float8_all_gather": False})
        degree = config.parallelism.tensor_parallel_degree
        convert_linear_layers(model, float8, config.int8, tensor_parallel_degree=degree, device=device)
    if config.lora.rank:
        adapters.shard_weights(None, None)
    model.materialize(device)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    optimizer = build.build_optimizer(config, model)
    balance = build.build_balance(config, model, device)
    sequences, batch_size = RandomSequences(config), training.global_batch_size
    compute_dtype = getattr(torch, training.mixed_precision_param)
    scale = training.initial_loss_scale if compute_dtype == torch.float16 else 1.0
    parameters = dict(model.named_parameters())

    def losses_of_step(step: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the valid tokens of the global batch, and that over those of each dataset."""
        batch = [sequences[index] for index in range((step - 1) * batch_size, step * batch_size)]
        tokens, targets, positions = (torch.from_numpy(np.stack(column)) for column in zip(*batch, strict=True))
        tokens, targets = tokens.to(device), targets.to(device)
        masked = (positions.to(device), Documents(positions)) if training.document_mask else ()
        valid = targets != IGNORED
        if not valid.any():
            problem = f"own.data: the sequences of step {step} have no valid target, so there is no loss to compare"
            raise ConfigError([f"{problem}; raise training.local_batch_size or give the sequences targets"])
        losses = token_losses(model, compute_dtype, tokens, targets, *masked, loss=config.own.loss)
        datasets = torch.arange((step - 1) * batch_size, step * batch_size, device=device) % len(sequences.names)
        own = [datasets == number for number in range(len(sequences.names))]
        means = [losses[rows].detach().double().sum() / valid[rows].sum().clamp(min=1) for rows in own]
        return losses.sum() / valid.sum(), torch.stack(means)

    trace = trace_of("initial weight", parameters)
    with progress("single-process reference", total=steps, unit="steps") as advance:
        for step in range(1, steps + 1):
            set_lr(optimizer, step, config.optimizer, config.lr_scheduler)
            optimizer.zero_grad()
            loss, of_datasets = losses_of_step(step)
            if balance:
                balance.begin_step(scale)
            (loss * scale).backward()
            scale_gradients(parameters.values(), 1 / scale)
            gradients = trace_of(f"step {step} gradient", {name: p.grad for name, p in parameters.items()})
            norm = nn.utils.clip_grad_norm_(parameters.values(), training.max_norm)
            trace |= trace_of(f"step {step}", {"loss": loss, "losses of datasets": of_datasets, "norm": norm})
            trace |= gradients
            optimizer.step()
            if balance:
                balance.update(norm.isfinite(), all_reduce=False)
            advance(1)
    trace |= trace_of("final weight", named_tensors(model))
    with torch.no_grad():
        return trace | trace_of("validation", {"loss": losses_of_step(steps + 1)[0]})
