//! Tests of LoRAs whose names begin to mean other weights. An engine that hashes the paths of LoRAs, but announces only their names, is
//! compared with three indexes. The first applies all events, the second restores a snapshot, and the third starts from a compacted
//! history.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use kvevents_index::Scope;
use kvevents_index::keys::lora_name;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_index::wire::scan::Limits;

/// A cached block: the path of its weights, and the prompt up to the end of the block.
type CachedBlock = (u8, Vec<u8>);

/// Names of LoRAs; the empty name is for prompts without a LoRA.
const NAMES: [&str; 3] = ["one", "two", ""];
const PATHS: u8 = 3;
const SYMBOLS: u8 = 2;
const LONGEST: usize = 4;

fn schema() -> Schema {
    Schema::new(Limits::default()).expect("the limits are valid")
}

fn index() -> PrefixIndex {
    PrefixIndex::new(schema(), kvevents_index::limits::Limits::default())
}

fn text(value: &str) -> Vec<u8> {
    [&[0xA0 | value.len() as u8], value.as_bytes()].concat()
}

fn number(value: u64) -> Vec<u8> {
    [&[0xCF][..], &value.to_be_bytes()].concat()
}

fn array(items: Vec<Vec<u8>>) -> Vec<u8> {
    [vec![0xDC], (items.len() as u16).to_be_bytes().to_vec(), items.concat()].concat()
}

fn event(tag: &str, fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let fields: Vec<Vec<u8>> = fields
        .iter()
        .map(|(name, value)| [text(name), value.clone()].concat())
        .collect();
    let head = [vec![0x81 + fields.len() as u8], text("type"), text(tag)].concat();
    [vec![0x92, 0x01, 0x91], head, fields.concat()].concat()
}

/// The hash of a block, which covers the path and the first blocks of a prompt, but not the name.
fn hash_of(name: usize, path: u8, prefix: &[u8]) -> u64 {
    let path = if NAMES[name].is_empty() { 0 } else { path };
    let bytes = [&[name as u8, path][..], prefix].concat();
    lora_name(&bytes) | 1 << 40
}

fn tokens_of(prefix: &[u8]) -> Vec<u32> {
    prefix.iter().flat_map(|&symbol| [u32::from(symbol), 7]).collect()
}

fn removal(hashes: &[u64]) -> Vec<u8> {
    let hashes = array(hashes.iter().map(|&hash| number(hash)).collect());
    event("BlockRemoved", &[("block_hashes", hashes), ("medium", text("GPU"))])
}

/// A store of the blocks of a prompt from `known` on.
fn store(name: usize, path: u8, prompt: &[u8], known: usize) -> Vec<u8> {
    let hash = |length: usize| hash_of(name, path, &prompt[..length]);
    let lora = NAMES[name];
    let mut fields = vec![
        (
            "block_hashes",
            array((known + 1..=prompt.len()).map(|length| number(hash(length))).collect()),
        ),
        ("parent_block_hash", if known > 0 { number(hash(known)) } else { vec![0xC0] }),
        (
            "token_ids",
            array(
                tokens_of(&prompt[known..])
                    .into_iter()
                    .map(|token| vec![token as u8])
                    .collect(),
            ),
        ),
        ("block_size", vec![2]),
        ("medium", text("GPU")),
    ];
    if !lora.is_empty() {
        fields.push(("lora_name", text(lora)));
    }
    event("BlockStored", &fields)
}

/// An engine, and what its events show about its LoRAs.
#[derive(Clone, Default)]
struct Engine {
    /// The path of the loaded weights of each name.
    paths: [u8; NAMES.len()],
    cached: [BTreeSet<CachedBlock>; NAMES.len()],
    /// For each name, the blocks that were stored after the last sign that the weights were replaced; None without a sign.
    current: [Option<BTreeSet<CachedBlock>>; NAMES.len()],
}

impl Engine {
    fn is_current(&self, name: usize, block: &CachedBlock) -> bool {
        self.current[name].as_ref().is_none_or(|current| current.contains(block))
    }

    /// Computes a prompt with the weights at a path. Returns the event that the engine sends, if any.
    fn compute(&mut self, name: usize, path: u8, prompt: &[u8]) -> Option<Vec<u8>> {
        let path = if NAMES[name].is_empty() { 0 } else { path };
        let block = |length: usize| (path, prompt[..length].to_vec());
        let known = (1..=prompt.len())
            .take_while(|&length| self.cached[name].contains(&block(length)))
            .count();
        // If an earlier block of the prompt was evicted, the engine still has the later blocks, and does not announce them again.
        let fresh = (known + 1..=prompt.len())
            .take_while(|&length| !self.cached[name].contains(&block(length)))
            .count();
        for length in known + 1..=known + fresh {
            let is_late = length > 1 && !self.is_current(name, &block(length - 1));
            let is_twin = |other: &CachedBlock| other.1 == prompt[..length] && self.is_current(name, other);
            if is_late || self.cached[name].iter().any(is_twin) {
                self.current[name] = Some(BTreeSet::new());
            }
            self.cached[name].insert(block(length));
            if let Some(current) = &mut self.current[name] {
                current.insert(block(length));
            }
        }
        (fresh > 0).then(|| store(name, path, &prompt[..known + fresh], known))
    }

    /// Evicts a block. If `is_leaf`, evicts it only if no other block follows it.
    fn evict(&mut self, name: usize, at: usize, is_leaf: bool) -> Option<Vec<u8>> {
        let cached = &self.cached[name];
        let has_next = |block: &CachedBlock| {
            cached
                .iter()
                .any(|other| other.0 == block.0 && other.1.len() > block.1.len() && other.1.starts_with(&block.1))
        };
        let able: Vec<&CachedBlock> = cached.iter().filter(|block| !is_leaf || !has_next(block)).collect();
        let block = (*able.get(at % able.len().max(1))?).clone();
        self.cached[name].remove(&block);
        if let Some(current) = &mut self.current[name] {
            current.remove(&block);
        }
        if self.cached.iter().all(BTreeSet::is_empty) {
            self.current = Default::default();
        }
        Some(removal(&[hash_of(name, block.0, &block.1)]))
    }

    /// Number of blocks of a prompt that the engine finds cached.
    fn cached_length(&self, name: usize, prompt: &[u8]) -> usize {
        let held = |&length: &usize| self.cached[name].contains(&(self.paths[name], prompt[..length].to_vec()));
        (1..=prompt.len()).take_while(held).count()
    }

    /// Numbers of blocks of a prompt that the engine certainly finds, and might find, as far as its events show.
    fn known(&self, name: usize, prompt: &[u8]) -> (usize, usize) {
        let count = |meant: &dyn Fn(&CachedBlock) -> bool| {
            let held = |&length: &usize| {
                self.cached[name]
                    .iter()
                    .any(|block| block.1 == prompt[..length] && meant(block))
            };
            (1..=prompt.len()).take_while(held).count()
        };
        let is_certain = |block: &CachedBlock| self.is_current(name, block);
        (count(&is_certain), count(&|_| true))
    }

    /// Whether each block that counts as one of the present weights was computed with these weights.
    fn has_shown_replacements(&self, name: usize) -> bool {
        let mut current = self.cached[name].iter().filter(|block| self.is_current(name, block));
        current.all(|block| block.0 == self.paths[name])
    }
}

fn prompts() -> Vec<Vec<u8>> {
    let mut found = vec![vec![]];
    for _ in 0..LONGEST {
        let longer = found
            .iter()
            .flat_map(|prompt: &Vec<u8>| (0..SYMBOLS).map(|symbol| [&prompt[..], &[symbol]].concat()));
        found = longer.collect();
    }
    found
}

/// The numbers of blocks of a prompt that an index with one worker counts as certain, and as possible.
fn answer(index: &PrefixIndex, name: usize, prompt: &[u8]) -> (usize, usize) {
    let lora = if NAMES[name].is_empty() {
        0
    } else {
        lora_name(NAMES[name].as_bytes())
    };
    let scope = Scope {
        lora,
        ..Scope::default()
    };
    let matches = index.match_prompt(&tokens_of(prompt), &scope);
    let hit = matches.hits.first();
    hit.map_or((0, 0), |hit| {
        (matches.certain(hit)[0] as usize / 2, hit.tokens[0] as usize / 2)
    })
}

#[derive(Clone, Debug)]
enum Step {
    Request(usize, usize, usize),
    /// A request that began before the present weights were loaded.
    Late(usize, u8, usize, usize),
    Load(usize, u8),
    Evict(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..NAMES.len(), 0..16_usize, 1..=LONGEST).prop_map(|(name, prompt, length)| Step::Request(name, prompt, length)),
        1 => (0..2_usize, 0..PATHS, 0..16_usize, 1..=LONGEST).prop_map(|(name, path, prompt, length)| Step::Late(name, path, prompt, length)),
        2 => (0..2_usize, 0..PATHS).prop_map(|(name, path)| Step::Load(name, path)),
        3 => (0..NAMES.len(), any::<usize>()).prop_map(|(name, at)| Step::Evict(name, at)),
    ];
    prop::collection::vec(step, 1..60)
}

/// Applies the steps to an engine. Returns the engine, and its events, each with the state of the engine after it.
fn run(steps: &[Step], is_leaf: bool) -> (Engine, Vec<(Engine, Vec<u8>)>) {
    let (mut engine, mut events, prompts) = (Engine::default(), Vec::new(), prompts());
    for step in steps {
        let event = match *step {
            Step::Request(name, prompt, length) => {
                let path = engine.paths[name];
                engine.compute(name, path, &prompts[prompt][..length])
            }
            Step::Late(name, path, prompt, length) => engine.compute(name, path, &prompts[prompt][..length]),
            Step::Load(name, path) => {
                engine.paths[name] = path;
                None
            }
            Step::Evict(name, at) => engine.evict(name, at, is_leaf),
        };
        events.extend(event.map(|event| (engine.clone(), event)));
    }
    (engine, events)
}

fn apply<'a>(index: &PrefixIndex, seq: &mut i64, payloads: impl IntoIterator<Item = &'a Vec<u8>>) {
    for payload in payloads {
        index.batch("a", 0, 0, *seq, payload);
        *seq += 1;
    }
}

fn answers(index: &PrefixIndex) -> BTreeMap<(usize, Vec<u8>), (usize, usize)> {
    let of_name = |name: usize| {
        prompts()
            .into_iter()
            .map(move |prompt| ((name, prompt.clone()), answer(index, name, &prompt)))
    };
    (0..NAMES.len()).flat_map(of_name).collect()
}

fn estimate_of(index: &PrefixIndex) -> bool {
    index
        .info("a", 0)
        .is_some_and(|info| info.estimate.is_some() || info.counters.unknown > 0 || !info.counters.rejected.is_empty())
}

proptest! {
    /// After each event, the index has the answers that follow from the events. If the events have shown each replacement of weights, the
    /// engine has every certain block, and the index has every block of the engine.
    #[test]
    fn certain_blocks_are_those_of_the_present_weights(steps in steps()) {
        let (index, mut seq) = (index(), 0);
        for (engine, event) in run(&steps, false).1 {
            apply(&index, &mut seq, [&event]);
            for (name, lora) in NAMES.iter().enumerate() {
                for prompt in prompts() {
                    let found = answer(&index, name, &prompt);
                    prop_assert_eq!(found, engine.known(name, &prompt), "{} {:?}", lora, prompt);
                    if engine.has_shown_replacements(name) {
                        let cached_length = engine.cached_length(name, &prompt);
                        prop_assert!(found.0 <= cached_length && cached_length <= found.1);
                    }
                }
            }
            prop_assert!(!estimate_of(&index));
        }
    }

    /// A snapshot and a compacted history, made at any time, give the same answers as all events, immediately and after each later event.
    #[test]
    fn late_consumers_have_the_same_answers(steps in steps(), cut in any::<prop::sample::Index>()) {
        let payloads: Vec<Vec<u8>> = run(&steps, true).1.into_iter().map(|(_, event)| event).collect();
        let cut = cut.index(payloads.len() + 1);
        let (whole, mut seq) = (index(), 0);
        apply(&whole, &mut seq, &payloads[..cut]);

        let restored = index();
        kvevents_index::snapshot::restore(&restored, &whole.save(Vec::new(), None).unwrap()[..]).unwrap();
        prop_assert_eq!(answers(&restored), answers(&whole));

        let mut compactor = Compactor::default();
        payloads[..cut].iter().for_each(|payload| compactor.apply(payload, &schema()));
        let (late, mut first) = (index(), 0);
        let compacted = compactor.payloads(1 << 20, 1.0).expect("no two blocks share a hash");
        apply(&late, &mut first, &compacted);
        prop_assert_eq!(answers(&late), answers(&whole));
        let mut again = Compactor::default();
        compacted.iter().for_each(|payload| again.restore(payload, &schema()));
        prop_assert_eq!(again.payloads(1 << 20, 1.0), Some(compacted));

        let start = seq;
        apply(&whole, &mut seq, &payloads[cut..]);
        apply(&restored, &mut { start }, &payloads[cut..]);
        apply(&late, &mut first, &payloads[cut..]);
        prop_assert_eq!(answers(&restored), answers(&whole));
        prop_assert_eq!(answers(&late), answers(&whole));
        prop_assert!(!estimate_of(&late));
    }

    /// If blocks inside of chains can be evicted before leaves, a late consumer can be less certain than others, but never more certain.
    #[test]
    fn late_consumers_are_not_more_certain(steps in steps(), cut in any::<prop::sample::Index>()) {
        let payloads: Vec<Vec<u8>> = run(&steps, false).1.into_iter().map(|(_, event)| event).collect();
        let cut = cut.index(payloads.len() + 1);
        let (whole, mut seq) = (index(), 0);
        apply(&whole, &mut seq, &payloads[..cut]);
        let mut compactor = Compactor::default();
        payloads[..cut].iter().for_each(|payload| compactor.apply(payload, &schema()));
        let (late, mut first) = (index(), 0);
        apply(&late, &mut first, &compactor.payloads(1 << 20, 1.0).expect("no two blocks share a hash"));
        let (late, whole) = (answers(&late), answers(&whole));
        for (prompt, (certain, possible)) in whole {
            prop_assert!(late[&prompt].0 <= certain && late[&prompt].1 == possible, "{:?} {:?}", prompt, late[&prompt]);
        }
    }
}

/// Blocks of 1,000 versions of an adapter: only blocks of the newest version are certain, no limit is reached, and all blocks can be
/// removed.
#[test]
fn a_thousand_versions_of_an_adapter_fill_no_limit() {
    const LENGTH: usize = 20;
    let prompt: Vec<u8> = (0..LENGTH).map(|at| at as u8 % 3).collect();
    let hashes = |version: u64| -> Vec<u64> { (0..LENGTH as u64).map(|at| (version + 1) << 8 | at).collect() };
    let (index, mut compactor, mut seq) = (index(), Compactor::default(), 0);
    let mut events = Vec::new();
    for version in 0..1_000 {
        let mut fields = vec![
            ("block_hashes", array(hashes(version).into_iter().map(number).collect())),
            ("parent_block_hash", vec![0xC0]),
            (
                "token_ids",
                array(tokens_of(&prompt).into_iter().map(|token| vec![token as u8]).collect()),
            ),
            ("block_size", vec![2]),
            ("medium", text("GPU")),
        ];
        fields.push(("lora_name", text(NAMES[0])));
        events.push(event("BlockStored", &fields));
    }
    for payload in &events {
        apply(&index, &mut seq, [payload]);
        compactor.apply(payload, &schema());
        assert_eq!(answer(&index, 0, &prompt), (LENGTH, LENGTH));
    }
    assert!(!estimate_of(&index));
    assert_eq!(
        (index.info("a", 0).unwrap().blocks, compactor.live()),
        (1_000 * LENGTH, 1_000 * LENGTH)
    );
    let (late, mut first) = (self::index(), 0);
    apply(&late, &mut first, &compactor.payloads(1 << 24, 1.0).unwrap());
    assert_eq!(
        (answer(&late, 0, &prompt), late.info("a", 0).unwrap().blocks),
        ((LENGTH, LENGTH), 1_000 * LENGTH)
    );
    // The newest blocks are removed first: older blocks could be found if the name had returned to a former path.
    for version in (0..1_000).rev() {
        apply(&index, &mut seq, [&removal(&hashes(version)[LENGTH / 2..])]);
    }
    assert_eq!(answer(&index, 0, &prompt), (LENGTH / 2, LENGTH / 2));
    apply(&index, &mut seq, [&removal(&hashes(999)[..LENGTH / 2])]);
    assert_eq!(answer(&index, 0, &prompt), (0, LENGTH / 2));
    for version in 0..999 {
        apply(&index, &mut seq, [&removal(&hashes(version)[..LENGTH / 2])]);
    }
    assert_eq!((answer(&index, 0, &prompt), index.info("a", 0).unwrap().blocks), ((0, 0), 0));
    assert!(!estimate_of(&index));
}

/// Two blocks without a LoRA that have equal keys and different hashes differ in a property that no event contains. While both exist,
/// neither is certain.
#[test]
fn blocks_that_differ_by_their_hashes_alone_are_uncertain() {
    let (index, mut seq) = (index(), 0);
    let plain = |hash: u64, parent: Option<u64>, symbol: u8| {
        let fields = [
            ("block_hashes", array(vec![number(hash)])),
            ("parent_block_hash", parent.map_or(vec![0xC0], number)),
            ("token_ids", array(vec![vec![symbol], vec![7]])),
            ("block_size", vec![2]),
            ("medium", text("GPU")),
        ];
        event("BlockStored", &fields)
    };
    apply(
        &index,
        &mut seq,
        &[plain(1, None, 0), plain(2, Some(1), 1), plain(3, Some(2), 0)],
    );
    assert_eq!(answer(&index, 2, &[0, 1, 0]), (3, 3));
    apply(&index, &mut seq, &[plain(12, Some(1), 1)]);
    assert_eq!(answer(&index, 2, &[0, 1, 0]), (1, 3));
    assert_eq!(answer(&index, 2, &[0, 0]), (1, 1));
    for hash in 100..200 {
        apply(&index, &mut seq, &[plain(hash, Some(1), 1)]);
    }
    assert_eq!((answer(&index, 2, &[0, 1, 0]), estimate_of(&index)), ((1, 3), false));
    let others: Vec<u64> = [12].into_iter().chain(100..200).collect();
    apply(&index, &mut seq, &[removal(&others)]);
    assert_eq!(answer(&index, 2, &[0, 1, 0]), (3, 3));
}
