//! `latch config`: prints the configuration of a server that is in force, and where each value comes from. Values that
//! are secret are not shown.

pub(crate) mod file;
pub(crate) mod limit;
pub(crate) mod options;
pub(crate) mod settings;
pub(crate) mod traces;
pub(crate) mod work;

use std::path::Path;

use anyhow::Result;
use clap::{ArgMatches, Args};
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::options::ServerOptions;
use crate::config::settings::{Origin, Settings};
use crate::output::{Cell, Output, Table, Tone};

#[derive(Args)]
pub(crate) struct Config {
    #[command(flatten)]
    options: ServerOptions,
}

/// A setting, as it is printed.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Printed {
    name: String,
    value: Value,
    /// `default`, `file`, `environment` or `flag`.
    from: &'static str,
    /// The file, the variable or the flag.
    source: Option<String>,
}

#[derive(Serialize)]
struct Shown {
    /// The configuration file, if there is one.
    file: Option<String>,
    settings: Vec<Printed>,
}

pub(crate) fn run(config: Config, matches: &ArgMatches, output: &mut Output<'_>) -> Result<()> {
    let settings = Settings::read(&config.options, matches)?;
    // What a server would refuse is refused here, too.
    let _ = settings.access()?;
    settings.tls()?;
    settings.check_work()?;
    settings.traces.collector()?;
    let shown =
        Shown { file: settings.file.as_deref().map(|file| file.display().to_string()), settings: settings.printed() };
    output.one(&shown, |text| {
        match &shown.file {
            Some(file) => text.line(format!("Configuration file: {file}")),
            None => text.line("Configuration file: none"),
        }
        text.line("");
        text.table(table(&shown.settings));
    })
}

fn table(settings: &[Printed]) -> Table {
    let mut table = Table::new(&["SETTING", "VALUE", "FROM"]);
    for setting in settings {
        let tone = if setting.from == "default" { Tone::Dim } else { Tone::Plain };
        let from = setting.source.as_ref().map_or(setting.from.into(), |source| format!("{} {source}", setting.from));
        table.row([setting.name.clone().into(), words(&setting.value).into(), Cell::new(from, tone)]);
    }
    table
}

/// A value for people.
fn words(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.is_empty() => "none".into(),
        Value::Array(items) => items.iter().map(words).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name} {}", words(value));
            fields.iter().map(field).collect::<Vec<_>>().join("; ")
        }
        Value::Number(number) => number.to_string(),
    }
}

impl Printed {
    pub(crate) fn new(name: impl Into<String>, value: Value, origin: &Origin) -> Printed {
        let (from, source) = match origin {
            Origin::Default => ("default", None),
            Origin::File(path) => ("file", Some(path.display().to_string())),
            Origin::Environment(name) => ("environment", Some(name.clone())),
            Origin::Flag(name) => ("flag", Some(name.clone())),
        };
        Printed { name: name.into(), value, from, source }
    }

    /// A path, or none.
    pub(crate) fn path(name: &str, path: Option<&Path>, origin: &Origin) -> Printed {
        Printed::new(name, json!(path.map(|path| path.display().to_string())), origin)
    }
}
