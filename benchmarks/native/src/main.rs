//! Compares the index of kvevents with the native indexes of other routers, on equal native input. `make bench-native`: all figures in one
//! run, as tables of Markdown. The exit code is 1 if a figure was not reached. `benchmarks/README.md` describes how each figure is
//! measured.

mod allocator;
mod applying;
mod matching;
mod measure;
mod memory;
mod mixed;
mod sides;
mod table;
mod threads;
mod vectors;
mod workload;

use std::process::exit;

use table::{Row, json, markdown};

/// A table: its name for `--only`, its title, and the function that returns its rows.
type Part = (&'static str, &'static str, fn(bool) -> Vec<Row>);

const PARTS: [Part; 7] = [
    ("match", "Match, us: tokens x workers that hold them", matching::rows),
    ("apart", "Match beside what has nothing to do with it, us", matching::apart),
    ("hybrid", "Match of engines with two KV cache groups, us", matching::hybrid),
    ("mixed", "Mixed traffic, from the wire", mixed::rows),
    ("apply", "Apply, ns a block, from the wire", applying::rows),
    (
        "threads",
        "One reader beside one writer, from the wire, 32 blocks an event",
        threads::rows,
    ),
    ("memory", "Resident bytes a block, least - most of five sizes", memory::rows),
];

const USAGE: &str = "usage: kvevents-native-bench [--quick] [--json] [--only PART]... | vectors";

fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("model name\t: ")).collect();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?").to_owned();
    format!(
        "{} x {}, load {load} at the start",
        models.len(),
        models.first().unwrap_or(&"?")
    )
}

fn main() {
    let (mut quick, mut as_json, mut only) = (false, false, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "vectors" => return print!("{}", vectors::json()),
            memory::GROW => return memory::grow(&mut arguments),
            "--quick" => quick = true,
            "--json" => as_json = true,
            "--only" => only.extend(arguments.next()),
            _ => {
                eprintln!("unknown argument {argument:?}; {USAGE}");
                exit(2);
            }
        }
    }
    if let Some(unknown) = only.iter().find(|name| PARTS.iter().all(|(part, ..)| part != name)) {
        eprintln!("no part is named {unknown:?}; there are {:?}", PARTS.map(|(part, ..)| part));
        exit(2);
    }
    if !as_json {
        println!("{}\n", machine());
    }
    let (mut missed, mut parts) = (0, Vec::new());
    for (part, title, rows) in PARTS {
        if only.is_empty() || only.iter().any(|name| name == part) {
            let rows = rows(quick);
            missed += rows.iter().filter(|row| row.is_missed()).count();
            if as_json {
                parts.push(json(title, &rows));
            } else {
                println!("{}", markdown(title, &rows));
            }
        }
    }
    if as_json {
        println!("[{}]", parts.join(", "));
    } else {
        println!("{missed} missed");
    }
    exit(i32::from(missed > 0));
}
