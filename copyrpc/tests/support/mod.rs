//! Shared parts of the binding's tests: contexts on the device of this run, and waiting for events.
//!
//! `MLX5_TEST_TIME=immediate|delay|virtual` sets when the software HCA executes,
//! `MLX5_TEST_DEVICE=mlx5_0` takes that device of libibverbs instead; `scripts/verbs-tests` lists
//! the tests that are useful there. So a test must not count polls: it steps until a condition
//! holds ([`step_until`]), or until nothing more can arrive ([`step_a_while`]).
#![allow(dead_code, reason = "each test uses what it needs")]

#[path = "../../../mlx5/tests/support/time.rs"]
mod time;

use std::cell::RefCell;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use copyrpc::{
    CallFailure, Context, ContextBuilder, Endpoint, EndpointConfig, Outcome, PendingEndpoint,
};
use mlx5::{Clock, ConnectOptions, DeviceSpec, FabricSpec, SoftOptions, Timing};
pub(crate) use time::{Mode, mode};

/// The outcome of a call, with the bytes of the reply.
pub(crate) type Ended = Result<Vec<u8>, CallFailure>;

/// Time after which a hang ends the process. The tests take far less.
const WATCHDOG: Duration = Duration::from_secs(100);
/// Pause between two steps on a libibverbs device: the process that emulates it may need this core.
const HARDWARE_PAUSE: Duration = Duration::from_micros(20);

/// The place where contexts meet: a fabric, or a device.
pub(crate) struct Net(time::Net);

impl Net {
    pub(crate) fn new() -> Self {
        Self(time::Net::new())
    }

    /// Strict mode in immediate time only. In any other time, it also checks that no thread writes
    /// the bytes that a WRITE sends until its completion is taken, and a ring is reused as soon as
    /// the peer has consumed it: see S5 in the protocol's document.
    pub(crate) fn spec(&self) -> DeviceSpec {
        let options = self.0.options();
        let clock = if mode() == Mode::Virtual {
            options.clock.clone()
        } else {
            Clock::System
        };
        time::Net::spec(&SoftOptions {
            clock,
            strict: mode() == Mode::Immediate,
            ..options
        })
    }

    pub(crate) fn context(&self) -> Checked {
        self.build(|builder| builder)
    }

    pub(crate) fn build(&self, sizes: impl FnOnce(ContextBuilder) -> ContextBuilder) -> Checked {
        Checked::new(sizes(ContextBuilder::new(self.spec())))
    }
}

/// Returns a device on the fabric in `dir`, which several processes share. Processes cannot share
/// virtual time.
pub(crate) fn spec_in(dir: PathBuf) -> DeviceSpec {
    let (fabric, clock) = (FabricSpec::Shared { dir: Some(dir) }, Clock::System);
    let timing = if mode() == Mode::Delay {
        time::Net::new().options().timing
    } else {
        Timing::Immediate
    };
    time::Net::spec(&SoftOptions {
        fabric,
        clock,
        timing,
        strict: mode() == Mode::Immediate,
        ..SoftOptions::default()
    })
}

/// A context that asserts, when dropped, that it broke no device rule and never found the peer
/// without a receive (RNR).
pub(crate) struct Checked(Context<u64>);

impl Deref for Checked {
    type Target = Context<u64>;

    fn deref(&self) -> &Context<u64> {
        &self.0
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let info = self.device_info();
            assert_eq!(
                (info.violations, info.rnr_naks.unwrap_or(0)),
                (0, 0),
                "{info:?}"
            );
        }
    }
}

impl Checked {
    pub(crate) fn new(builder: ContextBuilder) -> Self {
        Self(builder.build().unwrap())
    }

    /// Polls once, and adds the calls that ended to `ended`.
    pub(crate) fn poll_into(&self, ended: &RefCell<Vec<(u64, Ended)>>) {
        let push = |serial, outcome: Outcome<'_>| {
            ended
                .borrow_mut()
                .push((serial, outcome.map(|bytes| bytes.to_vec())))
        };
        self.poll(push).unwrap();
    }

    /// Polls once; no call may end.
    pub(crate) fn poll_quietly(&self) {
        self.poll(|serial, outcome| panic!("call {serial} ended: {outcome:?}"))
            .unwrap();
    }

    /// Answers every request with its own bytes.
    pub(crate) fn echo_all(&self) {
        while let Some(request) = self.recv() {
            let data = request.data().to_vec();
            request.reply(&data).unwrap();
        }
    }
}

/// Rings of 4 KiB, so that they wrap soon. A receive queue found empty is an error (B1) on the
/// software HCA; under the real driver, the HCA copies posted receives only at its next step, and
/// the peer may be informed of the receives before that step, so that an RNR NAK proves nothing.
pub(crate) fn small() -> EndpointConfig {
    let connect = ConnectOptions::default();
    let connect = ConnectOptions {
        rnr_retry: if mode() == Mode::Hardware {
            connect.rnr_retry
        } else {
            0
        },
        ..connect
    };
    EndpointConfig {
        ring_size: 4096,
        raw_operations: 0,
        connect,
        ..EndpointConfig::default()
    }
}

pub(crate) fn connect(
    a: PendingEndpoint<u64>,
    b: PendingEndpoint<u64>,
) -> (Endpoint<u64>, Endpoint<u64>) {
    let (record_a, record_b) = (a.local_info(), b.local_info());
    (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
}

/// A connection of two contexts.
pub(crate) fn join(
    a: &Context<u64>,
    b: &Context<u64>,
    config: &EndpointConfig,
) -> (Endpoint<u64>, Endpoint<u64>) {
    connect(
        a.create_endpoint(config).unwrap(),
        b.create_endpoint(config).unwrap(),
    )
}

fn pause() {
    match mode() {
        Mode::Hardware => std::thread::sleep(HARDWARE_PAUSE),
        _ => std::thread::yield_now(),
    }
}

/// Steps until `is_done`. Panics after [`WATCHDOG`].
pub(crate) fn step_until(mut is_done: impl FnMut() -> bool, mut step: impl FnMut()) {
    let watchdog = Instant::now() + WATCHDOG;
    while !is_done() {
        assert!(
            Instant::now() < watchdog,
            "watchdog: what the test waits for does not come"
        );
        step();
        if !is_done() {
            pause();
        }
    }
}

/// Steps until every message that is under way has arrived.
pub(crate) fn step_a_while(mut step: impl FnMut()) {
    let (least, rounds) = match mode() {
        Mode::Immediate => (Duration::ZERO, 10),
        Mode::Virtual => (Duration::ZERO, 10_000),
        Mode::Delay | Mode::Packets | Mode::Hardware => (Duration::from_millis(10), 200),
    };
    let start = Instant::now();
    for round in 0.. {
        if round >= rounds && start.elapsed() >= least {
            return;
        }
        step();
        pause();
    }
}

/// Returns bytes that differ from call to call.
pub(crate) fn payload(serial: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (serial as usize * 7 + at) as u8)
        .collect()
}

/// Two contexts and a connection between them.
pub(crate) struct Pair {
    pub(crate) client: Checked,
    pub(crate) server: Checked,
    pub(crate) to_server: Endpoint<u64>,
    pub(crate) to_client: Endpoint<u64>,
    /// The calls of either side that ended, and their outcomes.
    pub(crate) ended: RefCell<Vec<(u64, Ended)>>,
    pub(crate) net: Net,
}

impl Pair {
    pub(crate) fn new(
        sizes: impl Fn(ContextBuilder) -> ContextBuilder,
        config: &EndpointConfig,
    ) -> Self {
        let net = Net::new();
        let (client, server) = (net.build(&sizes), net.build(&sizes));
        let (to_server, to_client) = join(&client, &server, config);
        Self {
            client,
            server,
            to_server,
            to_client,
            ended: RefCell::default(),
            net,
        }
    }

    pub(crate) fn small() -> Self {
        Self::new(|builder| builder, &small())
    }

    /// Polls both.
    pub(crate) fn poll(&self) {
        self.client.poll_into(&self.ended);
        self.server.poll_into(&self.ended);
    }

    /// Polls both, then calls `then`.
    pub(crate) fn poll_and(&self, then: impl FnOnce()) {
        self.poll();
        then();
    }

    /// Polls, and lets the server answer, until `calls` calls have ended. Returns all calls that
    /// ended.
    pub(crate) fn finish(&self, calls: usize) -> Vec<(u64, Ended)> {
        let step = || {
            self.poll();
            self.server.echo_all();
        };
        step_until(|| self.ended.borrow().len() >= calls, step);
        self.ended.take()
    }

    /// Polls until the server has received `count` requests, and returns them.
    pub(crate) fn receive(&self, count: usize) -> Vec<copyrpc::RecvHandle<u64>> {
        let requests = RefCell::new(Vec::new());
        step_until(
            || requests.borrow().len() >= count,
            || {
                self.poll();
                requests
                    .borrow_mut()
                    .extend(std::iter::from_fn(|| self.server.recv()));
            },
        );
        requests.into_inner()
    }
}
