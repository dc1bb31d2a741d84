"""The same loop under DistributedDataParallel, to be started by torchrun."""

import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

rows, widths = int(sys.argv[1]), [int(w) for w in sys.argv[2].split(",")]
batch, steps = int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
torch.manual_seed(0)
inputs, targets = torch.randn(rows, widths[0]), torch.randn(rows, widths[-1])
layers = []
for before, after in zip(widths, widths[1:]):
    layers += [nn.Linear(before, after), nn.ReLU()]
model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(count):
    done = 0
    while done < count:
        for chosen in torch.randperm(rows).split(batch):
            if len(chosen) < batch or done == count:
                continue
            own = chosen.chunk(world)[rank]
            loss = functional.mse_loss(model(inputs[own]), targets[own])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1


train(10)
dist.barrier()
began = time.perf_counter()
train(steps)
spent = torch.tensor([time.perf_counter() - began])
dist.all_reduce(spent, op=dist.ReduceOp.MAX)
del model, optimizer
gc.collect()
dist.destroy_process_group()
if rank == 0:
    print(float(spent) / steps)
