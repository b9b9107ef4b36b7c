//! The guides of docs/server: their blocks for the shell run one after the other, as a reader would run them, against
//! the real command. A comment that begins with `<!-- sh` holds what the test adds, and `<!-- file NAME -->` stands
//! before a block that the reader saves as a file.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::text;

// The `main` function of the program is not used here.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../server/examples/shop.rs"]
mod shop;

/// The address of the guides. Each test has another one in its place.
const ADDRESS: &str = "127.0.0.1:7420";
/// Where the program of the guide listens, for the process that runs it.
const SHOP: &str = "LATCHWORK_SHOP_ADDRESS";

/// What the tests add to every guide. Whatever a guide has started is ended with it.
const PRELUDE: &str = r#"
set -eu
trap 'jobs -p | xargs -r kill 2> /dev/null; wait' EXIT
wait_for_server() {
    for attempt in $(seq 300); do
        if python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])))' \
            ${ADDRESS%:*} ${ADDRESS#*:} 2> /dev/null; then return; fi
        sleep 0.1
    done
    echo "no server listens on $ADDRESS" >&2
    exit 1
}
run_shop() {
    LATCHWORK_SHOP_ADDRESS=$ADDRESS "$TESTS" --exact guides::the_program_of_the_guides > /dev/null &
    wait_for_server
}
"#;

/// Not a test by itself: the program that the guides run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_of_the_guides() {
    let Ok(address) = std::env::var(SHOP) else { return };
    let address: SocketAddr = address.parse().unwrap();
    shop::serve("./shop-data", address, std::future::pending()).await.unwrap();
}

/// What a line of a guide belongs to.
enum Part {
    Text,
    Shell,
    File,
    Other,
}

/// The script of a guide.
fn script(guide: &str) -> String {
    let (mut script, mut part, mut file) = (PRELUDE.to_string(), Part::Text, None);
    for (index, line) in guide.lines().enumerate() {
        part = match (part, line) {
            (Part::Text, "```sh" | "<!-- sh") => {
                script += &format!("# line {}\n", index + 1);
                Part::Shell
            }
            (Part::Text, line) if line.starts_with("```") => match file.take() {
                Some(name) => {
                    script += &format!("cat > {name} << 'END OF FILE'\n");
                    Part::File
                }
                None => Part::Other,
            },
            (Part::Text, line) => {
                file = line.strip_prefix("<!-- file ").and_then(|rest| rest.strip_suffix(" -->")).or(file);
                Part::Text
            }
            (Part::Shell, "```" | "-->") | (Part::Other, "```") => Part::Text,
            (Part::File, "```") => {
                script += "END OF FILE\n";
                Part::Text
            }
            (part @ (Part::Shell | Part::File), line) => {
                script += line;
                script.push('\n');
                part
            }
            (Part::Other, _) => Part::Other,
        };
    }
    script
}

fn check(guide: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/server").join(guide);
    let home = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let script = script(&std::fs::read_to_string(path).unwrap()).replace(ADDRESS, &address);
    // A guide listens on the usual address unless it says another one.
    let script = script.replace("latch serve --store", &format!("latch serve --listen {address} --store"));
    std::fs::write(home.path().join("guide.sh"), &script).unwrap();
    let latch = Path::new(env!("CARGO_BIN_EXE_latch"));
    let programs = format!("{}:{}", latch.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.arg("-x").arg("guide.sh").current_dir(home.path()).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LATCH_") {
            bash.env_remove(name);
        }
    }
    bash.env("PATH", programs).env("ADDRESS", &address).env("TESTS", std::env::current_exe().unwrap());
    let output = bash.output().unwrap();
    let said = format!("{}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{guide}: {}\n{said}\n{script}", output.status);
}

#[test]
fn the_guide_to_a_service_works() {
    check("service.md");
}

#[test]
fn the_guide_to_locks_works() {
    check("lock.md");
}

#[test]
fn the_guide_to_claims_works() {
    check("claim.md");
}

#[test]
fn the_guide_to_operation_works() {
    check("operate.md");
}

#[test]
fn the_guide_to_backups_works() {
    check("backup.md");
}

#[test]
fn the_guide_to_security_works() {
    check("secure.md");
}

#[test]
fn the_guide_to_http_works() {
    check("http.md");
}
