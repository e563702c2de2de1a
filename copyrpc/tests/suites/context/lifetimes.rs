//! Lifetimes: endpoints, handles and user data of contexts that are gone, and numbers that are used
//! again.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use copyrpc::{
    CallError, CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig, Outcome, RecvHandle,
};

use crate::support::{Net, Pair, join, small, step_until};

fn build<U>(net: &Net) -> Context<U> {
    ContextBuilder::new(net.spec()).build().unwrap()
}

fn connect<U, V>(a: &Context<U>, b: &Context<V>) -> (Endpoint<U>, Endpoint<V>) {
    let (a, b) = (
        a.create_endpoint(&small()).unwrap(),
        b.create_endpoint(&small()).unwrap(),
    );
    let (record_a, record_b) = (a.local_info(), b.local_info());
    (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
}

/// A call of `close` or `abort` after the context's end keeps nothing alive: the connection is
/// freed, with the memory of its two rings and the device.
#[test]
fn an_endpoint_that_is_closed_or_aborted_after_its_context_leaves_nothing_behind() {
    let net = Net::new();
    let server: Context<u64> = build(&net);
    for end in [Endpoint::close, Endpoint::abort] {
        let (client, data) = (build::<Rc<()>>(&net), Rc::new(()));
        let (endpoint, _peer) = connect(&client, &server);
        endpoint.call(b"", Rc::clone(&data), 0).unwrap();
        client.flush_endpoints().unwrap();
        drop(client);
        end(&endpoint);
        let refused = endpoint.call(b"", Rc::clone(&data), 0);
        assert!(matches!(
            refused,
            Err(CallError::Closed {
                reason: CloseReason::ClosedHere,
                ..
            })
        ));
        drop((refused, endpoint));
        assert_eq!(Rc::strong_count(&data), 1);
    }
}

/// User data that holds the endpoint of its own call.
#[derive(Debug)]
struct Holder {
    endpoint: RefCell<Option<Endpoint<Rc<Self>>>>,
}

#[test]
fn user_data_goes_with_its_context_though_it_holds_the_endpoint() {
    let net = Net::new();
    let (client, server) = (build::<Rc<Holder>>(&net), build::<u64>(&net));
    let (endpoint, _peer) = connect(&client, &server);
    let holder = Rc::new(Holder {
        endpoint: RefCell::new(Some(endpoint.clone())),
    });
    endpoint.call(b"", Rc::clone(&holder), 0).unwrap();
    client.flush_endpoints().unwrap();
    drop(client);
    assert_eq!(Rc::strong_count(&holder), 1);
    assert_eq!(endpoint.outstanding_calls(), 0);
    holder.endpoint.take();
}

/// User data whose drop makes a call.
#[derive(Debug)]
struct Caller {
    endpoint: Endpoint<Option<Self>>,
    outcomes: Rc<Cell<u32>>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        let outcome = self.endpoint.call(b"from a drop", None, 0);
        self.endpoint.close();
        self.endpoint.abort();
        self.outcomes
            .set(self.outcomes.get() + if outcome.is_ok() { 1 } else { 100 });
    }
}

#[test]
fn user_data_may_call_and_close_when_it_is_dropped() {
    let net = Net::new();
    let (client, server) = (build::<Option<Caller>>(&net), build::<u64>(&net));
    let outcomes = Rc::default();
    for _ in 0..2 {
        let (endpoint, _peer) = connect(&client, &server);
        let caller = || {
            Some(Caller {
                endpoint: endpoint.clone(),
                outcomes: Rc::clone(&outcomes),
            })
        };
        endpoint.call(b"", caller(), 0).unwrap();
        let token = endpoint.call(b"", caller(), 0).unwrap();
        assert!(endpoint.cancel(token).is_some());
        drop(endpoint);
    }
    client.poll(|_, _| ()).unwrap();
    let (endpoint, _peer) = connect(&client, &server);
    endpoint
        .call(
            b"",
            Some(Caller {
                endpoint: endpoint.clone(),
                outcomes: Rc::clone(&outcomes),
            }),
            0,
        )
        .unwrap();
    drop((endpoint, client));
    assert_eq!(
        outcomes.get(),
        2 + 300,
        "two when cancelled, one when its connection was closed; of one more the context was gone"
    );
}

/// Endpoints, handles and records that are not connected, dropped from a callback and after their
/// context.
#[test]
fn anything_may_be_dropped_inside_a_callback() {
    let pair = Pair::small();
    let (other, other_peer) = join(&pair.client, &pair.server, &small());
    let mut pending = vec![
        pair.client.create_endpoint(&small()).unwrap(),
        pair.client.create_endpoint(&small()).unwrap(),
    ];
    other_peer.call(b"held", 5, 8).unwrap();
    let held: RefCell<Vec<RecvHandle<u64>>> = RefCell::default();
    step_until(
        || !held.borrow().is_empty(),
        || pair.poll_and(|| held.borrow_mut().extend(pair.client.recv())),
    );
    let mut others = vec![other.clone(), other];
    pair.to_server.call(b"", 1, 0).unwrap();
    let ended = Cell::new(false);
    step_until(
        || ended.get(),
        || {
            let on_response = |_, _: Outcome<'_>| {
                drop(pending.pop());
                others.iter().for_each(Endpoint::abort);
                others.clear();
                held.borrow_mut().clear();
                ended.set(true);
            };
            pair.client.poll(on_response).unwrap();
            pair.server.poll(|_, _| ()).unwrap();
            pair.server.echo_all();
        },
    );
    let Pair { client, .. } = pair;
    drop(client);
    drop(pending);
}

/// The application has received all requests, and does not call `recv` again.
#[test]
fn an_endpoint_that_ended_is_gone_though_nobody_receives_any_more() {
    let net = Net::new();
    let (client, server) = (net.context(), net.build(|builder| builder.srq_size(48)));
    let (to_server, to_client) = join(&client, &server, &small());
    to_server.call(b"", 1, 0).unwrap();
    let received = RefCell::new(None);
    step_until(
        || received.borrow().is_some(),
        || {
            client.poll_quietly();
            server.poll_quietly();
            received.replace(server.recv());
        },
    );
    to_client.abort();
    drop((to_client, received));
    server.poll_quietly();
    server.create_endpoint(&small()).unwrap();
    to_server.abort();
}

/// Devices use queue pair numbers again: some number their queue pairs in a circle, others take the
/// lowest free number.
#[test]
fn an_endpoint_that_ended_harms_no_later_one_with_its_number() {
    let pair = Pair::small();
    let (old, _peer) = join(&pair.client, &pair.server, &small());
    old.abort();
    pair.client.poll_quietly();
    let mut new = None;
    for _ in 0..5_000 {
        let pending = pair.client.create_endpoint(&small()).unwrap();
        if pending.local_info().address.qpn == old.qpn() {
            new = Some(pending);
            break;
        }
    }
    let new = new.expect("number reuse");
    let (new, _new_peer) =
        crate::support::connect(new, pair.server.create_endpoint(&small()).unwrap());
    new.call(b"new", 1, 8).unwrap();
    old.abort();
    old.close();
    assert_eq!(pair.finish(1), [(1, Ok(b"new".to_vec()))]);
}

/// The first poll after the abort takes a part of the arrivals and destroys the queue pair; the
/// other arrivals are still in the completion queue.
#[test]
fn what_arrived_for_an_endpoint_that_ended_is_nothing_to_the_next_with_its_number() {
    const LAST: u64 = 1000;
    // Room for more messages than a poll of a software HCA takes from one connection.
    let config = EndpointConfig {
        ring_size: 1 << 16,
        ..small()
    };
    let pair = Pair::new(|builder| builder, &config);
    let (old, peer) = join(&pair.client, &pair.server, &config);
    for serial in 0..100 {
        peer.call(b"late", serial, 8).unwrap();
        pair.server.flush_endpoints().unwrap();
    }
    old.abort();
    pair.client.poll_quietly();
    let make = || pair.client.create_endpoint(&config).unwrap();
    // A NIC may use the number again only after a long time; then any endpoint is taken.
    let new = (0..5_000)
        .map(|_| make())
        .find(|new| new.local_info().address.qpn == old.qpn())
        .unwrap_or_else(make);
    let (new, _new_peer) =
        crate::support::connect(new, pair.server.create_endpoint(&config).unwrap());
    new.call(b"new", LAST, 8).unwrap();
    let is_done = || {
        pair.ended
            .borrow()
            .iter()
            .any(|(serial, _)| *serial == LAST)
    };
    step_until(is_done, || pair.poll_and(|| pair.server.echo_all()));
    assert!(
        pair.ended.take().contains(&(LAST, Ok(b"new".to_vec()))),
        "{:?}",
        new.closed()
    );
}
