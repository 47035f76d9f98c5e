"""Write a checkpoint as a Hugging Face folder that transformers, vLLM and others load.

    titanlite export CHECKPOINT OUT [--dtype bfloat16] [--tokenizer FOLDER] [--source FOLDER] [--max-seq-len N]
                                    [--verify]

CHECKPOINT is a step-N folder, or the folder of a run's checkpoints, of which the newest is exported. OUT must not
exist. It gets the weights as safetensors of at most 5 GB, config.json, generation_config.json, the tokenizer's files
and README.md, a model card. One process with the memory of one tensor is enough, without a GPU.

The run's config.toml, beside the folder of its checkpoints, names the tokenizer and the folder whose weights the run
started from, if any; --tokenizer and --source name others. The config.json and generation_config.json of that folder
are kept, with its dtype, except for what the run changed, --dtype and --max-seq-len. Without such a folder, config.json
states the training's sequence length, and the dtype is the checkpoint's.

--verify has transformers load OUT, and compares its logits with the checkpoint's, block by block, in float64. It needs
24 bytes of memory per parameter. If OUT exists, nothing is written, and it is compared.

Exit status: 0 written, or equal; 1 OUT cannot be written, or differs; 2 the checkpoint or an argument is wrong.
"""

import errno
import sys
from pathlib import Path
from typing import Any

from titanlite.checkpoint.export import EXPORT_DTYPES, Export, dtype_of, prepare, value_of_run, write
from titanlite.config.hf.values import read_json_object
from titanlite.launch.arguments import Parser, count


def main(argv: list[str]) -> int:
    """Run `titanlite export`. Returns the exit status."""
    usage = "titanlite export CHECKPOINT OUT [--dtype bfloat16|float32|float16] [--tokenizer FOLDER] [--source FOLDER]"
    usage += " [--max-seq-len N] [--verify]"
    parser = Parser(usage, __doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a step-N folder, or the folder of several")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    text = "dtype of written weights (default: the source's, or the checkpoint's)"
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, help=text)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a tokenizer.json, or the folder with it")
    text = "folder of the model that the run started from; none: a new config.json"
    parser.add_argument("--source", metavar="FOLDER", help=text)
    parser.add_argument("--max-seq-len", type=count(), metavar="N", help="positions that config.json states")
    parser.add_argument("--verify", action="store_true", help="compare the folder with the checkpoint")
    arguments: dict[str, Any] = vars(parser.parse_args(argv))
    out, verifies = arguments.pop("out"), arguments.pop("verify")
    if compares := verifies and (out / "config.json").is_file():
        arguments["dtype"] = dtype_of(read_json_object(out / "config.json"))
    export = prepare(**arguments)
    try:
        None if compares else write(export, out)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise
        print(f"error: {out}: cannot be written: {error}", file=sys.stderr)
        return 1
    return 0 if not verifies or verify(export, out) else 1


def verify(export: Export, out: Path) -> bool:
    """Compare a folder with the checkpoint, and print the result. Return whether they are equal."""
    from titanlite.data.open import build_tokenizer
    from titanlite.tools import verify_export  # here, since it imports torch

    is_same = verify_export.verify(export.path, export.options, out, export.dtype, export.max_seq_len)
    trained = value_of_run(export.config, "model", "hf_assets_path")
    exported = build_tokenizer(str(out)) if (out / "tokenizer.json").is_file() else None
    line = verify_export.beginnings(build_tokenizer(trained) if isinstance(trained, str) else None, exported)
    print(line or "tokenizer: begins a text as in training")
    return is_same and not line
