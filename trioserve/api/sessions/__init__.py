"""Streams that outlive the connections of their readers: their bytes, their ends, their bounds."""
