//! Chooses the index that answers a query, and the part of it. It uses rules, not statistics: first the index with the
//! most fields bound to one value, then an index whose next field is bounded, then an index with the requested order.

use crate::entity::declare::Declaration;
use crate::entity::filter::{Comparison, Field};
use crate::entity::index::{self, Index};
use crate::entity::query::{Access, CheckedQuery, Direction, OrderPosition, Plan};
use crate::json;
use crate::store::Order;

use serde_json::Value;

/// Longer lists of values are not looked up one by one.
const VALUES: usize = 100;

/// What is read: ranges of keys of the index space, or all records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccessPath {
    pub(crate) plan: Plan,
    /// Ranges with their start included and their end excluded. Empty ranges are left out.
    pub(crate) ranges: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) order: Order,
    /// The start of the index's keys, before the values of the order.
    prefix: Vec<u8>,
    /// The fields of the order that the keys continue with.
    following: Vec<usize>,
    /// True if the index is unique and no field is bound to null, so that keys without null and missing have no id.
    unique: bool,
}

/// Where the rest of an index begins, behind a cursor.
pub(crate) enum IndexStart {
    /// Behind this key, which only the entity at the cursor can have.
    Behind(Vec<u8>),
    /// At this key. The position of its entity tells on which side of the cursor the entity stands.
    At(Vec<u8>),
}

/// The smallest bytes that are larger than all bytes with this prefix.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    unreachable!("a key starts with the name of a type, which is text")
}

/// The ranges of the encoded values that a comparison allows, after the prefix. `None` if it does not bound.
fn bounds(comparison: &Comparison, prefix: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let with = |value: &Value| {
        let mut key = prefix.to_vec();
        json::encode(&mut key, Some(value));
        key
    };
    // The first byte of a value is its kind. Each boolean is a kind of its own, and an index helps little with them.
    let kind = |value: &Value| match value {
        Value::Bool(_) => None,
        _ => Some(with(value)[..prefix.len() + 1].to_vec()),
    };
    Some(match comparison {
        Comparison::Equals(value) => vec![(with(value), end_of(&with(value)))],
        Comparison::Greater(value) => vec![(end_of(&with(value)), end_of(&kind(value)?))],
        Comparison::AtLeast(value) => vec![(with(value), end_of(&kind(value)?))],
        Comparison::Less(value) => vec![(kind(value)?, with(value))],
        Comparison::AtMost(value) => vec![(kind(value)?, end_of(&with(value)))],
        Comparison::Between(low, high) => {
            kind(low)?;
            vec![(with(low), end_of(&with(high)))]
        }
        Comparison::OneOf(values) if values.len() <= VALUES => {
            let mut ranges: Vec<_> = values.iter().map(|value| (with(value), end_of(&with(value)))).collect();
            ranges.sort();
            ranges.dedup();
            ranges
        }
        Comparison::StartsWith(start) => {
            let mut key = prefix.to_vec();
            json::encode_string_prefix(&mut key, start);
            vec![(key.clone(), end_of(&key))]
        }
        Comparison::OneOf(_)
        | Comparison::Contains(_)
        | Comparison::HasAll(_)
        | Comparison::Exists
        | Comparison::EndsWith(_) => return None,
    })
}

/// The intersection of two lists of ranges.
fn intersect(ours: &[(Vec<u8>, Vec<u8>)], others: &[(Vec<u8>, Vec<u8>)]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut both = Vec::new();
    for (start, end) in ours {
        for (other_start, other_end) in others {
            both.push((start.max(other_start).clone(), end.min(other_end).clone()));
        }
    }
    both.retain(|(start, end)| start < end);
    both
}

/// The best way to answer a query. `declaration` is the declaration at the generation that is read.
pub(crate) fn choose(query: &CheckedQuery, declaration: Option<&Declaration>, key_bytes: usize) -> AccessPath {
    let Some(entity_type) = &query.entity_type else {
        let plan = Plan { access: Access::ScanAll, sorts: !query.order.is_empty() };
        let (ranges, prefix) = (Vec::new(), Vec::new());
        return AccessPath { plan, ranges, order: Order::Ascending, prefix, following: Vec::new(), unique: false };
    };
    let conjuncts = query.conjuncts();
    let ways = declaration.into_iter().flat_map(Declaration::ready);
    let ways = ways.filter_map(|index| way(query, entity_type, index, &conjuncts, key_bytes));
    let ways = ways.chain(query.subtype.as_ref().map(|subtype| by_subtype(query, entity_type, subtype)));
    let best = ways.max_by_key(|(score, _)| *score).filter(|(score, _)| *score > (0, false, false));
    best.map(|(_, path)| path).unwrap_or_else(|| {
        let prefix = index::prefix(entity_type, 0);
        let ranges = vec![(prefix.clone(), end_of(&prefix))];
        let plan = Plan { access: Access::ScanType, sorts: !query.order.is_empty() };
        AccessPath { plan, ranges, order: Order::Ascending, prefix, following: Vec::new(), unique: false }
    })
}

/// Uses the index of subtypes, which is ordered only by id.
fn by_subtype(query: &CheckedQuery, entity_type: &str, subtype: &str) -> (Score, AccessPath) {
    let prefix = index::subtype_prefix(entity_type, subtype);
    let sorts = !query.order.is_empty();
    let access = Access::Index { fields: vec!["subtype".into()], equal: 1, bounded: false };
    let ranges = vec![(prefix.clone(), end_of(&prefix))];
    let plan = Plan { access, sorts };
    let following = Vec::new();
    ((1, false, !sorts), AccessPath { plan, ranges, order: Order::Ascending, prefix, following, unique: false })
}

/// The fields bound to one value, whether the next field is bounded, and whether the order is served.
type Score = (usize, bool, bool);

fn way(
    query: &CheckedQuery,
    entity_type: &str,
    index: &Index,
    conjuncts: &[(&Field, &Comparison)],
    key_bytes: usize,
) -> Option<(Score, AccessPath)> {
    let mut prefix = index::prefix(entity_type, index.number);
    let (mut equal, mut unique) = (0, index.unique);
    for field in &index.fields {
        let value = conjuncts.iter().find_map(|(of, comparison)| match comparison {
            Comparison::Equals(value) if *of == field => Some(value),
            _ => None,
        });
        let Some(value) = value else { break };
        json::encode(&mut prefix, Some(value));
        unique &= !value.is_null();
        equal += 1;
    }
    let mut ranges = vec![(prefix.clone(), end_of(&prefix))];
    let mut bounded = false;
    if let Some(next) = index.fields.get(equal) {
        for (_, comparison) in conjuncts.iter().filter(|(of, _)| *of == next) {
            if let Some(bounds) = bounds(comparison, &prefix) {
                ranges = intersect(&ranges, &bounds);
                bounded = true;
            }
        }
    }
    // The index has no keys longer than the store's limit, and a read with such a key would fail.
    if prefix.len() > key_bytes || ranges.iter().any(|(start, end)| start.len().max(end.len()) > key_bytes) {
        return None;
    }
    let (following, direction) = served_order(query, index, equal)
        .filter(|_| ranges.len() <= 1)
        .map_or((None, Direction::Ascending), |(following, direction)| (Some(following), direction));
    let serves = following.is_some();
    let order = if direction == Direction::Descending { Order::Descending } else { Order::Ascending };
    let fields = index.fields.iter().map(ToString::to_string).collect();
    let plan = Plan { access: Access::Index { fields, equal, bounded }, sorts: !serves };
    let path = AccessPath { plan, ranges, order, prefix, following: following.unwrap_or_default(), unique };
    let score = (equal, bounded, serves && !(query.order.is_empty() && equal == 0));
    Some((score, path))
}

/// Returns a value if reading the index serves the query's order: the fields after those bound to one value are exactly
/// the fields of the order, in one direction. The value has the fields of the order that the keys hold.
fn served_order(query: &CheckedQuery, index: &Index, equal: usize) -> Option<(Vec<usize>, Direction)> {
    let bound = &index.fields[..equal];
    // A field that is bound to one value does not influence the order.
    let order = query.order.iter().enumerate().filter(|(_, (field, _))| !bound.contains(field));
    let order: Vec<(usize, &Field, Direction)> = order.map(|(at, (field, way))| (at, field, *way)).collect();
    let direction = query.id_direction();
    let same = order.iter().map(|(_, field, _)| *field).eq(&index.fields[equal..])
        && order.iter().all(|(.., way)| *way == direction);
    same.then(|| (order.iter().map(|(at, ..)| *at).collect(), direction))
}

impl AccessPath {
    /// Where to start reading for the entities behind this position, in the direction of the read. The order must be
    /// served.
    pub(crate) fn start_behind(&self, position: &OrderPosition, key_bytes: usize) -> IndexStart {
        let mut key = self.prefix.clone();
        let mut unique = self.unique;
        for at in &self.following {
            let value = &position.values[*at];
            unique &= !json::is_missing_or_null(value);
            key.extend_from_slice(value);
        }
        // The key of a unique value has no id. Since the cursor was made, the value may have got another owner.
        if !unique {
            key.extend_from_slice(position.id.as_bytes());
        }
        // No key of the index is longer than the limit, so none stands between a longer key and its start.
        let shared = unique || key.len() > key_bytes;
        key.truncate(key_bytes);
        if shared { IndexStart::At(key) } else { IndexStart::Behind(key) }
    }
}
