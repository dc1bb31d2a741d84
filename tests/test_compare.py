"""``python -m dpexp.compare`` as a user types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_run_data
from conftest import TESTS
from rich.console import Console

import dpexp
from dpexp.records import read_run
from dpexp.report.build import build
from dpexp.report.single import print_run
from dpexp.report.tables import print_report, wide

# Written by earlier versions: the first one, the last one before communication was measured, and
# the first with repeats, parity and waterfall. Names and versions of the machine's system are cut.
RESULTS = TESTS / "data/results"
VERSIONS = ("first", "before_comm", "repeats_and_comm")
Compare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Run the command in an empty folder."""

    def run(
        *arguments: str | Path, columns: int = 160, terminal: bool = False
    ) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "COLUMNS": str(columns)}
        if terminal:
            variables["FORCE_COLOR"] = "1"  # rich then takes the pipe for one
        return subprocess.run(
            [sys.executable, "-m", "dpexp.compare", *map(str, arguments)],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def side(folder: Path, *runs: dict[str, Any]) -> Path:
    for number, run in enumerate(runs):
        cell = folder / f"{number}_{run['parallel']}_n{run['num_devices']}"
        cell.mkdir(parents=True)
        (cell / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def repeats(*rates: float, **changes: Any) -> list[dict[str, Any]]:
    return [make_run_data("ddp", 2, rate=rate, **changes) for rate in rates]


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two real sweeps; a batch of the second one takes 0.2 s instead of 0.02 s."""
    folder = tmp_path_factory.mktemp("slowed")
    for name, delay_s in (("fast", 0.02), ("slow", 0.2)):
        dpexp.sweep(["repeats=3", f"inject.data_delay_s={delay_s}"], folder=folder / name)
    return folder / "fast", folder / "slow"


def test_real_repeats_that_are_slower_break_the_limit(
    compare: Compare, slowed: tuple[Path, Path]
) -> None:
    fast, slow = slowed
    done = compare(fast, slow / "sweep.json", "--ignore", "inject", "--max-regression", "3%")
    assert done.returncode == 1, done.stdout + done.stderr
    shown = lines(done.stdout)
    assert shown[:2] == [f"A: {fast} (3 runs)", f"B: {slow / 'sweep.json'} (3 runs)"]
    assert any(line.startswith("none-n1: most in data: ") for line in shown)
    assert "1 cell: 1 slower" in shown
    assert shown[-1].startswith("slower by more than 3 %, or failing: none-n1 -")
    back = compare(slow, fast, "--ignore", "inject", "--max-regression", "3%")
    assert (back.returncode, lines(back.stdout)[-1]) == (0, "no cell is slower by more than 3 %")
    assert "1 cell: 1 faster" in lines(back.stdout)


def test_real_repeats_do_not_differ_from_themselves(
    compare: Compare, slowed: tuple[Path, Path]
) -> None:
    done = compare(slowed[0], slowed[0])
    assert done.returncode == 0
    assert "1 cell: 1 no measurable difference" in lines(done.stdout)
    # Not asked to look past it, the delay is a key that differs.
    done = compare(*slowed, "--max-regression", "3%")
    assert done.returncode == 2
    assert "none-n1: not comparable: inject.data_delay_s 0.02 → 0.2" in lines(done.stdout)


@pytest.mark.parametrize("version", VERSIONS)
def test_results_of_every_earlier_version_are_read(
    compare: Compare, version: str, tmp_path: Path
) -> None:
    done = compare(RESULTS / version, RESULTS / VERSIONS[-1])
    assert (done.returncode, done.stderr) == (0, "")
    shown = lines(done.stdout)
    for cell in ("none-n1", "ddp-n2"):  # the same cells, though their configs have other keys
        reason = "one run on each side: a verdict needs repeats (repeats=5)"
        assert f"{cell}: not comparable: {reason}" in shown
    assert "1 cell skipped on both sides" in shown
    sweep = shutil.copytree(RESULTS / version, tmp_path / "sweep")
    console = Console(file=(tmp_path / "out").open("w", encoding="utf-8"))
    report = build(sweep, ["parallel=none,ddp"])
    print_report(report.content, wide(console))
    cells = report.content.cells
    assert [(cell.label, cell.status) for cell in cells] == [
        ("none-n1", "ok"),
        ("none-n2", "skipped"),
        ("ddp-n2", "ok"),
    ]
    assert cells[2].speedup is not None
    folder = sweep / "3_ddp_n2"
    print_run(read_run(folder / "run.json"), folder, console)
    console.file.close()
    assert "ddp-n2 on cpu: 3 measured steps" in (tmp_path / "out").read_text(encoding="utf-8")


def test_what_is_not_whole_is_named_and_the_others_are_compared(
    compare: Compare, tmp_path: Path
) -> None:
    a = side(tmp_path / "a", *repeats(100.0, 100.1))
    b = side(tmp_path / "b", *repeats(100.0, 100.1, 100.2))
    broken = b / "2_ddp_n2/run.json"
    broken.write_text(broken.read_text()[:500])
    done = compare(a, b, "--max-regression", "3%")
    assert (done.returncode, done.stderr) == (2, "")
    shown = lines(done.stdout)
    assert "1 cell: 1 no measurable difference" in shown
    assert any(line.startswith(f"B: not read: {broken} is not whole") for line in shown)


def test_a_later_schema_is_refused_in_one_line(compare: Compare, tmp_path: Path) -> None:
    a = side(tmp_path / "a", *repeats(100.0))
    b = side(tmp_path / "b", *repeats(100.0, 100.0, schema=2))
    done = compare(a, b)
    path = b / "0_ddp_n2/run.json"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dpexp: {path} has schema 2; this dpexp reads up to 1\n"


def test_cells_without_a_partner_and_other_environments_are_listed(
    compare: Compare, tmp_path: Path
) -> None:
    old = {"environment": {"torch": "2.12.0"}}
    a = side(tmp_path / "a", *repeats(100.0, 100.1, **old), make_run_data("fsdp", 2))
    b = side(tmp_path / "b", *repeats(100.0, 100.1, environment={"torch": "2.13.0"}))
    done = compare(a, b, "--max-regression", "3%")
    assert done.returncode == 2
    assert lines(done.stdout)[-4:] == [
        "fsdp-n2: only in A",
        "differs in environment: torch 2.12.0 → 2.13.0",
        "1 cell: 1 no measurable difference",
        "cannot tell whether a cell is slower by more than 3 %: fsdp-n2: only in A",
    ]
    # What is new has no past to be measured by.
    assert compare(b, a, "--max-regression", "3%").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-regression", "3"], "--max-regression='3': is not a percentage. Allowed: 0% to"),
        (["--max-regression", "0.03"], "is not a percentage"),
        (["--max-regression", "-3%"], "expected one argument"),
        (["--max-regression=100%"], "is not a percentage"),
        (["--ignore", "batchsize"], "is no key of these configs that changes a measured step. Try"),
        (["--ignore", "task"], "makes figures differ in kind"),
    ],
)
def test_a_wrong_option_is_refused(
    compare: Compare, tmp_path: Path, arguments: list[str], told: str
) -> None:
    folder = side(tmp_path / "a", *repeats(100.0))
    done = compare(folder, folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_path_without_results_is_refused(compare: Compare, tmp_path: Path) -> None:
    here = side(tmp_path / "a", *repeats(100.0))
    (tmp_path / "empty").mkdir()
    for path, told in (("gone", "neither a file nor a folder"), ("empty", "holds no run.json")):
        done = compare(here, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"dpexp: B='{path}': " in done.stderr
        assert told in done.stderr


def test_no_figure_is_lost_in_a_narrow_terminal(compare: Compare, tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", *repeats(100.0, 100.1)), side(tmp_path / "b", *repeats(50.0, 50.1))
    done = compare(a, b, columns=48, terminal=True)
    text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    # By hand: the errors of the logarithms are 0.0005 and 0.001; t of one degree is 12.7.
    for figure in (" 100 ", " 50.05 ", " 0.500× ", " (0.493–0.507) ", " slower"):
        assert figure in text
    table = text.splitlines()[3:7]
    assert max(map(len, table)) <= 48


def test_torch_is_not_imported(tmp_path: Path) -> None:
    folder = side(tmp_path / "a", *repeats(100.0, 100.1))
    code = (
        "import sys\nfrom dpexp.compare import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
