//! Types and their declarations: indexes and unique values. A declaration is a record of the store, and every write of
//! an entity checks that the declaration it used is still valid. So an index misses no entity, no matter when it is
//! declared; and a view of the past reads the declaration of its own time.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use crate::entity::filter::Field;
use crate::entity::index::{Index, IndexState, SUBTYPES};
use crate::entity::op::check_type_name;
use crate::entity::{EntityError, Result};
use crate::record::{Record, stored};
use crate::store::{Item, Rev};

/// The declaration of a type.
///
/// ```
/// # use latchwork::entity::TypeSpec;
/// let person = TypeSpec::new("person")
///     .unique(["data.email"])
///     .unique(["data.country", "data.tax_number"])
///     .index(["data.city", "data.age"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a type is declared by Entities::declare"]
pub struct TypeSpec {
    pub(crate) name: String,
    pub(crate) indexes: Vec<IndexSpec>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexSpec {
    pub(crate) fields: Vec<String>,
    pub(crate) unique: bool,
}

/// The most indexes of a type, and the most fields of an index.
const INDEXES: usize = 64;
const FIELDS: usize = 8;

impl TypeSpec {
    /// A type without indexes.
    ///
    /// ```
    /// # use latchwork::entity::TypeSpec;
    /// let person = TypeSpec::new("person");
    /// ```
    pub fn new(name: impl Into<String>) -> TypeSpec {
        TypeSpec { name: name.into(), indexes: Vec::new() }
    }

    /// No two entities of the type may have the same values in all of these fields. The rule does not apply to an
    /// entity that lacks one of them or has null in it.
    ///
    /// ```
    /// # use latchwork::entity::TypeSpec;
    /// let person = TypeSpec::new("person").unique(["data.country", "data.tax_number"]);
    /// ```
    pub fn unique(self, fields: impl IntoIterator<Item = impl Into<String>>) -> TypeSpec {
        self.with(fields, true)
    }

    /// Finds by these fields, in this order, do not have to read every entity of the type.
    ///
    /// ```
    /// # use latchwork::entity::TypeSpec;
    /// let person = TypeSpec::new("person").index(["data.city", "data.age"]);
    /// ```
    pub fn index(self, fields: impl IntoIterator<Item = impl Into<String>>) -> TypeSpec {
        self.with(fields, false)
    }

    fn with(mut self, fields: impl IntoIterator<Item = impl Into<String>>, unique: bool) -> TypeSpec {
        self.indexes.push(IndexSpec { fields: fields.into_iter().map(Into::into).collect(), unique });
        self
    }

    /// The fields of each index, if the spec is valid.
    pub(crate) fn checked(&self) -> Result<Vec<(Vec<Field>, bool)>> {
        check_type_name(&self.name)?;
        let refuse =
            |reason: &str| Err(EntityError::Declaration { entity_type: self.name.clone(), reason: reason.into() });
        let mut checked: Vec<(Vec<Field>, bool)> = Vec::new();
        for index in &self.indexes {
            match index.fields.len() {
                0 => return refuse("an index needs a field"),
                1..=FIELDS => {}
                _ => return refuse("an index has at most 8 fields"),
            }
            let fields = index.fields.iter().map(|field| Field::parse(field)).collect::<Result<Vec<_>, _>>()?;
            if (1..fields.len()).any(|at| fields[..at].contains(&fields[at])) {
                return refuse("an index names a field twice");
            }
            if !checked.contains(&(fields.clone(), index.unique)) {
                checked.push((fields, index.unique));
            }
        }
        Ok(checked)
    }
}

/// The stored declaration of a type.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Declaration {
    /// The number of the last index that was declared.
    last: u16,
    pub(crate) indexes: Vec<Index>,
}

stored!(Declaration);

impl Declaration {
    pub(crate) fn find(&self, fields: &[Field], unique: bool) -> Option<&Index> {
        self.indexes.iter().find(|index| index.is_kept() && index.fields == fields && index.unique == unique)
    }

    pub(crate) fn by_number(&self, number: u16) -> Option<&Index> {
        self.indexes.iter().find(|index| index.number == number)
    }

    /// The indexes that writers maintain.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &Index> {
        self.indexes.iter().filter(|index| index.is_kept())
    }

    /// The indexes that finds can use.
    pub(crate) fn ready(&self) -> impl Iterator<Item = &Index> {
        self.indexes.iter().filter(|index| index.state == IndexState::Ready)
    }

    /// The declaration with everything that is asked for. The missing indexes must be built.
    pub(crate) fn with_missing(&self, entity_type: &str, asked: &[(Vec<Field>, bool)]) -> Result<Declaration> {
        let refuse = |reason: String| EntityError::Declaration { entity_type: entity_type.into(), reason };
        let mut changed = self.clone();
        for (fields, unique) in asked {
            if changed.find(fields, *unique).is_some() {
                continue;
            }
            if changed.indexes.len() >= INDEXES {
                return Err(refuse(format!("a type has at most {INDEXES} indexes")));
            }
            let spent = || refuse("all numbers for its indexes are used up".into());
            changed.last = changed.last.checked_add(1).filter(|number| *number < SUBTYPES).ok_or_else(spent)?;
            let (number, fields, unique) = (changed.last, fields.clone(), *unique);
            changed.indexes.push(Index { number, unique, state: IndexState::Building, fields });
        }
        Ok(changed)
    }

    /// The declaration with one index in another state.
    pub(crate) fn with_state(&self, number: u16, state: IndexState) -> Declaration {
        let mut changed = self.clone();
        for index in changed.indexes.iter_mut().filter(|index| index.number == number) {
            index.state = state;
        }
        changed
    }

    /// The declaration without an index.
    pub(crate) fn without(&self, number: u16) -> Declaration {
        let mut changed = self.clone();
        changed.indexes.retain(|index| index.number != number);
        changed
    }
}

/// A declaration with the rev it was read at; `None` if the type was never declared.
pub(crate) type Declared = Option<(Rev, Arc<Declaration>)>;

/// Recently used declarations. They may be out of date: writers check them, readers compare the rev.
#[derive(Default)]
pub(crate) struct Declarations {
    known: RwLock<HashMap<Arc<str>, Declared>>,
}

impl Declarations {
    /// The last known declaration of a type.
    pub(crate) fn known(&self, entity_type: &str) -> Option<Declared> {
        self.known.read().get(entity_type).cloned()
    }

    /// Reads the declaration from an item of the store.
    pub(crate) fn read(&self, entity_type: &str, item: Option<Item>) -> Result<Declared> {
        let Some(item) = item else { return Ok(None) };
        if let Some(Some((rev, known))) = self.known.read().get(entity_type)
            && *rev == item.rev
        {
            return Ok(Some((*rev, known.clone())));
        }
        let place = || format!("the declaration of type {entity_type:?}");
        let declaration = Declaration::decode(&item.value).map_err(|why| why.at(place()))?;
        Ok(Some((item.rev, Arc::new(declaration))))
    }

    pub(crate) fn remember(&self, entity_type: &str, declared: Declared) {
        self.known.write().insert(entity_type.into(), declared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_comes_back_as_it_was_stored() {
        let asked = TypeSpec::new("t").unique(["data.a\\.b", "metadata.c"]).index(["data"]).checked().unwrap();
        let declaration = Declaration::default().with_missing("t", &asked).unwrap();
        assert_eq!(declaration.with_missing("t", &asked).unwrap(), declaration);
        assert_eq!(declaration.indexes.len(), 2);
        for state in [IndexState::Building, IndexState::Ready, IndexState::Dropping] {
            let declaration = declaration.with_state(2, state);
            assert_eq!(Declaration::decode(&declaration.encode()), Ok(declaration));
        }
        assert!(Declaration::decode(&[1]).is_err());
    }
}
