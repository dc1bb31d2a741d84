"""Images that torchvision reads, on files that the tests make."""

from __future__ import annotations

import hashlib
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from library import library
from torch.utils.data import default_collate

from dpexp.datasets import cifar10, image_folder, vision
from dpexp.errors import ConfigError

torchvision = library("torchvision")
Image = pytest.importorskip("PIL.Image", reason="torchvision brings pillow")

BATCHES = "cifar-10-batches-py"


def write_png(file: Path, pixels: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file)


def refusal(make: Any, *arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make(*arguments)
    return caught.value


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Two classes: a wide image that is red in the middle, and two grey ones."""
    wide = np.zeros((4, 12, 3))
    wide[:, 4:8] = (255, 0, 0)
    write_png(tmp_path / "animals" / "dogs" / "a.png", wide)
    write_png(tmp_path / "animals" / "cats" / "a.png", np.full((8, 8), 51))
    write_png(tmp_path / "animals" / "cats" / "b.png", np.full((9, 4), 255))
    return tmp_path / "animals"


def test_images_get_the_class_of_their_folder_in_sorted_order(animals: Path) -> None:
    dataset = image_folder(str(animals), 4)
    assert len(dataset) == 3
    assert [label for _, label in dataset] == [0, 0, 1]
    pixels, labels = default_collate([dataset[row] for row in range(3)])
    assert (pixels.shape, pixels.dtype) == ((3, 3, 4, 4), torch.float32)
    assert labels.dtype == torch.int64


def test_an_image_is_cut_to_its_middle_and_scaled_to_0_to_1(animals: Path) -> None:
    dataset = image_folder(str(animals), 4)
    torch.testing.assert_close(dataset[0][0], torch.full((3, 4, 4), 0.2))
    red = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1).expand(3, 4, 4)
    torch.testing.assert_close(dataset[2][0], red)


def test_a_folder_of_images_can_be_sent_to_a_loader_process(animals: Path) -> None:
    dataset = image_folder(str(animals), 4)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[2][0], dataset[2][0])


def test_a_folder_that_is_not_there_is_refused(workdir: Path) -> None:
    error = refusal(image_folder, "nowhere", 4)
    assert (error.key, error.value) == ("dataset.path", "nowhere")
    assert f"searched from {workdir}" in str(error)
    assert "one folder of images per class" in error.fix


@pytest.mark.parametrize("files", [[], ["a.png"], ["cats/notes.txt"]])
def test_a_folder_without_classes_of_images_is_refused(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    error = refusal(image_folder, str(tmp_path), 4)
    assert (error.key, error.value) == ("dataset.path", str(tmp_path))
    assert "is not a folder of images" in error.problem
    assert "one folder of images per class" in error.allowed


def test_a_size_without_pixels_is_refused(animals: Path) -> None:
    assert refusal(image_folder, str(animals), 0).key == "dataset.size"


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-10 of two images per file; torchvision's checksums are those of these files."""
    kind = torchvision.datasets.CIFAR10
    folder = tmp_path / "data" / BATCHES
    folder.mkdir(parents=True)

    def write(name: str, content: Any) -> str:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    def images(first: int) -> dict[str, Any]:
        levels = np.array([first, first + 1], dtype=np.uint8)
        return {"data": np.repeat(levels[:, None], 3072, axis=1), "labels": [first % 10, 9]}

    train = [[name, write(name, images(10 * at))] for at, (name, _) in enumerate(kind.train_list)]
    test = [[name, write(name, images(255 - 1))] for name, _ in kind.test_list]
    meta = {"label_names": [f"class {number}" for number in range(10)]}
    md5 = write(kind.meta["filename"], meta)
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", test)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5})
    return tmp_path / "data"


def test_cifar10_gives_images_in_0_to_1_with_their_class(cifar: Path) -> None:
    dataset = cifar10(str(cifar), train=True, download=False)
    assert len(dataset) == 10
    image, label = dataset[3]
    assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.float32, 9)
    torch.testing.assert_close(image, torch.full((3, 32, 32), 11 / 255))


def test_cifar10_has_other_images_to_evaluate_on(cifar: Path) -> None:
    dataset = cifar10(str(cifar), train=False, download=False)
    assert len(dataset) == 2
    torch.testing.assert_close(dataset[1][0], torch.ones(3, 32, 32))


def test_cifar10_that_is_there_is_not_downloaded_again(
    cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://localhost:1/nothing")
    assert len(cifar10(str(cifar), train=True, download=True)) == 10


def test_cifar10_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    error = refusal(cifar10, str(tmp_path / "none"), True, False)
    assert (error.key, error.value) == ("dataset.path", str(tmp_path / "none"))
    assert error.fix.startswith("dataset.download=true, or dataset.path=")
    assert not (tmp_path / "none").exists()


def test_damaged_files_of_cifar10_are_refused(cifar: Path) -> None:
    (cifar / BATCHES / "data_batch_2").write_bytes(b"damaged")
    assert "is damaged" in refusal(cifar10, str(cifar), True, False).problem


def test_a_download_that_fails_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://localhost:1/nothing")
    error = refusal(cifar10, str(tmp_path / "data"), True, True)
    assert error.key == "dataset.path"
    assert "the download failed: " in error.problem
    assert "\n" not in str(error)
    assert error.fix == "dataset.path=<a folder that holds cifar-10-batches-py>"


def test_ranks_download_one_after_the_other(tmp_path: Path) -> None:
    # A lock belongs to an open file, so two threads stand for two processes.
    turns: list[str] = []

    def second() -> None:
        with vision.one_at_a_time(tmp_path, True):
            turns.append("second")

    thread = threading.Thread(target=second)
    with vision.one_at_a_time(tmp_path, True):
        thread.start()
        thread.join(0.3)
        turns.append("first")
    thread.join(10)
    assert turns == ["first", "second"]
