"""``python -m dpexp.compare A B``: two runs or sweeps, cell by cell."""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpexp import console
from dpexp.comparing import FASTER, NO_DIFFERENCE, NOT_COMPARABLE, SLOWER, Interval
from dpexp.contrast import Comparison, Gate, contrast, environment_differences, gate
from dpexp.errors import ConfigError
from dpexp.pairing import IN_KIND, CellRuns, Pairs, Run, cells_of, has_key, pair
from dpexp.records import LaterSchemaError, read_run
from dpexp.texts import visible

DESCRIPTION = """\
Two runs or sweeps, cell by cell: B against A. A cell is a config, with all its repeats; code,
versions and machine may differ. The verdict is faster, slower, no measurable difference, or not
comparable with the reason. Only repeats on both sides allow a verdict on speed:
python -m dpexp -m ... repeats=5
"""
EXIT_STATUS = """\
exit status with --max-regression:
  0  no cell is slower by more than that
  1  some cell is, or fails in B and not in A
  2  cannot tell: a cell is not comparable, is only in A, or its interval holds the limit
What did not run in A has nothing to lose and does not count. Without the option the status is 0.
A refusal is 2 in any case.
"""
_NUMBERED = re.compile(r"(\d+)_")


@dataclass(frozen=True)
class Side:
    """What was read of A or of B."""

    cells: tuple[CellRuns, ...]
    runs: int
    unreadable: tuple[str, ...]


def main() -> None:
    """Entry point. Exit status: see EXIT_STATUS."""
    console.prepare_streams()
    signal.signal(signal.SIGINT, console.leave_quietly)
    arguments = _parser().parse_args()
    try:
        status = _compare(arguments)
    except (ConfigError, LaterSchemaError) as error:
        console.say(f"dpexp: {error}")
        status = Gate.CANNOT_TELL
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m dpexp.compare",
        description=DESCRIPTION,
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for side in ("A", "B"):
        parser.add_argument(
            side, help="a run's folder, a sweep's, one that holds runs, or a run.json"
        )
    parser.add_argument(
        "--max-regression",
        metavar="P%",
        help="how much slower each cell may be, in percent of its samples/s in A, such as 3%%",
    )
    parser.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="a config key, or a node of keys, that may differ; can be given several times",
    )
    return parser


def _compare(arguments: argparse.Namespace) -> int:
    limit = None if arguments.max_regression is None else _share(arguments.max_regression)
    a, b = read_side("A", arguments.A), read_side("B", arguments.B)
    _check_ignored(arguments.ignore, [*a.cells, *b.cells])
    pairs = pair(a.cells, b.cells, arguments.ignore)
    found = [each for one in pairs.matched if (each := contrast(one)) is not None]
    _show(arguments, a, b, pairs, found)
    if limit is None:
        return Gate.HOLDS
    lost = [cell for cell in pairs.only_a if any(run["status"] == "ok" for run in cell.runs)]
    gaps = [*a.unreadable, *b.unreadable, *(f"{cell.name}: only in A" for cell in lost)]
    status, lines = gate(found, limit, gaps)
    shown = f"{100 * limit:.6g} %"
    told = {
        Gate.HOLDS: f"no cell is slower by more than {shown}",
        Gate.BROKEN: f"slower by more than {shown}, or failing",
        Gate.CANNOT_TELL: f"cannot tell whether a cell is slower by more than {shown}",
    }[status]
    print(visible(told + (": " + "; ".join(lines) if lines else "")))
    return status


def _share(text: str) -> float:
    """``3%`` as 0.03. Without the sign 3 and 0.03 could both mean either."""
    found = re.fullmatch(r"(\d{1,2}(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise ConfigError(
            "--max-regression",
            text,
            "is not a percentage",
            allowed="0% to 99%, with the sign",
            fix="--max-regression 3%",
        )
    return float(found[1]) / 100


def read_side(name: str, path: str) -> Side:
    """The results below a path, as cells.

    Args:
        name: ``A`` or ``B``, for messages.
        path: a ``run.json`` or ``sweep.json``, the folder of one, or a folder whose folders hold
            runs.

    Raises:
        ConfigError: nothing there can be read.
        LaterSchemaError: a result is of a later dpexp.
    """
    where = Path(path)
    if not where.exists():
        raise ConfigError(name, path, "is neither a file nor a folder")
    base = where.parent if where.name == "sweep.json" else where
    files = [base] if base.is_file() else [*base.glob("run.json")]
    files = files or sorted(base.glob("*/run.json"), key=_position)
    if not files:
        raise ConfigError(
            name,
            path,
            "holds no run.json, nor do the folders in it",
            fix="the folder of a run or of a sweep",
        )
    runs: list[Run] = []
    unreadable = []
    for file in files:
        try:
            runs.append(read_run(file))
        except LaterSchemaError:
            raise
        except (OSError, ValueError) as error:
            unreadable.append(f"not read: {error}")
    if not runs:
        raise ConfigError(name, path, f"has no result that can be read ({unreadable[0]})")
    return Side(tuple(cells_of(runs)), len(runs), tuple(unreadable))


def _position(file: Path) -> tuple[int, str]:
    """A sweep's cells are numbered; 10 comes after 9."""
    number = _NUMBERED.match(file.parent.name)
    return (int(number[1]) if number else 0, file.parent.name)


def _check_ignored(ignored: Sequence[str], cells: Sequence[CellRuns]) -> None:
    for key in ignored:
        if key in IN_KIND:
            raise ConfigError("--ignore", key, "makes figures differ in kind: nothing to compare")
        if has_key(cells, key):
            continue
        keys = sorted({known for cell in cells for known in cell.values})
        near = difflib.get_close_matches(key, keys, n=1)
        raise ConfigError(
            "--ignore",
            key,
            "is no key of these configs that changes a measured step",
            fix=f"--ignore {near[0]}" if near else "",
        )


def _show(
    arguments: argparse.Namespace, a: Side, b: Side, pairs: Pairs, found: Sequence[Comparison]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from dpexp.report.tables import wide

    out = wide(Console())

    def say(line: str) -> None:
        out.print(escape(visible(line)), soft_wrap=True, highlight=False)

    for name, side in (("A", a), ("B", b)):
        say(f"{name}: {getattr(arguments, name)} ({_counted(side.runs, 'run')})")
    if found:
        say("samples/s over all devices, and their ratio with its 95 % interval")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("cell", overflow="fold")
        table.add_column("A", justify="right", no_wrap=True)
        table.add_column("B", justify="right", no_wrap=True)
        # Where the terminal is narrow an interval goes below its ratio, and words below each other.
        table.add_column("B / A", justify="right", overflow="fold", min_width=15)
        table.add_column("verdict", overflow="fold", min_width=10)
        for each in found:
            table.add_row(*(escape(visible(text)) for text in _row(each)))
        out.print(table)
    for line in _lines(a, b, pairs, found):
        say(line)


def _row(each: Comparison) -> tuple[str, ...]:
    return (each.cell, _rate(each.a), _rate(each.b), _ratio(each.ratio), each.verdict)


def _rate(found: Interval | None) -> str:
    if found is None:
        return "–"
    return f"{found.value:,.0f}" if found.value >= 1000 else f"{found.value:.4g}"


def _ratio(found: Interval | None) -> str:
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.value:.3f}×"
    return f"{found.value:.3f}× ({found.low:.3f}–{found.high:.3f})"


def _lines(a: Side, b: Side, pairs: Pairs, found: Sequence[Comparison]) -> list[str]:
    """Below the table: reasons and remarks, what has no partner, what differs, and the sum."""
    lines = []
    for each in found:
        if each.reason is not None:
            lines.append(f"{each.cell}: {each.verdict}: {each.reason}")
        lines += [f"{each.cell}: {remark}" for remark in each.remarks]
    lines += [f"{cell.name}: only in A" for cell in pairs.only_a]
    lines += [f"{cell.name}: only in B" for cell in pairs.only_b]
    lines += [f"A: {line}" for line in a.unreadable] + [f"B: {line}" for line in b.unreadable]
    skipped = len(pairs.matched) - len(found)
    if skipped:
        lines.append(f"{_counted(skipped, 'cell')} skipped on both sides")
    differing = environment_differences(pairs.matched)
    if differing:
        lines.append("differs in environment: " + "; ".join(differing))
    said = Counter(each.verdict for each in found)
    counts = [f"{said[v]} {v}" for v in (FASTER, SLOWER, NO_DIFFERENCE, NOT_COMPARABLE) if said[v]]
    lines.append(
        f"{_counted(len(found), 'cell')}: {', '.join(counts)}"
        if found
        else "no cell is on both sides"
    )
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    main()
