//! Goodput beside TCP on paths with loss, reordering and delay.

use super::link::{Link, Load, flood};
use super::*;

/// The loads, with their names.
const LOADS: [(&str, Load); 4] = [
    ("WRITE 64 KiB", Load::write(64 << 10, 64)),
    ("READ 1 MiB", Load::read(1 << 20, 8)),
    ("calls, depth 1", Load::call(1)),
    ("calls, depth 64", Load::call(64)),
];

/// Runs all loads through 100 Mbit/s and a queue of 100 packets with each delay, loss and
/// reordering. Prints a table.
fn run(losses: &[u16], reorders: &[u16], delays_ms: &[u64], seeds: u64) {
    println!("| delay | loss | reorder | load | goodput | of TCP | packets |");
    let mut bad = Vec::new();
    for (delay_ms, loss, reorder) in delays_ms.iter().flat_map(|delay| {
        losses.iter().flat_map(move |loss| {
            reorders
                .iter()
                .map(move |reorder| (*delay, *loss, *reorder))
        })
    }) {
        let link = Link {
            loss_permille: loss,
            reorder_permille: reorder,
            ..Link::new(100, delay_ms * 1_000_000, 100)
        };
        // Long enough that the first doubling of the window, until a loss at random, weighs little.
        let seconds = 2 + if loss > 0 { 2 * delay_ms } else { delay_ms / 4 };
        let end_ns = seconds * 1_000_000_000;
        for (name, load) in LOADS {
            let seeds = if loss > 0 { seeds } else { 1 };
            let (mut goodput, mut of_tcp, mut packets) = (0.0, 0.0, 0.0);
            for seed in 1..=seeds {
                let outcome = flood(&[1], link, load, end_ns, seed);
                goodput += outcome.goodput / seeds as f64;
                packets += outcome.packets / seeds as f64;
                of_tcp += tcp::goodput(link, load, end_ns, seed) / seeds as f64;
            }
            let ratio = goodput / of_tcp;
            let row = format!(
                "| {delay_ms} ms | {}.{} % | {} % | {name} | {goodput:.4} | {ratio:.2} | {packets:.2} |",
                loss / 10,
                loss % 10,
                reorder / 10
            );
            println!("{row}");
            if loss <= 10 && (ratio < 0.8 || packets > 1.3) {
                bad.push(row);
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn p9_goodput_is_that_of_tcp_whatever_the_path() {
    run(&[0, 10], &[0, 100], &[0, 50], 4);
}

#[test]
#[ignore = "takes minutes"]
fn p9_goodput_is_that_of_tcp_on_every_path() {
    run(&[0, 1, 10, 50], &[0, 100], &[0, 1, 50], 10);
}
