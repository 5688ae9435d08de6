# The two commands: `make demo` and `make test`. Each sets everything up by itself; both share .venv.
SHELL := /bin/bash
PY := .venv/bin/python

.PHONY: help setup demo test lint format clean

help:
	@echo "make demo    train, adapt, evaluate, promote: the whole job on an embedded default (under 10 minutes on 2 cores)"
	@echo "             make demo LAMP5_QUESTIONS=questions.json LAMP5_OUTPUTS=outputs.json   the same on LaMP-5 files"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff and mypy"

setup:
	@bash launch/setup.sh

demo: setup
	@$(PY) launch/demo.py $(if $(LAMP5_QUESTIONS),--lamp5-questions "$(LAMP5_QUESTIONS)") $(if $(LAMP5_OUTPUTS),--lamp5-outputs "$(LAMP5_OUTPUTS)") $(DEMO_ARGS)

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
