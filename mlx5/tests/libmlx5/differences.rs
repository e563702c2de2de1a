//! The known differences with their reasons: the table in `docs/libmlx5.md`.

use std::collections::{BTreeMap, BTreeSet};

const DOCUMENT: &str = include_str!("../../../docs/libmlx5.md");

/// Returns the names in backquotes in the first column of the table under the heading `section`.
fn documented(section: &str) -> BTreeSet<String> {
    let text = DOCUMENT
        .split("\n## ")
        .find(|part| part.lines().next() == Some(section))
        .expect("no such section in docs/libmlx5.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned())
        .collect()
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

    /// Asserts that these are exactly the differences that `section` of the document lists.
    pub(crate) fn check(&self, section: &str) {
        let documented = documented(section);
        let unknown: Vec<String> = self
            .found
            .iter()
            .filter(|(key, _)| !documented.contains(*key))
            .map(|(key, example)| format!("{key}\n  {example}"))
            .collect();
        assert!(
            unknown.is_empty(),
            "docs/libmlx5.md, \"{section}\", does not know {} differences:\n{}",
            unknown.len(),
            unknown.join("\n")
        );
        let gone: Vec<&String> = documented
            .iter()
            .filter(|key| !self.found.contains_key(*key))
            .collect();
        assert!(
            gone.is_empty(),
            "docs/libmlx5.md, \"{section}\", lists differences that are none: {gone:?}"
        );
    }
}
