//! Definitions: a name and an asynchronous function, with its types left behind.

use std::collections::HashMap;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json::{self, JsonError};
use crate::store::Timestamp;
use crate::workflow::record::{Execution, Labels, Status, Wait, WaitsFor};
use crate::workflow::update::{PublishedValues, Validator};
use crate::workflow::{Boxed, Ctx, Failure, Result, WorkflowError};

/// How long an execution is kept after its end, unless it is said.
pub(crate) const DEFAULT_KEEP: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Starts the definition of a workflow.
pub fn workflow(name: impl Into<String>) -> WorkflowBuilder {
    WorkflowBuilder { name: name.into(), timeout: None, keep: DEFAULT_KEEP, validators: HashMap::new() }
}

/// A workflow whose function is still to come.
#[derive(Clone)]
#[must_use = "a workflow needs a function to run"]
pub struct WorkflowBuilder {
    name: String,
    timeout: Option<Duration>,
    keep: Duration,
    validators: HashMap<String, Validator>,
}

impl WorkflowBuilder {
    /// How long an execution may take, from its start to its end.
    pub fn timeout(mut self, timeout: Duration) -> WorkflowBuilder {
        self.timeout = Some(timeout);
        self
    }

    /// How long an execution is kept after its end: seven days unless this is said. Until then its id is taken and its
    /// result can be asked for; then it is removed with everything it has left.
    pub fn keep(mut self, keep: Duration) -> WorkflowBuilder {
        self.keep = keep;
        self
    }

    /// Decides whether an update of this name may be sent, by what the execution has published so far: one that is
    /// refused is not recorded anywhere. The values that it was shown are still so when the update is stored.
    pub fn validate<R: DeserializeOwned>(
        mut self,
        update: &str,
        validator: impl Fn(&PublishedValues<'_>, &R) -> Result<(), Failure> + Send + Sync + 'static,
    ) -> WorkflowBuilder {
        let validator = move |published: &PublishedValues<'_>, request: &str| {
            validator(published, &Failure::read("the request", request)?)
        };
        self.validators.insert(update.into(), Arc::new(validator));
        self
    }

    /// What an execution does. The function may be run again from its beginning at any time: everything that is not
    /// the same each time belongs into a step or comes from the context.
    pub fn run<F, Fut, I, O>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
        O: Serialize + DeserializeOwned,
    {
        let begin = move |ctx: Ctx, input: &str| -> Result<Running, Failure> {
            let input = Failure::read("the input", input)?;
            let run = ctx.run.clone();
            let running = function(ctx, input);
            Ok(Box::pin(async move {
                let output = running.await.and_then(|output| {
                    let output = json::to_value(&output);
                    Ok(output.map_err(|error| Failure::no_json("the output", &error))?.to_string())
                });
                run.until_children_ended().await;
                output
            }))
        };
        let WorkflowBuilder { name, timeout, keep, validators } = self;
        let (finalizer, fits, begin) = (OnceLock::new(), json::fits::<I>, Box::new(begin));
        let definition = Definition { name, timeout, keep, validators, finalizer, fits, begin };
        Workflow { definition: Arc::new(definition), types: PhantomData }
    }
}

/// An execution at work. It ends with JSON text, or with a failure.
pub(crate) type Running = Boxed<'static, Result<String, Failure>>;

type Begin = dyn Fn(Ctx, &str) -> Result<Running, Failure> + Send + Sync;

pub(crate) struct Definition {
    pub(crate) name: String,
    pub(crate) timeout: Option<Duration>,
    pub(crate) keep: Duration,
    pub(crate) validators: HashMap<String, Validator>,
    /// What runs after any end of an execution.
    pub(crate) finalizer: OnceLock<Arc<Definition>>,
    fits: fn(&str) -> Result<(), JsonError>,
    pub(crate) begin: Box<Begin>,
}

impl Definition {
    /// Refuses an input, as JSON text, that the function cannot be given.
    pub(crate) fn check(&self, input: &str) -> Result<()> {
        (self.fits)(input).map_err(|cause| WorkflowError::Input { workflow: self.name.clone(), cause })
    }

    /// The first record of an execution that is started now. If it is to begin later, it waits until then.
    pub(crate) fn first_record(&self, input: String, labels: Labels, now: Timestamp, begins: Timestamp) -> Execution {
        let deadline_us = self.timeout.map(|timeout| begins.max(now).plus(timeout).0);
        let mut first = Execution { deadline_us, labels, ..Execution::new(&self.name, input, now) };
        if begins > now {
            let until_us = Some(begins.0);
            let wait = Wait { what: WaitsFor::Timer, since_us: now.0, until_us };
            (first.status, first.waits) = (Status::Waiting, vec![wait]);
            (first.timer_us, first.begins_us) = (until_us, until_us);
        }
        first
    }
}

/// A workflow: what is registered with an engine and started there.
pub struct Workflow<I, O> {
    pub(crate) definition: Arc<Definition>,
    types: PhantomData<fn(I) -> O>,
}

impl<I, O> Workflow<I, O> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.definition.name
    }
}

impl<I, O> Clone for Workflow<I, O> {
    fn clone(&self) -> Workflow<I, O> {
        Workflow { definition: self.definition.clone(), types: PhantomData }
    }
}

shown!(Workflow<I, O>, it => name: it.definition.name);

shown!(WorkflowBuilder, it => name: it.name);
