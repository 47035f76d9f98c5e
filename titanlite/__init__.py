"""titanlite: the smallest trainer that composes all of PyTorch's native parallelism on a Llama-style model."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "Own", "RunResult", "TrainingError", "load", "parity", "plan", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titanlite import api  # imported here: titanlite.api imports torch, which takes seconds

    return getattr(api, name)
