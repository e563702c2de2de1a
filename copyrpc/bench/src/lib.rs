//! The benchmarks between two processes, `copyrpc_bench` and `scalerpc_bench`: transports of calls
//! (`compare`) under one load, and the effect of ScaleRPC's groups for a NIC whose cache of
//! queue-pair contexts is too small (`scale`).
//!
//! `held`: the memory of a server.

mod compare;
mod held;
mod scale;

use std::process::ExitCode;

use clap::{Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use benchkv_harness::held::Counting;
use benchkv_harness::launch::program::Program;

/// Counts the bytes allocated on the heap, which `held` reads.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `copyrpc_bench`.
pub fn copyrpc_bench() -> ExitCode {
    compare::run(Program("copyrpc_bench"), &CopyrpcBench::parse().options)
}

/// Runs `scalerpc_bench`.
pub fn scalerpc_bench() -> ExitCode {
    let program = Program("scalerpc_bench");
    let matches = beside_scalerpc(ScalerpcBench::command())
        .mut_subcommand("compare", beside_scalerpc)
        .get_matches();
    match ScalerpcBench::from_arg_matches(&matches) {
        Err(error) => error.exit(),
        Ok(ScalerpcBench {
            command: Some(Task::Scale(options)),
            ..
        }) => scale::run(program, &options).unwrap_or_else(|error| program.fail(1, &error)),
        Ok(ScalerpcBench {
            command: Some(Task::Compare(options)),
            ..
        }) => compare::run(program, &options),
        Ok(ScalerpcBench { compare, .. }) => compare::run(program, &compare),
    }
}

/// copyrpc between two processes, compared with other transports if these are requested.
#[derive(Debug, Parser)]
#[command(name = "copyrpc_bench", version, args_override_self = true)]
struct CopyrpcBench {
    #[command(flatten)]
    options: compare::Options,
}

/// Measures ScaleRPC. Without a command: `compare`, whose options may be given.
#[derive(Debug, Parser)]
#[command(
    name = "scalerpc_bench",
    version,
    args_override_self = true,
    args_conflicts_with_subcommands = true
)]
struct ScalerpcBench {
    #[command(subcommand)]
    command: Option<Task>,
    #[command(flatten)]
    compare: compare::Options,
}

#[derive(Debug, Subcommand)]
enum Task {
    #[command(args_override_self = true)]
    Compare(Box<compare::Options>),
    Scale(scale::Options),
}

/// Gives the options of [`compare`] the defaults of `scalerpc_bench`.
fn beside_scalerpc(command: Command) -> Command {
    let defaults = [
        (
            "contestants",
            "scalerpc,scalerpc-off,copyrpc,rc-send,ud-send",
        ),
        ("clients", "8,64"),
        ("depth", "8"),
        ("round_trip", "true"),
        ("duration_s", "0.2"),
    ];
    defaults
        .into_iter()
        .fold(command, |command, (name, value)| {
            command.mut_arg(name, |arg| arg.default_value(value))
        })
}
