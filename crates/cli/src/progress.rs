//! The progress of long work, on a terminal alone: one line on the standard error that is written again and again.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use latchwork::store::Env;

use crate::output::Format;
use crate::time;

/// How often the line is written. Short work shows none.
const EVERY: Duration = Duration::from_millis(250);

/// Does work, and shows `what` it is, how long it takes, and what `more` says.
pub(crate) async fn shown<T>(
    format: Format,
    what: &str,
    mut more: impl FnMut() -> String,
    work: impl Future<Output = T>,
) -> T {
    let is_shown = format == Format::Table && std::io::stderr().is_terminal();
    let env = Env::system();
    let mut work = std::pin::pin!(work);
    let mut is_drawn = false;
    loop {
        tokio::select! {
            done = &mut work => {
                if is_drawn {
                    draw("");
                }
                return done;
            }
            () = env.sleep(EVERY), if is_shown => {
                let took = time::exact(Duration::from_secs(env.monotonic().as_secs()));
                draw(&format!("{what}, {took}{}", more()));
                is_drawn = true;
            }
        }
    }
}

/// Writes the line again.
fn draw(line: &str) {
    let mut err = std::io::stderr();
    let _ = write!(err, "\r\u{1b}[2K{line}");
    let _ = err.flush();
}

/// A number of bytes for people: `12.3 MB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let found = units.into_iter().find(|(_, size)| bytes as f64 >= *size);
    found.map_or(format!("{bytes} bytes"), |(unit, size)| format!("{:.1} {unit}", bytes as f64 / size))
}

/// The size of the files in a directory. Files that vanish meanwhile are not counted.
pub(crate) fn size_of(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|found| found.is_file()).map(|found| found.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_for_people() {
        for (number, text) in [(0, "0 bytes"), (999, "999 bytes"), (12_345_678, "12.3 MB"), (2_000_000_000, "2.0 GB")] {
            assert_eq!(bytes(number), text);
        }
    }
}
