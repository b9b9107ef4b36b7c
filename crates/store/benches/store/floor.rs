//! The floor: appends the same bytes to a preallocated file with one fdatasync per group, grouped as the store groups,
//! and does nothing else. It is a bound to compare with, not an alternative to the store.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

const LENGTH: u64 = 256 << 20;

pub(crate) struct Floor {
    file: File,
    group: Mutex<Group>,
    waits: Condvar,
}

#[derive(Default)]
struct Group {
    bytes: Vec<u8>,
    waiting: Vec<oneshot::Sender<()>>,
    syncing: bool,
    closing: bool,
    offset: u64,
}

impl Floor {
    pub(crate) fn create(path: &Path) -> Arc<Floor> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path).expect("a file");
        let zeros = vec![0; 1 << 20];
        for offset in (0..LENGTH).step_by(zeros.len()) {
            file.write_all_at(&zeros, offset).expect("room for the floor's file");
        }
        file.sync_all().expect("a sync");
        let floor = Arc::new(Floor { file, group: Mutex::default(), waits: Condvar::new() });
        let thread = floor.clone();
        std::thread::spawn(move || thread.run());
        floor
    }

    pub(crate) fn close(&self) {
        self.group.lock().closing = true;
        self.waits.notify_all();
    }

    pub(crate) async fn append(&self, bytes: &[u8]) {
        let (sender, receiver) = oneshot::channel();
        {
            let mut group = self.group.lock();
            group.bytes.extend_from_slice(bytes);
            group.waiting.push(sender);
        }
        yield_once().await;
        self.lead();
        receiver.await.expect("the floor answers");
    }

    fn lead(&self) {
        let mut group = self.group.lock();
        if group.syncing || group.waiting.is_empty() {
            return;
        }
        if group.waiting.len() > 1 {
            self.waits.notify_one();
            return;
        }
        self.sync(&mut group);
    }

    fn run(&self) {
        let mut group = self.group.lock();
        while !group.closing {
            if group.syncing || group.waiting.is_empty() {
                self.waits.wait(&mut group);
            } else {
                self.sync(&mut group);
            }
        }
    }

    fn sync(&self, group: &mut parking_lot::MutexGuard<'_, Group>) {
        let bytes = std::mem::take(&mut group.bytes);
        let waiting = std::mem::take(&mut group.waiting);
        if group.offset + bytes.len() as u64 > LENGTH {
            group.offset = 0;
        }
        let offset = group.offset;
        group.offset += bytes.len() as u64;
        group.syncing = true;
        parking_lot::MutexGuard::unlocked(group, || {
            self.file.write_all_at(&bytes, offset).expect("a write");
            self.file.sync_data().expect("a sync");
            for waiting in waiting {
                let _ = waiting.send(());
            }
        });
        group.syncing = false;
        if !group.waiting.is_empty() {
            self.waits.notify_one();
        }
    }
}

async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
