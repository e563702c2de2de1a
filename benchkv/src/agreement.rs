//! The check that all ranks run the same job, before any transport is made.
//!
//! Each rank states the properties of the job that it would run, its build and its options, or the
//! reason why it cannot run. If there are such reasons, each is reported with its ranks. Otherwise
//! each property that differs is reported, with the ranks of each value. The outcome is the same on
//! all ranks.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use benchkv_harness::environment::Environment;
use benchkv_harness::launch::exchange::{Exchange, ExchangeError};
use copyrpc::EXCHANGE_VERSION;
use serde::Serialize;
use thiserror::Error;

use crate::options::Options;
use crate::result::SCHEMA_VERSION;

/// Maximum time for the slowest rank to reach this check.
const LIMIT: Duration = Duration::from_secs(30);

/// Properties that must be equal on all ranks, by names that a user knows.
type Facts = BTreeMap<String, String>;

/// The reason why the ranks do not run.
#[derive(Debug, Error)]
pub enum AgreementError {
    /// The exchange failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A rank cannot run its options, or ranks differ. The text is the same on all ranks.
    #[error("{0}")]
    Refused(String),
}

/// The statement of one rank: the properties of the job that it would run, or the reason why it
/// cannot run.
type Statement = Result<Facts, String>;

/// Returns this rank's `options` if every rank has options that it can run, and the options of all
/// ranks are the same. This is a collective operation.
///
/// # Errors
/// [`AgreementError::Refused`] with each error or difference, and its ranks.
pub fn agree(
    exchange: &mut dyn Exchange,
    options: Result<Options, String>,
) -> Result<Options, AgreementError> {
    let mine = options.as_ref().map(facts).map_err(Clone::clone);
    settle(exchange, &mine)?;
    options.map_err(AgreementError::Refused)
}

fn settle(exchange: &mut dyn Exchange, mine: &Statement) -> Result<(), AgreementError> {
    let mine = serde_json::to_vec(mine).unwrap_or_default();
    let parts = exchange.all_gather(&mine, LIMIT, &|| false)?;
    let unreadable =
        |_| Err("states its options in another form: it is of another version".to_owned());
    let read = |part: &Vec<u8>| serde_json::from_slice(part).unwrap_or_else(unreadable);
    let statements: Vec<Statement> = parts.iter().map(read).collect();
    match compare(&statements).as_slice() {
        [] => Ok(()),
        complaints => Err(AgreementError::Refused(complaints.join("\n"))),
    }
}

/// Returns the reasons why the job does not start: the refusals if any, otherwise the differences.
fn compare(statements: &[Statement]) -> Vec<String> {
    let refusals = statements.iter().map(|statement| statement.as_ref().err());
    let refusals = by_value(refusals.map(|refusal| refusal.map(String::as_str)));
    match refusals.as_slice() {
        [] => {}
        [(refusal, ranks)] if ranks.len() == statements.len() => {
            return vec![(*refusal).to_owned()];
        }
        _ => {
            let refusals = refusals.iter();
            return refusals
                .map(|(refusal, ranks)| format!("{}: {refusal}", rank_list(ranks)))
                .collect();
        }
    }
    let facts: Vec<&Facts> = statements.iter().flatten().collect();
    let names: std::collections::BTreeSet<&String> =
        facts.iter().flat_map(|facts| facts.keys()).collect();
    let difference = |name: &String| {
        let values = facts
            .iter()
            .map(|facts| facts.get(name).map_or("unknown", String::as_str));
        let values = by_value(values.map(Some));
        let each = values.iter();
        let each = each.map(|(value, ranks)| format!("{value} on {}", rank_list(ranks)));
        let each: Vec<String> = each.collect();
        (values.len() > 1).then(|| format!("the ranks disagree on {name}: {}", each.join("; ")))
    };
    names.into_iter().filter_map(difference).collect()
}

/// Returns each value with its ranks. The values are in the order of their first rank.
fn by_value<'a>(values: impl Iterator<Item = Option<&'a str>>) -> Vec<(&'a str, Vec<usize>)> {
    let mut ranks_of: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, value) in values.enumerate() {
        let Some(value) = value else { continue };
        match ranks_of.iter_mut().find(|(known, _)| *known == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => ranks_of.push((value, vec![rank])),
        }
    }
    ranks_of
}

fn rank_list(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let ending = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{ending} {}", numbers.join(", "))
}

/// Returns everything that affects the messages, expectations and measurements of a rank. The cores
/// of its threads are not included: hosts may differ.
fn facts(options: &Options) -> Facts {
    let environment = Environment::detect();
    let (workload, mut facts) = (&options.job.workload, Facts::new());
    let mut add =
        |name: &str, value: &dyn Display| facts.insert(name.to_owned(), value.to_string());
    add("the version of benchkv", &env!("CARGO_PKG_VERSION"));
    add("the commit of the build", &environment.git_commit);
    add("the profile of the build", &environment.build_profile);
    add("the version of connection records", &EXCHANGE_VERSION);
    add("the version of results", &SCHEMA_VERSION);
    add("--backend", &options.job.topology.backend);
    add("--carrier", &options.job.topology.carrier);
    add("--server-threads", &options.job.topology.daemons);
    add("--client-threads", &workload.clients);
    add("--queue-depth", &options.job.queue_depth);
    add("--seed", &workload.seed);
    add("--wait", &options.given_wait);
    // The reason of a choice (`device_by_auto`) has no effect on the job, and what `--wait auto`
    // chooses depends on the host.
    let asked = fields(&options.asked).into_iter();
    for (key, value) in asked.filter(|(key, _)| key != "device_by_auto" && key != "wait") {
        let flag = format!("--{}", key.trim_end_matches("_s").replace('_', "-"));
        let text = value.as_str().map(str::to_owned);
        add(&flag, &text.unwrap_or_else(|| value.to_string()));
    }
    for (key, value) in fields(&options.job.sizes) {
        add(&format!("the computed {key}"), &value);
    }
    facts
}

fn fields(of: &impl Serialize) -> Vec<(String, serde_json::Value)> {
    match serde_json::to_value(of) {
        Ok(serde_json::Value::Object(fields)) => fields.into_iter().collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, JobArgs, WaitChoice};

    /// An exchange with one other rank, which makes a given statement.
    struct Scripted(Vec<u8>);

    impl Exchange for Scripted {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        fn all_gather(
            &mut self,
            part: &[u8],
            _: Duration,
            _: &dyn Fn() -> bool,
        ) -> Result<Vec<Vec<u8>>, ExchangeError> {
            Ok(vec![part.to_vec(), self.0.clone()])
        }

        fn sleep(&mut self, _: Duration, _: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
            Ok(())
        }
    }

    fn runs(args: &str) -> Statement {
        let cli = Cli::try_parse_from(
            ["benchkv", "--device", "soft"]
                .into_iter()
                .chain(args.split_whitespace()),
        )
        .unwrap();
        Ok(facts(&Options::resolve(cli).unwrap()))
    }

    #[test]
    fn equal_ranks_agree() {
        settle(
            &mut Scripted(serde_json::to_vec(&runs("")).unwrap()),
            &runs(""),
        )
        .unwrap();
    }

    /// `--wait auto` chooses differently on the hosts of the two ranks.
    #[test]
    fn ranks_that_choose_the_wait_by_their_cores_agree() {
        let cli = Cli::try_parse_from(["benchkv", "--device", "soft"]).unwrap();
        let other = |wait| {
            let mut other = Options::resolve(cli.clone()).unwrap();
            other.asked.wait = wait;
            Scripted(serde_json::to_vec(&Statement::Ok(facts(&other))).unwrap())
        };
        for wait in [WaitChoice::Busy, WaitChoice::Event] {
            settle(&mut other(wait), &runs("")).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_read_is_of_another_version() {
        let refused = settle(&mut Scripted(b"\xa5".to_vec()), &runs(""))
            .unwrap_err()
            .to_string();
        assert_eq!(
            refused,
            "rank 1: states its options in another form: it is of another version"
        );
    }

    #[test]
    fn every_difference_is_named_with_its_ranks() {
        for (one, other, complaint) in [
            ("", "--seed 2", "--seed: 1 on ranks 0, 2; 2 on rank 1"),
            (
                "",
                "--backend meta",
                "--backend: delegation on ranks 0, 2; meta on rank 1",
            ),
            (
                "",
                "--device mlx5_0",
                "--device: soft on ranks 0, 2; mlx5_0 on rank 1",
            ),
            (
                "",
                "--device soft:rtt_us=6",
                "--device: soft on ranks 0, 2; soft:rtt_us=6 on rank 1",
            ),
            (
                "--poll-budget 3",
                "",
                "--poll-budget: 3 on ranks 0, 2; 0 on rank 1",
            ),
            (
                "",
                "--batch-window completion:2",
                "--batch-window: off on ranks 0, 2; ",
            ),
            (
                "",
                "--hold 20us",
                "--hold: off on ranks 0, 2; 20us on rank 1",
            ),
            ("", "--trace /tmp", "--trace: null on ranks 0, 2; "),
            (
                "",
                "--duration 3",
                "--duration: 2.0 on ranks 0, 2; 3.0 on rank 1",
            ),
            (
                "",
                "--ring-size 4096",
                "the computed ring_bytes: 8192 on ranks 0, 2; 4096 on rank 1",
            ),
            (
                "--no-verify",
                "",
                "--verify: false on ranks 0, 2; true on rank 1",
            ),
            (
                "",
                "--queue-depth 31",
                "--queue-depth: 32 on ranks 0, 2; 31 on rank 1",
            ),
            ("", "--server-threads 2", "--server-threads: 1 on"),
            ("", "--client-threads 2", "--client-threads: 1 on"),
            ("", "--shm-dir /dev/shm", "--shm-dir: null on"),
            ("", "--pin none", "--pin: "),
        ] {
            let complaints = compare(&[runs(one), runs(other), runs(one)]);
            assert!(
                complaints
                    .iter()
                    .any(|it| it.starts_with(&format!("the ranks disagree on {complaint}"))),
                "{complaints:?}"
            );
        }
        assert_eq!(compare(&[runs("--seed 3"), runs("--seed 3")]), [""; 0]);
        // The rule by which a rank got its device does not matter.
        let cli = Cli::try_parse_from(["benchkv"]).unwrap();
        let by_auto = Options::resolve(cli).unwrap();
        let named = Options::resolve(JobArgs {
            device: by_auto.asked.device.clone(),
            ..JobArgs::from(Cli::try_parse_from(["benchkv"]).unwrap())
        });
        assert_eq!(facts(&by_auto), facts(&named.unwrap()));
    }

    #[test]
    fn other_builds_are_named() {
        let mut older = runs("");
        let names = [
            "the version of benchkv",
            "the commit of the build",
            "the version of connection records",
        ];
        names
            .iter()
            .for_each(|name| *older.as_mut().unwrap().get_mut(*name).unwrap() = "older".to_owned());
        let complaints = compare(&[runs(""), older]);
        for name in names {
            let start = format!("the ranks disagree on {name}: ");
            assert!(
                complaints
                    .iter()
                    .any(|it| it.starts_with(&start) && it.ends_with("; older on rank 1")),
                "{complaints:?}"
            );
        }
        assert_eq!(complaints.len(), 3);
    }

    #[test]
    fn a_refusal_outweighs_differences_and_is_said_once() {
        let refuses = || Err("--pin: no".to_owned());
        assert_eq!(
            compare(&[runs(""), refuses(), runs("--seed 2"), refuses()]),
            ["ranks 1, 3: --pin: no"]
        );
    }
}
