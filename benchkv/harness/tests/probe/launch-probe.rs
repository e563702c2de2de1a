//! A job without a measurement: the program of the launcher's tests, and the smallest example of a
//! binary on the harness.
//!
//! `launch-probe RANKS DEED [RANK]`: each rank gathers its process id and passes a barrier; then
//! RANK does DEED.

#![allow(clippy::print_stdout, reason = "a binary's output is its result")]

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::baseline::{cache_line_ns, unix_echo_rps};
use benchkv_harness::clock::Clock;
use benchkv_harness::launch::exchange::{Exchange, SocketExchange};
use benchkv_harness::launch::launcher::{EXIT_FOLLOWS, Launch};
use benchkv_harness::launch::role::role;

const WITHIN: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            say(&format!("launch-probe: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line in one write: ranks share standard error, and lines must not mix.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

fn run() -> Result<ExitCode, Failure> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let word = |at: usize| {
        args.get(at)
            .map(|arg| arg.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    match role()? {
        Some(exchange) => rank(exchange, &word(1), word(2).parse().unwrap_or(0)),
        None => {
            let ranks = word(0).parse()?;
            let limit = if word(1) == "overrun" {
                Duration::from_millis(500)
            } else {
                Duration::from_secs(20)
            };
            let grace = Duration::from_millis(if word(1) == "defy" { 60_000 } else { 500 });
            let launch = Launch {
                ranks,
                args,
                environment: Vec::new(),
                time_limit: limit,
                grace,
            };
            Ok(launch.run().map_or_else(
                |error| {
                    say(&format!("launcher: {error}"));
                    ExitCode::from(error.exit_code())
                },
                |()| ExitCode::SUCCESS,
            ))
        }
    }
}

fn rank(mut exchange: SocketExchange, deed: &str, doer: usize) -> Result<ExitCode, Failure> {
    let (me, never) = (exchange.rank(), || false);
    let mine = me == doer;
    if mine && deed == "die-at-start" {
        return Ok(ExitCode::from(3));
    }
    if deed == "wind-down" {
        exchange.catch_interrupts()?;
    }
    let pids = exchange.all_gather(std::process::id().to_string().as_bytes(), WITHIN, &never)?;
    let pids: Vec<String> = pids
        .into_iter()
        .map(String::from_utf8)
        .collect::<Result<_, _>>()?;
    println!("rank {me} of {} sees {}", exchange.size(), pids.join(" "));
    exchange.barrier(WITHIN, &never)?;
    match deed {
        "large" => {
            let part = vec![me as u8; 3 << 20];
            let parts = exchange.all_gather(&part, Duration::from_secs(10), &never)?;
            let intact = parts.iter().enumerate().all(|(rank, part)| {
                part.len() == 3 << 20 && part.iter().all(|byte| *byte == rank as u8)
            });
            println!("rank {me} large parts intact: {intact}");
            // Rank 1 sends more bytes than one part holds.
            let length = |rank| if rank == 1 { 5 << 20 } else { 1000 };
            let wholes =
                exchange.gather(&vec![me as u8; length(me)], Duration::from_secs(10), &never)?;
            let is_whole =
                |(rank, whole): (usize, &Vec<u8>)| *whole == vec![rank as u8; length(rank)];
            let intact = wholes.len() == if me == 0 { exchange.size() } else { 0 }
                && wholes.iter().enumerate().all(is_whole);
            println!("rank {me} gathered: {intact}");
        }
        "echo" if mine => {
            let rps = unix_echo_rps(Clock::detect(), Duration::from_millis(50))?;
            println!("echo {rps}");
        }
        "cache-line" if mine => {
            let ns = cache_line_ns(None, Clock::detect(), Duration::from_millis(50))?;
            println!("cache-line {ns}");
        }
        "give-up" if mine => exchange.sleep(Duration::from_secs(15), &|| true)?,
        "leave-early" if mine => return Ok(ExitCode::SUCCESS),
        "precede-killed" | "precede-failed" | "precede-stuck" if !mine => {
            return Ok(ExitCode::from(EXIT_FOLLOWS));
        }
        "precede-killed" => {
            let _ = exchange.sleep(Duration::from_secs(15), &never);
            std::process::abort();
        }
        "precede-failed" => {
            let _ = exchange.sleep(Duration::from_secs(15), &never);
            return Ok(ExitCode::from(7));
        }
        "fail" if mine => return Ok(ExitCode::from(7)),
        "wait" | "overrun" => exchange.sleep(Duration::from_secs(15), &never)?,
        // The sleep is longer than the watchdog of the tests, so only a kill ends the rank in time.
        "ignore" | "defy" | "precede-stuck" => {
            println!("rank {me} ignores everything");
            std::thread::sleep(Duration::from_secs(60));
        }
        "wind-down" => {
            exchange.sleep(Duration::from_secs(15), &never)?;
            exchange.sleep(Duration::from_secs(15), &never)?;
            let all = exchange.all_gather(&[exchange.is_interrupted().into()], WITHIN, &never)?;
            println!("rank {me} interrupted: {all:?}");
        }
        "pause" => exchange.sleep(Duration::from_secs(1), &never)?,
        "babble" if mine => {
            use std::os::fd::AsFd;
            let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
            std::os::unix::net::UnixStream::from(socket).write_all(&[0xa5; 100])?;
        }
        _ => {}
    }
    exchange.barrier(WITHIN, &never)?;
    Ok(ExitCode::SUCCESS)
}
