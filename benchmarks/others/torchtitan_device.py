"""What torchtitan needs to start where there is no GPU: torch's functions of an accelerator, for the CPU."""

import contextlib
import os
import types
from typing import Any
from unittest import mock

import torch
import torch._utils

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What torchrun would set for a rank alone."""


class Cpu:
    """The functions of torch.cuda that torchtitan calls, for a CPU."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def patched_device() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch reports the CPU as its accelerator. Where there is a GPU it changes nothing."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return mock.patch.multiple(
        torch._utils, _get_available_device_type=lambda: "cpu", _get_device_module=lambda device_type: Cpu
    )
