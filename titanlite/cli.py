"""The `titanlite` command: one name, and a module for each of its subcommands."""

import errno
import importlib
import sys

from titanlite import __version__
from titanlite.errors import TrainingError
from titanlite.reliability.process import listen_as_launcher

COMMANDS = {
    "train": ("titanlite.launcher", "train a config on this node with as many ranks as it asks for"),
    "plan": ("titanlite.plan.command", "plan memory, communication and step time without the hardware"),
    "calibrate": ("titanlite.calibrate.command", "measure the devices at hand, for plans of runs on them"),
    "advise": ("titanlite.advise.command", "search the layouts of a model on so many devices"),
    "parity": ("titanlite.parity.command", "compare a config's layout with a single process"),
    "tokenize": ("titanlite.tokenize_dataset", "tokenize the dataset of a config before a run"),
    "checkpoint": ("titanlite.checkpoint.command", "list and verify the checkpoints of a run"),
    "convert": ("titanlite.checkpoint.convert", "convert a checkpoint of the older format"),
    "config": ("titanlite.config.command", "print a resolved config, or all options; convert a file of torchtitan"),
    "generate": ("titanlite.generate.command", "continue prompts with a trained model"),
    "eval": ("titanlite.evaluate", "compute the loss of a model on a dataset"),
    "export": ("titanlite.checkpoint.export", "write a checkpoint as a Hugging Face folder"),
}
"""Subcommand: the module whose `main(argv)` returns the exit status, and what it does."""


def usage() -> str:
    """Return the text of `titanlite --help`."""
    lines = ["usage: titanlite COMMAND [arguments]", "", "commands:"]
    lines += [f"  {name:<12}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    lines += [
        "",
        "titanlite COMMAND --help tells more. CONFIG is a TOML file, or a name such as debug or 70b of a config",
    ]
    lines += ["that comes with titanlite."]
    return "\n".join(lines)


def main() -> None:
    """Run a subcommand and exit with its status: 0 done, 2 wrong arguments or config, 1 anything else."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        sys.exit(0)
    if name == "--version":
        print(f"titanlite {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        print(f"error: titanlite {name}: unknown command; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    if name == "train":
        listen_as_launcher()  # before the imports, which take a while
    module, _ = COMMANDS[name]  # imported here, so that a command does not wait for the imports of the others
    command = importlib.import_module(module).main
    try:
        sys.exit(command(arguments))
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
