//! How much one client may ask of the server: sizes, counts and times. Only numbers; the places that keep to them name
//! them.

use std::time::Duration;

/// The limits of a server. A request over a limit is refused with a problem that names the limit.
///
/// ```
/// use latchwork_server::Limits;
///
/// let mut limits = Limits::default();
/// limits.body_bytes = 4 << 20;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// The time in which a client must have sent the whole body.
    pub body_time: Duration,
    /// Levels of nesting in JSON. At most 127, which is what the library stores.
    pub json_depth: usize,
    /// Bytes of the request line and all headers together.
    pub header_bytes: usize,
    /// The number of headers of a request.
    pub headers: usize,
    /// The time in which a client must have sent the headers. An idle connection is closed after it, too.
    pub header_time: Duration,
    /// Open connections of one listener. More connections wait to be accepted.
    pub connections: usize,
    /// The longest time that a request may ask the server to wait for something.
    pub wait: Duration,
    /// How long requests that are under way may take to finish when the server shuts down.
    pub drain_time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_bytes: 1 << 20,
            body_time: Duration::from_secs(30),
            json_depth: 127,
            header_bytes: 32 << 10,
            headers: 64,
            header_time: Duration::from_secs(30),
            connections: 4096,
            wait: Duration::from_secs(60),
            drain_time: Duration::from_secs(10),
        }
    }
}
