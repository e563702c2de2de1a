//! Servers and clients in a few lines.

use std::sync::mpsc;
use std::time::Duration;

use copyrpc_testing::executor::block_on;
use copyrpc_testing::methods::{self, Sums, numbers};
use ipc::parts::Reassembler;
use ipc::{AsyncClient, Client, ClientError, ClientOptions, Misfit, Server, SetupError};

const LONG: Duration = Duration::from_secs(20);

fn name(test: &str) -> String {
    format!("facade-{test}-{}", std::process::id())
}

#[test]
fn requests_that_were_received_before_a_step_are_answered_after_it() {
    let name = name("held");
    let mut server = Server::<u64, u64>::bind(&name).unwrap();
    let mut client = Client::<u64, u64, u64>::connect(&name).unwrap();
    client.call(1, 1).unwrap();
    server.poll();
    let held = server.recv().unwrap();
    client.call(2, 2).unwrap();
    let answered = server.step(|number| 10 * number);
    server.reply(held.0, 10).unwrap();
    let mut replies = vec![];
    client
        .poll(|user, reply| replies.push((user, reply)))
        .unwrap();
    assert_eq!((answered, replies), (1, vec![(2, Ok(20)), (1, Ok(10))]));
}

#[test]
fn messages_of_bytes_are_asked_and_answered_and_an_answer_that_is_too_long_ends_its_call() {
    let name = name("bytes");
    let (handles, handle) = mpsc::channel();
    let server = std::thread::spawn({
        let name = name.clone();
        move || {
            let mut server = ipc::bytes::Server::bind(&name).unwrap();
            handles.send(server.stop_handle()).unwrap();
            server.serve(|request| request.repeat(3)).unwrap();
        }
    });
    let mut client = ipc::bytes::Client::connect_within(&name, LONG).unwrap();
    assert_eq!(client.ask(b"ab", LONG), Ok(b"ababab".to_vec()));
    assert_eq!(client.ask(&[7; 1000], LONG), Ok(vec![7; 3000]));
    assert_eq!(
        client.ask(&[7; 2000], LONG),
        Err(ClientError::ReplyTooLong { len: None })
    );
    assert_eq!(
        client.ask(&[7; 5000], LONG),
        Err(ClientError::TooLarge {
            len: 5000,
            max: 4096
        })
    );
    handle.recv().unwrap().stop();
    server.join().unwrap();
}

#[test]
fn a_server_from_bind_has_the_tag_0_and_another_tag_or_kind_of_client_is_refused() {
    let (values, messages) = (name("tag-values"), name("tag-bytes"));
    let _servers = (
        Server::<u64, u64>::bind(&values).unwrap(),
        ipc::bytes::Server::bind(&messages).unwrap(),
    );
    let dir = ipc::Dir::open(None).unwrap();
    let connect_value =
        |name: &str, tag| Client::<u64, u64, ()>::connect_in(&dir, name, tag).map(drop);
    let connect_bytes =
        |name: &str, tag| ipc::bytes::Client::<()>::connect_in(&dir, name, tag).map(drop);
    assert!(connect_value(&values, 0).is_ok() && connect_bytes(&messages, 0).is_ok());
    for refused in [connect_value(&values, 1), connect_bytes(&messages, 1)] {
        assert!(
            matches!(refused, Err(SetupError::Types { .. })),
            "{refused:?}"
        );
    }
    for refused in [connect_bytes(&values, 0), connect_value(&messages, 0)].map(Result::unwrap_err)
    {
        assert!(
            matches!(refused, SetupError::Region(_)) && !refused.may_pass(),
            "{refused:?}"
        );
    }
}

#[test]
fn one_who_only_asks_with_bytes_goes_on_after_a_server_that_was_away() {
    let name = name("away-bytes");
    let mut server = ipc::bytes::Server::bind(&name).unwrap();
    let stop = server.stop_handle();
    let mut client = ipc::bytes::Client::connect(&name).unwrap();
    let questions = client.depth();
    for _ in 0..questions {
        assert_eq!(
            client.ask(b"late", Duration::from_nanos(1)),
            Err(ClientError::TimedOut)
        );
    }
    let mut answered = 0;
    while answered < questions {
        answered += server.step(<[u8]>::to_ascii_uppercase);
    }
    let server = std::thread::spawn(move || server.serve(<[u8]>::to_ascii_uppercase));
    assert_eq!(client.ask(b"now", LONG), Ok(b"NOW".to_vec()));
    stop.stop();
    server.join().unwrap().unwrap();
}

#[test]
fn a_client_of_bytes_goes_on_at_the_next_server_of_the_name_whatever_its_lengths_are() {
    let name = name("next-bytes");
    let dir = ipc::Dir::open(None).unwrap();
    let mut client = None;
    for (round, response) in [(0, 64), (1, 8192), (2, 4096)] {
        let max = ipc::bytes::MessageBytes {
            request: 4096,
            response,
        };
        let mut server = ipc::bytes::Server::with_options(
            &name,
            &ipc::bytes::ServerOptions {
                dir: Some(dir.clone()),
                max_clients: 1,
                depth: 4,
                message_bytes: max,
                type_tag: 0,
                ..ipc::bytes::ServerOptions::default()
            },
        )
        .unwrap();
        let stop = server.stop_handle();
        let server =
            std::thread::spawn(move || server.serve(move |request| request.repeat(response / 8)));
        let client =
            client.get_or_insert_with(|| ipc::bytes::Client::connect_within(&name, LONG).unwrap());
        assert_eq!(
            client.ask(b"12345678", LONG).map(|reply| reply.len()),
            Ok(response),
            "round {round}"
        );
        assert_eq!(client.message_bytes(), max);
        stop.stop();
        server.join().unwrap().unwrap();
        assert!(matches!(
            client.ask(b"none", Duration::ZERO),
            Err(ClientError::NotSent)
        ));
    }
}

/// The error shows whether a later call may succeed, for a blocking client and for every waiting
/// call of an asynchronous one.
#[test]
fn a_call_at_a_next_server_of_other_types_ends_for_good() {
    let name = name("misfit");
    let first = Server::<u64, u64>::bind(&name).unwrap();
    let mut client = Client::<u64, u64, ()>::connect_within(&name, LONG).unwrap();
    let options = ClientOptions {
        connect_timeout: LONG,
        ..ClientOptions::default()
    };
    let calls = block_on(AsyncClient::<Client<u64, u64, u64>>::with_options(
        name.clone(),
        &options,
    ))
    .unwrap();
    drop(first);
    let _next = Server::<u32, u64>::bind(&name).unwrap();
    for _ in 0..2 {
        let error = client.ask(1, LONG).unwrap_err();
        assert_eq!(
            (error, error.is_retryable()),
            (ClientError::Connect(Misfit::Types), false)
        );
    }
    let waiting: Vec<_> = (0..3_u64).map(|number| calls.call(number)).collect();
    for call in waiting {
        assert_eq!(block_on(call), Err(ClientError::Connect(Misfit::Types)));
    }
}

#[test]
fn a_client_with_calls_in_flight_does_not_forget_them_for_another_server() {
    let name = name("in-flight");
    let first = Server::<u64, u64>::bind(&name).unwrap();
    let mut client = Client::<u64, u64, u64>::connect(&name).unwrap();
    client.call(1, 7).unwrap();
    drop(first);
    let _next = Server::<u64, u64>::bind(&name).unwrap();
    let refused = client.reconnect(LONG).unwrap_err();
    assert!(
        matches!(refused, SetupError::CallsInFlight(1)) && !refused.may_pass(),
        "{refused}"
    );
    let mut ended = Vec::new();
    while client.poll(|user, _| ended.push(user)).is_ok() {}
    assert_eq!(ended, [7]);
    client.reconnect(LONG).unwrap();
}

#[test]
fn a_server_knows_that_the_client_of_a_request_has_gone() {
    let name = name("wanted");
    let (mut server, mut other) = (
        ipc::bytes::Server::bind(&name).unwrap(),
        Server::<u64, u64>::bind(&format!("{name}-other")).unwrap(),
    );
    let mut client = ipc::bytes::Client::<()>::connect(&name).unwrap();
    client.call(b"a", ()).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    assert!(server.is_wanted(&token) && !other.is_wanted(&token));
    drop(client);
    assert!(!server.is_wanted(&token));
    server.poll();
    let mut next = ipc::bytes::Client::<()>::connect(&name).unwrap();
    next.call(b"b", ()).unwrap();
    server.poll();
    let (of_next, _) = server.recv().unwrap();
    assert!(!server.is_wanted(&token) && server.is_wanted(&of_next));
    other.poll();
}

#[test]
fn methods_end_with_their_result_or_their_own_error_and_those_of_another_version_have_ends_of_their_own()
 {
    let name = name("methods");
    let (handles, handle) = mpsc::channel();
    let server = std::thread::spawn({
        let name = name.clone();
        move || {
            let mut server = ipc::bytes::Server::bind(&name).unwrap();
            handles.send(server.stop_handle()).unwrap();
            server
                .serve(|request| numbers::answer(&mut Sums, request))
                .unwrap();
        }
    });
    let client = ipc::bytes::Client::connect_within(&name, LONG).unwrap();
    methods::check(client, |error| matches!(error, ClientError::TimedOut));
    handle.recv().unwrap().stop();
    server.join().unwrap();
}

#[test]
fn payloads_above_a_message_are_one_call() {
    let name = name("parts");
    let (handles, handle) = mpsc::channel();
    let server = std::thread::spawn({
        let name = name.clone();
        move || {
            let mut server = ipc::bytes::Server::bind(&name).unwrap();
            handles.send(server.stop_handle()).unwrap();
            let mut parts = Reassembler::new(server.stop_handle(), 4 << 20, 8 << 20);
            server
                .serve(|part| parts.answer(part, |whole| numbers::answer(&mut Sums, &whole)))
                .unwrap();
            assert_eq!(parts.held(), 0);
        }
    });
    let client = ipc::bytes::Client::connect_within(&name, LONG).unwrap();
    let max = client.message_bytes();
    methods::check_in_parts(client, max.request, max.response);
    handle.recv().unwrap().stop();
    server.join().unwrap();
}
