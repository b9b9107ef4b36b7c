//! The backend in PostgreSQL: one schema holds one store, which any number of processes may use at once. Each process
//! has one writer, some connections for reads, and one that listens for commits of others.

mod link;
mod read;
mod restore;
mod retain;
mod schema;
mod writer;

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_postgres::{AsyncMessage, Config, NoTls};

use crate::backend::{Answer, Backend, Before, Changes, Contents, Damage, Pin, Rules, Scan, Stats};
use crate::disk::RealDisk;
use crate::{
    Commit, Env, Generation, Key, Limits, Outcome, Range, Result, SpaceId, Store, StoreError, Timestamp, Uuid, Version,
};

use link::{Link, failed};
use retain::{Pins, keep};
use schema::{Statements, VERSION, check_name, create};
use writer::{Job, PostgresWriter, key_of};

/// How a store in PostgreSQL is opened.
///
/// ```no_run
/// # async fn example() -> Result<(), latchwork_store::StoreError> {
/// use latchwork_store::PostgresOptions;
///
/// let options = PostgresOptions::new().schema("billing").connections(4);
/// let store = options.connect("postgres://app@localhost/app").await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    schema: String,
    connections: usize,
    is_pooled: bool,
    lease: Duration,
    patience: Duration,
    env: Env,
    limits: Limits,
}

impl Default for PostgresOptions {
    fn default() -> PostgresOptions {
        PostgresOptions {
            schema: "latchwork".into(),
            connections: 4,
            is_pooled: false,
            lease: Duration::from_secs(60),
            patience: Duration::from_secs(30),
            env: Env::system(),
            limits: Limits::default(),
        }
    }
}

impl PostgresOptions {
    /// The schema `latchwork`, four connections for reads, no pooler.
    ///
    /// ```
    /// # use latchwork_store::{PostgresOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = PostgresOptions::new().connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub fn new() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// The schema that holds the store. It is created if it is missing.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().schema("billing");
    /// ```
    pub fn schema(mut self, schema: impl Into<String>) -> PostgresOptions {
        self.schema = schema.into();
        self
    }

    /// How many connections serve reads, beside one for commits and one that listens.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().connections(8);
    /// ```
    pub fn connections(mut self, connections: usize) -> PostgresOptions {
        self.connections = connections;
        self
    }

    /// The connections go through a pooler in transaction mode: no statement is prepared, and commits of other
    /// processes are found by polling once a second.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().behind_pooler();
    /// ```
    pub fn behind_pooler(mut self) -> PostgresOptions {
        self.is_pooled = true;
        self
    }

    /// How long views of this process keep history after it has stopped without closing the store.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().lease(Duration::from_secs(20));
    /// ```
    pub fn lease(mut self, lease: Duration) -> PostgresOptions {
        self.lease = lease;
        self
    }

    /// How long a commit waits for a server that cannot be reached before it fails.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().patience(Duration::from_secs(5));
    /// ```
    pub fn patience(mut self, patience: Duration) -> PostgresOptions {
        self.patience = patience;
        self
    }

    /// Where time and chance come from.
    ///
    /// ```
    /// # use latchwork_store::{Env, PostgresOptions};
    /// let (env, clock) = Env::seeded(7);
    /// let options = PostgresOptions::new().env(env);
    /// ```
    pub fn env(mut self, env: Env) -> PostgresOptions {
        self.env = env;
        self
    }

    /// The largest sizes the store takes.
    ///
    /// ```
    /// # use latchwork_store::{Limits, PostgresOptions};
    /// let mut limits = Limits::default();
    /// limits.value_bytes = 64 << 10;
    /// let options = PostgresOptions::new().limits(limits);
    /// ```
    pub fn limits(mut self, limits: Limits) -> PostgresOptions {
        self.limits = limits;
        self
    }

    /// Opens the store, and creates it if there is none. `url` is a connection string of PostgreSQL.
    ///
    /// ```
    /// # use latchwork_store::{PostgresOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = PostgresOptions::new().schema("billing").connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(self, url: &str) -> Result<Store> {
        check_name(&self.schema)?;
        let invalid = |what: String| StoreError::Option { what };
        let config: Config =
            url.parse().map_err(|error| invalid(format!("the connection string of PostgreSQL: {error}")))?;
        if !(1..=64).contains(&self.connections) {
            return Err(invalid(format!("{} connections for reads; there are 1 to 64", self.connections)));
        }
        if self.lease < Duration::from_secs(1) {
            return Err(invalid(format!("a lease of {:?}; it is at least a second", self.lease)));
        }
        let (env, limits) = (self.env.clone(), self.limits);
        let mut config = config;
        // A standby has an older present; a silent network must not hold callers.
        config.target_session_attrs(tokio_postgres::config::TargetSessionAttrs::ReadWrite);
        config.connect_timeout(self.patience.max(Duration::from_secs(1))).tcp_user_timeout(self.lease);
        let backend = PostgresBackend::connect(self, config).await?;
        Store::with_backend(Arc::new(backend), env, limits, Arc::new(RealDisk)).await
    }
}

impl Store {
    /// Opens a store in a PostgreSQL database, in the schema `latchwork`; see [`PostgresOptions`] for more.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example() -> Result<()> {
    /// let store = Store::connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Store> {
        PostgresOptions::new().connect(url).await
    }
}

/// What the tasks of a backend share.
struct Shared {
    env: Env,
    config: Config,
    sql: Statements,
    identity: u128,
    /// Names this process among those that use the store.
    process: Uuid,
    lease: Duration,
    patience: Duration,
    /// How often the row of this process is renewed at least.
    pace: Duration,
    is_pooled: bool,
    /// Held while the row of this process is written.
    renewing: tokio::sync::Mutex<()>,
    readers: Vec<tokio::sync::Mutex<Option<Arc<Link>>>>,
    turn: AtomicUsize,
    /// The newest generation that this process knows of.
    latest: watch::Sender<Generation>,
    closed: AtomicBool,
    /// With the generation of the declaration that they are from.
    rules: Mutex<BTreeMap<SpaceId, (Rules, Generation)>>,
    pins: Arc<Mutex<Pins>>,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    applied: AtomicU64,
    refused: AtomicU64,
    groups: AtomicU64,
}

impl Shared {
    /// A connection of one's own.
    async fn open(&self) -> Result<Link> {
        let sql = &self.sql;
        let often = [
            &sql.lock_head,
            &sql.heads,
            &sql.range,
            &sql.floors,
            &sql.keep_old,
            &sql.keep_past,
            &sql.put,
            &sql.touch,
            &sql.advance,
            &sql.group,
            &sql.notify,
        ];
        Link::open(&self.config, if self.is_pooled { &[] } else { &often }).await
    }

    /// A connection for reads that are one statement each. Callers share it.
    async fn reader(&self) -> Result<Arc<Link>> {
        if self.is_closed() {
            return Err(StoreError::Closed);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.readers.len();
        let mut reader = self.readers[turn].lock().await;
        match &*reader {
            Some(link) if !link.is_closed() => Ok(link.clone()),
            _ => {
                let sql = &self.sql;
                let often = [&sql.head, &sql.get, &sql.floor, &sql.scan_up, &sql.scan_down, &sql.touched, &sql.changed];
                let link = Link::open(&self.config, if self.is_pooled { &[] } else { &often }).await?;
                Ok(reader.insert(Arc::new(link)).clone())
            }
        }
    }

    /// Waits for the server no longer than a commit may wait.
    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let limit = self.patience.max(Duration::from_secs(1));
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.env.sleep(limit) => {
                let cause = format!("no answer in {limit:?}").into();
                Err(StoreError::Server { action: "reach", cause, is_invalid: false })
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// The newest generation that is known here.
    fn seen(&self) -> Generation {
        *self.latest.borrow()
    }

    /// A generation was seen.
    fn saw(&self, generation: Generation) {
        self.latest.send_if_modified(|latest| {
            let is_newer = generation > *latest;
            if is_newer {
                *latest = generation;
            }
            is_newer
        });
    }

    /// The newest generation, and that of the newest declaration.
    async fn head(&self) -> Result<(Generation, Generation)> {
        let link = self.reader().await?;
        let rows = link.query(&self.sql.head, &[]).await.map_err(|error| failed("read from", &error))?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        let (latest, declared) = (row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64);
        self.saw(Generation(latest));
        Ok((Generation(latest), Generation(declared)))
    }

    async fn latest(&self) -> Result<Generation> {
        self.head().await.map(|(latest, _)| latest)
    }

    /// Waits for a generation. A notification that was lost only delays: the store is asked now and then.
    async fn newer(&self, than: Generation) -> Result<Generation> {
        let mut latest = self.latest.subscribe();
        let poll = if self.is_pooled { Duration::from_secs(1) } else { Duration::from_secs(5) };
        loop {
            if self.is_closed() {
                return Err(StoreError::Closed);
            }
            let seen = *latest.borrow_and_update();
            if seen > than {
                return Ok(seen);
            }
            tokio::select! {
                _ = latest.changed() => {}
                () = self.env.sleep(poll) => match self.head().await {
                    Err(error) if !error.is_passing() => return Err(error),
                    // A server that cannot be reached is asked again.
                    _ => {}
                },
            }
        }
    }
}

/// Follows the notifications of other processes, and connects again when the connection is lost.
async fn listen(shared: Weak<Shared>) {
    loop {
        let Some(store) = shared.upgrade().filter(|shared| !shared.is_closed()) else { return };
        let (config, channel, env) = (store.config.clone(), store.sql.channel.clone(), store.env.clone());
        drop(store);
        if let Ok((client, mut connection)) = config.connect(NoTls).await {
            let heard = |payload: &str| {
                let (store, generation) = (shared.upgrade(), payload.parse::<u64>());
                if let (Some(store), Ok(generation)) = (store, generation) {
                    store.saw(Generation(generation));
                }
            };
            let follow = async {
                while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                    if let AsyncMessage::Notification(note) = message {
                        heard(note.payload());
                    }
                }
            };
            let ask = async {
                let listened = client.batch_execute(&format!("LISTEN {channel}")).await;
                // What came before is not notified.
                if let (Ok(()), Some(store)) = (listened, shared.upgrade()) {
                    let _ = store.head().await;
                }
                std::future::pending::<()>().await;
            };
            let closed = async {
                while shared.upgrade().is_some_and(|store| !store.is_closed()) {
                    env.sleep(Duration::from_secs(1)).await;
                }
            };
            tokio::select! {
                () = follow => {}
                () = ask => {}
                () = closed => return,
            }
        }
        env.sleep(Duration::from_secs(1)).await;
    }
}

/// Keeps a store in PostgreSQL.
struct PostgresBackend {
    shared: Arc<Shared>,
    jobs: Mutex<Option<mpsc::UnboundedSender<Job>>>,
    writer: tokio::sync::Mutex<Option<tokio::task::JoinHandle<()>>>,
    tasks: Vec<tokio::task::AbortHandle>,
}

impl PostgresBackend {
    async fn connect(options: PostgresOptions, config: Config) -> Result<PostgresBackend> {
        let sql = Statements::of(&options.schema);
        let first = Link::open(&config, &[]).await?;
        let identity = prepare(&first, &sql, &options.env).await?;
        drop(first);
        let shared = Arc::new(Shared {
            process: options.env.uuid(),
            env: options.env,
            config,
            sql,
            identity,
            lease: options.lease,
            patience: options.patience,
            pace: (options.lease / 4).min(Duration::from_secs(10)),
            is_pooled: options.is_pooled,
            renewing: tokio::sync::Mutex::default(),
            readers: (0..options.connections).map(|_| tokio::sync::Mutex::default()).collect(),
            turn: AtomicUsize::new(0),
            latest: watch::Sender::new(Generation(0)),
            closed: AtomicBool::new(false),
            rules: Mutex::new(Rules::own().map(|(space, rules)| (space, (rules, Generation(0)))).into()),
            pins: Arc::default(),
            counters: Counters::default(),
        });
        shared.head().await?;
        shared.renew().await?;
        let floors = shared.reader().await?.query(&shared.sql.floors, &[]).await;
        shared.learn_floors(&floors.map_err(|error| failed("read from", &error))?);
        let (jobs, waiting) = mpsc::unbounded_channel();
        let writer = PostgresWriter::new(shared.clone(), waiting, shared.open().await?).await?;
        let mut tasks = vec![tokio::spawn(keep(Arc::downgrade(&shared))).abort_handle()];
        if !shared.is_pooled {
            tasks.push(tokio::spawn(listen(Arc::downgrade(&shared))).abort_handle());
        }
        // It ends by itself, when all that was given to it is answered.
        let writer = tokio::sync::Mutex::new(Some(tokio::spawn(writer.work())));
        Ok(PostgresBackend { shared, jobs: Mutex::new(Some(jobs)), writer, tasks })
    }
}

/// Creates the tables if they are missing, and gives the identity of the store.
async fn prepare(link: &Link, sql: &Statements, env: &Env) -> Result<u128> {
    let identity = u128::from(env.random()) << 64 | u128::from(env.random());
    let create = create(&sql.schema, &format!("{identity:032x}"));
    let error = |error: tokio_postgres::Error| failed("create the tables in", &error);
    let opened = link.query(&sql.opened, &[]).await;
    let rows = match opened {
        Ok(rows) if !rows.is_empty() => rows,
        _ => {
            link.run(&format!("BEGIN; {create} COMMIT;")).await.map_err(error)?;
            link.query(&sql.opened, &[]).await.map_err(error)?
        }
    };
    let row = rows.first().ok_or_else(|| StoreError::corrupt("table store", "it has no row"))?;
    let found: i32 = row.get(0);
    if found > VERSION {
        let path = sql.schema.clone().into();
        return Err(StoreError::NewerFormat { path, found: found as u32, supported: VERSION as u32 });
    }
    let identity: &str = row.get(1);
    u128::from_str_radix(identity, 16).map_err(|_| StoreError::corrupt("table store", "its identity is no number"))
}

impl Drop for PostgresBackend {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

impl Backend for PostgresBackend {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        let (answer, answered) = oneshot::channel();
        let sent = match &*self.jobs.lock() {
            Some(jobs) => jobs.send(Job { commit, answer }).map_err(|_| StoreError::Closed),
            None => Err(StoreError::Closed),
        };
        Box::pin(async move {
            sent?;
            answered.await.unwrap_or(Err(StoreError::Closed))
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(self.shared.latest())
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(self.shared.get(key, at))
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(self.shared.scan(scan, at))
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        Box::pin(self.shared.versions(key, at, limit))
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        Box::pin(self.shared.changes(range, after, limit))
    }

    fn newer(&self, than: Generation) -> Answer<'_, Generation> {
        Box::pin(self.shared.newer(than))
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        Box::pin(self.shared.before(time, spaces))
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        Box::pin(self.shared.pin(at))
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.shared.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        let mut known = self.shared.rules.lock();
        if known.get(&space).is_none_or(|(_, declared)| *declared <= at) {
            known.insert(space, (rules, at));
        }
    }

    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(async {
            if self.shared.is_closed() {
                return Err(StoreError::Closed);
            }
            self.shared.maintain().await
        })
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(self.shared.replace(contents))
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(async {
            let link = self.shared.reader().await?;
            let rows = link.query(&self.shared.sql.verify, &[]).await.map_err(|error| failed("read from", &error))?;
            let damage = |row: &tokio_postgres::Row| {
                let (table, key, detail): (&str, &[u8], &str) = (row.get(0), row.get(1), row.get(2));
                let key = key_of(key).map_or_else(|_| format!("{key:?}"), |key| key.to_string());
                Damage { place: format!("table {table}, key {key}"), detail: detail.into() }
            };
            Ok(rows.iter().map(damage).collect())
        })
    }

    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(async {
            let link = self.shared.reader().await?;
            let rows = link.query(&self.shared.sql.stats, &[]).await.map_err(|error| failed("read from", &error))?;
            let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
            let counters = &self.shared.counters;
            Ok(Stats {
                generation: Generation(row.get::<_, i64>(0) as u64),
                keys: row.get::<_, i64>(1) as u64,
                past_versions: row.get::<_, i64>(2) as u64,
                applied: counters.applied.load(Ordering::Relaxed),
                refused: counters.refused.load(Ordering::Relaxed),
                groups: counters.groups.load(Ordering::Relaxed),
                index_bytes: row.get::<_, Option<i64>>(3).unwrap_or_default() as u64,
                pins: self.shared.views() as u64,
                ..Stats::default()
            })
        })
    }

    fn identity(&self) -> u128 {
        self.shared.identity
    }

    fn close(&self) -> Answer<'_, ()> {
        Box::pin(async {
            if self.jobs.lock().take().is_none() {
                return Err(StoreError::Closed);
            }
            // Commits that wait are answered first.
            if let Some(writer) = self.writer.lock().await.take() {
                let _ = writer.await;
            }
            self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
            let _turn = self.shared.renewing.lock().await;
            let unpinned = match self.shared.reader().await {
                Ok(link) => link.query(&self.shared.sql.unpin, &[&self.shared.process]).await.map(drop),
                Err(_) => Ok(()),
            };
            self.shared.closed.store(true, Ordering::SeqCst);
            // Those that wait for a newer generation look again.
            self.shared.latest.send_modify(|_| {});
            unpinned.map_err(|error| failed("write to", &error))
        })
    }
}
