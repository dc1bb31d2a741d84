"""Images from files, read by torchvision."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpexp.errors import ConfigError
from dpexp.extras import load
from dpexp.texts import first_line


def image_folder(path: str, size: int) -> Any:
    """The images below a folder that has one folder per class (torchvision's ``ImageFolder``).

    Args:
        path: the folder, relative to the one in which dpexp was started.
        size: the short side is resized to it and the middle is cut out, in pixels.

    Returns:
        Rows of (image, class): float32 of shape [3, size, size] in 0..1, and the place of the
        class's folder in their sorted names.

    Raises:
        ConfigError: `size` is too small, or `path` is not such a folder.
    """
    if size < 1:
        raise ConfigError("dataset.size", size, "is too small", allowed="1 or more pixels")
    torchvision = load("dpexp.datasets.image_folder", "dataset._target_")
    transforms = torchvision.transforms
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            "dataset.path",
            path,
            f"there is no such folder (searched from {Path.cwd()})",
            fix="dataset.path=<a folder with one folder of images per class>",
        )
    transform = transforms.Compose(
        [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    )
    try:
        return torchvision.datasets.ImageFolder(str(folder), transform=transform)
    except OSError as error:
        raise ConfigError(
            "dataset.path",
            path,
            f"is not a folder of images: {first_line(error)}",
            allowed="a folder with one folder of images per class (cats/1.png, dogs/2.png)",
        ) from error


def cifar10(path: str, train: bool, download: bool) -> Any:
    """60,000 images of ten classes (torchvision's ``CIFAR10``).

    Args:
        path: the folder that holds ``cifar-10-batches-py``, or gets it.
        train: the 50,000 images for training; false = the 10,000 others.
        download: fetch the 170 MB if they are not there.

    Returns:
        Rows of (image, class): float32 of shape [3, 32, 32] in 0..1, and 0..9.

    Raises:
        ConfigError: the data is not there, is damaged, or cannot be downloaded.
    """
    torchvision = load("dpexp.datasets.cifar10", "dataset._target_")
    folder = Path(path).expanduser()
    try:
        with one_at_a_time(folder, download):
            return torchvision.datasets.CIFAR10(
                str(folder),
                train=train,
                transform=torchvision.transforms.ToTensor(),
                download=download,
            )
    except (OSError, RuntimeError) as error:
        # torchvision's RuntimeError is "Dataset not found or corrupted" and names its own argument.
        reason = first_line(error) if download else "does not hold CIFAR-10, or is damaged"
        problem = f"the download failed: {reason}" if download else reason
        elsewhere = "dataset.path=<a folder that holds cifar-10-batches-py>"
        fix = elsewhere if download else f"dataset.download=true, or {elsewhere}"
        raise ConfigError("dataset.path", path, problem, fix=fix) from error


@contextmanager
def one_at_a_time(folder: Path, download: bool) -> Iterator[None]:
    """Let the ranks of a host download one after the other: the first one does, the rest find it.

    Without it they would all write the same archive at once.
    """
    if not download:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
