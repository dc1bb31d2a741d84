"""The list of modules that run beside others is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from beside import MODULES

# What a test uses that measures a time or looks at more than its own processes.
OF_THE_MACHINE = re.compile(
    r"monotonic\(\) -|\bperf_counter|\bnow_s\b|\btimeit\b"
    r"|\bsignalled\b|\bprocess_iter\b|\bnet_connections\b"
)


@pytest.mark.parametrize("module", sorted(MODULES), ids=lambda path: path.stem)
def test_a_module_that_runs_beside_others_neither_measures_nor_waits(module: Path) -> None:
    found = OF_THE_MACHINE.findall(module.read_text(encoding="utf-8"))
    assert not found, f"{module} has {found}, so it runs alone"
