"""Compares ScaleRPC with copyrpc, SEND on reliable connections and SEND on datagrams.

Two processes pinned to two cores, on the software HCA, all by scalerpc_bench, under one and the same load, every payload checked. Round trips
are medians of blocks of 64 calls; rates are means over 0.4 s. With 8 clients ScaleRPC has one group, which never switches; with 64 two, which
take turns. There are no targets: the software HCA has no cache of contexts, for which grouping exists, and a verb costs its poster the work
that a NIC does.
"""

from .. import tools
from . import at, figures, row

LOADS = ["round_trip", "rate_8x8", "rate_64x8"]
RIVALS = ["copyrpc", "rc-send", "ud-send"]


def measure(bench):
    """Measures, all by one program."""
    bench.log("building")
    program = tools.built("copyrpc/bench", "bin", "scalerpc_bench")
    bench.log("measuring")
    run = bench.document_of([
        program, "compare", "--device", "soft", "--contestants", ",".join(["scalerpc", *RIVALS]),
        "--runs", bench.rounds, "--clients", "8,64", "--depth", "8", "--duration", "0.4", "--pin", bench.pin, "--wait", "busy",
    ])
    return {
        **{
            f"scalerpc_{load}_vs_{rival.replace('-', '_')}": at(run, f"ratios.{load}.{rival}.median") for load in LOADS for rival in RIVALS
        },
        **{
            f"{name.replace('-', '_')}_bytes_per_further_client": at(run, f"server_registered_bytes_per_further_client.{name}")
            for name in ["scalerpc", *RIVALS]
        },
        "conditions": {"rounds": bench.rounds, "cores": bench.pin},
        "raw": run,
    }


def table(result):
    """Prints the result."""
    raw = result["raw"]

    def figure(load, name):
        if load == "round_trip":
            return f"{at(raw, f'figures.{load}.{name}.ns_per_call_of_blocks.median'):.0f} ns"
        return f"{at(raw, f'figures.{load}.{name}.calls_per_s.median') / 1e6:.2f} M/s"

    print(
        f"ScaleRPC on cores {result['conditions']['cores']}; rounds: {result['conditions']['rounds']}; ours / theirs: of round trips less, of rates "
        "more is better; in brackets least and most"
    )
    print(", ".join([at(raw, "environment.cpu_model"), at(raw, "environment.kernel"), "commit " + at(raw, "environment.git_commit")]))
    row("", "value", "target")
    for load in LOADS:
        for rival in RIVALS:
            ratio = at(raw, f"ratios.{load}.{rival}")
            row(f"{load} / {rival}", figures(ratio, 2), "-", f"{figure(load, 'scalerpc')} / {figure(load, rival)}")
    for name in ["scalerpc", *RIVALS]:
        row(f"bytes that the server registers a client, {name}", f"{result[name.replace('-', '_') + '_bytes_per_further_client']:.0f}", "-")
