//! A find: the query, the plan of its answer, and what its cursors hold. Pure; `run.rs` does the reading.

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::entity::document::EntityRecord;
use crate::entity::filter::{Comparison, Field, Filter, FilterError, FilterNode};
use crate::entity::op::{check_subtype, check_type_name};
use crate::entity::{Entity, EntityError, EntityId, Result};
use crate::json;
use crate::page::{Cursor, Page};

/// The size of a page if the query does not set one.
const LIMIT: usize = 1000;

/// The name of the list in cursors.
const LIST: &str = "entities";

/// Describes the entities to find.
///
/// ```
/// use latchwork::entity::{Direction, Query, field};
///
/// let query = Query::of("person")
///     .filter(field("data.city").equals("Paris"))
///     .order_by("data.age", Direction::Descending)
///     .limit(10);
/// ```
#[derive(Debug, Clone)]
#[must_use = "a query does nothing until it is given to find"]
pub struct Query {
    entity_type: Option<Arc<str>>,
    subtype: Option<Arc<str>>,
    filter: Filter,
    order: Vec<(Result<Field, FilterError>, Direction)>,
    limit: usize,
    after: Option<Cursor>,
}

impl From<&Query> for Query {
    fn from(query: &Query) -> Query {
        query.clone()
    }
}

/// The direction of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direction {
    /// The smallest first. Missing fields come first, then null, booleans, numbers, strings, arrays and objects.
    #[default]
    Ascending,
    /// The largest first.
    Descending,
}

/// A page of found entities, and how they were found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Explained {
    /// The entities, in the requested order.
    pub page: Page<Entity>,
    /// How they were found.
    pub plan: Plan,
    /// The number of entities that were read.
    pub examined: usize,
}

/// How a find is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What is read.
    pub access: Access,
    /// True if all matches must be collected and sorted before the first is known.
    pub sorts: bool,
}

/// What a find reads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// A part of a declared index.
    Index {
        /// The index's fields.
        fields: Vec<String>,
        /// The number of fields that are bound to one value.
        equal: usize,
        /// True if the next field is bound to a range or a list of values.
        bounded: bool,
    },
    /// Every entity of the type: no declared index helps.
    ScanType,
    /// Every entity of the store: the query names no type.
    ScanAll,
}

impl Plan {
    /// True if no index helps, so that every entity of the type or of the store is read.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Entities, Query, TypeSpec, field};
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// let by_city = Query::of("person").filter(field("data.city").equals("Paris"));
    /// assert!(entities.explain(&by_city).await?.scans());
    /// entities.declare(TypeSpec::new("person").index(["data.city"])).await?;
    /// assert!(!entities.explain(&by_city).await?.scans());
    /// # Ok(()) }
    /// ```
    pub fn scans(&self) -> bool {
        !matches!(self.access, Access::Index { .. })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.access {
            Access::Index { fields, equal, bounded } => {
                write!(f, "index on {}: {equal} equal", fields.join(", "))?;
                if *bounded {
                    f.write_str(", 1 bounded")?;
                }
            }
            Access::ScanType => f.write_str("scan of the type")?,
            Access::ScanAll => f.write_str("scan of everything")?,
        }
        if self.sorts { f.write_str(", then sort") } else { Ok(()) }
    }
}

impl Query {
    /// Finds entities of this type.
    ///
    /// ```
    /// # use latchwork::entity::Query;
    /// let people = Query::of("person");
    /// ```
    pub fn of(entity_type: impl Into<Arc<str>>) -> Query {
        Query { entity_type: Some(entity_type.into()), ..Query::all() }
    }

    /// Finds entities of every type. Indexes belong to a type, so this reads all entities.
    ///
    /// ```
    /// # use latchwork::entity::{Query, field};
    /// let checked = Query::all().filter(field("metadata.checked").equals(true));
    /// ```
    pub fn all() -> Query {
        let (entity_type, subtype) = (None, None);
        Query { entity_type, subtype, filter: Filter::all(), order: Vec::new(), limit: LIMIT, after: None }
    }

    /// Finds entities of this subtype. Together with a type, this uses the index of subtypes, which every type has.
    ///
    /// ```
    /// # use latchwork::entity::Query;
    /// let invoices = Query::of("document").subtype("invoice");
    /// ```
    pub fn subtype(mut self, subtype: impl Into<Arc<str>>) -> Query {
        self.subtype = Some(subtype.into());
        self
    }

    /// Finds entities that match this filter. A second filter is combined with the first by `and`. Takes a [`Filter`]
    /// or its JSON.
    ///
    /// ```
    /// # use latchwork::entity::{Query, field};
    /// let adults = Query::of("person").filter(field("data.age").at_least(18));
    /// ```
    pub fn filter(mut self, filter: impl Into<Filter>) -> Query {
        self.filter = std::mem::replace(&mut self.filter, Filter::all()).and(filter.into());
        self
    }

    /// Orders the results by this field. Equal values are ordered by the next given field, and finally by id, in the
    /// direction of the last field.
    ///
    /// ```
    /// # use latchwork::entity::{Direction, Query};
    /// let oldest_first = Query::of("person").order_by("data.age", Direction::Descending);
    /// ```
    pub fn order_by(mut self, path: &str, direction: Direction) -> Query {
        self.order.push((Field::parse(path), direction));
        self
    }

    /// The most results of a page; the default is 1,000.
    ///
    /// ```
    /// # use latchwork::entity::Query;
    /// let ten = Query::of("person").limit(10);
    /// ```
    pub fn limit(mut self, limit: usize) -> Query {
        self.limit = limit;
        self
    }

    /// Continues after a page of the same query: its `next`.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Query, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let people = Query::of("person").limit(100);
    /// let first = entities.find(&people).await?;
    /// let second = entities.find(people.after(first.next)).await?;
    /// # Ok(()) }
    /// ```
    pub fn after(mut self, cursor: impl Into<Option<Cursor>>) -> Query {
        self.after = cursor.into();
        self
    }

    pub(crate) fn checked(&self) -> Result<CheckedQuery> {
        if let Some(entity_type) = &self.entity_type {
            check_type_name(entity_type)?;
        }
        self.subtype.as_deref().map_or(Ok(()), check_subtype)?;
        if self.limit == 0 {
            return Err(EntityError::Limit);
        }
        let filter = self.filter.clone().checked()?;
        let order = self.order.iter().map(|(field, direction)| Ok((field.clone()?, *direction)));
        let order = order.collect::<Result<Vec<_>, FilterError>>()?;
        let mut query = CheckedQuery {
            entity_type: self.entity_type.clone(),
            subtype: self.subtype.clone(),
            filter,
            order,
            limit: self.limit,
            fingerprint: 0,
            after: None,
        };
        query.fingerprint = query.compute_fingerprint();
        query.after = self.after.as_ref().map(|cursor| query.read_cursor(cursor)).transpose()?;
        Ok(query)
    }
}

/// A query that is known to be valid.
pub(crate) struct CheckedQuery {
    pub(crate) entity_type: Option<Arc<str>>,
    pub(crate) subtype: Option<Arc<str>>,
    pub(crate) filter: FilterNode,
    pub(crate) order: Vec<(Field, Direction)>,
    pub(crate) limit: usize,
    fingerprint: u64,
    pub(crate) after: Option<OrderPosition>,
}

/// A position in an order: the entity's values of the fields of the order, and its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OrderPosition {
    /// Encoded, one for each field of the order.
    pub(crate) values: Vec<Vec<u8>>,
    pub(crate) id: EntityId,
}

impl CheckedQuery {
    pub(crate) fn matches(&self, record: &EntityRecord) -> bool {
        self.entity_type.as_ref().is_none_or(|entity_type| *entity_type == record.entity_type)
            && (self.subtype.is_none() || self.subtype == record.subtype)
            && self.filter.holds(&record.data, &record.metadata)
    }

    /// Ids break ties, in the direction of the last field, so that an index can be read backwards.
    pub(crate) fn id_direction(&self) -> Direction {
        self.order.last().map_or(Direction::Ascending, |(_, direction)| *direction)
    }

    pub(crate) fn position(&self, id: &EntityId, record: &EntityRecord) -> OrderPosition {
        let encoded = |field: &Field| {
            let mut out = Vec::new();
            json::encode(&mut out, field.find(&record.data, &record.metadata));
            out
        };
        OrderPosition { values: self.order.iter().map(|(field, _)| encoded(field)).collect(), id: id.clone() }
    }

    /// Bytes that sort in the order of the query.
    pub(crate) fn sort_key(&self, position: &OrderPosition) -> Vec<u8> {
        let mut key = Vec::new();
        let directions = self.order.iter().map(|(_, direction)| *direction);
        for (value, direction) in position.values.iter().zip(directions) {
            push_directed(&mut key, value, direction);
        }
        let mut id = Vec::new();
        json::encode(&mut id, Some(&Value::String(position.id.as_str().into())));
        push_directed(&mut key, &id, self.id_direction());
        key
    }

    pub(crate) fn cursor(&self, position: &OrderPosition) -> Cursor {
        let mut bytes = position.values.concat();
        bytes.extend_from_slice(position.id.as_bytes());
        Cursor::new(LIST, self.fingerprint, &bytes)
    }

    fn read_cursor(&self, cursor: &Cursor) -> Result<OrderPosition> {
        let mut rest = cursor.position(LIST, self.fingerprint)?;
        let mut values = Vec::with_capacity(self.order.len());
        for _ in &self.order {
            let length = json::skip(rest).ok_or_else(|| cursor.unknown())?;
            values.push(rest[..length].to_vec());
            rest = &rest[length..];
        }
        let id: EntityId = std::str::from_utf8(rest).map_err(|_| cursor.unknown())?.into();
        id.validate().map_err(|_| cursor.unknown())?;
        Ok(OrderPosition { values, id })
    }

    /// Identifies a query by type, filter and order.
    fn compute_fingerprint(&self) -> u64 {
        let mut out = Vec::new();
        let text = |out: &mut Vec<u8>, text: &str| json::encode(out, Some(&Value::String(text.into())));
        json::encode(&mut out, self.entity_type.as_ref().map(|name| Value::String(name.to_string())).as_ref());
        for (field, direction) in &self.order {
            text(&mut out, &field.to_string());
            out.push(u8::from(*direction == Direction::Descending));
        }
        out.push(0xff);
        fingerprint_node(&self.filter, &mut out);
        if let Some(subtype) = &self.subtype {
            text(&mut out, subtype);
        }
        xxhash_rust::xxh3::xxh3_64(&out)
    }

    /// The comparisons of single fields that every match must fulfil.
    pub(crate) fn conjuncts(&self) -> Vec<(&Field, &Comparison)> {
        let mut found = Vec::new();
        let mut rest = vec![&self.filter];
        while let Some(node) = rest.pop() {
            match node {
                FilterNode::Is(field, comparison) => found.push((field, comparison)),
                FilterNode::All(nodes) => rest.extend(nodes),
                FilterNode::Any(_) | FilterNode::Not(_) => {}
            }
        }
        found
    }
}

fn push_directed(key: &mut Vec<u8>, bytes: &[u8], direction: Direction) {
    match direction {
        Direction::Ascending => key.extend_from_slice(bytes),
        // No encoded value is a prefix of another, so inverting the bits inverts the order.
        Direction::Descending => key.extend(bytes.iter().map(|byte| !byte)),
    }
}

fn fingerprint_node(node: &FilterNode, out: &mut Vec<u8>) {
    let mut list = |tag: u8, nodes: &[FilterNode]| {
        out.push(tag);
        out.extend_from_slice(&(nodes.len() as u64).to_be_bytes());
        nodes.iter().for_each(|node| fingerprint_node(node, out));
    };
    match node {
        FilterNode::All(nodes) => list(1, nodes),
        FilterNode::Any(nodes) => list(2, nodes),
        FilterNode::Not(node) => list(3, std::slice::from_ref(node)),
        FilterNode::Is(field, comparison) => {
            out.push(4);
            json::encode(out, Some(&Value::String(field.to_string())));
            let mut with = |tag: u8, values: &[&Value]| {
                out.push(tag);
                out.extend_from_slice(&(values.len() as u64).to_be_bytes());
                values.iter().for_each(|value| json::encode(out, Some(value)));
            };
            match comparison {
                Comparison::Equals(value) => with(1, &[value]),
                Comparison::Greater(value) => with(2, &[value]),
                Comparison::AtLeast(value) => with(3, &[value]),
                Comparison::Less(value) => with(4, &[value]),
                Comparison::AtMost(value) => with(5, &[value]),
                Comparison::Between(low, high) => with(6, &[low, high]),
                Comparison::OneOf(values) => with(7, &values.iter().collect::<Vec<_>>()),
                Comparison::Contains(value) => with(8, &[value]),
                Comparison::Exists => with(9, &[]),
                Comparison::StartsWith(prefix) => with(10, &[&Value::String(prefix.clone())]),
                Comparison::EndsWith(suffix) => with(11, &[&Value::String(suffix.clone())]),
                Comparison::HasAll(values) => with(12, &values.iter().collect::<Vec<_>>()),
            }
        }
    }
}
