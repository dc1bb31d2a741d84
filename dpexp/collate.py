"""From rows to a batch: torch's own collation, which also takes None and texts."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from dpexp.errors import ConfigError
from dpexp.texts import first_line


def collate(rows: list[Any]) -> Any:
    """Stack the rows' tensors, arrays and numbers; texts become lists; None stays None.

    Raises:
        ConfigError: the rows differ in structure or size, or hold something that cannot be
            stacked.
    """
    try:
        _same_keys(rows)
        return torch_collate(rows, collate_fn_map=_MAP)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        if "shared memory" in str(error):  # a loader process found no room there: not the rows
            raise
        raise ConfigError(
            "dataset",
            type(rows[0]).__name__ if isinstance(rows, (list, tuple)) and rows else "",
            f"its rows cannot be put together to a batch: {first_line(error)}",
            fix="rows of equal structure and sizes, or a dataset with a collate_fn of its own",
        ) from error


def collate_of(dataset: Any) -> Any:
    """How a dataset's rows become a batch: its own ``collate_fn``, or :func:`collate`."""
    return getattr(dataset, "collate_fn", collate)


def _same_keys(rows: list[Any]) -> None:
    """torch takes the keys of the first row, and drops what others have besides."""
    first = rows[0]
    if isinstance(first, (tuple, list)):
        for entries in zip(*rows, strict=False):  # of other lengths: torch refuses them itself
            if isinstance(entries[0], (dict, tuple, list)):
                _same_keys(list(entries))
    if not isinstance(first, dict):
        return
    for row in rows:
        if row.keys() != rows[0].keys():
            both = [", ".join(sorted(map(str, keys))) for keys in (rows[0], row)]
            raise TypeError(f"one row has the keys {both[0]}, another {both[1]}")
    for key, entry in first.items():
        if isinstance(entry, (dict, tuple, list)):
            _same_keys([row[key] for row in rows])


def _collate_none(rows: list[Any], *, collate_fn_map: Any = None) -> None:
    if any(row is not None for row in rows):
        raise TypeError("an entry is None in some rows and not in others")


def _collate_texts(rows: Any, *, collate_fn_map: Any = None) -> list[Any]:
    return list(rows)  # torch leaves a tuple here and a list there


_MAP = {
    **default_collate_fn_map,
    type(None): _collate_none,
    str: _collate_texts,
    bytes: _collate_texts,
}
