"""The wheel: what is in it, and that it runs from any folder (C21)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dpexp

ROOT = Path(__file__).parent.parent
Installed = Callable[..., subprocess.CompletedProcess[str]]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed into it, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("site")
    _pip("install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that must not be written to."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    # root may write into a read-only folder, so the mode alone would prove nothing
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)


@pytest.fixture
def installed(site: Path, elsewhere: Path) -> Installed:
    """Run the installed package as a user does, in the folder `elsewhere`."""

    def run(*arguments: str, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(program or (sys.executable, "-m", "dpexp")), *arguments],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_the_wheel_holds_the_package_with_its_configs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"dpexp/{p.relative_to(ROOT / 'dpexp')}" for p in (ROOT / "dpexp").rglob("*.py")}
    configs = {f"dpexp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    templates = {f"dpexp/{p.relative_to(ROOT / 'dpexp')}" for p in (ROOT / "dpexp").rglob("*.j2")}
    meta = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert len(configs) > 10
    assert len(templates) == 1
    assert names - meta == sources | configs | templates


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert f"\nVersion: {dpexp.__version__}\n" in texts["METADATA"]
    assert "\nRequires-Python: >=3.10\n" in texts["METADATA"]
    assert "dpexp = dpexp.__main__:main" in texts["entry_points.txt"]
    assert any(name.startswith("LICENSE") for name in texts)


def test_the_installed_package_is_the_one_that_runs(installed: Installed, site: Path) -> None:
    ended = installed("-c", "import dpexp; print(dpexp.__file__)", program=(sys.executable,))
    assert Path(ended.stdout.strip()) == site / "dpexp" / "__init__.py"
    script = installed("--cfg", "job", program=(str(site / "bin" / "dpexp"),))
    assert script.returncode == 0, script.stderr
    assert "_target_: dpexp.models.linear" in script.stdout


def test_it_runs_in_a_read_only_folder(installed: Installed, tmp_path: Path) -> None:
    ended = installed("parallel=ddp", "num_devices=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "ok"


@pytest.mark.slow
def test_it_sweeps_in_a_read_only_folder(installed: Installed, tmp_path: Path) -> None:
    ended = installed(
        "-m", "parallel=none,dp", "num_devices=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["status"] == "ok"


def test_it_takes_configs_from_a_folder_of_the_user(installed: Installed, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "experiment").mkdir()
    (own / "model" / "wide.yaml").write_text("_target_: dpexp.models.mlp\nwidths: [5, 64, 2]\n")
    (own / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: wide\nsteps: 3\n"
    )
    ended = installed(
        "--config-dir", str(own), "+experiment=mine", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "run" / "run.json").read_text())
    assert result["config"]["model"]["widths"] == [5, 64, 2]
    assert result["steps"] == {"measured": 2, "warmup": 1}
