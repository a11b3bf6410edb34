"""Observability of a server: events, the log, metrics, traces and telemetry."""
