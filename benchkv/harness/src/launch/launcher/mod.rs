//! Starts the ranks of a job on this host and supervises them to the end.
//!
//! The launcher is not a rank. Its ranks are its direct children, run the same executable with the
//! same arguments, and have a socket to the launcher as standard input. No named object is created.
//! The launcher relays their exchange (`relay`). When a rank fails, the launcher sends the rank and
//! the reason to the other ranks, gives them a grace period to end by themselves, and then kills
//! the remaining ranks. It does the same when the user interrupts it, except that ranks may still
//! exchange their last parts; a later interrupt kills them. If the launcher is killed, the kernel
//! kills the ranks.
//!
//! A terminal, `timeout` or a service manager signals all processes of a job at once. Only the
//! launcher acts: ranks ignore the signals that end a job in order. `timeout` signals the launcher
//! twice, so a signal shortly after an interrupt counts as part of that interrupt.
//!
//! When a rank is killed, another rank may detect that and end before the launcher sees either end.
//! The launcher reports the cause: a killed rank rather than a failed rank, and a failed rank
//! rather than a rank with the status [`EXIT_FOLLOWS`], which ended because of another rank. If all
//! ranks that ended by themselves have that status, the launcher reports the ranks that it had to
//! kill: they were stopped, or stuck.
//!
//! Only rank 0 has the launcher's standard output; other ranks write to standard error.

mod relay;

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use thiserror::Error;

use crate::clock::Clock;
pub use crate::launch::child::Ended;
use crate::launch::child::OwnChild;
use crate::launch::exchange::channel::Channel;
use crate::launch::exchange::frame::{Frame, MAX_RANKS};
use crate::launch::exchange::rank_list;
use crate::launch::role::RankOf;
use crate::launch::sys::{self, EndSignals};
use relay::Relay;

/// Exit status of a rank that ended because another rank, or the job, ended.
pub const EXIT_FOLLOWS: u8 = 5;
const FOLLOWS: Ended = Ended::Code(EXIT_FOLLOWS as i32);
/// Maximum time after a first signal in which a further signal counts as the same request.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// A job to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Number of ranks, 1 to [`Launch::MAX_RANKS`].
    pub ranks: usize,
    /// Arguments of every rank, without the program's name.
    pub args: Vec<OsString>,
    /// Environment variables of every rank, in addition to those of this process.
    pub environment: Vec<(&'static str, &'static str)>,
    /// Maximum time of the job. The launcher ends a job that takes longer.
    pub time_limit: Duration,
    /// Maximum time for ranks to end by themselves after a failure or an interrupt.
    pub grace: Duration,
}

/// The reason why the job failed. When it is returned, all ranks have ended.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The number of ranks is outside its range.
    #[error("{ranks} ranks asked for; legal are 1 to {MAX_RANKS}")]
    Ranks {
        /// The given number.
        ranks: usize,
    },
    /// A rank could not be started.
    #[error("rank {rank} could not be started: {source}")]
    Start {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// A rank ended with a failure, which was the first failure or the cause of the first failure.
    #[error("rank {rank} {how}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The end of the rank: its exit status or signal.
        how: Ended,
    },
    /// A rank ended, with status 0, while the others were waiting for it.
    #[error("rank {rank} ended before the others")]
    EndedEarly {
        /// The rank.
        rank: usize,
    },
    /// Ranks did not take part in an exchange in time, or did not end after the others had ended.
    #[error("rank {} did not answer within {within:?}: stopped, or stuck", rank_list(.ranks))]
    Missing {
        /// The ranks.
        ranks: Vec<usize>,
        /// Time that the other ranks, or the launcher, waited.
        within: Duration,
    },
    /// A rank sent bytes that are not the exchange protocol.
    #[error("rank {rank} broke the exchange protocol: it {what}")]
    Protocol {
        /// The rank.
        rank: usize,
        /// The violation.
        what: String,
    },
    /// The job took too long.
    #[error("the job did not end within {limit:?}; rank {} had not finished", rank_list(.running))]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Ranks that were still running.
        running: Vec<usize>,
    },
    /// A signal asked the launcher to end.
    #[error("interrupted by signal {signal} ({})", sys::signal_name(*.signal))]
    Interrupted {
        /// SIGINT, SIGTERM or SIGHUP.
        signal: i32,
    },
    /// A system call of the launcher itself failed.
    #[error("the launcher failed: {0}")]
    System(#[from] io::Error),
}

impl LaunchError {
    /// Returns the exit status for the launcher: 128 + signal after an interrupt, as shells report
    /// it; the status of the failed rank, unless the rank was killed or ended because of another
    /// rank; otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted { signal } => u8::try_from(128 + signal).unwrap_or(1),
            Self::RankFailed {
                how: how @ Ended::Code(code),
                ..
            } if *how != FOLLOWS => u8::try_from(*code).unwrap_or(1),
            _ => 1,
        }
    }

    /// Returns whether this failure is nearer to the cause than `recorded`, which was detected
    /// earlier.
    fn precedes(&self, recorded: &Self) -> bool {
        let (Self::RankFailed { how: seen, .. }, Self::RankFailed { how: before, .. }) =
            (self, recorded)
        else {
            return false;
        };
        let distance = |how: &Ended| match how {
            Ended::Signal(_) => 0,
            Ended::Code(_) => 1 + u8::from(*how == FOLLOWS),
        };
        distance(seen) < distance(before)
    }
}

impl Launch {
    /// Maximum number of ranks of one job.
    pub const MAX_RANKS: usize = MAX_RANKS;

    /// Runs the job. Blocks until all ranks have ended and are reaped. Call it from the main
    /// thread, because ranks end with the thread that started them. From this call on SIGINT,
    /// SIGTERM and SIGHUP are caught, also after the job: the process then only reports the end of
    /// the job, and a late or repeated signal must not prevent that.
    ///
    /// # Errors
    /// The first failure, as [`LaunchError`].
    pub fn run(&self) -> Result<(), LaunchError> {
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return Err(LaunchError::Ranks { ranks: self.ranks });
        }
        let signals = EndSignals::take()?;
        let ranks = (0..self.ranks)
            .map(|rank| RankProcess::start(rank, self))
            .collect::<Result<Vec<_>, _>>()?;
        let clock = Clock::monotonic();
        let limit_ns = clock.now_ns().saturating_add(as_ns(self.time_limit));
        let mut job = Job {
            ranks,
            relay: Relay::new(self.ranks),
            signals,
            clock,
            grace: self.grace,
            interrupt: None,
            failure: None,
            kill_at_ns: None,
            has_killed: false,
        };
        while job.is_running() {
            job.wait(limit_ns)?;
            job.take_signals();
            job.relay_frames()?;
            job.reap()?;
            job.keep_time(limit_ns, self.time_limit);
        }
        // A failure after an interrupt may be its consequence, so the interrupt is returned.
        job.interrupt
            .map(|(signal, _)| LaunchError::Interrupted { signal })
            .or(job.failure)
            .map_or(Ok(()), Err)
    }
}

/// The process of a rank. Dropping it kills the process.
struct RankProcess {
    child: OwnChild,
    channel: Channel,
    ended: Option<Ended>,
}

impl RankProcess {
    fn start(rank: usize, launch: &Launch) -> Result<Self, LaunchError> {
        let failed = |source| LaunchError::Start { rank, source };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let stdout = match rank {
            0 => Stdio::inherit(),
            _ => Stdio::from(io::stderr().as_fd().try_clone_to_owned().map_err(failed)?),
        };
        let size = launch.ranks;
        let role = RankOf { rank, size }.encode();
        let child = OwnChild::spawn(&role, &launch.args, &launch.environment, theirs, stdout)
            .map_err(failed)?;
        Ok(Self {
            child,
            channel: Channel::new(ours).map_err(failed)?,
            ended: None,
        })
    }
}

struct Job {
    ranks: Vec<RankProcess>,
    relay: Relay,
    signals: EndSignals,
    clock: Clock,
    grace: Duration,
    /// The signal with which the user interrupted a job that was not ending yet, and its time in
    /// ns.
    interrupt: Option<(i32, u64)>,
    /// The first failure, or its cause.
    failure: Option<LaunchError>,
    /// Time at which the remaining ranks are killed, in ns. Set by an interrupt or failure.
    kill_at_ns: Option<u64>,
    /// Whether the launcher has killed ranks; then a killed rank is no longer a cause of failure.
    has_killed: bool,
}

impl Job {
    fn is_running(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ended.is_none())
    }

    fn running(&self) -> Vec<usize> {
        let ranks = self.ranks.iter().enumerate();
        let running = ranks.filter(|(_, process)| process.ended.is_none());
        running.map(|(rank, _)| rank).collect()
    }

    /// Sleeps until a rank, a signal or a deadline needs attention.
    fn wait(&self, limit_ns: u64) -> io::Result<()> {
        let ends_ns = [self.kill_at_ns, self.relay.deadline_ns()];
        let next_ns = ends_ns.into_iter().flatten().fold(limit_ns, u64::min);
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
            fds.push(PollFd::new(&rank.child, PollFlags::IN));
            // A closed socket is always ready, and would end each wait at once. It needs no
            // attention: the end of the process follows.
            if !rank.channel.is_closed() {
                fds.push(PollFd::new(&rank.channel, rank.channel.events()));
            }
        }
        let left_ns = next_ns.saturating_sub(self.clock.now_ns());
        sys::poll(&mut fds, Duration::from_nanos(left_ns))
    }

    fn take_signals(&mut self) {
        for signal in self.signals.pending() {
            let now_ns = self.clock.now_ns();
            match (self.interrupt, self.kill_at_ns) {
                (Some((_, at_ns)), _) if now_ns.saturating_sub(at_ns) < as_ns(SAME_REQUEST) => {}
                // A second interrupt, or an interrupt while the job is ending, ends the grace
                // period.
                (_, Some(_)) => self.kill_at_ns = Some(0),
                (_, None) => {
                    self.interrupt = Some((signal, now_ns));
                    self.end_with(&Frame::Interrupted);
                }
            }
        }
    }

    fn relay_frames(&mut self) -> io::Result<()> {
        let now_ns = self.clock.now_ns();
        for rank in 0..self.ranks.len() {
            let Some(process) = self.ranks.get_mut(rank) else {
                break;
            };
            process.channel.push()?;
            process.channel.pull()?;
            loop {
                let process = self.ranks.get_mut(rank);
                let next = process.map_or(Ok(None), |process| process.channel.next());
                let answer = match next {
                    Ok(None) => break,
                    Ok(Some(frame)) => self.relay.arrived(rank, frame, now_ns),
                    Err(error) => Err(format!("sent {error}")),
                };
                match answer {
                    Ok(None) => {}
                    Ok(Some(frame)) => self.broadcast(&frame)?,
                    Err(what) => {
                        let died = Frame::Died {
                            rank: rank as u32,
                            how: format!("broke the exchange protocol: it {what}"),
                        };
                        self.fail(LaunchError::Protocol { rank, what }, died);
                        self.kill(rank);
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Records which ranks have ended. If several ranks ended at the same time and one was killed,
    /// the killed rank is the cause: the others may have ended because of it.
    fn reap(&mut self) -> io::Result<()> {
        let mut ended = Vec::new();
        let ranks = self.ranks.iter_mut().enumerate();
        for (rank, process) in ranks.filter(|(_, process)| process.ended.is_none()) {
            if let Some(how) = process.child.ended()? {
                process.ended = Some(how);
                ended.push((rank, how));
            }
        }
        ended.sort_by_key(|(_, how)| !matches!(how, Ended::Signal(_)));
        let died = |rank: usize, how: &dyn Display| Frame::Died {
            rank: rank as u32,
            how: how.to_string(),
        };
        for (rank, how) in ended.into_iter().filter(|(_, how)| !how.is_success()) {
            self.fail(LaunchError::RankFailed { rank, how }, died(rank, &how));
        }
        let running = self.running();
        let missed = self.relay.waited_for().find(|rank| !running.contains(rank));
        if let Some(rank) = missed {
            let news = died(rank, &"ended before the others");
            self.fail(LaunchError::EndedEarly { rank }, news);
        }
        Ok(())
    }

    /// Acts on every expired time limit.
    fn keep_time(&mut self, limit_ns: u64, limit: Duration) {
        let now_ns = self.clock.now_ns();
        if let Some(frame) = self.relay.expire(now_ns) {
            if let Frame::Missing {
                within_ms, ranks, ..
            } = &frame
            {
                let missing = LaunchError::Missing {
                    ranks: ranks.iter().map(|rank| *rank as usize).collect(),
                    within: Duration::from_millis((*within_ms).into()),
                };
                self.fail(missing, frame);
            }
        }
        if now_ns >= limit_ns && self.failure.is_none() {
            let running = self.running();
            self.fail(
                LaunchError::TimeLimit { limit, running },
                Frame::Interrupted,
            );
        }
        if self.kill_at_ns.is_some_and(|at_ns| at_ns <= now_ns) {
            // The other ranks ended because of a rank that has not ended in the whole grace period,
            // so that rank is the cause.
            let is_consequence = matches!(
                self.failure,
                Some(LaunchError::RankFailed { how: FOLLOWS, .. })
            );
            if is_consequence && !self.has_killed && self.kill_at_ns != Some(0) {
                self.failure = Some(LaunchError::Missing {
                    ranks: self.running(),
                    within: self.grace,
                });
            }
            (0..self.ranks.len()).for_each(|rank| self.kill(rank));
        }
    }

    /// Records a failure if it is the first, or has precedence over the recorded failure. Reports
    /// the first failure to every rank, and starts the grace period.
    fn fail(&mut self, failure: LaunchError, news: Frame) {
        match &self.failure {
            None => {
                self.failure = Some(failure);
                self.end_with(&news);
            }
            Some(recorded) if !self.has_killed && failure.precedes(recorded) => {
                self.failure = Some(failure)
            }
            Some(_) => {}
        }
    }

    /// Sends every rank the reason for the end, and starts the grace period unless it has begun.
    fn end_with(&mut self, news: &Frame) {
        self.kill_at_ns
            .get_or_insert(self.clock.now_ns().saturating_add(as_ns(self.grace)));
        // A socket fails only if its rank ends or will be killed, so the error is ignored.
        let _ = self.broadcast(news);
    }

    fn broadcast(&mut self, frame: &Frame) -> io::Result<()> {
        self.ranks
            .iter_mut()
            .filter(|rank| rank.ended.is_none())
            .try_for_each(|rank| rank.channel.send(frame))
    }

    fn kill(&mut self, rank: usize) {
        let process = self.ranks.get_mut(rank);
        if let Some(process) = process.filter(|process| process.ended.is_none()) {
            process.child.kill();
            self.has_killed = true;
        }
    }
}

fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
