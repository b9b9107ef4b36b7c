//! State over HTTP: containers and slots, their conditions, the locks that guard them, and their streams.

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use latchwork::state::States;
use latchwork::store::{History, Store};
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::Api;
use tokio::net::TcpStream;

use crate::client::{Answer, Ask, Running, ask, start, start_api};

const STATE: &str = "/v1/state/session/s-1";

fn operation(name: &str, body: Value) -> Ask {
    ask("POST", &format!("{STATE}/{name}")).json(body)
}

#[track_caller]
fn changed(answer: &Answer, status: u16) -> Value {
    assert_eq!(answer.status, status, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn a_state_is_written_read_and_removed() {
    let running = start().await;
    ask("GET", STATE).of(&running).await.is_problem(404, "not-found");
    let put = |name: &str, value: &str, state: Value| ask("PUT", STATE).header(name, value).json(state);
    let missing = put("if-match", "*", json!({})).of(&running).await.is_problem(412, "revision-conflict");
    assert_eq!(missing["current_rev"], json!(null));
    let created = put("if-none-match", "*", json!({"visits": 1})).of(&running).await;
    assert_eq!(changed(&created, 201), json!({"rev": 1, "changed": true}));
    assert_eq!(created.header("etag"), Some("\"r1\""));
    let again = put("if-none-match", "*", json!({})).of(&running).await.is_problem(412, "already-exists");
    assert_eq!(again["current_rev"], 1);
    let read = ask("GET", STATE).of(&running).await;
    assert_eq!(read.json(), json!({"scope": "session", "id": "s-1", "rev": 1, "state": {"visits": 1}}));
    assert_eq!(read.header("etag"), Some("\"r1\""));
    for known in ["\"r1\"", "W/\"r1\"", "*"] {
        let read = ask("GET", STATE).header("if-none-match", known).of(&running).await;
        assert_eq!((read.status, read.text.as_str(), read.header("etag")), (304, "", Some("\"r1\"")));
    }
    ask("PUT", STATE).json(json!(1)).of(&running).await.is_problem(428, "precondition-required");
    ask("DELETE", STATE).of(&running).await.is_problem(428, "precondition-required");
    for wrong in ["\"r2\"", "W/\"r1\"", "\"r2\", \"r3\""] {
        let refused = put("if-match", wrong, json!(1)).of(&running).await.is_problem(412, "revision-conflict");
        assert_eq!(refused["current_rev"], 1, "{wrong}");
    }
    assert_eq!(changed(&put("if-match", "\"r1\"", json!({"visits": 2})).of(&running).await, 200)["rev"], 2);
    assert_eq!(changed(&put("if-match", "\"r7\", \"r2\"", json!({"visits": 3})).of(&running).await, 200)["rev"], 3);
    assert_eq!(changed(&put("if-match", "*", json!({"visits": 4})).of(&running).await, 200)["rev"], 4);
    ask("DELETE", STATE).header("if-match", "\"r1\"").of(&running).await.is_problem(412, "revision-conflict");
    let removed = ask("DELETE", STATE).header("if-match", "\"r4\"").of(&running).await;
    assert_eq!(changed(&removed, 200), json!({"rev": 5, "changed": true}));
    assert_eq!(ask("GET", STATE).of(&running).await.is_problem(404, "not-found")["current_rev"], 5);
    ask("DELETE", STATE).header("if-match", "*").of(&running).await.is_problem(404, "not-found");
    put("if-match", "*", json!({})).of(&running).await.is_problem(412, "revision-conflict");
    assert_eq!(changed(&put("if-none-match", "*", json!([])).of(&running).await, 201)["rev"], 6);
}

#[tokio::test]
async fn operations_accumulate_without_a_condition() {
    let running = start().await;
    let value = async |ask: Ask| changed(&ask.of(&running).await, 200)["value"].clone();
    assert_eq!(value(operation("increment", json!({"path": "cart.items", "by": 2}))).await, 2);
    assert_eq!(value(operation("increment", json!({"path": "cart.items"}))).await, 3);
    assert_eq!(value(operation("increment", json!({"path": "cart.price", "by": 0.5}))).await, 0.5);
    assert_eq!(value(operation("push", json!({"path": "pages", "value": "/home"}))).await, 1);
    assert_eq!(value(operation("set-record", json!({"path": "flags", "entry": "beta", "value": true}))).await, true);
    assert_eq!(value(operation("delete-record", json!({"path": "flags", "entry": "beta"}))).await, true);
    let none = operation("delete-record", json!({"path": "flags", "entry": "beta"})).of(&running).await;
    assert_eq!(none.json()["changed"], false);
    assert_eq!(none.header("etag"), None, "the commit may hold changes of others");
    let patched = ask("PATCH", STATE).json(json!({"cart": {"price": null}, "user": "ada"})).of(&running).await;
    let state = json!({"cart": {"items": 3}, "pages": ["/home"], "flags": {}, "user": "ada"});
    assert_eq!(changed(&patched, 200)["value"], state);
    assert_eq!(ask("GET", STATE).of(&running).await.json()["state"], state);
    for (name, wrong) in [
        ("increment", json!({"path": "user"})),
        ("push", json!({"path": "user", "value": 1})),
        ("set-record", json!({"path": "user", "entry": "a", "value": 1})),
        ("increment", json!({"path": "a..b"})),
    ] {
        operation(name, wrong).of(&running).await.is_problem(400, "invalid");
    }
    operation("push", json!({"path": "pages"})).of(&running).await.is_problem(400, "invalid-body");
    ask("PATCH", STATE).json(json!([1])).of(&running).await.is_problem(400, "invalid");
    let rev = ask("GET", STATE).of(&running).await.json()["rev"].as_u64().unwrap();
    let conditional = |tag: &str| operation("increment", json!({"path": "n"})).header("if-match", tag);
    let refused = conditional("\"r1\"").of(&running).await.is_problem(412, "revision-conflict");
    assert_eq!(refused["current_rev"], rev);
    let done = conditional(&format!("\"r{rev}\"")).of(&running).await;
    assert_eq!(done.header("etag"), Some(&*format!("\"r{}\"", rev + 1)));
    conditional("*").of(&running).await.is_problem(400, "invalid-header");
    let only_new = operation("increment", json!({"path": "n"})).header("if-none-match", "*");
    only_new.of(&running).await.is_problem(412, "already-exists");
}

#[tokio::test]
async fn scopes_and_ids_are_kept_apart() {
    let running = start().await;
    for (scope, n) in [("request", 1), ("session", 2), ("user", 3), ("org", 4)] {
        let path = format!("/v1/state/{scope}/a%2Fb/increment");
        assert_eq!(ask("POST", &path).json(json!({"path": "n", "by": n})).of(&running).await.status, 200);
    }
    for (scope, n) in [("request", 1), ("session", 2), ("user", 3), ("org", 4)] {
        let read = ask("GET", &format!("/v1/state/{scope}/a%2Fb")).of(&running).await.json();
        assert_eq!((&read["id"], &read["state"]["n"]), (&json!("a/b"), &json!(n)));
    }
    assert_eq!(running.engine.states().user("a/b").get().await.unwrap(), Some(json!({"n": 3})));
    ask("GET", "/v1/state/global/a").of(&running).await.is_problem(400, "invalid-path");
    ask("GET", &format!("/v1/state/user/{}", "x".repeat(513))).of(&running).await.is_problem(400, "invalid");
}

#[tokio::test]
async fn slots_have_values_of_their_own_in_each_scope() {
    let running = start().await;
    ask("GET", "/v1/slots/orders").of(&running).await.is_problem(404, "not-found");
    let inc = |query: &str, by: i64| ask("POST", &format!("/v1/slots/orders/increment{query}")).json(json!({"by": by}));
    assert_eq!(changed(&inc("", 2).of(&running).await, 200), json!({"rev": 1, "changed": true, "value": 2}));
    for (n, query) in ["?workflow=import", "?execution=e-7", "?tree=e-7"].iter().enumerate() {
        assert_eq!(changed(&inc(query, n as i64 + 10).of(&running).await, 200)["value"], n + 10);
    }
    let read = ask("GET", "/v1/slots/orders?workflow=import").of(&running).await;
    let shown = json!({
        "name": "orders", "workflow": "import", "execution": null, "tree": null, "rev": 1, "value": 10,
    });
    assert_eq!((read.json(), read.header("etag")), (shown, Some("\"r1\"")));
    inc("?workflow=import&tree=x", 1).of(&running).await.is_problem(400, "invalid-query");
    let states = running.engine.states();
    assert_eq!(states.global().slot::<u64>("orders").get().await.unwrap(), Some(2));
    assert_eq!(states.tree("e-7").slot::<u64>("orders").get().await.unwrap(), Some(12));
    let put = |name: &str, value: &str, n: Value| ask("PUT", "/v1/slots/orders").header(name, value).json(n);
    put("if-none-match", "*", json!(1)).of(&running).await.is_problem(412, "already-exists");
    assert_eq!(changed(&put("if-match", "\"r1\"", json!(7)).of(&running).await, 200)["rev"], 2);
    assert_eq!(changed(&put("if-match", "*", json!("text")).of(&running).await, 200)["rev"], 3);
    inc("", 1).of(&running).await.is_problem(400, "invalid");
    assert_eq!(ask("DELETE", "/v1/slots/orders").header("if-match", "*").of(&running).await.status, 200);
    ask("DELETE", "/v1/slots/orders").header("if-match", "*").of(&running).await.is_problem(404, "not-found");
    assert_eq!(changed(&put("if-none-match", "*", json!(null)).of(&running).await, 201)["rev"], 5);
    assert_eq!(ask("GET", "/v1/slots/orders").of(&running).await.json()["value"], json!(null));
    let pushed = ask("POST", "/v1/slots/list/push").json(json!({"value": "a"})).of(&running).await;
    assert_eq!(changed(&pushed, 200)["value"], 1);
    let merged = ask("PATCH", "/v1/slots/profile").json(json!({"name": "Ada"})).of(&running).await;
    assert_eq!(changed(&merged, 200)["value"], json!({"name": "Ada"}));
    ask("PUT", "/v1/slots/profile").json(json!(1)).of(&running).await.is_problem(428, "precondition-required");
}

#[tokio::test]
async fn a_change_is_guarded_by_a_lock() {
    let running = start().await;
    let guard = running.engine.mutex("nightly").acquire().await.unwrap();
    let token = guard.token().number();
    let inc = |query: String| ask("POST", &format!("{STATE}/increment{query}")).json(json!({"path": "n"}));
    let fenced = || inc(format!("?lock=nightly&token={token}"));
    assert_eq!(fenced().of(&running).await.status, 200);
    guard.release().await.unwrap();
    fenced().of(&running).await.is_problem(409, "fenced");
    inc("?lock=nightly".into()).of(&running).await.is_problem(400, "invalid-query");
    inc("?lock=&token=1".into()).of(&running).await.is_problem(400, "invalid-query");
    let slot = ask("POST", &format!("/v1/slots/orders/increment?lock=nightly&token={token}")).json(json!({}));
    slot.of(&running).await.is_problem(409, "fenced");
    let put = ask("PUT", &format!("{STATE}?lock=nightly&token={token}")).header("if-match", "*").json(json!({}));
    put.of(&running).await.is_problem(409, "fenced");
    assert_eq!(ask("GET", STATE).of(&running).await.json()["state"]["n"], 1);
}

#[tokio::test]
async fn a_repeated_change_is_made_once() {
    let running = start().await;
    let call = || operation("increment", json!({"path": "n"})).header("idempotency-key", "k1");
    let (first, again) = (call().of(&running).await, call().of(&running).await);
    assert_eq!((&again.text, again.header("idempotent-replayed")), (&first.text, Some("true")));
    assert_eq!(ask("GET", STATE).of(&running).await.json()["state"]["n"], 1);
    let other = operation("increment", json!({"path": "n", "by": 2})).header("idempotency-key", "k1");
    other.of(&running).await.is_problem(422, "idempotency-key-reused");
    let calls = (0..16).map(|_| {
        let (call, place) = (operation("push", json!({"path": "l", "value": 1})), running.place.clone());
        tokio::spawn(async move { call.header("idempotency-key", "k2").at(&place).await.status })
    });
    for call in calls.collect::<Vec<_>>() {
        assert!([200, 409].contains(&call.await.unwrap()));
    }
    assert_eq!(ask("GET", STATE).of(&running).await.json()["state"]["l"], json!([1]));
}

#[tokio::test]
async fn many_callers_lose_no_change() {
    let running = start().await;
    let calls = (0..64).map(|_| {
        let (call, place) = (operation("increment", json!({"path": "n"})), running.place.clone());
        tokio::spawn(async move { call.at(&place).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().status, 200);
    }
    assert_eq!(ask("GET", STATE).of(&running).await.json()["state"]["n"], 64);
}

/// A stream of events.
struct Stream {
    body: hyper::body::Incoming,
    text: String,
    _driver: tokio::task::JoinHandle<hyper::Result<()>>,
}

impl Stream {
    async fn open(running: &Running, path: &str, last: Option<&str>) -> Stream {
        let stream = TcpStream::connect(&running.place).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let _driver = tokio::spawn(connection);
        let request = axum::http::Request::get(path).header("host", &running.place);
        let request = last.into_iter().fold(request, |request, last| request.header("last-event-id", last));
        let answer = sender.send_request(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200);
        Stream { body: answer.into_body(), text: String::new(), _driver }
    }

    /// The id and the data of the next event.
    async fn next(&mut self) -> (u64, Value) {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(str::to_string));
                let found = field("data: ").map(|data| (field("id: "), data));
                self.text = rest.to_string();
                if let Some((Some(id), data)) = found {
                    return (id.parse().unwrap(), serde_json::from_str(&data).unwrap());
                }
                continue;
            }
            let frame = self.body.frame().await.unwrap().unwrap();
            self.text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
    }
}

#[tokio::test]
async fn a_state_is_watched_from_any_position() {
    let running = start().await;
    operation("increment", json!({"path": "n"})).of(&running).await;
    let path = format!("{STATE}/watch");
    let mut stream = Stream::open(&running, &path, None).await;
    let (begin, now) = stream.next().await;
    assert_eq!(now, json!({"rev": 1, "time": null, "events": [], "state": {"n": 1}}));
    for _ in 0..2 {
        operation("increment", json!({"path": "n"})).of(&running).await;
    }
    let (first, change) = stream.next().await;
    assert!(first > begin);
    assert_eq!((&change["rev"], &change["state"]["n"]), (&json!(2), &json!(2)));
    let event = json!({"operation": "inc_state", "path": "n", "delta": 1});
    assert_eq!(change["events"], json!([event]));
    assert!(change["time"].is_string());
    let (second, _) = stream.next().await;
    drop(stream);
    ask("DELETE", STATE).header("if-match", "*").of(&running).await;
    let mut again = Stream::open(&running, &path, Some(&first.to_string())).await;
    assert_eq!(again.next().await.0, second);
    let (_, removed) = again.next().await;
    assert_eq!((&removed["rev"], &removed["state"]), (&json!(4), &json!(null)));
    let late = ask("GET", &format!("{path}?after=99999999")).of(&running).await;
    late.is_problem(400, "future-generation");
    ask("GET", &path).header("last-event-id", "x").of(&running).await.is_problem(400, "invalid-header");

    let mut slot = Stream::open(&running, "/v1/slots/orders/watch?workflow=import", None).await;
    assert_eq!(slot.next().await.1["state"], json!(null));
    ask("POST", "/v1/slots/orders/increment?workflow=import").json(json!({})).of(&running).await;
    assert_eq!(slot.next().await.1["state"], 1);
}

#[tokio::test]
async fn a_position_of_dropped_history_is_refused() {
    let store = Store::memory().await.unwrap();
    States::with_history(&store, History::Generations(2)).await.unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine)).await;
    operation("increment", json!({"path": "n"})).of(&running).await;
    let path = format!("{STATE}/watch");
    let (early, _) = Stream::open(&running, &path, None).await.next().await;
    for _ in 0..8 {
        operation("increment", json!({"path": "n"})).of(&running).await;
    }
    while store.maintain().await.unwrap() {}
    let dropped = ask("GET", &path).header("last-event-id", &early.to_string()).of(&running).await;
    let problem = dropped.is_problem(410, "history-dropped");
    assert!(problem["oldest_generation"].as_u64().unwrap() > early, "{problem}");
    // Without a position, the stream begins with the state as it is.
    assert_eq!(Stream::open(&running, &path, None).await.next().await.1["rev"], 9);
}
