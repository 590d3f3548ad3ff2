#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tranship_fuzz::peer::offered(data));
