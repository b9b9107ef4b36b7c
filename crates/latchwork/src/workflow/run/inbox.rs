//! The messages to an execution, as far as they were not received. In memory from the first time that somebody looks;
//! from then on whoever delivers one tells of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::record::Record;
use crate::store::{Generation, Key, Order};
use crate::workflow::run::{Run, State, Stop};
use crate::workflow::stored::kept::{Letter, Message, counted};
use crate::workflow::stored::record::WaitsFor;

#[derive(Default)]
pub(crate) struct Inbox {
    /// How often something was delivered by now. Whoever delivers counts that in the same commit.
    count: u64,
    /// In the order in which they came.
    messages: BTreeMap<Address, Message>,
    /// Those that were received, as long as that is not committed.
    taken: BTreeMap<Address, Message>,
    /// Whether there are messages that it does not hold.
    is_stale: bool,
    /// Messages that came behind some that nobody has told of yet, by the count; and since when, by the clock that only
    /// goes forward. Those who deliver at once tell of it in any order.
    early: BTreeMap<u64, Delivery>,
    gap_since: Option<Duration>,
}

/// Messages that came in one commit.
struct Delivery {
    generation: Generation,
    messages: Vec<(Key, Message)>,
}

/// How long somebody who has delivered something may take to tell of it, before it is read. Many may be about to.
const GAP: Duration = Duration::from_millis(50);

/// Where a message is: the generation in which it came, and its key.
pub(crate) type Address = (Generation, Key);

/// A message that was received.
pub(crate) struct Received {
    pub(crate) address: Address,
    pub(crate) message: Message,
}

impl Inbox {
    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// The count that is known.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn set_stale(&mut self) {
        self.is_stale = true;
    }

    /// Takes the first message of a kind for an operation.
    pub(crate) fn take(&mut self, is_it: impl Fn(&Letter) -> bool) -> Option<Received> {
        let address = self.messages.iter().find(|(_, message)| is_it(&message.body))?.0.clone();
        let message = self.messages.remove(&address)?;
        self.taken.insert(address.clone(), message.clone());
        Some(Received { address, message })
    }

    /// Whether there is such a message.
    pub(crate) fn holds(&self, is_it: impl Fn(&Letter) -> bool) -> bool {
        self.messages.values().any(|message| is_it(&message.body))
    }

    /// A message was not received after all.
    pub(super) fn give_back(&mut self, address: Address) {
        let message = self.taken.remove(&address);
        self.messages.extend(message.map(|message| (address, message)));
    }

    /// A receipt is committed.
    pub(super) fn remove(&mut self, received: &Address) {
        self.taken.remove(received);
    }

    /// Messages have come. Gives who may wait for those that it holds by that.
    fn deliver(&mut self, count: u64, delivery: Delivery, now: Duration) -> BTreeSet<WaitsFor> {
        let mut waited = BTreeSet::new();
        // They were read with the others, or will be.
        if count <= self.count || self.is_stale {
            return waited;
        }
        self.early.insert(count, delivery);
        while let Some(Delivery { generation, messages }) = self.early.remove(&(self.count + 1)) {
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

    /// For how long it still waits to be told of messages, if it knows that there are some.
    pub(crate) fn patience(&self, now: Duration) -> Option<Duration> {
        self.gap_since.map(|since| GAP.saturating_sub(now.saturating_sub(since)))
    }
}

impl Run {
    /// Sees to it that the messages are in memory.
    pub(crate) async fn ensure_inbox(&self) {
        let is_known = self.with(|state| match (&state.inbox, state.rev) {
            (Some(_), _) => true,
            // Nobody can have sent it anything.
            (None, None) => {
                state.inbox = Some(Inbox::default());
                true
            }
            (None, Some(_)) => false,
        });
        if !is_known && let Err(stop) = self.read_inbox().await {
            self.stop_for(stop).await
        }
    }

    /// Reads what was sent to it.
    pub(crate) async fn read_inbox(&self) -> Result<(), Stop> {
        while !self.read_inbox_once().await? {}
        Ok(())
    }

    /// The same, unless something was received while it was read: then it may be among what was found.
    async fn read_inbox_once(&self) -> Result<bool, Stop> {
        let receipts = self.with(|state| state.receipts);
        let kept = self.kept();
        let view = self.engine.store.view().await.map_err(|error| self.failed(error))?;
        let count = counted(view.get(&kept.count()).await.map_err(|error| self.failed(error))?.map(|item| item.rev));
        let found =
            view.scan(&kept.messages(), Order::Ascending, usize::MAX).await.map_err(|error| self.failed(error))?;
        let mut messages = BTreeMap::new();
        for (key, item) in found {
            match Message::decode(&item.value) {
                Ok(message) => {
                    messages.insert((item.generation, key), message);
                }
                Err(why) if why.is_version() => return Err(Stop::unknown_version(why.at("a message to it"))),
                // It goes on without that.
                Err(_) => self.engine.put_aside(&self.id, format!("message {key} is damaged: it cannot be received")),
            }
        }
        Ok(self.with(|state| {
            if state.receipts != receipts {
                return false;
            }
            // Two branches may read at once, and one have seen less.
            if state.inbox.as_ref().is_some_and(|known| known.count > count) {
                return true;
            }
            let before = state.inbox.take().unwrap_or_default();
            messages.retain(|address, _| !before.taken.contains_key(address));
            let is_stale = state.told_count > count;
            state.inbox = Some(Inbox { count, messages, taken: before.taken, is_stale, ..Inbox::default() });
            state.wake(|what, waits| waits && (what.is_message() || matches!(what, WaitsFor::Retry(_))));
            true
        }))
    }

    /// Somebody has delivered messages, in one commit.
    pub(crate) fn delivered(&self, count: u64, generation: Generation, messages: Vec<(Key, Message)>) {
        let now = self.env().monotonic();
        let has_gap = self.with(|state| {
            state.told_count = state.told_count.max(count);
            let Some(inbox) = &mut state.inbox else { return false };
            let waited = inbox.deliver(count, Delivery { generation, messages }, now);
            let has_gap = inbox.gap_since == Some(now);
            waited.iter().for_each(|what| state.wake_waiting(what));
            has_gap
        });
        if has_gap {
            self.nudge();
        }
    }
}

impl State {
    /// The messages, which whoever asks has seen to be in memory.
    pub(crate) fn inbox(&mut self) -> &mut Inbox {
        self.inbox.get_or_insert_default()
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

    /// The message of this number, as it came.
    async fn came(number: u64) -> Delivery {
        let body = Letter::Signal { name: "s".into(), payload: number.to_string() };
        let messages = vec![(key(number).await, Message { at_us: 0, body })];
        Delivery { generation: Generation(100 + number), messages }
    }

    fn payloads(inbox: &Inbox) -> Vec<String> {
        let payload = |message: &Message| match &message.body {
            Letter::Signal { payload, .. } => payload.clone(),
            _ => String::new(),
        };
        inbox.messages.values().map(payload).collect()
    }

    /// Two threads have delivered at once, and the later one tells first: neither is received out of turn.
    #[tokio::test]
    async fn what_is_told_in_any_order_is_held_in_the_order_it_came() {
        let mut inbox = Inbox::default();
        for (number, held, has_gap) in
            [(2, 0, true), (4, 0, true), (1, 2, true), (1, 2, true), (3, 4, false), (2, 4, false)]
        {
            let waited = inbox.deliver(number, came(number).await, NOW);
            assert_eq!(inbox.count(), held, "after {number}");
            let is_told = number == 1 && held == 2 || number == 3;
            assert!(waited.len() <= 1 && (is_told || waited.is_empty()), "after {number}: {waited:?}");
            assert_eq!(inbox.patience(NOW), has_gap.then_some(GAP), "after {number}");
            let expected: Vec<String> = (1..=held).map(|number| number.to_string()).collect();
            assert_eq!(payloads(&inbox), expected);
        }
    }

    /// Whoever has delivered a message was dropped before it could tell: that it is missing is known by the next, and
    /// it is waited for no longer than it takes to tell. Others that come meanwhile do not make that longer.
    #[tokio::test]
    async fn what_nobody_tells_of_is_not_waited_for() {
        let mut inbox = Inbox::default();
        inbox.deliver(2, came(2).await, NOW);
        inbox.deliver(3, came(3).await, NOW + GAP / 2);
        assert_eq!(inbox.patience(NOW + GAP / 2), Some(GAP / 2));
        assert_eq!(inbox.patience(NOW + GAP), Some(Duration::ZERO), "it is to be read");
        assert_eq!(payloads(&inbox), [""; 0]);
        inbox.set_stale();
        inbox.deliver(1, came(1).await, NOW);
        assert_eq!(inbox.count(), 0, "what is to be read is read with it");
    }
}
