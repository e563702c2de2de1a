//! `copyrpc_memory`: measures the memory that an endpoint takes beyond its two rings.
//!
//! Two contexts of one process connect many endpoints with each other. Measured before and after:
//! the bytes the program holds of its allocator, which counts here, and the pages that its memfds
//! hold, as the kernel counts them: queues, doorbell records and registered memory of software
//! devices. Then the parts of an endpoint are made alone in the same number: queue pairs, connected
//! ones, and registered regions. The rest is copyrpc's own.

use std::fmt;
use std::process::ExitCode;

use bench::held::{Counting, Held};
use bench::load::Failure;
use bench::program::Program;
use clap::Parser;
use copyrpc::{Context, ContextBuilder, Endpoint, EndpointConfig};
use harness::report::{JsonSink, Table};
use mlx5::{
    Access, ConnectOptions, Device, DeviceSpec, FabricSpec, LocalFabric, QpConfig, RoceOptions,
    SoftOptions,
};
use serde::Serialize;

/// Bytes of memory an endpoint of copyrpc takes beyond its two rings, on the software HCA.
#[derive(Debug, Parser)]
#[command(name = "copyrpc_memory", version)]
struct Cli {
    /// Connections to make, 1 to 4096; each is two endpoints.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=4096))]
    connections: u32,

    /// WQEBBs of each send queue, 16 to 32768 [default: that of copyrpc].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=32768))]
    send_wr: Option<u32>,

    /// Connections by packets over the loopback interface, in place of shared memory.
    #[arg(long)]
    packets: bool,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,
}

/// Bytes of each ring: whole pages, so that none is lost to rounding.
const RING_BYTES: u64 = 16 << 10;
/// Bytes of an endpoint's control memory, and number of endpoints that share a region.
const CONTROL_BYTES: usize = 64;
const CONTROL_PLACES: usize = 64;
/// Slots of its lane on the software HCA.
const LANE_SLOTS: u32 = 8;
/// Inline bytes that copyrpc asks of its queue pairs.
const INLINE_BYTES: usize = 220;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result; its JSON form is this structure. All values are bytes per endpoint.
#[derive(Debug, Serialize)]
struct Memory {
    /// Beyond the rings, connected and used once.
    bytes_per_endpoint: f64,
    /// Bytes beyond the rings before the first call.
    bytes_before_first_call: f64,
    /// Parts, which sum up to the first value.
    queue_pair: Held,
    /// Bytes for connecting it: for the software HCA, its lane to the other endpoint.
    connecting: Held,
    control_memory: Held,
    /// Bytes that the two rings take beside their own bytes.
    rings: Held,
    /// Bytes that copyrpc itself takes.
    rest: Held,
    endpoints: usize,
    ring_bytes: u64,
    send_wr: u32,
}

fn soft(fabric: &LocalFabric, packets: bool) -> DeviceSpec {
    let port = RoceOptions {
        port: Some(0),
        is_for_all: true,
        ..RoceOptions::new([127, 0, 0, 1].into())
    };
    let roce = packets.then_some(port);
    DeviceSpec::Soft(SoftOptions {
        fabric: FabricSpec::Local(fabric.clone()),
        roce,
        ..SoftOptions::default()
    })
}

/// One endpoint, connected; and connected and used.
fn endpoints(
    connections: usize,
    config: &EndpointConfig,
    packets: bool,
) -> Result<[Held; 2], Failure> {
    let fabric = LocalFabric::new();
    let queue_size = (connections * 9).next_power_of_two().max(4096) as u32;
    let context = || {
        ContextBuilder::new(soft(&fabric, packets))
            .srq_size((queue_size - 1).min((1 << 15) - 1))
            .cq_size(queue_size.max(1 << 15))
            .build()
    };
    let (caller, answerer): (Context<()>, Context<()>) = (context()?, context()?);
    let before = Held::now()?;
    let mut ends: Vec<[Endpoint<()>; 2]> = Vec::with_capacity(connections);
    let vector = Held::now()?.less(before);
    for _ in 0..connections {
        let (a, b) = (
            caller.create_endpoint(config)?,
            answerer.create_endpoint(config)?,
        );
        let (of_a, of_b) = (a.local_info(), b.local_info());
        ends.push([a.connect(&of_b)?, b.connect(&of_a)?]);
    }
    let each = |now: Held| {
        let mut each = now.less(vector).each_since(before, 2 * connections);
        each.device -= 2.0 * RING_BYTES as f64;
        each
    };
    let connected = each(Held::now()?);
    for pair in &ends {
        for (from, to, end) in [
            (&caller, &answerer, &pair[0]),
            (&answerer, &caller, &pair[1]),
        ] {
            end.call(&[0x5a; 32], (), 32)?;
            let mut has_ended = false;
            while !has_ended {
                from.poll(|(), outcome| has_ended = outcome.is_ok())?;
                to.poll(|(), _| ())?;
                while let Some(request) = to.recv() {
                    request
                        .reply(&[0xa5; 32])
                        .map_err(|error| error.to_string())?;
                }
            }
        }
    }
    Ok([connected, each(Held::now()?)])
}

/// Queue pairs as copyrpc makes them, the same once connected, regions of the control memory's
/// size, and what regions of a ring's size take beside the ring.
fn parts(
    connections: usize,
    send_wr: u32,
    lane_slots: u32,
    packets: bool,
) -> Result<[Held; 4], Failure> {
    let fabric = LocalFabric::new();
    let config = QpConfig {
        max_send_wr: send_wr,
        max_inline_data: INLINE_BYTES,
        lane_slots,
        ..QpConfig::default()
    };
    let end = || -> Result<_, Failure> {
        let device = Device::open(soft(&fabric, packets))?;
        let pd = device.alloc_pd()?;
        let (send_cq, recv_cq) = (device.create_cq(4096)?, device.create_mono_cq::<()>(4096)?);
        let srq = pd.create_srq(1023, 0)?;
        Ok((pd, send_cq, recv_cq, srq))
    };
    let ends = [end()?, end()?];
    let count = 2 * connections;
    let (mut qps, mut regions) = (Vec::with_capacity(count), Vec::with_capacity(2 * count));
    let start = Held::now()?;
    for _ in 0..connections {
        for (pd, send_cq, recv_cq, srq) in &ends {
            qps.push(pd.create_qp(send_cq, recv_cq, srq, &config)?);
        }
    }
    let created = Held::now()?;
    for pair in qps.chunks_exact_mut(2) {
        let [a, b] = pair else { continue };
        let addresses = [a.address(), b.address()];
        a.connect(&addresses[1], &ConnectOptions::default())?;
        b.connect(&addresses[0], &ConnectOptions::default())?;
    }
    let connected = Held::now()?;
    let mut allocate = |count, bytes, access| {
        (0..count).try_for_each(|at| {
            ends[at % 2]
                .0
                .alloc(bytes, access)
                .map(|region| regions.push(region))
        })
    };
    // Each end has its own.
    allocate(
        2 * connections.div_ceil(CONTROL_PLACES),
        CONTROL_PLACES * CONTROL_BYTES,
        Access::LOCAL_WRITE | Access::REMOTE_READ,
    )?;
    let control = Held::now()?;
    allocate(
        count,
        RING_BYTES as usize,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    )?;
    let mut ring = Held::now()?.each_since(control, count);
    ring.device -= RING_BYTES as f64;
    Ok([
        created.each_since(start, count),
        connected.each_since(created, count),
        control.each_since(connected, count),
        ring,
    ])
}

fn measure(cli: &Cli) -> Result<Memory, Failure> {
    let connections = cli.connections as usize;
    let mut config = EndpointConfig {
        ring_size: RING_BYTES,
        batches_in_flight: 4,
        raw_operations: 0,
        ..EndpointConfig::default()
    };
    config.max_send_wr = cli.send_wr;
    let send_wr = config.send_queue_wqebbs();
    let [connected, used] = endpoints(connections, &config, cli.packets)?;
    let [queue_pair, connecting, control_memory, ring] =
        parts(connections, send_wr, LANE_SLOTS, cli.packets)?;
    let rings = Held {
        heap: 2.0 * ring.heap,
        device: 2.0 * ring.device,
    };
    Ok(Memory {
        bytes_per_endpoint: used.sum(),
        bytes_before_first_call: connected.sum(),
        queue_pair,
        connecting,
        control_memory,
        rings,
        rest: [queue_pair, connecting, control_memory, rings]
            .into_iter()
            .fold(used, Held::less),
        endpoints: 2 * connections,
        ring_bytes: RING_BYTES,
        send_wr: send_wr.next_power_of_two(),
    })
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["bytes per endpoint", "heap", "device", "both"]);
        let rows = [
            ("queue pair", self.queue_pair),
            ("connecting it", self.connecting),
            ("control memory", self.control_memory),
            ("beside the rings' bytes", self.rings),
            ("copyrpc", self.rest),
        ];
        for (name, held) in rows {
            table.row([
                name.to_owned(),
                format!("{:.0}", held.heap),
                format!("{:.0}", held.device),
                format!("{:.0}", held.sum()),
            ]);
        }
        table.row([
            "beyond the rings".to_owned(),
            String::new(),
            String::new(),
            format!("{:.0}", self.bytes_per_endpoint),
        ]);
        write!(
            f,
            "{table}{} endpoints, send queues of {} WQEBBs",
            self.endpoints, self.send_wr
        )
    }
}

fn main() -> ExitCode {
    let (program, cli) = (Program("copyrpc_memory"), Cli::parse());
    let shown = measure(&cli).and_then(|memory| program.show(&memory, cli.json.as_ref(), None));
    shown.unwrap_or_else(|error| program.fail(1, &error))
}
