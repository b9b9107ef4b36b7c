//! Places of operations: the branch of the code that an operation is in, and how many operations come before it there.
//! A step of a path is a fork of the code, or a block of a flow, which is found by its name and not by its position.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A branch of the code: for each fork on the way to it, the number of the fork and the index of the branch. The
/// workflow function itself is the branch with an empty path.
///
/// A named step is several pairs: first its length in bytes under the mark `NAMED`, and which of its name it is; then
/// the bytes of the name, eight a pair. So paths with and without names are stored in the same way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub(crate) struct BranchPath(Option<Arc<[(u32, u32)]>>);

/// Marks the first pair of a named step. No fork has such a number.
const NAMED: u32 = 1 << 31;

/// The number of a block's trace, in the branch of the block. No operation has this number.
pub(crate) const TRACE: u32 = u32::MAX;

/// A step of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PathStep {
    Fork(u32, u32),
    Named(String, u32),
}

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

    /// The path of a block within this branch: its name, and which of that name it is.
    pub(crate) fn named(&self, name: &str, nth: u32) -> BranchPath {
        let four = |bytes: &[u8]| {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            u32::from_be_bytes(word)
        };
        let pair = |bytes: &[u8]| (four(&bytes[..bytes.len().min(4)]), four(bytes.get(4..).unwrap_or_default()));
        let name = [(NAMED | name.len() as u32, nth)].into_iter().chain(name.as_bytes().chunks(8).map(pair));
        BranchPath(Some(self.steps().iter().copied().chain(name).collect()))
    }

    /// True if a step of the path has a name.
    pub(crate) fn is_named(&self) -> bool {
        self.steps().iter().any(|(number, _)| number & NAMED != 0)
    }

    /// The place of the trace of the block with this path.
    pub(crate) fn trace(&self) -> Place {
        self.at(TRACE)
    }

    /// The steps, with their names. Damaged names are shown as far as they can be.
    fn each(&self) -> Vec<PathStep> {
        let (mut rest, mut steps) = (self.steps(), Vec::new());
        while let Some(((number, nth), after)) = rest.split_first() {
            if number & NAMED == 0 {
                steps.push(PathStep::Fork(*number, *nth));
                rest = after;
                continue;
            }
            let length = (number & !NAMED) as usize;
            let (name, after) = after.split_at(length.div_ceil(8).min(after.len()));
            let bytes = name.iter().flat_map(|(first, last)| [first.to_be_bytes(), last.to_be_bytes()]).flatten();
            let bytes: Vec<u8> = bytes.take(length).collect();
            steps.push(PathStep::Named(String::from_utf8_lossy(&bytes).into_owned(), *nth));
            rest = after;
        }
        steps
    }

    /// True if this is the other branch, or was forked within it.
    pub(crate) fn is_within(&self, other: &BranchPath) -> bool {
        self.steps().starts_with(other.steps())
    }

    /// Which of its name or fork the first step is by which this path goes on after the other one.
    pub(crate) fn nth_after(&self, other: &BranchPath) -> Option<u32> {
        self.steps().strip_prefix(other.steps())?.first().map(|(_, nth)| *nth)
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
        self.each().iter().try_for_each(|step| match step {
            PathStep::Fork(number, branch) => write!(f, "{number}.{branch}/"),
            PathStep::Named(name, 0) => write!(f, "{}/", escaped(name)),
            PathStep::Named(name, nth) => write!(f, "{}@{nth}/", escaped(name)),
        })
    }
}

/// A name as a path shows it: the signs that have a meaning there are written as `%` and two digits.
fn escaped(name: &str) -> String {
    let is_fork = |name: &str| name.chars().all(|c| c.is_ascii_digit() || c == '.');
    let mut shown = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '/' | '@' | '%' => shown.push_str(&format!("%{:02X}", c as u32)),
            '.' if is_fork(name) => shown.push_str("%2E"),
            c => shown.push(c),
        }
    }
    shown
}

fn unescaped(shown: &str) -> Option<String> {
    let mut parts = shown.split('%');
    let mut name = parts.next()?.to_string();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        name.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
        name.push_str(rest);
    }
    Some(name)
}

impl fmt::Debug for BranchPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            TRACE => write!(f, "{}", self.branch),
            number => write!(f, "{}{number}", self.branch),
        }
    }
}

impl FromStr for BranchPath {
    type Err = ();

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<BranchPath, ()> {
        text.split_terminator('/').try_fold(BranchPath::default(), |path, step| {
            let fork = step.split_once('.').and_then(|(number, branch)| {
                let number: u32 = number.parse().ok()?;
                Some((number, branch.parse().ok()?)).filter(|_| number & NAMED == 0)
            });
            if let Some((number, branch)) = fork {
                return Ok(path.fork(number, branch));
            }
            let (name, nth) = step.split_once('@').unwrap_or((step, "0"));
            match (unescaped(name), nth.parse()) {
                (Some(name), Ok(nth)) if !name.is_empty() => Ok(path.named(&name, nth)),
                _ => Err(()),
            }
        })
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Place, ()> {
        let (branch, number) = match text.rfind('/') {
            Some(end) => text.split_at(end + 1),
            None => ("", text),
        };
        let number = match number {
            "" if !branch.is_empty() => TRACE,
            number => number.parse().map_err(|_| ())?,
        };
        Ok(Place { branch: branch.parse()?, number })
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

    #[test]
    fn a_block_stands_at_its_name() {
        let root = BranchPath::default();
        for (place, shown) in [
            (root.named("plan", 0).trace(), "plan/"),
            (root.named("plan", 0).at(3), "plan/3"),
            (root.named("research-pipeline", 0).named("step", 12).fork(2, 1).at(0), "research-pipeline/step@12/2.1/0"),
            (root.named("3.1", 0).named("a/b@c%", 1).trace(), "3%2E1/a%2Fb%40c%25@1/"),
            (root.named("größer", 2).trace(), "größer@2/"),
        ] {
            let mut key = Vec::new();
            place.branch.write(&mut key);
            key.extend_from_slice(&place.number.to_be_bytes());
            assert_eq!(Place::read(&key), Some(place.clone()));
            assert_eq!(place.to_string(), shown);
            assert_eq!(shown.parse(), Ok(place));
        }
        assert!(root.named("a", 0).named("b", 1).is_within(&root.named("a", 0)));
        assert!(!root.named("ab", 0).is_within(&root.named("a", 0)), "a name is no prefix of another");
        assert!("/".parse::<Place>().is_err() && "a%/".parse::<Place>().is_err() && "a@x/".parse::<Place>().is_err());
    }
}
