"""Tests with a real model, which `make test-models` installs and runs; skipped without it."""
