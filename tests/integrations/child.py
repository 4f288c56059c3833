"""What the driver starts inside a client's environment: list the client's cases, or run one of them.

    python -m tests.integrations.child MODULE ANSWER         # write {"python", "versions", "cases"} to ANSWER
    python -m tests.integrations.child MODULE ANSWER CASE    # run CASE in the current folder, write {"note"}

Only the standard library and the client's own packages are at hand here.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def packages(requirements: str) -> list[str]:
    """Return the names in a requirements file."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements.splitlines())
    return [match[0] for match in found if match]


def describe(module: Any) -> dict[str, Any]:
    """Return the versions that a client runs with and the names of its cases."""
    requirements = Path(module.__file__).with_name("requirements.txt").read_text()
    names = ["torch", *(name for name in packages(requirements) if name != "torch")]
    return {
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
        "cases": list(module.CASES),
    }


def main() -> None:
    """Answer the driver."""
    name, answer, *case = sys.argv[1:]
    module = importlib.import_module(name)
    result = {"note": module.CASES[case[0]](Path.cwd())} if case else describe(module)
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
