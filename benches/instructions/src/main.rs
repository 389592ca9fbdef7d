//! Counts the instructions and allocations of every transition on the memory store, and compares
//! them with `expected.txt`.
//!
//! Counts do not depend on how busy the machine is, so a change that makes a transition dearer
//! fails here, however little it is. They do depend on the compiler, so they hold for the one that
//! is pinned, and for the profile `counted`. Instructions are counted by Callgrind; the program
//! runs itself under it.
//!
//! ```text
//! cargo run --profile counted -p twobox-instructions            compares, and fails if a count is above what is expected
//! cargo run --profile counted -p twobox-instructions -- update  writes expected.txt anew, to be reviewed as a diff
//! ```

mod callgrind;
mod counted;
mod scenarios;

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use counted::Counts;

type Failed = Box<dyn Error>;

/// By how much instructions may be above what is expected: code that is next to something else is
/// compiled a little differently.
const fn margin(expected: u64) -> u64 {
    expected * 3 / 100 + 10
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // With nowhere to say it, the code says it.
            let _ = writeln!(io::stderr(), "FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failed> {
    let expected = Path::new(env!("CARGO_MANIFEST_DIR")).join("expected.txt");
    match env::args().nth(1).as_deref() {
        None => compare(&read(&fs::read_to_string(expected)?)?, &callgrind::run()?),
        Some("update") => Ok(fs::write(expected, text(&callgrind::run()?))?),
        // What runs under Callgrind.
        Some(callgrind::COUNT) => scenarios::run(),
        Some(other) => Err(format!("{other:?} is no command; say nothing, or update").into()),
    }
}

fn compare(expected: &BTreeMap<String, Counts>, found: &[(String, Counts)]) -> Result<(), Failed> {
    let mut out = io::stdout().lock();
    let mut wrong = Vec::new();
    for (name, counts) in found {
        let Some(right) = expected.get(name) else {
            wrong.push(format!("{name} is not in expected.txt"));
            continue;
        };
        writeln!(
            out,
            "{name:34} {counts}   {:+.1} %",
            100.0 * (counts.instructions as f64 / right.instructions as f64 - 1.0)
        )?;
        let most =
            Counts { instructions: right.instructions + margin(right.instructions), ..*right };
        if counts.exceeds(&most) {
            wrong.push(format!("{name:34} {counts}\n{:34} {most} are allowed", ""));
        }
    }
    let gone = expected.keys().filter(|name| !found.iter().any(|(there, _)| there == *name));
    wrong.extend(gone.map(|name| format!("{name} is in expected.txt and was not counted")));
    if wrong.is_empty() { Ok(()) } else { Err(format!("too many\n{}", wrong.join("\n")).into()) }
}

fn text(found: &[(String, Counts)]) -> String {
    let lines = found.iter().map(|(name, counts)| format!("{name:34} {counts}\n"));
    let head =
        format!("# {:32} {:>12} {:>12} {:>12}\n", "what", "instructions", "allocations", "bytes");
    [head].into_iter().chain(lines).collect()
}

fn read(text: &str) -> Result<BTreeMap<String, Counts>, Failed> {
    text.lines().filter(|line| !line.starts_with('#')).map(counted::parse).collect()
}
