//! The two processes of a job, and the order of its steps. Each measurement makes a server and its
//! clients anew. The server's process sends the offers, the clients' process answers, and the
//! server admits the clients. Then the load runs, and when all calls are answered the server sends
//! its account. The server has a thread of its own, while the main thread of its process sleeps in
//! the exchange. No exchange is inside a measured window.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::pin_current_thread;
use benchkv_harness::baseline::cache_line_ns;
use benchkv_harness::clock::Clock;
use benchkv_harness::launch::exchange::{Exchange, ExchangeError};
use mlx5::Device;
use serde::{Deserialize, Serialize};

use super::case::{Case, Kind};
use super::contestant::{Answers, Client, Counters, Server};
use super::copy_rpc::{CopyClient, CopyServer};
use super::load::{Load, Measured, Pace};
use super::options::{Job, Mode};
use super::scale_rpc::{ScaleClient, ScaleServer};
use super::send::{RcPort, SendClient, SendServer, UdPort};
use crate::held::Held;
use benchkv_harness::launch::program::RANKS;

/// Duration of the cache-line ping-pong (`--baseline`).
const BASELINE: Duration = Duration::from_millis(200);
/// Maximum time of each exchange of records, while the other process makes its server or clients.
const SETUP_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time for the server's process to end a measurement and send its account.
const MEET_LIMIT: Duration = Duration::from_secs(15);
/// Maximum time that the server may be silent with calls unanswered.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// The server's account of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Account {
    /// Name, transport and modes of the server's device.
    pub(crate) device: String,
    /// Number of requests executed.
    pub(crate) answered: u64,
    pub(crate) bad_requests: u64,
    pub(crate) registered_bytes: u64,
    /// Bytes that the server takes, on the heap and in its device's memory.
    pub(crate) held_bytes: u64,
    pub(crate) counters: Counters,
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) measured: Measured,
    pub(crate) account: Account,
}

/// Makes all measurements, as the process with the clients, and passes each result to `take`.
/// Returns the nanoseconds of a round trip of a bare cache line, if that was requested.
pub(crate) fn call_all(
    job: &Job,
    exchange: &mut dyn Exchange,
    clock: Clock,
    mut take: impl FnMut(&str, Kind, Outcome),
) -> Result<Option<f64>, Failure> {
    let core = job.placement.client_core(0, 0);
    let other = job.placement.client_core(1, 0);
    core.map_or(Ok(()), pin_current_thread)?;
    let raw = || cache_line_ns(core.zip(other), clock, BASELINE);
    let raw_cacheline_ns = job.options.baseline.then(raw).transpose()?;
    let pace = Pace {
        clock,
        wait: job.wait,
        warmup: job.warmup(),
        length: job.length,
        is_timed: job.options.mode == Mode::Latency,
        silence: SILENCE_LIMIT,
    };
    for (load, kind) in job.measurements() {
        let case = job.case(kind, load);
        let outcome = match kind {
            Kind::Scalerpc | Kind::ScalerpcOff => call::<ScaleClient>(job, &case, &pace, exchange),
            Kind::Copyrpc => call::<CopyClient>(job, &case, &pace, exchange),
            Kind::RcSend => call::<SendClient<RcPort>>(job, &case, &pace, exchange),
            Kind::UdSend => call::<SendClient<UdPort>>(job, &case, &pace, exchange),
        };
        let outcome = outcome.map_err(|error| format!("{kind}, {}: {error}", load.name))?;
        take(&load.name, kind, outcome);
    }
    Ok(raw_cacheline_ns)
}

/// Makes all measurements, as the process with the server.
pub(crate) fn serve_all(job: &Job, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    for (load, kind) in job.measurements() {
        let case = job.case(kind, load);
        let served = match kind {
            Kind::Scalerpc | Kind::ScalerpcOff => serve::<ScaleServer>(job, &case, exchange),
            Kind::Copyrpc => serve::<CopyServer>(job, &case, exchange),
            Kind::RcSend => serve::<SendServer<RcPort>>(job, &case, exchange),
            Kind::UdSend => serve::<SendServer<UdPort>>(job, &case, exchange),
        };
        served.map_err(|error| format!("{kind}, {}: {error}", load.name))?;
    }
    Ok(())
}

const fn never() -> bool {
    false
}

/// Sends the bytes `part` to the other process. Returns the bytes that the other process sends.
fn swap(
    exchange: &mut dyn Exchange,
    part: &[u8],
    within: Duration,
    give_up: &dyn Fn() -> bool,
) -> Result<Vec<u8>, Failure> {
    let other = RANKS - 1 - exchange.rank();
    let mut parts = exchange.all_gather(part, within, give_up)?;
    // There is one part for each rank, so the index is in range.
    Ok(if other < parts.len() {
        parts.swap_remove(other)
    } else {
        Vec::new()
    })
}

/// Splits concatenated records of the same length, one for each client.
fn split(records: &[u8], clients: usize) -> Result<Vec<&[u8]>, Failure> {
    if records.len() % clients != 0 {
        return Err(format!("{} bytes of records for {clients} clients", records.len()).into());
    }
    match records.len() / clients {
        0 => Ok(vec![&[]; clients]),
        bytes => Ok(records.chunks_exact(bytes).collect()),
    }
}

fn call<C: Client>(
    job: &Job,
    case: &Case,
    pace: &Pace,
    exchange: &mut dyn Exchange,
) -> Result<Outcome, Failure> {
    let spec = job.options.device.spec(job.options.shm_dir.as_deref());
    let offers = swap(exchange, &[], SETUP_LIMIT, &never)?;
    let is_shared = !case.kind.has_devices();
    let shared = is_shared.then(|| Device::open(&spec)).transpose()?;
    let open = |(number, offer)| match &shared {
        Some(device) => C::open(case, device, number, offer),
        None => C::open(case, &Device::open(&spec)?, number, offer),
    };
    let offers = split(&offers, case.clients)?.into_iter().enumerate();
    let pending = offers.map(open).collect::<Result<Vec<_>, _>>()?;
    let (pending, said): (Vec<_>, Vec<_>) = pending.into_iter().unzip();
    let _nothing = swap(exchange, &said.concat(), SETUP_LIMIT, &never)?;
    let admissions = swap(exchange, &[], SETUP_LIMIT, &never)?;
    let admissions = split(&admissions, case.clients)?.into_iter();
    let pending = pending.into_iter().zip(admissions);
    let clients = pending
        .map(|(pending, admission)| C::admitted(pending, admission))
        .collect::<Result<Vec<_>, _>>()?;

    let mut load = Load::new(clients, case, pace);
    let measured = load.run(&mut || Ok(exchange.sleep(Duration::ZERO, &never)?))?;
    // The clients in `load` live until the server has given its account.
    exchange.barrier(MEET_LIMIT, &never)?;
    let account = swap(exchange, &[], MEET_LIMIT, &never)?;
    Ok(Outcome {
        measured,
        account: serde_json::from_slice(&account)?,
    })
}

type ServerThread<'scope> = ScopedJoinHandle<'scope, Result<Account, Failure>>;

fn serve<S: Server>(job: &Job, case: &Case, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    let stop = &AtomicBool::new(false);
    let account = std::thread::scope(|scope| {
        let (tell, told) = channel();
        let (mailbox, said) = channel();
        let work = move || answer::<S>(job, case, stop, &tell, &said);
        let thread = std::thread::Builder::new()
            .name("server".to_owned())
            .spawn_scoped(scope, work)?;
        let conducted = conduct(job, exchange, &thread, &told, &mailbox);
        stop.store(true, Ordering::Relaxed);
        drop(mailbox);
        let account = thread.join().unwrap_or_else(|_| {
            Err("the server's thread panicked: this is a defect, please report it".into())
        });
        match (conducted, account) {
            (Err(why), _) if is_elsewhere(&why) => Err(why),
            (Err(_), Err(cause)) => Err(cause),
            (conducted, account) => conducted.and(account),
        }
    })?;
    swap(exchange, &serde_json::to_vec(&account)?, MEET_LIMIT, &never)?;
    Ok(())
}

/// Returns whether the other process or the launcher failed, rather than the server's thread.
fn is_elsewhere(why: &Failure) -> bool {
    why.downcast_ref::<ExchangeError>()
        .is_some_and(|why| *why != ExchangeError::GivenUp)
}

/// Runs the main thread of the server's process: passes records between the server's thread and the
/// other process, then waits for the end of the load.
fn conduct(
    job: &Job,
    exchange: &mut dyn Exchange,
    thread: &ServerThread<'_>,
    told: &Receiver<Vec<u8>>,
    mailbox: &Sender<Vec<u8>>,
) -> Result<(), Failure> {
    let has_ended = || thread.is_finished();
    swap(exchange, &told.recv()?, SETUP_LIMIT, &has_ended)?;
    mailbox.send(swap(exchange, &[], SETUP_LIMIT, &has_ended)?)?;
    swap(exchange, &told.recv()?, SETUP_LIMIT, &has_ended)?;
    Ok(exchange.barrier(job.time_limit(), &has_ended)?)
}

/// Runs the server's thread: answers requests until the main thread sets `stop`, after all calls
/// are answered or the job has failed.
fn answer<S: Server>(
    job: &Job,
    case: &Case,
    stop: &AtomicBool,
    tell: &Sender<Vec<u8>>,
    said: &Receiver<Vec<u8>>,
) -> Result<Account, Failure> {
    let core = job.placement.client_core(1, 0);
    core.map_or(Ok(()), pin_current_thread)?;
    let answers = Answers::new(case);
    let spec = job.options.device.spec(job.options.shm_dir.as_deref());
    let ((mut server, offers), held) = Held::by(|| S::open(case, &spec, answers))?;
    tell.send(offers.concat())?;
    let admissions = server.admit(&split(&said.recv()?, case.clients)?)?;
    tell.send(admissions.concat())?;
    let mut waiter = job.wait.waiter();
    loop {
        if server.step()? > 0 {
            waiter.busy();
        } else if stop.load(Ordering::Relaxed) {
            break;
        } else {
            let mut slept = Ok(());
            waiter.idle(|| slept = server.sleep());
            slept?;
        }
    }
    let info = server.device_info();
    Ok(Account {
        device: format!("{}, {}, {}", info.name, info.transport, info.modes),
        answered: server.answers().answered(),
        bad_requests: server.answers().bad_requests(),
        registered_bytes: server.registered_bytes(),
        held_bytes: held.bytes()?,
        counters: server.counters(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_shared_out_to_the_clients() {
        assert_eq!(split(b"abcd", 2).unwrap(), [b"ab", b"cd"]);
        assert_eq!(split(b"", 2).unwrap(), [b"", b""]);
        assert!(split(b"abc", 2).is_err());
    }
}
