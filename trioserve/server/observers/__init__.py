"""Observers of a request's life: the log and the metrics, behind the protocol `Observer`."""
