//! What rides in the commit of a job: it lands with the job, or not at all.

use crate::store::{Commit, Receipt, Refusal, StoreError};

/// A rider of a job. `A` is the answer of a job that writes, `R` the result of a job that writes nothing.
pub(crate) trait Rider<A, R>: Send {
    /// Adds itself to the commit. It is called again if that commit was not sent or was refused.
    fn board(&mut self, commit: Commit, answer: &A) -> Commit;

    /// The commit has landed.
    fn landed(&mut self, receipt: &Receipt);

    /// The commit was refused, and nothing of it was written. Returns true if a check of the rider itself failed: then
    /// the job is dropped without an answer.
    fn refused(&mut self, refusal: &Refusal) -> bool;

    /// The store failed the commit, or it is unknown whether the commit was applied.
    fn failed(&mut self, error: &StoreError);

    /// The job writes nothing.
    fn rests(&mut self, rest: R);
}
