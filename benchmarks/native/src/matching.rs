//! Measures lookups without concurrent writes.

use std::hint::black_box;

use crate::measure::in_turns;
use crate::sides::{self, Find, Ours, SIDES, Side, Visit};
use crate::table::{Reach, Row};
use crate::workload::{BLOCK, CHAIN, Chain, Holdings, Random};

/// Number of prompts that are looked up in turn, so that no cache of the processor holds the data for the next prompt.
const TURNS: usize = 384;
/// Number of prompts for which the scores of all sides are compared.
const COMPARED: usize = 8;

/// An index and the prompts that are looked up in it.
struct Scenario {
    what: String,
    workers: u32,
    holdings: Holdings,
    prompts: Vec<Vec<u32>>,
    reach: Reach,
}

impl Scenario {
    /// Creates a scenario with a single chain, which each worker holds completely.
    fn warm(tokens: usize, workers: u32) -> Self {
        let chain = Chain::new(&mut Random(1), tokens / BLOCK as usize, BLOCK);
        Self {
            what: format!("{} x {workers}", thousands(tokens)),
            workers,
            prompts: vec![chain.tokens.clone()],
            holdings: Holdings::whole(vec![chain], workers),
            reach: Reach::Best(0.95),
        }
    }

    /// Creates a scenario with many chains, which are looked up in turn.
    fn cold(tokens: usize, workers: u32) -> Self {
        let mut random = Random(2);
        let chains: Vec<_> = (0..TURNS)
            .map(|_| Chain::new(&mut random, tokens / BLOCK as usize, BLOCK))
            .collect();
        Self {
            what: format!("{TURNS} prompts of {} in turn x {workers}", thousands(tokens)),
            workers,
            prompts: chains.iter().map(|chain| chain.tokens.clone()).collect(),
            holdings: Holdings::whole(chains, workers),
            reach: Reach::Best(1.0),
        }
    }

    /// Creates a scenario in which each worker holds some blocks more of the chain than the previous worker.
    fn staggered(workers: u32) -> Self {
        let mut scenario = Self::warm(CHAIN * BLOCK as usize, workers);
        let part = |worker: u32| CHAIN * (worker as usize + 1) / workers as usize;
        scenario.holdings.held = (0..workers).map(|worker| (worker, 0, part(worker))).collect();
        scenario.what = format!("32,768 x {workers}, each holds {} blocks more", CHAIN / workers as usize);
        scenario.reach = Reach::Best(1.0);
        scenario
    }

    /// Creates a scenario in which every worker holds the first half of the prompt, followed by blocks of a different chain.
    fn half_known(workers: u32) -> Self {
        let mut random = Random(3);
        let held = Chain::new(&mut random, CHAIN, BLOCK);
        let prompt = held.prefix(CHAIN / 2).extended(&mut random, CHAIN / 2);
        Self {
            what: format!("32,768, half known x {workers}"),
            workers,
            prompts: vec![prompt.tokens],
            holdings: Holdings::whole(vec![held], workers),
            reach: Reach::Best(1.0),
        }
    }

    /// Creates a scenario in which no worker holds the prompt.
    fn unknown(workers: u32) -> Self {
        let mut random = Random(4);
        let held = Chain::new(&mut random, CHAIN, BLOCK);
        Self {
            what: format!("32,768, unknown x {workers}"),
            workers,
            prompts: vec![random.tokens(CHAIN * BLOCK as usize).collect()],
            holdings: Holdings::whole(vec![held], workers),
            reach: Reach::Dynamo(0.1),
        }
    }

    fn measure(&self, rounds: usize) -> Row {
        let mut indexes = Indexes(self, Vec::new());
        (0..SIDES.len()).for_each(|side| sides::visit(side, &mut indexes));
        let indexes = indexes.1;
        for prompt in self.prompts.iter().take(COMPARED) {
            let expected = indexes[0].scores(prompt);
            for (index, side) in indexes.iter().zip(SIDES) {
                assert_eq!(
                    index.scores(prompt),
                    expected,
                    "{side} and {} differ: {}",
                    SIDES[0],
                    self.what
                );
            }
        }
        let calls = indexes.iter().map(|index| {
            let mut prompts = self.prompts.iter().cycle();
            let call = move || {
                let prompt = prompts.next().expect("there is a prompt");
                black_box(index.find(prompt));
            };
            Box::new(call) as Box<dyn FnMut() + '_>
        });
        let times = in_turns(rounds, &mut calls.collect::<Vec<_>>());
        let figures: Vec<_> = times.into_iter().map(Some).collect();
        Row::least(self.what.clone(), &figures, self.reach)
    }
}

/// A visitor that creates the index of each side for a scenario.
struct Indexes<'a>(&'a Scenario, Vec<Box<dyn Find>>);

impl Visit for Indexes<'_> {
    fn visit<S: Side>(&mut self) {
        let Self(scenario, indexes) = self;
        indexes.push(Box::new(S::filled(scenario.workers, BLOCK, scenario.holdings.payloads())));
    }
}

fn thousands(number: usize) -> String {
    format!("{},{:03}", number / 1_000, number % 1_000)
}

/// Returns the rows with microseconds per lookup.
pub fn rows(quick: bool) -> Vec<Row> {
    let rounds = if quick { 5 } else { 41 };
    let mut scenarios = Vec::new();
    for tokens in [1_024, 32_768, 240_000] {
        let workers = if quick { &[1, 16][..] } else { &[1, 16, 96, 256] };
        scenarios.extend(workers.iter().map(|&workers| Scenario::warm(tokens, workers)));
    }
    for (tokens, workers) in [(1_024, 1), (1_024, 16), (32_768, 1), (32_768, 16)] {
        if !quick || tokens == 1_024 {
            scenarios.push(Scenario::cold(tokens, workers));
        }
    }
    scenarios.extend([Scenario::staggered(256), Scenario::half_known(256), Scenario::unknown(256)]);
    let each = |scenario: &Scenario| {
        eprintln!("match {} ...", scenario.what);
        scenario.measure(rounds)
    };
    scenarios.iter().map(each).collect()
}

/// Returns the rows for our lookups in an index that also holds unrelated blocks.
pub fn apart(quick: bool) -> Vec<Row> {
    const HOLDERS: u32 = 16;
    const OTHERS: u32 = 16;
    let rounds = if quick { 5 } else { 41 };
    let mut rows = Vec::new();
    for tokens in [1_024, 32_768] {
        let scenario = Scenario::warm(tokens, HOLDERS);
        let index = |size_of: fn(u32) -> u32, labelled: bool, others: u32| {
            let mut random = Random(5);
            let added = (0..others).map(|at| Chain::new(&mut random, CHAIN, size_of(at)));
            let mut both = scenario.holdings.clone();
            let known = both.chains.len();
            both.chains = both.chains.iter().cloned().chain(added).collect::<Vec<_>>().into();
            both.held
                .extend((0..others).map(|at| (HOLDERS + at, known + at as usize, CHAIN)));
            let index = Ours::filled(HOLDERS + OTHERS, BLOCK, both.payloads());
            if labelled {
                (0..others).for_each(|at| index.label(HOLDERS + at, &format!("model-{at}")));
            }
            index
        };
        let indexes = [
            index(|_| BLOCK, false, 0),
            index(|_| BLOCK, true, OTHERS),
            index(|at| BLOCK + 1 + at, true, OTHERS),
            index(|at| BLOCK + 1 + at, false, OTHERS),
        ];
        let prompt = &scenario.prompts[0];
        let calls = indexes.iter().map(|index| {
            assert_eq!(index.scores(prompt), indexes[0].scores(prompt), "others change the answer");
            let call = || {
                black_box(index.find(prompt));
            };
            Box::new(call) as Box<dyn FnMut() + '_>
        });
        let times = in_turns(rounds, &mut calls.collect::<Vec<_>>());
        let name = format!("{} x {HOLDERS}", thousands(tokens));
        let row = |what: &str, time: f64| Row::new(format!("{name}, {what}"), vec![crate::table::short(time)]);
        rows.push(row("alone", times[0]));
        rows.push(row("16 other models", times[1]).judged(times[1] / times[0], 1.05, false, "of alone"));
        rows.push(row("16 other models of other block sizes", times[2]).judged(times[2] / times[0], 1.05, false, "of alone"));
        rows.push(row("16 other block sizes in the same model", times[3]));
    }
    rows
}

/// A second KV cache group beside a group with full attention.
struct SecondGroup {
    what: &'static str,
    kind: &'static str,
    window: Option<u32>,
    /// Number of blocks at the end of the prompt that the group holds.
    blocks: usize,
}

const SECOND_GROUPS: [SecondGroup; 3] = [
    SecondGroup {
        what: "a window of 128 (gpt-oss)",
        kind: "sliding_window",
        window: Some(128),
        blocks: 9,
    },
    SecondGroup {
        what: "a window of 1,024 (Gemma 3)",
        kind: "sliding_window",
        window: Some(1_024),
        blocks: 65,
    },
    SecondGroup {
        what: "a state (Qwen3-Next, Jamba)",
        kind: "mamba",
        window: None,
        blocks: 1,
    },
];

/// Returns the rows for our lookups of engines with two KV cache groups, and of the same engines with one group.
pub fn hybrid(quick: bool) -> Vec<Row> {
    let rounds = if quick { 5 } else { 41 };
    let fleets = if quick {
        &[(16, 2.0)][..]
    } else {
        &[(1, 1.5), (16, 2.0), (64, 2.0), (256, 3.0)]
    };
    let mut rows = Vec::new();
    for group in SECOND_GROUPS {
        for &(workers, limit) in fleets {
            let scenario = Scenario::warm(CHAIN * BLOCK as usize, workers);
            let chain = &scenario.holdings.chains[0];
            let second = chain.store_last(group.blocks, group.kind, group.window);
            let added = (0..workers).map(move |worker| (worker, second.clone()));
            let indexes = [
                Ours::filled(workers, BLOCK, scenario.holdings.payloads()),
                Ours::filled(workers, BLOCK, scenario.holdings.payloads().chain(added)),
            ];
            let prompt = &scenario.prompts[0];
            let calls = indexes.iter().map(|index| {
                assert_eq!(
                    index.scores(prompt),
                    indexes[0].scores(prompt),
                    "the second group changes the answer"
                );
                let call = || {
                    black_box(index.find(prompt));
                };
                Box::new(call) as Box<dyn FnMut() + '_>
            });
            let times = in_turns(rounds, &mut calls.collect::<Vec<_>>());
            let what = format!("{} with {}", scenario.what, group.what);
            rows.push(Row::new(what, vec![crate::table::short(times[1])]).judged(
                times[1] / times[0],
                limit,
                false,
                "of one group",
            ));
        }
    }
    rows
}
