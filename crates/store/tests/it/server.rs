//! A PostgreSQL server for tests. `cargo xtask test` starts one for the whole suite and names it in the environment; a
//! test that is run by itself starts its own, in a scratch directory, and ends it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names the server that is to be used.
pub(crate) const VARIABLE: &str = "LATCHWORK_TEST_POSTGRES";

/// A server, which ends when this is dropped if it was started here.
pub(crate) struct Server {
    pub(crate) url: String,
    started: Option<(Child, tempfile::TempDir)>,
    is_root: bool,
}

impl Server {
    pub(crate) fn start() -> Server {
        match std::env::var(VARIABLE) {
            Ok(url) => Server { url, started: None, is_root: false },
            Err(_) => Server::start_own(),
        }
    }

    /// A server of the test's own, which it may kill.
    pub(crate) fn start_own() -> Server {
        let home = tempfile::tempdir().expect("a directory");
        let is_root = owner(home.path()) == 0;
        if is_root {
            run(Command::new("chown").arg("postgres").arg(home.path()));
        }
        let data = home.path().join("data");
        run(program("initdb", is_root).args(["--auth=trust", "--username=postgres", "--no-sync", "-D"]).arg(&data));
        let url = format!("host={} user=postgres dbname=postgres", home.path().display());
        let child = serve(home.path(), is_root);
        Server { url, started: Some((child, home)), is_root }
    }

    /// Kills the server as a crash would, and starts it again on what it left.
    pub(crate) fn kill_and_start(&mut self) {
        let Some((child, home)) = &mut self.started else { panic!("only an own server is killed") };
        let lines = std::fs::read_to_string(home.path().join("data/postmaster.pid")).expect("the server runs");
        let pid = lines.lines().next().expect("a process id").to_string();
        let _ = Command::new("kill").args(["-KILL", &pid]).status();
        let _ = child.wait();
        *child = serve(home.path(), self.is_root);
    }

    /// The socket that the server listens on.
    pub(crate) fn socket(&self) -> PathBuf {
        let host = self.url.split_whitespace().find_map(|word| word.strip_prefix("host=")).expect("a socket's folder");
        Path::new(host).join(".s.PGSQL.5432")
    }
}

/// Starts a server on a directory, and waits until it answers.
#[allow(clippy::disallowed_methods)] // A server takes its own time to start.
fn serve(home: &Path, is_root: bool) -> Child {
    let sockets = format!("unix_socket_directories={}", home.display());
    let settings = ["listen_addresses=", "max_connections=200", &sockets];
    let mut server = program("postgres", is_root);
    server.arg("-D").arg(home.join("data")).args(settings.iter().flat_map(|setting| ["-c", setting]));
    let began = Instant::now();
    // After a kill the old processes may still hold the directory for a moment.
    loop {
        let mut child = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the server starts");
        while child.try_wait().expect("a process").is_none() {
            if is_ready(home) {
                return child;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "the server does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the server does not start");
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((mut child, _)) = self.started.take() {
            // A fast shutdown. The child may be a wrapper that changes the user and passes the signal on.
            let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
            let _ = child.wait();
        }
    }
}

fn is_ready(home: &Path) -> bool {
    let mut asked = Command::new(binary("pg_isready"));
    asked.arg("-h").arg(home).stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

fn owner(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("the directory is there").uid()
}

/// A program of the server. It refuses to run as root.
fn program(name: &str, is_root: bool) -> Command {
    match is_root {
        false => Command::new(binary(name)),
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(binary(name));
            command
        }
    }
}

/// Debian keeps the programs of the server out of the path.
pub(crate) fn binary(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = versions.map(|version| version.path().join("bin").join(name)).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    found.sort();
    found.splice(0..0, std::env::split_paths(&path).map(|folder| folder.join(name)));
    found.retain(|path| path.exists());
    found.pop().unwrap_or_else(|| name.into())
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; install postgresql"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
