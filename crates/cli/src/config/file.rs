//! The configuration file of a server, in TOML. It knows the shape of the file, and nothing of flags and variables.
//! What it says about a mistake names the place, and no value: a value may hold a password.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use latchwork_server::Token;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::config::traces::TracesTable;
use crate::config::work::{WorkTable, WorkerTable};
use crate::output::{Exit, Problem};

/// The file that is read if none is named and it exists.
pub(crate) const DEFAULT_FILE: &str = "latchwork.toml";

/// A configuration file. Every part may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConfigurationFile {
    pub(crate) listen: Option<Vec<String>>,
    pub(crate) hosts: Option<Vec<String>>,
    pub(crate) origins: Option<Vec<String>>,
    pub(crate) insecure: Option<bool>,
    pub(crate) socket: Option<bool>,
    pub(crate) metrics: Option<bool>,
    pub(crate) token_file: Option<PathBuf>,
    #[serde(default)]
    pub(crate) tls: TlsTable,
    #[serde(default)]
    pub(crate) log: LogTable,
    #[serde(default)]
    pub(crate) traces: TracesTable,
    #[serde(default)]
    pub(crate) limits: BTreeMap<String, toml::Value>,
    #[serde(default)]
    pub(crate) namespaces: BTreeMap<String, NamespaceTable>,
    #[serde(default)]
    pub(crate) tokens: Vec<Token>,
    #[serde(default)]
    pub(crate) workers: BTreeMap<String, WorkerTable>,
    /// By the names of namespaces.
    #[serde(default)]
    pub(crate) work: BTreeMap<String, WorkTable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TlsTable {
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogTable {
    pub(crate) format: Option<String>,
    pub(crate) level: Option<String>,
}

/// A namespace: its store. The short form is the store alone.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum NamespaceTable {
    Short(String),
    Full(FullNamespace),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FullNamespace {
    pub(crate) store: String,
    pub(crate) schema: Option<String>,
    /// A file that holds the password of the database.
    pub(crate) password_file: Option<PathBuf>,
}

/// A file of tokens beside the configuration.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenFile {
    #[serde(default)]
    tokens: Vec<Token>,
}

impl ConfigurationFile {
    /// Reads a file. Paths in it are relative to its directory.
    pub(crate) fn read(path: &Path) -> Result<ConfigurationFile, Problem> {
        let mut file: ConfigurationFile = parsed(path)?;
        let base = path.parent().unwrap_or(Path::new(""));
        let headers = &mut file.traces.headers_file;
        let paths = [&mut file.token_file, &mut file.tls.certificate, &mut file.tls.key, headers];
        for relative in paths.into_iter().flatten() {
            *relative = base.join(&relative);
        }
        for namespace in file.namespaces.values_mut() {
            *namespace = NamespaceTable::Full(namespace.clone().full(base));
        }
        file.workers.values_mut().for_each(|worker| worker.based(base));
        file.work.values_mut().for_each(|work| work.based(base));
        Ok(file)
    }
}

impl NamespaceTable {
    /// The full form, with paths that are relative to this directory.
    pub(crate) fn full(self, base: &Path) -> FullNamespace {
        let mut full = match self {
            NamespaceTable::Short(store) => FullNamespace { store, schema: None, password_file: None },
            NamespaceTable::Full(full) => full,
        };
        if !crate::store::is_database(&full.store) {
            full.store = base.join(&full.store).display().to_string();
        }
        full.password_file = full.password_file.map(|file| base.join(file));
        full
    }
}

/// The tokens in a file.
pub(crate) fn tokens(path: &Path) -> Result<Vec<Token>, Problem> {
    Ok(parsed::<TokenFile>(path)?.tokens)
}

fn parsed<T: DeserializeOwned>(path: &Path) -> Result<T, Problem> {
    let file = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let exit = if error.kind() == std::io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Failed };
        Problem::new(exit, format!("cannot read {file}: {error}")).with("file", file.to_string())
    })?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let place = line.map_or(file.to_string(), |line| format!("{file}, line {line}"));
        let problem = Problem::new(Exit::Usage, format!("{place}: {}", without_values(error.message())));
        problem.with("file", file.to_string()).with("line", line)
    })
}

/// A message of the parser without texts from the file.
fn without_values(message: &str) -> String {
    match message.split_once("string \"") {
        Some((before, rest)) => {
            let after = rest.rsplit_once('"').map_or("", |(_, after)| after);
            format!("{before}a string{after}")
        }
        None => message.trim().replace('\n', "; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ConfigurationFile, Problem> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("latchwork.toml");
        std::fs::write(&path, text).unwrap();
        ConfigurationFile::read(&path).map_err(|problem| {
            let message = problem.message.replace(&path.display().to_string(), "FILE");
            Problem { message, ..problem }
        })
    }

    #[test]
    fn a_mistake_is_named_with_its_line_and_without_values() {
        for (text, says) in [
            ("listen = 3", "FILE, line 1: invalid type: integer `3`, expected a sequence"),
            ("\nlissten = []", "FILE, line 2: unknown field `lissten`, expected one of "),
            ("insecure = \"postgres://me:hunter2@db\"", "FILE, line 1: invalid type: a string, expected a boolean"),
            ("[namespaces]\ndefault = 7", "FILE, line 2: data did not match any variant"),
            ("[[tokens]]\nname = \"a\"", "FILE, line 1: missing field `hash`"),
            ("[namespaces.a]\nstore = \"postgres://me:hunter2@db", "FILE, line 2: "),
        ] {
            let problem = read(text).unwrap_err();
            assert!(problem.message.starts_with(says), "{text}: {}", problem.message);
            assert!(!problem.message.contains("hunter2"), "{}", problem.message);
            assert_eq!(problem.exit, Exit::Usage);
        }
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let text = "token_file = \"t.toml\"\n[namespaces]\na = \"data\"\nb = \"postgres://db\"\nc = \"/c\"";
        let file = read(text).unwrap();
        assert!(file.token_file.unwrap().is_absolute());
        let store = |name: &str| file.namespaces[name].clone().full(Path::new("/elsewhere")).store;
        assert!(store("a").ends_with("/data") && store("a").len() > "/data".len());
        assert_eq!((store("b").as_str(), store("c").as_str()), ("postgres://db", "/c"));
    }
}
