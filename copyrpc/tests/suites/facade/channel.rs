//! Records swapped over a byte stream.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use copyrpc::{
    Context, EXCHANGE_RECORD_SIZE, Endpoint, ExchangeRecord, PendingEndpoint, RecordError, Refusal,
    SetupError,
};
use mlx5::LocalFabric;

use super::{builder, next_request, small, step_until};

#[test]
fn a_stream_connects_two_endpoints_and_what_is_wrong_with_it_is_said() {
    let fabric = LocalFabric::new();
    let near: Context<()> = builder(&fabric).build().unwrap();
    let pending = || near.create_endpoint(&small()).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    let far_builder = builder(&fabric);
    let peer = std::thread::spawn(move || {
        let far: Context<()> = far_builder.build().unwrap();
        let _endpoint = far
            .create_endpoint(&small())
            .unwrap()
            .connect_over(&theirs)
            .unwrap();
        let data = next_request(&far).data().to_vec();
        // The handshake took only the record and the byte after it from the stream.
        theirs.write_all(b"z").unwrap();
        is_done.recv().unwrap();
        data
    });
    let endpoint = pending().connect_over(&ours).unwrap();
    endpoint.call(b"hello", (), 0).unwrap();
    let mut next = [0];
    ours.set_nonblocking(true).unwrap();
    step_until(|| {
        near.poll(|(), _| ()).unwrap();
        (&ours).read_exact(&mut next).is_ok()
    });
    assert_eq!(&next, b"z");
    done.send(()).unwrap();
    assert_eq!(peer.join().unwrap(), b"hello");

    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[0; EXCHANGE_RECORD_SIZE]).unwrap();
    assert!(matches!(
        pending().connect_over(&ours),
        Err(SetupError::Record(RecordError::Magic { .. }))
    ));
    let cut = b"copyrpc\0"
        .iter()
        .chain(&[0; EXCHANGE_RECORD_SIZE])
        .copied()
        .take(EXCHANGE_RECORD_SIZE - 1);
    theirs.write_all(&cut.collect::<Vec<u8>>()).unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    assert!(matches!(
        pending().connect_over(&ours),
        Err(SetupError::Channel(_))
    ));
}

/// A peer that connects when it is asked for the last byte of the exchange and not before.
struct LatePeer {
    pending: Option<PendingEndpoint<()>>,
    endpoint: Option<Endpoint<()>>,
    /// The bytes that the peer received.
    heard: Vec<u8>,
    verdict: u8,
}

impl Write for LatePeer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.heard.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Read for LatePeer {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        if let [verdict] = bytes {
            *verdict = self.verdict;
            let record =
                ExchangeRecord::decode(self.heard[..EXCHANGE_RECORD_SIZE].try_into().unwrap())
                    .unwrap();
            self.endpoint = Some(self.pending.take().unwrap().connect(&record).unwrap());
        } else {
            bytes.copy_from_slice(&self.pending.as_ref().unwrap().local_info().encode());
        }
        Ok(bytes.len())
    }
}

#[test]
fn an_end_is_connected_over_a_stream_when_both_ends_are() {
    let fabric = LocalFabric::new();
    let [near, far] = [(); 2].map(|()| -> Context<()> { builder(&fabric).build().unwrap() });
    for verdict in [1, 0] {
        let mut peer = LatePeer {
            pending: Some(far.create_endpoint(&small()).unwrap()),
            endpoint: None,
            heard: Vec::new(),
            verdict,
        };
        let connected = near.connect_over(&small(), &mut peer);
        assert!(peer.endpoint.is_some(), "the peer was not waited for");
        assert_eq!(
            (peer.heard.len(), peer.heard.last()),
            (EXCHANGE_RECORD_SIZE + 1, Some(&1))
        );
        match connected {
            Ok(endpoint) => {
                endpoint.call(b"at once", (), 0).unwrap();
                near.flush_endpoints().unwrap();
                assert_eq!(next_request(&far).data().to_vec(), b"at once");
                assert_eq!(verdict, 1);
            }
            Err(error) => assert!(
                matches!(error, SetupError::NotConnectedThere) && verdict == 0,
                "{error}"
            ),
        }
    }
}

/// A client that waits for its server does not drain between its attempts.
#[test]
fn attempts_to_connect_that_failed_take_no_share_of_the_queues() {
    let fabric = LocalFabric::new();
    let near: Context<()> = builder(&fabric).endpoints(1).build().unwrap();
    let far: Context<()> = builder(&fabric).build().unwrap();
    let attempt = |verdict| {
        let pending = Some(far.create_endpoint(&small()).unwrap());
        near.connect_over(
            &small(),
            &mut LatePeer {
                pending,
                endpoint: None,
                heard: Vec::new(),
                verdict,
            },
        )
    };
    for _ in 0..3 {
        let refused = attempt(0);
        assert!(
            matches!(refused, Err(SetupError::NotConnectedThere)),
            "{refused:?}"
        );
    }
    let connected = attempt(1).unwrap();
    assert_eq!((near.endpoints(), connected.closed()), (1, None));
}

/// This runs over TCP, which loses the last bytes sent if a socket is closed with unread bytes.
#[test]
fn a_client_that_there_is_no_room_for_hears_so() {
    let fabric = LocalFabric::new();
    let server: Context<()> = builder(&fabric).srq_size(48).build().unwrap();
    let _only = server.create_endpoint(&small()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, client_builder) = (listener.local_addr().unwrap(), builder(&fabric));
    let client = std::thread::spawn(move || {
        let client: Context<()> = client_builder.build().unwrap();
        client
            .connect_over(&small(), TcpStream::connect(address).unwrap())
            .unwrap_err()
    });
    let refused = server
        .connect_over(&small(), listener.accept().unwrap().0)
        .unwrap_err();
    assert!(matches!(refused, SetupError::Full(_)), "{refused}");
    let heard = client.join().unwrap();
    assert!(
        matches!(
            heard,
            SetupError::Record(RecordError::Refused(Refusal::Full))
        ),
        "{heard}"
    );
}

/// The peer receives the refusal, and does not wait for the other end.
#[test]
fn an_end_that_cannot_connect_tells_the_other() {
    let fabric = LocalFabric::new();
    let near: Context<()> = builder(&fabric).build().unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[0; EXCHANGE_RECORD_SIZE]).unwrap();
    assert!(near.connect_over(&small(), ours).is_err());
    let mut heard = Vec::new();
    theirs.read_to_end(&mut heard).unwrap();
    assert_eq!(
        (heard.len(), heard.last()),
        (EXCHANGE_RECORD_SIZE + 1, Some(&0))
    );
}
