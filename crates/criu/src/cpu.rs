//! What the CPUs of two nodes offer to programs. A program has looked at its CPU when it started (libc has chosen its
//! `memcpy` by it), and goes on using what it found there; on a CPU without it, it dies of SIGILL after the move.

use std::collections::BTreeSet;
use std::fs;

use serde::{Deserialize, Serialize};

/// The CPU of a node as programs can see it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuFeatures {
    /// Architecture as Rust calls it: `x86_64`, `aarch64` …
    pub arch: String,
    /// Vendor, e.g. `GenuineIntel`; empty where the kernel does not tell.
    pub vendor: String,
    /// Model for people, e.g. `AMD EPYC 7543`.
    pub model: String,
    /// Names of features as in /proc/cpuinfo: those that every CPU of the node has.
    pub flags: BTreeSet<String>,
}

/// Flags (x86) that no program can depend on: those of the kernel, of hypervisors, power management and measurement, and
/// those that say only how fast an instruction is that works everywhere (`erms`, `fsrm` …) or that older CPUs take for a
/// no-op (`3dnowprefetch`, `cldemote`). Meanings after the kernel's arch/x86/include/asm/cpufeatures.h.
#[rustfmt::skip]
const NOT_FOR_PROGRAMS: [&str; 166] = [
    "3dnowprefetch", "acpi", "amd_dcm", "amd_lbr_pmc_freeze", "amd_lbr_v2", "amd_ppin", "aperfmperf", "apic", "arat",
    "arch_capabilities", "arch_lbr", "arch_perfmon", "art", "auto_ibrs", "avic", "bts", "bus_lock_detect", "cat_l2",
    "cat_l3", "cdp_l2", "cdp_l3", "cldemote", "cmp_legacy", "constant_tsc", "cpb", "cppc", "cpuid", "cpuid_fault",
    "cqm", "cqm_llc", "cqm_mbm_local", "cqm_mbm_total", "cqm_occup_llc", "cr8_legacy", "dca", "de", "debug_swap",
    "decodeassists", "ds_cpl", "dtes64", "dtherm", "dts", "epb", "ept", "ept_ad", "erms", "est", "extapic",
    "extd_apicid", "flexpriority", "flush_l1d", "flushbyasid", "fsrc", "fsrm", "fsrs", "fzrm", "hfi", "ht",
    "hw_pstate", "hwp", "hwp_act_window", "hwp_epp", "hwp_notify", "hwp_pkg_req", "hypervisor", "ibpb", "ibrs",
    "ibrs_enhanced", "ibs", "ibt", "ida", "intel_ppin", "intel_pt", "invpcid", "invpcid_single", "irperf", "lbrv",
    "mba", "mca", "mce", "md_clear", "monitor", "msr", "mtrr", "nodeid_msr", "nonstop_tsc", "nonstop_tsc_s3", "npt",
    "nrip_save", "nx", "osvw", "overflow_recov", "pae", "pat", "pausefilter", "pbe", "pcid", "pconfig", "pdcm",
    "pebs", "perfctr_core", "perfctr_llc", "perfctr_nb", "perfmon_v2", "pfthreshold", "pge", "pln", "proc_feedback",
    "pse", "pse36", "psfd", "pti", "pts", "ptsc", "rapl", "rdt_a", "rep_good", "ring3mwait", "sdbg", "sep", "sev",
    "sev_es", "sev_snp", "skinit", "smap", "smca", "sme", "smep", "smx", "split_lock_detect", "ss", "ssbd", "stibp",
    "succor", "svm", "svm_lock", "tdx_guest", "tdx_host_platform", "tm", "tm2", "tme", "topoext", "tpr_shadow",
    "tsc_adjust", "tsc_deadline_timer", "tsc_known_freq", "tsc_reliable", "tsc_scale", "umip", "v_spec_ctrl",
    "v_vmsave_vmload", "vgif", "virt_ssbd", "vmcb_clean", "vme", "vmmcall", "vmx", "vnmi", "vpid", "wbnoinvd", "wdt",
    "x2apic", "x2avic", "xsaves", "xtopology", "xtpr",
];

/// The node's own CPU. Empty flags where /proc/cpuinfo cannot be read.
pub fn features() -> CpuFeatures {
    parse(std::env::consts::ARCH, &fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

pub(crate) fn parse(arch: &str, cpuinfo: &str) -> CpuFeatures {
    let mut cpu = CpuFeatures { arch: arch.to_owned(), ..CpuFeatures::default() };
    let mut flags: Option<BTreeSet<String>> = None;
    for line in cpuinfo.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match key.trim() {
            "vendor_id" | "CPU implementer" if cpu.vendor.is_empty() => value.clone_into(&mut cpu.vendor),
            "model name" | "CPU part" if cpu.model.is_empty() => value.clone_into(&mut cpu.model),
            "flags" | "Features" => {
                let these: BTreeSet<String> = value.split_whitespace().map(str::to_owned).collect();
                // Where CPUs differ, a thread can rely only on what all have.
                flags = Some(match flags {
                    Some(common) => common.intersection(&these).cloned().collect(),
                    None => these,
                });
            }
            _ => {}
        }
    }
    cpu.flags = flags.unwrap_or_default();
    cpu
}

impl CpuFeatures {
    /// The features that this CPU has, a program could be using and `destination` lacks, sorted; the architecture alone
    /// where that differs. Empty means that a program from here can go on there. Sizes of register state need no look
    /// of their own: each component of XSAVE (AVX, AVX-512, AMX, protection keys) has a flag here.
    pub fn missing_on(&self, destination: &CpuFeatures) -> Vec<String> {
        if self.arch != destination.arch {
            return vec![format!("{} (the destination is {})", self.arch, destination.arch)];
        }
        self.flags.difference(&destination.flags).filter(|f| usable(f)).cloned().collect()
    }
}

fn usable(flag: &str) -> bool {
    NOT_FOR_PROGRAMS.binary_search(&flag).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: big\nflags\t\t: fpu sse2 avx avx2 avx512f smep vmx\n\n";

    #[test]
    fn only_what_all_cpus_have_counts() {
        let two = format!("{ONE}{}", ONE.replace("avx512f ", ""));
        let cpu = parse("x86_64", &two);
        assert_eq!((cpu.vendor.as_str(), cpu.model.as_str()), ("GenuineIntel", "Xeon: big"));
        assert!(cpu.flags.contains("avx2") && !cpu.flags.contains("avx512f"));
    }

    #[test]
    fn what_programs_use_is_missed_and_what_kernels_use_is_not() {
        let source = parse("x86_64", ONE);
        let destination = parse("x86_64", &ONE.replace(" avx2 avx512f smep vmx", " sse4_2"));
        assert_eq!(source.missing_on(&destination), ["avx2", "avx512f"]);
        assert_eq!(destination.missing_on(&source), ["sse4_2"]);
        assert_eq!(source.missing_on(&source), [""; 0]);
    }

    #[test]
    fn the_list_of_flags_is_sorted_which_its_search_relies_on() {
        assert!(NOT_FOR_PROGRAMS.is_sorted());
    }

    #[test]
    fn another_architecture_is_the_only_complaint() {
        let arm = parse("aarch64", "Features\t: fp asimd sve\nCPU implementer\t: 0x41\n");
        assert_eq!(parse("x86_64", ONE).missing_on(&arm), ["x86_64 (the destination is aarch64)"]);
        assert!(arm.flags.contains("sve"));
    }

    #[test]
    fn this_machine_can_move_to_itself_and_survives_serialisation() {
        let own = features();
        assert!(!own.flags.is_empty());
        assert_eq!(own.missing_on(&own), [""; 0]);
        let json = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<CpuFeatures>(&json).unwrap(), own);
    }
}
