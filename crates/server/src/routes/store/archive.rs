//! Archives of the format `tar` (ustar, with the numbers of GNU for files above 8 GiB). A flat list of files becomes a
//! stream of bytes whose length is known before. It knows nothing of stores.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use axum::body::Bytes;

/// The unit of the format.
const BLOCK: usize = 512;
/// The size of the pieces in which a file is read.
const PIECE: usize = 256 << 10;
/// The longest name that a header holds.
const NAME: usize = 100;
/// The largest size that a header holds in octal digits, plus one.
const OCTAL: u64 = 1 << 33;

/// The files of a directory and of those in it.
#[derive(Debug)]
pub(super) struct Archive {
    root: PathBuf,
    /// Names relative to the root, and sizes.
    files: Vec<(String, u64)>,
    /// Seconds since 1970: the time of all files.
    time: u64,
}

impl Archive {
    /// An archive of all files below a directory, which no longer change.
    pub(super) fn of(root: &Path, time: u64) -> io::Result<Archive> {
        let (mut files, mut rest) = (Vec::new(), vec![root.to_path_buf()]);
        while let Some(directory) = rest.pop() {
            for entry in std::fs::read_dir(&directory)? {
                let entry = entry?;
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    rest.push(entry.path());
                } else if kind.is_file() {
                    files.push((name(root, &entry.path())?, entry.metadata()?.len()));
                }
            }
        }
        files.sort();
        Ok(Archive { root: root.into(), files, time })
    }

    /// The number of bytes of the whole archive.
    pub(super) fn bytes(&self) -> u64 {
        let file = |(_, size): &(String, u64)| BLOCK as u64 + size.next_multiple_of(BLOCK as u64);
        self.files.iter().map(file).sum::<u64>() + 2 * BLOCK as u64
    }

    /// Passes the archive on piece by piece, until the end or until `send` returns false.
    pub(super) fn write(&self, mut send: impl FnMut(Bytes) -> bool) -> io::Result<()> {
        for (name, size) in &self.files {
            if !send(Bytes::copy_from_slice(&header(name, *size, self.time))) {
                return Ok(());
            }
            let mut file = File::open(self.root.join(name))?.take(*size);
            let mut left = *size;
            while left > 0 {
                let length = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
                // The end of a file is filled up to a whole block.
                let mut piece = vec![0; length.next_multiple_of(BLOCK)];
                file.read_exact(&mut piece[..length])?;
                left -= length as u64;
                if !send(piece.into()) {
                    return Ok(());
                }
            }
        }
        send(Bytes::from_static(&[0; 2 * BLOCK]));
        Ok(())
    }
}

/// The name of a file in the archive.
fn name(root: &Path, path: &Path) -> io::Result<String> {
    let name = path.strip_prefix(root).ok().and_then(Path::to_str).filter(|name| name.len() <= NAME);
    name.map(str::to_string).ok_or_else(|| io::Error::other("the name of a file does not fit into an archive"))
}

/// The header of a file.
fn header(name: &str, size: u64, time: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    match size < OCTAL {
        true => put(124, format!("{size:011o}\0").as_bytes()),
        false => {
            put(124, &[0x80, 0, 0, 0]);
            put(128, &size.to_be_bytes());
        }
    }
    put(136, format!("{:011o}\0", time.min(OCTAL - 1)).as_bytes());
    // The checksum is made over a header with spaces in its place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(archive: &Archive) -> Vec<u8> {
        let mut all = Vec::new();
        archive
            .write(|bytes| {
                all.extend(bytes);
                true
            })
            .unwrap();
        all
    }

    #[test]
    fn an_archive_is_as_long_as_was_said_and_unpacks() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(from.path().join("inner")).unwrap();
        let contents = [
            ("empty", Vec::new()),
            ("inner/small", b"abc".to_vec()),
            ("block", vec![7; BLOCK]),
            ("large", (0..PIECE + 1000).map(|at| at as u8).collect()),
        ];
        for (name, content) in &contents {
            std::fs::write(from.path().join(name), content).unwrap();
        }
        let archive = Archive::of(from.path(), 1_700_000_000).unwrap();
        let packed = packed(&archive);
        assert_eq!(packed.len() as u64, archive.bytes());
        let file = to.path().join("a.tar");
        std::fs::write(&file, &packed).unwrap();
        let unpacked = std::process::Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(to.path()).output();
        let unpacked = unpacked.unwrap();
        assert!(unpacked.status.success() && unpacked.stderr.is_empty(), "{unpacked:?}");
        for (name, content) in &contents {
            assert!(std::fs::read(to.path().join(name)).unwrap() == *content, "{name}");
        }
    }

    #[test]
    fn large_sizes_and_long_names_are_written_or_refused() {
        assert_eq!(&header("a", OCTAL - 1, 0)[124..136], b"77777777777\0");
        assert_eq!(header("a", OCTAL, 0)[124..136], [0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
        let root = Path::new("/r");
        assert_eq!(name(root, Path::new("/r/a/b")).unwrap(), "a/b");
        assert!(name(root, &root.join("x".repeat(101))).is_err());
    }
}
