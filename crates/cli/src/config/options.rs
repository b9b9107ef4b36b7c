//! The options of a server on the command line, which `latch serve` and `latch config` share. Each has a variable, too.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};

#[derive(Args)]
pub(crate) struct ServerOptions {
    /// The configuration file; ./latchwork.toml if it exists.
    #[arg(long, env = "LATCH_CONFIG", hide_env_values = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// An address to listen on; 127.0.0.1:7420 by default. Addresses that other machines can reach need a token and
    /// TLS.
    #[arg(long, env = "LATCH_LISTEN", hide_env_values = true, value_delimiter = ',', value_name = "ADDRESS")]
    pub(crate) listen: Vec<String>,
    /// Serves one more namespace: its name and its store. The store of the namespace `default` is --store.
    #[arg(long, value_name = "NAME=DIRECTORY|URL", value_parser = pair)]
    pub(crate) add_namespace: Vec<(String, String)>,
    /// A TOML file with the hashes of the tokens that are valid: `latch token create` prints what goes there.
    #[arg(long, env = "LATCH_TOKEN_FILE", hide_env_values = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// The certificate and those between it and its authority, in PEM.
    #[arg(long, env = "LATCH_TLS_CERT", hide_env_values = true, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The private key of the certificate, in PEM.
    #[arg(long, env = "LATCH_TLS_KEY", hide_env_values = true, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Lets other machines in without TLS; and without a token, if there is none. For networks that you trust.
    #[arg(long, env = "LATCH_INSECURE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) insecure: bool,
    /// A name under which the server is reached, beside those of this machine.
    #[arg(long, env = "LATCH_HOSTS", hide_env_values = true, value_delimiter = ',', value_name = "HOST")]
    pub(crate) host: Vec<String>,
    /// An origin whose pages may use the server from a browser, with a token.
    #[arg(long, env = "LATCH_ORIGINS", hide_env_values = true, value_delimiter = ',', value_name = "ORIGIN")]
    pub(crate) origin: Vec<String>,
    /// Opens no socket in the data directories.
    #[arg(long, env = "LATCH_NO_SOCKET", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) no_socket: bool,
    /// Serves no /metrics.
    #[arg(long, env = "LATCH_NO_METRICS", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) no_metrics: bool,
    /// A limit, for example body_bytes=4194304 or wait=30s.
    #[arg(long, env = "LATCH_LIMITS", hide_env_values = true, value_delimiter = ',', value_name = "NAME=VALUE",
        value_parser = pair)]
    pub(crate) limit: Vec<(String, String)>,
    /// Sends traces to an OpenTelemetry collector at this address, by OTLP over HTTP: http://127.0.0.1:4318.
    #[arg(long, env = "LATCH_TRACES_ENDPOINT", hide_env_values = true, value_name = "URL")]
    pub(crate) traces_endpoint: Option<String>,
    /// The name of the service in traces; `latch` by default.
    #[arg(long, env = "LATCH_TRACES_SERVICE", hide_env_values = true, value_name = "NAME")]
    pub(crate) traces_service: Option<String>,
    /// The share of the traces that is recorded, from 0 to 1; 1 by default.
    #[arg(long, env = "LATCH_TRACES_RATIO", hide_env_values = true, value_name = "RATIO")]
    pub(crate) traces_ratio: Option<f64>,
    /// A file with headers for the collector, which may be secret: `Name: value`, one a line.
    #[arg(long, env = "LATCH_TRACES_HEADERS_FILE", hide_env_values = true, value_name = "FILE")]
    pub(crate) traces_headers_file: Option<PathBuf>,
    /// How log lines are written.
    #[arg(long, env = "LATCH_LOG_FORMAT", hide_env_values = true, value_enum, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
    /// What is logged: error, warn, info, debug or trace; or levels by target, as in latch=debug,hyper=warn.
    #[arg(long, env = "LATCH_LOG_LEVEL", hide_env_values = true, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    pub(crate) fn word(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }
}

/// `NAME=VALUE`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} has no `=`: write NAME=VALUE"))?;
    match name.is_empty() || value.is_empty() {
        true => Err(format!("{text:?}: write NAME=VALUE")),
        false => Ok((name.into(), value.into())),
    }
}
