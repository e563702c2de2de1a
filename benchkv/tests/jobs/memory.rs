//! Compares the memory that the connections and channels of a job take with the memory in the plan.

use benchkv::cli::Cli;
use benchkv::options::Options;
use clap::Parser;
use engine::backend::composed::Composed;
use engine::backend::{Endpoints, Records, Workers};
use engine::topology::{Peer, Worker};

use crate::job::{Scratch, turn};

/// Returns the proportional set size of this process, in bytes. A page that the process maps
/// several times counts once.
fn held() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The daemons of 24 ranks in this process, each connected to the 23 others. A large difference
/// between the measured and the expected memory shows a wrong constant, with which jobs would be
/// refused wrongly.
#[test]
fn connections_take_about_what_was_reckoned() {
    const RANKS: usize = 24;
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = [
        "benchkv",
        "--backend",
        "delegation",
        "--ranks",
        &RANKS.to_string(),
        "--key-range",
        "1",
        "--shm-dir",
    ];
    let options = Options::resolve(
        Cli::try_parse_from(args.iter().copied().chain([dir.path().to_str().unwrap()])).unwrap(),
    )
    .unwrap();
    let before = held();
    let open = |rank| {
        Composed::new(&options.job, options.site(rank).unwrap())
            .unwrap()
            .open_daemon(0)
            .unwrap()
    };
    let mut daemons: Vec<_> = (0..RANKS).map(open).collect();
    let records: Vec<Records> = daemons.iter_mut().map(Endpoints::records).collect();
    let daemon_of = |rank| Peer {
        rank,
        worker: Worker::Daemon(0),
    };
    for (rank, daemon) in daemons.iter_mut().enumerate() {
        let for_it = |(from, records): (usize, &Records)| {
            let record = records.iter().find(|(to, _)| *to == daemon_of(rank))?;
            Some((daemon_of(from), record.1.clone()))
        };
        daemon
            .connect(
                &records
                    .iter()
                    .enumerate()
                    .filter_map(for_it)
                    .collect::<Records>(),
            )
            .unwrap();
    }
    let (taken, reckoned) = (held() - before, options.memory.connections_bytes);
    // Rings and completion queues that were never written take no memory.
    assert!(
        taken < reckoned * 5 / 4 && taken > reckoned / 2,
        "{taken} bytes taken, {reckoned} reckoned"
    );
}

/// With many daemons and deep queues most of a job's memory is their tables of calls to each other.
#[test]
fn channels_of_many_daemons_take_no_more_than_was_reckoned() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = [
        "benchkv",
        "--backend",
        "meta",
        "--server-threads",
        "8",
        "--client-threads",
        "4",
        "--queue-depth",
        "512",
        "--key-range",
        "1",
    ];
    let options = Options::resolve(
        Cli::try_parse_from(
            args.into_iter()
                .chain(["--shm-dir", dir.path().to_str().unwrap()]),
        )
        .unwrap(),
    )
    .unwrap();
    let before = held();
    let rank = Composed::new(&options.job, options.site(0).unwrap()).unwrap();
    let daemons: Vec<_> = (0..8)
        .map(|daemon| rank.open_daemon(daemon).unwrap())
        .collect();
    let (taken, reckoned) = (held() - before, options.memory.channels_bytes / 2);
    drop(daemons);
    assert!(
        taken < reckoned && taken > reckoned / 2,
        "{taken} bytes taken, {reckoned} reckoned"
    );
}
