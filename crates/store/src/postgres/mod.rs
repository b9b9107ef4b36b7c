//! The backend in PostgreSQL: one schema holds one store, which any number of processes may use at once. Each process
//! has one writer, some connections for reads, and one that listens for commits of others.

mod address;
mod drive;
mod group;
mod known;
mod landed;
mod link;
mod options;
mod outbox;
mod own;
mod ranges;
mod read;
mod read_only;
mod readers;
mod restore;
mod retain;
mod schema;
mod sql;
mod tls;
mod watched;
mod writer;

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};
use tokio_postgres::{AsyncMessage, Row};

use crate::backend::{Answer, Backend, Before, Changes, Contents, Damage, Pin, Rules, Scan, Stats};
use crate::{
    Commit, Env, Generation, Key, Outcome, Range, Result, ServerFault, SpaceId, StoreError, Timestamp, Uuid, Version,
};

pub use options::PostgresOptions;
#[cfg(feature = "testing")]
pub use options::PostgresSabotage;
pub use outbox::OutboxRow;
pub use own::{Postgres, SqlEnded, SqlTransaction};
pub use sql::{SqlError, SqlTx};

use known::{Known, News};
use link::{Address, Link, failed};
use own::Slots;
use retain::{Pins, keep};
use schema::{AS_EXPECTED, Sql, Statements, VERSION, create, extend, plans};
use watched::Watched;
use writer::{Job, Jobs, Writer, key_of};

/// What the tasks of a backend share.
struct Shared {
    env: Env,
    address: Address,
    sql: Statements,
    identity: u128,
    /// Names this process among those that use the store.
    process: Uuid,
    lease: Duration,
    patience: Duration,
    /// How often the row of this process is renewed at least.
    pace: Duration,
    is_pooled: bool,
    /// Whether notifications of other processes are heard here.
    listens: bool,
    /// The connection for leases and clean-up. It is held while the row of this process is written.
    upkeep: tokio::sync::Mutex<Option<Link>>,
    /// The row of this process is to be written: another process asks which views are open here, or a watch waits for
    /// a space that the row does not name.
    asked: Arc<Notify>,
    /// All reads are of one transaction: a connection that is lost is not replaced.
    is_frozen: bool,
    breakage: options::Breakage,
    readers: Vec<tokio::sync::Mutex<Option<Arc<Link>>>>,
    turn: AtomicUsize,
    /// The newest generation that this process knows of.
    latest: watch::Sender<Generation>,
    known: Mutex<Known>,
    /// When the server was last asked for the newest generation, on the monotonic clock.
    asked_head: Mutex<Duration>,
    closed: AtomicBool,
    /// Whether the row of this process was removed, or left to its lease.
    is_unpinned: AtomicBool,
    /// With the generation of the declaration that they are from.
    rules: Mutex<BTreeMap<SpaceId, (Rules, Generation)>>,
    pins: Arc<Mutex<Pins>>,
    watched: Mutex<Watched>,
    /// How many commits were forgotten since the tables were vacuumed last.
    forgotten: AtomicU64,
    is_vacuuming: AtomicBool,
    /// For transactions of the user's own.
    slots: Slots,
    /// Notified when there may be rows in the outbox.
    outbox: Notify,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    applied: AtomicU64,
    refused: AtomicU64,
    groups: AtomicU64,
}

impl Shared {
    fn new(options: PostgresOptions, address: Address, sql: Statements, identity: u128, is_frozen: bool) -> Shared {
        Shared {
            process: options.env.uuid(),
            env: options.env,
            address,
            sql,
            identity,
            lease: options.lease,
            patience: options.patience,
            pace: (options.lease / 4).min(Duration::from_secs(10)),
            is_pooled: options.is_pooled,
            listens: options.has_upkeep && !options.is_pooled && !is_frozen,
            upkeep: tokio::sync::Mutex::default(),
            asked: Arc::default(),
            is_frozen,
            breakage: options.breakage,
            readers: (0..options.connections).map(|_| tokio::sync::Mutex::default()).collect(),
            turn: AtomicUsize::new(0),
            latest: watch::Sender::new(Generation(0)),
            known: Mutex::default(),
            asked_head: Mutex::default(),
            closed: AtomicBool::new(false),
            is_unpinned: AtomicBool::new(false),
            rules: Mutex::new(Rules::own().map(|(space, rules)| (space, (rules, Generation(0)))).into()),
            pins: Arc::default(),
            watched: Mutex::default(),
            forgotten: AtomicU64::new(0),
            is_vacuuming: AtomicBool::new(false),
            slots: Slots::new(options.transactions),
            outbox: Notify::new(),
            counters: Counters::default(),
        }
    }

    /// A connection of one's own.
    async fn open(&self) -> Result<Link> {
        let sql = &self.sql;
        let often = [&sql.queue_and_lock, &sql.heads, &sql.heads_unless, &sql.range, &sql.floors, &sql.write];
        self.open_planned(&often).await
    }

    /// A connection that prepares statements, and that is [planned](Shared::plan) for.
    async fn open_planned(&self, often: &[&Sql]) -> Result<Link> {
        let link = self.open_for(often).await?;
        self.plan(&link).await;
        Ok(link)
    }

    /// Makes the statements of a connection look each key up in an index. Behind a pooler, and on a server that does
    /// not know a setting, they are planned as the server likes.
    async fn plan(&self, link: &Link) {
        if !self.is_pooled {
            let _ = link.run(&plans("")).await;
        }
    }

    /// A connection for transactions of the user's own.
    async fn open_own(&self) -> Result<Link> {
        let sql = &self.sql;
        let ends = [&sql.write_or_fail, &sql.lock_own_head, &sql.heads, &sql.range, &sql.floors];
        self.open_for(&ends).await
    }

    /// A connection that prepares statements.
    async fn open_for(&self, often: &[&Sql]) -> Result<Link> {
        Link::open(&self.address, if self.is_pooled { &[] } else { often }).await
    }

    /// A new id, and the time of the server. The id differs from all others, whatever the environment is.
    async fn new_id(&self, link: &Link) -> Result<Row> {
        let rows = link.query(&self.sql.new_id, &[]).await.map_err(|error| failed("read from", &error))?;
        rows.into_iter().next().ok_or_else(|| StoreError::corrupt("a new id", "there is none"))
    }

    /// Waits for the server no longer than a commit may wait.
    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let limit = self.limit();
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.env.sleep(limit) => {
                let cause = format!("no answer in {limit:?}").into();
                Err(StoreError::Server { action: "reach", cause, fault: ServerFault::Unreachable })
            }
        }
    }

    /// How long the server is waited for.
    fn limit(&self) -> Duration {
        self.patience.max(Duration::from_secs(1))
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
        *self.asked_head.lock() = self.env.monotonic();
        let rows = self.ask(&self.sql.head, &[]).await?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        let (latest, declared) = (row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64);
        self.saw(Generation(latest));
        Ok((Generation(latest), Generation(declared)))
    }

    /// Reads the head, unless it was asked for so short a time ago: then the answer tells those that wait.
    async fn head_unless_asked(&self, within: Duration) -> Result<()> {
        let asked = *self.asked_head.lock();
        if self.env.monotonic().saturating_sub(asked) < within {
            return Ok(());
        }
        self.head().await.map(drop)
    }

    async fn latest(&self) -> Result<Generation> {
        self.head().await.map(|(latest, _)| latest)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        let mut known = self.rules.lock();
        if known.get(&space).is_none_or(|(_, declared)| *declared <= at) {
            known.insert(space, (rules, at));
        }
    }

    async fn verify(&self) -> Result<Vec<Damage>> {
        let rows = self.ask(&self.sql.verify, &[]).await?;
        let damage = |row: &Row| {
            let (table, key, detail): (&str, &[u8], &str) = (row.get(0), row.get(1), row.get(2));
            let key = key_of(key).map_or_else(|_| format!("{key:?}"), |key| key.to_string());
            Damage { place: format!("table {table}, key {key}"), detail: detail.into() }
        };
        Ok(rows.iter().map(damage).collect())
    }

    async fn stats(&self) -> Result<Stats> {
        let rows = self.ask(&self.sql.stats, &[]).await?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        Ok(Stats {
            generation: Generation(row.get::<_, i64>(0) as u64),
            keys: row.get::<_, i64>(1) as u64,
            past_versions: row.get::<_, i64>(2) as u64,
            applied: self.counters.applied.load(Ordering::Relaxed),
            refused: self.counters.refused.load(Ordering::Relaxed),
            groups: self.counters.groups.load(Ordering::Relaxed),
            index_bytes: row.get::<_, Option<i64>>(3).unwrap_or_default() as u64,
            pins: self.views() as u64,
            ..Stats::default()
        })
    }

    /// Waits for a generation. A notification that was lost only delays: the store is asked now and then, by one of
    /// those that wait.
    async fn newer(&self, than: Generation, space: SpaceId) -> Result<Generation> {
        let mut latest = self.latest.subscribe();
        let wait = Wait::begin(self, space);
        let mut is_known = wait.is_known || !self.listens;
        let poll = if self.is_pooled { Duration::from_secs(1) } else { Duration::from_secs(5) };
        loop {
            if self.is_closed() {
                return Err(StoreError::Closed);
            }
            let seen = *latest.borrow_and_update();
            if seen > than {
                return Ok(seen);
            }
            if !is_known {
                is_known = true;
                self.asked.notify_one();
            }
            tokio::select! {
                _ = latest.changed() => {}
                () = self.env.sleep(poll) => match self.head_unless_asked(poll / 2).await {
                    Err(error) if !error.is_passing() => return Err(error),
                    // A server that cannot be reached is asked again.
                    _ => {}
                },
            }
        }
    }
}

/// A watch that waits for a space.
struct Wait<'a> {
    shared: &'a Shared,
    space: SpaceId,
    is_known: bool,
}

impl Wait<'_> {
    fn begin(shared: &Shared, space: SpaceId) -> Wait<'_> {
        Wait { shared, space, is_known: shared.watched.lock().begin(space) }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.shared.watched.lock().end(self.space);
    }
}

/// Follows the notifications of other processes, and connects again when the connection is lost.
async fn listen(shared: Weak<Shared>) {
    loop {
        let Some(store) = shared.upgrade().filter(|shared| !shared.is_closed()) else { return };
        let (address, channel, env) = (store.address.clone(), store.sql.channel.clone(), store.env.clone());
        drop(store);
        if let Ok((client, mut connection)) = address.connect().await {
            let heard = |payload: &str| {
                let Some(store) = shared.upgrade() else { return };
                match (News::parse(payload), payload.parse::<u64>()) {
                    (Some(news), _) => {
                        store.known.lock().heard(news);
                        store.saw(news.last.generation);
                    }
                    // A restore.
                    (None, Ok(generation)) => store.saw(Generation(generation)),
                    _ if payload == restore::ASK => store.asked.notify_one(),
                    _ if payload == outbox::NOTICE => store.outbox.notify_one(),
                    _ => {}
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
                    store.outbox.notify_one();
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
    jobs: Mutex<Option<Jobs>>,
    writer: tokio::sync::Mutex<Option<tokio::task::JoinHandle<()>>>,
    tasks: Vec<tokio::task::AbortHandle>,
}

impl PostgresBackend {
    async fn connect(options: PostgresOptions, address: Address) -> Result<PostgresBackend> {
        let mut sql = Statements::of(&options.schema);
        if options.breakage.skips_lock {
            let text = sql.queue_and_lock.text.replace("pg_advisory_xact_lock", "abs").replace(" FOR UPDATE OF h", "");
            sql.queue_and_lock.text = text;
            sql.write.text = sql.write.text.replace(AS_EXPECTED, "(true OR ");
        }
        let first = Link::open(&address, &[]).await?;
        let identity = prepare(&first, &sql, &options.env).await?;
        let has_upkeep = options.has_upkeep;
        let mut shared = Shared::new(options, address, sql, identity, false);
        shared.process = shared.new_id(&first).await?.get(0);
        let shared = Arc::new(shared);
        shared.plan(&first).await;
        *shared.upkeep.lock().await = Some(first);
        shared.head().await?;
        shared.renew().await?;
        shared.learn_all_floors().await?;
        let (jobs, waiting) = Jobs::new();
        let writer = Writer::new(shared.clone(), waiting, shared.open().await?).await?;
        let mut tasks = Vec::new();
        if has_upkeep {
            tasks.push(tokio::spawn(keep(Arc::downgrade(&shared))).abort_handle());
        }
        if shared.listens {
            tasks.push(tokio::spawn(listen(Arc::downgrade(&shared))).abort_handle());
        }
        // It ends by itself, when all that was given to it is answered.
        let writer = tokio::sync::Mutex::new(Some(tokio::spawn(writer.work())));
        Ok(PostgresBackend { shared, jobs: Mutex::new(Some(jobs)), writer, tasks })
    }
}

/// Creates the tables that are missing, all of them or those that an older program did not know, and gives the identity
/// of the store.
async fn prepare(link: &Link, sql: &Statements, env: &Env) -> Result<u128> {
    let error = |error: tokio_postgres::Error| failed("create the tables in", &error);
    match opened(link, sql).await? {
        Some((VERSION, identity)) => return Ok(identity),
        Some(_) => {
            for extension in extend(&sql.schema) {
                link.run(&extension).await.map_err(error)?;
            }
        }
        None => {}
    }
    // A role may have the right to use a schema without the right to create one.
    let is_there = link.query(&sql.has_schema, &[&sql.schema]).await.map_err(error)?;
    let identity = u128::from(env.random()) << 64 | u128::from(env.random());
    let create = create(&sql.schema, &format!("{identity:032x}"), is_there.is_empty());
    if let Err(failure) = link.run(&format!("BEGIN; {create} COMMIT;")).await {
        let _ = link.run("ROLLBACK").await;
        return Err(error(failure));
    }
    let opened = opened(link, sql).await?;
    opened.map(|(_, identity)| identity).ok_or_else(|| StoreError::corrupt("table store", "it has no row"))
}

/// The version of the tables and the identity of the store, if there is one.
async fn opened(link: &Link, sql: &Statements) -> Result<Option<(i32, u128)>> {
    let rows = match link.query(&sql.opened, &[]).await {
        Ok(rows) => rows,
        Err(error) if link::is_missing(&error) => return Ok(None),
        Err(error) => return Err(failed("read from", &error)),
    };
    let Some(row) = rows.first() else { return Ok(None) };
    let found: i32 = row.get(0);
    if found > VERSION {
        let path = sql.schema.clone().into();
        return Err(StoreError::NewerFormat { path, found: found as u32, supported: VERSION as u32 });
    }
    let identity = u128::from_str_radix(row.get(1), 16);
    identity
        .map(|identity| Some((found, identity)))
        .map_err(|_| StoreError::corrupt("table store", "its identity is no number"))
}

impl Drop for PostgresBackend {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
        // The views of this process are gone. If the runtime ends first, the lease of the row does.
        let is_unpinned = self.shared.is_unpinned.load(Ordering::SeqCst);
        if let (false, Ok(runtime)) = (is_unpinned, tokio::runtime::Handle::try_current()) {
            let shared = self.shared.clone();
            runtime.spawn(async move { shared.unpin().await });
        }
    }
}

impl Backend for PostgresBackend {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        let (answer, answered) = oneshot::channel();
        let sent = match &*self.jobs.lock() {
            Some(jobs) => jobs.send(Job { commit, answer }),
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

    fn newest<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Version>> {
        Box::pin(self.shared.newest(key))
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

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        Box::pin(self.shared.newer(than, space))
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
        self.shared.declare(space, rules, at);
    }

    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(async {
            if self.shared.is_closed() {
                return Err(StoreError::Closed);
            }
            let is_more = self.shared.maintain().await?;
            self.shared.vacuum_if_due();
            Ok(is_more)
        })
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(self.shared.replace(contents))
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(self.shared.verify())
    }

    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(self.shared.stats())
    }

    fn identity(&self) -> u128 {
        self.shared.identity
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn extension(&self) -> Option<&dyn std::any::Any> {
        Some(self)
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
            // The row of this process is not written after it was removed.
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.slots.close();
            // Those that wait for a newer generation look again.
            self.shared.latest.send_modify(|_| {});
            self.shared.unpin().await;
            Ok(())
        })
    }
}
