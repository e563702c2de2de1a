//! `scalerpc_bench`: ScaleRPC beside copyrpc, two-sided SEND and datagrams ([`compare`]), and the
//! effect of grouping for a NIC whose cache of queue-pair contexts is too small ([`scale`]).

mod compare;
mod scale;

use std::process::ExitCode;

use bench::held::Counting;
use bench::program::Program;
use clap::{Parser, Subcommand};

const PROGRAM: Program = Program("scalerpc_bench");

/// Counts the allocations of a server ([`scale`]).
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Measures ScaleRPC. Without a command: `compare`, whose options may be given.
#[derive(Debug, Parser)]
#[command(
    name = "scalerpc_bench",
    version,
    args_override_self = true,
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Options,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(args_override_self = true)]
    Compare(Box<compare::Options>),
    Scale(scale::Options),
}

fn main() -> ExitCode {
    let Cli {
        command,
        compare: options,
    } = Cli::parse();
    match command {
        None => compare::run(&options),
        Some(Command::Compare(options)) => compare::run(&options),
        Some(Command::Scale(options)) => {
            scale::run(&options).unwrap_or_else(|error| PROGRAM.fail(1, &error))
        }
    }
}
