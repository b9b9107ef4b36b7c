//! `latch serve` under load: killed again and again under clients that send a call again under its Idempotency-Key
//! until it is answered, and asked to end while clients write.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use latchwork::store::Env;
use serde_json::{Value, json};

use crate::serving::Serving;

/// An answer: its status, its head and its body.
struct Answer {
    status: u16,
    head: String,
    body: Value,
}

/// Sends a request on a connection of its own. `None` if there is no whole answer.
fn try_ask(place: &str, line: &str, headers: &str, body: &Value) -> Option<Answer> {
    let mut stream = TcpStream::connect(place).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "{line} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{headers}\r\n"
    );
    stream.write_all((head + &body).as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let is_whole = length.is_none_or(|length| length.parse::<usize>().ok() == Some(body.len()));
    let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body).ok()? };
    is_whole.then(|| Answer { status: head[9..12].parse().unwrap(), head: head.to_lowercase(), body })
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn pause(time: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { Env::system().sleep(time).await });
}

/// What the clients share.
struct Load {
    place: String,
    stop: AtomicBool,
    again: AtomicU64,
}

impl Load {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Sends a call until it is answered for good.
    fn insist(&self, line: &str, key: &str, headers: &str, body: &Value) -> Answer {
        let headers = format!("Idempotency-Key: {key}\r\n{headers}");
        for _ in 0..3000 {
            let answer = try_ask(&self.place, line, &headers, body);
            if let Some(answer) = answer.filter(|answer| !answer.head.contains("\nretry-after:")) {
                return answer;
            }
            self.again.fetch_add(1, Ordering::Relaxed);
            pause(Duration::from_millis(20));
        }
        panic!("{line} was never answered");
    }

    /// Updates an entity of its own under its rev. Returns how often.
    fn update(&self, client: usize) -> u64 {
        let id = format!("e-{client}");
        let new = json!({"id": id, "type": "thing", "data": {"number": 0}});
        assert_eq!(self.insist("POST /v1/entities", &format!("add-{id}"), "", &new).status, 201);
        let mut rev = 1;
        while self.goes_on() {
            let (line, condition) = (format!("PATCH /v1/entities/{id}"), format!("If-Match: \"r{rev}\"\r\n"));
            let answer = self.insist(&line, &format!("{id}-{rev}"), &condition, &json!({"data": {"number": rev}}));
            // A repeat of a call that had landed is not told that its condition does not hold any more.
            assert_eq!(answer.status, 200, "{id} at {rev}: {}", answer.body);
            rev += 1;
            assert!(answer.head.contains(&format!("etag: \"r{rev}\"")), "{}", answer.head);
        }
        rev - 1
    }

    /// Increments a number that all clients share. Returns how often.
    fn count(&self, client: usize) -> u64 {
        let mut done = 0;
        while self.goes_on() {
            let line = "POST /v1/state/org/o/increment";
            let answer = self.insist(line, &format!("count-{client}-{done}"), "", &json!({"path": "n"}));
            assert_eq!(answer.status, 200, "{}", answer.body);
            done += 1;
        }
        done
    }

    /// Acquires and releases a lock that all clients share. Returns the tokens.
    fn lock(&self, client: usize, held: &AtomicBool) -> Vec<u64> {
        let begun = self.insist("POST /v1/sessions", &format!("session-{client}"), "", &json!({"lease": "10m"}));
        let (session, mut tokens) = (begun.body["id"].clone(), Vec::new());
        while self.goes_on() {
            let key = format!("lock-{client}-{}", tokens.len());
            let asked = json!({"session": session});
            let granted = self.insist("POST /v1/locks/m/acquire?wait=5s", &format!("{key}-a"), "", &asked);
            assert_eq!((granted.status, &granted.body["granted"]), (200, &json!(true)), "{}", granted.body);
            assert!(!held.swap(true, Ordering::SeqCst), "two sessions hold the lock");
            let token = granted.body["token"].as_u64().unwrap();
            tokens.push(token);
            held.store(false, Ordering::SeqCst);
            let asked = json!({"session": session, "token": token});
            let released = self.insist("POST /v1/locks/m/release", &format!("{key}-r"), "", &asked);
            assert_eq!((released.status, &released.body["released"]), (200, &json!(true)), "{}", released.body);
        }
        tokens
    }
}

fn started(store: &Path, listen: &str) -> Serving {
    Serving::start(&["--store", store.to_str().unwrap(), "--listen", listen])
}

fn place(serving: &Serving) -> String {
    serving.url.strip_prefix("http://").unwrap().to_string()
}

fn get(place: &str, path: &str) -> Value {
    let answer = try_ask(place, &format!("GET {path}"), "", &Value::Null).unwrap();
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.body
}

#[test]
fn nothing_is_lost_or_doubled_when_the_server_is_killed_under_load() {
    const EACH: usize = 6;
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let mut serving = started(&store, "127.0.0.1:0");
    let load = Load { place: place(&serving), stop: AtomicBool::new(false), again: AtomicU64::new(0) };
    let (held, env, kills) = (AtomicBool::new(false), Env::system(), number("LATCHWORK_KILLS", 5));
    let (updates, counts, mut tokens) = std::thread::scope(|scope| {
        let (load, held) = (&load, &held);
        let updaters: Vec<_> = (0..EACH).map(|client| scope.spawn(move || load.update(client))).collect();
        let counters: Vec<_> = (0..EACH).map(|client| scope.spawn(move || load.count(client))).collect();
        let lockers: Vec<_> = (0..EACH).map(|client| scope.spawn(move || load.lock(client, held))).collect();
        for _ in 0..kills {
            pause(Duration::from_millis(200 + env.random() % 600));
            serving.process.kill().unwrap();
            serving.process.wait().unwrap();
            serving = started(&store, &load.place);
        }
        load.stop.store(true, Ordering::Relaxed);
        let updates: Vec<u64> = updaters.into_iter().map(|client| client.join().unwrap()).collect();
        let counts: u64 = counters.into_iter().map(|client| client.join().unwrap()).sum();
        let tokens: Vec<u64> = lockers.into_iter().flat_map(|client| client.join().unwrap()).collect();
        (updates, counts, tokens)
    });
    for (client, updates) in updates.iter().enumerate() {
        let entity = get(&load.place, &format!("/v1/entities/e-{client}"));
        assert_eq!((&entity["_rev"], &entity["data"]["number"]), (&json!(updates + 1), &json!(updates)));
    }
    assert_eq!(get(&load.place, "/v1/state/org/o")["state"]["n"], counts, "each increment was made once");
    let lock = get(&load.place, "/v1/locks/m");
    assert_eq!((&lock["used"], &lock["waiting"]), (&json!(0), &json!(0)), "{lock}");
    let grants = tokens.len();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), grants, "no token was granted twice");
    let (again, updates) = (load.again.load(Ordering::Relaxed), updates.iter().sum::<u64>());
    println!("{kills} kills, {updates} updates, {counts} increments, {grants} grants, {again} calls again");
    assert!(again > 0 && updates > 0 && counts > 0 && grants > 0);
    assert_eq!(serving.end(), Some(0));
}

/// Writes until the server ends. Returns how many writes were answered.
fn write_until_the_end(place: &str, client: usize) -> u64 {
    let mut done = 0;
    let line = format!("POST /v1/state/user/u-{client}/increment");
    while let Some(answer) = try_ask(place, &line, "", &json!({"path": "n"})) {
        match answer.status {
            200 => done += 1,
            // A connection that was accepted at the end.
            503 => {}
            _ => panic!("{}: {}", answer.status, answer.body),
        }
    }
    done
}

#[test]
fn a_server_that_is_asked_to_end_answers_what_is_under_way() {
    const WRITERS: usize = 16;
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let serving = started(&store, "127.0.0.1:0");
    let place = place(&serving);
    let body = json!({"id": "late", "type": "thing", "data": 1}).to_string();
    let (first, rest) = body.split_at(10);
    // A request whose body has not arrived, one that waits for a lock, and a stream.
    let mut slow = TcpStream::connect(&place).unwrap();
    let head = format!(
        "POST /v1/entities HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all((head + first).as_bytes()).unwrap();
    let session = |place: &str| {
        let begun = try_ask(place, "POST /v1/sessions", "", &json!({"lease": "60s"})).unwrap();
        json!({"session": begun.body["id"]})
    };
    let holder = try_ask(&place, "POST /v1/locks/m/acquire", "", &session(&place)).unwrap();
    assert_eq!(holder.status, 200);
    let mut stream = TcpStream::connect(&place).unwrap();
    write!(stream, "GET /v1/state/user/u-0/watch HTTP/1.1\r\nHost: {place}\r\n\r\n").unwrap();
    let (waiting, written, status) = std::thread::scope(|scope| {
        let place = &place;
        let waiter = session(place);
        let waiting = scope.spawn(move || try_ask(place, "POST /v1/locks/m/acquire?wait=50s", "", &waiter).unwrap());
        let writers: Vec<_> =
            (0..WRITERS).map(|client| scope.spawn(move || write_until_the_end(place, client))).collect();
        pause(Duration::from_millis(500));
        serving.signal("TERM");
        pause(Duration::from_millis(300));
        slow.write_all(rest.as_bytes()).unwrap();
        let mut answer = String::new();
        slow.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
        let written: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        (waiting.join().unwrap(), written, serving.end_of_signalled())
    });
    assert_eq!(status, Some(0));
    assert_eq!((waiting.status, &waiting.body["granted"]), (202, &json!(false)), "the request keeps its place");
    let mut events = String::new();
    stream.read_to_string(&mut events).unwrap();
    assert!(events.ends_with("0\r\n\r\n"), "the stream has ended, and was not cut off: {events:?}");

    let serving = started(&store, "127.0.0.1:0");
    let place = self::place(&serving);
    assert_eq!(get(&place, "/v1/entities/late")["_rev"], 1);
    for (client, written) in written.iter().enumerate() {
        assert!(*written > 0);
        let stored = get(&place, &format!("/v1/state/user/u-{client}"));
        assert_eq!(stored["state"]["n"], *written, "each write that landed was answered");
    }
    let lock = get(&place, "/v1/locks/m");
    assert_eq!((&lock["used"], &lock["waiting"]), (&json!(1), &json!(1)));
    assert_eq!(serving.end(), Some(0));
}
