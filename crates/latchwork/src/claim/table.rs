//! A table of the user's own as the configuration of a claim workflow names it: names are checked here, and quoted
//! before they are part of any statement. Knows no database.

use serde::Serialize;

use crate::entity::EntityId;

/// A table of the user's own that holds what a claim workflow is about, on a store in PostgreSQL. The column of the
/// status is the `status_field` of the workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct UserTable {
    /// Its name, with or without its schema: `invoices` or `billing.invoices`.
    pub name: String,
    /// The column that identifies a row. It is unique.
    pub id: String,
    /// The column with the version: a whole number that every change of the row raises by one.
    pub version: String,
}

/// How ids of rows begin, where ids of entities and of rows stand side by side.
pub(crate) const ROWS: &str = "sql:";

/// The longest name of a table or a column, in bytes.
const LONGEST: usize = 63;

/// Quotes the name of a table or a column. A name with other characters than letters, digits, `_` and `$` is refused.
pub(crate) fn quoted(name: &str) -> Result<String, String> {
    let is_first = |it: char| it.is_ascii_alphabetic() || it == '_';
    let is_plain = |it: char| is_first(it) || it.is_ascii_digit() || it == '$';
    match name.chars().next() {
        Some(first) if is_first(first) && name.chars().all(is_plain) && name.len() <= LONGEST => {
            Ok(format!("\"{name}\""))
        }
        _ => Err(format!(
            "{name:?} cannot be the name of a table or a column: it has 1 to {LONGEST} letters, digits, _ and $, and \
             starts with a letter or _"
        )),
    }
}

impl UserTable {
    /// Its name for a statement.
    pub(crate) fn quoted(&self) -> Result<String, String> {
        let parts: Vec<&str> = self.name.split('.').collect();
        if parts.len() > 2 {
            return Err(format!("{:?} is not a table, or a schema and a table", self.name));
        }
        let parts: Result<Vec<String>, String> = parts.into_iter().map(quoted).collect();
        Ok(parts?.join("."))
    }

    /// How the ids of its rows begin.
    pub(crate) fn prefix(&self) -> String {
        format!("{ROWS}{}:", self.name)
    }

    /// The id of a row among ids of entities.
    pub(crate) fn entity(&self, row: &EntityId) -> EntityId {
        let prefix = self.prefix();
        if row.starts_with(&prefix) { row.clone() } else { format!("{prefix}{row}").into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_quoted() {
        for (name, quoted) in [("invoices", "\"invoices\""), ("Billing.In_2$", "\"Billing\".\"In_2$\"")] {
            let table = UserTable { name: name.into(), id: "id".into(), version: "v".into() };
            assert_eq!(table.quoted().as_deref(), Ok(quoted));
        }
        let long = "a".repeat(64);
        for name in ["", "a.b.c", "a\"; DROP TABLE b; --", "a b", "1a", "a.", ".a", "ä", "a\0", "a-b", &long] {
            let table = UserTable { name: name.into(), id: "id".into(), version: "v".into() };
            assert!(table.quoted().is_err(), "{name:?}");
        }
    }
}
