//! The differences that are known, and why they are: the table in `docs/libmlx5.md`.

use std::collections::{BTreeMap, BTreeSet};

const DOCUMENT: &str = include_str!("../../../docs/libmlx5.md");

/// The rows of the table under the heading `section`: what is in their first column, between backquotes.
fn documented(section: &str) -> BTreeSet<String> {
    let text = DOCUMENT.split("\n## ").find(|part| part.lines().next() == Some(section)).expect("no such section in docs/libmlx5.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned()).collect()
}

/// Differences found, each with an example.
#[derive(Default)]
pub(crate) struct Differences {
    found: BTreeMap<String, String>,
}

impl Differences {
    pub(crate) fn add(&mut self, key: &str, example: impl FnOnce() -> String) {
        if !self.found.contains_key(key) {
            self.found.insert(key.to_owned(), example());
        }
    }

    /// These are exactly the ones that `section` of the document lists.
    pub(crate) fn check(&self, section: &str) {
        let documented = documented(section);
        let unknown: Vec<String> =
            self.found.iter().filter(|(key, _)| !documented.contains(*key)).map(|(key, example)| format!("{key}\n  {example}")).collect();
        assert!(unknown.is_empty(), "docs/libmlx5.md, \"{section}\", does not know {} differences:\n{}", unknown.len(), unknown.join("\n"));
        let gone: Vec<&String> = documented.iter().filter(|key| !self.found.contains_key(*key)).collect();
        assert!(gone.is_empty(), "docs/libmlx5.md, \"{section}\", lists differences that are none: {gone:?}");
    }
}
