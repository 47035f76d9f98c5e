"""Write a checkpoint as a Hugging Face folder that transformers, vLLM and other programs load.

    titanlite export CHECKPOINT OUT [--dtype bfloat16] [--ema] [--tokenizer FOLDER] [--source FOLDER]
                                    [--max-seq-len N] [--verify]
    titanlite export CHECKPOINT OUT --merge [...]         adapters (LoRA), merged into their base

CHECKPOINT is a step-N folder, or the folder of a run's checkpoints, of which the newest is exported. OUT must not
exist. The export writes to OUT the weights as safetensors files of at most 5 GB, config.json, generation_config.json,
the tokenizer's files and a model card, README.md. One process without a GPU is enough, with memory for one tensor.

The run's config.toml, beside the folder of its checkpoints, names the tokenizer and the source: the folder whose
weights the run started from. --tokenizer and --source name other folders. The export keeps the source's config.json,
generation_config.json and dtype, except values that the run, --dtype or --max-seq-len changed. Without a source,
config.json states the sequence length of training, and the dtype is the checkpoint's.

--verify has transformers load OUT, and compares its logits with the checkpoint's, block by block, in float64, with
24 bytes of memory per parameter. If OUT exists, --verify compares OUT and writes nothing.

A checkpoint of adapters (LoRA) is exported in the format of peft, without a tokenizer, or merged with --merge, which
needs the host memory of the full model.

Exit status: 0 written, or equal; 1 OUT cannot be written, or differs; 2 the checkpoint or an argument is wrong.
"""

import errno
import sys
from pathlib import Path

from titanlite.config.loader import ConfigError
from titanlite.launch.arguments import Parser, count

DTYPES = ("bfloat16", "float32", "float16")


def main(argv: list[str]) -> int:
    """Run `titanlite export`. Returns the exit status."""
    usage = "titanlite export CHECKPOINT OUT [--dtype bfloat16|float32|float16] [--tokenizer FOLDER] [--source FOLDER]"
    usage += " [--ema] [--max-seq-len N] [--merge] [--verify]"
    parser = Parser(usage, __doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a step-N folder, or the folder of several")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the source's, or the checkpoint's)")
    parser.add_argument("--ema", action="store_true", help="write the average of the weights (ema.decay) instead")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a tokenizer.json, or the folder with it")
    parser.add_argument("--source", metavar="FOLDER", help="the model that the run began with; none: a new config.json")
    parser.add_argument("--max-seq-len", type=count(), metavar="N", help="positions that config.json states")
    parser.add_argument("--merge", action="store_true", help="merge adapters (LoRA) into their base")
    parser.add_argument("--verify", action="store_true", help="compare the folder with the checkpoint")
    options = vars(parser.parse_args(argv))
    checkpoint, out, verifies = options["checkpoint"], options["out"], options.pop("verify")
    if not verifies or not (out / "config.json").is_file():
        if verifies and out.exists():
            raise ConfigError([f"--verify: {out} exists and has no config.json; name an exported folder, or a new one"])
        from titanlite.checkpoint.export import run  # late import: --help need not wait for torch

        try:
            run(**options, verifies=verifies)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            print(f"error: {out}: cannot be written: {error}", file=sys.stderr)
            return 1
    if verifies:
        from titanlite.tools.verify_export import verify  # late import: only --verify builds a model

        return 0 if verify(checkpoint, out, options["ema"]) else 1
    return 0
