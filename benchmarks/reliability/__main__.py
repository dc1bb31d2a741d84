"""``python -m benchmarks.reliability``: try all faults and print the page, or write it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common import ROOT
from benchmarks.reliability.damages import DAMAGES, PAIRS, Damage, damage_try, pair_try, sound_sweep
from benchmarks.reliability.faults import SWEEPS, Fault
from benchmarks.reliability.page import HEAD, line, page
from benchmarks.reliability.scene import becoming_read_only, read_only, small_disk
from benchmarks.reliability.tries import Seen, sweep_try
from dpexp.files import write_whole

PAGE = ROOT / "docs" / "reliability.md"
RANKS = {1: "none", 2: "ddp, 2"}
NEED_ROOT = (becoming_read_only, read_only, small_disk)
Try = Callable[[int], Seen]


def main() -> None:
    """Each fault so many times; Ctrl-C ends the tries, and what there is is shown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability")
    parser.add_argument("--repeats", type=int, default=10, help="tries of each fault")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name has these words")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    load = psutil.cpu_percent(1.0) / 100
    results: dict[tuple[str, str], list[Seen]] = {}
    skipped = [
        f"{each.name} ({RANKS[each.ranks]}): needs root"
        for each in SWEEPS
        if os.geteuid() != 0 and each.around in NEED_ROOT
    ]
    with sound_sweep() as sound:
        tries: dict[tuple[str, str], Try] = {
            **{
                (each.name, RANKS[each.ranks]): partial(_sweep_try, each)
                for each in SWEEPS
                if os.geteuid() == 0 or each.around not in NEED_ROOT
            },
            **{(each.name, RANKS[1]): partial(_damage_try, each, sound) for each in DAMAGES},
            **{(each.name, RANKS[1]): partial(pair_try, each) for each in PAIRS},
        }
        if options.only:
            tries = {
                key: attempt
                for key, attempt in tries.items()
                if any(word in key[0] for word in options.only)
            }
        # In rounds, so that the tries of a fault are not all made under the same load.
        with suppress(KeyboardInterrupt):
            for number in range(options.repeats):
                for key, attempt in tries.items():
                    seen = attempt(number)
                    results.setdefault(key, []).append(seen)
                    outcome = "; ".join(seen.wrong) or "as it has to be"
                    print(f"{number}: {', '.join(key)}: {outcome}", flush=True)
        skipped += [f"{', '.join(key)}: not reached" for key in tries if key not in results]
        if options.write:
            write_whole(PAGE, page(results, skipped, load))
    print("\n".join([HEAD, *(line(*key, seen) for key, seen in results.items())]))


def _sweep_try(fault: Fault, number: int) -> Seen:
    return sweep_try(fault, number, resume=number == 0)


def _damage_try(damage: Damage, sound: Callable[[], Path], number: int) -> Seen:
    return damage_try(damage, number, sound())


if __name__ == "__main__":
    main()
