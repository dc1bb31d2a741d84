"""docs/reliability.md: the table of all tries."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.overhead import describe
from benchmarks.reliability.command import ORPHAN_S
from benchmarks.reliability.tries import Seen

HEAD = (
    "| fault | ranks | tries | what ends | seconds to the end: median (worst) | what is kept "
    "| what the user reads | lost results | orphans | as it has to be |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
LONG = 220


def line(name: str, ranks: str, seen: Sequence[Seen]) -> str:
    """A fault's line of the table."""
    good = sum(not each.wrong for each in seen)
    seconds = [each.end_s for each in seen if each.end_s is not None]
    spent = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "–"
    resumed = [each.resumed for each in seen if each.resumed is not None]
    after = f"; resumed and complete: {sum(resumed)} of {len(resumed)}" if resumed else ""
    cells = (
        name, ranks, len(seen), _counted(each.ended for each in seen), spent,
        _counted(each.kept for each in seen) + after,
        _counted((plain(each.told) for each in seen), most=1),
        sum(each.lost for each in seen), sum(each.orphans for each in seen),
        f"{good} of {len(seen)}" if good == len(seen) else f"**{good} of {len(seen)}**",
    )  # fmt: skip
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _counted(texts: Iterable[str], most: int = 4) -> str:
    """Each text once, the most frequent ones first, with their number where they differ."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{text}: {count}" for text, count in counts.most_common(most)]
    if most == 1:
        return counts.most_common(1)[0][0]
    rest = f"; {len(counts) - most} others" if len(counts) > most else ""
    return "; ".join(shown) + rest


def plain(told: str) -> str:
    """A line of the console without what is another in each try, as Markdown."""
    text = re.sub(r"\S*/(reliability-\w+|dpexp-\w+)", "…", told)
    text = re.sub(r"/\S*/(lib/python3)", r"…/\1", text)  # where this machine has Python
    text = re.sub(r"\S+/(?=benchmarks/)", "", text)
    text = re.sub(r"(\[127\.0\.0\.1\]:|pid[ =(]+)\d+", r"\1…", text)
    text = text if len(text) <= LONG else text[: LONG - 1] + "…"
    return f"`{text}`" if text else ""


def unexpected(results: Mapping[tuple[str, str], Sequence[Seen]]) -> list[str]:
    """What did not end as it has to, one line for each fault and deviation."""
    return [
        f"- {name} ({ranks}): {plain(text).strip('`')}: {count} of {len(seen)}"
        for (name, ranks), seen in results.items()
        for text, count in Counter(wrong for each in seen for wrong in each.wrong).items()
    ]


def page(
    results: Mapping[tuple[str, str], Sequence[Seen]], skipped: Sequence[str], load: float
) -> str:
    """The whole page.

    Args:
        load: share of all cores that was busy before the first try.
    """
    known = {k: fact for k, fact in describe(load).items() if k not in ("accelerate", "lightning")}
    facts = "; ".join(f"{name}: {fact}" for name, fact in known.items())
    every = [each for seen in results.values() for each in seen]
    lost, orphans = sum(each.lost for each in every), sum(each.orphans for each in every)
    good = sum(not each.wrong for each in every)
    table = "\n".join([HEAD, *(line(*key, seen) for key, seen in results.items())])
    notes = "\n".join(unexpected(results)) or "Nothing."
    untried = "\n".join(f"- {text}" for text in skipped) or "Nothing."
    return f"""# What ends, and what is kept

Made by `python -m benchmarks.reliability --write`; do not edit it. {len(every)} tries of
{len(results)} faults: {lost} finished results lost, {orphans} processes left behind, {good} tries
as they have to be.

A try is a sweep of three cells, and the fault comes in the middle one; a step takes 50 ms there. A
finished result is *lost* if any file of its cell is gone, or has another content or time of change
than before the fault; it is looked at after the command's end, and again after `resume=`. An
*orphan* is a process of the command that lives {ORPHAN_S:g} s after its end, found by its session
and by a variable in its environment. *Seconds* are from the fault to the cell's `run.json` where
the sweep goes on, else until no process is left; for a port and variables, which are there all
the time, those of the whole command. They are upper bounds: other work was on the machine.
*Steps* are those that can be read from every rank's CSV and from the event file, of those that all
ranks had completed; they are written about every second. The sweep is resumed after every try
in which it did not go on, else after the first. The report has to be there at the end, but for a
second signal and a disk that takes nothing; where the command was killed, one that is made then has
to say that the sweep is not done, and how to go on.

{facts}

{table}

## Not as it has to be

{notes}

## Not tried

{untried}
"""
