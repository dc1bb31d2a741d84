"""Datasets of Hugging Face's library, from a folder or from their hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpexp.errors import ConfigError
from dpexp.extras import load
from dpexp.texts import first_line

# What `save_to_disk` leaves in a folder: of one split, or of several.
SAVED = ("state.json", "dataset_dict.json")
# Files that the library reads, and its names for their formats.
FILES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
    ".txt": "text",
}


def hf(path: str, split: str | None, columns: Sequence[str] | None) -> Any:
    """A dataset of the library ``datasets``, in torch's format.

    Args:
        path: a folder that ``save_to_disk`` wrote, a file (FILES), or what ``load_dataset`` takes:
            a folder of files, or a name on the hub. Folders and files are relative to the folder
            in which dpexp was started.
        split: which split; null only where there are none.
        columns: keep these; null = all.

    Returns:
        Rows that are dicts by column: numbers are tensors, strings stay strings.

    Raises:
        ConfigError: no such dataset, split or column, or the hub cannot be reached.
    """
    library = _library()
    folder = Path(path).expanduser()
    saved = any((folder / name).is_file() for name in SAVED)
    try:
        if saved:
            loaded = library.load_from_disk(str(folder))
        elif folder.is_file():
            loaded = library.load_dataset(_kind(folder, path), data_files=str(folder), split=split)
        else:
            loaded = library.load_dataset(str(folder) if folder.is_dir() else path, split=split)
    except ConfigError:
        raise
    except Exception as error:
        # The library and the hub's client raise whatever their own libraries do.
        raise _refused(path, split, error) from error
    chosen = _split_of(loaded, split) if saved or split is None else loaded
    return _with_columns(chosen, columns).with_format("torch")


def _kind(file: Path, path: str) -> str:
    if file.suffix not in FILES:
        raise ConfigError(
            "dataset.path", path, "is not a kind of file that can be read", allowed=", ".join(FILES)
        )
    return FILES[file.suffix]


def _library() -> Any:
    datasets = load("dpexp.datasets.hf", "dataset._target_")
    if not hasattr(datasets, "load_from_disk"):
        places = [datasets.__file__, *getattr(datasets, "__path__", ())]
        raise ConfigError(
            "dataset._target_",
            "dpexp.datasets.hf",
            f"{next(filter(None, places), 'a module')} hides the library datasets, or it is not "
            "installed",
            fix='rename it, or pip install "dpexp[hf]"',
        )
    return datasets


def _refused(path: str, split: str | None, error: Exception) -> ConfigError:
    reason = first_line(error)
    if split is not None and "split" in reason.lower():
        return ConfigError("dataset.split", split, reason, fix="dataset.split=<one of them>")
    return ConfigError(
        "dataset.path",
        path,
        f"cannot be loaded: {reason}",
        fix="dataset.path=<a folder that save_to_disk wrote, a folder of files, or a hub name>",
    )


def _split_of(loaded: Any, split: str | None) -> Any:
    """One split of a DatasetDict; a dataset without splits as it is."""
    if not isinstance(loaded, dict):
        if split is not None and split != str(loaded.split):
            raise ConfigError(
                "dataset.split",
                split,
                "the folder holds one dataset, without splits",
                fix="dataset.split=null",
            )
        return loaded
    names = ", ".join(map(str, loaded))
    if split is None:
        raise ConfigError(
            "dataset.split",
            None,
            "the dataset has splits, of which one is needed",
            allowed=names,
            fix=f"dataset.split={next(iter(loaded), 'train')}",
        )
    if split not in loaded:
        raise ConfigError("dataset.split", split, "there is no such split", allowed=names)
    return loaded[split]


def _with_columns(dataset: Any, columns: Sequence[str] | None) -> Any:
    if columns is None:
        return dataset
    there = dataset.column_names  # None where a stream does not know them
    unknown = [name for name in columns if there is not None and name not in there]
    if unknown or not columns:
        problem = f"there is no column {unknown[0]!r}" if unknown else "names no column"
        allowed = ", ".join(there or ())
        raise ConfigError("dataset.columns", list(columns), problem, allowed=allowed)
    return dataset.select_columns(list(columns))
