//! The connection of one node to the database, which a test can cut: a socket that passes everything on to the server.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

pub(super) struct Wire {
    is_open: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<UnixStream>>>,
    url: String,
    _home: tempfile::TempDir,
}

impl Wire {
    /// A wire to the server at this address, which names the folder of a socket and a port.
    pub(super) fn to(url: &str) -> Wire {
        let word = |key: &str| url.split_whitespace().find_map(|word| word.strip_prefix(key)).unwrap().to_string();
        let (host, port) = (word("host="), word("port="));
        let home = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(home.path().join(format!(".s.PGSQL.{port}"))).unwrap();
        let (is_open, streams) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let own = url.replace(&format!("host={host}"), &format!("host={}", home.path().display()));
        let (opens, all) = (is_open.clone(), streams.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let far = UnixStream::connect(format!("{host}/.s.PGSQL.{port}"));
                // A stream that is dropped is closed: the node sees that it cannot connect.
                let Ok(far) = far else { continue };
                let mut all = all.lock();
                if opens.load(Ordering::SeqCst) {
                    all.extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                    pass(near.try_clone().unwrap(), far.try_clone().unwrap());
                    pass(far, near);
                }
            }
        });
        Wire { is_open, streams, url: own, _home: home }
    }

    /// The address of this end.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Ends all connections. No other can be made until the wire is mended.
    pub(super) fn cut(&self) {
        let mut streams = self.streams.lock();
        self.is_open.store(false, Ordering::SeqCst);
        streams.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    pub(super) fn mend(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }
}

/// Passes everything from one end to the other, until one of them is closed.
fn pass(mut from: UnixStream, mut to: UnixStream) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}
