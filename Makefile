# The only commands one has to know. All need root on a Debian machine, but build and lint.
.PHONY: demo test test-all test-engines test-trackers test-vm test-skew soak fuzz miri bench lint setup build clean

# Moves a busy Redis between two nodes on this machine under a connected client, and shows what the client noticed.
demo: setup build
	target/release/tranship-lab demo

# Unit tests, and one pass through each end-to-end suite with real containers, side by side in namespaces of their own; see
# docs/testing.md. make test [SUITES="zoo redis"] [JOBS=N]
JOBS ?= 2
test: setup build
	target/release/suites run --jobs $(JOBS) $(SUITES)

# The same with every case of every matrix, all engines and all servers; then the trackers under an older kernel, an older agent, and the
# soak. An hour or two.
test-all: export TRANSHIP_ENGINES = all
test-all: setup build
	target/release/suites run --all --jobs $(JOBS) $(SUITES)
	$(MAKE) --no-print-directory test-trackers test-skew soak

# The suites of all engines besides runc, with their real daemons and programs; with what takes too long for `make test`.
test-engines: export TRANSHIP_ENGINES = all
test-engines: setup build
	target/release/suites run --all --jobs $(JOBS) docker podman crossing containerd servers obstacles
	cargo test --release -p tranship-e2e --test faults -- docker

# The ways to track writes under a kernel that has soft-dirty bits, in a virtual machine: a minute, and 60 MB of downloads the
# first time.
test-trackers:
	scripts/test-trackers

# Moves under the kernels of Debian 12 and 13, with version 2 of cgroups and all its controllers, in virtual machines; 120 MB of downloads the
# first time. make test-vm [KERNELS=6.1] [VM_SUITES="kernel watchers:limits"]
KERNELS ?= 6.1 6.12
VM_SUITES ?= kernel
test-vm: setup build
	for kernel in $(KERNELS); do scripts/test-vm $$kernel $(VM_SUITES) || exit 1; done

# An agent of an older commit at either end, and its journals, which today's agent takes over. Builds that agent first: minutes, of which the second
# run takes none. test-skew [OLD=COMMIT]
test-skew: setup build
	begun=$$(date +%s); old=$$(scripts/old-build $(OLD)) && built=$$(date +%s) && \
	TRANSHIP_OLD_BUILD=$$old cargo test --release -p tranship-e2e --test skew && \
	echo "test-skew: $$((built - begun)) s to build the old agent, $$(($$(date +%s) - built)) s to test"

# What takes long and is another run each time; SEED=N repeats one. Moves eight containers between three nodes MOVES times in all
# kinds of ways at once, under kills and cancels; moves a program that tortures its memory under mishaps; plays the fault matrix in every mode, and
# kills criu, its front and the pager at drawn moments.
soak: export TRANSHIP_SEED = $(or $(SEED),$(shell date +%s))
soak: setup build
	TRANSHIP_MOVES=$(or $(MOVES),500) cargo test --release -p tranship-e2e --test soak
	TRANSHIP_MOVES=$(or $(MOVES),200) cargo test --release -p tranship-e2e --test torture
	TRANSHIP_SECONDS=600 cargo test --release -p tranship-e2e --test mappings
	cargo test --release -p tranship-e2e --test faults

# make bench SUITE=cold|memory|blackout|tcp|engines|workflow [OUT=DIR] [ONLY=WORKLOAD-PREFIX] [LINK=1gbit|unshaped] [MODE=MODE] [RUNS=N]
# [PEER_RUNS=N]: writes OUT/results.json and charts, and shows a table.
SUITE ?= cold
OUT ?= bench/out
bench: setup build
	cargo run --release -p tranship-bench -- --suite $(SUITE) --out $(OUT) $(if $(ONLY),--only $(ONLY)) $(if $(LINK),--link $(LINK)) \
		$(if $(MODE),--mode $(MODE)) $(if $(RUNS),--runs $(RUNS)) $(if $(PEER_RUNS),--peer-runs $(PEER_RUNS))

lint:
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings

# Installs what the demo and the tests need: Debian packages, and a working CRIU in a prefix of its own.
setup:
	scripts/setup

build:
	cargo build --release --workspace

# Takes a lab down that is still up, and removes what was built.
clean:
	if [ -x target/release/tranship-lab ]; then target/release/tranship-lab down; fi
	cargo clean

# Each fuzz target under libFuzzer for so many seconds, one after the other. Needs a nightly compiler and cargo-fuzz: fuzz/README.md.
# make fuzz [SECONDS=30] [TARGETS="stream oci"] [SANITIZER=address]
SECONDS ?= 30
fuzz: export SANITIZER := $(or $(SANITIZER),none)
fuzz:
	scripts/fuzz $(SECONDS) $(TARGETS)

# The parts of the code that do no system calls under Miri, which finds undefined behaviour. Needs a nightly compiler with Miri.
miri:
	scripts/miri
