"""Compare the optimizer step of another program with the same step in one process in float64.

This module computes the step twice: in float64, which is the reference, and in the other program's dtypes. The distance
between the two results says how large a difference rounding explains. Updated weights are compared with an update from
the other program's own gradients, if the program wrote them, since Adam can turn the rounding of a gradient into a step
of full size."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titanlite.build_llama import build_llama
from titanlite.config.loader import ConfigError, printable
from titanlite.config.schema import Optimizer
from titanlite.launch.progress import progress
from titanlite.loss import IGNORED, cross_entropy
from titanlite.model import Documents, Llama
from titanlite.optimizer import build_adam
from titanlite.rope import rope_table
from titanlite.tools.parity.compare import FLOAT64_TOLERANCE, ROUNDING_FACTOR
from titanlite.tools.parity.ratios import Row, clusters, describe, relative
from titanlite.tools.parity.recorded_step import Dtypes, RecordedStep, read_steps
from titanlite.tools.parity.reference import token_losses
from titanlite.tools.parity.routes import Routes, set_loads, with_balance_loss

CPU = torch.device("cpu")
CHUNK_LOGITS = 2**26  # largest number of logits in memory at a time (0.5 GiB in float64), unless a sequence has more
OTHER_TERMS = {"balance_loss": "balance loss", "z_loss_weight": "z-loss"}  # `loss` excludes them; gradients do not
FLOAT64 = Dtypes(weights="float64", compute="float64", reduce="float64")
Tensors = dict[str, Tensor]
_scalar = functools.partial(torch.tensor, dtype=torch.float64)


class Pass(NamedTuple):
    """The results of a recorded step's forward and backward, in float64, and the experts that each token chose."""

    losses_BT: Tensor
    loss: Tensor  # the weighted sum of the tokens' losses
    gradients: Tensors
    routes: Routes


def run_against(folder: Path) -> int:
    """Compare the recorded steps in a folder with the same steps in float64, and print the comparison. Return the exit
    status: 0 if rounding explains all differences; 1 if not; 2 if rounding would explain even a result with a wrong
    factor. Raises ConfigError if a file of the folder is wrong, or a result is NaN or infinite."""
    first, *second = read_steps(folder)
    statuses = [_report(folder, first), *(_report(folder / "second", each) for each in second)]
    return 1 if 1 in statuses else max(statuses)


def _report(folder: Path, recorded: RecordedStep) -> int:
    """Compare one recorded step, print the comparison, and return the exit status."""
    step, (n_sequences, seq_len) = recorded.step, recorded.tokens_BT.shape
    dtypes = ", ".join(f"{name} {dtype}" for name, dtype in step.dtypes.model_dump().items())
    print(f"{folder}: {printable(step.program) or 'a step of another program'}")
    print(f"{n_sequences} sequences of {seq_len} tokens, {recorded.n_valid} valid; {dtypes}\n")
    exact = forward_backward(recorded, FLOAT64)
    rounded = exact if step.dtypes == FLOAT64 else forward_backward(recorded, step.dtypes)
    groups = compare(recorded, exact, rounded)
    n_others, n_choices = exact.routes.others(rounded.routes)
    if n_others:
        whose = "recorded" if recorded.experts is not None else "rounded"
        print(f"{n_others:,} of {n_choices:,} {whose} choices of a token's experts are not those of float64\n")
    print(f"{'':48} {'theirs':>13} {'float64':>13} {'theirs/ours':>11} {'distance':>9} {'allowed':>9}")
    rows = [row for rows in groups.values() for row in rows]
    for row in rows:
        norms = f"{row.theirs.norm().item():13.6e} {row.ours.norm().item():13.6e}"
        ratio = "" if row.ratio is None else f"{row.ratio:.6f}"
        print(f"{row.name:48} {norms} {ratio:>11} {row.distance:9.1e} {row.allowed:9.1e}  {row.verdict}")
    if not all(row.equal for row in rows):
        print("\nDIFFERENT", *findings(recorded, groups), sep="\n")
        return 1
    if coarse := [row.name for row in rows if row.verdict == "coarse"]:
        number = f"{len(coarse)} of {len(rows)}, the first {coarse[0]}"
        print(f"\nTOO COARSE TO COMPARE: {number}: rounding explains half of it or more; take wider data types")
        return 2
    row = max(rows, key=lambda row: row.distance / row.allowed)
    print(f"\nequal: the largest distance, of {row.name}, is {row.distance:.1e} of {row.allowed:.1e} allowed")
    return 0


def compare(recorded: RecordedStep, in_float64: Pass, as_theirs: Pass) -> dict[str, list[Row]]:
    """Return the rows that compare the two programs, by kind: "experts", "loss", "gradients", "gradient norm",
    "updates". `as_theirs`: the step computed in the other program's dtypes."""
    step = recorded.step
    losses, loss, exact, routes = in_float64
    rounded_losses, rounded_loss, rounded, rounded_routes = as_theirs
    norm, distance = _norm(exact), _norm({name: rounded[name] - tensor for name, tensor in exact.items()})
    groups: dict[str, list[Row]] = {}
    if recorded.experts is not None:
        rows = routes.rows(rounded_routes)
        groups["experts"] = [Row(f"experts of {name}", *both, _allowed(error)) for name, *both, error in rows]
    if step.loss is not None:
        # The rounding error of a mean may be zero by accident, so take its bound, the mean of the tokens' errors.
        allowed = _allowed((rounded_losses - losses).abs().sum() / losses.sum())
        groups["loss"] = [Row("loss", _scalar(step.loss), loss, allowed, rounded_loss)]
    # A gradient that in float64 is only rounding, such as the gradient of keys' biases, has no digits to compare.
    not_zero = {name: rounded[name] for name, each in exact.items() if each.norm() > FLOAT64_TOLERANCE * norm}
    if recorded.gradients is not None:
        own, allowed_of = recorded.gradients, lambda x, ours: _allowed(relative(x, ours), norm / ours.norm())
        groups["gradients"] = [
            Row(f"gradient {name}", own[name], ours, allowed_of(rounded[name], ours), not_zero.get(name))
            for name, ours in exact.items()
        ]
    if step.gradient_norm is not None:
        allowed = _allowed(distance / norm) + (0.0 if step.dtypes.weights == "float64" else _error_of_sum(exact))
        groups["gradient norm"] = [Row("gradient norm", _scalar(step.gradient_norm), norm, allowed, _norm(rounded))]
    if recorded.weights_after is not None:
        groups["updates"] = _compare_updates(recorded, exact, rounded, {*not_zero})
    return groups


def _compare_updates(recorded: RecordedStep, exact: Tensors, rounded: Tensors, not_zero: set[str]) -> list[Row]:
    """Return rows that compare updates of weights. The reference uses the other program's gradients, if recorded."""
    dtype, own, before = getattr(torch, recorded.step.dtypes.weights), recorded.gradients, recorded.weights
    ours, theirs = updates(recorded, own or exact, torch.float64), updates(recorded, own or rounded, dtype)
    errors = {name: relative(theirs[name], ours[name]) for name in ours}
    if own is None:
        # Adam turns rounding of a few elements into steps of lr: allow the largest error among tensors of equal dim().
        dims = {name: tensor.dim() for name, tensor in ours.items()}
        errors = {name: max(errors[each] for each in ours if dims[each] == dims[name]) for name in ours}
    theirs = {name: theirs[name] for name in not_zero}
    return [
        Row(f"update {name}", after - before[name], ours[name], _allowed(errors[name]), theirs.get(name))
        for name, after in recorded.weights_after.items()
    ]


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()


def _allowed(error: Tensor | float, magnitude: Tensor | float = 1.0) -> float:
    """Return the relative distance that rounding explains. `error`: the relative distance of a result in the program's
    dtypes from the result in float64; NaN if both are zero. `magnitude` multiplies float64's tolerance if above 1."""
    factors = [ROUNDING_FACTOR * float(error), FLOAT64_TOLERANCE * float(magnitude), FLOAT64_TOLERANCE]
    return max(factor for factor in factors if math.isfinite(factor))


def _error_of_sum(tensors: Tensors) -> float:
    """Return the relative error of a norm whose squares are summed one by one in float32, the least exact order."""
    squares = [tensor.flatten().square().numpy() for tensor in tensors.values()]
    lost = sum(abs(np.cumsum(each, dtype=np.float32)[-1] - each.sum()) for each in squares)
    return float(lost / (sum(each.sum() for each in squares) or 1.0))


def forward_backward(recorded: RecordedStep, dtypes: Dtypes, mean_BT: Tensor | None = None) -> Pass:
    """Compute the losses and gradients of a recorded step, including gradients of OTHER_TERMS. `mean_BT`: each token's
    weight in the loss; None: 1 / number of valid tokens. Raises ConfigError if a number is NaN or infinite."""
    weights, compute, reduce = (getattr(torch, name) for name in (dtypes.weights, dtypes.compute, dtypes.reduce))
    (n_sequences, seq_len), positions_BT = recorded.tokens_BT.shape, recorded.positions_BT
    options = with_balance_loss(recorded.model, recorded.step.balance_loss)
    model, routes = build_llama(options, max_seq_len=seq_len).to(weights), Routes(recorded)
    model.materialize(CPU)
    routes.follow(model)
    if compute != torch.float64:
        round_angles(model)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(recorded.weights.get(name, tensor))  # the folder lacks a tied head
    if mean_BT is None:
        mean_BT = torch.full((n_sequences, 1), 1 / recorded.n_valid, dtype=torch.float64)
    scale, losses = recorded.step.degrees.loss_scale if compute == torch.float16 else 1.0, []
    loss = functools.partial(with_z_loss, recorded.step.z_loss_weight) if recorded.step.z_loss_weight else None
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    with progress(f"one step in {dtypes.compute}", total=n_sequences, unit="sequences") as advance:
        n_at_a_time = max(CHUNK_LOGITS // (seq_len * recorded.model.vocab_size), 1)
        n_parts = recorded.step.balance_loss.parts if recorded.step.balance_loss else 1
        parts = torch.arange(n_sequences).split(n_sequences // n_parts)
        for part, rows in ((whole, some) for whole in parts for some in whole.split(n_at_a_time)):
            set_loads(model, recorded, part, scale)
            routes.sequences = rows
            masked = () if positions_BT is None else (positions_BT[rows], Documents(positions_BT[rows]))
            tokens_BT, targets_BT = recorded.tokens_BT[rows], recorded.targets_BT[rows]
            losses.append(token_losses(model, compute, tokens_BT, targets_BT, *masked, loss=loss))
            ((losses[-1] * mean_BT[rows]).sum() * scale).backward()
            losses[-1] = losses[-1].detach().double()
            for name, p in model.named_parameters():
                sums[name] += p.grad.double() / scale
                p.grad = None
            advance(len(rows))
    losses_BT, gradients = torch.cat(losses), {name: p.to(reduce).to(weights).double() for name, p in sums.items()}
    if not (losses_BT.isfinite().all() and _norm(gradients).isfinite()):
        what = f"with compute {dtypes.compute} and loss_scale {scale:g}, the step of {recorded.model.hf_assets_path}"
        raise ConfigError([f"{what} has numbers that are NaN or infinite; name the program's dtypes and loss_scale"])
    return Pass(losses_BT, (losses_BT * mean_BT).sum(), gradients, routes)


def with_z_loss(weight: float, logits_NV: Tensor, targets_N: Tensor, group: None) -> Tensor:
    """Return the cross-entropy of each token, with the gradient of cross-entropy + weight * logsumexp(logits)^2."""
    z_N = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).logsumexp(-1).square() * weight
    return cross_entropy(logits_NV, targets_N) + (z_N - z_N.detach()).where(targets_N != IGNORED, 0)


def round_angles(model: Llama) -> None:
    """Compute the rotary table from angles in float32, as programs do that compute in float32 or a narrower type."""
    tables = [rope_table(kind, model.max_seq_len, model.rope.dtype, torch.float32) for kind in model.rope_kinds]
    model.rope = torch.stack(tables).to(model.rope.device)


def updates(recorded: RecordedStep, gradients: Tensors, dtype: torch.dtype) -> Tensors:
    """Return in float64 what the optimizer's step adds to each weight, computed in `dtype`. The optimizer states are
    zero before a first step; before a second step they are those after a first step with its recorded gradients."""
    options, previous = recorded.step.optimizer, recorded.previous
    parameters = {name: nn.Parameter(recorded.weights[name].to(dtype, copy=True)) for name in gradients}
    groups = [
        {"params": [p], "weight_decay": options.weight_decay * (min(p.dim(), 2) in options.weight_decay_dims)}
        for p in parameters.values()
    ]
    adam = options.model_dump(include={"lr", "beta1", "beta2", "eps"})
    optimizer = build_adam(groups, Optimizer(**adam, implementation="for-loop"), options.name)
    for each, own in [*([(previous, previous.gradients)] if previous else []), (recorded, gradients)]:
        for name, parameter in parameters.items():
            parameter.data = each.weights[name].to(dtype, copy=True)
            parameter.grad = own[name].to(dtype, copy=True)  # clipping changes the copy
        if each.step.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters.values(), each.step.max_norm)
        optimizer.step()
    return {name: parameter.detach().double() - recorded.weights[name] for name, parameter in parameters.items()}


def findings(recorded: RecordedStep, groups: dict[str, list[Row]]) -> Iterator[str]:
    """Yield lines that say where the two programs differ, and which number (such as dp = 2) explains their ratio."""
    quantities, by_ratio = _quantities(recorded), {kind: clusters(rows) for kind, rows in groups.items()}
    # A gradient norm that counts n copies of each tensor is sqrt(n) times too large.
    of_norm = quantities | {f"sqrt({name})": math.sqrt(value) for name, value in quantities.items()}
    kind = "gradients" if recorded.gradients is not None else "loss"
    explained: set[str] = set()
    if kind in groups and (by_ratio[kind][1] or (kind == "loss" and not groups[kind][0].equal)):
        for text, kinds in _other_losses(recorded, groups, kind):
            yield f"{' and '.join(kinds)} are those {text}"
            explained |= {*kinds}
    for key in [key for key in OTHER_TERMS if getattr(recorded.step, key) and "gradients" in {*groups} - explained]:
        for text in _other_terms(recorded, groups["gradients"], quantities, key):
            yield f"gradients are right, except that {text}"
            explained.add("gradients")
    for kind, rows in groups.items():
        if kind in explained:
            continue
        if kind == "experts":
            if wrong := [row.name for row in rows if not row.equal]:
                which = f"in {len(wrong)} of {len(rows)} layers, first {wrong[0]}"
                yield f"experts are not those with the best scores, {which}: compare groups and the balance bias"
            continue
        if kind == "gradient norm" and recorded.gradients is not None:
            stated = rows[0]._replace(ours=_norm(recorded.gradients))
            if not stated.equal:
                text = describe(stated.ratio, stated.allowed, of_norm) if stated.ratio else "wrong"
                yield f"gradient norm is, for the program's own gradients, {text}"
            elif not rows[0].equal:
                yield "gradient norm is that of the program's own gradients"
            continue
        shared, others = by_ratio[kind]
        for ratio, members in shared.items():
            whom = _whom(rows if all(row.is_multiple(ratio) for row in rows) else members, rows, kind)
            known = of_norm if kind == "gradient norm" else quantities
            yield f"{whom} {describe(ratio, min(row.allowed for row in members), known)}"
        if others:
            most = max(others, key=lambda row: row.distance)
            by = f"{most.name}, by {most.distance:.1e} where {most.allowed:.1e} is rounding"
            yield f"{_whom(others, rows, kind)} different, and not by a factor; the most: {by}"
    if equal := [kind for kind, rows in groups.items() if all(row.verdict == "equal" for row in rows)]:
        own = ", computed from the program's own gradients" if recorded.gradients and "updates" in equal else ""
        yield f"equal: {', '.join(equal)}{own}"


def _whom(members: list[Row], rows: list[Row], kind: str) -> str:
    if len(members) == 1:
        return f"{members[0].name} is"
    if len(members) == len(rows):
        return f"{kind} are"
    return f"{len(members)} of {len(rows)} {kind}, the first {members[0].name}, are"


def _quantities(recorded: RecordedStep) -> dict[str, float]:
    """Return, by name, numbers by which a program may have multiplied or divided its gradients by mistake."""
    n_valid, n_tokens = recorded.n_valid, recorded.tokens_BT.numel()
    tokens = {"tokens": n_valid} if n_valid == n_tokens else {"valid tokens": n_valid, "all tokens": n_tokens}
    degrees = {name.replace("_", " "): value for name, value in recorded.step.degrees.model_dump().items()}
    numbers: dict[str, float] = {**tokens, "sequences": len(recorded.tokens_BT), **degrees}
    if recorded.model.moe.n_experts:
        numbers |= {"experts": recorded.model.moe.n_experts, "top-k": recorded.model.moe.n_experts_per_token}
    norm, max_norm = recorded.step.gradient_norm, recorded.step.max_norm
    if norm is not None and max_norm is not None and norm > max_norm:
        numbers["gradient norm / max_norm"] = norm / max_norm  # clipping divides gradients by this number
    return numbers


def _other_terms(recorded: RecordedStep, rows: list[Row], quantities: dict[str, float], key: str) -> Iterator[str]:
    """Yield a text if a wrong factor of the term `key` (OTHER_TERMS) explains all differences of the gradients."""
    step = recorded.step.model_copy(update={key: None})
    without = forward_backward(dataclasses.replace(recorded, step=step), FLOAT64).gradients
    bare = [without[row.name.removeprefix("gradient ")] for row in rows]
    terms = [row.ours - tensor for row, tensor in zip(rows, bare, strict=True)]
    square = sum(term.square().sum().item() for term in terms)
    inner = sum(((row.theirs - x) * y).sum().item() for row, x, y in zip(rows, bare, terms, strict=True))
    share, precision = inner / square, max(row.allowed * row.ours.norm().item() for row in rows) / math.sqrt(square)
    fits = all(row._replace(ours=x + share * y).equal for row, x, y in zip(rows, bare, terms, strict=True))
    if fits and abs(share) <= precision:
        yield f"they lack the {OTHER_TERMS[key]}"
    elif fits and share > 0 and abs(share - 1) > precision:
        yield f"the {OTHER_TERMS[key]} is {describe(share, precision, quantities)}"


def _other_losses(recorded: RecordedStep, groups: dict[str, list[Row]], kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each known mistake in the loss that explains the rows of `kind`, as a text and all kinds it explains."""
    valid_BT, degrees, n_sequences = recorded.targets_BT != IGNORED, recorded.step.degrees, len(recorded.targets_BT)
    counts: dict[int, list[str]] = {}
    for name, count in {
        "accumulation steps": degrees.accumulation_steps,
        "data-parallel ranks": degrees.dp,
        "microbatches": degrees.microbatches,
        "accumulation steps of all data-parallel ranks": degrees.accumulation_steps * degrees.dp * (degrees.dp > 1),
        "sequences": n_sequences,
    }.items():
        if count > 1 and n_sequences % count == 0:
            counts.setdefault(count, []).append(name)
    unmasked = dataclasses.replace(recorded, positions_BT=None)
    others = [(unmasked, "without the document mask", None)] if recorded.positions_BT is not None else []
    for count, names in counts.items():
        valid_G = valid_BT.view(count, -1).sum(1).clamp(min=1)
        mean_BT = (1 / (count * valid_G.double())).repeat_interleave(n_sequences // count)[:, None]
        text = f"of a mean over {count} {' or '.join(names)}, each a mean over its own tokens"
        others.append((recorded, text, mean_BT))
    for other, text, mean_BT in others:
        _, loss, gradients, _ = forward_backward(other, FLOAT64, mean_BT)
        ours = {f"gradient {name}": gradient for name, gradient in gradients.items()} | {"loss": loss}
        both = {each: groups[each] for each in ("gradients", "loss") if each in groups}
        equal = [each for each in both if all(row._replace(ours=ours[row.name]).equal for row in both[each])]
        if kind in equal:
            yield text, equal
