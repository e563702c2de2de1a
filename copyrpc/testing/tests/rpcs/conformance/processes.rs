//! The part of the suite that takes several processes: death, stop, fork.

use copyrpc_calls::{CallFailure, SessionEnd};
use copyrpc_shm::dir::Dir;

use super::{connect, ends, take_all};
use crate::rpc::{Refused, Rpc};
use crate::start;
use copyrpc_testing::helpers::{Scratch, next_word, say, wait_for, wait_for_some};

/// The other side of the tests below.
pub(crate) fn helper<R: Rpc>(role: &str, dir: &Dir) {
    match role {
        // Answers even numbers only, until it is killed.
        "server" => {
            let mut server = R::create(dir, 2, 8);
            say("ready");
            let mut odd = vec![];
            loop {
                let requests = take_all::<R>(&mut server);
                if requests.is_empty() {
                    std::thread::yield_now();
                }
                for (request, number) in requests {
                    if number % 2 == 0 {
                        assert!(R::reply(&mut server, request, number));
                    } else {
                        odd.push(request);
                    }
                }
            }
        }
        "caller" => {
            let mut client = R::connect(dir).expect("there is a free entry");
            let mut number = 0;
            say("connected");
            loop {
                while R::call(&mut client, number, number).is_ok() {
                    number += 1;
                }
                if R::poll(&mut client, |_, _| {}).is_err() {
                    return;
                }
            }
        }
        "idle" => {
            let mut client = R::connect(dir).expect("there is a free entry");
            R::call(&mut client, 1, 1).unwrap();
            say("called");
            next_word();
        }
        // The child of the client drops a client that belongs to its parent.
        "forking client" => {
            let mut client = R::connect(dir).expect("there is a free entry");
            R::call(&mut client, 1, 1).unwrap();
            let child = fork();
            if child == 0 {
                drop(client);
                exit_child();
            }
            assert_eq!(wait_for_child(child), 0, "the child's status");
            R::call(&mut client, 2, 2).unwrap();
            let mut ended = vec![];
            wait_for("no answer", || {
                ended.extend(ends::<R>(&mut client));
                ended.len() == 2
            });
            assert_eq!(ended, [(1, Ok(1)), (2, Ok(2))]);
            say("answered");
            next_word();
        }
        "forking server" => {
            let mut server = R::create(dir, 2, 8);
            let mut client = R::connect(dir).expect("there is a free entry");
            R::call(&mut client, 1, 1).unwrap();
            let requests = take_all::<R>(&mut server);
            let child = fork();
            if child == 0 {
                drop((requests, server));
                exit_child();
            }
            assert_eq!(wait_for_child(child), 0, "the child's status");
            for (request, number) in requests {
                assert!(R::reply(&mut server, request, number));
            }
            assert_eq!(ends::<R>(&mut client), [(1, Ok(1))]);
            say("answered");
            next_word();
        }
        // The child of this process is the next server.
        "parent of the next" => {
            let server = R::create(dir, 2, 8);
            if fork() > 0 {
                say("forked");
                next_word();
                return;
            }
            // SAFETY: no pointers are involved.
            let parent = || unsafe { libc::getppid() };
            let of = parent();
            assert!(R::try_create(dir, 2, 8).is_none(), "the parent lives");
            say("waiting");
            wait_for("the parent does not die", || parent() != of);
            let next = wait_for_some("the name stays taken", || R::try_create(dir, 2, 8));
            say("next");
            drop((server, next));
            exit_child();
        }
        other => panic!("unknown role {other}"),
    }
}

fn fork() -> libc::pid_t {
    // SAFETY: the helper has no other threads at work, which could hold locks.
    unsafe { libc::fork() }
}

/// Ends a child without running the exit code of the test harness.
fn exit_child() -> ! {
    // SAFETY: it ends the process.
    unsafe { libc::_exit(0) }
}

fn wait_for_child(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

pub(crate) fn forked_child_may_drop_a_client<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 8);
    let mut client = start::<R>("conformance: forking client", &scratch);
    let mut numbers = vec![];
    wait_for("no request", || {
        for (request, number) in take_all::<R>(&mut server) {
            numbers.push(number);
            assert!(
                R::reply(&mut server, request, number),
                "the child gave the entry up"
            );
        }
        numbers == [1, 2]
    });
    assert_eq!(client.hear(), "answered");
}

pub(crate) fn forked_child_may_drop_a_server_and_its_requests<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = start::<R>("conformance: forking server", &scratch);
    assert_eq!(server.hear(), "answered");
    assert_eq!(scratch.names().len(), 1);
}

pub(crate) fn forked_child_of_a_killed_server_can_be_the_next<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = start::<R>("conformance: parent of the next", &scratch);
    let mut words = [server.hear(), server.hear()];
    words.sort();
    assert_eq!(words, ["forked", "waiting"]);
    server.kill();
    assert_eq!(server.hear(), "next");
}

pub(crate) fn calls_of_a_killed_server_end_once_and_its_successor_serves<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    for _ in 0..3 {
        let mut server = start::<R>("conformance: server", &scratch);
        server.hear();
        let mut client = connect::<R>(&scratch);
        let mut ended = vec![];
        for n in 0..8 {
            R::call(&mut client, n, n).unwrap();
        }
        wait_for("the server does not answer", || {
            R::poll(&mut client, |user, outcome| ended.push((user, outcome))).unwrap();
            ended.len() == 4
        });
        server.kill();
        wait_for("the death was not noticed", || {
            R::poll(&mut client, |user, outcome| ended.push((user, outcome)))
                == Err(SessionEnd::PeerGone)
        });
        ended.sort_by_key(|(user, _)| *user);
        let gone = Err(CallFailure::Closed(SessionEnd::PeerGone));
        assert_eq!(
            ended,
            (0..8)
                .map(|n| (n, if n % 2 == 0 { Ok(n) } else { gone }))
                .collect::<Vec<_>>()
        );
        assert_eq!(
            R::call(&mut client, 7, 8),
            Err(Refused::Ended(7, 8, SessionEnd::PeerGone))
        );
    }
    assert_eq!(scratch.dir().sweep().unwrap(), 1);
    assert!(scratch.names().is_empty());
}

pub(crate) fn entry_of_a_killed_client_is_free_again<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 8);
    for _ in 0..5 {
        let mut client = start::<R>("conformance: idle", &scratch);
        assert_eq!(client.hear(), "called");
        assert!(R::connect(&scratch.dir()).is_none());
        let (late, _) = take_all::<R>(&mut server).remove(0);
        client.kill();
        let next = wait_for_some("the entry stays taken", || {
            R::serve_poll(&mut server);
            R::connect(&scratch.dir())
        });
        assert!(!R::reply(&mut server, late, 1));
        drop(next);
        R::serve_poll(&mut server);
    }
}

pub(crate) fn stopped_or_killed_client_stalls_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 3, 8);
    let mut good = connect::<R>(&scratch);
    let mut serve = |rounds: u64| {
        for n in 0..rounds {
            R::call(&mut good, n, n).unwrap();
            let mut ended = vec![];
            wait_for("a good client is stalled", || {
                for (request, number) in take_all::<R>(&mut server) {
                    // The server may already know that the killed client is gone.
                    R::reply(&mut server, request, number);
                }
                ended.extend(ends::<R>(&mut good));
                !ended.is_empty()
            });
            assert_eq!(ended, [(n, Ok(n))]);
        }
    };
    for round in 0..40 {
        let mut caller = start::<R>("conformance: caller", &scratch);
        caller.hear();
        serve(20 + round * 7);
        caller.signal(libc::SIGSTOP);
        serve(200);
        if round % 2 == 0 {
            caller.signal(libc::SIGCONT);
            serve(50);
        }
        caller.kill();
        serve(600);
    }
}
