//! `copyrpc_bench`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    copyrpc_bench::copyrpc_bench()
}
