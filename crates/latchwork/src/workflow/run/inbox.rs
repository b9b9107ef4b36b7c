//! The machine of the inbox: the messages to an execution that were not received. They are loaded when an operation
//! looks for a message for the first time; from then on each sender notifies the inbox of its delivery. The machine
//! does not know the operations that wait; it returns what a waiting operation would wait for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::try_join;

use crate::record::Record;
use crate::store::{Generation, Key, Order};
use crate::workflow::run::{Run, Stop};
use crate::workflow::stored::kept::{Message, MessageBody, counted};
use crate::workflow::stored::record::WaitsFor;

#[derive(Default)]
pub(crate) struct Inbox {
    /// Whether the messages are in memory.
    is_loaded: bool,
    /// How many deliveries are known. The sender counts each one in the commit that delivers.
    count: u64,
    /// The highest count that a sender has notified.
    told: u64,
    /// In the order in which they were delivered.
    messages: BTreeMap<Address, Message>,
    /// Messages whose receipt is not committed yet; and how many receipts were committed.
    taken: BTreeMap<Address, Message>,
    receipts: u64,
    /// True if the store holds messages that are not in memory.
    is_stale: bool,
    /// Deliveries that were notified before an earlier one, by their count; and since when one is missing, by the
    /// monotonic clock. Senders that deliver at the same time notify in any order.
    early: BTreeMap<u64, DeliveredMessages>,
    gap_since: Option<Duration>,
}

/// The messages that one commit delivered.
pub(super) struct DeliveredMessages {
    pub(super) generation: Generation,
    pub(super) messages: Vec<(Key, Message)>,
}

/// How long a missing notification is awaited before the messages are read. Many senders may be about to notify.
const GAP: Duration = Duration::from_millis(50);

/// Where a message is stored: the generation of its delivery, and its key.
pub(crate) type Address = (Generation, Key);

/// A message that was received.
pub(crate) struct Received {
    pub(crate) address: Address,
    pub(crate) message: Message,
}

/// The messages that a read has found, and how many receipts were committed when it began.
struct FoundMessages {
    count: u64,
    messages: BTreeMap<Address, Message>,
    receipts: u64,
}

/// What became of a read of the stored messages.
#[derive(Debug, PartialEq, Eq)]
enum Loaded {
    Now,
    /// A newer read came before it.
    Before,
    /// A receipt came before it: they are to be read again.
    Outdated,
}

/// What the inbox needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Need {
    Nothing,
    /// The messages have to be read from the store.
    Read,
    /// A sender may still notify of a missing delivery; look again after this pause.
    Patience(Duration),
}

impl Inbox {
    /// The inbox of an execution without any delivery. Senders notify it of everything from now on.
    pub(super) fn empty() -> Inbox {
        Inbox { is_loaded: true, ..Inbox::default() }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.is_loaded
    }

    /// The number of known deliveries, if the messages are in memory.
    pub(super) fn count(&self) -> Option<u64> {
        self.is_loaded.then_some(self.count)
    }

    /// The store may hold messages that are not in memory.
    pub(super) fn set_stale(&mut self) {
        self.is_stale = self.is_loaded;
    }

    /// Takes the first message that matches, for an operation.
    pub(crate) fn take(&mut self, is_it: impl Fn(&MessageBody) -> bool) -> Option<Received> {
        let address = self.messages.iter().find(|(_, message)| is_it(&message.body))?.0.clone();
        let message = self.messages.remove(&address)?;
        self.taken.insert(address.clone(), message.clone());
        Some(Received { address, message })
    }

    /// True if a message matches.
    pub(crate) fn holds(&self, is_it: impl Fn(&MessageBody) -> bool) -> bool {
        self.messages.values().any(|message| is_it(&message.body))
    }

    /// Puts a message back that was not received after all.
    pub(super) fn give_back(&mut self, address: Address) {
        let message = self.taken.remove(&address);
        self.messages.extend(message.map(|message| (address, message)));
    }

    /// A receipt is committed.
    pub(super) fn receive(&mut self, received: &Address) {
        self.receipts += 1;
        self.taken.remove(received);
    }

    /// A sender notifies of its delivery. Returns what operations may wait for among the messages that are new in
    /// memory.
    pub(super) fn deliver(&mut self, count: u64, delivery: DeliveredMessages, now: Duration) -> BTreeSet<WaitsFor> {
        self.told = self.told.max(count);
        let mut waited = BTreeSet::new();
        // A read has found these messages, or will find them.
        if !self.is_loaded || count <= self.count || self.is_stale {
            return waited;
        }
        self.early.insert(count, delivery);
        while let Some(DeliveredMessages { generation, messages }) = self.early.remove(&(self.count + 1)) {
            self.count += 1;
            waited.extend(messages.iter().map(|(_, message)| message.body.waited()));
            self.messages.extend(messages.into_iter().map(|(key, message)| ((generation, key), message)));
        }
        let is_same_gap = waited.is_empty() && self.gap_since.is_some();
        if !is_same_gap {
            self.gap_since = (!self.early.is_empty()).then_some(now);
        }
        waited
    }

    /// True if a delivery is missing since `now`.
    fn has_gap_since(&self, now: Duration) -> bool {
        self.gap_since == Some(now)
    }

    pub(super) fn need(&self, now: Duration) -> Need {
        let patience = self.gap_since.map(|since| GAP.saturating_sub(now.saturating_sub(since)));
        match patience {
            _ if self.is_stale => Need::Read,
            Some(Duration::ZERO) => Need::Read,
            Some(left) => Need::Patience(left),
            None => Need::Nothing,
        }
    }

    /// The messages were read. If a receipt was committed meanwhile, what it received may be among what was found, and
    /// they are to be read again.
    fn load(&mut self, FoundMessages { count, mut messages, receipts }: FoundMessages) -> Loaded {
        if self.receipts != receipts {
            return Loaded::Outdated;
        }
        // Two branches may read at once, and one may have seen less.
        if self.is_loaded && self.count > count {
            return Loaded::Before;
        }
        messages.retain(|address, _| !self.taken.contains_key(address));
        let is_stale = self.told > count;
        (self.is_loaded, self.count, self.messages, self.is_stale) = (true, count, messages, is_stale);
        self.early.clear();
        self.gap_since = None;
        Loaded::Now
    }
}

impl Run {
    /// Loads the messages, unless they are in memory.
    pub(crate) async fn ensure_inbox(&self) {
        let is_known = self.with(|state| {
            if !state.inbox.is_loaded() && !state.known.is_stored() {
                // No message can have been sent to an execution that is not stored.
                state.inbox = Inbox::empty();
            }
            state.inbox.is_loaded()
        });
        if !is_known && let Err(stop) = self.read_inbox().await {
            self.stop_for(stop).await
        }
    }

    /// Reads the messages from the store.
    pub(crate) async fn read_inbox(&self) -> Result<(), Stop> {
        while !self.read_inbox_once().await? {}
        Ok(())
    }

    async fn read_inbox_once(&self) -> Result<bool, Stop> {
        let receipts = self.with(|state| state.inbox.receipts);
        let kept = self.kept();
        let view = self.engine.store.view().await.map_err(|error| self.failed(error))?;
        let (key, range) = (kept.count(), kept.messages());
        let reads = try_join(view.get(&key), view.scan(&range, Order::Ascending, usize::MAX));
        let (count, found) = reads.await.map_err(|error| self.failed(error))?;
        let count = counted(count.map(|item| item.rev));
        let mut messages = BTreeMap::new();
        for (key, item) in found {
            match Message::decode(&item.value) {
                Ok(message) => {
                    messages.insert((item.generation, key), message);
                }
                Err(why) if why.is_version() => return Err(Stop::unknown_version(why.at("a message to it"))),
                // The execution continues without this message.
                Err(_) => self.engine.put_aside(&self.id, format!("message {key} is damaged: it cannot be received")),
            }
        }
        Ok(self.with(|state| {
            let loaded = state.inbox.load(FoundMessages { count, messages, receipts });
            if loaded == Loaded::Now {
                state.ops.wake_for_messages();
            }
            loaded != Loaded::Outdated
        }))
    }

    /// A sender notifies that one commit has delivered messages.
    pub(crate) fn delivered(&self, count: u64, generation: Generation, messages: Vec<(Key, Message)>) {
        let now = self.env().monotonic();
        let has_gap = self.with(|state| {
            let waited = state.inbox.deliver(count, DeliveredMessages { generation, messages }, now);
            waited.iter().for_each(|what| state.ops.wake_waiting(what));
            state.inbox.has_gap_since(now)
        });
        if has_gap {
            self.nudge();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{SpaceSpec, Store};

    const NOW: Duration = Duration::from_secs(1);

    async fn key(number: u64) -> Key {
        let store = Store::memory().await.unwrap();
        store.space(SpaceSpec::new("messages")).await.unwrap().key(number.to_be_bytes())
    }

    /// The delivery of the message with this number.
    async fn delivery(number: u64) -> DeliveredMessages {
        let body = MessageBody::Signal { name: "s".into(), payload: number.to_string() };
        let messages = vec![(key(number).await, Message { at_us: 0, body })];
        DeliveredMessages { generation: Generation(100 + number), messages }
    }

    async fn found(numbers: &[u64], count: u64, receipts: u64) -> FoundMessages {
        let mut messages = BTreeMap::new();
        for number in numbers {
            let DeliveredMessages { generation, messages: some } = delivery(*number).await;
            messages.extend(some.into_iter().map(|(key, message)| ((generation, key), message)));
        }
        FoundMessages { count, messages, receipts }
    }

    fn payloads(inbox: &Inbox) -> Vec<String> {
        let payload = |message: &Message| match &message.body {
            MessageBody::Signal { payload, .. } => payload.clone(),
            _ => String::new(),
        };
        inbox.messages.values().map(payload).collect()
    }

    /// Two threads deliver at once, and the later one notifies first: no message is received out of order.
    #[tokio::test]
    async fn notifications_in_any_order_are_held_in_the_order_of_delivery() {
        let mut inbox = Inbox::empty();
        for (number, held, has_gap) in
            [(2, 0, true), (4, 0, true), (1, 2, true), (1, 2, true), (3, 4, false), (2, 4, false)]
        {
            let waited = inbox.deliver(number, delivery(number).await, NOW);
            assert_eq!(inbox.count(), Some(held), "after {number}");
            let is_told = number == 1 && held == 2 || number == 3;
            assert!(waited.len() <= 1 && (is_told || waited.is_empty()), "after {number}: {waited:?}");
            let need = if has_gap { Need::Patience(GAP) } else { Need::Nothing };
            assert_eq!(inbox.need(NOW), need, "after {number}");
            let expected: Vec<String> = (1..=held).map(|number| number.to_string()).collect();
            assert_eq!(payloads(&inbox), expected);
        }
    }

    /// A sender was dropped before it could notify of its delivery. The next delivery shows that one is missing. The
    /// inbox waits only `GAP` for the notification, and later deliveries do not extend that.
    #[tokio::test]
    async fn a_delivery_without_a_notification_is_read_after_a_while() {
        let mut inbox = Inbox::empty();
        inbox.deliver(2, delivery(2).await, NOW);
        inbox.deliver(3, delivery(3).await, NOW + GAP / 2);
        assert_eq!(inbox.need(NOW + GAP / 2), Need::Patience(GAP / 2));
        assert_eq!(inbox.need(NOW + GAP), Need::Read);
        assert_eq!(payloads(&inbox), [""; 0]);
        inbox.set_stale();
        inbox.deliver(1, delivery(1).await, NOW);
        assert_eq!(inbox.count(), Some(0), "a stale inbox waits for the read");
    }

    /// Each row: the messages that a read has found, the count there, and what follows.
    #[tokio::test]
    async fn a_read_counts_unless_a_receipt_or_a_newer_read_came_before_it() {
        // FoundMessages, count, receipts before it; then whether it counts, and which messages are held.
        type Row<'a> = (&'a [u64], u64, u64, bool, &'a [&'a str]);
        let table: &[Row<'_>] =
            &[(&[1, 2], 2, 0, true, &["1", "2"]), (&[1], 1, 0, true, &["1"]), (&[1, 2], 2, 7, false, &[])];
        for (number, (numbers, count, receipts, counts, held)) in table.iter().enumerate() {
            let mut inbox = Inbox::default();
            let loaded = inbox.load(found(numbers, *count, *receipts).await);
            assert_eq!(loaded, if *counts { Loaded::Now } else { Loaded::Outdated }, "row {number}");
            assert_eq!(payloads(&inbox), *held, "row {number}");
            assert_eq!(inbox.need(NOW), Need::Nothing, "row {number}");
        }
        let mut inbox = Inbox::default();
        inbox.deliver(3, delivery(3).await, NOW);
        assert!(
            inbox.load(found(&[1, 2], 2, 0).await) == Loaded::Now && inbox.need(NOW) == Need::Read,
            "a delivery is newer"
        );
        assert!(inbox.load(found(&[1, 2, 3], 3, 0).await) == Loaded::Now && inbox.need(NOW) == Need::Nothing);
        let taken = inbox.take(|_| true).unwrap();
        assert_eq!(inbox.load(found(&[1, 2, 3], 3, 0).await), Loaded::Now);
        assert_eq!(payloads(&inbox), ["2", "3"], "a message that an operation has taken is not found again");
        assert_eq!(inbox.load(found(&[1], 1, 0).await), Loaded::Before);
        assert_eq!(payloads(&inbox), ["2", "3"], "an older read changes nothing");
        inbox.give_back(taken.address.clone());
        assert_eq!(payloads(&inbox), ["1", "2", "3"], "it was not received after all");
        let taken = inbox.take(|_| true).unwrap();
        inbox.receive(&taken.address);
        assert_eq!(
            inbox.load(found(&[1, 2, 3], 3, 0).await),
            Loaded::Outdated,
            "it may have been read before the receipt"
        );
        inbox.give_back(taken.address);
        assert_eq!(payloads(&inbox), ["2", "3"], "a receipt that is committed stands");
    }
}
