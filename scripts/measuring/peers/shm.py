"""Compares ipc, delegationrpc and flux with crossbeam's ArrayQueue and bounded channel, the channels of crossfire and kanal, rtrb's rings,
iceoryx2's request/response, an echo over a Unix socket, and a bare cache line that goes back and forth.

`shm-peers`, one program of a workspace of its own (benchkv/peers), makes all measurements, under one and the same load; replies are checked
before anything is measured.

Round trips are medians of blocks of 64. Between the two processes, rates are those of a whole window of 120 ms; between two threads
(delegationrpc, flux and their rivals) they are, on both sides, by the median of blocks of 1,024 calls, which does not change when a thread
loses its core for a moment. The echo runs on one core, where it
is fastest. The bare cache line is the faster of two fixed lines and 32 that take turns.

Several clients: windows of 480 ms, five rounds, medians. Clients stream 32 calls each, share one core and yield; the server has the other
core, or shares theirs too. "Never below half of the rate of a single client" is decided by the latter: there the single client is as
over-subscribed as eight are, and only the number of clients differs. With two cores, one client never has to give up its core.

It takes about three minutes, and half a minute with --runs 1; the first run also builds the rivals, for a minute or two. That is
too long for CI, which checks the format of benchkv/peers only.
"""

import os
import pathlib
import shutil
import tempfile

from .. import tools
from . import Samples, at, figures, row, target

# The counts that the tables show.
OF_SESSIONS = ["call", "server_poll", "recv", "reply", "client_poll", "client_poll_empty", "server_poll_empty", "rpc_depth1", "rpc_depth32"]
OF_FLUX = ["call", "poll_call", "recv", "reply", "poll_reply", "poll_empty", "rpc_depth1", "rpc_depth64"]
COUNTED = [f"{crate}_{name}" for name in OF_SESSIONS for crate in ("ipc", "delegation")] + [f"flux_{name}" for name in OF_FLUX]
# Ours over theirs. Of times, `theirs` of the last one is the network without idle nodes.
RATIOS = {
    "ipc_rtt_vs_raw_cacheline": ("ipc_rtt_ns", "raw_cacheline_rtt_ns"),
    "ipc_rtt_vs_iceoryx2": ("ipc_rtt_ns", "iceoryx2_rtt_ns"),
    "ipc_rate_depth32_vs_uds_echo": ("ipc_rate", "uds_echo_rate"),
    "ipc_idle_clients_cost": ("ipc_1_of_1024_rtt_ns", "ipc_1_of_1_rtt_ns"),
    "delegation_rate_vs_arrayqueue": ("delegation_rate_of_blocks", "array_queue_rate_of_blocks"),
    "flux_rate_vs_crossbeam_channel": ("flux_rate_of_blocks", "crossbeam_channel_rate_of_blocks"),
    "flux_rate_vs_crossfire": ("flux_rate_of_blocks", "crossfire_rate_of_blocks"),
    "flux_rate_vs_kanal": ("flux_rate_of_blocks", "kanal_rate_of_blocks"),
    "flux_rate_vs_rtrb": ("flux_rate_of_blocks", "rtrb_rate_of_blocks"),
    "flux_idle_nodes_cost": ("flux_rate_of_blocks", "flux_of_8_rate_of_blocks"),
}
CRATES = {"ipc": "ipc", "delegation": "delegationrpc"}
CLIENTS = (1, 2, 4, 8)


def measure(bench):
    """Measures, all by one program."""
    bench.log("building")
    program = tools.built("", "bin", "shm-peers", workspace=tools.ROOT / "benchkv/peers")
    bench.log("measuring")
    # Files that iceoryx2 leaves have this in their names.
    prefix = f"copyrpc-peers-{os.getpid()}-"
    try:
        run = bench.document_of([program, "--rounds", bench.rounds, "--cores", bench.pin, "--iceoryx2-prefix", prefix])
    finally:
        shutil.rmtree(pathlib.Path(tempfile.gettempdir()) / prefix, ignore_errors=True)
        for left in pathlib.Path("/dev/shm").glob(f"{prefix}*"):
            left.unlink(missing_ok=True)
    rounds = {name: Samples(values) for name, values in run["rounds"].items()}
    ratios = {name: (rounds[ours] / rounds[theirs]).object() for name, (ours, theirs) in RATIOS.items()}
    for crate in CRATES:
        for cores in ("one_core", "two_cores"):
            rates = [(rounds[f"{crate}_{cores}_{clients}_rate"] / rounds[f"{crate}_{cores}_1_rate"]).values for clients in CLIENTS]
            ratios[f"{crate}_{cores}_least_vs_1_client"] = Samples(map(min, zip(*rates))).object()
    run = {"ratios": ratios, "figures": {name: samples.object() for name, samples in rounds.items()}, "environment": run["environment"]}
    # The distance of the two cores, which on a virtual machine changes from time to time.
    line = at(run, "figures.raw_cacheline_rtt_ns")
    mode = "close to each other" if line["max"] <= 200 else "far from each other" if line["min"] > 200 else "now close to each other, now far"
    return {
        **{name: at(ratios, f"{name}.median") for name in RATIOS},
        **{f"{crate}_least_rate_of_1_to_8_clients_vs_1": at(ratios, f"{crate}_one_core_least_vs_1_client.median") for crate in CRATES},
        "core_mode": mode,
        "load_average_before": bench.load,
        "conditions": {"rounds": bench.rounds, "cores": bench.pin},
        "instructions": bench.count("ipc", "delegationrpc", "flux"),
        "raw": run,
    }


def table(result):
    """Prints the result."""
    raw = result["raw"]

    def millions(name, digits=1):
        return f"{at(raw, f'figures.{name}.median') / 1e6:.{digits}f} M/s"

    def ns(name):
        return f"{at(raw, f'figures.{name}.median'):.0f} ns"

    def of(what, name, sign, bound, more):
        target(what, at(raw, f"ratios.{name}"), sign, bound, 2, more)

    print(
        f"ipc, delegationrpc and flux on cores {result['conditions']['cores']}, {result['core_mode']}; rounds: {result['conditions']['rounds']}; "
        "ours / theirs; in brackets least and most"
    )
    environment = raw["environment"]
    print(f"{environment['cpu_model']}, {environment['kernel']}, commit {environment['git_commit']}; load average before: {result['load_average_before']:.2f}")
    row("", "value", "target")
    of("ipc: round trip / bare cache line", "ipc_rtt_vs_raw_cacheline", "<=", 1.15, f"{ns('ipc_rtt_ns')} / {ns('raw_cacheline_rtt_ns')}")
    of("ipc: round trip / iceoryx2", "ipc_rtt_vs_iceoryx2", "<=", 0.33, ns("iceoryx2_rtt_ns"))
    of("ipc: calls/s at depth 32 / Unix-socket echo", "ipc_rate_depth32_vs_uds_echo", ">=", 20, f"{millions('ipc_rate')} / {millions('uds_echo_rate', 3)}")
    of("ipc: time per call, 1 client of 1,024 / 1 of 1", "ipc_idle_clients_cost", "<=", 1.2, f"{ns('ipc_1_of_1024_rtt_ns')} / {ns('ipc_1_of_1_rtt_ns')}")
    of(
        "delegationrpc: calls/s at depth 32 / ArrayQueue pair", "delegation_rate_vs_arrayqueue", ">=", 2,
        f"{millions('delegation_rate_of_blocks')} / {millions('array_queue_rate_of_blocks')}",
    )
    for crate, shown in CRATES.items():
        least = at(raw, f"ratios.{crate}_two_cores_least_vs_1_client")
        target(
            f"{shown}: 1 to 8 clients, least rate / that of 1", result[f"{crate}_least_rate_of_1_to_8_clients_vs_1"], ">=", 0.5, 2,
            f"two cores: {figures(least, 2)}",
        )
    of(
        "flux: calls/s at depth 64 / crossbeam channels", "flux_rate_vs_crossbeam_channel", ">=", 3,
        f"{millions('flux_rate_of_blocks')} / {millions('crossbeam_channel_rate_of_blocks')}",
    )
    for rival in ("crossfire", "kanal"):
        of(f"flux: calls/s at depth 64 / {rival}", f"flux_rate_vs_{rival}", ">=", 3, millions(f"{rival}_rate_of_blocks"))
    of("flux: calls/s at depth 64 / rtrb", "flux_rate_vs_rtrb", ">=", 0.5, millions("rtrb_rate_of_blocks"))
    of(
        "flux: time per call, 2 nodes of 8 / 2 of 2", "flux_idle_nodes_cost", "<=", 1.2,
        f"{millions('flux_of_8_rate_of_blocks')} / {millions('flux_rate_of_blocks')}",
    )
    print(f"\n{'':16} {'':8} {'one core':>17} {'two cores':>17}")
    print(f"{'':16} {'clients':>8} {'M/s':>8} {'fairness':>8} {'M/s':>8} {'fairness':>8} {'region, B':>10}")
    for clients in CLIENTS:
        for crate, shown in CRATES.items():
            one, two = (f"figures.{crate}_{cores}_{clients}" for cores in ("one_core", "two_cores"))
            rates = " ".join(f"{at(raw, crowd + '_rate.median') / 1e6:8.2f} {at(raw, crowd + '_fairness.median'):8.2f}" for crowd in (one, two))
            print(f"{shown:16} {clients:8} {rates} {at(raw, one + '_region_bytes.median'):10.0f}")
    print("(calls/s of all clients together, 32 unanswered each; fairness: slowest client / fastest)")
    two, eight = (at(raw, f"figures.flux_{nodes}_nodes_bytes.median") for nodes in (2, 8))
    print(f"\nlanes of flux, as documented: 2 nodes {two:.0f} B, 8 nodes {eight:.0f} B")
    print(f"\n{'':32} {'instructions':>12}")
    for name in COUNTED:
        print(f"{name:32} {at(result['instructions'], name):12.0f}")
