//! Packets that no requester sends.

use super::*;

/// A stranger that knows the QPN, with any packet: no panic, and bounded memory. Ten million
/// packets.
#[test]
fn any_packets_in_any_order_change_no_memory_beyond_the_region_and_keep_little() {
    let mut understood = 0;
    for seed in seeds() {
        let mut world = World::new(seed, Badness::default(), 7);
        if seed % 4 == 0 {
            world = world.unreliable();
        }
        let options = world.requester.options();
        for nth in 0..50_000_u32 {
            if nth % 64 == 0 {
                // A connection that has failed takes nothing any more.
                let next = world.responder.expected();
                world.responder =
                    Responder::new(9, options.mtu, RNR_TIMER, next, options.is_polled);
                world.requester = Requester::new(options, next);
                (world.memory.receives, world.memory.open) = (20, None);
                world.memory.received.clear();
                for _ in 0..4 {
                    world.requester.post(
                        Request::Read(Reth {
                            addr: BASE,
                            rkey: RKEY,
                            len: 2000,
                        }),
                        true,
                    );
                    world.requester.post(
                        Request::Send {
                            len: 2000,
                            imm: None,
                            is_solicited: false,
                        },
                        true,
                    );
                }
            }
            while world.requester.next_packet(world.now_ns).is_some() {
                world.requester.on_sent(world.now_ns);
            }
            let mut bytes = [0; 64];
            bytes
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&world.rng.next_u64().to_le_bytes()));
            // Each packet has a PSN within 20 of the expected PSN, and an opcode less than 24.
            bytes[0] %= 24;
            bytes[1] &= 0x30;
            let near = world.rng.below(40) as u32;
            let psn = world
                .responder
                .expected()
                .after(near)
                .after(20_u32.wrapping_neg());
            bytes[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
            if world.rng.happens(700) {
                let reth = Reth {
                    addr: BASE + world.rng.below(MEMORY as u64),
                    rkey: RKEY,
                    len: world.rng.below(3000) as u32,
                };
                bytes[12..20].copy_from_slice(&reth.addr.to_be_bytes());
                bytes[20..24].copy_from_slice(&reth.rkey.to_be_bytes());
                bytes[24..28].copy_from_slice(&reth.len.to_be_bytes());
            }
            if let Ok((headers, payload)) = Headers::parse(&bytes) {
                understood += 1;
                world.arrive_at_responder(&headers, payload);
                if world.requester.on_response(&headers, payload, world.now_ns) != Taken::Nothing {
                    world.requester.placed(headers.bth.psn, world.now_ns);
                }
                world.now_ns += 1000;
                world.requester.on_time(world.now_ns);
            }
            assert!(world.responder.kept() <= 200);
            if world.rng.happens(200) {
                world.responder.next_reply(world.now_ns);
            }
        }
    }
    assert!(understood > 5_000_000, "{understood}");
}
