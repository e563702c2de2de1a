//! The structs and numbers of the crate's calls to libibverbs and libmlx5.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{ask, report};

#[path = "../../src/verbs/abi.rs"]
#[allow(dead_code, reason = "only its list is of interest")]
mod abi;
#[path = "../../src/verbs/numbers.rs"]
#[allow(dead_code, reason = "only its list is of interest")]
mod numbers;

/// Returns the sizes of structs and the offsets of their fields that have names in the header.
fn layouts() -> impl Iterator<Item = (&'static str, Option<&'static str>, usize)> {
    abi::LAYOUTS
        .iter()
        .filter(|(kind, ..)| *kind != "unnamed")
        .flat_map(|&(kind, name, size, fields)| {
            let fields = fields.iter().filter(|(field, _)| !field.starts_with('_'));
            (kind == "whole")
                .then_some((name, None, size))
                .into_iter()
                .chain(fields.map(move |&(field, at)| (name, Some(field), at)))
        })
}

/// Returns the C code that prints the numbers, sizes and offsets.
pub(crate) fn questions() -> String {
    let mut text = String::new();
    for (name, _) in numbers::NUMBERS {
        writeln!(text, "VALUE({name});").unwrap();
    }
    for (name, field, _) in layouts() {
        match field {
            Some(field) => writeln!(text, "OFFSET({name}, {field});").unwrap(),
            None => writeln!(text, "SIZE({name});").unwrap(),
        }
    }
    text
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn structs_and_numbers_of_the_verbs_libraries_are_the_headers() {
    let mut ours = BTreeMap::new();
    let mut put = |name: String, value: u64| {
        assert!(ours.insert(name.clone(), value).is_none(), "{name} twice")
    };
    numbers::NUMBERS
        .iter()
        .for_each(|(name, value)| put((*name).to_owned(), *value));
    for (name, field, value) in layouts() {
        put(
            field.map_or_else(
                || format!("sizeof({name})"),
                |field| format!("{name}.{field}"),
            ),
            value as u64,
        );
    }
    assert_eq!(ours, ask("libraries"));
    report(
        "structs and numbers of the verbs libraries",
        ours.len(),
        150,
    );
}
