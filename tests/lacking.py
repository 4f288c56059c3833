"""What the torch and the peers at hand cannot do: releases of one are made for those of another."""

from __future__ import annotations

import importlib

import pytest
import torch

#: Packages that test modules need besides torch, with the oldest version that will do.
NEEDS: dict[str, dict[str, tuple[int, ...]]] = {
    "test_convert": {"bitsandbytes": (), "torchao.optim": ()},
    "test_kernel_report": {"triton": (3, 4)},
    "test_triton": {"triton": (3, 4)},
}

forward_under_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"FSDP2 of torch {torch.__version__} has no forward pass on CPUs: their streams lack events",
)


def lacking(module: str) -> str | None:
    """Say why a test module cannot be run here."""
    for name, oldest in NEEDS.get(module, {}).items():
        try:
            found = importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {error}"
        if oldest and tuple(map(int, found.__version__.split(".")[: len(oldest)])) < oldest:
            return f"{name} {found.__version__} is older than {'.'.join(map(str, oldest))}"
    return None
