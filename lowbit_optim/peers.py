"""How torchao and bitsandbytes store a slot: each of their forms read into a tensor or state of this package, and back.

Both use the dynamic map of Dettmers et al. at 8 bits in blocks of 256, which is this package's `int8-dynamic`: such
codes and scales are passed on bit for bit. Their tables differ from that map by at most 1.8e-7 of a level, in fp32
rounding; the table that goes out is this package's, so that the values do not move either. Everything else is decoded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint import check_scale
from .formats import BlockFormat, get_format
from .state import QuantizedState, decoded, encode_flat, rebuild_state

#: Both keep slots of parameters with fewer elements in fp32.
SMALLEST_QUANTIZED = 4096


def dynamic_format(signed: bool) -> BlockFormat:
    """Return the 8-bit format that all three libraries share."""
    fmt = get_format("int8-dynamic", signed)
    assert isinstance(fmt, BlockFormat)
    return fmt


def _dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the shared format's codes at scale 1, fp32."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return dynamic_format(signed).decode((codes, torch.ones(1, device=device)))


def _is_dynamic(table: Tensor, signed: bool) -> bool:
    return torch.allclose(table.float(), _dynamic_map(signed, table.device), rtol=1e-6, atol=0.0)


def _in_dynamic(value: Tensor, signed: bool) -> QuantizedState:
    """Return a slot in the shared format: as it is where it has that already, else rounded to nearest."""
    fmt = dynamic_format(signed)
    if isinstance(value, QuantizedState) and value.format == fmt:
        return value
    return QuantizedState(fmt, encode_flat(fmt, decoded(value)), value.shape)


def _share(name: str, codes: Tensor, scale: Tensor, signed: bool) -> QuantizedState:
    """Wrap a copy of another library's codes, of the parameter's shape, and its scales of blocks of 256."""
    fmt = dynamic_format(signed)
    zero = fmt.center or 0
    padded = torch.nn.functional.pad(codes.reshape(-1), (0, -codes.numel() % fmt.block), value=zero)
    try:
        return rebuild_state(fmt.spec, (padded, scale.clone()), tuple(codes.shape), torch.float32)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# bitsandbytes --------------------------------------------------------------------------------------------------------

#: Where newer versions of bitsandbytes hide state from FSDP.
WRAPPED = "__bnb_optimizer_quant_state__"
#: Block lengths of bitsandbytes: today's, and that before 0.44.
_BNB_BLOCKS = (256, 2048)


def unwrap_bitsandbytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its hidden part beside the rest."""
    inner = entry.get(WRAPPED, {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"{WRAPPED} must be a mapping, got {type(inner).__name__}")
    return {**{name: value for name, value in entry.items() if name != WRAPPED}, **inner}


def read_bitsandbytes(entry: Mapping[str, Any], place: int, signed: bool) -> Tensor:
    """Return slot number `place` of an entry without its hidden part: fp32, or a state that shares its codes.

    Raises:
        ValueError: a part is missing, of the wrong dtype or size, or damaged; the message names it.
    """
    names = [f"{part}{place}" for part in ("state", "absmax", "qmap")]
    codes = _tensor(entry, names[0])
    if codes.dtype == torch.float32:
        return codes.clone()
    if codes.dtype != torch.uint8:
        raise ValueError(f"{names[0]}: dtype {codes.dtype} is neither that of 8-bit codes nor fp32")
    scale, table = _tensor(entry, names[1]), _tensor(entry, names[2])
    check_scale(names[1], scale)
    block = next((size for size in _BNB_BLOCKS if -(-codes.numel() // size) == scale.numel()), None)
    if block is None or scale.dim() != 1:
        raise ValueError(
            f"{names[1]}: shape {tuple(scale.shape)} is not one scale for each block of 256 or 2048 of the "
            f"{codes.numel()} elements of {names[0]}"
        )
    if table.shape != (256,):
        raise ValueError(f"{names[2]}: shape {tuple(table.shape)} is not that of a table of 256 values")
    if block == 256 and scale.dtype == torch.float32 and _is_dynamic(table, signed):
        return _share(names[0], codes, scale, signed)
    scales = scale.float().repeat_interleave(block)[: codes.numel()]
    return table.float()[codes.long()] * scales.view(codes.shape)


def write_bitsandbytes(value: Tensor, place: int, signed: bool, bits: str) -> dict[str, Tensor]:
    """Return slot number `place` as bitsandbytes stores it: by `bits`, and in fp32 where the parameter is small."""
    if bits == "32bit" or value.numel() < SMALLEST_QUANTIZED:
        return {f"state{place}": decoded(value)}
    state = _in_dynamic(value, signed)
    codes, scale = state.parts
    return {
        f"state{place}": codes[: value.numel()].clone().view(value.shape),
        f"qmap{place}": _dynamic_map(signed, codes.device),
        f"absmax{place}": scale,
    }


def _tensor(entry: Mapping[str, Any], name: str) -> Tensor:
    if not isinstance(entry.get(name), Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(entry.get(name)).__name__}; it has {', '.join(entry)}")
    tensor: Tensor = entry[name]
    return tensor


# torchao -------------------------------------------------------------------------------------------------------------

#: torchao's state classes by format: name, block length, and whether they are told the sign.
_TORCHAO = {
    "8bit": ("OptimState8bit", 256, True),
    "4bit": ("OptimState4bit", 128, True),
    "fp8": ("OptimStateFp8", 256, False),
}
_TORCHAO_NAMES = {name: bits for bits, (name, _, _) in _TORCHAO.items()}


def is_torchao(value: Any) -> bool:
    """Whether a value is one of torchao's quantized states, without importing torchao."""
    return type(value).__name__ in _TORCHAO_NAMES and type(value).__module__.startswith("torchao.")


def read_torchao(name: str, value: Any, signed: bool) -> Tensor:
    """Return a quantized state of torchao as fp32, or as a state that shares its codes.

    Raises:
        ValueError: its parts do not fit each other, its sign is another, or its scales are damaged.
    """
    bits = _TORCHAO_NAMES[type(value).__name__]
    per_code = 2 if bits == "4bit" else 1
    numel, blocks = value.numel(), value.scale.numel()
    if value.codes.numel() * per_code != numel or numel % blocks:
        raise ValueError(
            f"{name}: {value.codes.numel()} codes and {blocks} scales do not fit the shape {tuple(value.shape)}"
        )
    if getattr(value, "signed", signed) != signed:
        raise ValueError(f"{name}: it is stored as {'un' if signed else ''}signed, the slot is not")
    check_scale(name, value.scale)
    if bits == "8bit" and numel == blocks * 256 and _is_dynamic(value.qmap, signed):
        return _share(name, value.codes, value.scale, signed)
    plain: Tensor = value.dequantize()
    return plain.float()


def import_torchao(name: str) -> Any:
    """Import a module of torchao.

    Raises:
        ImportError: torchao is not installed, or not made for this torch.
    """
    try:
        return importlib.import_module(f"torchao.{name}")
    except ImportError as error:
        raise ImportError("state of torchao needs torchao: pip install 'lowbit-optim[torchao]'") from error
    except Exception as error:
        # A release for another torch fails in its own ways.
        raise ImportError(f"torchao cannot be imported with torch {torch.__version__}: {error}") from error


def write_torchao(value: Tensor, signed: bool, bits: str) -> Tensor:
    """Return a slot as torchao's optimizer of the format `bits` stores it.

    Raises:
        ImportError: torchao is not installed, or not made for this torch.
    """
    name, block, takes_sign = _TORCHAO[bits]
    if value.numel() < SMALLEST_QUANTIZED or value.numel() % block:
        return decoded(value)
    module = import_torchao(f"optim.subclass_{bits}")
    sign = {"signed": signed} if takes_sign else {}
    state: Any = getattr(module, name).zeros(tuple(value.shape), block_size=block, device=value.device, **sign)
    if bits == "8bit":
        codes, scale = _in_dynamic(value, signed).parts
        state.codes.copy_(codes.view(value.shape))
        state.scale.copy_(scale)
        state.qmap.copy_(_dynamic_map(signed, value.device))
    else:
        state.copy_(decoded(value).contiguous())
    result: Tensor = state
    return result
