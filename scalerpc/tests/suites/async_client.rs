//! Clients whose calls are futures: in tokio and in an executor of the test, from many tasks, late,
//! given up, and without a server. None of them uses a core while it waits.
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use copyrpc_testing::executor::block_on;
use copyrpc_testing::limits::{self, any_port};
use scalerpc::mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::rdma::RdmaOptions;
use scalerpc::{
    AsyncCall, AsyncClient, ClientError, ClientOptions, Handlers, HeldRequest, Server,
    ServerConfig, ServerOptions, StopHandle,
};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

const WATCHDOG: Duration = Duration::from_secs(120);
/// Type of requests that are kept until the test answers. Those of type 0 are answered in upper
/// case.
const KEPT: u16 = 1;
/// Maximum polls of a client that waits: twice the polls before it sleeps, and some polls after
/// early wake-ups.
const FEW: u64 = 2_000;

/// All types can be sent to other threads.
const _: () = {
    const fn is_portable<T: Send + Sync + 'static>() {}
    const fn is_sent<T: Send + 'static>() {}
    is_portable::<AsyncClient>();
    is_sent::<AsyncCall>();
};

/// Requests for the number after it.
const NEXT: u16 = 2;

/// The network of a server and its clients.
#[derive(Clone)]
struct Net(LocalFabric);

impl Net {
    fn new() -> Self {
        Self::of_length(1)
    }

    /// Makes the network of a test that takes `scale` times as long as others.
    fn of_length(scale: u32) -> Self {
        limits::watchdog(WATCHDOG * scale);
        Self(LocalFabric::new())
    }

    fn device(&self) -> DeviceSpec {
        DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(self.0.clone()),
            ..SoftOptions::default()
        })
    }

    fn options(&self) -> ClientOptions {
        let timeout = Duration::from_secs(100);
        ClientOptions {
            device: self.device(),
            timeout: Some(timeout),
            connect_timeout: Duration::from_secs(20),
            connections: 1,
            ..ClientOptions::default()
        }
    }

    async fn client(&self, address: SocketAddr) -> AsyncClient {
        AsyncClient::with_options(address, &self.options())
            .await
            .unwrap()
    }
}

struct Running {
    address: SocketAddr,
    stop: StopHandle,
    kept: mpsc::Receiver<HeldRequest>,
    thread: JoinHandle<()>,
}

/// Starts a server of small groups in a thread of its own.
fn start(net: &Net, address: &str, config: ServerConfig) -> Running {
    let (net, address) = (net.clone(), address.to_owned());
    let (keep, kept) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || {
        let options = ServerOptions {
            device: net.device(),
            config,
            rdma: RdmaOptions::default(),
            ..ServerOptions::default()
        };
        let mut server = Server::with_options(address, &options).unwrap();
        tell.send((server.local_addr().unwrap(), server.stop_handle()))
            .unwrap();
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert(0, |request: &[u8], response: &mut [u8]| {
            response[..request.len()].copy_from_slice(&request.to_ascii_uppercase());
            Ok(request.len())
        });
        handlers.insert_held(KEPT, move |request| drop(keep.send(request)));
        handlers.insert(NEXT, |request: &[u8], response: &mut [u8]| {
            let number = u32::from_le_bytes(request.try_into().unwrap());
            response[..4].copy_from_slice(&(number + 1).to_le_bytes());
            Ok(4)
        });
        server.serve_types(&mut handlers).unwrap();
    });
    let (address, stop) = told.recv().unwrap();
    Running {
        address,
        stop,
        kept,
        thread,
    }
}

impl Running {
    fn end(self) {
        self.stop.stop();
        self.thread.join().unwrap();
    }
}

fn config() -> ServerConfig {
    ServerConfig {
        max_clients: 16,
        group_size: 2,
        ..ServerConfig::default()
    }
}

#[test]
fn tasks_of_a_runtime_share_connections_and_get_each_their_own_responses() {
    const TASKS: u32 = 100;
    let net = Net::new();
    let server = start(&net, &any_port(), config());
    Runtime::new().unwrap().block_on(async {
        // There are more clients than a group has, so they take turns, and are informed of every
        // slice.
        let mut clients = Vec::new();
        for _ in 0..5 {
            clients.push(net.client(server.address).await);
        }
        let mut calls = JoinSet::new();
        for task in 0..TASKS {
            let client = clients[task as usize % clients.len()].clone();
            calls.spawn(async move {
                for call in 0..20 {
                    let number = task * 1_000 + call;
                    assert_eq!(
                        client.call_type(NEXT, number.to_le_bytes()).await.unwrap(),
                        (number + 1).to_le_bytes()
                    );
                    let text = format!("task {task} call {call}");
                    assert_eq!(
                        client.call(text.as_bytes()).await.unwrap(),
                        text.to_uppercase().as_bytes()
                    );
                }
            });
        }
        while let Some(ended) = calls.join_next().await {
            ended.unwrap();
        }
    });
    server.end();
}

/// Counts polls, not time: a client that waits, and a client that has nothing to do, do not poll
/// their connection. The calls of a burst find their client's thread asleep, are more than it has
/// slots, and bring messages of all sizes.
#[test]
fn bursts_of_calls_after_pauses_get_each_their_own_responses() {
    const TASKS: usize = 60;
    let scale = limits::scale_of("SHM_TEST_SCALE");
    let net = Net::of_length(scale);
    let server = start(&net, &any_port(), config());
    Runtime::new().unwrap().block_on(async {
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(net.client(server.address).await);
        }
        for round in 0..20 * scale as usize {
            thread::sleep(Duration::from_millis(3));
            // The calls are of one client in even rounds, and of all clients in odd rounds.
            let used = &clients[..1 + 2 * (round % 2)];
            let mut calls = JoinSet::new();
            for task in 0..TASKS {
                let client = used[task % used.len()].clone();
                calls.spawn(async move {
                    for call in 0..3 {
                        let len =
                            (round * 131 + task * 577 + call * 61) % (client.max_request() + 1);
                        let request: Vec<u8> = (0..len)
                            .map(|nth| b'a' + ((nth ^ task ^ call) % 26) as u8)
                            .collect();
                        assert_eq!(
                            client.call(&*request).await.unwrap(),
                            request.to_ascii_uppercase()
                        );
                    }
                });
            }
            while let Some(ended) = calls.join_next().await {
                ended.unwrap();
            }
        }
    });
    server.end();
}

#[test]
fn a_client_that_waits_uses_no_core_and_is_woken_by_its_response() {
    let net = Net::new();
    let server = start(&net, &any_port(), config());
    block_on(async {
        let client = net.client(server.address).await;
        assert_eq!(client.call(b"ping").await.unwrap(), b"PING");
        let mut call = pin!(client.call_type(KEPT, b"later"));
        let mut task = Context::from_waker(Waker::noop());
        assert!(call.as_mut().poll(&mut task).is_pending());
        let kept = server.kept.recv().unwrap();
        // The client sleeps after this time. Then it polls only once a second, to check that the
        // server lives.
        thread::sleep(Duration::from_millis(200));
        let (before, start) = (client.polls(), Instant::now());
        thread::sleep(Duration::from_millis(1_500));
        let seconds = start.elapsed().as_secs() + 2;
        let while_waiting = client.polls() - before;
        assert!(
            while_waiting <= seconds * FEW,
            "{while_waiting} polls in {seconds} s"
        );
        kept.reply(*b"now").unwrap();
        assert_eq!(call.await.unwrap(), b"now");
        // An idle client is woken only by the end of a slice.
        thread::sleep(Duration::from_millis(200));
        let before = client.polls();
        thread::sleep(Duration::from_millis(1_000));
        let while_idle = client.polls() - before;
        assert!(while_idle <= FEW, "{while_idle} polls with nothing to do");
    });
    server.end();
}

#[test]
fn more_calls_than_slots_wait_for_slots_and_one_that_is_given_up_keeps_nobody_waiting() {
    let net = Net::new();
    let server = start(
        &net,
        &any_port(),
        ServerConfig {
            depth: 2,
            ..config()
        },
    );
    block_on(async {
        let client = net.client(server.address).await;
        let mut task = Context::from_waker(Waker::noop());
        let mut given_up = Box::pin(client.call_type(KEPT, b"given up"));
        assert!(given_up.as_mut().poll(&mut task).is_pending());
        let kept = server.kept.recv().unwrap();
        drop(given_up);
        let mut holder = Box::pin(client.call_type(KEPT, b"last slot"));
        assert!(holder.as_mut().poll(&mut task).is_pending());
        let held = server.kept.recv().unwrap();
        // No slot is left, and then one for all these calls.
        let mut calls: Vec<_> = (0..50_u8)
            .map(|nth| Box::pin(client.call([b'a' + nth % 26])))
            .collect();
        for call in &mut calls {
            assert!(call.as_mut().poll(&mut task).is_pending());
        }
        held.reply(*b"heard").unwrap();
        assert_eq!(holder.await.unwrap(), b"heard");
        for (nth, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await.unwrap(), [b'A' + nth as u8 % 26]);
        }
        kept.reply(*b"unheard").unwrap();
        assert_eq!(client.call(b"x").await.unwrap(), b"X");
    });
    server.end();
}

#[test]
fn a_call_ends_at_its_time_with_a_slot_and_without() {
    let net = Net::new();
    let server = start(
        &net,
        &any_port(),
        ServerConfig {
            depth: 1,
            ..config()
        },
    );
    block_on(async {
        let client = net.client(server.address).await;
        let late = |error| matches!(error, ClientError::TimedOut);
        let mut task = Context::from_waker(Waker::noop());
        let mut first = pin!(client.call_type(KEPT, b"kept"));
        assert!(first.as_mut().poll(&mut task).is_pending());
        let kept = server.kept.recv().unwrap();
        let refused = client
            .call_within(b"no slot", Duration::from_millis(30))
            .await
            .unwrap_err();
        assert!(matches!(refused, ClientError::NotSent), "{refused}");
        kept.reply(*b"done").unwrap();
        assert_eq!(first.await.unwrap(), b"done");

        // The call has the slot, and the server has the request.
        let hasty = ClientOptions {
            timeout: Some(Duration::from_secs(1)),
            ..net.options()
        };
        let hasty = AsyncClient::with_options(server.address, &hasty)
            .await
            .unwrap();
        assert!(
            late(hasty.call_type(KEPT, b"too late").await.unwrap_err()),
            "with a slot"
        );
        server.kept.recv().unwrap().reply(*b"unheard").unwrap();
        assert_eq!(
            hasty.call_within(b"next", WATCHDOG).await.unwrap(),
            b"NEXT",
            "the late response gives the slot back"
        );

        let mut call = pin!(client.call_type(KEPT, b"kept too"));
        assert!(call.as_mut().poll(&mut task).is_pending());
        drop(server.kept.recv().unwrap());
        assert!(matches!(call.await, Err(ClientError::Dropped)));
        assert!(matches!(
            client.call(vec![0; client.max_request() + 1]).await,
            Err(ClientError::TooLarge { .. })
        ));
        assert_eq!(client.call(b"on").await.unwrap(), b"ON");
    });
    server.end();
}

/// Makes calls that run out of time, until two of them were sent.
async fn hold_both_slots(client: &AsyncClient) {
    let mut held = 0;
    while held < 2 {
        let late = client.call_type(KEPT, b"kept").await.unwrap_err();
        held += usize::from(matches!(late, ClientError::TimedOut));
    }
}

/// The server answers none of the requests that hold the slots.
#[test]
fn calls_that_were_given_up_hold_a_client_up_until_one_call_has_waited_for_its_whole_time() {
    let net = Net::new();
    let server = start(
        &net,
        &any_port(),
        ServerConfig {
            depth: 2,
            ..config()
        },
    );
    block_on(async {
        let client = net.client(server.address).await;
        let short = Duration::from_millis(50);
        let hasty = AsyncClient::with_options(
            server.address,
            &ClientOptions {
                timeout: Some(short),
                ..net.options()
            },
        )
        .await
        .unwrap();
        hold_both_slots(&hasty).await;
        let mut task = Context::from_waker(Waker::noop());
        let mut patient = pin!(hasty.call_within(b"patient", WATCHDOG));
        assert!(patient.as_mut().poll(&mut task).is_pending());
        let stuck = hasty.call(b"no slot").await.unwrap_err();
        assert!(
            matches!(stuck, ClientError::NoCredit { given_up: 2 }),
            "{stuck}"
        );
        assert_eq!(patient.await.unwrap(), b"PATIENT");
        hold_both_slots(&hasty).await;
        let stuck = hasty.call(b"no slot").await.unwrap_err();
        assert!(
            matches!(stuck, ClientError::NoCredit { given_up: 2 }),
            "{stuck}"
        );
        assert_eq!(
            hasty.call_within(b"next", WATCHDOG).await.unwrap(),
            b"NEXT",
            "without another call that waits for its whole time"
        );
        assert_eq!(client.call(b"beside").await.unwrap(), b"BESIDE");
        drop(server.kept.try_iter().collect::<Vec<_>>());
    });
    server.end();
}

#[test]
fn a_server_that_returns_is_connected_to_again_and_one_that_does_not_is_told() {
    let net = Net::new();
    let server = start(&net, &any_port(), config());
    let address = server.address;
    block_on(async {
        let client = net.client(address).await;
        assert_eq!(client.call(b"one").await.unwrap(), b"ONE");
        server.end();
        let server = start(&net, &address.to_string(), config());
        // The first of these calls may find that the old connection is gone.
        let mut responses = Vec::new();
        while !matches!(responses.last(), Some(Ok(_))) {
            responses.push(client.call(b"two").await);
        }
        assert!(responses.len() <= 2, "{responses:?}");
        server.end();
        for _ in 0..2 {
            let began = Instant::now();
            client
                .call_within(b"three", Duration::from_millis(300))
                .await
                .unwrap_err();
            assert!(
                began.elapsed() < Duration::from_secs(15),
                "it ends at its own time, not at that of connections"
            );
        }
    });
}
