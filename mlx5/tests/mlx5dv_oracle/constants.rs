//! Sizes, offsets and values, each derived from the bytes that the crate emits.

use std::collections::BTreeMap;

use mlx5::wire::*;

use super::{ask, report};

/// Returns the offset of the field that was set: the first byte in which `set` differs from
/// `clear`.
fn offset<const N: usize>(clear: [u8; N], set: [u8; N]) -> u64 {
    clear.iter().zip(&set).position(|(a, b)| a != b).unwrap() as u64
}

/// Returns the big-endian word at `at` in which `set` differs from `clear`.
fn bits<const N: usize>(clear: [u8; N], set: [u8; N], at: usize, len: usize) -> u64 {
    let word = |b: [u8; N]| {
        b[at..at + len]
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte))
    };
    word(clear) ^ word(set)
}

/// Returns the crate's values under the header's names.
fn constants() -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    let mut put = |name: &str, value: u64| {
        assert!(all.insert(name.to_owned(), value).is_none(), "{name} twice")
    };

    put("MLX5_OPCODE_NOP", Opcode::Nop as u64);
    put("MLX5_OPCODE_RDMA_WRITE", Opcode::RdmaWrite as u64);
    put("MLX5_OPCODE_RDMA_WRITE_IMM", Opcode::RdmaWriteImm as u64);
    put("MLX5_OPCODE_SEND", Opcode::Send as u64);
    put("MLX5_OPCODE_SEND_IMM", Opcode::SendImm as u64);
    put("MLX5_OPCODE_RDMA_READ", Opcode::RdmaRead as u64);
    put("MLX5_OPCODE_ATOMIC_CS", Opcode::AtomicCompareSwap as u64);
    put("MLX5_OPCODE_ATOMIC_FA", Opcode::AtomicFetchAdd as u64);

    let none = FenceMode::None;
    let ctrl = CtrlSegment {
        opcode: 0,
        wqe_index: 0,
        qpn: 0,
        ds: 0,
        signaled: false,
        fence: none,
        solicited: false,
        imm: 0,
    };
    let zero = ctrl.emit();
    put("sizeof(mlx5_wqe_ctrl_seg)", CtrlSegment::LEN as u64);
    put(
        "mlx5_wqe_ctrl_seg.opmod_idx_opcode",
        offset(
            zero,
            CtrlSegment {
                wqe_index: 0xffff,
                ..ctrl
            }
            .emit(),
        ) - 1,
    );
    put(
        "mlx5_wqe_ctrl_seg.qpn_ds",
        offset(
            zero,
            CtrlSegment {
                qpn: 0xff_ffff,
                ..ctrl
            }
            .emit(),
        ),
    );
    put(
        "mlx5_wqe_ctrl_seg.fm_ce_se",
        offset(
            zero,
            CtrlSegment {
                signaled: true,
                ..ctrl
            }
            .emit(),
        ),
    );
    put(
        "mlx5_wqe_ctrl_seg.imm",
        offset(zero, CtrlSegment { imm: !0, ..ctrl }.emit()),
    );
    put(
        "MLX5_WQE_CTRL_CQ_UPDATE",
        bits(
            zero,
            CtrlSegment {
                signaled: true,
                ..ctrl
            }
            .emit(),
            11,
            1,
        ),
    );
    put(
        "MLX5_WQE_CTRL_SOLICITED",
        bits(
            zero,
            CtrlSegment {
                solicited: true,
                ..ctrl
            }
            .emit(),
            11,
            1,
        ),
    );
    put(
        "MLX5_WQE_CTRL_FENCE",
        bits(
            zero,
            CtrlSegment {
                fence: FenceMode::SmallAndFence,
                ..ctrl
            }
            .emit(),
            11,
            1,
        ),
    );
    put(
        "MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE",
        bits(
            zero,
            CtrlSegment {
                fence: FenceMode::InitiatorSmall,
                ..ctrl
            }
            .emit(),
            11,
            1,
        ),
    );

    let data = DataSegment {
        byte_count: 0,
        lkey: 0,
        addr: 0,
    };
    let zero = data.emit();
    put("sizeof(mlx5_wqe_data_seg)", DataSegment::LEN as u64);
    put(
        "mlx5_wqe_data_seg.byte_count",
        offset(
            zero,
            DataSegment {
                byte_count: !0,
                ..data
            }
            .emit(),
        ),
    );
    put(
        "mlx5_wqe_data_seg.lkey",
        offset(zero, DataSegment { lkey: !0, ..data }.emit()),
    );
    put(
        "mlx5_wqe_data_seg.addr",
        offset(zero, DataSegment { addr: !0, ..data }.emit()),
    );
    put("sizeof(mlx5_wqe_inl_data_seg)", InlineHeader::LEN as u64);
    put(
        "MLX5_INLINE_SEG",
        bits([0; 4], InlineHeader { byte_count: 0 }.emit(), 0, 4),
    );
    put("MLX5_INVALID_LKEY", u64::from(INVALID_LKEY));

    let zero = RaddrSegment { addr: 0, rkey: 0 }.emit();
    put("sizeof(mlx5_wqe_raddr_seg)", RaddrSegment::LEN as u64);
    put(
        "mlx5_wqe_raddr_seg.raddr",
        offset(zero, RaddrSegment { addr: !0, rkey: 0 }.emit()),
    );
    put(
        "mlx5_wqe_raddr_seg.rkey",
        offset(zero, RaddrSegment { addr: 0, rkey: !0 }.emit()),
    );

    let zero = AtomicSegment {
        swap_add: 0,
        compare: 0,
    }
    .emit();
    put("sizeof(mlx5_wqe_atomic_seg)", AtomicSegment::LEN as u64);
    put(
        "mlx5_wqe_atomic_seg.swap_add",
        offset(
            zero,
            AtomicSegment {
                swap_add: !0,
                compare: 0,
            }
            .emit(),
        ),
    );
    put(
        "mlx5_wqe_atomic_seg.compare",
        offset(
            zero,
            AtomicSegment {
                swap_add: 0,
                compare: !0,
            }
            .emit(),
        ),
    );

    let zero = NextSegment { next_wqe_index: 0 }.emit();
    put("sizeof(mlx5_wqe_srq_next_seg)", NextSegment::LEN as u64);
    put(
        "mlx5_wqe_srq_next_seg.next_wqe_index",
        offset(zero, NextSegment { next_wqe_index: !0 }.emit()),
    );

    let empty = AddressVector::default();
    let segment = DatagramSegment {
        vector: empty,
        qpn: 0,
        qkey: 0,
    };
    let zero = segment.emit();
    let of = |vector| offset(zero, DatagramSegment { vector, ..segment }.emit());
    put("sizeof(mlx5_wqe_datagram_seg)", DatagramSegment::LEN as u64);
    put("MLX5_EXTENDED_UD_AV", bits([0; 48], zero, 8, 4));
    put(
        "mlx5_wqe_av.key",
        offset(
            zero,
            DatagramSegment {
                qkey: !0,
                ..segment
            }
            .emit(),
        ),
    );
    put(
        "mlx5_wqe_av.dqp_dct",
        offset(
            zero,
            DatagramSegment {
                qpn: 0xff_ffff,
                ..segment
            }
            .emit(),
        ) - 1,
    );
    put(
        "mlx5_wqe_av.stat_rate_sl",
        of(AddressVector {
            stat_rate_sl: !0,
            ..empty
        }),
    );
    put(
        "mlx5_wqe_av.fl_mlid",
        of(AddressVector {
            fl_mlid: !0,
            ..empty
        }),
    );
    put("mlx5_wqe_av.rlid", of(AddressVector { rlid: !0, ..empty }));
    put(
        "mlx5_wqe_av.rmac",
        of(AddressVector {
            rmac: [!0; 6],
            ..empty
        }),
    );
    put(
        "mlx5_wqe_av.tclass",
        of(AddressVector {
            tclass: !0,
            ..empty
        }),
    );
    put(
        "mlx5_wqe_av.hop_limit",
        of(AddressVector {
            hop_limit: !0,
            ..empty
        }),
    );
    put(
        "mlx5_wqe_av.grh_gid_fl",
        of(AddressVector {
            grh_gid_fl: !0,
            ..empty
        }),
    );
    put(
        "mlx5_wqe_av.rgid",
        of(AddressVector {
            rgid: [!0; 16],
            ..empty
        }),
    );

    put("MLX5_SEND_WQE_BB", WQEBB as u64);
    put("MLX5_RCV_DBR", QP_DBREC_RECEIVE as u64);
    put("MLX5_SND_DBR", QP_DBREC_SEND as u64);
    put("MLX5_CQ_DOORBELL", CQ_DOORBELL_OFFSET as u64);
    let arm = |solicited_only| {
        u64::from(u32::from_be(
            CqArm {
                sequence: 0,
                solicited_only,
                consumed: 0,
            }
            .record(),
        ))
    };
    put("MLX5_CQ_DB_REQ_NOT_SOL", arm(true));
    put("MLX5_CQ_DB_REQ_NOT", arm(false));

    put(
        "MLX5_INLINE_SCATTER_32",
        u64::from(op_own_with(
            CqeOpcode::Requester,
            CqeFormat::Inline32,
            false,
            false,
        )),
    );
    put(
        "MLX5_INLINE_SCATTER_64",
        u64::from(op_own_with(
            CqeOpcode::Requester,
            CqeFormat::Inline64,
            false,
            false,
        )),
    );
    put(
        "MLX5_CQE_OWNER_MASK",
        u64::from(op_own(CqeOpcode::Requester, true)),
    );
    put("MLX5_CQE_REQ", CqeOpcode::Requester as u64);
    put("MLX5_CQE_RESP_WR_IMM", CqeOpcode::ResponderWriteImm as u64);
    put("MLX5_CQE_RESP_SEND", CqeOpcode::ResponderSend as u64);
    put("MLX5_CQE_RESP_SEND_IMM", CqeOpcode::ResponderSendImm as u64);
    put(
        "MLX5_CQE_RESP_SEND_INV",
        CqeOpcode::ResponderSendInvalidate as u64,
    );
    put("MLX5_CQE_RESIZE_CQ", CqeOpcode::Resize as u64);
    put("MLX5_CQE_REQ_ERR", CqeOpcode::RequesterError as u64);
    put("MLX5_CQE_RESP_ERR", CqeOpcode::ResponderError as u64);
    put("MLX5_CQE_INVALID", CqeOpcode::Invalid as u64);

    put(
        "MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR",
        Syndrome::LocalLength as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR",
        Syndrome::LocalQpOperation as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_LOCAL_PROT_ERR",
        Syndrome::LocalProtection as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_WR_FLUSH_ERR",
        Syndrome::WorkRequestFlushed as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_MW_BIND_ERR",
        Syndrome::MemoryWindowBind as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_BAD_RESP_ERR",
        Syndrome::BadResponse as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR",
        Syndrome::LocalAccess as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR",
        Syndrome::RemoteInvalidRequest as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR",
        Syndrome::RemoteAccess as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_REMOTE_OP_ERR",
        Syndrome::RemoteOperation as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR",
        Syndrome::TransportRetryExceeded as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR",
        Syndrome::RnrRetryExceeded as u64,
    );
    put(
        "MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR",
        Syndrome::RemoteAborted as u64,
    );

    let cqe = ResponderCqe::default();
    let zero = cqe.emit();
    put("sizeof(mlx5_cqe64)", CQE_BYTES as u64);
    put(
        "mlx5_cqe64.flags_rqpn",
        offset(zero, ResponderCqe { grh: true, ..cqe }.emit()),
    );
    put(
        "mlx5_cqe64.srqn_uidx",
        offset(zero, ResponderCqe { srqn: !0, ..cqe }.emit()),
    );
    put(
        "mlx5_cqe64.imm_inval_pkey",
        offset(zero, ResponderCqe { imm: !0, ..cqe }.emit()),
    );
    put(
        "mlx5_cqe64.byte_cnt",
        offset(
            zero,
            ResponderCqe {
                byte_count: !0,
                ..cqe
            }
            .emit(),
        ),
    );
    put(
        "mlx5_cqe64.sop_drop_qpn",
        offset(
            zero,
            ResponderCqe {
                qpn: 0xff_ffff,
                ..cqe
            }
            .emit(),
        ) - 1,
    );
    put(
        "mlx5_cqe64.wqe_counter",
        offset(
            zero,
            ResponderCqe {
                wqe_counter: !0,
                ..cqe
            }
            .emit(),
        ),
    );
    put("mlx5_cqe64.op_own", OP_OWN_OFFSET as u64);

    let error = ErrorCqe {
        raw_syndrome: 0,
        vendor_syndrome: 0,
        wqe_opcode: 0,
        qpn: 0,
        wqe_counter: 0,
        user_index: 0,
    };
    let zero = error.emit();
    put("sizeof(mlx5_err_cqe)", zero.len() as u64);
    put(
        "mlx5_err_cqe.srqn",
        offset(
            zero,
            ErrorCqe {
                user_index: !0,
                ..error
            }
            .emit(),
        ),
    );
    put(
        "mlx5_err_cqe.vendor_err_synd",
        offset(
            zero,
            ErrorCqe {
                vendor_syndrome: !0,
                ..error
            }
            .emit(),
        ),
    );
    put(
        "mlx5_err_cqe.syndrome",
        offset(
            zero,
            ErrorCqe {
                raw_syndrome: !0,
                ..error
            }
            .emit(),
        ),
    );
    put(
        "mlx5_err_cqe.s_wqe_opcode_qpn",
        offset(
            zero,
            ErrorCqe {
                wqe_opcode: !0,
                ..error
            }
            .emit(),
        ),
    );
    put(
        "mlx5_err_cqe.wqe_counter",
        offset(
            zero,
            ErrorCqe {
                wqe_counter: !0,
                ..error
            }
            .emit(),
        ),
    );
    all
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn sizes_offsets_and_values_are_the_headers() {
    let header = ask("constants");
    let ours = constants();
    assert_eq!(ours, header);
    for (name, value) in header
        .iter()
        .filter(|(name, _)| name.starts_with("MLX5_CQE_SYNDROME_"))
    {
        assert_eq!(
            Syndrome::from_wire(*value as u8) as u64,
            *value,
            "{name} is read back"
        );
    }
    report("sizes, offsets and values", ours.len(), 80);
}
