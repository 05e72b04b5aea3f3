"""What the orchestrator costs, measured: `python -m bench [SECTION ...] [--full]`.

Prints a table for each section and writes bench-results/TIME.json, .md and .svg. Nothing else should run on the
machine meanwhile; the load average is part of every result. Exits with 1 when a section could not be measured;
a bound that does not hold is shown, and is no error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench import machine
from bench.report import Scale, table, write
from bench.section import run
from orchestrator.errors import EnvironmentUnusable

EXIT_UNUSABLE = 3
SECTIONS = ("start", "completions", "job", "launchers", "images", "grading", "branch", "world", "border")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; default: all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--full", action="store_const", dest="scale", const=Scale.FULL, help="all there is: half an hour"
    )
    size.add_argument("--tiny", action="store_const", dest="scale", const=Scale.TINY, help="only: does it run?")
    parser.add_argument("--results", type=Path, default=Path("bench-results"), help="where to write")
    parser.set_defaults(scale=Scale.QUICK)
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    try:
        about = machine.describe()
    except EnvironmentUnusable as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    print("machine: " + ", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    if about["load"] > about["cores"] / 2:
        print("note: this machine is busy; what follows is not what a quiet one gives", flush=True)
    done = []
    for name in given.sections or SECTIONS:
        done.append(run(name, given.scale))
        print(f"\n{table(done[-1])}", flush=True)
    path = write(given.results, time.strftime("%Y%m%d-%H%M%S", time.gmtime()), about, given.scale, done)
    print(f"\nwritten: {path}, .md and .svg")
    return int(any(section.error for section in done))


if __name__ == "__main__":
    sys.exit(main())
