"""What the hosts of a run tell each other, and whether they can make one run."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.errors import ConfigError
from dpexp.hosts import host_of, hosts_of, refusal, warnings, where
from dpexp.records import PhaseSummary, RunResult
from dpexp.report.single import clock_line, straggler_line
from dpexp.results import placed


def facts(**changed: Any) -> dict[str, Any]:
    known = {"torch": "2.13.0", "dpexp": "0.1.0", "code": "aa", "cores": 4, "config": {"seed": 0}}
    return {**known, "sources": {}, **changed}


def said(*hosts: tuple[str, int, dict[str, Any]], threads: int = 1) -> list[dict[str, Any]]:
    """What the ranks of some hosts say: of each its name, how many ranks, and its facts."""
    return [
        {
            "host": name,
            "agent": f"agent of {name}",
            "address": f"address of {name}",
            "pid": 100 + number,
            "threads": threads,
            "facts": own if number == 0 else None,
            "refused": None,
        }
        for name, ranks, own in hosts
        for number in range(ranks)
    ]


def test_each_host_has_its_ranks_and_what_it_is() -> None:
    a, b = hosts_of(said(("a", 1, facts()), ("b", 2, facts(cores=8))))
    assert (a["host"], a["ranks"], a["cores"]) == ("a", [0], 4)
    assert (b["host"], b["ranks"], b["cores"]) == ("b", [1, 2], 8)
    assert (b["address"], b["pids"], b["threads"]) == ("address of b", [100, 101], [1, 1])
    assert "config" not in a


def test_two_hosts_of_one_name_are_two() -> None:
    everyone = said(("a", 1, facts()), ("a", 1, facts()))
    everyone[1]["agent"] = "another one"
    assert [each["ranks"] for each in hosts_of(everyone)] == [[0], [1]]


def test_ranks_are_named_with_their_host_where_there_are_several() -> None:
    several = hosts_of(said(("a", 2, facts()), ("b", 3, facts())))
    assert where(several, [1]) == "rank 1 on a"
    assert where(several, [1, 2, 3, 4]) == "rank 1 on a; ranks 2, 3 and 4 on b"
    one = hosts_of(said(("a", 2, facts())))
    assert where(one, [0, 1]) == "ranks 0 and 1"
    assert host_of(one, 0) is None


def test_hosts_that_are_alike_are_not_refused() -> None:
    everyone = said(("a", 2, facts()), ("b", 2, facts()))
    assert refusal(everyone) is None
    assert warnings(everyone) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"code": "bb"}, ("hosts='b'", "another dpexp than a", "bb", "aa")),
        ({"config": {"seed": 1}}, ("hosts='b'", "another config", "seed: 0 on a, here 1")),
    ],
    ids=["dpexp", "config"],
)
def test_another_dpexp_or_config_is_refused_with_host_and_value(
    changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    error = refusal(said(("a", 2, facts()), ("b", 2, facts(**changed))))
    assert error is not None
    for word in words:
        assert word in str(error)


def test_what_one_host_refuses_is_refused_by_all_with_its_name() -> None:
    everyone = said(("a", 1, facts()), ("b", 1, facts()))
    everyone[1]["refused"] = vars(ConfigError("device", "cuda", "there is none", fix="device=cpu"))
    error = refusal(everyone)
    assert str(error) == "device='cuda': there is none (on b). Try: device=cpu"
    everyone[0]["refused"] = everyone[1]["refused"]
    assert "(on b)" not in str(refusal(everyone))


def test_what_differs_is_a_warning_that_names_hosts_and_values() -> None:
    own, other = facts(sources={"mine": "11"}), facts(torch="2.12.0", sources={"mine": "22"})
    told = warnings(said(("a", 1, own), ("b", 1, other)))
    assert told == [
        "warning: torch differs between hosts: 2.13.0 on a, 2.12.0 on b",
        "warning: mine is another file on b than on a",
    ]


def test_too_few_cores_are_told_per_host() -> None:
    told = warnings(said(("a", 2, facts()), ("b", 2, facts(cores=2)), threads=2))
    assert told[-1].startswith("on b 2 ranks with 4 threads share 2 cores")
    assert not any(text.startswith("on a") for text in told)


def test_the_result_says_which_rank_was_where() -> None:
    timing = {"step": PhaseSummary(1, 1, 1, 1, 1, 1)}
    result = RunResult("ok", "ddp-n2", {}, {}, "ddp", timing=timing, stragglers={"rank": 1})
    result.ranks.extend([{"rank": 0}, {"rank": 1}])
    found = placed(result, hosts_of(said(("a", 1, facts()), ("b", 1, facts()))))
    assert [each["host"] for each in found.ranks] == ["a", "b"]
    assert found.stragglers == {"rank": 1, "host": "b"}
    assert placed(result, []) == result


def test_the_console_names_the_host_of_the_slowest_rank_and_how_clocks_differ() -> None:
    ranks = [{"rank": n, "others_wait_mean_s": 0.002, "share_of_steps": 0.5} for n in range(2)]
    stragglers = {"rank": 1, "host": "b", "phase": "forward", "ranks": ranks}
    clocks = {"clock_offsets_s": [0.0, -12.5], "clock_error_s": 0.00025}
    run = {"stragglers": {**stragglers, **clocks}}
    told = straggler_line(run)
    assert told is not None
    assert told.startswith("the other ranks wait for rank 1 on b: 2 ms a step")
    assert (
        clock_line(run) == "clocks: up to -12.5 s from rank 0's, allowed for; known within 0.25 ms"
    )
    assert clock_line({"stragglers": {**stragglers, "clock_error_s": 0.0}}) is None
