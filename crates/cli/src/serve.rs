//! `latch serve`: a server on the namespaces of the configuration, from its start to a graceful end. It knows how the
//! process lives: logs, metrics, traces, signals. What is served is the business of the server crate.

mod logging;
mod measure;
mod traces;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{ArgMatches, Args};
use latchwork::claim::Claims;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use latchwork_server::{Access, Address, Api, Endpoint, Listen, Server, ServerBuilder, ServerError, TlsFiles, Workers};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::config::options::ServerOptions;
use crate::config::settings::{NamespaceStore, Settings};
use crate::config::work::WorkTable;
use crate::output::{Exit, Output, Problem};
use crate::serve::traces::{NewTraces, Traces};
use crate::signals::{ENDS, Signals};

/// The longest path of a directory in which a socket can be opened. The system allows about a hundred bytes for all.
const LONGEST: usize = 80;

#[derive(Args)]
pub(crate) struct Serve {
    #[command(flatten)]
    options: ServerOptions,
}

/// What is printed when the server listens.
#[derive(Serialize)]
struct Started {
    addresses: Vec<String>,
    namespaces: Vec<String>,
    pid: u32,
}

/// A namespace that is open.
struct Opened {
    name: String,
    store: Store,
    engine: Engine,
    workers: Workers,
    /// The claim workflows of the configuration, if there are some.
    claims: Option<Claims>,
    /// The data directory, if it has one.
    directory: Option<PathBuf>,
}

pub(crate) async fn run(serve: Serve, matches: &ArgMatches, output: &mut Output<'_>) -> Result<()> {
    let settings = Settings::read(&serve.options, matches)?;
    // A mistake in the configuration is reported before a store is opened.
    let (access, tls, endpoints) = (settings.access()?, settings.tls()?, settings.check_work()?);
    let (spans, traces) = settings.traces.collector()?.map(traces::prepare).unzip();
    logging::start(settings.log_format.value, &settings.log_level.value, spans)?;
    let mut ends = Signals::listen(&ENDS)?;
    let mut traces = traces.map(NewTraces::begin);
    let served = serve_all(&settings, (access, tls, endpoints), &mut ends, &mut traces, output).await;
    if let Some(traces) = traces {
        tokio::select! {
            () = traces.end() => {}
            _ = ends.next() => {}
        }
    }
    served
}

/// Serves until a signal asks for the end, or until a store stops.
async fn serve_all(
    settings: &Settings,
    (access, tls, endpoints): (Access, Option<TlsFiles>, BTreeMap<String, Endpoint>),
    ends: &mut Signals,
    traces: &mut Option<Traces>,
    output: &mut Output<'_>,
) -> Result<()> {
    let recorder = if settings.metrics.value { Some(measure::install()?) } else { None };
    let opened = open(settings, &endpoints).await?;
    let mut server = Server::builder().access(access).limits(settings.limits);
    for namespace in &opened {
        let api = Api::on(&namespace.engine).workers(&namespace.workers);
        server = server.namespace(&namespace.name, namespace.claims.iter().fold(api, Api::claims));
    }
    for address in &settings.listen.value {
        server = server.listen(match &tls {
            Some(files) => Listen::Tls(*address, files.clone()),
            None => Listen::Tcp(*address),
        });
    }
    let server = with_sockets(server, &opened, settings.socket.value);
    let server = match &recorder {
        Some(recorder) => {
            let recorder = recorder.clone();
            server.metrics(move || recorder.render())
        }
        None => server,
    };
    let server = match server.start().await {
        Ok(server) => server,
        Err(error) => {
            close(opened).await?;
            return Err(refused(error).into());
        }
    };
    let upkeep = recorder.map(|recorder| tokio::spawn(measure::keep_up(recorder, stores(&opened))));
    let told = tell(&server, &opened, output);
    let ended = if told.is_ok() { until_the_end(ends, &opened).await } else { None };
    tracing::info!("shutting down: requests that are under way finish");
    let finished = tokio::select! {
        finished = server.shutdown() => finished.context("the server did not end cleanly"),
        _ = ends.next() => {
            // There is no time for the last spans.
            *traces = None;
            Err(Problem::new(Exit::Failed, "a second signal ended the server at once").into())
        }
    };
    upkeep.into_iter().for_each(|upkeep| upkeep.abort());
    finished?;
    close(opened).await?;
    tracing::info!("ended");
    told?;
    match ended {
        Some(name) => Err(Problem::new(Exit::Failed, format!("the store of namespace {name:?} has stopped")).into()),
        None => Ok(()),
    }
}

/// Opens all stores, and starts an engine on each. If one fails, those before it are closed.
async fn open(settings: &Settings, endpoints: &BTreeMap<String, Endpoint>) -> Result<Vec<Opened>> {
    let mut opened = Vec::new();
    for (name, namespace) in &settings.namespaces {
        let namespace = &namespace.value;
        let is_new = namespace.store.directory().is_some_and(|directory| !directory.exists());
        match begin(name, namespace, &settings.work(name), endpoints).await {
            Ok(begun) => {
                let done = if is_new { "created and opened" } else { "opened" };
                tracing::info!(namespace = name, store = %namespace.store, "{done}");
                opened.push(begun);
            }
            Err(error) => {
                close(opened).await?;
                return Err(error);
            }
        }
    }
    Ok(opened)
}

/// Opens a store, and starts an engine on it, with its workers and claims.
async fn begin(
    name: &str,
    namespace: &NamespaceStore,
    work: &WorkTable,
    endpoints: &BTreeMap<String, Endpoint>,
) -> Result<Opened> {
    let texts = work.claims()?;
    let store = namespace.store.open_with(namespace.password_file.as_deref()).await?;
    let workers = work.workers(name, &store, endpoints)?;
    let engine = workers.register(Engine::on(&store).name(name)).start().await?;
    let directory = namespace.store.directory().map(Into::into);
    let mut opened = Opened { name: name.into(), store, engine, workers, claims: None, directory };
    if !texts.is_empty() {
        let claims = texts.into_iter().fold(Claims::on(&opened.engine), latchwork::claim::ClaimsBuilder::configure);
        match opened.workers.serve(claims).start().await {
            Ok(claims) => opened.claims = Some(claims),
            Err(error) => {
                close(vec![opened]).await?;
                return Err(Problem::new(Exit::Usage, format!("work.{name}.claims: {error}")).into());
            }
        }
    }
    Ok(opened)
}

/// Shuts down what is open. The engines may have ended before.
async fn close(opened: Vec<Opened>) -> Result<()> {
    for Opened { name, store, engine, .. } in opened {
        let ended = engine.shutdown().await;
        store.close().await.with_context(|| format!("the store of namespace {name:?} was not closed cleanly"))?;
        ended.with_context(|| format!("namespace {name:?} did not end cleanly"))?;
    }
    Ok(())
}

fn with_sockets(server: ServerBuilder, opened: &[Opened], are_wanted: bool) -> ServerBuilder {
    let directories = opened.iter().filter_map(|namespace| Some((namespace.directory.clone()?, &namespace.name)));
    let directories = directories.filter(|(directory, _)| {
        let fits = directory.as_os_str().len() <= LONGEST;
        if are_wanted && !fits {
            tracing::warn!(directory = %directory.display(), "the path is too long for a socket: none is opened there");
        }
        are_wanted && fits
    });
    directories.fold(server, |server, (directory, name)| server.listen(Listen::SocketOf(directory, name.clone())))
}

fn stores(opened: &[Opened]) -> Vec<(String, Store)> {
    opened.iter().map(|namespace| (namespace.name.clone(), namespace.store.clone())).collect()
}

/// A server that did not start: what the configuration asks for, or what the system refuses.
fn refused(error: ServerError) -> Problem {
    let exit = match error {
        ServerError::SocketInUse { .. } => Exit::Busy,
        ServerError::Listen { .. } | ServerError::End { .. } => Exit::Failed,
        _ => Exit::Usage,
    };
    let hint = match error {
        ServerError::Exposed { .. } | ServerError::PublicHost => {
            " (--token-file, --tls-cert and --tls-key; --insecure)"
        }
        _ => "",
    };
    Problem::new(exit, format!("{error}{hint}"))
}

fn tell(server: &Server, opened: &[Opened], output: &mut Output<'_>) -> Result<()> {
    let addresses: Vec<String> = server.addresses().iter().map(written).collect();
    addresses.iter().for_each(|address| tracing::debug!(address, "listening"));
    let namespaces = opened.iter().map(|namespace| namespace.name.clone()).collect();
    let started = Started { addresses, namespaces, pid: std::process::id() };
    output.one(&started, |text| {
        started.addresses.iter().for_each(|address| text.line(format!("Listening on {address}")));
    })?;
    output.flush()
}

/// An address as `--server` takes it.
fn written(address: &Address) -> String {
    match address {
        Address::Tcp(address) => format!("http://{address}"),
        Address::Tls(address) => format!("https://{address}"),
        Address::Socket(path) => format!("unix:{}", path.display()),
        other => format!("{other:?}"),
    }
}

/// Returns when a signal asks for the end, or with the namespace whose store has stopped.
async fn until_the_end(ends: &mut Signals, opened: &[Opened]) -> Option<String> {
    let mut stopped = JoinSet::new();
    for Opened { name, store, .. } in opened {
        let (name, store) = (name.clone(), store.clone());
        stopped.spawn(async move {
            store.ended().await;
            name
        });
    }
    tokio::select! {
        signal = ends.next() => {
            tracing::info!(signal = signal.as_str(), "a signal asks for the end");
            None
        }
        Some(Ok(name)) = stopped.join_next() => {
            tracing::error!(namespace = name, "the store has stopped");
            Some(name)
        }
    }
}
