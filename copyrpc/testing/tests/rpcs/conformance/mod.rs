//! Promises of every shared-memory RPC of the workspace, whatever its memory layout.

mod deadlines;
mod processes;
mod waiting;

use std::os::fd::AsRawFd;
use std::time::Instant;

use copyrpc_calls::{CallFailure, SessionEnd};
use copyrpc_testing::helpers::{self, PATIENCE, Scratch, wait_for_some};

use crate::rpc::{Outcome, Refused, Rpc};

pub(crate) use deadlines::*;
pub(crate) use processes::*;
pub(crate) use waiting::*;

fn pair<R: Rpc>(scratch: &Scratch, clients: usize, depth: usize) -> (R::Server, R::Client) {
    (
        R::create(&scratch.dir(), clients, depth),
        connect::<R>(scratch),
    )
}

fn connect<R: Rpc>(scratch: &Scratch) -> R::Client {
    R::connect(&scratch.dir()).expect("there is a free entry")
}

/// Polls once and takes all requests.
fn take_all<R: Rpc>(server: &mut R::Server) -> Vec<(R::Held, u64)> {
    R::serve_poll(server);
    std::iter::from_fn(|| R::recv(server)).collect()
}

/// Polls once and answers all requests by `answer`. Asserts that their clients are connected.
/// Returns the number of requests.
fn answer_all<R: Rpc>(server: &mut R::Server, answer: impl Fn(u64) -> u64) -> u64 {
    let requests = take_all::<R>(server);
    let count = requests.len() as u64;
    requests
        .into_iter()
        .for_each(|(request, number)| assert!(R::reply(server, request, answer(number))));
    count
}

fn ends<R: Rpc>(client: &mut R::Client) -> Vec<(u64, Outcome)> {
    let mut ended = vec![];
    let polled = R::poll(client, |user, outcome| ended.push((user, outcome)));
    assert_eq!(polled, Ok(ended.len()));
    ended
}

pub(crate) fn full_queue_gives_everything_back_and_a_reply_makes_room<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for n in 0..4 {
        R::call(&mut client, n, n).unwrap();
    }
    assert_eq!(R::call(&mut client, 77, 88), Err(Refused::Full(77, 88)));
    let mut requests = take_all::<R>(&mut server);
    assert_eq!(requests.len(), 4);
    assert!(R::call(&mut client, 0, 0).is_err(), "taken is not answered");
    let (first, _) = requests.remove(0);
    assert!(R::reply(&mut server, first, 100));
    assert!(
        R::call(&mut client, 0, 0).is_err(),
        "answered is not polled"
    );
    assert_eq!(ends::<R>(&mut client), [(0, Ok(100))]);
    R::call(&mut client, 4, 4).unwrap();
    assert!(R::call(&mut client, 5, 5).is_err());
}

pub(crate) fn rejected_request_ends_its_call<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    R::call(&mut client, 1, 10).unwrap();
    R::call(&mut client, 2, 20).unwrap();
    let mut requests = take_all::<R>(&mut server).into_iter();
    R::reject(&mut server, requests.next().unwrap().0);
    assert!(R::reply(&mut server, requests.next().unwrap().0, 5));
    assert_eq!(
        ends::<R>(&mut client),
        [(10, Err(CallFailure::Refused)), (20, Ok(5))]
    );
}

pub(crate) fn requests_that_are_dropped_end_their_calls_and_make_room<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    // More than one lap of both lanes.
    for _ in 0..10 {
        for n in 0..4 {
            R::call(&mut client, n, n).unwrap();
        }
        for (request, number) in take_all::<R>(&mut server) {
            if number % 2 == 0 {
                drop(request);
            } else {
                assert!(R::reply(&mut server, request, number));
            }
        }
        R::serve_poll(&mut server);
        let mut ended = ends::<R>(&mut client);
        ended.sort_unstable_by_key(|(user, _)| *user);
        assert_eq!(
            ended,
            [
                (0, Err(CallFailure::Dropped)),
                (1, Ok(1)),
                (2, Err(CallFailure::Dropped)),
                (3, Ok(3))
            ]
        );
        R::serve_poll(&mut server);
        assert_eq!(ends::<R>(&mut client), []);
    }
}

pub(crate) fn replies_in_any_order_at_full_depth_bring_every_token_back_once<R: Rpc>(name: &str) {
    let calls = 5_000_000 * u64::from(helpers::scale());
    let seed = 0x5eed_0002;
    let mut random = fastrand::Rng::with_seed(seed);
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 16);
    let mut returned = vec![0u8; calls as usize];
    let mut sent = 0;
    let mut expected = 0;
    let mut received = 0;
    let mut held = vec![];
    let mut empty = 0;
    while received < calls {
        while sent < calls && R::call(&mut client, sent, sent).is_ok() {
            sent += 1;
        }
        for (request, number) in take_all::<R>(&mut server) {
            assert_eq!(number, expected, "requests of a client come in order");
            expected += 1;
            held.push((request, number));
        }
        for _ in 0..random.usize(..=held.len()) {
            let (request, number) = held.swap_remove(random.usize(..held.len()));
            assert!(R::reply(&mut server, request, !number));
        }
        let ended = ends::<R>(&mut client);
        for (user, outcome) in &ended {
            assert_eq!(*outcome, Ok(!user), "seed {seed:#x}");
            returned[*user as usize] += 1;
            received += 1;
        }
        empty = if ended.is_empty() { empty + 1 } else { 0 };
        assert!(empty < 1000, "seed {seed:#x}: stuck at {received}");
    }
    assert!(returned.iter().all(|&n| n == 1));
    println!("{received} calls answered in any order, 0 lost, 0 repeated");
}

pub(crate) fn calls_of_a_server_that_ends_end_once_after_what_it_answered<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 8);
    for n in 0..5 {
        R::call(&mut client, n, n).unwrap();
    }
    let mut requests = take_all::<R>(&mut server).into_iter();
    assert!(R::reply(&mut server, requests.next().unwrap().0, 100));
    R::reject(&mut server, requests.next().unwrap().0);
    // The held requests are dropped before the server, as when a daemon ends.
    let rest = requests.count() as u64;
    drop(server);
    let mut ended = vec![];
    let mut polled = Ok(0);
    for _ in 0..3 {
        polled = R::poll(&mut client, |user, outcome| ended.push((user, outcome)));
    }
    assert_eq!(polled, Err(SessionEnd::PeerGone));
    assert_eq!(ended[..2], [(0, Ok(100)), (1, Err(CallFailure::Refused))]);
    assert_eq!(
        ended[2..].iter().map(|(user, _)| *user).collect::<Vec<_>>(),
        (2..2 + rest).collect::<Vec<_>>()
    );
    assert!(ended[2..].iter().all(|(_, outcome)| outcome.is_err()));
    assert_eq!(
        R::call(&mut client, 7, 8),
        Err(Refused::Ended(7, 8, SessionEnd::PeerGone))
    );
    assert!(scratch.names().is_empty());
    // A new server of the same name is a different server.
    let _next = R::create(&scratch.dir(), 1, 8);
    assert_eq!(
        R::call(&mut client, 7, 8),
        Err(Refused::Ended(7, 8, SessionEnd::PeerGone))
    );
}

pub(crate) fn calls_that_a_server_in_good_order_has_not_taken_reach_no_handler_and_others_are_of_unknown_fate<
    R: Rpc,
>(
    name: &str,
) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 5, 8);
    let mut clients: Vec<_> = (0..4).map(|_| connect::<R>(&scratch)).collect();
    let [untaken, answered, held, idle] = &mut clients[..] else {
        unreachable!()
    };
    for n in 0..2 {
        R::call(answered, 10 + n, n).unwrap();
        R::call(held, 20 + n, n).unwrap();
    }
    let mut requests = take_all::<R>(&mut server);
    requests.retain_mut(|(_, number)| *number / 10 == 2);
    assert_eq!(requests.len(), 2);
    assert_eq!(ends::<R>(answered), []);
    // The tokens of `answered` were dropped: their calls have ended.
    R::serve_poll(&mut server);
    let (request, _) = requests.remove(0);
    assert!(R::reply(&mut server, request, 5));
    for n in 2..4 {
        R::call(untaken, n, n).unwrap();
        R::call(answered, n, n).unwrap();
        R::call(held, n, n).unwrap();
    }
    // The poll finds the requests; the server does not receive them.
    assert_eq!(R::serve_poll(&mut server), 6);
    R::call(untaken, 4, 4).unwrap();
    drop(server);
    let all = |client: &mut R::Client| {
        let mut ended = vec![];
        while R::poll(client, |user, outcome| ended.push((user, outcome))).is_ok() {}
        assert_eq!(
            R::call(client, 7, 8),
            Err(Refused::Ended(7, 8, SessionEnd::PeerGone))
        );
        ended
    };
    let (stopped, dropped, gone) = (
        Err(CallFailure::NotSent),
        Err(CallFailure::Dropped),
        Err(CallFailure::Closed(SessionEnd::PeerGone)),
    );
    assert_eq!(all(untaken), [(2, stopped), (3, stopped), (4, stopped)]);
    assert_eq!(
        all(answered),
        [(0, dropped), (1, dropped), (2, stopped), (3, stopped)]
    );
    // The server had received requests of this client, so its calls end with `gone`.
    assert_eq!(all(held), [(0, Ok(5)), (1, gone), (2, gone), (3, gone)]);
    assert_eq!(all(idle), []);
    drop(requests);
}

pub(crate) fn late_answer_to_a_former_client_reaches_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    R::call(&mut client, 1, 1).unwrap();
    let (late, _) = take_all::<R>(&mut server).remove(0);
    // When the client disconnects, the server has found request 2, and not request 3.
    R::call(&mut client, 2, 2).unwrap();
    R::serve_poll(&mut server);
    R::call(&mut client, 3, 3).unwrap();
    assert!(R::connect(&scratch.dir()).is_none());
    drop(client);
    assert!(
        take_all::<R>(&mut server).is_empty(),
        "a request of a client that left is not worth serving"
    );
    let mut next = connect::<R>(&scratch);
    assert_eq!(R::id(&next), 0);
    R::call(&mut next, 4, 4).unwrap();
    let (request, number) = take_all::<R>(&mut server).remove(0);
    assert_eq!(number, 4);
    assert!(!R::reply(&mut server, late, 9));
    assert_eq!(ends::<R>(&mut next), []);
    assert!(R::reply(&mut server, request, 40));
    assert_eq!(ends::<R>(&mut next), [(4, Ok(40))]);
}

pub(crate) fn answer_that_a_former_client_did_not_take_reaches_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for n in 0..4 {
        R::call(&mut client, n, n).unwrap();
    }
    answer_all::<R>(&mut server, |number| number);
    drop(client);
    R::serve_poll(&mut server);
    let mut next = connect::<R>(&scratch);
    for n in 10..14 {
        R::call(&mut next, n, n).unwrap();
    }
    assert_eq!(ends::<R>(&mut next), []);
    assert_eq!(
        take_all::<R>(&mut server)
            .iter()
            .map(|(_, number)| *number)
            .collect::<Vec<_>>(),
        [10, 11, 12, 13]
    );
}

pub(crate) fn entries_are_reused_without_end<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 2, 2);
    let cycles = 50_000 * u64::from(helpers::scale()).min(20);
    for n in 0..cycles {
        R::serve_poll(&mut server);
        let mut client = connect::<R>(&scratch);
        if n % 64 == 0 {
            let _last = connect::<R>(&scratch);
            assert!(R::connect(&scratch.dir()).is_none());
        }
        R::call(&mut client, n, n).unwrap();
        // Some clients disconnect with a published call, some with a call that the server has
        // received.
        if n % 3 > 0 {
            let (request, number) = take_all::<R>(&mut server).remove(0);
            assert_eq!(number, n);
            if n % 3 == 1 {
                assert!(R::reply(&mut server, request, n));
                assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
            }
        }
    }
    no_descriptors_are_left();
    println!("{cycles} connections, 0 entries, 0 descriptors left");
}

fn no_descriptors_are_left() {
    let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    assert!(next < 1000, "descriptors are left open");
}

pub(crate) fn servers_come_and_go_under_living_clients<R: Rpc>(name: &str) {
    const SERVERS: u64 = 3000;
    let scratch = Scratch::new(name);
    // Clients of former servers, some of which never poll.
    let mut former = std::collections::VecDeque::new();
    for n in 0..SERVERS {
        let (mut server, mut client) = pair::<R>(&scratch, 2, 2);
        R::call(&mut client, n, n).unwrap();
        let (request, number) = take_all::<R>(&mut server).remove(0);
        assert_eq!(number, n);
        assert!(R::reply(&mut server, request, n));
        drop(server);
        assert!(scratch.names().is_empty());
        former.push_back((client, n));
        if former.len() > 64 {
            let (mut client, n) = former.pop_front().unwrap();
            if n % 2 == 0 {
                assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
                assert_eq!(R::poll(&mut client, |_, _| {}), Err(SessionEnd::PeerGone));
            }
        }
    }
    no_descriptors_are_left();
}

pub(crate) fn threads_lose_and_repeat_nothing<R: Rpc>(name: &str) {
    const CLIENTS: usize = 4;
    const CALLS: u64 = 30_000;
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), CLIENTS, 8);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| scope.spawn(|| call_until_done::<R>(connect::<R>(&scratch), CALLS)))
            .collect();
        let mut progress = Instant::now();
        while clients.iter().any(|client| !client.is_finished()) {
            let mut requests = take_all::<R>(&mut server);
            if requests.is_empty() {
                assert!(progress.elapsed() < 2 * PATIENCE, "stuck");
                std::thread::yield_now();
            } else {
                progress = Instant::now();
            }
            // The newest request is answered first.
            while let Some((request, number)) = requests.pop() {
                assert!(R::reply(&mut server, request, number + 1));
            }
        }
    });
}

pub(crate) fn threads_come_and_go_without_disturbing_each_other<R: Rpc>(name: &str) {
    const CLIENTS: usize = 4;
    const CYCLES: u64 = 1000;
    let scratch = Scratch::new(name);
    let (mut server, steady) = pair::<R>(&scratch, CLIENTS, 8);
    std::thread::scope(|scope| {
        let coming_and_going = || {
            for n in 0..CYCLES {
                // An entry is free again after the server's next poll.
                let client = wait_for_some("an entry stays taken", || R::connect(&scratch.dir()));
                call_until_done::<R>(client, n % 10);
            }
        };
        let mut clients: Vec<_> = (1..CLIENTS)
            .map(|_| scope.spawn(coming_and_going))
            .collect();
        clients.push(scope.spawn(|| call_until_done::<R>(steady, 10 * CYCLES)));
        while clients.iter().any(|client| !client.is_finished()) {
            if answer_all::<R>(&mut server, |number| number + 1) == 0 {
                std::thread::yield_now();
            }
        }
    });
}

fn call_until_done<R: Rpc>(mut client: R::Client, calls: u64) {
    let mut returned = vec![0u8; calls as usize];
    let mut sent = 0;
    let mut received = 0;
    let mut progress = Instant::now();
    while received < calls {
        while sent < calls && R::call(&mut client, sent, sent).is_ok() {
            sent += 1;
        }
        let ended = ends::<R>(&mut client);
        for (user, outcome) in &ended {
            assert_eq!(*outcome, Ok(user + 1));
            returned[*user as usize] += 1;
            received += 1;
        }
        if ended.is_empty() {
            assert!(progress.elapsed() < PATIENCE, "stuck at {received}");
            std::thread::yield_now();
        } else {
            progress = Instant::now();
        }
    }
    assert!(returned.iter().all(|&n| n == 1));
}

suite! {
    ipc bytes delegation: {
        full_queue_gives_everything_back_and_a_reply_makes_room
        rejected_request_ends_its_call
        requests_that_are_dropped_end_their_calls_and_make_room
        replies_in_any_order_at_full_depth_bring_every_token_back_once
        calls_of_a_server_that_ends_end_once_after_what_it_answered
        calls_that_a_server_in_good_order_has_not_taken_reach_no_handler_and_others_are_of_unknown_fate
        late_answer_to_a_former_client_reaches_nobody
        answer_that_a_former_client_did_not_take_reaches_nobody
        entries_are_reused_without_end
        servers_come_and_go_under_living_clients
        threads_lose_and_repeat_nothing
        threads_come_and_go_without_disturbing_each_other
        calls_of_a_killed_server_end_once_and_its_successor_serves
        entry_of_a_killed_client_is_free_again
        stopped_or_killed_client_stalls_nobody
        calls_without_an_answer_end_in_time_and_late_answers_reach_no_call
        cancelled_calls_keep_their_places_until_they_are_answered
        every_call_ends_once_whatever_is_cancelled_and_whatever_comes_too_late
        sleeping_client_wakes_for_a_deadline
        wait_ends_with_something_to_poll_for_or_with_its_time
        sleepers_are_woken_by_every_request_and_every_reply
        idle_sleepers_hardly_run
        sleeping_client_learns_of_its_servers_end
        sleeping_server_frees_the_entry_of_a_killed_client
        sleeping_server_frees_the_entry_of_a_client_that_leaves
        flag_that_is_down_over_an_empty_lane_ends_no_wait
        garbage_in_the_words_of_sleepers_stalls_nobody
        forked_child_may_drop_a_client
        forked_child_may_drop_a_server_and_its_requests
        forked_child_of_a_killed_server_can_be_the_next
    }
}
