# make demo   install, train the quickstart, sample three stories
# make test   install, run the tests of every guarantee (10 to 25 minutes on two cores)
# make test-more   the rest (20 to 40 minutes): lessons, documentation, pages in a browser, benchmarks, products of options
# make prove  all tests in full (hours): every kill, full disk, malicious file, compiled run and product of options
# make lint   style and formatting
# make lessons   run the lessons, and write a notebook and a page for each, in site/lessons/
# make docs   write the reference pages and the tables of benchmarks, and build the documentation as a site, in site/
PYTHON ?= python3
PIP = .venv/bin/python -m pip install --disable-pip-version-check

demo: .venv/ready
	.venv/bin/python train.py configs/quickstart.yaml
	@echo
	.venv/bin/python generate.py runs/quickstart --num-samples 3

test: .venv/ready-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not more" -n 2 --dist worksteal

test-more: .venv/ready-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m more -n 2 --dist worksteal

prove: .venv/ready-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -s --stress -n 2 --dist worksteal

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

lessons: .venv/ready-dev
	PYTHONWARNINGS=ignore .venv/bin/python -m thinker.lessons.build --out site/lessons --keep

docs: .venv/ready-dev
	.venv/bin/python scripts/make_reference.py
	.venv/bin/python scripts/benchmark.py pages
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "read it: .venv/bin/python -m http.server --directory site 8000, then open http://localhost:8000"

.venv/ready: requirements.txt pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing the packages of requirements.txt into .venv: a minute or more, most of it for torch"
	$(PIP) -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt requirements-more.txt .venv/ready
	@echo "installing the packages of the tests into .venv: a minute or more"
	$(PIP) -r requirements-dev.txt
	touch $@

.PHONY: demo test test-more prove lint lessons docs
