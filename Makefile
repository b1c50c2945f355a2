# Targets: demo test test-fast test-hub lint labextension wheel release docs linkcheck bench scale compatibility torture guide gpu-bundle gpu-check clean.  `make demo` on a fresh machine sets everything up.

PYTHON ?= $(shell scripts/find-python)
VENV ?= .venv
# Packages are built here: no torch, no tests.
BUILD_VENV ?= .venv-build
# Only the demo and the tests use torch. `make TORCH=` leaves it out.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Most tests wait most of the time: for kernels that start, for pages that load.
PYTEST_WORKERS ?= 3
# `make bench BENCH_ARGS=--strict` fails when a limit is missed, not only when a benchmark breaks.
BENCH_ARGS ?=
BIN := $(VENV)/bin
# The front end needs Node 20 to be built, and nothing to be used.  Without Node all else works.
NODE := $(shell command -v node)
FRONT := labextension
FRONT_VENV ?= $(VENV)
FRONT_SOURCES := $(shell find $(FRONT)/src $(FRONT)/style $(FRONT)/schema $(FRONT)/package.json $(FRONT)/yarn.lock)

.PHONY: demo test test-needs test-fast test-hub lint labextension linked front-end-test front-end-checked wheel release docs linkcheck bench scale compatibility torture guide gpu-bundle gpu-check clean

demo: $(VENV)/ready
	$(BIN)/jupyter gpu-ckpt demo

# What the tests need is downloaded while the sources are checked and the front end is built.
test: $(VENV)/ready
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-needs lint front-end-test
	$(BIN)/python -m pytest -m "not torture" --numprocesses=$(PYTEST_WORKERS) $(PYTEST_ARGS)

test-needs: $(VENV)/ready
	scripts/install-chromium
	scripts/install-proxy $(VENV)/proxy
	scripts/install-slurm
	scripts/install-kernels $(VENV)

# No CRIU, browser, hub or cluster: for the minutes between two edits.
test-fast: $(VENV)/ready
	$(BIN)/python -m pytest -m "not slow and not torture" --numprocesses=$(PYTEST_WORKERS) $(PYTEST_ARGS)

# A real JupyterHub with Linux users, and a real Slurm: a part of `make test`, too, but for the hundred culls in a row, which
# take ten minutes.  Needs root and Node; without them it says so.
test-hub: labextension $(VENV)/ready
	scripts/install-chromium
	scripts/install-proxy $(VENV)/proxy
	scripts/install-slurm
	$(BIN)/python -m pytest tests/hub $(PYTEST_ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without Node, or where its packages cannot be had, the front end is left out; one that does not build is an error.
labextension: $(VENV)/ready
ifdef NODE
	@if $(MAKE) --no-print-directory $(FRONT)/node_modules/.made; then $(MAKE) --no-print-directory linked; \
	else echo "The packages of the JupyterLab front end cannot be installed (see above): it is not built, all else works."; fi
else
	@echo "There is no Node on this machine: the JupyterLab front end is not built, all else works."
endif

# Into the environment as the wheel would put it there, but linked: what is built next shows at once.
linked: $(FRONT)/dist/package.json
	mkdir -p $(VENV)/share/jupyter/labextensions $(VENV)/etc/jupyter/jupyter_server_config.d
	rm -rf $(VENV)/share/jupyter/labextensions/jupyter-gpu-ckpt
	ln -sfn $(abspath $(FRONT)/dist) $(VENV)/share/jupyter/labextensions/jupyter-gpu-ckpt
	ln -sf $(abspath jupyter_gpu_ckpt/server/jupyter_gpu_ckpt.json) $(VENV)/etc/jupyter/jupyter_server_config.d/

$(FRONT)/dist/package.json: $(FRONT_SOURCES) $(FRONT)/node_modules/.made
	@cd $(FRONT) && PATH=$(abspath $(FRONT_VENV)/bin):$$PATH ../scripts/quietly "Building the JupyterLab front end ..." jlpm build

$(FRONT)/node_modules/.made: $(FRONT)/package.json $(FRONT)/yarn.lock | $(FRONT_VENV)/ready
	@cd $(FRONT) && PATH=$(abspath $(FRONT_VENV)/bin):$$PATH ../scripts/quietly "Installing the front end's packages ..." \
		jlpm install --immutable
	@touch $@

front-end-test: labextension
	@if [ -e $(FRONT)/node_modules/.made ]; then $(MAKE) --no-print-directory front-end-checked; fi

front-end-checked:
	cd $(FRONT) && PATH=$(abspath $(BIN)):$$PATH jlpm lint
	cd $(FRONT) && PATH=$(abspath $(BIN)):$$PATH jlpm test

# For this machine and those like it; with Node, with the front end.
wheel: $(BUILD_VENV)/ready
ifdef NODE
	@$(MAKE) --no-print-directory FRONT_VENV=$(BUILD_VENV) $(FRONT)/dist/package.json
else
	@echo "There is no Node on this machine: the wheel lacks the JupyterLab front end."
endif
	$(BUILD_VENV)/bin/python -m build --wheel --no-isolation .

# What is published, in dist/ (RELEASE.md): sdist, manylinux wheel, bill of materials, SHA-256 sums.  `URL=https://...` is
# the project's address in the packages' metadata.
release: $(BUILD_VENV)/ready
	scripts/set-version --check
	@$(MAKE) --no-print-directory FRONT_VENV=$(BUILD_VENV) $(FRONT)/dist/package.json
	$(BUILD_VENV)/bin/python scripts/release $(if $(URL),--url $(URL))

# The documentation as a site, in build/docs/; fails for each warning.
docs: $(VENV)/ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

# Asks for each address outside of the site, and fails if one does not answer; needs a network.
linkcheck: $(VENV)/ready
	$(BIN)/python -m sphinx --keep-going -q -b linkcheck -d build/doctrees docs build/linkcheck

bench: $(VENV)/ready
	$(BIN)/python scripts/bench $(BENCH_ARGS)

# Simulates 1,000 users on 64 GPUs and writes docs/scale.md anew; an hour.  ONLY=sharing: its part about shared GPUs.
scale: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[scale]' --config-settings editable_mode=compat
	$(BIN)/python scripts/scale $(if $(ONLY),--only $(ONLY))

# Tries frameworks and habits in real kernels and writes docs/compatibility.md anew; an hour on two cores.  Rows that need a
# GPU: GPU_CHECK_PARTS=compatibility scripts/gpu-check.
compatibility: $(VENV)/ready
	@scripts/quietly "Installing the packages that are tried (minutes) ..." \
		$(BIN)/python -m pip install --editable '.[compatibility]' --config-settings editable_mode=compat $(TORCH)
	$(BIN)/python scripts/compatibility

torture: $(VENV)/ready
	scripts/install-kernels --with-r $(VENV)
	$(BIN)/python -m pytest -m "torture or sweep" $(PYTEST_ARGS)

# Follows docs/admin/bare-metal.md and docs/admin/slurm.md, each from an empty machine; a part of `make torture`.  Needs
# root, debootstrap and slirp4netns; without them it says so.
guide: labextension
	scripts/install-chromium
	$(BIN)/python -m pytest -m torture tests/guide -s $(PYTEST_ARGS)

gpu-bundle: $(VENV)/ready
	PYTHON=$(abspath $(BIN)/python) scripts/gpu-bundle

gpu-check:
	scripts/gpu-check

$(BUILD_VENV)/ready: setup.cfg
	@scripts/quietly "Making a virtual environment in $(BUILD_VENV) ..." $(PYTHON) -m venv $(BUILD_VENV)
	@scripts/quietly "Installing what builds packages ..." $(BUILD_VENV)/bin/python -m pip install \
		$$($(PYTHON) scripts/extra build)
	@touch $@

# editable_mode=compat: a path instead of setuptools' import hook, which costs each of thousands of processes 35 ms.
$(VENV)/ready: setup.cfg pyproject.toml
	@scripts/quietly "Making a virtual environment in $(VENV) ..." $(PYTHON) -m venv $(VENV)
	@scripts/quietly "Bringing pip up to date ..." $(BIN)/python -m pip install --upgrade pip
	@scripts/quietly "Installing this package and what its demo and tests use (minutes, with torch) ..." \
		$(BIN)/python -m pip install --editable '.[test,lint,hub-test,build,docs]' --config-settings editable_mode=compat $(TORCH)
	@$(BIN)/jupyter gpu-ckpt install-criu
	@touch $@

clean:
	rm -rf $(FRONT)/dist $(FRONT)/lib $(FRONT)/node_modules $(VENV) $(BUILD_VENV) build dist *.egg-info gpu-bundle .pytest_cache .mypy_cache .ruff_cache
