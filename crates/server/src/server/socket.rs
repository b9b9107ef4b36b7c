//! The socket in a data directory: only the user of the process can open it, so that it needs no token. It is in its
//! place only with its rights, replaces one that a dead process has left, and is removed at the end.

use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use latchwork::store::Env;
use tokio::net::{UnixListener, UnixStream};

use crate::server::ServerError;

/// The name of the socket. Paths of sockets are short: about 100 bytes.
const NAME: &str = "api.sock";

/// A socket that this process listens on.
pub(crate) struct OwnSocket {
    listener: UnixListener,
    path: PathBuf,
    /// The device and the number of the file.
    file: (u64, u64),
}

impl OwnSocket {
    pub(crate) async fn bind(directory: &Path) -> Result<OwnSocket, ServerError> {
        let path = directory.join(NAME);
        match fs::symlink_metadata(&path) {
            Ok(found) if !found.file_type().is_socket() => return Err(ServerError::NotASocket { path }),
            Ok(_) if UnixStream::connect(&path).await.is_ok() => return Err(ServerError::SocketInUse { path }),
            _ => {}
        }
        let refused = |cause| ServerError::Listen { address: path.display().to_string(), cause };
        let (listener, file) = bind_private(directory, &path).map_err(refused)?;
        Ok(OwnSocket { listener, path, file })
    }

    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Between its creation and the change of its rights, others could open the socket. So it is created in a directory
/// that they cannot enter, and moved.
fn bind_private(directory: &Path, path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    fs::create_dir_all(directory)?;
    let private = directory.join(format!(".s{:08x}", Env::system().random() as u32));
    DirBuilder::new().mode(0o700).create(&private)?;
    let bound = bind_and_move(&private.join("s"), path);
    let removed = fs::remove_dir_all(&private);
    let bound = bound?;
    removed?;
    Ok(bound)
}

fn bind_and_move(first: &Path, path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let listener = UnixListener::bind(first)?;
    fs::set_permissions(first, Permissions::from_mode(0o600))?;
    let file = file_of(&fs::symlink_metadata(first)?);
    fs::rename(first, path)?;
    Ok((listener, file))
}

fn file_of(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        // Another process may have put its own in this place.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| file_of(&found) == self.file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(%error, socket = %self.path.display(), "the socket was not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_private_and_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let socket = OwnSocket::bind(directory.path()).await.unwrap();
        let path = socket.path().to_path_buf();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let second = OwnSocket::bind(directory.path()).await;
        assert!(matches!(second, Err(ServerError::SocketInUse { .. })));
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_of_a_dead_process_is_replaced_and_another_file_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(OwnSocket::bind(directory.path()).await.unwrap());
        fs::write(&path, "notes").unwrap();
        assert!(matches!(OwnSocket::bind(directory.path()).await, Err(ServerError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "notes");
    }
}
