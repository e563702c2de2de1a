//! Binding, connecting, serving and asking: what every shared-memory RPC with these does alike.

/// Tests of `$server` and `$client`, which send and answer `u64`.
#[macro_export]
macro_rules! facade {
    ($server:ty, $client:ty) => {
        use std::sync::mpsc;
        use std::time::Duration;

        const LONG: Duration = Duration::from_secs(20);
        const SHORT: Duration = Duration::from_millis(20);

        fn name(test: &str) -> String {
            format!("facade-{test}-{}-{}", env!("CARGO_CRATE_NAME"), std::process::id())
        }

        #[test]
        fn a_client_waits_for_its_server_asks_it_and_the_server_stops_when_told() {
            let name = name("serve");
            let (handles, handle) = mpsc::channel();
            let server = std::thread::spawn({
                let name = name.clone();
                move || {
                    // Time for the client to find no server.
                    std::thread::sleep(SHORT);
                    let mut server = <$server>::bind(&name).unwrap();
                    handles.send(server.stop_handle()).unwrap();
                    server.serve(|number| number * number);
                }
            });
            let mut client = <$client>::connect_within(&name, LONG).unwrap();
            for number in 0..100 {
                assert_eq!(client.ask(number, LONG), Ok(number * number));
            }
            // The server sleeps by then.
            std::thread::sleep(SHORT);
            assert_eq!(client.ask(7, LONG), Ok(49));
            handle.recv().unwrap().stop();
            server.join().unwrap();
            assert_eq!(client.ask(1, LONG), Err(AskError::Failed(CallFailed::Disconnected(SessionEnd::PeerGone))));
        }

        #[test]
        fn a_client_gives_up_waiting_for_a_server_that_does_not_come_up() {
            let refused = <$client>::connect_within(&name("nobody"), SHORT).map(drop).unwrap_err();
            assert!(matches!(refused, ConnectError::Region(_)) && refused.may_pass(), "{refused:?}");
        }

        #[test]
        fn a_question_ends_in_its_time_and_waits_behind_no_other_call() {
            let name = name("late");
            let mut server = <$server>::bind(&name).unwrap();
            let mut client = <$client>::connect(&name).unwrap();
            assert_eq!(client.ask(1, SHORT), Err(AskError::Failed(CallFailed::TimedOut)));
            client.call(2, ()).unwrap();
            assert_eq!(client.ask(3, LONG), Err(AskError::Full));
            // The late reply reaches no call.
            assert_eq!(server.step(|number| 10 * number), 2);
            let mut replies = vec![];
            assert_eq!(client.poll(|(), reply| replies.push(reply)), Ok(1));
            assert_eq!(replies, [Ok(20)]);
        }

        #[test]
        fn one_who_only_asks_goes_on_after_a_server_that_was_away_for_more_questions_than_fit() {
            let name = name("away");
            let mut server = <$server>::bind(&name).unwrap();
            let stop = server.stop_handle();
            let mut client = <$client>::connect(&name).unwrap();
            let questions = client.depth();
            for _ in 0..questions {
                assert_eq!(client.ask(1, Duration::ZERO), Err(AskError::Failed(CallFailed::TimedOut)));
            }
            assert_eq!(client.ask(2, LONG), Err(AskError::Full));
            let mut answered = 0;
            while answered < questions {
                answered += server.step(|number| 10 * number);
            }
            let server = std::thread::spawn(move || server.serve(|number| 10 * number));
            assert_eq!(client.ask(3, LONG), Ok(30));
            stop.stop();
            server.join().unwrap();
        }
    };
}
