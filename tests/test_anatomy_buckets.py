"""The buckets that a run would exchange, compared with those of torch itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from anatomies import random_rows, train, values
from builders import make_plan_for
from torch import nn

from dpexp.anatomy.traffic import ddp_buckets
from dpexp.schema import Task

REAL_BUCKETS = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from dpexp.models import mlp
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
found = {}
for cap, widths in ((0.003, [8, 64, 32, 2]), (None, [8, 640, 640, 640, 2])):
    for unused in (False, True):
        model = DDP(mlp(widths), bucket_cap_mb=cap, find_unused_parameters=unused)
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
        data = model._get_ddp_logging_data()
        found[f"{cap} {unused}"] = [data["bucket_sizes"], data.get("rebuilt_bucket_sizes")]
        del model
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_buckets_are_those_of_a_real_ddp(tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", "-c", REAL_BUCKETS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    real = json.loads(done.stdout)
    dataset = {**random_rows(), "features": 8}
    for cap, widths in ((0.003, [8, 64, 32, 2]), ("auto", [8, 640, 640, 640, 2])):
        model = {"_target_": "dpexp.models.mlp", "widths": widths}
        for unused in (False, True):
            options = {"bucket_cap_mb": cap, "find_unused_parameters": unused}
            buckets = train("ddp", 2, model=model, dataset=dataset, parallel=options).buckets
            first, later = real[f"{None if cap == 'auto' else cap} {unused}"]
            assert buckets is not None
            assert [bucket.bytes for bucket in buckets.first_step] == _numbers(first)
            assert [bucket.bytes for bucket in buckets.later] == _numbers(later or first)
            assert len(buckets.later) > 1


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def test_buckets_in_an_order_that_is_not_known_are_those_from_the_last_parameter() -> None:
    plan = make_plan_for("ddp", 2, task=Task.train, parallel={"bucket_cap_mb": 1e-5})
    buckets = ddp_buckets(nn.Linear(5, 2), plan, ())
    assert [bucket.bytes for bucket in buckets.later] == [48]  # 8 bytes are not the 10 of a bucket
    assert "assumed" in buckets.order


REAL_TRAFFIC = """
import json, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from dpexp.models import gpt
from dpexp.parallel.fsdp import units

class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if str(func).startswith("c10d"):
            whole = max(x.nbytes for x in tree_leaves(args) if torch.is_tensor(x))
            self.bytes[name] = self.bytes.get(name, 0) + whole
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
found = []
for reshard in (True, False):
    for micro_batches in (1, 2):
        model = gpt(11, 6, 8, 2, 3)
        mesh = init_device_mesh("cpu", (4,))
        for unit in (*units(model, "blocks"), model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        kept = sum(p.to_local().nbytes for p in model.parameters())
        for step in range(2):
            with Watch() as watch:
                for micro in range(micro_batches):
                    model.set_requires_gradient_sync(micro == micro_batches - 1)
                    model(torch.zeros(3, 6, dtype=torch.int64)).sum().backward()
        found.append([kept, watch.bytes["_allgather_base_"], watch.bytes["_reduce_scatter_base_"]])
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_the_traffic_of_fsdp_is_that_of_its_own_collectives() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REAL_TRAFFIC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    sizes = {"vocabulary": 11, "length": 6, "width": 8, "heads": 2, "layers": 3}
    dataset = {"_target_": "dpexp.datasets.tokens", "rows": 24, "length": 6, "vocabulary": 11}
    computed = []
    for reshard in (True, False):
        for micro_batches in (1, 2):
            anatomy = train(
                "fsdp",
                4,
                model={"_target_": "dpexp.models.gpt", **sizes},
                dataset={**dataset, "seed": 0},
                batch_size=12,
                accumulate=micro_batches,
                parallel={"reshard_after_forward": reshard},
            )
            traffic = [each.step_bytes for each in anatomy.exchanges]
            computed.append([values(anatomy.memory[0])["parameters"], *traffic])
    assert computed == json.loads(done.stdout)
