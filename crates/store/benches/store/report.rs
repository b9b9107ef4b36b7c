//! Prints figures as a table, or as one JSON object per line.

use std::cell::Cell;

/// Collects and prints figures.
pub(crate) struct Report {
    json: bool,
    /// True for short runs that only try out the suite. Their figures must not be quoted.
    pub(crate) quick: bool,
    wanted: Vec<String>,
    figures: Cell<usize>,
}

/// A figure with the floor that it is compared with.
pub(crate) struct Figure<'a> {
    pub(crate) name: &'a str,
    pub(crate) value: f64,
    pub(crate) unit: &'a str,
    pub(crate) floor: f64,
    pub(crate) target: &'a str,
}

impl Report {
    /// Reads the command line: `--json`, `--quick`, and the names of the wanted figures.
    pub(crate) fn from_arguments() -> Report {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
        let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
        let wanted = arguments.iter().map(String::as_str).filter(|word| !word.starts_with("--")).collect();
        Report::new(has("--json"), has("--quick"), wanted)
    }

    fn new(json: bool, quick: bool, wanted: Vec<&str>) -> Report {
        let wanted = wanted.into_iter().map(str::to_string).collect();
        if !json {
            println!("{:<28} {:>14} {:>14} {:>8}  to reach", "name", "value", "floor", "ratio");
        }
        Report { json, quick, wanted, figures: Cell::new(0) }
    }

    /// True if a figure is wanted. Without names on the command line all are.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| name.starts_with(wanted.as_str()))
    }

    pub(crate) fn add(&self, figure: Figure<'_>) {
        let Figure { name, value, unit, floor, target } = figure;
        self.figures.set(self.figures.get() + 1);
        let ratio = value / floor;
        if self.json {
            let line = serde_json::json!({"name": name, "value": value, "unit": unit, "floor": floor, "ratio": ratio});
            println!("{line}");
        } else {
            println!("{name:<28} {value:>14.1} {floor:>14.1} {ratio:>8.2}  {target} ({unit})");
        }
    }

    pub(crate) fn finish(self) {
        if self.figures.get() == 0 {
            eprintln!("no figure has a name that starts with {}", self.wanted.join(" or "));
            std::process::exit(2);
        }
        if !self.json && self.quick {
            println!("quick run: do not quote these figures");
        }
    }
}

/// The median of measurements.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Resident memory of this process in MB.
pub(crate) fn resident_mb() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: f64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(f64::NAN);
    pages * 4096.0 / 1e6
}

/// The bytes that this process has written to files. The kernel's `write_bytes` counts whole folios, which is many
/// times as much.
pub(crate) fn bytes_written() -> f64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(f64::NAN)
}
