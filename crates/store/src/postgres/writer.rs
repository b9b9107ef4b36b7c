//! The writer of a process: it takes the commits that wait and makes one transaction of them. If the process knows what
//! they are decided on, the transaction is one statement. Otherwise it has two round trips: the first locks the row
//! with the generation and reads what the commits are decided on, the second writes and commits. Commits are decided by
//! [`evaluate`] on [`Facts`]; no rule of a commit is here.
//!
//! After a lost connection the outcome of a transaction is looked up: each transaction writes its number into the row
//! of its writer. So a commit is answered as landed exactly if it landed, and is never applied twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{try_join, try_join3};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::Row;

use crate::backend::{Decision, Facts, Head, Needs, evaluate};
use crate::codec::put_string;
use crate::postgres::Shared;
use crate::postgres::known::{Guess, Guessed, News};
use crate::postgres::link::{Link, Param, failed, is_passing, is_refusal};
use crate::postgres::ranges::Ranges;
use crate::postgres::read::signed;
use crate::postgres::schema::Sql;
use crate::space::{RECEIPTS, SPACES};
use crate::{
    Commit, Committed, ErrorKind, Generation, Key, Outcome, Range, Result, Rev, SpaceId, StoreError, Timestamp, Uuid,
    Version,
};

/// How many commits share a transaction at the most, and how many bytes of them.
const MOST: usize = 1024;
const MOST_BYTES: usize = 16 << 20;

/// The pauses between attempts to reach the server.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(super) const LAST_PAUSE: Duration = Duration::from_secs(1);

/// How a transaction begins. The defaults of the role do not count: conditions are decided after a lock, which needs
/// READ COMMITTED. The lock of the head or of the store comes next, with the [settings](super::schema::SETTINGS).
pub(super) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// The answer of the server to a statement.
pub(super) type Answered<T> = Result<T, tokio_postgres::Error>;

/// A commit that waits, and its caller.
pub(super) struct Job {
    pub(super) commit: Commit,
    pub(super) answer: oneshot::Sender<Result<Outcome>>,
}

impl Job {
    /// A commit whose caller is not told through a channel.
    pub(super) fn alone(commit: Commit) -> Job {
        Job { commit, answer: oneshot::channel().0 }
    }
}

/// Where commits are given to the writer. Urgent ones have a queue of their own, which is served first.
pub(super) struct Jobs {
    urgent: mpsc::UnboundedSender<Job>,
    others: mpsc::UnboundedSender<Job>,
}

/// The other end of [`Jobs`].
pub(super) struct Waiting {
    urgent: mpsc::UnboundedReceiver<Job>,
    others: mpsc::UnboundedReceiver<Job>,
}

impl Jobs {
    pub(super) fn new() -> (Jobs, Waiting) {
        let ((urgent, first), (others, then)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        (Jobs { urgent, others }, Waiting { urgent: first, others: then })
    }

    pub(super) fn send(&self, job: Job) -> Result<()> {
        let queue = if job.commit.is_urgent { &self.urgent } else { &self.others };
        queue.send(job).map_err(|_| StoreError::Closed)
    }
}

impl Waiting {
    /// Waits for commits if there are none, and puts urgent ones first. Gives whether there are any.
    async fn next(&mut self, waiting: &mut Vec<Job>) -> bool {
        if waiting.is_empty() {
            tokio::select! {
                biased;
                Some(job) = self.urgent.recv() => waiting.push(job),
                count = self.others.recv_many(waiting, MOST) => if count == 0 {
                    // Closed; what is urgent may have come before that.
                    waiting.extend(self.urgent.recv().await);
                },
            }
        }
        let first: Vec<Job> = std::iter::from_fn(|| self.urgent.try_recv().ok()).collect();
        waiting.splice(0..0, first);
        !waiting.is_empty()
    }
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    jobs: Waiting,
    link: Option<Link>,
    /// Names the row that holds the number of the last transaction.
    id: Uuid,
    number: i64,
}

/// What the commits of a group come to, if the transaction lands.
pub(super) struct DecidedGroup {
    pub(super) answers: Vec<Result<Outcome>>,
    pub(super) applied: Vec<Committed>,
    /// The head with which the group is decided.
    pub(super) before: Last,
    /// The head when the group has landed.
    pub(super) after: Last,
}

impl DecidedGroup {
    /// Whether the only commit of the group lands now.
    pub(super) fn is_to_land(&self) -> bool {
        matches!(&self.answers[..], [Ok(Outcome::Applied(receipt))] if !receipt.repeated)
    }
}

/// What the head says of the commits before.
#[derive(Clone, Copy)]
pub(super) struct Last {
    pub(super) generation: Generation,
    pub(super) time: Timestamp,
    /// The generation of the newest declaration.
    pub(super) declared: i64,
}

impl Last {
    fn of(row: &Row) -> Last {
        let (generation, time) = (row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64);
        Last { generation: Generation(generation), time: Timestamp(time), declared: row.get(2) }
    }
}

/// Why a transaction was not answered.
pub(super) enum Trouble {
    /// It has not landed, and the reason may pass.
    Failed(StoreError),
    /// It has not landed, and would not if it was sent again.
    Rejected(StoreError),
    /// It may have landed.
    Unknown(StoreError, DecidedGroup),
}

impl Writer {
    /// The id comes from the server: it must differ from that of every other writer, whatever the environment is.
    pub(super) async fn new(shared: Arc<Shared>, jobs: Waiting, link: Link) -> Result<Writer> {
        let rows = link.query(&shared.sql.new_id, &[]).await.map_err(|error| failed("read from", &error))?;
        let id = rows.first().map(|row| row.get(0)).ok_or_else(|| StoreError::corrupt("a new id", "there is none"))?;
        Ok(Writer { shared, jobs, link: Some(link), id, number: 0 })
    }

    /// Works until the store is closed.
    pub(super) async fn work(mut self) {
        let (mut waiting, mut group) = (Vec::new(), Vec::new());
        loop {
            if !self.jobs.next(&mut waiting).await {
                return;
            }
            let mut bytes = 0;
            let fits = |job: &Job| {
                bytes += job.commit.writes.iter().map(|write| write.key().encoded().len()).sum::<usize>();
                bytes += job.commit.meta.len();
                bytes += job.commit.writes.iter().filter_map(written).map(Bytes::len).sum::<usize>();
                bytes <= MOST_BYTES
            };
            let count = waiting.iter().map(fits).take_while(|fits| *fits).count().max(1);
            group.extend(waiting.drain(..count));
            self.commit(&mut group).await;
        }
    }

    /// Commits a group, however often the connection is lost, until it is answered or the patience is over.
    async fn commit(&mut self, group: &mut Vec<Job>) {
        if let Err(error) = self.commit_together(group).await {
            if group.len() == 1 || error.kind() != ErrorKind::Invalid {
                return group.drain(..).for_each(|job| drop(job.answer.send(Err(error.clone()))));
            }
            // One of them is to blame.
            for job in std::mem::take(group) {
                Box::pin(self.commit(&mut vec![job])).await;
            }
        }
    }

    async fn commit_together(&mut self, group: &mut Vec<Job>) -> Result<()> {
        let (began, mut pause) = (self.shared.env.monotonic(), FIRST_PAUSE);
        let mut unknown: Option<DecidedGroup> = None;
        loop {
            let tried = match unknown.take() {
                None => self.transact(group).await,
                Some(decided) => self.look_up(decided).await,
            };
            let error = match tried {
                Ok(Some(decided)) => {
                    self.answer(group, decided);
                    return Ok(());
                }
                // It is known not to have landed: once more.
                Ok(None) => continue,
                Err(Trouble::Rejected(error)) => return Err(error),
                Err(Trouble::Failed(error)) => error,
                Err(Trouble::Unknown(error, decided)) => {
                    unknown = Some(decided);
                    error
                }
            };
            let is_over = self.shared.env.monotonic().saturating_sub(began) >= self.shared.patience;
            if self.shared.is_closed() || is_over {
                return Err(match unknown {
                    Some(_) => StoreError::Uncertain { cause: error.to_string().into() },
                    None => error,
                });
            }
            self.shared.env.sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    fn answer(&self, group: &mut Vec<Job>, decided: DecidedGroup) {
        let (counters, applied) = (&self.shared.counters, decided.applied.len() as u64);
        counters.applied.fetch_add(applied, Ordering::Relaxed);
        if let Some(last) = decided.applied.last() {
            counters.groups.fetch_add(1, Ordering::Relaxed);
            self.shared.known.lock().landed(&decided.applied, decided.after);
            self.shared.saw(last.generation);
        }
        for (job, answer) in group.drain(..).zip(decided.answers) {
            if let Ok(Outcome::Refused(_)) = &answer {
                counters.refused.fetch_add(1, Ordering::Relaxed);
            }
            let _ = job.answer.send(answer);
        }
    }

    /// The connection of the writer; a new one if the last was lost.
    async fn link(&mut self) -> Result<&Link, Trouble> {
        if self.link.as_ref().is_none_or(Link::is_closed) {
            let link = self.shared.open().await.map_err(Trouble::Failed)?;
            self.link = Some(link);
        }
        self.link.as_ref().ok_or(Trouble::Failed(StoreError::Closed))
    }

    /// One transaction.
    async fn transact(&mut self, group: &[Job]) -> Result<Option<DecidedGroup>, Trouble> {
        let guess = self.shared.known.lock().guess(group);
        if let Some(guess) = guess
            && let Some(decided) = self.write_guessed(group, guess).await?
        {
            return Ok(Some(decided));
        }
        self.number += 1;
        let (shared, writer) = (self.shared.clone(), (self.id, self.number));
        let link = self.link().await?;
        let (begin, lock) = (link.run(BEGIN), link.query(&shared.sql.lock_head, &[]));
        let (mut facts, last) = match shared.in_time(link.drive(gather(&shared, link, group, (begin, lock)))).await {
            Ok(Ok(facts)) => facts,
            Ok(Err(trouble)) => {
                self.link = None;
                return Err(trouble);
            }
            Err(error) => {
                self.link = None;
                return Err(Trouble::Failed(error));
            }
        };
        let decided = decide(&shared, group, &mut facts, last);
        if decided.applied.is_empty() {
            let ended = shared.in_time(link.drive(link.run("COMMIT"))).await;
            let ended = ended.and_then(|ended| ended.map_err(|error| failed("read from", &error)));
            return match ended {
                Ok(()) => Ok(Some(decided)),
                Err(error) => {
                    self.link = None;
                    Err(Trouble::Failed(error))
                }
            };
        }
        let scope = Scope { writer, own: None, versions: &Guessed::default() };
        let work = try_join(write(&shared, link, &shared.sql.write, &decided, scope), link.run("COMMIT"));
        match shared.in_time(link.drive(work)).await {
            Ok(Ok((true, ()))) => Ok(Some(decided)),
            Ok(Ok((false, ()))) => {
                Err(Trouble::Rejected(StoreError::corrupt("table head", "it was changed while it was locked")))
            }
            Ok(Err(error)) if is_refusal(&error) => {
                self.link = None;
                Err(trouble("write to", &error))
            }
            Ok(Err(error)) => {
                self.link = None;
                Err(Trouble::Unknown(failed("write to", &error), decided))
            }
            Err(error) => {
                self.link = None;
                Err(Trouble::Unknown(error, decided))
            }
        }
    }

    /// Decides the group on a guess, and writes it with one statement, which compares the guess with the tables. None
    /// if it was wrong, or if nothing is to be written: an answer needs a state that is known to be there.
    async fn write_guessed(&mut self, group: &[Job], guess: Guess) -> Result<Option<DecidedGroup>, Trouble> {
        let Guess { mut facts, last, versions } = guess;
        let shared = self.shared.clone();
        let decided = decide(&shared, group, &mut facts, last);
        if decided.applied.is_empty() {
            return Ok(None);
        }
        self.number += 1;
        let scope = Scope { writer: (self.id, self.number), own: None, versions: &versions };
        let link = self.link().await?;
        let written = shared.in_time(link.drive(write(&shared, link, &shared.sql.write, &decided, scope))).await;
        let is_right = match written {
            Ok(Ok(is_written)) => is_written,
            // What the server has refused is sent again in a transaction with the settings that it needs.
            Ok(Err(error)) if is_refusal(&error) => false,
            Ok(Err(error)) => {
                self.link = None;
                return Err(Trouble::Unknown(failed("write to", &error), decided));
            }
            Err(error) => {
                self.link = None;
                return Err(Trouble::Unknown(error, decided));
            }
        };
        let mut known = shared.known.lock();
        if is_right {
            known.guessed_right();
            return Ok(Some(decided));
        }
        known.guessed_wrong(&versions);
        Ok(None)
    }

    /// Looks whether a transaction has landed whose answer was lost. The lock waits until it has ended, if it had the
    /// same lock when its last statement was sent. If it had not, the server may execute its statement later: the head
    /// is changed, so that it no longer finds what it was decided with.
    async fn look_up(&mut self, decided: DecidedGroup) -> Result<Option<DecidedGroup>, Trouble> {
        let (shared, id, number) = (self.shared.clone(), self.id, self.number);
        let link = match self.link().await {
            Ok(link) => link,
            Err(Trouble::Failed(error) | Trouble::Rejected(error) | Trouble::Unknown(error, _)) => {
                return Err(Trouble::Unknown(error, decided));
            }
        };
        let asked = async {
            link.run(BEGIN).await?;
            link.query(&shared.sql.lock_head, &[]).await?;
            link.query(&shared.sql.outdate, &[]).await?;
            let rows = link.query(&shared.sql.landed, &[&id]).await?;
            link.run("COMMIT").await?;
            Ok(rows.first().map(|row| row.get::<_, i64>(0)))
        };
        let asked = shared.in_time(asked).await;
        let asked = asked
            .and_then(|asked: Result<_, tokio_postgres::Error>| asked.map_err(|error| failed("read from", &error)));
        match asked {
            Ok(last) if last == Some(number) && !shared.breakage.sends_again => Ok(Some(decided)),
            Ok(_) => Ok(None),
            Err(error) => {
                self.link = None;
                Err(Trouble::Unknown(error, decided))
            }
        }
    }
}

/// What an error of a transaction that has not landed means.
fn trouble(action: &'static str, error: &tokio_postgres::Error) -> Trouble {
    let trouble = if is_passing(error) { Trouble::Failed } else { Trouble::Rejected };
    trouble(failed(action, error))
}

fn written(write: &crate::Write) -> Option<&Bytes> {
    match write {
        crate::Write::Put(_, value) | crate::Write::PutStamped(_, value, _) => Some(value),
        crate::Write::Delete(_) => None,
    }
}

/// Begins, scans the ranges, locks the head, and reads all else that the commits are decided on, in one round trip.
/// They are sent in this order, so what is read after the lock sees what is committed when the lock is taken.
pub(super) async fn gather(
    shared: &Shared,
    link: &Link,
    group: &[Job],
    (begin, lock): (impl Future<Output = Answered<()>>, impl Future<Output = Answered<Vec<Row>>>),
) -> Result<(Facts, Last), Trouble> {
    let needs: Vec<Needs<'_>> = group.iter().map(|job| Needs::of(&job.commit)).collect();
    let mut receipts: Vec<Key> = needs.iter().filter_map(Needs::receipt).collect();
    let mut keys: Vec<&[u8]> = needs.iter().flat_map(Needs::heads).chain(&receipts).map(Key::encoded).collect();
    keys.sort_unstable();
    keys.dedup();
    let ranges = Ranges::of(&needs, shared.seen());
    let of_receipts = Range::of_space(RECEIPTS);
    let (from, to) = (of_receipts.start(), of_receipts.end());
    let asked: [Param<'_>; 3] = [&keys, &from, &to];
    let heads = link.query(&shared.sql.heads, &asked);
    let locked = try_join3(begin, ranges.scan(shared, link), lock);
    let asked = try_join(locked, try_join(heads, ranges.since(shared, link)));
    let error = |error: tokio_postgres::Error| trouble("read from", &error);
    let (((), mut scanned, head), (heads, since)) = asked.await.map_err(error)?;
    let head = head.first().ok_or_else(|| Trouble::Rejected(StoreError::corrupt("table head", "it has no row")))?;
    let last = Last::of(head);
    let mut facts = Facts::new(last.generation);
    let heads = add_heads(&mut facts, &keys, &receipts, &heads).map_err(Trouble::Rejected)?;
    shared.known.lock().read(last, heads.into_iter());
    if shared.breakage.drops_receipts {
        receipts.drain(..).for_each(|receipt| facts.add_receipt(receipt, None));
    }
    shared.learn_floors(&since.floors);
    if !ranges.is_covered(shared, last.generation, &since) {
        scanned = ranges.scan(shared, link).await.map_err(error)?;
    }
    ranges.add_to(&mut facts, shared, scanned, &since).map_err(Trouble::Rejected)?;
    Ok((facts, last))
}

/// Gives the heads that were found.
fn add_heads(facts: &mut Facts, keys: &[&[u8]], receipts: &[Key], rows: &[Row]) -> Result<Vec<(Key, Option<Head>)>> {
    let mut found: BTreeMap<&[u8], &Row> = rows.iter().map(|row| (row.get::<_, &[u8]>(0), row)).collect();
    for receipt in receipts {
        let version = found.get(receipt.encoded()).map(|row| Version {
            rev: Rev(row.get::<_, i64>(1) as u64),
            generation: Generation(row.get::<_, i64>(2) as u64),
            time: Timestamp(row.get::<_, i64>(3) as u64),
            value: row.get::<_, Option<&[u8]>>(5).map(Bytes::copy_from_slice),
        });
        facts.add_receipt(receipt.clone(), version);
    }
    let mut heads = Vec::with_capacity(keys.len());
    for key in keys {
        let head = found.remove(key).map(|row| Head {
            rev: Rev(row.get::<_, i64>(1) as u64),
            generation: Generation(row.get::<_, i64>(2) as u64),
            live: row.get(4),
        });
        let key = key_of(key)?;
        facts.add_head(key.clone(), head);
        heads.push((key, head));
    }
    Ok(heads)
}

pub(super) fn key_of(bytes: &[u8]) -> Result<Key> {
    let key = Key::from_encoded(Bytes::copy_from_slice(bytes));
    key.ok_or_else(|| StoreError::corrupt("a key in the database", "it is too short"))
}

/// Decides the commits of a group, each on what those before it leave.
pub(super) fn decide(shared: &Shared, group: &[Job], facts: &mut Facts, before: Last) -> DecidedGroup {
    let mut after = before;
    let (mut answers, mut applied) = (Vec::with_capacity(group.len()), Vec::new());
    for job in group {
        let now = shared.env.now().max(after.time);
        answers.push(match evaluate(job.commit.clone(), facts, now) {
            Err(error) => Err(error),
            Ok(Decision::Answer(receipt)) => Ok(Outcome::Applied(receipt)),
            Ok(Decision::Refuse(refusal)) => Ok(Outcome::Refused(refusal)),
            Ok(Decision::Apply(committed, receipt)) => {
                facts.apply(&committed);
                (after.generation, after.time) = (committed.generation, committed.time);
                if committed.changes.iter().any(|change| change.key.space() == SPACES) {
                    after.declared = committed.generation.0 as i64;
                }
                applied.push(committed);
                Ok(Outcome::Applied(receipt))
            }
        });
    }
    DecidedGroup { answers, applied, before, after }
}

/// The rows of a table, as columns.
#[derive(Default)]
struct Versions<'a> {
    keys: Vec<&'a [u8]>,
    revs: Vec<i64>,
    generations: Vec<i64>,
    times: Vec<i64>,
    values: Vec<Option<&'a [u8]>>,
    /// Of versions that are overwritten: at which generation.
    until: Vec<i64>,
}

impl<'a> Versions<'a> {
    fn push(&mut self, key: &'a [u8], (rev, generation, time, value): Columns<'a>, until: i64) {
        self.keys.push(key);
        self.revs.push(rev);
        self.generations.push(generation);
        self.times.push(time);
        self.values.push(value);
        self.until.push(until);
    }
}

/// Rev, generation, time, value.
type Columns<'a> = (i64, i64, i64, Option<&'a [u8]>);

/// The commits, once for each space that they touch, as columns.
#[derive(Default)]
struct Commits<'a> {
    spaces: Vec<i64>,
    generations: Vec<i64>,
    times: Vec<i64>,
    metas: Vec<&'a [u8]>,
    keys: Vec<Vec<u8>>,
}

/// What a group writes.
#[derive(Default)]
struct GroupRows<'a> {
    /// Keys that had a version before the group, and at which generation that ends.
    overwritten: Vec<&'a [u8]>,
    until: Vec<i64>,
    /// Versions that the group itself overwrites.
    between: Versions<'a>,
    present: Versions<'a>,
    commits: Commits<'a>,
}

impl<'a> GroupRows<'a> {
    fn of(applied: &'a [Committed]) -> GroupRows<'a> {
        let mut newest: BTreeMap<&[u8], Columns<'_>> = BTreeMap::new();
        let mut rows = GroupRows::default();
        for committed in applied {
            let (generation, time) = (committed.generation.0 as i64, committed.time.0 as i64);
            let mut touched: BTreeMap<SpaceId, Vec<u8>> = BTreeMap::new();
            for change in &committed.changes {
                let key = change.key.encoded();
                let columns = (change.rev.0 as i64, generation, time, change.value.as_deref());
                match newest.insert(key, columns) {
                    Some(before) => rows.between.push(key, before, generation),
                    None if change.rev.0 > 1 => {
                        rows.overwritten.push(key);
                        rows.until.push(generation);
                    }
                    // Nothing is stored under the key.
                    None => {}
                }
                put_string(touched.entry(change.key.space()).or_default(), key);
            }
            for (space, touched) in touched {
                rows.commits.spaces.push(i64::from(space.0));
                rows.commits.generations.push(generation);
                rows.commits.times.push(time);
                rows.commits.metas.push(&committed.meta[..]);
                rows.commits.keys.push(touched);
            }
        }
        newest.into_iter().for_each(|(key, columns)| rows.present.push(key, columns, 0));
        rows
    }
}

/// In which transaction a group is written.
pub(super) struct Scope<'a> {
    /// The id of the writer, and the number of the transaction.
    pub(super) writer: (Uuid, i64),
    /// The name of the user's transaction.
    pub(super) own: Option<&'a str>,
    /// What was not read in this transaction.
    pub(super) versions: &'a Guessed,
}

/// Writes what is decided, or nothing if the head or a guessed version has changed. Gives whether it was written.
pub(super) async fn write(
    shared: &Shared,
    link: &Link,
    sql: &Sql,
    decided: &DecidedGroup,
    Scope { writer: (writer, number), own, versions }: Scope<'_>,
) -> Answered<bool> {
    let GroupRows { overwritten, until: ends, between, present, commits } = GroupRows::of(&decided.applied);
    let (before, after) = (decided.before, decided.after);
    let (generation, time) = (signed(after.generation), after.time.0 as i64);
    let (expected, expected_time) = (signed(before.generation), before.time.0 as i64);
    let (channel, news, guessed_keys) = (&shared.sql.channel, News::of(decided).to_text(), versions.encoded());
    let Versions { keys: past, generations: from, revs: past_revs, times: past_times, values: past_values, until } =
        &between;
    let Versions { keys: all, revs, generations: made, times: at, values, .. } = &present;
    let params: [Param<'_>; 31] = [
        &overwritten,
        &ends,
        past,
        from,
        past_revs,
        past_times,
        past_values,
        until,
        all,
        revs,
        made,
        at,
        values,
        &commits.spaces,
        &commits.generations,
        &commits.times,
        &commits.metas,
        &commits.keys,
        &generation,
        &time,
        &after.declared,
        &writer,
        &number,
        channel,
        &news,
        &shared.process,
        &expected,
        &expected_time,
        &guessed_keys,
        &versions.generations,
        &own,
    ];
    Ok(!link.query(sql, &params).await?.is_empty())
}
