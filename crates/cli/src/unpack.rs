//! Unpacks a backup that a server sends: an archive of the format `tar` with plain files alone. Nothing is written
//! outside of the directory.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path};

use anyhow::{Context, Result};

use crate::client::Download;
use crate::output::{Exit, Problem};

/// The unit of the format.
const BLOCK: usize = 512;

/// What is expected next in the archive.
#[derive(Debug)]
enum Next {
    Header,
    /// A file, the bytes of it that are missing, and the filling behind it.
    Contents(File, u64, usize),
    Filling(usize),
    End,
}

/// Writes the archive into an empty or missing directory. If it breaks off, what was written is removed.
pub(crate) async fn into_directory(mut answer: Download, directory: &Path) -> Result<()> {
    let failed = || format!("cannot write the backup to {}", directory.display());
    DirBuilder::new().recursive(true).mode(0o700).create(directory).with_context(failed)?;
    if std::fs::read_dir(directory).with_context(failed)?.next().is_some() {
        let why = format!("{} is not empty; a backup needs an empty or missing directory", directory.display());
        return Err(Problem::new(Exit::Usage, why).into());
    }
    let mut unpacking = Unpacking { directory, next: Next::Header, rest: Vec::new(), written: Vec::new() };
    let unpacked = async {
        while let Some(piece) = answer.piece().await? {
            unpacking.take(&piece)?;
        }
        unpacking.end()
    };
    let unpacked = unpacked.await;
    if unpacked.is_err() {
        for name in &unpacking.written {
            let _ = std::fs::remove_file(directory.join(name));
        }
    }
    unpacked.with_context(failed)
}

struct Unpacking<'a> {
    directory: &'a Path,
    next: Next,
    /// The beginning of a header.
    rest: Vec<u8>,
    written: Vec<String>,
}

fn damaged(why: &str) -> anyhow::Error {
    Problem::new(Exit::Failed, format!("the archive is damaged: {why}")).into()
}

impl Unpacking<'_> {
    fn take(&mut self, mut piece: &[u8]) -> Result<()> {
        while !piece.is_empty() {
            match &mut self.next {
                Next::Header => {
                    let missing = (BLOCK - self.rest.len()).min(piece.len());
                    self.rest.extend_from_slice(&piece[..missing]);
                    piece = &piece[missing..];
                    if self.rest.len() == BLOCK {
                        self.begin()?;
                    }
                }
                Next::Contents(file, left, filling) => {
                    let length = usize::try_from(*left).unwrap_or(usize::MAX).min(piece.len());
                    file.write_all(&piece[..length])?;
                    *left -= length as u64;
                    piece = &piece[length..];
                    if *left == 0 {
                        file.sync_all()?;
                        self.next = Next::of_filling(*filling);
                    }
                }
                Next::Filling(left) => {
                    let length = piece.len().min(*left);
                    piece = &piece[length..];
                    self.next = Next::of_filling(*left - length);
                }
                Next::End => return Ok(()),
            }
        }
        Ok(())
    }

    /// Begins the file of a header.
    fn begin(&mut self) -> Result<()> {
        let header = std::mem::take(&mut self.rest);
        if header.iter().all(|byte| *byte == 0) {
            self.next = Next::End;
            return Ok(());
        }
        let name = header[..100].split(|byte| *byte == 0).next().unwrap_or_default();
        let name = std::str::from_utf8(name).map_err(|_| damaged("a name is not a text"))?;
        let is_plain = matches!(header[156], b'0' | 0);
        let mut parts = Path::new(name).components();
        // A snapshot has no folders.
        if !is_plain || !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(damaged("it holds something else than the files of a snapshot"));
        }
        let size = size(&header[124..136]).ok_or_else(|| damaged("a size cannot be read"))?;
        let path = self.directory.join(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        self.written.push(name.into());
        let filling = (BLOCK - (size % BLOCK as u64) as usize) % BLOCK;
        self.next = if size == 0 { Next::Header } else { Next::Contents(file, size, filling) };
        Ok(())
    }

    /// The archive is complete, and its files are on the disk.
    fn end(&self) -> Result<()> {
        if !matches!(self.next, Next::End) {
            return Err(damaged("it breaks off"));
        }
        Ok(File::open(self.directory)?.sync_all()?)
    }
}

impl Next {
    fn of_filling(left: usize) -> Next {
        if left == 0 { Next::Header } else { Next::Filling(left) }
    }
}

/// A number in octal digits, or in bytes if it is large.
fn size(field: &[u8]) -> Option<u64> {
    if field[0] == 0x80 {
        return Some(u64::from_be_bytes(field[4..12].try_into().ok()?));
    }
    let digits = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    u64::from_str_radix(digits, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, size: &[u8], kind: u8) -> Vec<u8> {
        let mut header = vec![0; BLOCK];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..124 + size.len()].copy_from_slice(size);
        header[156] = kind;
        header
    }

    fn archive() -> Vec<u8> {
        let mut all = header("a", b"00000000005\0", b'0');
        all.extend(b"hello");
        all.resize(2 * BLOCK, 0);
        all.extend(header("empty", b"00000000000\0", b'0'));
        all.extend(header("block", &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0], b'0'));
        all.extend(vec![7; BLOCK]);
        all.extend([0; 2 * BLOCK]);
        all
    }

    fn unpack(archive: &[u8], piece: usize) -> (tempfile::TempDir, Result<()>) {
        let directory = tempfile::tempdir().unwrap();
        let mut unpacking =
            Unpacking { directory: directory.path(), next: Next::Header, rest: Vec::new(), written: Vec::new() };
        let mut taken = archive.chunks(piece).try_for_each(|piece| unpacking.take(piece));
        taken = taken.and_then(|()| unpacking.end());
        (directory, taken)
    }

    #[test]
    fn files_are_unpacked_whatever_the_pieces_are() {
        for piece in [1, 100, 512, 4000] {
            let (directory, unpacked) = unpack(&archive(), piece);
            unpacked.unwrap();
            let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
            assert_eq!((read("a"), read("empty"), read("block")), (b"hello".to_vec(), Vec::new(), vec![7; BLOCK]));
        }
    }

    #[test]
    fn an_archive_that_breaks_off_or_holds_other_things_is_refused() {
        let whole = archive();
        for length in [10, 600, 2 * BLOCK, whole.len() - 2 * BLOCK] {
            assert!(unpack(&whole[..length], 512).1.is_err(), "{length}");
        }
        for (name, kind) in [("../a", b'0'), ("/a", b'0'), ("b/a", b'0'), ("", b'0'), ("..", b'0'), ("a", b'2')] {
            let mut all = header(name, b"00000000000\0", kind);
            all.extend([0; 2 * BLOCK]);
            assert!(unpack(&all, 512).1.is_err(), "{name}");
        }
    }
}
