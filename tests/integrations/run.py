"""Run the library inside each client: `python -m tests.integrations.run [client ...] [--case NAME]`.

A client is a folder beside this file with `requirements.txt`, what it needs besides torch, and `cases.py`, whose
`CASES` maps names to functions. A case gets an empty folder, raises if it fails, and may return a short note. Each
client has a virtual environment under `.integrations/`, made anew when what it is made from changes, and each case a
process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "tests.integrations"
ENVIRONMENTS = ROOT / ".integrations"
TAIL = 60  # lines of a failed case's output to show

#: Nothing is fetched, reported or run on more than one thread while cases run.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Client:
    """A folder with `requirements.txt` and `cases.py`, and the dotted name of the package around it."""

    folder: Path
    package: str = PACKAGE

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name}.cases"

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"


def find_clients() -> dict[str, Client]:
    """Return all clients by name."""
    found = sorted(Path(__file__).parent.glob("*/requirements.txt"))
    return {path.parent.name: Client(path.parent) for path in found}


# Environments --------------------------------------------------------------------------------------------------------


def torch_pin() -> str:
    """Return torch as `constraints.txt` pins it; the other pins there are the main environment's."""
    return next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))


def stamp_of(client: Client) -> str:
    """Return a text that changes with anything that an environment is made from."""
    # The rest of that file says how to check the code, not what is installed.
    project = (ROOT / "pyproject.toml").read_text().split("[tool.ruff]")[0]
    parts = [torch_pin(), sys.version, str(ROOT), client.requirements.read_text(), project]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(folder: Path, client: Client) -> None:
    """Make an environment with torch, the client and this library in it."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", torch_pin()]
    # torch goes first: a later install then finds it in place and does not fetch a CUDA build.
    subprocess.run(pip, check=True)
    subprocess.run([*pip, "--requirement", str(client.requirements), "--editable", str(ROOT)], check=True)


def environment(client: Client) -> Path:
    """Return the Python of a client's environment, which is made unless it is there and current."""
    folder = ENVIRONMENTS / client.name
    stamp, wanted = folder / "made-from", stamp_of(client)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        install(folder, client)
        stamp.write_text(wanted)
        print(f"{client.name}: environment made in {time.monotonic() - start:.0f} s", flush=True)
    return folder / "bin/python"


# Cases ---------------------------------------------------------------------------------------------------------------


def call(python: Path, client: Client, case: str | None, timeout: float) -> tuple[dict[str, Any] | None, str]:
    """Run `child` in an environment; return its answer, None where it failed, and all that it printed."""
    with tempfile.TemporaryDirectory(prefix="integration-") as name:
        scratch = Path(name)
        (scratch / "work").mkdir()
        answer, output = scratch / "answer.json", scratch / "output"
        variables = {
            **os.environ,
            **OFFLINE,
            "HF_HOME": str(scratch / "hf"),
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "VIRTUAL_ENV": str(python.parents[1]),
        }
        command = [str(python), "-m", f"{PACKAGE}.child", client.module, str(answer), *([case] if case else [])]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=scratch / "work",
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = ""
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                late = f"\nstopped after {timeout:.0f} s\n"
            finally:
                # Its workers too, which may outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = output.read_text(errors="replace") + late
        return (json.loads(answer.read_text()) if process.returncode == 0 else None), text


def show_tail(text: str) -> None:
    """Print the end of a failed case's output."""
    for line in text.splitlines()[-TAIL:]:
        print(f"    {line}", flush=True)


def run_client(client: Client, only: str | None, timeout: float) -> tuple[int, int]:
    """Run a client's cases, with a line for each; return how many there were and how many failed."""
    try:
        python = environment(client)
    except subprocess.CalledProcessError as error:
        print(f"{client.name}: its environment cannot be made: pip ended with {error.returncode}", flush=True)
        return 1, 1
    about, text = call(python, client, None, timeout)
    if about is None:
        print(f"{client.name}: its cases cannot be read", flush=True)
        show_tail(text)
        return 1, 1
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{client.name}: Python {about['python']}, {versions}", flush=True)
    cases = [case for case in about["cases"] if only in (None, case)]
    failures = 0
    for case in cases:
        start = time.monotonic()
        result, text = call(python, client, case, timeout)
        note, seconds = (result or {}).get("note") or "", time.monotonic() - start
        line = f"{client.name:<12} {case:<28} {'ok' if result else 'FAILED':<7} {seconds:6.1f} s  {note}"
        print(line.rstrip(), flush=True)
        if result is None:
            failures += 1
            show_tail(text)
    return len(cases), failures


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names; return 1 if anything failed."""
    clients = find_clients()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="client", help=f"of {', '.join(clients)}; all if none is named")
    parser.add_argument("--case", help="run the cases of this name only")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one case (default: 1800)")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.clients if name not in clients]:
        parser.error(f"no client {unknown[0]!r}; there are {', '.join(clients)}")
    start = time.monotonic()
    counts = [run_client(clients[name], args.case, args.timeout) for name in args.clients or clients]
    cases, failures = (sum(column) for column in zip(*counts, strict=True))
    if not cases:
        parser.error("no such case" if args.case else "no cases")
    print(f"{cases} cases, {failures} failed, {time.monotonic() - start:.0f} s", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    # Being stopped is an exit like any other, which stops the case that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
