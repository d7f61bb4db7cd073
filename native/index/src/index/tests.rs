//! What threads do to each other, and what a panic does to an index.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::scan::Limits as ScanLimits;
use crate::scan::tests::cases::{batch, map, text};

fn index() -> Index {
    Index::new(Schema::new(ScanLimits::default()).unwrap(), Limits::default())
}

/// A batch with one block of two tokens, or its removal.
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

fn tokens_of(index: &Index, tokens: &[u32]) -> Vec<u32> {
    let found = index.matched(tokens, &Scope::default());
    found.hits.iter().map(|hit| hit.tokens[0]).collect()
}

#[test]
fn a_batch_is_applied_at_once_or_not_at_all() {
    let (index, stored) = (index(), payload("BlockStored"));
    assert_eq!(index.try_batch("a", 0, 0, 0, &stored), None, "the stream has not begun");
    assert_eq!(index.batch("a", 0, 0, 0, &stored), Outcome::Applied(false));
    assert_eq!(
        index.try_batch("a", 0, 0, 1, &payload("BlockRemoved")),
        Some(Outcome::Applied(false))
    );
    assert_eq!(index.try_batch("a", 0, 0, 1, &stored), Some(Outcome::Duplicate));
    assert_eq!(index.try_batch("a", 0, 0, 2, &stored), Some(Outcome::Applied(false)));
    assert_eq!(index.try_batch("a", 0, 1, 3, &stored), None, "a new life has all to forget");
    assert_eq!(index.try_batch("a", 0, 0, 3, b"\xC1"), Some(Outcome::Unread));
    assert_eq!(index.try_batch("a", 0, 0, 3, &batch(&[map("AllBlocksCleared", &[])])), None);
    let reader = index.gate.read();
    assert_eq!(index.try_batch("a", 0, 0, 3, &stored), None);
    drop(reader);
    let writer = index.gate.write();
    assert!(index.try_matched(&[1, 2], &Scope::default()).is_none());
    drop(writer);
    let found = index.try_matched(&[1, 2], &Scope::default()).unwrap();
    assert_eq!(found.worker(&found.hits[0]).source, "a");
}

#[test]
fn nobody_waits_for_a_stream_that_is_busy_while_its_worker_is_removed() {
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
            let outcomes = [index.batch("other", 0, 0, 0, stored), index.batch("busy", 0, 0, 1, stored)];
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
    assert_eq!(index.batch("busy", 0, 0, 2, &stored), Outcome::Void);
    assert_eq!(index.batch("busy", 0, 1, 0, &stored), Outcome::Applied(false));
}

#[test]
fn a_panic_is_told_until_a_snapshot_is_restored() {
    let (index, stored) = (index(), payload("BlockStored"));
    index.batch("a", 0, 0, 0, &stored);
    let saved = index.save(Vec::new(), None).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut writer = index.gate.write();
        writer.records.remove(0);
        panic!("as a test");
    }));
    assert!(panicked.is_err() && index.is_damaged());
    assert_eq!(index.batch("a", 0, 0, 1, &stored), Outcome::Damaged);
    assert_eq!(index.try_batch("a", 0, 0, 1, &stored), Some(Outcome::Damaged));
    assert_eq!(index.batch("new", 0, 0, 1, &stored), Outcome::Damaged);
    crate::snapshot::restore(&index, &saved[..]).unwrap();
    assert!(!index.is_damaged());
    assert_eq!(
        (index.batch("a", 0, 0, 1, &stored), tokens_of(&index, &[1, 2])),
        (Outcome::Applied(false), vec![2])
    );
}
