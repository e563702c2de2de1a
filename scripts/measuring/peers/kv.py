"""Compares benchkv with Redis, with ipc alone, and its topologies with each other; 50 % gets of 100,000 keys, benchkv checks all values.

Local: one rank, one daemon and one client on a core each, 32 operations outstanding. Redis has the same cores: redis-server the daemon's,
redis-benchmark the client's, over a Unix socket, 50 connections (its default; with fewer it is slower) with a pipeline of 64, without
persistence and without TCP. redis-benchmark has no mix, so SETs and GETs are measured one after the other, and a half of each takes the
harmonic mean of their rates. ipc alone is its benchmark `calls` at depth 32, by the median, between two threads on these cores.

Remote: instructions without the software HCA, and messages passed from thread to thread, are those of one operation in a job that is stepped
in one thread (benchkv/benches/instructions.rs); rates are those of the same jobs with a process for each rank. The p50 of
`benchkv` without options is compared with the tick of the scheduler, 1 / CONFIG_HZ; where the kernel does not tell it, with that of 1000 Hz.
"""

import csv
import gzip
import json
import os
import platform
import re
import subprocess
import time

from .. import tools
from ..tools import Failure
from . import Samples, at, figures, row, target

TOPOLOGIES = ["meta", "delegation", "sharded"]
LOCAL = ["--ranks", "1", "--server-threads", "1", "--client-threads", "1", "--queue-depth", "32"]
REMOTE = ["--ranks", "2", "--server-threads", "2", "--client-threads", "1", "--queue-depth", "32", "--remote-ratio", "1"]


class Redis:
    """A redis-server on a core; a context manager."""

    def __init__(self, directory, cores):
        self.directory = directory / "redis"
        self.socket = self.directory / "socket"
        self.cores = cores

    def __enter__(self):
        self.directory.mkdir()
        log = (self.directory / "log").open("w")
        command = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--dir", self.directory, "--save", "", "--appendonly", "no"]
        self.server = subprocess.Popen(["taskset", "-c", str(self.cores[0]), *command], stdout=log, stderr=log)
        for _ in range(100):
            if self.socket.exists():
                return self
            if self.server.poll() is not None:
                break
            time.sleep(0.1)
        self.__exit__()
        raise Failure("redis-server did not start: " + (self.directory / "log").read_text())

    def __exit__(self, *_):
        self.server.terminate()
        self.server.wait()

    def rate(self):
        """Returns SETs and GETs per second, half of each."""
        command = ["redis-benchmark", "-s", self.socket, "-P", "64", "-r", "100000", "-d", "8", "-n", "500000", "-t", "set,get", "--csv"]
        printed = tools.output(["taskset", "-c", self.cores[1], *command], timeout=120)
        rates = {line[0]: float(line[1]) for line in csv.reader(printed.splitlines()) if line[0] in ("SET", "GET")}
        if len(rates) != 2:
            raise Failure(f"redis-benchmark printed {printed}")
        return 2 / sum(1 / rate for rate in rates.values())


def tick_ns():
    """Returns the scheduler's tick."""
    for path, opened in (("/proc/config.gz", gzip.open), (f"/boot/config-{platform.release()}", open)):
        try:
            with opened(path, "rt") as config:
                found = re.search(r"^CONFIG_HZ=(\d+)$", config.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return 10**9 // int(found.group(1))
    return 10**6


def measure(bench):
    """Measures in turn."""
    tools.need("redis-server")
    tools.need("redis-benchmark")
    bench.log("building")
    benchkv = tools.built("benchkv", "bin", "benchkv")
    counter = tools.built("benchkv", "bench", "instructions")
    # A benchmark of criterion: in the profile bench, which is release.
    ipc = tools.built("ipc", "bench", "calls")
    hand_overs = {}
    for topology in TOPOLOGIES:
        every, within = tools.output([counter, "--hand-overs", topology]).split()[:2]
        hand_overs[topology] = (float(every), float(within))
    counts = bench.count("benchkv")

    def ours(*arguments):
        command = ["taskset", "-c", bench.pin, benchkv, "--duration", "0.5", "--runs", "1", "--warmup", "0.2", *arguments]
        return bench.document_of(command, timeout=120)

    def ipc_rate():
        home = bench.work / "criterion"
        tools.output(["taskset", "-c", bench.pin, ipc, "--bench", "--exact", "ipc/calls/32"], env={**os.environ, "CRITERION_HOME": str(home)})
        estimates = list(home.glob("**/new/estimates.json"))
        if len(estimates) != 1:
            raise Failure("the benchmark of ipc gave no estimate")
        return 1e9 / at(json.loads(estimates[0].read_text()), "median.point_estimate")

    names = ["redis", "local", "local_delegation", "ipc", "default_p50", *TOPOLOGIES]
    samples = {name: Samples() for name in names}
    with Redis(bench.work, bench.cores) as redis:
        for _ in bench.each_round():
            samples["redis"].append(redis.rate())
            samples["local"].append(at(ours(*LOCAL, "--backend", "meta"), "total_rps"))
            samples["ipc"].append(ipc_rate())
            samples["local_delegation"].append(at(ours(*LOCAL, "--backend", "delegation"), "total_rps"))
            run = ours()
            samples["default_p50"].append(at(run, "remote_latency_ns.p50"))
            for topology in TOPOLOGIES:
                samples[topology].append(at(ours(*REMOTE, "--backend", topology), "remote_rps"))
    tick = tick_ns()
    ratios = {
        "benchkv_local_vs_redis": samples["local"] / samples["redis"],
        "benchkv_local_vs_ipc": samples["local"] / samples["ipc"],
        "delegation_vs_meta_one_rank": samples["local_delegation"] / samples["local"],
        "default_remote_p50_vs_tick": Samples(value / tick for value in samples["default_p50"].values),
    }
    result = {name: ratio.median for name, ratio in ratios.items()}
    for topology in TOPOLOGIES:
        result[f"instructions_remote_{topology}"] = at(counts, f"kv_remote_{topology}")
        result[f"handovers_remote_{topology}"], result[f"handovers_within_rank_remote_{topology}"] = hand_overs[topology]
        result[f"throughput_remote_{topology}"] = samples[topology].median
    result["raw"] = {
        **{name: ratio.object() for name, ratio in ratios.items()},
        "benchkv_local_operations_per_s": samples["local"].object(),
        "benchkv_local_delegation_operations_per_s": samples["local_delegation"].object(),
        "redis_operations_per_s": samples["redis"].object(),
        "ipc_calls_per_s": samples["ipc"].object(),
        "default_remote_p50_ns": samples["default_p50"].object(),
        **{f"throughput_remote_{topology}": samples[topology].object() for topology in TOPOLOGIES},
        "throughput_remote_delegation_vs_meta": (samples["delegation"] / samples["meta"]).object(),
        "throughput_remote_sharded_vs_delegation": (samples["sharded"] / samples["delegation"]).object(),
        "instructions": counts,
    }
    version = re.search(r" v=(\S*)", tools.output(["redis-server", "--version"]))
    result["conditions"] = {
        "rounds": bench.rounds, "cores": bench.pin, "load_average_before": bench.load, "tick_ns": tick,
        "redis": version.group(1) if version else "unknown", "device": "soft", "commit": at(run, "environment.git_commit"),
        "kernel": at(run, "environment.kernel"), "cpu": at(run, "environment.cpu_model"),
    }
    return result


def table(result):
    """Prints the result."""
    raw, conditions = result["raw"], result["conditions"]

    def shown(name, digits=0):
        return figures(raw[name], digits)

    # A row of two topologies: `name` names the figure of each, `bound` that of their ratio.
    def beside(what, ours, theirs, name, bound, digits):
        a, b = result[f"{name}_{ours}"], result[f"{name}_{theirs}"]
        target(f"{what}, {ours} / {theirs}", a / b, "<=", bound, 3, f"{a:.{digits}f} / {b:.{digits}f}")

    print(
        f"benchkv on cores {conditions['cores']}; rounds: {conditions['rounds']}; in brackets least and most; "
        f"load average before: {conditions['load_average_before']:.2f}"
    )
    print(f"{conditions['cpu']}, {conditions['kernel']}, commit {conditions['commit']}; Redis {conditions['redis']}")
    row("", "value", "target")
    target(
        "one rank: operations/s / Redis, pipeline of 64", raw["benchkv_local_vs_redis"], ">=", 5, 2,
        f"{shown('benchkv_local_operations_per_s')} / {shown('redis_operations_per_s')} per s",
    )
    target("one rank: operations/s / calls/s of ipc alone", raw["benchkv_local_vs_ipc"], ">=", 0.6, 3, f"{shown('ipc_calls_per_s')} per s")
    one_rank = raw["delegation_vs_meta_one_rank"]
    row("one rank: operations/s, delegation / meta", figures(one_rank, 3), "-", "an empty ring is polled")
    target(
        f"default run: remote p50 / tick of {conditions['tick_ns'] // 1000} us", raw["default_remote_p50_vs_tick"], "<=", 1, 3,
        f"{shown('default_remote_p50_ns')} ns",
    )
    for what, name, digits in (
        ("remote: instructions", "instructions_remote", 0),
        ("remote: hand-overs", "handovers_remote", 1),
        ("remote: hand-overs within ranks", "handovers_within_rank_remote", 1),
    ):
        beside(what, "delegation", "meta", name, 0.8, digits)
        beside(what, "sharded", "delegation", name, 1, digits)
    for topology in TOPOLOGIES:
        row(f"remote: operations/s, {topology}", f"{result[f'throughput_remote_{topology}']:.0f}", "-", shown(f"throughput_remote_{topology}"), on_page=False)
    for name in ("delegation_vs_meta", "sharded_vs_delegation"):
        ratio = raw[f"throughput_remote_{name}"]
        row(f"remote: operations/s, {name.replace('_vs_', ' / ')}", figures(ratio, 3), "-")
