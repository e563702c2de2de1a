//! The result: a table for people, one JSON document for programs, and the plot.

use std::collections::BTreeMap;
use std::fmt;

use benchkv_harness::Failure;
use benchkv_harness::chart::{Axis, Chart, Series};
use benchkv_harness::report::{Table, percent, rate};
use mlx5::NicParameters;
use serde::Serialize;

use super::calibration::{PUBLISHED, Published};
use super::curve::{Pair, Verdict};
use super::point::Measured;
use super::setting::Setting;

/// Value of [`Document::schema_version`]. It changes when the meaning of any field changes.
const SCHEMA_VERSION: u32 = 4;

/// The JSON document. It does not depend on the machine: equal options give equal bytes.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Document {
    schema: &'static str,
    schema_version: u32,
    #[serde(flatten)]
    verdict: Verdict,
    calibration: Published,
    calibrated_miss_ns: u64,
    nic: BTreeMap<&'static str, u64>,
    setting: Setting,
    curve: Vec<Pair>,
}

impl Document {
    pub(crate) fn new(setting: Setting, verdict: Verdict, curve: Vec<Pair>) -> Self {
        let nic = setting.nic();
        Self {
            schema: "scalerpc-scale",
            schema_version: SCHEMA_VERSION,
            verdict,
            calibration: PUBLISHED,
            calibrated_miss_ns: PUBLISHED.miss_ns(),
            nic: BTreeMap::from([
                ("doorbell_ns", nic.doorbell_ns),
                ("send_ns", nic.send_ns),
                ("byte_ps", nic.byte_ps),
                ("link_ns", nic.link_ns),
            ]),
            setting,
            curve,
        }
    }

    fn curve_table(&self) -> Table {
        let mut table = Table::new([
            "clients",
            "off",
            "misses",
            "on",
            "misses",
            "on/off",
            "slices",
            "on: a client's least..most",
        ]);
        for pair in &self.curve {
            let (off, on) = (&pair.off, &pair.on);
            let (fewest, most) = (on.fewest_of_a_client, on.most_of_a_client);
            table.row([
                pair.clients.to_string(),
                rate(off.responses_per_s),
                percent(off.send_miss_share),
                rate(on.responses_per_s),
                percent(on.send_miss_share),
                format!("{:.2}", pair.on_over_off()),
                slices(on),
                format!("{fewest}..{most}"),
            ]);
        }
        table
    }

    pub(crate) fn plot(&self) -> Result<String, Failure> {
        let pairs = || self.curve.iter();
        let series = |name: String, of: fn(&Pair) -> f64| Series {
            name,
            points: pairs()
                .map(|pair| (f64::from(pair.clients), of(pair)))
                .collect(),
        };
        let Setting {
            cache,
            miss_ns,
            group_size,
            slice_us,
            ..
        } = self.setting;
        Chart {
            title: format!(
                "One server, modelled: a NIC with {cache} contexts, {miss_ns} ns for one that is missing"
            ),
            x: Axis {
                title: "clients".to_owned(),
                label: |clients| format!("{clients:.0}"),
                names: Vec::new(),
                is_log: false,
            },
            y: Axis {
                title: "responses per second".to_owned(),
                label: rate,
                names: Vec::new(),
                is_log: false,
            },
            series: vec![
                series(
                    format!("grouping on: groups of {group_size}, slices of {slice_us} us and longer"),
                    |pair| pair.on.responses_per_s,
                ),
                series("grouping off".to_owned(), |pair| pair.off.responses_per_s),
            ],
        }
        .svg()
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting {
            depth,
            workload,
            group_size,
            slice_us,
            max_rotation_us,
            cache,
            miss_ns,
            server_ns,
            jitter_ns,
            seed,
            window_us,
            ..
        } = self.setting;
        let (request_bytes, response_bytes) = self.setting.bytes();
        let NicParameters {
            doorbell_ns,
            send_ns,
            byte_ps,
            link_ns,
            ..
        } = self.setting.nic();
        writeln!(
            f,
            "Modelled, in virtual time: the library as it is, on a model of NICs. Misses are of the messages that the server's NIC sends.\n"
        )?;
        writeln!(f, "{}", self.curve_table())?;
        writeln!(
            f,
            "grouping off drops by {} behind its peak",
            percent(self.verdict.grouping_off_drop)
        )?;
        writeln!(
            f,
            "grouping on keeps {} of its peak at worst, from {} clients on (with fewer the server is not busy)\n",
            percent(self.verdict.grouping_on_worst),
            self.verdict.enough_clients
        )?;
        writeln!(
            f,
            "NIC: {cache} contexts, {miss_ns} ns for one that is missing ({} ns by calibration: {} Gbit/s become {} at {} \
             misses, messages of {} B), {doorbell_ns} ns doorbell, {send_ns} ns a message, {byte_ps} ps a byte, {link_ns} ns and up to \
             {jitter_ns} ns jitter each way, seed {seed}",
            self.calibrated_miss_ns,
            self.calibration.full_gbps,
            self.calibration.missing_gbps,
            percent(self.calibration.miss_share),
            self.calibration.message_bytes
        )?;
        write!(
            f,
            "load: {workload:?}, {depth} calls outstanding by each client, {request_bytes} B there and {response_bytes} B back; \
             groups of {group_size}, slices of {slice_us} us and longer up to a rotation of {max_rotation_us} us; CPU {server_ns} ns \
             a request and {} ns a step of the server, {} ns a call of a client; {} ms measured",
            Setting::SERVER_STEP_NS,
            Setting::CLIENT_CALL_NS,
            window_us as f64 / 1e3
        )
    }
}

/// Returns the length of slices for the table; `-` if no slice began.
fn slices(measured: &Measured) -> String {
    if measured.slices == 0 {
        "-".to_owned()
    } else {
        format!("{} us", measured.slice_ns / 1000)
    }
}
