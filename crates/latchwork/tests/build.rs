//! Makes a module of each guide in docs/, from its examples in Rust, so that `guides.rs` compiles them. It knows the
//! fences and comments of Markdown, and nothing of the examples.
//!
//! The guides of docs/server/ are those of another crate, which compiles their examples itself.
//!
//! The examples of a guide are one function. Each example is a block inside the block of the example before, so it sees
//! the names of all earlier ones and may define them again. A comment that begins with `<!-- rust` holds what the
//! examples use and the guide does not show. Line N of a module is line N of its guide.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// What an example contains that is not compiled, because the workspace does not depend on its crate.
const NOT_COMPILED: &str = "tracing_subscriber::";

fn main() {
    let variable = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let (docs, out) = (variable("CARGO_MANIFEST_DIR").join("../../../docs"), variable("OUT_DIR"));
    println!("cargo::rerun-if-changed={}", docs.display());
    let mut guides = Vec::new();
    markdown_files(&docs, &mut guides);
    guides.sort();
    let mut modules = String::new();
    for guide in guides {
        let text = fs::read_to_string(&guide).expect("a guide can be read");
        let name = guide.strip_prefix(&docs).expect("it is in the folder").with_extension("");
        let name = name.display().to_string().replace(['/', '-'], "_");
        let Some(code) = code_of(&text, &guide) else { continue };
        let path = out.join(format!("{name}.md"));
        fs::write(&path, code).expect("the module can be written");
        modules += &format!("mod {} {{ include!({path:?}); }}\n", name.to_lowercase());
    }
    fs::write(out.join("guides.rs"), modules).expect("the modules can be written");
}

fn markdown_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder of the guides can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() && path.ends_with("server") {
            continue;
        }
        if path.is_dir() {
            markdown_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// What the lines of a guide are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Text,
    /// An example, or a comment for examples.
    Code,
    /// A block of another language, or an example that is not compiled.
    Other,
}

/// Returns the module of a guide; none if the guide has no example.
fn code_of(text: &str, guide: &Path) -> Option<String> {
    let mut code = String::from("async fn guide() -> Result<(), latchwork::workflow::Failure> { use crate::given;");
    let (mut part, mut depth) = (Part::Text, 0);
    let mut lines = text.lines().enumerate().peekable();
    lines.next().filter(|(_, title)| title.starts_with("# ")).expect("a guide begins with its title");
    while let Some((index, line)) = lines.next() {
        let next = lines.peek().map_or("", |(_, next)| *next);
        code.push('\n');
        part = match (part, line.trim()) {
            (Part::Text, "```rust" | "```rust,no_run") => {
                code.push('{');
                depth += 1;
                Part::Code
            }
            (Part::Text, "```rust,ignore") if !next.contains(NOT_COMPILED) => {
                panic!("{}:{}: this example would not be compiled: write ```rust", guide.display(), index + 1)
            }
            (Part::Text, "<!-- rust") => Part::Code,
            (Part::Text, fence) if fence.starts_with("```") => Part::Other,
            (Part::Code, "```") => {
                code.push(';');
                Part::Text
            }
            (Part::Code, "-->") | (Part::Other, "```") => Part::Text,
            (Part::Code, _) => {
                code.push_str(line);
                Part::Code
            }
            (part, _) => part,
        };
    }
    assert!(part == Part::Text, "{}: a block has no end", guide.display());
    code.push_str(&"}".repeat(depth));
    code.push_str(" Ok(()) }\n");
    (depth > 0).then_some(code)
}
