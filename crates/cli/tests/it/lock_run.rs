//! `latch lock run`: exit codes, signals, and holders that are killed or stand still.

use std::io::{BufRead, BufReader, PipeReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use latchwork::lock::Locks;
use latchwork::store::{Env, PostgresOptions, Store};
use serde_json::Value;

use crate::server::Server;
use crate::serving::{Serving, command};
use crate::{signal, succeeded, text};

/// Where the lock is, as arguments.
struct Place(Vec<String>);

impl Place {
    fn directory(path: &Path) -> Place {
        Place(vec!["--store".into(), path.display().to_string()])
    }

    fn database(server: &Server, schema: &str) -> Place {
        let host = server.socket().parent().unwrap().display().to_string().replace('/', "%2F");
        let url = format!("postgres:///postgres?user=postgres&host={host}");
        Place(["--store", &url, "--schema", schema].map(Into::into).to_vec())
    }

    fn server(url: &str) -> Place {
        Place(vec!["--server".into(), url.into()])
    }

    /// `latch lock run ARGUMENTS -- COMMAND`.
    fn lock_run(&self, arguments: &[&str], run: &[&str]) -> Command {
        let mut command = command();
        command.args(["lock", "run"]).args(arguments).args(&self.0).arg("--").args(run);
        command.stdin(Stdio::null());
        command
    }

    fn output(&self, arguments: &[&str], run: &[&str]) -> Output {
        self.lock_run(arguments, run).output().unwrap()
    }

    fn print(&self, arguments: &[&str]) -> Value {
        let output = command().args(arguments).args(&self.0).args(["-o", "json"]).output().unwrap();
        serde_json::from_str(&succeeded(output)).unwrap()
    }

    /// Starts a command that says that it runs, with its own process id, and then does more.
    fn start(&self, arguments: &[&str], more: &str) -> Running {
        let script = format!("echo $$; {more}");
        let mut command = self.lock_run(arguments, &["sh", "-c", &script]);
        let mut latch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(latch.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let Ok(child) = line.trim().parse() else {
            let _ = latch.kill();
            panic!("{line:?}: {}", text(&latch.wait_with_output().unwrap().stderr));
        };
        Running { latch, child, said }
    }
}

/// A command that runs under a lock.
struct Running {
    latch: Child,
    child: u32,
    said: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().into()
    }

    /// Waits for the end. Returns the exit code, and what was said on the standard error.
    fn end(self) -> (Option<i32>, String) {
        drop(self.said);
        let output = self.latch.wait_with_output().unwrap();
        (output.status.code(), text(&output.stderr))
    }
}

/// A process that has ended is gone, or its exit code was not asked for yet.
fn runs(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    status.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let (env, runtime) = (Env::system(), runtime());
    let end = env.monotonic() + Duration::from_secs(60);
    while !is_so() {
        assert!(env.monotonic() < end, "{what} has not happened");
        runtime.block_on(async { env.sleep(Duration::from_millis(20)).await });
    }
}

fn pause(time: Duration) {
    runtime().block_on(async { Env::system().sleep(time).await });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn data() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    (directory, store)
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    let (_directory, store) = data();
    let place = Place::directory(&store);
    for (script, code) in
        [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
    {
        let output = place.output(&["nightly"], &["sh", "-c", script]);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(code), String::new()), "{script}");
    }
    let mut first = 0;
    for _ in 0..2 {
        let output = place.output(&["nightly"], &["sh", "-c", "echo $LATCH_LOCK $LATCH_FENCE; exit 3"]);
        let said = text(&output.stdout);
        let (name, fence) = said.trim().split_once(' ').unwrap();
        assert_eq!(name, "nightly");
        let fence: u64 = fence.parse().unwrap();
        assert!(fence > first, "fences rise");
        first = fence;
    }
    let mut echo = place.lock_run(&["nightly"], &["cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut echo.stdin.take().unwrap(), b"from the standard input").unwrap();
    assert_eq!(text(&echo.wait_with_output().unwrap().stdout), "from the standard input");
    assert_eq!(place.print(&["lock", "show", "nightly"])["used"], 0);
}

#[test]
fn a_command_that_cannot_be_run_is_reported_before_the_lock_is_acquired() {
    let (directory, store) = data();
    let place = Place::directory(&store);
    let script = directory.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let text_file = directory.path().join("text");
    std::fs::write(&text_file, "hello").unwrap();
    let mut rights = std::fs::metadata(&script).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut rights, 0o755);
    std::fs::set_permissions(&script, rights).unwrap();
    for (run, code, says) in [
        ("no-such-command", 127, "cannot run \"no-such-command\": no folder of PATH has it"),
        ("/no/such/command", 127, "there is no such file"),
        (text_file.to_str().unwrap(), 126, "you may not execute it"),
        (directory.path().to_str().unwrap(), 126, "it is a directory"),
    ] {
        let output = place.output(&["nightly"], &[run]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.contains(says)), (Some(code), true), "{run}: {said}");
        assert!(!store.exists(), "nothing was opened");
    }
    let output = place.output(&["nightly"], &[script.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.contains("interpreter")), (Some(126), true), "{said}");
    let json = place.output(&["nightly", "-o", "json"], &["no-such-command"]);
    let said: Value = serde_json::from_str(&text(&json.stderr)).unwrap();
    assert_eq!((&said["error"]["code"], &said["error"]["exit"]), (&"no_command".into(), &127.into()));
    // A lock in the directory where one happens to be protects from nothing.
    let mut unnamed = command();
    let unnamed = unnamed.args(["lock", "run", "nightly", "--", "true"]).current_dir(directory.path());
    assert_eq!(unnamed.output().unwrap().status.code(), Some(2));
    for wrong in [&["nightly", "--shared", "--slots", "2"][..], &["nightly", "--lease", "1ms"], &["", "--try"]] {
        let output = place.output(wrong, &["true"]);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", text(&output.stderr));
    }
    let nothing = command().args(["lock", "run", "nightly"]).args(&place.0).output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
}

#[test]
fn a_lock_that_is_held_is_busy() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    // Through the socket of the live directory, and through the address.
    for place in [Place::directory(&store), Place::server(&serving.url)] {
        let running = place.start(&["nightly", "--label", "importer"], "exec sleep 60");
        for arguments in [&["nightly", "--try"][..], &["nightly", "--wait", "200ms"]] {
            let output = place.output(arguments, &["true"]);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(75), "{said}");
            assert!(said.contains("lock \"nightly\" was not free") && said.contains("session \"importer\""), "{said}");
        }
        let output = place.output(&["nightly", "--try", "-o", "json"], &["true"]);
        let said: Value = serde_json::from_str(&text(&output.stderr)).unwrap();
        assert_eq!(said["error"]["holders"][0]["label"], "importer");
        assert_eq!(place.output(&["other", "--try"], &["true"]).status.code(), Some(0), "another lock is free");
        let mixed = place.output(&["nightly", "--slots", "2", "--try"], &["true"]);
        let code = mixed.status.code();
        assert!(matches!(code, Some(2 | 5)), "it is a mutex: {code:?} {}", text(&mixed.stderr));
        let waiting = place.lock_run(&["nightly", "--wait", "60s"], &["sh", "-c", "exit 9"]).spawn().unwrap();
        until("the wait", || place.print(&["lock", "show", "nightly"])["waiting"] == 1);
        signal(running.latch.id(), "TERM");
        assert_eq!(running.end().0, Some(143), "the signal was forwarded");
        assert_eq!(waiting.wait_with_output().unwrap().status.code(), Some(9), "it got the lock");
        let shown = place.print(&["lock", "show", "nightly"]);
        assert_eq!((&shown["used"], &shown["waiting"]), (&0.into(), &0.into()));
    }
    assert_eq!(serving.end(), Some(0));
}

#[test]
fn a_directory_without_a_server_is_waited_for() {
    let (_directory, store) = data();
    let place = Place::directory(&store);
    let mut running = place.start(&["nightly"], "sleep 1; echo done");
    let busy = place.output(&["nightly", "--try"], &["true"]);
    assert_eq!(busy.status.code(), Some(75));
    assert!(text(&busy.stderr).contains(&format!("in use by process {}", running.latch.id())));
    assert_eq!(place.output(&["nightly", "--wait", "60s"], &["true"]).status.code(), Some(0));
    assert_eq!(running.line(), "done");
    assert_eq!(running.end().0, Some(0));
}

#[test]
fn slots_and_shared_locks_let_several_in() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let place = Place::server(&serving.url);
    let code = |arguments: &[&str]| place.output(arguments, &["true"]).status.code();
    let one = place.start(&["vendor", "--slots", "2"], "exec sleep 60");
    assert_eq!(code(&["vendor", "--slots", "2", "--try"]), Some(0));
    let two = place.start(&["vendor", "--slots", "2"], "exec sleep 60");
    assert_eq!(code(&["vendor", "--slots", "2", "--try"]), Some(75));
    let reader = place.start(&["config", "--shared"], "exec sleep 60");
    assert_eq!(code(&["config", "--shared", "--try"]), Some(0));
    assert_eq!(code(&["config", "--exclusive", "--try"]), Some(75));
    for running in [one, two, reader] {
        signal(running.latch.id(), "INT");
        assert_eq!(running.end().0, Some(130));
    }
    let writer = place.start(&["config", "--exclusive"], "exec sleep 60");
    assert_eq!(code(&["config", "--shared", "--try"]), Some(75));
    signal(writer.child, "KILL");
    assert_eq!(writer.end().0, Some(137), "the command was killed");
    assert_eq!(code(&["config", "--exclusive", "--try"]), Some(0), "its lock is free");
}

#[test]
fn signals_reach_the_command_and_its_children() {
    let (_directory, store) = data();
    let place = Place::directory(&store);
    for (name, says) in [("HUP", "hup"), ("USR1", "usr1"), ("INT", "int")] {
        let script = "trap 'echo hup; exit 4' HUP; trap 'echo usr1; exit 4' USR1; trap 'echo int; exit 4' INT;
            echo ready; while :; do sleep 0.05; done";
        let mut running = place.start(&["nightly"], script);
        assert_eq!(running.line(), "ready");
        signal(running.latch.id(), name);
        assert_eq!(running.line(), says);
        assert_eq!(running.end().0, Some(4), "{name}");
    }
    // A command that ignores the signal keeps its lock.
    let mut running = place.start(&["nightly"], "trap '' TERM; echo ready; sleep 1; exit 6");
    assert_eq!(running.line(), "ready");
    signal(running.latch.id(), "TERM");
    assert_eq!(running.end().0, Some(6));
}

#[test]
fn a_signal_ends_the_wait_and_leaves_nothing_behind() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let place = Place::directory(&store);
    let running = place.start(&["nightly"], "exec sleep 60");
    let waiting = place.lock_run(&["nightly", "--wait", "60s"], &["true"]).spawn().unwrap();
    until("the wait", || place.print(&["lock", "show", "nightly"])["waiting"] == 1);
    signal(waiting.id(), "TERM");
    assert_eq!(waiting.wait_with_output().unwrap().status.code(), Some(143));
    assert_eq!(place.print(&["lock", "show", "nightly"])["waiting"], 0);
    signal(running.latch.id(), "TERM");
    running.end();
    drop(serving);
}

#[test]
fn the_command_ends_if_its_holder_is_killed_and_the_next_one_gets_the_lock() {
    let (server, name) = (Server::start(), format!("cli_{}_killed", std::process::id()));
    let ((_directory, store), (_other, served)) = (data(), data());
    let serving = Serving::on(&served);
    for place in [Place::directory(&store), Place::database(&server, &name), Place::server(&serving.url)] {
        // A child of the command is ended, too.
        let mut running = place.start(&["nightly", "--lease", "2s"], "sleep 60 & echo $!; wait");
        let grandchild: u32 = running.line().parse().unwrap();
        assert!(runs(running.child) && runs(grandchild));
        signal(running.latch.id(), "KILL");
        let (command, next) = (running.child, place.output(&["nightly", "--wait", "60s"], &["true"]));
        assert_eq!(next.status.code(), Some(0), "{}", text(&next.stderr));
        until("the end of the command", || !runs(command) && !runs(grandchild));
        let (code, said) = running.end();
        assert_eq!(code, None);
        assert!(said.contains("latch lock run was killed; its command is terminated"), "{said}");
    }
}

/// A kill between the start of the command and the message to its guard would leave a command without an end.
#[test]
fn a_holder_that_is_killed_at_any_moment_leaves_no_command_behind() {
    let (directory, store) = data();
    let place = Place::directory(&store);
    let begun = directory.path().join("begun");
    let script = format!("echo $$ >> '{}'; exec sleep 60", begun.display());
    let processes = || -> Vec<u32> {
        let written = std::fs::read_to_string(&begun).unwrap_or_default();
        written.lines().map(|line| line.parse().unwrap()).collect()
    };
    // Until some commands have begun before the kill.
    for moment in 0..1000 {
        if processes().len() >= 10 {
            break;
        }
        let mut latch = place.lock_run(&["nightly"], &["sh", "-c", &script]).stderr(Stdio::null()).spawn().unwrap();
        pause(Duration::from_millis(moment));
        signal(latch.id(), "KILL");
        latch.wait().unwrap();
    }
    // Now the last command has begun, or never will.
    pause(Duration::from_millis(500));
    until("the end of all commands", || !processes().into_iter().any(runs));
    assert!(!processes().is_empty(), "no kill came after the start of a command");
}

#[test]
fn a_command_waits_for_its_barrier_and_does_not_inherit_it() {
    let begin = |barrier: PipeReader, run: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec \"$0\" __begin 3 table \"$@\" 3<&0 0</dev/null", env!("CARGO_BIN_EXE_latch")]);
        shell.args(run).stdin(barrier).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for (byte, run, code, said) in [
        (None, ["echo", "begun"], 76, "latch: latch lock run was killed; \"echo\" was not run\n"),
        (Some(&b"b"[..]), ["echo", "begun"], 0, "begun\n"),
        (Some(&b"b"[..]), ["ls", "-l /proc/self/fd"], 0, ""),
        (Some(&b"b"[..]), ["/nowhere/at/all", ""], 127, "cannot run \"/nowhere/at/all\": it does not exist any more\n"),
    ] {
        let (barrier, mut opens) = std::io::pipe().unwrap();
        let pipe = std::fs::read_link(format!("/proc/self/fd/{}", opens.as_raw_fd())).unwrap();
        let waits = begin(barrier, &run.map(|words| words.split(' ').collect::<Vec<_>>()).concat());
        byte.into_iter().for_each(|byte: &[u8]| opens.write_all(byte).unwrap());
        drop(opens);
        let output = waits.wait_with_output().unwrap();
        let all = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!((output.status.code(), all.ends_with(said)), (Some(code), true), "{all}");
        // `ls` shows what it has inherited.
        assert!(!all.contains(pipe.to_str().unwrap()), "{all}");
    }
}

#[test]
fn a_holder_that_stands_still_loses_the_lock_and_its_command_is_terminated_before() {
    let (server, name) = (Server::start(), format!("cli_{}_paused", std::process::id()));
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    for (place, cause) in [
        (Place::database(&server, &name), "was lost while this process stood still"),
        // A server tells only that the session has ended.
        (Place::server(&serving.url), "was lost"),
    ] {
        let running = place.start(&["nightly", "--lease", "2s"], "exec sleep 60");
        let (latch, command) = (running.latch.id(), running.child);
        signal(latch, "STOP");
        // The guard ends the command while the holder stands still, and before the lock has another holder.
        let look = format!("case $(cut -d ' ' -f 3 /proc/{command}/stat) in Z|X|'') ;; *) exit 9;; esac");
        let next = place.output(&["nightly", "--wait", "60s"], &["sh", "-c", &look]);
        assert_eq!(next.status.code(), Some(0), "{}", text(&next.stderr));
        signal(latch, "CONT");
        let (code, said) = running.end();
        assert_eq!(code, Some(76), "{said}");
        assert!(said.contains("stood still for 1s"), "{said}");
        assert!(said.contains(&format!("lock \"nightly\" {cause}")), "{said}");
    }
}

#[test]
fn a_lock_that_an_operator_releases_is_lost() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let (server, name) = (Server::start(), format!("cli_{}_forced", std::process::id()));
    for place in [Place::server(&serving.url), Place::database(&server, &name)] {
        let release = |place: &Place| {
            let token = place.print(&["lock", "show", "nightly"])["holders"][0]["token"].to_string();
            let release = ["lock", "release", "nightly", "--token", &token, "--reason", "it hangs", "--yes"];
            place.print(&release)
        };
        // One that ignores the signal is killed, and so are its children.
        let script = "trap '' TERM; (trap '' TERM; sleep 60) & echo $!; while :; do sleep 0.05; done";
        let mut running = place.start(&["nightly", "--lease", "2s", "--kill-after", "500ms"], script);
        let grandchild: u32 = running.line().parse().unwrap();
        assert!(release(&place)["released"]["token"].is_u64());
        let command = running.child;
        let (code, said) = running.end();
        assert_eq!(code, Some(76), "{said}");
        let expected = "was lost, because an operator released it: it hangs; the command was terminated";
        assert!(said.contains(expected), "{said}");
        until("the end of the command", || !runs(command) && !runs(grandchild));

        let mut running = place.start(&["nightly", "--on-lost", "warn", "--lease", "2s"], "echo on; sleep 4; exit 5");
        assert_eq!(running.line(), "on");
        release(&place);
        let (code, said) = running.end();
        assert_eq!(code, Some(5), "{said}");
        assert!(said.contains("was lost; the command goes on beside the next holder"), "{said}");
    }
}

#[test]
fn a_store_that_cannot_be_reached_has_a_code_of_its_own() {
    for place in [
        Place(vec!["--store".into(), "postgres://me:hunter2@127.0.0.1:1/app".into()]),
        Place::server("http://127.0.0.1:1"),
        Place::server("unix:/nowhere/api.sock"),
    ] {
        let output = place.output(&["nightly", "--try"], &["true"]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.contains("hunter2")), (Some(69), false), "{said}");
    }
}

#[test]
fn a_lock_outlasts_a_restart_of_the_server() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let address = serving.url.strip_prefix("http://").unwrap().to_string();
    let place = Place::server(&serving.url);
    let mut running = place.start(&["nightly", "--lease", "20s"], "echo on; sleep 8; echo off");
    let mut killed = place.start(&["weekly", "--lease", "20s"], "echo on; sleep 8; echo off");
    assert_eq!((running.line().as_str(), killed.line().as_str()), ("on", "on"));
    drop(serving);
    let serving = Serving::start(&["--store", store.to_str().unwrap(), "--listen", &address]);
    let busy = place.output(&["nightly", "--try"], &["true"]);
    assert_eq!(busy.status.code(), Some(75), "{}", text(&busy.stderr));
    assert_eq!((running.line().as_str(), killed.line().as_str()), ("off", "off"));
    for running in [running, killed] {
        let (code, said) = running.end();
        assert_eq!((code, said.as_str()), (Some(0), ""), "the lock was held all the time");
    }
    assert_eq!(place.output(&["nightly", "--try"], &["true"]).status.code(), Some(0));
    drop(serving);
}

#[test]
fn a_server_that_is_gone_for_a_lease_takes_the_lock_with_it() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let place = Place::server(&serving.url);
    let running = place.start(&["nightly", "--lease", "1s"], "exec sleep 60");
    drop(serving);
    let (code, said) = running.end();
    assert_eq!(code, Some(76), "{said}");
}

#[test]
fn code_of_the_library_and_the_command_exclude_each_other() {
    let (server, name) = (Server::start(), format!("cli_{}_both", std::process::id()));
    let place = Place::database(&server, &name);
    runtime().block_on(async {
        let store: Store = PostgresOptions::new().schema(&name).connect(&server.url).await.unwrap();
        let locks = Locks::on(&store).await.unwrap();
        let guard = locks.mutex("nightly").acquire().await.unwrap();
        let busy = place.output(&["nightly", "--try"], &["true"]);
        assert_eq!(busy.status.code(), Some(75), "{}", text(&busy.stderr));
        let waiting = place.lock_run(&["nightly", "--wait", "60s"], &["sh", "-c", "exit 8"]).spawn().unwrap();
        while locks.inspect("nightly").await.unwrap().waiting == 0 {
            store.env().sleep(Duration::from_millis(20)).await;
        }
        guard.release().await.unwrap();
        let ended = tokio::task::spawn_blocking(|| waiting.wait_with_output().unwrap()).await.unwrap();
        assert_eq!(ended.status.code(), Some(8));
        locks.shutdown().await.unwrap();
        store.close().await.unwrap();
    });
}

#[test]
fn a_stopped_command_is_terminated_all_the_same() {
    let (_directory, store) = data();
    let serving = Serving::on(&store);
    let place = Place::server(&serving.url);
    let running = place.start(&["nightly", "--lease", "2s"], "exec sleep 60");
    signal(running.child, "STOP");
    pause(Duration::from_millis(100));
    let token = place.print(&["lock", "show", "nightly"])["holders"][0]["token"].to_string();
    place.print(&["lock", "release", "nightly", "--token", &token, "--reason", "it is stopped", "--yes"]);
    let (code, said) = running.end();
    assert_eq!(code, Some(76), "{said}");
}

/// Runs a command in a terminal of its own. Returns its exit code, and what was on the screen.
fn in_terminal(mut run: Command, said: &str, typed: &[u8]) -> (Option<i32>, String) {
    let pair = nix::pty::openpty(None, None).unwrap();
    let mut terminal = std::fs::File::from(pair.master);
    let side = || Stdio::from(pair.slave.try_clone().unwrap());
    let mut process = run.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
    drop((run, pair.slave));
    let mut screen = String::new();
    let mut bytes = [0; 1024];
    // The terminal ends with an error when its last process is gone.
    while let Ok(length @ 1..) = std::io::Read::read(&mut terminal, &mut bytes) {
        let before = screen.contains(said);
        screen.push_str(&text(&bytes[..length]));
        if !before && screen.contains(said) {
            std::io::Write::write_all(&mut terminal, typed).unwrap();
        }
    }
    (process.wait().unwrap().code(), screen)
}

#[test]
fn a_command_has_the_terminal() {
    let (_directory, store) = data();
    let place = Place::directory(&store);
    let run = |script: &str| {
        let latch = place.lock_run(&["nightly"], &["sh", "-c", script]);
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(latch.get_program()).args(latch.get_args());
        command
    };
    // It reads what is typed: a command in the background would be stopped.
    let (code, screen) = in_terminal(run("echo ready; read word; echo got $word; exit 3"), "ready", b"hello\n");
    assert_eq!((code, screen.contains("got hello")), (Some(3), true), "{screen}");
    let (code, screen) = in_terminal(run("echo ready; sleep 60"), "ready", b"\x03");
    assert_eq!(code, Some(130), "{screen}");
    // What comes after it in a script has the terminal again.
    let latch = place.lock_run(&["nightly"], &["true"]);
    let mut script = Command::new("setsid");
    script.args(["--ctty", "--wait", "sh", "-c", "\"$@\"; echo ready; read word; echo got $word", "sh"]);
    script.arg(latch.get_program()).args(latch.get_args());
    let (code, screen) = in_terminal(script, "ready", b"hello\n");
    assert_eq!((code, screen.contains("got hello")), (Some(0), true), "{screen}");
}
