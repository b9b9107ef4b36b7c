//! The messages to an execution, as far as they were not received. In memory from the first time that somebody looks;
//! from then on whoever delivers one tells of it.

use std::collections::{BTreeMap, BTreeSet};

use crate::store::{Generation, Key, Order, StoreError};
use crate::workflow::kept::{Message, counted};
use crate::workflow::record::WaitsFor;
use crate::workflow::run::{Run, State, Stop};

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
}

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
    pub(crate) fn take(&mut self, is_it: impl Fn(&Message) -> bool) -> Option<Received> {
        let address = self.messages.iter().find(|(_, message)| is_it(message))?.0.clone();
        let message = self.messages.remove(&address)?;
        self.taken.insert(address.clone(), message.clone());
        Some(Received { address, message })
    }

    /// Whether there is such a message.
    pub(crate) fn holds(&self, is_it: impl Fn(&Message) -> bool) -> bool {
        self.messages.values().any(is_it)
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

    /// Messages have come, in one commit.
    fn deliver(&mut self, count: u64, generation: Generation, messages: Vec<(Key, Message)>) {
        // They were read with the others, or are behind some that nobody has told of.
        if count <= self.count || self.is_stale {
            return;
        }
        if count > self.count + 1 {
            self.is_stale = true;
            return;
        }
        self.count = count;
        self.messages.extend(messages.into_iter().map(|(key, message)| ((generation, key), message)));
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
        if !is_known && let Err(error) = self.read_inbox().await {
            self.stop_for(Stop::Failed(error)).await
        }
    }

    /// Reads what was sent to it.
    pub(crate) async fn read_inbox(&self) -> Result<(), StoreError> {
        while !self.read_inbox_once().await? {}
        Ok(())
    }

    /// The same, unless something was received while it was read: then it may be among what was found.
    async fn read_inbox_once(&self) -> Result<bool, StoreError> {
        let receipts = self.with(|state| state.receipts);
        let kept = self.kept();
        let view = self.engine.store.view().await?;
        let count = counted(view.get(&kept.count()).await?.map(|item| item.rev));
        let found = view.scan(&kept.messages(), Order::Ascending, usize::MAX).await?;
        let mut messages = BTreeMap::new();
        for (key, item) in found {
            match Message::decode(&item.value) {
                Some(message) => {
                    messages.insert((item.generation, key), message);
                }
                None => tracing::error!(id = %self.id, "a message is damaged and cannot be received"),
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
            state.inbox = Some(Inbox { count, messages, taken: before.taken, is_stale });
            state.wake(|what, waits| waits && (what.is_message() || matches!(what, WaitsFor::Retry(_))));
            true
        }))
    }

    /// Somebody has delivered messages, in one commit.
    pub(crate) fn delivered(&self, count: u64, generation: Generation, messages: Vec<(Key, Message)>) {
        let is_stale = self.with(|state| {
            state.told_count = state.told_count.max(count);
            let Some(inbox) = &mut state.inbox else { return false };
            let waited: BTreeSet<WaitsFor> = messages.iter().map(|(_, message)| message.body.waited()).collect();
            inbox.deliver(count, generation, messages);
            let is_stale = inbox.is_stale;
            waited.iter().for_each(|what| state.wake_waiting(what));
            is_stale
        });
        if is_stale {
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
