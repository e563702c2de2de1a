//! The honest ends: a server, its client, and its connections to liars.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use crate::{
    CallFailure, CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig, Outcome,
    PendingEndpoint, RecvHandle, SetupError, Window,
};
use mlx5::DeviceSpec;

use super::Time;

/// Bytes of each ring to a liar.
pub(crate) const RING: u64 = 4096;
/// Maximum number of batches in flight to or from a liar.
pub(crate) const BATCHES: u32 = 6;
/// User data of the honest calls has this bit.
const HONEST: u64 = 1 << 63;
/// Maximum number of polls until an honest call is answered, and until all calls to a liar have
/// ended.
const MOST_POLLS: usize = 1_000;

/// The end of a connection to a liar.
pub(crate) enum End {
    Refused(SetupError),
    Closed(CloseReason),
}

/// A connection of the server to a liar.
pub(crate) struct Victim {
    endpoint: Endpoint<u64>,
    held: Vec<RecvHandle<u64>>,
}

/// The server, and one client that does not lie.
pub(crate) struct Server {
    server: Context<u64>,
    client: Context<u64>,
    to_server: Endpoint<u64>,
    _to_client: Endpoint<u64>,
    /// Maximum answer to each call to a liar that has not ended.
    open: RefCell<HashMap<u64, usize>>,
    next_call: Cell<u64>,
    honest_calls: Cell<u64>,
}

impl Server {
    pub(crate) fn new(spec: &impl Fn() -> DeviceSpec) -> Self {
        // Room for the client and a few liars: if endpoints did not release their shares, the next
        // endpoints would soon be refused.
        let build = || {
            ContextBuilder::new(spec())
                .srq_size(128)
                .cq_size(256)
                .build()
                .unwrap()
        };
        let (server, client): (Context<u64>, Context<u64>) = (build(), build());
        let config = EndpointConfig {
            raw_operations: 0,
            ..EndpointConfig::default()
        };
        let a = client.create_endpoint(&config).unwrap();
        let b = server.create_endpoint(&config).unwrap();
        let (record_a, record_b) = (a.local_info(), b.local_info());
        let (to_server, _to_client) =
            (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
        Self {
            server,
            client,
            to_server,
            _to_client,
            open: RefCell::default(),
            next_call: Cell::new(0),
            honest_calls: Cell::new(0),
        }
    }

    pub(crate) fn pending(&self, rng: &mut fastrand::Rng) -> PendingEndpoint<u64> {
        let (batches, exempt_bytes) = (rng.u32(1..3), 256);
        let config = EndpointConfig {
            ring_size: RING,
            batches_in_flight: rng.u32(1..=BATCHES),
            raw_operations: 0,
            keepalive: Duration::from_millis(1),
            stall_timeout: Duration::from_millis(50),
            window: match rng.u8(..3) {
                0 => Window::Off,
                1 => Window::Completion {
                    batches,
                    exempt_bytes,
                },
                _ => Window::Consumption {
                    batches,
                    exempt_bytes,
                },
            },
            ..EndpointConfig::default()
        };
        self.server.create_endpoint(&config).unwrap()
    }

    pub(crate) fn victim(&self, endpoint: Endpoint<u64>) -> Victim {
        Victim {
            endpoint,
            held: Vec::new(),
        }
    }

    pub(crate) fn call(&self, victim: &Victim, rng: &mut fastrand::Rng) {
        let (len, allowance) = if rng.u8(..4) == 0 {
            (rng.usize(..500), rng.usize(..700))
        } else {
            (rng.usize(..40), rng.usize(..40))
        };
        let (number, payload) = (self.next_call.get(), &[5; 500][..len]);
        let taken = match rng.u8(..4) {
            0 => victim.endpoint.call_within(
                payload,
                number,
                allowance,
                Duration::from_micros(rng.u64(..5_000)),
            ),
            _ => victim.endpoint.call(payload, number, allowance),
        };
        let Ok(token) = taken else { return };
        self.next_call.set(number + 1);
        self.open.borrow_mut().insert(number, allowance);
        if rng.u8(..8) == 0 {
            assert_eq!(victim.endpoint.cancel(token), Some(number));
            self.open.borrow_mut().remove(&number);
        }
    }

    /// Polls the server once. Keeps the requests of liars, and answers the client's requests.
    fn poll(&self, victim: &mut Victim) {
        let on_response = |number, outcome: Outcome<'_>| {
            let allowance = self
                .open
                .borrow_mut()
                .remove(&number)
                .expect("a call ended twice, or that nobody made");
            match outcome {
                // The caller's allowance is rounded up.
                Ok(bytes) => assert!(bytes.to_vec().len() <= allowance + 31),
                Err(
                    CallFailure::Dropped | CallFailure::Refused | CallFailure::ReplyTooLong { .. },
                ) => {}
                Err(CallFailure::TimedOut | CallFailure::NotSent | CallFailure::Closed(_)) => {}
                Err(failure) => panic!("{failure}"),
            }
        };
        self.server.poll(on_response).unwrap();
        while let Some(request) = self.server.recv() {
            let data = request.data().to_vec();
            if request.endpoint() == victim.endpoint {
                assert!(data.len() as u64 <= RING / 8);
                victim.held.push(request);
            } else {
                request.reply(&data).unwrap();
            }
        }
    }

    /// Polls, and answers a request of a liar in about half of the calls.
    pub(crate) fn step(&self, victim: &mut Victim, rng: &mut fastrand::Rng) {
        self.poll(victim);
        if victim.held.is_empty() || rng.bool() {
            return;
        }
        let request = victim.held.swap_remove(rng.usize(..victim.held.len()));
        let len = rng.usize(..=request.max_reply());
        let answered = match rng.u8(..4) {
            0 => request.refuse().is_ok(),
            1 => return drop(request),
            _ => request.reply(&vec![1; len]).is_ok(),
        };
        assert!(answered || victim.endpoint.closed().is_some());
    }

    /// Checks that a call of the client is echoed unchanged.
    pub(crate) fn check_honest(&self, victim: &mut Victim) {
        let number = self.honest_calls.get();
        self.honest_calls.set(number + 1);
        let payload: Vec<u8> = (0..number % 300).map(|at| (number + at) as u8).collect();
        self.to_server
            .call(&payload, number | HONEST, payload.len())
            .unwrap();
        let is_answered = Cell::new(false);
        let on_response = |data, outcome: Outcome<'_>| {
            assert_eq!(
                (data, outcome.map(|bytes| bytes.to_vec())),
                (number | HONEST, Ok(payload.clone()))
            );
            is_answered.set(true);
        };
        for _ in 0..MOST_POLLS {
            self.client.poll(on_response).unwrap();
            if is_answered.get() {
                return;
            }
            self.poll(victim);
        }
        panic!(
            "an honest call is not answered: {:?}",
            self.to_server.stats()
        );
    }

    /// Ends the connection, and returns the reason of its end. Aborts a connection that is still
    /// open after `MOST_POLLS` polls. Asserts that all its calls end.
    pub(crate) fn end(
        &self,
        mut victim: Victim,
        time: &Time,
        rng: &mut fastrand::Rng,
    ) -> CloseReason {
        match rng.u8(..4) {
            0 => victim.endpoint.abort(),
            1 => victim.endpoint.close(),
            // From here on, the peer of the victim owes an answer.
            _ => {
                _ = victim.endpoint.call(&[], self.next_call.get(), 0).map(|_| {
                    self.open.borrow_mut().insert(self.next_call.get(), 0);
                    self.next_call.set(self.next_call.get() + 1);
                })
            }
        }
        for _ in 0..MOST_POLLS {
            if rng.bool() {
                victim.held.clear();
            }
            self.poll(&mut victim);
            if let (Some(reason), true) = (victim.endpoint.closed(), self.open.borrow().is_empty())
            {
                return reason;
            }
            time.pass_us(1_000);
        }
        // The connection is still open: then nothing is outstanding for which the liar could be
        // given up.
        assert!(
            self.open.borrow().is_empty(),
            "calls to a liar have not ended: {:?}",
            victim.endpoint.stats()
        );
        victim.endpoint.abort();
        self.poll(&mut victim);
        victim.endpoint.closed().unwrap()
    }

    /// Asserts that the honest ends broke no rule of the device.
    pub(crate) fn finish(&self) {
        for context in [&self.server, &self.client] {
            let info = context.device_info();
            assert_eq!(info.violations, 0, "{info:?}");
        }
    }
}

impl Victim {
    pub(crate) fn is_closed(&self) -> bool {
        self.endpoint.closed().is_some()
    }
}
