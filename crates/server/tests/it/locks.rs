//! Locks over HTTP: sessions that clients renew, requests that keep their place, and what operators do.

use std::path::Path;
use std::time::Duration;

use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::{Api, Server};

use crate::client::{Answer, Ask, Running, address, ask, free, start};

async fn begin(place: &str, lease: &str) -> String {
    let begun = ask("POST", "/v1/sessions").json(json!({"lease": lease, "label": "importer"})).at(place).await;
    assert_eq!(begun.status, 201, "{begun:?}");
    let session = begun.json();
    let id = session["id"].as_str().unwrap().to_string();
    assert_eq!(begun.header("location"), Some(&*format!("sessions/{id}")));
    id
}

fn acquire(lock: &str, wait: &str, body: Value) -> Ask {
    let wait = if wait.is_empty() { String::new() } else { format!("?wait={wait}") };
    ask("POST", &format!("/v1/locks/{lock}/acquire{wait}")).json(body)
}

fn release(lock: &str, session: &str, token: &Value) -> Ask {
    ask("POST", &format!("/v1/locks/{lock}/release")).json(json!({"session": session, "token": token}))
}

async fn pause(running: &Running, time: Duration) {
    running.engine.store().env().sleep(time).await;
}

#[track_caller]
fn granted(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    let standing = answer.json();
    assert_eq!(standing["granted"], true, "{standing}");
    assert_eq!((&standing["position"], &standing["holder"]), (&json!(null), &json!(null)));
    standing
}

#[track_caller]
fn waits(answer: &Answer) -> Value {
    assert_eq!(answer.status, 202, "{answer:?}");
    assert!(answer.header("retry-after").is_some());
    let standing = answer.json();
    assert_eq!(standing["granted"], false, "{standing}");
    assert!(standing["retry_after_ms"].as_u64().unwrap() > 0);
    standing
}

#[tokio::test]
async fn a_session_is_begun_renewed_and_ended() {
    let running = start().await;
    let id = begin(&running.place, "30s").await;
    let path = format!("/v1/sessions/{id}");
    let shown = ask("GET", &path).of(&running).await.json();
    assert_eq!((&shown["label"], &shown["lease_ms"]), (&json!("importer"), &json!(30_000)));
    assert_eq!(shown["locks"], json!([]));
    let held = granted(&acquire("m", "", json!({"session": id})).of(&running).await);
    let shown = ask("GET", &path).of(&running).await.json();
    let lock = json!({"name": "m", "workflow": null, "tree": null, "token": held["token"]});
    assert_eq!(shown["locks"], json!([lock]));
    let renewed = ask("POST", &format!("{path}/renew")).of(&running).await;
    assert_eq!(renewed.status, 200, "{renewed:?}");
    assert!(renewed.json()["lease_until"].as_str() > shown["lease_until"].as_str());
    assert_eq!(ask("DELETE", &path).of(&running).await.status, 204);
    assert_eq!(ask("DELETE", &path).of(&running).await.status, 204);
    for gone in [ask("GET", &path), ask("POST", &format!("{path}/renew"))] {
        assert_eq!(gone.of(&running).await.is_problem(410, "session-lost")["session"], json!(id));
    }
    acquire("m", "", json!({"session": id})).of(&running).await.is_problem(410, "session-lost");
    release("m", &id, &held["token"]).of(&running).await.is_problem(410, "session-lost");
    let other = begin(&running.place, "30s").await;
    granted(&acquire("m", "", json!({"session": other})).of(&running).await);
}

#[tokio::test]
async fn a_session_that_cannot_be_is_refused() {
    let running = start().await;
    let begin = |body: Value| ask("POST", "/v1/sessions").json(body);
    begin(json!({"lease": "soon"})).of(&running).await.is_problem(400, "invalid-body");
    begin(json!({"lease": "1ms"})).of(&running).await.is_problem(400, "invalid");
    begin(json!({"label": "x".repeat(513)})).of(&running).await.is_problem(400, "invalid");
    begin(json!({"leese": "1s"})).of(&running).await.is_problem(400, "invalid-body");
    ask("GET", "/v1/sessions/x").of(&running).await.is_problem(400, "invalid-path");
    let never = "/v1/sessions/01890a5d-ac96-774b-bcce-b302099a8057";
    ask("GET", never).of(&running).await.is_problem(410, "session-lost");
    // A session of the server's own process is none of its clients'.
    let own = running.engine.locks().session().await.unwrap();
    acquire("m", "", json!({"session": own.id()})).of(&running).await.is_problem(410, "session-lost");
    assert_eq!(ask("DELETE", &format!("/v1/sessions/{}", own.id())).of(&running).await.status, 204);
    assert!(own.renew().await.unwrap(), "a client has ended it");
}

#[tokio::test]
async fn a_lock_that_is_held_is_refused_with_its_holder() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "30s").await, begin(&running.place, "30s").await);
    let held = granted(&acquire("m", "", json!({"session": a, "request": "r"})).of(&running).await);
    assert_eq!((&held["name"], &held["request"], &held["session"]), (&json!("m"), &json!("r"), &json!(a)));
    let refused = acquire("m", "", json!({"session": b})).of(&running).await;
    let problem = refused.is_problem(409, "lock-held");
    assert_eq!((&problem["lock"], &problem["holder"]["session"]), (&json!("m"), &json!(a)));
    assert_eq!((&problem["holder"]["label"], &problem["holder"]["token"]), (&json!("importer"), &held["token"]));
    assert!(problem["holder"]["lease_until"].is_string());
    assert!((100..=1000).contains(&problem["retry_after_ms"].as_u64().unwrap()));
    assert_eq!(refused.header("retry-after"), Some("1"));
    // The same request again is the same grant.
    let again = granted(&acquire("m", "", json!({"session": a, "request": "r"})).of(&running).await);
    assert_eq!(again["token"], held["token"]);
    let released = release("m", &a, &held["token"]).of(&running).await;
    assert_eq!((released.status, &released.json()["released"]), (200, &json!(true)));
    assert_eq!(release("m", &a, &held["token"]).of(&running).await.json()["released"], false);
    let next = granted(&acquire("m", "", json!({"session": b})).of(&running).await);
    assert!(next["token"].as_u64() > held["token"].as_u64());
    assert_eq!(release("m", &a, &next["token"]).of(&running).await.json()["released"], false);
    assert_eq!(running.engine.locks().inspect("m").await.unwrap().used, 1);
}

#[tokio::test]
async fn a_request_whose_wait_is_over_keeps_its_place() {
    let running = start().await;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(begin(&running.place, "30s").await);
    }
    let body = |n: usize| json!({"session": sessions[n], "request": "r"});
    let held = granted(&acquire("m", "", body(0)).of(&running).await);
    let second = waits(&acquire("m", "20ms", body(1)).of(&running).await);
    assert_eq!((&second["position"], &second["holder"]["session"]), (&json!(0), &json!(sessions[0])));
    let third = waits(&acquire("m", "0s", body(2)).of(&running).await);
    assert_eq!(third["position"], 1);
    // A call without a wait looks at the request that is in the queue.
    assert_eq!(waits(&acquire("m", "", body(2)).of(&running).await)["token"], third["token"]);
    let patient = tokio::spawn(acquire("m", "30s", body(1)).at_owned(&running.place));
    pause(&running, Duration::from_millis(50)).await;
    release("m", &sessions[0], &held["token"]).of(&running).await;
    let answer = patient.await.unwrap();
    assert_eq!(granted(&answer)["token"], second["token"]);
    assert!(release("m", &sessions[1], &second["token"]).of(&running).await.json()["released"].as_bool().unwrap());
    // No call waited for the third meanwhile.
    assert_eq!(granted(&acquire("m", "", body(2)).of(&running).await)["token"], third["token"]);
}

#[tokio::test]
async fn a_request_that_waits_is_withdrawn_by_its_token() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "30s").await, begin(&running.place, "30s").await);
    granted(&acquire("m", "", json!({"session": a})).of(&running).await);
    let waiting = waits(&acquire("m", "0s", json!({"session": b})).of(&running).await);
    let again = json!({"session": b, "request": waiting["request"]});
    let patient = tokio::spawn(acquire("m", "30s", again).at_owned(&running.place));
    pause(&running, Duration::from_millis(50)).await;
    assert_eq!(release("m", &b, &waiting["token"]).of(&running).await.json()["released"], true);
    patient.await.unwrap().is_problem(409, "conflict");
    assert_eq!(running.engine.locks().inspect("m").await.unwrap().waiting, 0);
}

#[tokio::test]
async fn a_connection_that_breaks_leaves_the_request_in_the_queue() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "30s").await, begin(&running.place, "30s").await);
    let held = granted(&acquire("m", "", json!({"session": a})).of(&running).await);
    let body = || json!({"session": b, "request": "r"});
    let cut = tokio::spawn(acquire("m", "30s", body()).at_owned(&running.place));
    while running.engine.locks().inspect("m").await.unwrap().waiting == 0 {
        pause(&running, Duration::from_millis(5)).await;
    }
    cut.abort();
    pause(&running, Duration::from_millis(100)).await;
    assert_eq!(running.engine.locks().inspect("m").await.unwrap().waiting, 1);
    release("m", &a, &held["token"]).of(&running).await;
    granted(&acquire("m", "", body()).of(&running).await);
}

#[tokio::test]
async fn a_client_that_waits_keeps_its_session_and_one_that_is_silent_loses_it() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "60s").await, begin(&running.place, "300ms").await);
    let held = granted(&acquire("m", "", json!({"session": a})).of(&running).await);
    let body = || json!({"session": b, "request": "r"});
    waits(&acquire("m", "1s", body()).of(&running).await);
    release("m", &a, &held["token"]).of(&running).await;
    granted(&acquire("m", "", body()).of(&running).await);
    // Now it is not renewed, and the lock goes on to the next.
    granted(&acquire("m", "30s", json!({"session": a})).of(&running).await);
    acquire("m", "", body()).of(&running).await.is_problem(410, "session-lost");
}

#[tokio::test]
async fn all_kinds_of_locks_are_acquired() {
    let running = start().await;
    let s = begin(&running.place, "30s").await;
    let take = |lock: &str, request: &str, rest: Value| {
        let mut body = json!({"session": s, "request": request});
        body.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        acquire(lock, "", body)
    };
    let semaphore = |permits: u32| json!({"mode": "semaphore", "capacity": 3, "permits": permits});
    granted(&take("vendor", "a", semaphore(2)).of(&running).await);
    take("vendor", "b", semaphore(2)).of(&running).await.is_problem(409, "lock-held");
    granted(&take("vendor", "b", json!({"mode": "semaphore", "capacity": 3})).of(&running).await);
    take("vendor", "a", semaphore(1)).of(&running).await.is_problem(409, "lock-request-reused");
    let many = take("vendor", "c", semaphore(4)).of(&running).await.is_problem(400, "invalid");
    assert_eq!((&many["asked"], &many["capacity"]), (&json!(4), &json!(3)));
    let other = take("vendor", "c", json!({"mode": "mutex"})).of(&running).await.is_problem(409, "lock-kind");
    assert_eq!((&other["asked"], &other["stored"]), (&json!("mutex"), &json!({"semaphore": {"permits": 3}})));
    granted(&take("config", "r1", json!({"mode": "read"})).of(&running).await);
    granted(&take("config", "r2", json!({"mode": "read"})).of(&running).await);
    take("config", "w", json!({"mode": "write"})).of(&running).await.is_problem(409, "lock-held");
    granted(&take("other", "w", json!({"mode": "write"})).of(&running).await);
    let shown = ask("GET", "/v1/locks/other").of(&running).await.json();
    assert_eq!((&shown["kind"], &shown["used"], &shown["exclusive"]), (&json!("read_write"), &json!(1), &json!(true)));
    for wrong in [json!({"mode": "semaphore"}), json!({"capacity": 3}), json!({"mode": "read", "permits": 1})] {
        take("m", "x", wrong).of(&running).await.is_problem(400, "invalid-body");
    }
    for wrong in ["61s", "soon", "-1s"] {
        acquire("m", wrong, json!({"session": s})).of(&running).await.is_problem(400, "invalid-query");
    }
    let long = "x".repeat(257);
    acquire(&long, "", json!({"session": s})).of(&running).await.is_problem(400, "invalid");
    take("m", &long, json!({})).of(&running).await.is_problem(400, "invalid");
}

#[tokio::test]
async fn locks_are_listed_and_shown_as_the_command_prints_them() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "30s").await, begin(&running.place, "30s").await);
    granted(&acquire("a%2Fb%20c", "", json!({"session": a})).of(&running).await);
    let scoped = ask("POST", "/v1/locks/files/acquire?workflow=import").json(json!({"session": a, "request": "r"}));
    let files = granted(&scoped.of(&running).await);
    assert_eq!(files["workflow"], "import");
    waits(
        &ask("POST", "/v1/locks/files/acquire?workflow=import&wait=0s").json(json!({"session": b})).of(&running).await,
    );
    let free = granted(&acquire("free", "", json!({"session": a})).of(&running).await);
    release("free", &a, &free["token"]).of(&running).await;
    let names = |answer: &Answer| -> Vec<String> {
        let page = answer.json();
        page["items"].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_string()).collect()
    };
    let first = ask("GET", "/v1/locks?limit=2").of(&running).await;
    assert_eq!(names(&first), ["a/b c", "free"]);
    let next = first.json()["next"].as_str().unwrap().to_string();
    assert!(first.header("link").unwrap().contains(&next));
    assert_eq!(names(&ask("GET", &format!("/v1/locks?limit=2&after={next}")).of(&running).await), ["files"]);
    ask("GET", &format!("/v1/locks?held=true&after={next}")).of(&running).await.is_problem(400, "invalid-cursor");
    assert_eq!(names(&ask("GET", "/v1/locks?held=true").of(&running).await), ["a/b c", "files"]);
    assert_eq!(names(&ask("GET", "/v1/locks?workflow=import").of(&running).await), ["files"]);
    ask("GET", "/v1/locks?workflow=import&tree=x").of(&running).await.is_problem(400, "invalid-query");
    let shown = ask("GET", "/v1/locks/files?workflow=import").of(&running).await.json();
    let fields: Vec<&str> = shown.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = vec![
        "name",
        "workflow",
        "tree",
        "kind",
        "permits",
        "used",
        "exclusive",
        "waiting",
        "holders",
        "waiters",
        "forced",
    ];
    let mut fields = fields;
    fields.sort_unstable();
    expected.sort_unstable();
    assert_eq!(fields, expected);
    assert_eq!((&shown["holders"][0]["token"], &shown["waiters"][0]["session"]), (&files["token"], &json!(b)));
    assert!(shown["holders"][0]["since"].as_str().unwrap().ends_with('Z'));
    ask("GET", "/v1/locks/files").of(&running).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn an_operator_releases_and_removes_a_lock() {
    let running = start().await;
    let (a, b) = (begin(&running.place, "30s").await, begin(&running.place, "30s").await);
    let held = granted(&acquire("m", "", json!({"session": a})).of(&running).await);
    let patient = tokio::spawn(acquire("m", "30s", json!({"session": b, "request": "r"})).at_owned(&running.place));
    while running.engine.locks().inspect("m").await.unwrap().waiting == 0 {
        pause(&running, Duration::from_millis(5)).await;
    }
    ask("DELETE", "/v1/locks/m").of(&running).await.is_problem(409, "conflict");
    let force = |token: &Value, reason: &str| {
        ask("POST", "/v1/locks/m/force-release").json(json!({"token": token, "reason": reason}))
    };
    force(&json!(1), "x").of(&running).await.is_problem(404, "not-found");
    force(&held["token"], "").of(&running).await.is_problem(400, "invalid-body");
    force(&held["token"], &"x".repeat(4097)).of(&running).await.is_problem(400, "invalid");
    let forced = force(&held["token"], "it hangs").of(&running).await.json();
    assert_eq!((&forced["released"]["session"], &forced["released"]["label"]), (&json!(a), &json!("importer")));
    assert_eq!((&forced["granted"][0]["session"], &forced["waiting"]), (&json!(b), &json!(0)));
    let next = granted(&patient.await.unwrap());
    assert_eq!(release("m", &a, &held["token"]).of(&running).await.json()["released"], false);
    let shown = ask("GET", "/v1/locks/m").of(&running).await.json();
    assert_eq!((&shown["forced"][0]["reason"], &shown["forced"][0]["was_held"]), (&json!("it hangs"), &json!(true)));
    // A request that waits is told.
    let patient = tokio::spawn(acquire("m", "30s", json!({"session": a, "request": "w"})).at_owned(&running.place));
    while running.engine.locks().inspect("m").await.unwrap().waiting == 0 {
        pause(&running, Duration::from_millis(5)).await;
    }
    let waiter = ask("GET", "/v1/locks/m").of(&running).await.json()["waiters"][0]["token"].clone();
    force(&waiter, "not now").of(&running).await;
    assert_eq!(patient.await.unwrap().is_problem(409, "lock-forced")["reason"], "not now");
    release("m", &b, &next["token"]).of(&running).await;
    assert_eq!(ask("DELETE", "/v1/locks/m").of(&running).await.status, 204);
    ask("DELETE", "/v1/locks/m").of(&running).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_repeated_call_is_one_session_and_one_request() {
    let running = start().await;
    let call = |ask: Ask, key: &str| ask.header("idempotency-key", key);
    let begin = || call(ask("POST", "/v1/sessions").json(json!({})), "k1");
    let (first, again) = (begin().of(&running).await, begin().of(&running).await);
    assert_eq!((&again.text, again.header("idempotent-replayed")), (&first.text, Some("true")));
    let session = first.json()["id"].as_str().unwrap().to_string();
    assert_eq!(first.json()["label"], "local");
    let take = || call(acquire("m", "", json!({"session": session})), "k2");
    let (first, again) = (granted(&take().of(&running).await), take().of(&running).await);
    assert_eq!((&again.json(), again.header("idempotent-replayed")), (&first, Some("true")));
    // A call whose lock is held is no final answer: it is tried again.
    let wait = || call(acquire("m", "", json!({"session": session, "request": "other"})), "k3");
    wait().of(&running).await.is_problem(409, "lock-held");
    let free = || call(release("m", &session, &first["token"]), "k4");
    assert_eq!(free().of(&running).await.json()["released"], true);
    granted(&wait().of(&running).await);
    let again = free().of(&running).await;
    assert_eq!((&again.json()["released"], again.header("idempotent-replayed")), (&json!(true), Some("true")));
    assert_eq!(running.engine.locks().inspect("m").await.unwrap().used, 1);
    // A wait that is over is tried again as well.
    let wait = || call(acquire("m", "10ms", json!({"session": session})), "k5");
    let (one, two) = (waits(&wait().of(&running).await), waits(&wait().of(&running).await));
    assert_eq!((&one["request"], &one["token"]), (&two["request"], &two["token"]));
}

async fn serve(home: &Path) -> (Server, Engine, String) {
    let engine = Engine::open(home).start().await.unwrap();
    let server = Server::builder().namespace("default", Api::on(&engine)).listen(free()).start().await.unwrap();
    let place = address(&server);
    (server, engine, place)
}

#[tokio::test]
async fn a_client_goes_on_after_a_restart_of_the_server() {
    let home = tempfile::tempdir().unwrap();
    let (server, _engine, place) = serve(home.path()).await;
    let (a, b, silent) = (begin(&place, "30s").await, begin(&place, "30s").await, begin(&place, "400ms").await);
    let held = granted(&acquire("m", "", json!({"session": a})).at(&place).await);
    let body = || json!({"session": b, "request": "r"});
    let behind = waits(&acquire("m", "0s", body()).at(&place).await);
    granted(&acquire("other", "", json!({"session": silent})).at(&place).await);
    server.shutdown().await.unwrap();
    drop(_engine);

    let (server, _engine, place) = serve(home.path()).await;
    assert_eq!(ask("POST", &format!("/v1/sessions/{a}/renew")).at(&place).await.status, 200);
    assert_eq!(waits(&acquire("m", "0s", body()).at(&place).await)["token"], behind["token"]);
    assert_eq!(release("m", &a, &held["token"]).at(&place).await.json()["released"], true);
    assert_eq!(granted(&acquire("m", "10s", body()).at(&place).await)["token"], behind["token"]);
    // The client that has gone away loses its lock, although the server was restarted.
    granted(&acquire("other", "30s", json!({"session": a})).at(&place).await);
    ask("GET", &format!("/v1/sessions/{silent}")).at(&place).await.is_problem(410, "session-lost");
    server.shutdown().await.unwrap();
}

trait Owned {
    fn at_owned(self, place: &str) -> impl Future<Output = Answer> + Send + 'static;
}

impl Owned for Ask {
    fn at_owned(self, place: &str) -> impl Future<Output = Answer> + Send + 'static {
        let place = place.to_string();
        async move { self.at(&place).await }
    }
}
