//! Sagas: steps with compensations, which run in reverse order if the saga fails.

use std::future::Future;
use std::sync::Arc;
use std::task::Context;

use parking_lot::Mutex;

use crate::workflow::journal::place::Place;
use crate::workflow::run::Stop;
use crate::workflow::{Boxed, Ctx, Failure, Retry};

type UndoBody = Box<dyn Fn() -> Boxed<'static, Result<(), Failure>> + Send + Sync>;

/// A compensation.
pub(crate) struct Undo {
    /// The operation that was next when the compensation was set.
    pub(crate) place: Place,
    name: String,
    body: UndoBody,
}

pub(crate) type Undos = Mutex<Vec<Undo>>;

/// The compensations of a saga. Cheap to clone.
#[derive(Clone)]
pub struct Saga {
    ctx: Ctx,
    undos: Arc<Undos>,
}

impl Saga {
    /// Sets how to undo the next operation. The body runs as a step: at least once, and it is tried until it succeeds.
    /// Call this between operations, in the saga's own code or in a branch. In the body of a step it parks the
    /// execution, because a replay does not run that body. [`Ctx::key`] returns the idempotency key of the step to
    /// undo.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn book(room: u32) -> std::io::Result<()> { Ok(()) }
    /// # async fn give_back(room: u32) -> Result<(), Failure> { Ok(()) }
    /// async fn journey(ctx: Ctx, room: u32) -> Result<(), Failure> {
    ///     let booked = ctx.saga(async |saga| {
    ///         saga.compensate("give back", move || give_back(room));
    ///         ctx.run("book", async || Ok(book(room).await?)).await
    ///     });
    ///     booked.await
    /// }
    /// ```
    pub fn compensate<F, Fut>(&self, name: &str, body: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let Some(place) = self.ctx.here().upcoming() else {
            let reason = format!("compensation {name:?} was set while an operation was running, such as in its body");
            return self.ctx.run.set_stop(Stop::Parked(reason));
        };
        let body: UndoBody = Box::new(move || Box::pin(body()));
        self.undos.lock().push(Undo { place, name: name.into(), body });
    }
}

impl std::fmt::Debug for Saga {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saga").field("compensations", &self.undos.lock().len()).finish()
    }
}

impl Ctx {
    /// Runs code that sets compensations for what it does: see [`Saga::compensate`]. If the code fails, or the
    /// execution is cancelled meanwhile, the compensations run in reverse order. Each runs as a step that is tried
    /// until it succeeds. Then the failure is returned. A compensation that fails with a failure that is not retryable
    /// is skipped, and the returned failure names it.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn book(what: &str) -> std::io::Result<()> { Ok(()) }
    /// # async fn undo(what: &'static str) -> Result<(), Failure> { Ok(()) }
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let booked = ctx.saga(async |saga| {
    ///     for what in ["flight", "hotel"] {
    ///         saga.compensate(&format!("undo {what}"), move || undo(what));
    ///         ctx.run(&format!("book {what}"), async || Ok(book(what).await?)).await?;
    ///     }
    ///     Ok(())
    /// });
    /// booked.await?;
    /// # Ok(()) }
    /// ```
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
        // Branches may have set their compensations in another order than before.
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
