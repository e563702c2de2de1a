"""Counts the instructions of the data path exactly.

The program benches/instructions of each crate runs an operation two numbers of times under callgrind, in one thread. The difference of the two
counts, divided by the additional operations, is the cost of one, without set-up. The instructions of one function and of all that it calls are
counted in one run.

  scripts/instructions             prints a table
  scripts/instructions --of NAME   of one crate only; may be repeated
  scripts/instructions --json -    one JSON object on stdout and nothing else (or a file name instead of -): instructions by name
  scripts/instructions --check     the table; fails if a count is above its bound
  scripts/instructions --against FILE
                                   the table, with the counts in FILE (of --json) and the change in per cent
  scripts/instructions --vs-libmlx5 [--json -]
                                   also counts each operation through libibverbs and libmlx5, and prints the ratio. libmlx5 runs on the
                                   device of mlx5-run (or of the launcher that MLX5_RUN names), which executes none of its operations: its
                                   queue pairs are ready to libmlx5, but not to the device. The count is that of the measuring thread inside
                                   the loops of mlx5/benches/instructions/loops.c, which run three times: it must be linear. "locked" is the
                                   default of programs; "one" is libmlx5 at its best, without locks: a thread domain, a CQ of one thread,
                                   MLX5_SINGLE_THREADED=1. No other variable of libmlx5 is set.

The operations of the relay run on the device of mlx5-run too; what libibverbs and libmlx5 do in them is not counted.
"""

import argparse
import concurrent.futures
import ctypes.util
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple, Optional

from . import tools
from .tools import Failure

# The crates with a benchmark `instructions`, each in the folder of its name.
CRATES = ["mlx5", "copyrpc", "scalerpc", "ipc", "delegationrpc", "flux", "benchkv"]
# Their counts include the driver's copy to BlueFlame.
ON_THE_DRIVER = {"mlx5", "copyrpc", "scalerpc"}
# The software HCA's two entry points, with all functions they call.
HCA = ["--toggle-collect=mlx5_hca::hca::Hca::ring", "--toggle-collect=mlx5_hca::hca::Hca::empty_poll"]


class Operation(NamedTuple):
    """A line of the program's `--list`."""

    name: str
    bound: Optional[int]
    first: int
    second: int
    collect: str
    what: str


def operations(program):
    """Returns the operations that `program` knows, in its order."""
    for line in tools.output([program, "--list"]).splitlines():
        name, bound, first, second, collect, what = line.split("|")
        yield Operation(name, None if bound == "-" else int(bound), int(first), int(second), collect, what)


def callgrind(command, environment=None, written="/dev/null"):
    """Returns the instructions collected while `command` runs: callgrind's options and a program. callgrind writes the file `written`."""
    valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={written}", *command]
    launcher = environment.pop("LAUNCHER") if environment else None
    words = ([launcher] if launcher else []) + [str(word) for word in valgrind]
    # callgrind prints on standard error.
    printed = tools.output(["sh", "-c", 'exec "$@" 2>&1', "sh", *words], env=environment)
    collected = re.findall(r"^==\d+== Collected : (\d+)$", printed, re.MULTILINE)
    if len(collected) != 1:
        raise Failure(f"callgrind said nothing of {' '.join(words)}:\n{printed}")
    return int(collected[0])


def by_call(function, command, environment):
    """Returns the instructions collected in each call of the C function while `command` runs."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "out"
        callgrind([f"--dump-after={function}", *command], environment, written)
        dumps = sorted(written.parent.glob("out.*"), key=lambda dump: int(dump.suffix[1:]))
        return [int(re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)[1]) for dump in dumps]


def of_relay(program, name, number, function):
    """Returns the instructions of the program itself, and none of its libraries, in the relay's `function` while it does `number` operations."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "out"
        words = [f"--toggle-collect=mlx5::verbs::relay::Relay::{function}", "--compress-strings=no", program, name, number]
        callgrind(words, {**os.environ, "LAUNCHER": mlx5_run()}, written)
        total, is_own, is_of_call = 0, False, False
        for line in written.read_text().splitlines():
            key, is_header, value = line.partition("=")
            if key == "ob":
                is_own = value == str(program)
            elif key == "calls":
                # The next line has what the called function cost, which is counted where that is.
                is_of_call = True
            elif not is_header and line and not line.endswith(":") and ":" not in line:
                total += int(line.split()[-1]) if is_own and not is_of_call else 0
                is_of_call = False
        return total


def mlx5_run():
    """Returns the launcher of the software HCA under the real libraries."""
    return os.environ.get("MLX5_RUN") or tools.built("mlx5/preload", "bin", "mlx5-run")


def of_one(program, operation, *options):
    """Returns the instructions of one operation, by the difference of two runs."""
    name, first, second = operation.name, operation.first, operation.second
    less, more = (callgrind([*options, program, name, count]) for count in (first, second))
    return (more - less) / (second - first)


def count(program, operation):
    """Returns the instructions of one operation, in the part of the program that the operation names."""
    collect, _, but = operation.collect.partition(" but ")
    # No operation counts work that depends on the clock: a slower machine does it more often.
    without = [f"--toggle-collect=*::{but}", "--collect-atstart=yes"] if but else []
    kind, _, function = collect.partition(" ")
    toggle = f"--toggle-collect=*::{function}"
    if collect == "all":
        each = of_one(program, operation, *without)
    elif collect == "hca":
        each = of_one(program, operation, *HCA)
    elif collect == "nohca":
        each = of_one(program, operation, *HCA, "--collect-atstart=yes")
    elif kind == "relay":
        less, more = (of_relay(program, operation.name, number, function) for number in (operation.first, operation.second))
        each = (more - less) / (operation.second - operation.first)
    elif kind == "in":
        # The toggle excludes the set-up.
        each = callgrind([toggle, program, operation.name, operation.second]) / operation.second
    elif kind == "part":
        # Toggles combine: with both, callgrind collects the part without the HCA, and the HCA outside the part. Parts have no set-up, and
        # that of the HCA cancels out.
        toggles = [toggle, f"--toggle-collect=*::{but}"] if but else [toggle]
        part, both, hca = (callgrind([*options, program, operation.name, operation.second]) for options in (toggles, [*toggles, *HCA], HCA))
        each = (part + both - hca) / 2 / operation.second
    else:
        raise Failure(f"{operation.name} collects {operation.collect!r}")
    if each <= 0:
        raise Failure(f"nothing was collected for {operation.name}")
    return round(each, 2)


def linear(counts_of, first, second):
    """Returns the instructions of one operation from `counts_of`, the counts of some numbers of them. Fails if the count is not linear."""
    middle = (first + second) // 2
    least, half, most = counts_of([first, middle, second])
    a, b = (half - least) / (middle - first), (most - half) / (second - middle)
    if a <= 0 or a > 1.005 * b or b > 1.005 * a:
        raise Failure(f"not linear: {a} and {b}")
    return round((most - least) / (second - first), 2)


def of_libmlx5(program, launcher, name, api, threads, numbers):
    """Returns the instructions of each of these numbers of operations `name` in libmlx5, through the functions `api`."""
    ours = {"MLX5_SINGLE_THREADED", "MLX5_SHUT_UP_BF", "MLX5_POST_SEND_PREFER_BF"}
    environment = {variable: value for variable, value in os.environ.items() if variable not in ours}
    environment["LAUNCHER"] = launcher
    if threads == "one":
        environment["MLX5_SINGLE_THREADED"] = "1"
    # The first time also looks up symbols.
    words = ["--toggle-collect=measured_*", program, "--libmlx5", name, api, threads, numbers[0], *numbers]
    _, *counts = by_call("run", words, environment)
    return counts


def in_parallel(function, jobs):
    """Returns `function` of each of `jobs`, in their order. They run in parallel: counts do not depend on the machine's load."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def programs(crates):
    """Returns the benchmark program of each crate, and the routine by which the driver copies to BlueFlame if it matters (or None)."""
    found = {crate: tools.built(crate, "bench", "instructions") for crate in crates}
    copy = None
    if ON_THE_DRIVER & set(crates):
        program = found.get("mlx5") or tools.built("mlx5", "bench", "instructions")
        copy = tools.output(["valgrind", "--tool=none", "-q", program, "--copy-routine"]).strip()
    return found, copy


def versus(json_file):
    """Compares with libmlx5."""
    found, copy = programs(["mlx5"])
    program = found["mlx5"]
    launcher = mlx5_run()
    known = []
    for line in tools.output([program, "--list-vs"]).splitlines():
        name, theirs, apis, first, second, what = line.split("|")
        known.append((name, theirs, apis.split(","), int(first), int(second), what))

    own = in_parallel(
        lambda name, first, second: linear(lambda numbers: [callgrind([program, name, number]) for number in numbers], first, second),
        [(name, first, second) for name, _, _, first, second, _ in known],
    )
    # Several operations here are compared with the same one of libmlx5.
    rivals = dict.fromkeys(
        (theirs, api, threads, first, second) for _, theirs, apis, first, second, _ in known for api in apis for threads in ("locked", "one")
    )
    counts = in_parallel(
        lambda theirs, api, threads, *counts: linear(lambda numbers: of_libmlx5(program, launcher, theirs, api, threads, numbers), *counts),
        list(rivals),
    )
    by_rival = dict(zip(rivals, counts))
    rows = [
        {
            "operation": name, "what": what, "api": api, "threads": threads, "ours": ours,
            "libmlx5": by_rival[theirs, api, threads, first, second],
            "ratio": round(ours / by_rival[theirs, api, threads, first, second], 3),
        }
        for (name, theirs, apis, first, second, what), ours in zip(known, own)
        for api in apis
        for threads in ("locked", "one")
    ]

    def table():
        print(f"Instructions by callgrind of one operation here and in libmlx5. Copy to BlueFlame under valgrind: {copy}.")
        print(f"{'operation':26} {'here':>8}  {'libmlx5':18} {'threads':7} {'count':>8} {'ratio':>6}")
        for row in rows:
            print(f"{row['operation']:26} {row['ours']:8.2f}  {row['api']:18} {row['threads']:7} {row['libmlx5']:8.2f} {row['ratio']:6.3f}")

    tools.write_json({"blueflame_copy": copy, "operations": rows}, json_file, table)
    return 0


def counted(crates, checked_only=False):
    """Counts the operations of `crates`. Returns pairs of an operation and its instructions, and the routine that copies to BlueFlame."""
    found, copy = programs(crates)
    jobs = [(found[crate], operation) for crate in crates for operation in operations(found[crate])]
    if not ctypes.util.find_library("ibverbs"):
        print("no libibverbs: the operations of the relay: NOT counted", file=sys.stderr)
        jobs = [job for job in jobs if not job[1].collect.startswith("relay")]
    if checked_only:
        jobs = [job for job in jobs if job[1].bound is not None]
    return list(zip([operation for _, operation in jobs], in_parallel(count, jobs))), copy


def document(rows, copy):
    """Returns the JSON object of counted operations."""
    return {**{operation.name: each for operation, each in rows}, **({"blueflame_copy": copy} if copy else {})}


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", action="append", choices=CRATES, metavar="CRATE", help=f"one of {', '.join(CRATES)}; all")
    parser.add_argument("--json", metavar="FILE", help="- for stdout")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--against", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--vs-libmlx5", action="store_true")
    arguments = parser.parse_args()
    tools.need("valgrind")
    if arguments.vs_libmlx5:
        return versus(arguments.json)

    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    rows, copy = counted(list(dict.fromkeys(arguments.of or CRATES)), checked_only=arguments.check)
    above = [operation for operation, each in rows if operation.bound is not None and each > operation.bound]

    def table(file=sys.stdout):
        print("Instructions by callgrind." + (f" Copy to BlueFlame under valgrind: {copy}." if copy else ""), file=file)
        print(f"{'operation':36} {'each':>9} {'bound':>6}  what", file=file)
        for operation, each in rows:
            bound = "-" if operation.bound is None else operation.bound
            was = before.get(operation.name)
            change = f"  was {was:.2f}, {100 * (each / was - 1):+.1f} %" if was else ""
            verdict = "  ABOVE ITS BOUND" if operation in above else ""
            print(f"{operation.name:36} {each:9.2f} {bound!s:>6}  {operation.what}{change}{verdict}", file=file)

    tools.write_json(document(rows, copy), arguments.json, table)
    if arguments.json == "-" and arguments.check:
        table(sys.stderr)
    if arguments.check and above:
        raise Failure(f"{len(above)} above the bound")
    return 0
