"""Refusals as exceptions."""

from __future__ import annotations

import pickle

import pytest

from dpexp.errors import NO_VALUE, ConfigError, NonFiniteLossError


def copied(error: Exception) -> Exception:
    return pickle.loads(pickle.dumps(error))


def test_the_paragraph_names_key_value_problem_allowed_and_fix() -> None:
    error = ConfigError("device", "cuda: 0", "is not one", allowed="cpu", fix="device=cpu")
    assert str(error) == "device='cuda: 0': is not one. Allowed: cpu. Try: device=cpu"


def test_without_a_value_only_the_key_is_shown() -> None:
    assert str(ConfigError("config", NO_VALUE, "cannot be read")) == "config: cannot be read."


@pytest.mark.parametrize(("value", "typed"), [(None, "null"), (True, "true"), (False, "false")])
def test_a_value_is_shown_as_it_is_typed(value: object, typed: str) -> None:
    assert str(ConfigError("epochs", value, "is odd")) == f"epochs={typed}: is odd."


def test_a_long_value_is_cut() -> None:
    assert str(ConfigError("loss", "x" * 198, "is long")) == f"loss='{'x' * 198}': is long."
    assert str(ConfigError("loss", "x" * 199, "is long")) == f"loss='{'x' * 196}...: is long."


def test_a_refusal_is_a_value_error() -> None:
    assert isinstance(ConfigError("seed", 1, "no"), ValueError)


@pytest.mark.parametrize(
    "value", ["cuda: 0", 3, None, {"a": [1]}, lambda: None], ids=["str", "int", "None", "dict", "λ"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_refusal_reads_the_same_after_pickling(value: object, times: int) -> None:
    error: Exception = ConfigError("key", value, "is wrong", allowed="a, b", fix="key=a")
    before = str(error)
    for _ in range(times):
        error = copied(error)
    assert type(error) is ConfigError
    assert str(error) == before
    assert (error.key, error.problem) == ("key", "is wrong")
    assert (error.allowed, error.fix) == ("a, b", "key=a")


def test_a_refusal_without_a_value_has_none_after_pickling() -> None:
    error = copied(ConfigError("config", NO_VALUE, "cannot be read"))
    assert isinstance(error, ConfigError)
    assert error.value is NO_VALUE


def test_a_non_finite_loss_names_its_step() -> None:
    assert str(NonFiniteLossError(3)) == "non-finite loss at step 3"


def test_a_non_finite_loss_reads_the_same_after_pickling() -> None:
    error = copied(NonFiniteLossError(3))
    assert str(error) == "non-finite loss at step 3"
    assert isinstance(error, NonFiniteLossError)
    assert error.step == 3
