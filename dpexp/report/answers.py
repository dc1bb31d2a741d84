"""What a sweep says, in sentences. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dpexp.comparing import FASTER, NO_DIFFERENCE, WITHIN
from dpexp.report.cells import Run
from dpexp.report.findings import UNREADABLE, Failure
from dpexp.report.numbers import WIDEST, count_of, percent, ranged, significant, times
from dpexp.report.scaling import Cell
from dpexp.report.selection import SUSPECT, by_setting, named
from dpexp.report.waterfall import WAITING, shown
from dpexp.texts import first_line

MOST = 5  # settings that have a sentence of their own
SMALLEST = 0.01  # of a step; a smaller loss is not named
ONE_RUN_EACH = "one run each: no interval"
DISTURBED = "more than ideal, so the baseline was disturbed: measure again on an idle machine"
_TASKS = {"forward": "forward only", "evaluate": "evaluation"}


def answers_of(
    cells: Sequence[Cell],
    runs: Mapping[str, Run],
    failures: Sequence[Failure],
    missing: int = 0,
    cut_off: int = 0,
) -> tuple[str, ...]:
    """The answer in a sentence, then one for each further setting, then what limits them.

    Args:
        missing: runs of the sweep that never began.
        cut_off: runs that began and have no result.
    """
    groups = by_setting(cells)
    # What scales comes before what has nothing to compare with, and that before what did not run.
    order = sorted(groups, key=lambda setting: _rank(groups[setting]))
    if any(cell.samples_per_s is not None for cell in cells):
        order = [setting for setting in order if _rank(groups[setting]) < _NOTHING]
    sentences = []
    for setting in order[:MOST]:
        where = f"{setting}: " if setting and len(groups) > 1 else ""
        sentences.append(where + _of_setting(groups[setting], runs, failures))
    if len(order) > MOST:
        sentences.append(f"and {count_of(len(order) - MOST, 'more setting')} in summary.csv")
    if not cells:
        sentences.append("no cell has run")
    if missing or cut_off:
        begun = f"{count_of(cut_off, 'run')} {'was' if cut_off == 1 else 'were'} cut off"
        never = f"{count_of(missing, 'run')} {'has' if missing == 1 else 'have'} not begun"
        open_ones = ", ".join([begun] * bool(cut_off) + [never] * bool(missing))
        sentences.append(f"the sweep is not done: {open_ones}")
    return (*sentences, *_metrics(cells, runs), *_ends(cells, failures))


_COMPARED, _RATED, _NOTHING = range(3)


def _rank(cells: Sequence[Cell]) -> int:
    if _compared(cells):
        return _COMPARED
    return _RATED if any(cell.samples_per_s is not None for cell in cells) else _NOTHING


def _compared(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.speedup is not None and cell.folder != cell.baseline]


def _of_setting(cells: Sequence[Cell], runs: Mapping[str, Run], failures: Sequence[Failure]) -> str:
    compared = _compared(cells)
    best = best_of(cells, runs)
    if best is not None:
        bases = {cell.folder: cell for cell in cells}
        fast = [cell.folder for cell in compared if _too_fast(cell)]
        last = len(compared) > 1 and all((cell.speedup or 0.0) < 1 for cell in compared)
        told = _scaling(best, bases.get(best.baseline or ""), runs, last=last)
        return told + (f"; {named(fast)}: {DISTURBED}" if fast and not _too_fast(best) else "")
    rated = [cell for cell in cells if cell.samples_per_s is not None]
    if rated:
        return _rated(rated, runs)
    if any(cell.status == "ok" for cell in cells):
        return "no throughput is known: no step was measured"
    return _nothing(cells, failures)


def _too_fast(cell: Cell) -> bool:
    return (cell.efficiency or 0.0) > SUSPECT


def best_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Cell | None:
    """Of cells with a speed-up over another one the one to tell of."""
    bases = {cell.folder: cell for cell in cells}

    def worth(cell: Cell) -> tuple[float, ...]:
        return _trust(cell, bases.get(cell.baseline or ""), runs)

    return max(_compared(cells), key=worth, default=None)


def _trust(cell: Cell, base: Cell | None, runs: Mapping[str, Run]) -> tuple[float, ...]:
    """What makes a speed-up the one to tell of; what matters most comes first.

    It is of real devices that nothing disturbed, more of them than the baseline has, and known to
    be one.
    """
    sound = (not cell.emulated, not _injected(cell, runs), not _too_fast(cell))
    more = base is None or (cell.num_devices or 0) > (base.num_devices or 0)
    return (*sound, more, cell.verdict == FASTER, cell.speedup or 0.0)


def _injected(cell: Cell, runs: Mapping[str, Run]) -> bool:
    return any(runs[name].get("injected") for name in cell.folders)


def _scaling(cell: Cell, base: Cell | None, runs: Mapping[str, Run], *, last: bool) -> str:
    """A sentence on a cell with a speed-up.

    Args:
        last: it is slower than the baseline, and so are all others.
    """
    assert cell.speedup is not None and cell.efficiency is not None
    # Of the usual baseline nothing is said: a speed-up is taken to be against one device.
    usual = base is None or (base.parallel == "none" and base.num_devices == 1)
    what, figure = _described(cell, runs), _speedup(cell)
    if cell.verdict == NO_DIFFERENCE:
        text = f"{what}: no measurable difference from {_on(base)}"
        text += f": {figure}" if figure else ""
    elif cell.speedup < 1 and figure:
        slower = f"{what}: slower than {_on(base)}: "
        text = (f"nothing beats {_on(base)}; {what}: " if last else slower) + figure
    else:
        text = f"{what}: {figure}" + ("" if usual else f" against {_on(base)}")
    if not figure:  # nor is an efficiency one
        return f"{text}: its runs differ too much for a figure"
    return f"{text}, {percent(cell.efficiency)} efficient{_lost(cell)}"


def _speedup(cell: Cell) -> str:
    """The speed-up with its interval; "" where that says nothing."""
    assert cell.speedup is not None
    low, high = cell.speedup_low, cell.speedup_high
    if low is None or high is None or cell.speedup_scope == WITHIN:
        return f"{times(cell.speedup)}× ({ONE_RUN_EACH})"
    return "" if high > low * WIDEST else ranged(cell.speedup, low, high, "×")


def _lost(cell: Cell) -> str:
    if _too_fast(cell):
        return f"; {DISTURBED}"
    fall = cell.waterfall
    if fall is None or fall.loss_s <= 0:
        return ""
    part = fall.largest
    if fall.parts_s["residual"] > fall.parts_s[part]:
        return "; the largest part of the loss is not explained"
    if fall.share(part) < SMALLEST:
        return ""
    waits = part == WAITING and cell.straggler is not None
    return f"; loses most to {shown(part)}" + (f" ({cell.straggler})" if waits else "")


def _rated(cells: Sequence[Cell], runs: Mapping[str, Run]) -> str:
    doubted = [cell for cell in cells if cell.status == "ok" and cell.reason is not None]
    sound = [cell for cell in cells if cell not in doubted] or cells
    best = max(sound, key=lambda cell: cell.samples_per_s or 0.0)
    assert best.samples_per_s is not None
    low, high = best.samples_per_s_low, best.samples_per_s_high
    if low is None or high is None or best.interval_scope == WITHIN:
        figure = f"{significant(best.samples_per_s)} samples/s (one run: no interval)"
    else:
        figure = ranged(best.samples_per_s, low, high, " samples/s")
    if len(cells) == 1:
        return f"{_described(best, runs)}: {figure}; there is no other cell to compare it with"
    return (
        f"{len(cells)} cells cannot be compared with one another; "
        f"the fastest {'that can be believed ' if best not in doubted and doubted else ''}is "
        f"{_described(best, runs)}: {figure}"
    )


def _nothing(cells: Sequence[Cell], failures: Sequence[Failure]) -> str:
    own = {name for cell in cells for name in cell.folders}
    first = next((each for each in failures if each.folder in own and each.kind != "config"), None)
    first = first or next((each for each in failures if each.folder in own), None)
    counted = Counter(cell.status for cell in cells)
    ends = ", ".join(f"{number} {status}" for status, number in counted.items())
    reason = "" if first is None else f"; {first.folder}: {first_line(first.message)}"
    return f"no cell gave a figure ({ends}){reason}"


def _metrics(cells: Sequence[Cell], runs: Mapping[str, Run]) -> tuple[str, ...]:
    """What an evaluation found, which must not depend on strategy and devices."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in cells:
        for name in cell.folders:
            metric = runs[name].get("metric") or {}
            if metric.get("value") is not None:
                key = (cell.setting, str(metric.get("name")))
                value = f"{metric['value']:.6g} over {count_of(metric['samples'], 'sample')}"
                found.setdefault(key, {}).setdefault(value, []).append(name)
    lines = []
    for (setting, metric_name), values in list(found.items())[:MOST]:
        where = f"{setting}: " if setting else ""
        if len(values) == 1:
            (value,) = values
            lines.append(f"{where}{metric_name} {value}, the same in every cell")
        else:
            parts = "; ".join(f"{value} in {named(names)}" for value, names in values.items())
            lines.append(f"{where}{metric_name} differs: {parts}")
    return tuple(lines)


def _ends(cells: Sequence[Cell], failures: Sequence[Failure]) -> tuple[str, ...]:
    """That cells failed, were interrupted or cannot be trusted, a sentence each."""
    lines = []
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        kinds = Counter(each.kind or "no kind" for each in failures if each.status == "failed")
        told = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        some = " (or some of their repeats)" if any(cell.failures for cell in failed) else ""
        lines.append(f"{len(failed)} of {count_of(len(cells), 'cell')} failed{some}: {told}")
    if any(cell.status == "interrupted" for cell in cells):
        lines.append("the sweep was interrupted")
    lost = sum(each.status == UNREADABLE for each in failures)
    if lost:
        lines.append(f"{count_of(lost, 'result')} cannot be read")
    broken = [cell.folder for cell in cells if cell.parity == "fail"]
    if broken:
        lines.append(f"no speed-up where parity failed: {named(broken)}")
    return tuple(lines)


def _described(cell: Cell, runs: Mapping[str, Run]) -> str:
    task = str(runs[cell.folder]["config"].get("task"))
    words = [
        "emulated" if cell.emulated else "",
        _TASKS.get(task, ""),
        "weak scaling" if cell.scaling == "weak" else "",
        "with an injected disturbance" if _injected(cell, runs) else "",
    ]
    told = ", ".join(word for word in words if word)
    return _on(cell) + (f" ({told})" if told else "")


def _on(cell: Cell | None) -> str:
    return "its baseline" if cell is None else f"{cell.parallel} on {cell.num_devices}"
