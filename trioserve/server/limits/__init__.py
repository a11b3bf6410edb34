"""Limits of requests: queue, memory, rates and shared caches."""
