"""What a reader of a plan may not expect. Pure; no torch."""

from __future__ import annotations

from dpexp.schedule import chunk_sizes
from dpexp.schema import Config


def plan_notes(
    config: Config,
    cores: int,
    device_type: str,
    num_devices: int,
    here: int,
    batch_rows: int,
) -> tuple[str, ...]:
    """What the numbers of a plan mean that are not as they look.

    Args:
        cores: usable by this process.
        here: devices on this host.
        batch_rows: global.
    """
    notes = []
    if device_type == "cpu" and here > cores:
        notes.append(f"{here} devices share {cores} cores: their times include waiting for a core")
    if batch_rows % num_devices:
        chunks = _listed(chunk_sizes(batch_rows, num_devices))
        notes.append(
            f"batch_size {batch_rows} is not divisible by num_devices {num_devices}: "
            f"the devices get {chunks} rows; gradients are weighted by rows"
        )
    if config.prepare.sync_batchnorm and num_devices == 1:
        notes.append(
            "prepare.sync_batchnorm: one device sees the whole batch, so there is nothing to do"
        )
    notes.extend(f"{key}: not a key of dpexp; recorded, not used" for key in config.extra)
    return tuple(notes)


def _listed(sizes: tuple[int, ...]) -> str:
    """The sizes of the chunks; of many, the first and the last ones."""
    shown = [str(size) for size in sizes]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-2:]])
