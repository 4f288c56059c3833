"""Triton kernels of lowbit_optim: one launch steps all parameters of a signature.

The pieces mirror those of `lowbit_optim` and are combined by the compiler: `rules`, `formats` (on `maps`), `weights`
and `noise` are device functions, `step` has one kernel for each number of slots, `table` and `launch` are the host's
side, and `registry` knows which pieces there are. Nothing here imports `lowbit_optim`.
"""

from __future__ import annotations

from .formats import Format
from .launch import Launcher, Variant, dtype_of, options
from .registry import MAPS, MODES, RULES, Map, Rule, block_format, missing, plain_format
from .table import GRANULE, LONGEST_SPAN
from .weights import Mode

__all__ = [
    "GRANULE",
    "LONGEST_SPAN",
    "MAPS",
    "MODES",
    "RULES",
    "Format",
    "Launcher",
    "Map",
    "Mode",
    "Rule",
    "Variant",
    "block_format",
    "dtype_of",
    "missing",
    "options",
    "plain_format",
]
