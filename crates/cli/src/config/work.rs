//! The workers in the configuration of a server: the endpoints that are called, and which steps, actions and
//! after-effects of a namespace are done by them or by workers that take tasks. It knows the tables of the file and
//! what the server makes of them. What it says about a mistake names the place, and no secret.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use latchwork::store::Store;
use latchwork_server::{Endpoint, EndpointLimits, Worker, Workers};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::output::{Exit, Problem};
use crate::time;

/// `[workers.NAME]`: an endpoint.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerTable {
    url: String,
    /// A file with the secrets that sign the calls, one a line.
    secret_file: Option<PathBuf>,
    /// A file with the certificates that are trusted instead of those of the system.
    tls_ca: Option<PathBuf>,
    /// Allows plain HTTP to another machine.
    #[serde(default)]
    insecure: bool,
    timeout: Option<String>,
    attempts: Option<u32>,
    pause: Option<String>,
    longest_pause: Option<String>,
    concurrency: Option<usize>,
    answer_bytes: Option<usize>,
}

/// `[work.NAMESPACE]`: what is done by workers.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkTable {
    /// The files of claim workflows.
    #[serde(default)]
    claims: Vec<PathBuf>,
    #[serde(default)]
    actions: BTreeMap<String, DoneBy>,
    #[serde(default)]
    after_effects: BTreeMap<String, DoneBy>,
    /// The steps of workflows, one after the other.
    #[serde(default)]
    workflows: BTreeMap<String, Vec<StepTable>>,
}

/// Who does something: `{ worker = "NAME" }` or `{ tasks = "KIND" }`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DoneBy {
    worker: Option<String>,
    tasks: Option<String>,
}

/// A step of a workflow, and who does it.
#[derive(Debug, Clone, Deserialize)]
#[serde(from = "StepFields")]
pub(crate) struct StepTable {
    step: String,
    by: DoneBy,
}

/// A step, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepFields {
    step: String,
    worker: Option<String>,
    tasks: Option<String>,
}

impl From<StepFields> for StepTable {
    fn from(StepFields { step, worker, tasks }: StepFields) -> StepTable {
        StepTable { step, by: DoneBy { worker, tasks } }
    }
}

fn usage(why: impl Into<String>) -> Problem {
    Problem::new(Exit::Usage, why)
}

fn text(path: &Path) -> Result<String, Problem> {
    std::fs::read_to_string(path).map_err(|error| {
        let exit = if error.kind() == std::io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Failed };
        let file = path.display().to_string();
        Problem::new(exit, format!("cannot read {file}: {error}")).with("file", file)
    })
}

impl WorkerTable {
    /// Makes the paths relative to a directory.
    pub(crate) fn based(&mut self, base: &Path) {
        for path in [&mut self.secret_file, &mut self.tls_ca].into_iter().flatten() {
            *path = base.join(&path);
        }
    }

    /// The endpoint of this name.
    pub(crate) fn endpoint(&self, name: &str) -> Result<Endpoint, Problem> {
        let wrong = |why: &dyn std::fmt::Display| usage(format!("workers.{name}: {why}"));
        let mut limits = EndpointLimits::default();
        let times = [
            (&self.timeout, &mut limits.timeout),
            (&self.pause, &mut limits.pause),
            (&self.longest_pause, &mut limits.longest_pause),
        ];
        for (text, place) in times {
            let Some(text) = text else { continue };
            *place = time::duration(text).map_err(|why| wrong(&why))?;
        }
        limits.attempts = self.attempts.unwrap_or(limits.attempts);
        limits.concurrency = self.concurrency.unwrap_or(limits.concurrency);
        limits.answer_bytes = self.answer_bytes.unwrap_or(limits.answer_bytes);
        if limits.attempts == 0 || limits.concurrency == 0 || limits.answer_bytes == 0 {
            return Err(wrong(&"attempts, concurrency and answer_bytes are numbers above 0"));
        }
        let mut builder = Endpoint::builder(&self.url).limits(limits);
        if let Some(file) = &self.secret_file {
            builder = builder.secret(text(file)?);
        }
        if let Some(file) = &self.tls_ca {
            builder = builder.authorities(file);
        }
        let builder = if self.insecure { builder.insecure() } else { builder };
        builder.build().map_err(|error| wrong(&error))
    }

    /// As it is printed. The path of an address may be a secret.
    pub(crate) fn shown(&self) -> Value {
        let place = self.url.split_once("://").map_or("", |(_, rest)| rest);
        let host = place.split(['/', '?', '#']).next().unwrap_or_default();
        let file = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        json!({"host": host, "secret_file": file(&self.secret_file), "tls_ca": file(&self.tls_ca)})
    }
}

impl WorkTable {
    /// Makes the paths relative to a directory.
    pub(crate) fn based(&mut self, base: &Path) {
        self.claims.iter_mut().for_each(|path| *path = base.join(&path));
    }

    /// The texts of the claim workflows.
    pub(crate) fn claims(&self) -> Result<Vec<String>, Problem> {
        self.claims.iter().map(|path| text(path)).collect()
    }

    /// Checks that each worker is known.
    pub(crate) fn check(&self, namespace: &str, endpoints: &BTreeMap<String, Endpoint>) -> Result<(), Problem> {
        if self.claims.is_empty() && !(self.actions.is_empty() && self.after_effects.is_empty()) {
            let why = "actions and after-effects belong to claim workflows: name their files, claims = [\"…\"]";
            return Err(usage(format!("work.{namespace}: {why}")));
        }
        for (name, steps) in &self.workflows {
            if steps.is_empty() {
                return Err(usage(format!("work.{namespace}.workflows.{name}: a workflow has at least one step")));
            }
        }
        self.all().try_for_each(|(place, by)| by.found(&format!("work.{namespace}.{place}"), endpoints).map(drop))
    }

    /// Everything that is done by workers, with its place.
    fn all(&self) -> impl Iterator<Item = (String, &DoneBy)> {
        let steps = self.workflows.iter().flat_map(|(name, steps)| {
            steps.iter().map(move |step| (format!("workflows.{name}.{}", step.step), &step.by))
        });
        let actions = self.actions.iter().map(|(name, by)| (format!("actions.{name}"), by));
        steps.chain(actions).chain(self.after_effects.iter().map(|(name, by)| (format!("after_effects.{name}"), by)))
    }

    /// The workers on a store.
    pub(crate) fn workers(
        &self,
        namespace: &str,
        store: &Store,
        endpoints: &BTreeMap<String, Endpoint>,
    ) -> Result<Workers, Problem> {
        self.check(namespace, endpoints)?;
        let mut workers = Workers::on(store);
        let worker = |workers: &Workers, by: &DoneBy| {
            Ok::<Worker, Problem>(match by.found(namespace, endpoints)? {
                KnownWorker::Endpoint(endpoint) => workers.endpoint(endpoint),
                KnownWorker::Tasks(kind) => workers.tasks(kind),
            })
        };
        for (name, steps) in &self.workflows {
            let steps = steps.iter().map(|step| Ok((step.step.clone(), worker(&workers, &step.by)?)));
            let steps: Vec<_> = steps.collect::<Result<_, Problem>>()?;
            workers = workers.workflow(name, steps);
        }
        for (name, by) in &self.actions {
            let by = worker(&workers, by)?;
            workers = workers.action(name, by);
        }
        for (name, by) in &self.after_effects {
            let by = worker(&workers, by)?;
            workers = workers.after_effect(name, by);
        }
        Ok(workers)
    }

    /// As it is printed.
    pub(crate) fn shown(&self) -> Value {
        let files: Vec<String> = self.claims.iter().map(|path| path.display().to_string()).collect();
        let names = |all: &BTreeMap<String, DoneBy>| all.keys().cloned().collect::<Vec<_>>();
        let workflows: Vec<&String> = self.workflows.keys().collect();
        json!({
            "claims": files,
            "actions": names(&self.actions),
            "after_effects": names(&self.after_effects),
            "workflows": workflows,
        })
    }
}

/// Who does something, if it is known.
enum KnownWorker<'a> {
    Endpoint(&'a Endpoint),
    Tasks(&'a str),
}

impl DoneBy {
    fn found<'a>(&'a self, place: &str, endpoints: &'a BTreeMap<String, Endpoint>) -> Result<KnownWorker<'a>, Problem> {
        match (&self.worker, &self.tasks) {
            (Some(name), None) => {
                let unknown = || usage(format!("{place}: there is no worker {name:?}; add [workers.{name}]"));
                endpoints.get(name).map(KnownWorker::Endpoint).ok_or_else(unknown)
            }
            (None, Some(kind)) if (1..=200).contains(&kind.len()) => Ok(KnownWorker::Tasks(kind)),
            (None, Some(_)) => Err(usage(format!("{place}: the kind of a task has 1 to 200 bytes"))),
            _ => Err(usage(format!("{place}: give either worker = \"NAME\" or tasks = \"KIND\""))),
        }
    }
}
