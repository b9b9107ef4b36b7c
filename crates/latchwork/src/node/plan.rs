//! Which node owns which shard: a pure function of the nodes and the present owners. All nodes compute the same plan
//! from the same records. This file reads no store and no clock.

use std::collections::BTreeMap;

use crate::store::Uuid;

/// A node that is alive, as the plan sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) life: Uuid,
    /// It has workflows, and is not drained. The other nodes own shards only if there is no such node.
    pub(super) serves: bool,
}

/// The owner of each shard as it should be. A shard without an owner among the nodes gets one; a node that has more
/// than its share gives shards to the nodes that have less. As few shards as possible move. `None` if there are no
/// nodes.
pub(super) fn plan(nodes: &[Candidate], owners: &[Option<Uuid>]) -> Option<Vec<Uuid>> {
    let is_any = nodes.iter().any(|node| node.serves);
    // In the order of their lives, so that the order of the records makes no difference.
    let mut counts: BTreeMap<Uuid, usize> =
        nodes.iter().filter(|node| node.serves || !is_any).map(|node| (node.life, 0)).collect();
    if counts.is_empty() {
        return None;
    }
    for owner in owners.iter().flatten() {
        counts.entry(*owner).and_modify(|count| *count += 1);
    }
    let (least, more) = (owners.len() / counts.len(), owners.len() % counts.len());
    // The nodes that have most keep one more than the others.
    let mut by_count: Vec<(usize, Uuid)> = counts.iter().map(|(life, count)| (*count, *life)).collect();
    by_count.sort_unstable_by(|(a, one), (b, other)| b.cmp(a).then(one.cmp(other)));
    let mut room: BTreeMap<Uuid, usize> =
        by_count.iter().enumerate().map(|(at, (_, life))| (*life, least + usize::from(at < more))).collect();
    let kept = owners.iter().map(|owner| {
        let room = owner.as_ref().and_then(|owner| room.get_mut(owner)).filter(|room| **room > 0)?;
        *room -= 1;
        *owner
    });
    let kept: Vec<Option<Uuid>> = kept.collect();
    let mut free = room.into_iter().flat_map(|(life, room)| std::iter::repeat_n(life, room));
    Some(kept.into_iter().map(|owner| owner.or_else(|| free.next()).expect("shares add up to all shards")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Owners as text: a letter for each shard, a dot for none. Capital letters among the nodes serve, small ones do
    /// not.
    #[track_caller]
    fn check(nodes: &str, owners: &str, planned: &str) {
        let life = |name: char| Uuid::from_u128(name.to_ascii_lowercase() as u128);
        let nodes: Vec<Candidate> =
            nodes.chars().map(|name| Candidate { life: life(name), serves: name.is_uppercase() }).collect();
        let owners: Vec<Option<Uuid>> = owners.chars().map(|it| (it != '.').then(|| life(it))).collect();
        let found = plan(&nodes, &owners)
            .map_or(String::new(), |owners| owners.iter().map(|owner| char::from(owner.as_u128() as u8)).collect());
        assert_eq!(found, planned, "{nodes:?}");
    }

    #[test]
    fn every_shard_has_an_owner_and_as_few_as_possible_move() {
        check("A", "....", "aaaa");
        check("A", "abab", "aaaa"); // b is gone
        check("AB", "....", "aabb");
        check("AB", "aaaa", "aabb"); // b is new
        check("BA", "aaaa", "aabb");
        check("AB", "bbaa", "bbaa");
        check("ABC", "aabb..", "aabbcc");
        check("AC", "aabbcc", "aaaccc"); // b is gone
        check("ABC", "aaaaa", "aabbc");
        check("ABC", "ccccc", "ccaab");
    }

    #[test]
    fn nodes_that_do_not_serve_own_shards_only_if_no_other_node_does() {
        check("Ab", "bbbb", "aaaa");
        check("b", "....", "bbbb");
        check("ab", "aaaa", "aabb");
        check("", "....", "");
    }
}
