//! Why a value cannot be stored as JSON or read as a type, and the position of the problem in the value.
//!
//! The position is built while an error leaves the value: every array and object that the error passes adds its step in
//! front. So values without errors cost nothing for positions.

use std::borrow::Cow;
use std::fmt;

/// Why a value cannot be stored, or does not fit a type. `path` is the position in the value, as in `items[3].price`;
/// it is empty at the top.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum JsonError {
    /// A number that is NaN, infinite or too large for a float.
    #[error("the number at {} is not finite, and JSON has no such number; leave it out or store a string", place(path))]
    NotFinite { path: String },
    /// Arrays and objects are nested deeper than the limit.
    #[error(
        "the value at {} is nested in more than {limit} arrays and objects; store its parts separately, or as a string",
        shorten(place(path))
    )]
    TooDeep { path: String, limit: usize },
    /// A key of a map cannot become a string.
    #[error(
        "a key of the map at {} is {found}; use a string, an integer, a bool, a char or a variant without fields",
        place(path)
    )]
    Key { path: String, found: Cow<'static, str> },
    /// A 128-bit integer needs more than 64 bits.
    #[error("the integer at {} does not fit into 64 bits; store a string", place(path))]
    Integer { path: String },
    /// The value's own `Serialize` has failed.
    #[error("the value at {} cannot be written: {message}", place(path))]
    Custom { path: String, message: String },
    /// The value cannot be read as the requested type.
    #[error("the value at {} does not fit: {message}", place(path))]
    Misfit { path: String, message: String },
}

/// The most bytes of a key or of a very long path that a message shows.
const SHOWN: usize = 64;

impl JsonError {
    pub(super) fn under_key(self, key: &str) -> JsonError {
        let key = shorten(key);
        let plain = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '$'));
        self.under(if plain { key.into_owned() } else { format!("[{key:?}]") })
    }

    pub(super) fn under_index(self, index: usize) -> JsonError {
        self.under(format!("[{index}]"))
    }

    fn under(mut self, mut step: String) -> JsonError {
        let (JsonError::NotFinite { path }
        | JsonError::TooDeep { path, .. }
        | JsonError::Key { path, .. }
        | JsonError::Integer { path }
        | JsonError::Custom { path, .. }
        | JsonError::Misfit { path, .. }) = &mut self;
        if !path.is_empty() && !path.starts_with('[') {
            step.push('.');
        }
        path.insert_str(0, &step);
        self
    }
}

impl serde::ser::Error for JsonError {
    fn custom<T: fmt::Display>(message: T) -> JsonError {
        JsonError::Custom { path: String::new(), message: message.to_string() }
    }
}

fn place(path: &str) -> &str {
    if path.is_empty() { "the top" } else { path }
}

fn shorten(text: &str) -> Cow<'_, str> {
    if text.len() <= SHOWN {
        return text.into();
    }
    format!("{}…", &text[..text.floor_char_boundary(SHOWN)]).into()
}
