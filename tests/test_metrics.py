"""One figure over all samples of an evaluation, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import FakeComm, Ranks
from hypothesis import given
from hypothesis import strategies as st

from dpexp.errors import ConfigError
from dpexp.metrics import make_scoring
from dpexp.schedule import chunk_sizes

# EVAL5: five samples of three classes; the largest score is wrong on sample 0 only.
CLASSES = torch.tensor([0, 1, 2, 0, 1])
SCORES = torch.nn.functional.one_hot(torch.tensor([2, 1, 2, 0, 1]), 3).float() * 4
NINE = torch.arange(9.0)  # mean 4

NODE = {"_target_": "mymodule.mine"}
Batch = tuple[Any, Any, int]  # output, target, global rows


def cut(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end]
    if isinstance(value, dict):
        return {key: cut(entry, begin, end) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(cut(entry, begin, end) for entry in value)
    return value[begin:end] if isinstance(value, list) else value


def evaluate(
    batches: Sequence[Batch], world_size: int = 1, metric: Any = "auto", custom: Any = None
) -> Any:
    """What rank 0 makes of the batches, each spread over the ranks as under ddp."""
    ranks, result = Ranks(world_size), None
    for rank in reversed(range(world_size)):  # rank 0 is the last: it gets what the others have
        own = custom() if isinstance(custom, type) else custom
        scoring = make_scoring(metric, own, ranks.comm(rank), 1)
        for output, target, rows in batches:
            sizes = chunk_sizes(rows, world_size)
            begin, size = sum(sizes[:rank]), sizes[rank]
            begin, end = (begin, begin + size) if size else (0, sizes[0])  # idle: borrowed rows
            scoring.add(cut(output, begin, end), cut(target, begin, end), size)
        result = scoring.result()
        assert (result is None) is (rank > 0)
    return result


def in_batches(output: Any, target: Any, rows: int, batch_rows: int) -> list[Batch]:
    starts = range(0, rows, batch_rows)
    ends = [min(start + batch_rows, rows) for start in starts]
    return [
        (cut(output, a, b), cut(target, a, b), b - a) for a, b in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("batch_rows", [1, 2, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("metric", ["auto", "accuracy"])
def test_four_of_five_right_is_an_accuracy_of_four_fifths_on_any_number_of_ranks(
    metric: str, world_size: int, batch_rows: int
) -> None:
    found = evaluate(in_batches(SCORES, CLASSES, 5, batch_rows), world_size, metric)
    assert found == {"name": "accuracy", "value": 0.8, "samples": 5}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_rows", [1, 4, 9])
def test_the_mean_of_zero_to_eight_is_four_each_counted_once(
    world_size: int, batch_rows: int
) -> None:
    batches = in_batches(NINE, torch.zeros(9), 9, batch_rows)
    found = evaluate(batches, world_size, "l1")
    assert found == {"name": "l1", "value": 4.0, "samples": 9}


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9), st.integers(1, 4))
def test_the_value_does_not_depend_on_which_rank_had_which_row(
    values: list[float], world_size: int
) -> None:
    rows = len(values)
    batches = in_batches(torch.tensor(values), torch.zeros(rows), rows, 4)
    assert evaluate(batches, world_size, "l1") == evaluate(batches, 1, "l1")


@pytest.mark.parametrize(
    ("metric", "name", "output", "target", "value"),
    [
        ("auto", "mse", [[1.0, 2.0], [3.0, 0.0]], [[0.0, 0.0], [3.0, 2.0]], 2.25),
        ("l1", "l1", [[1.0, 2.0], [3.0, 0.0]], [[0.0, 0.0], [3.0, 2.0]], 1.25),
        ("cross_entropy", "cross_entropy", [[0.0, 0.0], [0.0, 0.0]], [0, 1], math.log(2)),
        ("accuracy", "accuracy", [1.5, -0.5, -2.0, 3.0], [1, 1, 0, 0], 0.5),  # one logit a row
        ("accuracy", "accuracy", [[0.2, 0.1]] * 4, [0, 0, 0, 1], 0.75),
    ],
)
def test_the_metric_by_name(metric: str, name: str, output: Any, target: Any, value: float) -> None:
    rows = len(output)
    found = evaluate([(torch.tensor(output), torch.tensor(target), rows)], 2, metric)
    assert found == {"name": name, "value": pytest.approx(value), "samples": rows}


@pytest.mark.parametrize("last", [False, True], ids=["classes in dimension 1", "classes last"])
def test_a_sample_of_several_predictions_counts_as_their_mean(last: bool) -> None:
    # Two rows of three predictions each, two classes; right: 2 of 3, then 3 of 3.
    chosen = torch.tensor([[0, 1, 1], [0, 0, 1]])
    target = torch.tensor([[0, 1, 0], [0, 0, 1]])
    scores = torch.nn.functional.one_hot(chosen, 2).float()
    output = scores if last else scores.movedim(-1, 1)
    found = evaluate([(output, target, 2)], 2, "accuracy")
    assert found == {"name": "accuracy", "value": pytest.approx(5 / 6), "samples": 2}


# Three rows of three predictions each, of which 2, 1 and 0 count; right: 1 of 2, then 1 of 1.
MASKED = torch.tensor([[0, 1, -100], [-100, 1, -100], [-100, -100, -100]])
GUESSED = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 1, 0]])


@pytest.mark.parametrize("batch_rows", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("metric", ["auto", "accuracy"])
def test_masked_targets_do_not_count_for_the_accuracy(
    metric: str, world_size: int, batch_rows: int
) -> None:
    scores = torch.nn.functional.one_hot(GUESSED, 2).float()
    found = evaluate(in_batches(scores, MASKED, 3, batch_rows), world_size, metric)
    assert found == {"name": "accuracy", "value": pytest.approx(2 / 3), "samples": 3}


@pytest.mark.parametrize("last", [False, True], ids=["classes in dimension 1", "classes last"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masked_targets_do_not_count_for_the_cross_entropy(world_size: int, last: bool) -> None:
    # Equal scores of two classes cost ln 2; three to one for the first costs ln 4/3 or ln 4.
    scores = torch.zeros(3, 3, 2)
    scores[0, :, 0] = math.log(3)
    output = scores if last else scores.movedim(-1, 1)
    found = evaluate(in_batches(output, MASKED, 3, 2), world_size, "cross_entropy")
    expected = (math.log(4 / 3) + math.log(4) + math.log(2)) / 3
    assert found == {"name": "cross_entropy", "value": pytest.approx(expected), "samples": 3}


@pytest.mark.parametrize("metric", ["accuracy", "cross_entropy"])
def test_where_all_targets_are_masked_there_is_no_mean(metric: str) -> None:
    found = evaluate([(torch.zeros(2, 3), torch.tensor([-100, -100]), 2)], 2, metric)
    assert math.isnan(found["value"])


def test_other_metrics_count_every_target() -> None:
    found = evaluate([(torch.zeros(2), torch.tensor([-100, 0]), 2)], 1, "l1")
    assert found == {"name": "l1", "value": 50.0, "samples": 2}


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)])
def test_the_prediction_may_be_a_part_of_the_output(wrap: Any) -> None:
    scoring = make_scoring("accuracy", None, FakeComm(), 1)
    scoring.add(wrap(SCORES), CLASSES, 5)
    assert scoring.result() == {"name": "accuracy", "value": 0.8, "samples": 5}


def test_a_value_that_is_no_number_makes_the_mean_none() -> None:
    found = evaluate([(torch.tensor([1.0, math.inf]), torch.zeros(2), 2)], 1, "l1")
    assert math.isnan(found["value"])
    assert found["samples"] == 2


# The model's own values


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", ["tensor", "dict"])
def test_a_models_own_values_per_row_are_averaged_over_rows(world_size: int, shape: str) -> None:
    output = NINE if shape == "tensor" else {"loss": NINE}
    batches = in_batches(output, None, 9, 4)
    expected = {"name": "output", "value": 4.0, "samples": 9}
    assert evaluate(batches, world_size) == expected


def test_a_models_own_mean_counts_for_each_of_its_rows() -> None:
    scoring = make_scoring("output", None, FakeComm(), 1)
    scoring.add(torch.tensor(1.0), None, 3)
    scoring.add({"loss": torch.tensor(5.0)}, None, 1)
    assert scoring.result() == {"name": "output", "value": 2.0, "samples": 4}


def test_under_dp_each_replicas_own_mean_counts_for_its_rows() -> None:
    # 5 rows on 4 devices are 2, 2, 1 and 0: three replicas have a mean.
    scoring = make_scoring("auto", None, FakeComm(), 4)
    scoring.add(torch.tensor([1.0, 2.0, 9.0]), None, 5)
    assert scoring.result() == {"name": "output", "value": 3.0, "samples": 5}


def test_an_output_that_is_neither_is_refused() -> None:
    scoring = make_scoring("output", None, FakeComm(), 2)
    with pytest.raises(ConfigError, match="is not a loss"):
        scoring.add({"logits": torch.zeros(3, 2)}, None, 3)


# Metrics of the user's


def wrong_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) != target).float()


def mean_wrong(output: torch.Tensor, target: torch.Tensor) -> float:
    return wrong_rows(output, target).mean().item()


class Largest:
    """The largest value over all batches, whose order and sizes it keeps."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def update(self, output: torch.Tensor, _target: Any) -> None:
        self.seen.append(output.tolist())

    def compute(self) -> torch.Tensor:
        assert self.seen == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0]]
        return torch.tensor(max(max(batch) for batch in self.seen))


@pytest.mark.parametrize("custom", [wrong_rows, mean_wrong])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_function_may_give_a_value_per_row_or_their_mean(custom: Any, world_size: int) -> None:
    found = evaluate(in_batches(SCORES, CLASSES, 5, 3), world_size, NODE, custom)
    assert found == {"name": "mine", "value": pytest.approx(0.2), "samples": 5}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_object_sees_whole_batches_in_order_whatever_the_number_of_ranks(
    world_size: int,
) -> None:
    found = evaluate(in_batches(NINE, None, 9, 4), world_size, NODE, Largest)
    assert found == {"name": "mine", "value": 8.0, "samples": 9}


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_and_targets_of_any_structure_are_put_together_again(world_size: int) -> None:
    output = {"x": NINE, "pair": (NINE, -NINE)}
    target = {"y": NINE, "names": [f"row {i}" for i in range(9)], "none": None}
    seen = []

    def look(whole: Any, wanted: Any) -> float:
        seen.append((whole, wanted))
        return 0.0

    evaluate(in_batches(output, target, 9, 9), world_size, NODE, look)
    whole, wanted = seen[-1]
    assert whole["x"].tolist() == whole["pair"][0].tolist() == NINE.tolist()
    assert whole["pair"][1].tolist() == (-NINE).tolist()
    assert (wanted["y"].tolist(), wanted["none"]) == (NINE.tolist(), None)
    assert wanted["names"] == target["names"]


def test_another_number_of_values_than_rows_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="gives 2 values for 5 rows") as caught:
        evaluate([(SCORES, CLASSES, 5)], 1, NODE, lambda _o, _t: [1.0, 2.0])
    assert caught.value.key == "metric"


@dataclass
class Output:
    """What a library returns: neither a tensor nor a dict."""

    logits: torch.Tensor


def test_an_output_object_holds_the_rows_of_all_ranks() -> None:
    ranks, found = Ranks(2), None
    for rank, rows in ((1, slice(3, 5)), (0, slice(0, 3))):
        own = make_scoring(NODE, lambda o, t: mean_wrong(o.logits, t), ranks.comm(rank), 1)
        own.add(Output(SCORES[rows]), CLASSES[rows], len(CLASSES[rows]))
        found = own.result()
    assert found == {"name": "mine", "value": pytest.approx(0.2), "samples": 5}


@pytest.mark.parametrize("metric", ["accuracy", "cross_entropy"])
@pytest.mark.parametrize("target", [None, ["a", "b"]], ids=["none", "texts"])
def test_a_metric_against_a_target_needs_one(metric: str, target: Any) -> None:
    with pytest.raises(ConfigError, match="needs a target"):
        evaluate([(torch.zeros(2, 3), target, 2)], 1, metric)


def test_a_refusal_names_the_metric() -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate([(torch.zeros(2, 3), torch.zeros(2), 2)], 1, "mse")
    assert caught.value.key == "metric"
