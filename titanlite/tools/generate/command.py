"""Continue prompts with a trained model.

FOLDER is a checkpoint's step-N folder, a run's folder or the folder of its checkpoints (the newest checkpoint is
taken), or a Hugging Face folder (config.json and safetensors). Each line of FILE is a prompt or, if the name of FILE
ends in .jsonl, a JSON object with the key "prompt".

Prints the text that follows each prompt, up to EOS or --max-new-tokens. Control characters except line feeds and tabs
are escaped (\\x1b), so that no text can control a terminal. With --chat, each prompt is a user's message in the
tokenizer's chat template, and the text is the assistant's answer. By default each token is the most likely one;
--temperature draws tokens at random, but always the same tokens for the same --seed and prompt.

Exit status: 0 done; 2 the folder or an argument is wrong.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config import ConfigError, Launch
from titanlite.config.loader import check_all, printable
from titanlite.config.schema import Comm, Model, Parallelism, Training
from titanlite.data.documents import text_of
from titanlite.data.files import read_rows, segment_of
from titanlite.launch.arguments import Parser, count, number
from titanlite.launch.launcher import run_on_ranks

USAGE = """titanlite generate FOLDER ["prompt" ...] [--prompts FILE] [--chat] [--max-new-tokens N]
           [--temperature T] [--top-k K] [--top-p P] [--seed S] [--batch-size B]
           [--dtype float32|bfloat16|float64] [--tokenizer FOLDER]
           [--tensor-parallel-degree N] [--expert-parallel]"""
LARGEST_FILE = 2**26  # largest number of characters in a prompts file
LONGEST = 2**20  # largest number of tokens of a prompt with its continuation
SHARDED = ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
"""Options of a dense model that the tensor-parallel degree must divide."""


def _parser() -> Parser:
    parser = Parser(USAGE, __doc__)
    parser.add_model_arguments()
    parser.add_argument("prompt", nargs="*", help="a text to continue")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a file of prompts")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user, in the chat template")
    parser.add_argument("--max-new-tokens", type=count(), default=64, metavar="N", help="default: 64")
    temperature = number(float, "a finite number >= 0", lambda value: 0 <= value < math.inf)
    top_p = number(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
    text = "divides the logits (default: 0, always the most likely token)"
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help=text)
    parser.add_argument("--top-k", type=count(), metavar="K", help="draw from the K most likely tokens")
    parser.add_argument("--top-p", type=top_p, metavar="P", help="draw from the fewest tokens of probability P or more")
    seed = number(int, "an integer >= 0", lambda value: value >= 0)
    parser.add_argument("--seed", type=seed, metavar="S", help="of the random choice (default: 42)")
    parser.add_argument("--batch-size", type=count(), default=8, metavar="B", help="prompts at a time (default: 8)")
    text = "ranks on this node that shard each layer (default: 1)"
    parser.add_argument("--tensor-parallel-degree", type=count(), default=1, metavar="N", help=text)
    text = "these ranks have different experts, instead of a shard of each"
    parser.add_argument("--expert-parallel", action="store_true", help=text)
    return parser


def main(argv: list[str]) -> int:
    """Run `titanlite generate`, or one of its ranks under torchrun. Returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    random = {key: each for key in ("top_k", "top_p", "seed") if (each := getattr(arguments, key)) is not None}
    if random and not arguments.temperature:
        key, value = next(iter(random.items()))
        problem = f"command line: --{key.replace('_', '-')} = {value}: read only when --temperature is above 0"
        raise ConfigError([f"{problem}; set that, or remove it"])
    texts = [*arguments.prompt, *(read_prompts(arguments.prompts) if arguments.prompts else [])]
    if not (texts := [text_of(text, "prompt") for text in texts]):
        raise ConfigError(["command line: expected a prompt, or --prompts FILE with one; --help tells more"])

    import torch  # late import: --help and wrong arguments need not wait

    from titanlite.data.tokenizer import continuation, encode_prompts
    from titanlite.tools.generate.folder import open_folder
    from titanlite.tools.generate.generator import Generator
    from titanlite.tools.generate.sampling import Sampling, choose, prompt_generators

    folder, degree = open_folder(arguments.folder), arguments.tensor_parallel_degree
    tokenizer = folder.tokenizer(arguments.tokenizer)
    stop = folder.stop_tokens(tokenizer)
    if arguments.chat:
        from titanlite.techniques.data.chat_template import encode_questions  # late import: only for --chat

        prompts = tokenizer.call(encode_questions, texts)
        list(map(tokenizer.rows.require, texts, prompts))  # rejects a token without an embedding
    else:
        prompts = encode_prompts(tokenizer, texts)
    launch = Launch.from_environment(torch.cuda.device_count())
    check_degree(folder.options, degree, launch, expert_parallel=arguments.expert_parallel)
    if launch.world_size < degree:
        return run_on_ranks(degree, ["generate", *argv])
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else folder.dtype
    longest, batch_size = max(map(len, prompts)), min(arguments.batch_size, len(texts))
    check_length(folder.options, longest, arguments.max_new_tokens, batch_size, dtype.itemsize / degree)
    with _ranks(launch, degree) as (device, mesh):
        sizes = {"batch_size": batch_size, "longest": longest, "max_new_tokens": arguments.max_new_tokens}
        options = {"dtype": dtype, "expert_parallel": arguments.expert_parallel, **sizes}
        generator = Generator(folder, device=device, mesh=mesh, **options)
        sampling = Sampling(temperature=arguments.temperature, **random)
        generators = prompt_generators(texts, sampling.seed)
        results = generator.generate(
            prompts, stop, lambda logits, batch: choose(logits, sampling, generators[batch.start : batch.stop])
        )
        for index, (prompt, tokens) in enumerate(zip(prompts, results, strict=True), 1):
            if launch.rank == 0:
                title = [f"--- prompt {index} of {len(texts)}"] if len(texts) > 1 else []
                text = printable(continuation(tokenizer, prompt, tokens), "\n\t")
                print(*title, text, sep="\n", flush=True)
                if not text:
                    print(f"prompt {index}: the model answered with nothing", file=sys.stderr)
    return 0


def read_prompts(file: Path) -> list[str]:
    """Return a file's prompts: its lines or, in .jsonl, each line's "prompt". Raises ConfigError if a line has none."""
    lines = read_lines(file, "--prompts ")
    if ".jsonl" not in file.suffixes:
        return lines
    prompts = []
    for line_number, line in enumerate(lines, 1):
        try:
            prompts.append(text_of(json.loads(line)["prompt"], "prompt"))
        except (ValueError, RecursionError, KeyError, TypeError):
            raise ConfigError([f'{file}: line {line_number}: expected a JSON object with a string "prompt"']) from None
    return prompts


def read_lines(file: Path, argument: str = "") -> list[str]:
    """Return the lines of a file, split as training data with text_sample_by = "line" is. Raises ConfigError, whose
    text begins with `argument`, if the file cannot be read or has more than LARGEST_FILE characters."""
    options, lines, size = Training(dataset="text", text_sample_by="line"), [], 0
    try:
        for row in read_rows(options, segment_of(options, file), ["text"]):
            lines.append(row.values["text"])
            size += len(lines[-1]) + 1
            if size > LARGEST_FILE:
                raise ConfigError([f"{file}: expected at most {LARGEST_FILE:,} characters"])
    except ConfigError as error:
        raise ConfigError([f"{argument}{problem}" for problem in error.problems]) from None
    return lines


def check_length(options: Model, longest: int, new: int, batch_size: int, itemsize: float) -> None:
    """Raise ConfigError if the longest prompt plus `new` tokens is too long for the model, or the KV cache of a batch
    does not fit into a rank's memory. `itemsize`: bytes of a cached number, divided by the ranks that share it."""
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    bytes_of_token = 2 * options.n_layers * options.n_kv_heads * options.head_dim * itemsize
    most = min(LONGEST, options.most_positions or LONGEST, int(memory / bytes_of_token / batch_size))
    if longest + new > most:
        problem = f"--max-new-tokens = {new}: with the {longest:,} tokens of the longest prompt, expected at most "
        raise ConfigError([f"{problem}{most:,}, in batches of {batch_size}; shorten it, or set --batch-size lower"])


def check_degree(options: Model, degree: int, launch: Launch, *, expert_parallel: bool) -> None:
    """Raise ConfigError if a model cannot be sharded over `degree` ranks, or the launch has another number of ranks."""
    option, n_experts, problems = f"--tensor-parallel-degree = {degree}", options.moe.n_experts, []
    sizes = {f"model.{key}": getattr(options, key) for key in SHARDED}
    if expert_parallel and (degree == 1 or not n_experts):
        what = "only with --tensor-parallel-degree above 1" if n_experts else "the model has no experts"
        problems.append(f"--expert-parallel: {what}")
    if n_experts:
        sizes |= {"model.moe.n_experts": n_experts} if expert_parallel else {"model.moe.expert_dim": options.expert_dim}
    problems += [f"{option}: expected a divisor of {key} = {size}" for key, size in sizes.items() if size % degree]
    if launch.n_devices and degree > launch.n_devices:
        problems.append(f"{option}: expected at most the {launch.n_devices} devices of this node")
    if launch.world_size not in (1, degree):
        problems.append(f"{option}: torchrun has started {launch.world_size} ranks; start as many as the degree")
    check_all(problems=problems)


@contextlib.contextmanager
def _ranks(launch: Launch, degree: int) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's device and the tensor-parallel mesh, which is None for a single rank."""
    from titanlite.launch.process_group import device_of, process_group
    from titanlite.parallel import mesh

    device = device_of(launch)
    if degree == 1:
        yield device, None
        return
    with process_group(launch, Comm(trace_buf_size=0), "."):
        parallelism = Parallelism(tensor_parallel_degree=degree, data_parallel_shard_degree=1)
        yield device, mesh.build_layout(parallelism, device).mesh["tp"]
