//! Endpoints: a connection in one value. `MLX5_TEST_DEVICE=mlx5_0` runs this on that device.

use std::time::Duration;

use copyrpc_testing::limits;
use mlx5::verbs::VerbsOptions;
use mlx5::*;

const WATCHDOG: Duration = Duration::from_secs(120);
/// Timeout that is long enough for a busy machine.
const SHORT: Duration = Duration::from_millis(50);

fn device() -> Device {
    limits::watchdog(WATCHDOG);
    let fabric = FabricSpec::Local(LocalFabric::new());
    match std::env::var("MLX5_TEST_DEVICE") {
        Ok(name) => Device::open(&*name).unwrap(),
        Err(_) => Device::open(DeviceSpec::Soft(SoftOptions {
            fabric,
            strict: true,
            ..SoftOptions::default()
        }))
        .unwrap(),
    }
}

fn pair(device: &Device, config: EndpointConfig) -> (Endpoint, Endpoint) {
    let (mut a, mut b) = (
        device.endpoint(config).unwrap(),
        device.endpoint(config).unwrap(),
    );
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    (a, b)
}

#[test]
fn messages_of_all_lengths_come_in_order_both_ways() {
    let device = device();
    let (mut a, mut b) = pair(
        &device,
        EndpointConfig {
            depth: 4,
            message_bytes: 1000,
            ..EndpointConfig::default()
        },
    );
    let message = |n: usize| (0..n).map(|i| (i + n) as u8).collect::<Vec<_>>();
    for n in [0, 1, 7, 64, 999, 1000] {
        a.send(&message(n)).unwrap();
        b.send(&message(n / 2)).unwrap();
        a.send(&message(n / 3)).unwrap();
        assert_eq!(b.recv().unwrap(), message(n));
        assert_eq!(b.recv().unwrap(), message(n / 3));
        assert_eq!(a.recv().unwrap(), message(n / 2));
    }
    assert_eq!((a.try_recv().unwrap(), b.try_recv().unwrap()), (None, None));
    let error = a.send(&message(1001)).unwrap_err();
    assert!(
        matches!(
            error,
            EndpointError::TooLong {
                bytes: 1001,
                max: 1000
            }
        ),
        "{error}"
    );
    a.send(&message(5)).unwrap();
    assert_eq!(b.recv().unwrap(), message(5));
}

#[test]
fn the_peers_memory_is_written_read_and_counted_in() {
    let device = device();
    let (mut a, mut b) = pair(
        &device,
        EndpointConfig {
            message_bytes: 256,
            memory_bytes: 4096,
            ..EndpointConfig::default()
        },
    );
    let bytes: Vec<u8> = (0..1000).map(|i| (i % 251) as u8).collect();
    a.write(100, &bytes).unwrap();
    let mut own = vec![0; 1000];
    b.memory().read(100, &mut own).unwrap();
    assert_eq!(own, bytes);
    b.memory().write(2000, b"mine").unwrap();
    let mut read = [0; 4];
    a.read(2000, &mut read).unwrap();
    assert_eq!(&read, b"mine");
    assert_eq!(
        (b.fetch_add(8, 5).unwrap(), b.fetch_add(8, 2).unwrap()),
        (0, 5)
    );
    assert_eq!(
        (
            b.compare_swap(8, 7, 1 << 40).unwrap(),
            b.compare_swap(8, 7, 0).unwrap()
        ),
        (7, 1 << 40)
    );
    for (offset, len) in [(4096, 1), (4000, 97), (usize::MAX, 2)] {
        let error = a.write(offset, &vec![0; len]).unwrap_err();
        assert!(matches!(error, EndpointError::OutOfBounds(_)), "{error}");
    }
    let error = a.fetch_add(4089, 1).unwrap_err();
    assert!(matches!(error, EndpointError::OutOfBounds(_)), "{error}");
    a.write(4095, &[9]).unwrap();
}

#[test]
fn a_recv_that_times_out_loses_nothing_and_any_other_operation_ends_the_connection() {
    let device = device();
    let (mut a, mut b) = pair(
        &device,
        EndpointConfig {
            depth: 2,
            timeout: Some(SHORT),
            ..EndpointConfig::default()
        },
    );
    let error = b.recv().unwrap_err();
    assert!(matches!(error, EndpointError::TimedOut(SHORT)), "{error}");
    a.send(b"1").unwrap();
    assert_eq!(b.recv().unwrap(), b"1");
    b.send(b"before").unwrap();
    // The peer has room for two.
    a.send(b"2").unwrap();
    a.send(b"3").unwrap();
    let error = a.send(b"4").unwrap_err();
    assert!(matches!(error, EndpointError::TimedOut(SHORT)), "{error}");
    for error in [
        a.send(b"5").unwrap_err(),
        a.read(0, &mut [0]).unwrap_err(),
        a.fetch_add(0, 1).unwrap_err(),
    ] {
        let expected = Syndrome::TransportRetryExceeded;
        assert!(
            matches!(error, EndpointError::Broken(CompletionError { syndrome, .. }) if syndrome == expected),
            "{error}"
        );
    }
    assert_eq!(a.recv().unwrap(), b"before");
    assert!(matches!(a.recv().unwrap_err(), EndpointError::Broken(_)));
    for message in [b"2", b"3"] {
        assert_eq!(b.recv().unwrap(), message);
    }
}

#[test]
fn a_timeout_that_no_clock_can_show_is_none() {
    let device = device();
    let (mut a, mut b) = pair(
        &device,
        EndpointConfig {
            timeout: Some(Duration::MAX),
            ..EndpointConfig::default()
        },
    );
    a.send(b"ages").unwrap();
    assert_eq!(b.recv().unwrap(), b"ages");
}

#[test]
fn a_peer_that_is_gone_fails_what_is_sent_to_it_and_what_it_had_sent_is_received() {
    let device = device();
    let connection = ConnectOptions {
        timeout: 10,
        retry_count: 1,
        ..ConnectOptions::default()
    };
    let (mut a, mut b) = pair(
        &device,
        EndpointConfig {
            connection,
            timeout: Some(WATCHDOG),
            ..EndpointConfig::default()
        },
    );
    b.send(b"farewell").unwrap();
    drop(b);
    let error = a.send(b"anybody?").unwrap_err();
    assert!(
        matches!(
            error,
            EndpointError::Failed(CompletionError {
                syndrome: Syndrome::TransportRetryExceeded,
                ..
            })
        ),
        "{error}"
    );
    assert_eq!(a.recv().unwrap(), b"farewell");
    for error in [
        a.recv().unwrap_err(),
        a.try_recv().unwrap_err(),
        a.write(0, &[1]).unwrap_err(),
    ] {
        assert!(matches!(error, EndpointError::Broken(_)), "{error}");
    }
}

#[test]
fn an_endpoint_that_is_not_connected_says_so_and_sizes_have_ranges() {
    let device = device();
    let mut alone = device.endpoint(EndpointConfig::default()).unwrap();
    for error in [
        alone.send(b"x").unwrap_err(),
        alone.recv().unwrap_err(),
        alone.read(0, &mut [0]).unwrap_err(),
    ] {
        assert!(matches!(error, EndpointError::NotConnected), "{error}");
    }
    let default = EndpointConfig::default();
    for config in [
        EndpointConfig {
            depth: 0,
            ..default
        },
        EndpointConfig {
            depth: 4097,
            ..default
        },
        EndpointConfig {
            message_bytes: 0,
            ..default
        },
        EndpointConfig {
            message_bytes: (1 << 20) + 1,
            ..default
        },
        EndpointConfig {
            memory_bytes: 0,
            ..default
        },
    ] {
        let error = device.endpoint(config).unwrap_err();
        assert!(
            matches!(
                error,
                EndpointError::Create(CreateError::Refused(hca::CreateError::OutOfRange { .. }))
            ),
            "{error}"
        );
    }
    let address = alone.address();
    assert_eq!(
        EndpointAddress::from_bytes(&address.to_bytes()),
        Some(address)
    );
    let mut nonsense = address.to_bytes();
    nonsense[40..56].fill(0xff);
    assert_eq!(
        EndpointAddress::from_bytes(&nonsense),
        None,
        "a range that ends behind the last address"
    );
    assert_eq!(
        EndpointAddress::from_bytes(&[0; EndpointAddress::LEN]),
        None
    );
}

#[test]
fn a_name_is_that_of_a_device() {
    let named = |name: &str| match DeviceSpec::from(name) {
        DeviceSpec::Verbs(VerbsOptions { device, port, .. }) => (device.unwrap(), port),
        other => panic!("{name}: {other:?}"),
    };
    assert!(
        matches!(DeviceSpec::from("soft"), DeviceSpec::Soft(_))
            && matches!(DeviceSpec::from("null"), DeviceSpec::Null(_))
    );
    assert_eq!(named("mlx5_0"), ("mlx5_0".to_owned(), None));
    assert_eq!(named("mlx5_1:2"), ("mlx5_1".to_owned(), Some(2)));
    assert_eq!(named("mlx5_1:x"), ("mlx5_1:x".to_owned(), None));
    let error = Device::open("no_such_device").unwrap_err().to_string();
    assert!(
        error.contains("no_such_device") || error.contains("libibverbs"),
        "{error}"
    );
}
