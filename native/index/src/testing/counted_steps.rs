//! Compares numbers of steps with models, so that each step is counted, and each limit is where it should be.

use proptest::prelude::*;

use super::bounded_time::{FairCase, batch_of, by_hashes, group, hashes, hostile_media, index, walked};
use crate::groups::Method;
use crate::lookup::Scope;
use crate::prefix_index::PrefixIndex;
use crate::step_counter::{self, Steps};
use crate::sync::yielding_lock::WORK_PER_HOLD;

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).collect()
}

fn near(steps: usize, model: usize, what: &str) {
    assert!(
        steps.abs_diff(model) <= 12,
        "{steps} steps instead of about {model} for {what}"
    );
}

/// Steps of one batch of a stream.
fn steps_of(index: &PrefixIndex, seq: i64, events: &[Vec<u8>]) -> Steps {
    step_counter::taken();
    index.batch("bad", 0, 0, seq, &batch_of(events));
    step_counter::taken()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// One of two hybrid streams holds every second block of a window, so that holders change with every block.
    #[test]
    fn reads_and_searches_of_hybrid_streams(blocks in 100_u32..3_000) {
        let index = index();
        let full = || group(0, "full_attention", 0, 1, 0..blocks, blocks);
        index.batch("a", 0, 0, 0, &batch_of(&[full(), group(1, "sliding_window", 9, 1, 0..blocks, 0)]));
        index.batch("b", 0, 0, 0, &batch_of(&[full(), group(1, "sliding_window", 9, 1, (0..blocks).step_by(2), 0)]));
        let (found, blocks) = (walked(&index, &prompt(blocks), false), blocks as usize);
        // The holders of each block are compared with those of the block before, and changes are stored; the changes are examined once to
        // find streams that are alike, and once for each of the two searches.
        near(found.reads, 2 * blocks + blocks / 8, "reads");
        // On the first and on the last level, the search for the second stream looks at each block of full attention, at each block of the
        // window, and once more at those blocks at which a hit might end.
        near(found.searches, 2 * (blocks / 8) + 2 * (2 * blocks + blocks / 2), "searches");
    }

    /// A stream with two blocks of each key: each might not be the block of the prompt.
    #[test]
    fn reads_of_doubtful_streams(blocks in 100_u32..3_000) {
        let index = index();
        let case = FairCase { tokens: blocks, is_hybrid: false };
        index.batch("a", 0, 0, 0, &batch_of(&[case.store(0, blocks, 1), case.store(blocks, blocks, 1)]));
        let (found, blocks) = (walked(&index, &prompt(blocks), false), blocks as usize);
        // Two records of each block are merged, in two steps each; the holders are read for bitmaps and for changes; the rows and twins are
        // examined; and two records of each of the first doubtful blocks are read.
        near(found.reads, 4 * blocks + 2 * blocks + (3 * blocks).div_ceil(8) + 2 * 65, "reads");
    }
}

/// A hybrid stream whose windows might have lost some blocks. The last block has a doubt only if `is_last_doubtful`.
fn is_certain_with_doubts(windows: u8, doubtful: u32, is_last_doubtful: bool) -> bool {
    const TOKENS: u32 = 200;
    let index = index();
    let mut events = vec![group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS)];
    for at in 1..=windows {
        let last = (is_last_doubtful && at == windows).then_some(TOKENS - 1);
        let places: Vec<u32> = (0..doubtful).chain(last).collect();
        let again = || places.clone().into_iter();
        events.push(group(at, "sliding_window", 9, 1, 0..TOKENS, 0));
        events.push(group(at, "sliding_window", 9, 1, again(), 0));
        let gone = [hashes(again()), vec![0xC0, at]].concat();
        events.push([b"\x94\xACBlockRemoved".to_vec(), gone].concat());
    }
    index.batch("a", 0, 0, 0, &batch_of(&events));
    let found = index.match_prompt(&prompt(TOKENS), &Scope::default());
    assert_eq!(found.hits[0].tokens[0], TOKENS);
    found.is_certain(&found.hits[0])
}

/// Doubts about 64 blocks are examined, on however many placements they are.
#[test]
fn blocks_with_doubts_are_limited() {
    for windows in [1, 6] {
        for (doubtful, is_certain) in [(0, true), (33, true), (64, true), (65, false)] {
            assert_eq!(
                is_certain_with_doubts(windows, doubtful, false),
                is_certain,
                "{windows} {doubtful}"
            );
        }
        assert!(!is_certain_with_doubts(windows, 60, true));
    }
}

/// If not even the holders of the first block can be read, all streams might hold the prompt.
#[test]
fn streams_whose_first_block_is_not_read() {
    let case = FairCase {
        tokens: 20,
        is_hybrid: false,
    };
    let index = hostile_media(&case, 16);
    index.batch("good", 0, 0, 0, &batch_of(&[case.store(0, 10, 1)]));
    let found = index.match_prompt(&prompt(case.tokens), &Scope::default());
    assert_eq!(found.hits.len(), 65);
    for hit in &found.hits {
        let is_good = found.worker(hit).source == "good";
        assert_eq!(hit.tokens[0], if is_good { 10 } else { case.tokens });
        assert_eq!(found.certain(hit)[0], if is_good { 10 } else { 0 });
    }
}

/// If not even the holders of the first block can be read, in none of many block sizes, all streams might hold the prompt.
#[test]
fn streams_whose_first_block_is_not_read_in_many_sizes() {
    let case = FairCase {
        tokens: 240,
        is_hybrid: false,
    };
    let index = hostile_media(&case, 1);
    for rank in 0..64 {
        let first = |medium: u32| FairCase::copies(0..1, &format!("{rank}-{medium}"));
        index.batch(
            &format!("bad-{rank}"),
            0,
            0,
            1,
            &batch_of(&(0..60).map(first).collect::<Vec<_>>()),
        );
    }
    for rank in 0..8_u32 {
        let sizes = 2 + 15 * rank..17 + 15 * rank;
        let stores: Vec<_> = sizes
            .map(|size| case.store(1_000 * size, case.tokens / size * size, size))
            .collect();
        index.batch("sizes", rank.into(), 0, 0, &batch_of(&stores));
    }
    let found = index.match_prompt(&prompt(case.tokens), &Scope::default());
    let of_media = found.hits.iter().filter(|hit| found.worker(hit).source != "sizes");
    let tokens: Vec<_> = of_media.map(|hit| (hit.tokens[0], found.certain(hit)[0])).collect();
    assert_eq!(tokens.len(), 64);
    assert!(
        tokens
            .iter()
            .all(|&(most, certain)| most == case.tokens && [0, most].contains(&certain))
    );
    assert!(tokens.iter().any(|&(_, certain)| certain == 0));
}

/// A stream begins to hold, and ceases to hold, a block on a medium at each position.
#[test]
fn holders_that_are_read_again() {
    const BLOCKS: usize = 1_000;
    let index = index();
    let case = FairCase {
        tokens: BLOCKS as u32,
        is_hybrid: false,
    };
    let copies = FairCase::copies((0..case.tokens).step_by(2), "cpu");
    index.batch("a", 0, 0, 0, &batch_of(&[case.store(0, case.tokens, 1)]));
    index.batch("b", 0, 0, 0, &batch_of(&[case.store(0, case.tokens, 1), copies]));
    let [once, again] = [false, true].map(|is_again| walked(&index, &prompt(case.tokens), is_again));
    // Each further read of a block restricts its holders to those that are meant, and reads them.
    near(again.reads - once.reads, 2 * BLOCKS, "further reads");
}

/// A stream that begins to need hashes publishes all of its copies, some at a time.
#[test]
fn a_stream_that_begins_to_need_hashes() {
    const BLOCKS: u32 = 3_000;
    let index = index();
    let waiting = |first: u32| {
        let fields = [hashes(first..first + BLOCKS), b"\xC0\x90\x00\xC0".to_vec(), b"\xC0".to_vec()];
        [b"\x97\xABBlockStored".to_vec(), fields.concat()].concat()
    };
    index.batch(
        "bad",
        0,
        0,
        0,
        &batch_of(&[group(0, "full_attention", 0, 2, 0..BLOCKS, 2 * BLOCKS)]),
    );
    let plain = steps_of(&index, 1, &[group(1, "other", 0, 1, 0..1, 0)]).taken;
    index.batch("bad", 0, 0, 2, &batch_of(&[waiting(BLOCKS), waiting(2 * BLOCKS)]));
    let Steps { taken, longest, .. } = steps_of(&index, 3, &[group(1, "mamba", 0, 5, 0..1, 0)]);
    let lookup = index.stream("bad", 0).unwrap().lock().groups.method();
    assert_eq!(lookup, Method::Hashes);
    // Each copy of a block is noted and published; each waiting copy is visited and published.
    let model = 2 * BLOCKS as usize + 4 * BLOCKS as usize + plain;
    assert!(taken.abs_diff(model) <= 100, "{taken} steps instead of {model}");
    assert!(
        longest <= 2 * BLOCKS as usize + 4 * WORK_PER_HOLD,
        "others wait for {longest} steps"
    );
}

/// Copies that one batch changes several times are published once, some at a time.
#[test]
fn copies_that_a_batch_changes() {
    const COPIES: u32 = 5_000;
    let changed = |times: usize| {
        let index = index();
        by_hashes(&index);
        steps_of(&index, 3, &vec![group(10, "sliding_window", 9, 2, 0..COPIES, 0); times])
    };
    let (once, thrice) = (changed(1), changed(3));
    assert!(once.longest <= 8 * WORK_PER_HOLD, "others wait for {} steps", once.longest);
    // Each copy is published once. Each further store of a copy takes three steps, and one to note the change.
    assert!(
        (2 * COPIES as usize..=3 * COPIES as usize).contains(&once.taken),
        "{} steps",
        once.taken
    );
    let more = thrice.taken - once.taken;
    assert!(more <= 6 * COPIES as usize, "{more} more steps");
}

/// Hashes of first blocks are compared with known schemes a few times.
#[test]
fn first_blocks_that_no_scheme_explains() {
    let store = |hash: u64| {
        let fields = [
            vec![0x91, 0xCF],
            hash.to_be_bytes().to_vec(),
            vec![0xC0],
            hashes(1..17),
            vec![16, 0xC0, 0xC0, 0xC0, 0xC0, 0],
        ];
        let kind = [&[0xAE][..], b"full_attention"].concat();
        [b"\x9B\xABBlockStored".to_vec(), fields.concat(), kind].concat()
    };
    for (unknown, is_found) in [(0, true), (3, true), (4, false)] {
        let index = index();
        index.batch("bad", 0, 0, 0, &batch_of(&[group(1, "mamba", 0, 16, 0..1, 0)]));
        for at in 0..unknown {
            index.batch("bad", 0, 0, 1 + at, &batch_of(&[store(at as u64)]));
        }
        // The hash that vLLM computes with SHA-256 of the pickled block.
        index.batch("bad", 0, 0, 1 + unknown, &batch_of(&[store(1_403_909_460_543_360_175)]));
        let is_known = index.stream("bad", 0).unwrap().lock().groups.hashing.is_some();
        assert_eq!(is_known, is_found, "after {unknown} others");
    }
}

/// Searches for the streams of other sources do not examine the many changes of one source.
#[test]
fn changes_of_one_source_are_not_examined_for_all() {
    const TOKENS: u32 = 8_000;
    let index = index();
    let full = |end: u32| group(0, "full_attention", 0, 1, 0..end, end);
    let windows = (1..5).map(|at| group(at, "sliding_window", 9, 1, (u32::from(at) % 2..TOKENS).step_by(2), 0));
    index.batch(
        "bad",
        0,
        0,
        0,
        &batch_of(&[full(TOKENS)].into_iter().chain(windows).collect::<Vec<_>>()),
    );
    for end in (0..600).map(|at| TOKENS - at) {
        let events = [full(end), group(1, "sliding_window", 9, 1, end - 9..end, 0)];
        index.batch(&format!("good-{end}"), 0, 0, 0, &batch_of(&events));
    }
    step_counter::taken();
    let found = index.match_prompt(&prompt(TOKENS), &Scope::default());
    let taken = step_counter::taken().taken;
    assert!(taken < 1 << 19, "{taken} steps");
    let certain = found.hits.iter().filter(|hit| found.is_certain(hit));
    assert_eq!(certain.filter(|hit| found.worker(hit).source != "bad").count(), 600);
}
