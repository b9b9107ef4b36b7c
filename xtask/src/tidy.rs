//! Style rules that are worth a check: lengths of lines, functions and files, the header of a file, words for
//! unfinished work, the order of the layers in the library, and names of types that stand for two things.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const LINE: usize = 120;
const FUNCTION: usize = 72;
const FILE: usize = 600;

/// The folders of the library, lowest first. Each uses only those before it.
const LAYERS: [&str; 10] = ["json", "lane", "entity", "state", "node", "lock", "workflow", "claim", "flow", "testing"];
const LIBRARY: &str = "crates/latchwork/src/";

/// The sources in which each name of a type is defined once.
const ONE_NAME: [&str; 2] = [LIBRARY, "crates/store/src/"];
/// Names that several modules may define.
const SHARED: [&str; 1] = ["Result"];

pub(crate) fn check(root: &Path) -> Result<()> {
    let mut files = Vec::new();
    for folder in ["benches/peers/src", "crates", "xtask"] {
        rust_files(&root.join(folder), &mut files)?;
    }
    files.sort();
    let (mut found, mut types) = (Vec::new(), BTreeMap::new());
    for path in &files {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        let complaints = complaints(&text).into_iter().chain(wrong_ways(&name, &text));
        let complaints = complaints.chain(second_types(&name, &text, &mut types));
        found.extend(complaints.map(|(line, what)| format!("{name}:{line}: {what}")));
    }
    if found.is_empty() {
        println!("── tidy: {} files", files.len());
        return Ok(());
    }
    bail!("not tidy:\n{}", found.join("\n"))
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn complaints(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    if !lines.first().is_some_and(|line| line.starts_with("//!")) {
        found.push((1, "a file opens with what it is for, after //!".to_string()));
    }
    // Examples make a file longer, and no harder to read.
    let length = lines.iter().filter(|line| !line.trim_start().starts_with("///")).count();
    if length > FILE {
        found.push((lines.len(), format!("{length} lines without documentation; a file has at most {FILE}")));
    }
    for (index, line) in lines.iter().enumerate() {
        let length = line.chars().count();
        if length > LINE {
            found.push((index + 1, format!("{length} characters; a line has at most {LINE}")));
        }
        // Split, so that this line does not match itself.
        for word in [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("todo", "!("), concat!("unimplemented", "!(")] {
            if line.contains(word) {
                found.push((index + 1, format!("{word} stands for unfinished work")));
            }
        }
        if let Some(length) = function_length(&lines[index..])
            && length > FUNCTION
        {
            found.push((index + 1, format!("{length} lines; a function has at most {FUNCTION}")));
        }
    }
    found
}

/// Uses of a layer in one below it.
fn wrong_ways(name: &str, text: &str) -> Vec<(usize, String)> {
    let rank = |layer: &str| LAYERS.iter().position(|other| *other == layer);
    let Some(path) = name.strip_prefix(LIBRARY) else { return Vec::new() };
    // A file beside the folders serves all of them, except for the root.
    let own = match path.split_once('/') {
        Some((folder, _)) => rank(folder),
        None if path == "lib.rs" => return Vec::new(),
        None => None,
    };
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
        for used in line.split("crate::").skip(1) {
            let layer =
                used.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or_default();
            if rank(layer).is_some_and(|used| own.is_none_or(|own| used > own)) {
                found.push((index + 1, format!("crate::{layer} is a layer above this file")));
            }
        }
    }
    found
}

/// Types whose name another type of the same crate has. `known` holds the first place of each name, by crate.
fn second_types(name: &str, text: &str, known: &mut BTreeMap<(&'static str, String), String>) -> Vec<(usize, String)> {
    let Some(folder) = ONE_NAME.into_iter().find(|folder| name.starts_with(folder)) else { return Vec::new() };
    // A file `no_rows.rs` stands in for `rows.rs` if a feature is off, with the same names.
    let stands_in = name.rsplit('/').next().is_some_and(|file| file.starts_with("no_"));
    if name.ends_with("_tests.rs") || stands_in {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        if line == "#[cfg(test)]" && lines.peek().is_some_and(|(_, next)| next.starts_with("mod tests")) {
            break;
        }
        let Some(defined) = defined_type(line).filter(|defined| !SHARED.contains(defined)) else { continue };
        match known.entry((folder, defined.into())) {
            Entry::Vacant(first) => {
                first.insert(format!("{name}:{}", index + 1));
            }
            Entry::Occupied(first) => {
                found.push((index + 1, format!("{defined} is also the name of the type at {}", first.get())));
            }
        }
    }
    found
}

/// The name of the type that a line without indentation defines.
fn defined_type(line: &str) -> Option<&str> {
    let mut words = line.split(' ');
    let mut word = words.next()?;
    if word.starts_with("pub") {
        word = words.find(|word| !word.ends_with(')'))?;
    }
    if !["struct", "enum", "trait", "type", "union"].contains(&word) {
        return None;
    }
    words.next()?.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
}

/// The number of lines of the function that starts here, by the indentation that rustfmt gives its last line.
fn function_length(lines: &[&str]) -> Option<usize> {
    let first = lines.first()?;
    let indent = first.len() - first.trim_start().len();
    let words: Vec<&str> = first.split_whitespace().collect();
    let name = words.iter().position(|word| *word == "fn")?;
    let qualifiers = ["const", "async", "unsafe", "extern"];
    let is_item =
        words[..name].iter().all(|word| word.starts_with("pub") || word.contains(')') || qualifiers.contains(word));
    if !is_item || first.trim_end().ends_with(['}', ';']) {
        return None;
    }
    let end = format!("{}}}", " ".repeat(indent));
    lines.iter().position(|line| *line == end).map(|end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_uses_only_those_before_it() {
        let lines = |name: &str, text: &str| -> Vec<usize> {
            wrong_ways(&format!("{LIBRARY}{name}"), text).into_iter().map(|(line, _)| line).collect()
        };
        let text = "use crate::lane::Part;\n// crate::workflow is told of here\nuse crate::workflow::Ctx;\n";
        assert_eq!(lines("lock/table.rs", text), [3]);
        assert!(lines("workflow/ctx.rs", text).is_empty());
        assert_eq!(lines("json/mod.rs", text), [1, 3]);
        assert_eq!(lines("record.rs", text), [1, 3], "what serves all layers uses none");
        assert!(lines("lib.rs", text).is_empty());
        assert!(wrong_ways("crates/cli/src/main.rs", text).is_empty());
    }

    #[test]
    fn a_name_stands_for_one_type_of_a_crate() {
        let mut known = BTreeMap::new();
        let mut found = |name: &str, text: &str| -> Vec<usize> {
            second_types(name, text, &mut known).into_iter().map(|(line, _)| line).collect()
        };
        let first = "pub(in crate::a) struct Job<T>(T);\ntype Result = ();\nstruct Done;\n    type Known = ();\n";
        assert!(found("crates/latchwork/src/a.rs", first).is_empty());
        let second = "type Result = ();\npub enum Known {\n}\npub(crate) trait Job {}\nstruct Done {\n}\n";
        assert_eq!(found("crates/latchwork/src/b.rs", second), [4, 5]);
        assert!(found("crates/store/src/b.rs", second).is_empty(), "another crate");
        assert!(found("crates/latchwork/src/b_tests.rs", second).is_empty());
        assert!(found("crates/latchwork/src/c.rs", "#[cfg(test)]\nmod tests {\n}\nstruct Job;\n").is_empty());
        assert!(found("crates/cli/src/list.rs", second).is_empty());
        assert_eq!(found("crates/latchwork/src/d.rs", "#[cfg(test)]\nmod arbitrary;\nstruct Job;\n"), [3]);
    }

    #[test]
    fn complaints_name_what_is_too_long() {
        let body = "    work();\n".repeat(80);
        let text = format!("//! A file.\n\npub(crate) async fn long() {{\n{body}}}\n\nfn short() {{}}\n");
        let lines: Vec<usize> = complaints(&text).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [3]);
        assert_eq!(complaints("fn main() {}\n").len(), 1, "a file without a header");
        assert_eq!(complaints(&format!("//! {}\n", "x".repeat(120))).len(), 1);
    }
}
