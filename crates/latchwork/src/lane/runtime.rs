//! The runtime on which a layer works, independent of the runtimes of its callers.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

/// The runtime on which a layer was opened. Work runs there as long as it exists, and on the caller's runtime
/// afterwards.
#[derive(Clone)]
pub(crate) struct Runtime(Option<Arc<RuntimeInner>>);

struct RuntimeInner {
    handle: Handle,
    is_gone: Arc<AtomicBool>,
    sentinel: AbortHandle,
}

/// Is dropped with the runtime, and records that.
struct Sentinel(Arc<AtomicBool>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Drop for RuntimeInner {
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
            Arc::new(RuntimeInner { handle, is_gone, sentinel: sentinel.abort_handle() })
        }))
    }

    /// Returns this runtime, or the caller's if this one has ended.
    pub(crate) fn handle(&self) -> Option<Handle> {
        let home = self.0.as_ref().filter(|home| !home.is_gone.load(Ordering::SeqCst));
        home.map(|home| home.handle.clone()).or_else(|| Handle::try_current().ok())
    }

    /// Does work in a task of its own. Without a runtime it does nothing.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(handle) = self.handle() {
            handle.spawn(work);
        }
    }

    /// Does work in a task of its own, which continues if the caller gives up. Returns `None` if the runtime ends
    /// first.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        self.handle()?.spawn(work).await.ok()
    }
}
