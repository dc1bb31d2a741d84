"""Tables of what a run would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.anatomy.data import (
    Anatomy,
    BatchShapes,
    Buckets,
    Exchange,
    Figure,
    Unit,
)
from dpexp.report.tables import wide
from dpexp.texts import visible

SHOWN = 6  # buckets that are listed; the others are only counted


def print_anatomy(anatomy: Anatomy, console: Console) -> None:
    """All tables, one below the other."""
    console = wide(console)

    def line(text: str) -> None:
        console.print(escape(text), soft_wrap=True, highlight=False)

    def section(title: str, table: Table) -> None:
        line(f"\n{title}")
        with console.capture() as capture:
            console.print(table, highlight=False)
        for text in capture.get().splitlines():  # without the spaces up to the table's edge
            line("  " + text.rstrip())

    for text in _head(anatomy):
        line(text)
    section(f"model: {anatomy.model.name}, built on {anatomy.model.built_on}", _model(anatomy))
    section("shapes on each device", _shapes(anatomy))
    if anatomy.problem:
        line(f"  output unknown: {visible(anatomy.problem)}")
    section("arithmetic of a full step, over all devices", _flops(anatomy))
    section("memory", _memory(anatomy))
    if anatomy.exchanges:
        section("exchanged in a full step", _traffic(anatomy.exchanges))
    else:
        line("\nexchanged in a full step: nothing")
    if anatomy.buckets is not None:
        section(
            f"gradient buckets, in the order {anatomy.buckets.order}",
            _bucket_table(anatomy.buckets),
        )
    if anatomy.units:
        section("sharded units", _units(anatomy.units))
    line("")
    for note in anatomy.notes:
        line(f"note: {note}")


def size(count: int) -> str:
    """Bytes for a person: ``48 B``, ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:  # else it would be rounded to 1024.0
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"


def operations(count: int) -> str:
    """FLOPs for a person: ``600 FLOP``, ``1.13 GFLOP``."""
    if count < 10_000:
        return f"{count:,} FLOP"
    value = count / 1e3
    for prefix in "kMGTP":
        if value < 999.5:  # else it would be rounded to 1000
            return f"{value:.3g} {prefix}FLOP"
        value /= 1000
    return f"{value:,.0f} EFLOP" if value >= 10 else f"{value:.3g} EFLOP"


def ranges(numbers: Iterable[int]) -> str:
    """``0-2, 4`` for 0, 1, 2, 4."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    parts = []
    for _, run in runs:
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts)


def figure(value: Figure, form: str = "size") -> str:
    """The number, or that there is none."""
    if value.value is None:
        return "unknown"
    text = size(value.value) if form == "size" else operations(value.value)
    return f"at least {text}" if value.at_least else text


def _head(anatomy: Anatomy) -> list[str]:
    layout = anatomy.layout
    emulated = ", emulated" if layout.emulated else ""
    processes = "1 process" if layout.num_processes == 1 else f"{layout.num_processes} processes"
    rows = "a stream" if layout.dataset_rows is None else f"{layout.dataset_rows:,} rows"
    steps = "" if layout.steps is None else f", {layout.steps:,} steps"
    micro = f" in {layout.micro_batches} micro-batches" if layout.micro_batches > 1 else ""
    return [
        f"{layout.label} on {layout.device}{emulated}, {processes}: computed, nothing was run",
        f"task={layout.task} precision={layout.precision}; {rows}{steps}; batch "
        f"{layout.batch_rows:,} rows, {layout.batch_rows_per_device:,} per device{micro}",
    ]


def _model(anatomy: Anatomy) -> Table:
    model = anatomy.model
    table = _table(("", "left"), ("numbers", "right"), ("bytes", "right"))
    table.add_row("parameters", f"{model.parameters:,}", size(model.parameter_bytes))
    table.add_row("  trainable", f"{model.trainable:,}", size(model.gradient_bytes))
    table.add_row("buffers", f"{model.buffers:,}", size(model.buffer_bytes))
    for dtype, count in model.bytes_by_dtype.items():
        table.add_row(f"  {dtype}", "", size(count))
    return table


def _shapes(anatomy: Anatomy) -> Table:
    heads = (("batch", "left"), ("device", "left"), ("rows", "right"))
    table = _table(*heads, ("input", "left"), ("target", "left"), ("output", "left"))
    _add_batch(table, "first", anatomy.first)
    if anatomy.last is None:
        table.add_row("last", "", "", "unknown: a stream has no length")
    else:
        _add_batch(table, f"last, step {anatomy.last.step:,}", anatomy.last)
    if anatomy.loss_shape:
        table.add_row("loss", "", "", "", "", anatomy.loss_shape)
    return table


def _add_batch(table: Table, name: str, batch: BatchShapes) -> None:
    for _, group in groupby(
        batch.devices, key=lambda each: (each.rows, each.inputs, each.target, each.output)
    ):
        devices = list(group)
        one = devices[0]
        shown = (one.inputs, one.target or "-", one.output or "unknown") if one.rows else ("idle",)
        where = ranges(each.device for each in devices)
        table.add_row(name, where, f"{one.rows:,}", *map(escape, shown))
        name = ""


def _flops(anatomy: Anatomy) -> Table:
    table = _table(("", "left"), ("", "right"), ("", "left"), heads=False)
    rows = [("forward", anatomy.forward_flops)]
    if anatomy.layout.task == "train":
        rows.append(("forward and backward", anatomy.step_flops))
    for name, flops in rows:
        shown = "none" if flops.value == 0 else figure(flops, "operations")
        table.add_row(name, shown, escape(_remark(flops, anatomy)))
    return table


def _memory(anatomy: Anatomy) -> Table:
    memory = anatomy.memory
    table = _table(("", "left"), *((device.where, "right") for device in memory), ("", "left"))
    for name in memory[0].parts:
        shown = "activations (estimate)" if name == "activations" else name
        cells = [device.parts[name] for device in memory]
        remarks = dict.fromkeys(_remark(part, anatomy) for part in cells if part.note)
        table.add_row(shown, *map(figure, cells), escape("; ".join(remarks)))
    totals = [device.total for device in memory]
    table.add_row("total", *map(figure, totals), totals[0].note)
    return table


def _remark(value: Figure, anatomy: Anatomy) -> str:
    """A figure's note; why the model could not be called is told once."""
    return "the model could not be called" if value.note == anatomy.problem != "" else value.note


def _traffic(exchanges: Sequence[Exchange]) -> Table:
    heads = (("", "left"), ("each device", "right"), ("sent on a ring", "right"))
    table = _table(*heads, ("computed from", "left"))
    for each in exchanges:
        ring = "-" if each.sent_bytes is None else size(each.sent_bytes)
        table.add_row(escape(each.what), size(each.step_bytes), ring, escape(each.formula))
    return table


def _bucket_table(buckets: Buckets) -> Table:
    table = _table(("", "left"), ("number", "right"), ("sizes", "left"))
    for name, held in (("first step", buckets.first_step), ("later", buckets.later)):
        sizes = [size(bucket.bytes) for bucket in held[:SHOWN]]
        more = f" and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
        table.add_row(name, str(len(held)), ", ".join(sizes) + more)
    return table


def _units(units: Sequence[Unit]) -> Table:
    heads = (("", "left"), ("units", "right"), ("parameters each", "right"))
    table = _table(*heads, ("bytes each", "right"))
    for _, group in groupby(units, key=lambda unit: (unit.parameters, unit.bytes)):
        same = list(group)
        name = same[0].name if len(same) == 1 else f"{same[0].name} to {same[-1].name}"
        numbers = (str(len(same)), f"{same[0].parameters:,}", size(same[0].bytes))
        table.add_row(escape(name), *numbers)
    return table


def _table(*columns: tuple[str, str], heads: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=heads)
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left")
    return table
