//! What the crates of other routers compute, for our tests: `kvevents-native-bench vectors` prints `tests/data/block-keys.json`.

mod vectors;

fn main() {
    if std::env::args().nth(1).as_deref() != Some("vectors") {
        eprintln!("usage: kvevents-native-bench vectors");
        std::process::exit(2);
    }
    print!("{}", vectors::json());
}
