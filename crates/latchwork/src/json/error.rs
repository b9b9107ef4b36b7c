//! What keeps a value from being stored as JSON, or from being read as a type, and where in the value it is.
//!
//! Places are found on the way out of the value: every array and object that an error passes adds its step in front.
//! So nothing is kept about places as long as all goes well.

use std::borrow::Cow;
use std::fmt;

/// Why a value cannot be stored, or does not fit. `path` says where in the value, as in `items[3].price`; it is empty
/// at the top.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // Of fields: they are named after what the messages say of them.
pub enum JsonError {
    /// NaN, an infinity, or a number beyond them.
    #[error("the number at {} is not finite, and JSON has no such number; leave it out or store a string", place(path))]
    NotFinite { path: String },
    /// Arrays and objects in one another beyond the limit.
    #[error(
        "the value at {} lies in {limit} arrays and objects and is another one; store its parts apart, or as a string",
        shorten(place(path))
    )]
    TooDeep { path: String, limit: usize },
    /// A key of a map that does not become a string.
    #[error(
        "a key of the map at {} is {found}; a key is a string, an integer, a bool, a char or a variant without fields",
        place(path)
    )]
    Key { path: String, found: Cow<'static, str> },
    /// An integer of 128 bits that needs more than 64.
    #[error("the integer at {} does not fit into 64 bits; store a string", place(path))]
    Integer { path: String },
    /// What the value's own `Serialize` raised.
    #[error("the value at {} cannot be written: {message}", place(path))]
    Custom { path: String, message: String },
    /// What keeps the value from being read as the type that is wanted.
    #[error("the value at {} does not fit: {message}", place(path))]
    Misfit { path: String, message: String },
}

/// Bytes of a key, or of a path without end, that a message shows.
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
