//! Reads results back. A file may have any content: each way in which it is not a result of this
//! version has a message of its own.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use benchkv_harness::Failure;
use benchkv_harness::hist::LatencySummary;
use serde_json::Value;

use super::{JobResult, Measured, SCHEMA, SCHEMA_VERSION};

/// The remedy for a file that is no result.
const NAME_A_RESULT: &str = "name a file that `benchkv --json FILE` wrote";

impl JobResult {
    /// Reads a document that `--json` wrote.
    ///
    /// # Errors
    /// A sentence with the kind of the file, the expected kind, and the remedy.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = File::open(path).map_err(|why| unreadable(&why));
        let result = text.and_then(Self::parse);
        result.map_err(|what| format!("{} {what}", path.display()).into())
    }

    fn parse(text: impl Read) -> Result<Self, String> {
        let document: Value = serde_json::from_reader(BufReader::new(text)).map_err(|why| match why.io_error_kind() {
            Some(_) => unreadable(&why.into()),
            None => format!("is not JSON ({why}); {NAME_A_RESULT}, or repeat the job if this is a part of one"),
        })?;
        let other = |found: &str| {
            format!("is JSON {found}, not {SCHEMA:?} of version {SCHEMA_VERSION}; {NAME_A_RESULT}")
        };
        let found = document["schema_version"]
            .as_u64()
            .ok_or_else(|| other("without a schema version"))?;
        let schema = &document["schema"];
        // Documents of version 1 have no schema name, and have the member `per_rank`.
        if schema != SCHEMA && !(schema.is_null() && document["per_rank"].is_array()) {
            let name = schema
                .as_str()
                .map(|name| format!("of the schema {name:?}"));
            return Err(other(name.as_deref().unwrap_or("without a schema name")));
        }
        if found != u64::from(SCHEMA_VERSION) {
            let writer = document["benchkv_version"].as_str().unwrap_or("unknown");
            return Err(format!(
                "is a result of schema version {found}, written by benchkv {writer}, and this benchkv reads version {SCHEMA_VERSION}; \
                 repeat the job, or use the benchkv that wrote it"
            ));
        }
        let malformed = |why| {
            format!(
                "is a malformed result of schema version {SCHEMA_VERSION}: {why}; repeat the job"
            )
        };
        let result: Self = serde_path_to_error::deserialize(document).map_err(malformed)?;
        result.contradiction().map_or(Ok(()), |what| {
            Err(format!("contradicts itself: {what}; repeat the job"))
        })?;
        Ok(result)
    }

    /// Returns a description of the first value that contradicts other values, or is not legal.
    fn contradiction(&self) -> Option<&'static str> {
        let runs = self.runs.iter().map(|run| &run.measured);
        let ranks = self.per_rank.iter().map(|rank| &rank.measured);
        let measured: Vec<&Measured> = runs.chain(ranks).chain([&self.measured]).collect();
        let fate = &self.fate;
        let ended = [fate.completed, fate.errors, fate.lost, fate.unfinished];
        let ended = ended.into_iter().fold(0, u64::saturating_add);
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        let is_in_order = |of: &LatencySummary| {
            [of.min, of.p50, of.p90, of.p99, of.p999, of.p9999, of.max].is_sorted()
        };
        let are_in_order = |of: &Measured| {
            let latencies = [of.latency_ns, of.local_latency_ns, of.remote_latency_ns];
            latencies.iter().all(is_in_order)
        };
        let is_below_0 = |of: &Measured| {
            let rates = [of.total_rps, of.local_rps, of.remote_rps];
            rates.iter().any(|rate| *rate < 0.0)
        };
        let contradictions = [
            (
                self.ranks != self.per_rank.len(),
                "it has another number of ranks in per_rank than in ranks",
            ),
            (
                self.runs.is_empty() || self.runs.len() > self.options.runs,
                "it has no run, or more than in options",
            ),
            (
                self.runs.iter().any(|run| run.duration_s <= 0.0),
                "a run took no time",
            ),
            (
                self.placement.usable_cores.is_empty() || self.placement.threads == 0,
                "it ran without threads or cores",
            ),
            (
                ended > fate.issued || fate.not_found > fate.completed,
                "more operations ended than were issued",
            ),
            (
                measured.iter().any(|of| is_below_0(of)),
                "a rate is below 0",
            ),
            (
                measured.iter().any(|of| !are_in_order(of)),
                "a percentile of latencies is below a lower one",
            ),
            (
                measured.iter().any(|of| !is_share(of.activity.empty_loops)),
                "a share is not between 0 and 1",
            ),
        ];
        contradictions
            .into_iter()
            .find_map(|(is_one, what)| is_one.then_some(what))
    }
}

fn unreadable(why: &io::Error) -> String {
    format!("cannot be read: {why}; {NAME_A_RESULT}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        JobResult::parse(text.as_bytes()).unwrap_err()
    }

    #[test]
    fn what_is_no_result_of_this_version_is_refused_with_what_was_found() {
        for (text, parts) in [
            ("", ["not JSON", "line 1", "--json FILE"]),
            (
                "{\"schema\": \"benchkv-result\", \"schema_ver",
                ["not JSON", "EOF", "repeat the job"],
            ),
            (
                "[1, 2]",
                ["without a schema version", "benchkv-result", "version 9"],
            ),
            (
                "{\"schema_version\": 3}",
                ["without a schema name", "benchkv-result", "--json FILE"],
            ),
            (
                "{\"schema\": \"other\", \"schema_version\": 3}",
                ["\"other\"", "benchkv-result", "--json FILE"],
            ),
            (
                "{\"schema_version\": 1, \"per_rank\": [], \"benchkv_version\": \"0.0.9\"}",
                [
                    "schema version 1, written by benchkv 0.0.9",
                    "reads version 9",
                    "repeat the job",
                ],
            ),
            (
                "{\"schema\": \"benchkv-result\", \"schema_version\": 10}",
                ["version 10", "reads version 9", "the benchkv that wrote it"],
            ),
            (
                "{\"schema\": \"benchkv-result\", \"schema_version\": 9}",
                [
                    "malformed result of schema version 9: ",
                    "missing field",
                    "repeat the job",
                ],
            ),
        ] {
            let error = refused(text);
            for part in parts {
                assert!(error.contains(part), "{part:?} is missing: {error}");
            }
        }
    }

    #[test]
    fn what_cannot_be_opened_or_is_no_json_is_refused() {
        let error = |path| JobResult::read(Path::new(path)).unwrap_err().to_string();
        let missing = error("/nonexistent/x.json");
        assert!(
            missing.starts_with("/nonexistent/x.json cannot be read: ")
                && missing.contains("No such file"),
            "{missing}"
        );
        assert!(error("/").contains("cannot be read"));
        assert!(
            error("/dev/zero").contains("is not JSON"),
            "as soon as that is known"
        );
    }
}
