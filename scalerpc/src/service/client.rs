//! The client's end of a connection to a server. The connection is made again when it has ended.

use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::task::Waker;
use std::time::Duration;

use copyrpc_calls::{CONNECTIONS, Connection, Dial, EndOf, EndReason, Facts, GoesOn, Refusal};
use mlx5::{Device, DeviceInfo, DeviceSpec};
use mlx5_rendezvous::{Route, Secret};

use super::{ClientError, LONGEST_SLEEP, SHORTEST_SLEEP, default_device};
use crate::protocol::{CallFailure, CallToken, ClientStats, CloseReason, State};
use crate::rdma::{RdmaClient, RdmaOptions, SetupError};

/// Options of a [`Client`](crate::Client).
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Device of the client, of the same kind as the server's. Default: the device that the
    /// environment variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software
    /// HCA.
    pub device: DeviceSpec,
    /// Options of the client's queues.
    pub rdma: RdmaOptions,
    /// Maximum time to wait, at each connection, for a server that is not there yet, does not
    /// answer, or has no room for another client. A permanent refusal ends the attempt at once: a
    /// different secret or version, or a device that this process may not reach. Default: 5 s.
    pub connect_timeout: Duration,
    /// Timeout of [`Client::call`](crate::Client::call); `None`: a call waits as long as the server
    /// lives. Default: 5 s.
    pub timeout: Option<Duration>,
    /// Maximum number of connections of an [`AsyncClient`](crate::AsyncClient): calls that find no
    /// room for 100 ms go over a further connection. Default: 8.
    pub connections: usize,
    /// The server's secret ([`ServerOptions::secret`](crate::ServerOptions::secret)), which both
    /// ends prove to each other. A client with another secret, or without the server's, is refused:
    /// [`Refusal`](crate::rdma::exchange::Refusal). Default: none.
    pub secret: Option<Secret>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        let within = Duration::from_secs(5);
        Self {
            device: default_device(),
            rdma: RdmaOptions::default(),
            connect_timeout: within,
            timeout: Some(within),
            connections: CONNECTIONS,
            secret: None,
        }
    }
}

impl EndReason for CloseReason {
    const CLOSED_HERE: Self = Self::ClosedHere;
}

/// A connection to a server, and everything that is needed to connect again.
pub struct Caller {
    pub(super) rdma: RdmaClient,
    /// The way to the server, and the socket over which this client connected. When the socket
    /// closes, the server probes this client. The field is declared after `rdma`, so the socket is
    /// closed after the queue pair.
    route: Route,
    options: ClientOptions,
    response: Vec<u8>,
    /// The calls that have a slot, with the numbers by which the user of this connection knows
    /// them.
    under_way: Vec<(CallToken, u64)>,
    /// Whether a call waited for its whole time while calls that ran out of time held every slot.
    had_no_slot: bool,
    /// Whether the server's socket ended while no call was under way.
    is_left: bool,
    /// Length of the next sleep, if nothing wakes this end.
    nap: Duration,
    /// Sum of the counters of earlier connections.
    past: ClientStats,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("route", &self.route)
            .field("state", &self.rdma.state())
            .finish_non_exhaustive()
    }
}

impl<A: ToSocketAddrs + fmt::Debug> Dial<A> for Caller {
    type Options = ClientOptions;
    type Error = ClientError;
    const THREAD: &'static str = "scalerpc-client";

    fn dial(
        address: A,
        options: &ClientOptions,
        has_thread: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, ClientError> {
        let mut options = options.clone();
        options.rdma.sleeps |= has_thread;
        let mut route = Route::to(address, options.secret.clone())?;
        let device = Device::open(&options.device).map_err(SetupError::from)?;
        let rdma = route.connect(options.connect_timeout, is_wanted, |meeting| {
            RdmaClient::connect_on(&device, &options.rdma, meeting)
        })?;
        route.has_paused(device.coarse_now_ns());
        Ok(Self {
            route,
            options,
            response: vec![0; rdma.max_payload()],
            under_way: Vec::new(),
            had_no_slot: false,
            is_left: false,
            nap: SHORTEST_SLEEP,
            past: ClientStats::default(),
            rdma,
        })
    }

    fn no_thread(error: io::Error) -> ClientError {
        SetupError::Thread(error).into()
    }
}

impl Connection for Caller {
    /// The kind of a call is its `rpc_type`.
    type Kind = u16;
    type Request = [u8];
    type Reply = Vec<u8>;
    type Arrival<'a> = &'a [u8];
    type ConnectError = SetupError;
    type EndReason = CloseReason;
    type Call = CallToken;
    type Stats = ClientStats;
    type Device = DeviceInfo;

    fn call(
        &mut self,
        number: u64,
        rpc_type: u16,
        request: &[u8],
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<ClientError>> {
        if self.is_stuck() {
            return Err(Refusal::Ended);
        }
        self.rdma
            .set_timeout_ns(nanoseconds(left.unwrap_or(Duration::MAX)));
        match self.rdma.call(rpc_type, request) {
            Ok(call) => {
                self.under_way.push((call, number));
                Ok(call)
            }
            Err(CallFailure::Full) => Err(Refusal::NoRoom),
            Err(CallFailure::NotSent) => Err(Refusal::Ended),
            Err(error) => Err(Refusal::Failed(error.of_client())),
        }
    }

    fn end_within(&mut self, call: CallToken, left: Duration) {
        self.rdma.end_within(call, nanoseconds(left));
    }

    fn flush(&mut self) {
        self.rdma.poll();
    }

    fn poll(&mut self, mut on_end: impl FnMut(u64, EndOf<Self, &[u8]>)) -> bool {
        let Self {
            rdma,
            response,
            under_way,
            ..
        } = self;
        rdma.poll();
        let mut moved = false;
        while let Some(completion) = rdma.poll_completion(response) {
            moved = true;
            let is_it = |(call, _): &(CallToken, u64)| *call == completion.call;
            if let Some(at) = under_way.iter().position(is_it) {
                let (_, number) = under_way.swap_remove(at);
                let reply = completion
                    .outcome
                    .map(|len| response.get(..len).unwrap_or_default());
                on_end(number, reply);
            }
        }
        if moved {
            self.nap = SHORTEST_SLEEP;
        }
        moved
    }

    /// Returns the error of a call that found no slot in its whole time. If calls that ran out of
    /// time hold every slot, the next call finds the connection stuck, unless the server answers
    /// one of them.
    fn late(&mut self) -> ClientError {
        let given_up = self.rdma.given_up_calls();
        self.had_no_slot =
            given_up > 0 && self.rdma.free_slots() == 0 && !self.rdma.core().is_busy();
        if self.had_no_slot {
            ClientError::NoCredit { given_up }
        } else {
            ClientError::NotSent
        }
    }

    /// Ends the call with the next poll, as its deadline does: the slot of the call is free when the
    /// response arrives.
    fn cancel(&mut self, call: CallToken) {
        self.rdma.end_within(call, 0);
    }

    fn sleep(&mut self, limit: Option<Duration>) {
        if self.options.rdma.sleeps {
            self.rdma.wait(limit);
        } else {
            std::thread::sleep(limit.map_or(self.nap, |limit| limit.min(self.nap)));
            self.nap = (2 * self.nap).min(LONGEST_SLEEP);
        }
        if self.under_way.is_empty() {
            self.end_pause();
        }
        take_events(&mut self.rdma);
    }

    fn waker(&self) -> Waker {
        self.rdma.device().waker()
    }

    /// Connects again, on another device if the present device broke down.
    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ClientError> {
        let is_broken = take_events(&mut self.rdma);
        let device = if is_broken {
            Device::open(&self.options.device).map_err(SetupError::from)?
        } else {
            self.rdma.device().clone()
        };
        // A server that closes waits until its last messages were taken. If the devices exchange
        // packets, this thread has to receive them. No call waits for its end
        // here: a client connects again after the end of every call, or of every call's time.
        let goes_on = || {
            device.progress();
            goes_on(&mut Vec::new(), &mut |_| ())
        };
        let options = &self.options.rdma;
        let (rdma, _before) = self.route.connect_again(within, goes_on, |meeting| {
            RdmaClient::connect_on(&device, options, meeting)
        })?;
        self.past += *self.rdma.stats();
        self.rdma = rdma;
        self.is_left = false;
        self.response.resize(self.rdma.max_payload(), 0);
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        let now_ns = self.rdma.device().coarse_now_ns();
        if self.route.has_paused(now_ns) {
            self.end_pause();
        }
        self.rdma.poll();
        self.is_stuck() || matches!(self.rdma.state(), State::Closed(_))
    }

    /// Begins a rest ([`RdmaClient::rest`]): a caller that waits for each of its calls polls only
    /// during a call.
    fn rest(&mut self) {
        self.rdma.rest();
    }

    fn facts(&self) -> Facts<ClientStats> {
        let mut stats = self.past;
        stats += *self.rdma.stats();
        Facts {
            connect_timeout: self.options.connect_timeout,
            timeout: self.options.timeout,
            connections: self.options.connections,
            max_request: self.rdma.max_payload(),
            max_reply: self.rdma.max_payload(),
            stats,
        }
    }

    fn device(&self) -> DeviceInfo {
        self.rdma.device().info()
    }
}

impl Caller {
    /// Returns the current connection's client on its device, which can make many calls at once.
    #[must_use]
    pub const fn rdma(&mut self) -> &mut RdmaClient {
        &mut self.rdma
    }

    /// Checks after a pause without calls whether the server has died. Only the socket shows that.
    fn end_pause(&mut self) {
        self.is_left = self.route.has_hung_up();
    }

    /// Returns whether calls need another connection: the server died in a pause, or a call found
    /// no slot in its whole time and no slot is free now.
    fn is_stuck(&mut self) -> bool {
        self.is_left || std::mem::take(&mut self.had_no_slot) && self.rdma.free_slots() == 0
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Takes the events of a client's own device. Returns whether the device or its queue broke down.
fn take_events(rdma: &mut RdmaClient) -> bool {
    let mut is_broken = matches!(rdma.state(), State::Closed(CloseReason::Device));
    while let Some(event) = rdma.device().take_async_event() {
        is_broken |= rdma.heed(event);
    }
    is_broken
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use copyrpc_calls::Ending;
    use copyrpc_calls::futures::Worker;

    use super::*;
    use crate::Server;
    use crate::rdma::exchange::{RecordError, Refusal as Refused};

    const WATCHDOG: Duration = Duration::from_secs(60);

    #[test]
    fn an_error_says_whether_the_call_may_be_made_again() {
        let io = || io::Error::other("test");
        let failure = CallFailure::of_client;
        let later = (true, false);
        let never = (false, false);
        let made = (false, true);
        let errors = [
            (
                ClientError::Connect(SetupError::Unreachable {
                    address: String::new(),
                    source: io(),
                }),
                later,
            ),
            (ClientError::Connect(SetupError::Thread(io())), never),
            (ClientError::Connect(SetupError::Channel(io())), later),
            (
                ClientError::Connect(SetupError::Record(RecordError::Refused(Refused::Full))),
                later,
            ),
            (
                ClientError::Connect(SetupError::Record(RecordError::Refused(
                    Refused::WrongSecret,
                ))),
                never,
            ),
            (
                ClientError::Connect(SetupError::Record(RecordError::Version {
                    name: "",
                    version: 2,
                    known: 1,
                })),
                never,
            ),
            (
                ClientError::Connect(SetupError::Connect(mlx5::ConnectError::NoGid)),
                never,
            ),
            (ClientError::NoCredit { given_up: 1 }, later),
            (failure(CallFailure::Full), later),
            (failure(CallFailure::TooLarge { len: 2, max: 1 }), never),
            (failure(CallFailure::UnknownType), never),
            (failure(CallFailure::Refused), made),
            (failure(CallFailure::ReplyTooLong { len: None }), made),
            (failure(CallFailure::Dropped), made),
            (failure(CallFailure::NotSent), later),
            (failure(CallFailure::TimedOut), made),
            (
                failure(CallFailure::Closed(CloseReason::Disconnected)),
                made,
            ),
        ];
        for (error, expected) in errors {
            assert_eq!(
                (error.is_retryable(), error.may_have_executed()),
                expected,
                "{error}"
            );
            let ending: &dyn Ending = &error;
            assert_eq!(
                (ending.is_retryable(), ending.may_have_executed()),
                expected,
                "{ending}"
            );
        }
    }

    /// No completion reports the breakdown, and the thread sleeps on the device.
    #[test]
    fn a_client_whose_device_breaks_down_goes_on_with_another_one_and_is_woken_through_it() {
        let (tell, told) = mpsc::channel();
        let server = thread::spawn(move || {
            let mut server = Server::bind("127.0.0.1:0").unwrap();
            tell.send((server.local_addr().unwrap(), server.stop_handle()))
                .unwrap();
            server
                .serve(|request| request.to_ascii_uppercase())
                .unwrap();
        });
        let (address, stop) = told.recv_timeout(WATCHDOG).unwrap();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let options = ClientOptions {
                timeout: Some(WATCHDOG),
                ..ClientOptions::default()
            };
            let connection = Caller::dial(address, &options, true, &|| true).unwrap();
            connection.rdma.device().soft().unwrap().break_down();
            let (worker, client) = Worker::new(connection);
            tell.send(client).unwrap();
            worker.serve();
        });
        let client = told.recv_timeout(WATCHDOG).unwrap();
        let (tell, told) = mpsc::channel();
        let caller = thread::spawn(move || {
            for _ in 0..3 {
                tell.send(copyrpc_testing::executor::block_on(client.call(b"x")))
                    .unwrap();
                // The client's thread sleeps before the next call.
                thread::sleep(Duration::from_millis(100));
            }
        });
        // The thread may detect the breakdown before it gets the first call, or with that call.
        if let Err(closed) = told.recv_timeout(WATCHDOG).unwrap() {
            assert!(
                matches!(closed, ClientError::Closed(CloseReason::Device)),
                "{closed}"
            );
        }
        for _ in 0..2 {
            assert_eq!(
                told.recv_timeout(WATCHDOG)
                    .expect("the thread is not woken")
                    .unwrap(),
                b"X"
            );
        }
        caller.join().unwrap();
        thread.join().unwrap();
        stop.stop();
        server.join().unwrap();
    }
}
