//! Clocks, and statistics of their readings.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Returns the CPU time of this thread.
pub fn cpu() -> Duration {
    reading(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the CPU seconds that all other programs have taken since the machine started.
pub fn cpu_of_others() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").expect("this is Linux");
    let numbers = text
        .lines()
        .next()
        .expect("it has a line for all CPUs")
        .split_whitespace()
        .skip(1);
    let ticks: Vec<f64> = numbers.map(|number| number.parse().expect("it has numbers")).collect();
    // Times for user, nice and system; for interrupts; and the time that the host of a virtual machine gave to other machines. Times for
    // idling and for waiting for disks are left out.
    let busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
    // SAFETY: the function has no arguments with conditions.
    let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    busy / ticks_per_second as f64 - reading(libc::CLOCK_PROCESS_CPUTIME_ID).as_secs_f64()
}

fn reading(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec in this stack frame.
    let failed = unsafe { libc::clock_gettime(clock, &mut now) };
    assert_eq!(failed, 0, "the clock is not available");
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Returns the middle value of the sorted values.
pub fn median(values: &mut [f64]) -> f64 {
    percentile(values, 0.5)
}

/// Returns the value below which a given share of the values is.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    values.sort_unstable_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

/// Returns the nanoseconds of one reading of `cpu`, which are a part of every measured interval.
pub fn clock_cost() -> f64 {
    const READINGS: u32 = 100_000;
    let start = cpu();
    for _ in 0..READINGS {
        black_box(cpu());
    }
    (cpu() - start).as_nanos() as f64 / f64::from(READINGS)
}

/// Time for which one side of a round works before the next side has its turn.
const TURN: Duration = Duration::from_millis(1);

/// Returns the microseconds of CPU per call of each function. The functions take turns of about a millisecond, and each figure is the
/// median of a function's turns.
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

/// Returns the number of calls in a turn. The calls that determine the number also warm up the function.
fn repeats(call: &mut Box<dyn FnMut() + '_>) -> u32 {
    let (start, mut count) = (Instant::now(), 0);
    while count < 3 || start.elapsed() < TURN {
        call();
        count += 1;
    }
    (f64::from(count) * TURN.as_secs_f64() / start.elapsed().as_secs_f64()).ceil() as u32
}
