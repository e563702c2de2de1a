//! Policies as they are typed, and refused.

use clap::Parser;
use engine::policy::PolicyOptions;

use crate::cli::Cli;
use crate::options::Options;

fn resolve(args: &str) -> Result<Options, String> {
    let cli = Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace()))
        .map_err(|e| e.to_string())?;
    Options::resolve(cli).map_err(|e| e.to_string())
}

#[test]
fn the_defaults_are_those_of_the_command_line_and_ask_for_nothing() {
    let options = resolve("").unwrap();
    assert_eq!(options.job.policies, PolicyOptions::default());
    assert!(!options.job.policies.govern() && options.job.policies.to_string().is_empty());
    assert!(!options.to_string().contains("polic"), "{options}");
}

#[test]
fn what_is_asked_for_is_in_the_plan() {
    let args =
        "--hold adaptive:12.5us --poll-budget 16 --flush-every 4 --batch-window completion:2";
    let options = resolve(args).unwrap();
    let listed =
        "policies: hold adaptive:12.5us, poll-budget 16, flush-every 4, batch-window completion:2";
    assert!(
        options.job.policies.govern() && options.to_string().contains(listed),
        "{options}"
    );
    assert!(
        !resolve("--batch-window consumption:2")
            .unwrap()
            .job
            .policies
            .govern(),
        "that is the connections' own"
    );
}

#[test]
fn ranges_end_where_they_say() {
    for (flag, legal, illegal, says) in [
        (
            "hold",
            ["0.5us", "100us"],
            ["0.4us", "100.1us"],
            "0.5us to 100us",
        ),
        (
            "coalesce-rtt-us",
            ["0.1", "1000000"],
            ["inf", "1000001"],
            "0.1 to 1000000",
        ),
        (
            "poll-budget",
            ["0", "4096"],
            ["4097", "adaptive"],
            "0 to 4096",
        ),
        ("flush-every", ["1", "4096"], ["0", "4097"], "1 to 4096"),
        (
            "batch-window",
            ["completion:1", "consumption:256"],
            ["completion:0", "consumption:257"],
            "1 to 256",
        ),
        (
            "batches-in-flight",
            ["1", "1024"],
            ["0", "1025"],
            "1 to 1024",
        ),
    ] {
        for value in legal {
            resolve(&format!("--{flag} {value}")).unwrap();
        }
        for value in illegal {
            let refused = resolve(&format!("--{flag} {value}")).unwrap_err();
            assert!(
                refused.contains(&format!("--{flag} ")) && refused.contains(says),
                "{refused}"
            );
        }
    }
}

#[test]
fn what_daemons_do_with_other_ranks_needs_daemons_that_do_and_other_ranks() {
    let flags = [
        ("--hold", "--hold 10us"),
        ("--hold", "--hold adaptive"),
        ("--coalesce-rtt-us", "--coalesce-rtt-us 2"),
        ("--poll-budget", "--poll-budget 2"),
        ("--flush-every", "--flush-every 2"),
    ];
    for (name, flag) in flags {
        let refused = resolve(&format!("--ranks 1 {flag}")).unwrap_err();
        assert!(
            refused.starts_with(&format!("{name} with 1 rank: ")),
            "{refused}"
        );
        let refused = resolve(&format!("--backend direct {flag}")).unwrap_err();
        assert!(
            refused.starts_with(&format!("{name} with --backend direct: ")),
            "{refused}"
        );
    }
    assert!(
        resolve("--ranks 1 --batch-window completion:1")
            .unwrap_err()
            .starts_with("--batch-window with 1 rank: ")
    );
    resolve("--backend direct --batch-window completion:1").unwrap();
}

#[test]
fn what_gathers_messages_needs_messages_that_gather() {
    let window = "the window is one of copyrpc's batches";
    for (backend, flag, why) in [
        ("rc-send", "--batch-window completion:1", window),
        ("ucx-am", "--batch-window completion:1", window),
        ("rc-send", "--batches-in-flight 8", window),
        (
            "ucx-am",
            "--flush-every 2",
            "UCX sends each message at once",
        ),
    ] {
        let refused = resolve(&format!("--backend {backend} {flag}")).unwrap_err();
        let name = flag.split(' ').next().unwrap();
        assert!(
            refused.starts_with(&format!(
                "{name} with --carrier {backend}: {why}; legal is --carrier copyrpc"
            )),
            "{refused}"
        );
    }
    resolve("--backend rc-send --flush-every 2 --hold 5us").unwrap();
}
