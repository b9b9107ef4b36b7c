//! The definition of a container: its initial value, and the type and schema that it must fit.

use serde_json::Value;

use crate::state::{Result, StateError};

/// Returns why a state does not fit a type, if it does not.
pub(crate) type StateFits = fn(&Value) -> std::result::Result<(), String>;

/// The definition of a container.
#[derive(Debug, Clone, Default)]
pub(crate) struct ContainerDefinition {
    /// The value that is read while nothing was ever written.
    pub(crate) initial: Option<Value>,
    /// Returns why a state does not fit the type that it is read as.
    pub(crate) fits: Option<StateFits>,
    /// True if the initial value was given. Then the defaults of a schema do not replace it.
    #[cfg(feature = "schema")]
    pub(crate) given: bool,
    #[cfg(feature = "schema")]
    pub(crate) schema: Option<std::sync::Arc<Schema>>,
}

impl ContainerDefinition {
    /// True if `check` can refuse a state, so that it must be restored.
    pub(crate) fn may_refuse(&self) -> bool {
        #[cfg(feature = "schema")]
        if self.schema.is_some() {
            return true;
        }
        self.fits.is_some()
    }

    /// Refuses a state that does not fit. A removed state always fits.
    pub(crate) fn check(&self, key: &str, state: Option<&Value>) -> Result<()> {
        let Some(state) = state else { return Ok(()) };
        #[cfg(feature = "schema")]
        if let Some(schema) = &self.schema {
            schema.check(key, state)?;
        }
        let fits = self.fits.map_or(Ok(()), |fits| fits(state));
        fits.map_err(|message| StateError::Mismatch { key: key.into(), message })
    }
}

/// A JSON schema, ready to be used.
#[cfg(feature = "schema")]
#[derive(Debug)]
pub(crate) struct Schema {
    validator: jsonschema::Validator,
    /// The initial value that its defaults make.
    pub(crate) defaults: Option<Value>,
}

#[cfg(feature = "schema")]
impl Schema {
    pub(crate) fn new(key: &str, schema: &Value) -> Result<Schema> {
        let refuse = |message: String| StateError::Schema { key: key.into(), message };
        crate::json::check_schema(schema).map_err(refuse)?;
        let validator = jsonschema::validator_for(schema).map_err(|error| refuse(error.to_string()))?;
        Ok(Schema { validator, defaults: defaults(schema) })
    }

    fn check(&self, key: &str, state: &Value) -> Result<()> {
        self.validator.validate(state).map_err(|error| {
            let path = error.instance_path().to_string();
            let path = if path.is_empty() { "its top".into() } else { path };
            StateError::SchemaViolation { key: key.into(), path, message: error.to_string() }
        })
    }
}

/// The value that a schema's defaults describe: its own default, or an object of the defaults of its properties.
#[cfg(feature = "schema")]
fn defaults(schema: &Value) -> Option<Value> {
    if let Some(default) = schema.get("default") {
        return Some(default.clone());
    }
    let properties = schema.get("properties")?.as_object()?;
    let filled = properties.iter().filter_map(|(name, schema)| Some((name.clone(), defaults(schema)?)));
    let filled: serde_json::Map<String, Value> = filled.collect();
    (!filled.is_empty()).then_some(Value::Object(filled))
}
