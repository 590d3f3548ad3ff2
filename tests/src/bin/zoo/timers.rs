//! Timers: they go on ticking, and long ones neither end early nor start anew.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};

use crate::raw;
use crate::species::{Check, Watch};

const PERIOD: Duration = Duration::from_millis(30);
const HOUR: Duration = Duration::from_secs(3600);
/// No move takes longer than this.
const STEP: Duration = Duration::from_secs(120);
/// Processor time is counted in jiffies of up to 10 ms, and rounded up when a timer is set.
const JIFFIES: Duration = Duration::from_millis(20);

/// Checks that what is left of a long timer only becomes less, and not by leaps.
fn countdown() -> impl FnMut(Duration) -> Result<()> {
    let mut before = HOUR;
    move |left| {
        ensure!(left <= before + JIFFIES, "the long timer went back from {before:?} to {left:?}");
        ensure!(before.saturating_sub(left) < STEP, "the long timer leapt from {before:?} to {left:?}");
        before = left;
        Ok(())
    }
}

fn one_shot(expiration: Option<Expiration>) -> Result<Duration> {
    match expiration {
        Some(Expiration::OneShot(left)) => Ok(left.into()),
        other => anyhow::bail!("the long timer is {other:?}"),
    }
}

/// Whether the expiration belongs to the short periodic timer.
fn periodic(expiration: Option<Expiration>) -> Result<()> {
    let interval = match expiration {
        Some(Expiration::Interval(interval) | Expiration::IntervalDelayed(_, interval)) => Duration::from(interval),
        other => anyhow::bail!("the periodic timer is {other:?}"),
    };
    ensure!(interval == PERIOD, "the period is {interval:?}");
    Ok(())
}

fn every_period() -> Expiration {
    Expiration::Interval(TimeSpec::from(PERIOD))
}

fn in_an_hour() -> Expiration {
    Expiration::OneShot(TimeSpec::from(HOUR))
}

/// Timer descriptors: a long one, a long periodic one, and one that has expired and was not read yet.
pub fn timerfd(_: &Path) -> Result<Check> {
    let long = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::empty())?;
    long.set(in_an_hour(), TimerSetTimeFlags::empty())?;
    let periodic = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::empty())?;
    let hourly = Expiration::IntervalDelayed(TimeSpec::from(HOUR), TimeSpec::from(PERIOD));
    periodic.set(hourly, TimerSetTimeFlags::empty())?;
    let short = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK)?;
    let soon = Expiration::OneShot(TimeSpec::from(Duration::from_micros(1)));
    short.set(soon, TimerSetTimeFlags::empty())?;
    let mut watch = Watch::new("the number of expirations");
    let (mut count_down, mut until_first) = (countdown(), countdown());
    let mut ticks = 0;
    Ok(Box::new(move || {
        match short.wait() {
            Ok(()) => {
                ticks += 1;
                short.set(soon, TimerSetTimeFlags::empty())?;
            }
            Err(nix::Error::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        watch.look(ticks)?;
        match periodic.get()? {
            Some(Expiration::IntervalDelayed(left, every)) if Duration::from(every) == PERIOD => {
                until_first(left.into())?;
            }
            other => anyhow::bail!("the periodic timer is {other:?}"),
        }
        count_down(one_shot(long.get()?)?)
    }))
}

/// A timer descriptor that ticks faster than it is read.
pub fn expired(_: &Path) -> Result<Check> {
    let short = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK)?;
    short.set(every_period(), TimerSetTimeFlags::empty())?;
    let mut watch = Watch::new("the number of expirations");
    let mut ticks = 0;
    Ok(Box::new(move || {
        match short.wait() {
            Ok(()) => ticks += 1,
            Err(nix::Error::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        watch.look(ticks)
    }))
}

/// POSIX timers that send a blocked signal with a value: one periodic, one long.
pub fn posix(_: &Path) -> Result<Check> {
    raw::block(&[libc::SIGUSR1])?;
    let timer = |value| -> Result<Timer> {
        let notify = SigevNotify::SigevSignal { signal: Signal::SIGUSR1, si_value: value };
        Ok(Timer::new(nix::time::ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))?)
    };
    let (mut short, mut long) = (timer(77)?, timer(88)?);
    short.set(every_period(), TimerSetTimeFlags::empty())?;
    long.set(in_an_hour(), TimerSetTimeFlags::empty())?;
    let mut watch = Watch::new("the number of expirations");
    let mut count_down = countdown();
    let mut ticks = 0;
    Ok(Box::new(move || {
        if let Some((_, value)) = raw::take_signal(&[libc::SIGUSR1])? {
            ensure!(value == 77, "a timer sent {value}");
            ticks += 1;
        }
        watch.look(ticks)?;
        periodic(short.get()?)?;
        count_down(one_shot(long.get()?)?)
    }))
}

/// Interval timers: real time, periodic, and processor time, long.
pub fn interval(_: &Path) -> Result<Check> {
    raw::block(&[libc::SIGALRM])?;
    raw::set_interval_timer(libc::ITIMER_REAL, PERIOD, PERIOD)?;
    raw::set_interval_timer(libc::ITIMER_VIRTUAL, HOUR, Duration::ZERO)?;
    raw::set_interval_timer(libc::ITIMER_PROF, HOUR, Duration::ZERO)?;
    let mut watch = Watch::new("the number of expirations");
    let (mut virtual_left, mut profile_left) = (countdown(), countdown());
    let mut ticks = 0;
    Ok(Box::new(move || {
        ticks += u64::from(raw::take_signal(&[libc::SIGALRM])?.is_some());
        watch.look(ticks)?;
        let interval = raw::interval_timer(libc::ITIMER_REAL)?.1;
        ensure!(interval == PERIOD, "the period is {interval:?}");
        virtual_left(raw::interval_timer(libc::ITIMER_VIRTUAL)?.0).context("ITIMER_VIRTUAL")?;
        profile_left(raw::interval_timer(libc::ITIMER_PROF)?.0).context("ITIMER_PROF")
    }))
}
