//! Sagas: steps with compensations, that are run in reverse order if the whole does not come to its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::workflow::{Ctx, Failure, Retry};

type Undo = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>> + Send + Sync>;

/// The compensations of a saga. Cheap to clone.
#[derive(Clone, Default)]
pub struct Saga {
    undos: Arc<Mutex<Vec<(String, Undo)>>>,
}

impl Saga {
    /// Says how to undo what is about to be done, or was done just now. The body is that of a step: it runs at least
    /// once, and is tried until it succeeds.
    pub fn compensate<F, Fut, E>(&self, name: &str, body: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Failure>,
    {
        let undo: Undo = Box::new(move || {
            let undo = body();
            Box::pin(async move { undo.await.map_err(Into::into) })
        });
        self.undos.lock().push((name.into(), undo));
    }
}

impl std::fmt::Debug for Saga {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saga").field("compensations", &self.undos.lock().len()).finish()
    }
}

impl Ctx {
    /// Runs code that says how to undo what it does. If it fails, or the execution is cancelled meanwhile, that is done
    /// in reverse order, each as a step that is tried until it succeeds; then the failure is given. A compensation
    /// that says that trying again is of no use is left, and so told with the failure.
    pub async fn saga<T, F>(&self, code: impl FnOnce(Saga) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let saga = Saga::default();
        let failure = match code(saga.clone()).await {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        let ctx = self.shielded();
        let undos = std::mem::take(&mut *saga.undos.lock());
        let mut left = Vec::new();
        for (name, undo) in undos.into_iter().rev() {
            let undone = ctx.run(&name, &*undo).retry(Retry::exponential()).await;
            if let Err(failure) = undone {
                left.push(format!("{name}: {failure}"));
            }
        }
        Err(if left.is_empty() { failure } else { failure.and(format!("not undone: {}", left.join("; "))) })
    }
}
