"""Runs the long forms of the tests, part by part, and keeps the totals of all runs.

  scripts/soak                        lists the parts with their totals so far
  scripts/soak PART [--minutes N]     runs rounds of a part until N minutes are over (default and maximum 60); run it again to continue
  scripts/soak all [--minutes N]      each part for N minutes
  scripts/soak seed=SEED              repeats one job of the part `storm`, by its printed seed
  scripts/soak page                   only rewrites the table of docs/reliability.md

A round is some minutes of one part. Its counts (kills, stops, operations, points) are added to docs/results/soak.json when all tests of the round have
passed, so a run that is ended early loses at most one round. copyrpc's core, scalerpc's worlds and the swarm take seeds that no earlier round had; the
points of shm-steps are a sixteenth of all, another one in each round; storms and other points start at a different place each time; the part `scalerpc`
is the same in each round. A round that fails is recorded as a finding; its output is kept in target/soak, and no further round is run.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time

from . import tools
from .tools import ROOT, Failure

RECORD = ROOT / "docs/results/soak.json"
PAGE = ROOT / "docs/reliability.md"
OUTPUT = ROOT / "target/soak"
MAX_MINUTES = 60
# Time limit of one command, in seconds: a hang is a finding.
LIMIT = 45 * 60

# The counters and the lines of tests that feed them. A pattern without a group counts its lines.
COUNTERS = {
    "kills": [r"(\d+) kills\b", r"(\d+) clients killed", r"(\d+) servers killed", r"(\d+) processes killed", r"TEST_SEED=\d+: (?:Rank|Client|Launcher)\b"],
    "stops": [r"(\d+) stops\b", r"(\d+) stopped\b", r"(\d+) times stopped", r"TEST_SEED=\d+: Pause\b"],
    "interrupts": [r"TEST_SEED=\d+: Interrupt\b"],
    "points": [r"(\d+) of \d+ (?:instructions|beginnings)"],
    "oracle operations": [r"oracle: (\d+) operations"],
    "garbled batches": [r"garbage: (\d+) batches"],
    "operations": [r"(\d+) operations of the living"],
    "connections": [r"(\d+) connections, 0 entries"],
    "random worlds": [r"random worlds: (\d+) seeds"],
    "calls": [r"random worlds: \d+ seeds, (\d+) calls made", r"(\d+) calls executed", r"(\d+) calls answered", r"^(\d+) requests ran", r"^(\d+) requests, "],
    "simulated jobs": [r"(\d+) jobs: "],
    "tests": [r"(\d+) passed;"],
}


def test(package, *arguments, release=False, **environment):
    """Returns a command: cargo test of a package, with variables set."""
    words = ["cargo", "test", "--locked", *(["--release"] if release else []), "-p", package, *arguments, "--nocapture"]
    return " ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(words)])


ONE = ["--", "--test-threads=1"]
# By part: a description, and the commands of a round. {round} is the number of earlier rounds, and {seed} grows by 10,000,000
# with each.
PARTS = {
    "rdma": ("processes on the software HCA killed and stopped at random", [
        test("mlx5", "--test", program, *ONE, *names, MLX5_TEST_SCALE=5, MLX5_TEST_TIME=when)
        for when in ("immediate", "delay") for program, *names in (["suites", "all_to_all::"], ["one_sided"])
    ]),
    "rdma-steps": ("requesters, owners and datagram senders stopped and killed at single instructions", [
        test("mlx5", "--test", "single_step", *ONE, MLX5_TEST_SCALE=15),
        test("mlx5-hca", "--test", "hca_single_step", *ONE, MLX5_TEST_SCALE=15),
    ]),
    "driver": ("other people's programs under mlx5-run, killed, stopped, and given nonsense", [
        "cargo build --release --locked -p mlx5-preload",
        test("mlx5-preload", "--test", "front_end", "--", "--ignored", "--test-threads=1", "garbage", "storm", release=True),
        "MLX5_TEST_SCALE=2 TESTS=bad_input scripts/verbs-tests target/release/mlx5-run --check-doorbells --",
        "MLX5_TEST_DEVICE=relay:mlx5_0 TESTS='context processes' scripts/verbs-tests target/release/mlx5-run --",
        "MLX5_TEST_DEVICE=relay:mlx5_0 TESTS='bad_input context facade processes' scripts/verbs-tests target/release/mlx5-run --link roce --",
        "scripts/verbs-roots target/release/mlx5-run",
        "scripts/verbs-peers target/release/mlx5-run",
        "target/release/mlx5-run -- scripts/hw-qualify --quick --device mlx5_0 -o target/hw-qualify.txt",
    ]),
    "packets": ("RoCE packets: random operations on a bad network, 10^9 packets of strangers, the suites of mlx5 and copyrpc's context with losses", [
        test("mlx5-hca", "--lib", "packets::tests::p", release=True, MLX5_TEST_SCALE=1000),
        test("mlx5-hca", "--lib", "p9_goodput", "--", "--ignored", release=True),
        test("mlx5-hca", "--lib", "any_packets", release=True, MLX5_TEST_SCALE=100),
        test("mlx5", "--test", "suites", "strangers", release=True, MLX5_TEST_SCALE=3400),
        test("mlx5", "--test", "suites", "--", "rc::", "verbs::", "statuses::", "asynchronous::", "bad_input::", "--skip", "used_again",
             "--skip", "cannot_reach_its_memory", "--skip", "far_more_messages", "--skip", "thousands_of_messages",
             MLX5_TEST_TIME="packets", MLX5_TEST_NETWORK="loss=5,double=5,reorder=50,delay_us=0..300"),
        test("copyrpc", "--test", "suites", "--", "context::", "--skip", "that_does_not_exist", "--skip", "that_does_nothing", "--skip", "made_room",
             "--skip", "a_call_behind_a_goodbye",
             MLX5_TEST_TIME="packets", MLX5_TEST_NETWORK="loss=5,double=5,reorder=50,delay_us=0..300"),
        "if scripts/two-hosts true; then cargo test --release --locked -p benchkv --features mpi --test mpi -- --ignored by_packets; fi",
    ]),
    "rxe": ("the suites of scripts/verbs-tests, copyrpc and benchkv on rdma_rxe of Linux, in an emulated machine", ["scripts/rxe all"]),
    "shm-steps": ("ipc and delegationrpc: clients and servers stopped and killed at single instructions and system calls, all of them in 16 rounds", [
        test("copyrpc-testing", "--test", "rpcs", *ONE, "single_step", SHM_TEST_SCALE=20, STEP_SHARE="{round}"),
    ]),
    "shm-storm": ("ipc and delegationrpc: clients and servers killed and stopped at random, entries used again; flux: nodes dropped at random", [
        test("copyrpc-testing", "--test", "rpcs", *ONE, "storm", SHM_TEST_SCALE=6),
        test("copyrpc-testing", "--test", "rpcs", "--", "entries_are_reused", SHM_TEST_SCALE=3),
        test("copyrpc-flux", "--test", "suites", *ONE, "storm", SHM_TEST_SCALE=20),
    ]),
    "copyrpc-core": ("copyrpc's core against its oracle, arbitrary bytes, peers that lie", [
        test("copyrpc", "--lib", *ONE, "protocol::oracle", COPYRPC_TEST_SCALE=40, COPYRPC_TEST_FIRST_SEED="{seed}"),
        test("copyrpc", "--lib", *ONE, "protocol::garbage", COPYRPC_TEST_SCALE=10, COPYRPC_TEST_FIRST_SEED="{seed}"),
        test("copyrpc", "--lib", *ONE, "liars", COPYRPC_TEST_SCALE=5),
    ]),
    "copyrpc-states": ("copyrpc: more of the core's states, up to 3 GiB", [
        test("copyrpc", "--lib", *ONE, "--include-ignored", "explore", "--skip", "two_calls", COPYRPC_TEST_SCALE=20),
        test("copyrpc", "--lib", *ONE, "two_calls", COPYRPC_TEST_SCALE=40),
    ]),
    "copyrpc-sanitizer": ("copyrpc's core under AddressSanitizer; needs a nightly toolchain", [
        "COPYRPC_TEST_SCALE=2 RUSTFLAGS=-Zsanitizer=address cargo +nightly test -p copyrpc --locked --lib --target $(rustc -vV | sed -n 's/^host: //p') protocol",
    ]),
    "services": ("10^7 calls of all four RPCs, blocking and as futures, with deadlines and cancels, at servers that hold, refuse, drop, call back, "
                 "and are killed and replaced; credit is back; copyrpc: also suspensions; copyrpc and scalerpc on bad networks", [
        test("copyrpc-testing", "--test", "services", "--", release=True, SHM_TEST_SCALE=2100),
        test("copyrpc", "--test", "suites", "--", "services::", COPYRPC_TEST_SCALE=40, COPYRPC_TEST_FIRST_SEED="{seed}"),
        test("copyrpc-testing", "--test", "rpcs", "--", "bad_network", SHM_TEST_SCALE=40),
    ]),
    "copyrpc-clients": ("copyrpc: clients that leave in four ways, are killed and stopped at random", [
        test("copyrpc", "--test", "leavers", *ONE, COPYRPC_TEST_SCALE=10),
        test("copyrpc", "--test", "suites", *ONE, "clients_that_are_killed", COPYRPC_TEST_SCALE=10),
        test("copyrpc", "--test", "suites", "service_async::bursts", "--", release=True, COPYRPC_TEST_SCALE=10),
    ]),
    "scalerpc": ("scalerpc: states, random worlds, clients in processes that are killed", [
        test("scalerpc", "--lib", "--", "explore", "worlds", COPYRPC_TEST_SCALE=5),
        test("scalerpc", "--test", "processes", *ONE, SHM_TEST_SCALE=5),
        test("scalerpc", "--test", "suites", "bursts", "--", release=True, SHM_TEST_SCALE=20),
    ]),
    "scalerpc-worlds": ("scalerpc: random worlds of timeouts, late answers, deaths of workers and clients, counters near their wraps", [
        test("scalerpc", "--lib", "--", "everything_goes_wrong", release=True, COPYRPC_TEST_SCALE=20, COPYRPC_TEST_FIRST_SEED="{seed}"),
    ]),
    "scalerpc-clients": ("scalerpc: 2,000 clients of four processes for ten minutes, a server's memory", [
        test("scalerpc", "--test", "processes", "--", "--ignored", "two_thousand", release=True, SHM_TEST_SCALE=20),
    ]),
    "backends": ("benchkv: every backend on 1, 2, 4 and 8 ranks, two kinds of keys, two depths", [
        test("benchkv", "--test", "jobs", "every_backend", "--", BENCHKV_TEST_SCALE=5),
    ]),
    "storm": ("benchkv: jobs of random shape, killed, stopped and interrupted at random", [test("benchkv", "--test", "jobs", "storm", "--", BENCHKV_TEST_SCALE=5)]),
    "musl": ("everything but mlx5-preload where the C library is musl; needs rustup", [
        "rustup target add x86_64-unknown-linux-musl",
        "cargo test --locked --workspace --exclude mlx5-preload --target x86_64-unknown-linux-musl -- --skip doorbell --nocapture",
    ]),
    "swarm": ("benchkv in virtual time: jobs of random shape and options", [
        test("benchkv-core", "--lib", "random_jobs", "--", release=True, SWARM_SEED="{seed}", SWARM_SEEDS=1000),
    ]),
}
SEEDS_A_ROUND = 10_000_000


def read_record():
    """The totals of all runs, by part."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def entry(record, part):
    """Returns the totals of a part."""
    return record.setdefault(part, {"rounds": 0, "seconds": 0, "counted": {}, "findings": [], "commits": [], "last": None})


def write_record(record):
    """Replaces the record, and the table of the page."""
    tools.write_json(record, str(RECORD), lambda: None)
    write_page(record)


def write_page(record):
    """Writes the table of docs/reliability.md, between its marks."""
    lines = ["| part | what | rounds | hours | counted | findings | last run, commit |", "|---|---|---|---|---|---|---|"]
    for part, (what, _) in PARTS.items():
        ran = record.get(part)
        if ran is None:
            lines.append(f"| `{part}` | {what} | 0 | | not run yet | | |")
            continue
        counted = ", ".join(f"{number:,} {name}" for name, number in ran["counted"].items())
        found = "; ".join(f"{finding['date']} {finding['what']}" for finding in ran["findings"]) or "none"
        lines.append(f"| `{part}` | {what} | {ran['rounds']} | {ran['seconds'] / 3600:.1f} | {counted} | {found} | {ran['last']}, {ran['commits'][-1]} |")
    text = PAGE.read_text()
    head, mark, rest = text.partition("<!-- soak -->\n")
    tail = rest.partition("<!-- end -->")
    if not mark or not tail[1]:
        raise Failure(f"{PAGE} lacks the marks <!-- soak --> and <!-- end -->")
    PAGE.write_text(head + mark + "\n".join(lines) + "\n" + tail[1] + tail[2])


def count(output):
    """Returns the counts in a test's output."""
    counted = {}
    for name, patterns in COUNTERS.items():
        for pattern in patterns:
            for found in re.findall(pattern, output, re.MULTILINE):
                counted[name] = counted.get(name, 0) + (int(found) if found.isdigit() else 1)
    return counted


def commit():
    """Returns the current commit, marked if files other than the record and its page differ from it."""
    changed = tools.output(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{file.relative_to(ROOT)}" for file in (RECORD, PAGE))], cwd=ROOT)
    return tools.output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT).strip() + ("-dirty" if changed else "")


def run_round(part, ran):
    """Runs one round. Returns its counts; a failure is a finding."""
    counted, output = {}, ""
    for command in PARTS[part][1]:
        command = command.format(seed=1 + ran["rounds"] * SEEDS_A_ROUND, round=ran["rounds"])
        print(f"soak: {command}", flush=True)
        done = subprocess.run(["timeout", "-k", "10", str(LIMIT), "bash", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        text = done.stdout.decode(errors="replace")
        output += f"\n$ {command}\n{text}"
        if done.returncode != 0:
            OUTPUT.mkdir(parents=True, exist_ok=True)
            file = OUTPUT / f"{part}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            file.write_text(output)
            failed = re.findall(r"(?m)^test (.*) \.\.\. FAILED$|^    (\S+)$(?=(?:\n    \S+$)*\n\ntest result: FAILED)", text)
            name = next((one or other for one, other in failed), f"status {done.returncode}")
            return counted, f"{name} (`{command}`)", file
        for name, number in count(text).items():
            counted[name] = counted.get(name, 0) + number
    if not counted.get("tests") or counted["tests"] < 1:
        raise Failure(f"{part} ran no test: its filters name nothing")
    return counted, None, None


def soak(part, minutes):
    """Runs rounds of a part, and adds their totals to the record."""
    begin, longest = time.monotonic(), 0
    while time.monotonic() - begin + longest < minutes * 60 or not longest:
        record = read_record()
        ran = entry(record, part)
        started = time.monotonic()
        counted, finding, file = run_round(part, ran)
        seconds = time.monotonic() - started
        longest = max(longest, seconds)
        ran["seconds"] += round(seconds)
        ran["last"] = time.strftime("%Y-%m-%d")
        if commit() not in ran["commits"]:
            ran["commits"].append(commit())
        if finding:
            ran["findings"].append({"date": ran["last"], "what": finding})
            write_record(record)
            raise Failure(f"{part} found something: {finding}; its output is in {file}")
        ran["rounds"] += 1
        for name, number in counted.items():
            ran["counted"][name] = ran["counted"].get(name, 0) + number
        write_record(record)
        print(f"soak: {part}: " + ", ".join(f"{number:,} {name}" for name, number in counted.items()), flush=True)


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", metavar="PART", help=f"{', '.join(PARTS)}, all, page, or seed=SEED")
    parser.add_argument("--minutes", type=float, default=MAX_MINUTES, metavar="N", help="above 0 to 60 [60]")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes <= MAX_MINUTES:
        raise Failure(f"--minutes {arguments.minutes}: above 0, {MAX_MINUTES} at most", 2)
    if arguments.part is None:
        record = read_record()
        for part, (what, _) in PARTS.items():
            counted = record.get(part, {}).get("counted", {})
            print(f"{part:16} {what}\n{'':16} " + (", ".join(f"{number:,} {name}" for name, number in counted.items()) or "not run yet"))
    elif arguments.part == "page":
        write_page(read_record())
    elif arguments.part.startswith("seed="):
        environment = {**os.environ, "BENCHKV_TEST_SEED": arguments.part.removeprefix("seed=")}
        return subprocess.run(shlex.split(test("benchkv", "--test", "jobs", "storm", "--")), cwd=ROOT, env=environment, check=False).returncode
    elif arguments.part == "all":
        for part in PARTS:
            soak(part, arguments.minutes)
    elif arguments.part in PARTS:
        soak(arguments.part, arguments.minutes)
    else:
        raise Failure(f"{arguments.part} is no part: {', '.join(PARTS)}", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
