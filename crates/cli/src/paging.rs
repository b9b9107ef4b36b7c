//! Long lists: the options that all lists have in common, and how their pages are put together.

use anyhow::Result;
use clap::Args;
use latchwork::{Cursor, Page};
use serde::Serialize;

use crate::output::{Format, Output, Table};

/// The page size of reads.
pub(crate) const PAGE: usize = 1000;

/// Which part of a list is shown.
#[derive(Args)]
pub(crate) struct Paging {
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list, with the same filters and order: its `next`.
    #[arg(long, value_name = "CURSOR")]
    after: Option<Cursor>,
}

impl Paging {
    /// Writes a list. `read` returns the page of this size after this cursor.
    pub(crate) async fn write<T: Serialize>(
        &self,
        name: &str,
        output: &mut Output<'_>,
        table: impl FnOnce(&[T]) -> Table,
        mut read: impl AsyncFnMut(usize, Option<Cursor>) -> Result<Page<T>>,
    ) -> Result<()> {
        let mut left = if self.all { usize::MAX } else { usize::try_from(self.limit).unwrap_or(usize::MAX) };
        let (mut found, mut next) = (Vec::new(), self.after.clone());
        loop {
            let page = read(left.min(PAGE), next.take()).await?;
            left -= page.items.len();
            found.extend(page.items);
            next = page.next;
            if left == 0 || next.is_none() {
                break;
            }
            if output.format() == Format::Jsonl {
                // Each page is written at once, so that a long list does not fill memory.
                found.drain(..).try_for_each(|item| output.line(&item))?;
            }
        }
        let next = next.map(|next| next.to_string());
        output.many(name, &found, next.as_deref(), table)
    }
}

/// Returns the first items of a list, at most this many. `read` returns the page of this size after this cursor.
pub(crate) async fn first<T>(
    most: usize,
    mut read: impl AsyncFnMut(usize, Option<Cursor>) -> Result<Page<T>>,
) -> Result<Vec<T>> {
    let (mut found, mut next) = (Vec::new(), None);
    while found.len() < most {
        let page = read((most - found.len()).min(PAGE), next.take()).await?;
        found.extend(page.items);
        next = page.next;
        if next.is_none() {
            break;
        }
    }
    Ok(found)
}
