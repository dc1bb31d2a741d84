"""What single launcher plugins do that a sweep of dpexp must not have."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from dpexp import env
from dpexp.ray_cells import own_resources
from dpexp.texts import first_line


@contextmanager
def patient_submitit() -> Iterator[None]:
    """A job that was killed has no result, and the launcher would not wait for the others.

    Each job's end is awaited; that of a lost one becomes a failed JobReturn.
    """
    from submitit import Job
    from submitit.core.utils import FailedJobError, UncompletedJobError

    original = Job.results

    def results(job: Any) -> list[Any]:
        try:
            return list(original(job))
        except (FailedJobError, UncompletedJobError) as error:
            lost = JobReturn(status=JobStatus.FAILED)
            lost.return_value = RuntimeError(first_line(error))
            return [lost]

    Job.results = results
    try:
        yield
    finally:
        Job.results = original


@contextmanager
def private_ray(inner: Any) -> Iterator[None]:
    """A cluster for this sweep, which nobody else can use; one with an address stays as it is."""
    # Ray runs a task again whose process was lost, in the same folder.
    inner.ray_cfg.remote.setdefault("max_retries", 0)
    if inner.ray_cfg.init.get("address") is not None:
        # The plugin would set it, and Ray refuses it for a cluster that is there.
        inner.ray_cfg.init.setdefault("object_store_memory", None)
        inner.ray_cfg.init.setdefault("logging_level", "WARNING")
        with own_resources():
            yield
        return
    env.protect_ray()
    scratch = tempfile.mkdtemp(prefix="dpexp-ray-")
    for key, value in (
        ("include_dashboard", False),
        ("_temp_dir", scratch),
        ("logging_level", "WARNING"),
    ):
        inner.ray_cfg.init.setdefault(key, value)
    try:
        with own_resources():
            yield
    finally:
        import ray

        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
        inner.ray_cfg.init.pop("_temp_dir")
