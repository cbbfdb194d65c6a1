"""Lightning: python examples/train_lightning.py, which starts two ranks by itself."""

from typing import Any

import lightning as L  # noqa: N812
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laconic.integrations.lightning import Compress


class Digits(L.LightningModule):
    """Handwritten digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        """Two matrices that are worth compressing."""
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        pixels, labels = batch
        return nn.functional.cross_entropy(self.network(pixels), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


digits: Any = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[360:], y[360:]), 64, shuffle=True)

L.seed_everything(0)
model, compress = Digits(), Compress("ecdq:error=0.08")
trainer = L.Trainer(strategy="ddp", devices=2, max_epochs=10, callbacks=[compress])
trainer.fit(model, loader)

model.cpu().eval()
accuracy = (model.network(x[:360]).argmax(1) == y[:360]).float().mean().item()
if trainer.is_global_zero and compress.handle is not None:
    print(f"{accuracy:.1%} right, {compress.handle.stats().ratio:.1f} times fewer bytes")
