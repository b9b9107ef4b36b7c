//! How every command answers: tables for people, JSON for programs, and exit codes. Commands say what the answer is;
//! this file decides how it looks and must not know what it is about.

use std::fmt;
use std::io::{IsTerminal, Write};

use anyhow::Result;
use clap::ValueEnum;
use latchwork::claim::ClaimError;
use latchwork::lock::LockError;
use latchwork::node::NodesError;
use latchwork::store::{ErrorKind, StoreError};
use latchwork::workflow::WorkflowError;
use serde::Serialize;
use serde_json::{Map, Value};

/// The last line of every help text.
pub(crate) const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 not allowed, \
    5 conflict or precondition, 6 the workflow failed, \
    69 unreachable, 75 busy or timed out (try again later)";

/// The formats of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// One JSON value.
    Json,
    /// One JSON value a line, for each item of a list.
    Jsonl,
}

/// Where answers go.
pub(crate) struct Output<'w> {
    format: Format,
    out: &'w mut dyn Write,
    /// True if the output is a terminal.
    terminal: bool,
    color: bool,
}

impl<'w> Output<'w> {
    /// Writes to the standard output. Uses colour on a terminal, unless `NO_COLOR` is set.
    pub(crate) fn new(format: Format, out: &'w mut dyn Write) -> Output<'w> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let terminal = std::io::stdout().is_terminal();
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Output { format, out, terminal, color: terminal && !is_dumb && !is_set("NO_COLOR") }
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// One item, as JSON or as text for people.
    pub(crate) fn one<T: Serialize>(&mut self, thing: &T, text: impl FnOnce(&mut Text)) -> Result<()> {
        match self.format {
            Format::Json => writeln!(self.out, "{}", serde_json::to_string_pretty(thing)?)?,
            Format::Jsonl => self.line(thing)?,
            Format::Table => {
                let mut written = Text { written: String::new(), terminal: self.terminal, color: self.color };
                text(&mut written);
                self.out.write_all(written.written.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Hands over what was written so far.
    pub(crate) fn flush(&mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }

    /// One item of a list, as a line of JSON.
    pub(crate) fn line<T: Serialize>(&mut self, thing: &T) -> Result<()> {
        Ok(writeln!(self.out, "{}", serde_json::to_string(thing)?)?)
    }

    /// A list: an object that has the items under `name`, a line for each, or a table. `next` is the cursor of the
    /// rest, if there is more: a field of the object, or otherwise a note on the standard error.
    pub(crate) fn many<T: Serialize>(
        &mut self,
        name: &str,
        things: &[T],
        next: Option<&str>,
        table: impl FnOnce(&[T]) -> Table,
    ) -> Result<()> {
        match self.format {
            Format::Json => {
                // Written by hand, so that the items keep the order of their fields.
                let next = serde_json::to_string(&next)?;
                let things = serde_json::to_string_pretty(things)?.replace('\n', "\n  ");
                writeln!(self.out, "{{\n  \"{name}\": {things},\n  \"next\": {next}\n}}")?;
            }
            Format::Jsonl => {
                things.iter().try_for_each(|thing| self.line(thing))?;
                if let Some(next) = next {
                    note(&format!("{{\"next\":{}}}", serde_json::to_string(next)?));
                }
            }
            Format::Table if things.is_empty() && next.is_none() => note(&format!("no {}", name.replace('_', " "))),
            Format::Table => {
                self.out.write_all(table(things).drawn(self.terminal, self.color).as_bytes())?;
                if next.is_some() {
                    self.out.flush()?;
                    // A cursor is longer than most tables are wide.
                    note("there are more: --limit N, or --all; with -o json, next is the cursor for --after");
                }
            }
        }
        Ok(())
    }
}

/// A note for people on the standard error. If it cannot be written, that is not a failure.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The text about one item, for people.
pub(crate) struct Text {
    written: String,
    terminal: bool,
    color: bool,
}

impl Text {
    /// The width of the terminal, if there is one.
    pub(crate) fn width(&self) -> Option<usize> {
        self.terminal.then(|| comfy_table::Table::new().width().map(usize::from)).flatten()
    }

    pub(crate) fn line(&mut self, line: impl AsRef<str>) {
        self.written.push_str(&plain(line.as_ref()));
        self.written.push('\n');
    }

    pub(crate) fn table(&mut self, table: Table) {
        self.written.push_str(&table.drawn(self.terminal, self.color));
    }
}

/// The meaning of a text, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Bad,
    Attention,
    Dim,
}

/// A text in a table.
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn new(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: text.into(), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text, Tone::Plain)
    }
}

/// Rows below a header, without lines between them.
pub(crate) struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with these titles, or without a header if there are none.
    pub(crate) fn new(header: &[&'static str]) -> Table {
        Table { header: header.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn drawn(self, terminal: bool, color: bool) -> String {
        use comfy_table::{Attribute, Color, ContentArrangement};
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        // Rows are wrapped to fit a screen. In a pipe each row stays one line.
        let arrangement = if terminal { ContentArrangement::Dynamic } else { ContentArrangement::Disabled };
        table.set_content_arrangement(arrangement);
        if color {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        if !self.header.is_empty() {
            let bold = |title: &&str| comfy_table::Cell::new(title).add_attribute(Attribute::Bold);
            table.set_header(self.header.iter().map(bold));
        }
        for row in self.rows {
            table.add_row(row.into_iter().map(|cell| {
                let drawn = comfy_table::Cell::new(plain(&cell.text));
                match cell.tone {
                    Tone::Plain => drawn,
                    Tone::Good => drawn.fg(Color::Green),
                    Tone::Bad => drawn.fg(Color::Red),
                    Tone::Attention => drawn.fg(Color::Yellow),
                    Tone::Dim => drawn.fg(Color::DarkGrey),
                }
            }));
        }
        table.column_iter_mut().for_each(|column| {
            column.set_padding((0, 2));
        });
        table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

/// A text as one line, without control characters that a terminal would obey.
pub(crate) fn plain(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() || ('\u{202a}'..='\u{202e}').contains(&letter) {
            true => line.extend(letter.escape_default()),
            false => line.push(letter),
        }
    }
    line
}

/// The beginning of a text that is too long for a table.
pub(crate) fn shortened(text: &str, letters: usize) -> String {
    match text.char_indices().nth(letters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

/// Why the command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(dead_code)] // The list of all exit codes, including those that no command uses yet.
pub(crate) enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    NotAllowed = 4,
    Conflict = 5,
    WorkflowFailed = 6,
    Unreachable = 69,
    Busy = 75,
    Lost = 76,
    NotExecutable = 126,
    NoCommand = 127,
}

impl Exit {
    /// Its name in JSON.
    fn name(self) -> &'static str {
        match self {
            Exit::Done => "done",
            Exit::Failed => "failed",
            Exit::Usage => "usage",
            Exit::NotFound => "not_found",
            Exit::NotAllowed => "not_allowed",
            Exit::Conflict => "conflict",
            Exit::WorkflowFailed => "workflow_failed",
            Exit::Unreachable => "unreachable",
            Exit::Busy => "busy",
            Exit::Lost => "lost",
            Exit::NotExecutable => "not_executable",
            Exit::NoCommand => "no_command",
        }
    }

    fn of(kind: ErrorKind) -> Exit {
        match kind {
            ErrorKind::Invalid => Exit::Usage,
            ErrorKind::NotFound => Exit::NotFound,
            ErrorKind::Conflict => Exit::Conflict,
            ErrorKind::Unavailable | ErrorKind::Corrupt => Exit::Failed,
        }
    }
}

/// The exit code of another process, with which this one ends. It has printed everything itself.
#[derive(Debug)]
pub(crate) struct Ended(pub(crate) u8);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it ended with exit code {}", self.0)
    }
}

impl std::error::Error for Ended {}

/// The class of an error of the library.
pub(crate) fn kind_of(error: &anyhow::Error) -> Option<ErrorKind> {
    match library(error) {
        Some(Ok(error)) => Some(error.kind()),
        Some(Err(kind)) => Some(kind),
        None => error.downcast_ref::<StoreError>().map(StoreError::kind),
    }
}

/// An error of the library: the store's error that is below it, or its kind.
fn library(error: &anyhow::Error) -> Option<std::result::Result<&StoreError, ErrorKind>> {
    if let Some(error) = error.downcast_ref::<WorkflowError>() {
        return Some(match error {
            WorkflowError::Store(error) | WorkflowError::Lock(LockError::Store(error)) => Ok(error),
            error => Err(error.kind()),
        });
    }
    if let Some(error) = error.downcast_ref::<ClaimError>() {
        return Some(match error {
            ClaimError::Store(error) => Ok(error),
            error => Err(error.kind()),
        });
    }
    if let Some(error) = error.downcast_ref::<NodesError>() {
        return Some(match error {
            NodesError::Store(error) => Ok(error),
            error => Err(error.kind()),
        });
    }
    match error.downcast_ref::<LockError>()? {
        LockError::Store(error) => Some(Ok(error)),
        error => Some(Err(error.kind())),
    }
}

/// What went wrong, as it is printed. Commands return it for what they find themselves; errors of the library become
/// one.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) exit: Exit,
    pub(crate) message: String,
    /// More fields, for JSON.
    pub(crate) fields: Map<String, Value>,
}

impl Problem {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Problem {
        Problem { exit, message: message.into(), fields: Map::new() }
    }

    /// Adds a field for JSON, for example the process that has the directory open.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Problem {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// The problem of an error. `None` if the reader of the output has closed it, which is not a problem.
    pub(crate) fn of(error: anyhow::Error) -> Option<Problem> {
        let error = match error.downcast::<Problem>() {
            Ok(problem) => return Some(problem),
            Err(error) => error,
        };
        let message = format!("{error:#}");
        let store = match library(&error) {
            Some(Err(kind)) => return Some(Problem::new(Exit::of(kind), message)),
            Some(Ok(error)) => Some(error),
            None => error.downcast_ref::<StoreError>(),
        };
        if let Some(error) = store {
            return Some(Problem::of_store(error, message));
        }
        match error.downcast_ref::<std::io::Error>() {
            Some(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => None,
            // Errors about files name the file. An error without a context is about the output.
            Some(_) if error.chain().count() == 1 => {
                Some(Problem::new(Exit::Failed, format!("cannot write the output: {message}")))
            }
            _ => Some(Problem::new(Exit::Failed, message)),
        }
    }

    fn of_store(error: &StoreError, message: String) -> Problem {
        match error {
            StoreError::Locked { path, owner } => {
                let pid = owner.parse::<u32>().ok();
                let who = pid.map_or("another process".into(), |pid| format!("process {pid}"));
                let message = format!("{} is in use by {who}; try again when it has ended", path.display());
                Problem::new(Exit::Busy, message).with("pid", pid).with("directory", path.display().to_string())
            }
            StoreError::NotAStore { path, .. } => {
                Problem::new(Exit::NotFound, message).with("directory", path.display().to_string())
            }
            StoreError::NoSchema { schema } => Problem::new(Exit::NotFound, message).with("schema", schema.as_str()),
            error => Problem::new(Exit::of(error.kind()), message),
        }
    }

    /// Prints it on the standard error, in the format of the answer.
    pub(crate) fn tell(&self, format: Format) {
        match format {
            Format::Table => note(&format!("latch: {}", self.message)),
            Format::Json | Format::Jsonl => {
                let mut error = self.fields.clone();
                error.insert("code".into(), self.exit.name().into());
                error.insert("exit".into(), (self.exit as u8).into());
                error.insert("message".into(), self.message.clone().into());
                note(&serde_json::json!({ "error": error }).to_string());
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["ID", "STATUS"]);
        table.row(["a".into(), Cell::new("failed", Tone::Bad)]);
        table.row(["an\u{1b}[31m id\n".into(), "completed".into()]);
        table
    }

    #[test]
    fn tables_contain_no_control_characters_from_texts() {
        assert_eq!(
            table().drawn(false, false),
            "ID                 STATUS\na                  failed\nan\\u{1b}[31m id\\n  completed\n"
        );
        let colored = table().drawn(false, true);
        assert!(colored.contains("\u{1b}[38;5;9mfailed") && !colored.contains("[31m id\n"), "{colored:?}");
    }

    #[test]
    fn things_keep_the_order_of_their_fields() {
        #[derive(Serialize)]
        struct Thing {
            name: &'static str,
            id: u32,
        }
        let things = [Thing { name: "a\nb", id: 1 }];
        let drawn = |format, next| {
            let mut out = Vec::new();
            let mut output = Output { format, out: &mut out, terminal: false, color: false };
            output.many("things", &things, next, |_| table()).unwrap();
            String::from_utf8(out).unwrap()
        };
        let json = drawn(Format::Json, Some("cursor"));
        assert!(json.find("name") < json.find("id"), "{json}");
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value, serde_json::json!({"things": [{"name": "a\nb", "id": 1}], "next": "cursor"}));
        assert_eq!(drawn(Format::Jsonl, None), "{\"name\":\"a\\nb\",\"id\":1}\n");
    }

    #[test]
    fn problems_have_codes() {
        let store = |error: StoreError| Problem::of(WorkflowError::from(error).into()).unwrap();
        let locked = store(StoreError::Locked { path: "data".into(), owner: "7".into() });
        assert_eq!((locked.exit, &locked.fields["pid"]), (Exit::Busy, &7.into()));
        let locked = store(StoreError::Locked { path: "data".into(), owner: String::new() });
        assert!(locked.message.contains("another process") && locked.fields["pid"].is_null());
        assert_eq!(store(StoreError::Closed).exit, Exit::Failed);
        let missing = WorkflowError::NotFound { id: "a".into() };
        assert_eq!(Problem::of(missing.into()).unwrap().exit, Exit::NotFound);
        let own = Problem::new(Exit::NotAllowed, "no").with("owner", "process 7");
        assert_eq!(Problem::of(own.into()).unwrap().exit, Exit::NotAllowed);
        let pipe = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(Problem::of(pipe.into()).is_none());
    }
}
