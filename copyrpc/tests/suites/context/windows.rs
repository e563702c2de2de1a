//! The effect of the batch window: it stalls flushes, and messages share WRITEs. Single flushes are
//! tested in `window` and `src/tests/protocol`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use copyrpc::{ContextBuilder, EndpointConfig, Outcome, Window};

use crate::support::{Checked, Mode, Net, Pair, mode, payload, small, step_a_while, step_until};

const CALLS: u64 = 400;
const LEN: usize = 40;

/// Each call and each reply is flushed by itself, and either side sleeps when it has nothing to do.
/// Returns stalls, batches and messages.
fn run(window: Window) -> (u64, u64, u64) {
    let pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            ring_size: 16 << 10,
            window,
            ..small()
        },
    );
    let (issued, ended) = (Cell::new(0), Cell::new(0));
    let step = || {
        while issued.get() < CALLS
            && pair
                .to_server
                .call(&payload(issued.get(), LEN), issued.get(), LEN)
                .is_ok()
        {
            issued.set(issued.get() + 1);
            pair.client.flush_endpoints().unwrap();
        }
        let on_response = |serial, outcome: Outcome<'_>| {
            assert_eq!(outcome.unwrap().to_vec(), payload(serial, LEN));
            ended.set(ended.get() + 1);
        };
        pair.client.wait(Some(Duration::ZERO)).unwrap();
        pair.client.poll(on_response).unwrap();
        pair.server.poll_quietly();
        while let Some(request) = pair.server.recv() {
            let data = request.data().to_vec();
            request.reply(&data).unwrap();
            pair.server.flush_endpoints().unwrap();
        }
    };
    step_until(|| ended.get() == CALLS, step);
    let (client, server) = (pair.client.stats(), pair.server.stats());
    assert_eq!((client.calls, server.replies), (CALLS, CALLS));
    (
        client.window_stalls.min(server.window_stalls),
        client.batches_sent + server.batches_sent,
        client.messages_sent + server.messages_sent,
    )
}

#[test]
fn messages_gather_behind_a_window_of_either_clock() {
    let (stalls, batches, messages) = run(Window::Off);
    assert_eq!((stalls, messages), (0, 2 * CALLS));
    let exempt_bytes = Window::DEFAULT_EXEMPT_BYTES;
    for window in [
        Window::Completion {
            batches: 1,
            exempt_bytes,
        },
        Window::Consumption {
            batches: 1,
            exempt_bytes,
        },
    ] {
        let (stalls, windowed, messages) = run(window);
        assert!(
            stalls > 0 && messages == 2 * CALLS,
            "{window:?}: {stalls}, {messages}"
        );
        assert!(
            windowed * 2 < batches,
            "{window:?}: {windowed} batches, {batches} without"
        );
    }
}

/// Batches that a full window holds back are posted only by a sleeper that wakes, for the
/// completion or the peer's word.
#[test]
fn a_sleeper_wakes_for_the_place_that_a_window_gets() {
    let exempt_bytes = Window::DEFAULT_EXEMPT_BYTES;
    for window in [
        Window::Completion {
            batches: 1,
            exempt_bytes,
        },
        Window::Consumption {
            batches: 1,
            exempt_bytes,
        },
    ] {
        let pair = Pair::new(
            |builder| builder,
            &EndpointConfig {
                keepalive: Duration::from_secs(50),
                window,
                ..small()
            },
        );
        for serial in 0..100 {
            pair.to_server.call(b"under way", 2 * serial, 0).unwrap();
            pair.client.flush_endpoints().unwrap();
            pair.to_server
                .call(b"held back", 2 * serial + 1, 0)
                .unwrap();
            // The peer answers nothing before it has both.
            let mut requests = Vec::new();
            let received = Cell::new(0);
            step_until(
                || received.get() == 2,
                || {
                    // The timeout is so long that the watchdog would end the test if the sleeper
                    // missed the event.
                    if pair.to_server.stats().messages_sent < 2 * (serial + 1) {
                        pair.client.wait(Some(Duration::from_secs(60))).unwrap();
                    }
                    pair.client.poll_quietly();
                    pair.server.poll_quietly();
                    requests.extend(pair.server.recv());
                    received.set(requests.len());
                },
            );
            requests
                .into_iter()
                .for_each(|request| request.reply(b"").unwrap());
            pair.finish(2);
        }
        assert!(pair.client.stats().window_stalls > 0, "{window:?}");
    }
}

/// The completion of the WRITE of the first reply was not taken when the context was dropped, or
/// the peer's word was not read.
#[test]
fn a_context_that_is_dropped_sends_the_replies_that_a_window_holds_back() {
    let exempt_bytes = Window::DEFAULT_EXEMPT_BYTES;
    for window in [
        Window::Completion {
            batches: 1,
            exempt_bytes,
        },
        Window::Consumption {
            batches: 1,
            exempt_bytes,
        },
    ] {
        drop_with_a_reply_that_waits(&EndpointConfig { window, ..small() });
    }
}

/// B1: the peer has taken the previous batch, but only its published record shows this.
#[test]
fn a_context_that_is_dropped_sends_the_replies_for_which_its_peer_has_made_room() {
    drop_with_a_reply_that_waits(&EndpointConfig {
        batches_in_flight: 1,
        ..small()
    });
}

/// The server, in a thread of its own, flushes its first reply. The second reply still waits when
/// the server is dropped. Meanwhile the client is polled: a device that gets packets answers only
/// in a poll.
fn drop_with_a_reply_that_waits(config: &EndpointConfig) {
    let net = Net::new();
    let client = net.context();
    let pending = client.create_endpoint(config).unwrap();
    let (spec, record) = (net.spec(), pending.local_info());
    let (connected, records) = mpsc::channel();
    let first_has_arrived = AtomicBool::new(false);
    let ended = RefCell::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let server = Checked::new(ContextBuilder::new(spec));
            let pending = server.create_endpoint(config).unwrap();
            let own_record = pending.local_info();
            let _endpoint = pending.connect(&record).unwrap();
            connected.send(own_record).unwrap();
            reply_and_leave(server, &first_has_arrived);
        });
        let to_server = pending.connect(&records.recv().unwrap()).unwrap();
        to_server.call(b"", 1, 0).unwrap();
        to_server.call(b"", 2, 4).unwrap();
        let poll = || client.poll_into(&ended);
        step_until(|| !ended.borrow().is_empty(), poll);
        step_a_while(poll);
        first_has_arrived.store(true, Ordering::Release);
        step_until(|| ended.borrow().len() == 2, poll);
    });
    assert_eq!(ended.take()[1], (2, Ok(b"held".to_vec())), "{config:?}");
}

fn reply_and_leave(server: Checked, first_has_arrived: &AtomicBool) {
    let mut requests = VecDeque::new();
    let receive = || {
        server.poll_quietly();
        requests.extend(std::iter::from_fn(|| server.recv()));
        requests.len() == 2
    };
    step_until(receive, || ());
    requests.pop_front().unwrap().reply(b"").unwrap();
    server.flush_endpoints().unwrap();
    let is_immediate = mode() == Mode::Immediate;
    // In other than immediate time, the server's device executes the WRITE in a poll, which takes
    // the completion too.
    let poll = || {
        if !is_immediate {
            server.poll_quietly();
        }
    };
    step_until(|| first_has_arrived.load(Ordering::Acquire), poll);
    requests.pop_front().unwrap().reply(b"held").unwrap();
    server.flush_endpoints().unwrap();
    assert!(
        !is_immediate || server.stats().messages_sent == 1,
        "the second waits"
    );
}
