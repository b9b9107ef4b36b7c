//! Stored records: a version byte, then the fields of that version. A program reads all versions up to its own. It
//! refuses a newer version, names both versions and leaves the record alone. This file knows no record of its own.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::Bytes;

/// A value that is stored under a version.
///
/// How a record grows: new fields go to its end. [`Record::APPENDED`] gets the encoded defaults of the new fields, and
/// those bytes are appended to records of older versions when they are read. A new variant of an enum is a version that
/// appends nothing. For any other change, [`Record::read`] is written by hand and reads each version as its old type.
pub(crate) trait Record: Sized {
    /// For each version after the first: the encoded defaults of the fields that this version has appended.
    const APPENDED: &'static [&'static [u8]] = &[];
    /// The version that is written, and the newest that is read.
    const VERSION: u8 = 1 + Self::APPENDED.len() as u8;

    /// Encodes the version byte and the fields.
    fn encode(&self) -> Bytes;

    /// Decodes the fields of a version from 1 to [`Record::VERSION`].
    fn read(version: u8, fields: &[u8]) -> Option<Self>;

    fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        match bytes.split_first() {
            Some((&version, fields)) if (1..=Self::VERSION).contains(&version) => {
                Self::read(version, fields).ok_or(Unreadable::Damaged)
            }
            Some((&found, _)) if found <= LAST => Err(Unreadable::Version { found, supported: Self::VERSION }),
            _ => Err(Unreadable::Damaged),
        }
    }
}

/// The highest possible version. A larger first byte, such as that of a text, is damage and not a newer version.
const LAST: u8 = 31;

/// Why a record cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// The bytes are not what was written.
    Damaged,
    /// This program does not know the version of the record; most likely it is newer. The record must stay as it is.
    Version { found: u8, supported: u8 },
}

impl Unreadable {
    /// Adds the place of the record.
    pub(crate) fn at(self, place: impl Into<String>) -> BadRecord {
        BadRecord { place: place.into(), why: self }
    }

    pub(crate) fn is_version(self) -> bool {
        matches!(self, Unreadable::Version { .. })
    }
}

/// A record that cannot be read, and why. Each layer converts it into its own error.
#[derive(Debug, Clone)]
pub(crate) struct BadRecord {
    pub(crate) place: String,
    pub(crate) why: Unreadable,
}

macro_rules! unreadable {
    ($error:ident) => {
        impl From<$crate::record::BadRecord> for $error {
            fn from($crate::record::BadRecord { place, why }: $crate::record::BadRecord) -> $error {
                match why {
                    $crate::record::Unreadable::Damaged => $error::Corrupt { place },
                    $crate::record::Unreadable::Version { found, supported } => {
                        $error::UnknownVersion { place, found, supported }
                    }
                }
            }
        }
    };
}
pub(crate) use unreadable;

/// Encodes the fields of a record with postcard, after its version.
pub(crate) fn write<R: Record>(fields: &impl Serialize) -> Bytes {
    // Most records are shorter than this. The copy below has the exact length.
    let mut bytes = Vec::with_capacity(256);
    bytes.push(R::VERSION);
    let bytes = postcard::to_extend(fields, bytes).expect("a record can be written to memory");
    Bytes::copy_from_slice(&bytes)
}

/// Decodes the fields of a record with postcard. The defaults of fields that its version did not have are appended.
pub(crate) fn read<R: Record + DeserializeOwned>(version: u8, fields: &[u8]) -> Option<R> {
    match R::APPENDED.get(usize::from(version) - 1..)? {
        [] => read_all(fields),
        appended => read_all(&[fields, &appended.concat()].concat()),
    }
}

/// Decodes a value that takes all of these bytes.
pub(crate) fn read_all<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    postcard::take_from_bytes(bytes).ok().filter(|(_, rest)| rest.is_empty()).map(|(value, _)| value)
}

/// Implements [`Record`] for types that postcard encodes: `stored!(Head, Lease => [b"\0"])`. The list after the arrow
/// is [`Record::APPENDED`].
macro_rules! stored {
    ($($record:ty $(=> [$($appended:literal),*])?),*) => {$(
        impl $crate::record::Record for $record {
            $(const APPENDED: &'static [&'static [u8]] = &[$($appended),*];)?

            fn encode(&self) -> $crate::store::Bytes {
                $crate::record::write::<Self>(self)
            }

            fn read(version: u8, fields: &[u8]) -> Option<Self> {
                $crate::record::read(version, fields)
            }
        }
    )*};
}
pub(crate) use stored;

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    /// A record in its first version.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct First {
        name: String,
        permits: u32,
    }

    /// The same record with two more fields.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Second {
        name: String,
        permits: u32,
        label: Option<String>,
        weight: u32,
    }

    /// The same record after a change that appending cannot express.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Third {
        name: String,
        room: Result<u32, String>,
    }

    stored!(First, Second => [b"\x00\x07"]);

    impl Record for Third {
        const VERSION: u8 = 3;

        fn encode(&self) -> Bytes {
            write::<Self>(self)
        }

        fn read(version: u8, fields: &[u8]) -> Option<Third> {
            match version {
                3 => read_all(fields),
                older => Second::read(older, fields).map(|it| Third { name: it.name, room: Ok(it.permits) }),
            }
        }
    }

    fn first() -> First {
        First { name: "n".into(), permits: 300 }
    }

    fn second(label: Option<&str>, weight: u32) -> Second {
        Second { name: "n".into(), permits: 300, label: label.map(Into::into), weight }
    }

    #[test]
    fn a_newer_program_reads_all_older_versions() {
        assert_eq!(postcard::to_stdvec(&(None::<String>, 7_u32)).unwrap(), Second::APPENDED[0], "as encoded");
        let third = Third { name: "n".into(), room: Ok(300) };
        assert_eq!(Second::decode(&first().encode()), Ok(second(None, 7)), "defaults fill the missing fields");
        assert_eq!(Second::decode(&second(Some("l"), 1).encode()), Ok(second(Some("l"), 1)));
        assert_eq!(Third::decode(&first().encode()), Ok(Third { ..third }));
        assert_eq!(Third::decode(&second(Some("l"), 1).encode()), Ok(Third { name: "n".into(), room: Ok(300) }));
    }

    // A program that was rolled back reads a record that the newer program wrote.
    #[test]
    fn an_older_program_refuses_a_newer_version_and_names_both() {
        let refused = First::decode(&second(None, 7).encode()).unwrap_err();
        assert_eq!(refused, Unreadable::Version { found: 2, supported: 1 });
        assert!(First::decode(&[0, 1, b'n', 1]).unwrap_err().is_version());
    }

    #[test]
    fn bytes_that_were_never_written_are_damage() {
        let mut longer = first().encode().to_vec();
        longer.push(0);
        let shorter = &longer[..longer.len() - 2];
        for bytes in [&longer[..], shorter, &[], &[1], &[1, 1, 0xff, 1], b"?", &[255; 3]] {
            assert_eq!(First::decode(bytes), Err(Unreadable::Damaged), "{bytes:?}");
        }
    }
}
