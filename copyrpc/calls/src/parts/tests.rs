use std::task::Waker;

use super::*;
use crate::methods::{Context, MethodError};

type ClientError = crate::CallFailure;

fn handle(timeout: Duration) -> StopHandle {
    StopHandle::new(Waker::noop().clone(), timeout)
}

fn reassembler(max_bytes: usize, max_held: usize) -> Reassembler {
    Reassembler::new(handle(Duration::ZERO), max_bytes, max_held)
}

/// Bytes of a message in each direction.
const MESSAGE: usize = 50;

/// Returns the bytes of a part: the header, and `bytes`.
fn part(kind: u32, name: (u64, u64), len: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let mut part = Vec::new();
    let kind_and_room = u64::from(kind) | (MESSAGE as u64) << 32;
    push_words(&mut part, [kind_and_room, name.0, name.1, len, offset]);
    part.extend_from_slice(bytes);
    part
}

/// Handles calls itself: the reply is the request backwards, as often as `times`.
struct Direct {
    parts: Reassembler,
    times: usize,
    /// Number of requests that the handler got.
    handled: usize,
    calls: usize,
    /// The number of the call that ends with this error, and whether the server gets the call
    /// before.
    fails: Option<(usize, bool, ClientError)>,
    /// Number of the call before which the server is replaced by another.
    restarts: Option<usize>,
}

impl Direct {
    fn new(times: usize) -> Self {
        let parts = reassembler(1000, 2000);
        Self {
            parts,
            times,
            handled: 0,
            calls: 0,
            fails: None,
            restarts: None,
        }
    }
}

impl Caller for Direct {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        Some(Duration::from_secs(9))
    }

    fn call(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Cow<'_, [u8]>, ClientError> {
        assert!(
            request.len() <= MESSAGE
                && timeout.is_none_or(|timeout| timeout <= Duration::from_secs(9))
        );
        self.calls += 1;
        let failure = self.fails.filter(|(call, ..)| *call == self.calls);
        if let Some((_, false, error)) = failure {
            return Err(error);
        }
        if self.restarts == Some(self.calls) {
            self.parts = reassembler(1000, 2000);
        }
        let reply = self.parts.answer(request, |whole| {
            self.handled += 1;
            backwards(&whole, self.times)
        });
        assert!(reply.len() <= MESSAGE);
        failure.map_or(Ok(reply.into()), |(_, _, error)| Err(error))
    }
}

fn backwards(bytes: &[u8], times: usize) -> Vec<u8> {
    bytes
        .iter()
        .rev()
        .copied()
        .collect::<Vec<_>>()
        .repeat(times)
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|n| n as u8).collect()
}

fn client(times: usize) -> Client<Direct> {
    Client::new(Direct::new(times), MESSAGE, MESSAGE)
}

#[test]
fn payloads_of_every_length_arrive_whole_in_both_directions_and_leave_nothing() {
    for times in [0, 1, 3] {
        let mut client = client(times);
        for len in 0..200 {
            assert_eq!(
                client.call(&payload(len), None),
                Ok(backwards(&payload(len), times).into())
            );
            assert_eq!(
                (client.caller.parts.held(), client.caller.handled),
                (0, len + 1)
            );
        }
    }
    let mut client = client(1);
    client.call(&payload(10), None).unwrap();
    assert_eq!(client.caller.calls, 1, "a short payload takes one call");
}

/// Each call of a payload is ended in each way: the error correctly states whether the handler ran.
#[test]
fn an_end_in_the_middle_says_whether_the_handler_ran_and_a_retry_succeeds_where_it_may() {
    let request = payload(95);
    let (sent, all) = (10, 12);
    let not_sent = ClientError::NotSent;
    let too_large = ClientError::TooLarge { len: 10, max: 9 };
    for (call, arrives, error) in (1..=all).flat_map(|call| {
        [
            (call, false, not_sent),
            (call, false, too_large),
            (call, false, ClientError::TimedOut),
            (call, true, ClientError::TimedOut),
        ]
    }) {
        let mut client = client(1);
        client.caller.fails = Some((call, arrives, error));
        let ended = client.call(&request, None).unwrap_err();
        let expected = match call {
            _ if call < sent => (PartsError::Unsent(error), error != too_large, false),
            _ if call == sent => (
                PartsError::Call(error),
                error == not_sent,
                error == ClientError::TimedOut,
            ),
            _ => (PartsError::Unfetched(error), false, true),
        };
        assert_eq!(
            (ended, ended.is_retryable(), ended.may_have_executed()),
            expected,
            "call {call}"
        );
        assert!(ended.may_have_executed() || client.caller.handled == 0);
        // The next call replaces the parts that the failed call left at the server.
        assert_eq!(
            client.call(&request, None),
            Ok(backwards(&request, 1).into())
        );
        assert_eq!(
            (client.caller.parts.held(), client.caller.parts.calls.len()),
            (0, 0)
        );
    }
    assert_eq!(
        client(1).call(&request, None).map(|reply| reply.len()),
        Ok(95)
    );
}

#[test]
fn a_server_that_is_restarted_in_the_middle_runs_no_handler_for_half_a_request() {
    for call in 2..=12 {
        let mut client = client(1);
        client.caller.restarts = Some(call);
        let ended = client.call(&payload(95), None).unwrap_err();
        let expected = if call <= 10 {
            (PartsError::Lost, true, false)
        } else {
            (PartsError::ReplyLost, false, true)
        };
        assert_eq!(
            (ended, ended.is_retryable(), ended.may_have_executed()),
            expected,
            "call {call}"
        );
        assert_eq!(client.caller.handled, usize::from(call > 10));
    }
}

#[test]
fn lengths_are_checked_before_memory_is_taken() {
    let mut client = client(3);
    let ended = client.call(&payload(1001), None).unwrap_err();
    assert_eq!(ended, PartsError::TooLong { max: 1000 });
    assert_eq!(
        (
            ended.is_retryable(),
            ended.may_have_executed(),
            client.caller.handled,
            client.caller.calls
        ),
        (false, false, 0, 1)
    );
    client.max_bytes = 299;
    let ended = client.call(&payload(100), None).unwrap_err();
    assert_eq!(ended, PartsError::ReplyTooLong { bytes: 300 });
    assert_eq!(
        (
            ended.is_retryable(),
            ended.may_have_executed(),
            client.caller.handled
        ),
        (false, true, 1)
    );
    let mut parts = reassembler(usize::MAX, usize::MAX);
    assert_eq!(
        parts.answer(
            &part(REQUEST, (1, 1), u64::MAX, 0, b"a"),
            |_| unreachable!()
        ),
        [BUSY]
    );
    assert_eq!(parts.held(), 0);
}

#[test]
fn clients_share_the_memory_and_what_a_client_left_behind_makes_room() {
    let one = 500 + CALL_BYTES;
    let mut parts = reassembler(1000, 2 * one);
    let mut first = |client, len, idle| {
        parts.idle = idle;
        let reply = parts
            .receive(&part(REQUEST, (client, 1), len, 0, b"ab"))
            .unwrap_err();
        (reply[0], parts.held())
    };
    let never = Duration::from_secs(3600);
    assert_eq!(first(1, 500, never), (MORE, one));
    assert_eq!(first(2, 500, never), (MORE, 2 * one));
    assert_eq!(first(3, 3, never), (BUSY, 2 * one));
    assert_eq!(first(2, 500, never), (MORE, 2 * one), "its own place");
    assert_eq!(
        first(3, 3, Duration::ZERO),
        (MORE, 3 + CALL_BYTES),
        "the others have gone"
    );
    parts.forget_idle(never);
    assert_eq!(parts.held(), 3 + CALL_BYTES);
    parts.forget_idle(Duration::ZERO);
    assert_eq!(parts.held(), 0);
    // Replies take up the shared memory too.
    parts.idle = never;
    let whole = part(REQUEST, (4, 1), 1, 0, b"a");
    assert_eq!(parts.answer(&whole, |_| vec![1; 5000])[0], DONE);
    assert_eq!(
        parts.answer(&part(REQUEST, (5, 1), 1, 0, b"a"), |_| unreachable!()),
        [BUSY]
    );
    assert!(
        PartsError::<ClientError>::Busy.is_retryable()
            && !PartsError::<ClientError>::Busy.may_have_executed()
    );
    assert_eq!(
        parts.answer(&whole, |_| vec![]).len(),
        REPLY_HEADER,
        "the client gave the reply up"
    );
    assert_eq!(parts.held(), 0);
}

#[test]
fn a_late_reply_leaves_the_next_call_of_its_client_alone() {
    let mut parts = reassembler(1000, 2000);
    let (given_up, _) = parts.receive(&part(REQUEST, (1, 1), 1, 0, b"a")).unwrap();
    assert_eq!(
        parts
            .receive(&part(REQUEST, (1, 2), 4, 0, b"ab"))
            .unwrap_err(),
        [MORE]
    );
    assert_eq!(parts.reply(given_up, vec![0; 500])[0], DONE);
    let (_, whole) = parts.receive(&part(REQUEST, (1, 2), 4, 2, b"cd")).unwrap();
    assert_eq!((&whole[..], parts.held()), (&b"abcd"[..], 0));
}

#[test]
fn the_clone_of_a_client_is_another_client() {
    #[derive(Clone)]
    struct No;
    let (client, parts) = (
        Client::new(No, MESSAGE, MESSAGE),
        &mut reassembler(1000, 2000),
    );
    for client in [&client.clone(), &client] {
        let part = client.transfer(client.name, &[7; 20], None).next_part();
        assert_eq!(parts.receive(&part).unwrap_err(), [MORE]);
    }
    assert_eq!(parts.calls.len(), 2);
}

#[test]
fn parts_that_do_not_fit_reach_no_handler() {
    let first = part(REQUEST, (1, 1), 30, 0, b"0123456789");
    let bad = [
        part(REQUEST, (1, 1), 30, 10, b"012345678901234567890"),
        part(REQUEST, (1, 1), 30, 11, b"0123456789"),
        part(REQUEST, (1, 1), 30, u64::MAX, b"0123456789"),
        part(REQUEST, (1, 1), 20, 10, b"0123456789"),
        part(REQUEST, (1, 1), 30, 10, b""),
        part(REQUEST, (1, 2), 30, 10, b"0123456789"),
        part(FETCH, (1, 1), 30, 10, b""),
        part(0x1_0003, (1, 1), 30, 10, b"0123456789"),
    ];
    for bad in bad {
        let mut parts = reassembler(1000, 2000);
        assert_eq!(parts.answer(&first, |_| unreachable!()), [MORE]);
        assert_eq!(parts.answer(&bad, |_| unreachable!()), [LOST], "{bad:?}");
        assert_eq!(parts.held(), 0);
    }
    for bad in [
        part(REQUEST, (1, 1), 3, 0, b"0123"),
        part(REQUEST, (1, 1), 3, 0, b""),
        part(FETCH, (1, 1), 0, 0, b""),
        b"short".to_vec(),
    ] {
        assert_eq!(
            reassembler(1000, 2000).answer(&bad, |_| unreachable!()),
            [LOST],
            "{bad:?}"
        );
    }
}

/// The request stays the caller's. The last part of it brings the first part of the reply.
#[test]
fn a_call_reports_its_progress_after_each_part() {
    let request = [7; 25];
    let mut seen = Vec::new();
    let mut client = Client::new(Direct::new(1), MESSAGE, MESSAGE);
    let reply = client
        .call_with(&request, None, |progress| seen.push(progress))
        .unwrap();
    assert_eq!(reply, request);
    let progress = |sent, received, reply| Progress {
        sent,
        received,
        reply,
    };
    assert_eq!(
        seen,
        [
            progress(10, 0, None),
            progress(20, 0, None),
            progress(25, 25, Some(25))
        ]
    );
}

/// A reply is being fetched, and a handler runs. The reply of a third call was given up by its
/// client.
#[test]
fn a_server_that_stops_lets_its_clients_fetch_the_replies_and_takes_no_further_request() {
    let stop = handle(Duration::from_secs(3600));
    let mut parts = Reassembler::new(stop.clone(), 1000, 20_000);
    let fetch = |parts: &mut Reassembler, client, done: usize| {
        parts
            .receive(&part(FETCH, (client, 1), 1, done as u64, b""))
            .unwrap_err()
    };
    let first = parts.answer(&part(REQUEST, (1, 1), 1, 0, b"a"), |_| vec![7; 100]);
    assert_eq!(
        parts.answer(&part(REQUEST, (2, 1), 1, 0, b"a"), |_| vec![0; 100])[0],
        DONE
    );
    let (running, _) = parts.receive(&part(REQUEST, (3, 1), 1, 0, b"a")).unwrap();
    assert_eq!(
        parts
            .receive(&part(REQUEST, (4, 1), 9, 0, b"a"))
            .unwrap_err(),
        [MORE]
    );
    assert!(!stop.is_stopped());
    stop.stop();
    assert_eq!(
        parts.answer(&part(REQUEST, (2, 2), 1, 0, b"a"), |_| unreachable!()),
        [BUSY]
    );
    assert_eq!(
        parts.answer(
            &part(REQUEST, (4, 1), 9, 1, b"12345678"),
            |_| unreachable!()
        ),
        [BUSY]
    );
    let mut done = first.len() - REPLY_HEADER;
    while done < 100 {
        assert!(!stop.is_stopped());
        done += fetch(&mut parts, 1, done).len() - REPLY_HEADER;
    }
    assert!(!stop.is_stopped(), "a handler runs");
    parts.reply(running, b"short".to_vec());
    assert_eq!((stop.is_stopped(), parts.held()), (true, 0));
}

/// Two clients fetch a reply, and leave one after the other. A third client's number is not known.
#[test]
fn a_server_that_stops_waits_for_no_client_that_has_left() {
    let stop = handle(Duration::from_secs(3600));
    let mut parts = Reassembler::new(stop.clone(), 1000, 20_000);
    for client in [1, 2] {
        let bytes = part(REQUEST, (client, 1), 1, 0, b"a");
        let context = Context::new().with_client(10 * client, None);
        let reply = parts.answer(&context.with_data(&bytes), |_| vec![7; 100]);
        assert_eq!(reply[0], DONE);
    }
    let unknown = part(REQUEST, (3, 1), 1, 0, b"a");
    parts.answer(&unknown, |_| vec![7; 100]);
    stop.stop();
    stop.forget(|client| client != 10);
    stop.forget(|client| client != 20);
    assert!(!stop.is_stopped(), "the third may be there");
    parts.forget_idle(Duration::ZERO);
    assert!(stop.is_stopped());
}

/// A server of methods without parts reports that it cannot decode a part, and no handler of a call
/// in parts is dropped early.
#[test]
fn a_part_is_no_request_of_a_method_and_the_whole_has_the_time_from_its_first_part() {
    assert!(
        [REQUEST, FETCH]
            .iter()
            .all(|kind| Header::read(&part(*kind, (1, 1), 30, 0, b"")).is_none())
    );
    // Method 7, whose caller has 5 s left.
    let mut request = Vec::new();
    push_words(&mut request, [7 | 5_000 << 32, 1]);
    let (mut parts, before) = (reassembler(1000, 2000), Instant::now());
    assert_eq!(
        parts
            .receive(&part(REQUEST, (1, 1), 16, 0, &request[..9]))
            .unwrap_err(),
        [MORE]
    );
    let first = Instant::now();
    let (whole, bytes) = parts
        .receive(&part(REQUEST, (1, 1), 16, 9, &request[9..]))
        .unwrap();
    let since = whole.deadline(&bytes).unwrap() - Duration::from_secs(5);
    assert!(bytes == request && since >= before && since <= first);
    assert_eq!(whole.deadline(b"no method"), None);
}

crate::service! {
    mod echo {
        fn echo(text: String) -> Result<String, ()> = 1;
    }
}

/// Fails if it runs.
struct Unreached;

impl echo::Service for Unreached {
    fn echo(&mut self, text: String) -> Result<String, ()> {
        unreachable!("{text}")
    }
}

/// A server of methods: in parts, if there is a `Reassembler`.
struct Server(Option<Reassembler>);

impl Caller for Server {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        None
    }

    fn call(&mut self, request: &[u8], _: Option<Duration>) -> Result<Cow<'_, [u8]>, ClientError> {
        let reply = match &mut self.0 {
            Some(parts) => parts.answer(request, |whole| echo::answer(&mut Unreached, &whole)),
            None => echo::answer(&mut Unreached, request),
        };
        Ok(reply.into())
    }
}

/// A request takes one part, or several.
#[test]
fn ends_of_which_one_has_parts_say_so_and_that_nothing_ran() {
    for len in [0, 200] {
        let mut whole = echo::Client::new(Server(Some(reassembler(1000, 2000))));
        let ended = whole.echo("a".repeat(len)).unwrap_err();
        assert_eq!(
            ended,
            MethodError::Arguments(PayloadError::NotInParts),
            "{len}"
        );
        assert!(!ended.is_retryable() && !ended.may_have_executed());
        let mut in_parts = echo::Client::new(Client::new(Server(None), MESSAGE, MESSAGE));
        let ended = in_parts.echo("a".repeat(len)).unwrap_err();
        assert_eq!(ended, MethodError::Call(PartsError::NoParts), "{len}");
        assert!(!ended.is_retryable() && !ended.may_have_executed());
    }
}

/// A call whose only part was sent.
fn transfer(max_bytes: usize) -> Transfer<'static> {
    let mut client = client(1);
    client.max_bytes = max_bytes;
    let mut transfer = client.transfer((1, 1), b"abc", None);
    transfer.next_part();
    transfer
}

#[test]
fn no_bytes_of_a_peer_panic_or_pass_the_bounds() {
    let mut seed = 7_u64;
    let mut random = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut parts = reassembler(100, 900);
    let mut handled = 0;
    for _ in 0..100_000 {
        let numbers = [0, 1, 10, 20, 30, 99, 100, 101, u64::MAX];
        let (len, offset) = (numbers[random(9) as usize], numbers[random(9) as usize]);
        let bytes = vec![
            0;
            if random(2) == 0 {
                random(12)
            } else {
                len.min(11)
            } as usize
        ];
        let mut any = part(
            REQUEST - 1 + random(4) as u32,
            (random(4), random(2)),
            len,
            offset,
            &bytes,
        );
        any.truncate(
            any.len()
                - if random(20) == 0 {
                    random(60).min(any.len() as u64) as usize
                } else {
                    0
                },
        );
        let reply = parts.answer(&any, |whole| {
            assert!(whole.len() <= 100);
            handled += 1;
            vec![0; 70]
        });
        assert!(parts.held() <= 900 + 70 + CALL_BYTES && parts.calls.len() <= 4);
        // Neither the message nor the reply, taken as a reply with one more byte at its beginning,
        // makes a client panic.
        let mut client = transfer(80);
        for first in 0..6 {
            let _any = client.take::<ClientError>(Ok([&[first], &any[..]].concat()));
            let _any = client.take::<ClientError>(Ok([&[first], &reply[..]].concat()));
            assert!(client.reply.len() <= 80);
        }
    }
    assert!(handled > 100, "{handled}");
}

#[test]
fn replies_that_are_none_end_a_call_whose_handler_may_have_run() {
    let mut long = vec![DONE];
    push_words(&mut long, [9]);
    long.extend([1, 2]);
    for reply in [
        vec![],
        vec![DONE],
        vec![5],
        vec![MORE],
        vec![DONE, 9, 0, 0, 0, 0, 0, 0, 0],
        vec![TOO_LONG, 9],
        b"text".to_vec(),
    ] {
        let ended = transfer(1000)
            .take::<ClientError>(Ok(reply.clone()))
            .unwrap_err();
        assert_eq!(
            (ended, ended.is_retryable(), ended.may_have_executed()),
            (PartsError::Reply, false, true),
            "{reply:?}"
        );
    }
    let mut transfer = transfer(1000);
    assert_eq!(transfer.take::<ClientError>(Ok(long)), Ok(()));
    assert!(!transfer.is_whole());
    let mut other = vec![DONE];
    push_words(&mut other, [8]);
    other.push(1);
    assert_eq!(
        transfer.take::<ClientError>(Ok(other)),
        Err(PartsError::Reply),
        "another length"
    );
}
