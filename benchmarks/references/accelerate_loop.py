"""The loop of loader_loop.py with Accelerate. It has no logger and no progress bar unless asked."""

import sys
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

rows, widths = int(sys.argv[1]), [int(w) for w in sys.argv[2].split(",")]
batch, steps = int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
data = TensorDataset(torch.randn(rows, widths[0]), torch.randn(rows, widths[-1]))
layers = []
for before, after in zip(widths, widths[1:]):
    layers += [nn.Linear(before, after), nn.ReLU()]
model = nn.Sequential(*layers[:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def batches():
    while True:
        yield from loader


def train(source, count):
    for _ in range(count):
        x, y = next(source)
        loss = functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


source = batches()
train(source, 10)
began = time.perf_counter()
train(source, steps)
print((time.perf_counter() - began) / steps)
