"""Who is told of a request's life: the log and the metrics."""
