//! The connections of two ranks, in one process.

use std::path::{Path, PathBuf};

use harness::device::DeviceChoice;
use shm::dir::Dir;

use super::*;
use crate::cli::BackendKind;
use crate::message::Outcome;
use crate::policy::PolicyOptions;

struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = Path::new("/dev/shm").join(format!("benchkv-remote-{}", std::process::id()));
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The connection of each of two ranks to the other, with the smallest ring.
fn pair(dir: &Dir) -> [Remote<usize>; 2] {
    let open = |rank| {
        let plan = Plan {
            topology: Topology { kind: BackendKind::Delegation, ranks: 2, daemons: 1, clients: 1 },
            rank,
            depth: 32,
            ring_slots: 1024,
            ring_bytes: 4096,
            store_keys: 1,
            policies: PolicyOptions::default(),
            device: DeviceChoice::Auto.spec(Some(dir.path())),
            dir: dir.clone(),
        };
        Remote::open(&plan, Worker::Daemon(0)).unwrap().unwrap()
    };
    let mut pair = [open(0), open(1)];
    let records = [0, 1].map(|rank: usize| pair[rank].records());
    for rank in [0, 1] {
        let far_end = Peer { rank: 1 - rank, worker: Worker::Daemon(0) };
        pair[rank].connect(&[(far_end, records[1 - rank][0].1.clone())]).unwrap();
    }
    pair
}

/// With more threads than cores a daemon that thinks it has work keeps its core from the peer that could give it credit: jobs became
/// a hundred times slower.
#[test]
fn waiting_for_credit_is_not_work_and_ends_with_it() {
    const REQUESTS: usize = 1000;
    let scratch = Scratch::new();
    let [mut asking, mut answering] = pair(&Dir::open(Some(&scratch.0)).unwrap());
    for number in 0..REQUESTS {
        let request = Request::put(1, number as u64, 7);
        asking.call(asking.link_for(&request).unwrap(), request, number).unwrap();
    }
    let rounds = |asking: &mut Remote<usize>| {
        let moved = (0..100).filter(|_| {
            let moved = asking.retry().unwrap() + asking.poll(|_, _| ()).unwrap().answers;
            asking.flush().unwrap();
            moved > 0
        });
        moved.count()
    };
    rounds(&mut asking);
    let (waiting, reads) = (asking.backlogged(), asking.report().reads);
    assert_eq!((rounds(&mut asking), asking.backlogged()), (0, waiting), "nobody answers, so nothing moves");
    assert!(waiting > 0 && asking.report().reads > reads, "it went on looking for credit");

    let mut answered = Vec::new();
    // Bounded: a round carries several requests.
    for _ in 0..10 * REQUESTS {
        answering.poll(|_, _| ()).unwrap();
        while let Some((_, incoming)) = answering.recv() {
            answering.answer(incoming, Some(Response::new(Outcome::PutOk)));
        }
        answering.flush().unwrap();
        asking.poll(|number, response| answered.push((number, response.is_some()))).unwrap();
        asking.retry().unwrap();
        asking.flush().unwrap();
    }
    assert_eq!(answered, (0..REQUESTS).map(|number| (number, true)).collect::<Vec<_>>(), "each once, in order");
    assert_eq!((asking.backlogged(), asking.outstanding(), asking.sent()), (0, 0, REQUESTS as u64));
}
