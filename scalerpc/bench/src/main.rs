//! `scalerpc_bench`: ScaleRPC beside copyrpc, two-sided SEND and datagrams ([`compare`]), and what grouping does for a NIC whose cache of
//! queue-pair contexts is too small ([`scale`]).

mod compare;
mod scale;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use harness::held::Counting;
use harness::report::say;

/// Counts what a server takes ([`scale`]).
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// ScaleRPC, measured.
#[derive(Debug, Parser)]
#[command(name = "scalerpc_bench", version, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Compare(compare::Options),
    Scale(scale::Options),
}

fn main() -> ExitCode {
    let ended: Result<(), Box<dyn Error>> = match Cli::parse().command {
        Command::Compare(options) => compare::run(&options),
        Command::Scale(options) => scale::run(&options),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("scalerpc_bench: {error}"));
            ExitCode::FAILURE
        }
    }
}
