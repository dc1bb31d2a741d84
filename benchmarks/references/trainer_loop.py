"""The loop of loader_loop.py with Lightning's Trainer in barebones mode: no logger, no checkpoints,
no progress bar, no summary, no sanity check."""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WARMUP = 10
rows, widths = int(sys.argv[1]), [int(w) for w in sys.argv[2].split(",")]
batch, steps = int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
data = TensorDataset(torch.randn(rows, widths[0]), torch.randn(rows, widths[-1]))
layers = []
for before, after in zip(widths, widths[1:]):
    layers += [nn.Linear(before, after), nn.ReLU()]
loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


class Training(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*layers[:-1])
        self.done = 0

    def training_step(self, batch, index):
        # From the start of the first measured step to the start of the one after the last.
        if self.done == WARMUP:
            self.began = time.perf_counter()
        if self.done == WARMUP + steps:
            self.ended = time.perf_counter()
        self.done += 1
        x, y = batch
        return functional.mse_loss(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


module = Training()
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    barebones=True,
    max_epochs=-1,
    max_steps=WARMUP + steps + 1,
)
trainer.fit(module, loader)
print((module.ended - module.began) / steps)
