"""torchtune's checkpointers, under names that make this package's state loadable.

torchtune reads a checkpoint before it imports the optimizer, and `torch.load` refuses classes that it does not know.
A config that names its checkpointer through this module imports the package in time:

    checkpointer:
      _component_: lowbit_optim.integrations.torchtune.FullModelHFCheckpointer

Every name here is `torchtune.training`'s own object of that name.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return what `torchtune.training` has under a name."""
    if name.startswith("__"):  # what Python asks of modules
        raise AttributeError(name)
    import torchtune.training

    return getattr(torchtune.training, name)
