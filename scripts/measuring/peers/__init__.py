"""Measures this repository and its rivals, in one run, in turn, on this machine.

  scripts/peers copyrpc [--runs N] [--json FILE|-]
  scripts/peers scalerpc [--runs N] [--json FILE|-]
  scripts/peers shm [--runs N] [--json FILE|-]
  scripts/peers kv [--runs N] [--json FILE|-]
  scripts/peers wire [--runs N] [--json FILE|-]
  scripts/peers all [--runs N]     all five, by default 3 rounds; writes their rows to docs/results/peers.md
  scripts/peers ... --busy         on a machine whose load is above 0.5; otherwise such a machine is refused

The modules of scripts/measuring/peers describe the measurements. There are N rounds (11); each measures everything once, on two pinned cores.
A ratio is the median of the rounds' ratios, this repository / rival in the unit of its name. Nothing else may run on the machine. A target is
met, or missed, if it is so in every round; there is no verdict if it lies between the least and the most, or if these are a factor of two apart.

With --json - there is one JSON object on stdout and nothing else. Missed targets are reported, but are not a failure: the exit status is 0
unless a measurement failed.
"""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from .. import instructions, tools
from ..tools import Failure

MEASURED = ["copyrpc", "scalerpc", "shm", "kv", "wire"]
PAGE = tools.ROOT / "docs/results/peers.md"
# The load average above which a machine is not idle.
IDLE = 0.5
# The most round over the least of a spread that says nothing but that the machine was not idle.
WIDE = 2
# The rows printed, for the page: name, value, target, verdict.
ROWS = []


class Samples:
    """One number for each round."""

    def __init__(self, values=()):
        self.values = list(values)

    def append(self, value):
        self.values.append(float(value))

    def __truediv__(self, other):
        """Round by round."""
        return Samples(ours / theirs for ours, theirs in zip(self.values, other.values))

    @property
    def median(self):
        return statistics.median(self.values)

    def object(self):
        """Returns median, minimum and maximum, for a JSON document."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values)}

    def figures(self, digits):
        """Returns the same as text."""
        return figures(self.object(), digits)


def figures(spread, digits):
    """Returns median, minimum and maximum as text."""
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"


def value_of(value, digits):
    """Returns a number, or the median of a spread with minimum and maximum, as text."""
    return figures(value, digits) if isinstance(value, dict) else f"{value:.{digits}f}"


def row(what, value="", target="", more="", verdict="", on_page=True):
    """Prints a row of the table. A value other than a ratio or a count differs from machine to machine, and is not for the page."""
    if what and value != "" and on_page:
        ROWS.append((what, value, target, verdict))
    print(f"{what:58} {value!s:>24} {target!s:>10}   {'; '.join(part for part in (verdict, more) if part)}")


def target(what, value, sign, bound, digits, more=""):
    """Prints a row with a target: `value` is a number or a spread, `sign` is <= or >=."""
    row(what, value_of(value, digits), f"{sign} {bound}", more, verdict(value, sign, bound))


def verdict(value, sign, bound):
    """Returns whether a number, or each of a spread, is within the bound, in words. A spread across the bound, or a wide one, has no verdict.

    >>> [verdict({"min": least, "max": most}, "<=", 1) for least, most in [(0.6, 0.9), (1.1, 1.4), (0.9, 1.1), (0.3, 0.9)]]
    ['met', 'MISSED', 'no verdict', 'no verdict']
    >>> verdict(2, ">=", 1), verdict(1, ">=", 2)
    ('met', 'MISSED')
    """
    least, most = (value["min"], value["max"]) if isinstance(value, dict) else (value, value)
    met = {end <= bound if sign == "<=" else end >= bound for end in (least, most)}
    return "no verdict" if len(met) > 1 or most > WIDE * least else "met" if met == {True} else "MISSED"


def at(document, path):
    """Returns the JSON document's value at the path, whose keys are separated by dots."""
    for key in path.split("."):
        if not isinstance(document, dict) or document.get(key) is None:
            raise Failure(f"nothing was measured of {path}")
        document = document[key]
    return document


class Bench:
    """The setting of every comparison: rounds, cores, a scratch directory."""

    def __init__(self, rounds, work, quiet):
        self.rounds = rounds
        self.work = pathlib.Path(work)
        self.quiet = quiet
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise Failure(f"two cores are needed, and this process may use {len(cores)}")
        self.cores = cores[:2]
        self.load = os.getloadavg()[0]

    @property
    def pin(self):
        return f"{self.cores[0]},{self.cores[1]}"

    def log(self, message):
        if not self.quiet and sys.stderr.isatty():
            print(f"peers: {message}", file=sys.stderr)

    def each_round(self, what="round", rounds=None):
        rounds = rounds or self.rounds
        for number in range(1, rounds + 1):
            self.log(f"{what} {number} of {rounds}")
            yield number

    def document_of(self, command, **options):
        """Runs a program of this repository with --json FILE, and returns the document that it wrote."""
        file = self.work / "ours.json"
        tools.output([*command, "--json", file], **options)
        return json.loads(file.read_text())

    def count(self, *crates):
        """Returns the instruction counts of `crates`, by name."""
        self.log("instructions")
        return instructions.document(*instructions.counted(crates))


def measured(what, rounds, quiet):
    """Returns the result of one comparison, and its module."""
    module = importlib.import_module(f".{what}", __name__)
    with tempfile.TemporaryDirectory() as work:
        return module.measure(Bench(rounds, work, quiet)), module


def write_page(sections, rounds, minutes):
    """Writes docs/results/peers.md, between its marks: a table for each comparison."""
    conditions = next(result["conditions"] for what, result, _ in sections if what == "copyrpc")
    lines = [
        f"{time.strftime('%Y-%m-%d')}, commit {conditions['commit']}, {conditions['cpu']}, {conditions['kernel']}, cores {conditions['cores']}, {rounds} "
        f"rounds, {minutes:.0f} minutes in all; load average before: {sections[0][1]['load_average_before']:.2f}.", ""
    ]
    for what, _, rows in sections:
        lines += [f"### {what}", "", "| | value (least to most) | target | |", "|---|---|---|---|"]
        lines += [f"| {name} | {value} | {bound} | {verdict.replace('MISSED', '**missed**')} |" for name, value, bound, verdict in rows]
        lines.append("")
    head, _, rest = PAGE.read_text().partition("<!-- peers -->\n")
    if not rest:
        raise Failure(f"{PAGE} has no mark <!-- peers -->")
    PAGE.write_text(f"{head}<!-- peers -->\n" + "\n".join(lines) + "<!-- end -->" + rest.partition("<!-- end -->")[2])


def measure_all(rounds):
    """Runs all, and writes the page."""
    sections, begin, load = [], time.monotonic(), os.getloadavg()[0]
    for what in MEASURED:
        result, module = measured(what, rounds, quiet=False)
        result.setdefault("load_average_before", load)
        ROWS.clear()
        module.table(result)
        print()
        sections.append((what, result, list(ROWS)))
    write_page(sections, rounds, (time.monotonic() - begin) / 60)


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", choices=[*MEASURED, "all"])
    parser.add_argument("--runs", type=int, metavar="N", choices=range(1, 100), help="1 to 99 [11; all: 3]")
    parser.add_argument("--json", metavar="FILE", help="- for stdout")
    parser.add_argument("--busy", action="store_true", help="measure on a machine that is not idle, too")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if load > IDLE and not arguments.busy:
        raise Failure(f"the load average is {load:.2f}, and at most {IDLE} is legal: end other programs, wait a minute, or give --busy", 2)
    tools.need("valgrind")
    if arguments.measured == "all":
        if arguments.json:
            raise Failure("all writes docs/results/peers.md; --json is of one comparison", 2)
        measure_all(arguments.runs or 3)
        return 0
    result, module = measured(arguments.measured, arguments.runs or 11, quiet=arguments.json == "-")
    tools.write_json(result, arguments.json, lambda: module.table(result))
    return 0
