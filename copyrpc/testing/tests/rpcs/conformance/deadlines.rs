//! The part of the suite about calls that are given up.

use std::time::{Duration, Instant};

use copyrpc_calls::CallFailure;

use super::{answer_all, ends, pair, take_all};
use crate::rpc::{Outcome, Refused, Rpc};
use copyrpc_testing::helpers::{PATIENCE, Scratch};

const SOON: Duration = Duration::from_millis(2);
const LATE: Duration = Duration::from_secs(3600);

/// Polls until at least one call ends. Returns the calls that ended.
fn next_ends<R: Rpc>(client: &mut R::Client) -> Vec<(u64, Outcome)> {
    let start = Instant::now();
    loop {
        let ended = ends::<R>(client);
        if !ended.is_empty() {
            return ended;
        }
        assert!(start.elapsed() < PATIENCE);
    }
}

pub(crate) fn calls_without_an_answer_end_in_time_and_late_answers_reach_no_call<R: Rpc>(
    name: &str,
) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for round in 0..20 {
        let start = Instant::now();
        R::call_within(&mut client, 1, round, SOON).unwrap();
        R::call_within(&mut client, 2, 100, LATE).unwrap();
        R::call(&mut client, 3, 200).unwrap();
        // The server is not informed of the deadline, whether it has taken the request or not.
        let early = if round % 2 == 0 {
            take_all::<R>(&mut server)
        } else {
            vec![]
        };
        assert_eq!(
            next_ends::<R>(&mut client),
            [(round, Err(CallFailure::TimedOut))]
        );
        assert!(start.elapsed() >= SOON, "never early");
        let requests = early.into_iter().chain(take_all::<R>(&mut server));
        for (request, number) in requests.collect::<Vec<_>>() {
            assert!(R::reply(&mut server, request, number * 10));
        }
        assert_eq!(ends::<R>(&mut client), [(100, Ok(20)), (200, Ok(30))]);
    }
    // An answer that has arrived when the deadline is checked wins.
    R::call_within(&mut client, 5, 5, Duration::ZERO).unwrap();
    answer_all::<R>(&mut server, |number| number);
    assert_eq!(ends::<R>(&mut client), [(5, Ok(5))]);
}

pub(crate) fn cancelled_calls_keep_their_places_until_they_are_answered<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for _ in 0..10 {
        let calls: Vec<_> = (0..4)
            .map(|n| R::call(&mut client, n, n).unwrap())
            .collect();
        assert_eq!(
            (
                R::cancel(&mut client, calls[1]),
                R::cancel(&mut client, calls[1])
            ),
            (Some(1), None)
        );
        assert_eq!(R::cancel(&mut client, calls[3]), Some(3));
        assert_eq!(
            R::call(&mut client, 7, 8).unwrap_err(),
            Refused::Full(7, 8),
            "the server may be writing its answer"
        );
        let mut requests = take_all::<R>(&mut server);
        assert_eq!(
            requests
                .iter()
                .map(|(_, number)| *number)
                .collect::<Vec<_>>(),
            [0, 1, 2, 3],
            "it is not told"
        );
        // The server answers one of the two requests whose calls have ended.
        let (request, number) = requests.remove(1);
        assert!(R::reply(&mut server, request, number));
        assert_eq!(ends::<R>(&mut client), []);
        let fifth = R::call(&mut client, 4, 4).unwrap();
        requests.extend(take_all::<R>(&mut server));
        for (request, number) in requests {
            assert!(R::reply(&mut server, request, number));
        }
        let mut ended = ends::<R>(&mut client);
        ended.sort_unstable_by_key(|(user, _)| *user);
        assert_eq!(ended, [(0, Ok(0)), (2, Ok(2)), (4, Ok(4))]);
        assert!(
            calls
                .iter()
                .chain([&fifth])
                .all(|call| R::cancel(&mut client, *call).is_none()),
            "they have ended"
        );
    }
}

/// Compares a client with a model, which records of each call whether it has ended.
pub(crate) fn every_call_ends_once_whatever_is_cancelled_and_whatever_comes_too_late<R: Rpc>(
    name: &str,
) {
    const DEPTH: usize = 8;
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, DEPTH);
    let mut made = 0u64;
    let mut given_up = 0;
    let mut answered = 0;
    let mut open = Vec::new();
    let mut held = Vec::new();
    let mut unanswered = 0;
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    for step in 0..60_000 {
        match random(10) {
            0..=2 => {
                let called = match random(3) {
                    0 => R::call_within(
                        &mut client,
                        made,
                        made,
                        Duration::from_micros(random(20) as u64),
                    ),
                    1 => R::call_within(&mut client, made, made, LATE),
                    _ => R::call(&mut client, made, made),
                };
                assert_eq!(called.is_err(), unanswered == DEPTH, "step {step}");
                if let Ok(call) = called {
                    open.push((made, call));
                    made += 1;
                    unanswered += 1;
                }
            }
            3 if !open.is_empty() => {
                let (number, call) = open.swap_remove(random(open.len()));
                assert_eq!(R::cancel(&mut client, call), Some(number));
                given_up += 1;
            }
            4 | 5 => held.extend(take_all::<R>(&mut server)),
            6 | 7 if !held.is_empty() => {
                let (request, number) = held.swap_remove(random(held.len()));
                if random(4) == 0 {
                    R::reject(&mut server, request);
                } else {
                    assert!(R::reply(&mut server, request, number + 1));
                }
            }
            _ => {
                for (number, outcome) in ends::<R>(&mut client) {
                    let place = open.iter().position(|(open, _)| *open == number);
                    open.swap_remove(
                        place.unwrap_or_else(|| panic!("{number} ended twice, step {step}")),
                    );
                    match outcome {
                        Ok(answer) => assert_eq!(answer, number + 1),
                        Err(CallFailure::Refused) => {}
                        Err(CallFailure::TimedOut) => {
                            given_up += 1;
                            continue;
                        }
                        Err(other) => panic!("{other}"),
                    }
                    answered += 1;
                }
                // The client has taken each answer, whether its caller waited or not.
                unanswered = held.len() + untaken::<R>(&mut server, &mut held);
            }
        }
    }
    assert!(
        given_up > 1_000 && answered > 1_000,
        "{made} made, {given_up} given up, {answered} answered"
    );
    assert_eq!(made, given_up + answered + open.len() as u64);
}

/// Takes the requests that were not taken yet. Returns their number.
fn untaken<R: Rpc>(server: &mut R::Server, held: &mut Vec<(R::Held, u64)>) -> usize {
    let new = take_all::<R>(server);
    let count = new.len();
    held.extend(new);
    count
}

pub(crate) fn sleeping_client_wakes_for_a_deadline<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (_server, mut client) = pair::<R>(&scratch, 1, 4);
    for timeout in [SOON, Duration::from_millis(150)] {
        let start = Instant::now();
        R::call_within(&mut client, 1, 1, timeout).unwrap();
        R::call_within(&mut client, 1, 2, LATE).unwrap();
        assert!(
            R::wait(&mut client, Some(PATIENCE)),
            "a deadline is something to poll for"
        );
        assert!(
            start.elapsed() >= timeout && start.elapsed() < timeout + PATIENCE / 4,
            "{:?}",
            start.elapsed()
        );
        assert_eq!(ends::<R>(&mut client), [(1, Err(CallFailure::TimedOut))]);
        assert!(!R::wait(&mut client, Some(SOON)), "the other is far away");
    }
}
