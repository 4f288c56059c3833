"""LightningCLI with the optimizer named in YAML alone, on one device or with DDP.

    python examples/lightning/main.py fit --config examples/lightning/adamw8bit.yaml

To go on from a checkpoint, add `--ckpt_path lightning_out/adamw8bit/epoch=0.ckpt`. Nothing here mentions lowbit_optim.
Where the model is sharded, the optimizer has to be made later: see fsdp2.py.
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Autoencoder(lightning.LightningModule):
    """A small network that learns to return its input."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss of a batch, and print it on the first process."""
        loss = (self.net(batch) - batch).float().square().mean()
        self.print(f"step {self.global_step} loss {loss.item()}")
        return loss


class Noise(lightning.LightningDataModule):
    """Random vectors, the same in every run."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return batches of 8; `precision` casts them."""
        return DataLoader(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), batch_size=8)


if __name__ == "__main__":
    LightningCLI(Autoencoder, Noise, seed_everything_default=1, save_config_callback=None)
