//! The server in the thread of an [`AsyncServer`](super::AsyncServer).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use copyrpc_calls::{Answer, Bind, Patience, Serving, StopHandle};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::sleep::{self, Alarm, Sleeper};

use super::Server;
use super::message::MessageBytes;
use crate::error::SetupError;
use crate::limits::{CLIENTS, CLIENTS_MAX, DEPTH, STOP_TIMEOUT};
use crate::token::Token;

/// Maximum sleep: time between two checks for requests that are overdue, or whose client has ended.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);
/// Number of steps between two checks for requests that are overdue or whose client has ended, for
/// a server that always has something to do.
const STEPS_PER_CHECK: u32 = 1024;
const ALL: [u64; CLIENTS_MAX / 64] = [u64::MAX; CLIENTS_MAX / 64];

/// Options of an [`AsyncServer`](super::AsyncServer).
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The directory. Default: the user's directory.
    pub dir: Option<Dir>,
    /// Maximum number of clients, 1 to 4096. Default: 64.
    pub clients: usize,
    /// Maximum number of unanswered calls of a client, a power of two, 1 to 32768. Default: 32.
    pub depth: usize,
    /// Maximum lengths of messages. Default: 4096 bytes each.
    pub max: MessageBytes,
    /// The application's number for the meaning of the messages. Default: 0.
    pub type_tag: u64,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            dir: None,
            clients: CLIENTS,
            depth: DEPTH,
            max: MessageBytes::DEFAULT,
            type_tag: 0,
        }
    }
}

/// A [`Server`], and the alarm by which other threads end its sleep.
#[derive(Debug)]
pub struct Host {
    server: Server,
    alarm: Arc<Alarm>,
    stop: StopHandle,
    patience: Patience,
    steps_to_check: u32,
    is_closed: bool,
}

impl Serving for Host {
    type Token = Token;
    /// The number of the client.
    type Peer = usize;
    type Error = SetupError;
    type Address = ();
    type Stats = ();
    type Device = ();

    fn address(&self) -> io::Result<()> {
        Ok(())
    }

    fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    fn device(&self) {}

    fn counts(&self) -> (usize, ()) {
        (self.server.clients(), ())
    }

    fn step(&mut self, holds_back: bool) -> Result<(), SetupError> {
        self.steps_to_check = self
            .steps_to_check
            .checked_sub(1)
            .unwrap_or(STEPS_PER_CHECK);
        let takes = !holds_back && !self.is_closed;
        // A closed server still notices clients that disconnect.
        let mask = if takes { &[][..] } else { &ALL };
        let is_found = self.server.poll_with_skip(mask) > 0 && takes;
        // The caller takes the posted answers after this reset, so no ring of the alarm is lost.
        if self.alarm.take() || is_found {
            self.patience.reset();
        } else if let Some(start) = self.patience.idle() {
            let mut alarm = &*self.alarm;
            let server = takes.then_some(&mut self.server as &mut dyn Sleeper);
            let sleepers = server.into_iter().chain([&mut alarm as &mut dyn Sleeper]);
            sleep::wait(sleepers, Some(LONGEST_SLEEP));
            self.patience.slept(start);
            self.steps_to_check = 0;
        }
        Ok(())
    }

    fn may_check(&self) -> bool {
        self.steps_to_check == 0
    }

    fn recv(&mut self) -> Option<(Token, Vec<u8>, usize)> {
        let (token, request) = self.server.recv()?;
        let client = token.client();
        Some((token, request.to_vec(), client))
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        match answer {
            Answer::Reply(reply) => self.server.answer(token, &reply),
            Answer::Refusal => drop(self.server.refuse(token)),
            Answer::SentBack => self.server.send_back(token),
            Answer::Dropped => drop(token),
        }
    }

    fn is_wanted(&self, token: &Token) -> bool {
        self.server.is_wanted(token)
    }

    /// Stops taking requests: calls in the lanes end when the server is dropped.
    fn close(&mut self) {
        self.is_closed = true;
    }
}

impl<A: Into<String>> Bind<A> for Host {
    type Options = ServerOptions;
    const THREAD: &'static str = "ipc-server";

    fn bind_with(name: A, options: &ServerOptions) -> Result<Self, SetupError> {
        let alarm = Arc::<Alarm>::default();
        Ok(Self {
            server: Server::with_options(&name.into(), options)?,
            stop: StopHandle::new(alarm.waker(), STOP_TIMEOUT),
            alarm,
            patience: Patience::new(),
            steps_to_check: 0,
            is_closed: false,
        })
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}
