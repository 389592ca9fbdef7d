//! What a measurement is worth: medians over interleaved rounds, and the conditions they were taken
//! under.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The value in the middle.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Lines of comma-separated values, below what one has to know about them.
#[derive(Debug)]
pub struct Data {
    name: &'static str,
    text: String,
}

impl Data {
    /// To be kept under this name.
    #[must_use]
    pub fn new(name: &'static str, folders: &[&Path], columns: &str) -> Self {
        let mut text = String::new();
        let mut say =
            |name: &str, value: &str| writeln!(text, "# {name}: {}", value.trim()).unwrap();
        say("date", &first_line("date", &["-u", "+%Y-%m-%d %H:%M UTC"]));
        let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model =
            processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let count = std::thread::available_parallelism().map_or(0, usize::from);
        say("processor", &format!("{count} x {}", model.trim_start_matches([' ', '\t', ':'])));
        say("system", &first_line("uname", &["-sr"]));
        for folder in folders {
            let kind = first_line("stat", &["-f", "-c", "%T", &folder.display().to_string()]);
            say("file system", &format!("{} is {kind}", folder.display()));
        }
        say("compiler", &first_line("rustc", &["--version"]));
        say("versions", &format!("redb {}, SQLite {}", version_of("redb"), rusqlite::version()));
        say("load at the beginning", &load());
        writeln!(text, "{columns}").unwrap();
        println!("{text}");
        Self { name, text }
    }

    /// Adds a line, and shows it.
    pub fn push(&mut self, line: &str) {
        println!("{line}");
        writeln!(self.text, "{line}").unwrap();
    }

    /// Writes it to `benches/data`.
    pub fn keep(mut self) {
        writeln!(self.text, "# load at the end: {}", load().trim()).unwrap();
        let path = root().join("benches/data").join(self.name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, self.text).unwrap();
        println!("written to {}", path.display());
    }
}

/// The lines that were kept under a name, without what stands above them.
#[must_use]
pub fn kept(name: &str) -> Vec<Vec<String>> {
    let text = fs::read_to_string(root().join("benches/data").join(name)).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| line.split(',').map(str::to_string).collect()).collect()
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default()
}

fn version_of(package: &str) -> String {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap_or_default();
    let after = lock
        .split_once(&format!("name = \"{package}\"\nversion = \""))
        .map_or("", |(_, after)| after);
    after.split('"').next().unwrap_or_default().to_string()
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(
        |_| "unknown".to_string(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_string(),
    )
}
