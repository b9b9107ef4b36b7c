//! The runtime that a layer does its work on, whichever runtime its callers are on.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

/// The runtime on which a layer was opened. Work is done there as long as it lives, and on the caller's afterwards.
#[derive(Clone)]
pub(crate) struct Runtime(Option<Arc<Home>>);

struct Home {
    handle: Handle,
    is_gone: Arc<AtomicBool>,
    sentinel: AbortHandle,
}

/// Ends with the runtime, and says so.
struct Sentinel(Arc<AtomicBool>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.sentinel.abort();
    }
}

impl Runtime {
    /// The runtime of the caller, if there is one.
    pub(crate) fn here() -> Runtime {
        Runtime(Handle::try_current().ok().map(|handle| {
            let is_gone = Arc::new(AtomicBool::new(false));
            let sentinel = Sentinel(is_gone.clone());
            let sentinel = handle.spawn(async move {
                let _sentinel = sentinel;
                std::future::pending::<()>().await
            });
            Arc::new(Home { handle, is_gone, sentinel: sentinel.abort_handle() })
        }))
    }

    /// The runtime itself: this one, or the caller's if this one has ended.
    pub(crate) fn handle(&self) -> Option<Handle> {
        let home = self.0.as_ref().filter(|home| !home.is_gone.load(Ordering::SeqCst));
        home.map(|home| home.handle.clone()).or_else(|| Handle::try_current().ok())
    }

    /// Does work in a task of its own. Without a runtime nothing is done.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(handle) = self.handle() {
            handle.spawn(work);
        }
    }

    /// Does work to its end in a task of its own, though the caller may give up. None if the runtime has ended before.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        self.handle()?.spawn(work).await.ok()
    }
}
