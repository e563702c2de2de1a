//! A rank's end of the exchange through the launcher.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::PollFd;

use super::channel::Channel;
use super::frame::{Frame, MAX_PART_BYTES};
use super::{Exchange, ExchangeError};
use crate::launch::sys::{self, Deadline};

/// Time to wait, after the time limit of a round, for the launcher's report of the missing ranks.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Interval at which a waiting rank checks whether to give up.
const GIVE_UP_INTERVAL: Duration = Duration::from_millis(10);

/// [`Exchange`] over the socket that the launcher gave to this process.
#[derive(Debug)]
pub struct SocketExchange {
    channel: Channel,
    rank: usize,
    size: usize,
    round: u32,
    /// Whether interrupts are expected.
    catches: bool,
    interrupted: bool,
    over: Option<ExchangeError>,
}

impl SocketExchange {
    pub(crate) fn new(socket: UnixStream, rank: usize, size: usize) -> io::Result<Self> {
        Ok(Self {
            channel: Channel::new(socket)?,
            rank,
            size,
            round: 0,
            catches: false,
            interrupted: false,
            over: None,
        })
    }

    /// Waits up to `time` for a frame. Returns `None` if no frame arrives, or if a sleep is
    /// interrupted.
    fn receive(
        &mut self,
        time: Duration,
        is_sleep: bool,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Option<Frame>, ExchangeError> {
        let end = Deadline::after(time);
        loop {
            let next = self.channel.next();
            match next.map_err(|error| ExchangeError::Protocol(error.to_string()))? {
                Some(Frame::Interrupted) if self.catches => {
                    self.interrupted = true;
                    continue;
                }
                Some(frame) => return Ok(Some(frame)),
                None if is_sleep && self.interrupted => return Ok(None),
                None => {}
            }
            if self.channel.is_closed() {
                return Err(ExchangeError::LauncherGone);
            }
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            let left = end.left();
            let mut fds = [PollFd::new(&self.channel, self.channel.events())];
            sys::poll(&mut fds, left.min(GIVE_UP_INTERVAL)).map_err(socket_failed)?;
            if fds[0].revents().is_empty() {
                if left.is_zero() {
                    return Ok(None);
                }
                continue;
            }
            self.channel.push().map_err(socket_failed)?;
            self.channel.pull().map_err(socket_failed)?;
        }
    }

    fn gather(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        if part.len() > MAX_PART_BYTES {
            return Err(ExchangeError::TooLarge {
                bytes: part.len(),
                most: MAX_PART_BYTES,
            });
        }
        let within_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
        self.round += 1;
        let mine = Frame::Part {
            round: self.round,
            within_ms,
            part: part.to_vec(),
        };
        self.channel.send(&mine).map_err(socket_failed)?;
        let within = within + ANSWER_GRACE;
        match self.receive(within, false, give_up)? {
            Some(Frame::Gathered { round, parts })
                if round == self.round && parts.len() == self.size =>
            {
                Ok(parts)
            }
            Some(frame) => Err(end_of_job(frame)),
            None => Err(ExchangeError::NoAnswer { within }),
        }
    }

    /// Runs one operation, unless the job is over. Records an error of the operation.
    fn attempt<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> Result<T, ExchangeError>,
    ) -> Result<T, ExchangeError> {
        if let Some(reason) = &self.over {
            return Err(reason.clone());
        }
        operation(self).inspect_err(|error| self.over = Some(error.clone()))
    }
}

impl Exchange for SocketExchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        self.attempt(|exchange| exchange.gather(part, within, give_up))
    }

    fn sleep(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        self.attempt(|exchange| {
            let frame = exchange.receive(time, true, give_up)?;
            frame.map_or(Ok(()), |frame| Err(end_of_job(frame)))
        })
    }

    /// Marks interrupts as expected. The launcher takes the signals and informs all ranks.
    fn catch_interrupts(&mut self) -> Result<(), ExchangeError> {
        self.catches = true;
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted
    }
}

/// Returns the error that a frame other than the expected answer means.
fn end_of_job(frame: Frame) -> ExchangeError {
    match frame {
        Frame::Died { rank, how } => ExchangeError::RankDied {
            rank: rank as usize,
            how,
        },
        Frame::Missing {
            within_ms, ranks, ..
        } => ExchangeError::Missing {
            ranks: ranks.into_iter().map(|rank| rank as usize).collect(),
            within: Duration::from_millis(within_ms.into()),
        },
        Frame::Interrupted => ExchangeError::Interrupted,
        Frame::Gathered { round, parts } => {
            ExchangeError::Protocol(format!("{} parts for round {round}", parts.len()))
        }
        Frame::Part { .. } => ExchangeError::Protocol("a frame that only ranks send".to_owned()),
    }
}

fn socket_failed(error: io::Error) -> ExchangeError {
    ExchangeError::Socket(error.to_string())
}
