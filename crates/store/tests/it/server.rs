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
    settings: Vec<String>,
    is_root: bool,
}

impl Server {
    pub(crate) fn start() -> Server {
        match std::env::var(VARIABLE) {
            Ok(url) => Server { url, started: None, settings: Vec::new(), is_root: false },
            Err(_) => Server::start_own(),
        }
    }

    /// A server of the test's own, which it may kill.
    pub(crate) fn start_own() -> Server {
        Server::start_with(|_| Vec::new())
    }

    /// A server with settings. What they need may be written to its folder, next to its data.
    pub(crate) fn start_with(settings: impl FnOnce(&Path) -> Vec<String>) -> Server {
        Server::begin(settings, |data, is_root| {
            run(program("initdb", is_root).args(["--auth=trust", "--username=postgres", "--no-sync", "-D"]).arg(data));
        })
    }

    /// A standby that follows this server.
    pub(crate) fn start_standby(&self) -> Server {
        let host = self.socket().parent().expect("a folder").to_path_buf();
        Server::begin(
            |_| vec!["hot_standby=on".into()],
            |data, is_root| {
                let mut copy = program("pg_basebackup", is_root);
                copy.arg("-h").arg(&host).args(["-U", "postgres", "--no-sync", "-c", "fast", "-R", "-D"]).arg(data);
                run(&mut copy);
            },
        )
    }

    fn begin(settings: impl FnOnce(&Path) -> Vec<String>, init: impl FnOnce(&Path, bool)) -> Server {
        let home = tempfile::tempdir().expect("a directory");
        let is_root = owner(home.path()) == 0;
        if is_root {
            run(Command::new("chown").arg("postgres").arg(home.path()));
        }
        init(&home.path().join("data"), is_root);
        let settings = settings(home.path());
        if is_root {
            run(Command::new("chown").args(["-R", "postgres"]).arg(home.path()));
        }
        let (host, port) = (home.path().display(), port(&settings));
        let url = format!("host={host} port={port} user=postgres dbname=postgres");
        let child = serve(home.path(), &settings, is_root);
        Server { url, started: Some((child, home)), settings, is_root }
    }

    /// The folder of an own server.
    pub(crate) fn home(&self) -> &Path {
        let Some((_, home)) = &self.started else { panic!("only an own server has a folder") };
        home.path()
    }

    /// Kills the server as a crash would, and starts it again on what it left.
    pub(crate) fn kill_and_start(&mut self) {
        self.kill();
        let Some((child, home)) = &mut self.started else { return };
        *child = serve(home.path(), &self.settings, self.is_root);
    }

    /// Kills the server as a crash would.
    pub(crate) fn kill(&mut self) {
        let Some((child, home)) = &mut self.started else { panic!("only an own server is killed") };
        let lines = std::fs::read_to_string(home.path().join("data/postmaster.pid")).expect("the server runs");
        let pid = lines.lines().next().expect("a process id").to_string();
        let _ = Command::new("kill").args(["-KILL", &pid]).status();
        let _ = child.wait();
    }

    /// The socket that the server listens on.
    pub(crate) fn socket(&self) -> PathBuf {
        let host = self.url.split_whitespace().find_map(|word| word.strip_prefix("host=")).expect("a socket's folder");
        let port = self.url.split_whitespace().find_map(|word| word.strip_prefix("port=")).unwrap_or("5432");
        Path::new(host).join(format!(".s.PGSQL.{port}"))
    }
}

/// The port in settings. A server that listens on sockets alone has the usual number.
fn port(settings: &[String]) -> &str {
    settings.iter().find_map(|setting| setting.strip_prefix("port=")).unwrap_or("5432")
}

/// Starts a server on a directory, and waits until it answers.
#[allow(clippy::disallowed_methods)] // A server takes its own time to start.
fn serve(home: &Path, more: &[String], is_root: bool) -> Child {
    let sockets = format!("unix_socket_directories={}", home.display());
    let settings = ["listen_addresses=", "max_connections=200", &sockets];
    let settings = settings.into_iter().chain(more.iter().map(String::as_str));
    let mut server = program("postgres", is_root);
    server.arg("-D").arg(home.join("data")).args(settings.flat_map(|setting| ["-c", setting]));
    let began = Instant::now();
    // After a kill the old processes may still hold the directory for a moment.
    loop {
        let mut child = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the server starts");
        while child.try_wait().expect("a process").is_none() {
            if is_ready(home, port(more)) {
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

fn is_ready(home: &Path, port: &str) -> bool {
    let mut asked = Command::new(binary("pg_isready"));
    asked.arg("-h").arg(home).args(["-p", port]).stdout(Stdio::null()).stderr(Stdio::null());
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
