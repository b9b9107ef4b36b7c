//! The configuration of a server that is in force: the file, over it the environment, over that the flags. Each value
//! knows where it comes from. What the values do is decided elsewhere.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ArgMatches;
use clap::parser::ValueSource;
use latchwork_server::{Access, Endpoint, Limits, Token};
use serde_json::json;

use crate::config::file::{self, ConfigurationFile, DEFAULT_FILE, FullNamespace};
use crate::config::options::{LogFormat, ServerOptions, pair};
use crate::config::traces::TraceSettings;
use crate::config::work::{WorkTable, WorkerTable};
use crate::config::{Printed, limit};
use crate::output::{Exit, Problem};
use crate::store::{DEFAULT_DIRECTORY, StoreArgument};
use crate::target::store_argument;

/// The name of the namespace of `--store`.
const DEFAULT_NAMESPACE: &str = "default";

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag(String),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// A value, and where it comes from.
#[derive(Debug, Clone)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    pub(crate) origin: Origin,
}

impl<T> Setting<T> {
    pub(crate) fn new(value: T) -> Setting<T> {
        Setting { value, origin: Origin::Default }
    }

    /// Replaces the value by that of a higher layer, if it has one.
    pub(crate) fn or(self, over: Option<T>, origin: impl FnOnce() -> Origin) -> Setting<T> {
        match over {
            Some(value) => Setting { value, origin: origin() },
            None => self,
        }
    }
}

/// The store of a namespace.
#[derive(Clone)]
pub(crate) struct NamespaceStore {
    pub(crate) store: StoreArgument,
    pub(crate) password_file: Option<PathBuf>,
}

/// The configuration in force.
pub(crate) struct Settings {
    /// The file that was read, if any.
    pub(crate) file: Option<PathBuf>,
    pub(crate) namespaces: BTreeMap<String, Setting<NamespaceStore>>,
    pub(crate) listen: Setting<Vec<SocketAddr>>,
    hosts: Setting<Vec<String>>,
    origins: Setting<Vec<String>>,
    insecure: Setting<bool>,
    pub(crate) socket: Setting<bool>,
    pub(crate) metrics: Setting<bool>,
    token_file: Setting<Option<PathBuf>>,
    tls_certificate: Setting<Option<PathBuf>>,
    tls_key: Setting<Option<PathBuf>>,
    pub(crate) log_format: Setting<LogFormat>,
    pub(crate) log_level: Setting<String>,
    pub(crate) traces: TraceSettings,
    pub(crate) limits: Limits,
    limit_origins: BTreeMap<&'static str, Origin>,
    tokens: Vec<Setting<Token>>,
    workers: BTreeMap<String, Setting<WorkerTable>>,
    work: BTreeMap<String, Setting<WorkTable>>,
}

/// Looks up where the options of the command line come from.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a>(&'a ArgMatches);

impl Given<'_> {
    /// A value that was given, on the command line or in a variable.
    fn value<T>(self, id: &str, value: Option<T>) -> Option<(T, Origin)> {
        let origin = match self.0.value_source(id)? {
            ValueSource::CommandLine => Origin::Flag(format!("--{}", id.replace('_', "-"))),
            ValueSource::EnvVariable => Origin::Environment(variable(id)),
            _ => return None,
        };
        Some((value?, origin))
    }

    pub(crate) fn over<T>(self, setting: Setting<T>, id: &str, value: Option<T>) -> Setting<T> {
        match self.value(id, value) {
            Some((value, origin)) => Setting { value, origin },
            None => setting,
        }
    }
}

/// The variable of an option.
fn variable(id: &str) -> String {
    let plural = matches!(id, "host" | "origin" | "limit");
    format!("LATCH_{}{}", id.to_uppercase(), if plural { "S" } else { "" })
}

fn usage(why: impl Into<String>) -> Problem {
    Problem::new(Exit::Usage, why)
}

impl Settings {
    /// Reads the file, the environment and the flags.
    pub(crate) fn read(options: &ServerOptions, matches: &ArgMatches) -> Result<Settings> {
        let given = Given(matches);
        let path = options.config.clone().or_else(|| Some(DEFAULT_FILE.into()).filter(|file: &PathBuf| file.exists()));
        let file = path.as_deref().map(ConfigurationFile::read).transpose()?.unwrap_or_default();
        let from_file = || Origin::File(path.clone().unwrap_or_default());
        let list = |own: Option<Vec<String>>, id: &str, flags: &Vec<String>| {
            let set = Setting::new(Vec::new()).or(own, from_file);
            given.over(set, id, Some(flags.clone()))
        };
        let path_of = |own: Option<PathBuf>, id: &str, flag: &Option<PathBuf>| {
            let set = Setting::new(None).or(own.map(Some), from_file);
            given.over(set, id, Some(flag.clone()))
        };
        let off = |own: Option<bool>, id: &str, flag: bool| {
            given.over(Setting::new(true).or(own, from_file), id, Some(!flag))
        };
        let insecure = Setting::new(false).or(file.insecure, from_file);
        let format = file.log.format.as_deref().map(log_format).transpose()?;
        let log_format = Setting::new(LogFormat::Text).or(format, from_file);
        let log_level = Setting::new("info".to_string()).or(file.log.level, from_file);
        let token_file = path_of(file.token_file, "token_file", &options.token_file);
        let (limits, limit_origins) = limits(&file.limits, options, given, from_file)?;
        Ok(Settings {
            namespaces: namespaces(file.namespaces, options, given, from_file)?,
            listen: addresses(list(file.listen, "listen", &options.listen))?,
            hosts: list(file.hosts, "host", &options.host),
            origins: list(file.origins, "origin", &options.origin),
            insecure: given.over(insecure, "insecure", Some(options.insecure)),
            socket: off(file.socket, "no_socket", options.no_socket),
            metrics: off(file.metrics, "no_metrics", options.no_metrics),
            tls_certificate: path_of(file.tls.certificate, "tls_cert", &options.tls_cert),
            tls_key: path_of(file.tls.key, "tls_key", &options.tls_key),
            log_format: given.over(log_format, "log_format", options.log_format),
            traces: TraceSettings::read(file.traces, options, given, from_file),
            log_level: given.over(log_level, "log_level", options.log_level.clone()),
            tokens: tokens(file.tokens, &token_file, from_file)?,
            workers: of_file(file.workers, from_file),
            work: of_file(file.work, from_file),
            token_file,
            limits,
            limit_origins,
            file: path,
        })
    }

    /// Who may use the server.
    pub(crate) fn access(&self) -> Result<Access, Problem> {
        let wrong = |error: latchwork_server::AccessError| usage(error.to_string());
        let mut access = Access::local();
        for host in &self.hosts.value {
            access = access.host(host).map_err(wrong)?;
        }
        for origin in &self.origins.value {
            access = access.origin(origin).map_err(wrong)?;
        }
        for token in &self.tokens {
            access = access.token(token.value.clone()).map_err(wrong)?;
        }
        Ok(if self.insecure.value { access.insecure() } else { access })
    }

    /// The files of the certificate, if there is one.
    pub(crate) fn tls(&self) -> Result<Option<latchwork_server::TlsFiles>, Problem> {
        match (&self.tls_certificate.value, &self.tls_key.value) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                Ok(Some(latchwork_server::TlsFiles { certificate: certificate.clone(), key: key.clone() }))
            }
            (Some(_), None) => Err(usage("a certificate needs its key: --tls-key")),
            (None, Some(_)) => Err(usage("a key needs its certificate: --tls-cert")),
        }
    }

    /// The endpoints of workers, by their names.
    pub(crate) fn endpoints(&self) -> Result<BTreeMap<String, Endpoint>, Problem> {
        self.workers.iter().map(|(name, table)| Ok((name.clone(), table.value.endpoint(name)?))).collect()
    }

    /// What workers do for a namespace.
    pub(crate) fn work(&self, namespace: &str) -> WorkTable {
        self.work.get(namespace).map(|work| work.value.clone()).unwrap_or_default()
    }

    /// Checks everything about workers that needs no store.
    pub(crate) fn check_work(&self) -> Result<BTreeMap<String, Endpoint>, Problem> {
        if let Some(name) = self.work.keys().find(|name| !self.namespaces.contains_key(*name)) {
            return Err(usage(format!("work.{name}: there is no namespace {name:?}")));
        }
        let endpoints = self.endpoints()?;
        for (name, work) in &self.work {
            work.value.check(name, &endpoints)?;
            work.value.claims()?;
        }
        Ok(endpoints)
    }

    /// All settings as they are printed, without secrets.
    pub(crate) fn printed(&self) -> Vec<Printed> {
        let mut all = Vec::new();
        for (name, namespace) in &self.namespaces {
            let NamespaceStore { store, password_file } = &namespace.value;
            let mut row = |part: &str, value| {
                all.push(Printed::new(format!("namespaces.{name}.{part}"), value, &namespace.origin));
            };
            row("store", json!(store.to_string()));
            store.schema().into_iter().for_each(|schema| row("schema", json!(schema)));
            password_file.iter().for_each(|file| row("password_file", json!(file.display().to_string())));
        }
        let addresses: Vec<String> = self.listen.value.iter().map(SocketAddr::to_string).collect();
        all.push(Printed::new("listen", json!(addresses), &self.listen.origin));
        all.push(Printed::new("hosts", json!(self.hosts.value), &self.hosts.origin));
        all.push(Printed::new("origins", json!(self.origins.value), &self.origins.origin));
        all.push(Printed::new("insecure", json!(self.insecure.value), &self.insecure.origin));
        all.push(Printed::new("socket", json!(self.socket.value), &self.socket.origin));
        all.push(Printed::new("metrics", json!(self.metrics.value), &self.metrics.origin));
        for (name, path) in
            [("tls.certificate", &self.tls_certificate), ("tls.key", &self.tls_key), ("token_file", &self.token_file)]
        {
            all.push(Printed::path(name, path.value.as_deref(), &path.origin));
        }
        for Setting { value, origin } in &self.tokens {
            let shown = json!({"role": value.role(), "namespaces": value.valid_in(), "hash": "(not shown)"});
            all.push(Printed::new(format!("tokens.{}", value.name()), shown, origin));
        }
        for (name, Setting { value, origin }) in &self.workers {
            all.push(Printed::new(format!("workers.{name}"), value.shown(), origin));
        }
        for (name, Setting { value, origin }) in &self.work {
            all.push(Printed::new(format!("work.{name}"), value.shown(), origin));
        }
        all.push(Printed::new("log.format", json!(self.log_format.value.word()), &self.log_format.origin));
        all.push(Printed::new("log.level", json!(self.log_level.value), &self.log_level.origin));
        all.extend(self.traces.printed());
        for name in limit::names() {
            let origin = self.limit_origins.get(name).unwrap_or(&Origin::Default);
            all.push(Printed::new(format!("limits.{name}"), limit::shown(self.limits, name), origin));
        }
        all
    }
}

/// A table that only the file has.
fn of_file<T>(tables: BTreeMap<String, T>, from_file: impl Fn() -> Origin) -> BTreeMap<String, Setting<T>> {
    tables.into_iter().map(|(name, value)| (name, Setting { value, origin: from_file() })).collect()
}

fn log_format(word: &str) -> Result<LogFormat, Problem> {
    clap::ValueEnum::from_str(word, false).map_err(|_| usage(format!("log.format is text or json, not {word:?}")))
}

fn addresses(texts: Setting<Vec<String>>) -> Result<Setting<Vec<SocketAddr>>, Problem> {
    let read = |text: &String| {
        text.parse().map_err(|_| usage(format!("{text:?} is not an address to listen on: write 127.0.0.1:7420")))
    };
    let Setting { value, origin } = texts;
    let value: Vec<SocketAddr> = value.iter().map(read).collect::<Result<_, Problem>>()?;
    // A server without an address would be reached by its sockets alone.
    let value = if value.is_empty() && origin == Origin::Default { vec![default_address()] } else { value };
    Ok(Setting { value, origin })
}

fn default_address() -> SocketAddr {
    match latchwork_server::Listen::default() {
        latchwork_server::Listen::Tcp(address) => address,
        _ => (std::net::Ipv4Addr::LOCALHOST, 7420).into(),
    }
}

type SetLimits = (Limits, BTreeMap<&'static str, Origin>);

fn limits(
    file: &BTreeMap<String, toml::Value>,
    options: &ServerOptions,
    given: Given<'_>,
    from_file: impl Fn() -> Origin,
) -> Result<SetLimits, Problem> {
    let (mut limits, mut origins) = (Limits::default(), BTreeMap::new());
    for (name, value) in file {
        origins.insert(limit::set_value(&mut limits, name, value).map_err(usage)?, from_file());
    }
    let mut layers = Vec::new();
    if let Some((set, origin)) = given.value("limit", Some(&options.limit)) {
        // One flag sets some limits. The others keep what the variable says.
        if let (Origin::Flag(_), Ok(text)) = (&origin, std::env::var(variable("limit"))) {
            let set: Result<Vec<_>, _> = text.split(',').filter(|pair| !pair.is_empty()).map(pair).collect();
            layers.push((set.map_err(usage)?, Origin::Environment(variable("limit"))));
        }
        layers.push((set.clone(), origin));
    }
    for (set, origin) in layers {
        for (name, text) in set {
            origins.insert(limit::set(&mut limits, &name, &text).map_err(usage)?, origin.clone());
        }
    }
    Ok((limits, origins))
}

fn tokens(
    own: Vec<Token>,
    token_file: &Setting<Option<PathBuf>>,
    from_file: impl Fn() -> Origin,
) -> Result<Vec<Setting<Token>>, Problem> {
    let mut all: Vec<_> = own.into_iter().map(|value| Setting { value, origin: from_file() }).collect();
    if let Some(path) = &token_file.value {
        let more = file::tokens(path)?.into_iter();
        all.extend(more.map(|value| Setting { value, origin: Origin::File(path.clone()) }));
    }
    // A file is read without the checks of a token that is made by hand.
    for Setting { value, .. } in &all {
        Token::new(value.name(), value.hash(), value.role()).map_err(|error| usage(error.to_string()))?;
    }
    Ok(all)
}

fn namespaces(
    file: BTreeMap<String, file::NamespaceTable>,
    options: &ServerOptions,
    given: Given<'_>,
    from_file: impl Fn() -> Origin,
) -> Result<BTreeMap<String, Setting<NamespaceStore>>, Problem> {
    let mut all = BTreeMap::new();
    for (name, table) in file {
        let FullNamespace { store, schema, password_file } = table.full(Path::new(""));
        let store = StoreArgument::new(store, schema).map_err(|why| usage(format!("namespaces.{name}: {why}")))?;
        all.insert(name, Setting { value: NamespaceStore { store, password_file }, origin: from_file() });
    }
    for (name, store) in &options.add_namespace {
        let store = StoreArgument::new(store, None).map_err(usage)?;
        let origin = Origin::Flag("--add-namespace".into());
        all.insert(name.clone(), Setting { value: NamespaceStore { store, password_file: None }, origin });
    }
    let one = |id: &str| given.0.try_get_one::<OsString>(id).ok().flatten().cloned();
    let schema = given.0.try_get_one::<String>("schema").ok().flatten().cloned();
    let store = one("store").filter(|store| !store.is_empty());
    if let Some((store, origin)) = given.value("store", store) {
        let store = store_argument(store, schema, given.0)?;
        all.insert(DEFAULT_NAMESPACE.into(), Setting { value: NamespaceStore { store, password_file: None }, origin });
    } else if let Some((_, Origin::Flag(_))) = given.value("schema", schema) {
        return Err(usage("--schema needs a database: --store postgres://…"));
    }
    if all.is_empty() {
        let store = StoreArgument::new(DEFAULT_DIRECTORY, None).map_err(usage)?;
        all.insert(DEFAULT_NAMESPACE.into(), Setting::new(NamespaceStore { store, password_file: None }));
    }
    Ok(all)
}
