//! Clocks, and what is made of their readings.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// CPU time of this thread.
pub fn cpu() -> Duration {
    reading(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU seconds that everything else on the machine has taken since it started.
pub fn cpu_of_others() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").expect("this is Linux");
    let numbers = text
        .lines()
        .next()
        .expect("it has a line for all CPUs")
        .split_whitespace()
        .skip(1);
    let ticks: Vec<f64> = numbers.map(|number| number.parse().expect("it has numbers")).collect();
    // User, nice and system; interrupts; time that the host of a virtual machine gave to others. Neither idle nor waiting for disks.
    let busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
    // SAFETY: a question without arguments that have to be valid.
    let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    busy / ticks_per_second as f64 - reading(libc::CLOCK_PROCESS_CPUTIME_ID).as_secs_f64()
}

fn reading(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this frame.
    let failed = unsafe { libc::clock_gettime(clock, &mut now) };
    assert_eq!(failed, 0, "the clock is not available");
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The value in the middle of the sorted ones.
pub fn median(values: &mut [f64]) -> f64 {
    percentile(values, 0.5)
}

/// The value below which a share of the others is.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    values.sort_unstable_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

/// Nanoseconds that one reading of `cpu` costs, which are part of every interval.
pub fn clock_cost() -> f64 {
    const READINGS: u32 = 100_000;
    let start = cpu();
    for _ in 0..READINGS {
        black_box(cpu());
    }
    (cpu() - start).as_nanos() as f64 / f64::from(READINGS)
}

/// How long a side of a round works before the next one has its turn.
const TURN: Duration = Duration::from_millis(1);

/// Microseconds of CPU that a call of each takes: they take turns of about a millisecond, and each figure is the median of its turns.
pub fn in_turns(rounds: usize, calls: &mut [Box<dyn FnMut() + '_>]) -> Vec<f64> {
    let repeats: Vec<u32> = calls.iter_mut().map(|call| repeats(call)).collect();
    let mut times = vec![Vec::with_capacity(rounds); calls.len()];
    for round in 0..rounds {
        for turn in 0..calls.len() {
            let side = (turn + round) % calls.len();
            let start = cpu();
            (0..repeats[side]).for_each(|_| calls[side]());
            times[side].push((cpu() - start).as_nanos() as f64 / 1e3 / f64::from(repeats[side]));
        }
    }
    times.iter_mut().map(|times| median(times)).collect()
}

/// How many calls make a turn; those that find it out also warm what is called.
fn repeats(call: &mut Box<dyn FnMut() + '_>) -> u32 {
    let (start, mut count) = (Instant::now(), 0);
    while count < 3 || start.elapsed() < TURN {
        call();
        count += 1;
    }
    (f64::from(count) * TURN.as_secs_f64() / start.elapsed().as_secs_f64()).ceil() as u32
}
