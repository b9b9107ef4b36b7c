//! A worker process, with the client for Python, that is killed in the middle of a task.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use latchwork::{Value, json};

use crate::client::{ask, start};

/// Takes one task and writes its token. Then it works without end, and gives signs of life.
const WORKER: &str = "\
import sys, time
from latchwork import Latchwork
def work(task):
    print(task.token, flush=True)
    time.sleep(3600)
Latchwork(sys.argv[1]).worker({'charge': work}, lease=1, concurrency=1, name=sys.argv[2]).run()
";

struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a worker. Returns it when it is at its task, with the token of that.
async fn at_work(url: String, name: &'static str) -> (Worker, u64) {
    let working = tokio::task::spawn_blocking(move || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python");
        let mut python = Command::new("python3");
        python.env("PYTHONDONTWRITEBYTECODE", "1").current_dir(folder).args(["-c", WORKER, &url, name]);
        let mut worker = Worker(python.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(worker.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (worker, line.trim().parse().unwrap_or_else(|_| panic!("{name} wrote {line:?}")))
    });
    working.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed_at_its_task_is_followed_by_another() {
    let running = start().await;
    let url = format!("http://{}", running.place);
    let put = ask("POST", "/v1/tasks").json(json!({"kind": "charge", "id": "t", "input": 1}));
    assert_eq!(put.of(&running).await.status, 201);
    let (mut first, token) = at_work(url.clone(), "first").await;
    let shown = async || ask("GET", "/v1/tasks/t").of(&running).await.json();
    assert_eq!((&shown().await["worker"], &shown().await["token"]), (&json!("first"), &json!(token)));
    // It lives longer than its lease: its heartbeats keep the task.
    running.engine.store().env().sleep(std::time::Duration::from_millis(1500)).await;
    assert_eq!(shown().await["token"], token);
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    let (_second, next) = at_work(url, "second").await;
    assert!(next > token, "{next} {token}");
    let found: Value = shown().await;
    assert_eq!((&found["attempt"], &found["worker"]), (&json!(2), &json!("second")), "{found}");
    assert_eq!(found["failure"]["code"], "lease-over");
    // What the first would have sent is refused.
    let late = ask("POST", "/v1/tasks/t/complete").json(json!({"token": token, "output": "first"}));
    late.of(&running).await.is_problem(409, "lease-lost");
    let done = ask("POST", "/v1/tasks/t/complete").json(json!({"token": next, "output": "second"}));
    assert_eq!(done.of(&running).await.json()["output"], "second");
}
