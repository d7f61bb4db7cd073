//! Compares the table with a model, and checks the table's memory at many sizes.

use std::collections::HashMap;

use kvevents_index::memory::table::{Table, TableHash};
use proptest::collection::vec;
use proptest::prelude::*;

fn mix(record: u32) -> u64 {
    let mut x = u64::from(record).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Kinds of hashes that records can have: uniform, equal, with a long common prefix, with a common end.
fn hash_of(record: u32) -> u64 {
    match record >> 28 {
        0 => mix(record),
        1 => mix(record % 3),
        2 => mix(record) >> 20,
        3 => mix(record) << 50,
        4 => 0,
        _ => u64::MAX - (u64::from(record) & 0xFF),
    }
}

fn sorted(records: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut records: Vec<u32> = records.collect();
    records.sort_unstable();
    records
}

fn contains(table: &Table, record: u32) -> bool {
    table.find(hash_of(record), |found| found == record) == Some(record)
}

/// A number of insertions of records of one kind; a negative number means removals.
#[derive(Clone, Debug)]
struct Run {
    kind: u32,
    first: u32,
    records: u32,
    insert: bool,
}

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let records = prop_oneof![4 => 0..40_u32, 2 => 0..600_u32, 1 => 0..3000_u32];
    let run = (
        prop_oneof![4 => Just(0_u32), 1 => 1..6_u32],
        0..3000_u32,
        records,
        proptest::bool::weighted(0.6),
    );
    vec(
        run.prop_map(|(kind, first, records, insert)| Run {
            kind,
            first,
            records,
            insert,
        }),
        1..30,
    )
}

fn apply(table: &mut Table, model: &mut HashMap<u32, usize>, run: &Run) {
    for record in (run.first..run.first + run.records).map(|record| record | run.kind << 28) {
        let count = model.entry(record).or_default();
        assert_eq!(contains(table, record), *count > 0);
        if run.insert {
            table.insert(hash_of(record), record, &hash_of);
            *count += 1;
        } else {
            assert_eq!(table.remove(hash_of(record), record, &hash_of), *count > 0);
            *count = count.saturating_sub(1);
        }
    }
}

fn all(model: &HashMap<u32, usize>) -> Vec<u32> {
    sorted(model.iter().flat_map(|(&record, &count)| std::iter::repeat_n(record, count)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_model(runs in runs()) {
        let mut model = HashMap::new();
        let mut table = if runs.len() % 2 == 0 { Table::new() } else { Table::dense() };
        for run in &runs {
            apply(&mut table, &mut model, run);
            prop_assert_eq!(table.len(), model.values().sum::<usize>());
        }
        let expected = all(&model);
        prop_assert_eq!(&sorted(table.iter()), &expected);
        for &record in &expected {
            prop_assert!(contains(&table, record));
            prop_assert!(table.remove(hash_of(record), record, &hash_of));
        }
        prop_assert!(table.is_empty());
        prop_assert_eq!(table.bytes(), 0);
    }

    /// A saved position finds the same record as a new search, even if entries were added, removed or moved after it was saved.
    #[test]
    fn seats_serve_until_something_moves(runs in runs()) {
        let mut model = HashMap::new();
        let mut table = if runs.len() % 2 == 0 { Table::new() } else { Table::dense() };
        let records = (0..6_u32).flat_map(|kind| (0..3000).step_by(29).map(move |record| record | kind << 28));
        let pair: Vec<TableHash> = records.map(|record| hash_of(record).into()).collect();
        for run in &runs {
            let before: Vec<_> = pair.iter().map(|&mixed| table.prefetch_position(mixed)).collect();
            if run.first % 8 == 0 {
                table.clear();
                model.clear();
            }
            apply(&mut table, &mut model, run);
            for (&mixed, &position) in pair.iter().zip(&before) {
                let (mut found, mut expected) = (Vec::new(), Vec::new());
                table.for_each_match_at(table.current_position(position, mixed), |record| { found.push(record); true });
                table.for_each_match(mixed, |record| { expected.push(record); true });
                prop_assert_eq!(found, expected);
            }
        }
    }
}

/// The table grows from ten thousand to a million entries in steps of a tenth, and then shrinks to no entries.
fn load_is_bounded(mut table: Table, most: f64) {
    let (mut size, mut worst) = (10_000_u32, 0.0_f64);
    while size < 1_100_000 {
        for record in table.len() as u32..size {
            table.insert(hash_of(record), record, &hash_of);
        }
        worst = worst.max(table.bytes() as f64 / f64::from(size));
        size += size / 10;
    }
    assert!(worst < most, "{worst} bytes an entry while growing");
    for record in (0..table.len() as u32).rev() {
        assert!(table.remove(hash_of(record), record, &hash_of));
        if record > 10_000 && record % (record / 10) == 0 {
            worst = worst.max(table.bytes() as f64 / f64::from(record));
        }
    }
    assert!(worst < 22.0, "{worst} bytes an entry while shrinking");
    assert_eq!(table.bytes(), 0);
}

#[test]
fn the_load_is_bounded_at_any_size() {
    load_is_bounded(Table::new(), 11.5);
}

#[test]
fn a_dense_table_is_denser() {
    load_is_bounded(Table::dense(), 9.5);
}

#[test]
fn tiny_tables_are_tiny() {
    let mut table = Table::new();
    for record in 0..300 {
        table.insert(hash_of(record), record, &hash_of);
        assert!(
            table.bytes() <= 300 + 16 * table.len(),
            "{} bytes for {}",
            table.bytes(),
            table.len()
        );
    }
}

/// Entries with equal hashes form a list. A list of 20,000 entries must not enlarge the directory.
#[test]
fn equal_hashes_stay_in_one_segment() {
    let either = |record: u32| if record >> 31 == 1 { mix(record << 1 >> 1) } else { 7 };
    let mut table = Table::new();
    for record in 0..20_000 {
        table.insert(7, record, &either);
        table.insert(mix(record), record | 1 << 31, &either);
    }
    assert!(table.bytes() < 12 * table.len(), "{}", table.bytes());
    assert!(
        (0..20_000)
            .step_by(97)
            .all(|record| table.find(7, |found| found == record).is_some())
    );
    for record in 0..20_000 {
        assert!(table.remove(7, record, &either) && table.remove(mix(record), record | 1 << 31, &either));
    }
    assert_eq!(table.bytes(), 0);
}

#[test]
fn cleared_is_as_new() {
    let mut table = Table::new();
    (0..5000).for_each(|record| table.insert(hash_of(record), record, &hash_of));
    table.clear();
    assert_eq!((table.len(), table.bytes(), table.iter().count()), (0, 0, 0));
    table.insert(1, 1, &hash_of);
    assert_eq!(table.find(1, |_| true), Some(1));
}

#[test]
fn crosses_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Table>();
}
