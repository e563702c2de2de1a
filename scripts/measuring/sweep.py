"""Measures benchkv at every point of a grid and compares the results. A sweep that was ended early continues where it was.

  scripts/sweep --name NAME [options] [-- options of benchkv for every point]

RESULTS/NAME/ has POINT.json for each job (BACKEND-rRANKS-dDEPTH-POLICY-N, with --rates and --sizes
BACKEND-rRANKS-dDEPTH-atRATE-vBYTES-POLICY-N), POINT.log of its last attempt, conditions (the options: a sweep of this name with other options for its points is refused) and report.txt, report.svg, report.csv. A point with a valid result of the requested number of ranks is not
run again; a point whose file is broken, of another version, or of an interrupted job, is. The grid of a sweep may grow.

Exit status: 0 all points are measured, 1 some failed, 2 bad arguments, 130 interrupted.
"""

import argparse
import difflib
import fcntl
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

from . import tools
from .tools import Failure

POLICY = re.compile(r"[a-z0-9]+=.*")


def refuse(message):
    """Ends the script: the arguments are wrong."""
    raise Failure(message, status=2)


def parsed(words):
    """Parses and checks the arguments."""
    flags = []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    grid = parser.add_argument_group("the grid; each list is words in one argument")
    grid.add_argument("--name", required=True)
    grid.add_argument("--backends", default="delegation", metavar="LIST", help="[delegation]")
    grid.add_argument("--ranks", default="2", metavar="LIST", help="[2]")
    grid.add_argument("--depths", default="32", metavar="LIST", help="operations outstanding per client [32]")
    grid.add_argument("--rates", default="", metavar="LIST", help="operations per second of an open loop, for all clients together [closed loop]")
    grid.add_argument("--sizes", default="", metavar="LIST", help="bytes of a value [8]")
    grid.add_argument(
        "--policies", default="none=", metavar="LIST",
        help="NAME=FLAGS, with commas for the spaces between flags (so none within): 'none= hold=--hold,8us' [none=]",
    )
    grid.add_argument("--repeats", default="1", metavar="N", help="jobs at each point, each with its own seed, 1 to 99 [1]")
    how = parser.add_argument_group("how and where")
    how.add_argument(
        "--launcher", default="local", metavar="KIND",
        help="local: benchkv starts the ranks. sim: in virtual time, by benchkv sim. mpirun: mpirun -n RANKS, with $MPIRUN_FLAGS. srun: srun -n RANKS, with $SRUN_FLAGS, within an "
        "allocation. slurm: writes RESULTS/NAME/job.sbatch, which does the latter, and starts nothing [local]",
    )
    how.add_argument("--benchkv", metavar="PATH", help="the binary [target/release/benchkv, built if the launcher is local]")
    how.add_argument("--results", default="results", metavar="DIR", type=pathlib.Path, help="[results]")
    how.add_argument("--time-limit", default="600", metavar="S", help="seconds that one job may take [600]")
    how.add_argument("--nodes", default="2", metavar="N", help="for --launcher slurm: nodes [2]")
    how.add_argument("--cpus", default="8", metavar="N", help="for --launcher slurm: cores of each rank [8]")
    how.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    # A value may begin with dashes: the flags of a policy.
    options = [action.option_strings[0] for action in parser._actions if action.nargs is None]
    joined = []
    words = iter(words)
    for word in words:
        value = next(words, None) if word in options else None
        joined.append(word if value is None else f"{word}={value}")
    asked = parser.parse_args(joined)

    if not re.fullmatch(r"[A-Za-z0-9._-]+", asked.name) or asked.name.startswith("."):
        refuse(f"--name '{asked.name}': letters, digits, dots, dashes; it names a directory")
    asked.flags = flags
    for option in ("ranks", "depths", "rates", "sizes", "time_limit", "nodes", "cpus"):
        values = getattr(asked, option).split()
        shown = "--" + option.replace("_", "-")
        most = {"rates": 9, "sizes": 8}.get(option, 5)
        if not values and option not in ("rates", "sizes"):
            refuse(f"{shown}: the list is empty")
        for value in values:
            if not re.fullmatch(rf"[1-9][0-9]{{0,{most - 1}}}", value):
                refuse(f"{shown} '{value}': numbers from 1 to {'9' * most}")
        setattr(asked, option, [int(value) for value in values] if option in ("ranks", "depths", "rates", "sizes") else int(getattr(asked, option)))
    if not re.fullmatch(r"[1-9][0-9]?", asked.repeats):
        refuse(f"--repeats '{asked.repeats}': 1 to 99")
    asked.repeats = int(asked.repeats)
    asked.backends, asked.policies = asked.backends.split(), asked.policies.split()
    for option, legal, words in (
        ("backends", r"[a-z-]+", "names of backends, see benchkv --help"),
        ("policies", POLICY, "NAME=FLAGS, the name of small letters and digits"),
    ):
        if not getattr(asked, option):
            refuse(f"--{option}: the list is empty")
        for value in getattr(asked, option):
            if not re.fullmatch(legal, value):
                refuse(f"--{option} '{value}': {words}")
    if asked.launcher not in ("local", "sim", "mpirun", "srun", "slurm"):
        refuse(f"--launcher {asked.launcher}: local, sim, mpirun, srun or slurm")
    return asked


def program(asked):
    """Returns the path of benchkv, which it builds if necessary."""
    benchkv = asked.benchkv
    if benchkv is None:
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or tools.ROOT / "target")
        benchkv = str(target / "release" / "benchkv")
        if asked.launcher in ("local", "sim") and not asked.dry_run:
            benchkv = tools.built("benchkv", "bin", "benchkv")
    if not asked.dry_run and shutil.which(benchkv) is None:
        refuse(f"{benchkv} is no program: build it (cargo build --release -p benchkv), or name it by --benchkv")
    return benchkv


class Conditions:
    """The options that all points of a sweep share, and the flags of its policies, in a file of its directory."""

    def __init__(self, asked, directory):
        self.path = directory / "conditions"
        launcher = "srun" if asked.launcher == "slurm" else asked.launcher
        self.common = [f"launcher {launcher}", *(f"flag {flag}" for flag in asked.flags)]
        self.policies = [f"policy {policy}" for policy in asked.policies]

    def known_policies(self):
        """Returns the policies of earlier measurements."""
        return [line for line in self.lines() if line.startswith("policy ")]

    def lines(self):
        return self.path.read_text().splitlines() if self.path.exists() else []

    def check(self):
        """Refuses to mix results of different conditions."""
        if not self.path.exists():
            return
        before = [line for line in self.lines() if not line.startswith("policy ")]
        if before != self.common:
            changed = [line.replace("-", "<", 1).replace("+", ">", 1) for line in difflib.ndiff(before, self.common) if line[0] in "-+"]
            refuse(
                f"{self.path.parent} has results of other options (<, and > is what was asked for); give another --name, or the same options:\n"
                + "\n".join(changed)
            )
        for policy in self.policies:
            name = policy.partition("=")[0]
            for known in self.known_policies():
                if known.partition("=")[0] == name and known != policy:
                    refuse(f"{self.path.parent} has results of '{known}', which is another than '{policy}'; give it another name")

    def write(self):
        """Writes them, with the earlier policies."""
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(self.common + sorted({*self.known_policies(), *self.policies})) + "\n")
        new.replace(self.path)


def batch_script(asked, directory):
    """Returns the Slurm job that runs the whole sweep."""
    again = [str(tools.ROOT / "scripts" / "sweep"), "--launcher", "srun"]
    for option, value in (
        ("name", asked.name), ("backends", " ".join(asked.backends)), ("ranks", " ".join(map(str, asked.ranks))),
        ("depths", " ".join(map(str, asked.depths))), ("rates", " ".join(map(str, asked.rates)) or None),
        ("sizes", " ".join(map(str, asked.sizes)) or None), ("policies", " ".join(asked.policies)), ("repeats", asked.repeats),
        ("benchkv", asked.benchkv), ("results", asked.results), ("time-limit", asked.time_limit),
    ):
        if value is not None:
            again += [f"--{option}", str(value)]
    return "\n".join([
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=sweep-{asked.name}",
        f"#SBATCH --nodes={asked.nodes} --ntasks={max(asked.ranks)} --cpus-per-task={asked.cpus} --exclusive",
        f"#SBATCH --output={directory}/slurm-%j.log",
        "#SBATCH --requeue",
        "export SRUN_CPUS_PER_TASK=" + str(asked.cpus),
        f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*again, '--', *asked.flags])}",
    ])


def command_of(asked, benchkv, backend, ranks, depth, rate, size, policy, repeat):
    """Returns the command of a point."""
    flags = {variable: shlex.split(os.environ.get(variable, "")) for variable in ("MPIRUN_FLAGS", "SRUN_FLAGS")}
    start = {
        "local": [benchkv],
        "sim": [benchkv, "sim"],
        "mpirun": ["mpirun", "-n", str(ranks), *flags["MPIRUN_FLAGS"], benchkv],
        "srun": ["srun", "-n", str(ranks), *flags["SRUN_FLAGS"], benchkv],
    }[asked.launcher]
    # The flags of a policy come last: they override those of all points.
    of_policy = [flag for flag in policy.partition("=")[2].split(",") if flag]
    of_load = [*(["--rate", str(rate)] if rate else []), *(["--value-size", str(size)] if size else [])]
    return [
        *start, "--ranks", str(ranks), "--backend", backend, "--queue-depth", str(depth), *of_load, "--seed", str(repeat), *asked.flags, *of_policy,
    ]


def is_valid(benchkv, result, ranks=None):
    """Returns whether the file has a complete result of `ranks` ranks: a launcher of another MPI would start several jobs of one rank."""
    if not result.exists() or result.stat().st_size == 0:
        return False
    if subprocess.run([benchkv, "report", "--check", result], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        return False
    return ranks is None or json.loads(result.read_text())["ranks"] == ranks


def measure(command, log, time_limit, lock):
    """Runs a job and returns its exit status; None if it took too long. Interrupted, it ends the job first."""
    with log.open("w") as out:
        # The job inherits the lock: a job that outlives a killed sweep is still measuring.
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, pass_fds=[lock.fileno()], start_new_session=True
        )
    try:
        return job.wait(time_limit)
    except BaseException as error:
        job.terminate()
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def interrupted(*_):
    """Ends a sweep on SIGTERM as on Ctrl-C."""
    raise KeyboardInterrupt


def main():
    """Runs the script."""
    asked = parsed(sys.argv[1:])
    benchkv = program(asked)
    directory = asked.results / asked.name
    conditions = Conditions(asked, directory)
    conditions.check()
    points = [
        (
            f"{backend}-r{ranks}-d{depth}{f'-at{rate}' if rate else ''}{f'-v{size}' if size else ''}-{policy.partition('=')[0]}-{repeat}",
            ranks,
            command_of(asked, benchkv, backend, ranks, depth, rate, size, policy, repeat),
        )
        for repeat, policy, ranks, depth, rate, size, backend in itertools.product(
            range(1, asked.repeats + 1), asked.policies, asked.ranks, asked.depths, asked.rates or [None], asked.sizes or [None],
            asked.backends
        )
    ] if asked.launcher != "slurm" else []
    points = [(point, ranks, [*command, "--json", str(directory / f"{point}.json")]) for point, ranks, command in points]
    if asked.dry_run:
        if asked.launcher == "slurm":
            print(batch_script(asked, directory))
        for point, ranks, command in points:
            if not directory.joinpath(f"{point}.json").exists() or not is_valid(benchkv, directory / f"{point}.json", ranks):
                print(shlex.join(command))
        return 0

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"a sweep, or a job of one that was killed, is still running in {directory}: wait for it, or end it")
        conditions.write()
        if asked.launcher == "slurm":
            script = directory / "job.sbatch"
            script.write_text(batch_script(asked, directory) + "\n")
            print(f"sbatch {script}")
            return 0
        signal.signal(signal.SIGTERM, interrupted)
        try:
            return sweep(asked, benchkv, directory, points, lock)
        except KeyboardInterrupt:
            print("sweep: interrupted; the same command goes on with it", file=sys.stderr)
            return 130


def sweep(asked, benchkv, directory, points, lock):
    """Runs the points that have no result yet, and the report."""
    measured, skipped, failed = 0, 0, 0
    for point, ranks, command in points:
        result, log = directory / f"{point}.json", directory / f"{point}.log"
        if is_valid(benchkv, result, ranks):
            skipped += 1
            continue
        print(point, end=" ", flush=True)
        result.unlink(missing_ok=True)
        status = measure(command, log, asked.time_limit, lock)
        shown = f"status {status}" if status is not None else f"no end within {asked.time_limit} s"
        # An unsound result is a result too, and is not measured again.
        if is_valid(benchkv, result, ranks):
            measured += 1
            print(f"measured ({shown})", flush=True)
        else:
            failed += 1
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            if result.exists() and is_valid(benchkv, result):
                last = f"the result has not {ranks} ranks: is benchkv built for the launcher's MPI (--features mpi)?"
            print(f"FAILED ({shown}): {last}", flush=True)
    print(f"{measured} measured, {skipped} there before, {failed} failed", end="")
    valid = sorted(file for file in directory.glob("*.json") if is_valid(benchkv, file))
    if valid:
        report = directory / "report.txt"
        charts = {"report": "latency-by-rate"}
        if len(asked.sizes) > 1:
            charts |= {"latency": "latency-by-size", "bandwidth": "bandwidth-by-size"}
        for name, chart in charts.items():
            files = [argument for ending in ("svg", "csv") for argument in ("-o", directory / f"{name}.{ending}")]
            report.write_text(tools.output([benchkv, "report", "--chart", chart, *files, *valid]))
        print(f"; {report}", end="")
    print()
    return 1 if failed else 0
