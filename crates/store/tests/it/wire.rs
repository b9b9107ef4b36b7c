//! A way to the server on which connections are cut: before something is sent, in the middle of it, after it, before
//! its answer, and in the middle of the answer. What the client sends at once is taken as one thing: in the store's own
//! traffic that is a part of a transaction, or its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Notify;

use crate::server::Server;

/// Where a connection is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    BeforeSending,
    InTheMiddle,
    AfterSending,
    BeforeTheAnswer,
    InTheAnswer,
}

impl Cut {
    pub(crate) const ALL: [Cut; 5] =
        [Cut::BeforeSending, Cut::InTheMiddle, Cut::AfterSending, Cut::BeforeTheAnswer, Cut::InTheAnswer];
}

/// How often the client may send before its connection is cut. It needs about four times to open a connection.
const LIFE: std::ops::Range<u32> = 5..16;

#[derive(Clone)]
pub(crate) struct Wire {
    pub(crate) url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    cuts: [AtomicU64; 5],
    is_broken: AtomicBool,
    is_silent: AtomicBool,
    holds_next: AtomicBool,
    /// What was held may go on; and it has, and was answered.
    released: Notify,
    delivered: Notify,
}

impl Wire {
    /// A way to a server. It is whole at first.
    pub(crate) async fn to(server: &Server, seed: u64) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (socket, state) = (server.socket(), Arc::new(State::default()));
        let url = format!("host=127.0.0.1 port={port} user=postgres dbname=postgres sslmode=disable");
        let wire = Wire { url, state: state.clone() };
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed);
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = UnixStream::connect(&socket).await else { continue };
                tokio::spawn(pass(client, server, random.fork(), state.clone()));
            }
        });
        wire
    }

    pub(crate) fn break_from_now_on(&self) {
        self.state.is_broken.store(true, Ordering::SeqCst);
    }

    pub(crate) fn mend(&self) {
        self.state.is_broken.store(false, Ordering::SeqCst);
    }

    /// From now on, or no longer, a connection that is used stays open and passes nothing on any more.
    pub(crate) fn be_silent(&self, is_silent: bool) {
        self.state.is_silent.store(is_silent, Ordering::SeqCst);
    }

    /// What the client sends next does not reach the server before it is released. The client finds its connection cut.
    pub(crate) fn hold_next(&self) {
        self.state.holds_next.store(true, Ordering::SeqCst);
    }

    /// Lets what is held reach the server, and waits for the answer.
    pub(crate) async fn release(&self) {
        assert!(!self.state.holds_next.load(Ordering::SeqCst), "something is held");
        self.state.released.notify_one();
        self.state.delivered.notified().await;
    }

    pub(crate) fn cuts(&self) -> u64 {
        Cut::ALL.into_iter().map(|cut| self.cuts_of(cut)).sum()
    }

    pub(crate) fn cuts_of(&self, cut: Cut) -> u64 {
        self.state.cuts[cut as usize].load(Ordering::SeqCst)
    }
}

/// Passes bytes on between the two until the connection is cut, or one of them ends it.
async fn pass(mut client: TcpStream, mut server: UnixStream, mut random: fastrand::Rng, state: Arc<State>) {
    let (mut sent, mut answer) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let mut left = random.u32(LIFE);
    loop {
        tokio::select! {
            read = client.read(&mut sent) => {
                let Ok(count @ 1..) = read else { return };
                if state.is_silent.load(Ordering::SeqCst) {
                    return std::future::pending().await;
                }
                if state.holds_next.swap(false, Ordering::SeqCst) {
                    return hold(client, server, &sent[..count], &state).await;
                }
                if state.is_broken.load(Ordering::SeqCst) {
                    left -= 1;
                }
                if left == 0 {
                    let cut = random.choice(Cut::ALL).unwrap();
                    state.cuts[cut as usize].fetch_add(1, Ordering::SeqCst);
                    return end(cut, &sent[..count], (&mut client, &mut server), &mut random).await;
                }
                if server.write_all(&sent[..count]).await.is_err() {
                    return;
                }
            }
            read = server.read(&mut answer) => {
                let Ok(count @ 1..) = read else { return };
                if client.write_all(&answer[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Ends the side of the client, and passes on later what it has sent.
async fn hold(client: TcpStream, mut server: UnixStream, sent: &[u8], state: &State) {
    drop(client);
    state.released.notified().await;
    server.write_all(sent).await.unwrap();
    assert!(server.read(&mut vec![0; 64 << 10]).await.unwrap() > 0, "the server answers");
    state.delivered.notify_one();
    // The server closes it when it has answered everything.
    let _ = server.shutdown().await;
    while server.read(&mut vec![0; 64 << 10]).await.is_ok_and(|count| count > 0) {}
}

/// The last that happens on a connection. Both sides are closed after it.
async fn end(cut: Cut, sent: &[u8], (client, server): (&mut TcpStream, &mut UnixStream), random: &mut fastrand::Rng) {
    let mut answer = vec![0; 64 << 10];
    let passed = match cut {
        Cut::BeforeSending => 0,
        Cut::InTheMiddle => random.usize(0..sent.len()),
        Cut::AfterSending | Cut::BeforeTheAnswer | Cut::InTheAnswer => sent.len(),
    };
    let _ = server.write_all(&sent[..passed]).await;
    if let Cut::BeforeTheAnswer | Cut::InTheAnswer = cut {
        let count = server.read(&mut answer).await.unwrap_or(0);
        if cut == Cut::InTheAnswer && count > 1 {
            let _ = client.write_all(&answer[..random.usize(1..count)]).await;
        }
    }
}
