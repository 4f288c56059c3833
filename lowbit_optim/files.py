"""Checkpoint files: read, find the optimizer's state in them, convert it, and write the whole back in one piece.

A checkpoint is a file of `torch.save` or a folder of distributed checkpoint (DCP), which is imported here and nowhere
else.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .convert import convert_state_dict
from .peers import import_torchao
from .sources import recognise
from .state import QuantizedState

#: Endings of names that are files of `torch.save`.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
#: How deep optimizer state is looked for.
_DEPTH = 4

_Keys = tuple[Any, ...]


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` did.

    Attributes:
        keys: where optimizer state was found, "" for the checkpoint itself.
        source: library that each of them came from.
        parameters: number of parameters that have state.
        bytes: bytes of their state as written.
        is_folder: whether a DCP folder was written.
        notes: what the conversion warned of.
    """

    keys: tuple[str, ...]
    source: tuple[str, ...]
    parameters: int
    bytes: int
    is_folder: bool
    notes: tuple[str, ...]


def convert_checkpoint(
    source: Path, target: Path, to: str, *, format: str | None = None, key: str | None = None, force: bool = False
) -> Converted:
    """Write a checkpoint with the state of its optimizers in another library's form, and all else as it is.

    Args:
        source: a file of `torch.save`, or a DCP folder.
        target: a file if its name ends with one of `SUFFIXES`, else what `source` is.
        to: as in `convert_state_dict`.
        format: as in `convert_state_dict`.
        key: where the optimizer's state is, such as "optimizer" or "optimizer_states.0"; None looks for it.
        force: replace what is at `target`.

    Raises:
        FileNotFoundError: there is no `source`, or no folder for `target`.
        FileExistsError: there is something at `target`, and not `force`.
        ValueError: `source` cannot be read, has no optimizer state or several, or it cannot be converted; the message
            names the entry.
    """
    check_paths(source, target, force)
    is_folder = source.is_dir() and target.suffix not in SUFFIXES
    content = read_checkpoint(source)
    paths = _find(content) if key is None else [_named(content, key)]
    sources, notes, count, size = [], [], 0, 0
    for path in paths:
        old, flat = _unflatten(_at(content, path))
        with warnings.catch_warnings(record=True) as caught, _naming(_text(path)):
            warnings.simplefilter("always")
            sources.append(recognise(old))
            new = convert_state_dict(old, to, format=format)
        notes += [str(warning.message) for warning in caught]
        count, size = count + len(new["state"]), size + _bytes(new["state"])
        content = _replaced(content, path, _flatten(new) if flat else new)
    (_write_folder if is_folder else _write_file)(content, target)
    return Converted(tuple(map(_text, paths)), tuple(sources), count, size, is_folder, tuple(notes))


def check_paths(source: Path, target: Path, force: bool) -> None:
    """Check what `convert_checkpoint` says of its paths, before anything is read.

    A folder is replaced by a folder only, and only one of DCP: any other may hold what nobody meant to lose.
    """
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}")
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists already; --force replaces it")
    if target.is_dir() and (not source.is_dir() or not _is_dcp_folder(target)):
        raise FileExistsError(
            f"{target} is a folder, and not of DCP alone: it is not replaced; name a file or a new folder"
        )
    if target.is_dir() and target.resolve() in source.resolve().parents:
        raise FileExistsError(f"{source} lies in {target}, which would be deleted; name another folder")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write to")


def _is_dcp_folder(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    return ".metadata" in names and all(name == ".metadata" or name.endswith(".distcp") for name in names)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the key of the state that is being converted before the message of what is raised."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}" if key else str(error)) from error


def _bytes(value: Any) -> int:
    """Return the stored bytes of all tensors in nested mappings."""
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if not isinstance(value, Tensor):
        return 0
    if isinstance(value, QuantizedState):
        return sum(map(_bytes, value.parts))
    if hasattr(value, "__tensor_flatten__"):  # torchao's
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()


# Finding optimizer state ---------------------------------------------------------------------------------------------


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and "param_groups" in value


def _is_flat(value: Any) -> bool:
    """Whether this is what torch's helpers make with `flatten_optimizer_state_dict=True`."""
    names = [key for key in value if isinstance(key, str)] if isinstance(value, Mapping) else []
    return any(name.startswith("param_groups.") for name in names)


def _find(content: Any) -> list[_Keys]:
    found = list(_search(content, ()))
    if not found:
        told = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"no optimizer state found; the checkpoint has {told or 'nothing'}")
    # Several optimizers of one trainer stand in one list and are converted together.
    if len({path[:-1] if path and isinstance(path[-1], int) else path for path in found}) > 1:
        raise ValueError(f"several optimizer states found; choose one with --key: {', '.join(map(_text, found))}")
    return found


def _search(value: Any, path: _Keys) -> Iterator[_Keys]:
    if _is_nested(value) or _is_flat(value):
        yield path
    elif len(path) < _DEPTH:
        for key, inner in _items(value):
            yield from _search(inner, (*path, key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _text(path: _Keys) -> str:
    return ".".join(map(str, path))


def _named(content: Any, key: str) -> _Keys:
    """Return the path of a dotted key, whose parts may have dots themselves."""
    path: _Keys = ()
    value, rest = content, key
    while rest:
        steps = [(name, inner) for name, inner in _items(value) if rest == str(name) or rest.startswith(f"{name}.")]
        if not steps:
            told = ", ".join(str(name) for name, _ in _items(value)) or f"a {type(value).__name__}"
            raise ValueError(f"no {key!r} in the checkpoint: {_text(path) or 'it'} has {told}")
        name, value = max(steps, key=lambda step: len(str(step[0])))
        path, rest = (*path, name), rest[len(str(name)) + 1 :]
    if not (_is_nested(value) or _is_flat(value)):
        raise ValueError(f"{key}: not an optimizer's state dict, which has 'state' and 'param_groups'")
    return path


def _at(value: Any, path: _Keys) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: _Keys, new: Any) -> Any:
    """Return `value` with what is at `path` replaced; containers on the way are copied."""
    if not path:
        return new
    copied = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copied


# Flattened state -----------------------------------------------------------------------------------------------------


def _unflatten(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return a state dict with "state" and "param_groups", and whether it was flattened.

    Flattened, each parameter names its own options. Parameters with the same ones make a group.
    """
    if _is_nested(value):
        return value, False
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, entry in value.items():
        kind, _, rest = name.partition(".")
        param, _, slot = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not param:
            raise ValueError(f"{name!r} is neither 'state.PARAMETER.NAME' nor 'param_groups.PARAMETER.NAME'")
        (state if kind == "state" else options).setdefault(param, {})[slot] = entry
    groups: dict[str, dict[str, Any]] = {}
    for param, chosen in options.items():
        group = groups.setdefault(repr(sorted(chosen.items())), {**chosen, "params": []})
        group["params"].append(param)
    return {"state": state, "param_groups": list(groups.values())}, True


def _flatten(sd: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"state.{param}.{name}": value for param, entry in sd["state"].items() for name, value in entry.items()}
    for group in sd["param_groups"]:
        named = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        flat |= {f"param_groups.{param}.{name}": value for param in group["params"] for name, value in named.items()}
    return flat


# Reading -------------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> Any:
    """Return the content of a checkpoint, on the CPU. Quantized state in a DCP folder comes decoded, in fp32.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither a file of `torch.save` nor a complete DCP folder.
    """
    if path.is_dir() and not (path / ".metadata").exists():
        raise ValueError(f"{path} has no .metadata: it is no DCP folder, or its save was not finished")
    read: Callable[[Path], Any] = _read_folder if path.is_dir() else _load
    try:
        return _knowing_torchao(read, path)
    except OSError as error:
        if error.filename is not None:  # a file that is not there or may not be read says so itself
            raise
        raise _unreadable(path, error) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ImportError, KeyError, IndexError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    told = str(error)
    if "Unsupported global" in told or "Unsupported class" in told:
        found = re.search(r"(?:GLOBAL|class) (\S+)", told)
        named = found[1].removeprefix("builtins.") if found else ""
        return ValueError(
            f"{path} holds objects that are not read from a file nobody vouches for: {named or 'unknown'}"
        )
    kind = "DCP folder, or a damaged one" if path.is_dir() else "file of torch.save, or a damaged one"
    return ValueError(f"{path} cannot be read: it is no {kind} ({type(error).__name__})")


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _knowing_torchao(read: Callable[[Path], Any], path: Path) -> Any:
    """Read; where torchao's classes are refused as unknown, import torchao, which makes them known, and read again."""
    try:
        return read(path)
    except Exception as error:
        if "torchao" not in str(error):
            raise
    import_torchao("optim")
    return read(path)


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _read_folder(path: Path) -> Any:
    dcp = _dcp()
    metadata = dcp.FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, dcp.TensorStorageMetadata)
        flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None

    class Planner(dcp.DefaultLoadPlanner):  # type: ignore[misc,name-defined]
        """Reads what is no tensor without running its pickles."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = _load(value)

    try:
        with _one_process():
            dcp.load(flat, checkpoint_id=path, planner=Planner(False, False))
    except dcp.api.CheckpointException as error:
        # What happened in the one process that there is; the exception itself is none of `Exception`.
        raise RuntimeError(str(next(iter(error.failures.values()))[0])) from error
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        _insert(nested, (metadata.planner_data or {}).get(name, (name,)), value)
    return _lists(nested)


def _insert(nested: dict[Any, Any], path: _Keys, value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _lists(value: Any) -> Any:
    """Turn dicts whose keys are the places in a list back into lists, except the states of numbered parameters."""
    if not isinstance(value, dict):
        return value
    inner = {key: entry if key == "state" else _lists(entry) for key, entry in value.items()}
    numbered = bool(inner) and all(type(key) is int for key in inner)
    return [inner[key] for key in range(len(inner))] if numbered and set(inner) == set(range(len(inner))) else inner


@contextmanager
def _one_process() -> Iterator[None]:
    """Keep DCP, which sees that there is no process group, from warning of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Writing -------------------------------------------------------------------------------------------------------------


def _write_file(content: Any, target: Path) -> None:
    """Write under a name of its own in the same folder, then rename: others see the old content or the new."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        if target.is_dir():
            with _moved_away(target):
                Path(name).rename(target)
        else:
            Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_folder(content: Any, target: Path) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"a DCP folder holds a dict, and this checkpoint is a {type(content).__name__}")
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _one_process():
            _dcp().save(content, checkpoint_id=folder)
        folder.chmod(0o777 & ~_umask())
        with _moved_away(target):
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _moved_away(target: Path) -> Iterator[None]:
    """Have nothing at `target` within; what was there is deleted afterwards, or comes back if that failed."""
    if not target.exists():
        yield
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old = target.rename(aside / target.name)
    try:
        yield
    except BaseException:
        old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
