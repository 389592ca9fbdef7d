//! Real death: processes that are killed while they work on real files. What they were told is
//! there, nothing is there twice, the order holds (P2 to P5, P8).

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{Load, Message, Millis, Moment, Owner, Reader};
use twobox_redb::{RedbError, RedbOptions, RedbReader, RedbStore};
use twobox_reliability::seed::{Seed, long};
use twobox_reliability::shop::{self, EVENTS, Found, Mode, PATIENCE};

/// A process, and the lines that it has told.
struct Victim {
    name: String,
    child: Child,
    lines: Receiver<String>,
    told: Vec<String>,
}

impl Victim {
    fn start(
        role: &str,
        mode: &str,
        folder: &Path,
        round: u64,
        orders: std::ops::Range<usize>,
    ) -> Self {
        let arguments = [round.to_string(), orders.start.to_string(), orders.end.to_string()];
        let mut command = Command::new(env!("CARGO_BIN_EXE_victim"));
        command
            .args([role, mode])
            .arg(folder)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (line, lines) = mpsc::channel();
        thread::spawn(move || {
            out.lines().map_while(Result::ok).try_for_each(|text| line.send(text))
        });
        Self { name: format!("{role} of round {round}"), child, lines, told: Vec::new() }
    }

    /// Listens until it has told so many lines, or has ended.
    fn listen(&mut self, lines: usize) {
        while self.told.len() < lines {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.told.push(line),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("{} hangs after {:?}", self.name, self.told.last())
                }
            }
        }
    }

    /// Listens for so long, and kills it.
    fn kill_after(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            self.told.push(line);
        }
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.told.extend(self.lines.iter());
    }

    /// Lets it come to its own end, which must be a good one.
    fn finish(&mut self) {
        drop(self.child.stdin.take());
        self.listen(usize::MAX);
        assert!(
            self.child.wait().unwrap().success(),
            "{} failed after {:?}",
            self.name,
            self.told.last()
        );
    }

    fn placed(&self) -> impl Iterator<Item = String> {
        self.told.iter().filter_map(|line| line.strip_prefix("placed ")).map(ToString::to_string)
    }

    fn applied(&self) -> impl Iterator<Item = String> {
        self.told.iter().filter_map(|line| line.strip_prefix("applied ")).map(ToString::to_string)
    }
}

/// A test that fails leaves no process behind.
impl Drop for Victim {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn assert_told(told: &BTreeSet<String>, found: &Found, when: &str) {
    let missing: Vec<&String> = told.difference(&found.orders).collect();
    assert!(missing.is_empty(), "told and not there, {when}: {missing:?}");
}

/// What is in copies of the files of a shop that is dead: the files themselves are repaired by the
/// next process.
fn look_at_copies(folder: &Path) -> Found {
    let copies = folder.join("copies");
    fs::create_dir_all(&copies).unwrap();
    let open = |name: &str| {
        let (file, copy) = (folder.join(name), copies.join(name));
        if !file.exists() {
            return None;
        }
        fs::copy(&file, &copy).unwrap();
        Some(RedbStore::open(&copy).unwrap_or_else(|error| panic!("{name}: {error}")))
    };
    match (open("sender.redb"), open("receiver.redb")) {
        (Some(sender), Some(receiver)) => Found::of(&sender, &receiver).unwrap(),
        _ => Found::default(),
    }
}

#[derive(Debug, Default)]
struct Killed {
    kills: u64,
    /// Before the files were open, and after an event was applied.
    early: u64,
    relayed: u64,
    told: usize,
    unknown: usize,
    effects: usize,
}

/// Kills a shop so many times, then lets it finish.
fn kill_a_shop(rounds: u64, seed: &mut Seed, killed: &mut Killed) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut told = BTreeSet::new();
    for round in 0..rounds {
        let mut victim = Victim::start("shop", "alone", folder, round, 0..1_000);
        // Sometimes it dies at once, or while it opens its files.
        if round % 5 > 0 && seed.below(4) > 0 {
            let lines = 1 + seed.below(24);
            victim.listen(lines);
        }
        victim.kill_after(if round % 5 > 0 {
            Duration::from_micros(seed.below(8_000) as u64)
        } else {
            Duration::ZERO
        });
        killed.kills += 1;
        killed.early += u64::from(victim.told.is_empty());
        killed.relayed += u64::from(victim.applied().next().is_some());
        told.extend(victim.placed());
        let found = look_at_copies(folder);
        assert_told(&told, &found, &format!("after round {round}"));
        for id in victim.applied() {
            assert!(found.applied.contains(&id), "{id} was applied, and is not in round {round}");
        }
        killed.unknown += found.orders.len() - told.len();
        // P1, P8: what was under way is done again, whether it was committed or not; then we are
        // told of it.
        let under_way = format!("r{round}-{}", victim.placed().count());
        let store = shop::open(&folder.join("sender.redb"), Mode::Alone).unwrap();
        let repeated =
            shop::place(&store, &under_way, victim.placed().count(), Millis::new(0)).unwrap();
        assert_eq!(repeated, found.orders.contains(&under_way), "{under_way}");
        told.insert(under_way);
        assert_eq!(told, Found::sent(&mut store.view().unwrap()).unwrap().0.orders);
    }
    let mut last = Victim::start("shop", "alone", folder, rounds, 0..1);
    last.finish();
    told.extend(last.placed());
    let found = look_at_copies(folder);
    assert_eq!(found.orders, told);
    assert_eq!(
        (found.pending, found.applied.len()),
        (0, told.len() * EVENTS),
        "P3: everything is delivered at the end"
    );
    killed.told += told.len();
    killed.effects += found.applied.len();
}

/// P2 to P5, P8.
#[test]
fn a_shop_is_killed_again_and_again() {
    let started = Instant::now();
    let shops = if long() { 15 } else { 1 };
    let mut killed = Killed::default();
    for shop in 0..shops {
        kill_a_shop(20, &mut Seed::new(shop), &mut killed);
    }
    let Killed { kills, early, relayed, told, unknown, effects } = killed;
    println!(
        "real death: {kills} kills, {early} of them before the files were open, {relayed} after a delivery; {told} orders told, \
         {unknown} found that nobody was told of; {effects} effects, each once; {:.1?}",
        started.elapsed()
    );
    assert!(early > 0 && relayed > 0, "it must be killed in all of its work");
}

/// P3, P6: a process is killed while it publishes and holds the leases of all lanes. Whoever opens
/// the file next delivers everything at once: its clock stands still.
#[test]
fn f32_leases_end_with_the_process_that_held_them() {
    for mode in ["alone", "shared"] {
        let folder = tempfile::tempdir().unwrap();
        let mut victim = Victim::start("holder", mode, folder.path(), 0, 0..10);
        victim.listen(11);
        assert_eq!(victim.told.last().map(String::as_str), Some("publishing"));
        victim.child.kill().unwrap();
        victim.child.wait().unwrap();

        // A moment after the last order was placed.
        let now = Millis::new(1_790_000_000_000 + 10);
        let path = folder.path().join("sender.redb");
        let leased = |store: &RedbStore| store.view().unwrap().stats(now).unwrap().all.leased;
        let kept = RedbOptions::new().end_leases(false).open(&path).unwrap();
        assert!(leased(&kept) > 0, "nothing was leased, so nothing was tested");
        let lent = RedbStore::open(&path).map(drop);
        assert!(matches!(lent, Err(RedbError::AlreadyOpen)), "{lent:?}");
        assert!(leased(&kept) > 0, "the leases of a store that is open");
        kept.close().unwrap();

        let store = RedbStore::open(&path).unwrap();
        assert_eq!(leased(&store), 0);
        let settings = RelaySettings::new(Owner::new("the next one").unwrap());
        let mut attempts = Vec::new();
        let publisher = Counting(&mut attempts);
        let mut relay = Relay::new(&store, publisher, settings, Moment::steady(now)).unwrap();
        let counters = relay.run_until_idle(Moment::steady(now)).unwrap();
        assert_eq!(counters.confirmed, 10 * EVENTS as u64, "on a clock that stands still");
        drop(relay);
        // F4: what was started and not answered is counted.
        assert!(attempts.contains(&2), "{attempts:?}");
    }
}

/// P2, P3: a process forks. The child is refused whatever it tries, and leaves the file and its
/// locks alone, also where it drops what its parent had open.
#[cfg(unix)]
#[test]
fn f56_a_fork_is_refused_and_leaves_the_file_alone() {
    for mode in ["alone", "shared"] {
        let folder = tempfile::tempdir().unwrap();
        let mut parent = Victim::start("forks", mode, folder.path(), 0, 0..0);
        parent.listen(usize::MAX);
        let mut told = vec![
            "place: true",
            "begin is refused, true",
            "view is refused, true",
            "database is refused, true",
        ];
        told.extend((mode == "shared").then_some("reader is refused, true"));
        told.extend([
            "commit: false",
            "close is refused, true",
            "the child ends",
            "still locked: true",
            "the parent ends",
        ]);
        assert_eq!(parent.told, told, "{mode}");
        let store = RedbStore::open(folder.path().join("sender.redb")).unwrap();
        let found = Found::sent(&mut store.view().unwrap()).unwrap().0;
        assert_eq!(found.orders, ["after", "before"].map(str::to_string).into());
    }
}

/// Confirms, and keeps the attempts.
struct Counting<'a>(&'a mut Vec<u32>);

impl Publisher for Counting<'_> {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        self.0.extend(batch.iter().map(|message| message.attempt));
        batch.iter().map(|_| Published::Confirmed).collect()
    }
}

/// P2 to P5 with two senders and a relay on one file at once, in processes of their own, one of
/// which is killed: redb's `MultiWriter`.
#[test]
fn many_processes_write_one_file() {
    let started = Instant::now();
    let (rounds, orders) = if long() { (40, 25) } else { (5, 15) };
    let mut seed = Seed::new(3);
    let (mut total, mut kills) = (0, 0);
    for round in 0..rounds {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        RedbStore::create(&path).unwrap().close().unwrap();
        let start = |role, number| Victim::start(role, "many", folder.path(), number, 0..orders);
        let mut victims =
            [start("sender", 1), start("sender", 2), start("relay", 3), start("relay", 3)];
        let doomed = round % 5;
        if let Some(victim) = victims.get_mut(doomed) {
            victim.listen(1 + seed.below(5));
            victim.kill_after(Duration::from_micros(seed.below(8_000) as u64));
            kills += 1;
        }
        let mut told = BTreeSet::new();
        for (number, victim) in victims.iter_mut().enumerate() {
            if number != doomed {
                victim.finish();
            }
            told.extend(victim.placed());
        }
        let mut last = start("relay", 4);
        last.finish();
        let store = RedbStore::open(&path).unwrap();
        let found = Found::of(&store, &store).unwrap();
        assert_told(&told, &found, &format!("after round {round}"));
        assert!(
            found.orders.len() <= told.len() + 1,
            "only the order under way may be there untold"
        );
        assert_eq!(
            (found.pending, found.applied.len()),
            (0, found.orders.len() * EVENTS),
            "round {round}"
        );
        total += found.orders.len();
    }
    println!(
        "many processes on one file: {rounds} rounds of 2 senders and 2 relays, {kills} kills; {total} orders, {} effects, each once; {:.1?}",
        total * EVENTS,
        started.elapsed()
    );
}

/// A reader in another process sees whole commits only, and all that were told before it looked
/// (P2, P3).
#[test]
fn another_process_reads_meanwhile() {
    let started = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let looks = if long() { 400 } else { 40 };
    let mut victim = Victim::start("shop", "shared", folder, 0, 0..100_000);
    victim.listen(2);
    let reader = RedbReader::open(folder.join("sender.redb")).unwrap();
    let mut before = 0;
    for _look in 0..looks {
        victim.told.extend(victim.lines.try_iter());
        let told: BTreeSet<String> = victim.placed().collect();
        let (found, _, _) = Found::sent(&mut reader.view().unwrap()).unwrap();
        assert_told(&told, &found, "in the reader's view");
        assert!(found.orders.len() >= before, "a later view shows less");
        before = found.orders.len();
        // The next look is at something new.
        let lines = victim.told.len() + 1;
        victim.listen(lines);
    }
    victim.kill_after(Duration::ZERO);
    // With its writer dead, the reader keeps to the last commit that it can see.
    let (found, _, _) = Found::sent(&mut reader.view().unwrap()).unwrap();
    assert!(found.orders.len() >= before);
    drop(reader);
    // One that comes now is told that the file must be repaired by a writer.
    assert!(matches!(RedbReader::open(folder.join("sender.redb")), Err(RedbError::NeedsRepair)));
    let store = shop::open(&folder.join("sender.redb"), Mode::Alone).unwrap();
    let (found, _, _) = Found::sent(&mut store.view().unwrap()).unwrap();
    assert_told(&victim.placed().collect(), &found, "after the repair");
    println!(
        "one writes, one reads: {looks} views while {} orders were placed; {:.1?}",
        found.orders.len(),
        started.elapsed()
    );
}
