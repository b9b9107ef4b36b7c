//! Notices: what a node tells the others. A notice is written by the commit that it tells of, so it is neither lost nor
//! early. Every node follows all notices, in the order of the commits, and acts on those that concern it.

use serde::{Deserialize, Serialize};

use crate::lane::Part;
use crate::node::ExecutionId;
use crate::record::{Record, stored};
use crate::store::{Commit, Space, Uuid, Write};

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NodeNotice {
    /// Something of an execution was changed by a node that does not own it. For the owner.
    Execution(ExecutionId),
    /// Something of a schedule was changed by a node that does not own it. For the owner.
    Schedule(String),
    /// A request of a session was granted, refused or removed by another process than the session's. For the process
    /// that has begun the session.
    Session(Uuid),
    /// A release of a lock in this shard was not finished. For the owner.
    Locks(u16),
    /// An alarm was set in this shard by another node than its owner. For the owner.
    Alarm(u16),
    /// After-effects were written for an entity in this shard. For the owner.
    Effects(u16),
    /// Callers of a node wait for news of an execution. For the owner.
    Listens { id: ExecutionId, node: Uuid },
    /// There is news of an execution that callers of other nodes wait for.
    News(ExecutionId),
    /// The execution is to run on this node, which does not own it. For that node.
    Lent { id: ExecutionId, node: Uuid },
    /// Shards have other owners.
    Shards,
}

/// The notices of one commit.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredNotices(pub(super) Vec<NodeNotice>);

stored!(StoredNotices);

/// Keys of notices begin with this byte, then comes the life of the node that has written them.
pub(super) const NOTICES: u8 = b'w';

/// The keys of the notices of a life begin with this.
fn prefix_of(from: Uuid) -> Vec<u8> {
    [&[NOTICES][..], from.as_bytes()].concat()
}

/// Adds a notice to a part.
pub(super) fn noticed(part: Part, space: &Space, from: Uuid, notice: NodeNotice) -> Part {
    part.put_numbered(space, prefix_of(from), StoredNotices(vec![notice]).encode())
}

/// Adds a write of one commit to another commit. A notice gets a number that is free there.
pub(super) fn moved(commit: Commit, write: Write, space: &Space, from: Uuid) -> Commit {
    match write {
        Write::Put(key, value) if space.prefix(prefix_of(from)).contains(&key) => {
            Part::default().put_numbered(space, prefix_of(from), value).place_whole(commit).0
        }
        write => commit.write(write),
    }
}
