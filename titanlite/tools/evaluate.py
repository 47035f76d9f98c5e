"""Compute the loss of a trained model on a dataset.

FOLDER is a checkpoint's step-N folder, a run's folder or the folder of its checkpoints (the newest checkpoint is
taken), or a Hugging Face folder (config.json and safetensors). The dataset is one that training.dataset can name:
pydoc_topics, text, json, parquet, c4 or hub. All documents are read once, in order, as packed sequences. Other options
of [training], such as --training.dataset_text_key=content, say how documents are read.

Prints the loss in nats per token, as training and validation compute it, and the perplexity. Several ranks share the
work and the weights (FSDP): torchrun --nproc-per-node=N -m titanlite eval FOLDER ...

Exit status: 0 done; 2 the folder, the dataset or an argument is wrong.
"""

import itertools
import math
from typing import Any

from titanlite.config import ConfigError, Launch, check, load_values
from titanlite.config.schema import Training
from titanlite.launch.arguments import Parser, count

USAGE = """titanlite eval FOLDER --dataset NAME [--dataset-path PATH] [--split NAME] [--seq-len N]
           [--batch-size B] [--document-mask] [--dtype float32|bfloat16|float64] [--tokenizer FOLDER]
           [--training.key=value ...]"""
OPTIONS = ("dataset", "dataset_path", "dataset_split", "seq_len", "local_batch_size", "document_mask")
"""Options of [training] for which the command has an argument."""
MORE_OPTIONS = ("dataset_config", "dataset_text_key", "text_sample_by", "cache_folder", "loss_chunks")
MORE_OPTIONS += ("attention_backend", "mixed_precision_param", "packing", "dataset_format", "dataset_messages_key")
MORE_OPTIONS += ("dataset_prompt_key", "dataset_response_key", "long_conversations", "special_tokens_in_text")
"""Further options of [training] that an evaluation reads, as --training.key=value."""


def main(argv: list[str]) -> int:
    """Run `titanlite eval`: evaluate a folder and print the result. Returns the exit status."""
    parser = Parser(USAGE, __doc__)
    parser.add_model_arguments()
    parser.add_argument("--dataset", required=True, metavar="NAME", help="as training.dataset")
    parser.add_argument("--dataset-path", metavar="PATH", help="file, folder, glob or name on the hub")
    parser.add_argument("--split", dest="dataset_split", metavar="NAME", help="split of a hub dataset (default: train)")
    text = "tokens of a sequence (default: the run's or 2048)"
    parser.add_argument("--seq-len", type=count(), metavar="N", help=text)
    text = "sequences at a time (default: 8)"
    parser.add_argument("--batch-size", dest="local_batch_size", type=count(), metavar="B", help=text)
    parser.add_argument("--document-mask", action="store_const", const="true", help="attend only within a document")
    arguments, overrides = parser.parse_known_args(argv)
    readable = [f"--training.{key}" for key in MORE_OPTIONS]
    for before, override in itertools.pairwise(["", *overrides]):
        is_value = before in readable and not override.startswith("--")
        if not is_value and override.partition("=")[0] not in readable:
            raise ConfigError([f"command line: {override}: expected one of {', '.join(readable)}; --help tells more"])
    import torch  # late import: --help and wrong arguments need not wait

    from titanlite.launch.process_group import options_of_run, process_group
    from titanlite.tools.generate.folder import open_folder

    folder = open_folder(arguments.folder)
    kind = arguments.dtype or str(folder.dtype).removeprefix("torch.")
    # training.dtype has no float16, but float32 represents float16 weights exactly.
    training = {"dtype": "float32" if kind == "float16" else kind, "seq_len": folder.value("training", "seq_len")}
    given = {key: getattr(arguments, key) for key in OPTIONS if getattr(arguments, key) is not None}
    values = {
        "model": folder.options.model_dump() | {"hf_assets_path": folder.tokenizer_path(arguments.tokenizer)},
        "training": {key: value for key, value in training.items() if value is not None},
        "validation": {"steps": -1},
    }
    loaded = load_values(values, str(folder.path), [f"--training.{k}={v}" for k, v in given.items()] + overrides)
    launch = Launch.from_environment(torch.cuda.device_count())
    config, tokenizer = check(loaded, launch), folder.tokenizer(arguments.tokenizer)
    with process_group(launch, config.comm, ".", options_of_run(config)):
        loss, n_sequences = evaluate(config, launch, folder, tokenizer)
    if launch.rank == 0:
        print(f"{folder.path}: {n_sequences:,} sequences of {config.training.seq_len} tokens")
        perplexity = math.exp(loss) if loss < 700 else math.inf
        print(f"loss {loss:.6f} nats per token, perplexity {perplexity:.4f}")
    return 0


def evaluate(config: Any, launch: Launch, folder: Any, tokenizer: Any) -> tuple[float, int]:
    """Return the loss of a folder's model on the dataset of a resolved config, and the dataset's number of sequences.
    Every rank must call `evaluate`. Raises ConfigError if weights or data are unreadable, or the loss is not finite."""
    from titanlite import build
    from titanlite.launch.process_group import device_of
    from titanlite.launch.progress import progress
    from titanlite.parallel import mesh

    sequences = open_sequences(tokenizer, config.training, builds_cache=launch.local_rank == 0)
    device = device_of(launch)
    layout = mesh.build_layout(config.parallelism, device)
    model = build.build_stage(config, layout, None, device)
    model.materialize(device)
    folder.load(model)
    train_step = build.build_train_step(build.Run(config, layout, device, model, {0: model}))
    batches, total = build.build_validation_batches(config, layout, sequences)
    with progress("evaluation", total=total, unit="batches", enabled=launch.rank == 0) as advance:
        loss = train_step.validate(batches, advance)
    if not math.isfinite(loss):
        problem = f"{folder.path}: the loss is {loss}; expected a finite number"
        raise ConfigError([f"{problem}; take undamaged weights, or another --dtype"])
    return loss, sequences.n_sequences


def open_sequences(tokenizer: Any, training: Training, *, builds_cache: bool) -> Any:
    """Return all documents of a dataset, in order, as packed sequences that are read once. `builds_cache`: whether this
    rank builds the token cache. Raises ConfigError if documents cannot be read."""
    from titanlite.data.open import open_cache, pack_once
    from titanlite.data.source import Source

    source, options = Source(training), {"cache_folder": training.cache_folder, "builds_cache": builds_cache}
    cache = open_cache(source, tokenizer, 0.0, **options)
    if not (sequences := pack_once(cache, "train", tokenizer, training)).n_sequences:
        raise ConfigError([f"{source}: has no text"])
    return sequences
