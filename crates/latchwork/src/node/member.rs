//! The nodes of a store that processes share: their stored records, and what one node knows of the others. This file
//! decides nothing; `plan.rs` and `membership.rs` do.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::lease::Watch;
use super::notice::NOTICES;
use super::plan::Candidate;
use crate::record::{Record, stored};
use crate::store::{History, Key, Rev, Space, SpaceSpec, Store, StoreError, Uuid};

/// The names of the spaces: nodes and notices, which every node follows; and the log of moves.
pub(super) const BOARD: &str = "node.board";
pub(super) const MOVES: &str = "node.moves";

/// How long notices are kept. A node that was paused for longer looks at everything again.
const NOTICES_KEPT: Duration = Duration::from_secs(60);

/// How long the log of moves is kept.
const MOVES_KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The first byte of the keys of nodes.
pub(super) const NODES: u8 = b'n';

/// The lease of a node by default, and the shortest. A node is alive for its lease after each renewal.
pub(super) const LEASE: Duration = Duration::from_secs(15);
pub(super) const SHORTEST: Duration = Duration::from_millis(100);

/// How a node takes part in a store that it shares with others.
///
/// ```
/// # use std::time::Duration;
/// # use latchwork::node::NodeOptions;
/// # use latchwork::workflow::{Engine, Result};
/// # use latchwork::store::Store;
/// # async fn example(store: &Store) -> Result<()> {
/// let options = NodeOptions::new().name("billing-1").lease(Duration::from_secs(10));
/// let engine = Engine::on(store).node(options).start().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeOptions {
    pub(super) name: Option<String>,
    pub(super) lease: Option<Duration>,
}

impl NodeOptions {
    /// A node with a name of its own and a lease of 15 seconds.
    ///
    /// ```
    /// # use latchwork::node::NodeOptions;
    /// let options = NodeOptions::new();
    /// ```
    pub fn new() -> NodeOptions {
        NodeOptions::default()
    }

    /// The name of the node in lists and logs. No other live node may have it. If a node of this name has died, the
    /// start waits until its lease is over.
    ///
    /// ```
    /// # use latchwork::node::NodeOptions;
    /// let options = NodeOptions::new().name("billing-1");
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> NodeOptions {
        self.name = Some(name.into());
        self
    }

    /// How long the other nodes wait for a sign of life before they take over the work of this node; at least 100 ms.
    /// The node renews its lease three times as often.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::node::NodeOptions;
    /// let options = NodeOptions::new().lease(Duration::from_secs(5));
    /// ```
    pub fn lease(mut self, lease: Duration) -> NodeOptions {
        self.lease = Some(lease);
        self
    }
}

/// What other nodes need to know of a workflow that a node can run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownWorkflow {
    /// The versions whose executions the node continues.
    pub(crate) versions: Vec<u32>,
    /// The version that new executions are started under.
    pub(crate) newest: u32,
    pub(crate) timeout_us: Option<u64>,
    /// True if its starts have rules, which only a node that has registered it can decide.
    pub(crate) has_rules: bool,
    /// The updates that it checks before they are stored.
    pub(crate) validated: Vec<String>,
}

/// The stored record of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct NodeRecord {
    /// Chosen anew for each process, and whenever a node joins again. Shards name their owners by it.
    pub(super) life: Uuid,
    pub(super) lease_us: u64,
    pub(super) since_us: u64,
    pub(super) renewed_us: u64,
    /// It gives its shards to other nodes and gets no more.
    pub(super) is_draining: bool,
    /// The workflows that it can run.
    pub(super) workflows: BTreeMap<String, KnownWorkflow>,
    /// How many executions it has in memory.
    pub(super) residents: u64,
    /// How many of its commits were refused because another node had taken the shard.
    pub(super) refused: u64,
    /// The version of the library.
    pub(super) program: String,
}

/// Why shards have got other owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MoveReason {
    /// They had no owner.
    Free,
    /// Their owner did not renew its lease.
    Dead,
    /// Their owner has stopped, or is drained.
    Left,
    /// Another node has less than its share.
    Balanced,
}

/// Shards that have got another owner together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredMove {
    pub(super) from: Option<String>,
    pub(super) to: Option<String>,
    pub(super) shards: Vec<u16>,
    pub(super) why: MoveReason,
}

/// The moves of one commit. Its history is the log.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredMoves(pub(super) Vec<StoredMove>);

stored!(NodeRecord, StoredMoves);

impl NodeRecord {
    pub(super) fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// True if it can own shards while other nodes can, too.
    pub(super) fn serves(&self) -> bool {
        !self.is_draining && !self.workflows.is_empty()
    }

    /// True if it can run executions of this workflow that were started under this version.
    pub(super) fn runs(&self, workflow: &str, version: u32) -> bool {
        self.workflows.get(workflow).is_some_and(|known| known.versions.contains(&version))
    }
}

/// The spaces that nodes share.
#[derive(Clone)]
pub(super) struct NodeSpaces {
    pub(super) board: Space,
    pub(super) moves: Space,
}

impl NodeSpaces {
    pub(super) async fn declare(store: &Store) -> Result<NodeSpaces, StoreError> {
        Ok(NodeSpaces {
            board: store.space(SpaceSpec::new(BOARD).history(History::For(NOTICES_KEPT))).await?,
            moves: store.space(SpaceSpec::new(MOVES).history(History::For(MOVES_KEPT))).await?,
        })
    }

    pub(super) async fn find(store: &Store) -> Result<Option<NodeSpaces>, StoreError> {
        let known = store.spaces().await?;
        let space = |name: &str| known.iter().find(|space| space.name() == name).cloned();
        Ok(space(BOARD).zip(space(MOVES)).map(|(board, moves)| NodeSpaces { board, moves }))
    }

    pub(super) fn node(&self, name: &str) -> Key {
        self.board.key([&[NODES], name.as_bytes()].concat())
    }

    /// The prefix of the notices of a node.
    pub(super) fn notices(&self, life: Uuid) -> crate::store::Range {
        self.board.prefix([&[NOTICES][..], life.as_bytes()].concat())
    }

    pub(super) fn log(&self) -> Key {
        self.moves.key("log")
    }
}

/// The name of the node in the key of its record.
pub(super) fn read_name(key: &Key) -> Option<&str> {
    std::str::from_utf8(key.bytes().strip_prefix(&[NODES])?).ok()
}

/// A node as another one knows it.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) rev: Rev,
    pub(super) record: NodeRecord,
}

/// The nodes as one of them knows them, by their lives.
#[derive(Default)]
pub(super) struct Members {
    pub(super) known: BTreeMap<Uuid, Member>,
    pub(super) leases: Watch,
}

/// The consequence of a record that was seen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MemberChange {
    /// The node renewed its lease, and nothing else has changed.
    Renewed,
    /// A node is new, is gone, or serves differently.
    Changed,
}

impl Members {
    /// A node's record was seen, or that there is none. Returns the lives that are gone.
    pub(super) fn see(
        &mut self,
        name: &str,
        found: Option<(Rev, NodeRecord)>,
        now: Duration,
    ) -> (MemberChange, Vec<Uuid>) {
        let life = found.as_ref().map(|(_, record)| record.life);
        let gone: Vec<Uuid> = self
            .known
            .iter()
            .filter(|(known, member)| member.name == name && Some(**known) != life)
            .map(|(life, _)| *life)
            .collect();
        for life in &gone {
            self.known.remove(life);
            self.leases.forget(*life);
        }
        let mut seen = if gone.is_empty() { MemberChange::Renewed } else { MemberChange::Changed };
        if let Some((rev, record)) = found {
            let before = self.known.get(&record.life);
            // Records may be seen out of order: by a scan, and then by the watch.
            if before.is_some_and(|before| before.rev >= rev) {
                return (seen, gone);
            }
            // A node has the same workflows for its whole life.
            if before.is_none_or(|before| before.record.serves() != record.serves()) {
                seen = MemberChange::Changed;
            }
            self.leases.see(record.life, rev, record.lease(), now);
            self.known.insert(record.life, Member { name: name.into(), rev, record });
        }
        (seen, gone)
    }

    pub(super) fn candidates(&self) -> Vec<Candidate> {
        self.known.values().map(|it| Candidate { life: it.record.life, serves: it.record.serves() }).collect()
    }
}

/// Decodes the record of a node from its key and value.
pub(super) fn read_member(key: &Key, rev: Rev, value: &[u8]) -> Option<Member> {
    let (name, record) = (read_name(key)?, NodeRecord::decode(value));
    match record {
        Ok(record) => Some(Member { name: name.into(), rev, record }),
        Err(why) => {
            // It counts as dead, and the owner of nothing: its shards are given to others.
            tracing::error!(node = name, ?why, "the record of a node cannot be read");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(life: u128, is_draining: bool) -> NodeRecord {
        NodeRecord {
            life: Uuid::from_u128(life),
            lease_us: 1_000_000,
            since_us: 0,
            renewed_us: 0,
            is_draining,
            workflows: [(
                "order".to_string(),
                KnownWorkflow {
                    versions: vec![1],
                    newest: 1,
                    timeout_us: None,
                    has_rules: false,
                    validated: Vec::new(),
                },
            )]
            .into(),
            residents: 0,
            refused: 0,
            program: "1".into(),
        }
    }

    /// Each line: the rev and record that is found under the name "a", what it means, and the lives that are gone.
    #[test]
    fn records_are_told_apart_by_life_and_rev() {
        let mut members = Members::default();
        let mut check = |found: Option<(u64, NodeRecord)>, seen: MemberChange, gone: &[u128]| {
            let gone: Vec<Uuid> = gone.iter().copied().map(Uuid::from_u128).collect();
            let found = found.map(|(rev, record)| (Rev(rev), record));
            assert_eq!(members.see("a", found.clone(), Duration::ZERO), (seen, gone), "{found:?}");
        };
        check(None, MemberChange::Renewed, &[]);
        check(Some((1, record(1, false))), MemberChange::Changed, &[]);
        check(Some((2, record(1, false))), MemberChange::Renewed, &[]);
        check(Some((3, record(1, true))), MemberChange::Changed, &[]);
        check(Some((2, record(1, false))), MemberChange::Renewed, &[]);
        check(Some((5, record(2, false))), MemberChange::Changed, &[1]);
        check(None, MemberChange::Changed, &[2]);
    }
}
