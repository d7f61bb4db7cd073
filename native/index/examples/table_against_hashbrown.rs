//! The index's table beside `hashbrown`'s, both of record numbers whose hashes are in the records: bytes and nanoseconds an entry, and
//! the longest single insert. Over one doubling, since that is the period of both: sizes between two powers of two.
//!
//! `cargo run --release --no-default-features --example table_against_hashbrown`

use std::hint::black_box;
use std::time::Instant;

use hashbrown::HashTable;
use kvevents_index::memory::table::Table;

const LEAST: usize = 1 << 21;
const SIZES: usize = 8;

/// As large as the index's, so that reading a hash costs what it costs there.
type Record = [u64; 3];

struct Figures {
    name: &'static str,
    bytes: Vec<f64>,
    insert: f64,
    longest: f64,
    hit: f64,
    miss: f64,
}

/// Fills a table and reports its memory at each of the sizes; then looks up keys that are there and keys that are not, shuffled.
fn measure<T>(
    name: &'static str,
    records: &[Record],
    mut table: T,
    insert: impl Fn(&mut T, u64, u32),
    find: impl Fn(&T, u64) -> Option<u32>,
    bytes: impl Fn(&T) -> usize,
) -> Figures {
    let (mut weights, mut longest) = (Vec::new(), 0.0_f64);
    let begun = Instant::now();
    for (at, record) in records.iter().enumerate() {
        let before = Instant::now();
        insert(&mut table, record[0], at as u32);
        longest = longest.max(before.elapsed().as_secs_f64());
        let size = at + 1;
        if size >= LEAST && size.is_multiple_of(LEAST / SIZES) {
            weights.push(bytes(&table) as f64 / size as f64);
        }
    }
    let count = records.len() as f64;
    let inserted = begun.elapsed().as_secs_f64() / count;
    let all = |mask: u64| {
        let begun = Instant::now();
        for at in 0..records.len() {
            // An odd step goes round a power of two; entries past its end are left out.
            let record = &records[at.wrapping_mul(0x9E37_79B1) & (records.len().next_power_of_two() / 2 - 1)];
            black_box(find(&table, record[0] ^ mask));
        }
        begun.elapsed().as_secs_f64() / count
    };
    Figures {
        name,
        bytes: weights,
        insert: inserted * 1e9,
        longest: longest * 1e3,
        hit: all(0) * 1e9,
        miss: all(0x5555_5555_5555_5555) * 1e9,
    }
}

fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

fn main() {
    let records: Vec<Record> = (1..=2 * LEAST as u64).map(|at| [mixed(at), at, at]).collect();
    let hash = |number: u32| records[number as usize][0];
    let ours = |name, table| {
        measure(
            name,
            &records,
            table,
            |table: &mut Table, value, number| table.insert(value, number, &hash),
            |table, value| table.find(value, |number| hash(number) == value),
            Table::bytes,
        )
    };
    let theirs = measure(
        "hashbrown::HashTable<u32>",
        &records,
        HashTable::new(),
        |table: &mut HashTable<u32>, value, number| {
            table.insert_unique(value, number, |&number| hash(number));
        },
        |table, value| table.find(value, |&number| hash(number) == value).copied(),
        HashTable::allocation_size,
    );
    for figures in [ours("Table", Table::new()), ours("Table, dense", Table::dense()), theirs] {
        let of = |pick: fn(f64, f64) -> f64| figures.bytes.iter().copied().reduce(pick).unwrap_or(0.0);
        let mean = figures.bytes.iter().sum::<f64>() / figures.bytes.len() as f64;
        println!(
            "{:26} {:5.1} bytes an entry ({:.1} to {:.1}); ns: insert {:.0}, hit {:.0}, miss {:.0}; longest insert {:.2} ms",
            figures.name,
            mean,
            of(f64::min),
            of(f64::max),
            figures.insert,
            figures.hit,
            figures.miss,
            figures.longest
        );
    }
}
