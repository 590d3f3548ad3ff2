#![no_main]

use std::panic::{set_hook, take_hook};
use std::sync::Once;

static HOOK: Once = Once::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // The product catches panics of the decoder, a dependency; libFuzzer's hook would end the program before.
    HOOK.call_once(|| {
        let abort = take_hook();
        set_hook(Box::new(move |panic| {
            if !panic.location().is_some_and(|place| place.file().contains("netlink-packet")) {
                abort(panic);
            }
        }));
    });
    tranship_fuzz::local::rtnetlink(data);
});
