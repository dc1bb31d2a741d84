"""The exercise as a learner writes it: one item at a time, default collate, DataLoader, Linear."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


epochs = int(sys.argv[1])
loader = DataLoader(RandomDataset(5, 100), batch_size=30, shuffle=True)
model = nn.Linear(5, 2)
for data in loader:
    model(data)
steps = 0
began = time.perf_counter()
for _ in range(epochs):
    for data in loader:
        output = model(data)
        steps += 1
print((time.perf_counter() - began) / steps)
