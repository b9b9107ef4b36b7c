//! Pages of lists, and the cursors between them. This file knows no list: each list names itself in its cursors, and
//! only the list knows what its positions are.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::damage::scan_around;
use crate::store::{Item, Key, Order, Range, Space, StoreError, View};

/// How many items a page holds by default, and at most.
const PAGE: usize = 100;
pub(crate) const MOST: usize = 1000;

/// The first byte of cursors.
const VERSION: u8 = 2;

/// A page of a list.
///
/// ```
/// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
/// # async fn example(engine: Engine) -> Result<()> {
/// let mut cursor = None;
/// loop {
///     let page = engine.list(ExecutionFilter::new()).limit(50).after(cursor).await?;
///     for execution in &page {
///         println!("{}", execution.id);
///     }
///     cursor = page.next;
///     if cursor.is_none() {
///         break;
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page<T> {
    /// The items, in the order of the list.
    pub items: Vec<T>,
    /// Where the next page begins, if there is one.
    pub next: Option<Cursor>,
}

impl<T> Page<T> {
    /// The same page with other items.
    pub fn map<U>(self, change: impl FnMut(T) -> U) -> Page<U> {
        Page { items: self.items.into_iter().map(change).collect(), next: self.next }
    }
}

impl<T> Default for Page<T> {
    /// A page without items, and without a next page.
    fn default() -> Page<T> {
        Page { items: Vec::new(), next: None }
    }
}

impl<T> IntoIterator for Page<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.items.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a Page<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.items.iter()
    }
}

/// Where a list continues. As text, it can be stored and sent. It continues only the list that it comes from, with the
/// same filter and the same order.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cursor(Vec<u8>);

/// Why a cursor cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum CursorError {
    /// It is not a cursor, or was changed.
    #[error("{text:?} is not a cursor: no list has returned it")]
    Unknown { text: String },
    /// It belongs to a list of other things.
    #[error("this cursor continues a list of {found}, not a list of {expected}")]
    OtherList { expected: String, found: String },
    /// It belongs to a list of the same things, with another filter or order.
    #[error("this cursor continues a list of {list} with another filter or order; use the same for each page")]
    OtherQuery { list: String },
}

/// The parts of a cursor.
struct Parts<'a> {
    /// The name of its list.
    list: &'a str,
    /// Stands for the filter and the order of the list.
    mark: u64,
    position: &'a [u8],
}

impl<'a> Parts<'a> {
    fn read(bytes: &'a [u8]) -> Option<Parts<'a>> {
        let (&length, rest) = bytes.strip_prefix(&[VERSION])?.split_first()?;
        let (list, rest) = rest.split_at_checked(usize::from(length))?;
        let (mark, position) = rest.split_first_chunk()?;
        Some(Parts { list: std::str::from_utf8(list).ok()?, mark: u64::from_be_bytes(*mark), position })
    }
}

impl Cursor {
    /// The cursor at a position in the list of this name. The mark stands for the filter and the order of the list.
    pub(crate) fn new(list: &str, mark: u64, position: &[u8]) -> Cursor {
        Cursor([&[VERSION, list.len() as u8], list.as_bytes(), &mark.to_be_bytes(), position].concat())
    }

    /// Reads the bytes of a cursor.
    pub(crate) fn read(bytes: &[u8]) -> Option<Cursor> {
        Parts::read(bytes).map(|_| Cursor(bytes.to_vec()))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The position in the list of this name, if the cursor belongs to that list.
    pub(crate) fn position(&self, list: &str, mark: u64) -> Result<&[u8], CursorError> {
        let parts = Parts::read(&self.0).ok_or_else(|| self.unknown())?;
        if parts.list != list {
            return Err(CursorError::OtherList { expected: list.into(), found: parts.list.into() });
        }
        if parts.mark != mark {
            return Err(CursorError::OtherQuery { list: list.into() });
        }
        Ok(parts.position)
    }

    /// The error for a cursor whose position its list cannot have.
    pub(crate) fn unknown(&self) -> CursorError {
        CursorError::Unknown { text: self.to_string() }
    }
}

/// Stands for the filter and the order of a list in its cursors. It is the same in every process.
pub(crate) fn mark(of: &impl Serialize) -> u64 {
    let bytes = postcard::to_extend(of, Vec::new()).expect("a filter can be written to memory");
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cursor({self})")
    }
}

impl FromStr for Cursor {
    type Err = CursorError;

    fn from_str(text: &str) -> Result<Cursor, CursorError> {
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let byte = |two: &[u8]| Some(digit(two[0])? << 4 | digit(*two.get(1)?)?);
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let cursor = bytes.and_then(|bytes| Cursor::read(&bytes));
        cursor.ok_or_else(|| CursorError::Unknown { text: text.into() })
    }
}

impl TryFrom<String> for Cursor {
    type Error = CursorError;

    fn try_from(text: String) -> Result<Cursor, CursorError> {
        text.parse()
    }
}

impl From<Cursor> for String {
    fn from(cursor: Cursor) -> String {
        cursor.to_string()
    }
}

/// Which page of which list a caller asks for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    list: &'static str,
    pub(crate) limit: usize,
    pub(crate) after: Option<Cursor>,
}

impl Asked {
    /// The first page of the list of this name: the items in the plural.
    pub(crate) fn of(list: &'static str) -> Asked {
        Asked { list, limit: PAGE, after: None }
    }

    /// The position after which the page begins, if it is not the first page.
    pub(crate) fn position(&self, mark: u64) -> Result<Option<&[u8]>, CursorError> {
        self.after.as_ref().map(|after| after.position(self.list, mark)).transpose()
    }

    /// The error for a cursor whose position the list cannot have.
    pub(crate) fn unknown(&self) -> CursorError {
        self.after.as_ref().map_or(CursorError::Unknown { text: String::new() }, Cursor::unknown)
    }

    /// The cursor at a position.
    pub(crate) fn cursor(&self, mark: u64, position: &[u8]) -> Cursor {
        Cursor::new(self.list, mark, position)
    }

    /// Makes the page of items with their positions. An item beyond the limit shows that there is a next page.
    pub(crate) fn page<T>(&self, mark: u64, mut found: Vec<(impl AsRef<[u8]>, T)>) -> Page<T> {
        let has_more = found.len() > self.limit;
        found.truncate(self.limit);
        let last = found.last().filter(|_| has_more);
        let next = last.map(|(position, _)| self.cursor(mark, position.as_ref()));
        Page { items: found.into_iter().map(|(_, item)| item).collect(), next }
    }

    /// Reads the page from records; positions are the keys. `read` returns `None` for a record that is not in the list.
    pub(crate) async fn scan<T, E>(
        &self,
        mark: u64,
        records: Records<'_>,
        mut read: impl FnMut(&Key, &Item) -> Result<Option<T>, E>,
    ) -> Result<Page<T>, E>
    where
        E: From<StoreError> + From<CursorError>,
    {
        let Records { view, space, range, order, .. } = &records;
        let behind = |rest: &Range, key: &Key| match order {
            Order::Ascending => rest.after(key),
            Order::Descending => rest.before(key),
        };
        let mut rest = range.clone();
        if let Some(position) = self.position(mark)? {
            let key = space.key(position);
            if !range.contains(&key) {
                return Err(self.unknown().into());
            }
            rest = behind(&rest, &key);
        }
        let mut found: Vec<(Vec<u8>, T)> = Vec::new();
        let mut batch = self.limit + 1;
        loop {
            let scanned = match records.skips_damage {
                true => scan_around(view, space, &rest, batch).await?.found,
                false => view.scan(&rest, *order, batch).await?,
            };
            let is_end = scanned.len() < batch;
            for (key, item) in &scanned {
                found.extend(read(key, item)?.map(|item| (key.bytes().to_vec(), item)));
                if found.len() > self.limit {
                    return Ok(self.page(mark, found));
                }
            }
            match scanned.last().filter(|_| !is_end) {
                Some((last, _)) => rest = behind(&rest, last),
                None => return Ok(self.page(mark, found)),
            }
            // Few of the records are in the list.
            batch = MOST;
        }
    }
}

/// The records that a list is read from.
pub(crate) struct Records<'a> {
    pub(crate) view: &'a View,
    pub(crate) space: &'a Space,
    pub(crate) range: Range,
    pub(crate) order: Order,
    /// True if records that the store cannot read are skipped. Only for the ascending order.
    pub(crate) skips_damage: bool,
}

/// Implements what all lists have in common: `limit`, `after`, and that they are awaited. The type needs a field
/// `asked` and an asynchronous method `page`: `paged!(Reviews => ReviewDescription, WorkflowError)`.
macro_rules! paged {
    ($list:ident $(<$life:lifetime>)? => $item:ty, $error:ty) => {
        impl $(<$life>)? $list $(<$life>)? {
            /// The size of a page: 100 by default, at least 1 and at most 1000.
            pub fn limit(mut self, limit: usize) -> Self {
                self.asked.limit = limit.clamp(1, $crate::page::MOST);
                self
            }

            /// Continues after an earlier page: its `next`.
            pub fn after(mut self, cursor: impl Into<Option<$crate::Cursor>>) -> Self {
                self.asked.after = cursor.into();
                self
            }
        }

        impl $(<$life>)? std::future::IntoFuture for $list $(<$life>)? {
            type Output = std::result::Result<$crate::Page<$item>, $error>;
            type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send $(+ $life)?>>;

            fn into_future(self) -> Self::IntoFuture {
                Box::pin(self.page())
            }
        }
    };
}
pub(crate) use paged;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back_from_its_text() {
        let cursor = Cursor::new("locks", 7, b"\x00\xff/a");
        assert_eq!(cursor.to_string().parse(), Ok(cursor.clone()));
        let json = serde_json::to_string(&cursor).unwrap();
        assert_eq!(serde_json::from_str::<Cursor>(&json).unwrap(), cursor);
        assert_eq!(cursor.position("locks", 7), Ok(&b"\x00\xff/a"[..]));
        assert_eq!(format!("{cursor:?}"), format!("Cursor({cursor})"));
    }

    #[test]
    fn a_cursor_of_another_list_or_filter_is_refused() {
        let cursor = Cursor::new("locks", 7, b"a");
        let other = CursorError::OtherList { expected: "claims".into(), found: "locks".into() };
        assert_eq!(cursor.position("claims", 7), Err(other));
        assert_eq!(cursor.position("locks", 8), Err(CursorError::OtherQuery { list: "locks".into() }));
        assert_ne!(mark(&Some("a")), mark(&None::<&str>));
        assert_ne!(mark(&("a", "bc")), mark(&("ab", "c")));
    }

    #[test]
    fn text_that_no_list_has_returned_is_not_a_cursor() {
        let good = Cursor::new("locks", 7, b"").to_string();
        for length in 0..good.len() {
            assert!(good[..length].parse::<Cursor>().is_err(), "{length}");
        }
        for text in ["", "xyz", "0", "02", "0a00", "é", &good.replacen("02", "01", 1), &format!("{good}0")] {
            assert_eq!(text.parse::<Cursor>(), Err(CursorError::Unknown { text: text.into() }));
            assert!(serde_json::from_value::<Cursor>(text.into()).is_err());
        }
    }

    #[test]
    fn an_item_beyond_the_limit_shows_that_there_is_a_next_page() {
        let mut asked = Asked::of("locks");
        asked.limit = 2;
        let page = asked.page(0, vec![("a", 1), ("b", 2)]);
        assert_eq!(page, Page { items: vec![1, 2], next: None });
        let page = asked.page(0, vec![("a", 1), ("b", 2), ("c", 3)]);
        assert_eq!(page.next, Some(Cursor::new("locks", 0, b"b")));
        assert_eq!(page.map(|number| number * 10).into_iter().collect::<Vec<_>>(), [10, 20]);
        assert_eq!((&Page { items: vec![1], next: None }).into_iter().sum::<i32>(), 1);
    }
}
