"""The command `titanlite`, with a module for each of its subcommands."""

import errno
import importlib
import os
import re
import signal
import sys

from titanlite import __version__
from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, did_you_mean, print_problems, printable
from titanlite.launch import process
from titanlite.launch.other_processes import listen_as_launcher
from titanlite.launch.process import exit_process

COMMANDS = {
    "train": ("titanlite.launch.launcher", "train a config on this node with as many ranks as it asks for"),
    "plan": ("titanlite.tools.plan.command", "plan memory, communication and step time without the hardware"),
    "calibrate": ("titanlite.tools.calibrate.command", "measure the devices at hand, for plans of runs on them"),
    "advise": ("titanlite.tools.advise.command", "search the layouts of a model on so many devices"),
    "parity": ("titanlite.tools.parity.command", "compare a config's layout with a single process"),
    "source": ("titanlite.tools.source", "print the lines of titanlite that a config executes"),
    "diff": ("titanlite.tools.diff.command", "find the first tensor at which two runs differ"),
    "tokenize": ("titanlite.tools.tokenize", "tokenize the dataset of a config before a run"),
    "checkpoint": ("titanlite.tools.checkpoint", "list and verify the checkpoints of a run"),
    "config": ("titanlite.tools.config", "print, compare or convert configs, or print all options"),
    "generate": ("titanlite.tools.generate.command", "continue prompts with a trained model"),
    "eval": ("titanlite.tools.evaluate", "compute the loss of a model on a dataset"),
    "logprobs": ("titanlite.tools.logprobs", "compute log-probabilities, and compare a trainer's and an engine's"),
    "export": ("titanlite.tools.export", "write a checkpoint as a Hugging Face folder"),
}
"""Module and description of each subcommand. A module's `main(argv)` returns the exit status or raises ConfigError."""


def usage() -> str:
    commands = "".join(f"  {name:<12}{purpose}\n" for name, (_, purpose) in COMMANDS.items())
    hint = "CONFIG is a TOML file, or a name such as debug or 70b of a config\nthat comes with titanlite."
    return f"usage: titanlite COMMAND [arguments]\n\ncommands:\n{commands}\ntitanlite COMMAND --help tells more. {hint}"


def main() -> None:
    """Run a subcommand and exit with its status: 0 done, 2 wrong arguments or config, 1 anything else."""
    name, *arguments = sys.argv[1:] or ["--help"]
    process.prepare(is_command=True)
    sys.stderr = process.UnfailingStream(sys.stderr)
    sys.stdout = process.UnfailingStream(sys.stdout) if name == "train" else sys.stdout
    status, problem = 1, ""
    try:
        try:
            status = run(name, arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status, problem = 1, f"titanlite {name}: interrupted"
    except TrainingError as error:
        problem = f"{error}"
    except (MemoryError, ImportError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("allocate mem|new thread|map segment", f"{error}"):
            raise
        reason = printable(f"{error}") or "no more can be allocated"
        problem = f"titanlite {name}: out of memory: {reason}; is ulimit -v too low?"
    except OSError as error:
        status = 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1
        if error.filename is None:  # writing to stdout failed: the disk is full, or a reader such as `head` has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        what = printable(f"{error.filename or 'standard output'}: {error.strerror or error}")
        problem = "" if isinstance(error, BrokenPipeError) else what if status == 2 else f"titanlite {name}: {what}"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    exit_process(status)  # a normal exit would wait for threads, which could change the status


def run(name: str, arguments: list[str]) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"titanlite {__version__}")
        return 0
    if name == "train":
        listen_as_launcher()  # handle signals already during the imports, which take a while
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends a command as Ctrl-C does
    if process.ENDS_WITH_STDIN in os.environ:
        process.end_after(sys.stdin.read, "standard input", status=0)  # torchrun reports any other status as a failure
    return run_command(name, arguments)


def run_command(name: str, arguments: list[str]) -> int:
    """Run a subcommand's module and return its status; print the problems of a wrong config or argument."""
    try:
        if odd := next((text for text in [name, *arguments] if printable(text, "\t\n") != text), ""):
            raise ConfigError([f"command line: {odd}: expected UTF-8 without control characters"])
        if name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
            raise ConfigError([f"titanlite {name}: unknown command{hint}"])
        module, _ = COMMANDS[name]  # imported here: no command needs another command's module
        return importlib.import_module(module).main(arguments)
    except ConfigError as error:
        if name not in ("generate", "eval") or os.environ.get("LOCAL_RANK", "0") == "0":  # rank 0 prints for all ranks
            print_problems(error)
        return 2
