"""Compares ipc, delegationrpc and flux with crossbeam's ArrayQueue and bounded channel, the channels of crossfire and kanal, rtrb's rings,
iceoryx2's request/response, an echo over a Unix socket, and a bare cache line that goes back and forth.

`shm-peers`, one program of a workspace of its own (benchkv/peers), makes all measurements, under one and the same load; replies are checked
before anything is measured.

Round trips are medians of blocks of 64. Between the two processes, rates are those of a whole window of 120 ms; between two threads
(delegationrpc, flux and their rivals) they are, on both sides, by the median of blocks of 1,024 calls, which does not change when a thread
loses its core for a moment. The echo runs on one core, where it
is fastest. The bare cache line is the faster of two fixed lines and 32 that take turns.

A virtual machine's cores move, and what a rival costs depends on how far the two are from each other. So the bare cache line is also measured
between any two measurements. A ratio counts for the distance (siblings of one core, near, far) that was measured before and after both of its
sides; each distance has rows and verdicts of its own.

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
# The distances of two cores, and the round-trip time of a bare cache line, in ns, below which they have it.
DISTANCES = {"siblings": 80, "near": 200, "far": float("inf")}
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
    places = {name: [distance(lines) for lines in of_name] for name, of_name in run["lines"].items()}
    run = {
        "distances": {where: at_distance(where, rounds, places) for where in DISTANCES},
        "crowds": {
            crate: (Samples(map(min, zip(*((rounds[f"{crate}_two_cores_{n}_rate"] / rounds[f"{crate}_two_cores_1_rate"]).values for n in CLIENTS))))).object()
            for crate in CRATES
        },
        "least_rate_of_1_to_8_clients_vs_1": {
            crate: min((rounds[f"{crate}_one_core_{n}_rate"] / rounds[f"{crate}_one_core_1_rate"]).median for n in CLIENTS) for crate in CRATES
        },
        "figures": {name: samples.object() for name, samples in rounds.items()},
        "environment": run["environment"],
    }
    return {
        "load_average_before": bench.load,
        "conditions": {"rounds": bench.rounds, "cores": bench.pin},
        "instructions": bench.count("ipc", "delegationrpc", "flux"),
        "raw": run,
    }


def distance(lines):
    """Returns the distance of the cores that round-trip times of a bare cache line show; None if it changed between them.

    >>> distance([45, 47]), distance([117, 180]), distance([45, 500])
    ('siblings', 'near', None)
    """
    found = {next(where for where, below in DISTANCES.items() if ns < below) for ns in lines}
    return found.pop() if len(found) == 1 else None


def at_distance(where, rounds, places):
    """Returns the ratios of the rounds in which both sides were measured at this distance, and the figures measured at it, by name."""

    def spread(values):
        return {**Samples(values).object(), "rounds": len(values)} if values else None

    ratios = {
        name: spread([
            ratio for ratio, *both in zip((rounds[ours] / rounds[theirs]).values, places[ours], places[theirs]) if both == [where, where]
        ])
        for name, (ours, theirs) in RATIOS.items()
    }
    of_both = {name for pair in RATIOS.values() for name in pair} | {"ipc_rate"}
    found = {name: spread([value for value, place in zip(rounds[name].values, places[name]) if place == where]) for name in of_both}
    return {"ratios": ratios, "figures": found}


def table(result):
    """Prints the result."""
    raw = result["raw"]
    environment = raw["environment"]
    print(f"ipc, delegationrpc and flux on cores {result['conditions']['cores']}; rounds: {result['conditions']['rounds']}; ours / theirs; in brackets least and most")
    print(f"{environment['cpu_model']}, {environment['kernel']}, commit {environment['git_commit']}; load average before: {result['load_average_before']:.2f}")
    for where, found in raw["distances"].items():
        if any(found["ratios"].values()):
            ratios_of(where, found)
    row("\nat any distance", "value", "target", on_page=False)
    for crate, shown in CRATES.items():
        least = at(raw, f"least_rate_of_1_to_8_clients_vs_1.{crate}")
        target(f"{shown}: 1 to 8 clients, least rate / that of 1", least, ">=", 0.5, 2, f"two cores: {figures(at(raw, f'crowds.{crate}'), 2)}")
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


def ratios_of(where, found):
    """Prints the ratios of the rounds with the cores at this distance."""
    figures_of = found["figures"]

    def shown(name):
        figure = figures_of[name]
        if figure is None:
            return "-"
        return f"{figure['median']:.0f} ns" if name.endswith("_ns") else f"{figure['median'] / 1e6:.3g} M/s"

    def of(what, name, sign, bound):
        ours, theirs = RATIOS[name]
        if found["ratios"][name]:
            more = f"{shown(ours)} / {shown(theirs)}; rounds: {found['ratios'][name]['rounds']}"
            target(f"{what}, cores {where}", found["ratios"][name], sign, bound, 2, more)

    line = figures_of["raw_cacheline_rtt_ns"]
    at_line = f", a bare cache line {line['median']:.0f} ns" if line else ""
    row(f"\ncores {where}{at_line}", "value", "target", on_page=False)
    of("ipc: round trip / bare line", "ipc_rtt_vs_raw_cacheline", "<=", 1.15)
    of("ipc: round trip / iceoryx2", "ipc_rtt_vs_iceoryx2", "<=", 0.33)
    of("ipc: calls/s, depth 32 / Unix socket", "ipc_rate_depth32_vs_uds_echo", ">=", 20)
    of("ipc: a call, 1 client of 1,024 / 1 of 1", "ipc_idle_clients_cost", "<=", 1.2)
    of("delegationrpc: calls/s, depth 32 / ArrayQueues", "delegation_rate_vs_arrayqueue", ">=", 3)
    for rival in ("crossbeam_channel", "crossfire", "kanal"):
        of(f"flux: calls/s, depth 64 / {rival.removesuffix('_channel')}", f"flux_rate_vs_{rival}", ">=", 3)
    of("flux: calls/s, depth 64 / rtrb", "flux_rate_vs_rtrb", ">=", 0.5)
    of("flux: a call, 2 nodes of 8 / 2 of 2", "flux_idle_nodes_cost", "<=", 1.2)
