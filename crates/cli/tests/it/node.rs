//! `latch node` on a database that two engines share.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use latchwork::node::{NodeOptions, Nodes};
use latchwork::store::PostgresOptions;
use latchwork::workflow::{Ctx, Engine, workflow};
use serde_json::Value;

use crate::server::Server;
use crate::{succeeded, text};

fn run(arguments: &[&str], url: &str, schema: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command.args(arguments).args(["--store", url, "--schema", schema]).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn nodes_are_listed_shown_and_drained_and_their_moves_are_told() {
    let server = Server::start();
    let host = server.socket().parent().unwrap().display().to_string().replace('/', "%2F");
    let (url, schema) =
        (format!("postgres:///postgres?user=postgres&host={host}"), format!("cli_{}_node", std::process::id()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engines = runtime.block_on(async {
        let mut engines = Vec::new();
        for name in ["billing-1", "billing-2"] {
            let store = PostgresOptions::new().schema(&schema).connect(&server.url).await.unwrap();
            let order = workflow("order").version(3).continues([2]).run(async |_: Ctx, n: u64| Ok(n));
            let engine = Engine::on(&store).register(&order).node(NodeOptions::new().name(name));
            engines.push(engine.start().await.unwrap());
        }
        let shares = async |shares: &[usize]| {
            for _ in 0..2000 {
                let nodes = Nodes::on(engines[0].store()).list().await.unwrap();
                if nodes.iter().map(|node| node.shards.len()).eq(shares.iter().copied()) {
                    return;
                }
                engines[0].store().env().sleep(Duration::from_millis(10)).await;
            }
            panic!("the shares are not {shares:?}");
        };
        shares(&[32, 32]).await;
        let drained = succeeded(run(&["node", "drain", "billing-1"], &url, &schema));
        assert!(drained.contains("\"billing-1\" gives its"), "{drained}");
        shares(&[0, 64]).await;
        engines
    });
    let listed: Value = serde_json::from_str(&succeeded(run(&["node", "list", "-o", "json"], &url, &schema))).unwrap();
    let nodes = listed["nodes"].as_array().unwrap();
    assert_eq!((nodes.len(), &nodes[0]["name"], &nodes[0]["draining"]), (2, &"billing-1".into(), &true.into()));
    assert_eq!(nodes[1]["workflows"]["order"], serde_json::json!([2, 3]));
    let table = succeeded(run(&["node", "list"], &url, &schema));
    assert!(table.contains("billing-1") && table.contains("draining") && table.contains("serving"), "{table}");
    let shown = succeeded(run(&["node", "show", "billing-2"], &url, &schema));
    assert!(shown.contains("64 of 64 shards: 0-63.") && shown.contains("\"order\", version 2, 3."), "{shown}");
    let moves = succeeded(run(&["node", "moves"], &url, &schema));
    assert!(moves.contains("it left or is drained") && moves.contains("balanced"), "{moves}");
    for (arguments, code, message) in [
        (&["node", "show", "billing-9"][..], 3, "there is no node \"billing-9\""),
        (&["node", "drain", "billing-9"], 3, "there is no node"),
        (&["node", "drain", "billing-2"], 5, "no other node can take over"),
    ] {
        let output = run(arguments, &url, &schema);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert!(text(&output.stderr).contains(message), "{arguments:?}: {}", text(&output.stderr));
    }
    let unrunnable = run(&["node", "unrunnable"], &url, &schema);
    assert!(text(&unrunnable.stderr).contains("no executions"), "{}", text(&unrunnable.stderr));
    succeeded(run(&["node", "drain", "billing-1", "--undo"], &url, &schema));
    runtime.block_on(async {
        for engine in &engines {
            engine.shutdown().await.unwrap();
        }
    });
    let none = run(&["node", "list"], &url, &schema);
    assert!(text(&none.stderr).contains("no nodes"), "{}", text(&none.stderr));
}
