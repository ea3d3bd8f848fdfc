# Two commands do everything on a fresh machine with Python, make and git: `make demo` and `make test`.
PYTHON ?= python3
OUT ?= out
# Bytecode is kept, whatever the shell says: a hundred processes of the tests import the package.
unexport PYTHONDONTWRITEBYTECODE
APT = DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o Acquire::http::Timeout=20

.PHONY: demo test test-all tests check oldest newest lint style types core-alone browser site gallery explorer bench zoo gpu faults bands alarms coverage known-models journey readme-times release-check clean

# The core alone: no torch.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --editable .
	touch $@

# Everything that the checks need. Dependency groups need pip 25.1.
.venv-test/ready: pyproject.toml
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	.venv-test/bin/pip install --quiet --editable ".[torch]" --group test
	touch $@

demo: .venv/ready
	.venv/bin/limitformer figure st-fig1 --out $(OUT)
	.venv/bin/limitformer figure text-fate --out $(OUT)
	.venv/bin/limitformer phase --dim 4,6,8 --beta 0:2:0.125 --samples 4000 --out $(OUT)

lint: style types

style: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/lint-imports

types: .venv-test/ready
	nice -n 19 .venv-test/bin/mypy

# A Chromium for the tests of the page that `limitformer check` writes; without one they are skipped.
browser:
	@for each in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v $$each > /dev/null && exit 0; done; \
	[ "$$(id -u)" = 0 ] && { $(APT) update && $(APT) install chromium-headless-shell || $(APT) install chromium; } \
		> /dev/null 2>&1 \
	|| echo "No Chromium, so the tests of the page are skipped: install the package chromium, or name one in CHROMIUM."

test: .venv-test/ready .venv/ready browser
	@$(MAKE) --no-print-directory --jobs 4 style types tests core-alone

# Also the tests that are marked as slow, about an hour.
test-all:
	@$(MAKE) --no-print-directory test ALL=--all

tests: .venv-test/ready
	.venv-test/bin/python -m pytest -n 2 --dist loadgroup $(ALL)

core-alone: .venv/ready
	nice -n 19 .venv/bin/python tests/core_alone.py

QUICK = -q -m fast -n 2 --dist loadgroup tests/models tests/base tests/numerics/test_kernels.py tests/covariance/test_limit.py \
	tests/sphere tests/simulation/test_results.py tests/papers/figures/test_figure_pages.py tests/test_faults.py \
	tests/test_language.py

# For every edit, about a minute: format, imports, and the quick tests; `make test` before a commit.
check: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/lint-imports > /dev/null || .venv-test/bin/lint-imports
	.venv-test/bin/python -m pytest $(QUICK)

# The same tests with the smallest versions of all dependencies that pyproject.toml allows, and with the newest there are.
# The smallest warn of what newer packages beside them will remove.
oldest newest:
	$(PYTHON) -m venv --clear .venv-$@
	.venv-$@/bin/pip install --quiet --disable-pip-version-check uv
	.venv-$@/bin/uv pip install --quiet --python .venv-$@ --editable ".[all]" \
		--resolution $(if $(filter oldest,$@),lowest-direct,highest)
	.venv-$@/bin/uv pip install --quiet --python .venv-$@ "pytest>=8.3,<9.2" pytest-xdist hypothesis jaxtyping pyyaml
	.venv-$@/bin/uv pip check --python .venv-$@
	.venv-$@/bin/python -m pytest $(QUICK) $(if $(filter oldest,$@),-W ignore::DeprecationWarning)

# The documentation as a site, strictly: whatever leads nowhere ends the build. `make test` builds it too, and looks at it.
site: .venv-test/ready
	NO_MKDOCS_2_WARNING=1 .venv-test/bin/python -m mkdocs build --strict --site-dir $(OUT)/site

# Every figure that needs no training, from a clean state or from where it was stopped, about three hours; ONLY="ct-fig6" takes one.
gallery: .venv-test/ready
	.venv-test/bin/python -m limitformer_papers.gallery docs/figures $(ONLY)
	.venv-test/bin/python docs/tools/cards.py

# The numbers of the explorer's pages, where they are due, ten minutes; stopped, it goes on; ONLY="sphere stock" takes some.
explorer: .venv-test/ready
	.venv-test/bin/python -m limitformer_papers.explorer.make docs/explorer $(ONLY)

# Faults of one line that the tests, and misreadings that the witness, must catch, about an hour; some of them: make faults ONLY="sweep nn".
faults: .venv-test/ready browser
	.venv-test/bin/python tests/faults.py $(if $(ONLY),--only $(ONLY))
	$(if $(ONLY),,.venv-test/bin/python -m tests.witness.mutants)

# Drawn networks of eight families against the bands of their laws.
bands: .venv-test/ready
	cd tests && OMP_NUM_THREADS=1 ../.venv-test/bin/python band_coverage.py $(FAMILIES)

# False alarms of the initialisation checks, over 200 sound models of every family and 25 sound pairs of builds.
alarms: .venv-test/ready
	cd tests && OMP_NUM_THREADS=1 ../.venv-test/bin/python initialisation_alarms.py $(FAMILIES)
	cd tests && OMP_NUM_THREADS=1 ../.venv-test/bin/python two_builds.py $(FAMILIES)

# Which lines the tests run; compiled kernels and other processes cannot be seen and are left out.
coverage: .venv-test/ready
	.venv-test/bin/pip install --quiet --group coverage
	.venv-test/bin/python -m pytest --cov --cov-report=term; found=$$?; \
		.venv-test/bin/pip uninstall --quiet --yes pytest-cov coverage; exit $$found

# What a release must pass, hours: distributions, each extra from the wheel, both commands from the sdist; ONLY="build site".
release-check: .venv-test/ready
	.venv-test/bin/pip install --quiet --group release
	.venv-test/bin/python tests/release.py $(ONLY)

# Every model type of transformers, small, and docs/architectures.md; stopped, it resumes; two hours, or less with more WORKERS.
ZOO = nice -n 10 .venv-test/bin/python -m benchmarks.zoo --workers $(or $(WORKERS),2) --out $(OUT)/zoo
zoo: .venv-test/ready
	$(ZOO)
	$(ZOO) --witness
	$(ZOO) --sizes
	$(ZOO) --laws --page docs/architectures.md

# Where eight known models lie, beside the thresholds (docs/check.md), ten minutes; stopped, it resumes with the next model.
known-models: .venv-test/ready
	OMP_NUM_THREADS=1 nice -n 19 .venv-test/bin/python -m benchmarks.known_models

# The commands of the engineer's page on its model, whose outputs and times are written into it, and those of the README.
journey: .venv-test/ready
	.venv-test/bin/python -m benchmarks.journey docs/start-engineer.md

readme-times: .venv-test/ready
	.venv-test/bin/python -m benchmarks.journey README.md

# The papers' training experiments on a GPU, MINUTES at a time; the same command resumes. docs/gpu.md; SIZE=tiny needs none.
gpu: .venv-test/ready
	.venv-test/bin/python -m limitformer_papers.gpu --size $(or $(SIZE),paper) --minutes $(or $(MINUTES),8) \
		--out $(or $(RUNS),runs)$(if $(DATA), --data $(DATA))

bench: .venv-test/ready
	.venv-test/bin/python -m benchmarks.run $(OUT)

clean:
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .venv .venv-test .venv-oldest .venv-newest out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
