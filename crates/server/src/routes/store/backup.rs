//! Backups: the library writes a snapshot into a temporary directory of the server, and the client gets it as one
//! archive. The directory is removed when the client has it, or has gone.

use std::io;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use futures_util::stream;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::api::Namespace;
use crate::routes::store::archive::Archive;
use crate::wire::problem::{Problem, ProblemShape};

/// The generation of the backup.
const GENERATION: HeaderName = HeaderName::from_static("latchwork-generation");

/// How many pieces of an archive wait for a slow client.
const PIECES: usize = 4;

/// Downloads a backup of the store at its newest generation, while it goes on working. The archive has the format
/// `tar`; unpacked into an empty directory, it is a snapshot that `latch store restore` takes, and a data directory
/// that can be opened. The server writes it to its temporary directory (`TMPDIR`) first.
#[utoipa::path(
    get,
    path = "/store/backup",
    responses(
        (status = 200, description = "The archive.", body = Vec<u8>, content_type = "application/x-tar",
            headers(("Latchwork-Generation" = u64, description = "The generation of the backup."))),
        (status = 503, description = "The backup could not be written; the log of the server names the cause.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn back_up(State(namespace): State<Namespace>) -> Result<Response, Problem> {
    let time = namespace.env().now().0 / 1_000_000;
    let view = namespace.engine().store().view().await?;
    let generation = view.generation();
    // The snapshot is written to its end also if the client goes: its directory is removed only when nothing writes
    // there any more.
    let writing = tokio::spawn(async move {
        let directory = tempfile::Builder::new().prefix("latchwork-backup-").tempdir().map_err(failed)?;
        view.persist(directory.path()).await?;
        Ok::<_, Problem>(directory)
    });
    let directory = writing.await.map_err(|_| Problem::internal("the task that writes a backup has panicked"))??;
    let archive = Archive::of(directory.path(), time).map_err(failed)?;
    let length = archive.bytes();
    let mut answer = Response::new(Body::from_stream(streamed(directory, archive)));
    let file = format!("attachment; filename=\"latchwork-{}-{generation}.tar\"", namespace.name());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    headers.insert(CONTENT_LENGTH, length.into());
    headers.insert(GENERATION, generation.0.into());
    if let Ok(file) = HeaderValue::try_from(file) {
        headers.insert(CONTENT_DISPOSITION, file);
    }
    Ok(answer)
}

fn failed(error: io::Error) -> Problem {
    Problem::unavailable(&error)
}

/// Reads the archive on a thread of its own, as fast as the client takes it. An error cuts the answer short, which the
/// client sees by its length.
fn streamed(directory: TempDir, archive: Archive) -> impl stream::Stream<Item = io::Result<Bytes>> + Send {
    let (sender, mut pieces) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let written = archive.write(|piece| sender.blocking_send(Ok(piece)).is_ok());
        if let Err(error) = written {
            tracing::error!(%error, "a backup could not be sent");
            let _ = sender.blocking_send(Err(error));
        }
        if let Err(error) = directory.close() {
            tracing::warn!(%error, "the temporary directory of a backup could not be removed");
        }
    });
    stream::poll_fn(move |context| pieces.poll_recv(context))
}
