//! Compares the index's table with 1,024 tables of `hashbrown` that grow one at a time. Both store record numbers; the hashes are in the
//! records. The two take turns: of insertions while they grow, then of lookups and removals. Prints the nanoseconds and bytes per entry,
//! and the longest turn. The index prefetches the memory that an insertion needs; `hashbrown` has no function for this.
//!
//! `cargo run --release --example table_against_hashbrown [ENTRIES]`

use std::hint::black_box;
use std::time::Instant;

use hashbrown::HashTable;
use kvevents_index::memory::table::{Stage, Table, TableHash};

/// A record with the size of the index's records, so that reading a hash takes the same time.
type Record = [u64; 3];

const SHARDS: usize = 1_024;
/// Number of entries that are inserted, looked up or removed in one turn.
const TURN: usize = 256;
/// Maximum number of lookups and removals.
const MOST: usize = 4_000_000;
/// Number of entries by which prefetching precedes an insertion.
const AHEAD: [(usize, Stage); 3] = [(24, Stage::Directory), (16, Stage::Segment), (8, Stage::Bucket)];

/// Total seconds of all turns, and seconds of the longest turn.
#[derive(Clone, Copy, Default)]
struct Time {
    sum: f64,
    longest: f64,
}

impl Time {
    fn add<R>(&mut self, work: impl FnOnce() -> R) {
        let begun = Instant::now();
        black_box(work());
        let seconds = begun.elapsed().as_secs_f64();
        (self.sum, self.longest) = (self.sum + seconds, self.longest.max(seconds));
    }
}

fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

fn shard(hash: u64) -> usize {
    (hash >> 40) as usize % SHARDS
}

fn main() {
    let entries = std::env::args()
        .nth(1)
        .and_then(|number| number.parse().ok())
        .unwrap_or(4_000_000);
    let records: Vec<Record> = (1..=entries as u64).map(|at| [mixed(at), at, at]).collect();
    let hash = |number: u32| records[number as usize][0];
    let (mut plain, mut ahead) = (Table::dense(), Table::dense());
    let mut theirs: Vec<HashTable<u32>> = (0..SHARDS).map(|_| HashTable::new()).collect();
    let report = |what: &str, count: usize, times: &[(&str, Time)]| {
        let cells = times.iter().map(|(name, time)| {
            let (each, longest) = (time.sum * 1e9 / count as f64, time.longest * 1e3);
            format!("{name} {each:.0} ns (longest turn {longest:.2} ms)")
        });
        println!("{what}: {}", cells.collect::<Vec<_>>().join(", "));
    };

    let mut times = [Time::default(); 3];
    for first in (0..entries).step_by(TURN) {
        let turn = first..entries.min(first + TURN);
        times[0].add(|| turn.clone().for_each(|at| plain.insert(records[at][0], at as u32, &hash)));
        times[1].add(|| {
            for at in turn.clone() {
                for (distance, stage) in AHEAD {
                    if let Some(record) = records[..turn.end].get(at + distance) {
                        ahead.prefetch(TableHash::from(record[0]), stage);
                    }
                }
                ahead.insert(records[at][0], at as u32, &hash);
            }
        });
        times[2].add(|| {
            for at in turn.clone() {
                theirs[shard(records[at][0])].insert_unique(records[at][0], at as u32, |&number| hash(number));
            }
        });
    }
    report(
        "insert",
        entries,
        &[("ours", times[0]), ("prefetched", times[1]), ("theirs", times[2])],
    );
    let bytes: usize = theirs.iter().map(HashTable::allocation_size).sum();
    let [ours, theirs_bytes] = [plain.bytes(), bytes].map(|bytes| bytes as f64 / entries as f64);
    println!("bytes an entry: ours {ours:.1}, theirs {theirs_bytes:.1}");

    let count = entries.min(MOST);
    for (what, mask) in [("hit", 0), ("miss", 0x5555_5555_5555_5555_u64)] {
        let mut times = [Time::default(); 2];
        for first in (0..count).step_by(TURN) {
            let wanted = (first..count.min(first + TURN)).map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15) % entries);
            let wanted: Vec<u64> = wanted.map(|at| records[at][0] ^ mask).collect();
            times[0].add(|| {
                wanted
                    .iter()
                    .filter_map(|&key| plain.find(key, |number| hash(number) == key))
                    .max()
            });
            let find = |&key: &u64| theirs[shard(key)].find(key, |&number| hash(number) == key);
            times[1].add(|| wanted.iter().filter_map(find).max());
        }
        report(what, count, &[("ours", times[0]), ("theirs", times[1])]);
    }
    let mut times = [Time::default(); 2];
    for first in (0..count).step_by(TURN) {
        let turn = first..count.min(first + TURN);
        times[0].add(|| {
            turn.clone()
                .filter(|&at| plain.remove(records[at][0], at as u32, &hash))
                .count()
        });
        times[1].add(|| {
            for at in turn {
                if let Ok(entry) = theirs[shard(records[at][0])].find_entry(records[at][0], |&number| number == at as u32) {
                    entry.remove();
                }
            }
        });
    }
    report("remove", count, &[("ours", times[0]), ("theirs", times[1])]);
}
