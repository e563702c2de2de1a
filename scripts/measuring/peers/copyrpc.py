"""Compares copyrpc with UCX active messages and a bare cache line, and its clients and servers with tarpc and tonic.

Two processes pinned to two cores, on the software HCA, are compared with UCX active messages over shared memory (ucx_perftest of Debian's
ucx-utils) and with a bare cache line that goes back and forth. Compared with UCX, times and rates are means over a run on both sides; the medians
of both are printed too (p50). Compared with the cache line, and for idle endpoints, times are medians of blocks of calls. A round trip of UCX is twice its one-way
time, its rate of requests with replies half of its one-way message rate. Payloads are verified once before the rounds, and not in them, since
ucx_perftest does not. Then follow one active endpoint alone and among 1,024, in turn; instructions by callgrind; and memory.

The README's client and server (`services`, a benchmark of benchkv/peers) are compared with the same round trip without them, and the pair with futures
with tarpc and tonic over TCP on the loopback interface, whose tasks run on the same two cores. Each reply is checked.
"""

import os
import re
import subprocess
import time

from .. import tools
from ..tools import Failure
from . import Samples, at, figures, row, target

UCX_TLS = "self,posix,sysv,cma"


class Ucx:
    """ucx_perftest between the two cores."""

    def __init__(self, cores):
        self.cores = cores
        self.port = 20000 + os.getpid() % 20000
        self.environment = {**os.environ, "UCX_TLS": UCX_TLS}

    def run(self, test, messages, **more):
        """Returns the output of the client of `test`; the server is on the other core."""
        server_command = ["taskset", "-c", str(self.cores[1]), "timeout", "60", "ucx_perftest", "-p", str(self.port)]
        client_command = ["taskset", "-c", str(self.cores[0]), "timeout", "60", "ucx_perftest", "127.0.0.1", "-p", str(self.port)]
        client_command += ["-t", test, "-s", "32", "-n", str(messages), "-w", "20000", "-f", "-v"]
        self.port += 1
        server = subprocess.Popen(server_command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            # The server takes a moment to listen.
            for _ in range(50):
                time.sleep(0.05)
                client = subprocess.run(
                    client_command, env={**self.environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
                )
                if client.returncode == 0:
                    return client.stdout
                if server.poll() is not None:
                    break
        finally:
            server.kill()
            server.wait()
        raise Failure(f"ucx_perftest -t {test}: {client.stdout}")

    def figures(self, test, messages):
        """Returns average one-way latency in us, its median, and messages per second."""
        last = self.run(test, messages).splitlines()[-1].split(",")
        # Iterations; percentile, average and overall latency; average and overall bandwidth; average and overall message rate.
        try:
            percentile, overall, rate = float(last[1]), float(last[3]), float(last[7])
        except (IndexError, ValueError) as error:
            raise Failure(f"ucx_perftest -t {test} printed no figures") from error
        return overall, percentile, rate

    def transport(self):
        """Returns the transports that UCX chose, as it reports them."""
        found = re.search(r"ep_cfg\[\d+\]: (.*)", self.run("ucp_am_lat", 1000, UCX_LOG_LEVEL="info"))
        return found.group(1) if found else "unknown"


def measure(bench):
    """Measures in turn."""
    tools.need("ucx_perftest")
    program = tools.built("copyrpc/bench", "bin", "copyrpc_bench")

    def ours(*arguments):
        length = [] if "--calls" in arguments else ["--duration", "0.4"]
        return bench.document_of([program, "--device", "soft", "--pin", bench.pin, "--wait", "busy", "--runs", "1", *length, *arguments])

    def of_copyrpc(document, figure):
        """Returns a figure of the only load of the document."""
        (load,) = document["figures"].values()
        return at(load, f"copyrpc.{figure}")

    def rate(depth, *arguments):
        return ours("--verify=false", "--mode", "rate", "--depth", str(depth), *arguments)

    bench.log("checking")
    ours("--mode", "rate", "--depth", "64")
    ucx = Ucx(bench.cores)
    transport = ucx.transport()

    services = tools.built("", "bench", "services", workspace=tools.ROOT / "benchkv/peers")

    def service(mode, depth=1):
        return at(bench.document_of([services, "--mode", mode, "--depth", str(depth), "--cores", bench.pin]), "per_s")

    names = ["pair", "async", "tarpc", "tonic", "rtt", "rtt_p50", "rtt_of_blocks", "rate", "ucx_rtt", "ucx_rtt_p50", "ucx_rate", "raw", "alone", "among"]
    samples = {name: Samples() for name in names}
    for _ in bench.each_round():
        latency, median, _ = ucx.figures("ucp_am_lat", 300000)
        samples["ucx_rtt"].append(2000 * latency)
        samples["ucx_rtt_p50"].append(2000 * median)
        run = rate(1, "--baseline")
        samples["rtt"].append(of_copyrpc(run, "ns_per_call.median"))
        samples["rtt_of_blocks"].append(of_copyrpc(run, "ns_per_call_of_blocks.median"))
        samples["raw"].append(at(run, "raw_cacheline_ns"))
        samples["rtt_p50"].append(of_copyrpc(ours("--verify=false", "--mode", "latency", "--depth", "1"), "round_trip_p50_ns.median"))
        samples["pair"].append(1e9 / service("blocking"))
        for mode in ("async", "tarpc", "tonic"):
            samples[mode].append(service(mode, 64))
        samples["ucx_rate"].append(ucx.figures("ucp_am_bw", 2000000)[2] / 2)
        samples["rate"].append(of_copyrpc(rate(64), "calls_per_s.median"))

    bench.log("messages per WRITE")
    last = rate(64, "--runs", "5")

    # The same queues and rings, so that only the idle endpoints differ.
    same = ["--ring-size", "65536", "--batches", "21", "--srq-size", "32767", "--cq-size", "32768"]
    for _ in bench.each_round("idle endpoints, round", 5):
        samples["alone"].append(of_copyrpc(rate(1, *same), "ns_per_call_of_blocks.median"))
        samples["among"].append(of_copyrpc(rate(1, *same, "--connected", "1023"), "ns_per_call_of_blocks.median"))

    counts = bench.count("copyrpc")
    bench.log("memory")
    of_memory = ours("--verify=false", "--clients", "100,300", "--calls", "10000", "--ring-size", "16384", "--batches", "4", "--srq-size", "2047")
    beyond_rings = at(of_memory, "server_bytes_per_further_client.copyrpc") - at(of_memory, "server_registered_bytes_per_further_client.copyrpc")
    ratios = {
        "copyrpc_rtt_vs_ucx_am": samples["rtt"] / samples["ucx_rtt"],
        "copyrpc_rtt_p50_vs_ucx_am_p50": samples["rtt_p50"] / samples["ucx_rtt_p50"],
        "copyrpc_rate_vs_ucx_am": samples["rate"] / samples["ucx_rate"],
        "copyrpc_rtt_vs_raw_cacheline": samples["rtt_of_blocks"] / samples["raw"],
        "idle_endpoints_cost": samples["among"] / samples["alone"],
        "client_and_server_rtt_vs_copyrpc": samples["pair"] / samples["rtt"],
        "client_and_server_rtt_vs_ucx_am": samples["pair"] / samples["ucx_rtt"],
        "async_rate_vs_tarpc": samples["async"] / samples["tarpc"],
        "async_rate_vs_tonic": samples["async"] / samples["tonic"],
    }
    version = re.search(r"(?:Library version|Version|UCT version=)[: ]*(.*)", tools.output(["ucx_info", "-v"]))
    return {
        **{name: ratios[name].median for name in ratios if "p50" not in name},
        "bytes_per_endpoint": beyond_rings,
        "instructions_per_rpc": at(counts, "rpc_depth64"),
        "messages_per_write": {
            side: Samples(run[side]["messages_sent"] / run[side]["writes"] for run in of_copyrpc(last, "runs")).object() for side in ("client", "server")
        },
        "copyrpc_calls_per_s_of_5_runs": of_copyrpc(last, "calls_per_s"),
        "raw": {
            **{name: ratio.object() for name, ratio in ratios.items()},
            "copyrpc_rtt_ns": samples["rtt"].object(),
            "copyrpc_rtt_p50_ns": samples["rtt_p50"].object(),
            "copyrpc_rtt_of_blocks_ns": samples["rtt_of_blocks"].object(),
            "ucx_am_rtt_ns": samples["ucx_rtt"].object(),
            "ucx_am_rtt_p50_ns": samples["ucx_rtt_p50"].object(),
            "raw_cacheline_rtt_ns": samples["raw"].object(),
            "client_and_server_rtt_ns": samples["pair"].object(),
            **{f"{mode}_calls_per_s": samples[mode].object() for mode in ("async", "tarpc", "tonic")},
            "copyrpc_calls_per_s": samples["rate"].object(),
            "ucx_am_calls_per_s": samples["ucx_rate"].object(),
            "one_endpoint_ns_per_call": samples["alone"].object(),
            "one_of_1024_endpoints_ns_per_call": samples["among"].object(),
            "idle_poll_instructions": {"one_endpoint": at(counts, "idle_poll"), "1024_endpoints": at(counts, "idle_poll_of_1024")},
            "instructions": counts,
        },
        "conditions": {
            "rounds": bench.rounds, "cores": bench.pin, "ucx": version.group(1) if version else "unknown", "ucx_transport": transport,
            "ucx_tls": UCX_TLS, "device": "soft", "commit": at(last, "environment.git_commit"), "kernel": at(last, "environment.kernel"),
            "cpu": at(last, "environment.cpu_model"),
        },
    }


def table(result):
    """Prints the result."""
    raw, conditions = result["raw"], result["conditions"]
    counts = raw["instructions"]

    def shown(name, digits=0):
        return figures(raw[name], digits)

    def beside(ours, theirs, unit):
        return f"{shown(ours)} {unit} / {shown(theirs)} {unit}"

    print(f"copyrpc on cores {conditions['cores']} beside UCX AM ({conditions['ucx_transport']}); rounds: {conditions['rounds']}; in brackets least and most")
    row("", "value", "target")
    target("round trip of 32 B, depth 1 / UCX AM", raw["copyrpc_rtt_vs_ucx_am"], "<=", 1.0, 3, beside("copyrpc_rtt_ns", "ucx_am_rtt_ns", "ns"))
    row("the same, medians of the calls", shown("copyrpc_rtt_p50_vs_ucx_am_p50", 3), "-", beside("copyrpc_rtt_p50_ns", "ucx_am_rtt_p50_ns", "ns"))
    target("calls/s of 32 B, depth 64 / UCX AM", raw["copyrpc_rate_vs_ucx_am"], ">=", 5, 2, beside("copyrpc_calls_per_s", "ucx_am_calls_per_s", "per s"))
    pair = beside("client_and_server_rtt_ns", "copyrpc_rtt_ns", "ns")
    target("round trip of Client and Server / without them", raw["client_and_server_rtt_vs_copyrpc"], "<=", 1.1, 3, pair)
    row("the same / UCX AM", shown("client_and_server_rtt_vs_ucx_am", 3), "-")
    for rival in ("tarpc", "tonic"):
        what = beside("async_calls_per_s", f"{rival}_calls_per_s", "per s")
        target(f"calls/s of AsyncClient and AsyncServer, depth 64 / {rival}", raw[f"async_rate_vs_{rival}"], ">=", 3, 2, what)
    row("round trip / bare cache line", shown("copyrpc_rtt_vs_raw_cacheline", 3), "-", beside("copyrpc_rtt_of_blocks_ns", "raw_cacheline_rtt_ns", "ns"))
    target("instructions per call, both sides, depth 64", result["instructions_per_rpc"], "<=", 250, 0, f"depth 1 {counts['rpc_depth1']:.0f}")
    target(
        "time per call, 1 endpoint of 1,024 / 1 of 1", raw["idle_endpoints_cost"], "<=", 1.1, 3,
        beside("one_of_1024_endpoints_ns_per_call", "one_endpoint_ns_per_call", "ns"),
    )
    row("calls/s, depth 64", "", "-", "5 runs; " + figures(result["copyrpc_calls_per_s_of_5_runs"], 0))
    target("bytes per endpoint beyond the rings", result["bytes_per_endpoint"], "<=", 5120, 0)
    for side, spread in result["messages_per_write"].items():
        row(f"messages per WRITE, {side}", figures(spread, 1), "-", "5 runs")
    row("instructions of an idle poll", f"{counts['idle_poll']:.0f}", "-", f"1,024 endpoints: {counts['idle_poll_of_1024']:.0f}")
