//! The smallest client that keeps a connection alive: it sends bytes that are ready, and reads an answer with a length,
//! or a stream. It knows no route.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A connection that is kept alive.
pub(crate) struct Connection {
    stream: TcpStream,
    place: String,
    read: Vec<u8>,
    written: Vec<u8>,
}

/// An answer: the head, and the body as text.
pub(crate) struct Answer<'a> {
    pub(crate) head: &'a str,
    pub(crate) body: &'a str,
}

impl Connection {
    pub(crate) async fn open(place: &str) -> Connection {
        let stream = TcpStream::connect(place).await.expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        Connection { stream, place: place.into(), read: Vec::with_capacity(4096), written: Vec::with_capacity(4096) }
    }

    /// Sends a request, and reads the whole answer. Its status must be this one.
    pub(crate) async fn ask(&mut self, status: u16, line: &str, headers: &str, body: &str) -> Answer<'_> {
        use std::io::Write as _;
        let Connection { stream, place, read, written } = self;
        written.clear();
        let kind = if body.is_empty() { "" } else { "content-type: application/json\r\n" };
        let length = body.len();
        write!(written, "{line} HTTP/1.1\r\nhost: {place}\r\n{kind}{headers}content-length: {length}\r\n\r\n{body}")
            .expect("memory");
        stream.write_all(written).await.expect("the server reads");
        read.clear();
        let (end, length) = loop {
            let seen = read.len().saturating_sub(3);
            assert!(stream.read_buf(read).await.expect("the server answers") > 0, "the connection has ended");
            if let Some(found) = read[seen..].windows(4).position(|four| four == b"\r\n\r\n") {
                let end = seen + found + 4;
                break (end, length_of(&read[..end]));
            }
        };
        while read.len() < end + length {
            assert!(stream.read_buf(read).await.expect("the server answers") > 0, "the connection has ended");
        }
        let (head, body) = std::str::from_utf8(read).expect("text").split_at(end);
        assert_eq!(head.get(9..12), Some(&*status.to_string()), "{line}: {head}{body}");
        Answer { head, body }
    }

    /// Asks for a stream of events, and waits until it begins.
    pub(crate) async fn follow(mut self, path: &str) -> Follower {
        let head = format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", self.place);
        self.stream.write_all(head.as_bytes()).await.expect("the server reads");
        while !self.read.windows(6).any(|six| six == b"retry:") {
            assert!(self.stream.read_buf(&mut self.read).await.expect("the server answers") > 0, "no stream");
        }
        Follower { stream: self.stream, read: self.read }
    }
}

fn length_of(head: &[u8]) -> usize {
    let head = std::str::from_utf8(head).expect("a head is text");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.and_then(|length| length.parse().ok()).unwrap_or_else(|| panic!("no length: {head}"))
}

/// A stream of events, of which only the ids are looked at.
pub(crate) struct Follower {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Follower {
    /// Passes the ids of what has arrived to `seen`. False at the end of the stream.
    pub(crate) fn look(&mut self, mut seen: impl FnMut(u64)) -> bool {
        let (mut from, mut goes_on) = (0, true);
        while let Some(length) = self.read[from..].iter().position(|byte| *byte == b'\n') {
            let line = &self.read[from..from + length];
            if let Some(id) = line.strip_prefix(b"id: ") {
                let id = std::str::from_utf8(id).ok().and_then(|id| id.trim_end().parse().ok());
                seen(id.expect("an id is a number"));
            }
            // The last chunk of an answer without a length is empty.
            goes_on &= line != b"0\r";
            from += length + 1;
        }
        self.read.drain(..from);
        goes_on
    }

    /// Waits for more.
    pub(crate) async fn more(&mut self) {
        assert!(self.stream.read_buf(&mut self.read).await.expect("the server answers") > 0, "the stream is cut off");
    }
}

/// The text of a field of a JSON object, without reading the rest of it.
pub(crate) fn field<'a>(body: &'a str, name: &str) -> &'a str {
    let found = body.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name} is missing in {body}")).1;
    found.split([',', '}']).next().unwrap_or_default().trim().trim_matches('"')
}
