//! Work in the background of a sequencer: it runs beside the chain, never fails it, and is waited for before the
//! sequencer ends.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;

use crate::flow::frame::Frame;
use crate::workflow::Boxed;

/// The work of a sequencer.
#[derive(Default)]
pub(crate) struct Works {
    new: Mutex<Vec<Boxed<'static, ()>>>,
    /// How many have not ended.
    left: AtomicUsize,
}

impl Works {
    pub(crate) fn add(&self, work: Boxed<'static, ()>) {
        self.left.fetch_add(1, Ordering::SeqCst);
        self.new.lock().push(work);
    }

    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::SeqCst)
    }

    /// Waits until all work so far has ended. [`drive`] polls the chain after each end of work.
    pub(crate) async fn ended(&self) {
        std::future::poll_fn(|_| if self.left() == 0 { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// Runs the chain of a sequencer and its work, until all of it has ended.
pub(crate) async fn drive<T>(frame: &Arc<Frame>, chain: impl Future<Output = T>) -> T {
    let mut chain = std::pin::pin!(chain);
    let mut running: FuturesUnordered<Boxed<'static, ()>> = FuturesUnordered::new();
    let mut ended = None;
    std::future::poll_fn(|context| {
        loop {
            running.extend(std::mem::take(&mut *frame.works.new.lock()));
            while let Poll::Ready(Some(())) = running.poll_next_unpin(context) {
                frame.works.left.fetch_sub(1, Ordering::SeqCst);
            }
            // After the work: the chain may wait for the end of work, or for a change that work makes.
            if ended.is_none()
                && let Poll::Ready(result) = chain.as_mut().poll(context)
            {
                ended = Some(result);
            }
            if !frame.works.new.lock().is_empty() {
                continue;
            }
            if running.is_empty()
                && let Some(result) = ended.take()
            {
                return Poll::Ready(result);
            }
            return Poll::Pending;
        }
    })
    .await
}
