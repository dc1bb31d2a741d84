"""Training on one device, written by hand: data in memory, one gather per batch, SGD."""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

rows, widths, batch, steps = int(sys.argv[1]), [int(w) for w in sys.argv[2].split(",")], 0, 0
batch, steps = int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
inputs, targets = torch.randn(rows, widths[0]), torch.randn(rows, widths[-1])
layers = []
for before, after in zip(widths, widths[1:]):
    layers += [nn.Linear(before, after), nn.ReLU()]
model = nn.Sequential(*layers[:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def indices(count):
    while True:
        for chosen in torch.randperm(rows).split(batch):
            if len(chosen) == batch:
                count -= 1
                yield chosen
            if count == 0:
                return


def train(count):
    for chosen in indices(count):
        loss = functional.mse_loss(model(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


train(10)
began = time.perf_counter()
train(steps)
print((time.perf_counter() - began) / steps)
