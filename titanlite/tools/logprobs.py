"""Compute the log-probabilities of given tokens, and say whether those of a trainer and an engine differ by rounding.

FOLDER is a folder that titanlite generate takes, with the weights of trainer and engine. Each line of ROWS.jsonl is a
JSON object:
  token_ids          ids of the tokens to evaluate; if the model saw BOS, here or in prompt_token_ids
  prompt_token_ids   optional: ids of the tokens before token_ids
  trainer_logprobs   optional: the trainer's log-probability of each of token_ids, in nats, or null
  engine_logprobs    optional: the inference engine's log-probability of each of token_ids, in nats, or null
  routed_experts     optional: the experts of each token and layer, [tokens][layers][experts per token]

Prints a JSON object for each row: its line number, and the logprobs computed for token_ids. Lines on standard error
compare trainer and engine with these logprobs (docs/verify_your_trainer.md). Exit status: 0 rounding explains all
differences; 1 rounding does not; 2 an argument or file is wrong, or the logprobs are too coarse to compare.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from titanlite.config import ConfigError, Launch
from titanlite.config.hf.values import read_json_object
from titanlite.files.durable import Record, first_problem
from titanlite.launch.arguments import MODEL_DTYPES, Parser, number

USAGE = """titanlite logprobs FOLDER ROWS.jsonl [--temperature T] [--dtype TYPE]
           [--trainer-dtype TYPE] [--engine-dtype TYPE]"""
DTYPES = ("float32", "bfloat16", "float16")
Ids = list[Annotated[int, Field(ge=0)]]
Logprobs = list[Annotated[float, Field(allow_inf_nan=False)] | None]


class Row(Record):
    """A line of ROWS.jsonl. `titanlite logprobs --help` describes the keys."""

    token_ids: Annotated[Ids, Field(min_length=1)]
    prompt_token_ids: Ids = Field(default=[])
    trainer_logprobs: Logprobs = Field(default=[])
    engine_logprobs: Logprobs = Field(default=[])
    routed_experts: list[list[Ids]] = Field(default=[])


Values = dict[int, list[float | None]]  # logprobs of the token_ids of a row, by the row's line number in the file


def main(argv: list[str]) -> int:
    """Run `titanlite logprobs` and return its exit status."""
    parser = Parser(USAGE, __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint or a Hugging Face folder")
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="a file of rows")
    positive = number(float, "a finite number > 0", lambda value: 0 < value < math.inf)
    text = "divides the logits, as it did for the logprobs to compare (default: 1)"
    parser.add_argument("--temperature", type=positive, default=1.0, metavar="T", help=text)
    parser.add_argument("--dtype", choices=MODEL_DTYPES, default="float64", help="compute in this type")
    for name in ("trainer", "engine"):
        text = f"type in which the {name} computed (default: the folder's)"
        parser.add_argument(f"--{name}-dtype", choices=DTYPES, help=text)
    arguments = parser.parse_args(argv)
    from titanlite.tools.generate.folder import open_folder  # late import: --help need not wait for torch

    folder = open_folder(arguments.folder)
    rows = read(arguments.rows, folder)
    compute = functools.cache(functools.partial(logprobs, folder, rows, arguments.temperature))
    programs = dict[str, tuple[str, Values, Values]]()
    for name in ("trainer", "engine"):
        dtype = getattr(arguments, f"{name}_dtype") or f"{folder.dtype}".removeprefix("torch.")
        theirs = {line: getattr(row, f"{name}_logprobs") for line, row in rows.items()}
        if any(x is not None for own in theirs.values() for x in own):
            if arguments.dtype != "float64" or dtype not in DTYPES:
                problem = f"--dtype = {arguments.dtype}, --{name}-dtype = {dtype}: to tell what rounding explains"
                raise ConfigError([f"{problem}, expected float64 and a narrower type; set one of them"])
            programs[name] = dtype, theirs, compute(dtype)
    for line, values in compute(arguments.dtype).items():
        print(json.dumps({"line": line, "logprobs": values}))
    return compare(rows, compute(arguments.dtype), programs) if programs else 0


def read(file: Path, folder: Any) -> dict[int, Row]:
    """Return the rows of a file, by line. Raises ConfigError if the file cannot be read or a row is wrong."""
    from titanlite.tools.generate.command import read_lines

    rows, most = dict[int, Row](), folder.options.most_positions
    if folder.is_hugging_face and not most:
        most = read_json_object(folder.path / "config.json").get("max_position_embeddings")
    for line, text in enumerate(read_lines(file), 1):
        if not text.strip():
            continue
        try:
            rows[line] = Row.model_validate_json(text)
            problem = _problem(rows[line], folder.options, most if type(most) is int and most else math.inf)
        except ValidationError as error:
            problem = f"{first_problem(error)}; --help describes a row"
        if problem:
            raise ConfigError([f"{file}: line {line}: {problem}"])
    if not rows:
        raise ConfigError([f"{file}: has no row; expected a JSON object on each line, as --help describes it"])
    return rows


def _problem(row: Row, model: Any, most: float) -> str:
    """Return what is wrong with a row, and what to do; "" if the row fits the model."""
    tokens, experts = [*row.prompt_token_ids, *row.token_ids], row.routed_experts
    if max(tokens) >= model.vocab_size:
        return f"the id {max(tokens)}: expected ids below {model.vocab_size}; take the model that had these tokens"
    if not 1 < len(tokens) <= most:
        return f"{len(tokens):,} tokens with the prompt: expected 2 to {most:,}, as the model takes; change the row"
    for name, values in (("trainer", row.trainer_logprobs), ("engine", row.engine_logprobs)):
        if values and len(values) != len(row.token_ids):
            return f"{name}_logprobs: expected {len(row.token_ids)} numbers, one for each of token_ids, or null"
        if values and values[0] is not None and not row.prompt_token_ids:
            return f"{name}_logprobs.0: nothing predicts the first token; write null, or prompt_token_ids"
    layers, k, n = [*filter(model.has_experts, range(model.n_layers))], model.moe.n_experts_per_token, len(tokens)
    fits = layers and len(experts) in (n, n - 1) and {*map(len, experts)} == {model.n_layers}
    own = [each[layer] for each in experts for layer in layers] if fits else [[]]
    if experts and not all(len({*ids}) == len(ids) == k and max(ids) < model.moe.n_experts for ids in own):
        expected = f"{n} tokens or one less, {model.n_layers} layers, {k} of {model.moe.n_experts} experts"
        return f"routed_experts: expected {expected}; write what the routers chose, or nothing"
    return ""


def logprobs(folder: Any, rows: dict[int, Row], temperature: float, dtype: str) -> Values:
    """Return the logprobs of the rows' token_ids, computed in `dtype`; None for a row's first token if it has no
    prompt. Raises ConfigError if weights cannot be read, or a result is not finite."""
    import torch
    import torch.nn.functional as F

    from titanlite.build_llama import build_llama
    from titanlite.launch.process_group import device_of
    from titanlite.launch.progress import progress
    from titanlite.loss import cross_entropy
    from titanlite.tools.parity.against import CHUNK_LOGITS, round_angles
    from titanlite.tools.parity.routes import routers

    def losses(x_ND: Any, weight_VD: Any, targets_N: Any) -> Any:
        """Return the losses of the last len(targets_N) tokens, computed from one chunk of logits at a time."""
        wide, n = torch.promote_types(x_ND.dtype, torch.float32), max(CHUNK_LOGITS // len(weight_VD), 1)
        chunks = zip(x_ND[-len(targets_N) :].split(n), targets_N.split(n), strict=True)
        return torch.cat([cross_entropy(F.linear(x, weight_VD).to(wide) / temperature, ids) for x, ids in chunks])

    device, result = device_of(Launch.from_environment(torch.cuda.device_count())), Values()
    longest = max(len(row.prompt_token_ids) + len(row.token_ids) for row in rows.values())
    model = build_llama(folder.options, max_seq_len=longest).to(getattr(torch, dtype))
    model.materialize(device)
    folder.load(model)
    model.output.loss = losses
    if dtype != "float64":
        round_angles(model)
    routes = {int(name.rpartition(".")[2]): (router, router.choose) for name, router in routers(model).items()}
    with torch.no_grad(), progress(f"forward in {dtype}", total=len(rows), unit="rows") as advance:
        for line, row in rows.items():
            tokens = torch.tensor([*row.prompt_token_ids, *row.token_ids], device=device)
            for layer, (router, choose) in routes.items():
                own = torch.tensor([token[layer] for token in row.routed_experts[: len(tokens) - 1]], device=device)
                router.choose = functools.partial(lambda own, _: own, own) if len(own) else choose
            first = max(len(row.prompt_token_ids), 1)
            values = -model(tokens[None, :-1], targets=tokens[first:]).double()
            if not values.isfinite().all():
                problem = f"{folder.path}: line {line}: logits in {dtype} are NaN or infinite; expected finite ones"
                raise ConfigError([f"{problem}; take undamaged weights, or another type"])
            result[line] = [None] * (first - len(row.prompt_token_ids)) + values.tolist()
            advance(1)
    return result


def compare(rows: dict[int, Row], ours: Values, programs: dict[str, tuple[str, Values, Values]]) -> int:
    """Print how far the logprobs of trainer and engine are from `ours`, the distances that rounding explains, and the
    verdict; return the exit status. `programs`: each program's dtype, its logprobs, and titanlite's in this dtype."""
    from titanlite.tools.parity.compare import ROUNDING_FACTOR as FACTOR

    means, wrong, coarse = [], [], []
    for name, (dtype, reported, rounded) in programs.items():
        places = [(line, i) for line, values in reported.items() for i, x in enumerate(values) if x is not None]
        theirs, own, near = (np.array([each[line][i] for line, i in places]) for each in (reported, ours, rounded))
        off, noise, n = abs(theirs - own), abs(near - own), len(places)
        rms = math.sqrt(np.square(noise).mean())
        allowed, most = 2 * noise.mean() + FACTOR * rms / math.sqrt(n), max(2 * noise.max(), FACTOR * rms)
        text = f"{name}: {n:,} logprobs, {off.mean():.1e} nats off in the mean and {off.max():.1e} at most"
        print(f"{text}; allowed for {dtype}: {allowed:.1e} and {most:.1e}", file=sys.stderr)
        means.append(f"{name} {off.mean():.1e}{'' if means else ' nats off in the mean'}")
        if off.mean() > allowed or off.max() > most:
            line, i = places[(off > min(most, off.max() / 2)).argmax()]
            wrong.append(f"the {name}; first in line {line} at position {len(rows[line].prompt_token_ids) + i:,}")
        elif abs(np.diff(own)).sum() <= allowed * n:
            coarse.append(f"too coarse to compare: for the {name}, rounding explains a shift by one token")
    print(f"{', '.join(means)}: {' and '.join(wrong or coarse) or 'rounding'}", file=sys.stderr)
    return 1 if wrong else 2 if coarse else 0
