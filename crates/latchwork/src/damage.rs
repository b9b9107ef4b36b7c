//! Damaged records in a scan: the scan skips them and reports their keys.

use crate::store::{ErrorKind, Item, Key, Order, Range, Result, Space, View};

/// The records of a range, in key order.
#[derive(Default)]
pub(crate) struct Scanned {
    pub(crate) found: Vec<(Key, Item)>,
    /// The keys in the range whose records the store cannot read.
    pub(crate) damaged: Vec<Key>,
}

impl Scanned {
    /// The keys of all scanned records, damaged ones included, in no particular order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.found.iter().map(|(key, _)| key).chain(&self.damaged)
    }
}

/// Scans a range for at most `limit` readable records. The store fails a scan that reaches a damaged record; this
/// function continues after that record.
pub(crate) async fn scan_around(view: &View, space: &Space, range: &Range, limit: usize) -> Result<Scanned> {
    let mut rest = range.clone();
    let (mut found, mut damaged) = (Vec::new(), Vec::new());
    loop {
        let error = match view.scan(&rest, Order::Ascending, limit - found.len()).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => error,
            more => {
                found.append(&mut more?);
                return Ok(Scanned { found, damaged });
            }
        };
        let key = first_damaged(view, space, &rest, limit - found.len()).await?.ok_or(error)?;
        found.append(&mut view.scan(&rest.before(&key), Order::Ascending, limit - found.len()).await?);
        rest = rest.after(&key);
        damaged.push(key);
    }
}

/// The first key of a range whose record is damaged. The store does not report the key, so the range is halved until
/// the key is found. None if the damage is not in a single record.
async fn first_damaged(view: &View, space: &Space, range: &Range, limit: usize) -> Result<Option<Key>> {
    let mut rest = range.clone();
    // The bytes that the key is known to start with.
    let mut known = Vec::new();
    while !rest.is_empty() {
        let key = space.key(&known);
        if !known.is_empty() && rest.contains(&key) && is_damaged(view.get(&key).await)? {
            return Ok(Some(key));
        }
        let (mut low, mut high) = (0, u8::MAX);
        while low < high {
            let middle = low + (high - low) / 2;
            let bound = space.key([&known[..], &[middle + 1]].concat());
            let front = rest.before(&bound);
            if !front.is_empty() && is_damaged(view.scan(&front, Order::Ascending, limit).await)? {
                high = middle;
            } else {
                (low, rest) = (middle + 1, rest.from(&bound));
            }
        }
        known.push(low);
    }
    Ok(None)
}

fn is_damaged<T>(read: Result<T>) -> Result<bool> {
    match read {
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(true),
        read => read.map(|_| false),
    }
}
