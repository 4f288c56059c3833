"""The command `lowbit-optim`, also `python -m lowbit_optim`: its commands are in `cli`, which needs an extra."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line; without its extra, say what to install and exit with 2."""
    try:
        cli = importlib.import_module("lowbit_optim.cli")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f"lowbit-optim: the command line needs {missing!r}, which is not installed; "
            "run: pip install 'lowbit-optim[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    cli.app()


if __name__ == "__main__":
    main()
