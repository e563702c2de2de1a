//! Devices of libibverbs: the list of devices, their capabilities, and the errors if a device
//! cannot be used.
//!
//! The ignored tests need a device. `mlx5-run` makes a device, with faults; the `ignore` reason of
//! each test names them. `scripts/verbs-tests` runs the tests in this way.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

use mlx5::verbs::{DeviceEntry, LinkLayer, PortState, VerbsError, VerbsOptions};
use mlx5::*;

fn open(options: &VerbsOptions) -> Result<Device, VerbsError> {
    Device::open(DeviceSpec::Verbs(options.clone())).map_err(|error| match error {
        OpenError::Verbs(error) | OpenError::NoVerbs(_, error) => error,
        other => panic!("{other}"),
    })
}

fn refusal(options: &VerbsOptions) -> VerbsError {
    open(options).map(|device| device.info()).unwrap_err()
}

fn named(name: &str) -> VerbsOptions {
    VerbsOptions {
        device: Some(name.to_owned()),
        ..VerbsOptions::default()
    }
}

/// Asserts that every part is in the text.
fn says(error: &VerbsError, parts: &[&str]) {
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn a_device_that_is_not_there_is_refused_with_what_to_do() {
    let text = Device::open("no such device").unwrap_err().to_string();
    assert!(text.contains("\"no such device\""), "{text}");
    match refusal(&named("no such device")) {
        error @ VerbsError::NotInstalled { .. } => {
            says(&error, &["apt-get install libibverbs1 ibverbs-providers"])
        }
        error @ VerbsError::NoDevice { .. } => {
            says(&error, &["this machine has no RDMA device", "modprobe"])
        }
        error => says(
            &error,
            &["there is no RDMA device \"no such device\"; there are: "],
        ),
    }
}

#[test]
fn options_out_of_range_are_refused_before_anything_is_looked_for() {
    let error = refusal(&VerbsOptions {
        service_level: 16,
        ..VerbsOptions::default()
    });
    assert_eq!(error.to_string(), "service_level is 16; legal is 0..=15");
    let error = refusal(&VerbsOptions {
        max_rd_atomic: 0,
        ..VerbsOptions::default()
    });
    assert_eq!(error.to_string(), "max_rd_atomic is 0; legal is 1..=16");
    let error = refusal(&VerbsOptions {
        mtu: Some(1500),
        ..VerbsOptions::default()
    });
    assert_eq!(
        error.to_string(),
        "mtu is 1500; legal is 256, 512, 1024, 2048 or 4096"
    );
}

#[test]
#[ignore = "needs libibverbs1 and no RDMA device, or mlx5-run --fault devices=none"]
fn no_device_at_all_is_said() {
    for options in [VerbsOptions::default(), named("mlx5_0"), named("0")] {
        let error = refusal(&options);
        assert!(matches!(error, VerbsError::NoDevice { .. }), "{error}");
        says(&error, &["this machine has no RDMA device"]);
    }
    assert!(matches!(
        DeviceEntry::all(),
        Err(VerbsError::NoDevice { .. })
    ));
}

#[test]
#[ignore = "needs mlx5-run"]
fn devices_are_listed_and_opened_by_name_by_place_and_by_default() {
    let all = DeviceEntry::all().unwrap();
    let [entry] = &all[..] else { panic!("{all:?}") };
    assert_eq!(entry.name, "mlx5_0");
    assert_ne!(entry.node_guid, 0);
    let ports = entry.ports.clone().unwrap();
    let [port] = ports[..] else {
        panic!("{ports:?}")
    };
    assert_eq!(
        (port.number, port.state, port.mtu),
        (1, PortState::Active, 4096)
    );
    let is_roce = port.link_layer == LinkLayer::Ethernet;
    assert_eq!(port.lid == 0, is_roce);
    for options in [
        VerbsOptions::default(),
        named("mlx5_0"),
        named("0"),
        VerbsOptions {
            port: Some(1),
            ..named("mlx5_0")
        },
    ] {
        let info = open(&options).unwrap().info();
        assert_eq!(
            (info.name.as_str(), info.numa_node),
            ("mlx5_0:1", entry.numa_node)
        );
        let transport = if is_roce {
            "RoCE v2, GID index 3 (::ffff:127.0.0.1".to_owned()
        } else {
            format!("InfiniBand, LID {}", port.lid)
        };
        assert!(info.transport.starts_with(&transport), "{}", info.transport);
        assert!(
            info.engine == Engine::Direct && info.modes.starts_with("direct, libmlx5.so.1."),
            "{}",
            info.modes
        );
        let relayed = open(&VerbsOptions {
            relay: true,
            ..options
        })
        .unwrap()
        .info();
        assert!(
            relayed.engine == Engine::Relay && relayed.modes.starts_with("relay, libibverbs, "),
            "{}",
            relayed.modes
        );
        assert!(
            info.max_cqe > 0 && info.max_srq_wr > 0 && info.max_send_wr > 0,
            "{info:?}"
        );
    }
    let device = open(&VerbsOptions::default()).unwrap();
    assert!(
        device.null().is_none()
            && device.soft().and_then(|soft| soft.trace_hash()).is_none()
            && device
                .soft()
                .and_then(|soft| soft.next_event_ns())
                .is_none()
            && !device.progress()
    );
    assert_eq!(
        device
            .soft()
            .map_or_else(Vec::new, |soft| soft.take_violations()),
        []
    );
}

#[test]
#[ignore = "needs mlx5-run"]
fn names_ports_and_indices_that_are_not_there_are_refused_with_those_that_are() {
    says(
        &refusal(&named("mlx5_7")),
        &["no RDMA device \"mlx5_7\"; there are: mlx5_0"],
    );
    says(
        &refusal(&named("1")),
        &["no RDMA device \"1\"; there are: mlx5_0"],
    );
    for port in [0, 2] {
        let error = refusal(&VerbsOptions {
            port: Some(port),
            ..VerbsOptions::default()
        });
        says(
            &error,
            &[
                "mlx5_0 has 1 port(s), numbered from 1",
                &format!("port {port} was asked for"),
            ],
        );
    }
    let error = refusal(&VerbsOptions {
        gid_index: Some(200),
        ..VerbsOptions::default()
    });
    says(
        &error,
        &["port 1 of mlx5_0 has no GID at index 200; it has: 0: "],
    );
    let error = refusal(&VerbsOptions {
        pkey_index: 999,
        ..VerbsOptions::default()
    });
    says(
        &error,
        &["port 1 of mlx5_0 has ", " P_Keys; index 999 was asked for"],
    );
}

#[test]
#[ignore = "needs mlx5-run"]
fn what_the_options_ask_for_is_what_connections_use() {
    let mtu = |mtu| {
        open(&VerbsOptions {
            mtu,
            ..VerbsOptions::default()
        })
        .unwrap()
    };
    let address = |device: &Device| {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
        let own = ReceiveSource::Own {
            depth: 1,
            max_sge: 0,
        };
        pd.create_qp(&cq, &cq, own, &QpConfig::default())
            .unwrap()
            .address()
    };
    let (whole, half) = (address(&mtu(None)), address(&mtu(Some(2048))));
    assert_eq!(
        (whole.kind, whole.mtu, half.mtu),
        (DeviceKind::Hardware, 4096, 2048)
    );
    assert_ne!(whole.psn, half.psn, "at random");
    let with_gid = open(&VerbsOptions {
        gid_index: Some(0),
        ..VerbsOptions::default()
    })
    .unwrap();
    assert!(
        with_gid.info().transport.contains("GID index 0"),
        "{}",
        with_gid.info().transport
    );
    assert_ne!(address(&with_gid).gid, [0; 16]);
}

#[test]
#[ignore = "needs mlx5-run"]
fn sizes_are_those_the_libraries_gave_and_never_less_than_asked_for() {
    let device = open(&VerbsOptions::default()).unwrap();
    let (pd, info) = (device.alloc_pd().unwrap(), device.info());
    for entries in [1, 2, 3, 64, 65, 1000] {
        let cq = device.create_cq(entries).unwrap();
        assert!(cq.entries() >= entries && cq.entries().is_power_of_two());
    }
    let cq = device
        .create_cq(CqConfig {
            cqe_bytes: 128,
            ..16.into()
        })
        .unwrap();
    for depth in [1, 2, 7, 8, 100] {
        let srq = pd.create_srq(depth, 3).unwrap();
        assert!(srq.depth() >= depth as usize && srq.free() == srq.depth());
        for max_send_wr in [1, 16, 17, 64, 1000] {
            let config = QpConfig {
                max_send_wr,
                max_inline_data: 220,
                ..QpConfig::default()
            };
            let rc = pd.create_qp(&cq, &cq, &srq, &config).unwrap();
            let ud = pd
                .create_ud_qp(&cq, &cq, ReceiveSource::Own { depth, max_sge: 2 }, &config)
                .unwrap();
            for (capacity, inline) in [
                (rc.send_capacity(), rc.max_inline_data()),
                (ud.send_capacity(), ud.max_inline_data()),
            ] {
                let wanted = max_send_wr.next_power_of_two().max(16) as usize;
                assert_eq!(
                    (capacity, inline),
                    (wanted, 220),
                    "not more memory than asked for, either"
                );
            }
            assert!(ud.free_receives() >= depth as usize);
        }
    }
    assert!(matches!(
        device.create_cq(info.max_cqe + 1),
        Err(CreateError::Refused(hca::CreateError::OutOfRange { .. }))
    ));
    let with_vector = |comp_vector| {
        device.create_cq(CqConfig {
            comp_vector,
            ..16.into()
        })
    };
    assert!(
        info.comp_vectors > 1 && (0..info.comp_vectors).all(|vector| with_vector(vector).is_ok())
    );
    assert!(matches!(
        with_vector(info.comp_vectors),
        Err(CreateError::Refused(hca::CreateError::OutOfRange {
            min: 0,
            ..
        }))
    ));
    assert!(matches!(
        pd.create_srq(info.max_srq_wr + 1, 1),
        Err(CreateError::Refused(hca::CreateError::OutOfRange { .. }))
    ));
    assert!(matches!(
        device.create_cq(CqConfig {
            compression: true,
            ..16.into()
        }),
        Err(CreateError::Unsupported { .. })
    ));
}

#[test]
#[ignore = "needs mlx5-run"]
fn datagrams_go_where_an_address_says() {
    let device = open(&VerbsOptions::default()).unwrap();
    let (pd, mut cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let mut recv_cq = device.create_cq(16).unwrap();
    let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
    let own = ReceiveSource::Own {
        depth: 4,
        max_sge: 1,
    };
    let [mut from, mut to] = [(); 2].map(|()| {
        pd.create_ud_qp(&cq, &recv_cq, own, &QpConfig::default())
            .unwrap()
    });
    from.activate(1).unwrap();
    to.activate(2).unwrap();
    to.post_receive(&[mr.sge(0, 100).unwrap()], 7).unwrap();
    to.ring_receives();
    let destination = from.destination_of(&to.address(), 2).unwrap();
    from.post(
        &UdSend {
            to: &destination,
            payload: Inline(b"here"),
        },
        Signal::Always,
        0,
    )
    .unwrap();
    from.ring();
    recv_cq.arm(false);
    assert!(device.wait(Some(std::time::Duration::from_secs(20))));
    let mut arrived = None;
    recv_cq.poll(1, |cqe| {
        arrived = Some((
            cqe.result(),
            to.complete_receive(&cqe),
            cqe.byte_count(),
            cqe.source_qpn(),
        ))
    });
    assert_eq!(arrived, Some((Ok(()), Some(7), 44, from.qpn())));
    cq.poll(1, |cqe| cqe.result().unwrap());
    let soft = QpAddress::soft(1, to.qpn(), 0);
    assert!(matches!(
        from.destination_of(&soft, 2),
        Err(ConnectError::DifferentKinds { .. })
    ));
    assert!(matches!(
        from.destination_of(
            &QpAddress {
                gid: [0; 16],
                ..to.address()
            },
            2
        ),
        Ok(_) | Err(ConnectError::NoGid)
    ));
}

#[test]
#[ignore = "needs mlx5-run --fault open=EACCES"]
fn a_file_that_may_not_be_opened_is_named_and_who_may_open_it() {
    for relay in [false, true] {
        let error = refusal(&VerbsOptions {
            relay,
            ..VerbsOptions::default()
        });
        assert!(matches!(error, VerbsError::Permission { .. }), "{error}");
        says(
            &error,
            &[
                "no permission to open /dev/infiniband/uverbs0 of mlx5_0",
                "usermod -aG rdma",
            ],
        );
    }
    let [entry] = &DeviceEntry::all().unwrap()[..] else {
        panic!("it is listed all the same")
    };
    assert!(
        matches!(entry.ports, Err(VerbsError::Permission { .. })),
        "{entry:?}"
    );
}

#[test]
#[ignore = "needs mlx5-run --fault port=down"]
fn a_port_that_is_down_is_refused_with_its_state() {
    for (port, relay) in [(None, false), (Some(1), false), (None, true)] {
        let error = refusal(&VerbsOptions {
            port,
            relay,
            ..VerbsOptions::default()
        });
        assert!(
            matches!(
                error,
                VerbsError::PortDown {
                    state: PortState::Down,
                    ..
                }
            ),
            "{error}"
        );
        says(&error, &["port 1 of mlx5_0 is down, not active", "cable"]);
    }
    assert_eq!(
        DeviceEntry::all().unwrap()[0].ports.as_ref().unwrap()[0].state,
        PortState::Down
    );
}

#[test]
#[ignore = "needs mlx5-run --link roce --fault gid=none"]
fn a_roce_port_without_a_gid_is_refused() {
    for (gid_index, relay) in [(None, false), (Some(0), false), (None, true)] {
        let error = refusal(&VerbsOptions {
            gid_index,
            relay,
            ..VerbsOptions::default()
        });
        assert!(
            matches!(error, VerbsError::NoGid { index: 0, .. }),
            "{error}"
        );
        says(
            &error,
            &["port 1 of mlx5_0 has no GID at index 0; it has: none"],
        );
    }
}

#[test]
#[ignore = "needs mlx5-run --fault reg_mr=ENOMEM"]
fn a_region_that_may_not_be_locked_is_refused_with_the_limit() {
    let device = open(&VerbsOptions::default()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let error = pd.alloc(4096, Access::LOCAL_WRITE).unwrap_err().to_string();
    assert!(
        error.contains("the limit of locked memory (ulimit -l) is ")
            && error.contains("this region has 4 KiB"),
        "{error}"
    );
}

#[test]
#[ignore = "needs mlx5-run --fault create_qp=ENOMEM"]
fn a_queue_pair_the_kernel_refuses_is_an_error_with_the_calls_name() {
    let device = open(&VerbsOptions::default()).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 0,
    };
    let error = pd
        .create_qp(&cq, &cq, own, &QpConfig::default())
        .unwrap_err();
    let CreateError::Call(error) = error else {
        panic!("{error}")
    };
    assert_eq!(
        (error.call, error.errno),
        ("mlx5dv_create_qp", libc::ENOMEM)
    );
}

#[test]
#[ignore = "needs mlx5-run --fault create_qp=EOPNOTSUPP"]
fn a_device_without_such_queue_pairs_says_which_are_needed() {
    let device = open(&VerbsOptions {
        relay: true,
        ..VerbsOptions::default()
    })
    .unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 0,
    };
    let error = pd
        .create_qp(&cq, &cq, own, &QpConfig::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("ibv_create_qp: Operation not supported")
            && error.contains("reliable connections are needed"),
        "{error}"
    );
}

#[test]
#[ignore = "needs mlx5-run --fault srq=none"]
fn a_device_without_shared_receive_queues_refuses_them_and_connects_queue_pairs_with_their_own() {
    let device = open(&VerbsOptions {
        relay: true,
        ..VerbsOptions::default()
    })
    .unwrap();
    let (pd, mut cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let error = pd.create_srq(1, 0).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "this device has no shared receive queues: give each queue pair receives of its own"
        ),
        "{error}"
    );
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 1,
    };
    let mut qp = pd.create_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    qp.post_receive(&[], 0).unwrap();
    qp.ring_receives();
    assert_eq!(
        result_of_a_send(
            &device,
            &mut qp,
            &mut cq,
            std::time::Duration::from_secs(10)
        ),
        Some(Ok(()))
    );
}

#[test]
#[ignore = "needs mlx5-run --fault modify_qp=EINVAL@1"]
fn a_transition_the_kernel_refuses_leaves_the_state() {
    let device = open(&VerbsOptions::default()).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 0,
    };
    let mut qp = pd.create_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
    let to = qp.address();
    let error = qp.connect(&to, &ConnectOptions::default()).unwrap_err();
    assert!(
        matches!(&error, ConnectError::Call(error) if error.errno == libc::EINVAL),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .starts_with("ibv_modify_qp (to RTR): Invalid argument"),
        "{error}"
    );
    assert_eq!(qp.state(), QpState::Init, "the first step was done");
}

#[test]
#[ignore = "needs mlx5-run --fault atomics=none"]
fn a_device_without_atomics_connects_and_refuses_them_where_they_are_asked_for() {
    let device = open(&VerbsOptions::default()).unwrap();
    assert!(!device.info().has_atomics);
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 0,
    };
    let mut qp = pd.create_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let mr = pd.alloc(4096, all).unwrap();
    let op = FetchAdd {
        addr: mr.addr(),
        rkey: mr.rkey(),
        add: 1,
        into: mr.sge(8, 8).unwrap(),
    };
    assert_eq!(qp.post(&op, Signal::Always, 0), Err(PostError::NoAtomics));
    assert!(matches!(
        pd.alloc(4096, all | Access::REMOTE_ATOMIC),
        Err(RegisterError::NoAtomics)
    ));
}

/// Makes two connected ends of one device.
fn connected() -> (Device, [RcQp; 2], [Cq; 2], Srq) {
    let device = open(&VerbsOptions::default()).unwrap();
    let (pd, cqs) = (
        device.alloc_pd().unwrap(),
        [(); 2].map(|()| device.create_cq(64).unwrap()),
    );
    let mut srq = pd.create_srq(32, 0).unwrap();
    let mut qps = [(); 2].map(|()| {
        pd.create_qp(&cqs[0], &cqs[1], &srq, &QpConfig::default())
            .unwrap()
    });
    let addresses = [qps[0].address(), qps[1].address()];
    for (qp, to) in qps.iter_mut().zip(addresses.iter().rev()) {
        qp.connect(
            to,
            &ConnectOptions {
                timeout: 14,
                retry_count: 7,
                ..ConnectOptions::default()
            },
        )
        .unwrap();
    }
    for _ in 0..32 {
        srq.post(&[], 0).unwrap();
    }
    srq.ring();
    (device, qps, cqs, srq)
}

fn next_event(device: &Device) -> AsyncEvent {
    let start = std::time::Instant::now();
    loop {
        if let Some(event) = device.take_async_event() {
            return event;
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(20));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Sends an empty message. Returns its outcome.
fn result_of_a_send(
    device: &Device,
    qp: &mut RcQp,
    cq: &mut Cq,
    patience: std::time::Duration,
) -> Option<Result<(), CompletionError>> {
    qp.post(&Send { payload: () }, Signal::Always, 0).unwrap();
    qp.ring();
    let (start, mut result) = (std::time::Instant::now(), None);
    while result.is_none() && start.elapsed() < patience {
        cq.poll(1, |cqe| {
            qp.complete(&cqe);
            result = Some(cqe.result());
        });
        device.progress();
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    result
}

#[test]
#[ignore = "needs mlx5-run --fault port=down@300+300"]
fn a_port_that_goes_down_and_up_is_reported_and_connections_go_on() {
    let (device, [mut qp, _peer], [mut cq, _], _srq) = connected();
    let long = std::time::Duration::from_secs(20);
    assert_eq!(
        result_of_a_send(&device, &mut qp, &mut cq, long),
        Some(Ok(()))
    );
    assert_eq!(next_event(&device), AsyncEvent::PortError { port: 1 });
    assert_eq!(
        DeviceEntry::all().unwrap()[0].ports.as_ref().unwrap()[0].state,
        PortState::Active,
        "of a device that was opened just now"
    );
    assert_eq!(
        result_of_a_send(&device, &mut qp, &mut cq, long),
        Some(Ok(()))
    );
    assert_eq!(next_event(&device), AsyncEvent::PortActive { port: 1 });
    assert_eq!(device.take_async_event(), None);
}

#[test]
#[ignore = "needs mlx5-run --fault device=fatal@1000"]
fn a_device_that_breaks_down_says_so_and_completes_nothing_more() {
    let (device, [mut qp, _peer], [mut cq, _], _srq) = connected();
    assert_eq!(
        result_of_a_send(
            &device,
            &mut qp,
            &mut cq,
            std::time::Duration::from_secs(20)
        ),
        Some(Ok(()))
    );
    assert_eq!(next_event(&device), AsyncEvent::DeviceFatal);
    assert_eq!(
        result_of_a_send(
            &device,
            &mut qp,
            &mut cq,
            std::time::Duration::from_millis(300)
        ),
        None
    );
    assert_eq!(device.take_async_event(), None);
}
