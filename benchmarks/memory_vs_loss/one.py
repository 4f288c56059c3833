"""One run in a process of its own: takes what it is about as JSON and prints its row as JSON in the last line."""

from __future__ import annotations

import json
import sys

import torch

from .run import one_run
from .tasks import Settings

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    print(json.dumps(one_run(asked["task"], asked["recipe"], asked["lr"], Settings(**asked["settings"]))))
