"""Compares copyrpc by packets with UDP that a program uses itself.

Two threads of one process exchange datagrams over the loopback interface and poll without a sleep; copyrpc and WRITEs go over software HCAs
with ports for packets there (soft:roce=127.0.0.1,packets=all). A datagram has as many bytes as a packet of copyrpc with one message of 32 bytes.
"""

from .. import tools
from . import Samples, at, figures, row, target

DEVICE = "soft:roce=127.0.0.1,port=0,packets=all"
# A message of 32 bytes with its headers; a packet of the largest RDMA MTU with its headers.
MESSAGE, PACKET = 100, 4096 + 32
WRITE = 65536


def measure(bench):
    """Measures in turn."""
    program, udp = (tools.built("copyrpc/bench", "bin", name) for name in ("copyrpc_bench", "copyrpc_udp"))

    def ours(depth, *more):
        command = [program, "--device", DEVICE, "--pin", bench.pin, "--wait", "busy", "--runs", "1", "--duration", "0.4", "--mode", "rate"]
        return bench.document_of([*command, "--depth", str(depth), *more])

    def theirs(mode, size, depth):
        command = ["taskset", "-c", bench.pin, udp, "--mode", mode, "--bytes", str(size), "--depth", str(depth), "--duration", "0.4"]
        return at(bench.document_of(command), "per_s")

    def figure(document, name):
        """Returns the median of a figure of the only load of the document."""
        (load,) = document["figures"].values()
        return at(load, f"copyrpc.{name}.median")

    bench.log("checking")
    last = ours(64)
    samples = {name: Samples() for name in ("rtt", "udp_rtt", "rate", "udp_rate", "write", "stream")}
    for _ in bench.each_round():
        samples["rtt"].append(figure(ours(1, "--verify=false"), "ns_per_call"))
        samples["udp_rtt"].append(1e9 / theirs("calls", MESSAGE, 1))
        samples["rate"].append(figure(ours(64, "--verify=false"), "calls_per_s"))
        samples["udp_rate"].append(theirs("calls", MESSAGE, 64))
        samples["write"].append(theirs("write", WRITE, 8) * WRITE / 1e6)
        samples["stream"].append(theirs("stream", PACKET, 16) * 4096 / 1e6)
    ratios = {
        "rtt_vs_udp": samples["rtt"] / samples["udp_rtt"],
        "rate_vs_udp": samples["rate"] / samples["udp_rate"],
        "write_vs_stream": samples["write"] / samples["stream"],
    }
    return {
        **{name: ratio.median for name, ratio in ratios.items()},
        "raw": {**{name: ratio.object() for name, ratio in ratios.items()}, **{name: sample.object() for name, sample in samples.items()}},
        "conditions": {
            "rounds": bench.rounds, "cores": bench.pin, "device": DEVICE, "commit": at(last, "environment.git_commit"),
            "kernel": at(last, "environment.kernel"), "cpu": at(last, "environment.cpu_model"),
        },
    }


def table(result):
    """Prints the result."""
    raw, conditions = result["raw"], result["conditions"]

    def beside(ours, theirs, unit):
        return f"{figures(raw[ours], 0)} {unit} / {figures(raw[theirs], 0)} {unit}"

    print(f"copyrpc by packets on cores {conditions['cores']} beside UDP; rounds: {conditions['rounds']}; in brackets least and most")
    row("", "value", "target")
    target("round trip of 32 B, depth 1 / UDP ping-pong", raw["rtt_vs_udp"], "<=", 1.5, 2, beside("rtt", "udp_rtt", "ns"))
    target("calls/s of 32 B, depth 64 / a datagram each way", raw["rate_vs_udp"], ">=", 5, 2, beside("rate", "udp_rate", "per s"))
    target("WRITEs of 64 KiB / stream of the same packets", raw["write_vs_stream"], ">=", 0.7, 2, beside("write", "stream", "MB/s"))
