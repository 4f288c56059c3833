"""LightningCLI with FSDP2, on 2 processes that Lightning starts.

    python examples/lightning/fsdp2.py fit --config examples/lightning/fsdp2.yaml

Sharding replaces the parameters, and an `optimizer` at the top of the YAML is made before that: it would hold
parameters that nobody trains, whichever library it comes from. So the model takes the optimizer as an argument here,
and makes it in `configure_optimizers`, which Lightning calls after `configure_model`.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from main import Autoencoder, Noise
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer


class ShardedAutoencoder(Autoencoder):
    """The same network, a shard of it on each process.

    Args:
        optimizer: takes parameters and returns their optimizer.
        width: hidden units.
    """

    def __init__(self, optimizer: OptimizerCallable, width: int = 128) -> None:
        super().__init__(width)
        self.make_optimizer = optimizer

    def configure_model(self) -> None:
        """Shard each layer, then what is left."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> Optimizer:
        """Return an optimizer over what `configure_model` left."""
        return self.make_optimizer(self.parameters())


if __name__ == "__main__":
    LightningCLI(
        ShardedAutoencoder,
        Noise,
        seed_everything_default=1,
        save_config_callback=None,
        auto_configure_optimizers=False,
    )
