//! The value of `--store`: a data directory, or a schema of a PostgreSQL database. This file opens it, for reading or
//! for an operator's change, and keeps the password of a database out of everything that is printed.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use latchwork::store::{PostgresOptions, Store};
use latchwork::workflow::Engine;

/// The data directory, if no store is named.
pub(crate) const DEFAULT_DIRECTORY: &str = "./latchwork-data";

/// The schema, if none is named.
const SCHEMA: &str = "latchwork";

/// How long a command waits for a database.
const PATIENCE: Duration = Duration::from_secs(10);

/// The value of `--store`.
#[derive(Clone)]
pub(crate) enum StoreArgument {
    Directory(PathBuf),
    /// A connection string, and the schema.
    Database(String, String),
}

impl StoreArgument {
    pub(crate) fn new(store: impl Into<OsString>, schema: Option<String>) -> Result<StoreArgument, &'static str> {
        let store = store.into();
        match (store.to_str().filter(|text| is_database(text)), schema) {
            (Some(url), None) => Ok(StoreArgument::Database(url.into(), SCHEMA.into())),
            (Some(url), Some(schema)) => Ok(StoreArgument::Database(url.into(), schema)),
            (None, None) => Ok(StoreArgument::Directory(store.into())),
            (None, Some(_)) => Err("--schema needs a database: --store postgres://…"),
        }
    }

    fn database(schema: &str) -> PostgresOptions {
        // A command is short: it needs no notifications, and works behind a pooler, too.
        let options = PostgresOptions::new().schema(schema).connections(1).behind_pooler().patience(PATIENCE);
        with_password(options)
    }

    /// Opens the store to look at it. Creates and changes nothing.
    pub(crate) async fn look(&self) -> Result<Store> {
        Ok(match self {
            StoreArgument::Directory(directory) => Store::open_read_only(directory).await?,
            StoreArgument::Database(url, schema) => Self::database(schema).connect_read_only(url).await?,
        })
    }

    /// Starts an engine that makes an operator's changes and runs nothing. A store that does not exist is not created.
    pub(crate) async fn operate(&self) -> Result<Engine> {
        self.look().await?.close().await?;
        Ok(match self {
            StoreArgument::Directory(directory) => Engine::open(directory).idle().start().await?,
            StoreArgument::Database(url, schema) => {
                Engine::on(&Self::database(schema).connect(url).await?).idle().start().await?
            }
        })
    }

    /// Opens the store to work on it, and creates it if it does not exist.
    pub(crate) async fn open(&self) -> Result<Store> {
        self.open_with(None).await
    }

    /// The same, with a file that holds the password of the database.
    pub(crate) async fn open_with(&self, password_file: Option<&Path>) -> Result<Store> {
        Ok(match self {
            StoreArgument::Directory(directory) => Store::open(directory).await?,
            StoreArgument::Database(url, schema) => {
                let options = PostgresOptions::new().schema(schema);
                let options = match password_file {
                    Some(file) => {
                        let read = std::fs::read_to_string(file);
                        let password = read.with_context(|| format!("cannot read {}", file.display()))?;
                        options.password(password.trim_end_matches(['\r', '\n']))
                    }
                    None => with_password(options),
                };
                options.connect(url).await?
            }
        })
    }

    /// The data directory, if it is one.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            StoreArgument::Directory(directory) => Some(directory),
            StoreArgument::Database(..) => None,
        }
    }

    /// The schema, if it is a database.
    pub(crate) fn schema(&self) -> Option<&str> {
        match self {
            StoreArgument::Directory(_) => None,
            StoreArgument::Database(_, schema) => Some(schema),
        }
    }

    /// The arguments that name this store to another process of this program.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        match self {
            StoreArgument::Directory(directory) => vec!["--store".into(), directory.into()],
            StoreArgument::Database(url, schema) => {
                vec!["--store".into(), url.into(), "--schema".into(), schema.into()]
            }
        }
    }

    /// The same, as a user types them. The password is left out.
    pub(crate) fn typed(&self) -> String {
        match self {
            StoreArgument::Database(_, schema) if schema != SCHEMA => {
                format!("--store {} --schema {}", quoted(self), quoted(schema))
            }
            _ => format!("--store {}", quoted(self)),
        }
    }
}

/// True if a store of this name is a database.
pub(crate) fn is_database(text: &str) -> bool {
    text.starts_with("postgres://") || text.starts_with("postgresql://")
}

/// Without the password.
impl fmt::Display for StoreArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreArgument::Directory(directory) => directory.display().fmt(f),
            StoreArgument::Database(url, _) => f.write_str(&without_password(url)),
        }
    }
}

/// As libpq does: the command line of a process can be read by other users.
fn with_password(options: PostgresOptions) -> PostgresOptions {
    match std::env::var("PGPASSWORD") {
        Ok(password) if !password.is_empty() => options.password(password),
        _ => options,
    }
}

/// Quotes an argument for a shell, if that is necessary.
pub(crate) fn quoted(text: impl fmt::Display) -> String {
    let text = text.to_string();
    match text.contains(|letter: char| letter.is_whitespace() || "'\"$&;()?*".contains(letter)) {
        true => format!("'{}'", text.replace('\'', r"'\''")),
        false => text,
    }
}

/// A connection string as it is printed: credentials without the password, and settings without a password.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "postgres://…".into() };
    let (credentials, rest) = match rest.split_once('@') {
        Some((credentials, rest)) => (Some(credentials), rest),
        None => (None, rest),
    };
    let user = credentials.map(|credentials| credentials.split_once(':').map_or(credentials, |(user, _)| user));
    let user = user.map(|user| format!("{user}@")).unwrap_or_default();
    let (base, settings) = rest.split_once('?').unwrap_or((rest, ""));
    let is_shown = |setting: &&str| !setting.is_empty() && !setting.to_ascii_lowercase().starts_with("pass");
    let settings: Vec<&str> = settings.split('&').filter(is_shown).collect();
    let settings = if settings.is_empty() { String::new() } else { format!("?{}", settings.join("&")) };
    format!("{scheme}://{user}{base}{settings}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        for (url, shown) in [
            ("postgres://me:hunter2@db/app", "postgres://me@db/app"),
            ("postgres://me@db:5433/app?sslmode=require", "postgres://me@db:5433/app?sslmode=require"),
            ("postgresql:///app?user=me&password=hunter2&host=/run", "postgresql:///app?user=me&host=/run"),
            ("postgres://me:hunt?er2@db/app", "postgres://me@db/app"),
            ("postgres://db", "postgres://db"),
        ] {
            let store = StoreArgument::new(url, None).unwrap();
            assert_eq!(store.to_string(), shown);
            assert!(!store.typed().contains("hunter2"), "{}", store.typed());
        }
    }

    #[test]
    fn a_schema_is_of_a_database() {
        assert!(StoreArgument::new("./data", Some("a".into())).is_err());
        let typed = StoreArgument::new("postgres://db?sslmode=require", Some("a".into())).unwrap().typed();
        assert_eq!(typed, "--store 'postgres://db?sslmode=require' --schema a");
    }
}
