//! Calls over networks that lose, double, delay and reorder packets: each call is executed once,
//! and answered.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use copyrpc::mlx5::DeviceSpec;
use copyrpc_calls::{AsyncClient, Client, Connection, Dial, ErrorOf, StopHandle};
use copyrpc_testing::executor::block_on;
use copyrpc_testing::helpers::scale;
use copyrpc_testing::limits::{any_port, watchdog};

const WATCHDOG: Duration = Duration::from_secs(60);
const CALLERS: u64 = 16;

type Handler = Box<dyn FnMut(&[u8]) -> Vec<u8> + Send>;
type Told = mpsc::Sender<(SocketAddr, StopHandle)>;

/// Calls a server of each network, which `serve` runs until it is stopped: `serve` publishes its
/// address, and gets the number of calls that it answers.
fn each_call_is_executed_once_and_answered<C>(
    serve: fn(DeviceSpec, Handler, Told, u64),
    options: fn(DeviceSpec) -> C::Options,
) where
    C: Dial<SocketAddr, Error: std::fmt::Debug, Options: Sync>
        + Connection<Request = [u8], Reply = Vec<u8>>
        + 'static,
    AsyncClient<C>: Sync,
{
    let calls = 50 * u64::from(scale());
    watchdog(WATCHDOG * scale());
    for network in [
        "reorder=50,delay_us=1000",
        "delay_us=3000..7000",
        "double=50",
        "loss=10,double=10,reorder=100,delay_us=0..500",
    ] {
        let device = DeviceSpec::from(&*format!(
            "soft:roce=127.0.0.1,port=0,mtu=1024,packets=all,{network}"
        ));
        let counts = Arc::new(Mutex::new(HashMap::<u64, u32>::new()));
        let counted = Arc::clone(&counts);
        let handler = move |request: &[u8]| {
            let number = u64::from_le_bytes(request[..8].try_into().unwrap());
            *counted.lock().unwrap().entry(number).or_default() += 1;
            request.to_vec()
        };
        let (tell, told) = mpsc::channel();
        let server: JoinHandle<()> = thread::spawn({
            let device = device.clone();
            move || serve(device, Box::new(handler), tell, CALLERS * calls)
        });
        let (address, stop) = told.recv().unwrap();
        let options = &options(device);
        let make = |name: u64, call: u64| {
            let mut payload = (name << 32 | call).to_le_bytes().to_vec();
            // With the header and the trailer of scalerpc, some of these lengths have a packet that
            // begins inside the trailer.
            let len = [8, 980 + call as usize % 16, 3000][call as usize % 3];
            payload.resize(len, name as u8);
            thread::sleep(Duration::from_millis(if call % 50 == 0 { name } else { 0 }));
            payload
        };
        let check = |name: u64, call: u64, answer: Result<Vec<u8>, ErrorOf<C>>| match answer {
            Ok(answer) => assert_eq!(answer[..8], (name << 32 | call).to_le_bytes()),
            Err(error) => panic!("{network}: client {name}, call {call}: {error}"),
        };
        let alone = |name: u64| {
            let mut client = Client::<C>::with_options(address, options).unwrap();
            for call in 0..calls {
                let answer = client.call_within(&make(name, call), WATCHDOG / 6);
                let answer = answer.map(<[u8]>::to_vec);
                check(name, call, answer);
            }
        };
        // Some clients share a connection, and call at the same time.
        let shared =
            &[0, 1].map(|_| block_on(AsyncClient::<C>::with_options(address, options)).unwrap());
        let together = |name: u64| {
            for call in 0..calls {
                let made = shared[name as usize % 2].call_within(make(name, call), WATCHDOG / 6);
                check(name, call, block_on(made));
            }
        };
        thread::scope(|scope| {
            (0..CALLERS / 4).for_each(|name| drop(scope.spawn(move || alone(name))));
            (CALLERS / 4..CALLERS).for_each(|name| drop(scope.spawn(move || together(name))));
        });
        stop.stop();
        server.join().unwrap();
        let counts = counts.lock().unwrap();
        assert!(
            counts.len() as u64 == CALLERS * calls && counts.values().all(|count| *count == 1),
            "{network}"
        );
    }
}

#[test]
fn of_copyrpc() {
    each_call_is_executed_once_and_answered::<copyrpc::Caller>(
        |device, mut handler, told, _| {
            let options = copyrpc::ServerOptions {
                device,
                ..copyrpc::ServerOptions::default()
            };
            let mut server = copyrpc::Server::with_options(any_port(), &options).unwrap();
            told.send((server.local_addr().unwrap(), server.stop_handle()))
                .unwrap();
            server.serve(|request| handler(&request.to_vec())).unwrap();
        },
        |device| copyrpc::ClientOptions {
            device,
            ..copyrpc::ClientOptions::default()
        },
    );
}

#[test]
fn of_scalerpc() {
    each_call_is_executed_once_and_answered::<scalerpc::Caller>(
        |device, handler, told, calls| {
            let options = scalerpc::ServerOptions {
                device,
                ..scalerpc::ServerOptions::default()
            };
            let mut server = scalerpc::Server::with_options(any_port(), &options).unwrap();
            told.send((server.local_addr().unwrap(), server.stop_handle()))
                .unwrap();
            server.serve(handler).unwrap();
            let stats = server.stats();
            assert_eq!((stats.accepted, stats.garbage), (calls, 0), "{stats:?}");
        },
        |device| scalerpc::ClientOptions {
            device,
            ..scalerpc::ClientOptions::default()
        },
    );
}
