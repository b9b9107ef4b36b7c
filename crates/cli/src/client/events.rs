//! Streams of server-sent events: read event by event, and continued after the last event if the connection breaks.
//! What the events are about is the business of the commands.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Result;
use hyper::header::HeaderName;
use hyper::{Method, StatusCode};
use latchwork::Value;

use crate::client::{ANSWERING, Ask, Client, Download, is_unreachable};
use crate::output::{Exit, Problem};

/// The header that says where a stream continues.
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
/// The pause before a stream is asked for again.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a stream is asked for in vain.
const PATIENCE: Duration = Duration::from_secs(60);
/// A server gives a sign of life every 15 s: after this time of silence the connection is taken for broken.
const SILENCE: Duration = Duration::from_secs(45);
/// The longest event.
const LONGEST: usize = 64 << 20;

/// One event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StreamEvent {
    /// Where the stream continues after this event.
    pub(crate) position: u64,
    /// The type of the event.
    pub(crate) name: String,
    pub(crate) data: Value,
}

/// A stream of events.
pub(crate) struct EventStream {
    client: Client,
    ask: Ask,
    position: Option<u64>,
    open: Option<Download>,
    reader: EventReader,
}

impl Client {
    /// A stream, after this position if there is one.
    pub(crate) fn events(&self, path: &str, query: &[(&str, String)], after: Option<u64>) -> EventStream {
        let ask = self.ask(Method::GET, path, query);
        EventStream { client: self.clone(), ask, position: after, open: None, reader: EventReader::default() }
    }
}

impl EventStream {
    /// The next event; `None` at the end of the stream. If the connection breaks, the stream continues after the last
    /// event: a stream says in its events when it has ended, so an answer that ends before is a broken connection, too.
    /// EventStream of the last position may come again. Nothing is lost if this is dropped before.
    pub(crate) async fn next(&mut self) -> Result<Option<StreamEvent>> {
        loop {
            if let Some(event) = self.reader.events.pop_front() {
                return self.take(event).map(Some);
            }
            if self.open.is_none() && !self.open().await? {
                return Ok(None);
            }
            let Some(open) = &mut self.open else { continue };
            let piece = tokio::select! {
                piece = open.piece() => piece,
                () = self.client.0.env.sleep(SILENCE), if !self.client.is_here() => Ok(None),
            };
            match piece {
                Ok(Some(piece)) => self.reader.read(&piece)?,
                Ok(None) => self.broke().await,
                Err(error) if is_unreachable(&error) => self.broke().await,
                Err(error) => return Err(error),
            }
        }
    }

    /// The position of the last event.
    pub(crate) fn position(&self) -> Option<u64> {
        self.position
    }

    fn take(&mut self, event: StreamEvent) -> Result<StreamEvent> {
        if event.name == "problem" {
            let word = |name: &str| event.data.get(name).and_then(Value::as_str);
            let why = word("detail").or(word("title")).unwrap_or("the stream has failed");
            let problem = Problem::new(Exit::Failed, why);
            return Err(problem.with("problem", word("code").unwrap_or_default()).into());
        }
        self.position = Some(event.position);
        Ok(event)
    }

    async fn broke(&mut self) {
        (self.open, self.reader) = (None, EventReader::default());
        self.client.0.env.sleep(PAUSE).await;
    }

    /// Asks for the stream. False if there are no more events.
    async fn open(&mut self) -> Result<bool> {
        self.ask.headers = self.position.iter().map(|position| (LAST_EVENT, position.to_string())).collect();
        let until = self.client.0.env.monotonic() + PATIENCE;
        loop {
            match self.client.within(ANSWERING, self.client.send(&self.ask)).await {
                Ok(answer) if answer.status() == StatusCode::NO_CONTENT => return Ok(false),
                Ok(answer) => {
                    self.open = Some(answer);
                    return Ok(true);
                }
                Err(error) if !is_unreachable(&error) || self.client.0.env.monotonic() >= until => return Err(error),
                Err(_) => self.client.0.env.sleep(PAUSE).await,
            }
        }
    }
}

/// Takes a stream apart into events.
#[derive(Default)]
struct EventReader {
    /// The line that has not ended.
    line: Vec<u8>,
    /// The fields of the event that has not ended.
    position: Option<u64>,
    name: String,
    data: String,
    events: VecDeque<StreamEvent>,
}

impl EventReader {
    fn read(&mut self, mut piece: &[u8]) -> Result<()> {
        while let Some(end) = piece.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&piece[..end]);
            piece = &piece[end + 1..];
            let line = std::mem::take(&mut self.line);
            self.field(String::from_utf8_lossy(&line).trim_end_matches('\r'))?;
        }
        self.line.extend_from_slice(piece);
        match self.line.len() + self.data.len() > LONGEST {
            true => Err(Problem::new(Exit::Failed, "an event of the stream is too long").into()),
            false => Ok(()),
        }
    }

    fn field(&mut self, line: &str) -> Result<()> {
        if line.is_empty() {
            return self.end();
        }
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => self.position = value.parse().ok(),
            "event" => self.name = value.into(),
            "data" => {
                if !self.data.is_empty() {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            // A comment is a sign of life; other fields are for browsers.
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        let (position, name, data) =
            (self.position.take(), std::mem::take(&mut self.name), std::mem::take(&mut self.data));
        if data.is_empty() {
            return Ok(());
        }
        let unreadable = |error| Problem::new(Exit::Failed, format!("an event of the stream cannot be read: {error}"));
        let data = serde_json::from_str(&data).map_err(unreadable)?;
        self.events.push_back(StreamEvent { position: position.unwrap_or_default(), name, data });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    #[test]
    fn events_are_read_whatever_the_pieces_are() {
        let text = "retry: 2000\n\n:\n\nid: 7\nevent: status\ndata: {\"a\":\ndata: 1}\n\nid:8\r\ndata:2\r\n\r\n";
        for size in [1, 3, 1000] {
            let mut reader = EventReader::default();
            text.as_bytes().chunks(size).for_each(|piece| reader.read(piece).unwrap());
            let found: Vec<StreamEvent> = reader.events.into_iter().collect();
            let event = |position, name: &str, data| StreamEvent { position, name: name.into(), data };
            assert_eq!(found, [event(7, "status", json!({"a": 1})), event(8, "", json!(2))], "{size}");
        }
        assert!(EventReader::default().read(b"data: {\n\n").is_err());
    }
}
