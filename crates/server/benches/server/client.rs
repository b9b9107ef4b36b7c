//! The clients: a process of their own with one thread, so that what they cost can be told from what the server costs.
//! A line on the standard input is a round; its figures are a line on the standard output.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::entities::{document, id};
use crate::processor_seconds;
use crate::report::median;
use crate::wire::{Connection, field};

/// Runs clients until the standard input ends. `number` is a count: of entities, locks or streams.
pub(crate) fn run(kind: &str, place: &str, number: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let number: usize = number.parse().expect("a number");
    match kind {
        "update" => rounds(&runtime, Updaters::open(place, number)),
        "get" => rounds(&runtime, Single::open(place, number)),
        "lock" => rounds(&runtime, Locker::open(place, number)),
        "start" => rounds(&runtime, Starters::open(place, false)),
        "start-and-ask" => rounds(&runtime, Starters::open(place, true)),
        "follow" => rounds(&runtime, Followers::open(place, number)),
        other => panic!("there are no clients {other}"),
    }
}

/// Clients of one kind.
trait Clients {
    /// One round. What it returns is printed, after the processor time and the time of the round.
    async fn round(&mut self, asked: &str) -> f64;
}

fn rounds<C: Clients>(runtime: &tokio::runtime::Runtime, open: impl Future<Output = C>) {
    let mut clients = runtime.block_on(open);
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let (began, before) = (Instant::now(), processor_seconds());
        let figure = runtime.block_on(clients.round(&line.expect("a line")));
        let (took, used) = (began.elapsed().as_secs_f64(), processor_seconds() - before);
        say(&format!("{figure} {took} {used}"));
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("an output");
}

fn milliseconds(asked: &str) -> Duration {
    Duration::from_millis(asked.parse().expect("a time"))
}

/// The connections of a server under load.
pub(crate) const CONNECTIONS: usize = 64;

/// Connections that each update entities of their own under their revs.
struct Updaters(Vec<Updater>);

struct Updater {
    connection: Connection,
    entities: Vec<(String, u64)>,
    random: fastrand::Rng,
}

impl Updaters {
    async fn open(place: &str, each: usize) -> Updaters {
        let mut updaters = Vec::new();
        for number in 0..CONNECTIONS {
            let entities = (number * each..(number + 1) * each).map(|index| (id(index), 1)).collect();
            let random = fastrand::Rng::with_seed(number as u64);
            updaters.push(Updater { connection: Connection::open(place).await, entities, random });
        }
        Updaters(updaters)
    }
}

impl Updater {
    async fn update(&mut self) {
        let at = self.random.usize(..self.entities.len());
        let (id, rev) = &mut self.entities[at];
        let body = format!("{{\"data\":{}}}", document(*rev));
        let (line, condition) = (format!("PATCH /v1/entities/{id}"), format!("if-match: \"r{rev}\"\r\n"));
        let answer = self.connection.ask(200, &line, &condition, &body).await;
        let tag = answer.head.lines().find_map(|line| line.strip_prefix("etag: \"r")).expect("an ETag");
        let new: u64 = tag.trim_end_matches('"').parse().expect("a rev");
        assert_eq!(new, *rev + 1, "no other client writes this entity");
        *rev = new;
    }
}

/// Runs each client as a task until the time is over. Returns how many calls were answered.
async fn until<C: Send + 'static>(
    clients: &mut Vec<C>,
    time: Duration,
    call: impl AsyncFn(&mut C) + Clone + 'static,
) -> f64 {
    let end = Instant::now() + time;
    let local = tokio::task::LocalSet::new();
    let tasks: Vec<_> = std::mem::take(clients)
        .into_iter()
        .map(|mut client| {
            let call = call.clone();
            local.spawn_local(async move {
                let mut done = 0u64;
                while Instant::now() < end {
                    call(&mut client).await;
                    done += 1;
                }
                (client, done)
            })
        })
        .collect();
    let mut all = 0;
    local
        .run_until(async {
            for task in tasks {
                let (client, done) = task.await.expect("a client");
                clients.push(client);
                all += done;
            }
        })
        .await;
    all as f64
}

impl Clients for Updaters {
    async fn round(&mut self, asked: &str) -> f64 {
        until(&mut self.0, milliseconds(asked), async |updater: &mut Updater| updater.update().await).await
    }
}

/// Measures calls of one connection, one after the other. Returns their median in microseconds.
async fn median_of(count: usize, mut call: impl AsyncFnMut()) -> f64 {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        call().await;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    median(times)
}

/// One connection that reads entities.
struct Single {
    connection: Connection,
    count: usize,
    random: fastrand::Rng,
}

impl Single {
    async fn open(place: &str, count: usize) -> Single {
        Single { connection: Connection::open(place).await, count, random: fastrand::Rng::with_seed(1) }
    }
}

impl Clients for Single {
    async fn round(&mut self, asked: &str) -> f64 {
        let Single { connection, count, random } = self;
        median_of(asked.parse().expect("a count"), async || {
            let line = format!("GET /v1/entities/{}", id(random.usize(..*count)));
            connection.ask(200, &line, "", "").await;
        })
        .await
    }
}

/// One connection whose session acquires and releases locks.
struct Locker {
    connection: Connection,
    session: String,
    count: usize,
    next: usize,
}

impl Locker {
    async fn open(place: &str, count: usize) -> Locker {
        let mut connection = Connection::open(place).await;
        let session = connection.ask(201, "POST /v1/sessions", "", "{\"lease\":\"1h\"}").await;
        let session = field(session.body, "id").to_string();
        Locker { connection, session, count, next: 0 }
    }
}

impl Clients for Locker {
    async fn round(&mut self, asked: &str) -> f64 {
        let Locker { connection, session, count, next } = self;
        median_of(asked.parse().expect("a count"), async || {
            let name = *next % *count;
            *next += 1;
            let body = format!("{{\"session\":\"{session}\"}}");
            let held = connection.ask(200, &format!("POST /v1/locks/h{name}/acquire"), "", &body).await;
            let body = format!("{{\"session\":\"{session}\",\"token\":{}}}", field(held.body, "token"));
            connection.ask(200, &format!("POST /v1/locks/h{name}/release"), "", &body).await;
        })
        .await
    }
}

/// Connections that each start an execution, wait for its result, and start the next one.
struct Starters {
    /// The connections, with the input that each sends.
    open: Vec<(Connection, u64)>,
    /// True if the result is asked for by a request of its own.
    asks_again: bool,
}

impl Starters {
    async fn open(place: &str, asks_again: bool) -> Starters {
        let mut open = Vec::new();
        for number in 0..CONNECTIONS {
            open.push((Connection::open(place).await, number as u64));
        }
        Starters { open, asks_again }
    }
}

impl Clients for Starters {
    async fn round(&mut self, asked: &str) -> f64 {
        let asks_again = self.asks_again;
        until(&mut self.open, milliseconds(asked), async move |(connection, number): &mut (Connection, u64)| {
            let body = format!("{{\"workflow\":\"several\",\"input\":{number}}}");
            let ended = match asks_again {
                false => connection.ask(201, "POST /v1/workflows?wait=30s", "", &body).await,
                true => {
                    let id = field(connection.ask(201, "POST /v1/workflows", "", &body).await.body, "id").to_string();
                    connection.ask(200, &format!("GET /v1/workflows/{id}/result?wait=30s"), "", "").await
                }
            };
            assert_eq!(field(ended.body, "output"), (*number + 1).to_string());
        })
        .await
    }
}

/// Clients of one stream each.
struct Followers {
    place: String,
    count: usize,
}

impl Followers {
    async fn open(place: &str, count: usize) -> Followers {
        Followers { place: place.into(), count }
    }
}

impl Clients for Followers {
    /// Opens the streams, says so, and reads each to its end. Returns how many events there were.
    async fn round(&mut self, asked: &str) -> f64 {
        let mut streams = JoinSet::new();
        for _ in 0..self.count {
            let stream = Connection::open(&self.place).await.follow(asked).await;
            streams.spawn(to_the_end(stream));
        }
        say("open");
        let (mut all, mut last) = (0, None);
        while let Some(count) = streams.join_next().await {
            let count = count.expect("a client");
            assert_eq!(*last.get_or_insert(count), count, "each client gets the same events");
            all += count;
        }
        all as f64
    }
}

/// Reads a stream to its end. Its events have the numbers from 0 on: none may be missing.
async fn to_the_end(mut stream: crate::wire::Follower) -> u64 {
    let mut upcoming = 0;
    while stream.look(|id| {
        assert_eq!(id, upcoming, "no event is lost, and none comes twice");
        upcoming += 1;
    }) {
        stream.more().await;
    }
    upcoming
}
