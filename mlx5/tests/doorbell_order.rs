//! The barriers of a doorbell are in release code. No test can detect a missing barrier by running,
//! so this test reads the machine code.
//!
//! One function per copy routine writes a write-combining register. Every path through such a
//! function must be: record, `sfence`, register, `sfence`, return. `src/tests/doorbell_order.rs`
//! tests the order of the operations themselves.
#![cfg(target_arch = "x86_64")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn output(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|e| {
        panic!("{command:?}: {e}; objdump is part of binutils, which a C linker needs too")
    });
    assert!(
        out.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

/// The library as a release build links it into every program: the output of
/// `cargo build --release -p mlx5` in the target folder of the tests.
fn release_library() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .with_file_name("release")
        .join("libmlx5.rlib");
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --release -p mlx5` first",
        path.display()
    );
    path
}

/// A function: its instructions by address, in Intel syntax.
type Code = BTreeMap<u64, String>;

/// Returns all functions whose path is `name`.
fn functions(disassembly: &str, name: &str) -> Vec<Code> {
    let mut found = vec![];
    let mut inside = false;
    for line in disassembly.lines() {
        if let Some(symbol) = line
            .strip_suffix(">:")
            .and_then(|l| l.split_once('<'))
            .map(|(_, symbol)| symbol)
        {
            inside = symbol == name || symbol.starts_with(&format!("{name}::"));
            if inside {
                found.push(Code::new());
            }
        } else if let (true, Some((address, text))) = (inside, line.trim().split_once(":\t")) {
            let address = u64::from_str_radix(address, 16).unwrap();
            found
                .last_mut()
                .unwrap()
                .insert(address, text.trim().to_owned());
        }
    }
    found
}

/// The state of a path through the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Start,
    Record,
    Started,
    Register,
    Flushed,
}

/// Returns the state after an instruction, or an error if the instruction is illegal there.
fn step(at: At, text: &str) -> Result<At, &'static str> {
    let (mnemonic, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let target = operands.trim().split(',').next().unwrap();
    if mnemonic == "sfence" {
        return match at {
            At::Record => Ok(At::Started),
            At::Register => Ok(At::Flushed),
            _ => Err("a fence that is not between record and register, or behind the register"),
        };
    }
    if mnemonic == "call" || mnemonic == "ud2" {
        return Err("a call");
    }
    let reads_only = ["cmp", "test", "bt"].contains(&mnemonic);
    if !target.contains("PTR [") || reads_only {
        return Ok(at);
    }
    match at {
        At::Start if target.starts_with("DWORD") => Ok(At::Record),
        At::Started | At::Register if !target.starts_with("DWORD") => Ok(At::Register),
        // After the flush, the only store is to the doorbell's own field: the half for the next
        // doorbell.
        At::Flushed if target.starts_with("QWORD") && !mnemonic.contains("nt") => Ok(at),
        _ => Err("a store out of order"),
    }
}

/// Follows every path through a function.
fn check(code: &Code) {
    let first = *code.keys().next().unwrap();
    let mut ways = vec![(first, At::Start)];
    let mut seen = HashSet::new();
    while let Some((address, at)) = ways.pop() {
        if !seen.insert((address, at)) {
            continue;
        }
        let text = code.get(&address).unwrap_or_else(|| {
            panic!("a way leads out of the function, to {address:#x}: {code:#?}")
        });
        if text.starts_with("ret") {
            assert_eq!(
                at,
                At::Flushed,
                "returns at {address:#x} without having rung: {code:#?}"
            );
            continue;
        }
        let at = step(at, text).unwrap_or_else(|what| {
            panic!("{what} at {address:#x} ({text}), behind {at:?}: {code:#?}")
        });
        let jumps = text.starts_with('j');
        if jumps {
            let target = text.split_whitespace().nth(1).unwrap();
            ways.push((
                u64::from_str_radix(target, 16)
                    .unwrap_or_else(|_| panic!("where does it jump: {text}")),
                at,
            ));
        }
        if !text.starts_with("jmp") {
            ways.extend(
                code.range(address + 1..)
                    .next()
                    .map(|(next, _)| (*next, at)),
            );
        }
    }
    assert!(seen.iter().any(|(_, at)| *at == At::Flushed));
}

#[test]
#[ignore = "reads the library of `cargo build --release -p mlx5`"]
fn every_write_combining_doorbell_has_its_fences_in_release_code() {
    let args = ["-d", "--no-show-raw-insn", "-M", "intel", "-C"];
    let disassembly = output(Command::new("objdump").args(args).arg(release_library()));
    let functions = functions(&disassembly, "mlx5::queues::doorbell::announce");
    // The vector registers of the `movntdq` instructions identify a copy routine. The routines for
    // 8 bytes and for ordinary memory have no such instruction.
    let with = |register: &str| -> Vec<&Code> {
        let stores = |text: &String| text.contains("movntdq") && text.contains(register);
        functions
            .iter()
            .filter(|code| code.values().any(stores))
            .collect()
    };
    assert_eq!(
        (functions.len(), with("").len()),
        (5, 3),
        "SSE2, AVX, AVX-512, 8 bytes only and ordinary memory"
    );
    let is_8_bytes = |code: &&Code| {
        code.values().any(|text| text == "sfence")
            && !code.values().any(|text| text.contains("movntdq"))
    };
    let [code] = functions.iter().filter(is_8_bytes).collect::<Vec<_>>()[..] else {
        panic!("not one routine for 8 bytes")
    };
    check(code);
    for register in ["xmm", "ymm", "zmm"] {
        let [code] = with(register)[..] else {
            panic!("not one routine with {register}")
        };
        check(code);
    }
}
