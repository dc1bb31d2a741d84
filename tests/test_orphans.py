"""Processes of an earlier start that still write into its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpexp import orphans
from dpexp.errors import ConfigError
from dpexp.orphans import wait_for_orphans

WRITES = "import sys; log = open(sys.argv[1], 'a'); print('here', flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform == "darwin", reason="it does not tell how a file was opened")
def test_who_writes_there_is_waited_for_but_not_a_rank_of_the_same_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "ORPHANS_S", 0.1)
    command = [sys.executable, "-c", WRITES, str(tmp_path / "dpexp.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdin is not None
        writer.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {writer.pid} of the earlier start"):
            wait_for_orphans(tmp_path, in_cells=False)
        wait_for_orphans(tmp_path, in_cells=True)
        wait_for_orphans(tmp_path, in_cells=False, parent=os.getpid())
        writer.stdin.close()
    wait_for_orphans(tmp_path, in_cells=False)
