//! `copyrpc_udp`: the performance of plain UDP and of RDMA WRITEs by packets, which `scripts/peers
//! wire` compares with copyrpc by packets. Two threads on the loopback interface poll without a
//! sleep, as `copyrpc_bench --wait busy` does.

use std::fmt;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use benchkv_harness::Failure;
use benchkv_harness::launch::program::Program;
use benchkv_harness::report::JsonSink;
use clap::{Parser, ValueEnum};
use mlx5::{Access, ConnectOptions, Device, QpConfig, Signal, Write};
use serde::Serialize;

/// Measures UDP between two threads, and RDMA WRITEs by packets.
#[derive(Debug, Parser)]
#[command(name = "copyrpc_udp", version)]
struct Cli {
    /// Measured work.
    #[arg(long, value_enum)]
    mode: Mode,
    /// Bytes of a packet or of a WRITE, 1 to 1048576.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    bytes: u32,
    /// Packets or WRITEs under way, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    depth: u8,
    /// Seconds to measure, 0.01 to 60.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    duration: f64,
    /// Also write the result as one JSON document to a file, or to standard output with -.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    /// Each packet is returned: a call is one packet each way, with sendmmsg and recvmmsg.
    Calls,
    /// Packets in one direction; the receiver returns one packet for each `--depth` packets.
    Stream,
    /// WRITEs of one queue pair by packets.
    Write,
}

/// The result; its JSON form is this structure.
#[derive(Debug, Serialize)]
struct Measured {
    mode: Mode,
    bytes: u32,
    depth: u8,
    count: u64,
    per_s: f64,
    ns_each: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mode, bytes, depth, ..
        } = self;
        let (count, per_s, ns) = (self.count, self.per_s, self.ns_each);
        write!(
            f,
            "{mode:?}, {bytes} B, depth {depth}: {count}, {per_s:.0} per second, {ns:.0} ns each"
        )
    }
}

struct Batch {
    socket: UdpSocket,
    bytes: Vec<Vec<u8>>,
}

impl Batch {
    fn new(socket: UdpSocket, depth: usize, bytes: usize) -> Self {
        Self {
            socket,
            bytes: vec![vec![0; bytes]; depth],
        }
    }

    /// Calls `f` with the socket's descriptor and the message headers of the first `count` buffers.
    fn with<R>(&mut self, count: usize, f: impl FnOnce(i32, &mut [libc::mmsghdr]) -> R) -> R {
        let mut vectors: Vec<_> = self.bytes[..count]
            .iter_mut()
            .map(|buffer| libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            })
            .collect();
        let header = |vector: &mut libc::iovec| {
            // SAFETY: a header has only integers and raw pointers, for which zero bytes are valid.
            let mut header: libc::mmsghdr = unsafe { core::mem::zeroed() };
            (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (vector, 1);
            header
        };
        let mut headers: Vec<_> = vectors.iter_mut().map(header).collect();
        f(self.socket.as_raw_fd(), &mut headers)
    }

    fn send(&mut self, count: usize) -> io::Result<()> {
        let mut sent = 0;
        while sent < count {
            let result = self.with(count - sent, |fd, headers| {
                let count = headers.len() as u32;
                // SAFETY: there are `count` headers. Their vectors and buffers live until the call
                // returns, and nothing else uses them meanwhile.
                unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count, libc::MSG_DONTWAIT) }
            });
            match usize::try_from(result) {
                Ok(more) => sent += more,
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }

    /// Receives up to one packet per buffer. Returns the number of packets received.
    fn receive(&mut self) -> usize {
        let depth = self.bytes.len();
        let result = self.with(depth, |fd, headers| {
            let (headers, flags) = (headers.as_mut_ptr(), libc::MSG_DONTWAIT);
            // SAFETY: there are `depth` headers. Their vectors and buffers live until the call
            // returns, and nothing else uses them meanwhile. A null pointer means no timeout.
            unsafe { libc::recvmmsg(fd, headers, depth as u32, flags, core::ptr::null_mut()) }
        });
        usize::try_from(result).unwrap_or(0)
    }
}

/// Measures the calls or the stream of packets. Fails if nothing arrives for 100 ms: packets were
/// lost.
fn packets(cli: &Cli) -> Result<(u64, Duration), Failure> {
    let a = UdpSocket::bind(("127.0.0.1", 0))?;
    let b = UdpSocket::bind(("127.0.0.1", 0))?;
    a.connect(b.local_addr()?)?;
    b.connect(a.local_addr()?)?;
    let depth = usize::from(cli.depth);
    let bytes = cli.bytes as usize;
    let is_stream = cli.mode == Mode::Stream;
    let (mut near, mut far) = (Batch::new(a, depth, bytes), Batch::new(b, depth, bytes));
    let (start, is_over) = (Instant::now(), AtomicBool::new(false));
    let limit = Duration::from_secs_f64(cli.duration);
    thread::scope(|scope| {
        let echo = scope.spawn(|| -> io::Result<()> {
            let mut arrived = 0;
            while !is_over.load(Ordering::Relaxed) {
                let more = far.receive();
                arrived += more;
                if !is_stream {
                    far.send(more)?;
                } else if arrived >= depth {
                    far.send(1)?;
                    arrived -= depth;
                }
            }
            Ok(())
        });
        let mut count = 0;
        let mut last = Instant::now();
        let sent = near.send(depth);
        let result = loop {
            let more = near.receive();
            let now = Instant::now();
            count += (if is_stream { more * depth } else { more }) as u64;
            if sent.is_err() || now - start >= limit {
                break sent;
            }
            if more == 0 && now - last > Duration::from_millis(100) {
                break Err(io::Error::other(
                    "packets were lost: the buffers of the sockets hold less than --depth",
                ));
            }
            if more > 0 {
                last = now;
                if let Err(error) = near.send(if is_stream { more * depth } else { more }) {
                    break Err(error);
                }
            }
        };
        let elapsed = start.elapsed();
        is_over.store(true, Ordering::Relaxed);
        result?;
        echo.join()
            .map_err(|_| io::Error::other("the other thread panicked"))??;
        Ok((count, elapsed))
    })
}

fn writes(cli: &Cli) -> Result<(u64, Duration), Failure> {
    let open = || -> Result<_, Failure> {
        let device = Device::open("soft:roce=127.0.0.1,port=0,packets=all")?;
        let pd = device.alloc_pd()?;
        let (send_cq, recv_cq) = (device.create_cq(128)?, device.create_cq(128)?);
        let srq = pd.create_srq(1, 0)?;
        let config = QpConfig {
            max_send_wr: 128,
            ..QpConfig::default()
        };
        let qp = pd.create_qp(&send_cq, &recv_cq, &srq, &config)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = pd.alloc(cli.bytes as usize, access)?;
        Ok((device, send_cq, qp, mr))
    };
    let (tell, told) = std::sync::mpsc::channel();
    let (tell_back, told_back) = std::sync::mpsc::channel();
    let (is_over, open) = (&AtomicBool::new(false), &open);
    let gone = || io::Error::other("the other thread ended");
    thread::scope(|scope| {
        let target = scope.spawn(move || -> Result<(), Failure> {
            let (device, _cq, mut qp, mr) = open()?;
            tell.send((qp.address(), mr.addr(), mr.rkey()))
                .map_err(|_| gone())?;
            let address = told_back.recv().map_err(|_| gone())?;
            qp.connect(&address, &ConnectOptions::default())?;
            while !is_over.load(Ordering::Relaxed) {
                device.progress();
            }
            Ok(())
        });
        let run = || -> Result<(u64, Duration), Failure> {
            let (_device, mut cq, mut qp, mr) = open()?;
            let (address, addr, rkey) = told.recv().map_err(|_| gone())?;
            tell_back.send(qp.address()).map_err(|_| gone())?;
            qp.connect(&address, &ConnectOptions::default())?;
            let (start, limit) = (Instant::now(), Duration::from_secs_f64(cli.duration));
            let mut under_way = 0_u64;
            let mut count = 0;
            let mut failed = None;
            while start.elapsed() < limit {
                while under_way < cli.depth.into() {
                    let payload = mr.sge(0, cli.bytes)?;
                    let write = Write {
                        addr,
                        rkey,
                        payload,
                    };
                    qp.post(&write, Signal::Always, 0)?;
                    under_way += 1;
                }
                qp.ring();
                cq.poll(64, |cqe| {
                    let done = qp.complete_each(&cqe, |_: u64| ()) as u64;
                    failed = failed.take().or(cqe.result().err());
                    (under_way, count) = (under_way - done, count + done);
                });
                if let Some(error) = failed {
                    return Err(error.into());
                }
            }
            Ok((count, start.elapsed()))
        };
        let result = run();
        is_over.store(true, Ordering::Relaxed);
        target.join().map_err(|_| gone())??;
        result
    })
}

fn main() -> ExitCode {
    let (program, cli) = (Program("copyrpc_udp"), Cli::parse());
    let measured = if cli.mode == Mode::Write {
        writes(&cli)
    } else {
        packets(&cli)
    };
    let shown = measured.map(|(count, elapsed)| {
        let per_s = count as f64 / elapsed.as_secs_f64();
        let measured = Measured {
            mode: cli.mode,
            bytes: cli.bytes,
            depth: cli.depth,
            count,
            per_s,
            ns_each: 1e9 / per_s,
        };
        program.show(&measured, cli.json.as_ref(), None)
    });
    shown.unwrap_or_else(|error| program.fail(1, &error))
}
