"""Runs tests under Triton's interpreter, in a process of their own.

The interpreter is chosen when Triton is first imported, for a whole process. So one process for each test worker is
started with `TRITON_INTERPRET=1` and kept, and tests marked with `interpreted` run there.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _patch_once()


def _patch_once() -> None:
    """Patch `triton.language` once for each launch, not again for each of our device functions: half of the time."""
    from triton.runtime.interpreter import InterpretedFunction

    whole = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("triton."):
            return whole(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start)


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the process that interprets kernels. Its arguments must be plain values."""

    @pytest.mark.interpreter
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        _process().submit(_run, test.__module__, test.__name__, arguments).result()

    return run
