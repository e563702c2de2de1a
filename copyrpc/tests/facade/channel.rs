//! Records swapped over a byte stream.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use copyrpc::{ConnectFailure, Context, EXCHANGE_RECORD_SIZE, ExchangeError};
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
        far.create_endpoint(&small()).unwrap().connect_over(&theirs).unwrap();
        let data = next_request(&far).data().to_vec();
        // Nothing of the stream was taken but the record.
        theirs.write_all(b"z").unwrap();
        is_done.recv().unwrap();
        data
    });
    let endpoint = pending().connect_over(&ours).unwrap();
    endpoint.call(b"hello", (), 0).unwrap();
    let mut next = [0];
    ours.set_nonblocking(true).unwrap();
    // The peer may not have connected yet: then the request is sent again, while this end polls.
    step_until(|| {
        near.poll(|(), _| ()).unwrap();
        (&ours).read_exact(&mut next).is_ok()
    });
    assert_eq!(&next, b"z");
    done.send(()).unwrap();
    assert_eq!(peer.join().unwrap(), b"hello");

    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[0; EXCHANGE_RECORD_SIZE]).unwrap();
    assert!(matches!(pending().connect_over(&ours), Err(ConnectFailure::Exchange(ExchangeError::Magic))));
    theirs.write_all(&[0; EXCHANGE_RECORD_SIZE - 1]).unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    assert!(matches!(pending().connect_over(&ours), Err(ConnectFailure::Channel(_))));
}
