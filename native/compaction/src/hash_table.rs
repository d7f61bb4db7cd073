//! Bounds the memory of `hashbrown` tables, which do not shrink by themselves.

use hashbrown::HashTable;

/// Capacity, in entries, up to which a table is not shrunk, to avoid frequent resizing.
const KEPT_CAPACITY: usize = 448;
/// A table is shrunk if its capacity exceeds its number of entries multiplied by this number.
const MAX_CAPACITY_PER_ENTRY: usize = 8;

/// Inserts the ID of a block that is not in the table.
#[inline]
pub fn insert(table: &mut HashTable<u32>, number: u32, place_of: impl Fn(&u32) -> u64) {
    reserve(table, &place_of);
    table.insert_unique(place_of(&number), number, &place_of);
}

/// Removes the ID of a block, if the table contains it.
#[inline]
pub fn remove(table: &mut HashTable<u32>, number: u32, place_of: impl Fn(&u32) -> u64) {
    if let Ok(found) = table.find_entry(place_of(&number), |&other| other == number) {
        found.remove();
        shrink(table, place_of);
    }
}

/// Reserves capacity for one more entry.
#[inline]
fn reserve<T>(table: &mut HashTable<T>, place_of: impl Fn(&T) -> u64) {
    if table.capacity() == table.len() {
        rebuild(table, place_of);
    }
}

/// Rebuilds a table that is full. If it is full only because of marks of removed entries, it keeps its size. `hashbrown` itself would
/// double the size.
#[cold]
fn rebuild<T>(table: &mut HashTable<T>, place_of: impl Fn(&T) -> u64) {
    let (needed, whole) = (table.len() + 1, table.num_buckets() / 8 * 7);
    let room = if needed * 4 <= whole * 3 {
        whole
    } else {
        needed.max(whole + 1)
    };
    let mut fresh = HashTable::with_capacity(room);
    for entry in table.drain() {
        fresh.insert_unique(place_of(&entry), entry, &place_of);
    }
    *table = fresh;
}

/// Releases capacity that a table does not need any more.
#[inline]
fn shrink<T>(table: &mut HashTable<T>, place_of: impl Fn(&T) -> u64) {
    let (length, whole) = (table.len(), table.num_buckets() / 8 * 7);
    if length == 0 || (whole > KEPT_CAPACITY && length * MAX_CAPACITY_PER_ENTRY < whole) {
        shrink_to(table, length, place_of);
    }
}

#[cold]
fn shrink_to<T>(table: &mut HashTable<T>, length: usize, place_of: impl Fn(&T) -> u64) {
    if length == 0 {
        *table = HashTable::new();
    } else {
        table.shrink_to(length * 2, place_of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place_of(value: &u64) -> u64 {
        let mixed = value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    }

    /// The memory of a table depends on its present number of entries. A table loses no entry, and frees all memory with the last entry.
    #[test]
    fn a_table_shrinks_with_its_entries() {
        let mut table: HashTable<u64> = HashTable::new();
        for live in [100_u64, 4_000, 70_000, 9_000, 1] {
            for value in 0..5 * live {
                reserve(&mut table, place_of);
                table.insert_unique(place_of(&value), value, place_of);
                if let Some(gone) = value.checked_sub(live) {
                    let found = table.find_entry(place_of(&gone), |&other| other == gone);
                    found.expect("it was put there").remove();
                    shrink(&mut table, place_of);
                }
                // Each slot takes an entry and a tag; the remaining bytes are for vector instructions.
                assert!(
                    table.allocation_size() <= table.len().max(KEPT_CAPACITY) * 9 * 4 + 64,
                    "{} {table:?}",
                    table.len()
                );
            }
            assert!((4 * live..5 * live).all(|value| table.find(place_of(&value), |&other| other == value).is_some()));
            for value in 4 * live..5 * live {
                let found = table.find_entry(place_of(&value), |&other| other == value);
                found.expect("it was put there").remove();
                shrink(&mut table, place_of);
                assert!(table.allocation_size() <= table.len().max(KEPT_CAPACITY) * 9 * (2 * MAX_CAPACITY_PER_ENTRY) + 64);
            }
            assert_eq!((table.len(), table.allocation_size()), (0, 0));
        }
    }

    /// Marks of removed entries do not make a table grow, however many entries were added and removed.
    #[test]
    fn removed_entries_do_not_make_a_table_grow() {
        const LIVE: u64 = 5_300;
        let mut table: HashTable<u64> = HashTable::new();
        let mut bytes = 0;
        for value in 0..300 * LIVE {
            reserve(&mut table, place_of);
            table.insert_unique(place_of(&value), value, place_of);
            let Some(gone) = value.checked_sub(LIVE) else {
                bytes = table.allocation_size();
                continue;
            };
            let found = table.find_entry(place_of(&gone), |&other| other == gone);
            found.expect("it was put there").remove();
            assert_eq!(table.allocation_size(), bytes);
        }
    }
}
