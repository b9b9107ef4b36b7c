//! The position of a part of a JSON value, as people write it: `data.address.city`. Knows nothing of the part itself.

use std::fmt;

use serde_json::Value;

/// The path to a part of a JSON value: keys of objects and indexes of arrays, at least one, none of them empty.
///
/// It is written with dots between its segments. A dot or a backslash within a segment is written with a backslash
/// before it. Every path has one written form, and paths are ordered segment by segment.
///
/// ```
/// let order = serde_json::json!({"lines": [{"price": 7}], "ship.to": "Oslo"});
/// let price = latchwork::Path::parse("lines.0.price")?;
/// assert_eq!(price.find(&order), Some(&7.into()));
/// let place = latchwork::Path::new(["ship.to"])?;
/// assert_eq!(place.to_string(), r"ship\.to");
/// # Ok::<(), latchwork::PathError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Path {
    segments: Vec<String>,
}

/// Why a text is not a path. Positions are in bytes of the written form.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum PathError {
    /// There is no segment.
    #[error("the path is empty; it must have at least one segment")]
    Empty,
    /// There is nothing between two dots, before the first dot or after the last dot.
    #[error("the path has an empty segment at byte {position}; write a dot that belongs to a segment as \\.")]
    EmptySegment { position: usize },
    /// There is a backslash at the end or before an ordinary character.
    #[error(
        "the backslash at byte {position} of the path escapes nothing; write one that belongs to a segment as \\\\"
    )]
    Backslash { position: usize },
}

impl Path {
    /// Reads the written form.
    ///
    /// ```
    /// let city = latchwork::Path::parse("data.address.city")?;
    /// assert_eq!(city.segments().len(), 3);
    /// # Ok::<(), latchwork::PathError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Path, PathError> {
        if text.is_empty() {
            return Err(PathError::Empty);
        }
        let mut segments = Vec::new();
        let mut segment = String::new();
        let mut chars = text.char_indices();
        while let Some((position, c)) = chars.next() {
            match c {
                '.' if segment.is_empty() => return Err(PathError::EmptySegment { position }),
                '.' => segments.push(std::mem::take(&mut segment)),
                '\\' => match chars.next() {
                    Some((_, escaped @ ('.' | '\\'))) => segment.push(escaped),
                    _ => return Err(PathError::Backslash { position }),
                },
                c => segment.push(c),
            }
        }
        if segment.is_empty() {
            return Err(PathError::EmptySegment { position: text.len() });
        }
        segments.push(segment);
        Ok(Path { segments })
    }

    /// Makes a path of `segments`, which need no escapes.
    ///
    /// ```
    /// let path = latchwork::Path::new(["ship.to", "city"])?;
    /// assert_eq!(path.to_string(), r"ship\.to.city");
    /// # Ok::<(), latchwork::PathError>(())
    /// ```
    pub fn new(segments: impl IntoIterator<Item = impl Into<String>>) -> Result<Path, PathError> {
        let path = Path { segments: segments.into_iter().map(Into::into).collect() };
        if path.segments.is_empty() {
            return Err(PathError::Empty);
        }
        match path.segments.iter().position(String::is_empty) {
            None => Ok(path),
            Some(empty) => Err(PathError::EmptySegment { position: written_length(&path.segments[..empty]) }),
        }
    }

    /// Keys and indexes from the outside in, without escapes.
    ///
    /// ```
    /// let path = latchwork::Path::parse(r"ship\.to.city")?;
    /// assert_eq!(path.segments(), ["ship.to", "city"]);
    /// # Ok::<(), latchwork::PathError>(())
    /// ```
    pub fn segments(&self) -> &[String] {
        &self.segments
    }

    /// Returns the value at the path in `root`. Items of an array are found by index in plain decimal: `0`, `17`, not
    /// `017`.
    ///
    /// ```
    /// # use latchwork::{Path, json};
    /// let order = json!({"lines": [{"price": 7}]});
    /// assert_eq!(Path::parse("lines.0.price")?.find(&order), Some(&json!(7)));
    /// assert_eq!(Path::parse("lines.1.price")?.find(&order), None);
    /// # Ok::<(), latchwork::PathError>(())
    /// ```
    pub fn find<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        find_in(&self.segments, root)
    }
}

impl From<Path> for String {
    fn from(path: Path) -> String {
        path.to_string()
    }
}

impl TryFrom<String> for Path {
    type Error = PathError;

    fn try_from(text: String) -> Result<Path, PathError> {
        Path::parse(&text)
    }
}

/// Returns the value at `segments` in `root`; `root` itself if there are none.
pub(crate) fn find_in<'a>(segments: &[String], root: &'a Value) -> Option<&'a Value> {
    segments.iter().try_fold(root, |value, segment| match value {
        Value::Object(fields) => fields.get(segment),
        Value::Array(items) => items.get(array_index(segment)?),
        _ => None,
    })
}

/// Each index has one spelling, so that two different paths never find the same value.
pub(crate) fn array_index(segment: &str) -> Option<usize> {
    let plain = segment == "0" || !segment.starts_with(['0', '+']);
    if plain { segment.parse().ok() } else { None }
}

/// The length of the written form, with a dot after each segment.
fn written_length(segments: &[String]) -> usize {
    segments.iter().map(|segment| segment.len() + segment.matches(['.', '\\']).count() + 1).sum()
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for (index, segment) in self.segments.iter().enumerate() {
            if index > 0 {
                f.write_char('.')?;
            }
            for c in segment.chars() {
                if matches!(c, '.' | '\\') {
                    f.write_char('\\')?;
                }
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}
