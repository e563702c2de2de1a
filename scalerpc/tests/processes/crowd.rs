//! A process of many clients. Each client makes some thousand calls and disconnects, and another
//! client connects in its place.

use std::time::{Duration, Instant};

use scalerpc::mlx5::Device;

use crate::desk::{LARGE_ARENA, SMALL_ARENA, device_in, socket_in};
use crate::guest::Guest;
use copyrpc_testing::helpers::is_over;

/// Number of clients at a time.
pub(crate) const SIZE: usize = 100;
/// Number of calls of a client before it disconnects.
const QUOTA: std::ops::Range<u64> = 500..4_000;
/// Pause before the next attempt to connect, if the server was full.
const PAUSE: Duration = Duration::from_millis(5);
/// Rounds without work before the process yields its core.
const SPINS: u32 = 8;

/// Runs `size` clients, each on a device of its own or all on one, until the test closes the input.
/// Then all clients disconnect.
pub(crate) fn run(size: usize, shares_device: bool) {
    let (device, socket) = (
        device_in(if shares_device {
            LARGE_ARENA
        } else {
            SMALL_ARENA
        }),
        socket_in(),
    );
    let shared = shares_device.then(|| Device::open(&device).unwrap());
    let open = || {
        shared
            .clone()
            .unwrap_or_else(|| Device::open(&device).unwrap())
    };
    let mut places: Vec<Option<(Guest, u64)>> = (0..size).map(|_| None).collect();
    let mut rng = fastrand::Rng::new();
    let mut ends = false;
    let mut next_attempt = Instant::now();
    let mut idle_rounds = 0;
    while !ends || places.iter().any(Option::is_some) {
        let mut moved = 0;
        for place in &mut places {
            match place {
                Some((Guest { caller, .. }, quota)) => {
                    moved += caller.step(if ends { 0 } else { *quota });
                    if caller.outstanding() == 0 && (ends || caller.made() >= *quota) {
                        place
                            .take()
                            .into_iter()
                            .for_each(|(guest, _)| guest.say_farewell());
                    }
                }
                None if !ends && Instant::now() >= next_attempt => {
                    match Guest::connect(&open(), &socket) {
                        Some(guest) => *place = Some((guest, rng.u64(QUOTA))),
                        None => next_attempt = Instant::now() + PAUSE,
                    }
                }
                None => {}
            }
        }
        ends = ends || is_over();
        idle_rounds = if moved > 0 { 0 } else { idle_rounds + 1 };
        if idle_rounds > SPINS {
            std::thread::sleep(Duration::from_micros(10));
        }
    }
}
