//! Places of operations: the branch of the code that an operation is in, and how many operations come before it there.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A branch of the code: for each fork on the way to it, the number of the fork and the index of the branch. The
/// workflow function itself is the branch with an empty path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub(crate) struct BranchPath(Option<Arc<[(u32, u32)]>>);

/// The place of an operation. In the order of places, the operations of one branch are consecutive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) branch: BranchPath,
    /// Counted from 0.
    pub(crate) number: u32,
}

impl BranchPath {
    pub(crate) fn steps(&self) -> &[(u32, u32)] {
        self.0.as_deref().unwrap_or_default()
    }

    /// A branch of a fork in this branch.
    pub(crate) fn fork(&self, number: u32, branch: u32) -> BranchPath {
        BranchPath(Some(self.steps().iter().copied().chain([(number, branch)]).collect()))
    }

    /// True if this is the other branch, or was forked within it.
    pub(crate) fn is_within(&self, other: &BranchPath) -> bool {
        self.steps().starts_with(other.steps())
    }

    pub(crate) fn at(&self, number: u32) -> Place {
        Place { branch: self.clone(), number }
    }

    /// Appends the path to a key. The keys of one branch are consecutive and in order.
    pub(crate) fn write(&self, key: &mut Vec<u8>) {
        let steps = self.steps();
        key.extend_from_slice(&(steps.len() as u16).to_be_bytes());
        for (number, branch) in steps {
            key.extend_from_slice(&number.to_be_bytes());
            key.extend_from_slice(&branch.to_be_bytes());
        }
    }
}

impl Place {
    /// A branch of the fork at this place.
    pub(crate) fn fork(&self, branch: usize) -> BranchPath {
        self.branch.fork(self.number, branch as u32)
    }

    /// The index of the branch of this fork that `branch` is, or is within.
    pub(crate) fn beside(&self, branch: &BranchPath) -> Option<usize> {
        let (number, which) = branch.steps().strip_prefix(self.branch.steps())?.first()?;
        (*number == self.number).then_some(*which as usize)
    }

    /// A sort key for operations: those of a fork's branches come after the fork and before what follows it.
    pub(crate) fn along(&self) -> Vec<u32> {
        let steps = self.branch.steps().iter().flat_map(|(number, branch)| [*number, *branch]);
        steps.chain([self.number]).collect()
    }

    /// Reads the place from the end of a key.
    pub(crate) fn read(bytes: &[u8]) -> Option<Place> {
        let (count, rest) = bytes.split_first_chunk::<2>()?;
        let (steps, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*count)) * 8)?;
        let number = u32::from_be_bytes(rest.try_into().ok()?);
        let four = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_be_bytes);
        let steps: Arc<[_]> = steps.chunks_exact(8).map(|step| (four(&step[..4]), four(&step[4..]))).collect();
        let branch = BranchPath((!steps.is_empty()).then_some(steps));
        Some(Place { branch, number })
    }
}

impl fmt::Display for BranchPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps().iter().try_for_each(|(number, branch)| write!(f, "{number}.{branch}/"))
    }
}

impl fmt::Debug for BranchPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.branch, self.number)
    }
}

impl FromStr for BranchPath {
    type Err = ();

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<BranchPath, ()> {
        let step = |text: &str| {
            let (number, branch) = text.split_once('.')?;
            Some((number.parse().ok()?, branch.parse().ok()?))
        };
        let steps: Option<Vec<(u32, u32)>> = text.split_terminator('/').map(step).collect();
        let steps = steps.ok_or(())?;
        Ok(BranchPath((!steps.is_empty()).then(|| steps.into())))
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Place, ()> {
        let (branch, number) = match text.rfind('/') {
            Some(end) => text.split_at(end + 1),
            None => ("", text),
        };
        Ok(Place { branch: branch.parse()?, number: number.parse().map_err(|_| ())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let deep = BranchPath::default().fork(3, 1).fork(0, 12).at(7);
        for place in [BranchPath::default().at(0), deep.clone()] {
            let mut key = Vec::new();
            place.branch.write(&mut key);
            key.extend_from_slice(&place.number.to_be_bytes());
            assert_eq!(Place::read(&key), Some(place.clone()));
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        assert_eq!(deep.to_string(), "3.1/0.12/7");
        assert_eq!(Place::read(&[0, 1, 0]), None);
    }
}
