//! Whether a transaction has landed whose answer was lost, by the row of its writer and the clock of the server.

use std::time::Duration;

use tokio_postgres::Row;

use crate::postgres::writer::Last;
use crate::{Env, Result, StoreError};

/// What the clock of the server showed at the latest, in seconds, when an answer came; and when that was here.
#[derive(Clone, Copy)]
pub(super) struct ServerClock {
    pub(super) shown: f64,
    at: Duration,
}

impl ServerClock {
    pub(super) fn read(env: &Env, row: &Row, column: usize) -> ServerClock {
        ServerClock { shown: row.get(column), at: env.monotonic() }
    }

    /// What it shows after some time from now on, or a little less.
    pub(super) fn after(self, env: &Env, duration: Duration) -> f64 {
        self.shown + (env.monotonic().saturating_sub(self.at) + duration).as_secs_f64()
    }
}

/// What is known of the last transaction of a writer that has landed.
pub(super) struct Landed {
    number: Option<i64>,
    /// Where it has left the head.
    pub(super) last: Option<Last>,
    /// What the server's clock shows.
    now: f64,
}

/// For how long a writer is certainly known, in seconds: half of the time after which it is forgotten.
const KNOWN: f64 = 12.0 * 3600.0;

impl Landed {
    pub(super) fn of(row: &Row) -> Landed {
        Landed { number: row.get(0), last: Last::of(row, 1), now: row.get(3) }
    }

    /// Whether a transaction has landed that was sent at this time of the server. An error if that was so long ago that
    /// the server may have forgotten it: the process was suspended. A higher number was left by a look-up before this
    /// one, which may have found nothing for that reason.
    pub(super) fn has(&self, number: i64, sent: f64) -> Result<bool> {
        if self.number.is_none_or(|last| last > number) && self.now - sent > KNOWN {
            let cause = "the answer was asked for more than twelve hours later, and the server no longer knows it";
            return Err(StoreError::Uncertain { cause: cause.into() });
        }
        Ok(self.number == Some(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that was suspended asks for the outcome a day later.
    #[test]
    fn a_writer_that_may_be_forgotten_leaves_the_outcome_open() {
        let asked = |number, hours: f64| Landed { number, last: None, now: 1e9 + hours * 3600.0 }.has(4, 1e9);
        assert!(matches!(asked(Some(4), 0.0), Ok(true)));
        assert!(matches!(asked(Some(2), 0.0), Ok(false)));
        assert!(matches!(asked(None, 11.0), Ok(false)), "it is the first transaction of the writer");
        assert!(matches!(asked(None, 13.0), Err(StoreError::Uncertain { .. })));
        assert!(matches!(asked(Some(5), 11.0), Ok(false)), "a look-up has given it up");
        assert!(matches!(asked(Some(5), 13.0), Err(StoreError::Uncertain { .. })), "did that look-up find the row?");
        assert!(matches!(asked(Some(4), 13.0), Ok(true)), "it has not been forgotten");
        assert!(matches!(asked(Some(2), 100.0), Ok(false)), "the row is of an earlier transaction");
    }
}
