//! Bad input, and good input in a bad order: each gives a typed error. Nothing is written, nothing
//! hangs, and only the device's memory is touched.

use std::any::Any;

use crate::end::*;
use crate::time::Net;
use mlx5::*;

fn out_of_range(result: Result<(), CreateError>) -> (&'static str, u64, u64, u64) {
    match result.unwrap_err() {
        CreateError::Refused(hca::CreateError::OutOfRange {
            what,
            value,
            min,
            max,
        }) => (what, value, min, max),
        other => panic!("{other}"),
    }
}

#[test]
fn sizes_above_what_the_device_says_it_can_are_refused_and_its_limits_work() {
    let net = Net::new();
    let device = net.device();
    let info = device.info();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(8).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let cqs = |n: u32| device.create_cq(n).map(drop);
    for n in [0, info.max_cqe + 1, u32::MAX] {
        assert_eq!(
            out_of_range(cqs(n)),
            ("the number of CQ entries", n.into(), 1, info.max_cqe.into())
        );
        assert_eq!(
            out_of_range(device.create_mono_cq::<()>(n).map(drop)).1,
            u64::from(n)
        );
    }
    for comp_vector in [info.comp_vectors, u32::MAX] {
        let refused = out_of_range(
            device
                .create_cq(CqConfig {
                    comp_vector,
                    ..CqConfig::from(8)
                })
                .map(drop),
        );
        assert_eq!(
            refused,
            (
                "the completion vector",
                comp_vector.into(),
                0,
                u64::from(info.comp_vectors) - 1
            )
        );
    }
    let illegal = device
        .create_cq(CqConfig {
            cqe_bytes: 96,
            ..CqConfig::from(8)
        })
        .map(drop);
    assert!(
        matches!(
            illegal,
            Err(CreateError::Refused(hca::CreateError::Illegal {
                value: 96,
                legal: "64 or 128",
                ..
            }))
        ),
        "{illegal:?}"
    );
    for n in [0, info.max_srq_wr + 1, u32::MAX] {
        assert_eq!(
            out_of_range(pd.create_srq(n, 0).map(drop)),
            (
                "the depth of a receive queue",
                n.into(),
                1,
                info.max_srq_wr.into()
            )
        );
    }
    for max_sge in [info.max_recv_sge as usize + 1, usize::MAX] {
        let refused = out_of_range(pd.create_srq(4, max_sge).map(drop));
        assert_eq!(
            refused,
            (
                "the number of buffers of a receive",
                max_sge as u64,
                0,
                info.max_recv_sge.into()
            )
        );
    }
    type Create = fn(&Pd, &Cq, ReceiveSource<'_>, &QpConfig) -> Result<(), CreateError>;
    let kinds: [Create; 2] = [
        |pd, cq, rx, config| pd.create_qp(cq, cq, rx, config).map(drop),
        |pd, cq, rx, config| pd.create_ud_qp(cq, cq, rx, config).map(drop),
    ];
    for create in kinds {
        let good = QpConfig {
            max_send_wr: info.max_send_wr,
            max_inline_data: info.max_inline_data as usize,
            ..QpConfig::default()
        };
        for max_send_wr in [0, info.max_send_wr + 1, u32::MAX] {
            let refused = out_of_range(create(
                &pd,
                &cq,
                ReceiveSource::Shared(&srq),
                &QpConfig {
                    max_send_wr,
                    ..good
                },
            ));
            assert_eq!(
                refused,
                (
                    "max_send_wr",
                    max_send_wr.into(),
                    1,
                    info.max_send_wr.into()
                )
            );
        }
        for max_inline_data in [info.max_inline_data as usize + 1, usize::MAX] {
            let refused = out_of_range(create(
                &pd,
                &cq,
                ReceiveSource::Shared(&srq),
                &QpConfig {
                    max_inline_data,
                    ..good
                },
            ));
            assert_eq!(refused.0, "max_inline_data");
        }
        let max_sge = info.max_recv_sge as usize;
        for (depth, max_sge) in [(0, 1), (info.max_recv_wr + 1, 1), (4, max_sge + 1)] {
            out_of_range(create(
                &pd,
                &cq,
                ReceiveSource::Own { depth, max_sge },
                &good,
            ));
        }
        create(
            &pd,
            &cq,
            ReceiveSource::Own {
                depth: info.max_recv_wr,
                max_sge,
            },
            &good,
        )
        .unwrap();
    }
    pd.create_srq(info.max_srq_wr, info.max_recv_sge as usize)
        .unwrap();
}

#[test]
fn what_the_driver_can_tell_to_be_wrong_is_refused_before_anything_is_written() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, OWN);
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    let long = Sge {
        addr: a.mr.addr(),
        len: 1 << 30,
        lkey: a.mr.lkey(),
    };
    let too_long = Sge {
        len: (1 << 30) + 1,
        ..long
    };
    let hybrid = (Inline(b"x"), long);
    let refused = Err(PostError::MessageTooLong {
        bytes: (1 << 30) + 1,
    });
    assert_eq!(
        a.qp.post(&Send { payload: too_long }, Signal::Always, 0),
        refused
    );
    assert_eq!(
        a.qp.post(
            &Write {
                addr,
                rkey,
                payload: hybrid
            },
            Signal::Always,
            0
        ),
        refused
    );
    assert_eq!(
        a.qp.post(
            &Read {
                addr,
                rkey,
                into: too_long
            },
            Signal::Always,
            0
        ),
        refused
    );
    let bytes = [0; 221];
    let refused = Err(PostError::InlineTooLong {
        bytes: 221,
        max: 220,
    });
    assert_eq!(
        a.qp.post(
            &Send {
                payload: Inline(&bytes)
            },
            Signal::Always,
            0
        ),
        refused
    );
    assert_eq!(
        a.qp.post(
            &SendImm {
                imm: 0,
                payload: (Inline(&bytes), long)
            },
            Signal::Always,
            0
        ),
        refused
    );
    let buffers = [b.mr.sge(0, 8).unwrap(); 4];
    assert_eq!(
        b.qp.post_receive(&buffers, 0),
        Err(PostReceiveError::TooManySges { count: 4, max: 3 })
    );
    assert_eq!(
        b.qp.post_receive(&[long, buffers[0]], 0),
        Err(PostReceiveError::TooLong {
            bytes: (1 << 30) + 8
        })
    );
    assert_eq!(
        a.srq.as_mut().unwrap().post(&buffers, 0),
        Err(PostReceiveError::TooManySges { count: 4, max: 3 })
    );
    assert_eq!(a.qp.post_receive(&[], 0), Err(PostReceiveError::Shared));
    a.qp.ring();
    b.qp.ring_receives();
    net.quiet();
    assert_eq!((a.sent(), b.received()), (vec![], vec![]));
    // The longest message is legal to post, but the region that it names is shorter.
    a.post(&Send { payload: long }, 1);
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::LocalProtection
    );
}

#[test]
fn a_message_of_length_0_needs_no_key_no_buffer_and_no_address() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, OWN);
    b.receives(3, 0);
    let nowhere = Sge {
        addr: 0,
        len: 0,
        lkey: 0,
    };
    a.post(
        &Write {
            addr: 0,
            rkey: 0,
            payload: nowhere,
        },
        0,
    );
    a.post(
        &Read {
            addr: 0,
            rkey: 0,
            into: nowhere,
        },
        1,
    );
    a.post(
        &WriteImm {
            addr: 0,
            rkey: 0,
            imm: 1,
            payload: Inline(b""),
        },
        2,
    );
    a.post(
        &SendImm {
            imm: 2,
            payload: (Inline(b""), nowhere),
        },
        3,
    );
    b.receive(&[nowhere, b.mr.sge(INTO, 4).unwrap(), nowhere], 3);
    a.post(&Send { payload: () }, 4);
    assert_eq!(
        net.collect(5, || a.sent()),
        [0, 1, 2, 3, 4].map(|user| (user, Ok(0)))
    );
    let got: Vec<_> = net
        .collect(3, || b.received())
        .iter()
        .map(|r| r.unwrap())
        .map(|r| (r.user, r.imm, r.byte_count))
        .collect();
    assert_eq!(got, [(0, 1, 0), (1, 2, 0), (2, 0, 0)]);
    // An empty buffer is not emitted: on the wire it would mean 2^31 bytes.
    a.post(
        &Send {
            payload: Inline(b"4444"),
        },
        5,
    );
    assert_eq!(net.collect(1, || b.received())[0].unwrap().byte_count, 4);
    assert_eq!(b.bytes(INTO, 4), b"4444");
}

#[test]
fn every_step_in_the_wrong_state_is_refused_with_the_state_and_changes_nothing() {
    let net = Net::new();
    let (mut a, b) = (End::new(net.device(), OWN), End::new(net.device(), SHARED));
    let (options, to) = (ConnectOptions::default(), b.qp.address());
    let refusal = |result: Result<(), ConnectError>| match result.unwrap_err() {
        ConnectError::WrongState { from, needs } => (from, needs),
        other => panic!("{other}"),
    };
    let send = Send { payload: () };
    let post = |a: &mut End| a.qp.post(&send, Signal::Always, 0);
    use QpState::{Error, Init, ReadyToReceive, ReadyToSend, Reset};
    // RESET.
    assert_eq!(a.qp.state(), Reset);
    assert_eq!(refusal(a.qp.ready_to_receive(&to, &options)), (Reset, Init));
    assert_eq!(refusal(a.qp.ready_to_send()), (Reset, ReadyToReceive));
    assert_eq!(
        (post(&mut a), a.qp.post_receive(&[], 0)),
        (
            Err(PostError::WrongState(Reset)),
            Err(PostReceiveError::WrongState)
        )
    );
    // INIT.
    a.qp.initialize().unwrap();
    assert_eq!(refusal(a.qp.initialize()), (Init, Reset));
    assert_eq!(refusal(a.qp.ready_to_send()), (Init, ReadyToReceive));
    assert_eq!(
        (post(&mut a), a.qp.post_receive(&[], 0)),
        (Err(PostError::WrongState(Init)), Ok(()))
    );
    // A device that does not find its peer when it connects detects a wrong address when it sends.
    if crate::time::finds_peers() {
        let nowhere = QpAddress { lid: 999, ..to };
        assert!(matches!(
            a.qp.ready_to_receive(&nowhere, &options),
            Err(ConnectError::Soft(hca::ConnectError::NoSuchDevice {
                lid: 999,
                ..
            }))
        ));
        let nobody = QpAddress {
            qpn: to.qpn ^ 1,
            ..to
        };
        assert!(matches!(
            a.qp.ready_to_receive(&nobody, &options),
            Err(ConnectError::Soft(hca::ConnectError::NoSuchQp { .. }))
        ));
    }
    let other = if to.kind == DeviceKind::Soft {
        DeviceKind::Hardware
    } else {
        DeviceKind::Soft
    };
    let of_another_kind =
        a.qp.ready_to_receive(&QpAddress { kind: other, ..to }, &options);
    assert!(
        matches!(of_another_kind, Err(ConnectError::DifferentKinds { local, remote }) if (local, remote) == (to.kind, other))
    );
    for (bad, option) in [
        (
            ConnectOptions {
                timeout: 0,
                ..options
            },
            "timeout",
        ),
        (
            ConnectOptions {
                timeout: 32,
                ..options
            },
            "timeout",
        ),
        (
            ConnectOptions {
                retry_count: 8,
                ..options
            },
            "retry_count",
        ),
        (
            ConnectOptions {
                rnr_retry: 8,
                ..options
            },
            "rnr_retry",
        ),
    ] {
        assert!(
            matches!(a.qp.ready_to_receive(&to, &bad), Err(ConnectError::Option { option: o, .. }) if o == option)
        );
    }
    assert_eq!(a.qp.state(), Init);
    // RTR.
    a.qp.ready_to_receive(&to, &options).unwrap();
    assert_eq!(refusal(a.qp.initialize()), (ReadyToReceive, Reset));
    assert_eq!(
        refusal(a.qp.ready_to_receive(&to, &options)),
        (ReadyToReceive, Init)
    );
    assert_eq!(
        (post(&mut a), a.qp.post_receive(&[], 0)),
        (Err(PostError::WrongState(ReadyToReceive)), Ok(()))
    );
    // RTS.
    a.qp.ready_to_send().unwrap();
    assert_eq!(refusal(a.qp.connect(&to, &options)), (ReadyToSend, Reset));
    assert_eq!((post(&mut a), a.qp.state()), (Ok(()), ReadyToSend));
    // ERROR: the only way out is a new queue pair.
    a.qp.fail();
    assert_eq!(refusal(a.qp.connect(&to, &options)), (Error, Reset));
    assert_eq!(refusal(a.qp.ready_to_send()), (Error, ReadyToReceive));
    assert_eq!(post(&mut a), Err(PostError::WrongState(Error)));
    a.qp.ring();
    a.qp.ring_receives();
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::WorkRequestFlushed
    );
    assert_eq!(net.collect(2, || a.received()).len(), 2);
}

#[test]
fn a_queue_pair_that_receives_but_does_not_send_yet_is_written_and_read() {
    let net = Net::new();
    let (mut a, mut b) = (
        End::new(net.device(), SHARED),
        End::new(net.device(), SHARED),
    );
    b.qp.initialize().unwrap();
    b.qp.ready_to_receive(&a.qp.address(), &ConnectOptions::default())
        .unwrap();
    a.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.receives(1, 8);
    a.post(
        &Send {
            payload: Inline(b"early"),
        },
        0,
    );
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    assert_eq!(net.collect(1, || b.received()).len(), 1);
}

#[test]
fn regions_that_cannot_be_are_refused() {
    let net = Net::new();
    let (a, _b) = pair(&net, SHARED);
    let at = std::ptr::NonNull::from(Box::leak(Box::new([0u64; 8]))).cast();
    for access in [
        Access::REMOTE_WRITE,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_WRITE | Access::REMOTE_READ,
    ] {
        assert!(matches!(
            a.pd.alloc(64, access),
            Err(RegisterError::Refused(
                hca::RegisterError::RemoteWithoutLocalWrite
            ))
        ));
        assert!(matches!(
            // SAFETY: the device refuses the registration, and the memory is leaked, so it stays
            // allocated.
            unsafe { a.pd.register(at, 64, access) },
            Err(RegisterError::Refused(
                hca::RegisterError::RemoteWithoutLocalWrite
            ))
        ));
    }
    assert!(matches!(
        a.pd.alloc(0, ANY),
        Err(RegisterError::Refused(hca::RegisterError::Empty))
    ));
    assert!(matches!(
        // SAFETY: as above.
        unsafe { a.pd.register(at, 0, Access::empty()) },
        Err(RegisterError::Refused(hca::RegisterError::Empty))
    ));
    // More than a soft device's arena; more than any memory.
    let too_many = [2 << 30, usize::MAX - 5, usize::MAX];
    for bytes in too_many.into_iter().skip(usize::from(
        crate::time::mode() == crate::time::Mode::Hardware,
    )) {
        assert!(
            matches!(a.pd.alloc(bytes, ANY), Err(RegisterError::Refused(hca::RegisterError::Memory { bytes: b, .. })) if b == bytes),
            "{bytes}"
        );
    }
    for (offset, len) in [
        (BYTES, 1),
        (0, BYTES as u32 + 1),
        (usize::MAX, 1),
        (BYTES - 1, 2),
    ] {
        assert_eq!(
            a.mr.sge(offset, len),
            Err(OutOfBounds {
                offset,
                len: len as usize,
                region: BYTES
            })
        );
        assert!(
            a.mr.write(offset, &vec![0; len as usize]).is_err()
                && a.mr.read(offset, &mut vec![0; len as usize]).is_err()
        );
    }
    assert_eq!(a.mr.sge(BYTES, 0).unwrap().len, 0);
}

/// Posts an operation that uses `mr`, which is dropped before the device executes it. Returns the
/// status.
fn freed(
    net: &Net,
    a: &mut End,
    b: &End,
    mr: Mr,
    post: impl FnOnce(&mut End, &Mr),
) -> CompletionError {
    // Posted now, and announced only when the region is gone, which is late enough in every mode of
    // time.
    post(a, &mr);
    drop(mr);
    // A region of another owner takes its place.
    let next = (
        a.pd.alloc(4096, ANY).unwrap(),
        b.pd.alloc(4096, ANY).unwrap(),
    );
    a.qp.ring();
    let [(_, result)] = net.collect(1, || a.sent())[..] else {
        panic!()
    };
    for mr in [&next.0, &next.1] {
        let mut bytes = [1; 4096];
        mr.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }
    result.unwrap_err()
}

#[test]
fn a_region_freed_under_posted_work_is_an_error_and_not_touched() {
    let gone = "no such key, or its region was deregistered";
    for kind in 0..5 {
        let net = Net::new();
        let (mut a, mut b) = pair(&net, OWN);
        b.receives(1, 64);
        let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
        let local = kind < 3;
        let mr = if local { &a.pd } else { &b.pd }.alloc(4096, ANY).unwrap();
        let error = freed(&net, &mut a, &b, mr, |a, mr| {
            let posted = match kind {
                0 => a.qp.post(
                    &Send {
                        payload: mr.sge(0, 8).unwrap(),
                    },
                    Signal::Always,
                    0,
                ),
                1 => a.qp.post(
                    &Read {
                        addr,
                        rkey,
                        into: mr.sge(0, 8).unwrap(),
                    },
                    Signal::Always,
                    0,
                ),
                2 => a.qp.post(
                    &FetchAdd {
                        addr,
                        rkey,
                        add: 1,
                        into: mr.sge(0, 8).unwrap(),
                    },
                    Signal::Always,
                    0,
                ),
                3 => a.qp.post(
                    &Write {
                        addr: mr.addr(),
                        rkey: mr.rkey(),
                        payload: Inline(&[7; 8]),
                    },
                    Signal::Always,
                    0,
                ),
                _ => a.qp.post(
                    &FetchAdd {
                        addr: mr.addr(),
                        rkey: mr.rkey(),
                        add: 1,
                        into: a.mr.sge(0, 8).unwrap(),
                    },
                    Signal::Always,
                    0,
                ),
            };
            posted.unwrap();
        });
        let status = if local {
            Syndrome::LocalProtection
        } else {
            Syndrome::RemoteAccess
        };
        assert_eq!(
            (error.syndrome, error.vendor_text()),
            (
                status,
                if local {
                    crate::time::detail(gone)
                } else {
                    crate::time::remote_detail(gone)
                }
            ),
            "{kind}"
        );
    }
}

#[test]
fn a_region_freed_while_its_operation_is_on_the_way_is_not_touched() {
    const DELAY_NS: u64 = 5_000;
    // With a delay the doorbell comes first, and the device executes when the test has let the
    // delay pass.
    let net = Net::in_mode(crate::time::Mode::Immediate);
    let mut options = net.options();
    // Strict mode would report, rightly, that the source changed under the device.
    options.strict = false;
    options.timing = Timing::Delay { ns: DELAY_NS };
    let (mut a, mut b) = (
        End::new(net.open(&options), SHARED),
        End::new(net.open(&options), OWN),
    );
    connect(&mut a, &mut b, &ConnectOptions::default());
    b.receives(1, 64);
    let mr = a.pd.alloc(4096, ANY).unwrap();
    a.post(
        &Send {
            payload: mr.sge(0, 8).unwrap(),
        },
        0,
    );
    assert_eq!(a.sent(), []);
    drop(mr);
    net.pass_ns(DELAY_NS);
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::LocalProtection
    );
    // Also a receive whose buffer is deregistered while it is posted.
    let (mut a, mut b) = (
        End::new(net.open(&options), SHARED),
        End::new(net.open(&options), OWN),
    );
    connect(&mut a, &mut b, &ConnectOptions::default());
    let mr = b.pd.alloc(4096, ANY).unwrap();
    b.receive(&[mr.sge(0, 64).unwrap()], 7);
    a.post(
        &Send {
            payload: Inline(b"nowhere"),
        },
        0,
    );
    drop(mr);
    net.pass_ns(DELAY_NS);
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::RemoteOperation
    );
    let (user, error) = net.collect(1, || b.received())[0].unwrap_err();
    assert_eq!((user, error.syndrome), (7, Syndrome::LocalProtection));
}

#[test]
fn objects_of_both_kinds_of_queue_pair_can_be_dropped_in_any_order_with_work_posted() {
    // On libibverbs each order takes some hundred commands, so only every 11th order runs.
    // `scripts/soak` runs all orders.
    let step = if crate::time::mode() == crate::time::Mode::Hardware
        && copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE") == 1
    {
        11
    } else {
        1
    };
    for order in (0..5040usize).step_by(step) {
        let net = Net::new();
        let (mut a, mut b) = pair(&net, OWN);
        a.receives(2, 8);
        b.receives(2, 8);
        let End {
            mut qp,
            mut send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
        } = a;
        let own = ReceiveSource::Own {
            depth: 4,
            max_sge: 1,
        };
        let mut ud = pd
            .create_ud_qp(&send_cq, &recv_cq, own, &QpConfig::default())
            .unwrap();
        ud.activate(7).unwrap();
        ud.post_receive(&[mr.sge(0, 64).unwrap()], 0).unwrap();
        ud.ring_receives();
        let to = ud.destination_of(&ud.address(), 7).unwrap();
        ud.post(
            &UdSend {
                to: &to,
                payload: (),
            },
            Signal::Always,
            0,
        )
        .unwrap();
        ud.ring();
        qp.post(
            &Send {
                payload: mr.sge(0, 8).unwrap(),
            },
            Signal::Always,
            1,
        )
        .unwrap();
        qp.ring();
        b.post(&Send { payload: () }, 1);
        if order % 3 == 0 {
            send_cq.poll(8, |_| ());
        }
        let own_device = device.clone();
        net.forget(&own_device);
        drop(own_device);
        let mut parts: Vec<Box<dyn Any>> = vec![
            Box::new(qp),
            Box::new(ud),
            Box::new(send_cq),
            Box::new(recv_cq),
            Box::new(srq),
            Box::new(mr),
            Box::new((pd, device)),
        ];
        let mut order = order;
        for left in (1..=parts.len()).rev() {
            drop(parts.remove(order % left));
            order /= left;
            b.device.progress();
            b.received();
        }
    }
}

/// The system may have no huge pages. Then the memory works the same way, and the reason can be
/// printed.
#[test]
fn memory_asked_for_in_huge_pages_says_what_it_got_and_works_either_way() {
    let net = Net::new();
    let pd = net.device().alloc_pd().unwrap();
    let base = pd.alloc(100, ANY).unwrap();
    assert_eq!(base.pages(), Pages::Base);
    for bytes in [1, 2 << 20, 5 << 20] {
        let mr = pd.alloc_huge(bytes, ANY).unwrap();
        match mr.pages() {
            Pages::Huge => assert_eq!(mr.addr() % (2 << 20), 0),
            Pages::NotHuge(why) => assert!(why.to_string().contains("huge pages"), "{why}"),
            Pages::Base => panic!("neither huge pages nor a reason"),
        }
        mr.write(bytes - 1, &[7]).unwrap();
        let mut last = [0];
        mr.read(bytes - 1, &mut last).unwrap();
        assert_eq!((last, mr.len()), ([7], bytes));
    }
}
