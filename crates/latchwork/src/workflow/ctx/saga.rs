//! Sagas: steps with compensations, that are run in reverse order if the whole does not come to its end.

use std::future::Future;
use std::sync::Arc;
use std::task::Context;

use parking_lot::Mutex;

use crate::workflow::journal::place::Place;
use crate::workflow::run::Stop;
use crate::workflow::{Boxed, Ctx, Failure, Retry};

type Body = Box<dyn Fn() -> Boxed<'static, Result<(), Failure>> + Send + Sync>;

/// How to undo something.
pub(crate) struct Undo {
    /// Before which operation that was said.
    pub(crate) place: Place,
    name: String,
    body: Body,
}

pub(crate) type Undos = Mutex<Vec<Undo>>;

/// The compensations of a saga. Cheap to clone.
#[derive(Clone)]
pub struct Saga {
    ctx: Ctx,
    undos: Arc<Undos>,
}

impl Saga {
    /// Says how to undo what is about to be done, or was done just now. The body is that of a step: it runs at least
    /// once, and is tried until it succeeds. Say it between operations, in the saga's own code or in a branch: said in
    /// the body of a step it parks the execution, since a replay does not run that.
    pub fn compensate<F, Fut, E>(&self, name: &str, body: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Failure>,
    {
        let Some(place) = self.ctx.here().upcoming() else {
            let reason =
                format!("compensation {name:?} was said while an operation was under way, such as in its body");
            return self.ctx.run.set_stop(Stop::Parked(reason));
        };
        let body: Body = Box::new(move || {
            let undo = body();
            Box::pin(async move { undo.await.map_err(Into::into) })
        });
        self.undos.lock().push(Undo { place, name: name.into(), body });
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
        let saga = Saga { ctx: self.clone(), undos: Arc::default() };
        self.run.with(|state| state.begin_saga(&saga.undos));
        let mut code = std::pin::pin!(code(saga.clone()));
        let poll = |context: &mut Context<'_>| self.here().poll(&self.run, true, || code.as_mut().poll(context));
        let failure = match std::future::poll_fn(poll).await {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        let ctx = self.shielded();
        let mut undos = std::mem::take(&mut *saga.undos.lock());
        // Branches may have said so in another order than before.
        undos.sort_by_cached_key(|undo| undo.place.along());
        let mut left = Vec::new();
        for Undo { name, body, .. } in undos.into_iter().rev() {
            let undone = ctx.run(&name, &*body).retry(Retry::exponential()).await;
            if let Err(failure) = undone {
                left.push(format!("{name}: {failure}"));
            }
        }
        Err(if left.is_empty() { failure } else { failure.and(format!("not undone: {}", left.join("; "))) })
    }
}
