//! A process reads what another one writes, and only one writes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use twobox::{Dump, Fingerprint, Reader, Register, Request, Store, Table};
use twobox_redb::{RedbError, RedbOptions, RedbReader};

use crate::common::at;

const PATH: &str = "TWOBOX_REDB_TEST_PATH";
const ANSWER: &str = "answer: ";

/// The other process: it answers each line that it gets with what it sees.
#[test]
#[ignore = "it is the other process of the tests below, which start it"]
fn other_process() {
    let Ok(path) = std::env::var(PATH) else { return };
    let reader = RedbReader::open(&path).unwrap();
    let first = reader.view().unwrap();
    for line in std::io::stdin().lines() {
        let answer = match line.unwrap().as_str() {
            "count" => count(&mut reader.view().unwrap()).to_string(),
            "write" => match RedbOptions::new().shared(true).open(&path) {
                Ok(_) => "opened".to_string(),
                Err(RedbError::AlreadyOpen) => "already open".to_string(),
                Err(error) => error.to_string(),
            },
            other => panic!("{other}"),
        };
        println!("{ANSWER}{answer}");
    }
    // The view of the beginning still shows the beginning.
    let mut first = first;
    assert_eq!(count(&mut first), 1);
}

fn count(view: &mut twobox_redb::RedbView) -> usize {
    Dump::of(view).unwrap().count(Table::Requests)
}

struct Other {
    child: Child,
    asks: ChildStdin,
    answers: Receiver<String>,
}

impl Other {
    fn start(path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::other_process", "--ignored", "--nocapture"])
            .env(PATH, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, lines) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The harness may have begun the line.
                if let Some((_, answer)) = line.split_once(ANSWER) {
                    let _ = send.send(answer.to_string());
                }
            }
        });
        Self { child, asks, answers }
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.asks, "{what}").unwrap();
        self.answers.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// Ends it, and says whether all was well there.
    fn end(self) -> bool {
        let Self { mut child, asks, .. } = self;
        drop(asks);
        child.wait().unwrap().success()
    }
}

#[test]
fn another_process_reads_while_this_one_writes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.redb");
    let store = RedbOptions::new().shared(true).create(&path).unwrap();
    let register = |id: &str| {
        let request = Request::new("shop", id, Fingerprint::of([("item", id)])).unwrap();
        let _ = store.run(Register::new(&request), at(1)).unwrap();
    };
    register("req-1");
    let mut other = Other::start(&path);
    assert_eq!(other.ask("count"), "1");
    register("req-2");
    assert_eq!(other.ask("count"), "2");
    // What is not committed is not seen.
    let request = Request::new("shop", "req-3", Fingerprint::of([("item", "3")])).unwrap();
    let mut tx = store.begin().unwrap();
    let _ = twobox::Tables::run(&mut tx, Register::new(&request), at(2)).unwrap();
    assert_eq!(other.ask("count"), "2");
    twobox::Transaction::commit(tx).unwrap();
    assert_eq!(other.ask("count"), "3");
    assert_eq!(other.ask("write"), "already open");
    assert!(other.end());
}
