//! Work that whoever wants it does himself, as long as he is polled: so he who is alone waits for nobody's turn but his
//! own. If he gives up, or others come to depend on it, it goes on in a task of its own: code that is not polled, or
//! is dropped, holds nobody up, and leaves nothing half done.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Such work. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Errand(Arc<Shared>);

struct Shared {
    work: Mutex<Option<Work>>,
    /// Whether it is to go on in a task of its own.
    is_left: AtomicBool,
    runtime: Handle,
}

impl Errand {
    pub(crate) fn new(runtime: &Handle, work: impl Future<Output = ()> + Send + 'static) -> Errand {
        let (work, runtime) = (Mutex::new(Some(Box::pin(work) as Work)), runtime.clone());
        Errand(Arc::new(Shared { work, is_left: AtomicBool::new(false), runtime }))
    }

    /// Leaves it to a task of its own. Whoever polls it just now does so afterwards.
    pub(crate) fn leave(&self) {
        self.0.is_left.store(true, Ordering::SeqCst);
        // Either this finds the work free, or whoever polls it finds that it is left.
        fence(Ordering::SeqCst);
        self.hand_over();
    }

    fn hand_over(&self) {
        let work = self.0.work.try_lock().and_then(|mut work| work.take());
        work.into_iter().for_each(|work| drop(self.0.runtime.spawn(work)));
    }

    fn poll(&self, context: &mut Context<'_>) {
        if let Some(mut slot) = self.0.work.try_lock()
            && let Some(work) = &mut *slot
            && work.as_mut().poll(context).is_ready()
        {
            *slot = None;
        }
        fence(Ordering::SeqCst);
        if self.0.is_left.load(Ordering::SeqCst) {
            self.hand_over();
        }
    }
}

/// What an errand is run for. Without an answer, nobody is left who could give one.
pub(crate) struct Awaited<T> {
    errand: Option<Errand>,
    answered: oneshot::Receiver<T>,
}

impl<T> Awaited<T> {
    /// Waits for an answer, and does the work for it if there is any.
    pub(crate) fn new(errand: Option<Errand>, answered: oneshot::Receiver<T>) -> Awaited<T> {
        Awaited { errand, answered }
    }
}

impl<T: Send + 'static> Awaited<T> {
    /// Does something to its end, though whoever waits for it may give up.
    pub(crate) fn to_its_end(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> Awaited<T> {
        let (answer, answered) = oneshot::channel();
        let errand = Errand::new(runtime, async move {
            let _ = answer.send(work.await);
        });
        Awaited::new(Some(errand), answered)
    }
}

impl<T> Future for Awaited<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.errand.iter().for_each(|errand| errand.poll(context));
        let answer = std::task::ready!(Pin::new(&mut self.answered).poll(context));
        self.errand.take().iter().for_each(Errand::leave);
        Poll::Ready(answer.ok())
    }
}

impl<T> Drop for Awaited<T> {
    fn drop(&mut self) {
        self.errand.take().iter().for_each(Errand::leave);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noop() -> Context<'static> {
        Context::from_waker(std::task::Waker::noop())
    }

    #[tokio::test]
    async fn work_is_done_by_whoever_wants_it_and_goes_on_without() {
        for gives_up in [false, true] {
            let (go, gone) = oneshot::channel::<()>();
            let (done, is_done) = oneshot::channel();
            let work = async move {
                let _ = gone.await;
                let _ = done.send(tokio::task::try_id());
                7
            };
            let mut asked = Awaited::to_its_end(&Handle::current(), work);
            assert!(Pin::new(&mut asked).poll(&mut noop()).is_pending());
            go.send(()).unwrap();
            if gives_up {
                drop(asked);
                assert!(is_done.await.unwrap().is_some());
            } else {
                assert_eq!(asked.await, Some(7));
                assert!(is_done.await.unwrap().is_none());
            }
        }
    }

    /// Whoever has begun it is not polled any more; somebody else needs it.
    #[tokio::test]
    async fn work_that_is_left_goes_on_though_nobody_polls_it() {
        let (done, is_done) = oneshot::channel();
        let errand = Errand::new(&Handle::current(), async move {
            tokio::task::yield_now().await;
            let _ = done.send(());
        });
        errand.poll(&mut noop());
        errand.leave();
        is_done.await.unwrap();
        errand.poll(&mut noop());
    }
}
