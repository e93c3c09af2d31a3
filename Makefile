# coda: `make train` trains a small Llama on Shakespeare, `make test` runs the tests; README.md lists the rest. CMake does the
# building, in build/; this file sees to it that what CMake needs is there.

# What `make train` trains: about 3 million parameters, about two minutes on two cores.
DATA    ?= data/shakespeare.txt
STEPS   ?= 900
BATCH   ?= 4
SEQ     ?= 128
LR      ?= 2e-3
HIDDEN  ?= 256
LAYERS  ?= 4
HEADS   ?= 8
KVHEADS ?= 4
FFN     ?= 688
TRAIN_FLAGS ?= --holdout 0.05 --schedule cosine --warmup 50 --min-lr 1e-4

FUZZ_SECONDS ?= 60

PREFIX ?= /usr/local
CMAKE_FLAGS ?=

.PHONY: coda train test cuda wheel test-python test-python-newest install agreement sanitize fuzz format tidy clean

coda: build/build.ninja
	@cmake --build build --target coda_cli

build/build.ninja:
	@scripts/install_packages build
	@cmake --preset release -D CODA_BUILD_TESTS=OFF $(CMAKE_FLAGS)

train: coda $(DATA)
	@build/coda train --data $(DATA) --steps $(STEPS) --batch $(BATCH) --seq $(SEQ) --lr $(LR) \
	  --hidden $(HIDDEN) --layers $(LAYERS) --heads $(HEADS) --kv-heads $(KVHEADS) --ffn $(FFN) $(TRAIN_FLAGS)

data/shakespeare.txt:
	@scripts/fetch_shakespeare $@

test:
	@grep -qs 'CODA_BUILD_TESTS:BOOL=ON' build/CMakeCache.txt && [ -e build/build.ninja ] || \
	  { scripts/install_packages build test && cmake --preset release -D CODA_BUILD_TESTS=ON $(CMAKE_FLAGS); }
	@cmake --build build
	@ctest --preset release -j 2

sanitize:
	@[ -e build-sanitize/build.ninja ] || \
	  { scripts/install_packages build test && cmake --preset sanitize $(CMAKE_FLAGS); }
	@cmake --build build-sanitize
	@ctest --preset sanitize -j 2

# Damaged files, thought up by libFuzzer from those in test/fuzz/corpus. What it finds is written to build-fuzz and run again
# by: build-fuzz/test/fuzz/loaders_fuzz FILE
fuzz:
	@[ -e build-fuzz/build.ninja ] || { scripts/install_packages build fuzz && cmake --preset fuzz $(CMAKE_FLAGS); }
	@cmake --build build-fuzz --target loaders_fuzz
	@mkdir -p build-fuzz/corpus
	@build-fuzz/test/fuzz/loaders_fuzz -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=512 -malloc_limit_mb=64 -timeout=10 \
	  -print_final_stats=1 -artifact_prefix=build-fuzz/ build-fuzz/corpus test/fuzz/corpus

# The command line too: build/coda has the GPU engine afterwards.
cuda: build/build.ninja
	@grep -qs 'CODA_CUDA:BOOL=ON' build/CMakeCache.txt || cmake -D CODA_CUDA=ON build
	@cmake --build build --target coda_cuda

# coda_torch for pip install: build/wheel/coda_torch-*.whl. With the GPU half where `make cuda` was run before.
wheel: build/build.ninja .venv-torch/ready
	@rm -rf build/wheel
	@export PATH=$(CURDIR)/.venv-torch/bin:$$PATH && \
	  pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps -w build/wheel/unnamed ./python && \
	  auditwheel repair --exclude libtorch.so -w build/wheel build/wheel/unnamed/*.whl

# The wheel as a user has it: in an environment of its own, but for PyTorch, whose 5 GB are borrowed from the other one.
test-python: wheel
	@rm -rf .venv-wheel && python3 -m venv .venv-wheel
	@echo $(CURDIR)/.venv-torch/lib/python3.*/site-packages > $$(echo .venv-wheel/lib/python3.*/site-packages)/torch.pth
	@.venv-wheel/bin/pip --disable-pip-version-check install --quiet --no-deps --no-index build/wheel/*.whl
	@cd python/tests && ../../.venv-wheel/bin/python -m pytest -q

# The same wheel under the newest PyTorch: its operators and the patch. What is no part of PyTorch is borrowed from .venv-torch.
NEWEST_TESTS = $(patsubst %,%_test.py,operators contract accumulate troubles patch)
test-python-newest: .venv-torch/ready .venv-newest-torch/ready
	@[ -e build/wheel ] || $(MAKE) wheel
	@echo $(CURDIR)/.venv-torch/lib/python3.*/site-packages > $$(echo .venv-newest-torch/lib/python3.*/site-packages)/others.pth
	@.venv-newest-torch/bin/pip --disable-pip-version-check install --quiet --no-deps --no-index --force-reinstall build/wheel/*.whl
	@cd python/tests && ../../.venv-newest-torch/bin/python -m pytest -q $(NEWEST_TESTS)

install: coda
	@cmake --install build --prefix $(PREFIX)

# Against Hugging Face's own Llama; 5 GB of PyTorch, so not among the tests.
agreement: coda data/shakespeare.txt .venv-torch/ready
	@.venv-torch/bin/python test/agreement.py --coda build/coda --text data/shakespeare.txt

.venv-torch/ready: scripts/requirements-agreement.txt scripts/requirements-wheel.txt
	@scripts/install_packages python
	@rm -rf .venv-torch && python3 -m venv .venv-torch
	@.venv-torch/bin/pip --disable-pip-version-check --quiet install --require-hashes -r $<
	@.venv-torch/bin/pip --disable-pip-version-check --quiet install --require-hashes --no-deps -r scripts/requirements-wheel.txt
	@touch $@

.venv-newest-torch/ready: scripts/requirements-newest-torch.txt
	@scripts/install_packages python
	@rm -rf .venv-newest-torch && python3 -m venv .venv-newest-torch
	@.venv-newest-torch/bin/pip --disable-pip-version-check --quiet install --require-hashes --no-deps -r $<
	@touch $@

format:
	@scripts/format

tidy: build/build.ninja
	@scripts/tidy

clean:
	@rm -rf build build-debug build-sanitize build-fuzz build-tidy .venv-wheel
