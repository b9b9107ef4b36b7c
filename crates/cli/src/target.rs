//! What a command works on: a store, which it opens itself, or a server. A data directory that a process has open is
//! reached through the socket in it, if that process serves one.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use latchwork::store::{Store, StoreError};

use crate::client::Client;
use crate::output::{Exit, Problem};
use crate::store::{DEFAULT_DIRECTORY, StoreArgument, is_database};

/// The name of the socket in a data directory.
const SOCKET: &str = "api.sock";

/// The heading of the options that every command has.
pub(crate) const COMMON: &str = "Common options";

/// The options that say what a command works on.
#[derive(Args)]
pub(crate) struct TargetOptions {
    /// The data directory, or a PostgreSQL database: postgres://user@host/database. PGPASSWORD is the password. The
    /// default is ./latchwork-data.
    #[arg(
        long,
        global = true,
        help_heading = COMMON,
        env = "LATCH_STORE",
        hide_env_values = true,
        value_name = "DIRECTORY|URL",
    )]
    store: Option<OsString>,
    /// The schema of the database that holds the store; latchwork by default.
    #[arg(
        long,
        global = true,
        help_heading = COMMON,
        env = "LATCH_SCHEMA",
        hide_env_values = true,
        value_name = "NAME",
    )]
    schema: Option<String>,
    /// A server in place of a store: http://…, https://… or unix:PATH. LATCH_TOKEN is the token.
    #[arg(long, global = true, help_heading = COMMON, env = "LATCH_SERVER", hide_env_values = true, value_name = "URL")]
    server: Option<String>,
    /// The namespace of the server; its default namespace without this.
    #[arg(
        long,
        global = true,
        help_heading = COMMON,
        env = "LATCH_NAMESPACE",
        hide_env_values = true,
        value_name = "NAME",
    )]
    namespace: Option<String>,
    /// A file in PEM with the authorities that the server's certificate may come from, in place of those of the system.
    #[arg(
        long,
        global = true,
        help_heading = COMMON,
        env = "LATCH_TLS_CA",
        hide_env_values = true,
        value_name = "FILE",
    )]
    tls_ca: Option<PathBuf>,
}

impl TargetOptions {
    /// The target. Of a store and a server, a flag goes before a variable.
    pub(crate) fn read(self, matches: &ArgMatches) -> Result<Target, Problem> {
        let usage = |why: &str| Problem::new(Exit::Usage, why);
        let is_flag = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let TargetOptions { store, schema, server, namespace, tls_ca } = self;
        // A variable that is empty says nothing.
        let said = |text: &String| !text.is_empty();
        let (store, server) = (store.filter(|store| !store.is_empty()), server.filter(said));
        let (schema, namespace) = (schema.filter(said), namespace.filter(said));
        let server = match (server, &store) {
            (Some(_), Some(_)) if is_flag("server") == is_flag("store") => {
                let both = "a command works on a store or on a server: give --store or --server, not both";
                return Err(usage(both));
            }
            (Some(_), Some(_)) if is_flag("store") => None,
            (server, _) => server,
        };
        if let Some(server) = server {
            return Ok(Target::Server(Client::new(&server, namespace, tls_ca.as_deref())?));
        }
        if is_flag("namespace") {
            return Err(usage("--namespace needs a server: --server URL"));
        }
        let is_named = store.is_some();
        let store = store.unwrap_or_else(|| DEFAULT_DIRECTORY.into());
        let argument = store_argument(store, schema, matches)?;
        Ok(Target::Store { argument, is_named })
    }
}

/// The store of `--store` and `--schema`. A variable is for the stores that it fits.
pub(crate) fn store_argument(
    store: OsString,
    schema: Option<String>,
    matches: &ArgMatches,
) -> Result<StoreArgument, Problem> {
    let is_flag = matches.value_source("schema") == Some(ValueSource::CommandLine);
    let fits = is_flag || store.to_str().is_some_and(is_database);
    let schema = schema.filter(|schema| fits && !schema.is_empty());
    StoreArgument::new(store, schema).map_err(|why| Problem::new(Exit::Usage, why))
}

/// What a command works on.
pub(crate) enum Target {
    Store {
        argument: StoreArgument,
        /// True if the store was named; false for the default directory.
        is_named: bool,
    },
    Server(Client),
}

/// A target that was opened to look at it.
pub(crate) enum Looked {
    Store(Store),
    Server(Client),
}

impl Target {
    /// The store, for a command that works on nothing else.
    pub(crate) fn store(&self, command: &str) -> Result<&StoreArgument, Problem> {
        match self {
            Target::Store { argument, .. } => Ok(argument),
            Target::Server(_) => {
                let why = format!("latch {command} works on a store, not on a server: use --store");
                Err(Problem::new(Exit::Usage, why))
            }
        }
    }

    /// Opens the store to look at it, or finds the server that has it open.
    pub(crate) async fn look(&self) -> Result<Looked> {
        match self {
            Target::Server(client) => Ok(Looked::Server(client.clone())),
            Target::Store { argument, .. } => match argument.look().await {
                Ok(store) => Ok(Looked::Store(store)),
                Err(error) => match live(argument, &error).await {
                    Some(client) => Ok(Looked::Server(client)),
                    None => Err(error),
                },
            },
        }
    }
}

/// The server that has a directory open, if this is why it could not be opened.
pub(crate) async fn live(argument: &StoreArgument, error: &anyhow::Error) -> Option<Client> {
    let Some(StoreError::Locked { .. }) = error.downcast_ref::<StoreError>() else { return None };
    let socket: PathBuf = argument.directory()?.join(SOCKET);
    let client = Client::socket(socket);
    // A process that was killed leaves its socket behind.
    client.is_listening().await.then_some(client)
}
