//! Four nodes, each calling the next node: `cargo run --release -p copyrpc-flux --example ring`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use flux::{Config, network};

fn main() -> Result<(), flux::OptionError> {
    std::thread::scope(|scope| {
        for mut node in network::<usize, ()>(4, Config::default())? {
            scope.spawn(move || {
                let next = (node.index() + 1) % node.nodes();
                let (mut answered, mut replied) = (0, 0);
                // The call cannot fail: the other node exists, and one call is within the limit.
                let _ = node.call(next, node.index(), ());
                while answered + replied < 2 {
                    node.poll(|(), reply| {
                        (replied, _) = (1, println!("node {next} answered {reply:?}"))
                    });
                    while let Some((_, token, number)) = node.recv() {
                        answered += 1;
                        let _ = node.reply(token, number * number);
                    }
                }
            });
        }
        Ok(())
    })
}
