"""Mistakes of the user: a short refusal that names the key, and nothing left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import dpexp
from dpexp import server

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")

# Refused before anything is built: overrides, the key and the value as shown, further words.
REFUSED: list[tuple[tuple[str, ...], str, str, tuple[str, ...]]] = [
    # an unknown option of a group
    (("dataset=randm",), "dataset", "'randm'", ("digits", "Try: dataset=random")),
    (("model=linaer",), "model", "'linaer'", ("mlp", "Try: model=linear")),
    (("parallel=dpp",), "parallel", "'dpp'", ("ddp, dp, fsdp, none",)),
    (("optimizer=sdg",), "optimizer", "'sdg'", ("adamw", "Try: optimizer=sgd")),
    (("+experiment=tutoral",), "experiment", "'tutoral'", ("Try: +experiment=tutorial",)),
    (("parallel=null",), "parallel", "null", ("ddp, dp, fsdp, none",)),
    (("parallel=",), "parallel", "", ("ddp, dp, fsdp, none",)),
    (("~parallel",), "parallel", "~parallel", ("ddp, dp, fsdp, none",)),
    (("model=null",), "model", "null", ("linear",)),
    # a misspelt key
    (("foo=1",), "foo", "1", ("+foo",)),
    (("batchsize=30",), "batchsize", "30", ("Try: batch_size",)),
    (("shapes.dept=1",), "shapes.dept", "1", ("Try: shapes.depth",)),
    (("parallel.kindd=x",), "parallel.kindd", "x", ()),
    (("parallel=ddp", "+parallel.bucket_mb=1"), "parallel.bucket_mb", "1", ("bucket_cap_mb",)),
    (("parallel=ddp", "+parallel.device_ids=[0,1]"), "parallel.device_ids", "[0, 1]", ()),
    (("parallel=ddp", "+parallel.sync_bn=true"), "parallel.sync_bn", "true", ()),
    (("hydra.run.dirr=x",), "hydra.run.dirr", "x", ()),
    (("+seed=3",), "seed", "", ("seed=3",)),
    # not an override at all
    (("x",), "x", "", ()),
    (("=3",), "", "3", ()),
    (("batch_size=1,2",), "batch_size", "1,2", ("--multirun",)),
    # a wrong type or a value out of range
    (("num_devices=two",), "num_devices", "'two'", ("auto",)),
    (("num_devices=true",), "num_devices", "true", ("auto",)),
    (("num_devices=1.5",), "num_devices", "1.5", ("auto",)),
    (("num_devices=0",), "num_devices", "0", ("from 1",)),
    (("num_devices=-1",), "num_devices", "-1", ("from 1",)),
    (("batch_size=abc",), "batch_size", "'abc'", ("whole number",)),
    (("batch_size=1.5",), "batch_size", "1.5", ("whole number",)),
    (("batch_size=true",), "batch_size", "true", ("whole number",)),
    (("batch_size=null",), "batch_size", "null", ("whole number",)),
    (("batch_size=0",), "batch_size", "0", ("1 or more",)),
    (("epochs=0",), "epochs", "0", ("1 or more",)),
    (("epochs=null",), "epochs", "null", ("steps",)),
    (("warmup_steps=-1",), "warmup_steps", "-1", ("0 or more",)),
    (("seed=-1",), "seed", "-1", ("0 or more",)),
    (("shapes.depth=-1",), "shapes.depth", "-1", ("0 or more",)),
    (("loader.workers=-1",), "loader.workers", "-1", ("0 or more",)),
    (("loader=null",), "loader", "null", ()),
    (("shapes=3",), "shapes", "3", ()),
    (("forward_kwargs=3",), "forward_kwargs", "3", ()),
    (("task=trian",), "task", "'trian'", ("forward, train",)),
    (("scaling=weekly",), "scaling", "'weekly'", ("strong, weak",)),
    (("drop_last=maybe",), "drop_last", "'maybe'", ("true or false",)),
    (("save_weights=perhaps",), "save_weights", "'perhaps'", ("true or false",)),
    (("loss=msee",), "loss", "'msee'", ("mse", "cross_entropy")),
    (("dataset.rows=ten",), "dataset.rows", "'ten'", ("whole number",)),
    (("model=mlp", "model.widths=5"), "model.widths", "5", ("list",)),
    (("optimizer.lr=fast",), "optimizer.lr", "'fast'", ("a number",)),
    (("model=custom", "model._target_=3"), "model._target_", "3", ("dotted name",)),
    (("model=custom", "model._target_=null"), "model._target_", "null", ("dotted name",)),
    (("parallel.timeout_s=0",), "parallel.timeout_s", "0", ("more than 0",)),
    (("parallel=ddp", "parallel.bucket_cap_mb=0"), "parallel.bucket_cap_mb", "0", ()),
    # a value that is missing or cannot be resolved
    (("dataset=tensors",), "dataset.path", "must be given", ()),
    (("dataset=custom",), "dataset._target_", "must be given", ()),
    (("model.in_features=???",), "model.in_features", "must be given", ()),
    (
        ("model.in_features=${dataset.featuresss}",),
        "model.in_features",
        "${dataset.featuresss}",
        ("dataset.featuresss",),
    ),
    # an impossible combination
    (("parallel=none", "num_devices=4"), "num_devices", "4", ("parallel=none", "parallel=dp")),
    (("parallel=dp", "+parallel.static_graph=true"), "parallel.static_graph", "true", ("ddp",)),
    (("parallel=ddp", "parallel.backend=nccl"), "parallel.backend", "'nccl'", ("gloo",)),
    (("parallel=ddp", "parallel.backend=mpi"), "parallel.backend", "'mpi'", ("gloo",)),
    # nothing left to do
    (("steps=0",), "steps", "0", ("1 or more",)),
    (("steps=-1",), "steps", "-1", ("1 or more",)),
    # a device that is not there, or that is no device
    *(
        ((f'device="{device}"',), "device", repr(device), DEVICES)
        for device in (
            "cuda: 0",
            "cuda:-1",
            "cuda:00",
            " cpu",
            "cpu ",
            "0",
            "cuda:0,1",
            "cuda:None",
            "cuda:cuda:0",
            "",
            "CUDA:0",
            "gpu",
            "cpu:99",
        )
    ),
    (("device=0",), "device", "0", DEVICES),
    (("device=mps",), "device", "'mps'", ("MPS", "not available", "cpu")),
    (("device=xpu",), "device", "'xpu'", ("XPU", "not available", "cpu")),
]

# Found out in the ranks, where user code can be imported: the run has failed, with a refusal.
MODEL, DATASET = "model=custom", "dataset=custom"
FAILED: list[tuple[tuple[str, ...], str, str, tuple[str, ...]]] = [
    # a missing file, or one that holds something else
    (("dataset=tensors", "dataset.path=no.npy"), "dataset.path", "'no.npy'", ("no such file",)),
    (("dataset=tensors", "dataset.path=no.txt"), "dataset.path", "'no.txt'", (".npy", ".pt")),
    (("dataset=tensors", "dataset.path=text.npy"), "dataset.path", "'text.npy'", ("cannot be",)),
    (
        ("dataset=tensors", "dataset.path=pair.npz", "dataset.inputs=z"),
        "dataset.inputs",
        "'z'",
        ("x, y",),
    ),
    (("dataset=tensors", "dataset.path=odd.npz"), "dataset.path", "'odd.npz'", ("3", "4")),
    # a class that cannot be imported, or that does not take its arguments
    ((MODEL, "model._target_=usercode.Nett"), "model._target_", "'usercode.Nett'", ("Nett",)),
    ((MODEL, "model._target_=nomod.Net"), "model._target_", "'nomod.Net'", ("nomod",)),
    ((MODEL, "model._target_=Net"), "model._target_", "'Net'", ("cannot be imported",)),
    ((DATASET, "dataset._target_=nomod.Data"), "dataset._target_", "'nomod.Data'", ("nomod",)),
    (
        (MODEL, "model._target_=usercode.Strict", "+model.hiden=3"),
        "model",
        "'usercode.Strict'",
        ("hiden",),
    ),
    (
        (MODEL, "model._target_=usercode.not_a_module"),
        "model._target_",
        "'usercode.not_a_module'",
        ("int", "Module"),
    ),
    (
        ("task=train", "optimizer=custom", "optimizer._target_=torch.optim.Sgd"),
        "optimizer._target_",
        "'torch.optim.Sgd'",
        ("Sgd",),
    ),
    (("task=train", "+optimizer.momentun=0.9"), "optimizer", "SGD", ("momentun",)),
    (("task=train", "optimizer.lr=-1"), "optimizer", "", ("learning rate", "-1")),
    ((MODEL, "model._target_=usercode.mistaken"), "model.colour", "'blue'", ("model.colour=red",)),
    # a dataset that is empty or has no length
    (("dataset.rows=0",), "dataset", "", ("empty", "0 rows")),
    (("dataset.rows=-1",), "dataset.rows", "-1", ("0 or more",)),
    ((DATASET, "dataset._target_=usercode.Unsized"), "dataset", "'Unsized'", ("neither __len__",)),
    # nothing left to do
    (("dataset.rows=20", "drop_last=true"), "drop_last", "true", ("20", "30")),
    # parts that do not fit each other
    (("task=train", "model.out_features=3"), "loss", "'mse'", ("[30, 3]", "[30, 2]")),
    (("task=train", "dataset.targets=0", "loss=mse"), "loss", "'mse'", ("target",)),
    (("task=train", MODEL, "model._target_=torch.nn.ReLU"), "task", "'train'", ("ReLU",)),
    (("model=mlp", "model.widths=[5]"), "model.widths", "[5]", ("model.widths=[",)),
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all."""
    server.start(several_ranks=True)


def name_of(case: object) -> str | None:
    return " ".join(case) if isinstance(case, tuple) else None


def check_paragraph(text: str, key: str, value: str, words: tuple[str, ...]) -> None:
    """One short paragraph that names the key and the value, and shows a way out."""
    assert "\n" not in text
    assert len(text) < 600
    assert "Traceback" not in text
    assert key in text
    assert value in text
    for word in words:
        assert word in text
    assert "Try: " in text or "Allowed: " in text, "no way out"


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run_folders(folder: Path) -> list[Path]:
    """Everything below the folders for runs and sweeps."""
    return [*folder.glob("outputs/runs/*"), *folder.glob("outputs/sweeps/*")]


@pytest.mark.parametrize(("overrides", "key", "value", "words"), REFUSED, ids=name_of)
def test_a_mistake_in_the_config_is_refused_and_leaves_no_run(
    workdir: Path, overrides: tuple[str, ...], key: str, value: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(dpexp.ConfigError) as refusal:
        dpexp.run(list(overrides))
    check_paragraph(str(refusal.value), key, value, words)
    assert run_folders(workdir) == []


@pytest.mark.parametrize(
    "overrides",
    [("parallel=dpp",), ("batchsize=3",), ("steps=0",), ("num_devices=4",), ("device=mps",)],
    ids=name_of,
)
def test_a_refused_run_leaves_the_working_folder_empty(
    workdir: Path, overrides: tuple[str, ...]
) -> None:
    with pytest.raises(dpexp.ConfigError):
        dpexp.run(list(overrides))
    assert left(workdir) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_without_cuda_a_cuda_device_is_refused_and_not_replaced(workdir: Path, device: str) -> None:
    with pytest.raises(dpexp.ConfigError) as refusal:
        dpexp.run([f"device={device}"])
    words = ("CUDA", "not available", "device=auto")
    check_paragraph(str(refusal.value), "device", repr(device), words)
    assert run_folders(workdir) == []


def test_an_unquoted_comma_in_a_device_names_it_and_how_to_quote(workdir: Path) -> None:
    with pytest.raises(dpexp.ConfigError) as refusal:
        dpexp.run(["device=cuda:0,1"])
    check_paragraph(str(refusal.value), "device", "cuda:0,1", ("quote",))
    assert left(workdir) == []


@pytest.fixture
def files(workdir: Path) -> Path:
    """Files that are not what they seem to be."""
    (workdir / "text.npy").write_text("not an array")
    np.savez(workdir / "pair.npz", x=np.zeros((3, 5)), y=np.zeros((3, 2)))
    np.savez(workdir / "odd.npz", x=np.zeros((3, 5)), y=np.zeros((4, 2)))
    return workdir


@pytest.mark.parametrize(("overrides", "key", "value", "words"), FAILED, ids=name_of)
def test_a_mistake_found_in_a_rank_is_a_refusal_and_leaves_no_folder(
    files: Path, overrides: tuple[str, ...], key: str, value: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(dpexp.ConfigError) as refused:
        dpexp.run(list(overrides))
    check_paragraph(str(refused.value), key, value, words)
    assert not (files / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "key", "value", "words"),
    [case for case in FAILED if "usercode" in case[2] or case[1] in ("dataset", "drop_last")],
    ids=name_of,
)
def test_a_mistake_found_in_both_ranks_is_one_refusal_and_leaves_no_folder(
    workdir: Path, overrides: tuple[str, ...], key: str, value: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(dpexp.ConfigError) as refused:
        dpexp.run([*overrides, "parallel=ddp", "num_devices=2"])
    check_paragraph(str(refused.value), key, value, words)
    assert not (workdir / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((DATASET, "dataset._target_=usercode.FailingRows"), ("OSError", "row 50")),
        ((MODEL, "model._target_=usercode.Raising"), ("usercode.Raising", "no such thing")),
        ((MODEL, "model._target_=usercode.Raising", "+model.text=gone"), ("model", "gone")),
        (("+forward_kwargs.delta=3",), ("delta",)),
    ],
)
def test_an_error_of_user_code_names_its_place_and_cause(
    workdir: Path, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    run = dpexp.run([*overrides, "shuffle=false"])
    assert run.result.status == "failed"
    assert run.result.error.kind == "user_error"
    assert all(word in run.result.error.message for word in words), run.result.error.message
    assert "Traceback" not in run.result.error.message


# The forms that look like mistakes and are none


@pytest.mark.parametrize("override", ["+foo=1", "++foo=1", "++seed=3", "optimizer.lr=1e-3"])
def test_these_forms_are_accepted(tmp_path: Path, override: str) -> None:
    run = dpexp.run([override, "steps=1"], folder=tmp_path)
    assert run.result.status == "ok"


def test_an_added_key_is_recorded_and_said_to_be_unused(tmp_path: Path) -> None:
    run = dpexp.run(["+foo=1", "steps=1"], folder=tmp_path)
    assert run.result.config["foo"] == 1
    assert any(note.startswith("foo: ") for note in run.result.notes)


@pytest.mark.parametrize("written", ["1e-3", '"1e-3"', "0.001"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    train = ["task=train", "steps=1"]
    run = dpexp.run([*train, f"optimizer.lr={written}"], folder=tmp_path)
    assert run.result.status == "ok", run.result.error
    assert run.result.config["optimizer"]["lr"] == 0.001


@pytest.mark.parametrize("written", ["[5,8,2]", "[5, 8, 2]"])
def test_a_list_may_have_spaces(tmp_path: Path, written: str) -> None:
    run = dpexp.run(["model=mlp", f"model.widths={written}", "steps=1"], folder=tmp_path)
    assert run.result.config["model"]["widths"] == [5, 8, 2]
    assert run.result.status == "ok"


def test_a_quoted_path_may_have_commas_spaces_and_equals_signs(workdir: Path) -> None:
    torch.save(torch.zeros(30, 5), workdir / "a=b, c.pt")
    run = dpexp.run(["dataset=tensors", 'dataset.path="a=b, c.pt"', "steps=1"])
    assert run.result.status == "ok", run.result.error
    assert run.result.samples_seen == 30
