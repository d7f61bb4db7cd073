//! Tests of concurrent threads, and of an index after a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::holders::holder_sets::EMPTY;
use crate::lookup::Scope;
use crate::store::records::Row;
use crate::testing::cases::{batch, map, text};
use crate::wire::scan::Limits as ScanLimits;

fn index() -> PrefixIndex {
    PrefixIndex::new(Schema::new(ScanLimits::default()).unwrap(), Limits::default())
}

/// A batch that stores or removes one block of two tokens.
fn payload(kind: &str) -> Vec<u8> {
    let stored: [(&str, &[u8]); 5] = [
        ("block_hashes", &[0x91, 0x05]),
        ("parent_block_hash", &[0xC0]),
        ("token_ids", &[0x92, 0x01, 0x02]),
        ("block_size", &[0x02]),
        ("medium", &text("GPU")),
    ];
    let fields = if kind == "BlockStored" {
        &stored[..]
    } else {
        &[stored[0], stored[4]]
    };
    batch(&[map(kind, fields)])
}

/// A MessagePack array of numbers of up to 64 bits.
fn array(numbers: impl ExactSizeIterator<Item = u64>) -> Vec<u8> {
    let mut out = vec![0xDC];
    out.extend((numbers.len() as u16).to_be_bytes());
    for number in numbers {
        out.push(0xCF);
        out.extend(number.to_be_bytes());
    }
    out
}

/// A batch that stores a chain of blocks of two tokens from the first block of a prompt.
fn store(hashes: &[u64], tokens: &[u32]) -> Vec<u8> {
    let fields: [(&str, &[u8]); 5] = [
        ("block_hashes", &array(hashes.iter().copied())),
        ("parent_block_hash", &[0xC0]),
        ("token_ids", &array(tokens.iter().map(|&token| token.into()))),
        ("block_size", &[0x02]),
        ("medium", &text("GPU")),
    ];
    batch(&[map("BlockStored", &fields)])
}

fn removal(hashes: &[u64]) -> Vec<u8> {
    let fields: [(&str, &[u8]); 2] = [("block_hashes", &array(hashes.iter().copied())), ("medium", &text("GPU"))];
    batch(&[map("BlockRemoved", &fields)])
}

fn tokens_of(index: &PrefixIndex, tokens: &[u32]) -> Vec<u32> {
    let found = index.match_prompt(tokens, &Scope::default());
    found.hits.iter().map(|hit| hit.tokens[0]).collect()
}

/// A lookup waits for a writer only while the writer changes data that the lookup reads.
#[test]
fn a_lookup_waits_only_for_writers_of_the_same_data() {
    let (index, stored) = (index(), payload("BlockStored"));
    index.batch("a", 0, 0, 0, &stored);
    let mut writer = index.shared_lock.write();
    assert_eq!(tokens_of(&index, &[1, 2]), [2]);
    let set = writer.records.set(0);
    writer.records.put_set(0, EMPTY);
    assert_eq!(tokens_of(&index, &[3, 4]), [0; 0]);
    std::thread::scope(|scope| {
        let lookup = scope.spawn(|| tokens_of(&index, &[1, 2]));
        while index.shared_lock.waiting() == 0 {
            std::thread::yield_now();
        }
        writer.records.put_set(0, set);
        drop(writer);
        assert_eq!(lookup.join().unwrap(), [2]);
    });
}

/// While chains are added and removed and slots are reused, a lookup finds the state of one moment. It never counts blocks of one chain for
/// another chain.
#[test]
fn a_lookup_finds_the_state_of_one_moment() {
    const BLOCKS: u64 = 64;
    let index = index();
    let tokens = |chain: u64| -> Vec<u32> { (0..2 * BLOCKS).map(|at| (chain * 1_000 + at) as u32).collect() };
    let hashes = |chain: u64| -> Vec<u64> { (0..BLOCKS).map(|at| chain << 16 | at).collect() };
    let stored = [1, 2].map(|chain| store(&hashes(chain), &tokens(chain)));
    let removed = [1, 2].map(|chain| removal(&hashes(chain).into_iter().rev().collect::<Vec<_>>()));
    index.batch("kept", 0, 0, 0, &stored[0]);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let turns = (0..2_000).flat_map(|_| [&stored[0], &removed[0], &stored[1], &removed[1]]);
            for (seq, payload) in turns.enumerate() {
                assert_eq!(
                    index.batch("busy", 0, 0, seq as i64, payload).outcome,
                    Outcome::Applied(false)
                );
            }
            ended.store(true, Ordering::SeqCst);
        });
        let [one, two] = [1, 2].map(tokens);
        while !ended.load(Ordering::SeqCst) {
            let found = index.match_prompt(&one, &Scope::default());
            let hit = found.hits.iter().find(|hit| found.worker(hit).source == "kept");
            assert_eq!(hit.map(|hit| hit.tokens[0]), Some(2 * BLOCKS as u32));
            let found = index.match_prompt(&two, &Scope::default());
            assert!(found.hits.iter().all(|hit| found.worker(hit).source == "busy"));
        }
    });
    assert_eq!(tokens_of(&index, &tokens(2)), [0; 0]);
}

#[test]
fn no_thread_waits_for_a_busy_stream_while_its_worker_is_removed() {
    let (index, stored) = (index(), payload("BlockStored"));
    index.batch("busy", 0, 0, 0, &stored);
    let busy = index.stream("busy", 0).unwrap();
    let locked = busy.lock();
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| index.remove("busy", None));
        while index.stream("busy", 0).is_some() {
            std::thread::yield_now();
        }
        let (sender, receiver) = mpsc::channel();
        let (index, stored) = (&index, &stored);
        scope.spawn(move || {
            let outcomes = [
                index.batch("other", 0, 0, 0, stored).outcome,
                index.batch("busy", 0, 0, 1, stored).outcome,
            ];
            sender.send((outcomes, tokens_of(index, &[1, 2]))).unwrap();
        });
        let done = receiver.recv_timeout(Duration::from_secs(60));
        drop(locked);
        assert_eq!(
            done,
            Ok(([Outcome::Applied(false), Outcome::Void], vec![2])),
            "what is being removed is not seen"
        );
        assert_eq!(remover.join().unwrap(), 1);
    });
    assert_eq!(index.batch("busy", 0, 0, 2, &stored).outcome, Outcome::Void);
    assert_eq!(index.batch("busy", 0, 1, 0, &stored).outcome, Outcome::Applied(false));
}

#[test]
fn a_panic_is_reported_until_a_snapshot_is_restored() {
    let (index, stored) = (index(), payload("BlockStored"));
    index.batch("a", 0, 0, 0, &stored);
    let saved = index.save(Vec::new(), None).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut writer = index.shared_lock.write();
        writer.records.remove(Row::single(0));
        panic!("as a test");
    }));
    assert!(panicked.is_err() && index.is_damaged());
    assert_eq!(index.batch("a", 0, 0, 1, &stored).outcome, Outcome::Damaged);
    assert_eq!(index.batch("new", 0, 0, 1, &stored).outcome, Outcome::Damaged);
    crate::snapshot::restore(&index, &saved[..]).unwrap();
    assert!(!index.is_damaged());
    assert_eq!(
        (index.batch("a", 0, 0, 1, &stored).outcome, tokens_of(&index, &[1, 2])),
        (Outcome::Applied(false), vec![2])
    );
}
