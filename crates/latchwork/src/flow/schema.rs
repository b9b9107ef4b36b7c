//! What is known of a type of state: its fields with their schemas, which of them are transient, and whether JSON fits
//! it. Declarations of several blocks are merged here. Knows nothing of running blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::error::{FlowError, Result};

/// The keyword of transient fields in a schema.
const TRANSIENT: &str = "x-latchwork-transient";

/// A field of a state that lives in memory only: it is neither in checkpoints nor on the stream, and has its default
/// again when a request continues after an interruption.
///
/// ```
/// use latchwork::flow::Transient;
///
/// #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
/// struct Worker {
///     done: u32,
///     last_claimed: Transient<bool>,
/// }
/// let mut worker = Worker::default();
/// *worker.last_claimed = true;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Transient<T>(pub T);

impl<T> Deref for Transient<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Transient<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: JsonSchema> JsonSchema for Transient<T> {
    // The keyword has to be in the schema of the field itself.
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("Transient_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = T::json_schema(generator);
        schema.insert(TRANSIENT.into(), true.into());
        schema
    }
}

/// Says why JSON does not fit a type, if it does not.
pub(crate) type Fits = fn(&Value) -> std::result::Result<(), String>;

/// The part of a state that a block declares.
#[derive(Clone)]
pub(crate) struct StatePart {
    /// The path of the block, from the outside in.
    pub(crate) block: String,
    pub(crate) fields: BTreeMap<String, Value>,
    pub(crate) fits: Fits,
}

fn fits<T: DeserializeOwned>(state: &Value) -> std::result::Result<(), String> {
    T::deserialize(state).map(drop).map_err(|error| error.to_string())
}

impl StatePart {
    /// The part that a type describes.
    pub(crate) fn of<T: JsonSchema + DeserializeOwned>(block: &str) -> Result<StatePart> {
        let mut settings = SchemaSettings::default();
        settings.inline_subschemas = true;
        let schema = settings.into_generator().into_root_schema_for::<T>().to_value();
        let fields = schema.get("properties").and_then(Value::as_object);
        let fields = fields.ok_or_else(|| FlowError::NotAStruct { block: block.into() })?;
        let fields = fields.iter().map(|(name, schema)| (name.clone(), schema.clone())).collect();
        Ok(StatePart { block: block.into(), fields, fits: fits::<T> })
    }

    pub(crate) fn transient(&self) -> BTreeSet<String> {
        let is_transient = |schema: &Value| schema.get(TRANSIENT) == Some(&Value::Bool(true));
        self.fields.iter().filter(|(_, schema)| is_transient(schema)).map(|(name, _)| name.clone()).collect()
    }

    /// The same part, of a block that is now inside another one.
    pub(crate) fn within(mut self, outer: &str) -> StatePart {
        self.block = format!("{outer}/{}", self.block);
        self
    }

    /// Refuses two parts in which a field has different types.
    fn agrees(&self, scope: &str, other: &StatePart) -> Result<()> {
        for (field, schema) in &self.fields {
            let Some(second) = other.fields.get(field) else { continue };
            if plain(schema) != plain(second) {
                return Err(FlowError::Conflict {
                    scope: scope.into(),
                    field: field.as_str().into(),
                    first: self.block.as_str().into(),
                    first_type: type_of(schema).into(),
                    second: other.block.as_str().into(),
                    second_type: type_of(second).into(),
                });
            }
        }
        Ok(())
    }
}

/// Refuses parts in which a field has different types.
pub(crate) fn merge(scope: &str, parts: &[StatePart]) -> Result<()> {
    for (index, part) in parts.iter().enumerate() {
        for other in &parts[..index] {
            other.agrees(scope, part)?;
        }
    }
    Ok(())
}

/// The schema without what does not matter for the type. Whether a field is transient is the owner's decision.
fn plain(schema: &Value) -> Value {
    match schema {
        Value::Object(map) => {
            let is_told = |key: &str| ["title", "description", "default", "examples", TRANSIENT].contains(&key);
            map.iter().filter(|(key, _)| !is_told(key)).map(|(key, value)| (key.clone(), plain(value))).collect()
        }
        Value::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

fn type_of(schema: &Value) -> String {
    match schema.get("type") {
        Some(Value::String(name)) => match schema.get("format").and_then(Value::as_str) {
            Some(format) => format!("{name} ({format})"),
            None => name.clone(),
        },
        _ => plain(schema).to_string(),
    }
}

/// The state that a block declares: its defaults, its transient fields, and everything that it has to fit.
pub(crate) struct Shape {
    pub(crate) defaults: Arc<dyn Fn() -> Value + Send + Sync>,
    pub(crate) transient: BTreeSet<String>,
    pub(crate) own: StatePart,
    pub(crate) parts: Vec<StatePart>,
}

impl Shape {
    pub(crate) fn of<S>(block: &str) -> Result<Shape>
    where
        S: Default + Serialize + DeserializeOwned + JsonSchema,
    {
        let own = StatePart::of::<S>(block)?;
        let defaults = || crate::json::to_value(&S::default()).unwrap_or_default();
        Ok(Shape { defaults: Arc::new(defaults), transient: own.transient(), own, parts: Vec::new() })
    }

    /// Takes over the needs of the blocks inside.
    pub(crate) fn serve(&mut self, parts: Vec<StatePart>) -> Result<()> {
        for part in &parts {
            if let Some(field) = part.fields.keys().find(|field| !self.own.fields.contains_key(*field)) {
                let (field, block) = (field.clone(), part.block.clone());
                return Err(FlowError::MissingField { field, block, sequencer: self.own.block.clone() });
            }
            self.own.agrees("sequencer", part)?;
        }
        self.parts = parts;
        Ok(())
    }

    /// Says why a state does not fit the type that it is read as.
    pub(crate) fn check(&self, state: &Value) -> std::result::Result<(), String> {
        (self.own.fits)(state)?;
        let wrong = |part: &StatePart| (part.fits)(state).map_err(|why| format!("{why} (needed by {:?})", part.block));
        self.parts.iter().try_for_each(wrong)
    }

    /// The state without its transient fields.
    pub(crate) fn durable(&self, state: &Value) -> Value {
        let mut state = state.clone();
        if let Value::Object(fields) = &mut state {
            fields.retain(|field, _| !self.transient.contains(field));
        }
        state
    }

    /// The state of a checkpoint. Fields that it does not have, such as transient ones, have their defaults.
    pub(crate) fn restored(&self, checkpoint: Value) -> Value {
        match ((self.defaults)(), checkpoint) {
            (Value::Object(mut fields), Value::Object(stored)) => {
                fields.extend(stored.into_iter().filter(|(field, _)| !self.transient.contains(field)));
                Value::Object(fields)
            }
            (_, checkpoint) => checkpoint,
        }
    }
}
