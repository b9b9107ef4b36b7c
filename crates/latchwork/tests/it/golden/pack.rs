//! Files without their empty parts: a log is mostly zeros, and so is an index. A packed file holds the length of the
//! whole file (8 bytes, little-endian), and each block that is not all zeros after its number (4 bytes).

use std::fs;
use std::path::Path;

const BLOCK: usize = 256;

/// Packs all files of a directory into another.
pub(super) fn write(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        // This file names the process that has the store open.
        if entry.file_name() == "LOCK" {
            continue;
        }
        let whole = fs::read(entry.path()).unwrap();
        let mut packed = (whole.len() as u64).to_le_bytes().to_vec();
        for (number, block) in whole.chunks(BLOCK).enumerate().filter(|(_, block)| block.iter().any(|byte| *byte != 0))
        {
            packed.extend_from_slice(&(number as u32).to_le_bytes());
            packed.extend_from_slice(block);
        }
        fs::write(to.join(entry.file_name()), packed).unwrap();
    }
}

/// Unpacks all files of a directory into another.
pub(super) fn read(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let packed = fs::read(entry.path()).unwrap();
        let (length, blocks) = packed.split_first_chunk::<8>().unwrap();
        let mut whole = vec![0; u64::from_le_bytes(*length) as usize];
        for block in blocks.chunks(BLOCK + 4) {
            let (number, block) = block.split_first_chunk::<4>().unwrap();
            let at = u32::from_le_bytes(*number) as usize * BLOCK;
            whole[at..at + block.len()].copy_from_slice(block);
        }
        fs::write(to.join(entry.file_name()), whole).unwrap();
    }
}
