//! What the value of a decision has to fit: a JSON schema, and the options that take a value. It is stored with the
//! review, so that every caller who decides it is held to it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ValueSchema {
    pub(crate) schema: Value,
    /// The options whose value has to fit, and whether one of them may be chosen without a value.
    pub(crate) options: BTreeMap<String, bool>,
}

impl ValueSchema {
    /// Says why a decision does not fit.
    #[cfg(feature = "schema")]
    pub(crate) fn check(&self, option: &str, value: &Value) -> Result<(), String> {
        let Some(may_be_missing) = self.options.get(option) else { return Ok(()) };
        if *may_be_missing && value.is_null() {
            return Ok(());
        }
        crate::json::check_schema(&self.schema)?;
        let validator =
            jsonschema::validator_for(&self.schema).map_err(|error| format!("the schema is wrong: {error}"))?;
        validator.validate(value).map_err(|error| match error.instance_path().to_string() {
            path if path.is_empty() => error.to_string(),
            path => format!("at {path}: {error}"),
        })
    }

    /// This program cannot look.
    #[cfg(not(feature = "schema"))]
    pub(crate) fn check(&self, option: &str, _: &Value) -> Result<(), String> {
        match self.options.contains_key(option) {
            true => Err("this program was built without the feature `schema`".into()),
            false => Ok(()),
        }
    }
}
