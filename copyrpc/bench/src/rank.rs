//! One of the two processes, and the order of a job: device and endpoints, exchange of records,
//! connections; then the warm-up and each run, between which the two meet while nothing is
//! outstanding; then the reports. What is measured is the caller's; no meeting is inside a window.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use bench::load::Failure;
use bench::program::swap;
use harness::affinity::pin_current_thread;
use harness::clock::{Clock, ClockSource};
use harness::environment::peak_rss_bytes;
use harness::hist::LatencyHistogram;
use launch::exchange::Exchange;
use launch::pingpong::{PingPong, PingPongResult};
use serde::{Deserialize, Serialize};

use crate::client::Load;
use crate::options::{Length, Options};
use crate::server::{Control, News, serve};
use crate::setup::{Counts, Moment, Setup};

/// Duration of the baseline's measurement.
const BASELINE: Duration = Duration::from_millis(200);
/// Maximum time for the slower process to make and connect its endpoints.
const SETUP_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time for the two processes to meet when nothing is outstanding.
const MEET_LIMIT: Duration = Duration::from_secs(15);

const STUCK: &str = "the answering thread does not answer";

/// The report of a process at the end.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankReport {
    pub(crate) device: String,
    /// Number of wrong payloads.
    pub(crate) bad_payloads: u64,
    pub(crate) peak_rss_bytes: u64,
    /// Counters of each run.
    pub(crate) counts: Vec<Counts>,
    /// The caller's measurements.
    pub(crate) caller: Option<CallerReport>,
}

/// The caller's measurements.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CallerReport {
    pub(crate) clock: ClockSource,
    pub(crate) raw_cacheline: Option<PingPongResult>,
    /// Calls and nanoseconds of each run.
    pub(crate) windows: Vec<(u64, u64)>,
    /// Samples of each run. In latency mode its round-trip times in ns; in rate mode the time per
    /// call of each block of polls in ps.
    pub(crate) latencies: Vec<LatencyHistogram>,
}

/// Runs this process's part of the job.
pub(crate) fn run(options: &Options, exchange: &mut dyn Exchange) -> Result<RankReport, Failure> {
    if exchange.rank() == 0 {
        call(options, exchange)
    } else {
        answer(options, exchange)
    }
}

const fn never() -> bool {
    false
}

/// Rank 0: calls.
fn call(options: &Options, exchange: &mut dyn Exchange) -> Result<RankReport, Failure> {
    let cores = options
        .plan
        .client_core(0, 0)
        .zip(options.plan.client_core(1, 0));
    if let Some((core, _)) = cores {
        pin_current_thread(core)?;
    }
    let clock = Clock::detect();
    let raw_cacheline = match options.baseline {
        true => Some(
            PingPong {
                cores,
                duration: BASELINE,
            }
            .measure(&clock)?,
        ),
        false => None,
    };
    let setup = Setup::open(options)?;
    let device = setup.device();
    let records = swap(exchange, &setup.records(), SETUP_LIMIT, &never)?;
    let (context, endpoints) = setup.connect(&records)?;
    exchange.barrier(SETUP_LIMIT, &never)?;

    let job = &options.job;
    let mut load = Load::new(job, clock, &endpoints);
    let mut caller = CallerReport {
        clock: clock.source(),
        raw_cacheline,
        windows: Vec::new(),
        latencies: Vec::new(),
    };
    let mut counts = Vec::new();
    if job.warmup_s > 0.0 {
        load.run(&context, Length::Seconds(job.warmup_s), false)?;
    }
    meet(exchange)?;
    let mut before = Moment::now(&context);
    for _ in 0..job.runs {
        let window = load.run(&context, job.length, true)?;
        caller.windows.push((window.calls, window.elapsed_ns));
        caller.latencies.push(load.take_latencies());
        let after = Moment::now(&context);
        counts.push(Counts::between(&before, &after));
        before = after;
        meet(exchange)?;
    }
    Ok(RankReport {
        device,
        bad_payloads: load.bad_replies(),
        peak_rss_bytes: peak_rss_bytes(),
        counts,
        caller: Some(caller),
    })
}

/// The caller's side of the end of a phase: the other one counts between the two.
fn meet(exchange: &mut dyn Exchange) -> Result<(), Failure> {
    exchange.barrier(MEET_LIMIT, &never)?;
    Ok(exchange.barrier(MEET_LIMIT, &never)?)
}

type Answerer<'scope> = ScopedJoinHandle<'scope, Result<(), Failure>>;

/// Rank 1: answers, in a thread of its own.
fn answer(options: &Options, exchange: &mut dyn Exchange) -> Result<RankReport, Failure> {
    let core = options.plan.client_core(1, 0);
    let control = &Control::default();
    std::thread::scope(|scope| {
        let (tell, news) = channel();
        let (mailbox, records) = channel();
        let work = move || serve(options, core, control, &tell, &records);
        let thread = std::thread::Builder::new()
            .name("answerer".to_owned())
            .spawn_scoped(scope, work)?;
        let outcome = conduct(options, exchange, control, &thread, &news, &mailbox);
        control.stop();
        drop(mailbox);
        let ended = thread.join().unwrap_or_else(|_| {
            Err("the answering thread panicked: this is a defect, please report it".into())
        });
        // A thread that failed has the reason of what failed here.
        outcome.or_else(|error| ended.and(Err(error)))
    })
}

/// The main thread of rank 1.
fn conduct(
    options: &Options,
    exchange: &mut dyn Exchange,
    control: &Control,
    thread: &Answerer<'_>,
    news: &Receiver<News>,
    mailbox: &Sender<Vec<u8>>,
) -> Result<RankReport, Failure> {
    let has_ended = || thread.is_finished();
    let News::Open { device, records } = next(news, thread, SETUP_LIMIT)? else {
        return Err(STUCK.into());
    };
    // A thread that has ended is noticed by the next wait.
    let _ = mailbox.send(swap(exchange, &records, SETUP_LIMIT, &has_ended)?);
    let News::Connected = next(news, thread, SETUP_LIMIT)? else {
        return Err(STUCK.into());
    };
    exchange.barrier(SETUP_LIMIT, &has_ended)?;

    let mut report = RankReport {
        device,
        bad_payloads: 0,
        peak_rss_bytes: 0,
        counts: Vec::new(),
        caller: None,
    };
    for phase in 0..=options.job.runs {
        exchange.barrier(options.time_limit(), &has_ended)?;
        control.end_phase(phase + 1);
        let News::Phase {
            counts,
            bad_requests,
        } = next(news, thread, MEET_LIMIT)?
        else {
            return Err(STUCK.into());
        };
        report.bad_payloads = bad_requests;
        // The first phase is the warm-up.
        if phase > 0 {
            report.counts.push(counts);
        }
        exchange.barrier(MEET_LIMIT, &has_ended)?;
    }
    report.peak_rss_bytes = peak_rss_bytes();
    Ok(report)
}

/// Waits for the next message of the thread. Fails if the thread ends, or takes too long.
fn next(news: &Receiver<News>, thread: &Answerer<'_>, within: Duration) -> Result<News, Failure> {
    const INTERVAL: Duration = Duration::from_millis(10);
    for _ in 0..within.as_millis() / INTERVAL.as_millis() {
        match news.recv_timeout(INTERVAL) {
            Ok(news) => return Ok(news),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if thread.is_finished() => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    Err(STUCK.into())
}
