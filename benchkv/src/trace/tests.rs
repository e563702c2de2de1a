use csv::StringRecord;

use super::*;

#[path = "../../tests/support/series.rs"]
mod series_file;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("benchkv-trace-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn file(&self, text: &str) -> PathBuf {
        let file = file_of(&self.0, 0, 1);
        fs::write(&file, text).unwrap();
        file
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns a sample in which every field has a value of its own, so that no field can be taken for
/// another.
fn sample(from: u64, run: Option<u16>) -> Sample {
    let fields: StringRecord = (from..from + 12).map(|value| value.to_string()).collect();
    let fields: StringRecord = fields
        .iter()
        .enumerate()
        .map(|(at, text)| if at == 1 { "" } else { text })
        .collect();
    Sample {
        run,
        ..fields.deserialize(None).unwrap()
    }
}

#[test]
fn a_series_reads_back_as_it_was_written() {
    let dir = Scratch::new("roundtrip");
    let samples = vec![
        sample(1, None),
        sample(100, Some(3)),
        Sample {
            time_ns: u64::MAX,
            ..sample(u64::MAX - 20, Some(u16::MAX))
        },
    ];
    let file = file_of(&dir.0, 3, 12);
    let text = || fs::read_to_string(&file).unwrap();
    let mut series = Series {
        samples,
        ..Series::default()
    };
    write(&file, &series).unwrap();
    assert_eq!(series_file::read(&file).unwrap(), series);
    assert_eq!(
        text().lines().take(2).collect::<Vec<_>>(),
        [&columns(&[]), "1,,3,4,5,6,7,8,9,10,11,12"]
    );
    assert!(text().ends_with('\n') && text().lines().count() == 4);
    let [first, ..] = series.samples.as_slice() else {
        panic!("three")
    };
    assert_eq!(
        (first.hold_ns, first.outstanding, first.window_stalls),
        (12, 9, 8),
        "columns are where the header says"
    );
    series = Series {
        endpoints: vec![0, 11],
        by_endpoint: vec![5, 6, 7, 8, 9, u32::MAX],
        ..series
    };
    write(&file, &series).unwrap();
    assert_eq!(series_file::read(&file).unwrap(), series);
    assert!(
        text().lines().nth(1).unwrap().ends_with(",11,12,5,6")
            && text().contains("hold_ns,outstanding_0,outstanding_11\n")
    );
    write(&file, &Series::default()).unwrap();
    assert_eq!(series_file::read(&file).unwrap(), Series::default());
}

#[test]
fn files_are_found_by_rank_and_daemon() {
    let dir = Scratch::new("find");
    for (rank, daemon) in [(10, 0), (2, 1), (2, 0)] {
        write(&file_of(&dir.0, rank, daemon), &Series::default()).unwrap();
    }
    for other in [
        "rank-1-daemon-.csv",
        "rank-x-daemon-0.csv",
        "rank-1-daemon-0.csv.gz",
        "result.json",
    ] {
        fs::write(dir.0.join(other), "").unwrap();
    }
    let found: Vec<_> = series_file::files_in(&dir.0)
        .into_iter()
        .map(|(daemon, _)| daemon)
        .collect();
    assert_eq!(found, [(2, 0), (2, 1), (10, 0)]);
}

#[test]
fn what_is_no_trace_is_refused_with_file_and_line() {
    let dir = Scratch::new("malformed");
    let header = columns(&[]);
    let good = "1,,3,4,5,6,7,8,9,10,11,12";
    for (text, parts) in [
        ("a,b\n1,2\n".to_owned(), ["line: 2", ""]),
        (
            format!("{header},outstanding_3\n{good},-1\n"),
            ["line: 2", "field 12"],
        ),
        (format!("{header}\n{good}\n1,2\n"), ["line: 3", "2 fields"]),
        (format!("{header}\n{good},15\n"), ["line: 2", "13 fields"]),
        (
            format!("{header}\n{}\n", good.replace(",3,", ",-3,")),
            ["line: 2", "field 2"],
        ),
        (
            format!("{header}\n{}\n", good.replace(",,", ",65536,")),
            ["line: 2", "field 1"],
        ),
        (
            format!("{header}\n{}\n", good.replace(",12", ",")),
            ["line: 2", "field 11"],
        ),
    ] {
        let refused = series_file::read(&dir.file(&text)).unwrap_err().to_string();
        assert!(refused.contains("rank-0-daemon-1.csv"), "{refused}");
        assert!(
            parts.iter().all(|part| refused.contains(part)),
            "{text:?}: {refused}"
        );
    }
    let missing = series_file::read(&file_of(&dir.0, 7, 7))
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("rank-7-daemon-7.csv: No such file"),
        "{missing}"
    );
    fs::write(file_of(&dir.0, 0, 1), [0xff, 0xfe, b'\n', 0xff]).unwrap();
    let binary = series_file::read(&file_of(&dir.0, 0, 1))
        .unwrap_err()
        .to_string();
    assert!(binary.contains("UTF-8"), "{binary}");
}

#[test]
fn a_directory_is_looked_at_made_when_series_are_written_and_refused_where_it_cannot_be_used() {
    let dir = Scratch::new("check");
    let options = |dir: PathBuf| TraceOptions { dir, interval: 1 };
    let new = options(dir.0.join("deep/er"));
    new.check().unwrap();
    assert_eq!(
        fs::read_dir(&dir.0).unwrap().count(),
        0,
        "neither a directory nor the probe is left"
    );
    new.write(0, [&Series::default()].into_iter()).unwrap();
    assert_eq!(series_file::files_in(&new.dir).len(), 1);
    let occupied = new.check().unwrap_err().to_string();
    assert!(
        occupied.contains("deep/er has the traces of another job"),
        "{occupied}"
    );
    let file = dir.file("");
    for unusable in [
        file.clone(),
        file.join("below"),
        PathBuf::from("/proc/benchkv"),
    ] {
        let refused = options(unusable.clone()).check().unwrap_err().to_string();
        assert!(refused.starts_with(unusable.to_str().unwrap()), "{refused}");
    }
}
