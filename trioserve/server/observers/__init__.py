"""What a server reports of its work: events and their log, metrics, traces, and telemetry."""
