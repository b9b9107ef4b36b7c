//! Encodes and decodes numbers and strings, and computes checksums. docs/format.md describes the records that are built
//! from them; this file knows none of them.

use bytes::{Buf, Bytes};

/// Checksum of `bytes`. `seed` binds it to the place where the bytes belong.
pub(crate) fn checksum(seed: u64, bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(bytes, seed)
}

/// Writes seven bits per byte, the lowest first. The top bit says that more bytes follow.
pub(crate) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(crate) fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Writes a value as its length plus one and its bytes, or its absence as zero.
pub(crate) fn put_optional(out: &mut Vec<u8>, bytes: Option<&Bytes>) {
    match bytes {
        None => out.push(0),
        Some(bytes) => {
            put_number(out, bytes.len() as u64 + 1);
            out.extend_from_slice(bytes);
        }
    }
}

/// Reads a number from the front of `bytes` and removes it there.
pub(crate) fn get_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Reads what the functions above wrote. Every method returns `None` if the bytes end too early or are not valid.
pub(crate) struct Reader(pub(crate) Bytes);

impl Reader {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut rest = &self.0[..];
        let number = get_number(&mut rest)?;
        self.0.advance(self.0.len() - rest.len());
        Some(number)
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.0.has_remaining().then(|| self.0.get_u8())
    }

    /// Returns a slice that shares the memory of the input.
    pub(crate) fn take(&mut self, length: usize) -> Option<Bytes> {
        (self.0.len() >= length).then(|| self.0.split_to(length))
    }

    pub(crate) fn string(&mut self) -> Option<Bytes> {
        let length = self.number()?;
        self.take(usize::try_from(length).ok()?)
    }

    pub(crate) fn optional(&mut self) -> Option<Option<Bytes>> {
        match self.number()? {
            0 => Some(None),
            length => self.take(usize::try_from(length - 1).ok()?).map(Some),
        }
    }

    /// Returns `Some` if everything was read.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_strings_are_read_back_and_truncated_ones_are_not() {
        let mut out = Vec::new();
        for number in [0, 1, 127, 128, 300, u64::MAX] {
            put_number(&mut out, number);
        }
        put_string(&mut out, b"key");
        put_optional(&mut out, None);
        put_optional(&mut out, Some(&Bytes::from_static(b"")));
        for cut in 0..out.len() {
            assert_eq!(read_all(&out[..cut]), None, "cut at {cut}");
        }
        assert_eq!(read_all(&out), Some(()));
    }

    fn read_all(bytes: &[u8]) -> Option<()> {
        let mut reader = Reader(Bytes::copy_from_slice(bytes));
        for number in [0, 1, 127, 128, 300, u64::MAX] {
            assert_eq!(reader.number()?, number);
        }
        assert_eq!(reader.string()?, "key");
        assert_eq!(reader.optional()?, None);
        assert_eq!(reader.optional()?, Some(Bytes::new()));
        reader.end()
    }
}
