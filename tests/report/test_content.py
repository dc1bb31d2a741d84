"""What a report says of folders with results."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_run_result
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from dpexp.records import ErrorRecord, RunResult
from dpexp.report.build import build
from dpexp.report.content import Content, Failure, MemoryPoint, ShapeRow, content_of
from dpexp.report.reading import read_sources, repeating
from dpexp.report.tables import show
from dpexp.sweep_folder import write_record

MACHINE = {"start": {}, "end": {}, "warnings": []}


def at(strategy: str, devices: int, rate: float, **changes: Any) -> RunResult:
    throughput = {"samples_per_s": rate, "samples_measured": rate, "wall_s": 1.0}
    return make_run_result(strategy, devices, throughput=throughput, **changes)


def lost(kind: str = "oom") -> RunResult:
    error = ErrorRecord(kind, "RuntimeError", "no room\nmore", 1, 7, "Trace")
    return at("ddp", 2, 0.0, status="failed", error=error, label="ddp-n2")


def written(folder: Path, *results: RunResult) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(results):
        cell = folder / f"{number}_{result.parallel}_n{result.num_devices}"
        cell.mkdir()
        result.write(cell / "run.json")
    return folder


def content(folder: Path, *results: RunResult) -> Content:
    return content_of([written(folder, *results)])


# What is no result


def test_what_cannot_be_read_is_told_and_the_others_are_reported(tmp_path: Path) -> None:
    written(tmp_path, at("none", 1, 100.0), at("ddp", 2, 150.0))
    whole = (tmp_path / "0_none_n1/run.json").read_text()
    plain = json.loads(whole)
    for name, text in {
        "2_a_n1": whole[:-100],
        "3_b_n1": "",
        "4_c_n1": "[1]",
        "5_d_n1": json.dumps({**plain, "schema": 99}),
        "6_e_n1": json.dumps({**plain, "timing": 5}),
        "7_f_n1": json.dumps({**plain, "status": "fine"}),
        "8_g_n1": whole.replace('"schema": 1', '"schema": "x"'),
        "9_h_n1": "[" * 100_000,
        "12_k_n1": json.dumps({**plain, "ranks": [5], "comm": {"ranks": 1}}),
        "13_l_n1": json.dumps({**plain, "throughput": {"samples_per_s": "x"}}),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "10_i_n1/run.json").mkdir(parents=True)
    (tmp_path / "11_j_n1/.hydra").mkdir(parents=True)
    found = content_of([tmp_path])
    assert [cell.folder for cell in found.cells] == ["0_none_n1", "1_ddp_n2"]
    ends = {each.folder.partition("_")[0]: each.status for each in found.failures}
    assert [number for number, end in ends.items() if end != "unreadable"] == ["11"]
    assert ends["11"] == "cut off"
    why = {each.folder.partition("_")[0]: each.message for each in found.failures}
    assert sorted(map(int, why)) == list(range(2, 14))
    assert "schema 99" in why["5"] and "timing is 5, not a set of keys" in why["6"]
    assert "'fine'" in why["7"] and why["11"].startswith("there is no run.json")
    assert found.status == "interrupted"
    assert "11 results cannot be read" in found.answers
    assert "the sweep is not done: 1 run was cut off" in found.answers
    assert found.resume == ""  # nothing here says what it was


def test_of_a_sweep_whose_command_was_killed_it_says_what_is_open_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "it's one", at("none", 1, 100.0), at("ddp", 2, 150.0))
    (folder / "2_dp_n2").mkdir()
    (folder / "2_dp_n2/steps.rank0.csv").write_text("step,step_s\n0,0.1\n1,0.1\n2,0.")
    hydra: dict[str, Any] = {"overrides": {"task": ["parallel=none,ddp,dp", "+note='a b'"]}}
    hydra["runtime"] = {"cwd": str(tmp_path)}
    write_record(folder, OmegaConf.create({"hydra": hydra}), 4)
    found = content_of([folder])
    assert (found.status, [each.status for each in found.failures]) == ("interrupted", ["cut off"])
    assert found.failures[0].message.endswith("; 2 steps of rank 0 can be read")
    assert "the sweep is not done: 1 run was cut off, 1 run has not begun" in found.answers
    assert shlex.split(found.resume) == [
        "python", "-m", "dpexp", "-m", "parallel=none,ddp,dp", "+note='a b'",
        "resume='it\\'s one'",
    ]  # fmt: skip
    value: Any = OverridesParser.create().parse_override(shlex.split(found.resume)[-1]).value()
    assert str(value) == "it's one"
    report = build(folder)
    shown = {
        name: (folder / name).read_text(encoding="utf-8") for name in ("report.md", "sweep.json")
    }
    assert f"## Go on\n\n    {found.resume}" in shown["report.md"]
    assert json.loads(shown["sweep.json"])["resume"] == found.resume
    assert "What goes on with what is not done" in (folder / "report.html").read_text("utf-8")
    show(report.content, folder)
    assert f"to go on: {found.resume}" in capsys.readouterr().out


def test_steps_of_a_cut_off_cell_with_a_table_per_host_are_those_of_rank_0(tmp_path: Path) -> None:
    folder = written(tmp_path, at("none", 1, 100.0))
    (folder / "1_ddp_n70").mkdir()
    (folder / "1_ddp_n70/steps.host0.csv").write_text("rank,step\n0,0\n10,0\n2,0\n0,1\n0,")
    (failure,) = content_of([folder]).failures
    assert failure.message.endswith("; 2 steps of rank 0 can be read")


@pytest.mark.parametrize(("kind", "told"), [("time_limit", True), ("user_error", False)])
def test_how_to_go_on_is_told_where_a_run_was_ended_from_outside(
    tmp_path: Path, kind: str, told: bool
) -> None:
    failed = lost(kind)
    folder = written(tmp_path / "s", at("none", 1, 100.0), failed)
    hydra = {"overrides": {"task": ["parallel=none,ddp"]}, "runtime": {"cwd": str(tmp_path)}}
    write_record(folder, OmegaConf.create({"hydra": hydra}), 2)
    assert (content_of([folder]).resume != "") is told


def test_a_fault_of_the_report_is_not_blamed_on_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpexp.report.content._title", lambda sources: sources[1])
    with pytest.raises(IndexError):
        content(tmp_path)


def test_earlier_attempts_and_folders_of_launchers_are_no_cells(tmp_path: Path) -> None:
    written(tmp_path, at("none", 1, 100.0))
    written(tmp_path / "earlier", at("none", 1, 1.0))
    for name in ("earlier/.hydra", ".submitit/.hydra", "scaling", "pictures"):
        (tmp_path / name).mkdir(parents=True)
    found = content_of([tmp_path])
    assert ([cell.folder for cell in found.cells], found.failures) == (["0_none_n1"], ())


# What is said of each run


def test_a_failure_has_kind_rank_step_and_traceback(tmp_path: Path) -> None:
    found = content(tmp_path, at("none", 1, 100.0), lost())
    assert found.failures == (
        Failure("1_ddp_n2", "ddp-n2", "failed", "oom", 1, None, 7, "no room\nmore", "Trace"),
    )
    assert found.status == "failed"
    assert found.answers[1] == "1 of 2 cells failed: oom 1"


def test_memory_is_of_the_process_or_of_the_device_and_says_what_did_not_fit(
    tmp_path: Path,
) -> None:
    gpu = {"peak_bytes": [500], "peak_device_bytes": {"cuda:0": 70, "cuda:1": 90}}
    first, second, third = content(
        tmp_path, at("none", 1, 1.0), at("dp", 2, 1.0, memory=gpu), lost()
    ).memory
    peak = 200 * 2**20
    assert first == MemoryPoint("0_none_n1", "none", 1, "", 30, peak, "process", False)
    assert second == MemoryPoint("1_dp_n2", "dp", 2, "", 15, 90, "device", False)
    assert (third.folder, third.out_of_memory) == ("2_ddp_n2", True)


def test_a_breakdown_adds_up_to_the_mean_step_of_the_slowest_rank(tmp_path: Path) -> None:
    phases = {"data": 1.0, "transfer": 2.0, "forward": 7.0, "backward": 20.0, "optimizer": 3.0,
              "other": 0.5}  # fmt: skip
    own = {
        "rank": 0, "comm_exposed_mean_s": 6.0, "comm_overlapped_mean_s": 9.0,
        "straggler_wait_mean_s": 4.0, "exposed_backward_mean_s": 5.0,
        "waiting_backward_mean_s": 3.0, "backward_without_exchange_s": 1.0,
    }  # fmt: skip
    run = at("ddp", 2, 1.0, ranks=[{"rank": 0, "phase_mean_s": phases}], comm={"ranks": [own]})
    step = replace((run.timing or {})["step"], mean_s=34.0)
    (found,) = content(tmp_path, replace(run, timing={"step": step})).breakdowns
    assert found.parts_s == {
        "data": 1.0, "transfer": 2.0, "forward": 5.0, "backward": 12.0,
        "exposed_communication": 6.0, "waiting": 4.0, "optimizer": 3.0, "other": 1.0,
    }  # fmt: skip
    assert (found.step_s, sum(found.parts_s.values())) == (34.0, 34.0)


def test_shapes_are_those_of_each_replica_as_far_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, at("dp", 2, 1.0))
    head = "module,replica,input_shape,output_shape,count,first_step,last_step\n"
    rows = ',0,"[15, 5]","[15, 2]",3,0,2\nfc,1,"[5, 5]","[5, 2]",1,3,3\n,1,"[15'
    (tmp_path / "0_dp_n2/shapes.csv").write_text(head + rows)
    found = content_of([tmp_path])
    assert found.shapes == (
        ShapeRow("0_dp_n2", "dp-n2", "", 0, "[15, 5]", "[15, 2]", 3),
        ShapeRow("0_dp_n2", "dp-n2", "fc", 1, "[5, 5]", "[5, 2]", 1),
    )
    many = "".join(f'layer{n},0,"[1]","[1]",1,0,0\n' for n in range(100))
    (tmp_path / "0_dp_n2/shapes.csv").write_text(head + many)
    assert (len(content_of([tmp_path]).shapes), content_of([tmp_path]).shapes_left) == (64, 1)
    (tmp_path / "0_dp_n2/shapes.csv").write_text(head + '"' + "x" * 200_000 + '"')
    assert "shapes.csv of 0_dp_n2 cannot be read" in content_of([tmp_path]).warnings[-1]


def test_parity_has_a_row_per_cell(tmp_path: Path) -> None:
    near = {"difference": 2e-7, "tolerance": 1e-6}
    good = {"verdict": "pass", "reason": None, "steps": 3, "loss": near, "gradients": near,
            "weights": None}  # fmt: skip
    bad = {**good, "verdict": "fail", "reason": "losses differ"}
    rows = content(tmp_path, at("none", 1, 1.0, parity=good), at("ddp", 2, 1.0, parity=bad)).parity
    assert rows == (
        ("0_none_n1", "pass", "2e-07 of 1e-06", "2e-07 of 1e-06", "–", ""),
        ("1_ddp_n2", "fail", "2e-07 of 1e-06", "2e-07 of 1e-06", "–", "losses differ"),
    )


# Warnings, notes and the environment


def test_each_doubt_is_told_once_with_its_cells(tmp_path: Path) -> None:
    busy = [f"other programs kept {cores} cores busy meanwhile" for cores in (0.5, 1.25)]
    runs = [
        at("none", 1, 100.0, machine={**MACHINE, "warnings": [busy[0]]}, notes=[busy[0], "n"]),
        at("dp", 2, 150.0, machine={**MACHINE, "warnings": [busy[1]]}, notes=[busy[1], "n"]),
        at("ddp", 8, 1000.0, injected=["rank 1 pauses"]),
    ]
    beside = "cells of this sweep run 2 at a time and disturb each other's timing"
    runs = [replace(run, notes=[*run.notes, beside]) for run in runs]
    found = content(tmp_path, *runs)
    emulated, fast, crowded, moved, together, injected = found.warnings
    assert emulated.startswith("dp ran on virtual devices") and emulated.endswith(": 1_dp_n2")
    assert fast.startswith("an efficiency above 120 %") and fast.endswith(": 2_ddp_n8")
    assert crowded.startswith("more devices or threads than cores") and crowded.endswith(
        ": 2_ddp_n8"
    )
    assert moved == f"{busy[0]} (0_none_n1; alike in 1_dp_n2)"
    assert together == f"{beside} (0_none_n1; alike in 1_dp_n2, 2_ddp_n8)"
    assert injected == "disturbed on purpose: rank 1 pauses (2_ddp_n8)"
    assert found.notes[0] == ("0_none_n1, 1_dp_n2", "n")
    assert not [note for _, note in found.notes if "busy" in note]


def test_where_a_cell_ran_and_what_it_saved_are_notes(tmp_path: Path) -> None:
    saved = {"count": 3, "last_step": 30, "failed": 0, "gone_on_from": None}
    hosts = [{"host": "a", "ranks": [0]}, {"host": "b", "ranks": [1]}]
    there = {"hosts": hosts, "pinned": [[2], [3]], "checkpoint": saved}
    found = content(tmp_path, at("none", 1, 100.0), at("ddp", 2, 150.0, **there))
    assert [note for where, note in found.notes if where == "1_ddp_n2"] == [
        "on 2 hosts: a (rank 0), b (rank 1)",
        "pinned: rank 0 to core 2, rank 1 to core 3",
        "checkpoints: 3 saved, the last after 30 steps",
    ]


def test_where_cells_ran_in_different_environments_each_value_names_its_cells(
    tmp_path: Path,
) -> None:
    variables = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": None}
    code = {"commit": None, "sources": {}}
    one = {"torch": "2.13", "accelerator": None, "variables": variables, "code": code}
    runs = [at("none", 1, 1.0, environment=one), at("ddp", 2, 1.0, environment=one)]
    assert content(tmp_path / "a", *runs).environment == (
        ("torch", "2.13"), ("accelerator", "none"), ("OMP_NUM_THREADS", "1"),
    )  # fmt: skip
    other = replace(runs[1], environment={**one, "torch": "2.14"})
    assert content(tmp_path / "b", runs[0], other).environment[0] == (
        "torch", "2.13 (0_none_n1); 2.14 (1_ddp_n2)",
    )  # fmt: skip


# The command, and several folders


def test_the_command_is_what_was_typed_without_the_folder_or_what_resumes() -> None:
    assert repeating(["a=1,2", "model.widths=[8, 2]", "resume=last", "rerun=failed"]) == (
        "python -m dpexp -m a=1,2 'model.widths=[8, 2]'"
    )


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ("hydra: {overrides: {task: [a=1]}}", "python -m dpexp -m a=1"),
        (
            "hydra: {overrides: {task: [a=1], hydra: [hydra.sweep.dir=/x, hydra/launcher=joblib]},"
            " runtime: {config_sources: [{path: /my conf, provider: command-line}]}}",
            "python -m dpexp -m '--config-dir=/my conf' hydra/launcher=joblib a=1",
        ),
        ("hydra: [", "python -m dpexp -m typed=1"),
        ("5", "python -m dpexp -m typed=1"),
        (None, "python -m dpexp -m typed=1"),
    ],
)
def test_the_command_is_that_of_the_sweeps_record(
    tmp_path: Path, record: str | None, command: str
) -> None:
    if record is not None:
        (tmp_path / "multirun.yaml").write_text(record)
    (source,) = read_sources([tmp_path], ["typed=1"])
    assert source.command == command


def test_several_sweeps_are_compared_each_within_itself(tmp_path: Path) -> None:
    one = written(tmp_path / "one", at("none", 1, 100.0), at("ddp", 2, 150.0))
    two = written(tmp_path / "two", at("none", 1, 100.0), at("ddp", 2, 190.0), lost())
    found = content_of([one, two])
    assert found.title == "2 sweeps and runs"
    assert {cell.folder: cell.baseline for cell in found.cells} == {
        "one/0_none_n1": "one/0_none_n1", "one/1_ddp_n2": "one/0_none_n1",
        "two/0_none_n1": "two/0_none_n1", "two/1_ddp_n2": "two/0_none_n1",
        "two/2_ddp_n2": "two/0_none_n1",
    }  # fmt: skip
    assert {cell.setting for cell in found.cells} == {"one", "two"}
    assert [line.partition(" (")[0] for line in found.answers[:2]] == [
        "two: ddp on 2", "one: ddp on 2",
    ]  # fmt: skip
    assert [each.folder for each in found.failures] == ["two/2_ddp_n2"]


def test_single_runs_are_compared_with_one_another(tmp_path: Path) -> None:
    for name, run in {"a": at("none", 1, 100.0), "b": at("ddp", 2, 150.0)}.items():
        (tmp_path / name).mkdir()
        run.write(tmp_path / name / "run.json")
    found = content_of([tmp_path / "a", tmp_path / "b"])
    assert [(cell.folder, cell.speedup) for cell in found.cells] == [("a", 1.0), ("b", 1.5)]
    assert content_of([tmp_path / "a"]).title == "Run a"
