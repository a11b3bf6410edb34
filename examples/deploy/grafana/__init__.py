"""A dashboard for Grafana, and what makes it."""
