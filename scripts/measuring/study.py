"""Repeats the study of docs/study.md: jobs in virtual time, their tables and their plots.

  scripts/study                 the whole study: writes the tables into docs/study.md, and the plots next to it
  scripts/study --only NAME     one table and its plot; may be repeated
  scripts/study --check         the cheaper half of the figures; fails where one differs from the page by more than 5 %. And that one job has the
                                same document in two runs of the release build and one of the debug build
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
import statistics
import sys
import tempfile

from . import tools

PAGE = tools.ROOT / "docs" / "study.md"
IMAGES = tools.ROOT / "docs" / "images"
CLIENTS = 46
# Receives of one queue: 1.9 million per second.
CEILING = 526
# The time until figures are steady, and the same time again.
WINDOW = {1: "1ms", 32: "2ms"}
TOLERANCE = 0.05
# The memos' published figures, in million operations per second, depth 1.
PUBLISHED = {
    "hold, published": {2: 14.9, 4: 21.1, 8: 11.2, 16: 19.6, 32: 39.2},
    "direct, published": {2: 2.8, 4: 7.4, 8: 15.4, 16: 29.7, 32: 62.7},
    "UCX, published": {2: 3.4, 4: 6.7, 8: 14.4, 16: 46.8, 32: 66.5},
}
# By row: what was published of the jobs of one table each, in million operations per second by nodes; with the depth.
COMPARED = {
    "delegation": (1, {2: 13.79, 4: 21.72, 8: 8.16, 16: 14.38, 32: 27.24}),
    "hold 10 us": (1, {2: 14.85, 4: 21.08, 8: 11.17, 16: 20.01, 32: 31.69}),
    "adaptive hold": (1, {2: 14.73, 4: 20.91, 8: 11.11, 16: 19.49, 32: 38.93}),
    "hold 2 round trips": (1, {8: 9.45}),
    "direct": (1, {2: 2.75, 4: 6.59, 8: 13.55, 16: 26.31, 32: 54.27}),
    "delegation, depth 32": (32, {2: 15.26, 8: 8.79, 16: 110.04}),
    "poll budget 16, depth 32": (32, {8: 58.4, 16: 24.7}),
}
RANKS = [2, 4, 8, 16, 32]
# Operations outstanding of the jobs that are run in real time too.
REAL_DEPTHS = [1, 2, 4, 8, 16, 32]
# A job that must have the same document whenever and by whichever build it is run.
SAME = ["-n", "4", "-d", "2", "--client-threads", "8", "--strict", "-t", "300us"]


class Point:
    """One job."""

    def __init__(self, ranks, *args, depth=1, nic="", cpu="", window=None):
        window = window or WINDOW[depth]
        nics = ",".join(part for part in [f"queue={CEILING}", nic] if part)
        self.args = ["-n", ranks, "-d", depth, "--client-threads", CLIENTS, "-t", window, "--warmup", window, "--no-verify"]
        self.args += ["--memory-limit", "1024G", "--nic", nics, "--cpu", cpu, *args]
        self.args = [str(arg) for arg in self.args]
        self.ranks, self.is_direct = ranks, "direct" in args

    def key(self):
        """Returns the key of a point; points with the same key are equal."""
        return " ".join(self.args)

    def is_cheap(self):
        """Returns whether --check runs this point."""
        return self.ranks <= 8 and "-d 32" not in self.key() and not self.is_direct


NO_CEILING = {"nic": "queue=0,receive=0,unordered=0"}
HOLD = ("--hold", "10us")
WINDOWED = ("--batch-window", "completion:1")
VARIANTS = {
    "delegation": (),
    "hold": HOLD,
    "window": WINDOWED,
    "direct": ("--backend", "direct"),
    "two-sided": ("--backend", "rc-send"),
}
POLICIES = {
    "none": (),
    "hold 10 us": HOLD,
    "adaptive hold": ("--hold", "adaptive"),
    "hold 2 round trips": ("--hold", "rtt:2"),
    "poll budget 16": ("--poll-budget", 16),
    "adaptive budget": ("--poll-budget", "adaptive"),
    "coalesce 6 us": ("--coalesce-rtt-us", 6),
    "stagger 10 us": ("--initial-stagger-us", 10),
    "flush every 4": ("--flush-every", 4),
    "flush every 8": ("--flush-every", 8),
    "window completion:1": WINDOWED,
    "window completion:2": ("--batch-window", "completion:2"),
    "window completion:4": ("--batch-window", "completion:4"),
    "window consumption:1": ("--batch-window", "consumption:1"),
    "window consumption:4": ("--batch-window", "consumption:4"),
}
TOPOLOGIES = {
    f"{name}, {daemons} daemon{'s' if daemons > 1 else ''}{', window' if window else ''}": ("--backend", name, "--server-threads", daemons, *window)
    for name in ("delegation", "meta", "sharded")
    for daemons in (1, 2, 4)
    for window in ((), WINDOWED)
    if not (name != "delegation" and daemons == 1) and not (name == "delegation" and daemons > 1)
}
CAUSES = {
    "as it is": {},
    "no ceiling of a queue": {"nic": "queue=0"},
    "no ceiling of a queue or a NIC": NO_CEILING,
    "an empty round takes 4 x": {"cpu": "round=240"},
    "an empty round takes 16 x": {"cpu": "round=960"},
    "clients issue at half the rate": {"cpu": "operation=120,client=50"},
    "half the way": {"nic": "link=350"},
    "four times the way": {"nic": "link=2800"},
}
DOUBLED = {
    "cpu": {"round": 60, "message": 70, "completion": 40, "write": 100, "client": 25, "operation": 60},
    "nic": {"queue": CEILING, "receive": 185, "link": 700, "doorbell": 250, "send": 10},
}


def sensitivity():
    """Returns the points with each assumption halved and doubled."""
    rows = {"as it is": {}}
    for model, values in DOUBLED.items():
        for name, value in values.items():
            rows[f"{name} / 2"] = {model: f"{name}={value // 2}"}
            rows[f"{name} x 2"] = {model: f"{name}={value * 2}"}
    return rows


def beside(published):
    """Rate, what was published, and the ratio of the two."""
    return lambda result: f"{rate(result)} / {published:.1f} = {result['total_rps'] / 1e6 / published:.2f}"


def compared(nodes):
    """The table of what was published."""
    options = {**POLICIES, "delegation": (), "direct": VARIANTS["direct"], "delegation, depth 32": (), "poll budget 16, depth 32": POLICIES["poll budget 16"]}
    cell = lambda row, depth, ranks, figures: (Point(ranks, *options[row], depth=depth), beside(figures[ranks])) if ranks in figures else "-"
    return {row: {name: cell(row, depth, ranks, figures) for name, ranks in nodes.items()} for row, (depth, figures) in COMPARED.items()}


def rate(result):
    """Returns million operations per second."""
    return f"{result['total_rps'] / 1e6:.1f}"


def detail(result):
    """Returns rate, operations per WRITE, mean latency."""
    mean_us = result["latency_ns"]["mean"] / 1e3
    return f"{rate(result)} ({result['activity']['messages_per_write']:.1f} a WRITE, {mean_us:.0f} us)"


def grid(rows, columns, point, show=rate):
    """A table: for each row and column a point, and its format."""
    return {row: {column: (point(row, column), show) for column in columns} for row in rows}


def tables():
    """Returns all tables by name: rows of columns, each a point or a number as text."""
    nodes = {f"NP {ranks}": ranks for ranks in RANKS}
    by_nodes = lambda rows, **world: grid(rows, nodes, lambda row, column: Point(nodes[column], *rows[row], **world))
    ceiling = by_nodes({name: VARIANTS[name] for name in ("hold", "direct", "two-sided", "delegation", "window")})
    for name, figures in PUBLISHED.items():
        ceiling[name] = {f"NP {ranks}": f"{figures[ranks]:.1f}" for ranks in RANKS}
    causes = grid(CAUSES, nodes, lambda row, column: Point(nodes[column], **CAUSES[row]))
    ways = {"delegation": (), "window": WINDOWED, "direct": VARIANTS["direct"]}
    halves = sensitivity()
    large = {f"NP {ranks}": ranks for ranks in (48, 64)}
    at_scale = {"delegation": (), "window": WINDOWED, "sharded, 2 daemons, window": TOPOLOGIES["sharded, 2 daemons, window"], "meta, 2 daemons, window": TOPOLOGIES["meta, 2 daemons, window"]}
    return {
        "ceiling": ceiling,
        "compared": compared(nodes),
        "no-ceiling": by_nodes(VARIANTS, **NO_CEILING),
        "depth-32": by_nodes(VARIANTS, depth=32),
        "causes": causes,
        "states": grid({"delegation": (), "window": WINDOWED}, nodes, lambda row, column: Point(nodes[column], *ways[row]), detail),
        "policies": by_nodes(POLICIES),
        "topologies": by_nodes({**TOPOLOGIES, "direct": VARIANTS["direct"]}),
        "scale": grid(at_scale, large, lambda row, column: Point(large[column], *at_scale[row], window="200us"), detail),
        "sensitivity": grid(halves, ways, lambda row, column: Point(8, *ways[column], **halves[row])),
    }


def run(program, points):
    """Runs the points, as many at a time as there are cores."""
    todo = {point.key(): point for point in points}
    # The longest jobs first.
    order = sorted(todo.values(), key=lambda point: -point.ranks)
    results = {}

    def one(point):
        return point.key(), json.loads(tools.output([program, "sim", "--json", "-", *point.args]))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (key, result) in enumerate(pool.map(one, order), 1):
            results[key] = result
            if sys.stderr.isatty():
                print(f"\r{number} of {len(order)} ", end="", file=sys.stderr, flush=True)
    return results


def text_of(cell, results):
    """Returns the text of a cell."""
    if isinstance(cell, str):
        return cell
    point, show = cell
    return show(results[point.key()])


def markdown(table, results):
    """Returns a table as Markdown."""
    columns = list(next(iter(table.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(text_of(cell, results) for cell in cells.values()) + " |" for row, cells in table.items()]
    return "\n".join(lines)


def points_of(table):
    """Returns its jobs."""
    return [cell[0] for cells in table.values() for cell in cells.values() if not isinstance(cell, str)]


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
    cheap = {name: {row: {c: cell for c, cell in cells.items() if not isinstance(cell, str) and cell[0].is_cheap()} for row, cells in table.items()} for name, table in named.items()}
    results = run(program, [point for table in cheap.values() for point in points_of(table)])
    wrong = []
    for name, table in cheap.items():
        page_says = said(page, name)
        for row, cells in table.items():
            for column, cell in cells.items():
                now, before = text_of(cell, results), page_says.get(row, {}).get(column, "nothing")
                numbers = [re.match(r"[\d.]+", text) for text in (now, before)]
                is_same = all(numbers) and abs(float(numbers[0][0]) - float(numbers[1][0])) <= max(0.11, TOLERANCE * float(numbers[1][0]))
                if not is_same:
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
    "ceiling": (
        "study",
        "nodes, 46 clients each, one operation each",
        {"hold": "#4269d0", "direct": "#ff725c", "two-sided": "#6cc5b0", "window": "#3ca951", "hold, published": "#4269d0", "direct, published": "#ff725c", "UCX, published": "#6cc5b0"},
    ),
    "topologies": (
        "study-topologies",
        "nodes, 46 clients each, one operation each",
        {"delegation, 1 daemon": "#9c6b4e", "delegation, 1 daemon, window": "#3ca951", "meta, 2 daemons, window": "#4269d0", "sharded, 2 daemons, window": "#a463f2", "direct": "#ff725c"},
    ),
    "depth-32": (
        "study-depth-32",
        "nodes, 46 clients each, 32 operations each",
        {"delegation": "#9c6b4e", "hold": "#4269d0", "window": "#3ca951", "direct": "#ff725c", "two-sided": "#6cc5b0"},
    ),
    "scale": (
        "study-scale",
        "nodes, 46 clients each, one operation each",
        {"delegation": "#9c6b4e", "window": "#3ca951", "meta, 2 daemons, window": "#4269d0", "sharded, 2 daemons, window": "#a463f2"},
    ),
}


def plot(name, table, results):
    """Draws throughput against nodes, as an SVG."""
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
        parts.append(f'<text x="{x(index):.1f}" y="{height - bottom + 18}" text-anchor="middle">{ranks.removeprefix("NP ")}</text>')
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
    program = asked.benchkv or tools.built("benchkv", "bin", "benchkv")
    if asked.real:
        real(program, asked.rounds)
        return 0
    page = PAGE.read_text()
    if asked.check:
        check(page, {name: table for name, table in named.items() if name != "scale"}, program)
        return 0
    for name in named:
        said(page, name)
    for name, table in named.items():
        print(name, flush=True)
        results = run(program, points_of(table))
        # Written table by table: the whole study takes long.
        page = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda found: found[1] + markdown(table, results) + found[2], PAGE.read_text(), flags=re.S)
        PAGE.write_text(page)
        if name in PLOTS:
            plot(name, table, results)
    return 0
