//! A server in this process, and the process of its clients.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use latchwork_server::{Address, Api, Listen, Server};
use tokio::runtime::Runtime;

/// Starts a server on a free port. Returns it with its address.
pub(crate) fn serve(runtime: &Runtime, api: Api) -> (Server, String) {
    let listen = Listen::Tcp("127.0.0.1:0".parse().expect("an address"));
    let server = runtime.block_on(Server::builder().namespace("default", api).listen(listen).start());
    let server = server.expect("a server");
    let Address::Tcp(address) = &server.addresses()[0] else { panic!("{:?}", server.addresses()) };
    let place = address.to_string();
    (server, place)
}

/// The process of the clients. It ends with its standard input.
pub(crate) struct Clients {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// What a round of the clients has measured.
pub(crate) struct Round {
    /// The number of calls, or a median in microseconds.
    pub(crate) figure: f64,
    pub(crate) seconds: f64,
    /// Seconds of the processor that the clients have used.
    pub(crate) used: f64,
}

impl Clients {
    pub(crate) fn start(kind: &str, place: &str, number: usize) -> Clients {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["client", kind, place, &number.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("a child");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("the child's output"));
        let mut clients = Clients { process, input, output };
        clients.hear("ready");
        clients
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line of the child");
        line.trim().into()
    }

    /// Waits for a line.
    pub(crate) fn hear(&mut self, line: &str) {
        assert_eq!(self.line(), line, "the clients have failed");
    }

    pub(crate) fn begin(&mut self, asked: &str) {
        writeln!(self.input.as_mut().expect("it runs"), "{asked}").expect("a line to the child");
    }

    pub(crate) fn end(&mut self) -> Round {
        let line = self.line();
        let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [figure, seconds, used] = numbers[..] else { panic!("the clients have failed: {line:?}") };
        Round { figure, seconds, used }
    }

    pub(crate) fn round(&mut self, asked: &str) -> Round {
        self.begin(asked);
        self.end()
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.process.wait();
    }
}
