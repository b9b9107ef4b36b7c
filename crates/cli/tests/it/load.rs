//! A thousand clients that watch, beside 256 that write, on a real `latch serve`: no event is lost, none comes twice,
//! and the memory of the server is bounded, also if some clients do not read.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use latchwork::store::Env;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::serving::Serving;

/// The clients that watch. Each watches the state that one of the writers changes.
const WATCHERS: usize = 1000;
const WRITERS: usize = 256;
/// One in so many watchers does not read before the writers have ended.
const SLEEPY: usize = 10;
/// What the server may use beside its memory when all clients are connected and the caches of the store are full.
const GROWTH: u64 = 192 << 20;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The resident memory of a process in bytes.
fn resident(process: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Increments the state of a writer on one connection until the time is over. Returns how often.
async fn write(place: String, writer: usize, stop: Arc<AtomicBool>) -> u64 {
    let mut stream = TcpStream::connect(&place).await.unwrap();
    let body = "{\"path\":\"n\"}";
    let request = format!(
        "POST /v1/state/user/u-{writer}/increment HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (mut read, mut done) = (Vec::new(), 0);
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(request.as_bytes()).await.unwrap();
        read.clear();
        // The answer is JSON, and ends with the object that it is.
        while !read.ends_with(b"}") {
            let more = stream.read_buf(&mut read).await;
            let so_far = String::from_utf8_lossy(&read);
            assert!(matches!(more, Ok(1..)), "writer {writer}, after {done}: {more:?}, and {so_far:?}");
        }
        assert!(read.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&read));
        done += 1;
    }
    done
}

/// A client that watches a state.
struct Watcher {
    stream: TcpStream,
    read: Vec<u8>,
    rev: u64,
}

impl Watcher {
    async fn open(place: &str, number: usize) -> Watcher {
        let mut stream = TcpStream::connect(place).await.unwrap();
        let user = number % WRITERS;
        let request = format!("GET /v1/state/user/u-{user}/watch HTTP/1.1\r\nHost: {place}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut watcher = Watcher { stream, read: Vec::new(), rev: 0 };
        // The first event is the state as it is, which is none.
        while !watcher.read.windows(6).any(|six| six == b"data: ") {
            assert!(watcher.stream.read_buf(&mut watcher.read).await.unwrap() > 0, "no stream");
        }
        watcher
    }

    /// Reads until the event of this rev. Every event has the rev after the one before.
    async fn until(&mut self, rev: u64, seen: &AtomicU64) {
        loop {
            let mut from = 0;
            while let Some(length) = self.read[from..].windows(2).position(|two| two == b"\n\n") {
                let event = String::from_utf8_lossy(&self.read[from..from + length]).into_owned();
                self.event(&event);
                seen.fetch_add(1, Ordering::Relaxed);
                from += length + 2;
            }
            self.read.drain(..from);
            if self.rev >= rev {
                return;
            }
            assert!(self.stream.read_buf(&mut self.read).await.unwrap() > 0, "the stream has ended at {}", self.rev);
        }
    }

    fn event(&mut self, event: &str) {
        let Some(data) = event.lines().find_map(|line| line.strip_prefix("data: ")) else { return };
        let data: serde_json::Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {event}"));
        let Some(rev) = data["rev"].as_u64().filter(|rev| *rev > 0) else { return };
        assert_eq!(rev, self.rev + 1, "no event is lost, and none comes twice");
        assert_eq!(data["state"]["n"], rev);
        self.rev = rev;
    }
}

#[test]
fn a_thousand_clients_watch_what_256_write_and_miss_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let serving = Serving::on(&directory.path().join("data"));
    let (process, place) = (serving.process.id(), serving.url.strip_prefix("http://").unwrap().to_string());
    let (idle, seconds) = (resident(process), number("LATCHWORK_LOAD_SECONDS", 3));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (events, written, connected, peak) = runtime.block_on(async {
        let mut watchers = Vec::new();
        for number in 0..WATCHERS {
            watchers.push(Watcher::open(&place, number).await);
        }
        let connected = resident(process);
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let writers: Vec<_> =
            (0..WRITERS).map(|writer| tokio::spawn(write(place.clone(), writer, stop.clone()))).collect();
        let last: Vec<_> = (0..WRITERS).map(|_| tokio::sync::watch::Sender::new(None::<u64>)).collect();
        let reading = watchers.into_iter().enumerate().map(|(number, mut watcher)| {
            let (mut last, seen) = (last[number % WRITERS].subscribe(), seen.clone());
            tokio::spawn(async move {
                if number % SLEEPY != 0 {
                    tokio::select! {
                        _ = last.wait_for(Option::is_some) => {}
                        () = watcher.until(u64::MAX, &seen) => {}
                    }
                }
                let rev = last.wait_for(Option::is_some).await.unwrap().unwrap();
                watcher.until(rev, &seen).await;
                assert_eq!(watcher.rev, rev, "there are no events beyond the last write");
            })
        });
        let (reading, mut peak): (Vec<_>, u64) = (reading.collect(), connected);
        for _ in 0..seconds * 10 {
            Env::system().sleep(Duration::from_millis(100)).await;
            peak = peak.max(resident(process));
        }
        stop.store(true, Ordering::Relaxed);
        let mut written = 0;
        for (writer, last) in writers.into_iter().zip(&last) {
            let count = writer.await.unwrap();
            written += count;
            last.send_replace(Some(count));
        }
        for reading in reading {
            reading.await.unwrap();
        }
        (seen.load(Ordering::Relaxed), written, connected, peak.max(resident(process)))
    });
    let mb = |bytes: u64| bytes >> 20;
    let line = format!(
        "{seconds} s: {written} writes, {events} events; memory {} MB idle, {} MB connected, {} MB at most",
        mb(idle),
        mb(connected),
        mb(peak)
    );
    let _ = writeln!(std::io::stdout(), "{line}");
    assert!(written >= WRITERS as u64, "each writer wrote");
    assert!(peak <= connected + GROWTH, "{line}");
    assert_eq!(serving.end(), Some(0));
}
