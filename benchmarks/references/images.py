"""Training a small CNN on images, written by hand, with the usual options of such a loop."""

import argparse
import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from dpexp.datasets import images
from dpexp.models import cnn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
parser.add_argument("--batch", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--warmup", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--preload", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
asked = parser.parse_args()

torch.manual_seed(0)
dataset = images(asked.rows, 3, 32, 32, 10, 0)
if asked.preload:
    whole = dataset.collate_fn(dataset.__getitems__(range(asked.rows)))
model = cnn(3, [4, 8], 10)
if asked.compile:
    model.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def batches():
    if asked.preload:
        while True:
            for chosen in torch.randperm(asked.rows).split(asked.batch):
                if len(chosen) == asked.batch:
                    yield whole[0].index_select(0, chosen), whole[1].index_select(0, chosen)
    loader = DataLoader(
        dataset,
        batch_size=asked.batch,
        shuffle=True,
        drop_last=True,
        num_workers=asked.workers,
        collate_fn=dataset.collate_fn,
        persistent_workers=asked.workers > 0,
        multiprocessing_context="fork" if asked.workers else None,
    )
    while True:
        yield from loader


def train(source, count):
    for _ in range(count):
        x, y = next(source)
        for part, target in zip(x.chunk(asked.accumulate), y.chunk(asked.accumulate)):
            loss = functional.cross_entropy(model(part), target) / asked.accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


source = batches()
train(source, asked.warmup)
began = time.perf_counter()
train(source, asked.steps)
print((time.perf_counter() - began) / asked.steps)
