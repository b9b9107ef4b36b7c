//! The nouns of the command through a server: the same output as on the store itself.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};
use serde_json::Value;

use crate::serving::{Serving, command};
use crate::{succeeded, text};

/// Holds a lock and waits for a message, or fails.
fn order() -> Workflow<u32, u32> {
    workflow("order").run(async |ctx: Ctx, n: u32| {
        if n == 0 {
            return ctx.run("ship", async || Err::<u32, Failure>(Failure::new("no ship").not_retryable())).await;
        }
        let _guard = ctx.mutex("account-42").acquire().await?;
        ctx.run("charge", async || Ok(n)).await?;
        ctx.receive::<()>("end").await?;
        Ok(n)
    })
}

fn made(store: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::open(store).register(&order()).start().await.unwrap();
        let failed = engine.start(&order(), 0).id("o/0").tag("vip").await.unwrap();
        failed.result().await.unwrap_err();
        for (id, n) in [("o1", 1), ("o2", 2)] {
            engine.start(&order(), n).id(id).attribute("price", i64::from(n)).await.unwrap();
            let waits = usize::try_from(n - 1).unwrap();
            while engine.locks().inspect("account-42").await.map_or(true, |lock| lock.waiters.len() != waits)
                || engine.residents() > 0
            {
                engine.store().env().sleep(Duration::from_millis(5)).await;
            }
        }
        engine.stop();
        engine.store().close().await.unwrap();
    });
}

fn run(arguments: &[&str], place: &[&str]) -> Output {
    command().args(arguments).args(place).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_server_answers_as_the_store_does() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    made(&store);
    let place = store.to_str().unwrap();
    let commands: [&[&str]; 16] = [
        &["workflow", "list"],
        &["workflow", "list", "--status", "failed"],
        &["workflow", "list", "--waits-for", "lock:account-42", "--ascending"],
        &["workflow", "list", "--attribute", "price>=1", "--limit", "1"],
        &["workflow", "list", "--tag", "vip", "--since", "2d"],
        &["workflow", "list", "--tag", "none"],
        &["workflow", "show", "o/0"],
        &["workflow", "show", "o1"],
        &["workflow", "why", "o2"],
        &["workflow", "why", "o/0"],
        &["workflow", "history", "o1"],
        &["workflow", "history", "--type", "order"],
        &["lock", "list"],
        &["lock", "list", "--held", "--workflow", "order"],
        &["lock", "show", "account-42"],
        &["store", "verify"],
    ];
    let said = |place: &[&str]| -> Vec<(String, String, Option<i32>)> {
        let each = |(command, format): (&&[&str], &&str)| {
            let output = run(&[command, &["-o", *format][..]].concat(), place);
            (text(&output.stdout), text(&output.stderr), output.status.code())
        };
        let formats = ["table", "json", "jsonl"];
        commands.iter().flat_map(|command| formats.iter().map(move |format| (command, format))).map(each).collect()
    };
    let direct = said(&["--store", place]);
    let serving = Serving::on(&store);
    // A server has no workflows, so that nothing changes.
    let (socket, remote) = (said(&["--store", place]), said(&["--server", &serving.url]));
    let unix = format!("unix:{place}/api.sock");
    let unix = said(&["--server", &unix, "--namespace", "default"]);
    for (index, direct) in direct.iter().enumerate() {
        let asked = (commands[index / 3], ["table", "json", "jsonl"][index % 3]);
        for other in [&socket[index], &remote[index], &unix[index]] {
            assert_eq!(without_ages(other), without_ages(direct), "{asked:?}");
        }
    }
    assert_eq!(serving.end(), Some(0));
}

/// Times relative to now differ from one second to the next.
fn without_ages((out, err, code): &(String, String, Option<i32>)) -> (String, String, Option<i32>) {
    let mut words = Vec::new();
    for line in out.lines() {
        let kept = line.split_whitespace().filter(|word| {
            let digits = word.trim_start_matches('(').trim_end_matches([')', ',', '.']);
            let digits = digits.strip_suffix("ms").or(digits.strip_suffix('s'));
            let is_age = digits.is_some_and(|number| number.parse::<u32>().is_ok());
            // The bars of a timeline end now.
            let is_bar = word.bytes().all(|byte| b"=-".contains(&byte));
            !is_age
                && !is_bar
                && !["just", "now", "ago", "(just", "now)", "ago)", "now).", "ago).", "for", "now,"].contains(word)
        });
        words.push(kept.collect::<Vec<_>>().join(" "));
    }
    (words.join("\n"), err.clone(), *code)
}

#[test]
fn problems_of_a_server_have_the_exit_codes_of_the_command() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    made(&store);
    let created = run(&["token", "create", "--name", "ops", "--role", "admin"], &[]);
    let reader = run(&["token", "create", "--name", "reader", "--role", "read"], &[]);
    let (created, reader) = (succeeded(created), succeeded(reader));
    let tokens = directory.path().join("tokens.toml");
    std::fs::write(&tokens, format!("{created}{reader}")).unwrap();
    let secret =
        |said: &str| said.lines().find_map(|line| line.strip_prefix("# lw_")).map(|s| format!("lw_{s}")).unwrap();
    let serving = Serving::start(&["--store", store.to_str().unwrap(), "--token-file", tokens.to_str().unwrap()]);
    let ask = |arguments: &[&str], token: Option<&str>| {
        let mut command = command();
        command.args(arguments).args(["--server", &serving.url, "-o", "json"]).stdin(Stdio::null());
        token.into_iter().for_each(|token| {
            command.env("LATCH_TOKEN", token);
        });
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        let error: Value = serde_json::from_str(said.trim()).unwrap_or(Value::Null);
        (output.status.code(), error["error"].clone())
    };
    let (ops, reader) = (secret(&created), secret(&reader));
    let token = Some(ops.as_str());
    for (arguments, token, code, problem) in [
        (&["workflow", "list"][..], None, 4, "unauthenticated"),
        (&["workflow", "list"], Some("lw_0"), 4, "unauthenticated"),
        (&["workflow", "list", "--namespace", "other"], token, 3, "namespace-not-found"),
        (&["workflow", "show", "nothing"], token, 3, "not-found"),
        (&["workflow", "list", "--after", "x"], token, 2, ""),
        (&["lock", "show", "nothing"], token, 3, "not-found"),
        (&["lock", "release", "account-42", "--token", "1", "--reason", "x", "--yes"], Some(&reader), 4, "forbidden"),
        (&["lock", "release", "account-42", "--token", "1", "--reason", "x", "--yes"], token, 3, "not-found"),
        (&["lock", "release", "account-42", "--token", "1", "--reason", "x"], token, 3, ""),
    ] {
        let (given, error) = ask(arguments, token);
        assert_eq!(given, Some(code), "{arguments:?}: {error}");
        assert!(problem.is_empty() || error["problem"] == problem, "{arguments:?}: {error}");
    }
    assert_eq!(ask(&["workflow", "list"], Some(&reader)).0, Some(0));
    for wrong in ["ftp://a", "http://me:secret@a", "localhost", "http://a?token=b"] {
        let output = run(&["workflow", "list", "--server", wrong], &[]);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {}", text(&output.stderr));
        assert!(!text(&output.stderr).contains("secret"));
    }
    let both = run(&["workflow", "list", "--server", &serving.url, "--store", "x"], &[]);
    assert_eq!(both.status.code(), Some(2));
    let other = run(&["dev", "--server", &serving.url], &[]);
    assert_eq!(other.status.code(), Some(2), "{}", text(&other.stderr));
    let gone = run(&["workflow", "list", "--server", "http://127.0.0.1:1"], &[]);
    assert_eq!(gone.status.code(), Some(69), "{}", text(&gone.stderr));
}

#[test]
fn a_lock_is_released_through_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    made(&store);
    let serving = Serving::on(&store);
    let printed = |arguments: &[&str]| -> Value {
        let output = run(&[arguments, &["-o", "json"]].concat(), &["--store", store.to_str().unwrap()]);
        serde_json::from_str(&succeeded(output)).unwrap()
    };
    let shown = printed(&["lock", "show", "account-42"]);
    let token = shown["holders"][0]["token"].to_string();
    let release = ["lock", "release", "account-42", "--token", &token, "--reason", "it hangs", "--yes"];
    let released = printed(&release);
    assert_eq!((&released["released"]["execution"], &released["waiting"]), (&"o1".into(), &0.into()));
    assert_eq!(released["granted"][0]["execution"], "o2");
    let again = run(&release, &["--server", &serving.url]);
    assert_eq!(again.status.code(), Some(3), "{}", text(&again.stderr));
    let forced = printed(&["lock", "show", "account-42"])["forced"].clone();
    assert_eq!((&forced[0]["reason"], forced.as_array().unwrap().len()), (&"it hangs".into(), 1));
    assert_eq!(serving.end(), Some(0));
}

fn openssl(home: &Path, arguments: &str) {
    let output = std::process::Command::new("openssl").current_dir(home).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
}

#[test]
fn a_server_with_tls_is_trusted_if_its_authority_is() {
    let directory = tempfile::tempdir().unwrap();
    let (home, store) = (directory.path(), directory.path().join("data"));
    let new_key = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    for name in ["authority", "stranger"] {
        openssl(home, &format!("{new_key} -x509 -days 2 -keyout {name}.key -out {name}.pem -subj /CN={name}"));
    }
    std::fs::write(home.join("about"), "subjectAltName=IP:127.0.0.1").unwrap();
    openssl(home, &format!("{new_key} -keyout server.key -out server.csr -subj /CN=server"));
    let sign = "x509 -req -days 2 -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial";
    openssl(home, &format!("{sign} -out server.pem -extfile about"));
    let file = |name: &str| home.join(name).display().to_string();
    let (certificate, key) = (file("server.pem"), file("server.key"));
    let serving = Serving::start(&["--store", store.to_str().unwrap(), "--tls-cert", &certificate, "--tls-key", &key]);
    assert!(serving.url.starts_with("https://127.0.0.1:"), "{}", serving.url);
    let list = |authorities: &[&str]| run(&["workflow", "list", "--server", &serving.url], authorities);
    succeeded(list(&["--tls-ca", &file("authority.pem")]));
    for (authorities, code) in [
        (&["--tls-ca", &file("stranger.pem")][..], 69),
        (&[], 69),
        (&["--tls-ca", &file("about")], 2),
        (&["--tls-ca", &file("nothing.pem")], 2),
    ] {
        let output = list(authorities);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{authorities:?}: {said}");
        assert!(code == 2 || said.contains("certificate"), "{said}");
    }
    let plain = serving.url.replace("https://", "http://");
    assert_eq!(run(&["workflow", "list", "--server", &plain], &[]).status.code(), Some(69));
    assert_eq!(serving.end(), Some(0));
}

/// The JSON of a command, without leases: a server goes on counting them.
fn parsed(arguments: &[&str], place: &[&str]) -> Value {
    fn without_leases(value: &mut Value) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(without_leases),
            Value::Object(fields) => {
                fields.retain(|name, _| !name.starts_with("lease_"));
                fields.values_mut().for_each(without_leases);
            }
            _ => {}
        }
    }
    let said = succeeded(run(&[arguments, &["-o", "json"]].concat(), place));
    let mut value = serde_json::from_str(&said).unwrap();
    without_leases(&mut value);
    value
}

// Another process takes its own time.
#[allow(clippy::disallowed_methods)]
#[test]
fn claims_are_looked_at_and_ended_through_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let store = crate::claim::made(directory.path());
    let place = ["--store", store.to_str().unwrap()];
    let claims = parsed(&["claim", "list"], &place)["claims"].clone();
    let entities: Vec<String> =
        claims.as_array().unwrap().iter().map(|claim| claim["entity"].as_str().unwrap().to_string()).collect();
    let commands: Vec<Vec<&str>> = [vec!["claim", "list", "--limit", "1"], vec!["claim", "list", "--needs-review"]]
        .into_iter()
        .chain([vec!["claim", "dead", "list"]])
        .chain(entities.iter().map(|entity| vec!["claim", "show", entity.as_str()]))
        .collect();
    let said = |place: &[&str]| commands.iter().map(|command| parsed(command, place)).collect::<Vec<_>>();
    // An engine ends the sessions of the process that made the claims. From then on, the owners have no name.
    let serving = Serving::on(&store);
    while parsed(&["claim", "list"], &place)["claims"].to_string().contains("\"process ") {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(serving.end(), Some(0));
    let direct = said(&place);
    let serving = Serving::on(&store);
    let remote = ["--server", serving.url.as_str()];
    assert_eq!((said(&remote), said(&place)), (direct.clone(), direct.clone()));
    let table = succeeded(run(&["claim", "list"], &remote));
    assert!(table.starts_with("ENTITY"), "{table}");
    let dead = direct[2]["dead_letters"][0]["key"].as_str().unwrap();
    assert_eq!(parsed(&["claim", "dead", "retry", dead], &remote)["key"], dead);
    assert_eq!(run(&["claim", "dead", "retry", dead], &remote).status.code(), Some(3));
    let release = ["claim", "release", &entities[0], "--reason", "it hangs"];
    assert_eq!(run(&release, &remote).status.code(), Some(2), "it asks, and there is no terminal");
    let released = parsed(&[&release[..], &["--yes", "--actor", "eve"]].concat(), &remote);
    assert_eq!((&released["claim"]["entity"], &released["actor"]), (&entities[0].as_str().into(), &"eve".into()));
    assert_eq!(released["status"], released["claim"]["revert_to"]);
    assert_eq!(run(&[&release[..], &["--yes"]].concat(), &remote).status.code(), Some(3), "it is released");
    assert_eq!(serving.end(), Some(0));
}

#[test]
fn reviews_are_decided_through_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let store = crate::review::made(directory.path());
    let place = ["--store", store.to_str().unwrap()];
    let open = parsed(&["review", "list"], &place);
    let id = open["reviews"][0]["id"].as_str().unwrap();
    let small = parsed(&["review", "list", "--name", "small", "--limit", "1"], &place);
    let serving = Serving::on(&store);
    let remote = ["--server", serving.url.as_str()];
    assert_eq!(parsed(&["review", "list"], &remote), open);
    assert_eq!(parsed(&["review", "list", "--name", "small", "--limit", "1"], &remote), small);
    let decide = ["review", "decide", id, "approve", "--by", "ada", "--reason", "it was lost"];
    let wrong = run(&["review", "decide", id, "perhaps", "--by", "ada"], &remote);
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong.stderr));
    let decided = parsed(&decide, &remote);
    assert_eq!((&decided["state"], &decided["decision"]["by"]), (&"decided".into(), &"ada".into()));
    assert_eq!(run(&decide, &remote).status.code(), Some(5), "it is decided once");
    assert_eq!(parsed(&["review", "show", id], &remote), decided);
    let shown = succeeded(run(&["review", "show", id], &remote));
    assert!(shown.contains("by ada: \"approve\": it was lost"), "{shown}");
    assert_eq!(serving.end(), Some(0));
    assert_eq!(parsed(&["review", "show", id], &place), decided);
}

#[test]
fn schedules_are_changed_and_nodes_listed_through_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    made(&store);
    let place = ["--store", store.to_str().unwrap()];
    for name in ["hourly", "nightly"] {
        succeeded(run(&["schedule", "create", name, "--workflow", "order", "--input", "1", "--every", "1h"], &place));
    }
    let (listed, shown) = (parsed(&["schedule", "list"], &place), parsed(&["schedule", "show", "nightly"], &place));
    let serving = Serving::on(&store);
    let remote = ["--server", serving.url.as_str()];
    assert_eq!(parsed(&["schedule", "list"], &remote), listed);
    assert_eq!(parsed(&["schedule", "show", "nightly"], &remote)["next"], shown["next"]);
    let paused = parsed(&["schedule", "pause", "nightly", "--reason", "holidays"], &remote);
    assert_eq!(paused, serde_json::json!({"name": "nightly", "paused": "holidays"}));
    assert_eq!(parsed(&["schedule", "list", "--paused"], &remote)["schedules"][0]["name"], "nightly");
    assert!(parsed(&["schedule", "resume", "nightly"], &remote)["next"].is_string());
    let said = succeeded(run(&["schedule", "delete", "nightly"], &remote));
    assert_eq!(said, "Schedule \"nightly\" is deleted.\n");
    assert_eq!(run(&["schedule", "show", "nightly"], &remote).status.code(), Some(3));
    // The server has no workflow, and checks that there is one.
    let create = ["schedule", "create", "new", "--workflow", "order", "--cron", "0 2 * * *", "--jitter", "5s"];
    let refused = run(&create, &remote);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    let wrong = run(&["schedule", "create", "new", "--workflow", "order", "--cron", "soon"], &remote);
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong.stderr));
    let nodes = succeeded(run(&["node", "list"], &remote));
    assert!(nodes.is_empty() || nodes.starts_with("NAME"), "{nodes}");
    assert_eq!(run(&["node", "show", "nothing"], &remote).status.code(), Some(3));
    assert_eq!(run(&["node", "drain", "nothing"], &remote).status.code(), Some(3));
    assert!(parsed(&["node", "moves"], &remote)["moves"].is_array());
    assert_eq!(parsed(&["node", "unrunnable"], &remote)["executions"], serde_json::json!([]));
    assert_eq!(serving.end(), Some(0));
}
