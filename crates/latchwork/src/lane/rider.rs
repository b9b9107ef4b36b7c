//! What rides in the commit of a job: it lands with the job, or not at all.

use crate::store::{Commit, Receipt, Refusal, StoreError};

/// A rider of a job. `A` is the answer of a job that is written, `R` what a job comes to for which nothing is written.
pub(crate) trait Rider<A, R>: Send {
    /// Adds itself to the commit. It is called again if that commit was not sent or not taken.
    fn board(&mut self, commit: Commit, answer: &A) -> Commit;

    /// The commit has landed.
    fn landed(&mut self, receipt: &Receipt);

    /// The commit was refused, and nothing of it is written. Tells whether that was for a reason of the rider's own:
    /// then the job is dropped without an answer.
    fn refused(&mut self, refusal: &Refusal) -> bool;

    /// The store did not take the commit, or did not tell whether it did.
    fn failed(&mut self, error: &StoreError);

    /// Nothing is written for the job.
    fn rests(&mut self, rest: R);
}
