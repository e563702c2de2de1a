"""Repeats the study of docs/study.md: jobs in virtual time, their tables and their plots.

  scripts/study                 the whole study: writes the tables into docs/study.md, and the plots next to it
  scripts/study --only NAME     one table and its plot; may be repeated
  scripts/study --commands      prints the command of each figure, of all tables or of those named by --only
  scripts/study --check         the cheaper figures, among them both states at depth 32; fails where one differs from the page by more than 5 %, or than
                                two of the standard deviations that the page gives. And that one job has the same document in two runs of the release
                                build and one of the debug build
  scripts/study --real [--rounds N]
                                calibrates the simulation on this machine, and compares jobs of one daemon and one client, in turns real and
                                simulated: the median of the ratios of N rounds [5]. Needs two idle cores; writes nothing

A table is in the page between <!-- NAME --> and <!-- end -->. The same options and seed give the same figures on every machine.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import statistics
import sys
import tempfile

from . import tools

PAGE = tools.ROOT / "docs" / "study.md"
IMAGES = tools.ROOT / "docs" / "images"
CLIENTS = 46
# Receives of one queue: 1.9 million per second.
CEILING = 526
# The CPU time of a message with which jobs at depth 32 are as fast as the published ones in their high state.
FITTED = "message=45"
# The same, and a round with which those of the low state take as long as the published mean of 0.71 us.
LONG = f"{FITTED},round=400"
MANY = ("--batches-in-flight", 512)
TOLERANCE = 0.05
SEEDS = range(1, 6)
# Figures in million operations per second that were published of a cluster, depth 1: by the document's table "fixed hold" (a), and by its
# table "NP sweep", a later job (b).
PUBLISHED = {
    "delegation, published (a)": {2: 13.79, 4: 21.72, 8: 8.16, 16: 14.38, 32: 27.24},
    "hold 10 us, published (a)": {2: 14.85, 4: 21.08, 8: 11.17, 16: 20.01, 32: 31.69},
    "adaptive hold, published (b)": {2: 14.73, 4: 20.91, 8: 11.11, 16: 19.49, 32: 38.93},
    "direct, published (a)": {2: 2.75, 4: 6.59, 8: 13.55, 16: 26.31, 32: 54.27},
    "ucx-am, published (a)": {2: 3.53, 4: 6.62, 8: 12.51, 16: 10.15, 32: 9.61},
}
RANKS = [2, 4, 8, 16, 32]
# The loads of a job that is swept up and down, in operations of each client.
UP = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
# The loads that bring a job of depth 32 into its low state.
RAMP = [1, 4, 8, 16, 24]
# The clients of a node that have begun.
ARRIVALS = [1, 2, 4, 8, 16, 24, 32, 40]
# Operations outstanding of the jobs that are run in real time too.
REAL_DEPTHS = [1, 2, 4, 8, 16, 32]
# A job that must have the same document whenever and by whichever build it is run.
SAME = ["-n", "4", "-d", "2", "--client-threads", "8", "--strict", "-t", "300us"]


class Point:
    """One job."""

    def __init__(self, ranks, *args, depth=1, nic="", cpu="", time="1ms", warmup="1ms", clients=CLIENTS, is_cheap=None):
        nics = nic if nic.startswith("queue=") else f"queue={CEILING},{nic}".rstrip(",")
        self.args = ["-n", ranks, "-d", depth, "--client-threads", clients, "-t", time, "--warmup", warmup, "--no-verify", "--empty"]
        self.args += ["--memory-limit", "1024G", "--nic", nics, "--cpu", cpu, *args]
        self.args = [str(arg) for arg in self.args]
        # Whether --check runs it.
        self.is_cheap = ranks <= 8 and depth == 1 and "direct" not in args if is_cheap is None else is_cheap
        self.ranks = ranks

    def key(self):
        """Returns the key of a point; points with the same key are equal."""
        return " ".join(self.args)


def swept(ranks, loads, *args, cpu=FITTED, **world):
    """Returns a job with these operations of each client in its runs, one after the other."""
    return Point(ranks, "--sweep", "depth=" + ",".join(map(str, loads)), *args, depth=max(loads), cpu=cpu, **world)


NO_CEILING = {"nic": "queue=0,receive=0,unordered=0"}
HOLD = ("--hold", "10us")
WINDOWED = ("--batch-window", "completion:1")
VARIANTS = {
    "delegation": (),
    "hold 10 us": HOLD,
    "adaptive hold": ("--hold", "adaptive"),
    "window": WINDOWED,
    "direct": ("--backend", "direct"),
    "two-sided": ("--backend", "rc-send"),
}
POLICIES = {
    "none": (),
    "hold 10 us": HOLD,
    "adaptive hold": ("--hold", "adaptive"),
    "poll budget 16": ("--poll-budget", 16),
    "coalesce 6 us": ("--coalesce-rtt-us", 6),
    "flush every 4": ("--flush-every", 4),
    "flush every 8": ("--flush-every", 8),
    "window completion:1": WINDOWED,
    "window completion:4": ("--batch-window", "completion:4"),
    "window consumption:1": ("--batch-window", "consumption:1"),
}
# Those that are tried on jobs in the low state: the published plan 1, with its threshold, too.
LIFTING = POLICIES | {"poll budget 16 up to 37 completions": ("--poll-budget", "16:37")}
TOPOLOGIES = {
    f"{name}, {daemons} daemon{'s' if daemons > 1 else ''}{', window' if window else ''}": ("--backend", name, "--server-threads", daemons, *window)
    for name in ("delegation", "meta", "sharded")
    for daemons in (1, 2, 4)
    for window in ((), WINDOWED)
    if not (name != "delegation" and daemons == 1) and not (name == "delegation" and daemons > 2)
}
DOUBLED = {
    "cpu": {"round": 60, "poll": 25, "message": 70, "completion": 40, "write": 100},
    "nic": {"queue": CEILING, "link": 700},
}


def sensitivity():
    """Returns the points with each assumption halved and doubled."""
    rows = {"as it is": {}}
    for model, values in DOUBLED.items():
        for name, value in values.items():
            rows[f"{name} / 2"] = {model: f"{name}={value // 2}"}
            rows[f"{name} x 2"] = {model: f"{name}={value * 2}"}
    return rows


def rate(result):
    """Returns million operations per second."""
    return f"{result['total_rps'] / 1e6:.1f}"


def rates(*runs):
    """Returns a format: those of some runs of a job."""
    return lambda result: " -> ".join(rate(result["runs"][run]) for run in runs)


def detail(result):
    """Returns rate, operations per WRITE, mean latency."""
    mean_us = result["latency_ns"]["mean"] / 1e3
    return f"{rate(result)} ({result['activity']['messages_per_write']:.1f} a WRITE, {mean_us:.0f} us)"


def mean_of(first, last):
    """Returns a format: the mean rate of these runs of jobs that differ in their seed, and the deviation between jobs, if there are several."""

    def show(*results):
        means = [statistics.mean(run["total_rps"] / 1e6 for run in result["runs"][first:last]) for result in results]
        return f"{statistics.mean(means):.1f}" + (f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else "")

    return show


def phases(*spans):
    """Returns a format: that of `mean_of` for several spans of runs."""
    return lambda *results: " -> ".join(mean_of(*span)(*results) for span in spans)


def seeded(point):
    """Returns the jobs of a point with each seed; `point` gets it as options."""
    return [point("--seed", seed) for seed in SEEDS]


def grid(rows, columns, point, show=rate):
    """A table: for each row and column a point, and its format."""
    return {row: {column: (point(row, column), show) for column in columns} for row in rows}


def hysteresis():
    """The table of jobs whose load goes up, and of others whose load goes down, a run for each load."""
    premise = {"nic": f"{NO_CEILING['nic']},link=2000", "cpu": f"{FITTED},round=700"}
    jobs = {f"NP {ranks}": (ranks, (), {}) for ranks in (4, 8, 16)}
    jobs |= {f"NP {ranks}, 512 batches": (ranks, MANY, {}) for ranks in (8, 16)}
    jobs |= {f"NP {ranks}, 256 batches": (ranks, ("--batches-in-flight", 256), {}) for ranks in (8, 16)}
    # The bound of a queue alone is taken away, and then that of the whole NIC too.
    jobs["NP 8, queue=0"] = (8, MANY, {"nic": "queue=0"})
    jobs |= {f"NP {ranks}, queue=0, receive=0": (ranks, MANY, {"nic": "queue=0,receive=0"}) for ranks in (8, 16)}
    jobs |= {f"NP {ranks}, no ceiling": (ranks, MANY, premise) for ranks in (8, 16)}
    table = {}
    for name, (ranks, args, world) in jobs.items():
        run = UP if ranks < 16 or "0" not in world.get("nic", "") else [1, 2, 4, 8, 16, 32]
        for way, loads in (("up", run), ("down", run[::-1])):
            point = swept(ranks, loads, *args, is_cheap=ranks <= 8, **world)
            table[f"{name}, {way}"] = {f"depth {load}": (point, rates(loads.index(load))) if load in run else "-" for load in UP}
    return table


def starts():
    """The table of jobs at depth 32 with 512 batches that begin differently, or are disturbed."""
    columns = {"NP 8": (8, FITTED), "NP 8, round=400": (8, LONG), "NP 16": (16, FITTED)}
    job = lambda *args, **world: lambda ranks, cpu: Point(ranks, *MANY, *args, depth=32, cpu=cpu, is_cheap=ranks == 8 and cpu == FITTED, **world)
    loads = lambda of: lambda ranks, cpu: Point(ranks, "--sweep", of, *MANY, depth=32, cpu=cpu, is_cheap=ranks == 8 and cpu == FITTED)
    # With the first run that counts.
    rows = {
        "all at once": (job(time="5ms", warmup="2ms"), 0),
        "messages late by up to 3 us": (job("--runs", 8, nic="jitter=3000", warmup="2ms"), 5),
        "a host stands still for 1 ms": (job("--pause", "0@2ms+1ms", "--runs", 8), 5),
        "the window, off after 2 ms": (job(*WINDOWED, "--policies-until", "2ms", "--runs", 6), 3),
        "load from 32 to 1 and back at once": (loads("depth=32,32,1,32,32,32"), 4),
        "17 clients, then 20, 24, 32, 40, 46": (loads("clients=17,20,24,32,40,46,46,46"), 6),
        "clients arrive in eight steps from 1": (loads("clients=" + ",".join(map(str, ARRIVALS + [46] * 4))), 8),
        "load up in five steps from 1": (low, 15),
    }
    table = {"published": {"NP 8": "8.8", "NP 8, round=400": "-", "NP 16": "110.0"}}
    for row, (point, first) in rows.items():
        table[row] = {column: (point(*world), mean_of(first, None)) for column, world in columns.items()}
    # Seeds differ in keys only, unless messages are late at random.
    late = lambda cpu: (seeded(lambda *seed: swept(8, RAMP + [32] * 15, *MANY, *seed, cpu=cpu, nic="jitter=1000", is_cheap=False)), mean_of(15, None))
    table["the same, messages late by up to 1 us"] = {column: late(cpu) if ranks == 8 else "-" for column, (ranks, cpu) in columns.items()}
    return table


def lasting():
    """The table of jobs of 8 nodes in the low state that are watched for longer, by the time of a round: their rate, or when they left it."""
    job = lambda last, time, cpu, *more: swept(8, RAMP + [32] * last, *(more or MANY), cpu=f"{FITTED},{cpu}", time=time, is_cheap=False)
    stop = (*MANY, "--pause", "0@12ms+1ms")
    batches = ("--batches-in-flight", 256)

    def shown(result):
        times = [run["total_rps"] / 1e6 for run in result["runs"][len(RAMP):]]
        left = next((number for number in range(len(times)) if min(times[number:]) > 30), None)
        ms = result["options"]["duration_s"] * 1e3
        return f"{times[-1]:.1f}" if left is None else f"left after {left * ms:.0f} to {(left + 1) * ms:.0f} ms"

    rounds = (60, 500, 600, 650, 700)
    rows = {
        "25 ms": {ns: job(25, "1ms", f"round={ns}") for ns in rounds},
        "250 ms": {ns: job(25, "10ms", f"round={ns}") for ns in rounds if ns < 700},
        "1 s": {60: job(27, "38ms", "round=60")},
        "50 ms, 256 batches": {60: job(10, "5ms", "round=60", *batches)},
        "20 ms, a host stands still for 1 ms": {60: job(20, "1ms", "round=60", *stop), 500: job(20, "1ms", "round=500", *stop)},
        "10 ms, CPU times vary by up to 30 %": {60: job(10, "1ms", "round=60,noise=30")},
        "10 ms, CPU times vary by up to 90 %": {60: job(10, "1ms", "round=60,noise=90")},
        "50 ms, CPU times vary by up to 90 %": {ns: job(10, "5ms", f"round={ns},noise=90") for ns in (60, 500)},
    }
    return {row: {f"round={ns}": (jobs[ns], shown) if ns in jobs else "-" for ns in rounds} for row, jobs in rows.items()}


def daemons():
    """The table of plan 3: 8 nodes at depth 32 with several daemons each, that begin all at once or come from below, and then with the window."""
    rows = {name: args for name, args in TOPOLOGIES.items() if name.endswith("2 daemons")}
    columns = {
        "all at once": (lambda args: Point(8, *args, *MANY, depth=32, cpu=FITTED, time="5ms", warmup="2ms", is_cheap=False), mean_of(0, None)),
        "from below": (lambda args: swept(8, RAMP + [32] * 15, *MANY, *args, is_cheap=False), mean_of(15, None)),
        "from below, then the window": (lambda args: swept(8, RAMP + [32] * 15, *MANY, *args, *WINDOWED, "--policies-from", "10ms", is_cheap=False), mean_of(15, None)),
    }
    return {row: {column: (job(args), show) for column, (job, show) in columns.items()} for row, args in rows.items()}


def rival():
    """The table of CPUs that limit a node in place of the NIC: by the messages that a daemon moves, or by its completions."""
    nodes = {f"NP {ranks}": ranks for ranks in RANKS}
    jobs = {
        # Of 32 nodes for a shorter time, as the job is large.
        "direct, depth 1": lambda ranks, cpu: (Point(ranks, *VARIANTS["direct"], cpu=cpu, is_cheap=False, **({} if ranks < 32 else {"time": "300us", "warmup": "300us"}), **NO_CEILING), rate),
        "delegation, depth 1": lambda ranks, cpu: (Point(ranks, cpu=cpu, is_cheap=ranks == 8, **NO_CEILING), rate),
        "delegation, depth 32, all at once": lambda ranks, cpu: (Point(ranks, *MANY, depth=32, cpu=cpu, time="5ms", warmup="2ms", is_cheap=False, **NO_CEILING), rate),
        "delegation, depth 32, from below": lambda ranks, cpu: (swept(ranks, RAMP + [32] * 5, *MANY, cpu=cpu, is_cheap=ranks == 8, **NO_CEILING), rates(-1)),
    }
    published = {
        "direct, depth 1, published (a)": PUBLISHED["direct, published (a)"],
        "delegation, depth 1, published (a)": PUBLISHED["delegation, published (a)"],
        "delegation, depth 32, published": {2: 15.26, 8: 8.79, 16: 110.04},
    }
    table = {row: {column: f"{figures[ranks]:.1f}" if ranks in figures else "-" for column, ranks in nodes.items()} for row, figures in published.items()}
    for cpu in ("message=450", f"{FITTED},completion=450"):
        table |= {f"{cpu}: {row}": {column: job(ranks, cpu) if ranks < 32 or (cpu, row) == ("message=450", "direct, depth 1") else "-" for column, ranks in nodes.items()} for row, job in jobs.items()}
    # A higher cost of each WRITE that a daemon sends, and a longer round.
    for cpu in (f"{FITTED},write=450", f"{FITTED},round=450"):
        shown = ("delegation, depth 1", "delegation, depth 32, from below")
        table |= {f"{cpu}: {row}": {column: jobs[row](ranks, cpu) if ranks == 8 else "-" for column, ranks in nodes.items()} for row in shown}
    return table


def bounds():
    """The table of jobs of 8 nodes at depth 32 with 512 batches, by the time that a queue takes for a receive."""
    rows = {
        "from below": lambda queue_ns: (swept(8, RAMP + [32] * 15, *MANY, nic=f"queue={queue_ns}", is_cheap=queue_ns == 350), mean_of(15, None)),
        "all at once": lambda queue_ns: (Point(8, *MANY, depth=32, cpu=FITTED, nic=f"queue={queue_ns}", time="5ms", warmup="2ms", is_cheap=False), mean_of(0, None)),
    }
    return {row: {f"queue={queue_ns}": job(queue_ns) for queue_ns in (300, 350, 400, 450, CEILING, 700)} for row, job in rows.items()}


def jumps():
    """The table of jobs in the low state whose load rises to depth 32 at once."""
    job = lambda last: swept(8, [load for load in RAMP if load <= last] + [32] * 5, *MANY, is_cheap=False)
    return {"rate": {f"from depth {last}": (job(last), rates(-1)) for last in reversed(RAMP)}}


def lifted():
    """The table of policies that act for 5 ms on a job in its low state: before, with them, and after."""

    jobs = {
        "NP 8, depth 32, 512 batches": (8, RAMP + [32] * 18, MANY),
        "NP 8, depth 8": (8, [1, 2, 3, 4, 6] + [8] * 18, ()),
        "NP 16, depth 32, 512 batches": (16, RAMP + [32] * 18, MANY),
        "NP 8, depth 32, 256 batches": (8, RAMP + [32] * 18, ("--batches-in-flight", 256)),
    }
    rows = ["hold 10 us", "adaptive hold", "poll budget 16, a poll takes 1000 ns"]
    rows += ["poll budget 16 up to 37 completions", "poll budget 16 up to 37 completions, a poll takes 1000 ns"]
    rows += ["coalesce 6 us", "flush every 8", "window completion:1", "window completion:4", "window consumption:1"]
    shown = {
        "NP 8, depth 32, 512 batches": rows,
        "NP 8, depth 8": ("hold 10 us", "coalesce 6 us", "flush every 8", "window completion:1"),
        "NP 16, depth 32, 512 batches": ("window completion:1",),
        "NP 8, depth 32, 256 batches": ("hold 10 us", "window completion:1"),
    }

    def cell(row, column):
        ranks, loads, args = jobs[column]
        name, _, price = row.partition(", a poll takes ")
        cpu = f"{FITTED},poll={price.removesuffix(' ns')}" if price else FITTED
        policy = [*args, *LIFTING[name], "--policies-from", "14ms", "--policies-until", "19ms"]
        job = lambda *seed: swept(ranks, loads, *policy, *seed, cpu=cpu, is_cheap=False)
        # Several jobs for the policy that lifts, and for one that does not.
        is_seeded = column == "NP 8, depth 32, 512 batches" and row in ("hold 10 us", "window completion:1")
        return seeded(job) if is_seeded else job(), phases((8, 13), (13, 18), (18, 23))

    return {row: {column: cell(row, column) if row in shown[column] else "-" for column in jobs} for row in rows}


def waits():
    """The table of jobs in which each round of a daemon waits 16 us more."""
    cpu = f"{FITTED},round=16060"
    rows = {
        "all at once": (lambda ranks: Point(ranks, depth=32, cpu=cpu, time="5ms", warmup="2ms", is_cheap=ranks == 8), mean_of(0, None)),
        "from below, 512 batches": (lambda ranks: swept(ranks, RAMP + [32] * 8, *MANY, cpu=cpu, is_cheap=False), mean_of(8, None)),
    }
    return {
        "published, without": {"NP 8": "8.8", "NP 16": "110.0"},
        "published, poll budget 16": {"NP 8": "58.4", "NP 16": "24.7"},
        **{row: {f"NP {ranks}": (point(ranks), show) for ranks in (8, 16)} for row, (point, show) in rows.items()},
    }


def prices():
    """The table of the window at depth 32 where the job is in its high state."""
    rows = {"none": (), "window completion:1": WINDOWED}
    job = lambda row, ranks: Point(ranks, *rows[row], depth=32, cpu=FITTED, time="5ms", warmup="2ms", is_cheap=ranks <= 8)
    return {row: {f"NP {ranks}": (job(row, ranks), mean_of(0, None)) for ranks in RANKS if ranks < 32} for row in rows}


def low(ranks, cpu, link=700):
    """Returns a job at depth 32 that comes from below and has 15 runs there."""
    return swept(ranks, RAMP + [32] * 15, *MANY, cpu=cpu, nic=f"link={link}", is_cheap=ranks == 8 and cpu in (FITTED, LONG))


def columns():
    """The table of the published columns about a daemon's rounds beside those of a daemon in simulated jobs."""
    high = lambda ranks: Point(ranks, depth=32, cpu=FITTED, time="5ms", warmup="2ms", is_cheap=False)
    jobs = {"NP 8, low": low(8, FITTED), "NP 8, low, round=400": low(8, LONG), "NP 16, low": low(16, FITTED), "NP 8, high": high(8), "NP 16, high": high(16)}
    # Of the last runs of rank 0's daemon.
    share = lambda number: lambda of, rate_of: f"{100 * of('loops_by_cqes', number) / of('loops'):.1f} %"
    rows = {
        "M operations/s": (lambda of, rate_of: f"{rate_of('total_rps') / 1e6:.1f}", "8.79", "110.04"),
        "outstanding": (lambda of, rate_of: f"{of('outstanding_ns') / of('span_ns'):.0f}", "1,343; steady: 1,370 to 1,470", "833; steady: 1,390 to 1,420"),
        "loop": (lambda of, rate_of: f"{of('span_ns') / of('loops') / 1e3:.2f} us", "0.71 us", "4.3 us"),
        "loops in 10 s": (lambda of, rate_of: f"{of('loops') / of('span_ns') * 1e4:.1f} M", "14.0 M", "2.3 M"),
        "answers a loop": (lambda of, rate_of: f"{rate_of('remote_rps') * of('span_ns') / 1e9 / of('loops'):.2f}", "0.97; steady: 0.58 to 0.72", "28.0; steady: 107 to 200"),
        "completions a loop": (lambda of, rate_of: f"{of('cqes') / of('loops'):.2f}", "-", "-"),
        "loops with 0": (share(0), "62.0 %", "93.1 %"),
        "1": (share(1), "32.4 %", "0.76 %"),
        "2 to 10": (share(2), "5.6 %", "0.67 %"),
        "11 to 100": (share(3), "-", "-"),
        "> 100": (share(4), "0.037 %", "3.68 %"),
    }

    def cell(name, show):
        def text(result):
            runs, windows = result["runs"][-5:], result["per_rank"][0]["daemons"][0]["windows"][-5:]
            of = lambda member, number=None: sum(window[member] if number is None else window[member][number] for window in windows)
            # Rates of a whole job are of the cluster, those of a daemon of its rank.
            rate_of = lambda member: statistics.mean(run[member] for run in runs) / (result["ranks"] if member == "remote_rps" else 1)
            return show(of, rate_of)

        return jobs[name], text

    return {row: {"published, NP 8": of_8, "published, NP 16": of_16, **{name: cell(name, show) for name in jobs}} for row, (show, of_8, of_16) in rows.items()}


def premise(direct):
    """The table of receives per queue at depth 1, in millions a second, from the published rates and those of the row `direct`."""
    published, delegated = PUBLISHED["direct, published (a)"], PUBLISHED["delegation, published (a)"]
    remote = lambda ranks: (ranks - 1) / ranks / ranks
    simulated = lambda factor: {f"NP {ranks}": (direct[f"NP {ranks}"][0], lambda result, ranks=ranks: f"{result['total_rps'] / 1e6 * factor(ranks):.2f}") for ranks in RANKS}
    of = lambda rates, factor, least=2: {f"NP {ranks}": f"{rates[ranks] * factor(ranks):.2f}" if ranks >= least else "-" for ranks in RANKS}
    return {
        "direct, published: receives of a queue": of(published, remote),
        "direct, simulated: receives of a queue": simulated(remote),
        "delegation, published: receives of a queue, one message each": of(delegated, lambda ranks: 2 * remote(ranks), 8),
        "direct, published: operations of a node": of(published, lambda ranks: 1 / ranks),
        "direct, simulated: operations of a node": simulated(lambda ranks: 1 / ranks),
    }


def tables():
    """Returns all tables by name: rows of columns, each a point or a number as text."""
    nodes = {f"NP {ranks}": ranks for ranks in RANKS}
    by_nodes = lambda rows, **world: grid(rows, nodes, lambda row, column: Point(nodes[column], *rows[row], **world))
    ceiling = by_nodes(VARIANTS)
    for name, figures in PUBLISHED.items():
        ceiling[name] = {f"NP {ranks}": f"{figures[ranks]:.1f}" for ranks in RANKS}
    # Of 32 nodes `direct` with two daemons takes longer than the rest of the table.
    topologies = by_nodes({**TOPOLOGIES, "direct": VARIANTS["direct"], "direct, 2 daemons": (*VARIANTS["direct"], "--server-threads", 2)})
    topologies["direct, 2 daemons"]["NP 32"] = "-"
    # The bound of a whole NIC is taken away.
    for name in ("meta, 2 daemons", "meta, 2 daemons, window", "sharded, 2 daemons", "sharded, 2 daemons, window"):
        topologies[f"{name}, receive=0"] = {column: (Point(8, *TOPOLOGIES[name], nic="receive=0"), rate) if ranks == 8 else "-" for column, ranks in nodes.items()}
    topologies["direct, 2 daemons, receive=0"] = {column: (Point(8, *VARIANTS["direct"], "--server-threads", 2, nic="receive=0"), rate) if ranks == 8 else "-" for column, ranks in nodes.items()}
    two = {"delegation": (), "window": WINDOWED}
    halves = sensitivity()
    hops = {f"link={link}, {backend}": (link, backend) for link in (700, 1400, 2000) for backend in ("meta", "delegation")}
    hop = lambda row, column: Point(2, "--backend", hops[row][1], "--server-threads", 2, depth=4, clients=4, nic=f"link={hops[row][0]}", cpu=column, is_cheap=True)
    rounds = [f"message={message}, link=2000, round={round_ns}" for message in (45, 70) for round_ns in (60, 400, 500, 700)]
    world_of = lambda row: dict(pair.split("=") for pair in row.split(", "))
    at_depth_1 = lambda row, column: Point(nodes[column], is_cheap=column == "NP 4", nic=f"link={world_of(row)['link']}", cpu=f"message={world_of(row)['message']},round={world_of(row)['round']}")

    large = [f"message=45, link={link}" for link in (700, 2000)]
    at_depth_32 = lambda row, column: low(8, f"message={world_of(row)['message']},{column}", world_of(row)["link"])
    sensitive = {
        "delegation, NP 4": lambda world: (Point(4, **world), rate),
        "NP 8": lambda world: (Point(8, is_cheap=False, **world), rate),
        "NP 16": lambda world: (Point(16, **world), rate),
        "window, NP 8": lambda world: (Point(8, *WINDOWED, is_cheap=False, **world), rate),
        "direct, NP 8": lambda world: (Point(8, *VARIANTS["direct"], **world), rate),
        "depth 6 from below -> above, NP 8": lambda world: (swept(8, [1, 2, 4, 6, 32, 6], **{"cpu": "", "is_cheap": False, **world}), rates(3, 5)),
        "depth 32, NP 8": lambda world: (Point(8, depth=32, is_cheap=False, **world), rate),
    }
    return {
        "premise": premise(ceiling["direct"]),
        "hysteresis": hysteresis(),
        "starts": starts(),
        "lasting": lasting(),
        "bounds": bounds(),
        "rival": rival(),
        "jumps": jumps(),
        "lifted": lifted(),
        "waits": waits(),
        "prices": prices(),
        "columns": columns(),
        "ceiling": ceiling,
        "no-ceiling": by_nodes({name: VARIANTS[name] for name in ("delegation", "window", "direct")}, **NO_CEILING),
        "states": grid(two, nodes, lambda row, column: Point(nodes[column], *two[row]), detail),
        "map": grid(rounds, [f"NP {ranks}" for ranks in RANKS if ranks < 32], at_depth_1),
        "map-32": grid(large, [f"round={round_ns}" for round_ns in (60, 300, 400, 500, 600, 700)], at_depth_32, mean_of(15, None)),
        "policies": by_nodes(POLICIES),
        "topologies": topologies,
        "daemons": daemons(),
        "hops": grid(hops, [f"round={round_ns}" for round_ns in (60, 120, 240, 480)], hop),
        "sensitivity": {row: {column: cell(world) for column, cell in sensitive.items()} for row, world in halves.items()},
    }


def run(program, points, known):
    """Runs the points that are not `known`, as many at a time as there are cores, and adds them."""
    todo = {point.key(): point for point in points if point.key() not in known}
    # The longest jobs first.
    order = sorted(todo.values(), key=lambda point: -point.ranks)

    def one(point):
        return point.key(), json.loads(tools.output([program, "sim", "--json", "-", *point.args]))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (key, result) in enumerate(pool.map(one, order), 1):
            known[key] = result
            if sys.stderr.isatty():
                print(f"\r{number} of {len(order)} ", end="", file=sys.stderr, flush=True)
    return known


def jobs_of(cell):
    """Returns the points of a cell: one, or a list of them."""
    return cell[0] if isinstance(cell[0], list) else [cell[0]]


def text_of(cell, results):
    """Returns the text of a cell."""
    if isinstance(cell, str):
        return cell
    return cell[1](*[results[point.key()] for point in jobs_of(cell)])


def markdown(table, results):
    """Returns a table as Markdown."""
    columns = list(next(iter(table.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(text_of(cell, results) for cell in cells.values()) + " |" for row, cells in table.items()]
    return "\n".join(lines)


def points_of(table):
    """Returns its jobs."""
    return [point for cells in table.values() for cell in cells.values() if not isinstance(cell, str) for point in jobs_of(cell)]


def said(page, name):
    """Returns the figures of a table in the page, by row and column."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", page, re.S)
    if not found:
        raise tools.Failure(f"{PAGE} has no table {name}")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    columns = lines[0][1:] if lines else []
    return {line[0]: dict(zip(columns, line[1:])) for line in lines[2:]}


def check(page, named, program):
    """Fails if a figure of the page differs."""
    cheap = {name: {row: {c: cell for c, cell in cells.items() if not isinstance(cell, str) and all(point.is_cheap for point in jobs_of(cell))} for row, cells in table.items()} for name, table in named.items()}
    results = run(program, [point for table in cheap.values() for point in points_of(table)], {})
    wrong = []
    for name, table in cheap.items():
        page_says = said(page, name)
        for row, cells in table.items():
            for column, cell in cells.items():
                now, before = text_of(cell, results), page_says.get(row, {}).get(column, "nothing")
                # Each with its deviation between jobs, if it has one.
                found, named_ones = (re.findall(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?", text) for text in (now, before))
                is_near = lambda one, other: abs(float(one[0]) - float(other[0])) <= max(0.11, TOLERANCE * float(other[0]), 2 * float(other[1] or 0))
                if len(found) != len(named_ones) or not all(map(is_near, found, named_ones)):
                    wrong.append(f"{name}, {row}, {column}: {now}; the page says {before}")
    wrong += same(program)
    if wrong:
        raise tools.Failure("\n".join(["figures of docs/study.md are not those of this code: run scripts/study, and read the page again", *wrong]))
    print("the page's figures are those of this code")


def same(program):
    """Says which builds and runs of one job have another document than the first."""
    debug = tools.built("benchkv", "bin", "benchkv", release=False, beside="jobs")
    first, wrong = None, []
    for name, binary in (("release", program), ("release again", program), ("debug", debug)):
        document = json.loads(tools.output([binary, "sim", "--json", "-", *SAME]))
        document.pop("environment")
        first = first or document
        if document != first:
            wrong.append(f"benchkv sim {' '.join(SAME)}, {name}: another document")
    return wrong


def closed_loop(result):
    """Returns million operations per second, of the whole and while both threads have their cores: outstanding by median latency (Little's law)."""
    return result["total_rps"] / 1e6, result["queue_depth"] / result["latency_ns"]["p50"] * 1e3


def real(program, rounds):
    """Compares real and simulated jobs of one daemon and one client."""
    job = ["-n", "1", "--server-threads", "1", "--client-threads", "1", "--no-verify", "--json", "-"]
    ratios = {depth: [] for depth in REAL_DEPTHS}
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "cpu")
        for number in range(1, rounds + 1):
            tools.output([program, "sim", "--calibrate", model])
            for depth, found in ratios.items():
                measured = closed_loop(json.loads(tools.output([program, *job, "-d", str(depth), "-t", "0.5", "--warmup", "0.1", "--wait", "busy"])))
                simulated = closed_loop(json.loads(tools.output([program, "sim", *job, "-d", str(depth), "-t", "1ms", "--warmup", "1ms", "--cpu", model])))
                found.append([of_simulation / of_job for of_simulation, of_job in zip(simulated, measured)])
            if sys.stderr.isatty():
                print(f"\r{number} of {rounds} ", end="", file=sys.stderr, flush=True)
    print("| outstanding | simulated / measured | the same by median latencies |\n|---|---|---|")
    for depth, found in ratios.items():
        print(f"| {depth} | " + " | ".join(f"{statistics.median(column):.2f}" for column in zip(*found)) + " |")
    lockstep = tools.built("benchkv", "bench", "instructions")
    print("\n| nodes | | messages a WRITE | completions a round | completions a round that took some |\n|---|---|---|---|---|")
    for ranks in (2, 4):
        job = ["-n", str(ranks), "--client-threads", "4", "-d", "8", "--no-verify"]
        runs = {
            "real": [program, *job, "--json", "-", "-t", "1", "--warmup", "0.2", "--wait", "yield", "--pin", "none"],
            "simulated": [program, "sim", *job, "--json", "-", "-t", "1ms", "--warmup", "1ms"],
        }
        found = {}
        for name, run in runs.items():
            activity = json.loads(tools.output(run))["activity"]
            with_cqes = 1 - activity["loops_by_cqes"][0]
            found[name] = [activity["messages_per_write"], activity["cqes_per_loop"], activity["cqes_per_loop"] / with_cqes]
        _, batches = tools.output([lockstep, "--lockstep", " ".join([*job, "--device", "soft"])]).splitlines()
        found["lockstep"] = [float(figure) for figure in batches.split()]
        for name, figures in found.items():
            print(f"| {ranks} | {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")


# By table: what it is called in the plot of that name, and its lines with their colours; dashed where figures were published.
PLOTS = {
    "hysteresis": (
        "study-hysteresis",
        "operations outstanding of each client",
        {"NP 8, 512 batches, up": "#ff725c", "NP 8, 512 batches, down": "#3ca951", "NP 16, 512 batches, up": "#9c6b4e", "NP 16, 512 batches, down": "#4269d0"},
    ),
    "ceiling": (
        "study",
        "nodes, 46 clients each, one operation each",
        {"delegation": "#9c6b4e", "hold 10 us": "#4269d0", "direct": "#ff725c", "window": "#3ca951", "delegation, published (a)": "#9c6b4e", "hold 10 us, published (a)": "#4269d0", "direct, published (a)": "#ff725c"},
    ),
    "topologies": (
        "study-topologies",
        "nodes, 46 clients each, one operation each",
        {"delegation, 1 daemon": "#9c6b4e", "delegation, 1 daemon, window": "#3ca951", "meta, 2 daemons, window": "#4269d0", "sharded, 2 daemons, window": "#a463f2", "direct": "#ff725c"},
    ),
}


def plot(name, table, results):
    """Draws throughput against the columns of a table, as an SVG."""
    file, title, series = PLOTS[name]
    width, height, left, bottom, top = 760, 400, 56, 40, 24
    ranks_shown = list(next(iter(table.values())))
    rates = {row: [float(text_of(cell, results).split()[0]) for cell in table[row].values()] for row in series}
    tick = next(tick for tick in (10, 20, 50, 100, 200, 500) if max(map(max, rates.values())) <= 5 * tick)
    most = 5.0 * tick
    x = lambda index: left + index * (width - left - 230) / (len(ranks_shown) - 1)
    y = lambda value: height - bottom - value / most * (height - bottom - top)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="#ffffff"/>']
    for value in range(0, int(most) + 1, tick):
        parts.append(f'<line x1="{left}" x2="{x(len(ranks_shown) - 1):.0f}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/><text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for index, ranks in enumerate(ranks_shown):
        parts.append(f'<text x="{x(index):.1f}" y="{height - bottom + 18}" text-anchor="middle">{ranks.split()[-1]}</text>')
    parts.append(f'<text x="{x((len(ranks_shown) - 1) / 2):.0f}" y="{height - 6}" text-anchor="middle">{title}</text><text x="{left}" y="12">million operations per second</text>')
    for number, (name, colour) in enumerate(series.items()):
        dash = ' stroke-dasharray="5 4"' if "published" in name else ""
        line = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, value in enumerate(rates[name]))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        label = top + 16 + number * 18
        parts.append(f'<line x1="{width - 218}" x2="{width - 190}" y1="{label}" y2="{label}" stroke="{colour}" stroke-width="2"{dash}/><text x="{width - 184}" y="{label + 4}">{name}</text>')
    (IMAGES / f"{file}.svg").write_text("\n".join([*parts, "</svg>"]) + "\n")


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    parser.add_argument("--benchkv", metavar="PATH", help="the binary [built if it is not named]")
    asked = parser.parse_args()
    named = tables()
    unknown = [name for name in asked.only if name not in named]
    if unknown:
        parser.error(f"{unknown[0]} is no table; there are {', '.join(named)}")
    if asked.only:
        named = {name: named[name] for name in asked.only}
    if asked.commands:
        for name, table in named.items():
            for row, cells in table.items():
                for column, cell in cells.items():
                    for point in [] if isinstance(cell, str) else jobs_of(cell):
                        print(f"{name} | {row} | {column} | benchkv sim {shlex.join(point.args)}")
        return 0
    program = asked.benchkv or tools.built("benchkv", "bin", "benchkv")
    if asked.real:
        real(program, asked.rounds)
        return 0
    page = PAGE.read_text()
    if asked.check:
        check(page, named, program)
        return 0
    for name in named:
        said(page, name)
    results = {}
    for name, table in named.items():
        print(name, flush=True)
        run(program, points_of(table), results)
        # Written table by table: the whole study takes long.
        page = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda found: found[1] + markdown(table, results) + found[2], PAGE.read_text(), flags=re.S)
        PAGE.write_text(page)
        if name in PLOTS:
            plot(name, table, results)
    return 0
