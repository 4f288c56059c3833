"""Run a function on several gloo processes, with a time limit and nothing left behind."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported torch but never used a thread pool: quick to start, and safe.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lowbit_optim", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(rank, *args)` on `world` processes of one gloo group and return what each returned.

    Args:
        world: number of processes.
        function: a function of a module; it and its arguments are pickled.
        *args: further arguments.
        timeout: seconds after which all processes are killed.

    Raises:
        AssertionError: a process raised, died or ran out of time; the message has the first traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_work, args=(theirs, rank, world, Path(folder) / "store", function, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        assert ready, f"ranks {sorted(waiting.values())} ran out of time"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure, payload = pipe.recv()
            except EOFError:
                failure, payload = "the process died", b""
            assert failure is None, f"rank {rank}: {failure}"
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, rank: int, world: int, store: Path, function: Callable[..., Any], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        buffer = io.BytesIO()
        torch.save(function(rank, *args), buffer)
        pipe.send((None, buffer.getvalue()))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((traceback.format_exc(), b""))
