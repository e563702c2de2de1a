//! The structs and numbers by which the crate speaks to libibverbs and libmlx5.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{ask, report};

#[path = "../../src/verbs/abi.rs"]
#[allow(dead_code, reason = "only its list is of interest")]
mod abi;
#[path = "../../src/verbs/numbers.rs"]
#[allow(dead_code, reason = "only its list is of interest")]
mod numbers;

/// For the C compiler: what to print.
pub(crate) fn questions() -> String {
    let mut text = String::new();
    for (name, _) in numbers::NUMBERS {
        writeln!(text, "VALUE({name});").unwrap();
    }
    for (name, size, fields) in abi::LAYOUTS {
        if size.is_some() {
            writeln!(text, "SIZE({name});").unwrap();
        }
        for (field, _) in *fields {
            writeln!(text, "OFFSET({name}, {field});").unwrap();
        }
    }
    text
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn structs_and_numbers_of_the_verbs_libraries_are_the_headers() {
    let mut ours = BTreeMap::new();
    let mut put = |name: String, value: u64| assert!(ours.insert(name.clone(), value).is_none(), "{name} twice");
    numbers::NUMBERS.iter().for_each(|(name, value)| put((*name).to_owned(), *value));
    for (name, size, fields) in abi::LAYOUTS {
        size.iter().for_each(|size| put(format!("sizeof({name})"), *size as u64));
        fields.iter().for_each(|(field, offset)| put(format!("{name}.{field}"), *offset as u64));
    }
    assert_eq!(ours, ask("libraries"));
    report("structs and numbers of the verbs libraries", ours.len(), 150);
}
