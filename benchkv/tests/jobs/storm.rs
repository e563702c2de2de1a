//! Jobs of random shape, in which a process is ended or stopped at a random moment: no hang, a
//! matching exit status and last line, a result that is complete or absent, nothing lost, nothing
//! left behind.
//!
//! A seed gives the shape, the victim, the signal and the moment: `BENCHKV_TEST_SEED` repeats one.
//! `BENCHKV_TEST_SCALE` above 1 is the factor of the number of jobs, which then have new seeds in
//! each run.

use std::fs;
use std::time::{Duration, SystemTime};

use benchkv::result::JobResult;
use fastrand::Rng;

use crate::job::{BACKENDS, Ended, Job, Process, Scratch, benchkv, turn};

/// Number of jobs at scale 1.
const JOBS: u64 = 8;

/// The event of a job.
#[derive(Debug, Clone, Copy)]
enum Blow {
    /// A rank is killed.
    Rank(usize),
    /// A rank is stopped for a while.
    Pause(usize),
    /// The launcher is killed.
    Launcher,
    /// The launcher, or every process, is asked to end the job.
    Interrupt { signal: libc::c_int, all: bool },
}

/// A job and its event.
#[derive(Debug)]
struct Story {
    args: Vec<String>,
    blow: Blow,
    moment: Duration,
}

impl Story {
    fn new(seed: u64) -> Self {
        let rng = &mut Rng::with_seed(seed);
        let ranks = rng.usize(2..=4);
        let backend = BACKENDS[rng.usize(..BACKENDS.len())];
        let blow = match rng.usize(..8) {
            0 | 1 => Blow::Rank(rng.usize(..ranks)),
            2 | 3 => Blow::Pause(rng.usize(..ranks)),
            4 => Blow::Launcher,
            _ => Blow::Interrupt {
                signal: [libc::SIGINT, libc::SIGTERM, libc::SIGHUP][rng.usize(..3)],
                all: rng.bool(),
            },
        };
        let numbers = [
            ("--ranks", ranks),
            ("--queue-depth", [1, 8, 256][rng.usize(..3)]),
            ("--client-threads", rng.usize(1..=2)),
        ];
        let words = [
            ("--backend", backend),
            ("--wait", ["auto", "yield", "event"][rng.usize(..3)]),
        ];
        let windows = [("--warmup", "0.1"), ("--duration", "0.2"), ("--runs", "3")];
        let numbers = numbers.map(|(flag, number)| [flag.to_owned(), number.to_string()]);
        let words = words
            .into_iter()
            .chain(windows)
            .map(|(flag, word)| [flag.to_owned(), word.to_owned()]);
        let args = numbers.into_iter().chain(words).flatten().collect();
        Self {
            args,
            blow,
            moment: Duration::from_millis(rng.u64(..2500)),
        }
    }

    /// Applies the event to the job. Returns the line by which the job has to name the victim, if
    /// any.
    fn strike(&self, job: &Job, ranks: &[Process]) -> Option<String> {
        // A process that has ended and is not yet waited for takes signals without effect.
        let kill =
            |process: Process| (!process.has_ended()).then(|| process.try_signal(libc::SIGKILL));
        match self.blow {
            Blow::Rank(rank) => {
                kill(ranks[rank])?;
                Some(format!(
                    "benchkv: rank {rank} was killed by signal 9 (SIGKILL)"
                ))
            }
            Blow::Pause(rank) => {
                ranks[rank].try_signal(libc::SIGSTOP);
                std::thread::sleep(Duration::from_millis(300));
                ranks[rank].try_signal(libc::SIGCONT);
                None
            }
            Blow::Launcher => {
                kill(job.launcher())?;
                None
            }
            Blow::Interrupt { signal, all } => {
                job.launcher().try_signal(signal);
                if all {
                    job.group().try_signal(signal);
                }
                Some(format!("benchkv: interrupted by signal {signal} "))
            }
        }
    }

    /// Returns the exit status that the blow causes. The status is also 0 if the job had ended
    /// before.
    fn status(&self) -> Option<i32> {
        match self.blow {
            Blow::Rank(_) => Some(1),
            Blow::Pause(_) => Some(0),
            Blow::Launcher => None,
            Blow::Interrupt { signal, .. } => Some(128 + signal),
        }
    }
}

/// Asserts that an existing result is complete and sound.
fn assert_result(text: &str, ended: &Ended) {
    let result: JobResult = serde_json::from_str(text).unwrap();
    assert!(
        result.is_sound(),
        "{} lost: {}",
        result.fate.lost,
        ended.stderr
    );
    assert_eq!(
        result.fate.issued,
        result.fate.completed + result.fate.errors + result.fate.unfinished
    );
    assert!(
        result.interrupted || (result.runs.len(), result.fate.unfinished) == (3, 0),
        "{} runs",
        result.runs.len()
    );
}

fn play(seed: u64) {
    let story = Story::new(seed);
    eprintln!(
        "BENCHKV_TEST_SEED={seed}: {:?} after {:?} of {}",
        story.blow,
        story.moment,
        story.args.join(" ")
    );
    let _turn = turn();
    let dir = Scratch::in_memory();
    let files = Scratch::on_disk();
    let (json, csv) = (
        files.path().join("result.json"),
        files.path().join("result.csv"),
    );
    let mut command = benchkv(&[]);
    command
        .args(&story.args)
        .arg("--shm-dir")
        .arg(dir.path())
        .arg("--json")
        .arg(&json)
        .arg("--output")
        .arg(&csv);
    let job = Job::start(&mut command);
    let ranks: Vec<Process> = (0..story.args[1].parse().unwrap())
        .map(|rank| job.rank(rank))
        .collect();
    std::thread::sleep(story.moment);
    let clients: Vec<Process> = ranks.iter().flat_map(|rank| rank.children()).collect();
    let line = story.strike(&job, &ranks);
    for process in ranks.iter().chain(&clients) {
        job.until("every process has ended", || {
            process.has_ended().then_some(())
        });
    }
    let ended = job.end();
    let code = ended.status.code();
    assert!(
        code == Some(0) || code == story.status(),
        "{}: {}",
        ended.status,
        ended.stderr
    );
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    if let Some(line) = line.filter(|_| code != Some(0)) {
        assert!(
            ended
                .stderr
                .lines()
                .last()
                .is_some_and(|last| last.starts_with(&line)),
            "{line:?} is not the last line: {}",
            ended.stderr
        );
    }
    match fs::read_to_string(&json) {
        Ok(text) => assert_result(&text, &ended),
        Err(error) => assert_ne!(code, Some(0), "{error}: {}", ended.stderr),
    }
    assert!(code != Some(0) || csv.exists(), "{}", ended.stderr);
    // A killed launcher leaves the files of its ranks to the next job.
    if !matches!(story.blow, Blow::Launcher) {
        dir.assert_empty();
        assert!(
            files
                .names()
                .iter()
                .all(|name| name.starts_with("result.") && !name.ends_with(".partial")),
            "{:?}",
            files.names()
        );
    } else {
        // The next job has a number of operations, because a loaded machine may do none in a length
        // of time.
        let next = Job::start(benchkv(&["--ops", "100"]).arg("--shm-dir").arg(dir.path())).end();
        assert!(next.status.success(), "{}: {}", next.status, next.stderr);
        dir.assert_empty();
    }
}

#[test]
fn a_storm_leaves_no_job_hanging_no_wrong_result_and_nothing_behind() {
    let variable = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|value| value.parse::<u64>().unwrap())
    };
    let scale = variable("BENCHKV_TEST_SCALE").unwrap_or(1);
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
    match (variable("BENCHKV_TEST_SEED"), scale) {
        (Some(seed), _) => play(seed),
        (None, 1) => (0..JOBS).for_each(play),
        (None, scale) => (0..scale * JOBS).for_each(|job| play(now + job)),
    }
}
