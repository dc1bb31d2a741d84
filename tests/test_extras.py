"""Packages that an extra brings: missing, hidden, or not fitting."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from dpexp import datasets
from dpexp.errors import ConfigError
from dpexp.extras import EXTRAS, NEEDS, explain_broken, load, refuse_missing

ROOT = Path(__file__).parent.parent
RESNET: dict[str, Any] = {"_target_": "torchvision.models.resnet18", "weights": None}
MISFIT = "raise RuntimeError('operator torchvision::nms does not exist\\nand more')\n"

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Have exactly these packages of the table installed, as far as a finder can tell."""
    real = importlib.util.find_spec

    def only(*there: str, folders: tuple[str, ...] = ()) -> None:
        def find(name: str, package: str | None = None) -> ModuleSpec | None:
            if name in folders:
                return ModuleSpec(name, None)  # a folder without code
            if name in EXTRAS:
                return ModuleSpec(name, None, origin="here.py") if name in there else None
            return real(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return only


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a module with this code before all others."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, code: str) -> Path:
        for loaded in [key for key in sys.modules if key.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        file = tmp_path / f"{name}.py"
        file.write_text(code, encoding="utf-8")
        return file

    yield write  # type: ignore[misc]
    for name in EXTRAS:
        if getattr(sys.modules.get(name), "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


def refusal(key: str, node: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        refuse_missing(key, node)
    return caught.value


def failure_of(target: str) -> BaseException:
    with pytest.raises(Exception) as caught:
        instantiate({"_target_": target})
    return caught.value


def test_a_missing_package_is_told_in_one_line(install: Install) -> None:
    install()
    assert str(refusal("model", RESNET)) == (
        "model._target_='torchvision.models.resnet18': needs torchvision, which is not installed. "
        'Try: pip install "dpexp[vision]"'
    )


@pytest.mark.parametrize("target", NEEDS)
def test_our_own_targets_name_the_package_that_they_need(install: Install, target: str) -> None:
    install()
    error = refusal("dataset", {"_target_": target})
    pip_name = {"sklearn": "scikit-learn"}.get(NEEDS[target], NEEDS[target])
    assert (error.key, error.value) == ("dataset._target_", target)
    assert error.problem.startswith(f"needs {pip_name},")
    assert error.fix == f'pip install "dpexp[{EXTRAS[NEEDS[target]]}]"'


@pytest.mark.parametrize("node", [RESNET, *({"_target_": target} for target in NEEDS)])
def test_an_installed_package_is_accepted(install: Install, node: dict[str, Any]) -> None:
    install(*EXTRAS)
    refuse_missing("model", node)


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "mymodule.Net"},
        {"_target_": "no_such_package.Net"},
        {"_target_": "torchvision_of_mine.Net"},
        {"_target_": "dpexp.models.linear", "in_features": 5},
        {"_target_": "???"},
        {"_target_": None},
        {"path": "torchvision.models"},
        "cross_entropy",
        None,
        3,
    ],
)
def test_what_is_in_no_extra_is_left_alone(install: Install, node: Any) -> None:
    install()
    refuse_missing("model", node)


@pytest.mark.parametrize(
    ("node", "key"),
    [
        (
            {"_target_": "mymodule.Net", "config": {"_target_": "transformers.GPT2Config"}},
            "model.config._target_",
        ),
        (
            {"_target_": "mymodule.Net", "parts": [{"width": 3}, {"inner": RESNET}]},
            "model.parts[1].inner._target_",
        ),
    ],
)
def test_nodes_in_nodes_are_looked_at(install: Install, node: dict[str, Any], key: str) -> None:
    install()
    assert refusal("model", node).key == key


def test_a_folder_that_happens_to_be_called_datasets_is_not_the_library(install: Install) -> None:
    install(folders=("datasets",))
    assert "needs datasets" in str(refusal("dataset", {"_target_": "dpexp.datasets.hf"}))
    refuse_missing("dataset", {"_target_": "datasets.mine.MyData"})


@pytest.mark.parametrize("name", ["datasets", "datasets.py"])
def test_a_module_of_the_user_may_have_the_name_of_a_library(
    install: Install, workdir: Path, name: str
) -> None:
    install()
    (workdir / name).touch() if name.endswith(".py") else (workdir / name).mkdir()
    refuse_missing("dataset", {"_target_": "datasets.mine.MyData"})


def test_the_digits_without_scikit_learn_are_refused(install: Install) -> None:
    install()
    with pytest.raises(ConfigError, match="needs scikit-learn, which is not installed") as caught:
        datasets.digits(flatten=True)
    assert caught.value.fix == 'pip install "dpexp[digits]"'


def test_every_extra_is_one_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package_name, extra in EXTRAS.items():
        (line,) = [line for line in project.splitlines() if line.startswith(f"{extra} = ")]
        assert f'"{package_name.replace("sklearn", "scikit-learn")}>=' in line


@pytest.mark.parametrize("target", NEEDS)
def test_our_own_targets_exist(target: str) -> None:
    module, _, name = target.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def test_a_torchvision_for_another_torch_is_told_with_the_first_line_of_its_error(
    package: Callable[[str, str], Path],
) -> None:
    package("torchvision", MISFIT)
    target = "torchvision.models.resnet18"
    assert explain_broken(target, failure_of(target)) == (
        "torchvision is installed but does not fit this torch "
        "(operator torchvision::nms does not exist)"
    )


def test_a_library_that_imports_the_broken_one_is_named_too(
    package: Callable[[str, str], Path],
) -> None:
    package("torchvision", MISFIT)
    package(
        "transformers",
        "try:\n    import torchvision\n"
        "except RuntimeError as e:\n    raise ModuleNotFoundError('Could not import X') from e\n",
    )
    target = "transformers.GPT2LMHeadModel"
    reason = explain_broken(target, failure_of(target)) or ""
    assert reason.startswith("torchvision is installed but does not fit this torch (operator")
    assert reason.endswith(f"; {target} imports it")


def test_a_library_that_fails_for_another_reason_is_not_said_to_misfit(
    package: Callable[[str, str], Path],
) -> None:
    package("transformers", "raise OSError('libfoo.so: cannot open')\n")
    reason = explain_broken("transformers.X", failure_of("transformers.X"))
    assert reason == "transformers is installed but cannot be imported (libfoo.so: cannot open)"


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("", "torchvision.models.resnet18"),  # there is no such name
        ("def f():\n    raise RuntimeError('operator')\n", "torchvision.f"),  # it ran
        ("import no_such_package\n", "torchvision.f"),
    ],
)
def test_other_failures_are_not_explained(
    package: Callable[[str, str], Path], code: str, target: str
) -> None:
    package("torchvision", code)
    assert explain_broken(target, failure_of(target)) is None
    assert explain_broken("no_such_package.f", failure_of("no_such_package.f")) is None


def test_our_own_target_with_a_broken_package_is_refused(
    package: Callable[[str, str], Path],
) -> None:
    package("torchvision", MISFIT)
    with pytest.raises(ConfigError, match="does not fit this torch") as caught:
        load("dpexp.datasets.cifar10", "dataset._target_")
    assert caught.value.value == "dpexp.datasets.cifar10"


def test_our_own_target_without_its_package_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match="needs torchvision, which is not installed"):
        load("dpexp.datasets.cifar10", "dataset._target_")


def test_a_module_that_hides_the_library_datasets_is_named(
    package: Callable[[str, str], Path],
) -> None:
    file = package("datasets", "rows = 3\n")
    with pytest.raises(ConfigError, match="hides the library datasets") as caught:
        datasets.hf("data", split=None, columns=None)
    assert str(file) in str(caught.value)
