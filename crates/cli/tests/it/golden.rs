//! Conversations with the command, with everything that it prints: `golden/NAME.txt`. Each of them is held on a data
//! directory, through a server, through the socket of a live process and on a database, and must be the same there.
//! `LATCHWORK_GOLDEN=write cargo test -p latch --test it golden` writes the answers again.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use latchwork::store::PostgresOptions;
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Schedule, Workflow, workflow};
use latchwork::{Value, json};

use crate::server::Server;
use crate::serving::{Serving, command};
use crate::text;

const HOUR: Duration = Duration::from_secs(3600);

/// Ends in one of several ways, or waits.
fn order() -> Workflow<String, u32> {
    workflow("order").run(async |ctx: Ctx, end: String| match end.as_str() {
        "complete" => {
            ctx.publish("progress", &json!({"percent": 100})).await?;
            let paid = ctx.run("charge", async || Ok(42)).await?;
            ctx.uuid().await;
            Ok(paid)
        }
        "signal" => {
            ctx.run("charge", async || Ok(42)).await?;
            ctx.receive::<u32>("approve").await
        }
        "retry" => {
            let retry = Retry::exponential().first_pause(HOUR).longest_pause(HOUR);
            ctx.run("ship", async || Err::<u32, _>(Failure::new("no ship"))).retry(retry).await
        }
        "panic" => panic!("cause unknown"),
        _ => Err(Failure::new("the card was refused").not_retryable()),
    })
}

async fn filled(engine: &Engine) {
    let order = order();
    for (id, end) in
        [("done", "complete"), ("refused", "fail"), ("waits", "signal"), ("retries", "retry"), ("parked", "panic")]
    {
        engine.start(&order, end.to_string()).id(id).tag("shown").await.unwrap();
        // The list is ordered by the time of the start.
        let is_at_rest = async || {
            let why = engine.why(id).await.unwrap();
            !why.resident && why.state != latchwork::workflow::ExecutionState::Running
        };
        while !is_at_rest().await {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
    }
    // It does not fire during the test.
    let yearly = Schedule::every("yearly", HOUR * 24 * 365).workflow(&order, "complete".to_string());
    engine.schedules().put(yearly).await.unwrap();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(future)
}

fn made(directory: &Path) {
    block_on(async {
        let engine = Engine::open(directory).register(&order()).start().await.unwrap();
        filled(&engine).await;
        engine.shutdown().await.unwrap();
    });
}

/// The words of a line of a conversation: those in single quotes are one.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut rest) = (Vec::new(), line.trim());
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').unwrap(),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        words.push(word.to_string());
        rest = after.trim_start();
    }
    words
}

/// What differs from one time to the next is replaced: times, ages, ids, generations and cursors.
fn steady(said: &str) -> String {
    let mut lines = Vec::new();
    let mut is_numbered = false;
    for line in said.lines().flat_map(opened) {
        let indent = line.len() - line.trim_start().len();
        let mut words: Vec<String> = line.split_whitespace().map(steady_word).collect();
        is_numbered = line.starts_with("REV ") && line.contains("GENERATION") || is_numbered && !line.is_empty();
        if is_numbered && words[0] != "REV" {
            words[1] = "GENERATION".into();
        }
        for at in 1..words.len() {
            let is_number = words[at].trim_matches(['.', ',']).parse::<u64>().is_ok();
            match words[at - 1].trim_matches(['"', ':']) {
                "generation" | "token" if is_number => words[at] = "N".into(),
                _ if words[at - 1] == "\"next\":" && words[at] != "null" => words[at] = "CURSOR".into(),
                _ => {}
            }
        }
        let line = format!("{}{}", " ".repeat(indent), words.join(" "));
        // The two largest units of a time span are two words.
        let line = line.replace("SPAN SPAN", "SPAN").replace("under SPAN", "SPAN").replace("DAY CLOCK UTC", "TIME");
        let line = line.replace("just now", "SPAN ago").replace("overdue by SPAN", "in SPAN");
        // The usage names the options that say where the conversation is held.
        let places = ["--store <DIRECTORY|URL> ", "--server <URL> ", "--schema <NAME> "];
        lines.push(places.iter().fold(line, |line, place| line.replace(place, "")));
    }
    lines.join("\n")
}

/// What the next commands of a conversation can use: the last token and the last id that were printed.
#[derive(Default)]
struct Known {
    token: String,
    id: String,
}

impl Known {
    fn learn(&mut self, said: &str) {
        let words: Vec<String> =
            said.split(|letter: char| letter.is_whitespace() || letter == ',').map(Into::into).collect();
        let bare = |word: &str| word.trim_matches(|letter: char| "\":.{}".contains(letter)).to_string();
        for (index, word) in words.iter().enumerate() {
            // In a line of JSON, a name and its value are one word.
            let (name, value) = match word.split_once(':') {
                Some((name, value)) if !value.is_empty() => (bare(name), bare(value)),
                _ => (
                    bare(word),
                    words[index + 1..].iter().map(|next| bare(next)).find(|next| !next.is_empty()).unwrap_or_default(),
                ),
            };
            if name == "token" && value.parse::<u64>().is_ok() {
                self.token = value;
            } else if steady_word(&value) == "UUID" && ["id", "session"].contains(&name.as_str()) {
                self.id = value;
            }
        }
    }
}

/// A line of JSON as several lines.
fn opened(line: &str) -> Vec<String> {
    let value = serde_json::from_str::<Value>(line).ok().filter(Value::is_object);
    let opened = value.map_or_else(|| line.to_string(), |value| format!("{value:#}"));
    opened.lines().map(Into::into).collect()
}

fn steady_word(word: &str) -> String {
    let bare = word.trim_matches(|letter: char| "\"(),.:;".contains(letter));
    let is_shape = |shape: &str| {
        let fits = |(letter, shape): (char, char)| match shape {
            'd' => letter.is_ascii_digit(),
            'x' => letter.is_ascii_hexdigit(),
            _ => letter == shape,
        };
        bare.len() == shape.len() && bare.chars().zip(shape.chars()).all(fits)
    };
    let digits = bare.trim_end_matches(|letter: char| letter.is_ascii_lowercase());
    let unit = &bare[digits.len()..];
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let shown = match bare {
        _ if is_shape("xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") => "UUID",
        _ if is_shape("dddd-dd-ddTdd:dd:dd.ddddddZ") => "TIME",
        _ if is_shape("dddd-dd-dd") => "DAY",
        _ if is_shape("dd:dd:dd") => "CLOCK",
        _ if is_shape("dddddddddddddddd") => "TIME_US",
        _ if is_number && ["us", "ms", "s", "m", "h", "d"].contains(&unit) => "SPAN",
        _ if !bare.is_empty() && bare.bytes().all(|byte| b"=-".contains(&byte)) => "BAR",
        _ => return word.into(),
    };
    word.replace(bare, shown)
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/golden/{name}.txt"))
}

/// The conversation as it goes in this place: the lines that begin with `$ latch` are the commands.
pub(crate) fn held(name: &str, place: &[&str]) -> String {
    let script = std::fs::read_to_string(golden(name)).unwrap();
    let (mut all, mut known) = (String::new(), Known::default());
    for line in script.lines().filter(|line| line.starts_with("$ latch ") || line.starts_with("# ")) {
        all += &format!("{line}\n");
        let Some(asked) = line.strip_prefix("$ latch ") else { continue };
        let words = words(asked).into_iter().map(|word| word.replace("$TOKEN", &known.token).replace("$ID", &known.id));
        let output = command().args(words).args(place).stdin(Stdio::null()).output().unwrap();
        known.learn(&text(&output.stdout));
        for said in [text(&output.stdout), text(&output.stderr)] {
            let said = steady(&said);
            if !said.is_empty() {
                all += &format!("{said}\n");
            }
        }
        if output.status.code() != Some(0) {
            all += &format!("[exit code {}]\n", output.status.code().unwrap());
        }
        all.push('\n');
    }
    all
}

/// Holds a conversation in a place, and compares it with the file.
pub(crate) fn check(name: &str, place: &[&str]) {
    let found = held(name, place);
    if std::env::var("LATCHWORK_GOLDEN").is_ok_and(|word| word == "write") {
        std::fs::write(golden(name), &found).unwrap();
    }
    let expected = std::fs::read_to_string(golden(name)).unwrap();
    for (index, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{name}.txt, line {}, at {place:?}", index + 1);
    }
    assert_eq!(found.lines().count(), expected.lines().count(), "{name}.txt at {place:?}");
}

fn copied(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Holds conversations on a directory, through a server, and through the socket of a live process. Each begins on the
/// same store.
fn everywhere(names: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let store = home.path().join("made");
    made(&store);
    for name in names {
        let [direct, served, live] =
            ["direct", "served", "live"].map(|place| home.path().join(format!("{name}-{place}")));
        [&direct, &served, &live].into_iter().for_each(|copy| copied(&store, copy));
        check(name, &["--store", direct.to_str().unwrap()]);
        let serving = Serving::on(&served);
        check(name, &["--server", &serving.url]);
        assert_eq!(serving.end(), Some(0));
        let serving = Serving::on(&live);
        check(name, &["--store", live.to_str().unwrap()]);
        assert_eq!(serving.end(), Some(0));
    }
}

#[test]
fn entities_and_states_are_the_same_on_a_store_and_through_a_server() {
    everywhere(&["entity", "state"]);
}

#[test]
fn executions_and_schedules_are_the_same_on_a_store_and_through_a_server() {
    everywhere(&["workflow", "schedule"]);
}

#[test]
fn tasks_locks_and_claims_are_the_same_on_a_store_and_through_a_server() {
    everywhere(&["task", "lock", "claim"]);
}

#[test]
fn what_needs_a_program_says_so_on_a_store() {
    let home = tempfile::tempdir().unwrap();
    let store = home.path().join("data");
    made(&store);
    check("alone", &["--store", store.to_str().unwrap()]);
}

#[test]
fn conversations_on_a_database_are_the_same() {
    let (server, schema) = (Server::start(), format!("cli_{}_golden", std::process::id()));
    let host = server.socket().parent().unwrap().display().to_string().replace('/', "%2F");
    let url = format!("postgres:///postgres?user=postgres&host={host}");
    for name in ["entity", "state", "workflow", "task"] {
        let schema = format!("{schema}_{name}");
        block_on(async {
            let store = PostgresOptions::new().schema(&schema).connect(&server.url).await.unwrap();
            let engine = Engine::on(&store).register(&order()).start().await.unwrap();
            filled(&engine).await;
            engine.shutdown().await.unwrap();
            store.close().await.unwrap();
        });
        check(name, &["--store", &url, "--schema", &schema]);
    }
}

/// Looking changes nothing: neither a file nor its time.
#[test]
fn commands_that_look_through_the_api_change_no_file() {
    let home = tempfile::tempdir().unwrap();
    let store = home.path().join("data");
    made(&store);
    let files = || {
        let read = std::fs::read_dir(&store).unwrap().map(|entry| entry.unwrap());
        let about = |entry: std::fs::DirEntry| {
            let found = entry.metadata().unwrap();
            (entry.file_name(), found.len(), found.modified().unwrap())
        };
        let mut all: Vec<_> = read.map(about).collect();
        all.sort();
        all
    };
    let before = files();
    for looks in [
        &["entity", "find"][..],
        &["entity", "get", "none"],
        &["entity", "history", "none"],
        &["state", "get", "user/none"],
        &["task", "list"],
        &["claim", "outbox"],
        &["workflow", "query", "done"],
        &["workflow", "result", "done"],
        &["workflow", "limit", "order"],
        &["tail", "done"],
    ] {
        let output = command().args(looks).arg("--store").arg(&store).stdin(Stdio::null()).output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 3)), "{looks:?}: {}", text(&output.stderr));
        assert_eq!(files(), before, "{looks:?}");
    }
}
