"""Imports what a rank imports, does one training step, and tells its peak resident memory in MiB."""

import resource
import sys

import psutil  # noqa: F401
import rich.progress  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.utils.tensorboard  # noqa: F401
from hydra.utils import instantiate  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1] == "ddp":
    dist.init_process_group("gloo")
model = nn.Linear(5, 2)
wrapped = DistributedDataParallel(model) if sys.argv[1] == "ddp" else model
wrapped(torch.randn(30, 5)).sum().backward()
rank = dist.get_rank() if sys.argv[1] == "ddp" else 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del wrapped
if sys.argv[1] == "ddp":
    dist.barrier()
    dist.destroy_process_group()
if rank == 0:
    print(peak / (2**20 if sys.platform == "darwin" else 2**10))
