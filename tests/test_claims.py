"""Claims of devices and cores, with real processes: disjoint, all or nothing, free after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpexp import claims
from dpexp.claims import Claim, Wanted, attempt, wait_for
from dpexp.errors import ConfigError

# Claims, says what it has, and holds it for so long as stdin is open.
HOLDER = """
import json, sys
from pathlib import Path
from dpexp import claims
claims.claims_folder = lambda: Path(sys.argv[1])
wanted = claims.Wanted("core", tuple(sys.argv[3].split(",")), int(sys.argv[2]))
claim = claims.wait_for(wanted, Path("/runs/mine"), lambda line: None)
print(json.dumps(claim.names), flush=True)
sys.stdin.read()
"""
# Claims two of four, many times; each has a file of its own by name while it is held.
CONTENDER = """
import sys, time
from pathlib import Path
from dpexp import claims
place = Path(sys.argv[1])
claims.claims_folder = lambda: place / "claims"
claims.POLL_S = 0.001
for _ in range(20):
    claim = claims.wait_for(claims.Wanted("core", tuple("0123"), 2), place, lambda line: None)
    for name in claim.names:
        (place / name).touch(exist_ok=False)
    time.sleep(0.002)
    for name in claim.names:
        (place / name).unlink()
    claim.release()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the claims, of this test alone."""
    folder = tmp_path / "claims"
    monkeypatch.setattr(claims, "claims_folder", lambda: folder)
    return folder


def cores(count: int, names: str = "0123") -> Wanted:
    return Wanted("core", tuple(names), count)


def taken(wanted: Wanted) -> Claim:
    found = attempt(wanted, Path("/runs/a"))
    assert isinstance(found, Claim), found
    return found


@pytest.fixture
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds core 0 of 0 and 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place), "1", "0,1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == ["0"]
        yield process
        process.kill()


def test_claims_are_disjoint_all_or_nothing_and_the_first_ones_that_are_free() -> None:
    first = taken(cores(1))
    second = taken(cores(2))
    assert (first.names, second.names) == (("0",), ("1", "2"))
    refused = attempt(cores(2), Path("/runs/b"))
    assert refused == [f"core-{name}: pid {os.getpid()} (/runs/a)" for name in "012"]
    third = taken(cores(1))  # the attempt before has given back what it had
    assert third.names == ("3",)
    second.release()
    second.release()
    assert taken(cores(1, "21")).names == ("2",)
    assert taken(Wanted("cuda", ("0",), 1)).names == ("0",)  # another kind of thing


def test_what_a_process_held_is_free_when_it_is_killed(holder: subprocess.Popen[str]) -> None:
    assert attempt(cores(2, "01"), Path("/runs/b")) == [f"core-0: pid {holder.pid} (/runs/mine)"]
    holder.kill()
    holder.wait()
    claim = taken(cores(2, "01"))
    assert claim.names == ("0", "1")
    claim.release()


def test_who_waits_says_once_who_has_it_and_goes_on_when_it_is_free(
    holder: subprocess.Popen[str],
) -> None:
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        threading.Timer(3 * claims.POLL_S, holder.kill).start()

    claim = wait_for(cores(2, "01"), Path("/runs/b"), tell)
    assert claim.names == ("0", "1")
    claim.release()
    assert told == [
        "waiting for 2 cores: 1 of 2 are taken; Ctrl-C ends it. "
        f"core-0: pid {holder.pid} (/runs/mine)"
    ]


def test_a_signal_ends_the_wait_and_nothing_is_held(holder: subprocess.Popen[str]) -> None:
    def tell(_line: str) -> None:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for(cores(2, "01"), Path("/runs/b"), tell)
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken(cores(1, "1")).names == ("1",)


def test_processes_that_choose_at_the_same_time_never_have_the_same(tmp_path: Path) -> None:
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=60)[1] for process in contenders]
    assert ended == [""] * 3


def test_the_folder_is_this_users_alone(place: Path, tmp_path: Path) -> None:
    taken(cores(1)).release()
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "core-0").stat().st_mode & 0o777 == 0o600
    place.chmod(0o755)
    with pytest.raises(ConfigError, match=r"claims, in which .* is not this user's alone.* Try: "):
        attempt(cores(1), tmp_path)


def test_a_folder_of_somebody_elses_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    place.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="is not this user's alone"):
        attempt(cores(1), tmp_path)


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_no_link_is_followed_for_the_folder(place: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="is no folder of its own"):
        attempt(cores(1), tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "missing").exists()


def test_no_link_is_followed_for_a_file(place: Path, tmp_path: Path) -> None:
    place.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("kept")
    (place / "core-0").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot be locked"):
        attempt(cores(1), tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_file_that_is_removed_while_it_is_locked_is_no_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = claims.fcntl.flock

    def tidied_up(handle: int, how: int) -> None:
        lock(handle, how)
        (place / "core-0").unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(claims.fcntl, "flock", tidied_up)
        assert attempt(cores(1, "0"), Path("/runs/b")) == ["core-0: a run that has just begun"]
    claim = taken(cores(1, "0"))
    assert isinstance(attempt(cores(1, "0"), Path("/runs/b")), list)
    claim.release()


def test_a_name_with_slashes_is_a_file_in_the_folder(place: Path) -> None:
    claim = taken(Wanted("cuda", ("MIG-GPU-1f/../../1/0",), 1))
    assert (place / "cuda-MIG-GPU-1f_______1_0").exists()
    claim.release()


def test_a_file_that_is_being_written_hides_no_holder(place: Path) -> None:
    claim = taken(cores(1, "0"))
    (place / "core-0").write_text('{"pid": ')
    assert attempt(cores(1, "0"), Path("/runs/b")) == ["core-0: a run that has just begun"]
    claim.release()


def test_the_usual_folder_names_the_user() -> None:
    path = claims.Path(claims.tempfile.gettempdir()) / f"dpexp-claims-{os.getuid()}"
    done = subprocess.run(
        [sys.executable, "-c", "from dpexp.claims import claims_folder; print(claims_folder())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(path)
