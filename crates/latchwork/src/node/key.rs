//! Parts of keys that all layers above use. This file does not know what the keys are for.

/// Appends a text to a key, with its length first. So no written text is a prefix of another one.
pub(crate) fn write_text(key: &mut Vec<u8>, text: &str) {
    key.extend_from_slice(&(text.len() as u16).to_be_bytes());
    key.extend_from_slice(text.as_bytes());
}

/// Returns the text that [`write_text`] has written, and the rest of the key.
pub(crate) fn read_text(key: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = key.split_first_chunk::<2>()?;
    let (text, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))?;
    Some((std::str::from_utf8(text).ok()?, rest))
}
