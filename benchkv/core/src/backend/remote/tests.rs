//! The connections of two ranks, in one process.

use std::time::{Duration, Instant};

use super::*;
use crate::job::{Job, Sizes};
use crate::message::Outcome;
use crate::tests::{self as testing, Scratch, topology};
use crate::topology::Backend;
use crate::ucx::PeerErrors;
use crate::workload::Workload;

/// Number of requests: more than a ring or a window holds.
const REQUESTS: usize = 1000;
const WINDOW: usize = 16;

/// Makes the connection of each of two ranks to the other, with the smallest ring.
pub(super) fn pair(scratch: &Scratch, carrier: Carrier) -> [Remote<usize>; 2] {
    pair_of(scratch, carrier, [8, 8])
}

/// Makes the connections of two ranks. The values of rank k have `value_bytes[k]` bytes.
pub(super) fn pair_of(
    scratch: &Scratch,
    carrier: Carrier,
    value_bytes: [usize; 2],
) -> [Remote<usize>; 2] {
    ranks_of(scratch, carrier, value_bytes)
}

/// Makes connections of each rank to all others.
fn ranks_of<const N: usize>(
    scratch: &Scratch,
    carrier: Carrier,
    value_bytes: [usize; N],
) -> [Remote<usize>; N] {
    let open = |rank: usize| {
        let job = testing::job(topology(Backend::Delegation, carrier, N, 1, 1));
        let sizes = Sizes {
            ring_bytes: 4096,
            window: WINDOW,
            ..job.sizes
        };
        let workload = Workload {
            value_bytes: value_bytes[rank],
            ..job.workload
        };
        let job = Job {
            sizes,
            workload,
            ucx_errors: Some(PeerErrors::Peer),
            ..job
        };
        Remote::open(
            &RankPlan::new(&job, scratch.site(rank)).unwrap(),
            Worker::Daemon(0),
            None,
        )
        .unwrap()
        .unwrap()
    };
    let mut ranks: [Remote<usize>; N] = std::array::from_fn(open);
    let records: Vec<_> = ranks.iter_mut().map(Remote::records).collect();
    for (from, (to, record)) in records
        .iter()
        .enumerate()
        .flat_map(|(from, records)| records.iter().map(move |record| (from, record)))
    {
        ranks[to.rank]
            .connect(&[(
                Peer {
                    rank: from,
                    worker: Worker::Daemon(0),
                },
                record.clone(),
            )])
            .unwrap();
    }
    ranks
}

/// The option lowers the limit of a client's connection, which is higher by default.
#[test]
fn a_client_with_connections_of_its_own_may_have_one_batch_in_flight() {
    let scratch = Scratch::new();
    let job = Job {
        policies: testing::policies("--batches-in-flight 1"),
        ..testing::job(topology(Backend::Direct, Carrier::Copyrpc, 2, 1, 1))
    };
    let plan = RankPlan::new(&job, scratch.site(0)).unwrap();
    let opened = Remote::<usize>::open(&plan, Worker::Client(0), None);
    assert!(opened.unwrap().is_some());
}

/// Makes [`REQUESTS`] calls, more than find room at once.
fn call_all(asking: &mut Remote<usize>) {
    for number in 0..REQUESTS {
        let request = Request::put(1, number as u64, 7);
        asking
            .call(asking.link_for(&request).unwrap(), request, number)
            .unwrap();
    }
}

/// Steps both ends until all calls are answered, in order, each once; every third is refused.
fn answer_all(asking: &mut Remote<usize>, answering: &mut Remote<usize>) {
    let (mut answered, mut arrived) = (Vec::new(), 0);
    // Bounded: a round carries several requests.
    for _ in 0..10 * REQUESTS {
        answering.poll(|_, _, _| (), |_, _| None).unwrap();
        while let Some((request, incoming)) = answering.recv(&mut []) {
            assert_eq!(request, Request::put(1, arrived, 7));
            answering.answer(
                incoming,
                (arrived % 3 > 0).then_some(Response::new(Outcome::PutOk)),
                &[],
            );
            arrived += 1;
        }
        answering.flush().unwrap();
        asking
            .poll(
                |number, response, _| answered.push((number, response.is_some())),
                |_, _| None,
            )
            .unwrap();
        asking.retry().unwrap();
        asking.flush().unwrap();
    }
    assert_eq!(
        answered,
        (0..REQUESTS)
            .map(|number| (number, number % 3 > 0))
            .collect::<Vec<_>>(),
        "each once, in order"
    );
    assert_eq!(
        (asking.backlogged(), asking.outstanding(), asking.sent()),
        (0, 0, REQUESTS as u64)
    );
}

/// Bytes of a peer whose tail does not have the agreed length are not a message.
#[test]
fn a_value_of_another_length_than_agreed_is_no_value() {
    for (theirs, ours) in [(8, 40), (40, 8), (40, 48)] {
        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair_of(&scratch, Carrier::Copyrpc, [theirs, ours]);
        for (number, request) in [Request::put(1, 1, 7), Request::get(1, 1)]
            .into_iter()
            .enumerate()
        {
            asking
                .call(asking.link_for(&request).unwrap(), request, number)
                .unwrap();
        }
        asking.flush().unwrap();
        answering.poll(|_, _, _| (), |_, _| None).unwrap();
        let (get, found) = answering.recv(&mut vec![0; ours - 8]).unwrap();
        assert_eq!(
            (get.at(0), answering.recv(&mut vec![0; ours - 8]).is_none()),
            (Request::get(1, 1), true),
            "the put is refused"
        );
        answering.answer(
            found,
            Some(Response::new(Outcome::GetOk { value: 7 })),
            &vec![0; ours - 8],
        );
        answering.flush().unwrap();
        let mut answers = Vec::new();
        asking
            .poll(
                |number, response, tail| answers.push((number, response, tail.len())),
                |_, _| None,
            )
            .unwrap();
        assert_eq!(answers, [(0, None, 0), (1, None, 0)], "{theirs}, {ours}");

        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair_of(&scratch, Carrier::RcSend, [theirs, ours]);
        let request = Request::put(1, 1, 7);
        asking
            .call(asking.link_for(&request).unwrap(), request, 0)
            .unwrap();
        asking.flush().unwrap();
        let gone = (0..1000)
            .find_map(|_| answering.poll(|_, _, _| (), |_, _| None).err())
            .unwrap();
        assert!(
            matches!(gone, BackendError::PeerGone { rank: 0, .. }),
            "{gone}"
        );
    }
}

/// Runs a hundred rounds. Returns the number of rounds that sent a waiting request or took an
/// answer.
fn moving_rounds(asking: &mut Remote<usize>) -> usize {
    let moved = (0..100).filter(|_| {
        let moved =
            asking.retry().unwrap() + asking.poll(|_, _, _| (), |_, _| None).unwrap().answers;
        asking.flush().unwrap();
        moved > 0
    });
    moved.count()
}

/// A daemon that counted the READs for credit as work would not sleep. With more threads than
/// cores, the daemon would keep the core from the peer whose credit it needs, and jobs would be a
/// hundred times slower.
#[test]
fn waiting_for_credit_is_not_work_and_ends_with_it() {
    let scratch = Scratch::new();
    let [mut asking, mut answering] = pair(&scratch, Carrier::Copyrpc);
    call_all(&mut asking);
    moving_rounds(&mut asking);
    let waiting = asking.backlogged();
    let reads = asking.transport().unwrap().counted.of("reads");
    assert_eq!(
        (moving_rounds(&mut asking), asking.backlogged()),
        (0, waiting),
        "nobody answers, so nothing moves"
    );
    assert!(
        waiting > 0 && asking.transport().unwrap().counted.of("reads") > reads,
        "it went on looking for credit"
    );
    answer_all(&mut asking, &mut answering);
}

/// `serve` answers requests on arrival. One buffer holds the tail of a put's value, or the tail of
/// the value that a get found.
#[test]
fn a_request_that_is_served_does_not_wait() {
    let scratch = Scratch::new();
    let [mut asking, mut answering] = pair_of(&scratch, Carrier::Copyrpc, [16, 16]);
    let requests = [
        Request::put(1, 1, 7),
        Request::get(1, 1),
        Request::get(1, 2),
    ];
    for (number, request) in requests.into_iter().enumerate() {
        asking
            .call(asking.link_for(&request).unwrap(), request, number)
            .unwrap();
    }
    asking.flush().unwrap();
    let mut served = Vec::new();
    let serve = |request: &Request, tail: &mut [u8]| {
        served.push((request.key(), tail.len()));
        if request.is_put() {
            return Some(Response::new(Outcome::PutOk));
        }
        tail.fill(9);
        (request.key() == 1).then_some(Response::new(Outcome::GetOk { value: 7 }))
    };
    answering.poll(|_, _, _| (), serve).unwrap();
    assert_eq!(served, [(1, 8), (1, 8), (2, 8)]);
    let (request, _kept) = answering.recv(&mut [0; 8]).unwrap();
    assert!(
        request.key() == 2 && answering.recv(&mut [0; 8]).is_none(),
        "this one was not answered"
    );
    answering.flush().unwrap();
    let mut answers = Vec::new();
    asking
        .poll(
            |number, response, tail| answers.push((number, response, tail.to_vec())),
            |_, _| None,
        )
        .unwrap();
    let found = Response::new(Outcome::GetOk { value: 7 });
    assert_eq!(
        answers,
        [
            (0, Some(Response::new(Outcome::PutOk)), vec![]),
            (1, Some(found), vec![9; 8])
        ]
    );
}

/// A new request waits for the backlog although there is room, until `retry` has sent the backlog.
#[test]
fn a_request_does_not_overtake_those_that_wait() {
    for carrier in [Carrier::Copyrpc, Carrier::RcSend] {
        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair(&scratch, carrier);
        let mut arrived = Vec::new();
        // Answers the requests that have arrived, and takes the answers.
        let mut serve = |asking: &mut Remote<usize>| {
            asking.flush().unwrap();
            answering.poll(|_, _, _| (), |_, _| None).unwrap();
            while let Some((request, incoming)) = answering.recv(&mut []) {
                arrived.push(request.key());
                answering.answer(incoming, Some(Response::new(Outcome::PutOk)), &[]);
            }
            answering.flush().unwrap();
            asking.poll(|_, _, _| (), |_, _| None).unwrap();
            arrived.len()
        };
        call_all(&mut asking);
        let (sent, mut rounds) = (asking.sent() as usize, 0..10 * REQUESTS);
        while serve(&mut asking) < sent {
            rounds.next().unwrap();
        }
        assert!(
            asking.backlogged() > 0 && asking.outstanding() == 0,
            "{carrier:?}: there is room"
        );
        let last = Request::put(1, REQUESTS as u64, 7);
        asking
            .call(asking.link_for(&last).unwrap(), last, REQUESTS)
            .unwrap();
        while serve(&mut asking) <= REQUESTS {
            asking.retry().unwrap();
            rounds.next().unwrap();
        }
        assert!(arrived.is_sorted(), "{carrier:?}");
    }
}

/// The number of SENDs under way never exceeds the number of the peer's receives, so no SEND is
/// repeated. Further requests wait until earlier requests are answered.
#[test]
fn no_more_sends_are_under_way_than_receives_are_posted() {
    let scratch = Scratch::new();
    let [mut asking, mut answering] = pair(&scratch, Carrier::RcSend);
    call_all(&mut asking);
    moving_rounds(&mut asking);
    assert_eq!(
        (moving_rounds(&mut asking), asking.backlogged()),
        (0, REQUESTS - WINDOW)
    );
    answer_all(&mut asking, &mut answering);
    let [asked, answered] = [asking, answering].map(|mut end| end.transport().unwrap());
    assert_eq!(
        [&asked, &answered].map(|end| end.counted.of("messages")),
        [REQUESTS as u64; 2]
    );
    assert!(asked.counted.of("waits") > 0, "{asked:?}");
}

#[test]
#[ignore = "needs libucx0"]
fn no_more_messages_of_ucx_wait_for_answers_than_the_window_has_places() {
    let scratch = Scratch::new();
    let [mut asking, mut answering] = pair(&scratch, Carrier::UcxAm);
    call_all(&mut asking);
    moving_rounds(&mut asking);
    assert_eq!(
        (moving_rounds(&mut asking), asking.backlogged()),
        (0, REQUESTS - WINDOW)
    );
    answer_all(&mut asking, &mut answering);
    let report = asking.transport().unwrap();
    assert!(
        report.counted.of("messages") == REQUESTS as u64 && report.counted.of("waits") > 0,
        "{report:?}"
    );
    assert!(
        report.device.starts_with("ucx:1.") && report.reached_by.contains(" by tcp/"),
        "{report:?}"
    );
}

#[test]
#[ignore = "needs libucx0"]
fn a_dead_peer_of_ucx_is_missed() {
    misses_the_dead(&[Carrier::UcxAm]);
}

/// The peer has taken all messages and owes answers, so no message is under way whose failure would
/// show the death.
#[test]
fn a_dead_peer_is_missed_although_nothing_is_sent_to_it() {
    misses_the_dead(&[Carrier::Copyrpc, Carrier::RcSend]);
}

/// A rank that ends because another rank is dead closes its connections in order, perhaps before
/// the death is detected. The error must name the dead rank.
#[test]
fn a_peer_that_left_in_order_is_not_named_while_another_is_dead() {
    let scratch = Scratch::new();
    let [mut asking, mut leaver, mut dead] = ranks_of(&scratch, Carrier::Copyrpc, [8; 3]);
    for number in 0..64_usize {
        let request = Request::put(1 + (number % 2) as u32, number as u64, 7);
        asking
            .call(asking.link_for(&request).unwrap(), request, number)
            .unwrap();
    }
    asking.flush().unwrap();
    for peer in [&mut leaver, &mut dead] {
        peer.poll(|_, _, _| (), |_, _| None).unwrap();
    }
    drop(leaver);
    let mut lost = 0;
    for _ in 0..100 {
        asking
            .poll(
                |_, response, _| lost += usize::from(response.is_none()),
                |_, _| None,
            )
            .unwrap();
    }
    assert!(lost > 0, "it left, and ended its calls");
    // A further call to the rank that closed waits.
    let request = Request::put(1, 0, 7);
    asking
        .call(asking.link_for(&request).unwrap(), request, 64)
        .unwrap();
    dead.abort();
    drop(dead);
    let start = Instant::now();
    let gone = loop {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "neither was missed"
        );
        if let Err(gone) = asking
            .poll(|_, _, _| (), |_, _| None)
            .and_then(|_| asking.flush())
        {
            break gone;
        }
    };
    assert!(
        matches!(gone, BackendError::PeerGone { rank: 2, .. }),
        "{gone}"
    );
}

fn misses_the_dead(carriers: &[Carrier]) {
    for carrier in carriers.iter().copied() {
        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair(&scratch, carrier);
        call_all(&mut asking);
        asking.flush().unwrap();
        answering.poll(|_, _, _| (), |_, _| None).unwrap();
        drop(answering);
        let start = Instant::now();
        let gone = loop {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{carrier:?}: it was never missed"
            );
            if let Err(gone) = asking.poll(|_, _, _| (), |_, _| None) {
                break gone;
            }
            asking.flush().unwrap();
        };
        assert!(
            matches!(gone, BackendError::PeerGone { rank: 1, .. }),
            "{carrier:?}: {gone}"
        );
    }
}
