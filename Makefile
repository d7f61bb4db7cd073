# The whole developer interface; `make help` lists it. Every target sets up what it needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TESTS_STAMP := $(VENV)/.ready-tests
BENCH_STAMP := $(VENV)/.ready-bench

# The native module, built in place. Cargo rebuilds only what changed; without a change it is not even asked.
NATIVE := native/python/kvevents_native/_native.abi3.so
NATIVE_SOURCES := native/Cargo.lock $(shell find native -path native/target -prune -o -name Cargo.toml -print -o -path '*/src/*.rs' -print)

# The environment that builds distributions.
PACKAGING := build/packaging/bin

CARGO_FLAGS := --locked --manifest-path native/Cargo.toml
PROPTEST_CASES ?= 20000
FUZZ ?= 20

# Where images set it, each of the hundreds of programs that the tests start would compile all of our modules again: 1 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test suite unit integration system kubernetes coverage collected crate lint types mypy pyright bench bench-native bench-check bench-native-program figures study docs engines conform chaos plane-chaos partitions soak fuzz fuzz-native model sanitize dist wheels-check pure-check licences version image deny contract clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(NATIVE)  ## `kvevents demo`: what events are worth, on simulated engines over real sockets
	$(BIN)/kvevents demo

# What `suite` needs is made first: make would begin all the other targets before it came back to one that had to wait.
test: $(STAMP)  ## Everything that CI checks, two things at a time: the longest first, the others beside it
	+$(MAKE) --no-print-directory --jobs 2 $(NATIVE) $(TESTS_STAMP) pyright mypy collected
	+$(MAKE) --no-print-directory --jobs 2 suite crate lint

PYTEST := $(BIN)/python -m pytest
# Tests of sockets and processes wait for two thirds of their time: five processes of them for two CPUs, a file to each at a time.
PARALLEL := --numprocesses 5 --dist loadfile --no-loadscope-reorder

suite: $(NATIVE) $(TESTS_STAMP)
	$(PYTEST) $(PARALLEL)

# pytest compiles tests with explained assertions when it imports them: 10 s of CPU for each process of a suite that finds none compiled.
collected: $(NATIVE) $(TESTS_STAMP)
	@echo "$(PYTEST) --collect-only"; said=$$($(PYTEST) --collect-only -qq) || { echo "$$said"; exit 1; }

unit: $(NATIVE)  ## Tests without processes and sockets: less than a minute
	$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/unit

integration: $(NATIVE) $(TESTS_STAMP)  ## Tests with sockets, processes and NATS servers
	$(PYTEST) $(PARALLEL) tests/integration

system: $(NATIVE) $(TESTS_STAMP)  ## Tests with Prometheus, a browser, clusters, faults, and everything together
	$(PYTEST) $(PARALLEL) tests/system

# Its program is built once and kept: `make test` has the watches that it recorded, and needs neither Go nor etcd.
API_SERVER := .cache/kubernetes/kube-apiserver

kubernetes: $(NATIVE) $(API_SERVER)  ## Discovery with a real API server of Kubernetes (Go 1.24 and etcd; its first build takes 7 minutes and 3 GB)
	KVEVENTS_KUBERNETES=1 $(PYTEST) -s tests/system/test_kubernetes_server.py tests/system/test_helm_api_server.py $(KUBERNETES)

$(API_SERVER): $(addprefix tools/kubernetes/,main.go go.mod go.sum) $(STAMP)
	tools/setup kubernetes
	cd tools/kubernetes && nice -n 15 go build -buildvcs=false -trimpath -ldflags '-s -w' -o $(abspath $@) .

coverage: $(NATIVE) $(TESTS_STAMP)  ## The whole suite, then a report of the lines and the modules that no test reaches
	$(PYTEST) $(PARALLEL) --cov=kvevents --cov=kvevents_plane --cov-report=term-missing:skip-covered

crate:  # only the document of the index has tests; those of the others would compile all libraries a second time
	+cargo test $(CARGO_FLAGS) --workspace --lib --tests
	+cargo test $(CARGO_FLAGS) --package kvevents-index --doc
	cargo package --quiet --offline --no-verify --allow-dirty $(CARGO_FLAGS) --package kvevents-index

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v biome >/dev/null; then biome ci; else echo "no biome (npm install -g @biomejs/biome): the page is not linted"; fi
	cargo fmt --all --check --manifest-path native/Cargo.toml
	cargo fmt --check --manifest-path benchmarks/native/Cargo.toml
	cargo fmt --check --manifest-path tools/contract/Cargo.toml
	PYO3_PYTHON=$(abspath $(BIN)/python) cargo clippy $(CARGO_FLAGS) --workspace --all-targets --all-features -- -D warnings
	PYO3_PYTHON=$(abspath $(BIN)/python) cargo clippy $(CARGO_FLAGS) --package kvevents-python --features python -- -D warnings  # as in wheels

types: mypy pyright

mypy: $(STAMP)
	$(BIN)/mypy

pyright: $(STAMP)
	$(BIN)/pyright

bench: $(NATIVE) $(BENCH_STAMP)  ## Ratios against the engines' released classes, Dynamo's indexer, zmq.proxy and nats-py (downloads about 450 MB once)
	$(BIN)/python -m benchmarks

# NO_MKDOCS_2_WARNING leaves out a page of text about releases that this site does not use. With --quiet nothing would be strict.
docs: $(NATIVE)  ## The documentation site, in build/site; ends with an error at a broken link or a page that is not in the navigation
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Its workspace is its own, so that no other target fetches the rivals.
bench-native: bench-check bench-native-program  ## Our index beside those of Dynamo and SMG as Rust libraries, on equal input (NATIVE_BENCH="--only match"); compiles their crates
	benchmarks/native/target/release/kvevents-native-bench $(NATIVE_BENCH)

# A job of CI, and not part of `make test`: the rivals bring several hundred crates, which take minutes to fetch and to check.
bench-check:  ## Whether the harness of `make bench-native`, the example in Rust and the packaged crate of the index compile: minutes, downloads crates
	cargo check --locked --manifest-path benchmarks/native/Cargo.toml
	cargo check --locked --manifest-path examples/rust/Cargo.toml
	cargo package --quiet --allow-dirty $(CARGO_FLAGS) --package kvevents-index

bench-native-program:
	cargo build --release --locked --manifest-path benchmarks/native/Cargo.toml

figures: $(NATIVE) $(BENCH_STAMP)  ## Both benchmarks and the study, an hour on a machine that does nothing else, and the documents with their results
	$(BIN)/python -m benchmarks.page --measure $(FIGURES)
	$(BIN)/python -m benchmarks.study --write

study: $(NATIVE)  ## The simulated figures of documents again, and whether other defaults of `prefix-aware` would be better: minutes
	$(BIN)/python -m benchmarks.study

engines: $(NATIVE)  ## Real vLLM servers and SGLang's radix trees on CPUs: each request predicted and compared (3 GB once; ENGINES="--requests 2000 --seed 7")
	$(BIN)/python -m tests.system.engines $(ENGINES)
	$(BIN)/python -m tests.system.engines.sglang_runs $(SGLANG)

conform: $(NATIVE)  ## `kvevents conform` for ours and released rivals (200 MB once, and 400 MB of engines), which writes its page
	$(BIN)/python -m tools.conform.results $(CONFORM)

chaos: $(NATIVE)  ## Minutes of faults done to engines, relays and consumers; ends with an error when one says EXACT and is wrong
	$(BIN)/python -m tests.system.chaos $(CHAOS)

plane-chaos: $(NATIVE)  ## Rounds of faults done to engines, bridges, NATS servers and replicas (PLANE_CHAOS="--rounds 200 --write")
	$(BIN)/python -m tests.system.plane_chaos $(PLANE_CHAOS)

partitions: $(NATIVE) $(TESTS_STAMP)  ## Halves of a plane that are cut off from each other in network namespaces, with all that takes a minute; wants root
	KVEVENTS_LONG=1 $(PYTEST) tests/*/test_plane_partition.py

soak: $(NATIVE)  ## Minutes of churn (SOAK="--minutes 60" for an hour) in which memory, descriptors and threads must stay as they are
	$(BIN)/python -m tests.system.chaos.soak $(SOAK)

fuzz: $(NATIVE) $(TESTS_STAMP) fuzz-native  ## Every property test with new examples, FUZZ times as many as it has by itself; hours for a high one
	HYPOTHESIS_PROFILE=explore HYPOTHESIS_SCALE=$(FUZZ) $(PYTEST) -m hypothesis --timeout 3600 \
	  --numprocesses 3 --dist loadfile --no-loadscope-reorder

fuzz-native: $(STAMP)  ## Those of the native core: optimised with many examples, then fewer under the sanitizers
	PROPTEST_CASES=$(PROPTEST_CASES) cargo test --release $(CARGO_FLAGS) --workspace
	+$(MAKE) --no-print-directory sanitize SANITIZED_CASES=1000

model:  ## What lookups may read beside a writer, in the orders of threads and of memory that loom knows: a minute
	RUSTFLAGS="--cfg loom" cargo test $(CARGO_FLAGS) --package kvevents-index --lib --target-dir native/target/loom testing::model::

# Sanitizers are nightly features that stable ships; RUSTC_BOOTSTRAP lets them in. A target of its own keeps them off build scripts. The
# module has none of the sanitizer's own code, so Python is started with that of the C compiler.
SANITIZED_CASES ?= 100
SANITIZED := RUSTC_BOOTSTRAP=1 PROPTEST_CASES=$(SANITIZED_CASES)
NATIVE_TESTS := $(wildcard $(addprefix tests/*/test_,native*.py index*.py snapshot*.py block_keys.py bulk.py compactor.py keyed_stores.py \
  lifting.py scan.py))

sanitize: $(STAMP) model  ## All native code, from Rust and from Python, under AddressSanitizer, and the index under ThreadSanitizer: minutes
	host=$$(rustc --print host-tuple) && $(SANITIZED) RUSTFLAGS=-Zsanitizer=address \
	  cargo test $(CARGO_FLAGS) --workspace --lib --tests --target $$host --target-dir native/target/sanitized
	host=$$(rustc --print host-tuple) && $(SANITIZED) RUSTFLAGS=-Zsanitizer=address PYO3_PYTHON=$(abspath $(BIN)/python) \
	  cargo build $(CARGO_FLAGS) --package kvevents-python --features python,testing --target $$host --target-dir native/target/sanitized && \
	  KVEVENTS_NATIVE=native/target/sanitized/$$host/debug/libkvevents_native.so PYTHONPATH=tests/support PYTHONMALLOC=malloc \
	  LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 $(PYTEST) -p native_elsewhere \
	  --numprocesses 2 --dist loadfile --timeout 600 --deselect \
	  tests/integration/test_index.py::test_the_memory_of_a_hostile_payload_is_bounded_by_a_multiple_of_its_size $(NATIVE_TESTS)
	host=$$(rustc --print host-tuple) && $(SANITIZED) TSAN_OPTIONS=suppressions=$(abspath native/thread_sanitizer.txt) \
	  RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg thread_sanitizer" \
	  cargo test $(CARGO_FLAGS) --package kvevents-index --lib --tests --target $$host --target-dir native/target/threads

dist:  ## Wheels and source distributions of kvevents, kvevents-native and kvevents-plane, in dist/; needs no .venv: 3 minutes
	PYTHON=$(PYTHON) tools/setup wheels
	+$(MAKE) --no-print-directory licences
	rm -rf dist
	$(PACKAGING)/python -m hatchling build -d dist
	cd plane && ../$(PACKAGING)/python -m hatchling build -d ../dist
	cd native/python && ../../$(PACKAGING)/maturin sdist --out ../../dist
	cd native/python && ../../$(PACKAGING)/maturin build --release --interpreter ../../$(PACKAGING)/python --out ../../dist
	@echo "install them with: pip install dist/*.whl 'kvevents[all]'"

wheels-check: dist  ## Install the wheels into fresh environments of every Python found, use them, and run what documents say: minutes, downloads
	$(PACKAGING)/python tools/check_wheels.py dist

pure-check:  ## The same of the pure wheel alone, without Rust and .venv, with PYTHON and any other that is found
	rm -rf build && $(PYTHON) -m venv build/packaging
	$(PACKAGING)/python -m pip install --quiet 'hatchling>=1.27,<2'
	$(PACKAGING)/python -m hatchling build -d build/dist
	cd plane && ../$(PACKAGING)/python -m hatchling build -d ../build/dist
	$(PYTHON) tools/check_wheels.py --pure build/dist

licences:  # of the crates in the native wheel, which takes every LICENSE* along
	$(PYTHON) tools/licences.py native/python/LICENSE-THIRD-PARTY

VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' native/Cargo.toml)

version:
	@echo $(VERSION)

image:  ## The container image, as kvevents:VERSION
	docker build --file deploy/Dockerfile --tag kvevents:$(VERSION) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$$(git rev-parse HEAD) --build-arg SOURCE=$(KVEVENTS_REPOSITORY) .

deny:  ## Licences, sources and advisories of the crates; needs cargo-deny (cargo install --locked cargo-deny)
	cargo deny --manifest-path native/Cargo.toml check

contract:  ## The Rust code of the gRPC contract, after a change of query.proto or of tools/contract; compiles prost's compiler: a minute
	cargo run --quiet --locked --manifest-path tools/contract/Cargo.toml

$(NATIVE): $(NATIVE_SOURCES) $(STAMP)
	touch $(VENV)/.building  # its age is that of the sources it was begun with: an edit meanwhile is not lost
	cd native/python && env -u CONDA_PREFIX VIRTUAL_ENV=$(abspath $(VENV)) $(abspath $(BIN))/maturin develop --quiet --release --skip-install \
	  --features python,testing
	touch -r $(VENV)/.building $(NATIVE)

$(STAMP): pyproject.toml native/python/pyproject.toml plane/pyproject.toml tools/setup tools/constraints.txt
	PYTHON=$(PYTHON) tools/setup
	touch $(STAMP)

$(TESTS_STAMP): tools/setup $(STAMP)  # a browser and a Prometheus, for which nobody else waits
	tools/setup tests
	touch $(TESTS_STAMP)

$(BENCH_STAMP): tools/setup $(STAMP)  # wrk, which asks the service
	tools/setup bench
	touch $(BENCH_STAMP)

clean:
	rm -rf native/python/LICENSE-THIRD-PARTY $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist native/target benchmarks/native/target tools/contract/target $(NATIVE)
