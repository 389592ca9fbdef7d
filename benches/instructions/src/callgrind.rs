//! Runs this program under Callgrind, which writes what it has counted after each call of the
//! function that is counted.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::Failed;
use crate::counted::{self, Counts};

/// The command that makes the program count.
pub(crate) const COUNT: &str = "count";

pub(crate) fn run() -> Result<Vec<(String, Counts)>, Failed> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("out");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet"]).args(counted::CALLGRIND);
    valgrind
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(env::current_exe()?)
        .arg(COUNT);
    let ran = valgrind.output().map_err(|error| format!("valgrind cannot be run: {error}"))?;
    if !ran.status.success() {
        return Err(format!("the counting failed: {}", String::from_utf8_lossy(&ran.stderr)).into());
    }
    let said = String::from_utf8(ran.stdout)?;
    let lines = said.lines().zip(1..);
    lines
        .map(|(line, part)| {
            let (name, counts) = counted::parse(line)?;
            let instructions = instructions(&out.with_extension(part.to_string()))?;
            Ok((name, Counts { instructions, ..counts }))
        })
        .collect()
}

/// The instructions of one part.
fn instructions(part: &Path) -> Result<u64, Failed> {
    let text = fs::read_to_string(part).map_err(|error| format!("{}: {error}", part.display()))?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    Ok(total.ok_or("Callgrind has written no total")?.trim().parse()?)
}
