//! The writer of a process: it takes the commits that wait and makes one transaction of them. If the process knows what
//! they are decided on, the transaction is one statement. If it knows all but the generation, which other processes
//! move, the transaction locks the row with the generation and writes the group with whatever generation it finds, in
//! one round trip. Otherwise it has two: the first locks the row and reads what the commits are decided on, the second
//! writes and commits. Commits are decided by [`evaluate`] on [`Facts`]; no rule of a commit is here.
//!
//! After a lost connection the outcome of a transaction is looked up: each transaction writes its number into the row
//! of its writer. So a commit is answered as landed exactly if it landed, and is never applied twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{try_join, try_join3, try_join4};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::Row;

use crate::backend::{Decision, Facts, Head, Needs, evaluate};
use crate::postgres::Shared;
use crate::postgres::group::{MANY, Scope, write};
use crate::postgres::known::{Guess, Guessed};
use crate::postgres::landed::{Landed, ServerClock};
use crate::postgres::link::{Link, Param, failed, is_passing, is_refusal};
use crate::postgres::ranges::Ranges;
use crate::postgres::read::signed;
use crate::space::{RECEIPTS, SPACES};
use crate::{
    Check, Commit, Committed, ErrorKind, Generation, Key, Outcome, Range, Receipt, Result, Rev, StoreError, Timestamp,
    Uuid, Version, Write,
};

/// How many commits share a transaction at the most, and how many bytes of them.
const MOST: usize = 1024;
const MOST_BYTES: usize = 16 << 20;

/// How often callers may bring new commits before the next transaction begins.
const MOST_ROUNDS: u32 = 8;

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
    /// Lets callers go on that were answered, as long as they bring new commits: these share the next transaction.
    async fn settle(&self) {
        for _ in 0..MOST_ROUNDS {
            let count = self.others.len();
            if count >= MOST || !self.urgent.is_empty() {
                return;
            }
            tokio::task::yield_now().await;
            if self.others.len() == count {
                return;
            }
        }
    }

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
    /// Names the row that holds the number of the last transaction. Numbers are even: one that was given up leaves the
    /// odd number after it.
    id: Uuid,
    number: i64,
    clock: ServerClock,
    /// When the last transaction was sent, by the clock of the server.
    sent: f64,
}

/// What the commits of a group come to, if the transaction lands.
pub(super) struct DecidedGroup {
    pub(super) answers: Vec<Result<Outcome>>,
    pub(super) applied: Vec<Committed>,
    /// The head with which the group is decided.
    pub(super) before: Last,
    /// The head when the group has landed.
    pub(super) after: Last,
    /// The generation of the newest declaration among the commits.
    pub(super) declared: Option<i64>,
    /// Whether the group moves along with the head, which its transaction locks.
    pub(super) moves: bool,
}

impl DecidedGroup {
    /// Whether the only commit of the group lands now.
    pub(super) fn is_to_land(&self) -> bool {
        matches!(&self.answers[..], [Ok(Outcome::Applied(receipt))] if !receipt.repeated)
    }

    /// Whether the group may land with another head than it was decided with. Then nothing that it writes or answers
    /// may depend on generations or times, but those of its commits themselves.
    fn may_move(&self, group: &[Job]) -> bool {
        let is_plain = |Job { commit, .. }: &Job| {
            let is_stamped = |write: &Write| matches!(write, Write::PutStamped(..));
            // The receipt of a commit with an id holds its time.
            commit.id.is_none()
                && !commit.checks.iter().any(|check| matches!(check, Check::AtGeneration(_)))
                && !commit.writes.iter().any(is_stamped)
        };
        let is_refused = |answer: &Result<Outcome>| matches!(answer, Ok(Outcome::Refused(_)));
        self.declared.is_none() && group.iter().all(is_plain) && !self.answers.iter().any(is_refused)
    }

    /// The group as it has landed, with the head that it has left.
    fn landed(mut self, after: Last) -> DecidedGroup {
        if !self.moves {
            return self;
        }
        let by = after.generation.0 - self.after.generation.0;
        for Committed { generation, time, .. } in &mut self.applied {
            (generation.0, *time) = (generation.0 + by, after.time);
        }
        for answer in &mut self.answers {
            if let Ok(Outcome::Applied(Receipt { generation, time, .. })) = answer {
                (generation.0, *time) = (generation.0 + by, after.time);
            }
        }
        self.after = after;
        self
    }
}

/// What became of a guess.
enum Guessing {
    /// The group has landed, or has nothing to land.
    Decided(DecidedGroup),
    /// Nothing was written, because the head was another one.
    HeadWasWrong,
    /// Nothing was written. The next attempt looks at the tables.
    Looks,
}

/// What the head says of the commits before.
#[derive(Clone, Copy)]
pub(super) struct Last {
    pub(super) generation: Generation,
    pub(super) time: Timestamp,
}

impl Last {
    /// From two columns of a row; none if the first one is null.
    pub(super) fn of(row: &Row, column: usize) -> Option<Last> {
        let generation: i64 = row.get::<_, Option<i64>>(column)?;
        let time: i64 = row.get(column + 1);
        Some(Last { generation: Generation(generation as u64), time: Timestamp(time as u64) })
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
    pub(super) async fn new(shared: Arc<Shared>, jobs: Waiting, link: Link) -> Result<Writer> {
        let row = shared.new_id(&link).await?;
        let clock = ServerClock::read(&shared.env, &row, 1);
        Ok(Writer { shared, jobs, link: Some(link), id: row.get(0), number: 0, clock, sent: clock.shown })
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
            if count > 1 {
                self.jobs.settle().await;
            }
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
        for _ in 0..2 {
            let guess = self.shared.known.lock().guess(group);
            let Some(guess) = guess else { break };
            match self.write_guessed(group, guess).await? {
                Guessing::Decided(decided) => return Ok(Some(decided)),
                Guessing::HeadWasWrong => {}
                Guessing::Looks => break,
            }
        }
        self.number += 2;
        let (shared, writer) = (self.shared.clone(), (self.id, self.number));
        self.sent = self.clock.after(&shared.env, Duration::ZERO);
        let link = self.link().await?;
        let (begin, lock) = (link.run(BEGIN), link.query(&shared.sql.queue_and_lock, &[&""]));
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
        let scope = Scope { writer, name: None, versions: &Guessed::default(), deadline: None };
        let work = try_join(write(&shared, link, &shared.sql.write, &decided, scope), link.run("COMMIT"));
        match shared.in_time(link.drive(work)).await {
            Ok(Ok((written, ()))) => {
                let changed = || StoreError::corrupt("table head", "it was changed while it was locked");
                let row = written.first().ok_or_else(|| Trouble::Rejected(changed()))?;
                self.clock = ServerClock::read(&shared.env, row, 4);
                Ok(Some(decided))
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

    /// Decides the group on a guess, and writes it in one round trip, with a statement that compares the guess with the
    /// tables.
    async fn write_guessed(&mut self, group: &[Job], guess: Guess) -> Result<Guessing, Trouble> {
        let Guess { mut facts, last, versions, moves } = guess;
        let shared = self.shared.clone();
        let mut decided = decide(&shared, group, &mut facts, last);
        decided.moves = moves;
        // An answer needs a state that is known to be there.
        if decided.applied.is_empty() || (moves && !decided.may_move(group)) {
            return Ok(Guessing::Looks);
        }
        self.number += 2;
        let (writer, name) = ((self.id, self.number), moves.then(|| self.number.to_string()));
        self.sent = self.clock.after(&shared.env, Duration::ZERO);
        let deadline = self.clock.after(&shared.env, shared.limit() / 2);
        let scope = Scope { writer, name: name.as_deref(), versions: &versions, deadline: Some(deadline) };
        let link = self.link().await?;
        let written = write(&shared, link, &shared.sql.write, &decided, scope);
        let (keys, of_receipts) = (versions.encoded(), Range::of_space(RECEIPTS));
        let (from, to) = (of_receipts.start(), of_receipts.end());
        let asked: [Param<'_>; 5] = [&keys, &from, &to, &writer.0, &writer.1];
        // Of a large group, some commit is to land, whatever is found.
        let asks_heads = group.len() < MANY;
        let written = async {
            let Some(name) = &name else { return Ok((written.await?, None)) };
            // With its name, the statement does nothing outside of the transaction with the lock.
            let name: [Param<'_>; 1] = [name];
            let locked = try_join(link.run(BEGIN), link.query(&shared.sql.queue_and_lock, &name));
            let heads = async {
                let heads = link.query(&shared.sql.heads_unless, &asked);
                if asks_heads { heads.await.map(Some) } else { Ok(None) }
            };
            let (((), head), written, heads, ()) = try_join4(locked, written, heads, link.run("COMMIT")).await?;
            Ok((written, heads.map(|heads| (head, heads))))
        };
        let (written, found) = match shared.in_time(link.drive(written)).await {
            Ok(Ok(answered)) => answered,
            // What the server has refused is sent again in a transaction with the settings that it needs.
            Ok(Err(error)) if is_refusal(&error) => {
                // In a transaction, what was sent after it may still be on its way.
                self.link = self.link.take().filter(|_| !moves);
                (Vec::new(), None)
            }
            Ok(Err(error)) => {
                self.link = None;
                return Err(Trouble::Unknown(failed("write to", &error), decided));
            }
            Err(error) => {
                self.link = None;
                return Err(Trouble::Unknown(error, decided));
            }
        };
        if let Some((row, after)) = written.first().and_then(|row| Some((row, Last::of(row, 2)?))) {
            self.clock = ServerClock::read(&shared.env, row, 4);
            shared.known.lock().guessed_right(moves);
            return Ok(Guessing::Decided(decided.landed(after)));
        }
        if !moves {
            shared.known.lock().guessed_head_wrong();
            return Ok(if versions.are_sure(group) { Guessing::HeadWasWrong } else { Guessing::Looks });
        }
        if let Some((head, rows)) = found {
            // What was found under the lock is enough to refuse commits, and most of them are refused now.
            let (mut facts, last, heads) = facts_of(&head, &keys, &[], &rows).map_err(Trouble::Rejected)?;
            shared.known.lock().looked(heads.into_iter());
            let decided = decide(&shared, group, &mut facts, last);
            if decided.applied.is_empty() {
                return Ok(Guessing::Decided(decided));
            }
        }
        shared.known.lock().guessed_keys_wrong(&versions);
        Ok(Guessing::Looks)
    }

    /// Looks whether a transaction has landed whose answer was lost. The lock waits until it has ended, if it had the
    /// same lock when its last statement was sent. If it had not, the server may execute its statement later: the head
    /// is changed, and the row of the writer, so that it no longer finds what it was decided with.
    async fn look_up(&mut self, decided: DecidedGroup) -> Result<Option<DecidedGroup>, Trouble> {
        let (shared, id, number, sent) = (self.shared.clone(), self.id, self.number, self.sent);
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
            link.query(&shared.sql.give_up, &[&id, &number]).await?;
            link.run("COMMIT").await?;
            Ok(rows.first().map(Landed::of))
        };
        let asked = shared.in_time(asked).await;
        let asked = asked
            .and_then(|asked: Result<_, tokio_postgres::Error>| asked.map_err(|error| failed("read from", &error)));
        match asked {
            Ok(Some(landed)) if !shared.breakage.sends_again => match landed.has(number, sent) {
                Ok(true) => Ok(Some(match landed.last {
                    Some(after) => decided.landed(after),
                    None => decided,
                })),
                Ok(false) => Ok(None),
                Err(error) => Err(Trouble::Rejected(error)),
            },
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

fn written(write: &Write) -> Option<&Bytes> {
    match write {
        Write::Put(_, value) | Write::PutStamped(_, value, _) => Some(value),
        Write::Delete(_) => None,
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
    let (mut facts, last, heads) = facts_of(&head, &keys, &receipts, &heads).map_err(Trouble::Rejected)?;
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

/// A key, and its newest version, if it has one.
type FoundHead = (Key, Option<Head>);

/// What commits are decided on, by what was read under the lock of the head: the head, and versions of keys. Receipts
/// are among the keys.
fn facts_of(head: &[Row], keys: &[&[u8]], receipts: &[Key], rows: &[Row]) -> Result<(Facts, Last, Vec<FoundHead>)> {
    let last = head.first().and_then(|row| Last::of(row, 0));
    let last = last.ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
    let mut facts = Facts::new(last.generation);
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
    Ok((facts, last, heads))
}

pub(super) fn key_of(bytes: &[u8]) -> Result<Key> {
    let key = Key::from_encoded(Bytes::copy_from_slice(bytes));
    key.ok_or_else(|| StoreError::corrupt("a key in the database", "it is too short"))
}

/// Decides the commits of a group, each on what those before it leave.
pub(super) fn decide(shared: &Shared, group: &[Job], facts: &mut Facts, before: Last) -> DecidedGroup {
    let (mut after, mut declared) = (before, None);
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
                    declared = Some(signed(committed.generation));
                }
                applied.push(committed);
                Ok(Outcome::Applied(receipt))
            }
        });
    }
    DecidedGroup { answers, applied, before, after, declared, moves: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller that always has another commit does not hold up the group.
    #[tokio::test]
    async fn callers_that_never_end_do_not_hold_up_a_group() {
        let (jobs, waiting) = Jobs::new();
        tokio::spawn(async move {
            while jobs.send(Job::alone(Commit::new())).is_ok() {
                tokio::task::yield_now().await;
            }
        });
        waiting.settle().await;
        assert!(waiting.others.len() <= 2 * MOST_ROUNDS as usize, "{} have come", waiting.others.len());
    }
}
