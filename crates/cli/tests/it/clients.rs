//! The clients for Python and JavaScript: their examples, run as programs against a real server that is killed in
//! between.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::serving::{Serving, get};
use crate::{signal, succeeded};

/// A language with a client.
#[derive(Clone, Copy)]
struct Language {
    program: &'static str,
    package: &'static str,
    folder: &'static str,
    ending: &'static str,
}

const PYTHON: Language = Language { program: "python3", package: "python3", folder: "python", ending: "py" };
const JAVASCRIPT: Language = Language { program: "node", package: "nodejs", folder: "typescript", ending: "js" };

impl Language {
    fn folder(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients").join(self.folder)
    }

    fn command(self) -> Command {
        let works = Command::new(self.program).arg("--version").stdout(Stdio::null()).status().is_ok();
        assert!(works, "{} is missing; install it with: apt-get install {}", self.program, self.package);
        let mut command = Command::new(self.program);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        command
    }

    /// An example, with its arguments.
    fn example(self, name: &str, arguments: &[&str]) -> Command {
        let mut command = self.command();
        command.arg(self.folder().join("examples").join(format!("{name}.{}", self.ending))).args(arguments);
        command
    }

    /// An example that runs beside the test, when it has written its first line.
    fn beside(self, name: &str, arguments: &[&str]) -> Beside {
        let mut process = self.example(name, arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "working\n");
        Beside(process)
    }
}

/// A process that is killed when it is dropped.
struct Beside(Child);

impl Beside {
    /// Asks it to end, and returns its exit code.
    fn end(mut self) -> Option<i32> {
        signal(self.0.id(), "TERM");
        self.0.wait().unwrap().code()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const CLAIMS: &str = r#"{
  "workflow": "invoice",
  "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
  "status_types": ["sent", "paying", "paid"],
  "steps": [{
    "step_id": 10, "step_key": "pay", "status": "sent", "action": "Pay",
    "successful_claim_state": ["paying", "sent"], "successful_state": "paid"
  }]
}"#;

const CONFIGURATION: &str = r#"
[namespaces]
default = "data"

[work.default]
claims = ["invoices.json"]
actions.Pay = { tasks = "pay" }
workflows.welcome = [{ step = "greet", tasks = "greet" }]
"#;

/// A server whose work is done by a worker, on a port that it can be started on again.
struct Served {
    directory: tempfile::TempDir,
    place: String,
    serving: Option<Serving>,
}

impl Served {
    fn start() -> Served {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("invoices.json"), CLAIMS).unwrap();
        std::fs::write(directory.path().join("latchwork.toml"), CONFIGURATION).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        drop(listener);
        let mut served = Served { directory, place, serving: None };
        served.again();
        served
    }

    /// Starts the server, after it was killed.
    fn again(&mut self) {
        self.serving = None;
        let file = self.directory.path().join("latchwork.toml");
        self.serving = Some(Serving::start(&["--config", file.to_str().unwrap(), "--listen", &self.place]));
    }

    fn kill(&mut self) {
        // Dropping it kills it.
        self.serving = None;
    }

    fn url(&self) -> String {
        format!("http://{}", self.place)
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (mut stream, body) = (TcpStream::connect(&self.place).unwrap(), body.to_string());
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.place);
        write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 20"), "{answer}");
        serde_json::from_str(body).unwrap()
    }

    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&get(&self.url(), path, "").1).unwrap()
    }

    fn add_invoice(&self, id: &str) {
        self.post("/v1/entities", &json!({"id": id, "type": "invoice", "data": {"status": "sent"}}));
    }
}

/// The lines of programs that run at the same time.
fn lines(commands: Vec<Command>) -> Vec<String> {
    let spawn = |mut command: Command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let running: Vec<Child> = commands.into_iter().map(spawn).collect();
    let outputs = running.into_iter().map(|child| succeeded(child.wait_with_output().unwrap()));
    outputs.flat_map(|output| output.lines().map(str::to_string).collect::<Vec<_>>()).collect()
}

fn locks_exclude_each_other(language: Language) {
    let served = Served::start();
    let (url, directory) = (served.url(), tempfile::tempdir().unwrap());
    // All of them write to one file, so that their lines stand in the order in which they were written.
    let log = directory.path().join("log");
    let spawn = |_| {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&log).unwrap();
        language.example("lock", &[&url, "printer/1"]).stdout(file).spawn().unwrap()
    };
    let running: Vec<Child> = (0..3).map(spawn).collect();
    for mut child in running {
        assert!(child.wait().unwrap().success());
    }
    let log = std::fs::read_to_string(log).unwrap();
    let lines: Vec<(u64, &str)> = log
        .lines()
        .map(|line| {
            let (token, what) = line.strip_prefix("token ").unwrap().split_once(": ").unwrap();
            (token.parse().unwrap(), what)
        })
        .collect();
    assert_eq!(lines.len(), 6, "{log}");
    for pair in lines.chunks(2) {
        assert_eq!((pair[0].1, pair[1]), ("begin", (pair[0].0, "end")), "{log}");
    }
    assert!(lines.is_sorted_by_key(|(token, _)| token), "{log}");
    assert_eq!(served.get("/v1/locks?held=true")["items"], json!([]));
}

fn a_claim_is_done_once_by_a_worker(language: Language) {
    let served = Served::start();
    let url = served.url();
    served.add_invoice("i/1");
    let worker = language.beside("worker", &[&url]);
    let mut said = lines((0..4).map(|_| language.example("claim", &[&url, "i/1", "7"])).collect());
    said.sort();
    assert_eq!(said.len(), 4, "{said:?}");
    assert!(said[..3].iter().all(|line| line.starts_with("not paid here: ")), "{said:?}");
    assert_eq!(said[3], format!("paid: sent -> paid, receipt {}-i/1", language.ending));
    assert_eq!(served.get("/v1/entities/i%2F1")["data"], json!({"status": "paid", "amount": 7}));
    served.add_invoice("i2");
    let refused = language.example("claim", &[&url, "i2", "0"]).output().unwrap();
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("action-rejected"), "{refused}");
    assert_eq!(worker.end(), Some(0));
}

fn a_worker_outlives_the_server(language: Language) {
    let mut served = Served::start();
    let worker = language.beside("worker", &[&served.url()]);
    let result = |served: &Served, id: &str| served.get(&format!("/v1/workflows/{id}/result?wait=60s"));
    let start = |served: &Served, id: &str| {
        served.post("/v1/workflows", &json!({"workflow": "welcome", "id": id, "input": id}));
    };
    // The workflow has no code: its only step is a task of the worker.
    start(&served, "ada");
    assert_eq!(result(&served, "ada")["output"], greeting("ada"));
    served.kill();
    served.again();
    start(&served, "bob");
    assert_eq!(result(&served, "bob")["output"], greeting("bob"));
    // What was done before the crash is known after it.
    assert_eq!(result(&served, "ada")["output"], greeting("ada"));
    served.post("/v1/tasks", &json!({"kind": "greet", "id": "blank"}));
    let failed = served.get("/v1/tasks/blank?wait=60s");
    assert_eq!((&failed["state"], &failed["attempt"]), (&json!("failed"), &json!(1)), "{failed}");
    assert_eq!(failed["failure"]["message"], "there is no name to greet");
    assert_eq!(worker.end(), Some(0));
}

fn greeting(name: &str) -> Value {
    json!(format!("Hello, {name}!"))
}

#[test]
fn locks_of_python_programs_exclude_each_other() {
    locks_exclude_each_other(PYTHON);
}

#[test]
fn locks_of_javascript_programs_exclude_each_other() {
    locks_exclude_each_other(JAVASCRIPT);
}

#[test]
fn a_claim_of_python_programs_is_done_once_by_a_worker() {
    a_claim_is_done_once_by_a_worker(PYTHON);
}

#[test]
fn a_claim_of_javascript_programs_is_done_once_by_a_worker() {
    a_claim_is_done_once_by_a_worker(JAVASCRIPT);
}

#[test]
fn a_python_worker_outlives_the_server() {
    a_worker_outlives_the_server(PYTHON);
}

#[test]
fn a_javascript_worker_outlives_the_server() {
    a_worker_outlives_the_server(JAVASCRIPT);
}

/// The example of the reference libraries of Standard Webhooks.
const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

#[test]
fn python_verifies_the_signature_of_a_call() {
    let script = format!(
        "from latchwork import verify\n\
         headers = {{'Webhook-Id': '{ID}', 'webhook-timestamp': '1614265330', 'webhook-signature': '{SIGNATURE}'}}\n\
         secret = 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw'\n\
         verify(b'{{\"test\": 2432232314}}', headers, secret, tolerance=1e12)\n\
         for body, tolerance in [(b'{{\"test\": 2432232315}}', 1e12), (b'{{\"test\": 2432232314}}', 300)]:\n    \
             try:\n        verify(body, headers, secret, tolerance=tolerance)\n    \
             except ValueError as error:\n        print(error)\n"
    );
    let output = PYTHON.command().current_dir(PYTHON.folder()).args(["-c", &script]).output().unwrap();
    assert_eq!(succeeded(output), "the signature is wrong\nthe call is too old, or from the future\n");
}

#[test]
fn javascript_verifies_the_signature_of_a_call() {
    let script = format!(
        "import {{ verify }} from './latchwork.js';\n\
         const headers = {{'Webhook-Id': '{ID}', 'webhook-timestamp': '1614265330'}};\n\
         headers['webhook-signature'] = '{SIGNATURE}';\n\
         const secret = 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw';\n\
         await verify('{{\"test\": 2432232314}}', headers, secret, {{ toleranceMs: 1e15 }});\n\
         const other = [['{{\"test\": 2432232315}}', 1e15], ['{{\"test\": 2432232314}}', 3e5]];\n\
         for (const [body, toleranceMs] of other) {{\n\
           await verify(body, headers, secret, {{ toleranceMs }}).catch((error) => console.log(error.message));\n\
         }}\n"
    );
    let mut command = JAVASCRIPT.command();
    let output =
        command.current_dir(JAVASCRIPT.folder()).args(["--input-type=module", "-e", &script]).output().unwrap();
    assert_eq!(succeeded(output), "the signature is wrong\nthe call is too old, or from the future\n");
}
