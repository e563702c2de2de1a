//! The differences between results: the settings that distinguish the results, and the setting
//! among these that is the axis, along which the results are ordered.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::result::JobResult;

/// Members of the document that are settings, in order of significance. `options` means all
/// settings in that member.
const SETTINGS: [&str; 19] = [
    "options.label",
    "clock.source",
    "backend",
    "carrier",
    "ranks",
    "queue_depth",
    "client_threads",
    "server_threads",
    "options.device",
    "options",
    "simulation.cpu",
    "simulation.nic",
    "simulation.course",
    "sizes.ring_bytes",
    "launcher.kind",
    "environment.cpu_model",
    "environment.build_profile",
    COMMIT,
    "launcher.hosts",
];

/// The setting with the commit of the build. Its values are in the order of their first
/// measurements, not of their names.
pub(super) const COMMIT: &str = "environment.git_commit";
/// The setting with the size of a value, in bytes.
pub(super) const VALUE_SIZE: &str = "options.value_size";

/// Settings that make no difference: directories.
const IRRELEVANT: [&str; 2] = ["options.shm_dir", "options.trace"];

/// Settings by name. The name of a nested setting begins with the names of its parents.
type Settings = BTreeMap<String, Value>;

/// Results that differ in no setting: repeats of a measurement.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) members: Vec<usize>,
    /// The settings that distinguish the group from other groups; the backend if no setting is
    /// necessary.
    pub(super) label: String,
    /// Place of the group on the axis, as text; empty without an axis.
    pub(super) place: String,
    /// The settings that distinguish the group from other groups at the same place.
    pub(super) series: String,
}

#[derive(Debug, Clone)]
pub(super) struct Comparison {
    /// Groups, ordered by series, and within a series along the axis.
    pub(super) groups: Vec<Group>,
    /// Settings that all results share.
    pub(super) common: Vec<(String, String)>,
}

impl Comparison {
    /// Compares the results along the setting `along`, or, if it is `None`, along the first setting
    /// that distinguishes results and is a number in all of them.
    pub(super) fn of(results: &[JobResult], along: Option<&str>) -> Self {
        let settings: Vec<Settings> = results.iter().map(settings).collect();
        let names = ordered(&settings);
        let differs = |name: &&String| {
            let mut pairs = settings.windows(2);
            pairs.any(|pair| matches!(pair, [a, b] if a.get(*name) != b.get(*name)))
        };
        let telling = telling(&settings, names.iter().filter(differs));
        let is_number = |all: &Settings, name: &String| all.get(name).is_some_and(Value::is_number);
        let mut candidates = telling.iter().copied();
        let axis = candidates.find(|name| match along {
            Some(along) => *name == along,
            None => settings.iter().all(|all| is_number(all, name)),
        });
        let others = telling.into_iter().filter(|name| Some(*name) != axis);
        let others: Vec<&String> = others.collect();
        let keys: Vec<&String> = others.iter().copied().chain(axis).collect();
        let mut members: Vec<(usize, &Settings)> = settings.iter().enumerate().collect();
        let commits = commits(results);
        let since = |commit: Option<&Value>| {
            let commit = commit.and_then(Value::as_str);
            commits
                .iter()
                .position(|name| Some(name.as_str()) == commit)
        };
        members.sort_by(|(_, a), (_, b)| {
            let order = |name: &str| match (name, a.get(name), b.get(name)) {
                (COMMIT, a, b) => since(a).cmp(&since(b)),
                (_, a, b) => by_size(a, b),
            };
            let orders = keys.iter().map(|name| order(name));
            orders.fold(Ordering::Equal, Ordering::then)
        });
        let group = |alike: &[(usize, &Settings)]| {
            let (_, all) = alike.first()?;
            let series = described(&others, all);
            let place = described(axis.as_slice(), all);
            let parts = [series.as_str(), place.as_str()].into_iter();
            let label: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
            let label = label.join(", ");
            let named = |text: String| match text.as_str() {
                "" => text_of(all.get("backend")),
                _ => text,
            };
            Some(Group {
                members: alike.iter().map(|(member, _)| *member).collect(),
                label: named(label),
                place,
                series: named(series),
            })
        };
        let groups = members
            .chunk_by(|(_, a), (_, b)| keys.iter().all(|name| a.get(*name) == b.get(*name)))
            .filter_map(group)
            .collect();
        let common = names.iter().filter(|name| !differs(name));
        let of_first = |name: &String| Some((title(name), text_of(settings.first()?.get(name))));
        Self {
            groups,
            common: common.filter_map(of_first).collect(),
        }
    }
}

fn settings(result: &JobResult) -> Settings {
    let document = serde_json::to_value(result).unwrap_or_default();
    let mut all = Settings::new();
    for path in SETTINGS {
        let members = path.split('.');
        let value = members.fold(&document, |value, member| &value[member]);
        flatten(path, value, &mut all);
    }
    let is_relevant = |name: &str| !IRRELEVANT.iter().any(|other| is_within(name, other));
    all.retain(|name, _| is_relevant(name));
    all
}

fn flatten(name: &str, value: &Value, all: &mut Settings) {
    match value {
        Value::Object(members) => members
            .iter()
            .for_each(|(member, value)| flatten(&format!("{name}.{member}"), value, all)),
        value => {
            all.insert(name.to_owned(), value.clone());
        }
    }
}

/// Returns whether the setting `name` is `outer` or is nested in it.
fn is_within(name: &str, outer: &str) -> bool {
    name.strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the names of all settings, in order of significance.
fn ordered(settings: &[Settings]) -> Vec<String> {
    let names: BTreeSet<&String> = settings.iter().flat_map(BTreeMap::keys).collect();
    let rank = |name: &str| SETTINGS.iter().position(|setting| is_within(name, setting));
    let mut names: Vec<String> = names.into_iter().cloned().collect();
    names.sort_by_key(|name| rank(name));
    names
}

/// Returns the settings that are needed to distinguish the results. Each of them distinguishes
/// results that are equal in all settings before it. The remaining settings that differ follow from
/// the returned settings.
fn telling<'a>(
    settings: &[Settings],
    differing: impl Iterator<Item = &'a String>,
) -> Vec<&'a String> {
    let kinds = |names: &[&String]| {
        let text = |all: &Settings, name: &&String| text_of(all.get(*name));
        let of_one = |all| names.iter().map(|name| text(all, name)).collect::<Vec<_>>();
        settings.iter().map(of_one).collect::<BTreeSet<_>>().len()
    };
    let mut telling = Vec::new();
    for name in differing {
        let before = kinds(&telling);
        telling.push(name);
        if kinds(&telling) == before {
            telling.pop();
        }
    }
    telling
}

/// Returns the commits of the results, in the order of their first measurements.
pub(super) fn commits(results: &[JobResult]) -> Vec<String> {
    let mut first = BTreeMap::<&String, u64>::new();
    for of in results.iter().map(|result| &result.environment) {
        let since = first.entry(&of.git_commit).or_insert(of.unix_s);
        *since = of.unix_s.min(*since);
    }
    let mut commits: Vec<(u64, &String)> = first.into_iter().map(|(name, at)| (at, name)).collect();
    commits.sort_unstable();
    commits.into_iter().map(|(_, name)| name.clone()).collect()
}

/// Compares settings: numbers by their value, before texts.
fn by_size(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    let number = |value: Option<&Value>| value.and_then(Value::as_f64);
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => text_of(a).cmp(&text_of(b)),
    }
}

/// Returns settings in a few words. A label, and the names of a backend and a carrier, are shown
/// without the name of the setting.
fn described(names: &[&String], all: &Settings) -> String {
    let part = |name: &&String| match (name.as_str(), text_of(all.get(*name))) {
        ("backend" | "carrier" | "options.label", value) => value,
        (_, value) => format!("{} {value}", title(name)),
    };
    let parts: Vec<String> = names.iter().map(part).collect();
    parts.join(", ")
}

fn title(name: &str) -> String {
    if let Some(model) = name.strip_prefix("simulation.") {
        return model.replace('.', " ");
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    match last {
        "queue_depth" => "depth".to_owned(),
        "server_threads" => "daemons".to_owned(),
        "client_threads" => "clients".to_owned(),
        "git_commit" => "commit".to_owned(),
        "source" if name.starts_with("clock") => "clock".to_owned(),
        "kind" if name.starts_with("launcher") => "launcher".to_owned(),
        "kind" if name.contains("distribution") => "distribution".to_owned(),
        last => last.replace('_', " "),
    }
}

/// Returns a setting's value as a report prints it, and a commit by 12 digits.
pub(super) fn text_of(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        Some(Value::String(text))
            if text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            text.chars().take(12).collect()
        }
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(is)) => (if *is { "on" } else { "off" }).to_owned(),
        Some(Value::Array(parts)) if parts.is_empty() => "none".to_owned(),
        Some(Value::Array(parts)) => {
            let parts = parts.iter().map(|part| text_of(Some(part)));
            parts.collect::<Vec<_>>().join(" ")
        }
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn all(results: &[Value]) -> Vec<Settings> {
        let flat = |result: &Value| {
            let mut settings = Settings::new();
            result
                .as_object()
                .unwrap()
                .iter()
                .for_each(|(name, value)| flatten(name, value, &mut settings));
            settings
        };
        results.iter().map(flat).collect()
    }

    fn telling_names(results: &[Settings]) -> Vec<String> {
        telling(results, ordered(results).iter())
            .into_iter()
            .cloned()
            .collect()
    }

    #[test]
    fn what_follows_from_other_settings_tells_nothing() {
        let results = all(&[
            json!({ "backend": "meta", "ranks": 2, "options": { "remote_ratio": 0.5, "hold": { "us": 1 } } }),
            json!({ "backend": "meta", "ranks": 4, "options": { "remote_ratio": 0.75, "hold": { "us": 1 } } }),
            json!({ "backend": "direct", "ranks": 4, "options": { "remote_ratio": 0.75, "hold": { "us": 1 } } }),
        ]);
        assert_eq!(telling_names(&results), ["backend", "ranks"]);
        let hold =
            |us: u64| json!({ "backend": "meta", "ranks": 2, "options": { "hold": { "us": us } } });
        assert_eq!(
            telling_names(&all(&[hold(1), hold(4)])),
            ["options.hold.us"]
        );
        assert_eq!(
            telling_names(&all(&[hold(1), hold(1)])),
            Vec::<String>::new(),
            "repeats"
        );
    }
}
