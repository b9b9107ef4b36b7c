//! Words that hide the subject of a sentence, and are not used in sources and documents: `cargo xtask tidy --words`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Whether `cargo xtask test` checks words.
pub(crate) const IS_ON: bool = true;

/// Words, and words in a row, in lower case. Halves are joined so that this file is not found by itself.
const WORDS: [&str; 7] = [
    concat!("who", "ever"),
    concat!("some", "body"),
    concat!("no", "body"),
    concat!("every", "body"),
    concat!("any", "body"),
    concat!("such as ", "are"),
    concat!("the one that no", "body"),
];

/// Uses that stay, as the file and a part of the line: names that others have given, for example.
const ALLOWED: [(&str, &str); 0] = [];

/// Where there are sources and documents of this project.
const FOLDERS: [&str; 4] = ["benches/peers/src", "crates", "docs", "xtask"];
const FILES: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"];

/// Prints how often the words are used in each file, the most first, and each use.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut files: Vec<PathBuf> = FILES.iter().map(|file| root.join(file)).collect();
    for folder in FOLDERS {
        texts(&root.join(folder), &mut files)?;
    }
    let (mut all, mut counts, mut sum) = (Vec::new(), Vec::new(), 0);
    for path in &files {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        let found = uses(&name, &text);
        if !found.is_empty() {
            sum += found.len();
            counts.push((found.len(), name.clone()));
            all.extend(found.into_iter().map(|(line, word)| format!("{name}:{line}: {word}")));
        }
    }
    if sum == 0 {
        println!("── words: {} files", files.len());
        return Ok(());
    }
    counts.sort_by(|a, b| b.cmp(a));
    all.iter().for_each(|found| println!("{found}"));
    counts.iter().for_each(|(count, name)| println!("{count:5} {name}"));
    bail!("{sum} words in {} files hide the subject of their sentence; STYLE tells what to write", counts.len())
}

fn texts(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            texts(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "md") {
            files.push(path);
        }
    }
    files.sort();
    Ok(())
}

/// The uses in a text: lines and words. A name in the code is read as its words: `a_word_of_a_name`.
fn uses(name: &str, text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if ALLOWED.iter().any(|(file, part)| *file == name && line.contains(part)) {
            continue;
        }
        let is_letter = |letter: char| letter.is_alphanumeric();
        let plain: Vec<String> = line.split(|letter| !is_letter(letter)).map(str::to_lowercase).collect();
        let plain = format!(" {} ", plain.join(" "));
        // Between two uses side by side there is one space.
        let count = |word: &str| plain.replace(' ', "  ").matches(&format!(" {} ", word.replace(' ', "  "))).count();
        for word in WORDS {
            found.extend(std::iter::repeat_n((index + 1, word), count(word)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_found_in_sentences_and_names() {
        let line = |text: &str| uses("a.rs", text).len();
        let word = WORDS[0];
        assert_eq!(line(&format!("/// {word} comes, {} goes.", word.to_uppercase())), 2);
        assert_eq!(line(&format!("{word} {word}")), 2);
        assert_eq!(line(&format!("fn {word}_comes_first() {{")), 1);
        assert_eq!(line(&format!("{word}s and un{word}")), 0);
        assert_eq!(line("Such  as   are, in a row"), 0, "one space");
        assert_eq!(line(&format!("// those {} here", WORDS[5])), 1);
        assert_eq!(line("The caller waits for its turn."), 0);
    }

    #[test]
    fn words_are_in_lower_case() {
        assert!(WORDS.iter().all(|word| *word == word.to_lowercase()));
    }
}
