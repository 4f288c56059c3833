"""Time of `import lowbit_optim` against that of `import torch`: `python -m benchmarks.import_time`.

Each import is timed in a process of its own, the two in turn, after one of each that is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from .harness import RESULTS, machine, write_csv

MODULES = ("torch", "lowbit_optim")
ROOT = Path(__file__).parents[1]
TIMED = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    """Return the seconds that importing a module takes in a new process.

    Raises:
        RuntimeError: the import printed something.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", TIMED.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    if done.stderr or len(done.stdout.splitlines()) != 1:
        raise RuntimeError(f"import {module} printed {done.stdout + done.stderr!r}")
    return float(done.stdout)


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted imports of each")
    parser.add_argument("--out", type=Path, default=RESULTS / "import_time.csv")
    options = parser.parse_args()
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for turn in range(options.rounds + 1):
        for module in MODULES:
            taken = seconds(module)
            if turn:
                times[module].append(taken)
    torch_time = statistics.median(times["torch"])
    rows = [
        {
            "module": module,
            "processes": options.rounds,
            "min_s": round(min(taken), 3),
            "median_s": round(statistics.median(taken), 3),
            "max_s": round(max(taken), 3),
            "ratio_to_torch": round(statistics.median(taken) / torch_time, 3),
        }
        for module, taken in times.items()
    ]
    write_csv(options.out, rows)
    print(machine())
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
