//! Binding, connecting, serving and asking, in a few lines.

use std::sync::mpsc;
use std::time::Duration;

use ::ipc::{Client, ClientError, Misfit, Server, SetupError};

use crate::typed::Typed;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);
/// A call with this time is sent, and has no reply in time.
const SHORTEST: Duration = Duration::from_nanos(1);

fn name(test: &str) -> String {
    format!("facade-{test}-{}", std::process::id())
}

fn a_client_waits_for_its_server_asks_it_and_the_server_stops_when_told<T: Typed>(test: &str) {
    let name = name(test);
    let (handles, handle) = mpsc::channel();
    let server = std::thread::spawn({
        let name = name.clone();
        move || {
            // The client finds no server in this time.
            std::thread::sleep(SHORT);
            let mut server = Server::<u64, u64, T::Announced>::bind(&name).unwrap();
            handles.send(server.stop_handle()).unwrap();
            server.serve(|number| number * number);
        }
    });
    let mut client = Client::<u64, u64, (), T::Announced>::connect_within(&name, LONG).unwrap();
    for number in 0..100 {
        assert_eq!(client.ask(number, LONG), Ok(number * number));
    }
    // The server sleeps after this time.
    std::thread::sleep(SHORT);
    assert_eq!(client.ask(7, LONG), Ok(49));
    handle.recv().unwrap().stop();
    server.join().unwrap();
    assert_eq!(client.ask(1, SHORT), Err(ClientError::NotSent));
}

fn a_client_goes_on_at_the_next_server_of_the_name<T: Typed>(test: &str) {
    let name = name(test);
    let bind = || Server::<u64, u64, T::Announced>::bind(&name).unwrap();
    let serve = |mut server: Server<u64, u64, T::Announced>, factor| {
        let stop = server.stop_handle();
        (
            std::thread::spawn(move || server.serve(|number| number * factor)),
            stop,
        )
    };
    let (first, stop) = serve(bind(), 10);
    let mut patient = Client::<u64, u64, (), T::Announced>::connect_within(&name, LONG).unwrap();
    let mut hasty = Client::<u64, u64, (), T::Announced>::connect(&name).unwrap();
    assert_eq!((patient.ask(1, LONG), hasty.ask(2, LONG)), (Ok(10), Ok(20)));
    stop.stop();
    first.join().unwrap();
    let gone = ClientError::Connect(Misfit::Absent);
    assert!(gone.is_retryable() && !gone.may_have_executed());
    // `patient` waits for the next server as long as its call may take; `hasty` tries once.
    assert_eq!(
        (patient.ask(3, SHORT), hasty.ask(3, LONG)),
        (Err(ClientError::NotSent), Err(gone))
    );
    let asking = std::thread::spawn(move || (patient.ask(4, LONG), patient));
    std::thread::sleep(SHORT);
    let (second, stop) = serve(bind(), 100);
    let (answer, mut patient) = asking.join().unwrap();
    assert_eq!(
        (answer, hasty.ask(5, LONG), patient.ask(6, LONG)),
        (Ok(400), Ok(500), Ok(600))
    );
    stop.stop();
    second.join().unwrap();
    // A call that ends only after the server has ended.
    let mut third = bind();
    patient.reconnect(LONG).unwrap();
    assert_eq!(patient.ask(7, SHORTEST), Err(ClientError::TimedOut));
    third.poll();
    drop(third);
    assert!(
        patient
            .reconnect(Duration::ZERO)
            .is_err_and(|error| error.may_pass())
    );
    let _fourth = bind();
    patient.reconnect(LONG).unwrap();
    assert_eq!(
        (patient.in_flight(), patient.call(8, ()).is_ok()),
        (0, true)
    );
}

fn a_client_gives_up_waiting_for_a_server_that_does_not_come_up<T: Typed>(test: &str) {
    let refused = Client::<u64, u64, (), T::Announced>::connect_within(&name(test), SHORT)
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(refused, SetupError::Region(_)) && refused.may_pass(),
        "{refused:?}"
    );
}

fn a_question_ends_in_its_time_and_waits_behind_no_other_call<T: Typed>(test: &str) {
    let name = name(test);
    let mut server = Server::<u64, u64, T::Announced>::bind(&name).unwrap();
    let mut client = Client::<u64, u64, (), T::Announced>::connect(&name).unwrap();
    // With a timeout of 0, nothing is sent.
    assert_eq!(client.ask(1, Duration::ZERO), Err(ClientError::NotSent));
    assert_eq!(server.poll(), 0);
    assert_eq!(client.ask(1, SHORT), Err(ClientError::TimedOut));
    client.call(2, ()).unwrap();
    assert_eq!(client.ask(3, LONG), Err(ClientError::Full));
    // The late reply reaches no call.
    assert_eq!(server.step(|number| 10 * number), 2);
    let mut replies = vec![];
    assert_eq!(client.poll(|(), reply| replies.push(reply)), Ok(1));
    assert_eq!(replies, [Ok(20)]);
}

fn one_who_only_asks_goes_on_after_a_server_that_was_away_for_more_questions_than_fit<T: Typed>(
    test: &str,
) {
    let name = name(test);
    let mut server = Server::<u64, u64, T::Announced>::bind(&name).unwrap();
    let stop = server.stop_handle();
    let mut client = Client::<u64, u64, (), T::Announced>::connect(&name).unwrap();
    let questions = client.depth();
    for _ in 0..questions {
        assert_eq!(client.ask(1, SHORTEST), Err(ClientError::TimedOut));
    }
    assert_eq!(client.ask(2, LONG), Err(ClientError::Full));
    let mut answered = 0;
    while answered < questions {
        answered += server.step(|number| 10 * number);
    }
    let server = std::thread::spawn(move || server.serve(|number| 10 * number));
    assert_eq!(client.ask(3, LONG), Ok(30));
    stop.stop();
    server.join().unwrap();
}

suite! {
    ipc delegation: {
        a_client_waits_for_its_server_asks_it_and_the_server_stops_when_told
        a_client_goes_on_at_the_next_server_of_the_name
        a_client_gives_up_waiting_for_a_server_that_does_not_come_up
        a_question_ends_in_its_time_and_waits_behind_no_other_call
        one_who_only_asks_goes_on_after_a_server_that_was_away_for_more_questions_than_fit
    }
}
