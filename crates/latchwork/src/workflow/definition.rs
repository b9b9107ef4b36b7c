//! Definitions: a name and an asynchronous function, without its types.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json::{self, JsonError};
use crate::micros;
use crate::node::KnownWorkflow;
use crate::store::Timestamp;
use crate::workflow::admission::policy::{Batch, Debounce, RateLimit, WhenFull};
use crate::workflow::admission::{Policy, StartNeeds, list};
use crate::workflow::ctx::update::{PublishedValues, UpdateValidator};
use crate::workflow::engine::check_name;
use crate::workflow::stored::record::{Execution, Labels, StoredStatus, Wait, WaitsFor};
use crate::workflow::{Boxed, Ctx, Failure, Result, WorkflowError};

/// How long an execution is kept after its end by default.
pub(crate) const DEFAULT_KEEP: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Starts the definition of a workflow.
///
/// ```
/// # use latchwork::workflow::{Ctx, workflow};
/// let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
/// ```
pub fn workflow(name: impl Into<String>) -> WorkflowBuilder {
    let (name, validators, policy) = (name.into(), HashMap::new(), Policy::default());
    let (version, continues) = (FIRST_VERSION, Vec::new());
    WorkflowBuilder { name, version, continues, timeout: None, keep: DEFAULT_KEEP, validators, policy }
}

/// The version of a definition that names none.
pub(crate) const FIRST_VERSION: u32 = 1;

/// A workflow that has no function yet.
#[derive(Clone)]
#[must_use = "a workflow needs a function to run"]
pub struct WorkflowBuilder {
    name: String,
    version: u32,
    continues: Vec<u32>,
    timeout: Option<Duration>,
    keep: Duration,
    validators: HashMap<String, UpdateValidator>,
    policy: Policy,
}

impl WorkflowBuilder {
    /// The version of this code; the default is 1. It is stored with every execution that is started under it. Code of
    /// another version does not run the execution, unless it [continues](WorkflowBuilder::continues) that version: the
    /// execution is left to the nodes that have the version. An engine can register several versions of a workflow; new
    /// executions are started under the highest.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// let order: Workflow<u64, u64> = workflow("order").version(2).run(async |_: Ctx, price: u64| Ok(price));
    /// ```
    pub fn version(mut self, version: u32) -> WorkflowBuilder {
        self.version = version;
        self
    }

    /// This code also continues executions that were started under these versions.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// let order = workflow("order").version(3).continues([1, 2]);
    /// let order: Workflow<u64, u64> = order.run(async |_: Ctx, price: u64| Ok(price));
    /// ```
    pub fn continues(mut self, versions: impl IntoIterator<Item = u32>) -> WorkflowBuilder {
        self.continues.extend(versions);
        self
    }

    /// How many executions may run at once. Waiting and parked executions count. A start beyond the limit is rejected
    /// with [`WorkflowError::LimitReached`], unless [`WorkflowBuilder::when_full`] says otherwise. The commit that
    /// starts an execution takes the permit. The commit that ends it returns the permit, however the execution ends.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, WorkflowError, workflow};
    /// let nightly = workflow("nightly").concurrency(1).run(async |ctx: Ctx, (): ()| {
    ///     ctx.sleep(Duration::from_secs(3600)).await
    /// });
    /// # let engine = Engine::on(&Store::memory().await?).register(&nightly).start().await?;
    /// engine.start(&nightly, ()).await?;
    /// let error = engine.start(&nightly, ()).await.unwrap_err();
    /// assert!(matches!(error, WorkflowError::LimitReached { limit: 1, .. }));
    /// # Ok(()) }
    /// ```
    pub fn concurrency(mut self, max: u32) -> WorkflowBuilder {
        self.policy.total = Some(max);
        self
    }

    /// Breaks the limits on purpose, so that tests can show that they notice: permits are taken in a commit of their
    /// own.
    ///
    /// ```
    /// # use latchwork::workflow::workflow;
    /// let broken = workflow("import").concurrency(2).sabotage_permits();
    /// ```
    #[cfg(feature = "testing")]
    pub fn sabotage_permits(mut self) -> WorkflowBuilder {
        self.policy.permits_apart = true;
        self
    }

    /// The same for each key. The key is computed from the input once, at the start. If there is also a limit for the
    /// whole workflow, an execution needs a permit of both.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, workflow};
    /// let import = workflow("import").concurrency_by(2, |customer: &String| customer.clone()).concurrency(50);
    /// let import = import.run(async |_: Ctx, customer: String| Ok(customer));
    /// ```
    pub fn concurrency_by<I: DeserializeOwned + 'static, K: Into<String>>(
        mut self,
        max: u32,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) -> WorkflowBuilder {
        self.policy.each(max, key);
        self
    }

    /// What happens to a start when a limit of concurrency is reached. With `when_full(Queue::new())` it waits.
    ///
    /// ```
    /// # use latchwork::workflow::{Queue, workflow};
    /// let import = workflow("import").concurrency(2).when_full(Queue::new().depth(1000));
    /// ```
    pub fn when_full(mut self, when_full: impl Into<WhenFull>) -> WorkflowBuilder {
        self.policy.when_full = when_full.into();
        self
    }

    /// How often the workflow may be started.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, RateLimit, workflow};
    /// let mail = workflow("mail").rate_limit(RateLimit::new(1, Duration::from_secs(3600)));
    /// let mail = mail.run(async |_: Ctx, text: String| Ok(text));
    /// # let engine = Engine::on(&Store::memory().await?).register(&mail).start().await?;
    /// engine.start(&mail, "Hello".to_string()).await?;
    /// assert!(engine.start(&mail, "Hello again".to_string()).await.unwrap_err().is_rejection());
    /// # Ok(()) }
    /// ```
    pub fn rate_limit(mut self, limit: RateLimit) -> WorkflowBuilder {
        self.policy.rate = Some(limit);
        self
    }

    /// Starts that follow each other closely become one execution. Every caller gets a handle of it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Debounce, workflow};
    /// let index = workflow("index").debounce(Debounce::new(Duration::from_secs(5)));
    /// let index = index.run(async |_: Ctx, page: String| Ok(page));
    /// ```
    pub fn debounce(mut self, debounce: Debounce) -> WorkflowBuilder {
        self.policy.debounce = Some(debounce);
        self
    }

    /// Gathers starts: one execution gets a list of inputs and returns a list of outputs in the same order. Each caller
    /// starts it with one input, and its handle returns the output for this input.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Batch, Ctx, Engine, workflow};
    /// let double = workflow("double").batch(Batch::new(100, Duration::from_millis(5)));
    /// let double = double.run(async |_: Ctx, numbers: Vec<u64>| Ok(numbers.iter().map(|n| n * 2).collect()));
    /// # let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// let (a, b) = (engine.start(&double, 1).await?, engine.start(&double, 2).await?);
    /// assert_eq!((a.result().await?, b.result().await?), (2, 4));
    /// assert_eq!(a.id(), b.id());
    /// # Ok(()) }
    /// ```
    pub fn batch(mut self, batch: Batch) -> BatchBuilder {
        self.policy.batch = Some(batch);
        BatchBuilder(self)
    }

    /// How long an execution may take, from its start to its end.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, WorkflowError, workflow};
    /// let late = workflow("late").timeout(Duration::from_millis(50)).run(async |ctx: Ctx, (): ()| {
    ///     ctx.sleep(Duration::from_secs(3600)).await
    /// });
    /// # let engine = Engine::on(&Store::memory().await?).register(&late).start().await?;
    /// let error = engine.start(&late, ()).await?.result().await.unwrap_err();
    /// assert!(matches!(error, WorkflowError::TimedOut { .. }));
    /// # Ok(()) }
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> WorkflowBuilder {
        self.timeout = Some(timeout);
        self
    }

    /// How long an execution is kept after its end: seven days by default. Until then its id is taken and its result
    /// can be read. Then it is removed with everything that belongs to it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::workflow;
    /// let import = workflow("import").keep(Duration::from_secs(3600));
    /// ```
    pub fn keep(mut self, keep: Duration) -> WorkflowBuilder {
        self.keep = keep;
        self
    }

    /// Decides whether an update of this name may be sent, based on the values that the execution has published. A
    /// refused update is not recorded. The commit that stores the update checks that these values have not changed.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, workflow};
    /// let account = workflow("account").validate("take", |published, amount: &u64| {
    ///     let sum: u64 = published.get("sum").unwrap_or(0);
    ///     if *amount <= sum { Ok(()) } else { Err(Failure::new(format!("the sum is only {sum}"))) }
    /// });
    /// ```
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

    /// Passes a value to the function that it shares with the rest of the program, such as a pool or a client. Each
    /// execution gets a clone, between its context and its input: see [`WithShared::run`]. Pass several values as a
    /// tuple or a struct. Put a value in an `Arc` if it is not `Clone` or is expensive to clone.
    ///
    /// ```
    /// use latchwork::workflow::{Ctx, Failure, Workflow, workflow};
    ///
    /// #[derive(Clone)]
    /// struct Cards; // a client, a connection pool
    ///
    /// impl Cards {
    ///     async fn charge(&self, price: u64) -> std::io::Result<String> {
    ///         Ok(format!("{price} paid"))
    ///     }
    /// }
    ///
    /// async fn place(ctx: Ctx, cards: Cards, price: u64) -> Result<String, Failure> {
    ///     ctx.run("charge", async || Ok(cards.charge(price).await?)).await
    /// }
    ///
    /// let order: Workflow<u64, String> = workflow("order").with(Cards).run(place);
    /// ```
    pub fn with<S: Clone + Send + Sync + 'static>(self, shared: S) -> WithShared<WorkflowBuilder, S> {
        WithShared { builder: self, shared }
    }

    /// Sets the function of the workflow, from a context and an input to an output. It may run again from its beginning
    /// at any time. So everything that is not the same each time belongs in a step or comes from the context.
    ///
    /// ```
    /// use latchwork::workflow::{Ctx, Failure, Workflow, workflow};
    ///
    /// async fn greet(ctx: Ctx, name: String) -> Result<String, Failure> {
    ///     ctx.run("greeting", async || Ok(format!("Hello, {name}!"))).await
    /// }
    ///
    /// let plain: Workflow<String, String> = workflow("greet").run(greet);
    /// let closure = workflow("double").run(async |_, number: u64| Ok(number * 2));
    /// ```
    pub fn run<F, Fut, I, O>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
        O: Serialize + DeserializeOwned,
    {
        self.of::<I, F, Fut, I, O>(function, json::fits::<I>)
    }

    /// A workflow that callers start with a `C` and that returns an `O`. Its function may take another type.
    fn of<C, F, Fut, I, O>(self, function: F, fits: InputFits) -> Workflow<C, O>
    where
        F: Fn(Ctx, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, Failure>> + Send + 'static,
        I: DeserializeOwned,
        O: Serialize,
    {
        let begin = move |ctx: Ctx, input: &str| -> Result<RunningExecution, Failure> {
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
        let WorkflowBuilder { name, version, continues, timeout, keep, validators, policy } = self;
        let (begin, takes, finalizer, wrong) = (Box::new(begin), json::fits::<I>, OnceLock::new(), OnceLock::new());
        let definition = Definition {
            name,
            version,
            continues,
            timeout,
            keep,
            validators,
            policy,
            finalizer,
            wrong,
            fits,
            takes,
            begin,
        };
        Workflow { definition: Arc::new(definition), types: PhantomData }
    }
}

/// Checks JSON text.
type InputFits = fn(&str) -> Result<(), JsonError>;

/// A workflow that gathers its starts and has no function yet.
#[derive(Clone)]
#[must_use = "a workflow needs a function to run"]
pub struct BatchBuilder(WorkflowBuilder);

/// A workflow with a value that its function shares with the rest of the program: see [`WorkflowBuilder::with`].
#[derive(Clone)]
#[must_use = "a workflow needs a function to run"]
pub struct WithShared<B, S> {
    builder: B,
    shared: S,
}

impl<S: Clone + Send + Sync + 'static> WithShared<WorkflowBuilder, S> {
    /// Like [`WorkflowBuilder::run`], with a function that also gets the shared value.
    ///
    /// ```
    /// # use latchwork::workflow::workflow;
    /// let order = workflow("order").with("EUR");
    /// let order = order.run(async |_, currency, price: u64| Ok(format!("{price} {currency}")));
    /// # let _: latchwork::workflow::Workflow<u64, String> = order;
    /// ```
    pub fn run<F, Fut, I, O>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, S, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
        O: Serialize + DeserializeOwned,
    {
        let WithShared { builder, shared } = self;
        builder.run(move |ctx, input| function(ctx, shared.clone(), input))
    }
}

impl<S: Clone + Send + Sync + 'static> WithShared<BatchBuilder, S> {
    /// Like [`BatchBuilder::run`], with a function that also gets the shared value.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Batch, workflow};
    /// let times = workflow("times").batch(Batch::new(100, Duration::from_millis(5))).with(2);
    /// let times = times.run(async |_, by, numbers: Vec<u64>| Ok(numbers.iter().map(|n| n * by).collect()));
    /// # let _: latchwork::workflow::Workflow<u64, u64> = times;
    /// ```
    pub fn run<F, Fut, I, O>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, S, Vec<I>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<O>, Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
        O: Serialize + DeserializeOwned,
    {
        let WithShared { builder, shared } = self;
        builder.run(move |ctx, inputs| function(ctx, shared.clone(), inputs))
    }
}

impl BatchBuilder {
    /// Passes a value to the function that it shares with the rest of the program, as [`WorkflowBuilder::with`] does.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Batch, workflow};
    /// let times = workflow("times").batch(Batch::new(100, Duration::from_millis(5))).with(2);
    /// let times = times.run(async |_, by, numbers: Vec<u64>| Ok(numbers.iter().map(|n| n * by).collect()));
    /// # let _: latchwork::workflow::Workflow<u64, u64> = times;
    /// ```
    pub fn with<S: Clone + Send + Sync + 'static>(self, shared: S) -> WithShared<BatchBuilder, S> {
        WithShared { builder: self, shared }
    }

    /// Sets the function that handles the gathered inputs. It returns one output for each input, in the same order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Batch, Ctx, Engine, Workflow, workflow};
    /// let double = workflow("double").batch(Batch::new(100, Duration::from_millis(5)));
    /// let double: Workflow<u64, u64> =
    ///     double.run(async |_: Ctx, numbers: Vec<u64>| Ok(numbers.iter().map(|n| n * 2).collect()));
    /// # let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// assert_eq!(engine.start(&double, 21).await?.result().await?, 42);
    /// # Ok(()) }
    /// ```
    pub fn run<F, Fut, I, O>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, Vec<I>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<O>, Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
        O: Serialize + DeserializeOwned,
    {
        let function = move |ctx: Ctx, inputs: Vec<I>| {
            let count = inputs.len();
            let running = function(ctx, inputs);
            async move {
                let outputs = running.await?;
                match outputs.len() == count {
                    true => Ok(outputs),
                    false => {
                        let message = format!("a batch of {count} inputs returned {} outputs", outputs.len());
                        Err(Failure::new(message).with_code("latchwork.batch.outputs").not_retryable())
                    }
                }
            }
        };
        let Workflow { definition, .. } = self.0.of::<I, _, _, _, _>(function, json::fits::<I>);
        Workflow { definition, types: PhantomData }
    }
}

/// A running execution. It ends with JSON text or with a failure.
pub(crate) type RunningExecution = Boxed<'static, Result<String, Failure>>;

type Begin = dyn Fn(Ctx, &str) -> Result<RunningExecution, Failure> + Send + Sync;

pub(crate) struct Definition {
    pub(crate) version: u32,
    continues: Vec<u32>,
    pub(crate) name: String,
    pub(crate) timeout: Option<Duration>,
    pub(crate) keep: Duration,
    pub(crate) validators: HashMap<String, UpdateValidator>,
    /// The workflow that runs after the end of an execution, and the error if it was set wrongly.
    pub(crate) finalizer: OnceLock<Arc<Definition>>,
    pub(crate) wrong: OnceLock<&'static str>,
    /// The rules for its starts.
    pub(crate) policy: Policy,
    /// Checks the input of a caller, and the input of the function.
    fits: InputFits,
    takes: InputFits,
    pub(crate) begin: Box<Begin>,
}

impl Definition {
    /// A definition without code, for starts of a workflow that only other nodes can run.
    pub(crate) fn elsewhere(name: &str, known: &KnownWorkflow) -> Definition {
        let unregistered = format!("workflow {name:?} is not registered with this engine");
        Definition {
            name: name.into(),
            version: known.newest,
            continues: Vec::new(),
            timeout: known.timeout_us.map(Duration::from_micros),
            keep: DEFAULT_KEEP,
            validators: HashMap::new(),
            finalizer: OnceLock::new(),
            wrong: OnceLock::new(),
            policy: Policy::default(),
            fits: |_| Ok(()),
            takes: |_| Ok(()),
            begin: Box::new(move |_, _| Err(Failure::new(unregistered.clone()).not_retryable())),
        }
    }

    /// What other nodes need to know of this workflow.
    fn known(&self, versions: Vec<u32>) -> KnownWorkflow {
        let (timeout_us, has_rules) = (self.timeout.map(micros::of), !self.policy.is_empty());
        let mut validated: Vec<String> = self.validators.keys().cloned().collect();
        validated.sort_unstable();
        KnownWorkflow { versions, newest: self.version, timeout_us, has_rules, validated }
    }

    /// The versions whose executions it runs.
    fn versions(&self) -> impl Iterator<Item = u32> + '_ {
        self.continues.iter().copied().filter(|version| *version != self.version).chain([self.version])
    }

    /// Rejects rules that make no sense.
    pub(crate) fn check_meaning(&self) -> Result<()> {
        self.policy.check(&self.name)?;
        let wrong = self.wrong.get().map(|reason| (self.name.clone(), reason.to_string()));
        wrong.map_or(Ok(()), |(workflow, reason)| Err(WorkflowError::Policy { workflow, reason }))
    }

    /// Rejects an input, as JSON text, that callers cannot pass.
    pub(crate) fn check(&self, input: &str) -> Result<()> {
        (self.fits)(input).map_err(|cause| WorkflowError::Input { workflow: self.name.clone(), cause })
    }

    /// Rejects an input, as JSON text, that the function cannot take.
    pub(crate) fn check_whole(&self, input: &str) -> Result<()> {
        (self.takes)(input).map_err(|cause| WorkflowError::Input { workflow: self.name.clone(), cause })
    }

    /// What a start needs. None if the definition has no rules for starts.
    pub(crate) fn asked(&self, input: &str) -> Result<Option<StartNeeds>> {
        let is_limited = !self.policy.is_empty();
        is_limited.then(|| self.policy.asked(&self.name, input)).transpose()
    }

    /// What a fork with this input needs. A fork is not gathered. The keys of a batch come from its first input.
    pub(crate) fn asked_by_fork(&self, input: &str) -> Result<Option<StartNeeds>> {
        let first = self.policy.batch.as_ref().and_then(|_| {
            let inputs: Vec<&serde_json::value::RawValue> = serde_json::from_str(input).ok()?;
            inputs.first().map(|first| first.get().to_string())
        });
        Ok(self.asked(first.as_deref().unwrap_or(input))?.map(StartNeeds::alone))
    }

    /// The input of an execution that is not gathered: a batch of one, if the workflow has batches.
    pub(crate) fn alone(&self, input: String) -> String {
        if self.policy.batch.is_some() { list(&[input]) } else { input }
    }

    /// The first record of an execution that is started now. If it begins later, it waits until then.
    pub(crate) fn first_record(&self, input: String, labels: Labels, now: Timestamp, begins: Timestamp) -> Execution {
        let deadline_us = self.timeout.map(|timeout| begins.max(now).plus(timeout).0);
        let version = self.version;
        let mut first = Execution { deadline_us, labels, version, ..Execution::new(&self.name, input, now) };
        if begins > now {
            let wait = Wait { what: WaitsFor::Timer, since: now, until: Some(begins) };
            (first.status, first.waits) = (StoredStatus::Waiting, vec![wait]);
            (first.timer_us, first.begins_us) = (Some(begins.0), Some(begins.0));
        }
        first
    }
}

/// A workflow: it is registered with an engine and started there. Its executions take an `I` and return an `O`.
///
/// ```
/// use latchwork::workflow::{Ctx, Failure, Workflow, workflow};
///
/// async fn place(ctx: Ctx, price: u64) -> Result<String, Failure> {
///     ctx.run("charge", async || Ok(format!("{price} paid"))).await
/// }
///
/// /// The definition, for the program and for its tests.
/// fn order() -> Workflow<u64, String> {
///     workflow("order").run(place)
/// }
/// assert_eq!(order().name(), "order");
/// ```
pub struct Workflow<I, O> {
    pub(crate) definition: Arc<Definition>,
    types: PhantomData<fn(I) -> O>,
}

impl<I, O> Workflow<I, O> {
    /// Its name.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, workflow};
    /// let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
    /// assert_eq!(double.name(), "double");
    /// ```
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

shown!(BatchBuilder, it => name: it.0.name);

/// The definitions that an engine has registered.
pub(crate) struct Definitions(HashMap<String, DefinitionVersions>);

/// The definitions of a workflow.
struct DefinitionVersions {
    newest: Arc<Definition>,
    /// The definition that runs executions of each version.
    by_version: BTreeMap<u32, Arc<Definition>>,
}

impl Definitions {
    pub(crate) fn new(registered: Vec<Arc<Definition>>) -> Result<Definitions> {
        let mut definitions: HashMap<String, DefinitionVersions> = HashMap::new();
        for definition in registered {
            check_name("the name of a workflow", &definition.name)?;
            definition.check_meaning()?;
            let fresh = || DefinitionVersions { newest: definition.clone(), by_version: BTreeMap::new() };
            let versions = definitions.entry(definition.name.clone()).or_insert_with(fresh);
            if versions.newest.version < definition.version {
                versions.newest = definition.clone();
            }
            for version in definition.versions() {
                if versions.by_version.insert(version, definition.clone()).is_some() {
                    return Err(WorkflowError::RegisteredTwice { name: definition.name.clone(), version });
                }
            }
        }
        Ok(Definitions(definitions))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    pub(crate) fn newest(&self, name: &str) -> Option<&Arc<Definition>> {
        self.0.get(name).map(|versions| &versions.newest)
    }

    pub(crate) fn of_version(&self, name: &str, version: u32) -> Option<&Arc<Definition>> {
        self.0.get(name)?.by_version.get(&version)
    }

    /// The names, each with the versions whose executions can run here.
    pub(crate) fn versions(&self) -> BTreeMap<String, KnownWorkflow> {
        let mut versions = BTreeMap::new();
        let mut names: Vec<&String> = self.0.keys().collect();
        names.sort_unstable();
        for name in names {
            let DefinitionVersions { newest, by_version } = &self.0[name];
            versions.insert(name.clone(), newest.known(by_version.keys().copied().collect()));
        }
        versions
    }
}
