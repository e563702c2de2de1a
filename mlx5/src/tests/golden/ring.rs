//! Completion queues after the device's writes: every byte of the ring, written over 0xa5.

use std::sync::atomic::Ordering;

use super::cqe::{noisy, session};
use super::hex;
use crate::config::CqConfig;
use crate::provider::null::NullDevice;
use mlx5_hca::CqMemory;

use crate::tests::null;
use crate::tests::null_device::Plays;
use crate::wire::{CqeOpcode, MiniCqe};

/// A completion queue of a null device.
struct Ring {
    null: NullDevice,
    cqn: u32,
    parts: CqMemory,
    bytes: usize,
}

fn ring(entries: u32, cqe_bytes: u32) -> Ring {
    let (null, control) = null();
    let (cqn, parts) = control
        .queues()
        .create_cq(&CqConfig {
            cqe_bytes,
            compression: true,
            ..CqConfig::from(entries)
        })
        .unwrap();
    assert_eq!(parts.cqe_bytes, cqe_bytes);
    let ring = Ring {
        null,
        cqn,
        parts,
        bytes: (entries * cqe_bytes) as usize,
    };
    ring.fill();
    ring
}

impl Ring {
    fn fill(&self) {
        // SAFETY: the CQ's buffer, which this test alone accesses.
        unsafe { self.parts.buffer.as_ptr().write_bytes(0xa5, self.bytes) };
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: as above.
        (0..self.bytes)
            .map(|at| unsafe { self.parts.buffer.as_ptr().add(at).read_volatile() })
            .collect()
    }

    /// Lets the device write `count` CQEs, and consumes them.
    fn skip(&self, count: u32) {
        for done in 1..=count {
            assert!(
                self.null
                    .write_cqe(self.cqn, &[0; 64], CqeOpcode::Requester)
            );
            // SAFETY: the doorbell record of the CQ.
            unsafe { &self.parts.record.as_ref()[0] }.store(done.to_be(), Ordering::Release);
        }
        self.fill();
    }
}

/// A receive of `byte_count` (hex) bytes, solicited, with the op_own that the device is to write.
fn receive(byte_count: &str, op_own: &str) -> [u8; 64] {
    noisy(&[
        (36, "deadbeef"),
        (44, byte_count),
        (56, "00123456"),
        (60, "0007"),
        (63, op_own),
    ])
}

#[test]
fn a_plain_cqe_fills_its_entry_and_the_owner_bit_turns_with_the_lap() {
    let ring = ring(4, 64);
    ring.skip(2);
    for (at, op_own) in [(2, "22"), (3, "22"), (0, "23")] {
        ring.fill();
        assert!(ring.null.write_cqe(
            ring.cqn,
            &receive("00000100", "02"),
            CqeOpcode::ResponderSend
        ));
        let mut want = vec![0xa5; 256];
        want[at * 64..][..64].copy_from_slice(&receive("00000100", op_own));
        assert_eq!(ring.bytes(), want);
    }
}

#[test]
fn bytes_scattered_to_a_cqe_are_its_first_32() {
    for len in [0u8, 1, 31, 32] {
        let (ring, data) = (ring(4, 64), (0..len).collect::<Vec<_>>());
        let count = format!("000000{len:02x}");
        assert!(ring.null.write_scattered(
            ring.cqn,
            &receive(&count, "00"),
            CqeOpcode::ResponderSendImm,
            &data
        ));
        let mut want = vec![0xa5; 256];
        // RESP_SEND_IMM 3, MLX5_INLINE_SCATTER_32.
        want[..64].copy_from_slice(&receive(&count, "34"));
        want[..data.len()].copy_from_slice(&data);
        assert_eq!(ring.bytes(), want, "{len} bytes");
    }
}

#[test]
fn the_cqe_of_a_large_entry_is_its_second_half_and_64_bytes_are_scattered_to_the_first() {
    let (ring, data) = (ring(4, 128), (0..64).collect::<Vec<u8>>());
    ring.skip(1);
    assert!(ring.null.write_cqe(
        ring.cqn,
        &receive("00000100", "00"),
        CqeOpcode::ResponderSend
    ));
    assert!(ring.null.write_scattered(
        ring.cqn,
        &receive("00000040", "00"),
        CqeOpcode::ResponderWriteImm,
        &data
    ));
    let mut want = vec![0xa5; 512];
    want[128 + 64..][..64].copy_from_slice(&receive("00000100", "20"));
    // RESP_WR_IMM 1, MLX5_INLINE_SCATTER_64.
    want[256..][..64].copy_from_slice(&data);
    want[256 + 64..][..64].copy_from_slice(&receive("00000040", "18"));
    assert_eq!(ring.bytes(), want);
}

#[test]
fn a_compressed_session_is_a_title_and_arrays_where_the_kernel_looks_for_them() {
    let minis: Vec<_> = (0..18)
        .map(|i| MiniCqe {
            word: i,
            byte_count: 0x100 + i,
        })
        .collect();
    let minis = [
        minis,
        vec![MiniCqe {
            word: 0x8000_0012,
            byte_count: 0x4000_0112,
        }],
    ]
    .concat();
    for cqe_bytes in [64, 128] {
        let ring = ring(32, cqe_bytes);
        ring.skip(32 + 20);
        let mut title = session()[20];
        title[44..48].copy_from_slice(&hex("a5a5a5a5"));
        title[63] = 0;
        assert!(
            ring.null
                .write_compressed(ring.cqn, &title, CqeOpcode::ResponderSend, &minis)
        );
        let mut want = Vec::new();
        for entry in session() {
            want.extend(vec![0xa5; cqe_bytes as usize - 64]);
            want.extend(entry);
        }
        assert_eq!(ring.bytes(), want, "entries of {cqe_bytes} bytes");
    }
}
