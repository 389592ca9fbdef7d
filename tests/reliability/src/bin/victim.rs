//! The process that is killed: `victim ROLE MODE FOLDER ROUND FIRST END`. It stops at the first
//! error, and says which.

use std::path::Path;

use twobox_reliability::shop::{self, Clock, Mode};

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, mode, folder, round, first, end] = &arguments[..] else {
        return Err("usage: victim ROLE MODE FOLDER ROUND FIRST END".into());
    };
    let mode = match mode.as_str() {
        "alone" => Mode::Alone,
        "shared" => Mode::Shared,
        "many" => Mode::Many,
        other => return Err(format!("no mode {other}").into()),
    };
    let (folder, number, orders) =
        (Path::new(folder), round.parse()?, first.parse()?..end.parse()?);
    match role.as_str() {
        "shop" => shop::run(folder, mode, number, orders),
        "holder" => shop::hold(folder, mode, number, orders),
        #[cfg(unix)]
        "forks" => shop::forks(folder, mode),
        "sender" => {
            let store = shop::open(&folder.join("store.redb"), mode)?;
            shop::send(&store, &format!("r{round}"), orders, &Clock::new(number), || {})
        }
        "relay" => {
            let store = shop::open(&folder.join("store.redb"), mode)?;
            shop::relay(&store, &store, &Clock::new(number), shop::until_input_ends())
        }
        other => Err(format!("no role {other}").into()),
    }
}
